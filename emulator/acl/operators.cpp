// The graph engine's operators, which are not emulated. Such an operator puts its device into error, because
// doing nothing would leave stale results.
#include <acl/acl.h>
#include <acl/acl_op_compiler.h>

#include "devices.h"
#include "errors.h"

namespace rec_sdk::emulator {
namespace {

aclError refuse(const char* operation) {
  const std::string message =
      text("operator %s: torch_npu asks for the graph engine (aclop), which is not emulated", operation);
  if (current_device() >= 0) {
    fail_device(current_device(), ACL_ERROR_OP_NOT_FOUND, message);
  }
  return fail(ACL_ERROR_OP_NOT_FOUND, message);
}

}  // namespace
}  // namespace rec_sdk::emulator

using namespace rec_sdk::emulator;

aclError aclopCompileAndExecute(const char* operation, int, const aclTensorDesc* const[],
                                const aclDataBuffer* const[], int, const aclTensorDesc* const[],
                                aclDataBuffer* const[], const aclopAttr*, aclopEngineType, aclopCompileType,
                                const char*, aclrtStream) {
  return refuse(operation);
}

aclError aclopCompileAndExecuteV2(const char* operation, int, aclTensorDesc*[], aclDataBuffer*[], int,
                                  aclTensorDesc*[], aclDataBuffer*[], aclopAttr*, aclopEngineType,
                                  aclopCompileType, const char*, aclrtStream) {
  return refuse(operation);
}
