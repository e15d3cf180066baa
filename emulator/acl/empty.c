// A library that torch_npu names but needs nothing of.
typedef int rec_sdk_nothing;
