"""The format of checkpoints on disk: folders, manifest, tensor files and indexes."""
