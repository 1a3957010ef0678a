"""Samples to activation rows on devices: batches, meshes, producers and the generator."""
