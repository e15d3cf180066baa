"""Looks up weights in checkpoints that are mapped into memory, and switches to new checkpoints."""

from __future__ import annotations

import contextlib
import functools
import logging
import tempfile
import threading
import weakref
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import TracebackType
from typing import overload

import numpy as np
import numpy.typing as npt
import torch

from ... import _engine
from ...runtime.exits import OwnThread, calls
from ...runtime.numbers import is_number
from ...runtime.warn import SaveWarning, warn
from ..format.errors import CheckpointError
from ..format.folders import Paths, chain_of, latest_save, to_paths
from ..format.index import ensure_index, open_served_table
from ..format.manifest import Manifest
from ..format.quantized import BITS
from ..format.tensors import DTYPES
from ..format.validation import table_chain

logger = logging.getLogger("rec_sdk_torch.serving")

Array = npt.NDArray[np.generic]


@dataclass(frozen=True, eq=False)
class _OpenedSave:
    """The table's rows in one chain of saves, mapped into memory."""

    save: Path
    id: str
    table: _engine.ServedTable
    rows: int
    dim: int
    dtype: torch.dtype
    bits: int | None


class TableReader:
    """Read-only lookups of one table in the checkpoints of a folder.

    Files of any size are mapped into memory when the reader opens a save. Pages are loaded when they are first read,
    and processes share them. A lookup sees one consistent state: the latest save that `refresh` found, with the saves
    before it in its chain. Several threads may use one reader.

    Args:
        path: the folder passed to `Saver.save`; or one of its saves, in which case the reader does not switch to later
            saves; or several folders, of which the latest save is read. The saves of its chain may be in any of them.
        table: name of the table, or its key in the manifest if several tables have the name.
        default: value of all elements of the row that an unknown id gets.
        follow: interval in seconds at which a thread looks for later saves. If None, only `refresh` does.

    Raises:
        CheckpointError: there is no save or no such table, or a file is missing or damaged.
        TypeError: `default` or `follow` is not a number.
        ValueError: `follow` is not positive, or the sequence of folders is empty.

    Example:
        >>> import tempfile, torch
        >>> from rec_sdk_torch import Saver, TableBatchedEmbedding, TableConfig, TableOptimizer
        >>> from rec_sdk_torch.serving import TableReader
        >>> sgd = TableOptimizer.create(torch.optim.SGD, {"lr": 0.1})
        >>> model = TableBatchedEmbedding([TableConfig("t", 100, 4)], optimizer=sgd, cache=10)
        >>> model(torch.tensor([7]), torch.tensor([0, 1])).sum().backward()
        >>> path = Saver().save(model, tempfile.mkdtemp())
        >>> with TableReader(path, "t") as reader:
        ...     rows, found = reader.find(torch.tensor([7, 8]))
        >>> rows.shape, found.tolist()
        (torch.Size([2, 4]), [True, False])
    """

    def __init__(self, path: Paths, table: str, *, default: float = 0.0, follow: float | None = None) -> None:
        for name, number in (("default", default), ("follow", follow)):
            if not is_number(number) and not (name == "follow" and number is None):
                raise TypeError(f"{name} is {number!r}, expected a number")
        if follow is not None and not 0 < follow <= threading.TIMEOUT_MAX:
            raise ValueError(f"follow is {follow}, expected seconds, more than 0 and at most 2^33, or None")
        self._paths, self._name, self._default = to_paths(path), table, float(default)
        follow = None if follow is None else float(follow)
        self._refreshing = threading.Lock()
        self._ended = threading.Event()
        self._opened = self._open(latest_save(self._paths))
        self._thread: OwnThread | None = None
        if follow is not None:
            following = functools.partial(_follow, weakref.ref(self), self._ended, follow)
            self._thread = OwnThread(following, stop=self._ended.set)
            self._thread.start()
            weakref.finalize(self, self._ended.set).atexit = False

    def _open(self, save: Path) -> _OpenedSave:
        """Maps the table's rows in the chain of `save`."""
        chain = chain_of(save, self._paths)
        saved_table = chain[-1][1].table(self._table_key(*chain[-1]))
        bits = BITS.get(saved_table.weight_dtype)
        dtype = torch.float32 if bits else DTYPES[saved_table.weight_dtype]
        with tempfile.TemporaryDirectory(prefix="rec_sdk_torch-") as temporary:  # mapped files stay readable
            saves = []
            for folder, manifest, saved in reversed(table_chain(chain, saved_table).saves):
                saves.append((folder, manifest, saved, ensure_index(folder, manifest, saved.key, Path(temporary))))
            table = open_served_table(saves)
        return _OpenedSave(save, chain[-1][1].id, table, saved_table.rows, saved_table.embedding_dim, dtype, bits)

    def _table_key(self, folder: Path, manifest: Manifest) -> str:
        keys = [table.key for table in manifest.tables]
        if self._name in keys:
            return self._name
        found = [table.key for table in manifest.tables if table.name == self._name]
        if len(found) != 1:
            raise CheckpointError(f"{folder}: no table {self._name!r}, only {keys}")
        return found[0]

    # ---- following new saves

    def refresh(self) -> bool:
        """Opens the latest save unless it is open already; returns whether it was opened.

        Until the new save is open, other threads look up rows in the previous one.

        Raises:
            CheckpointError: a save of the chain is missing or damaged; the reader continues to use the previous save.
        """
        with calls, self._refreshing:
            save = latest_save(self._paths)
            if save == self._opened.save:
                return False
            self._opened = self._open(save)
            logger.info("table %r is read from %s", self._name, save)
            return True

    def _follow(self, last_problem: str) -> str:
        """Calls `refresh`; returns an error's text, or "". Issues a warning if the text differs from `last_problem`."""
        try:
            self.refresh()
        except (CheckpointError, OSError) as error:
            if str(error) != last_problem:
                warn(f"table {self._name!r} stays at {self._opened.save}: {error}", SaveWarning)
            return str(error)
        return ""

    def close(self) -> None:
        """Ends the thread that looks for later saves; deleting the reader also ends it.

        Files stay mapped until the reader is deleted.
        """
        self._ended.set()
        if self._thread is not None:
            self._thread.join()

    def __enter__(self) -> TableReader:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.close()

    # ---- properties

    @property
    def save(self) -> Path:
        """The folder of the save that is open."""
        return self._opened.save

    @property
    def embedding_dim(self) -> int:
        """D, the number of weights in a row."""
        return self._opened.dim

    @property
    def dtype(self) -> torch.dtype:
        """The data type of the tensors that `lookup` returns: the table's, or float32 if rows are quantized."""
        return self._opened.dtype

    @property
    def bits(self) -> int | None:
        """Number of bits per weight, 8 or 4, if rows are quantized; None otherwise."""
        return self._opened.bits

    def __len__(self) -> int:
        """Returns the number of rows in the save."""
        return self._opened.rows

    # ---- lookups

    @overload
    def lookup(self, ids: torch.Tensor) -> torch.Tensor: ...
    @overload
    def lookup(self, ids: Array) -> Array: ...
    def lookup(self, ids: torch.Tensor | Array) -> torch.Tensor | Array:
        """Returns the weights of `ids`, `[..., D]`; the row of an unknown id is filled with the default.

        Args:
            ids: integers of any shape: a tensor on the host, or an array.

        Returns:
            A tensor if `ids` is a tensor, an array if it is an array, in the table's data type. For a bfloat16 table,
                an array is float32.

        Raises:
            TypeError: `ids` are not integers, or are on a device.
            CheckpointError: the index is damaged.
        """
        return self.find(ids)[0]

    @overload
    def find(self, ids: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]: ...
    @overload
    def find(self, ids: Array) -> tuple[Array, Array]: ...
    def find(self, ids: torch.Tensor | Array) -> tuple[torch.Tensor, torch.Tensor] | tuple[Array, Array]:
        """Returns the rows of `ids`, `[..., D]`, and which ids are known, bool of the shape of `ids`.

        Args:
            ids: integers of any shape: a tensor on the host, or an array.

        Raises:
            TypeError: `ids` are not integers, or are on a device.
            CheckpointError: the index is damaged.
        """
        opened = self._opened
        wanted = _integers(ids, "ids")
        missing = torch.full((opened.dim,), self._default, dtype=opened.dtype, device="cpu")
        rows = torch.empty((wanted.size, opened.dim), dtype=opened.dtype, device="cpu")
        flat = np.ascontiguousarray(wanted, np.int64).reshape(-1)
        with _engine_errors_as_checkpoint_errors():
            if opened.bits:
                known = opened.table.lookup_floats(flat, self._default, rows.numpy())
            else:
                known = opened.table.lookup(flat, missing.view(torch.uint8).numpy(), rows.view(torch.uint8).numpy())
        rows, known = rows.reshape(*wanted.shape, opened.dim), known.reshape(wanted.shape)
        if isinstance(ids, torch.Tensor):
            return rows, torch.from_numpy(known)
        return (rows.float() if opened.dtype == torch.bfloat16 else rows).numpy(), known

    @overload
    def lookup_pooled(
        self,
        ids: torch.Tensor,
        offsets: torch.Tensor | Array,
        weights: torch.Tensor | Array | None = None,
        pooling: str = "sum",
    ) -> torch.Tensor: ...
    @overload
    def lookup_pooled(
        self,
        ids: Array,
        offsets: torch.Tensor | Array,
        weights: torch.Tensor | Array | None = None,
        pooling: str = "sum",
    ) -> Array: ...
    def lookup_pooled(
        self,
        ids: torch.Tensor | Array,
        offsets: torch.Tensor | Array,
        weights: torch.Tensor | Array | None = None,
        pooling: str = "sum",
    ) -> torch.Tensor | Array:
        """Returns sums or means of the rows of each bag, float32 `[B, D]`.

        The rows of all ids are never in memory at once. Results are bit-identical to the output of the operator
        `lookup_pooled` on the CPU for the rows that `lookup` returns, for any number of threads. An empty bag gives
        zeros.

        Args:
            ids: integers `[N]`, bag after bag: a tensor on the host, or an array. The result is of the same kind.
            offsets: integers `[B + 1]`, ascending from 0 to N: positions where bags begin, then the end of the last
                bag.
            weights: floats `[N]`, a factor for each row, used as float32; None for no factors.
            pooling: "sum", or "mean": the (weighted) sum divided by the number of ids in the bag.

        Raises:
            TypeError: `ids` or `offsets` are not integers, or are on a device.
            ValueError: `pooling` is unknown, `offsets` do not ascend from 0 to N, or shapes do not fit.
            CheckpointError: the index is damaged.
        """
        opened = self._opened
        wanted, ends = _integers(ids, "ids"), _integers(offsets, "offsets")
        if pooling not in ("sum", "mean"):
            raise ValueError(f"pooling is {pooling!r}, expected 'sum' or 'mean'")
        if wanted.ndim != 1 or ends.ndim != 1:
            raise ValueError(f"ids are {wanted.shape} and offsets {ends.shape}, expected one dimension of each")
        flat, begins = np.ascontiguousarray(wanted, np.int64), np.ascontiguousarray(ends, np.int64)
        if not len(begins) or begins[0] != 0 or begins[-1] != len(flat) or (begins[1:] < begins[:-1]).any():
            raise ValueError(f"offsets must ascend from 0 to the number of ids, {len(flat)}")
        factors = None if weights is None else _floats(weights, len(flat))
        missing = float(torch.tensor(self._default, dtype=opened.dtype, device="cpu"))
        sums = torch.empty((len(begins) - 1, opened.dim), dtype=torch.float32, device="cpu")
        with _engine_errors_as_checkpoint_errors():
            opened.table.lookup_pooled(flat, begins, factors, pooling == "mean", missing, sums.numpy())
        return sums if isinstance(ids, torch.Tensor) else sums.numpy()


@contextlib.contextmanager
def _engine_errors_as_checkpoint_errors() -> Iterator[None]:
    """Converts a ValueError of the engine to a CheckpointError; arguments must have been checked before."""
    try:
        with calls:
            yield
    except ValueError as error:
        raise CheckpointError(str(error)) from error


def _integers(values: torch.Tensor | Array, name: str) -> Array:
    array = values.numpy() if isinstance(values, torch.Tensor) and values.device.type == "cpu" else values
    if not isinstance(array, np.ndarray) or array.dtype.kind not in "iu":
        kind = (
            f"{values.dtype} on {values.device}"
            if isinstance(values, torch.Tensor)
            else getattr(values, "dtype", type(values))
        )
        raise TypeError(f"{name} are {kind}, expected integers: a tensor on the host, or a numpy array")
    return array


def _floats(values: torch.Tensor | Array, count: int) -> npt.NDArray[np.float32]:
    tensor = values if isinstance(values, torch.Tensor) else torch.from_numpy(np.asarray(values))
    if tensor.shape != (count,) or not tensor.dtype.is_floating_point:
        raise ValueError(f"weights are {tensor.dtype} {list(tensor.shape)}, expected floats [{count}], one for each id")
    floats: npt.NDArray[np.float32] = tensor.detach().to("cpu", torch.float32).contiguous().numpy()
    return floats


def _follow(reader: weakref.ref[TableReader], ended: threading.Event, seconds: float) -> None:
    last_problem = ""
    while not ended.wait(seconds):
        alive = reader()
        if alive is None:
            return
        last_problem = alive._follow(last_problem)
        del alive  # otherwise this reference would keep the reader alive while the thread waits
