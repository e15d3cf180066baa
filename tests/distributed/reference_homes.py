"""Reference for the owner rank of an id, in Python integers of any size."""

from __future__ import annotations

MASK = 2**64 - 1


def fold(a: int, b: int) -> int:
    return a * b & MASK ^ a * b >> 64


def home_of(i: int, home: tuple[int, int], world_size: int) -> int:
    """Returns the owner rank of an id; `home` is the argument of the engine's `owner_ranks`."""
    rank, block = home
    if rank >= 0:
        return rank
    if rank == -2:
        mixed = fold((i & MASK) ^ 0x9E3779B97F4A7C15, 0xD6E8FEB86659FD93)
        return fold(mixed, 0xBF58476D1CE4E5B9) * world_size >> 64
    return i // block if rank == -3 and 0 <= i < block * world_size else i % world_size


def home_argument(home: str, num_embeddings: int, world_size: int) -> tuple[int, int]:
    """Returns the `home` argument of `home_of` for the name of a `Home` option."""
    return {"modulo": (-1, 0), "hash": (-2, 0), "continuous": (-3, -(-num_embeddings // world_size))}[home]
