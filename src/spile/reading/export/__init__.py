"""A dataset in the forms that other programs read: the old guides' pickles, SAELens, NumPy, Parquet, Hugging Face."""
