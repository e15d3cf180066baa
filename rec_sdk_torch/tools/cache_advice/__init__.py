"""`python -m rec_sdk_torch.cache_advice` recommends cache sizes and a policy from the ids that a run looked up."""
