"""What a save is: folders, manifest, files of tensors, indexes."""
