"""Embedding collections for tables larger than device memory, with TorchRec's interfaces and Rec SDK's names."""

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
from .configs import HashEmbeddingBagConfig, check_config_class, table_config

HomeOption: TypeAlias = Home | str | Mapping[str, Home | str]
"""Rule by which ranks own the rows of all tables, or a dict of rules by table name; the default is MODULO."""


def _option_by_table(option: str, value: Any, tables: Sequence[BaseEmbeddingConfig]) -> Mapping[str, Any]:
    """Returns an option by table name; `value` is a dict, or one value for all tables.

    Raises:
        ValueError: the dict names an unknown table.
    """
    names = [table.name for table in tables]
    if not isinstance(value, Mapping):
        return dict.fromkeys(names, value)
    unknown = sorted(set(value) - set(names))
    if unknown:
        raise ValueError(f"{option} names tables {unknown}, only {names} are there")
    return value


def _make_embedding(
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
    """Creates the table-batched embedding of a collection, whose configs must be of the class `kind`.

    `of_tables` contains fields of `TableConfig` that are set for all tables.
    """
    check_config_class(tables, kind, type(collection).__name__, capacity=capacity)
    paddings, homes = _option_by_table("padding_idx", padding_idx, tables), _option_by_table("home", home, tables)
    configs = [
        replace(
            table_config(table, capacity=capacity),
            padding_idx=paddings.get(table.name),
            home=Home.parse(homes.get(table.name, Home.MODULO)),
            **of_tables,
        )
        for table in tables
    ]
    # TorchRec's own configs have no is_incremental, so their tables track changes if another table does.
    if any(config.track_changes for config in configs):
        has_option = [hasattr(table, "is_incremental") for table in tables]
        configs = [c if has else replace(c, track_changes=True) for c, has in zip(configs, has_option, strict=True)]
    return TableBatchedEmbedding.from_options(configs, options)


class EmbCacheEmbeddingCollection(SequenceTables, CachedCollection, EmbeddingCollectionInterface):
    """Collection that returns a row for each id. All rows are in host memory; a cache on the device holds hot rows.

    It replaces TorchRec's `EmbeddingCollection`. Rows and cache are allocated at the first use. In training mode a
    forward needs an optimizer (`apply_optimizer_in_backward`), and its backward pass updates the rows.

    Arguments and errors are the same as for `EmbCacheEmbeddingBagCollection`, except:

    Args:
        tables: configs of the tables. `EmbCacheEmbeddingConfig` defines a hash table, whose ids are any int64;
            TorchRec's `EmbeddingConfig` defines an index table, whose ids are 0 to `num_embeddings - 1`.
        need_indices: whether the outputs contain the looked-up ids, as their weights; there is no `is_weighted`.

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
        embedding = _make_embedding(self, tables, EmbeddingConfig, options, padding_idx, home, **of_tables)
        super().__init__(tables, embedding, embedding_optimizer_cls)
        self._need_indices = need_indices

    @eager
    def forward(self, features: KeyedJaggedTensor) -> dict[str, JaggedTensor]:
        """Looks up every feature.

        Args:
            features: ids, int32 or int64, fastest on the host; features that no table uses are ignored. Keys may have
                different batch sizes; inverse indices are ignored, as in TorchRec.

        Returns:
            A JaggedTensor for each output name, with values float32 `[n_f, D]` and the feature's lengths.
        """
        bags, batch = self._make_batch(features, weighted=False)
        parts = self.embedding.lookup_features(batch)
        return bags.sequences(self.output_names, batch.original, parts, self._need_indices)


class _PooledCollection(PooledTables, CachedCollection, EmbeddingBagCollectionInterface):
    """Collection that returns pooled embeddings as a KeyedTensor."""

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
            features: ids, int32 or int64, fastest on the host, with weights if the collection is weighted; features
                that no table uses are ignored. Keys may have different batch sizes if there are inverse indices.

        Returns:
            A KeyedTensor with values float32 `[B, sum of the features' dims]` and keys in table order. With inverse
            indices, B is the number of samples in them.
        """
        bags, batch = self._make_batch(features, weighted=self._is_weighted)
        dims = self.embedding.feature_dims
        values = self.embedding.lookup_pooled(batch)
        if bags.features.inverse_indices_or_none() is not None:
            values = bags.expand(values, dims, batch.original.feature_keys.tolist())
        return KeyedTensor(keys=self.output_names, length_per_key=dims, values=values)


class EmbCacheEmbeddingBagCollection(_PooledCollection):
    """Collection that pools the rows of each bag. All rows are in host memory; a cache on the device holds hot rows.

    It replaces TorchRec's `EmbeddingBagCollection`. Rows and cache are allocated at the first use. In training mode a
    forward needs an optimizer (`apply_optimizer_in_backward`), and its backward pass updates the rows.

    Args:
        tables: configs of the tables. `EmbCacheEmbeddingBagConfig` defines a hash table, whose ids are any int64;
            TorchRec's `EmbeddingBagConfig` defines an index table, whose ids are 0 to `num_embeddings - 1`.
        world_size: number of ranks whose batches share one cache. This argument, `batch_size` and `multi_hot_sizes`
            only estimate the largest batch, a lower bound of the cache size. `cache` as an int ignores the bound.
        batch_size: samples per batch of one rank; larger batches are allowed. None: a batch counts as one row.
        multi_hot_sizes: ids per sample of each table. None: one for each of its features.
        is_weighted: whether bags are sums weighted by the batch's weights, float `[n]`, which may require grad.
        need_accumulate_offset: accepted for Rec SDK's scripts; has no effect.
        device: device of the cache, such as `"cuda"` or `"npu:0"`. None: torch's default device.
        embedding_optimizer_cls: the only optimizer class that may be applied; None: any.
        cache: size of the device cache. None: derived from free memory; an int: rows of each table; a float in (0, 1]:
            fraction of `num_embeddings`; a string such as `"2GiB"`: device memory for all tables together; a dict: one
            of these values by table name.
        seed: seed of the initial weights, which are a function of seed, table name and id. None: drawn from torch's
            generator.
        bounds_check_mode: handling of an id outside an index table: `"fatal"` raises IndexError, `"warning"` reads row
            0 and warns, `"ignore"` and `"none"` read row 0.
        check_finite: handling of a NaN or infinite gradient: `"off"` ignores it, `"warn"` warns, `"raise"` raises a
            FloatingPointError before any row changes.
        cache_policy: policy that chooses victims of a full cache, see docs/cache.md. Results do not depend on it.
        update: when rows are updated: in the `"backward"` pass, or at the `"step"`, which is `fused_optimizer.step()`.
        host_store: folder whose memory-mapped files hold the rows; None: the rows are in host memory.
        stochastic_rounding: whether updates round 16-bit weights up or down at random, without bias.
        cache_dtype: data type of the weights in the cache: torch.float32, float16 or bfloat16; None: the table's.
        padding_idx: padding id of all tables, or a dict by table name. A padding id has no row and no gradient.
        home: rule by which ranks own the rows of a row-wise sharded table: `"modulo"`, `"hash"` or `"continuous"`; one
            for all tables, or a dict by table name.

    Raises:
        ValueError, TypeError: a table or an option is invalid; the message names it.
        MemoryError: index tables do not fit into host memory.
        ImportError, NotImplementedError: the device's software is missing, or the device is not supported.

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
        embedding = _make_embedding(self, tables, EmbeddingBagConfig, options, padding_idx, home, **of_tables)
        super().__init__(tables, embedding, embedding_optimizer_cls, is_weighted)


class HashEmbeddingBagCollection(_PooledCollection):
    """Collection that pools the rows of each bag, with all rows in device memory.

    An id is any int64. `num_embeddings` is the capacity of a table; an id beyond it raises `CapacityError`. Initial
    weights depend on a seed that is drawn from torch's generator.

    Args:
        tables: configs of the tables: `HashEmbeddingBagConfig`, or another `EmbeddingBagConfig`.
        is_weighted: whether bags are sums weighted by the batch's weights, float `[n]`, which may require grad.
        device: device of the rows, such as `"cuda"` or `"npu:0"`. None: torch's default device.

    The other arguments are the same as for `EmbCacheEmbeddingBagCollection`.

    Raises:
        ValueError, TypeError: a table or an option is invalid; the message names it.
        ImportError, NotImplementedError: the device's software is missing, or the device is not supported.

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
        check_config_class(tables, EmbeddingBagConfig, type(self).__name__, capacity=True)
        cache = {table.name: table.num_embeddings for table in tables}
        options = EmbeddingOptions(cache=cache, device=device, check_finite=check_finite, update=update)
        rounding: dict[str, Any] = {"stochastic_rounding": stochastic_rounding}
        embedding = _make_embedding(
            self, tables, EmbeddingBagConfig, options, padding_idx, home, capacity=True, **rounding
        )
        super().__init__(tables, embedding, None, is_weighted)
