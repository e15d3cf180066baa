"""What both examples share: click data, training loop, report."""
