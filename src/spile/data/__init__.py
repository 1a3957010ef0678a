"""Where samples come from: ARC, chat and plain text; Hugging Face, JSONL and Parquet; streams; tokens."""
