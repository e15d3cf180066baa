"""Modules for programs that read checkpoints (`manifest`, `folders`, `validation`, `errors`), and the command line."""

import sys

from ..saves.format import errors, folders, manifest, validation

for _name, _module in {
    "errors": errors,
    "folders": folders,
    "manifest": manifest,
    "validation": validation,
    "contents": validation,  # this name was used until version 0.2
}.items():
    sys.modules[f"{__name__}.{_name}"] = _module
