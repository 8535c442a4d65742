# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What an evaluation writes down: a line per completion, and the scores and intervals that are made of the lines."""

import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, fields
from math import comb
from pathlib import Path
from typing import Any

import numpy as np

RESULTS_FILE = "results.json"
"""Scores and every setting that produced them; byte for byte the same after an interruption."""
SPEED_FILE = "speed.json"
"""Tokens per second, and the layout of the last run: what differs between two runs of the same evaluation."""
SETTINGS_FILE = "settings.json"
"""Written when an evaluation starts; one that goes on must have the same."""
ITEMS_FILE = "items.jsonl"
"""Prompts and answer columns."""
COMPLETIONS_FILE = "completions.jsonl"
PART_FILES = "completions-*.jsonl"
"""What each process appends to while it runs; joined to `COMPLETIONS_FILE` at the end."""
INTERVAL_LEVEL = 0.95

Key = tuple[int, int, int]


@dataclass(frozen=True)
class CompletionRecord:
    """
    One completion and its grade.

    Args:
        max_completion_length (`int`):
            Window it was decoded in.
        item (`int`):
            Index of its row in the task's split.
        sample (`int`):
            Which of the item's samples it is.
        item_hash (`str`):
            Of the item's prompt and answer columns: two runs are compared item by item where it is the same.
        completion (`str`):
            Text without special tokens, as the grader saw it.
        num_tokens (`int`):
            Tokens up to and including the first end token.
        num_steps (`int`):
            Denoising steps the row took part in.
        is_truncated (`bool`):
            Whether it lacks an end token.
        score (`float`):
            Of the task's correctness reward; 1.0 is right.
        reason (`str`):
            Why, as [`rewards.grading.Grade`] words it.
        answer (`str`, *optional*):
            What was taken for the answer.
        seconds (`float`):
            Its share of the time its batch took to decode.
    """

    max_completion_length: int
    item: int
    sample: int
    item_hash: str
    completion: str
    num_tokens: int
    num_steps: int
    is_truncated: bool
    score: float
    reason: str
    answer: str | None
    seconds: float

    @property
    def key(self) -> Key:
        return self.max_completion_length, self.item, self.sample

    @property
    def is_right(self) -> bool:
        return self.score == 1.0


_FIELDS = {f.name for f in fields(CompletionRecord)}


def read_records(path: Path) -> list[CompletionRecord]:
    """
    Read the completions of a file, without a last line that was torn when its writer was killed.

    Args:
        path (`pathlib.Path`):
            File of JSON lines.

    Returns:
        `list[CompletionRecord]`
    """
    data = path.read_bytes()
    records = []
    for number, line in enumerate(data[: data.rfind(b"\n") + 1].splitlines(), start=1):
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        if not isinstance(values, dict) or values.keys() != _FIELDS:
            raise ValueError(
                f"{path}, line {number}, is no record of a completion: {line[:80]!r}. The file was changed by "
                "something else: remove the line to have its completion made again, or choose another output_dir."
            )
        records.append(CompletionRecord(**values))
    return records


class RecordWriter:
    """
    Appends completions to a file, each a whole line that outlives the process.

    Args:
        path (`pathlib.Path`):
            The file. A torn last line is cut off first, since what follows would be joined to it.
    """

    def __init__(self, path: Path) -> None:
        self.file = path.open("ab+")
        self.file.seek(0)
        self.file.truncate(self.file.read().rfind(b"\n") + 1)

    def write(self, records: Iterable[CompletionRecord]) -> None:
        """Append the records and hand them to the operating system."""
        self.file.write(b"".join(as_line(asdict(record)) for record in records))
        self.file.flush()

    def close(self) -> None:
        self.file.close()


def as_line(values: dict[str, Any]) -> bytes:
    """A JSON line, in ASCII: no completion can hold what some reader takes for the end of a line."""
    return (json.dumps(values) + "\n").encode()


def by_item(records: Iterable[CompletionRecord]) -> dict[int, list[CompletionRecord]]:
    """Records of each item, both in order."""
    grouped: defaultdict[int, list[CompletionRecord]] = defaultdict(list)
    for record in sorted(records, key=lambda record: record.key):
        grouped[record.item].append(record)
    return dict(grouped)


def pass_at_k(num_samples: int, num_right: int, k: int) -> float:
    r"""
    Unbiased estimate of the chance that at least one of `k` samples is right, from `num_samples` of them.

    `1 - C(n - c, k) / C(n, k)`, equation 1 of
    [Evaluating Large Language Models Trained on Code](https://huggingface.co/papers/2107.03374), with `n` samples of
    which `c` are right. With `k` = 1 it is the share of right samples.

    Args:
        num_samples (`int`):
            Samples of an item.
        num_right (`int`):
            Those that are right.
        k (`int`):
            At most `num_samples`.

    Returns:
        `float`
    """
    if not 1 <= k <= num_samples or not 0 <= num_right <= num_samples:
        raise ValueError(
            f"Expected 1 <= k <= num_samples and 0 <= num_right <= num_samples, got k={k}, num_right={num_right} and "
            f"num_samples={num_samples}. Draw at least k samples of each item."
        )
    total = comb(num_samples, k)
    return (total - comb(num_samples - num_right, k)) / total


def bootstrap_interval(values: Sequence[float], *, num_resamples: int, seed: int) -> tuple[float, float]:
    """
    Percentile bootstrap interval of a mean over items, at [`INTERVAL_LEVEL`].

    Items are drawn with replacement, each with all of its samples: samples of one item are not independent. The
    interval has no width where all items have one value, and is too narrow for fewer than about 30 items.

    Args:
        values (`Sequence[float]`):
            One value per item.
        num_resamples (`int`):
            Times the items are drawn.
        seed (`int`):
            Seed of the draws: the same for every statistic of a run, so that all see the same resamples.

    Returns:
        `tuple[float, float]`
    """
    array = np.asarray(values, dtype=np.float64)
    generator = np.random.default_rng(seed)
    means = [array[generator.integers(len(array), size=len(array))].mean() for _ in range(num_resamples)]
    tail = (1 - INTERVAL_LEVEL) / 2
    low, high = np.quantile(means, [tail, 1 - tail])
    return float(low), float(high)


def estimated(values: Sequence[float], *, num_resamples: int, seed: int) -> dict[str, float]:
    """Mean over items with its interval."""
    low, high = bootstrap_interval(values, num_resamples=num_resamples, seed=seed)
    return {"mean": sum(values) / len(values), "low": low, "high": high}


def scores_of(
    records: Sequence[CompletionRecord], *, num_samples: int, num_resamples: int, seed: int
) -> dict[str, Any]:
    """
    Scores of the completions of one length.

    Args:
        records (`Sequence[CompletionRecord]`):
            `num_samples` of each item.
        num_samples (`int`):
            Samples per item.
        num_resamples (`int`):
            Resamples of the intervals.
        seed (`int`):
            Seed of the resamples.

    Returns:
        `dict`:
            `pass@k` for 1, the powers of two and `num_samples`, and `mean_score`, each with `mean`, `low` and `high`;
            then counts and shares of the completions.
    """
    items = by_item(records)
    assert all(len(samples) == num_samples for samples in items.values())
    ks = sorted({*(2**power for power in range(num_samples.bit_length())), num_samples})
    rights = [sum(record.is_right for record in samples) for samples in items.values()]
    means = [sum(record.score for record in samples) / num_samples for samples in items.values()]
    interval = {"num_resamples": num_resamples, "seed": seed}
    num_tokens, num_steps = (sum(vars(r)[name] for r in records) for name in ("num_tokens", "num_steps"))
    return {
        "num_items": len(items),
        "num_samples": num_samples,
        **{f"pass@{k}": estimated([pass_at_k(num_samples, c, k) for c in rights], **interval) for k in ks},
        "mean_score": estimated(means, **interval),
        "reasons": dict(sorted(Counter(record.reason for record in records).items())),
        "tokens_per_completion": num_tokens / len(records),
        "steps_per_completion": num_steps / len(records),
        "truncated": sum(record.is_truncated for record in records) / len(records),
    }


def speed_of(records: Sequence[CompletionRecord]) -> dict[str, float]:
    """Tokens up to the end token and seconds of decoding, both summed over processes."""
    num_tokens, seconds = sum(r.num_tokens for r in records), sum(r.seconds for r in records)
    return {
        "num_tokens": num_tokens,
        "seconds": seconds,
        "tokens_per_second": num_tokens / seconds,
        "items_per_second": len({r.item for r in records}) / seconds,
    }
