"""The commands of the package; `python -m rec_sdk_torch` lists them."""
