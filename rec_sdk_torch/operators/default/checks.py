"""Argument checks with the messages of `torch_npu_ext/ops`: types, shapes, strides, devices, and index values."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

MAX_DIM = 1 << 30
"""`kMaxDim` of op_kernels/common/record.h."""
_INT64 = 1 << 63

_NAMES = {
    torch.float64: "Double",
    torch.float32: "Float",
    torch.float16: "Half",
    torch.bfloat16: "BFloat16",
    torch.uint8: "Byte",
    torch.int8: "Char",
    torch.int16: "Short",
    torch.int32: "Int",
    torch.int64: "Long",
    torch.bool: "Bool",
}


def type_name(dtype: torch.dtype) -> str:
    """Returns the name that C++ messages use for a dtype, such as "Float"."""
    return _NAMES.get(dtype, str(dtype).removeprefix("torch."))


class Checker:
    """The argument checks of one operator call. A failed check raises a RuntimeError that names operator and argument.

    Attributes:
        operator: the name of the operator.
        device: the device of the first argument, on which all tensors must be.
    """

    def __init__(self, operator: str, reference: torch.Tensor) -> None:
        self.operator, self.device = operator, reference.device

    def require(self, condition: bool, message: str) -> None:
        if not condition:
            raise RuntimeError(f"rec_sdk::{self.operator}: {message}")

    def type_and_rank(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, rank: int) -> None:
        wanted, found = type_name(dtype), type_name(tensor.dtype)
        self.require(tensor.dtype == dtype, f"{name} must be {wanted}, got {found}")
        self.require(tensor.dim() == rank, f"{name} must have {rank} dimension(s), got {tensor.dim()}")

    def tensor(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, rank: int) -> None:
        """Checks the type, rank and device of a tensor."""
        self.type_and_rank(name, tensor, dtype, rank)
        self.require(tensor.device == self.device, f"{name} must be on the device of the first argument")

    def contiguous(self, name: str, tensor: torch.Tensor) -> None:
        self.require(tensor.is_contiguous(), f"{name} must be contiguous; call .contiguous() on it")

    def vector(self, name: str, tensor: torch.Tensor, dtype: torch.dtype, size: int | None = None) -> None:
        """Checks that a tensor is a contiguous vector with `size` elements; None allows any number."""
        self.tensor(name, tensor, dtype, 1)
        found = tensor.shape[0]
        self.require(size is None or found == size, f"{name} must have {size} element(s), got {found}")
        self.contiguous(name, tensor)

    def matrix(self, name: str, tensor: torch.Tensor) -> None:
        """Checks that a tensor is a float32 matrix with contiguous rows; an empty matrix may have any strides."""
        self.tensor(name, tensor, torch.float32, 2)
        if tensor.numel():
            self._row_strides(name, tensor)

    def _row_strides(self, name: str, tensor: torch.Tensor) -> None:
        (rows, columns), (down, right) = tensor.shape, tensor.stride()
        self.require(columns <= 1 or right == 1, f"{name} must have stride(1) = 1, got {right}")
        enough = f"{name} must have stride(0) >= size(1) = {columns}, got {down}"
        self.require(rows <= 1 or down >= columns, enough)

    def storage_dtype(self, name: str, dtype: torch.dtype) -> None:
        """Checks that weights can be stored in a dtype."""
        good = dtype in (torch.float32, torch.float16, torch.bfloat16)
        self.require(good, f"{name} must be of Float, Half or BFloat16, got {type_name(dtype)}")

    def weights(self, weights: torch.Tensor) -> None:
        self.storage_dtype("weights", weights.dtype)
        self.tensor("weights", weights, weights.dtype, 2)
        dim = weights.shape[1]
        self.require(1 <= dim <= MAX_DIM, f"weights must have from 1 to {MAX_DIM} columns, got {dim}")
        self._row_strides("weights", weights)

    def bags(
        self, offsets: torch.Tensor, columns: torch.Tensor, mean: torch.Tensor, first_bag: int, batch_size: int
    ) -> None:
        """Checks the arguments that describe the bags of a pooled lookup; each feature has `batch_size` bags."""
        self.vector("offsets", offsets, torch.int64)
        self.require(offsets.shape[0] >= 1, "offsets must have bags + 1 elements, got none")
        self.vector("columns", columns, torch.int64)
        count, features = offsets.shape[0] - 1, columns.shape[0]
        self.vector("mean", mean, torch.bool, features)
        total = features * batch_size
        self.require(total < _INT64, f"{features} feature(s) with a batch of {batch_size} are too many bags")
        self.require(first_bag >= 0, f"first_bag must not be negative, got {first_bag}")
        self.require(
            count == 0 or count <= total - first_bag,
            f"bags {first_bag} to {first_bag} + {count} exceed the {total} bags of {features} feature(s) with a batch "
            f"of {batch_size}",
        )

    def require_none(self, bad: torch.Tensor, message: Callable[[int], str]) -> None:
        """Raises if an element of `bad`, bool `[n]`, is True; `message` maps the first such index to the error text."""
        if bool(bad.any()):
            self.require(False, message(int(bad.nonzero()[0, 0])))

    def indices(self, name: str, values: torch.Tensor, limit: int) -> torch.Tensor:
        """Checks that all `values`, int32 `[n]`, are in `[0, limit)`; returns them as int64."""
        wide = values.long()
        self.require_none(
            (wide < 0) | (wide >= limit),
            lambda i: f"{name} must be in [0, {limit}), got {int(wide[i])} at index {i}",
        )
        return wide

    def offsets(self, name: str, offsets: torch.Tensor, end: int) -> torch.Tensor:
        """Checks that `offsets`, `[n + 1]`, start at 0, do not decrease, and end at `end`; returns them as int64."""
        wide = offsets.long()
        self.require(int(wide[0]) == 0, f"{name} must start at 0, got {int(wide[0])}")
        self.require_none(
            wide[:-1] > wide[1:],
            lambda i: f"{name} must not decrease, got {int(wide[i])} then {int(wide[i + 1])} at index {i + 1}",
        )
        self.require(int(wide[-1]) == end, f"{name} must end at {end}, got {int(wide[-1])}")
        return wide

    def slices(self, columns: torch.Tensor, dim: int, width: int) -> list[int]:
        """Checks that each slice of `dim` columns that begins at one of `columns` lies within `width` columns.

        Returns:
            `columns`, int64 `[features]`, as a list of ints.
        """
        starts: list[int] = columns.tolist()
        for index, column in enumerate(starts):
            self.require(
                0 <= column <= width - dim,
                f"columns must be in [0, {width - dim}] for slices of {dim} in {width} columns, got {column} at index "
                f"{index}",
            )
        return starts

    def indices_by_source(
        self, name: str, values: torch.Tensor, source: torch.Tensor | None, limits: Sequence[int]
    ) -> torch.Tensor:
        """Checks that `values[i]` is in `[0, limits[source[i]])` for each i; returns the values as int64.

        `values` is int32 `[n]`. Without `source`, `limits` has one element, which is the limit of all values.
        """
        if source is None:
            return self.indices(name, values, limits[0])
        wide = values.long()
        limit = torch.tensor(limits, device=wide.device)[source]

        def message(i: int) -> str:
            which = f"for grads[{int(source[i])}], got {int(wide[i])} at index {i}"
            return f"{name} must be in [0, {int(limit[i])}) {which}"

        self.require_none((wide < 0) | (wide >= limit), message)
        return wide
