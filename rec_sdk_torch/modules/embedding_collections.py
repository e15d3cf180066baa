"""Embedding collections whose tables are larger than device memory; TorchRec's interfaces, Rec SDK's names."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeAlias

import torch
from torchrec.modules.embedding_configs import BaseEmbeddingConfig, EmbeddingBagConfig, EmbeddingConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollectionInterface, EmbeddingCollectionInterface
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..eager import eager
from ..tbe import BatchHint, BoundsCheckMode, CacheOption, EmbeddingOptions, TableBatchedEmbedding
from ..tbe.config.table import Home
from ..tbe.options import Device, Folder
from .collection import CachedCollection
from .configs import HashEmbeddingBagConfig, can_track, check_kind, table_config

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
    if any(config.track_changes for config in configs):
        pairs = zip(tables, configs, strict=True)
        configs = [config if can_track(table) else replace(config, track_changes=True) for table, config in pairs]
    return TableBatchedEmbedding.from_options(configs, options)


class EmbCacheEmbeddingCollection(CachedCollection, EmbeddingCollectionInterface):
    """Sequence embeddings with a device cache over host tables."""

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
        """Checks the tables; rows and cache are laid out at first use.

        Args:
            tables: `EmbCacheEmbeddingConfig` (hash tables) and plain `EmbeddingConfig` (index tables).
            world_size, batch_size, multi_hot_sizes: size a derived cache (ranks, samples of one rank, ids
                per sample of each table); larger batches are legal.
            need_indices: outputs carry their ids as weights.
            need_accumulate_offset: accepted for Rec SDK scripts; offsets never need accumulating here.
            embedding_optimizer_cls: optimizer the tables are made for; binding when given.
            device, cache, seed, bounds_check_mode, check_finite, cache_policy, update, host_store: as
                `rec_sdk_torch.tbe.EmbeddingOptions` describes them.
            stochastic_rounding, cache_dtype: as `TableConfig` describes them, of all tables.
            padding_idx: an id that means nothing, see `TableConfig`: of all tables, or of those that a dict names.
            home: the rank on which each row lives where the tables are sharded row-wise: "modulo", "hash" or
                "continuous", as `Home` describes them; of all tables, or by table.

        Raises:
            ValueError, TypeError: tables or options that cannot be met; the message names them.
            MemoryError: index tables that the host cannot hold.
        """
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
        parts = self._embedding.lookup_features(batch)
        return bags.sequences(self._names, batch.whole, parts, self._need_indices)

    def need_indices(self) -> bool:
        """Whether outputs carry their ids as weights."""
        return self._need_indices

    def embedding_dim(self) -> int:
        """D of the tables.

        Raises:
            ValueError: the tables have several.
        """
        return self._one_dim()

    def embedding_configs(self) -> list[EmbeddingConfig]:
        """The configs, as given."""
        return [config for config in self._configs if isinstance(config, EmbeddingConfig)]

    def embedding_names_by_table(self) -> list[list[str]]:
        """Output names of each table."""
        return self._names_by_table


class _PooledCollection(CachedCollection, EmbeddingBagCollectionInterface):
    """Pooled embeddings as a KeyedTensor."""

    _handles_name = "embedding_bags"

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
        dims = self._embedding.feature_dims
        pooled = self._embedding.lookup_pooled(batch)
        values = bags.expand(pooled, dims, batch.whole.feature_keys.tolist())
        return KeyedTensor(keys=self._names, length_per_key=dims, values=values)

    def is_weighted(self) -> bool:
        """Whether bags are sums weighted per sample."""
        return self._is_weighted

    def embedding_bag_configs(self) -> list[EmbeddingBagConfig]:
        """The configs, as given."""
        return [config for config in self._configs if isinstance(config, EmbeddingBagConfig)]


class EmbCacheEmbeddingBagCollection(_PooledCollection):
    """Pooled embeddings with a device cache over host tables."""

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
        """Checks the tables; rows and cache are laid out at first use.

        Args and errors are those of `EmbCacheEmbeddingCollection`, with `EmbCacheEmbeddingBagConfig` (hash
        tables) and plain `EmbeddingBagConfig` (index tables), and:

        Args:
            is_weighted: bags are sums weighted by the batch's weights, which may require grad.
        """
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
    """Pooled embeddings of hash-mapped ids, wholly in device memory: `num_embeddings` is the capacity."""

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
        """Checks the tables; the cache, as large as the tables, is laid out at first use.

        The seed of the initial weights is drawn from torch's generator. The keywords are as
        `EmbCacheEmbeddingBagCollection` describes them.

        Raises:
            ValueError, TypeError: tables that cannot be met; the message names them.
        """
        check_kind(tables, EmbeddingBagConfig, type(self).__name__, capacity=True)
        cache = {table.name: table.num_embeddings for table in tables}
        options = EmbeddingOptions(cache=cache, device=device, check_finite=check_finite, update=update)
        rounding: dict[str, Any] = {"stochastic_rounding": stochastic_rounding}
        embedding = _embedding(self, tables, EmbeddingBagConfig, options, padding_idx, home, capacity=True, **rounding)
        super().__init__(tables, embedding, None, is_weighted)
