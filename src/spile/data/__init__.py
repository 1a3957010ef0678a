"""Inputs and how they become samples: sources, rows, prompts, tokens, and splitting into streams."""
