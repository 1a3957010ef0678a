"""Where a run's streams are worked off: on this machine, or on a Ray cluster. One scheduler, two engines."""
