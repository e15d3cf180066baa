"""Table-batched embeddings: many tables, one call. Needs torch only; the collections stand on it.

The names of `__init__.pyi` are all that other rooms import; each is imported when it is first used.
"""

from ..runtime.lazy import attach as _attach

__getattr__, __dir__, __all__ = _attach(__name__, __file__)
