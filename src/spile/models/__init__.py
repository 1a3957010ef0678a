"""The JAX decoder, the model families, and loading of weights and adapters."""
