"""Activations in memory: a loaded model, and rows that feed a training loop."""
