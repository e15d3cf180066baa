"""The error for a missing engine: Python imports this file only if the compiled library of the same name is missing."""

from pathlib import Path

raise ImportError(
    f"the host engine of rec_sdk_torch is not built in {Path(__file__).parent}, from where Python has imported the "
    "package. If this is the repository, build it there: make build, or pip install --no-build-isolation --no-deps "
    "--editable . To use an installed package instead, start Python in another folder"
)
