"""The format of saves: folders, manifest, files of tensors, indexes."""
