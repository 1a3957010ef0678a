"""What measures and forecasts: benchmarks, limits, the TPU compiler for ``spile plan``. No worker comes here."""
