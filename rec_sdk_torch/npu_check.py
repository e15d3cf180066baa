"""Runs every operator on an NPU and on the CPU, compares the bits, and times them. Run it first on a new chip.

    python -m rec_sdk_torch.npu_check

Prints a report to send along with a question. Each line appears before its operator runs, so that the last one
names what hangs. The exit status is 0 when all bits are equal, 1 when not or when an operator failed, 2 without an NPU.
"""

from __future__ import annotations

import argparse
import platform
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from . import __version__, emulate
from .backends.devices import parse_device
from .formulas import FORMULAS
from .ops import hot_segments, ops
from .record import RecordLayout
from .tbe.config.optimizer import COEFFICIENTS

__all__ = ["Case", "cases", "main"]

Tensors = Mapping[str, torch.Tensor]

_MAX_GRADIENT = 1.5
_BAG = 8
_TYPES = {torch.float32: "fp32", torch.float16: "fp16", torch.bfloat16: "bf16"}


@dataclass(frozen=True)
class Case:
    """One call of an operator.

    Attributes:
        name: operator and variant.
        inputs: on the CPU; `call` gets copies of them on the device to run on.
        call: runs the operator; the tensors, by name, that hold its results.
        least_bytes: every index and gradient once, every looked-up row once, every updated record once each way, every
            output once.
    """

    name: str
    inputs: Tensors
    call: Callable[[Tensors], Tensors]
    least_bytes: int


@dataclass(frozen=True)
class _Batch:
    """Lookups of one table and the segments of their rows; a few rows have thousands of lookups."""

    rows: int
    dim: int
    slots: torch.Tensor
    unique: torch.Tensor
    offsets: torch.Tensor
    positions: torch.Tensor
    hot_segments: torch.Tensor

    @classmethod
    def draw(cls, rows: int, lookups: int, dim: int) -> _Batch:
        generator = torch.Generator().manual_seed(0)
        slots = (torch.rand(lookups, generator=generator) ** 4 * rows).int()
        unique, inverse, counts = torch.unique(slots, return_inverse=True, return_counts=True)
        offsets = torch.nn.functional.pad(counts.cumsum(0), (1, 0)).int()
        positions = torch.argsort(inverse, stable=True).int()
        hot = torch.from_numpy(hot_segments(offsets.numpy()))
        return cls(rows, dim, slots, unique, offsets, positions, hot)

    def records(self, layout: RecordLayout) -> torch.Tensor:
        """Weights of both signs, states that are positive."""
        generator = torch.Generator().manual_seed(1)
        records = torch.zeros((self.rows, layout.bytes), dtype=torch.uint8)
        layout.weight(records).copy_(torch.randn((self.rows, layout.dim), generator=generator))
        for index, elements in enumerate(layout.state_elements):
            layout.state(records, index).copy_(torch.rand((self.rows, elements), generator=generator) + 0.1)
        return records

    def values(self, *shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=torch.Generator().manual_seed(2))


def _copies(batch: _Batch) -> Iterator[Case]:
    layout = RecordLayout(batch.dim, torch.float32, (batch.dim,))
    least = len(batch.unique) * (4 + 2 * layout.bytes)
    inputs = {"cache": batch.records(layout), "slots": batch.unique}
    yield Case("gather_rows", inputs, lambda t: {"rows": ops.gather_rows(t["cache"], t["slots"])}, least)

    def scatter(t: Tensors) -> Tensors:
        ops.scatter_rows(t["cache"], t["slots"], t["rows"])
        return {"cache": t["cache"]}

    rows = inputs["cache"].flip(0)[: len(batch.unique)].contiguous()
    yield Case("scatter_rows", {**inputs, "rows": rows}, scatter, least)

    def swap(t: Tensors) -> Tensors:
        leaving = torch.empty_like(t["rows"])
        ops.swap_rows(t["cache"], t["slots"], t["places"], t["rows"], leaving)
        return {"cache": t["cache"], "leaving": leaving}

    places = torch.arange(len(batch.unique), dtype=torch.int32)
    moved = len(places) * (8 + 4 * layout.bytes)
    yield Case("swap_rows", {**inputs, "rows": rows, "places": places}, swap, moved)


def _lookups(batch: _Batch) -> Iterator[Case]:
    n, dim = len(batch.slots), batch.dim
    offsets = torch.arange(0, n + 1, _BAG)
    bags = len(offsets) - 1
    bag_inputs = {
        "slots": batch.slots[: bags * _BAG],
        "offsets": offsets,
        "columns": torch.zeros(1, dtype=torch.int64),
        "mean": torch.ones(1, dtype=torch.bool),
        "scale": batch.values(bags * _BAG),
        "grad": batch.values(bags, dim),
    }
    for dtype, short in _TYPES.items():
        layout = RecordLayout(dim, dtype, (dim,))
        records = batch.records(layout)

        def weights(t: Tensors, layout: RecordLayout = layout) -> torch.Tensor:
            return layout.weight(t["cache"])

        def sequence(t: Tensors, weights: Callable[[Tensors], torch.Tensor] = weights) -> Tensors:
            return {"out": ops.lookup_sequence(weights(t), t["slots"])}

        def pooled(t: Tensors, weights: Callable[[Tensors], torch.Tensor] = weights) -> Tensors:
            out = torch.empty_like(t["grad"])
            ops.lookup_pooled(weights(t), t["slots"], t["offsets"], t["scale"], t["columns"], t["mean"], 0, out)
            return {"out": out}

        def weights_grad(t: Tensors, weights: Callable[[Tensors], torch.Tensor] = weights) -> Tensors:
            grad = ops.pooled_weights_grad(weights(t), t["slots"], t["offsets"], t["grad"], t["columns"], t["mean"])
            return {"grad": grad}

        read = n * (dim * dtype.itemsize + 4)
        inputs = {"cache": records, "slots": batch.slots}
        yield Case(f"lookup_sequence {short}", inputs, sequence, read + 4 * n * dim)
        inputs = {"cache": records, **bag_inputs}
        least = read + 4 * n + bags * (8 + 4 * dim)
        yield Case(f"lookup_pooled {short}", inputs, pooled, least)
        yield Case(f"pooled_weights_grad {short}", inputs, weights_grad, least)


def _updates(batch: _Batch) -> Iterator[Case]:
    n, u, dim = len(batch.slots), len(batch.unique), batch.dim
    segments = {
        "grad": batch.values(n, dim),
        "unique": batch.unique,
        "offsets": batch.offsets,
        "positions": batch.positions,
        "hot": batch.hot_segments,
    }
    coefficients = torch.linspace(0.1, 0.9, COEFFICIENTS)[None]
    coefficients[0, 0] = _MAX_GRADIENT
    read = 4 * n * dim + 4 * n + 8 * u
    for optimizer, formula in FORMULAS.items():
        for dtype, short in _TYPES.items():
            layout = RecordLayout(dim, dtype, formula.state_elements(dim))
            inputs = {
                **segments,
                "cache": batch.records(layout),
                "tables": torch.tensor([0, u], dtype=torch.int32),
                "coefficients": coefficients,
            }

            def update(t: Tensors, layout: RecordLayout = layout, optimizer: str = optimizer) -> Tensors:
                ops.update_rows(
                    t["cache"],
                    [t["grad"]],
                    t["unique"],
                    t["tables"],
                    t["offsets"],
                    t["positions"],
                    None,
                    None,
                    None,
                    t["coefficients"],
                    optimizer,
                    layout.dim,
                    layout.weight_dtype,
                    hot_segments=t["hot"],
                )
                states = {f"state {i}": layout.state(t["cache"], i) for i in range(len(layout.state_elements))}
                return {"weights": layout.weight(t["cache"]), **states}

            yield Case(f"update_rows {optimizer} {short}", inputs, update, read + 2 * u * layout.bytes)

    def accumulate(t: Tensors) -> Tensors:
        segments = (t["unique"], t["offsets"], t["positions"], None, None, None, t["hot"])
        ops.accumulate_rows(t["pending"], [t["grad"]], *segments)
        return {"pending": t["pending"]}

    inputs = {**segments, "pending": torch.zeros((batch.rows, 2 * dim))}
    yield Case("accumulate_rows", inputs, accumulate, read + 2 * u * 8 * dim)


def cases(rows: int, lookups: int, dim: int) -> Iterator[Case]:
    """Every operator, the simplest kernels first."""
    batch = _Batch.draw(rows, lookups, dim)
    yield from _copies(batch)
    yield from _lookups(batch)
    yield from _updates(batch)


def _difference(ours: torch.Tensor, reference: torch.Tensor) -> str:
    """Says what differs, "" if no bit does. Distances are of integers, for floats units in the last place."""
    words = {1: torch.uint8, 2: torch.int16, 4: torch.int32}[reference.itemsize]
    a, b = (tensor.contiguous().view(words).long() for tensor in (ours, reference))
    wrong = a != b
    if not wrong.any():
        return ""
    first = wrong.nonzero()[0].tolist()
    values = f"{ours[tuple(first)].item()!r}, on the CPU {reference[tuple(first)].item()!r}"
    count, most = int(wrong.sum()), int((a - b).abs().max())
    return (
        f"{count} of {wrong.numel()} values differ, by up to {most} in the last place; the first at {first}: {values}"
    )


def _differences(case: Case, device: torch.device) -> str:
    def run(on: torch.device) -> Tensors:
        inputs = {name: tensor.to(on, copy=True) for name, tensor in case.inputs.items()}
        return {name: result.cpu() for name, result in case.call(inputs).items()}

    expected, found = run(torch.device("cpu")), run(device)
    each = ((name, _difference(found[name], expected[name])) for name in expected)
    return "; ".join(f"{name}: {difference}" for name, difference in each if difference)


def _seconds(device: torch.device, call: Callable[[], object], repeats: int) -> float:
    """Seconds of one call, in a queue of them."""
    synchronize = torch.npu.synchronize  # type: ignore[attr-defined]
    call()
    synchronize(device)
    start = time.perf_counter()
    for _ in range(repeats):
        call()
    synchronize(device)
    return (time.perf_counter() - start) / repeats


class _Check:
    """One report."""

    def __init__(self, device: torch.device, options: argparse.Namespace) -> None:
        self.device = device
        self.options = options
        self.failed: list[str] = []

    def _copy_bandwidth(self) -> float:
        """Bytes per second, read and written."""
        size: int = self.options.copy_mib << 20
        source = torch.zeros(size, dtype=torch.uint8, device=self.device)
        target = torch.empty_like(source)
        return 2 * size / _seconds(self.device, lambda: target.copy_(source), self.options.repeats)

    def header(self) -> float:
        """Prints what it runs on; the copy bandwidth."""
        import torch_npu

        name = torch.npu.get_device_name(self.device)  # type: ignore[attr-defined]
        print(f"rec_sdk_torch {__version__}, torch {torch.__version__}, torch_npu {torch_npu.__version__}, ", end="")
        print(f"Python {platform.python_version()}, {platform.machine()}")
        if emulate.active():
            print(f"{self.device}: EMULATED (torch is told {name}). Bits mean something, times do not.")
        else:
            print(f"{self.device}: {name}")
        bandwidth = self._copy_bandwidth()
        print(f"copy bandwidth {bandwidth / 1e9:.1f} GB/s; 'byte time' is what an operator's least bytes take at it")
        print(f"{self.options.rows} rows, {self.options.lookups} lookups, D = {self.options.dim}", flush=True)
        return bandwidth

    def case(self, case: Case, bandwidth: float) -> None:
        """Prints one line."""
        print(f"{case.name:<50}", end="", flush=True)
        differences = _differences(case, self.device)
        there = {name: tensor.to(self.device) for name, tensor in case.inputs.items()}
        seconds = _seconds(self.device, lambda: case.call(there), self.options.repeats)
        byte_time = case.least_bytes / bandwidth
        times = f"{1e6 * seconds:>10.1f} us{seconds / byte_time:>8.2f} x byte time"
        print(f"{'DIFFERS' if differences else 'same bits':<10}{times}", flush=True)
        if differences:
            self.failed.append(case.name)
            print(f"    {differences}", flush=True)

    def run(self) -> int:
        """Prints the report; the exit status."""
        bandwidth = self.header()
        for case in cases(self.options.rows, self.options.lookups, self.options.dim):
            try:
                self.case(case, bandwidth)
            except RuntimeError as error:  # after one, torch_npu's queue runs nothing any more
                print(f"FAILED\n{error}\nNot run: what follows {case.name}.")
                return 1
        if self.failed:
            print(f"Bits differ: {', '.join(self.failed)}.")
            return 1
        print("All bits are the CPU's.")
        return 0


def _parse(arguments: Sequence[str]) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m rec_sdk_torch.npu_check",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--device", default="npu", help="default: the current NPU")
    parser.add_argument("--rows", type=int, default=100_000, help="rows of the table (default: %(default)s)")
    parser.add_argument("--lookups", type=int, default=65_536, help="lookups of the batch (default: %(default)s)")
    parser.add_argument("--dim", type=int, default=128, help="elements of a row (default: %(default)s)")
    parser.add_argument(
        "--repeats", type=int, default=20, help="calls that a time is the mean of (default: %(default)s)"
    )
    parser.add_argument("--copy-mib", type=int, default=256, help="size of the timed copy (default: %(default)s)")
    options = parser.parse_args(arguments)
    for name in ("rows", "lookups", "dim", "repeats", "copy_mib"):
        if getattr(options, name) < 1:
            parser.error(f"--{name.replace('_', '-')} is {getattr(options, name)}, it must be at least 1")
    if options.lookups < _BAG:
        parser.error(f"--lookups is {options.lookups}, it must be at least {_BAG}")
    return options


def main(arguments: Sequence[str]) -> int:
    """Checks the operators; the exit status."""
    options = _parse(arguments)
    try:
        device = parse_device(options.device)
    except (ImportError, ValueError, RuntimeError) as error:
        print(f"npu_check: there is no NPU to check. {error}", file=sys.stderr)
        return 2
    if device.type != "npu":
        print(f"npu_check: {options.device!r} is no NPU; --device takes npu or npu:INDEX", file=sys.stderr)
        return 2
    return _Check(device, options).run()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
