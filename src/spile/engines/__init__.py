"""Where workers run: the supervisor and its engines."""
