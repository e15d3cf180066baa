"""Exports tables to modules and file formats of other libraries, optionally quantized."""

from .saves.serve.arrays import to_arrays, to_safetensors
from .saves.serve.id_map import IdMap
from .saves.serve.modules import ExportedCollection, quantized, to_embedding_bags, to_torchrec
from .saves.serve.quantize import quantize_save

__all__ = [
    "ExportedCollection",
    "IdMap",
    "quantize_save",
    "quantized",
    "to_arrays",
    "to_embedding_bags",
    "to_safetensors",
    "to_torchrec",
]
