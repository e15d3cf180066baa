"""Embedding collections whose tables are larger than device memory; TorchRec's interfaces, Rec SDK's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..runtime.eager import eager
from ..tbe import BatchHint, BoundsCheckMode, CacheOption, Device, EmbeddingOptions, Folder, Home, TableBatchedEmbedding
from .collection import CachedCollection
from .collection_methods import PooledTables, SequenceTables
from .configs import HashEmbeddingBagConfig, check_kind, table_config

HomeOption: TypeAlias = Home | str | Mapping[str, Home | str]
"""The home of the rows of all tables, or of those that are named; others are at home by MODULO."""


def _by_table(option: str, given: Any, tables: Sequence[BaseEmbeddingConfig]) -> Mapping[str, Any]:
    """An option of the tables, by name: the same of all, or as a dict has it.

    Raises:
        ValueError: it names a table that is not there.
    """
    names = [table.name for table in tables]
    if not isinstance(given, Mapping):
        return dict.fromkeys(names, given)
    unknown = sorted(set(given) - set(names))
    if unknown:
        raise ValueError(f"{option} names tables {unknown}, only {names} are there")
    return given


def _embedding(
    collection: torch.nn.Module,
    tables: Sequence[BaseEmbeddingConfig],
    kind: type[BaseEmbeddingConfig],
    options: EmbeddingOptions,
    padding_idx: int | Mapping[str, int] | None,
    home: HomeOption,
    *,
    capacity: bool = False,
    **of_tables: Any,
) -> TableBatchedEmbedding:
    """The tables of a collection, whose configs must be of `kind`; `of_tables`: fields of `TableConfig` of them all."""
    check_kind(tables, kind, type(collection).__name__, capacity=capacity)
    paddings, homes = _by_table("padding_idx", padding_idx, tables), _by_table("home", home, tables)
    configs = [
        replace(
            table_config(table, capacity=capacity),
            padding_idx=paddings.get(table.name),
            home=Home.parse(homes.get(table.name, Home.MODULO)),
            **of_tables,
        )
        for table in tables
    ]
    if any(config.track_changes for config in configs):  # so do TorchRec's own, which have no is_incremental
        own = [hasattr(table, "is_incremental") for table in tables]
        configs = [c if has else replace(c, track_changes=True) for c, has in zip(configs, own, strict=True)]
    return TableBatchedEmbedding.from_options(configs, options)


class EmbCacheEmbeddingCollection(SequenceTables, CachedCollection, EmbeddingCollectionInterface):
    """Looks up a row for each id, with all rows in host memory and a cache of them on the device.

    It takes the place of TorchRec's `EmbeddingCollection`. The rows and the cache are laid out at the first use. In
    training mode a forward needs an optimizer (`apply_optimizer_in_backward`), and its backward pass updates the rows.

    Its arguments are those of `EmbCacheEmbeddingBagCollection`, with its errors, but for these:

    Args:
        tables: `EmbCacheEmbeddingConfig` makes a hash table, whose ids are any int64; TorchRec's `EmbeddingConfig` an
            index table, whose ids are from 0 to `num_embeddings - 1`.
        need_indices: outputs carry their ids as weights; in place of `is_weighted`.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import EmbCacheEmbeddingCollection, EmbCacheEmbeddingConfig
        >>> config = EmbCacheEmbeddingConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingCollection([config], cache=10, device="cpu")
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, -7, 7]), lengths=torch.tensor([2, 1]))
        >>> tables.eval()(batch)["item"].values().shape
        torch.Size([3, 4])
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingConfig],
        world_size: int = 1,
        batch_size: int | None = None,
        multi_hot_sizes: Sequence[int] | None = None,
        need_indices: bool = False,
        need_accumulate_offset: bool = True,
        device: Device = None,
        embedding_optimizer_cls: type | None = None,
        *,
        cache: CacheOption = None,
        seed: int | None = None,
        bounds_check_mode: BoundsCheckMode | str = "warning",
        check_finite: str = "off",
        cache_policy: str = "lrfu",
        update: str = "backward",
        host_store: Folder = None,
        stochastic_rounding: bool = False,
        cache_dtype: torch.dtype | None = None,
        padding_idx: int | Mapping[str, int] | None = None,
        home: HomeOption = "modulo",
    ) -> None:
        options = EmbeddingOptions(
            cache=cache,
            batch_hint=BatchHint(batch_size, multi_hot_sizes, world_size),
            device=device,
            seed=seed,
            bounds_check_mode=bounds_check_mode,
            check_finite=check_finite,
            cache_policy=cache_policy,
            update=update,
            host_store=host_store,
        )
        of_tables: dict[str, Any] = {"stochastic_rounding": stochastic_rounding, "cache_dtype": cache_dtype}
        embedding = _embedding(self, tables, EmbeddingConfig, options, padding_idx, home, **of_tables)
        super().__init__(tables, embedding, embedding_optimizer_cls)
        self._need_indices = need_indices

    @eager
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up every feature.

        Args:
            features: ids int32 or int64, on the host for speed; features no table has are ignored. Keys may have batch
                sizes of their own; inverse indices are ignored, as in TorchRec.

        Returns:
            by embedding name, values float32 `[n_f, D]` with the feature's lengths.
        """
        bags, batch = self._batch(features, weighted=False)
        parts = self.embedding.lookup_features(batch)
        return bags.sequences(self.output_names, batch.original, parts, self._need_indices)


class _PooledCollection(PooledTables, CachedCollection, EmbeddingBagCollectionInterface):
    """Pooled embeddings as a KeyedTensor."""

    handles_name = "embedding_bags"

    def __init__(
        self,
        tables: Sequence[BaseEmbeddingConfig],
        embedding: TableBatchedEmbedding,
        embedding_optimizer_cls: type | None,
        is_weighted: bool,
    ) -> None:
        super().__init__(tables, embedding, embedding_optimizer_cls)
        self._is_weighted = is_weighted

    @eager
    def forward(self, features: KeyedJaggedTensor) -> KeyedTensor:
        """Looks up and pools every feature.

        Args:
            features: ids int32 or int64, on the host for speed; weights when the collection is weighted;
                features no table has are ignored. Keys may have batch sizes of their own, with inverse indices.

        Returns:
            values float32 `[B, sum of the features' dims]`, keys in table order. With inverse indices, B is theirs.
        """
        bags, batch = self._batch(features, weighted=self._is_weighted)
        dims = self.embedding.feature_dims
        values = self.embedding.lookup_pooled(batch)
        if bags.features.inverse_indices_or_none() is not None:
            values = bags.expand(values, dims, batch.original.feature_keys.tolist())
        return KeyedTensor(keys=self.output_names, length_per_key=dims, values=values)


class EmbCacheEmbeddingBagCollection(_PooledCollection):
    """Looks up bags of ids and pools their rows, with all rows in host memory and a cache of them on the device.

    It takes the place of TorchRec's `EmbeddingBagCollection`. The rows and the cache are laid out at the first use. In
    training mode a forward needs an optimizer (`apply_optimizer_in_backward`), and its backward pass updates the rows.

    Args:
        tables: `EmbCacheEmbeddingBagConfig` makes a hash table, whose ids are any int64; TorchRec's
            `EmbeddingBagConfig` an index table, whose ids are from 0 to `num_embeddings - 1`.
        world_size: ranks whose batches meet in one cache. This and the next two only size a derived cache.
        batch_size: samples of a batch of one rank; larger batches are legal. None: a batch counts as one row.
        multi_hot_sizes: ids per sample of each table. None: one for each of its features.
        is_weighted: bags are sums weighted by the batch's weights, float `[n]`, which may require grad.
        need_accumulate_offset: has no effect; scripts of Rec SDK give it.
        device: where the cache is, such as `"cuda"` or `"npu:0"`. None: torch's default device.
        embedding_optimizer_cls: the only optimizer class that may be applied; None: any.
        cache: size of the device cache. None: derived from the memory that is free; an int: rows of each table; a
            float in (0, 1]: that share of `num_embeddings`; a string such as `"2GiB"`: device memory of all tables;
            a dict: one of these by table name.
        seed: of the initial weights, which are a function of seed, table name and id. None: drawn from torch's
            generator.
        bounds_check_mode: what an id outside an index table does: `"fatal"` raises IndexError, `"warning"` reads row 0
            and warns, `"ignore"` and `"none"` read row 0.
        check_finite: what a NaN or infinite gradient does: `"off"` nothing, `"warn"` a warning, `"raise"` a
            FloatingPointError before any row changes.
        cache_policy: which rows leave a full cache: a policy of docs/cache.md. Results are the same.
        update: when rows are updated: in the `"backward"` pass, or by `"step"`, `fused_optimizer.step()`.
        host_store: a folder for the rows, as files that are mapped into memory; None: they are in host memory.
        stochastic_rounding: updates round 16-bit weights up or down at random, right on average.
        cache_dtype: data type of the weights in the cache: torch.float32, float16 or bfloat16; None: the table's.
        padding_idx: an id that means nothing, of all tables, or by table name: it has no row and no gradient.
        home: which rank has a row of a row-wise sharded table: `"modulo"`, `"hash"` or `"continuous"`; of all tables,
            or by table name.

    Raises:
        ValueError, TypeError: tables or options that cannot be met; the message names them.
        MemoryError: index tables that the host cannot hold.
        ImportError, NotImplementedError: the device has no software here, or no tables can be on it.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
        >>> from rec_sdk_torch import apply_optimizer_in_backward
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=0.1, device="cpu")
        >>> apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, -7, 7]), lengths=torch.tensor([2, 1]))
        >>> tables(batch).values().sum().backward()  # updates two rows
        >>> tables.table_ids("t").tolist(), tables.cache_sizes
        ([7, -7], {'t': 10})
    """

    def __init__(
        self,
        tables: Sequence[EmbeddingBagConfig],
        world_size: int = 1,
        batch_size: int | None = None,
        multi_hot_sizes: Sequence[int] | None = None,
        is_weighted: bool = False,
        need_accumulate_offset: bool = True,
        device: Device = None,
        embedding_optimizer_cls: type | None = None,
        *,
        cache: CacheOption = None,
        seed: int | None = None,
        bounds_check_mode: BoundsCheckMode | str = "warning",
        check_finite: str = "off",
        cache_policy: str = "lrfu",
        update: str = "backward",
        host_store: Folder = None,
        stochastic_rounding: bool = False,
        cache_dtype: torch.dtype | None = None,
        padding_idx: int | Mapping[str, int] | None = None,
        home: HomeOption = "modulo",
    ) -> None:
        options = EmbeddingOptions(
            cache=cache,
            batch_hint=BatchHint(batch_size, multi_hot_sizes, world_size),
            device=device,
            seed=seed,
            bounds_check_mode=bounds_check_mode,
            check_finite=check_finite,
            cache_policy=cache_policy,
            update=update,
            host_store=host_store,
        )
        of_tables: dict[str, Any] = {"stochastic_rounding": stochastic_rounding, "cache_dtype": cache_dtype}
        embedding = _embedding(self, tables, EmbeddingBagConfig, options, padding_idx, home, **of_tables)
        super().__init__(tables, embedding, embedding_optimizer_cls, is_weighted)


class HashEmbeddingBagCollection(_PooledCollection):
    """Looks up bags of ids and pools their rows, which are wholly in device memory.

    An id is any int64. `num_embeddings` is the capacity of a table: one id more is a `CapacityError`. Initial weights
    depend on a seed that is drawn from torch's generator.

    Args:
        tables: `HashEmbeddingBagConfig`, or another `EmbeddingBagConfig`.
        is_weighted: bags are sums weighted by the batch's weights, float `[n]`, which may require grad.
        device: where the rows are, such as `"cuda"` or `"npu:0"`. None: torch's default device.

    Its other arguments are those of `EmbCacheEmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: tables or options that cannot be met; the message names them.
        ImportError, NotImplementedError: the device has no software here, or no tables can be on it.

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import HashEmbeddingBagCollection, HashEmbeddingBagConfig
        >>> config = HashEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = HashEmbeddingBagCollection([config], device="cpu")
        >>> batch = KeyedJaggedTensor(["item"], torch.tensor([7, -7, 7]), lengths=torch.tensor([2, 1]))
        >>> tables.eval()(batch).values().shape
        torch.Size([2, 4])
    """

    def __init__(
        self,
        tables: Sequence[HashEmbeddingBagConfig],
        is_weighted: bool = False,
        device: Device = None,
        *,
        check_finite: str = "off",
        update: str = "backward",
        stochastic_rounding: bool = False,
        padding_idx: int | Mapping[str, int] | None = None,
        home: HomeOption = "modulo",
    ) -> None:
        check_kind(tables, EmbeddingBagConfig, type(self).__name__, capacity=True)
        cache = {table.name: table.num_embeddings for table in tables}
        options = EmbeddingOptions(cache=cache, device=device, check_finite=check_finite, update=update)
        rounding: dict[str, Any] = {"stochastic_rounding": stochastic_rounding}
        embedding = _embedding(self, tables, EmbeddingBagConfig, options, padding_idx, home, capacity=True, **rounding)
        super().__init__(tables, embedding, None, is_weighted)
