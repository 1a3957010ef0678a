"""ARC: grids, their encodings as text, variants, prompts, and the fast check of a line."""
