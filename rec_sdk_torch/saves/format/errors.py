"""Exceptions for checkpoints that cannot be used."""

from __future__ import annotations


class CheckpointError(RuntimeError, ValueError):
    """Exception raised when a checkpoint is missing, damaged or does not fit; the message names the file.

    The class is a subclass of ValueError, which Rec SDK raises in these cases. A load that raises this error leaves the
    model unchanged.

    Example:
        >>> import rec_sdk_torch
        >>> try:
        ...     rec_sdk_torch.Saver.get_latest_load_path("/nowhere")
        ... except rec_sdk_torch.CheckpointError as error:
        ...     print(error)
        /nowhere: there is no such folder
    """
