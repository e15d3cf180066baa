"""Maps ids of a model's tables to row numbers of exported tables."""

from __future__ import annotations

import torch
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ...modules.bags import Bags


def _select_bags(part: JaggedTensor, bags: torch.Tensor) -> JaggedTensor:
    """Selects bags of a feature by their indices `bags` `[n]`; a bag is repeated if its index is.

    Raises:
        IndexError: an index is out of range; only checked on the host.
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
    """Module that maps the ids of a batch to row numbers of exported tables.

    An unknown id is mapped to the table's last row, which is zeros.

    Attributes:
        tables: index of the table that each feature reads, by feature name.
    """

    def __init__(self, ids: list[torch.Tensor | None], tables: dict[str, int], *, pooled: bool = True) -> None:
        """Stores the sorted ids of each table as buffers.

        Args:
            ids: for each table its ids, int64 `[n]`, in the order of the rows; None if ids are row numbers.
            tables: index of the table that each feature reads, by feature name.
            pooled: whether the tables pool bags. If True, a batch with `inverse_indices` is expanded to one bag per
                sample.
        """
        super().__init__()
        self.tables = tables
        self._pooled = pooled
        for table, known in enumerate(ids):
            ordered, rows = (None, None) if known is None else torch.sort(known)
            self.register_buffer(f"ids{table}", ordered)
            self.register_buffer(f"rows{table}", rows)

    def rows_of(self, table: int, ids: torch.Tensor) -> torch.Tensor:
        """Returns the row numbers of `ids` in the table with index `table`, int64 of the same shape."""
        known, rows = getattr(self, f"ids{table}"), getattr(self, f"rows{table}")
        ids = ids.long()
        if known is None:
            return ids
        if len(known) == 0:
            return torch.zeros_like(ids)
        positions = torch.searchsorted(known, ids).clamp_(max=len(known) - 1)
        return torch.where(known[positions] == ids, rows[positions], len(known))

    def forward(self, features: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Returns the batch with row numbers in place of ids, and without features that no table reads.

        If tables are not pooled, each key keeps its batch size. Otherwise, keys get the batch size of
        `inverse_indices`.

        Raises:
            ValueError: lengths or `inverse_indices` do not fit the keys, or pooled keys have several batch sizes and no
                `inverse_indices`.
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
