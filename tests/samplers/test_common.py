# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from typing import Any

import pytest
import torch

from trl_stabledrl import samplers
from trl_stabledrl.samplers import Rollout, SamplingSettings, check_decoding, validate_trajectory

END, MASK = 1, 2


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"block_length": 0}, "block_length to be an integer >= 1, got 0"),
        ({"num_denoising_steps": 0}, "num_denoising_steps to be an integer >= 1, got 0"),
        ({"max_completion_length": 0}, "max_completion_length to be an integer >= 1, got 0"),
        ({"temperature": -1.0}, "temperature to be 0, or a number >= 0.001, got -1.0"),
        ({"temperature": math.nan}, "temperature to be 0, or a number >= 0.001, got nan"),
        ({"top_k": -1}, "top_k to be an integer >= 0, got -1"),
        ({"top_p": 0.0}, "top_p to be 0 < top_p <= 1, got 0.0"),
        ({"remasking": "confidence"}, "remasking to be one of .*, got 'confidence'"),
        ({"confidence_threshold": 1.0}, "confidence_threshold to be None, or 0 <= .*, got 1.0"),
        ({"confidence_threshold": 0.9, "remasking": "random"}, "remasking to be 'low_confidence' or 'margin'"),
        ({"suppress_eos": "always"}, "suppress_eos to be None, 'sampling' or 'early_commit', got 'always'"),
        ({"guidance_scale": -0.5}, "guidance_scale to be a number >= 0, got -0.5"),
        ({"vocab_chunk_rows": 0}, "vocab_chunk_rows to be None, or an integer >= 1, got 0"),
    ],
)
def test_settings_that_cannot_work_are_refused(settings, message):
    with pytest.raises(ValueError, match=f"Expected {message}"):
        SamplingSettings(**settings)


def no_model(**inputs: Any) -> Any:
    pytest.fail("the model was run")


def sample_without_model(attention: Any, **changes: Any) -> Rollout:
    inputs: dict[str, Any] = {
        "prompt_ids": torch.tensor([[5, 6], [0, 7]]),
        "prompt_mask": torch.tensor([[1, 1], [0, 1]]),
        "mask_token_id": MASK,
        "end_token_ids": (END,),
        "settings": SamplingSettings(),
        "row_seeds": [0, 1],
    }
    return samplers.sample(no_model, attention=attention, **inputs | changes)


@pytest.mark.parametrize(
    ("attention", "settings", "message"),
    [
        (
            "full",
            {"max_completion_length": 16},
            r"block_length to be 1 to max_completion_length=16, got 32\. Shorten the block or lengthen",
        ),
        (
            "block",
            {"guidance_scale": 1.5},
            r"guidance_scale to be 0 with block attention, got 1\.5\. .* set guidance_scale to 0\.",
        ),
        ("causal", {}, r"attention to be one of \('full', 'block'\), got 'causal'"),
    ],
)
def test_settings_that_do_not_fit_the_attention_are_refused_without_a_model(attention, settings, message):
    chosen = SamplingSettings(**settings)

    with pytest.raises(ValueError, match=f"Expected {message}"):
        check_decoding(chosen, attention=attention)
    with pytest.raises(ValueError, match=f"Expected {message}"):
        sample_without_model(attention, settings=chosen)


def test_settings_that_fit_one_attention_only_pass_there():
    check_decoding(SamplingSettings(max_completion_length=16, block_length=32), attention="block")
    check_decoding(SamplingSettings(guidance_scale=1.5), attention="full")


@pytest.mark.parametrize("attention", ["full", "block"])
@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"row_seeds": [0]}, "row_seeds to be one seed for each of the 2 rows, got '1 seeds'"),
        ({"mask_token_id": END}, "mask_token_id to be none of end_token_ids"),
        ({"prompt_mask": torch.ones(2, 3)}, "prompt_mask to be of the shape of prompt_ids"),
        ({"prompt_mask": torch.tensor([[1, 1], [1, 0]])}, r"prompt_mask to be left-padded, got .* rows \[1\]"),
    ],
)
def test_inputs_that_cannot_work_are_refused(attention, changes, message):
    with pytest.raises(ValueError, match=f"Expected {message}"):
        sample_without_model(attention, **changes)


GOOD = Rollout(
    completion_ids=[[5, 6, 7, 8, END], [5, 6, 7, 8, 9, 5]],
    window_ids=torch.tensor([[5, 6, 7, 8, END, 6], [5, 6, 7, 8, 9, 5]]),
    commit_step=torch.tensor([[0, 0, 1, 1, 1, 0], [1, 0, 2, 2, 0, 0]]),
    block_offset=torch.tensor([0, 0]),
    num_forwards=5,
    num_backbone_positions=60,
    num_vocab_positions=20,
    num_tokens=11,
    num_decoded=12,
    num_row_steps=8,
)
SHORT = dataclasses.replace(
    GOOD,
    completion_ids=[[END], [5, 6, 7, 8, 9, 5]],
    window_ids=torch.tensor([[END, 6, 7, 8, MASK, MASK], [5, 6, 7, 8, 9, 5]]),
    commit_step=torch.tensor([[0, 0, 1, 1, -1, -1], [1, 0, 2, 2, 0, 0]]),
)
# blocks of 4 behind prompts that fill 3 and 2 positions of the first
SHIFTED = dataclasses.replace(
    GOOD,
    completion_ids=[[5, 6, END], [5, 6, 7, 8, 9, 5]],
    window_ids=torch.tensor([[5, 6, END, 8, 9, MASK], [5, 6, 7, 8, 9, 5]]),
    commit_step=torch.tensor([[0, 1, 0, 2, 1, -1], [1, 0, 3, 2, 1, 0]]),
    block_offset=torch.tensor([3, 2]),
)


def changed(rollout: Rollout, field: str, row: int, column: int, value: int) -> Rollout:
    tensor = getattr(rollout, field).clone()
    tensor[row, column] = value
    return dataclasses.replace(rollout, **{field: tensor})


@pytest.mark.parametrize("rollout", [GOOD, SHORT, SHIFTED], ids=["full", "short", "shifted"])
def test_a_whole_trajectory_passes(rollout):
    validate_trajectory(rollout, block_length=4, mask_token_id=MASK, end_token_ids=(END,))


@pytest.mark.parametrize(
    ("rollout", "message"),
    [
        (changed(GOOD, "window_ids", 0, 2, MASK), r"no mask token \(2\) in row 0, block 0"),
        (changed(GOOD, "commit_step", 0, 2, -1), "steps contiguous from 0 in row 0, block 0"),
        (changed(GOOD, "commit_step", 1, 1, 1), "steps contiguous from 0 in row 1, block 0"),
        (changed(GOOD, "commit_step", 1, 4, 2), "steps contiguous from 0 in row 1, block 1"),
        (changed(SHORT, "commit_step", 0, 4, 0), "only mask tokens and steps -1 in row 0, block 1"),
        (changed(SHORT, "window_ids", 0, 5, 9), "only mask tokens and steps -1 in row 0, block 1"),
        (changed(SHORT, "window_ids", 0, 0, 9), r"no mask token \(2\) in row 0, block 1"),
        (dataclasses.replace(GOOD, completion_ids=[[5, 6, 7, 8], [5, 6, 7, 8, 9, 5]]), "the completion of row 0"),
        (dataclasses.replace(GOOD, completion_ids=[[5]]), "one commit step per window token"),
        (changed(SHIFTED, "commit_step", 0, 0, 1), "steps contiguous from 0 in row 0, block 0"),
        (changed(SHIFTED, "commit_step", 1, 5, 1), "steps contiguous from 0 in row 1, block 1"),
        (changed(SHIFTED, "window_ids", 0, 4, MASK), r"no mask token \(2\) in row 0, block 1"),
        (changed(SHIFTED, "commit_step", 0, 5, 0), "only mask tokens and steps -1 in row 0, block 2"),
        (
            dataclasses.replace(SHIFTED, block_offset=torch.tensor([0, 0])),
            "only mask tokens and steps -1 in row 0, block 1",
        ),
        (
            dataclasses.replace(SHIFTED, block_offset=torch.tensor([4, 0])),
            r"block_offset to be 0 to 3, .* got \[4, 0\]",
        ),
        (dataclasses.replace(SHIFTED, block_offset=torch.tensor([3])), "one commit step per window token, one block"),
    ],
)
def test_a_broken_trajectory_is_refused(rollout, message):
    with pytest.raises(ValueError, match=f"Expected {message}"):
        validate_trajectory(rollout, block_length=4, mask_token_id=MASK, end_token_ids=(END,))
