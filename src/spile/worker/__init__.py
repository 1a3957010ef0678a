"""The worker: one pipeline from samples to committed shards."""
