"""Answers that scripts for FBGEMM go by, beside FBGEMM's own."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest
import torch

from rec_sdk_torch import fbgemm
from rec_sdk_torch.fbgemm import SplitTableBatchedEmbeddingBagsCodegen as Ours

SPECS = [(20, 8, "HOST", "CPU")]
HYPER_PARAMETERS = ["lr", "eps", "beta1", "beta2", "weight_decay", "lower_bound"]


def theirs() -> Any:
    return pytest.importorskip("fbgemm_gpu.split_table_batched_embeddings_ops_training")


@pytest.mark.parametrize("kind", [int, np.int64, np.int32])
def test_locations_are_numbers_too(kind: type) -> None:
    module = Ours([(20, 8, kind(3), kind(0))], pooling_mode=kind(1), bounds_check_mode=kind(2))
    assert module.pooling_mode is fbgemm.PoolingMode.MEAN
    assert module.bounds_check_mode is fbgemm.BoundsCheckMode.IGNORE
    assert module(torch.tensor([1]), torch.tensor([0, 1])).shape == (1, 8)
    with pytest.raises(ValueError, match=r"the location of embedding_specs\[0\] is 7, allowed are \[0, 1, 2, 3, 4\]"):
        Ours([(20, 8, kind(7), kind(0))])
    with pytest.raises(TypeError, match=r"optimizer is .*3.*, expected a member"):
        Ours(SPECS, optimizer=kind(3))


def test_optimizers_equal_fbgemms() -> None:
    kind = theirs().OptimType
    for member in kind:
        same = fbgemm.OptimType[member.name]
        assert same == member
        assert member == same
        assert hash(same) == hash(member)
        assert {same: 1}[member] == 1
        others = [other for other in kind if other is not member]
        assert all(same != other and other != same for other in others)
    module = Ours(SPECS, optimizer=kind.ADAM)
    assert module.optimizer == kind.ADAM
    assert module.optimizer in (kind.LAMB, kind.ADAM)
    assert module.optimizer != "ADAM"


def test_no_preallocated_buffers_are_none() -> None:
    Ours(SPECS, preallocated_host_buffers={})
    with pytest.raises(NotImplementedError, match="preallocated_host_buffers"):
        Ours(SPECS, preallocated_host_buffers={"weights_host": torch.zeros(1)})


@pytest.mark.parametrize("name", HYPER_PARAMETERS)
@pytest.mark.parametrize("optimizer", ["EXACT_SGD", "EXACT_ADAGRAD", "ADAM", "EXACT_ROWWISE_ADAGRAD"])
def test_hyper_parameters_that_an_optimizer_lacks(optimizer: str, name: str, caplog: pytest.LogCaptureFixture) -> None:
    """FBGEMM sets them all, and its kernels read those of the optimizer: here a line says which have no effect."""
    module = Ours(SPECS, optimizer=optimizer)
    before = dict(module._optimizer.options)
    module.update_hyper_parameters({name: 0.25})
    changed = module._optimizer.options != before
    lines = [record.getMessage() for record in caplog.records]
    assert changed or lines == [f"{name}=0.25 has no effect: {optimizer} with this mode does not use it"]
    assert not (changed and lines)
    now = dict(module._optimizer.options)
    with pytest.raises(NotImplementedError, match="other"):
        module.update_hyper_parameters({name: 0.5, "other": 1.0})
    assert module._optimizer.options == now


def test_none_has_no_states() -> None:
    module = Ours(SPECS, optimizer="NONE")
    for call in (
        module.split_optimizer_states,
        module.get_optimizer_state,
        lambda: module.update_hyper_parameters({"eps": 1.0}),
        lambda: module.set_learning_rate(1.0),
    ):
        with pytest.raises(NotImplementedError, match="NONE has"):
            call()


def test_adagradw_has_iter() -> None:
    definition = fbgemm.CounterBasedRegularizationDefinition
    options = {"optimizer": "EXACT_ROWWISE_ADAGRAD", "weight_decay_mode": "COUNTER", "weight_decay": 0.1}
    for mode, extra in (("ADAGRADW", ["iter"]), ("DECOUPLE", [])):
        counted = definition(counter_weight_decay_mode=fbgemm.CounterWeightDecayMode[mode])
        (states,) = Ours(SPECS, counter_based_regularization=counted, **options).get_optimizer_state()
        assert list(states) == ["sum", "prev_iter", "row_counter", *extra]


def test_mean_with_weights_divides_the_gradient_too(device: torch.device) -> None:
    """FBGEMM's CPU module divides the output alone: the docs say so."""
    batch = torch.tensor([1, 2]), torch.tensor([0, 2]), torch.tensor([1.0, 3.0])
    kinds = theirs()
    their_specs = [(20, 8, kinds.EmbeddingLocation.HOST, kinds.ComputeDevice.CPU)]
    other = kinds.SplitTableBatchedEmbeddingBagsCodegen(
        their_specs, pooling_mode=kinds.PoolingMode.MEAN, learning_rate=1.0
    )
    module = Ours(SPECS, pooling_mode="MEAN", learning_rate=1.0)
    for each in (module, other):
        each(*batch).sum().backward()
    assert [module.split_embedding_weights()[0][i, 0].item() for i in (1, 2)] == [-0.5, -1.5]
    assert [other.split_embedding_weights()[0][i, 0].item() for i in (1, 2)] == [-1.0, -3.0]


def test_an_output_of_the_callers_memory(device: torch.device) -> None:
    """The same rows and updates, each rank's and feature's where the offsets say; other memory stays as it is."""
    on = ("HOST", "CPU") if device.type == "cpu" else ("DEVICE", "CUDA")
    specs = [(20, 4, *on), (20, 8, *on)]
    plain, written = (Ours(specs, device=device) for _ in "ab")
    for module in (plain, written):
        for table in module.split_embedding_weights():
            table.copy_(torch.arange(table.numel()).reshape(table.shape))
    batch, sizes = (torch.arange(5), torch.arange(6)), [[1, 2], [2, 0]]
    memory = torch.full((40,), -1.0, device=device)
    offsets = torch.tensor([[30, 2], [20, 0]])  # 4 and 16 elements of rank 0, 8 and none of rank 1
    for _ in range(2):
        expected = plain(*batch, batch_size_per_feature_per_rank=sizes)
        out = written(*batch, batch_size_per_feature_per_rank=sizes, vbe_output=memory, vbe_output_offsets=offsets)
        assert out.data_ptr() == memory.data_ptr()
        first, second, third = expected.detach().split([4, 16, 8])
        for begin, part in ((30, first), (2, second), (20, third)):
            assert torch.equal(out.detach()[begin : begin + len(part)], part)
        assert (out.detach() == -1).sum() == 40 - 28
        weights = torch.arange(28.0, device=device)
        (expected * weights).sum().backward()
        (torch.cat([out[30:34], out[2:18], out[20:28]]) * weights).sum().backward()
        for one, other in zip(plain.split_embedding_weights(), written.split_embedding_weights(), strict=True):
            assert torch.equal(one, other)
    with pytest.raises(ValueError, match="go together"):
        written(*batch, vbe_output=memory)
    with pytest.raises(ValueError, match=r"expected offsets of shape \(2, 2\)"):
        written(*batch, batch_size_per_feature_per_rank=sizes, vbe_output=memory[:33], vbe_output_offsets=offsets)
