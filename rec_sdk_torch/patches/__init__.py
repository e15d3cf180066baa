"""Changes of `import rec_sdk_torch` in torch and TorchRec, one file each. Optimizers: `optim/torchrec_hooks.py`."""

from . import gathering, process_groups, topology, torch_checkpoints, wrapped_collections

PATCHES = (process_groups, topology, gathering, torch_checkpoints, wrapped_collections)


def install() -> None:
    """Changes the modules that are imported, and the others once they are."""
    for patch in PATCHES:
        patch.install()
