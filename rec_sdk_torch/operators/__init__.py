"""The operators `torch.ops.rec_sdk.*`, from below: their schemas, devices and defaults, then how they are called."""
