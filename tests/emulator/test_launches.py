"""Failing launches, and limits on the number of cores, on the EMULATED NPU. Results are compared with the CPU's."""

from __future__ import annotations

import ctypes
import json
import os
from pathlib import Path

import forked_python
import launch_failures
import pytest
import torch
import torch_npu

from benchmarks.npu_model import EmulatedCounters
from rec_sdk_torch import emulate

KERNELS_OF_UPDATE = ["sum_chunks", "update_rows"]


@pytest.mark.parametrize("queue", ["0", "1"], ids=["at once", "task queue"])
@pytest.mark.parametrize(
    ("operator", "launched", "kernels"),
    [("lookup", 0, ["lookup_sequence"]), *(("update", n, KERNELS_OF_UPDATE) for n in range(2))],
)
def test_a_launch_that_fails_raises_and_nothing_follows_it(
    operator: str, launched: int, kernels: list[str], queue: str
) -> None:
    script = Path(launch_failures.__file__)
    done = forked_python.python(script, operator, str(launched), TASK_QUEUE_ENABLE=queue)
    assert done.returncode == 0, done.stderr
    printed = done.stdout
    assert f"{kernels[-1]}" in printed, "names the operator"
    assert f"kernel '{kernels[launched]}' was not launched" in printed
    ran = json.loads(printed.partition("ran: ")[2].splitlines()[0])
    assert sorted(ran) == kernels[:launched]


def test_an_earlier_error_is_not_reported_by_the_next_launch() -> None:
    script = Path(launch_failures.__file__)
    done = forked_python.python(script, "other, lookup", "0", TASK_QUEUE_ENABLE="0")
    assert done.returncode == 0, done.stderr
    before, _, ran = done.stdout.partition("ran: ")
    assert "kernel" not in before, before
    assert list(json.loads(ran.splitlines()[0])) == ["lookup_sequence"]


def test_the_first_call_loads_the_kernels() -> None:
    """In a process that has only created NPU tensors, the first call loads the kernels.

    Without kernels, torch_npu would fall back to the CPU.
    """
    calls = "for operator, arguments in test_edges.good_calls('npu').values(): operator(**arguments)"
    path = os.pathsep.join([str(Path(__file__).parents[1] / "ops"), os.environ.get("PYTHONPATH", "")])
    done = forked_python.python("-c", f"import torch_npu, test_edges\n{calls}\nprint('through')", PYTHONPATH=path)
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[-1] == "through"
    assert "fall back to run on the CPU" not in done.stderr


def test_kernels_keep_to_the_limit_of_their_stream() -> None:
    counters = EmulatedCounters()
    stream = torch.npu.Stream()
    torch_npu.npu.set_stream_limit(stream, -1, 5)
    cores = {}
    for name, on in (("limited", stream), ("default", torch.npu.current_stream())):
        torch.npu.synchronize()
        counters.reset()
        with torch.npu.stream(on):
            rows = launch_failures.lookup("npu")
        torch.npu.synchronize()
        assert torch.equal(rows.cpu(), launch_failures.lookup("cpu"))
        (kernel,) = (kernel for kernel in counters.read() if kernel.name == "lookup_sequence")
        cores[name] = len(kernel.bytes)
    assert cores["limited"] == 5
    assert cores["default"] > 5


def test_an_unknown_number_of_cores_means_one(capfd: pytest.CaptureFixture[str]) -> None:
    library = ctypes.CDLL(str(emulate.library_directory() / "librec_sdk_ascendc.so"))
    library.rec_sdk_ascendc_vector_cores.restype = ctypes.c_int64
    library.rec_sdk_ascendc_vector_cores.argtypes = (ctypes.c_void_p,)
    no_stream = ctypes.c_void_p(64)
    assert library.rec_sdk_ascendc_vector_cores(no_stream) == 1
    assert library.rec_sdk_ascendc_vector_cores(no_stream) == 1
    assert library.rec_sdk_ascendc_take_error() == 0
    assert capfd.readouterr().err.count("kernels run on one core, which is slow") == 1
