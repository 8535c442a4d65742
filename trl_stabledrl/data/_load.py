# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0

"""Rows from the Hub or from local files, through one door."""

from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

from datasets import Dataset, load_dataset

from ._generate import SPLITS, Row, check_num_prompts, check_split

_BUILDER_OF_SUFFIX = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


def load_prompts(
    source: str,
    as_row: Callable[[Row], Row | None],
    *,
    split: str,
    num_prompts: int | None,
    columns: tuple[str, ...],
    hub_config: str | None = None,
    hub_split: str | None = None,
    splits: tuple[str, ...] = SPLITS,
) -> Dataset:
    """
    Rows of a split, as a task words them.

    Args:
        source (`str`):
            Name of a dataset on the Hub, a local file (CSV, JSON, JSON lines or Parquet, taken whole as the split
            asked for), or a local folder with files named after their splits.
        as_row (`Callable[[dict], dict or None]`):
            Makes a row of the task from one of the source; `None` leaves it out, a `ValueError` says what is wrong
            with it.
        split (`str`):
            One of `splits`.
        num_prompts (`int`, *optional*):
            Keep this many rows from the start; all by default.
        columns (`tuple[str, ...]`):
            Columns that `as_row` reads, found whatever their case.
        hub_config (`str`, *optional*):
            Configuration of the dataset on the Hub. Local sources have none.
        hub_split (`str`, *optional*):
            What the dataset on the Hub calls the split. Defaults to `split`.
        splits (`tuple[str, ...]`, *optional*, defaults to `("train", "test")`):
            Splits the task has.

    Returns:
        `datasets.Dataset`:
            The rows, in order.
    """
    check_split(split, splits)
    if num_prompts is not None:
        check_num_prompts(num_prompts)
    found = _load(source, split=split, hub_config=hub_config, hub_split=hub_split or split)
    rows: list[Row] = []
    for index, values in enumerate(_pick(found, source, columns)):
        if len(rows) == num_prompts:
            break
        try:
            row = as_row(values)
        except ValueError as error:
            raise ValueError(f"Row {index} of the {split} split of {source!r}: {error}") from error
        if row is not None:
            rows.append(row)
    if not rows or (num_prompts is not None and len(rows) < num_prompts):
        raise ValueError(
            f"The {split} split of {source!r} has {len(rows)} rows for this task, too few for "
            f"num_prompts={num_prompts}. Ask for fewer, or leave it out to take all there are."
        )
    return Dataset.from_list(rows)


def is_local(source: str) -> bool:
    return Path(source).exists()


def _load(source: str, *, split: str, hub_config: str | None, hub_split: str) -> Any:
    path = Path(source)
    if path.is_file():
        if path.suffix not in _BUILDER_OF_SUFFIX:
            raise ValueError(
                f"Cannot read {source!r}: expected a file that ends in one of {', '.join(_BUILDER_OF_SUFFIX)}."
            )
        return load_dataset(_BUILDER_OF_SUFFIX[path.suffix], data_files={split: str(path)}, split=split)
    if path.is_dir():
        return load_dataset(str(path), split=split)
    return load_dataset(source, hub_config, split=hub_split)


def _pick(rows: Dataset, source: str, columns: tuple[str, ...]) -> Iterable[Row]:
    names = {name.lower(): name for name in rows.column_names}
    missing = [column for column in columns if column not in names]
    if missing:
        raise ValueError(
            f"{source!r} has no column {', '.join(f'`{column}`' for column in missing)}: it has "
            f"{', '.join(f'`{column}`' for column in rows.column_names)}. Rename its columns to "
            f"{', '.join(f'`{column}`' for column in columns)}."
        )
    kept = rows.select_columns([names[column] for column in columns])
    return ({column: row[names[column]] for column in columns} for row in kept)  # type: ignore[call-overload, index]
