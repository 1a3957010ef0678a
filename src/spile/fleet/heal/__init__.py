"""The pure reconciler, the history it decides from, and the monitor that carries its decisions out."""
