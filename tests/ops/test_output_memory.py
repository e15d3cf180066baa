"""Large outputs on the CPU reuse the memory of freed outputs."""

from __future__ import annotations

import ctypes
import gc
import os
import resource
import subprocess
import sys
import threading
from collections.abc import Callable

import pytest
import torch

from rec_sdk_torch.operators.calls import empty_output, ops
from rec_sdk_torch.operators.schemas import _library
from rec_sdk_torch.tbe import Pooling, TableBatchedEmbedding, TableConfig, TableOptimizer

pytestmark = pytest.mark.kernels

CPU = torch.device("cpu")


@pytest.fixture(autouse=True)
def _on_the_cpu(device: torch.device) -> None:
    if device.type != "cpu":
        pytest.skip("about host memory alone, which a run on the CPU tests")


LARGE = (1 << 14, 256)  # 16 MiB
SMALL = (1 << 10, 256)
_kept = _library.rec_sdk_kept_output_bytes
_kept.restype = ctypes.c_int64


def _flush() -> None:
    """Makes the allocator drop its kept blocks, by allocating an unusual size."""
    gc.collect()
    for _ in range(80):
        empty_output((1 << 12, 257), CPU)


def test_memory_of_a_freed_output_is_reused() -> None:
    _flush()
    first = empty_output(LARGE, CPU)
    place = first.data_ptr()
    second = empty_output(LARGE, CPU)
    assert second.data_ptr() != place
    view = first[5:, 1:].detach()
    del first
    third = empty_output(LARGE, CPU)
    assert third.data_ptr() not in (place, second.data_ptr()), "a view still uses it"
    del view
    assert empty_output(LARGE, CPU).data_ptr() == place


def test_sizes_up_to_an_eighth_apart_share_blocks() -> None:
    _flush()
    place = empty_output(LARGE, CPU).data_ptr()
    fewer = empty_output((LARGE[0] - 1, LARGE[1]), CPU)
    assert fewer.data_ptr() == place
    assert fewer.fill_(1.0).sum() == fewer.numel()
    assert empty_output((LARGE[0] + 1, LARGE[1]), CPU).data_ptr() != place, "it would not fit"


def test_small_outputs_are_torchs_own() -> None:
    assert empty_output(SMALL, CPU).untyped_storage().resizable()
    assert not empty_output(LARGE, CPU).untyped_storage().resizable()
    assert empty_output((0, 64), CPU).shape == (0, 64)


def test_kept_memory_is_bounded() -> None:
    many = [empty_output(LARGE, CPU) for _ in range(20)]
    del many
    assert _kept() <= 8 * (LARGE[0] * LARGE[1] * 4)
    _flush()
    assert _kept() < LARGE[0] * LARGE[1] * 4, "blocks that others were taken instead of go back"


def _page_faults() -> int:
    return resource.getrusage(resource.RUSAGE_THREAD).ru_minflt


@pytest.mark.parametrize("pooling", [Pooling.NONE, Pooling.SUM])
def test_a_step_maps_no_pages_for_its_output(pooling: Pooling) -> None:
    rows, dim, samples = 100, 128, 1 << 17  # an output of 64 MiB
    embedding = TableBatchedEmbedding(
        [TableConfig("t", rows, dim, pooling=pooling)],
        optimizer=TableOptimizer.create(torch.optim.SGD, {"lr": 0.1}),
        device=CPU,
    )
    ids, offsets = torch.arange(samples) % rows, torch.arange(samples + 1)

    expected = embedding(ids, offsets).detach().clone()
    for _ in range(2):
        embedding(ids, offsets)
    before = _page_faults()
    output = embedding(ids, offsets)
    assert _page_faults() - before < samples * dim * 4 // 4096 // 8
    assert torch.equal(output, expected)


def test_tensors_behave_as_others() -> None:
    weights = torch.arange(200.0).view(100, 2).repeat(1, 64)
    slots = (torch.arange(1 << 15) % 100).int()
    output = ops.lookup_sequence(weights, slots)
    assert torch.equal(output, weights.index_select(0, slots))
    with torch.inference_mode():
        assert ops.lookup_sequence(weights, slots).is_inference()
    leaf = output.requires_grad_()
    leaf.mul(2.0).sum().backward()
    assert leaf.grad is not None
    assert torch.equal(leaf.grad, torch.full_like(leaf, 2.0))
    assert torch.equal(torch.from_numpy(output.detach().numpy()), output)
    output.detach().share_memory_()


@pytest.mark.parametrize(
    "resize",
    [
        lambda output, more: output.untyped_storage().resize_(0),
        lambda output, more: output.resize_(more),
        lambda output, more: torch.ones(more, out=output),
    ],
    ids=["storage", "resize_", "out"],
)
def test_resizing_is_an_error(resize: Callable[[torch.Tensor, tuple[int, int]], object]) -> None:
    output = empty_output(LARGE, CPU)
    with pytest.raises(RuntimeError, match="storage that is not resizable"):
        resize(output, (2 * LARGE[0], LARGE[1]))


def test_fewer_elements_and_clones_are_no_error() -> None:
    output = empty_output(LARGE, CPU)
    copy = output.clone()
    copy.untyped_storage().resize_(0)
    assert copy.untyped_storage().nbytes() == 0
    assert output.resize_(SMALL).shape == SMALL


def test_threads_never_share_a_block() -> None:
    errors = []

    def work(number: float) -> None:
        for _ in range(20):
            own_output = empty_output(LARGE, CPU).fill_(number)
            if not bool((own_output == number).all()):
                errors.append(number)

    threads = [threading.Thread(target=work, args=(float(i),)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors


def test_a_forked_process_can_allocate_outputs() -> None:
    kept = empty_output(LARGE, CPU).fill_(3.0)
    expected, size = bytes(kept.numpy().tobytes()), LARGE[0] * LARGE[1] * 4
    pid = os.fork()
    if pid == 0:  # torch's threads do not exist in the child
        own_output = empty_output(LARGE, CPU)
        ctypes.memset(own_output.data_ptr(), 4, size)
        os._exit(0 if ctypes.string_at(kept.data_ptr(), size) == expected else 1)
    assert os.waitpid(pid, 0)[1] == 0
    assert ctypes.string_at(kept.data_ptr(), size) == expected


@pytest.mark.parametrize("shape", [(-1, 4), (4, -1), (2**31 + 1, 2**31), (2**62 + 2**18, 4)])
def test_an_impossible_shape_is_refused(shape: tuple[int, int]) -> None:
    with pytest.raises(RuntimeError, match="empty_output: rows and columns are"):
        ops.empty_output(torch.empty(0), *shape)


_SHORT = """
import resource
import torch
from rec_sdk_torch.operators.calls import empty_output, ops
size, cpu = 1 << 26, torch.device("cpu")  # 256 MiB
many = [empty_output((n, 256), cpu) for n in (size // 256, size // 256 + 8192)]
del many  # two blocks are kept
used = int(open("/proc/self/statm").read().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (128 << 20), -1))
assert empty_output((3 * size // 512, 256), cpu).numel() == 3 * size // 2
try:
    empty_output((64 * size // 256, 256), cpu)
except RuntimeError as error:
    print(error)
"""


def test_kept_blocks_are_freed_before_out_of_memory() -> None:
    run = subprocess.run([sys.executable, "-c", _SHORT], capture_output=True, text=True, timeout=120, check=False)
    assert run.returncode == 0, run.stderr
    assert "memory is short: an output of 16777216 x 256 needs 17179869184 bytes" in run.stdout, run.stdout
