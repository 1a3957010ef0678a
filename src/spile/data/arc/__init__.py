"""ARC tasks: grids, encodings as text, augmentations, prompts, answers and scores."""
