"""A snapshot as a terminal table. It reads and never commands."""
