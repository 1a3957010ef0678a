"""Frozen nouns that validate themselves: the run, the taps, the samples, the sizes, the machines. Pure."""
