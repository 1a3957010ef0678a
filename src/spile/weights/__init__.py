"""Hugging Face safetensors to sharded arrays."""
