"""Every optimizer clips the aggregated gradient."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torchrec
from jagged import apply, bags_collection, same_bits, single_ids, train_step

import rec_sdk_torch as rst

SGD, ADAM, ADAGRAD = torch.optim.SGD, torch.optim.Adam, torch.optim.Adagrad
CLIPPED: list[tuple[type, dict[str, Any]]] = [
    (SGD, {}),
    (ADAGRAD, {}),
    (ADAM, {}),
    (torch.optim.SparseAdam, {}),
    *(
        (torchrec.optim.RowWiseAdagrad, {"weight_decay": 0.25, **options})
        for options in (
            {"weight_decay": 0.0},
            {"weight_decay_mode": "l2"},
            {"weight_decay_mode": "decouple"},
            {"max_norm": 1.5},
            {"weight_decay_mode": "decouple_global"},
            {"weight_decay_mode": "cowclip", "lower_bound": 0.125},
            {"weight_decay_mode": "counter"},
            {"weight_decay_mode": "counter", "counter_weight_decay_mode": "adagradw"},
        )
    ),
    (torchrec.optim.PartialRowWiseAdam, {}),
    (torchrec.optim.LAMB, {}),
    (torchrec.optim.PartialRowWiseLAMB, {}),
    (torchrec.optim.LarsSGD, {"eta": 1.0, "weight_decay": 0.25}),
]


@pytest.mark.parametrize("windowed", [False, True])
@pytest.mark.parametrize(("cls", "options"), CLIPPED)
def test_every_optimizer_clips(device: torch.device, cls: type, options: dict[str, Any], windowed: bool) -> None:
    """As without clipping on the gradient that it makes: of two lookups of -1.5 and 2.0, and of one of 0.25, at 0.5."""
    if windowed:
        cls = getattr(rst, f"Accumulate{cls.__name__.removeprefix('Sparse')}")
        options = {**options, "use_accumulate": True}
    clipped, plain = bags_collection(device), bags_collection(device)
    apply(clipped, cls, gradient_clipping=True, max_gradient=0.5, **options)
    apply(plain, cls, **options)
    for factor, bound in ((2.0, 0.5), (-1.5, -0.5), (0.25, 0.25)):
        train_step(clipped, single_ids([1, 2, 3, 3]), factor)
        output = plain(single_ids([1, 2, 3])).values()
        output.backward(torch.tensor([bound, bound, 0.5 if factor == 0.25 else bound]).to(device)[:, None].expand(3, 4))
    assert not list(same_bits(clipped.state_dict(), plain.state_dict()))
    assert not list(same_bits(clipped.fused_optimizer.state_dict(), plain.fused_optimizer.state_dict()))
    unbound = bags_collection(device)
    apply(unbound, cls, **options)
    train_step(unbound, single_ids([1, 2, 3, 3]), 2.0)
    train_step(unbound, single_ids([1, 2, 3, 3]), -1.5)
    train_step(unbound, single_ids([1, 2, 3, 3]), 0.25)
    assert list(same_bits(clipped.state_dict(), unbound.state_dict()))
