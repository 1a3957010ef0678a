"""The conversion function of the old guides, under its old name. New programs call ``spile.data.convert.convert``."""

from __future__ import annotations

from pathlib import Path

from spile.data.convert import RowSelection, convert


def convert_hf_dataset_to_arc_format(
    dataset_name: str,
    column_name: str = "examples",
    output_filename: str = "arc_format_train.jsonl",
    start_index: int = 0,
    end_index: int | None = None,
) -> int:
    """Write rows of a dataset as ARC tasks to a JSONL file, which ``spile extract --dataset`` reads.

    Args:
        dataset_name: A dataset of the Hugging Face hub, or a file.
        column_name: The column with the pairs of each task; the last pair is the test.
        output_filename: The JSONL file. Its folder is created.
        start_index: The first row.
        end_index: The row after the last one; None for all rows.

    Returns:
        The number of tasks written.

    """
    selection = RowSelection(column_name, start_index, end_index)
    return convert(dataset_name, Path(output_filename), selection=selection).tally.samples
