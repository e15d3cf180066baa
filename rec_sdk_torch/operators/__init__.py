"""The operators `torch.ops.rec_sdk.*`: schemas, device backends, default kernels in plain torch, and functions."""
