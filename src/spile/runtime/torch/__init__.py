"""Any Hugging Face causal model through PyTorch's forward hooks, as a producer of rows. Nothing else imports torch."""
