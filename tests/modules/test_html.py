"""A collection as a notebook shows it: a line for each table, with what the counters say."""

from __future__ import annotations

import re
from typing import Any
from xml.etree import ElementTree

import pytest
import torch
from jagged import jagged
from torchrec.modules.embedding_configs import EmbeddingBagConfig

import rec_sdk_torch as rst


def make(device: torch.device, cache: int = 4) -> Any:
    """A hash table, and an index table of 9 rows."""
    configs = [
        rst.EmbCacheEmbeddingBagConfig(num_embeddings=4000, embedding_dim=4, name="t0", feature_names=["f0"]),
        EmbeddingBagConfig(num_embeddings=9, embedding_dim=4, name="t1", feature_names=["f1"]),
    ]
    collection = rst.EmbCacheEmbeddingBagCollection(configs, device=device, cache=cache, seed=0)
    if device.type != "meta":
        rst.apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.1})
    return collection


def train(collection: Any, *ids: list[int]) -> None:
    for each in ids:
        collection(jagged({"f0": [each], "f1": [each]})).values().sum().backward()


def lines(collection: Any) -> dict[str, list[str]]:
    """The cells of each table. The HTML is well formed."""
    root = ElementTree.fromstring(collection._repr_html_())
    head = [cell.text for cell in root.findall("./thead/tr/th")]
    assert head == ["table", "rows", "of", "columns", "in the cache", "hit rate", "device MiB", "host MiB"]
    found = {}
    for row in root.findall("./tbody/tr"):
        name, *cells = ["".join(cell.itertext()) for cell in row]
        assert len(cells) == len(head) - 1
        found[name] = cells
    return found


def test_it_shows_rows_cache_and_rate(device: torch.device) -> None:
    collection = make(device)
    train(collection, [1, 2], [2, 3], [7, 8])
    shown = lines(collection)
    stats = collection.cache_stats("t0")
    # Ids 1, 2, 3, 7, 8 are known; of 6 rows that batches looked up, one was there.
    assert (stats["unique_rows"], stats["unique_misses"]) == (6, 5)
    assert shown["t0"][:5] == ["5", "4,000", "4", "4", "16.7%"]
    assert list(shown) == ["t0", "t1"]
    for name, cells in shown.items():
        memory = collection.memory_report(name)
        assert cells[5:] == [f"{memory[kind] / 2**20:.2f}" for kind in ("device", "host")]
    assert f"EmbCacheEmbeddingBagCollection on {collection.device}" in collection._repr_html_()
    collection.reset_cache_stats()
    assert lines(collection)["t0"][4] == "-", "no rate without lookups"


@pytest.mark.parametrize("meta", [False, True])
def test_it_lays_out_nothing(device: torch.device, meta: bool) -> None:
    """Options may still change, and a collection on the meta device has no rows at all."""
    collection = make(torch.device("meta") if meta else device)
    assert lines(collection)["t0"][:5] == ["-", "4,000", "4", "-", "-"]
    assert not collection.embedding.layout.built


def test_prefetched_batches_are_trained_as_before(device: torch.device) -> None:
    """It may be shown between any two steps."""
    batches = [jagged({"f0": [[n, n + 1]], "f1": [[n % 9]]}) for n in range(6)]
    plain, shown = make(device, cache=40), make(device, cache=40)
    for batch in batches:
        plain(batch).values().sum().backward()
    for batch in rst.prefetch(batches, shown, depth=2):
        lines(shown)
        shown(batch).values().sum().backward()
        lines(shown)
    left, right = plain.state_dict(), shown.state_dict()
    assert left.keys() == right.keys()
    assert all(torch.equal(left[name], right[name]) for name in left)
    assert re.search(r"<th>t0</th><td>7</td>", shown._repr_html_())
