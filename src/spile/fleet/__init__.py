"""The machines: provider, Cloud TPU, states, the pure reconciler, ssh, deploy."""
