"""Gives rows to people: samples, rows and batches of a dataset, read without loading what was not asked for."""
