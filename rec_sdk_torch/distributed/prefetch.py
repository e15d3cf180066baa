"""Prefetching: while a batch is trained, the next batches are planned and their rows are copied to the device cache."""

from __future__ import annotations

import dataclasses
import operator
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias, TypeVar

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..modules.collection import CachedCollection
from ..tbe import MAX_DEPTH, Prefetched
from .sharded import ShardedCollection
from .sharded_batch import ShardedBatch

MAX_UNTRAINED = 3
"""Maximum number of yielded batches that may be untrained, as in TorchRec's pipelines; older ones count as skipped."""

T = TypeVar("T")
U = TypeVar("U")
Collection: TypeAlias = CachedCollection | ShardedCollection
Features: TypeAlias = KeyedJaggedTensor | Mapping[str, KeyedJaggedTensor]


def prefetch(
    batches: Iterable[T],
    module: torch.nn.Module,
    depth: int = 2,
    features: Callable[[T], Features] | None = None,
) -> Iterator[T]:
    """Yields the batches in order; while one is trained, the next `depth` are planned and their missing rows fetched.

    Every collection in `module` plans and fetches in a thread of its own. Outputs, weights and optimizer states are the
    same as without prefetching. Skipping a batch or abandoning the iterator has no effect on the tables. With sharded
    collections, the iterators of all ranks end when the first rank has no more batches.

    Args:
        batches: iterable of batches, read up to `depth` batches ahead in the caller's thread. If it raises an error,
            the batches read before are yielded first.
        module: a collection, or a model that contains some.
        depth: number of batches to plan ahead, 0 to 12; 0 prefetches nothing. If the device cache cannot hold the rows
            of depth + 1 batches, fewer are planned ahead.
        features: function that returns, for a batch, the KeyedJaggedTensor that the collections will look up, or a
            dict with one for each collection by its name in `module`. By default, the batch itself if it is a
            KeyedJaggedTensor, else its only field that is one.

    Raises:
        ValueError: `depth` is out of range; `module` has no collection; `features` names a collection that does not
            exist.
        TypeError: a batch has no KeyedJaggedTensor, or several, and `features` does not select one (raised at that
            batch).

    Example:
        >>> import torch
        >>> from torchrec import KeyedJaggedTensor
        >>> from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig
        >>> from rec_sdk_torch import apply_optimizer_in_backward, prefetch
        >>> config = EmbCacheEmbeddingBagConfig(name="t", num_embeddings=100, embedding_dim=4, feature_names=["item"])
        >>> tables = EmbCacheEmbeddingBagCollection([config], cache=10, device="cpu")
        >>> apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 0.1})
        >>> batches = [KeyedJaggedTensor(["item"], torch.tensor([n]), lengths=torch.tensor([1])) for n in range(3)]
        >>> for batch in prefetch(batches, tables, depth=2):
        ...     tables(batch).values().sum().backward()
        >>> tables.table_ids("t").tolist()
        [0, 1, 2]
    """
    depth = check_depth(depth)
    collections = find_collections(module)
    if features is not None and not callable(features):
        raise TypeError(f"features is {features!r}, expected a function of a batch, or None")
    of_batch = features or find_features

    def start(batch: T) -> tuple[T, PrefetchedBatch | None]:
        return batch, PrefetchedBatch(collections, of_batch(batch), depth) if depth else None

    return iterate_ahead(batches, depth, start, collections)


def check_depth(depth: int) -> int:
    """Returns `depth` as an int.

    Raises:
        ValueError: `depth` is not from 0 to 12.
        TypeError: `depth` is not an integer.
    """
    try:
        number = operator.index(depth)
    except TypeError:
        raise TypeError(f"depth is {depth!r}, expected an int from 0 to {MAX_DEPTH}") from None
    if not 0 <= number <= MAX_DEPTH:
        raise ValueError(f"depth is {number}, allowed are 0 to {MAX_DEPTH}")
    return number


def find_collections(module: torch.nn.Module) -> dict[str, Collection]:
    """Returns the collections of a module, by name.

    Raises:
        TypeError: `module` is not a torch.nn.Module.
        ValueError: the module has no collection.
    """
    if not isinstance(module, torch.nn.Module):
        raise TypeError(f"the model is {module!r}, expected a torch.nn.Module")
    found = {name: part for name, part in module.named_modules() if isinstance(part, Collection)}
    if not found:
        raise ValueError(
            f"{type(module).__name__} has no EmbCacheEmbeddingCollection, EmbCacheEmbeddingBagCollection or "
            "HashEmbeddingBagCollection: nothing can be prefetched"
        )
    return found


def find_features(batch: object) -> KeyedJaggedTensor:
    """Returns the batch itself if it is a KeyedJaggedTensor, else its only field that is one.

    Raises:
        TypeError: no field is a KeyedJaggedTensor, or several are.
    """
    if isinstance(batch, KeyedJaggedTensor):
        return batch
    found = {name: value for name, value in _batch_fields(batch).items() if isinstance(value, KeyedJaggedTensor)}
    if len(found) != 1:
        which = f"several KeyedJaggedTensors ({sorted(found)})" if found else "no KeyedJaggedTensor"
        raise TypeError(f"a batch of type {type(batch).__name__} has {which}: say which to prefetch by features=")
    return next(iter(found.values()))


def _batch_fields(batch: object) -> dict[str, object]:
    if isinstance(batch, Mapping):
        return {str(name): value for name, value in batch.items()}
    if dataclasses.is_dataclass(batch):
        return {field.name: getattr(batch, field.name) for field in dataclasses.fields(batch)}
    if isinstance(batch, (tuple, list)):
        return {str(index): value for index, value in enumerate(batch)}
    return dict(getattr(batch, "__dict__", {}))


class PrefetchedBatch:
    """A batch that is prefetched by all collections that look it up."""

    def __init__(self, collections: Mapping[str, Collection], features: Features, depth: int) -> None:
        self._entries: list[tuple[Any, Prefetched | ShardedBatch]] = []
        self._features = _features_by_collection(collections, features)
        try:
            for name, tensor in self._features.items():
                self._entries.append((collections[name], collections[name].prefetch(tensor, depth=depth)))
        except BaseException:
            self.discard()
            raise

    @classmethod
    def end_of_data(cls, collections: Mapping[str, Collection], before: PrefetchedBatch | None) -> PrefetchedBatch:
        """Returns a placeholder that reports the end of this rank's data to the other ranks of sharded collections.

        Args:
            collections: all collections.
            before: the previous batch; only the collections that looked it up are used. None uses all collections.
        """
        started = cls(collections, {}, 0)
        named = {name: collections[name] for name in before._features} if before is not None else collections
        started._entries = [(each, each.prefetch_end_of_data()) for each in _sharded_collections(named)]
        return started

    def is_past_end(self) -> bool:
        """Returns whether some rank's data ended before this batch; blocks for all ranks if collections are sharded."""
        batches = [prefetched for _, prefetched in self._entries if isinstance(prefetched, ShardedBatch)]
        # `any` over a generator would stop early, but every rank must take part in the exchange of every batch.
        past_end = [each.is_past_end() for each in batches]
        return any(past_end)

    def add_copy(self, features: Features) -> None:
        """Registers `features` as another object with the same batch, such as its copy on a device."""
        copies = _features_by_collection(dict(self._features), features)
        for (_, prefetched), name in zip(self._entries, self._features, strict=True):
            if name in copies:
                prefetched.add_copy(copies[name], copies[name].values())

    def discard(self) -> None:
        """Discards the plans of the batch if its forward has not run."""
        for collection, prefetched in self._entries:
            collection.forget(prefetched)


def _features_by_collection(collections: Mapping[str, Any], features: Features) -> dict[str, KeyedJaggedTensor]:
    if isinstance(features, KeyedJaggedTensor):
        return dict.fromkeys(collections, features)
    if not isinstance(features, Mapping):
        raise TypeError(
            f"features= gave a {type(features).__name__}, expected a KeyedJaggedTensor, or a dict of them by collection"
        )
    unknown = sorted(set(features) - set(collections))
    if unknown:
        raise ValueError(f"features= names collections {unknown} that are not there, only {sorted(collections)}")
    return {name: features[name] for name in collections if name in features}  # this order is the same on all ranks


def _sharded_collections(collections: Mapping[str, Collection]) -> list[ShardedCollection]:
    return [each for each in collections.values() if isinstance(each, ShardedCollection)]


def _limited_to_all_ranks(batches: Iterable[T], collections: Mapping[str, Collection]) -> Iterator[T]:
    """Yields batches as long as every rank has one; before each batch, ranks exchange whether they have one."""
    sharded = _sharded_collections(collections)
    if not sharded:
        yield from batches
        return
    source, none, exchange = iter(batches), object(), sharded[0].exchange
    while True:
        batch: Any = next(source, none)
        if exchange.finish_check(exchange.start_check(batch is none, "reads a batch")):
            return
        yield batch


def iterate_ahead(
    batches: Iterable[T],
    depth: int,
    start: Callable[[T], tuple[U, PrefetchedBatch | None]],
    collections: Mapping[str, Collection],
    drain: bool = True,
) -> Iterator[U]:
    """Yields the result of `start` for each batch; `start` is called up to `depth` batches ahead.

    With sharded collections, all ranks end after the same number of batches.

    Args:
        batches: iterable of batches. If it or `start` raises an error, the results of earlier batches are yielded
            first.
        depth: number of batches to start ahead, 0 or more.
        start: function that returns, for a batch, the value to yield, and the prefetched batch or None.
        collections: the collections that look the batches up.
        drain: whether to yield the batches that are still queued when `batches` ends. If False, they are discarded.
    """
    for each in _sharded_collections(collections)[:1]:
        settings = {"batches ahead": str(depth), "execute_all_batches": str(drain)}
        each.exchange.check_same("begins to read batches", {"": settings})
    source = iter(batches if depth else _limited_to_all_ranks(batches, collections))
    ahead: deque[tuple[Any, PrefetchedBatch | None]] = deque()
    yielded: deque[PrefetchedBatch] = deque()
    last: PrefetchedBatch | None = None
    error: Exception | None = None
    more = True
    try:
        while True:
            while more and len(ahead) <= depth:
                if ahead and _is_past_end(ahead[-1]):
                    more = False
                    break
                try:
                    batch = next(source)
                except StopIteration:
                    more = False
                    if depth and _sharded_collections(collections):
                        ahead.append((None, PrefetchedBatch.end_of_data(collections, last)))
                    break
                except Exception as raised:
                    error, more = raised, False
                    break
                try:
                    ahead.append(start(batch))
                    last = ahead[-1][1]
                except Exception as raised:
                    error, more = raised, False
            if not drain and ahead and _is_past_end(ahead[-1]):
                more = False
            if not ahead or not (more or drain):
                break
            item, started = ahead.popleft()
            if started is not None:
                yielded.append(started)
                if started.is_past_end():
                    break
            yield item
            while len(yielded) > MAX_UNTRAINED:
                yielded.popleft().discard()
    finally:
        for started in (*(started for _, started in reversed(ahead)), *reversed(yielded)):
            if started is not None:
                started.discard()
    if error is not None:
        raise error


def _is_past_end(item: tuple[Any, PrefetchedBatch | None]) -> bool:
    return item[1] is not None and item[1].is_past_end()
