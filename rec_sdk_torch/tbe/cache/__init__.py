"""One device cache: a batch as it is planned, its plan, rows on their way, its part of lookups and updates."""
