"""Fake GCS and fake Cloud TPU, for tests and demonstrations. Not part of the wheel."""
