"""The contenders beside `TableBatchedEmbedding`: our collection, and rivals whose rows are renumbered for them."""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from .contenders import Contender, NotAvailableError
from .cuda_ours import TimedCollection
from .cuda_workload import Need, activation_bytes
from .rivals import Rival, TorchSparse, fbgemm_training
from .workload import BETAS, EPS, LEARNING_RATE, TableSet, Workload


@dataclass(frozen=True)
class Place:
    """Where and with what a contender is made.

    Attributes:
        device: of the cache, or of whole tables.
        seed: of weights.
        grad: gradient of the output, shared, `[N, D]` on the device.
        ratio: what a rival with a cache holds of the rows.
    """

    device: torch.device
    seed: int
    grad: torch.Tensor
    ratio: float


class Resident(Rival):
    """A rival that looks up ranks, which are on the device already."""

    def inputs(self, ranks: torch.Tensor) -> torch.Tensor:
        """Makes what `forward` takes, from int64 `[tables, lookups per table]` on the host."""
        raise NotImplementedError

    def load(self, table: int, ranks: torch.Tensor, weights: torch.Tensor) -> None:
        """Takes over some rows."""
        raise NotImplementedError


class _OneTable(Resident):
    """The rows of all tables in one, so that a step is a few launches."""

    count: int
    rows: int

    def inputs(self, ranks: torch.Tensor) -> torch.Tensor:
        first_row = torch.arange(0, self.count * self.rows, self.rows)
        return (ranks + first_row[:, None]).view(1, -1).to(self._rows_of_all().device)

    def load(self, table: int, ranks: torch.Tensor, weights: torch.Tensor) -> None:
        rows = self._rows_of_all()
        rows[(ranks + table * self.rows).to(rows.device)] = weights.to(rows.device)

    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        rows = self._rows_of_all()
        return rows[(ids + table * self.rows).to(rows.device)]

    def _rows_of_all(self) -> torch.Tensor:
        return self.tables()[0].detach()


class TorchFused(_OneTable, TorchSparse):
    """`nn.Embedding(sparse=True)` with SparseAdam or SGD."""

    name = "torch sparse"

    def __init__(self, workload: Workload, place: Place) -> None:
        self.count, self.rows = workload.tables.count, workload.tables.rows
        whole = replace(workload, tables=TableSet(1, self.count * self.rows))
        super().__init__(whole, place.seed, place.device, place.grad)


class TorchIndexAdd(_OneTable):
    """`index_select`, and SGD as one `index_add_` of all gradients: right only because SGD is linear."""

    name = "index_add"

    def __init__(self, workload: Workload, place: Place) -> None:
        if workload.optimizer != "sgd":
            raise NotAvailableError("index_add_ is an update for SGD only")
        self.workload = workload
        self.count, self.rows = workload.tables.count, workload.tables.rows
        self._weight = torch.zeros((self.count * self.rows, workload.dim), device=place.device)
        self._grad = place.grad
        self._ids = torch.empty(0)

    def tables(self) -> list[torch.Tensor]:
        return [self._weight]

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        self._ids = ids.view(-1)
        return self._weight.index_select(0, self._ids)

    def backward(self, raw: torch.Tensor) -> None:
        self._weight.index_add_(0, self._ids, self._grad, alpha=-LEARNING_RATE)

    def output(self, raw: torch.Tensor) -> torch.Tensor:
        return raw


class FbgemmCuda(Resident):
    """`SplitTableBatchedEmbeddingBagsCodegen`: whole tables on the device, or in managed memory with a cache."""

    def __init__(self, workload: Workload, place: Place, cached: bool) -> None:
        self.name = "fbgemm cached" if cached else "fbgemm"
        if place.device.type != "cuda":
            raise NotAvailableError("needs CUDA")
        training = fbgemm_training()
        self.workload = workload
        self._cached = cached
        locations = training.EmbeddingLocation
        location = locations.MANAGED_CACHING if cached else locations.DEVICE
        spec = (workload.tables.rows, workload.dim, location, training.ComputeDevice.CUDA)
        kinds = training.OptimType
        try:
            self._module = training.SplitTableBatchedEmbeddingBagsCodegen(
                [spec] * workload.tables.count,
                optimizer=kinds.ADAM if workload.optimizer == "adam" else kinds.EXACT_SGD,
                learning_rate=LEARNING_RATE,
                eps=EPS,
                beta1=BETAS[0],
                beta2=BETAS[1],
                cache_load_factor=place.ratio,
                pooling_mode=training.PoolingMode.NONE,
                bounds_check_mode=training.BoundsCheckMode.NONE,
                stochastic_rounding=False,
                device=place.device,
            )
        except (RuntimeError, AttributeError, NotImplementedError) as error:
            first = str(error).splitlines()[0]
            raise NotAvailableError(f"this fbgemm_gpu has no CUDA kernels: {first}") from error
        self._offsets = workload.offsets.to(place.device)
        self._grad = place.grad

    def tables(self) -> list[torch.Tensor]:
        if self._cached:
            self._module.flush()
        return list(self._module.split_embedding_weights())

    def inputs(self, ranks: torch.Tensor) -> torch.Tensor:
        return ranks.to(self._grad.device)

    def load(self, table: int, ranks: torch.Tensor, weights: torch.Tensor) -> None:
        rows = self.tables()[table].detach()
        rows[ranks.to(rows.device)] = weights.to(rows.device)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._module(ids.view(-1), self._offsets)
        return out

    def backward(self, raw: torch.Tensor) -> None:
        raw.backward(self._grad)

    def output(self, raw: torch.Tensor) -> torch.Tensor:
        return raw


CUDA_RIVALS = ("collection", "torch", "index-add", "fbgemm", "fbgemm-cached")


def need_of(name: str, workload: Workload, ours: Need, ratio: float) -> Need:
    """The memory that contender `name` takes beside ours, which takes `ours`."""
    output = activation_bytes(workload)
    weights = workload.tables.count * workload.tables.rows * workload.dim * 4
    return {
        "collection": ours,
        # The sparse gradient, its coalesced form, and the temporaries of the optimizer.
        "torch": Need(workload.table_bytes + 6 * output, 0),
        "index-add": Need(weights + output, 0),
        "fbgemm": Need(workload.table_bytes + 3 * output, 0),
        "fbgemm-cached": Need(int(ratio * weights) + workload.table_bytes - weights + 3 * output, weights),
    }[name]


def make_contender(name: str, workload: Workload, place: Place) -> Contender:
    """The contender `name` of CUDA_RIVALS.

    Raises:
        NotAvailableError: it cannot run here, or not on this workload.
    """
    if name == "collection":
        return TimedCollection(workload, place.ratio, seed=place.seed, device=place.device, grad=place.grad)
    if name == "torch":
        return TorchFused(workload, place)
    if name == "index-add":
        return TorchIndexAdd(workload, place)
    return FbgemmCuda(workload, place, cached=name == "fbgemm-cached")
