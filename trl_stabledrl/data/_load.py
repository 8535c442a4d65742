# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Rows from the Hub or from local files, through one door."""

from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from ._generate import check_split

_BUILDER_OF_SUFFIX = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_rows(source: str, *, config_name: str | None, split: str, num_prompts: int | None) -> Dataset:
    """
    Rows of a split.

    Args:
        source (`str`):
            Name of a dataset on the Hub, a local file (CSV, JSON, JSON lines or Parquet, taken whole as the split
            asked for), or a local folder with files named after their splits.
        config_name (`str`, *optional*):
            Configuration of the dataset on the Hub. Local sources have none.
        split (`str`):
            `"train"` or `"test"`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.

    Returns:
        `datasets.Dataset`:
            The rows, in order.
    """
    check_split(split)
    path = Path(source)
    rows: Any
    if path.is_file():
        if path.suffix not in _BUILDER_OF_SUFFIX:
            raise ValueError(
                f"Cannot read {source!r}: expected a file that ends in one of {', '.join(_BUILDER_OF_SUFFIX)}."
            )
        rows = load_dataset(_BUILDER_OF_SUFFIX[path.suffix], data_files={split: str(path)}, split=split)
    elif path.is_dir():
        rows = load_dataset(str(path), split=split)
    else:
        rows = load_dataset(source, config_name, split=split)
    if num_prompts is None:
        return rows
    if not 1 <= num_prompts <= len(rows):
        raise ValueError(
            f"`num_prompts` must lie between 1 and the {len(rows)} rows of the {split} split of {source!r}, got "
            f"{num_prompts}. Leave it out to take all."
        )
    return rows.select(range(num_prompts))


def check_columns(rows: Dataset, source: str, needed: tuple[str, ...]) -> None:
    missing = [column for column in needed if column not in rows.column_names]
    if missing:
        raise ValueError(
            f"{source!r} has no column {', '.join(f'`{column}`' for column in missing)}: it has "
            f"{', '.join(f'`{column}`' for column in rows.column_names)}. Rename its columns to "
            f"{', '.join(f'`{column}`' for column in needed)}."
        )
