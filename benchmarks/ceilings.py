"""Measured upper limits (ceilings) of the machine: bandwidths of copies, of row gathers on the host, and of row swaps.

Copies between host and device, and swaps, are left out if the device is the host.
"""

from __future__ import annotations

import argparse
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from rec_sdk_torch.operators.calls import ops

from .runner import Row
from .timing import Clock

ROW_BYTES, REPEATS = 512, 10


def needs(options: argparse.Namespace, record_bytes: int) -> tuple[int, int]:
    """Returns the bytes of device and host memory that the measurements need."""
    buffer, swapped = options.copy_mib << 20, options.swap_rows * record_bytes
    return 2 * buffer + 7 * swapped, 2 * buffer + options.host_rows * ROW_BYTES + 3 * swapped


class Ceilings:
    """Bandwidth measurements of one device.

    Copies move `copy_mib` MiB. Gathers read `swap_rows` out of `host_rows` rows, and swaps move `swap_rows` records.
    """

    def __init__(self, device: torch.device, options: argparse.Namespace, record_bytes: int) -> None:
        self._device, self._options = device, options
        self._buffer_bytes, self._record_bytes = options.copy_mib << 20, record_bytes
        self._clock = Clock(device)
        self._module = None if device.type == "cpu" else torch.get_device_module(device)

    def measure(self) -> list[Row]:
        """Measures all ceilings, and determines whether staged or direct swaps are faster."""
        found = [self._device_copy(), *self._bus(), *self._host_gathers(), *self._swaps()]
        return [*found, *faster_swaps(found)]

    @staticmethod
    def _row(name: str, moved_bytes: int = 0, seconds: float = 0.0, **more: object) -> Row:
        speed = {"GB/s": moved_bytes / seconds / 1e9, "ms": seconds * 1e3} if seconds else {}
        return {"table": "ceilings, best", "name": name, **speed, "moved_bytes": moved_bytes, **more}

    def _best(self, call: Callable[[], object]) -> float:
        call()
        best = float("inf")
        for _ in range(REPEATS):
            self._clock.synchronize()
            begin = self._clock.mark()
            call()
            end = self._clock.mark()
            self._clock.synchronize()
            best = min(best, self._clock.seconds(begin, end))
        return best

    def _device_buffer(self) -> torch.Tensor:
        return torch.zeros(self._buffer_bytes, dtype=torch.uint8, device=self._device)

    def _pinned(self, *shape: int) -> torch.Tensor:
        return torch.zeros(shape, dtype=torch.uint8, pin_memory=self._module is not None)

    def _device_copy(self) -> Row:
        source, target = self._device_buffer(), self._device_buffer()
        size = 2 * self._buffer_bytes
        return self._row("device copy, read + written", size, self._best(lambda: target.copy_(source)))

    def _bus(self) -> list[Row]:
        if self._module is None:
            return []
        module, size = self._module, self._buffer_bytes
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
            self._row("pinned H2D", size, self._best(lambda: target.copy_(up, non_blocking=True))),
            self._row("pinned D2H", size, self._best(lambda: down.copy_(source, non_blocking=True))),
            self._row("duplex, both at once", 2 * size, self._best(duplex)),
        ]

    def _host_gathers(self) -> list[Row]:
        options = self._options
        rows = torch.ones((options.host_rows, ROW_BYTES), dtype=torch.uint8)
        index = torch.randint(0, options.host_rows, (options.swap_rows,), generator=torch.Generator().manual_seed(0))
        out = self._pinned(options.swap_rows, ROW_BYTES)
        pinned = " into pinned memory" if self._module else ""
        found = []
        for threads in dict.fromkeys((1, torch.get_num_threads())):
            with _threads(threads):
                best = self._best(lambda: torch.index_select(rows, 0, index, out=out))
            name = f"host gather of {ROW_BYTES}-byte rows{pinned}, {threads} thread" + "s" * (threads > 1)
            found.append(self._row(name, options.swap_rows * ROW_BYTES, best, correct=bool((out == 1).all())))
        return found

    def _swaps(self) -> list[Row]:
        """Measures row swaps into and out of the cache, both through a staging buffer on the device and directly."""
        if self._module is None:
            return []
        count, size = self._options.swap_rows, self._options.swap_rows * self._record_bytes
        host, back = self._pinned(count, self._record_bytes), self._pinned(count, self._record_bytes)
        host.random_(generator=torch.Generator().manual_seed(1))
        cache = torch.zeros((4 * count, self._record_bytes), dtype=torch.uint8, device=self._device)
        slots = torch.randperm(4 * count, generator=torch.Generator().manual_seed(2))[:count].int().to(self._device)

        def staged_in() -> None:
            ops.scatter_rows(cache, slots, host.to(self._device, non_blocking=True))

        def staged_out() -> None:
            back.copy_(ops.gather_rows(cache, slots), non_blocking=True)

        calls: dict[str, Callable[[], object]] = {
            "in, staged": staged_in,
            "in, direct": lambda: ops.scatter_rows(cache, slots, host),
            "out, staged": staged_out,
            "out, direct": lambda: ops.gather_rows.out(cache, slots, out=back),
        }
        found = []
        for way, call in calls.items():
            name = f"{self._record_bytes}-byte rows {way}"
            cache.zero_()
            back.zero_()
            try:
                if way.startswith("out"):
                    staged_in()
                seconds = self._best(call)
            except (AttributeError, RuntimeError) as error:
                found.append(self._row(name, absent=f"not in this build: {str(error).splitlines()[0]}"))
                continue
            if way.startswith("in"):
                staged_out()
            self._clock.synchronize()
            found.append(self._row(name, size, seconds, correct=torch.equal(back, host)))
        return found


@contextmanager
def _threads(count: int) -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(count)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def rate(ceilings: list[Row], prefix: str) -> float | None:
    """Returns the bytes per second of the ceiling whose name starts with `prefix`; None if it was not measured."""
    found = (row["GB/s"] * 1e9 for row in ceilings if row.get("name", "").startswith(prefix) and "GB/s" in row)
    return next(found, None)


def faster_swaps(ceilings: list[Row]) -> Iterator[Row]:
    """Yields for each direction whether the staged or the direct swap is faster, if both were measured."""
    milliseconds = {row["name"]: row["ms"] for row in ceilings if "ms" in row}
    for name, staged in milliseconds.items():
        direct = milliseconds.get(name.replace(", staged", ", direct"))
        if name.endswith(", staged") and direct:
            times = max(staged / direct, direct / staged)
            faster = {"way": "direct" if staged > direct else "staged", "times": times}
            yield {"table": "faster way of a swap", "rows": name.removesuffix(", staged"), **faster}
