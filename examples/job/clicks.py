"""The clicks of each step of the job; a resumed job continues with the step after its save."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from dlrm.data_generated import generated_clicks
from support.clicks import ClickBatch, ClickData, random_split
from support.errors import InputError

REQUESTS = 32


class Clicks:
    """A generated log with a random order in each epoch; the seed alone determines log and orders.

    Attributes:
        data: the whole log, for the sizes of the tables.
        test: clicks that are not trained on.
    """

    def __init__(self, samples: int, seed: int, batch_size: int) -> None:
        """Generates the log.

        Args:
            samples: number of clicks in the log.
            seed: determines the clicks, their split and their order.
            batch_size: number of clicks per step, summed over all ranks.
        """
        self.data = generated_clicks(samples, seed)
        split = random_split(samples, seed)
        self._train: ClickData = self.data.select(split.train)
        self.test: ClickData = self.data.select(split.test)
        self._seed, self._batch_size = seed, batch_size
        self._steps = len(self._train) // batch_size
        if self._steps == 0:
            raise InputError(
                f"--batch-size {batch_size} is more than the {len(self._train)} clicks that --samples {samples} trains"
            )

    def batches(self, begin: int, end: int, rank: int, ranks: int) -> Iterator[ClickBatch]:
        """Yields the rank's part of the batches of steps `begin` up to `end`, where 0 is the first step."""
        epoch, order = -1, torch.empty(0)
        for step in range(begin, end):
            wanted, place = divmod(step, self._steps)
            if wanted != epoch:
                epoch, order = wanted, self._order(wanted)
            samples = order[place * self._batch_size : (place + 1) * self._batch_size]
            yield self._train.select(samples.chunk(ranks)[rank]).batch()

    def requests(self) -> ClickBatch:
        """Returns clicks of the first step as requests. After this step, tables and saves contain their ids."""
        return self._train.select(self._order(0)[: min(REQUESTS, self._batch_size)]).batch()

    def _order(self, epoch: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self._seed * 1_000_003 % 2**63 + epoch)
        return torch.randperm(len(self._train), generator=generator)
