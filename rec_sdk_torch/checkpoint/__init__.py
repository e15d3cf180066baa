"""Saves of tables, for programs that read them: `manifest`, `folders`, `contents`, `errors`; and the command line."""

import sys

from ..saves.format import contents, errors, folders, manifest

for _module in (contents, errors, folders, manifest):
    sys.modules[f"{__name__}.{_module.__name__.rpartition('.')[2]}"] = _module
