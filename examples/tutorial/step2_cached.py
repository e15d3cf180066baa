"""Step 2, cached tables: python examples/tutorial/step2_cached.py."""

import torch
from clicks import DIM, ROWS, Model, batches, loss_of, report
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig


def make_model():
    tables = EmbCacheEmbeddingBagCollection(
        tables=[
            EmbCacheEmbeddingBagConfig(name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name])
            for name, rows in ROWS.items()
        ],
        cache=0.4,  # of the rows are on the device
    )
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    return Model(tables)


def train(model, optimizer, steps):
    losses = []
    for batch in batches(steps):
        optimizer.zero_grad()
        loss = loss_of(model, batch)
        loss.backward()  # also updates the rows of the tables
        optimizer.step()
        losses.append(loss.detach())
    report(losses)


def main():
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    train(model, optimizer, steps=200)
    stats = model.tables.cache_stats()
    print(f"rows in the cache: {model.tables.cache_sizes}")
    print(f"found in the cache: {1 - stats['unique_misses'] / stats['unique_rows']:.0%}")


if __name__ == "__main__":
    main()
