"""The part that both examples share: click data, training loop, report."""
