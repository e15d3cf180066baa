"""Table-batched embeddings: many tables in one call. They require only torch; the TorchRec collections build on them.

Other packages import only the names of `__init__.pyi`, each of which is loaded at its first use.
"""

from ..runtime.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
