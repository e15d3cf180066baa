"""Trains a table, saves deltas, and serves it in a second process that follows the saves.

python examples/serve.py --steps 200
"""

from __future__ import annotations

import argparse
import multiprocessing
import tempfile
import time
from multiprocessing.connection import Connection
from pathlib import Path

import torch

from rec_sdk_torch import Pooling, Saver, TableBatchedEmbedding, TableConfig, TableOptimizer
from rec_sdk_torch.serving import TableReader

DIM = 16


def serve(folder: str, questions: Connection) -> None:
    """Serves the weights of ids, with the name of the save, until it receives None."""
    with TableReader(folder, "t_item", follow=0.05) as reader:
        while (ids := questions.recv()) is not None:
            questions.send((reader.save.name, reader.lookup(ids).numpy()))


def train(embedding: TableBatchedEmbedding, steps: int, generator: torch.Generator) -> None:
    for _ in range(steps):
        ids = torch.randint(-(2**62), 2**62, (64,), generator=generator) % 1000
        embedding(ids, torch.arange(len(ids) + 1)).square().sum().backward()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200, help="between two saves")
    parser.add_argument("--saves", type=int, default=4)
    options = parser.parse_args()
    table = TableConfig("t_item", 1000, DIM, pooling=Pooling.SUM, track_changes=True)
    optimizer = TableOptimizer.create(torch.optim.Adagrad, {"lr": 0.05})
    embedding = TableBatchedEmbedding([table], optimizer=optimizer, cache=300, seed=0)
    generator = torch.Generator().manual_seed(0)
    ids = torch.arange(1000)
    saver = Saver()
    with tempfile.TemporaryDirectory() as folder:
        train(embedding, options.steps, generator)
        save = saver.save(embedding, folder)
        ours, server_end = multiprocessing.get_context("spawn").Pipe()
        server = multiprocessing.get_context("spawn").Process(target=serve, args=(folder, server_end))
        server.start()
        for number in range(options.saves):
            if number > 0:
                train(embedding, options.steps, generator)
                save = saver.save(embedding, folder, incremental=True)
            deadline = time.monotonic() + 60
            seen = ""
            while seen != Path(save).name:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"the server stays at {seen}, the latest save is {save}")
                ours.send(ids)
                seen, weights = ours.recv()
            view = embedding.view("t_item")
            known = view.knows(ids)
            same = torch.equal(torch.from_numpy(weights)[known], view.read(ids[known], ["weight"]).parts["weight"])
            print(f"save {number}: {int(known.sum())} rows, served as trained: {same}")
        ours.send(None)
        server.join()


if __name__ == "__main__":
    main()
