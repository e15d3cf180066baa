"""Step 1, TorchRec alone: python examples/tutorial/step1_torchrec.py."""

import torch
from clicks import DIM, ROWS, Model, batches, train
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward


def make_model():
    configs = [
        EmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
        for name, rows in ROWS.items()
    ]
    tables = EmbeddingBagCollection(tables=configs)
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    return Model(tables)


if __name__ == "__main__":
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    train(model, optimizer, batches(steps=200))
