"""Quantized rows with 8 or 4 bits per weight: a row has the codes of its weights, then a scale and a bias.

`torch.ops.quantized.embedding_bag_byte` and `embedding_bag_4bit` read the same layout.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

NAMES = {8: "Q8", 4: "Q4"}
"""Names of the data types in a manifest, by bits per weight."""
BITS = {name: bits for bits, name in NAMES.items()}
_PARAMETERS: dict[int, type[np.floating[Any]]] = {8: np.float32, 4: np.float16}
"""Data types of scale and bias, by bits per weight."""

Floats = npt.NDArray[np.float32]


def row_bytes(name: str, dim: int) -> int:
    """Returns the size in bytes of a row of `dim` weights of the data type `name`, with its scale and bias."""
    bits = BITS[name]
    return (dim * bits + 7) // 8 + 2 * np.dtype(_PARAMETERS[bits]).itemsize


def quantize(rows: Floats, bits: int) -> npt.NDArray[np.uint8]:
    """Quantizes float32 rows `[n, D]` to uint8 `[n, row_bytes]`.

    The bias is rounded down and the scale up, so that the codes 0 .. 2^bits - 1 cover the values of the row. Each
    dequantized weight differs from the original by at most half the scale.

    Args:
        rows: float32 `[n, D]`.
        bits: 8 or 4.

    Raises:
        ValueError: a weight is not finite, or the range of a row exceeds the type of scale and bias: float32 with 8
            bits, float16 with 4 bits.
    """
    kind, max_code = _PARAMETERS[bits], 2**bits - 1
    exact = rows.astype(np.float64)
    with np.errstate(over="ignore", invalid="ignore"):
        bias = _rounded(exact.min(axis=1), kind, -np.inf)
        scale = _rounded((exact.max(axis=1) - bias.astype(np.float64)) / max_code, kind, np.inf)
        largest = np.float32(max_code) * scale.astype(np.float32) + bias.astype(np.float32)
    if not np.isfinite(largest).all():  # readers dequantize in float32, where the largest weight must be finite
        raise ValueError(
            f"a weight is not finite, or the range of a row exceeds a scale and a bias of {np.dtype(kind)}"
        )
    wide = scale.astype(np.float64)[:, None]
    offset = exact - bias.astype(np.float64)[:, None]
    codes = np.rint(np.divide(offset, wide, out=np.zeros_like(offset), where=wide > 0)).astype(np.uint8)
    if bits == 4:
        padded = np.zeros((len(codes), (codes.shape[1] + 1) // 2 * 2), np.uint8)
        padded[:, : codes.shape[1]] = codes
        codes = padded[:, ::2] | padded[:, 1::2] << 4
    parameters = np.stack([scale, bias], axis=1)
    return np.concatenate([codes, parameters.view(np.uint8).reshape(len(rows), -1)], axis=1)


def _rounded(values: npt.NDArray[np.float64], kind: type[np.floating[Any]], towards: float) -> npt.NDArray[Any]:
    """Converts values to the type `kind`, rounded towards minus or plus infinity."""
    nearest: npt.NDArray[Any] = values.astype(kind)
    beyond = nearest < values if towards > 0 else nearest > values
    further: npt.NDArray[Any] = np.nextafter(nearest, np.array(towards, kind))
    return np.where(beyond, further, nearest)


def dequantize(packed: npt.NDArray[np.uint8], bits: int, dim: int) -> Floats:
    """Returns float32 weights `[n, D]` of quantized rows: `code * scale + bias`."""
    kind, count = _PARAMETERS[bits], (dim * bits + 7) // 8
    codes = packed[:, :count]
    if bits == 4:
        codes = np.stack([codes & 15, codes >> 4], axis=2).reshape(len(packed), -1)[:, :dim]
    parameters = np.ascontiguousarray(packed[:, count:]).view(kind).astype(np.float32)
    weights: Floats = codes.astype(np.float32) * parameters[:, :1] + parameters[:, 1:]
    return weights
