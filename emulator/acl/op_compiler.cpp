// The settings of the operator compiler, which are stored but have no effect.
#include <acl/acl_op_compiler.h>
#include <acl/acl_rt.h>

#include <atomic>
#include <cstring>

namespace {

constexpr char kOption[] = "disable";
constexpr int kParameters = 64;
std::atomic<int64_t> parameters[kParameters];

}  // namespace

aclError aclSetCompileopt(aclCompileOpt, const char*) { return ACL_SUCCESS; }

size_t aclGetCompileoptSize(aclCompileOpt) { return sizeof kOption; }

aclError aclGetCompileopt(aclCompileOpt, char* value, size_t length) {
  if (length < sizeof kOption) {
    return ACL_ERROR_INVALID_PARAM;
  }
  std::memcpy(value, kOption, sizeof kOption);
  return ACL_SUCCESS;
}

aclError aclrtSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  if (option < 0 || option >= kParameters) {
    return ACL_ERROR_INVALID_PARAM;
  }
  parameters[option] = value;
  return ACL_SUCCESS;
}

aclError aclrtCtxSetSysParamOpt(aclSysParamOpt option, int64_t value) {
  return aclrtSetSysParamOpt(option, value);
}

aclError aclrtGetSysParamOpt(aclSysParamOpt option, int64_t* value) {
  if (option < 0 || option >= kParameters) {
    return ACL_ERROR_INVALID_PARAM;
  }
  *value = parameters[option];
  return ACL_SUCCESS;
}
