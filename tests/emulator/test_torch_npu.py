"""torch_npu on the EMULATED NPU. The reference is the same computation on the CPU, which runs the same kernels."""

from __future__ import annotations

import io
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import forked_python
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from rec_sdk_torch import emulate

DTYPES = (
    torch.float32,
    torch.float64,
    torch.float16,
    torch.bfloat16,
    torch.int64,
    torch.int32,
    torch.int16,
    torch.int8,
    torch.uint8,
    torch.bool,
)


def sample(*shape: int, dtype: torch.dtype = torch.float32, seed: int = 0) -> Tensor:
    """Draws the same values for every device, on the CPU."""
    generator = torch.Generator().manual_seed(seed)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator).to(dtype)
    return torch.randint(0, 2 if dtype == torch.bool else 100, shape, generator=generator).to(dtype)


def assert_same(actual: Any, expected: Any) -> None:
    """Checks that two tensors are bit-identical and that `actual` is on the NPU."""
    if isinstance(expected, Tensor):
        assert actual.device.type == "npu"
        torch.testing.assert_close(actual.cpu(), expected, rtol=0, atol=0, equal_nan=True)
    elif isinstance(expected, tuple | list):
        assert len(actual) == len(expected)
        for ours, theirs in zip(actual, expected, strict=True):
            assert_same(ours, theirs)
    else:
        assert actual == expected


def test_these_tests_run_on_the_emulated_npu() -> None:
    assert emulate.active()


# ---------------------------------------------------------------- copies, types, views


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_copies_keep_every_bit(dtype: torch.dtype) -> None:
    values = sample(5, 7, dtype=dtype)
    there = values.to("npu")
    assert there.dtype == dtype
    assert_same(there, values)
    assert_same(there.t(), values.t())
    assert_same(there[1:4, ::3], values[1:4, ::3])
    assert_same(there.clone().copy_(values.flip(0)), values.flip(0))  # a view of the host
    assert torch.equal(torch.empty(7, 5, dtype=dtype).copy_(there.t()), values.t())


@pytest.mark.parametrize("target", DTYPES, ids=str)
def test_casts(target: torch.dtype) -> None:
    for dtype in DTYPES:
        values = sample(20, dtype=dtype)
        if dtype.is_floating_point:
            values = values.abs()  # casting negative numbers to uint8 is undefined
        assert_same(values.to("npu").to(target), values.to(target))


def test_views_share_memory() -> None:
    base = torch.zeros(4, 6, device="npu")
    base[1:3].t()[::2].fill_(2)
    base.view(2, 12)[1].add_(1)
    base.select(1, 5).mul_(3).sub_(1)
    base.unsqueeze(0).diagonal(dim1=1, dim2=2).zero_()
    expected = torch.zeros(4, 6)
    expected[1:3].t()[::2].fill_(2)
    expected.view(2, 12)[1].add_(1)
    expected.select(1, 5).mul_(3).sub_(1)
    expected.unsqueeze(0).diagonal(dim1=1, dim2=2).zero_()
    assert_same(base, expected)


def test_in_place_operators_return_their_operand() -> None:
    values = torch.ones(3, device="npu")
    version = values._version
    assert values.add_(1) is values
    assert values._version > version
    assert torch.relu_(values) is values


def test_outputs_are_resized_and_written_through_views() -> None:
    a = sample(3, 4)
    out = torch.empty(0, device="npu")
    assert torch.mul(a.to("npu"), 2, out=out) is out
    assert_same(out, a * 2)
    base = torch.zeros(3, 8, device="npu")
    torch.add(a.to("npu"), 1, out=base[:, ::2])
    expected = torch.zeros(3, 8)
    torch.add(a, 1, out=expected[:, ::2])
    assert_same(base, expected)
    values, indices = torch.empty(0, device="npu"), torch.empty(0, dtype=torch.int64, device="npu")
    torch.sort(a.to("npu"), out=(values, indices))
    assert_same((values, indices), tuple(torch.sort(a)))


def test_an_output_that_is_an_input() -> None:
    a = sample(6).to("npu")
    with pytest.raises(RuntimeError, match="memory location"):
        torch.add(a[:5], 1, out=a[1:])
    assert_same(a, sample(6))
    b = sample(6).to("npu")
    torch.exp(b, out=b)
    assert_same(b, sample(6).exp())


# ---------------------------------------------------------------- operators

INDICES = torch.tensor([3, 0, 3, 1])
OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "add": lambda x: x + 2.5 * x,
    "comparison": lambda x: torch.where(x > 0, x, -x),
    "mixed types": lambda x: x + torch.arange(6, device=x.device),
    "scalar tensor of the host": lambda x: torch.tensor(2.0) * x,
    "matmul": lambda x: x @ x.t(),
    "batched matmul": lambda x: torch.bmm(x[None], x.t()[None]),
    "einsum": lambda x: torch.einsum("ij,kj->ik", x, x),
    "sum": lambda x: (x.sum(), x.sum(1), x.mean(0, keepdim=True)),
    "softmax": lambda x: F.softmax(x, 1),
    "norm": lambda x: F.layer_norm(x, (6,)),
    "batch norm": lambda x: F.batch_norm(x, None, None, training=True),
    "logsumexp": lambda x: torch.logsumexp(x, 1),
    "cat": lambda x: torch.cat([x, x[:1], 2 * x]),
    "stack and split": lambda x: torch.stack(list(torch.split(x, 2, dim=1))),
    "index": lambda x: x[INDICES.to(x.device)],
    "index on the host": lambda x: x[INDICES],
    "mask": lambda x: x[x > 0],
    "index_put": lambda x: x.clone().index_put_((INDICES.to(x.device),), x[:1].expand(4, 6), accumulate=True),
    "index_add": lambda x: torch.zeros_like(x).index_add_(0, INDICES.to(x.device), x),
    "index_select": lambda x: x.index_select(1, INDICES.to(x.device)),
    "gather": lambda x: x.gather(1, INDICES.to(x.device)[:, None]),
    "scatter_add": lambda x: torch.zeros_like(x).scatter_add_(0, INDICES.to(x.device)[:, None].expand(4, 6), x),
    "embedding": lambda x: F.embedding(INDICES.to(x.device), x),
    "embedding_bag": lambda x: F.embedding_bag(
        INDICES.to(x.device), x, torch.tensor([0, 3], device=x.device), mode="sum"
    ),
    "cumsum": lambda x: torch.cumsum(x, 1),
    "sort": lambda x: torch.sort(x, dim=1)[0],
    "topk": lambda x: torch.topk(x, 3)[0],
    "max": lambda x: x.max(dim=1)[0],
    "clamp": lambda x: x.clamp(-0.5, 0.5),
    "bce": lambda x: F.binary_cross_entropy_with_logits(x, (x > 0).float()),
    "cross entropy": lambda x: F.cross_entropy(x, INDICES.to(x.device)),
    "l1": lambda x: F.l1_loss(x, x.flip(0)),
    "convolution": lambda x: F.conv1d(x[None], x[:2, None, :3].expand(2, 4, 3)),
    "foreach": lambda x: torch._foreach_mul([x, x[:2]], 3.0),
    "float64": lambda x: x.double() / 3,
}


@pytest.mark.parametrize("name", OPERATORS)
def test_operators_and_their_gradients(name: str) -> None:
    results = []
    for device in ("npu", "cpu"):
        x = sample(4, 6).to(device).requires_grad_()
        out = OPERATORS[name](x)
        first = out[0] if isinstance(out, tuple | list) else out
        (grad,) = torch.autograd.grad(first, x, torch.ones_like(first) * 0.5)
        results.append((out, grad))
    assert_same(*results)


INTEGER_OPERATORS: dict[str, Callable[[Tensor], Any]] = {
    "unique": lambda x: torch.unique(x, return_inverse=True, return_counts=True),
    "bincount": lambda x: torch.bincount(x.flatten()),
    "nonzero": lambda x: torch.nonzero(x > 50),
    "argsort": lambda x: torch.argsort(x, stable=True),
    "one hot": lambda x: F.one_hot(x % 5, 5),
    "repeat_interleave": lambda x: torch.repeat_interleave(x, x[:, 0] % 3, dim=0),
    "bits": lambda x: ((x << 3) ^ (x >> 1)) & 0xFF,
    "searchsorted": lambda x: torch.searchsorted(torch.arange(100, device=x.device), x),
    "arange": lambda x: torch.arange(2, 20, 3, device=x.device),
    "eye, full, zeros": lambda x: [
        torch.eye(3, device=x.device),
        torch.full((2,), 7, device=x.device),
        torch.zeros_like(x),
        torch.tril_indices(3, 3, device=x.device),
    ],
    "item": lambda x: (x[0, 0].item(), int(x.sum()), bool((x > 0).any()), x.tolist()),
    "equal": lambda x: (torch.equal(x, x.clone()), torch.equal(x, x + 1)),
}


@pytest.mark.parametrize("name", INTEGER_OPERATORS)
def test_integer_operators(name: str) -> None:
    x = sample(4, 6, dtype=torch.int64)
    assert_same(INTEGER_OPERATORS[name](x.to("npu")), INTEGER_OPERATORS[name](x))


def test_operands_of_different_devices_are_refused() -> None:
    with pytest.raises(RuntimeError, match=r"same device, .* npu:0 and cpu! \(argument other of aten::add\)"):
        torch.ones(3, device="npu") + torch.ones(3)
    with pytest.raises(RuntimeError, match="npu:0 and npu:1"):
        torch.ones(3, device="npu:0") @ torch.ones(3, device="npu:1")
    with pytest.raises(RuntimeError, match="same device"):
        torch.add(torch.ones(3, device="npu"), 1, out=torch.empty(3))


def test_kernel_errors_are_raised() -> None:
    with pytest.raises(RuntimeError, match="must match the size"):
        torch.ones(3, device="npu") + torch.ones(4, device="npu")
    with pytest.raises(IndexError, match="out of range"):
        F.embedding(torch.tensor([9], device="npu"), torch.ones(3, 2, device="npu"))
    assert torch.ones(3, device="npu").sum().item() == 3  # the device still works


def test_the_error_of_an_unsupported_operator_names_it() -> None:
    import torch_npu

    x = torch.ones(2, 8, device="npu")
    with pytest.raises(RuntimeError, match="aclnnRmsNorm"):
        torch_npu.npu_rms_norm(x, torch.ones(8, device="npu"))


# ---------------------------------------------------------------- random numbers


def draws() -> list[Tensor]:
    x = torch.ones(50, device="npu")
    return [
        torch.rand(5, device="npu"),
        torch.randn(5, device="npu"),
        torch.randint(100, (5,), device="npu"),
        torch.randperm(10, device="npu"),
        torch.bernoulli(0.5 * x),
        torch.multinomial(x, 5),
        F.dropout(x, 0.5),
        torch.empty(5, device="npu").uniform_(),
        nn.init.trunc_normal_(torch.empty(5, device="npu")),
    ]


def test_random_numbers_follow_from_the_seed() -> None:
    torch.manual_seed(1)
    first, next_ones = draws(), draws()
    torch.manual_seed(1)
    again = draws()
    torch.manual_seed(2)
    other = draws()
    for a, b, c, d in zip(first, again, next_ones, other, strict=True):
        assert torch.equal(a, b)
        assert not torch.equal(a, c)
        assert not torch.equal(a, d)


def test_the_generators_of_npu_and_host_are_independent() -> None:
    torch.manual_seed(1)
    torch.npu.manual_seed(7)
    a = torch.rand(3, device="npu")
    draws()
    host = torch.rand(3)
    torch.manual_seed(1)
    assert torch.equal(torch.rand(3), host)
    torch.npu.manual_seed(7)
    state = torch.npu.get_rng_state()
    assert torch.equal(torch.rand(3, device="npu"), a)
    torch.npu.set_rng_state(state)
    assert torch.equal(torch.rand(3, device="npu"), a)
    own = torch.Generator(device="npu").manual_seed(7)
    assert torch.equal(torch.rand(3, device="npu", generator=own), a)
    with pytest.raises(RuntimeError, match="generator"):
        torch.rand(3, device="npu", generator=torch.Generator())


# ---------------------------------------------------------------- training


def build(device: str) -> nn.Module:
    torch.manual_seed(0)
    layers = (nn.Linear(6, 8), nn.ReLU(), nn.LayerNorm(8), nn.Linear(8, 1))
    return nn.Sequential(*layers).to(device)


def train(device: str, create: Callable[[Any], torch.optim.Optimizer]) -> tuple[list[float], list[Tensor]]:
    model = build(device)
    optimizer = create(model.parameters())
    losses = []
    for step in range(4):
        x = sample(16, 6, seed=step).to(device)
        optimizer.zero_grad()
        loss = F.binary_cross_entropy_with_logits(model(x).squeeze(1), (x[:, 0] > 0).float())
        loss.backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        losses.append(loss.item())
    return losses, list(model.parameters())


OPTIMIZERS: dict[str, Callable[[Any], torch.optim.Optimizer]] = {
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.Adam(p, lr=0.1),
    "adam foreach": lambda p: torch.optim.Adam(p, lr=0.1, foreach=True),
    "adam one by one": lambda p: torch.optim.Adam(p, lr=0.1, foreach=False),
    "adamw": lambda p: torch.optim.AdamW(p, lr=0.1),
    "adagrad": lambda p: torch.optim.Adagrad(p, lr=0.1),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.1),
    "adadelta": torch.optim.Adadelta,
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_training_equals_the_cpu(name: str) -> None:
    losses, parameters = train("npu", OPTIMIZERS[name])
    expected_losses, expected = train("cpu", OPTIMIZERS[name])
    assert losses == pytest.approx(expected_losses, rel=1e-5)
    assert losses[-1] != losses[0]
    for ours, theirs in zip(parameters, expected, strict=True):
        torch.testing.assert_close(ours.cpu(), theirs, rtol=1e-4, atol=1e-5)


def test_mixed_precision() -> None:
    model = build("npu")
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    scaler = torch.amp.GradScaler("npu", init_scale=128.0)
    before = model[0].weight.detach().clone()
    with torch.autocast("npu", dtype=torch.float16):
        out = model(sample(4, 6).to("npu"))
    assert out.dtype == torch.float16
    scaler.scale(out.float().sum()).backward()
    scaler.step(optimizer)
    scaler.update()
    assert not torch.equal(before, model[0].weight)


def test_gradients_of_gradients() -> None:
    x = torch.tensor([2.0], device="npu", requires_grad=True)
    (first,) = torch.autograd.grad(x**3, x, create_graph=True)
    (second,) = torch.autograd.grad(first, x)
    assert (first.item(), second.item()) == (12.0, 12.0)


# ---------------------------------------------------------------- the rest of torch


def test_save_and_load() -> None:
    model = build("npu")
    file = io.BytesIO()
    torch.save(model.state_dict(), file)
    file.seek(0)
    loaded = torch.load(file)
    assert_same(list(loaded.values()), [p.cpu() for p in model.state_dict().values()])
    file.seek(0)
    assert torch.load(file, map_location="cpu")["0.weight"].device.type == "cpu"


def test_printing() -> None:
    assert str(torch.tensor([1.5, 2.0], device="npu")) == "tensor([1.5000, 2.0000], device='npu:0')"


def test_streams_and_events() -> None:
    stream = torch.npu.Stream()
    begin, end = (torch.npu.Event(enable_timing=True) for _ in range(2))
    x = torch.ones(1000, device="npu")
    stream.wait_stream(torch.npu.current_stream())
    with torch.npu.stream(stream):
        begin.record()
        y = x * 2
        end.record()
    torch.npu.current_stream().wait_stream(stream)
    y.record_stream(torch.npu.current_stream())
    assert y.sum().item() == 2000
    assert begin.elapsed_time(end) >= 0


def test_pinned_memory_and_asynchronous_copies() -> None:
    values = sample(100).pin_memory()
    assert values.is_pinned()
    there = values.to("npu", non_blocking=True)
    back = torch.empty(100).pin_memory()
    back.copy_(there, non_blocking=True)
    torch.npu.synchronize()
    assert torch.equal(back, values)


def test_devices() -> None:
    assert torch.npu.device_count() >= 2
    there = torch.ones(3, device="npu:1") * 2
    assert there.device == torch.device("npu:1")
    assert_same(there.to("npu:0"), torch.full((3,), 2.0))


FAILING_COPY = """
import ctypes, torch, torch_npu
lib = ctypes.CDLL("libopapi.so")
lib.aclCreateTensor.restype = ctypes.c_void_p
def describe(t):
    sizes = (ctypes.c_int64 * t.dim())(*t.shape); strides = (ctypes.c_int64 * t.dim())(*t.stride())
    n = ctypes.c_uint64(t.dim())
    return ctypes.c_void_p(lib.aclCreateTensor(sizes, n, 0, strides, ctypes.c_int64(0), 2, sizes, n,
                                               ctypes.c_void_p(t.data_ptr())))
a, b = torch.ones(3, device="npu"), torch.ones(4, device="npu")
torch.npu.synchronize()
workspace, executor = ctypes.c_uint64(), ctypes.c_void_p()
lib.aclnnInplaceCopyGetWorkspaceSize(describe(a), describe(b), ctypes.byref(workspace), ctypes.byref(executor))
stream = ctypes.c_void_p(torch.npu.current_stream().npu_stream)
lib.aclnnInplaceCopy(None, ctypes.c_uint64(0), executor, stream)
try:
    torch.npu.synchronize()
except RuntimeError as error:
    print("raised", error)
"""


def test_stream_errors_are_raised_at_the_next_synchronization() -> None:
    finished = forked_python.python("-c", FAILING_COPY)
    assert "raised" in finished.stdout, finished.stderr
    assert "aclnnInplaceCopy" in finished.stdout
    assert "must match the size" in finished.stdout


def test_quantized_tensors_are_refused() -> None:
    with pytest.raises(NotImplementedError, match="quantized"):
        torch.quantize_per_tensor(torch.ones(3, device="npu"), 0.1, 0, torch.qint8)


def test_threads() -> None:
    """Operators, copies and random numbers run in several threads at once."""

    def work(seed: int) -> Tensor:
        x = sample(50, 50, seed=seed).to("npu")
        generator = torch.Generator("npu").manual_seed(seed)
        for _ in range(30):
            x = torch.relu(x @ x.t()) / 50 + torch.rand(50, 50, device="npu", generator=generator)
        return x.cpu()

    with ThreadPoolExecutor(4) as pool:
        together = list(pool.map(work, range(8)))
    for seed, result in enumerate(together):
        assert torch.equal(result, work(seed))


def test_a_waiting_process_is_idle() -> None:
    """torch_npu's release thread polls every microsecond; the emulator makes it sleep longer."""
    torch.ones(3, device="npu").sum().item()
    tasks = Path("/proc/self/task").iterdir()
    threads = [task / "status" for task in tasks if (task / "comm").read_text() == "release_thread\n"]
    assert threads  # one for each device

    def naps() -> int:
        return sum(int(each.read_text().partition("\nvoluntary_ctxt_switches:")[2].split()[0]) for each in threads)

    before, begin = naps(), time.monotonic()
    time.sleep(0.3)
    assert naps() - before < 4000 * len(threads) * (time.monotonic() - begin), "by themselves, 11,000 a second each"
