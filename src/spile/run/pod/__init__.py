"""Many hosts that act as one worker."""
