"""Pure arithmetic: what is left to do, batches, shards, bytes, hours, dollars."""
