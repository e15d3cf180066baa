"""`python -m rec_sdk_torch.cache_advice`: how large a cache has to be for the ids of a run, and which policy suits."""
