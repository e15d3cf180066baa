"""Step 6, serving the save of step 5: python examples/tutorial/step6_served.py saves."""

import sys
from pathlib import Path

import torch
from clicks import DIM, ROWS, Model, evaluate
from torchrec import KeyedTensor

from rec_sdk_torch.serving import TableReader


class ServedTables(torch.nn.Module):
    """Tables read from the latest save, on any machine that can read the folder: no collection, optimizer or ranks."""

    def __init__(self, folder):
        super().__init__()
        self.readers = {name: TableReader(folder, f"t_{name}") for name in ROWS}

    def forward(self, ids):
        rows = [reader.lookup(ids[name].values()) for name, reader in self.readers.items()]
        return KeyedTensor(list(ROWS), [DIM] * len(rows), torch.cat(rows, dim=1))


if __name__ == "__main__":
    folder = Path(sys.argv[1])
    model = Model(ServedTables(folder))
    model.dense.load_state_dict(torch.load(folder / "dense.pt"))
    print(f"loss of the served model: {evaluate(model):.4f}")
