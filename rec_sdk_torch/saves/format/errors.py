"""Errors that say what is wrong with a save."""

from __future__ import annotations


class CheckpointError(RuntimeError, ValueError):
    """A save is missing, damaged, or of something else; the message names the file.

    It is a ValueError as well, which Rec SDK raises there. The model is as it was before the load.

    Example:
        >>> import rec_sdk_torch
        >>> try:
        ...     rec_sdk_torch.Saver.get_latest_load_path("/nowhere")
        ... except rec_sdk_torch.CheckpointError as error:
        ...     print(error)
        /nowhere: there is no such folder
    """
