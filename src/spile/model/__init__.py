"""Pure JAX: one decoder and its switches, its weights' shapes, its attention kernels. No files, no network."""
