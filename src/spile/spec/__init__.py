"""Frozen nouns that validate themselves: the run, the taps, the samples, the architectures' sizes, the machine types. Pure."""
