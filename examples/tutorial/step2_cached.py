"""Step 2, cached tables: python examples/tutorial/step2_cached.py."""

import torch
from clicks import DIM, ROWS, Model, batches, say, train
from torchrec.optim.apply_optimizer_in_backward import apply_optimizer_in_backward

from rec_sdk_torch import EmbCacheEmbeddingBagCollection, EmbCacheEmbeddingBagConfig


def make_model(**options):
    configs = [
        EmbCacheEmbeddingBagConfig(
            name=f"t_{name}", num_embeddings=rows, embedding_dim=DIM, feature_names=[name], **options
        )
        for name, rows in ROWS.items()
    ]
    tables = EmbCacheEmbeddingBagCollection(tables=configs, cache=0.4)  # 40% of the rows are on the device
    apply_optimizer_in_backward(torch.optim.Adagrad, tables.parameters(), {"lr": 0.1})
    return Model(tables)


def report(tables):
    stats = tables.cache_stats()
    say(f"rows in the cache: {tables.cache_sizes}")
    say(f"found in the cache: {1 - stats['unique_misses'] / stats['unique_rows']:.0%}")


if __name__ == "__main__":
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    train(model, optimizer, batches(steps=200))
    report(model.tables)
