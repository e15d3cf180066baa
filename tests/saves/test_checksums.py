"""Checksums of saves equal zlib's, whichever CPU instructions compute them."""

from __future__ import annotations

import zlib
from typing import Any

import numpy as np
import pytest

from rec_sdk_torch import _engine
from rec_sdk_torch.saves.format.tensors import crc32


@pytest.mark.parametrize("checksum", [_engine.crc32, crc32], ids=["engine", "used"])
def test_a_checksum_equals_zlibs(checksum: object) -> None:
    """All lengths up to some hundred bytes are tried, at every alignment, with preceding bytes."""
    data = np.random.default_rng(0).integers(0, 256, 70_000, np.uint8)
    assert callable(checksum)
    for size in [*range(400), 4096, 65_537]:
        begin, before = size % 17, size * 77_777_777 % 2**32
        piece = memoryview(data)[begin : begin + size]
        assert checksum(piece, before) == zlib.crc32(piece, before)
        assert checksum(piece.tobytes()) == zlib.crc32(piece)
    parts = crc32(data[30_000:], crc32(data[:30_000]))
    assert parts == zlib.crc32(data)


def test_objects_without_bytes_are_refused() -> None:
    text: Any = "text"
    with pytest.raises(TypeError):
        _engine.crc32(text)
    with pytest.raises((BufferError, ValueError)):
        _engine.crc32(np.zeros((4, 4), np.uint8)[:, 1])
