"""All that draws: datasets, fleets, workers, reports. It reads and never commands."""
