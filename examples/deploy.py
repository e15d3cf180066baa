"""Trains a DLRM, saves its tables, exports its dense part, and serves both in a second process without the model.

python examples/deploy.py
python examples/deploy.py --bits 8        rows of 8 bits in the second process

A version of the model is a save of the tables, with `dense-<name of the save>.pt2` in the same folder. The server
opens both, so tables and dense part are from the same step. Later versions are saved as deltas.
"""

from __future__ import annotations

import support.environment  # noqa: F401  # first: what follows may be missing

# isort: split
import argparse
import multiprocessing
import sys
import tempfile
from collections.abc import Sequence
from multiprocessing.connection import Connection
from pathlib import Path

import torch
from dlrm.cached import cached_tables
from dlrm.data_generated import generated_clicks
from dlrm.model import DLRM
from dlrm.served import answer, export_dense, request_of
from support.clicks import ClickBatch, ClickData

from rec_sdk_torch import Saver, apply_optimizer_in_backward
from rec_sdk_torch.export import quantize_save
from rec_sdk_torch.serving import TableReader

DIM = 16


def serve(tables: Sequence[str], requests: Connection) -> None:
    """Runs in the second process: answers requests with the most recently received version, until it receives None."""
    while (message := requests.recv()) is not None:
        if isinstance(message[0], Path):
            save, program = message
            readers = {name: TableReader(save, name) for name in tables}
            dense = torch.export.load(program).module()
        else:
            requests.send(answer(dense, readers, message).numpy())


def build(data: ClickData) -> DLRM:
    """Builds the model, whose tables are updated in the backward pass."""
    tables = cached_tables(data, 256, 0.2, DIM, seed=0, keeps_changes=True)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.05})
    torch.manual_seed(0)
    return DLRM(tables, len(data.features), DIM, data.dense.shape[1])


def train(model: DLRM, batches: Sequence[ClickBatch], optimizer: torch.optim.Optimizer) -> None:
    model.train()
    loss_of = torch.nn.BCEWithLogitsLoss()
    for batch in batches:
        optimizer.zero_grad()
        loss_of(model(batch), batch.labels).backward()
        optimizer.step()


def main() -> int:
    """Runs the script. Returns 1 if answers differ from the live model's."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--samples", type=int, default=20_000, help="clicks to generate")
    parser.add_argument("--versions", type=int, default=2, help="how often it is trained and deployed")
    parser.add_argument("--bits", type=int, choices=[8, 4], help="of the rows that are served; as trained by default")
    options = parser.parse_args()
    data = generated_clicks(options.samples, seed=0)
    model, tables = build(data), list(data.features)
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=1e-3)
    batches = list(data.batches(256))
    share = len(batches) // options.versions
    ours, server_end = multiprocessing.get_context("spawn").Pipe()
    server = multiprocessing.get_context("spawn").Process(target=serve, args=(tables, server_end), daemon=True)
    server.start()
    server_end.close()  # otherwise this process would wait forever if the server ended
    wrong = 0
    with tempfile.TemporaryDirectory() as place:
        for version in range(options.versions):
            seen = batches[version * share : (version + 1) * share]
            train(model, seen, optimizer)
            save = Path(Saver().save(model, Path(place, "saves"), incremental=version > 0))
            if options.bits:
                quantized = quantize_save(save.parent, Path(place, "quantized"), options.bits)
                save = quantized.save
            program = save.parent / f"dense-{save.name}.pt2"
            export_dense(model.dense.eval(), DIM, data, program)
            ours.send((save, program))
            ours.send(request_of(seen[0]))
            answer = torch.from_numpy(ours.recv())
            with torch.inference_mode():
                live = model.eval()(seen[0]).sigmoid()
            difference = float((answer - live).abs().max())
            wrong += difference > (0.05 if options.bits else 1e-6)
            print(f"version {version}: {len(answer)} answers, at most {difference:.2g} from the live model's")
        ours.send(None)
        server.join()
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
