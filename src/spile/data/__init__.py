"""Where samples come from: ARC tasks, chats and plain text; Hugging Face, JSONL and Parquet; streams; tokens."""
