"""`python -m rec_sdk_torch.cache_advice` recommends cache sizes and a policy from the ids of a run."""
