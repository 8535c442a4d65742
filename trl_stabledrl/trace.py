# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""A page that replays how the tokens of completions were committed."""

import base64
import hashlib
import json
import math
from collections.abc import Sequence
from dataclasses import fields
from itertools import pairwise
from pathlib import Path
from typing import Any

from transformers import PreTrainedModel, PreTrainedTokenizerBase

from . import __version__
from .core.unmasking import Remasking
from .decoding import Prompt
from .models.facts import ModelFacts, model_facts
from .samplers import Rollout

_TEMPLATE = Path(__file__).with_name("trace.html")
_MEASURES: dict[Remasking, tuple[str, str]] = {
    "low_confidence": ("confidence", "probability of the token when it was committed"),
    "margin": ("margin", "gap between the two highest probabilities"),
    "entropy": ("certainty", "exp(-entropy) of the prediction, 1 where it is sure"),
    "random": ("rank", "a random number, which says nothing about the model"),
}


def write_trace(
    path: str | Path,
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
) -> None:
    """
    Write one self-contained page that replays, step by step, how the tokens of completions were committed.

    The page loads nothing and works from a file. A link to `#prompt=2&step=last` opens it there.

    Args:
        path (`str` or `pathlib.Path`):
            File to write.
        model ([`~transformers.PreTrainedModel`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`):
            The prompts, in the order of the rollouts' rows.
        rollouts (`Sequence[`[`~samplers.Rollout`]`]`):
            From [`trl_stabledrl.generate`] with `return_rollouts=True`.

    Example:

    ```python
    texts, rollouts = trl_stabledrl.generate(model, tokenizer, prompts, return_rollouts=True)
    trl_stabledrl.write_trace("trace.html", model, tokenizer, prompts, rollouts)
    ```
    """
    Path(path).write_text(_page(trace_data(model, tokenizer, prompts, rollouts)), encoding="utf-8")


def trace_data(
    model: PreTrainedModel,
    tokenizer: PreTrainedTokenizerBase,
    prompts: Sequence[Prompt],
    rollouts: Sequence[Rollout],
) -> dict[str, Any]:
    """
    Collect what the page of [`write_trace`] shows, as JSON can hold it.

    Args:
        model ([`~transformers.PreTrainedModel`]):
            The model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        prompts (`Sequence[str]` or `Sequence[list[dict]]`):
            The prompts, in the order of the rollouts' rows.
        rollouts (`Sequence[`[`~samplers.Rollout`]`]`):
            What was decoded.

    Returns:
        `dict`:
            `model`, `family`, `settings`, `confidence` (what it measures) and `rows`, one a completion. The lists of a
            row have an entry for each decoded position; `steps` count from 1 over all blocks.
    """
    num_rows = sum(len(rollout.completion_ids) for rollout in rollouts)
    if num_rows != len(prompts) or num_rows == 0:
        raise ValueError(f"There are {len(prompts)} prompts for {num_rows} rows of rollouts. Pass one for each row.")
    settings = rollouts[0].settings
    if settings is None or any(rollout.settings != settings for rollout in rollouts):
        raise ValueError("The rollouts do not all name the same settings. Pass those of one call of generate.")
    facts = model_facts(model, tokenizer)
    has_confidence = all(rollout.confidence is not None for rollout in rollouts)
    name, meaning = _MEASURES[settings.remasking]
    rows: list[dict[str, Any]] = []
    for rollout in rollouts:
        for row in range(len(rollout.completion_ids)):
            rows.append(_row(facts, prompts[len(rows)], rollout, row, settings.block_length, settings.remasking))
    shown = {f.name: vars(settings)[f.name] for f in fields(settings) if f.name != "vocab_chunk_rows"}
    return {
        "model": str(facts.config.name_or_path).rstrip("/").rpartition("/")[2],
        "family": facts.family.name,
        "settings": {key: value for key, value in shown.items() if value is not None} | {"version": __version__},
        "confidence": {"name": name, "meaning": meaning} if has_confidence else None,
        "rows": rows,
    }


def _row(
    facts: ModelFacts, prompt: Prompt, rollout: Rollout, row: int, block_length: int, remasking: Remasking
) -> dict[str, Any]:
    within: list[int] = rollout.commit_step[row].tolist()
    num_decoded = sum(step >= 0 for step in within)  # whole blocks from the left
    num_prompt_tokens = int(rollout.block_offset[row])
    borders = [0, *range(block_length - num_prompt_tokens, num_decoded, block_length), num_decoded]
    steps: list[int] = []
    for start, stop in pairwise(borders):
        before = max(steps, default=0)
        steps.extend(before + 1 + step for step in within[start:stop])
    ids: list[int] = rollout.window_ids[row, :num_decoded].tolist()
    completion = rollout.completion_ids[row]
    confidence = None
    if rollout.confidence is not None:
        values: list[float] = rollout.confidence[row, :num_decoded].tolist()
        confidence = [round(math.exp(value) if remasking == "entropy" else value, 4) for value in values]
    return {
        "prompt": _prompt_text(prompt),
        "num_completion_tokens": len(completion),
        "end": len(completion) - 1 if completion[-1] in facts.end_token_ids else None,
        "num_undecoded": len(within) - num_decoded,
        "num_prompt_tokens_in_block": num_prompt_tokens,
        "num_steps": max(steps),
        "block_starts": borders[:-1],
        "token_ids": ids,
        "texts": token_texts(facts.tokenizer, ids),
        "steps": steps,
        "confidence": confidence,
    }


def token_texts(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> list[str]:
    """
    Split the text of token ids into what each adds to it.

    A token that ends within a character adds nothing, and the one that completes it adds the character.

    Args:
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The tokenizer.
        ids (`Sequence[int]`):
            Token ids, special ones included.

    Returns:
        `list[str]`:
            Texts that add up to the whole.
    """
    texts: list[str] = []
    start, done = 0, 0  # what is decoded begins a token early, since many tokenizers treat a text's first one apart
    for place in range(len(ids)):
        before, now = (_decoded(tokenizer, ids[start:stop]) for stop in (done, place + 1))
        is_last = place == len(ids) - 1
        if not now.startswith(before):  # a decoder that rewrites: begin anew
            texts.append(_decoded(tokenizer, ids[place : place + 1]))
            start = done = place + 1
        elif now.endswith("\ufffd") and not is_last:
            texts.append("")
        else:
            texts.append(now[len(before) :])
            start, done = done, place + 1
    return texts


def _decoded(tokenizer: PreTrainedTokenizerBase, ids: Sequence[int]) -> str:
    text: Any = tokenizer.decode(list(ids), skip_special_tokens=False, clean_up_tokenization_spaces=False)
    return text


def _prompt_text(prompt: Any) -> str:
    if isinstance(prompt, str):
        return prompt
    return "\n\n".join(f"{message['role']}: {message['content']}" for message in prompt)


def _page(data: dict[str, Any]) -> str:
    page = _TEMPLATE.read_text(encoding="utf-8")
    for name, tag in (("__STYLE_HASH__", "style"), ("__SCRIPT_HASH__", "script")):
        content = page.partition(f"<{tag}>")[2].partition(f"</{tag}>")[0]
        digest = base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()
        page = page.replace(name, f"sha256-{digest}")  # the browser runs nothing else, whatever a text holds
    text = json.dumps(data, separators=(",", ":"))  # ASCII: no separators that JavaScript would take for a line's end
    for character in "<>&":
        text = text.replace(character, f"\\u{ord(character):04x}")
    return page.replace("__TRACE__", text)
