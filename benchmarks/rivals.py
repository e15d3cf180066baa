"""Other libraries' contenders in the step benchmarks of the CPU and of the GPU, with our initial weights."""

from __future__ import annotations

import warnings
from abc import abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from .contenders import HOST, Contender, JaggedContender, optimizer_of
from .phases import TimedCollection
from .pool import MemoryNeed, activation_bytes
from .tables import NotAvailableError, configs, make_collection
from .workload import BETAS, EPS, LEARNING_RATE, TableSet, Workload

DENSE_ROWS = 1_000_000
"""The largest number of rows for TorchRec, whose gradient is as large as the tables."""


class Rival(Contender):
    """A contender of another library; it holds whole tables, which start from our weights."""

    @abstractmethod
    def tables(self) -> list[torch.Tensor]:
        """Returns the weights of each table, `[rows, D]`."""

    def weights(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        weights = self.tables()[table].detach()
        return weights[ids.to(weights.device)]


class TorchSparse(Rival):
    """`torch.nn.Embedding` or `EmbeddingBag` with sparse gradients, and torch.optim."""

    name = "torch"

    def __init__(
        self, workload: Workload, seed: int, device: torch.device = HOST, grad: torch.Tensor | None = None
    ) -> None:
        self.workload = workload
        self._grads = workload.by_feature(workload.gradient(seed).to(device) if grad is None else grad)
        self._starts = torch.arange(0, workload.per_table, workload.bag, device=device)
        self._modules: list[Any] = []
        for rows, dim in zip(workload.tables.sizes, workload.dims, strict=True):
            weight = torch.zeros((rows, dim), device=device)
            if workload.pooled:
                self._modules.append(nn.EmbeddingBag(rows, dim, mode="sum", sparse=True, _weight=weight))
            else:
                self._modules.append(nn.Embedding(rows, dim, sparse=True, _weight=weight))
        self._optimizer = self._make_optimizer(self.tables())

    def _make_optimizer(self, parameters: list[torch.Tensor]) -> torch.optim.Optimizer:
        if self.workload.optimizer == "rowwise_adagrad":
            raise NotAvailableError("torch.optim has no row-wise Adagrad")
        optimizer, options = optimizer_of(self.workload.optimizer)
        return optimizer(parameters, **options)

    def tables(self) -> list[torch.Tensor]:
        return [module.weight for module in self._modules]

    def forward(self, ids: torch.Tensor) -> list[torch.Tensor]:
        pairs = zip(self._modules, ids, strict=True)
        if self.workload.pooled:
            return [module(part, self._starts) for module, part in pairs]
        return [module(part) for module, part in pairs]

    def backward(self, raw: list[torch.Tensor]) -> None:
        torch.autograd.backward(raw, self._grads)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)

    def output(self, raw: list[torch.Tensor]) -> torch.Tensor:
        return torch.cat(raw, dim=1 if self.workload.pooled else 0)


def fbgemm_training() -> Any:
    """Imports FBGEMM's training module.

    Raises:
        NotAvailableError: FBGEMM cannot be imported.
    """
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            from fbgemm_gpu import split_table_batched_embeddings_ops_training as training
    except (ImportError, OSError) as error:
        raise NotAvailableError(f"fbgemm_gpu cannot be imported: {error}") from error
    return training


OPTIM_TYPES = {
    "sgd": "EXACT_SGD",
    "adagrad": "EXACT_ADAGRAD",
    "rowwise_adagrad": "EXACT_ROWWISE_ADAGRAD",
    "adam": "ADAM",
}


def fbgemm_module(sizes: Sequence[tuple[int, int]], optimizer: str, place: str = "HOST", **options: Any) -> Any:
    """Builds `SplitTableBatchedEmbeddingBagsCodegen` with tables of (rows, D), on the CPU unless `place` is on a
    device.
    """
    training = fbgemm_training()
    location = getattr(training.EmbeddingLocation, place)
    compute = training.ComputeDevice.CPU if place == "HOST" else training.ComputeDevice.CUDA
    mode = getattr(training.PoolingMode, options.pop("pooling_mode", "SUM"))
    return training.SplitTableBatchedEmbeddingBagsCodegen(
        [(*size, location, compute) for size in sizes],
        optimizer=getattr(training.OptimType, OPTIM_TYPES[optimizer]),
        pooling_mode=mode,
        bounds_check_mode=training.BoundsCheckMode.NONE,
        stochastic_rounding=False,
        **{"learning_rate": LEARNING_RATE, "eps": EPS, **options},
    )


class Fbgemm(Rival):
    """`SplitTableBatchedEmbeddingBagsCodegen` on the CPU.

    A sequence uses either summed bags of one id (`bags_of_one`, the faster form: PoolingMode.NONE has a several times
    slower backward) or PoolingMode.NONE.
    """

    def __init__(self, workload: Workload, seed: int, bags_of_one: bool = True) -> None:
        self.name = "fbgemm" if bags_of_one else "fbgemm-none"
        self.workload = workload
        self._single = bags_of_one and not workload.pooled
        if not bags_of_one and workload.pooled:
            raise NotAvailableError("PoolingMode.NONE does not pool")
        if workload.optimizer == "adam":
            raise NotAvailableError("FBGEMM has no Adam on the CPU")
        sizes = list(zip(workload.tables.sizes, workload.dims, strict=True))
        mode = "SUM" if bags_of_one else "NONE"
        self._module = fbgemm_module(sizes, workload.optimizer, pooling_mode=mode)
        lookups = workload.tables.count * workload.per_table
        self._offsets = torch.arange(lookups + 1) if self._single else workload.offsets
        grad = workload.gradient(seed)
        self._grad = self._in_bags(grad) if self._single else grad

    def _in_bags(self, rows: torch.Tensor) -> torch.Tensor:
        """Converts `[N, D]` feature after feature to `[N / tables, tables * D]`."""
        shape = (self.workload.tables.count, self.workload.per_table, self.workload.dim)
        return rows.view(shape).transpose(0, 1).reshape(self.workload.per_table, -1)

    def tables(self) -> list[torch.Tensor]:
        return list(self._module.split_embedding_weights())

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self._module(ids.view(-1), self._offsets)
        return out

    def backward(self, raw: torch.Tensor) -> None:
        raw.backward(self._grad)

    def output(self, raw: torch.Tensor) -> torch.Tensor:
        if not self._single:
            return raw
        shape = (self.workload.per_table, self.workload.tables.count, self.workload.dim)
        return raw.view(shape).transpose(0, 1).reshape(-1, self.workload.dim)


class TorchRec(JaggedContender, Rival):
    """`EmbeddingCollection` or `EmbeddingBagCollection`, unsharded, with `apply_optimizer_in_backward`."""

    name = "torchrec"

    def __init__(self, workload: Workload, seed: int) -> None:
        if workload.optimizer not in ("sgd", "adagrad"):
            raise NotAvailableError("unsharded TorchRec has dense gradients, which SparseAdam refuses")
        rows = sum(workload.tables.sizes)
        if rows > DENSE_ROWS:
            raise NotAvailableError(f"unsharded TorchRec makes a dense gradient of all {rows:,} rows at every step")
        self.workload = workload
        grad = workload.gradient(seed)
        self._grads = [grad] if workload.pooled else workload.by_feature(grad)
        tables = configs(list(zip(workload.tables.sizes, workload.dims, strict=True)))
        self.module = make_collection(tables, *optimizer_of(workload.optimizer), workload.pooled, prefix="")

    def tables(self) -> list[torch.Tensor]:
        return list(self.module.parameters())


RIVALS = ("torch", "fbgemm", "fbgemm-none", "torchrec")


def make_rival(name: str, workload: Workload, seed: int) -> Rival:
    """Builds the rival `name`.

    Raises:
        NotAvailableError: the contender cannot run on this machine or on this workload.
    """
    if name == "torch":
        return TorchSparse(workload, seed)
    if name == "torchrec":
        return TorchRec(workload, seed)
    return Fbgemm(workload, seed, bags_of_one=name == "fbgemm")


# ---- rivals on a pool's batches: they look up ranks instead of ids


@dataclass(frozen=True)
class Place:
    """The device and settings of a contender.

    Attributes:
        device: device of the cache, or of whole tables.
        seed: seed of the weights.
        grad: shared gradient of the output, `[N, D]` on the device.
        ratio: share of the rows that a rival's cache holds.
    """

    device: torch.device
    seed: int
    grad: torch.Tensor
    ratio: float


class Resident(Rival):
    """A rival with whole tables; its inputs are the ids' ranks, which are already on the device."""

    def inputs(self, ranks: torch.Tensor) -> torch.Tensor:
        """Builds the argument of `forward` from int64 `[tables, lookups per table]` on the host."""
        raise NotImplementedError

    def load(self, table: int, ranks: torch.Tensor, weights: torch.Tensor) -> None:
        """Copies the weights of some rows into a table."""
        raise NotImplementedError


class _OneTable(Resident):
    """A rival with the rows of all tables in one table, so that a step needs few launches."""

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
    """`index_select`, and SGD as one `index_add_` of all gradients, which is correct only because SGD is linear."""

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


class FbgemmCuda(Resident, Fbgemm):
    """`SplitTableBatchedEmbeddingBagsCodegen`: whole tables on the device, or in managed memory with a cache."""

    def __init__(self, workload: Workload, place: Place, cached: bool) -> None:
        self.name = "fbgemm cached" if cached else "fbgemm"
        if place.device.type != "cuda":
            raise NotAvailableError("needs CUDA")
        fbgemm_training()
        self.workload = workload
        self._cached, self._single = cached, False
        sizes = [(workload.tables.rows, workload.dim)] * workload.tables.count
        options = {"beta1": BETAS[0], "beta2": BETAS[1], "cache_load_factor": place.ratio, "device": place.device}
        location = "MANAGED_CACHING" if cached else "DEVICE"
        try:
            self._module = fbgemm_module(sizes, workload.optimizer, location, pooling_mode="NONE", **options)
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


POOL_RIVALS = ("collection", "torch", "index-add", "fbgemm", "fbgemm-cached")


def need_of(name: str, workload: Workload, ours: MemoryNeed, ratio: float) -> MemoryNeed:
    """Returns the memory that contender `name` needs in addition to our tables, which need `ours`."""
    output = activation_bytes(workload)
    weights = workload.tables.count * workload.tables.rows * workload.dim * 4
    return {
        "collection": ours,
        # Six outputs' worth of memory: the sparse gradient, its coalesced form, and the optimizer's temporaries.
        "torch": MemoryNeed(workload.table_bytes + 6 * output, 0),
        "index-add": MemoryNeed(weights + output, 0),
        "fbgemm": MemoryNeed(workload.table_bytes + 3 * output, 0),
        "fbgemm-cached": MemoryNeed(int(ratio * weights) + workload.table_bytes - weights + 3 * output, weights),
    }[name]


def make_contender(name: str, workload: Workload, place: Place) -> Contender:
    """Builds the contender `name` of POOL_RIVALS.

    Raises:
        NotAvailableError: the contender cannot run on this machine or on this workload.
    """
    if name == "collection":
        return TimedCollection(workload, place.ratio, seed=place.seed, device=place.device, grad=place.grad)
    if name == "torch":
        return TorchFused(workload, place)
    if name == "index-add":
        return TorchIndexAdd(workload, place)
    return FbgemmCuda(workload, place, cached=name == "fbgemm-cached")
