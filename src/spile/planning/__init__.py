"""The size, time, cost and memory of a run, and benchmarks of this machine."""
