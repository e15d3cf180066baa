"""Live tables as modules and files that other programs know."""

from ..checkpoint.quantize import quantize_save as quantize_save
from .arrays import to_arrays as to_arrays
from .arrays import to_safetensors as to_safetensors
from .id_map import IdMap as IdMap
from .modules import ExportedCollection as ExportedCollection
from .modules import quantized as quantized
from .modules import to_embedding_bags as to_embedding_bags
from .modules import to_torchrec as to_torchrec
