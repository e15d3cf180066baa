"""Rounding of float32 to 16 bits, to nearest even or stochastically; see op_kernels/common/convert.h and rounding.h."""

from __future__ import annotations

import torch

_LOWER = (1 << 32) - 1
_FACTOR = 0xD6E8FEB86659FD93 - (1 << 64)
_GOLDEN = 0x9E3779B97F4A7C15 - (1 << 64)
_INFINITY = 0x7F800000


def rounding_bits(ids: torch.Tensor, seeds: torch.Tensor, dim: int) -> torch.Tensor:
    """Generates a 32-bit random number for each element of rows; only the upper 16 bits are random enough to use.

    Args:
        ids: the id of each row, int64 `[n]`.
        seeds: the seed of each row's table in this update, int64 `[n]`.
        dim: the number of columns.

    Returns:
        int64 `[n, dim]`.
    """
    z = ids * _GOLDEN + seeds
    for _ in range(2):
        z = (z ^ ((z >> 32) & _LOWER)) * _FACTOR
    start, step = ((part & _LOWER)[:, None] for part in (z >> 32, z))
    return (start + torch.arange(dim, device=ids.device) * step) & _LOWER


def round_to(values: torch.Tensor, dtype: torch.dtype, random: torch.Tensor | None = None) -> torch.Tensor:
    """Rounds float32 `values` to `dtype`: to nearest even or, with `random` from `rounding_bits`, stochastically.

    Stochastic rounding rounds to nearest where a magnitude exceeds the dtype's largest finite number. A NaN becomes the
    same NaN as in the kernels.
    """
    if dtype == torch.float32:
        return values
    if random is None:
        bits = values.to(dtype).view(torch.int16).long()
    else:
        bits = _bfloat16(values, random) if dtype == torch.bfloat16 else _float16(values, random)
    sign = torch.where(torch.signbit(values), 0x8000, 0) if dtype == torch.float16 else 0
    bits = torch.where(values.isnan(), (0x7E00 if dtype == torch.float16 else 0x7FC0) + sign, bits)
    return (((bits + 0x8000) & 0xFFFF) - 0x8000).to(torch.int16).view(dtype)


def _bits(values: torch.Tensor) -> torch.Tensor:
    return values.contiguous().view(torch.int32).long() & _LOWER


def _bfloat16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    bits = _bits(values)
    to_nearest = 0x7FFF + ((bits >> 16) & 1)
    return (bits + torch.where(bits & 0x7FFFFFFF > 0x7F7F0000, to_nearest, random >> 16)) >> 16


def _float16(values: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    bits = _bits(values)
    magnitude = bits & 0x7FFFFFFF
    small = magnitude < 113 << 23  # subnormal in float16: truncated to units of 2^-37
    units = (values.abs().masked_fill(~small, 0) * 2.0**37).long()
    rounded = (torch.where(small, units, magnitude - (112 << 23)) + (random >> 19)) >> 13
    infinite = torch.where(magnitude < 0x477FF000, 0x7BFF, 0x7C00)
    return torch.where(magnitude > 0x477FE000, infinite, rounded) | ((bits >> 16) & 0x8000)
