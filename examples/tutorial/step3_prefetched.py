"""Step 3, batches planned ahead: python examples/tutorial/step3_prefetched.py."""

import torch
from clicks import batches, say, train
from step2_cached import make_model, report

from rec_sdk_torch import prefetch

if __name__ == "__main__":
    torch.manual_seed(0)
    model = make_model()
    optimizer = torch.optim.Adam(model.dense.parameters(), lr=0.01)
    train(model, optimizer, prefetch(batches(steps=200), model, depth=2))
    report(model.tables)
    say(f"planned ahead at once: {model.tables.cache_stats()['depth_reached']}")
