"""Rows of whole tables: read, written, removed, loaded, saved, given as a state dict or as gradients."""
