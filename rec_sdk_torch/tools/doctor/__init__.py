"""`python -m rec_sdk_torch.doctor`: what works on this machine, and what does not and why."""
