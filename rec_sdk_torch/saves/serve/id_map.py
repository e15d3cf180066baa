"""Maps ids of live tables to rows of exported ones."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ...modules.bags import Bags


def _select_bags(part: JaggedTensor, bags: torch.Tensor) -> JaggedTensor:
    """Returns the bags `[n]` of a feature, each as often as it is named.

    Raises:
        IndexError: there is no such bag, where it is on the host.
    """
    lengths = part.lengths().index_select(0, bags)
    begins = part.offsets().index_select(0, bags) - (lengths.cumsum(0) - lengths)
    positions = torch.repeat_interleave(begins, lengths) + torch.arange(int(lengths.sum()), device=begins.device)
    weights = part.weights_or_none()
    return JaggedTensor(
        part.values().index_select(0, positions),
        None if weights is None else weights.index_select(0, positions),
        lengths,
    )


class IdMap(torch.nn.Module):
    """Ids of tables -> rows of exported ones. An id that a table does not know is its last row, which is zeros.

    Attributes:
        tables: place of the table that each feature reads, by its name.
    """

    def __init__(self, ids: list[torch.Tensor | None], tables: dict[str, int], *, pooled: bool = True) -> None:
        """
        Args:
            ids: of each table int64 `[n]`, of row 0 and so on; None where ids are rows.
            tables: place of the table that each feature reads, by its name.
            pooled: a batch with `inverse_indices` becomes one in which each sample has its bags itself.
        """
        super().__init__()
        self.tables = tables
        self._pooled = pooled
        for table, known in enumerate(ids):
            ordered, rows = (None, None) if known is None else torch.sort(known)
            self.register_buffer(f"ids{table}", ordered)
            self.register_buffer(f"rows{table}", rows)

    def rows_of(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Rows of `ids`, int64 of their shape."""
        known, rows = getattr(self, f"ids{table}"), getattr(self, f"rows{table}")
        ids = ids.long()
        if known is None:
            return ids
        if len(known) == 0:
            return torch.zeros_like(ids)
        positions = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        return torch.where(known[positions] == ids, rows[positions], len(known))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with rows for ids, and the features that tables read.

        Keys of sequences keep batch sizes of their own. Keys of bags have that of `inverse_indices`.

        Raises:
            ValueError: lengths or `inverse_indices` that do not fit the keys; pooled keys with several batch sizes
                and no `inverse_indices`.
        """
        batch_keys: list[str] = features.keys()
        bags = Bags.of(features, len(batch_keys))
        keys = [key for key in batch_keys if key in self.tables]
        parts = [features[key] for key in keys]
        bag_indices = None
        if self._pooled:
            bags.check_pooled()
            bag_indices = bags.bags_of_samples(keys, features.lengths().device)
        if bag_indices is not None:
            parts = [_select_bags(part, chosen) for part, chosen in zip(parts, bag_indices, strict=True)]
        weights = [part.weights_or_none() for part in parts]
        sizes = [[len(part.lengths())] for part in parts]
        return KeyedJaggedTensor(
            keys,
            torch.cat([self.rows_of(self.tables[key], part.values()) for key, part in zip(keys, parts, strict=True)]),
            None if any(each is None for each in weights) else torch.cat([w for w in weights if w is not None]),
            torch.cat([part.lengths() for part in parts]),
            stride_per_key_per_rank=None if bags.sizes is None or bag_indices is not None else sizes,
        )
