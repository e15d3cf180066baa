"""Parts that the examples share: click data, training loop, report."""
