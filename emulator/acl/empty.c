// A library that torch_npu links with but calls nothing of.
typedef int rec_sdk_nothing;
