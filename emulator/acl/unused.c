// Functions that torch_npu resolves when it is loaded. They do nothing here. They are for profiling, dumps,
// descriptions of operators for the graph engine, and kernels in CANN's binary format.
#include <stdint.h>

#define UNUSED(name)                                          \
  __attribute__((visibility("default"))) intptr_t name(void); \
  intptr_t name(void) { return 0; }

UNUSED(MsprofGetHashId)
UNUSED(MsprofRegisterCallback)
UNUSED(MsprofReportAdditionalInfo)
UNUSED(MsprofReportApi)
UNUSED(MsprofReportCompactInfo)
UNUSED(MsprofSysCycleTime)

UNUSED(aclmdlFinalizeDump)
UNUSED(aclmdlInitDump)
UNUSED(aclmdlSetDump)

UNUSED(aclCreateDataBuffer)
UNUSED(aclCreateTensorDesc)
UNUSED(aclDestroyDataBuffer)
UNUSED(aclDestroyTensorDesc)
UNUSED(aclGetTensorDescDimV2)
UNUSED(aclGetTensorDescFormat)
UNUSED(aclGetTensorDescNumDims)
UNUSED(aclGetTensorDescType)
UNUSED(aclSetTensorDescName)
UNUSED(aclSetTensorFormat)
UNUSED(aclSetTensorPlaceMent)
UNUSED(aclSetTensorShape)
UNUSED(aclopCreateAttr)
UNUSED(aclopDestroyAttr)
UNUSED(aclopSetAttrBool)
UNUSED(aclopSetAttrDataType)
UNUSED(aclopSetAttrFloat)
UNUSED(aclopSetAttrInt)
UNUSED(aclopSetAttrListBool)
UNUSED(aclopSetAttrListFloat)
UNUSED(aclopSetAttrListInt)
UNUSED(aclopSetAttrListListInt)
UNUSED(aclopSetAttrString)

UNUSED(aclrtBinaryGetFunction)
UNUSED(aclrtBinaryLoadFromData)
UNUSED(aclrtGetFunctionAddr)
UNUSED(aclrtProcessReport)
UNUSED(rtDevBinaryRegister)
UNUSED(rtFunctionRegister)
UNUSED(rtGetC2cCtrlAddr)
UNUSED(rtKernelLaunch)
