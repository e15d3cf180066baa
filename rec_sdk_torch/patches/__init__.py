"""Patches that `import rec_sdk_torch` applies to torch and TorchRec, one file each.

Patches of TorchRec's optimizers are in `optim/torchrec_hooks.py`.
"""

from . import gathering, process_groups, topology, torch_checkpoints, wrapped_collections

PATCHES = (process_groups, topology, gathering, torch_checkpoints, wrapped_collections)


def install() -> None:
    """Patches modules of torch and TorchRec: now if they are imported already, else as soon as they are imported."""
    for patch in PATCHES:
        patch.install()
