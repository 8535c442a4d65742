# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Whether two engines that decoded the same prompts greedily did the same."""

import math
from itertools import pairwise

from ..samplers import Rollout


def first_disagreement(expected: Rollout, found: Rollout, *, tolerance: float) -> str | None:
    """
    Describe the first place where two greedy rollouts of the same prompts differ by more than rounding.

    Up to there both saw the same tokens, so that what they commit in a step can be compared: tokens, places, and the
    confidence in them. Where rounding has put a near tie the other way round, what follows differs rightly: a row is
    compared no further.

    Args:
        expected ([`Rollout`]):
            What is taken for right, with its confidences.
        found ([`Rollout`]):
            What is compared with it, with its confidences; it may lack what lies behind an end token.
        tolerance (`float`):
            Largest difference between two confidences, in nats, that rounding explains.

    Returns:
        `str` or `None`:
            Row, token and what each engine has there, or None where they agree.
    """
    assert expected.confidence is not None
    assert found.confidence is not None
    assert expected.settings is not None
    settings = expected.settings
    is_log = settings.remasking == "entropy"
    for row in range(len(expected.completion_ids)):
        sides = [
            (
                rollout.window_ids[row].tolist(),
                rollout.commit_step[row].tolist(),
                [v if is_log else math.log(max(v, 1e-300)) for v in rollout.confidence[row].tolist()],  # type: ignore[index]
            )
            for rollout in (expected, found)
        ]
        window = len(found.completion_ids[row])
        first = settings.block_length - int(expected.block_offset[row])
        borders = [0, *range(first, window, settings.block_length), window]
        for start, stop in pairwise(borders):
            verdict = _block_disagreement(sides, start, stop, tolerance)
            if verdict == "":
                break
            if verdict is not None:
                return f"prompt {row}, {verdict}"
        else:
            if len(expected.completion_ids[row]) != window:
                return f"prompt {row}: {len(expected.completion_ids[row])} tokens expected, {window} found"
    return None


def _block_disagreement(
    sides: list[tuple[list[int], list[int], list[float]]], start: int, stop: int, tolerance: float
) -> str | None:
    """None where a block was decoded alike, nothing where a near tie fell the other way, else the difference."""
    for step in range(1 + max(max(steps[start:stop]) for _, steps, _ in sides)):
        commits = [
            {place: (tokens[place], values[place]) for place in range(start, stop) if steps[place] == step}
            for tokens, steps, values in sides
        ]
        chosen = [{place: token for place, (token, _) in part.items()} for part in commits]
        values = [sorted(value for _, value in part.values()) for part in commits]
        is_close = all(values) and all(
            abs(one - other) <= tolerance for one, other in zip(values[0][::-1], values[1][::-1], strict=False)
        )
        if chosen[0] != chosen[1]:
            if is_close:
                return ""
            return f"token {min(chosen[0] | chosen[1])}, step {step + 1}: {_words(commits)}"
        for place, (_, value) in commits[0].items():
            if not abs(value - commits[1][place][1]) <= tolerance:
                return f"token {place}, step {step + 1}: {_words(commits)}"
    return None


def _words(commits: list[dict[int, tuple[int, float]]]) -> str:
    names = ("transformers commits", "vLLM")
    parts = [
        f"{name} "
        + (", ".join(f"{token} at {place} ({value:.4f})" for place, (token, value) in part.items()) or "none")
        for name, part in zip(names, commits, strict=True)
    ]
    return "; ".join(parts) + " (token at place, log confidence)"
