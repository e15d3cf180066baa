"""`python -m rec_sdk_torch.doctor` reports what works on this machine, and why the rest does not."""
