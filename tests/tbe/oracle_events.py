"""Events of the oracle other than training: warming a cache, loading a state, reading all data of a table."""

from __future__ import annotations

import torch
from lifecycle_reference import MOST
from oracle_evictions import Result
from oracle_scenarios import Scenario, Step

from rec_sdk_torch.tbe import TableBatchedEmbedding


def warm(embedding: TableBatchedEmbedding, scenario: Scenario, step: Step) -> None:
    """Fetches rows into the cache without a batch; this is refused while batches are in flight."""
    for index, table in enumerate(scenario.tables):
        ids = torch.tensor(sorted(scenario.ids(index, step)), dtype=torch.int64)
        try:
            embedding.view(table.name).warm(ids, torch.arange(len(ids)).flip(0) if index % 2 else None)
        except RuntimeError as error:
            if "in flight" not in str(error):
                raise


def fill_counts(embedding: TableBatchedEmbedding, scenario: Scenario, step: Step) -> None:
    """Sets row counters to one below their maximum."""
    for index, table in enumerate(scenario.tables):
        view, ids = embedding.view(table.name), torch.tensor(sorted(scenario.ids(index, step)), dtype=torch.int64)
        if table.lifecycle is not None and table.name != scenario.frozen:
            known = ids[view.knows(ids)]
            names = view.row_columns(known).keys() & {"count", "clicks"}
            view.write_row_columns(known, {name: torch.full_like(known, MOST - 1) for name in names})


def loaded(embedding: TableBatchedEmbedding, saved: dict[str, torch.Tensor]) -> bool:
    """Loads a state; returns False if the load is refused because a batch in flight uses ids that it would remove."""
    if not saved:
        return False
    try:
        embedding.load_state_dict(saved)
    except RuntimeError as error:
        if "in flight" not in str(error):
            raise
        return False
    return True


def norms(embedding: TableBatchedEmbedding, norm_type: float) -> torch.Tensor:
    """Returns each table's gradient norm, either the counted norm or the norm of pending gradients; changes nothing."""
    if embedding.options.grad_norms:
        return torch.tensor(list(embedding.counted_norms(norm_type).values()))
    grads = [embedding.gradient(table.name) for table in embedding.tables]
    return torch.stack([norm_of(grad, norm_type) for grad in grads])


def norm_of(grad: torch.Tensor | None, norm_type: float) -> torch.Tensor:
    return (
        torch.zeros(())
        if grad is None or not len(grad)
        else torch.linalg.vector_norm(grad.double().cpu(), norm_type).float()
    )


def clip(embedding: TableBatchedEmbedding, max_norm: float) -> torch.Tensor:
    """Clips the pending gradients by their total norm, as torch's `clip_grad_norm_`; returns the norm."""
    grads = [grad for table in embedding.tables if (grad := embedding.gradient(table.name)) is not None]
    norm = torch.nn.utils.get_total_norm(grads)
    for grad in grads:
        grad.mul_((max_norm / (norm + 1e-6)).clamp(max=1.0))
    return norm.cpu()


def collect(embedding: TableBatchedEmbedding, name: str, result: Result) -> None:
    view = embedding.view(name)
    whole = view.read(view.ids())
    result[f"{name}.ids"] = whole.ids
    result |= {f"{name}.row {column}": values for column, values in view.row_columns(whole.ids).items()}
    candidates, columns = view.candidates()
    result |= {f"{name}.candidate {column}": values for column, values in ({"ids": candidates} | columns).items()}
    result[f"{name}.sketch"] = view.sketch()
    result |= {f"{name}.clock {clock}": torch.tensor(value) for clock, value in view.clocks().items()}
    if view.config.lifecycle is not None:
        stats = embedding.cache_stats(name)
        result |= {f"{name}.{key}": torch.tensor(stats[key]) for key in ("not_admitted_lookups", "evicted")}
    for part, values in whole.parts.items():
        result[f"{name}.{part}"] = values
