"""Immutable, validated descriptions of runs, taps and samples, without input or output."""
