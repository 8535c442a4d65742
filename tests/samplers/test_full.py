# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.tiny import tiny_llada
from trl_stabledrl.samplers import Rollout, SamplingSettings, sample_full

END, MASK, OTHER_END = 1, 2, 4
VOCAB_SIZE = 12
NEVER = -1e4  # a logit; infinite ones would not survive the identity head


class ScriptedModel(nn.Module):
    """Model whose logits are a function of the ids; it keeps what it was called with."""

    def __init__(self, logits_of: Callable[[Tensor], Tensor], *, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.weight = nn.Parameter(torch.eye(VOCAB_SIZE, dtype=dtype))
        self.calls: list[tuple[Tensor, Tensor]] = []
        self.position_ids: list[Tensor] = []

    def forward(self, *, input_ids, attention_mask, position_ids, is_selected, head_fn):
        self.calls.append((input_ids.clone(), is_selected.clone()))
        self.position_ids.append(position_ids)
        hidden = self.logits_of(input_ids).to(self.weight.dtype)  # (B, S, V), as the head is the identity
        result = head_fn(hidden[is_selected] * self.weight.sum(dim=0), self.weight)
        assert not any(tensor.requires_grad for tensor in result)
        return result


def flat(input_ids: Tensor) -> Tensor:
    return torch.zeros(*input_ids.shape, VOCAB_SIZE)


def favour(*tokens: int, by: float = 50.0) -> Callable[[Tensor], Tensor]:
    def logits_of(input_ids: Tensor) -> Tensor:
        logits = flat(input_ids)
        logits[..., list(tokens)] = by
        return logits

    return logits_of


def never_end(input_ids: Tensor) -> Tensor:
    return favour(END, OTHER_END, by=NEVER)(input_ids)


def sample(model, prompts: list[list[int]], *, seeds: list[int] | None = None, pad: int = 0, **kwargs) -> Rollout:
    """Sample from left-padded prompts; keyword arguments of `SamplingSettings` and `sample_full` alike."""
    names = {field.name for field in dataclasses.fields(SamplingSettings)}
    settings = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    length = max(len(prompt) for prompt in prompts)
    return sample_full(
        model,
        torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts]),
        torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        mask_token_id=MASK,
        end_token_ids=(END, OTHER_END),
        settings=SamplingSettings(**{"num_denoising_steps": 2, "temperature": 1.0} | settings),
        row_seeds=seeds or list(range(len(prompts))),
        **kwargs,
    )


def test_only_masked_positions_of_the_active_block_reach_the_head():
    model = ScriptedModel(never_end)

    rollout = sample(
        model, [[5] * 64] * 8, max_completion_length=128, block_length=32, num_denoising_steps=16, temperature=0.9
    )

    assert sum(range(2, 33, 2)) == 272
    assert rollout.num_vocab_positions == sum(int(s.sum()) for _, s in model.calls) == 8 * 4 * 272 == 8704
    assert rollout.num_forwards == len(model.calls) == 64
    assert rollout.num_backbone_positions == 64 * 8 * 192 == 98_304
    assert rollout.num_tokens == 8 * 128
    for call, (_, is_selected) in enumerate(model.calls):
        block, step = divmod(call, 16)
        columns = is_selected.nonzero()[:, 1] - 64
        assert ((columns >= 32 * block) & (columns < 32 * (block + 1))).all()
        assert is_selected.sum(dim=1).tolist() == [32 - 2 * step] * 8


@pytest.mark.parametrize("remasking", ["low_confidence", "random", "entropy", "margin"])
@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_a_ragged_window_is_filled_exactly_and_no_committed_token_changes(remasking, temperature):
    model = ScriptedModel(favour(MASK))  # predicts the mask wherever it can

    rollout = sample(
        model,
        [[5, 6, 7], [8]],
        max_completion_length=10,
        block_length=4,
        num_denoising_steps=7,
        remasking=remasking,
        temperature=temperature,
        suppress_eos="sampling",
    )

    assert [len(ids) for ids in rollout.completion_ids] == [10, 10]
    assert rollout.num_forwards == 4 + 4 + 2  # one token a step: a block has no more steps than tokens
    assert MASK not in rollout.window_ids
    seen = [ids[:, 3:] for ids, _ in model.calls] + [rollout.window_ids]
    for before, after in zip(seen, seen[1:], strict=False):
        is_committed = before != MASK
        assert torch.equal(before[is_committed], after[is_committed])
        assert ((after != MASK).sum(dim=1) - is_committed.sum(dim=1)).tolist() == [1, 1]
    for row in rollout.commit_step.tolist():
        assert [sorted(row[:4]), sorted(row[4:8]), sorted(row[8:])] == [[0, 1, 2, 3], [0, 1, 2, 3], [0, 1]]


def test_the_most_confident_position_is_committed_first():
    def logits_of(input_ids: Tensor) -> Tensor:
        logits = flat(input_ids)
        logits[:, 2:, 7] = torch.tensor([1.0, 4.0, 2.0, 3.0])  # confidence by position of the window
        return logits

    for remasking in ("low_confidence", "margin", "entropy"):
        rollout = sample(
            ScriptedModel(logits_of),
            [[5, 6]],
            max_completion_length=4,
            block_length=4,
            num_denoising_steps=4,
            temperature=0.0,
            remasking=remasking,
        )
        assert rollout.commit_step.tolist() == [[3, 0, 2, 1]]


def test_confident_blocks_take_one_forward_each():
    rollout = sample(
        ScriptedModel(favour(7)),
        [[5, 6], [5]],
        max_completion_length=12,
        block_length=4,
        num_denoising_steps=4,
        confidence_threshold=0.9,
    )

    assert rollout.num_forwards == 3
    assert rollout.num_vocab_positions == 24
    assert rollout.num_decoded / rollout.num_row_steps == 4  # a row's tokens per forward
    assert not rollout.commit_step.any()


def test_unsure_rows_commit_one_token_a_step_and_sure_neighbours_wait_outside_the_batch():
    def logits_of(input_ids: Tensor) -> Tensor:
        logits = never_end(input_ids)
        logits[input_ids[:, 0] == 5, :, 7] = 50.0
        return logits

    model = ScriptedModel(logits_of)
    rollout = sample(
        model, [[5], [6]], max_completion_length=8, block_length=4, num_denoising_steps=1, confidence_threshold=0.9
    )

    assert rollout.commit_step[0].tolist() == [0] * 8
    assert [sorted(block) for block in rollout.commit_step[1].view(2, 4).tolist()] == [[0, 1, 2, 3]] * 2
    assert [len(ids) for ids, _ in model.calls] == [2, 1, 1, 1] * 2
    assert rollout.num_row_steps == 2 * (1 + 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("peak", [0.05, 3.0])
def test_rollout_frequencies_are_the_softmax_within_three_standard_errors(dtype, peak):
    given = torch.tensor([peak * math.cos(3 * i) for i in range(VOCAB_SIZE)], dtype=dtype)
    model = ScriptedModel(lambda ids: given.expand(*ids.shape, VOCAB_SIZE), dtype=dtype)

    rollout = sample(
        model, [[5]] * 200, max_completion_length=100, block_length=100, num_denoising_steps=1, vocab_chunk_rows=37
    )

    num = rollout.window_ids.numel()
    weights = [0.0 if i == MASK else math.exp(x) for i, x in enumerate(given.double().tolist())]
    for token, weight in enumerate(weights):
        p = weight / sum(weights)
        frequency = (rollout.window_ids == token).double().mean().item()
        assert abs(frequency - p) <= 3 * math.sqrt(p * (1 - p) / num)


def test_rollouts_differ_by_seed_at_temperature_one_and_agree_at_zero():
    near_uniform = lambda ids: 0.01 * torch.arange(VOCAB_SIZE).float().expand(*ids.shape, -1)  # noqa: E731

    def rollouts(temperature: float, seeds: list[int]) -> list[list[int]]:
        model = ScriptedModel(near_uniform)
        sizes: dict[str, Any] = {"max_completion_length": 8, "block_length": 4}
        return sample(model, [[5, 6]] * 8, seeds=seeds, temperature=temperature, **sizes).window_ids.tolist()

    warm = rollouts(1.0, list(range(8)))
    assert len({tuple(ids) for ids in warm}) == 8
    assert rollouts(1.0, list(range(8))) == warm
    other_rank = rollouts(1.0, list(range(8, 16)))
    assert not {tuple(ids) for ids in warm} & {tuple(ids) for ids in other_rank}
    assert len({tuple(ids) for ids in rollouts(0.0, list(range(8)))}) == 1


def test_every_row_stays_in_its_own_support():
    supports = {5: [0, 3], 6: [6, 7], 7: [8, 9, 10]}

    def logits_of(input_ids: Tensor) -> Tensor:
        logits = torch.full((*input_ids.shape, VOCAB_SIZE), NEVER)
        for row, prompt in enumerate(input_ids[:, 0].tolist()):
            logits[row, :, supports[prompt]] = 0.0
        return logits

    rollout = sample(
        ScriptedModel(logits_of), [[5], [6], [7]], max_completion_length=40, block_length=8, temperature=0.7
    )

    assert [sorted(set(ids)) for ids in rollout.window_ids.tolist()] == list(supports.values())


MIXED_PROMPTS = [[5, 6, 7, 8, 9, 10], [11], [END, 20, 21], [30, 31, 32, 33], [40, 41]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("guidance_scale", [0.0, 1.5])
def test_a_row_does_not_depend_on_its_batch(temperature, remasking, guidance_scale):
    model = tiny_llada()
    settings: dict[str, Any] = {
        "max_completion_length": 12,
        "block_length": 4,
        "num_denoising_steps": 3,
        "temperature": temperature,
        "remasking": remasking,
        "guidance_scale": guidance_scale,
    }
    seeds = [11, 12, 13, 14, 15]

    together = sample(model, MIXED_PROMPTS, seeds=seeds, pad=END, **settings)
    order = [3, 0, 4, 2, 1]
    shuffled = sample(
        model, [MIXED_PROMPTS[i] for i in order], seeds=[seeds[i] for i in order], vocab_chunk_rows=3, **settings
    )

    assert torch.equal(shuffled.window_ids, together.window_ids[order])
    assert torch.equal(shuffled.commit_step, together.commit_step[order])
    for row, (prompt, seed) in enumerate(zip(MIXED_PROMPTS, seeds, strict=True)):
        alone = sample(model, [prompt], seeds=[seed], **settings)
        assert alone.completion_ids[0] == together.completion_ids[row]
        assert torch.equal(alone.commit_step[0], together.commit_step[row])


def test_greedy_decoding_of_a_real_model_follows_the_definition():
    model, prompt = tiny_llada(), [5, 6, 7]
    window = [MASK] * 8
    for start in (0, 4):
        for _ in range(2):  # two tokens a step
            with torch.no_grad():
                probs = model(torch.tensor([prompt + window])).logits[0, 3:].double()
            probs[:, MASK] = -math.inf
            best, tokens = probs.softmax(dim=-1).max(dim=-1)
            masked = [i for i in range(start, start + 4) if window[i] == MASK]
            for i in sorted(masked, key=lambda i: -best[i].item())[:2]:
                window[i] = int(tokens[i])

    rollout = sample(
        model, [prompt], max_completion_length=8, block_length=4, temperature=0.0, suppress_eos="early_commit"
    )

    assert not {END, OTHER_END} & set(window[:4])  # else it would stop
    assert rollout.window_ids.tolist() == [window]


def end_in_block(block: int) -> Callable[[Tensor], Tensor]:
    """Row 0 (prompt 5) is sure of an end token at the second position of a block; nothing else ever ends."""

    def logits_of(input_ids: Tensor) -> Tensor:
        logits = never_end(input_ids)
        logits[input_ids[:, 0] == 5, 1 + 4 * block + 1, OTHER_END] = 50.0
        return logits

    return logits_of


def test_rows_with_an_end_token_in_a_finished_block_leave_the_batch():
    model = ScriptedModel(end_in_block(1))

    rollout = sample(model, [[5], [6]], max_completion_length=12, block_length=4)

    assert [len(ids) for ids, _ in model.calls] == [2, 2, 2, 2, 1, 1]
    assert rollout.num_vocab_positions == 2 * (4 + 2) + 2 * (4 + 2) + 1 * (4 + 2)
    assert rollout.num_backbone_positions == 4 * 2 * 13 + 2 * 1 * 13
    assert rollout.completion_ids[0][-1] == OTHER_END
    assert [len(ids) for ids in rollout.completion_ids] == [6, 12]
    assert rollout.num_tokens == 18
    assert rollout.num_decoded == 20
    assert rollout.num_row_steps == 4 + 6
    assert MASK not in rollout.window_ids[0, :8]  # the end block is whole, also past the end token
    assert (rollout.window_ids[0, 8:] == MASK).all()
    assert (rollout.commit_step[0, 8:] == -1).all()


def test_sampling_stops_when_every_row_has_ended():
    model = ScriptedModel(favour(END))

    rollout = sample(model, [[5], [6]], max_completion_length=12, block_length=4)

    assert len(model.calls) == 2
    assert rollout.completion_ids == [[END], [END]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_end_tokens_can_be_banned_from_sampling(temperature):
    rollout = sample(
        ScriptedModel(favour(END, OTHER_END)),
        [[5], [6]],
        max_completion_length=12,
        block_length=4,
        temperature=temperature,
        suppress_eos="sampling",
    )

    assert not {END, OTHER_END} & set(rollout.window_ids.flatten().tolist())


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("confidence_threshold", [None, 0.5])
def test_end_tokens_can_be_kept_from_being_committed_early(temperature, confidence_threshold):
    def logits_of(input_ids: Tensor) -> Tensor:
        logits = favour(7, by=5.0)(input_ids)
        logits[:, 1, :] = 0.0
        logits[:, 1, END] = 50.0  # the surest position of all
        return logits

    steps = {}
    for suppress_eos in (None, "early_commit"):
        rollout = sample(
            ScriptedModel(logits_of),
            [[5]],
            max_completion_length=4,
            block_length=4,
            num_denoising_steps=4,
            temperature=temperature,
            suppress_eos=suppress_eos,
            confidence_threshold=confidence_threshold,
        )
        steps[suppress_eos] = rollout.commit_step[0].tolist()

    assert steps[None][0] == 0
    assert steps["early_commit"][0] == max(steps["early_commit"]) > 0


def test_guidance_extrapolates_from_the_masked_prompt_in_one_doubled_forward():
    def logits_of(input_ids: Tensor) -> Tensor:
        is_blind = (input_ids[:, :2] == MASK).all(dim=1)
        logits = flat(input_ids)
        logits[..., 6], logits[..., 7] = 2.0, 1.0
        logits[is_blind, :, 6], logits[is_blind, :, 7] = 2.0, 0.0
        return logits

    sizes: dict[str, Any] = {"max_completion_length": 4, "block_length": 4, "temperature": 0.0}
    plain, guided = ScriptedModel(logits_of), ScriptedModel(logits_of)
    without = sample(plain, [[5, 5], [5, 5]], **sizes)
    # token 7: 0 + (1 + 1.5) * 1 = 2.5, above token 6: 2 + 2.5 * 0 = 2
    rollout = sample(guided, [[5, 5], [5, 5]], guidance_scale=1.5, **sizes)

    assert set(without.window_ids.flatten().tolist()) == {6}
    assert set(rollout.window_ids.flatten().tolist()) == {7}
    assert rollout.num_forwards == without.num_forwards == 2
    assert rollout.num_backbone_positions == 2 * without.num_backbone_positions
    assert rollout.num_vocab_positions == without.num_vocab_positions
    ids, _ = guided.calls[0]
    assert ids[:, :2].tolist() == [[5, 5], [5, 5], [MASK, MASK], [MASK, MASK]]


def test_guidance_masks_real_prompt_tokens_only():
    model = ScriptedModel(never_end)

    sample(model, [[5, 6, 7], [8]], pad=9, max_completion_length=4, block_length=4, guidance_scale=1.0)

    assert model.calls[0][0][:, :3].tolist() == [[5, 6, 7], [9, 9, 8], [MASK] * 3, [9, 9, MASK]]


def test_a_prompt_with_an_end_token_or_end_as_padding_changes_no_length():
    sizes: dict[str, Any] = {"max_completion_length": 8, "block_length": 4}

    padded = sample(ScriptedModel(never_end), [[5, END, 6], [END]], pad=END, **sizes)
    other = sample(ScriptedModel(never_end), [[5, END, 6], [END]], pad=0, **sizes)

    assert [len(ids) for ids in padded.completion_ids] == [8, 8]
    assert torch.equal(padded.window_ids, other.window_ids)


def test_positions_are_counted_from_the_first_real_token():
    model = ScriptedModel(never_end)

    sample(model, [[5, 6, 7], [8]], max_completion_length=4, block_length=4)

    # rotary embeddings would forgive a shift, learned ones and the model's length limit would not
    assert model.position_ids[0].tolist() == [[0, 1, 2, 3, 4, 5, 6], [0, 0, 0, 1, 2, 3, 4]]


def test_columns_that_pad_every_row_left_are_dropped():
    def logits_of(input_ids: Tensor) -> Tensor:
        logits = never_end(input_ids)
        logits[input_ids[:, 0] == 5, -8, END] = 50.0
        return logits

    model = ScriptedModel(logits_of)
    sample(model, [[5] * 6, [6] * 2], max_completion_length=8, block_length=4)

    assert [tuple(ids.shape) for ids, _ in model.calls] == [(2, 14), (2, 14), (1, 10), (1, 10)]


def test_ranks_run_the_same_number_of_forwards():
    # rank 0 ends in its first block, rank 1 never; each is told what the other says at the same turn
    models = [ScriptedModel(favour(END)), ScriptedModel(never_end)]
    is_active = {1: [True] * 6 + [False]}
    told: list[bool] = []

    def any_rank_active(is_local_active: bool) -> bool:
        told.append(is_local_active)
        return is_local_active or is_active[1][len(told) - 1]

    sizes: dict[str, Any] = {"max_completion_length": 12, "block_length": 4}
    finished = sample(models[0], [[5], [6]], any_rank_active=any_rank_active, **sizes)
    other = sample(models[1], [[5], [6]], **sizes)

    assert told == [True, True] + [False] * 5
    assert len(models[0].calls) == len(models[1].calls) == finished.num_forwards == other.num_forwards == 6
    assert [int(is_selected.sum()) for _, is_selected in models[0].calls] == [8, 4, 0, 0, 0, 0]
    assert finished.completion_ids == [[END], [END]]


def test_empty_forwards_run_on_a_real_model():
    turns = iter([True, True, True, False])

    rollout = sample(
        tiny_llada(),
        [[5, 6]],
        max_completion_length=4,
        block_length=4,
        guidance_scale=1.0,
        any_rank_active=lambda is_active: next(turns),
    )

    assert rollout.num_forwards == 3
    assert MASK not in rollout.window_ids


def test_no_autograd_graph_is_built_in_train_mode_with_gradients_on():
    model = tiny_llada().train()
    sizes_of_graphs = []
    model.model.register_forward_hook(
        lambda module, args, output: sizes_of_graphs.append(output.last_hidden_state.requires_grad)
    )

    with torch.enable_grad():
        rollout = sample(model, [[5, 6]], max_completion_length=8, block_length=4)

    assert sizes_of_graphs == [False] * rollout.num_forwards
    assert not rollout.window_ids.requires_grad
    assert model.training
    assert torch.is_grad_enabled()


def test_the_global_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    first = sample(ScriptedModel(never_end), [[5]], max_completion_length=8, block_length=4)
    assert torch.equal(torch.get_rng_state(), state)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        again = sample(ScriptedModel(never_end), [[5]], max_completion_length=8, block_length=4)

    assert torch.equal(first.window_ids, again.window_ids)


def test_logits_are_held_a_chunk_at_a_time(monkeypatch):
    rows = []
    mm = torch.mm
    monkeypatch.setattr(torch, "mm", lambda a, b, **kwargs: rows.append(len(a)) or mm(a, b, **kwargs))
    sizes: dict[str, Any] = {"max_completion_length": 8, "block_length": 8, "num_denoising_steps": 1}

    whole = sample(ScriptedModel(never_end), [[5]] * 4, **sizes)
    assert rows == [32]
    rows.clear()
    chunked = sample(ScriptedModel(never_end), [[5]] * 4, vocab_chunk_rows=5, **sizes)

    assert rows == [5] * 6 + [2]
    assert torch.equal(chunked.window_ids, whole.window_ids)


def test_bf16_models_are_sampled_in_float32():
    rollout = sample(tiny_llada(dtype=torch.bfloat16), MIXED_PROMPTS, max_completion_length=8, block_length=4)

    assert MASK not in [token for ids in rollout.completion_ids for token in ids]
    assert rollout.window_ids.dtype == torch.long


def test_progress_counts_up_to_the_whole_window():
    seen = []

    sample(
        ScriptedModel(end_in_block(0)),
        [[5], [6]],
        max_completion_length=8,
        block_length=4,
        progress=lambda *pair: seen.append(pair),
    )

    # two tokens a row and step; the row that ends in block 0 skips the 4 positions of block 1
    assert seen == [(4, 16), (8, 16), (14, 16), (16, 16)]


def test_a_model_that_returns_nan_stops_the_rollout():
    def logits_of(input_ids: Tensor) -> Tensor:
        return flat(input_ids).masked_fill((input_ids[:, 0] == 6)[:, None, None], math.nan)

    with pytest.raises(ValueError, match=r"finite logits, got NaN or infinity in rows \[1\]"):
        sample(ScriptedModel(logits_of), [[5], [6]], max_completion_length=4, block_length=4)
