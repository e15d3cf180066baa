"""HybridTrainPipelineSparseDist with an unsharded model: results are bit-identical to a plain loop's."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
from test_prefetch import Net, assert_trained_the_same, is_idle, is_same, make_batches, pipeline_of, sgd, state, train
from torchrec import KeyedJaggedTensor

import rec_sdk_torch as rst


def hybrid(model: Any, device: Any, **options: Any) -> Any:
    return rst.HybridTrainPipelineSparseDist(model, sgd(model), device, **options)


@pytest.mark.parametrize("pipe_n_batch", [1, 6, 12])
def test_the_pipeline_has_the_bits_of_a_plain_loop(device: torch.device, pipe_n_batch: int) -> None:
    batches = make_batches(20)
    plain, ahead = Net(device), Net(device)
    pipeline = hybrid(ahead, device, return_loss=True, pipe_n_batch=pipe_n_batch)
    source = iter(batches)
    outputs = [pipeline.progress(source) for _ in batches]
    with pytest.raises(StopIteration):
        pipeline.progress(source)
    assert all(torch.equal((out**2).mean(), loss) for out, loss in outputs)
    assert_trained_the_same(ahead, plain, [out.detach().cpu() for out, _ in outputs], train(plain, batches))


def test_batches_are_read_ahead(device: torch.device) -> None:
    model = Net(device)
    read: list[int] = []

    def source() -> Any:
        for place, batch in enumerate(make_batches(9)):
            read.append(place)
            yield batch

    batches = source()
    default = hybrid(model, device)
    output = default.progress(batches)
    assert output.shape == (4,), "without return_loss it is the output alone"
    assert len(read) == 7, "the batch of the step, and six"
    rest = hybrid(model, device, execute_all_batches=False, pipe_n_batch=2)
    left = iter(make_batches(5))
    for _ in range(3):
        rest.progress(left)
    with pytest.raises(StopIteration):  # two batches had been read ahead when the data ended
        rest.progress(left)
    default.reset()
    assert is_idle(model)


def test_another_iterator_begins_at_once(device: torch.device) -> None:
    """When the pipeline is given another iterator, it drops the batches read ahead from the previous one."""
    first, second = make_batches(9), make_batches(4, seed=1)
    plain, ahead = Net(device), Net(device)
    pipeline = hybrid(ahead, device, pipe_n_batch=3)
    sources = [iter(first)] * 2 + [iter(second)] * 4
    outputs = [pipeline.progress(source).detach().cpu() for source in sources]
    with pytest.raises(StopIteration):
        pipeline.progress(sources[-1])
    assert_trained_the_same(ahead, plain, outputs, train(plain, first[:2] + second))


@dataclass
class Batch:
    """A batch of ids, with factors of the loss that are used only on the device."""

    ids: KeyedJaggedTensor
    factors: torch.Tensor

    def to(self, device: torch.device, non_blocking: bool = False) -> Batch:
        return Batch(self.ids.to(device, non_blocking), self.factors.to(device, non_blocking=non_blocking))

    def record_stream(self, stream: Any) -> None:
        self.ids.record_stream(stream)
        self.factors.record_stream(stream)


class Scaled(torch.nn.Module):
    def __init__(self, device: torch.device) -> None:
        super().__init__()
        self.inner = Net(device)
        self.dense = self.inner.dense

    def forward(self, batch: Batch) -> tuple[torch.Tensor, torch.Tensor]:
        out = self.inner(batch.ids)[1] * batch.factors
        return (out**2).mean(), out


def test_dense_inputs_have_arrived_before_the_forward(device: torch.device) -> None:
    """Copies from page-locked memory are asynchronous. The test delays their stream, so a missing wait shows."""
    factors = [torch.arange(4.0) + place for place in range(8)]
    if device.type != "cpu":
        factors = [values.pin_memory() for values in factors]
    batches = [Batch(ids, values) for ids, values in zip(make_batches(8), factors, strict=True)]
    plain = Scaled(device)
    expected = train(plain, [batch.to(device) for batch in batches])
    for depth in (0, 3):
        model = Scaled(device)
        pipeline = pipeline_of(model, device, depth=depth, features=lambda batch: batch.ids)
        source = iter(batches)
        outputs = [pipeline.progress(source).detach().cpu() for _ in batches]
        assert all(map(torch.equal, outputs, expected))
        assert is_same(state(model), state(plain))


def test_wrong_arguments(device: torch.device) -> None:
    model = Net(device)
    wrong: list[tuple[dict[str, Any], type[Exception], str]] = [
        ({"pipe_n_batch": 0}, ValueError, "pipe_n_batch is 0, allowed are 1 to 12"),
        ({"pipe_n_batch": 13}, ValueError, "pipe_n_batch is 13"),
        ({"pipe_n_batch": 2.0}, TypeError, r"pipe_n_batch is 2\.0"),
        ({"pipe_n_batch": True}, TypeError, "pipe_n_batch is True"),
        ({"apply_jit": True}, ValueError, "apply_jit=True is not supported"),
    ]
    for options, error, message in wrong:
        with pytest.raises(error, match=message):
            hybrid(model, device, **options)
    with pytest.raises(ValueError, match="no EmbCache"):
        rst.HybridTrainPipelineSparseDist(model.dense, sgd(model), device)
    with pytest.raises(ValueError, match="the pipeline's device is meta"):
        hybrid(model, "meta")
