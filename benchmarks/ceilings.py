"""The machine's ceilings, measured before anything else: copies, rows gathered by the host, and how rows swap."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any

import torch

from rec_sdk_torch.ops import ops

from .timing import Clock

ROW_BYTES = 512
NEEDS_CUDA = "needs CUDA"
Result = dict[str, Any]


@dataclass(frozen=True)
class CeilingSizes:
    """Sizes of what is measured.

    Attributes:
        buffer_bytes: of one copy.
        host_rows: of ROW_BYTES each, that the host gathers from.
        rows: gathered, or swapped.
        record_bytes: of a swapped row.
        repeats: the fastest counts.
    """

    buffer_bytes: int
    host_rows: int
    rows: int
    record_bytes: int
    repeats: int

    def needs(self) -> tuple[int, int]:
        """Bytes of device and of host memory."""
        swapped = self.rows * self.record_bytes
        return 2 * self.buffer_bytes + 7 * swapped, 2 * self.buffer_bytes + self.host_rows * ROW_BYTES + 3 * swapped


@dataclass
class Ceiling:
    """One measurement; `absent` says why there is none."""

    name: str
    moved_bytes: int = 0
    seconds: float = 0.0
    correct: bool | None = None
    absent: str | None = None

    def describe(self) -> Result:
        """For the JSON."""
        rate = self.moved_bytes / self.seconds if self.seconds else None
        return {**asdict(self), "bytes_per_second": rate}


class Ceilings:
    """Measures one device."""

    def __init__(self, device: torch.device, sizes: CeilingSizes) -> None:
        self._device = device
        self._sizes = sizes
        self._clock = Clock(device)
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def measure(self) -> list[Result]:
        """All of them, in the order of the report."""
        found = [self._device_copy(), *self._bus(), *self._host_gathers(), *self._swaps()]
        return [ceiling.describe() for ceiling in found]

    def _best(self, call: Callable[[], object]) -> float:
        call()
        best = float("inf")
        for _ in range(self._sizes.repeats):
            self._clock.synchronize()
            begin = self._clock.mark()
            call()
            end = self._clock.mark()
            self._clock.synchronize()
            best = min(best, self._clock.seconds(begin, end))
        return best

    def _device_buffer(self) -> torch.Tensor:
        return torch.zeros(self._sizes.buffer_bytes, dtype=torch.uint8, device=self._device)

    def _pinned(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._module is not None)

    def _device_copy(self) -> Ceiling:
        source, target = self._device_buffer(), self._device_buffer()
        size = 2 * self._sizes.buffer_bytes
        return Ceiling("device copy, read + written", size, self._best(lambda: target.copy_(source)))

    def _bus(self) -> list[Ceiling]:
        names = ["pinned H2D", "pinned D2H", "duplex, both at once"]
        if self._module is None:
            return [Ceiling(name, absent=NEEDS_CUDA) for name in names]
        module, size = self._module, self._sizes.buffer_bytes
        up, down = self._pinned(size), self._pinned(size)
        source, target = self._device_buffer(), self._device_buffer()
        streams = [module.Stream(device=self._device) for _ in range(2)]

        def duplex() -> None:
            here = module.current_stream(self._device)
            for stream, copy in zip(streams, ((target, up), (down, source)), strict=True):
                stream.wait_stream(here)
                with module.stream(stream):
                    copy[0].copy_(copy[1], non_blocking=True)
            for stream in streams:
                here.wait_stream(stream)

        return [
            Ceiling(names[0], size, self._best(lambda: target.copy_(up, non_blocking=True))),
            Ceiling(names[1], size, self._best(lambda: down.copy_(source, non_blocking=True))),
            Ceiling(names[2], 2 * size, self._best(duplex)),
        ]

    def _host_gathers(self) -> list[Ceiling]:
        sizes = self._sizes
        rows = torch.ones((sizes.host_rows, ROW_BYTES), dtype=torch.uint8)
        index = torch.randint(0, sizes.host_rows, (sizes.rows,), generator=torch.Generator().manual_seed(0))
        out = self._pinned(sizes.rows, ROW_BYTES)
        pinned = " into pinned memory" if self._module else ""
        found = []
        for threads in dict.fromkeys((1, torch.get_num_threads())):
            with _threads(threads):
                best = self._best(lambda: torch.index_select(rows, 0, index, out=out))
            name = f"host gather of {ROW_BYTES}-byte rows{pinned}, {threads} thread" + "s" * (threads > 1)
            found.append(Ceiling(name, sizes.rows * ROW_BYTES, best, correct=bool((out == 1).all())))
        return found

    def _swaps(self) -> list[Ceiling]:
        """Rows into the cache and out of it: through a staging buffer on the device, or straight."""
        what = f"{self._sizes.record_bytes}-byte rows"
        names = [f"{what} {way}, {how}" for way in ("in", "out") for how in ("staged", "direct")]
        if self._module is None:
            return [Ceiling(name, absent=NEEDS_CUDA) for name in names]
        sizes = self._sizes
        count, size = sizes.rows, sizes.rows * sizes.record_bytes
        host, back = self._pinned(count, sizes.record_bytes), self._pinned(count, sizes.record_bytes)
        host.random_(generator=torch.Generator().manual_seed(1))
        cache = torch.zeros((4 * count, sizes.record_bytes), dtype=torch.uint8, device=self._device)
        slots = torch.randperm(4 * count, generator=torch.Generator().manual_seed(2))[:count].int().to(self._device)
        expected = host.to(self._device)

        def staged_in() -> None:
            ops.scatter_rows(cache, slots, host.to(self._device, non_blocking=True))

        def staged_out() -> None:
            back.copy_(ops.gather_rows(cache, slots), non_blocking=True)

        def direct_out() -> None:
            ops.gather_rows.out(cache, slots, out=back)

        def arrived() -> bool:
            return torch.equal(ops.gather_rows(cache, slots), expected)

        def left() -> bool:
            return torch.equal(back, host)

        def measured(name: str, call: Callable[[], None], check: Callable[[], bool], clear: torch.Tensor) -> Ceiling:
            clear.zero_()
            try:
                seconds = self._best(call)
            except (AttributeError, RuntimeError) as error:
                return Ceiling(name, absent=f"not in this build: {str(error).splitlines()[0]}")
            self._clock.synchronize()
            return Ceiling(name, size, seconds, correct=check())

        found = [
            measured(names[0], staged_in, arrived, cache),
            measured(names[1], lambda: ops.scatter_rows(cache, slots, host), arrived, cache),
        ]
        staged_in()
        found += [
            measured(names[2], staged_out, left, back),
            measured(names[3], direct_out, left, back),
        ]
        return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rate(ceilings: list[Result], prefix: str) -> float | None:
    """Bytes per second of the ceiling whose name starts with `prefix`; None where it was not measured."""
    for ceiling in ceilings:
        if ceiling["name"].startswith(prefix):
            found: float | None = ceiling["bytes_per_second"]
            return found
    return None


def faster_swaps(ceilings: list[Result]) -> list[str]:
    """Which way of swapping is faster, in words; nothing where only one was measured."""
    lines = []
    pairs = [c for c in ceilings if c["name"].endswith(", staged")]
    for staged in pairs:
        name = staged["name"].removesuffix(", staged")
        direct = next(c for c in ceilings if c["name"] == f"{name}, direct")
        if staged["seconds"] and direct["seconds"]:
            ratio = staged["seconds"] / direct["seconds"]
            winner = "direct" if ratio > 1 else "staged"
            lines.append(f"{name}: {winner} is faster, {max(ratio, 1 / ratio):.2f}x")
    return lines
