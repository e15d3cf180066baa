"""Saves of tables: `rec_sdk_torch.Saver`, the format, and `python -m rec_sdk_torch.checkpoint`."""
