"""Benchmarks: run by hand or by ``make bench``, never by a test. Each module's ``main`` prints a table of its own."""
