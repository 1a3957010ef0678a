"""Pure JAX: one decoder, a table of architectures, taps. No files, no network."""
