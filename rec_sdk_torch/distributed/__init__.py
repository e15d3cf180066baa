"""Pipelines: what runs beside the training step."""
