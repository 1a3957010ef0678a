"""Fleets of TPU machines: specification, provider, Cloud TPU client, reconciler, monitor, agent and deploy."""
