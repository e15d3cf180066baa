"""Python imports this file only where the library of the same name, which goes first, is not beside it."""

from pathlib import Path

raise ImportError(
    f"the host engine of rec_sdk_torch is not built in {Path(__file__).parent}, from where Python has imported the "
    "package. If that is the repository: make build, or pip install --no-build-isolation --no-deps --editable . builds "
    "it there; if the package is installed as well, start Python in another folder, and it is imported from where it "
    "is installed"
)
