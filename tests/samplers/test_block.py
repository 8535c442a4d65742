# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import math
from collections import Counter
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests import naive
from tests.tiny import tiny_sdar
from trl_stabledrl.core.attention import dense_mask
from trl_stabledrl.samplers import Rollout, SamplingSettings, sample_block

END, MASK, OTHER_END = 1, 2, 4
ENDS = (END, OTHER_END)
VOCAB_SIZE = 12
NEVER = -1e4  # a logit; infinite ones would not survive the identity head


class ScriptedModel(nn.Module):
    """Model whose logits are a function of the ids; it fills its cache, and keeps what it was called with."""

    def __init__(self, logits_of: Callable[[Tensor, Tensor], Tensor]) -> None:
        super().__init__()
        self.logits_of = logits_of
        self.weight = nn.Parameter(torch.eye(VOCAB_SIZE))
        self.calls: list[dict[str, Any]] = []

    def forward(self, *, input_ids, layout, past_key_values, is_selected, head_fn):
        num_cached = past_key_values.get_seq_length()
        stored = torch.zeros(len(input_ids), 1, input_ids.shape[1], 1)
        keys, _ = past_key_values.update(stored, stored, 0)
        assert keys.shape[2] == layout.copy_index.shape[1] == layout.position.shape[1]
        queries = layout.last(input_ids.shape[1])
        self.calls.append(
            {
                "input_ids": input_ids.clone(),
                "is_selected": is_selected.clone(),
                "copy_index": queries.copy_index,
                "position": queries.position,
                "num_cached": num_cached,
            }
        )
        hidden = self.logits_of(input_ids, queries.position)
        return head_fn(hidden[is_selected] * self.weight.sum(dim=0), self.weight)

    def seen(self, name: str) -> list[Any]:
        return [call[name].tolist() if isinstance(call[name], Tensor) else call[name] for call in self.calls]


def favour(*tokens: int, by: float = 50.0) -> Callable[[Tensor, Tensor], Tensor]:
    def logits_of(input_ids: Tensor, position: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, VOCAB_SIZE)
        logits[..., list(tokens)] = by
        return logits

    return logits_of


never_end = favour(*ENDS, by=NEVER)


def end_at(place: int) -> Callable[[Tensor, Tensor], Tensor]:
    """Rows that start with a 5 are sure of an end token at one position; nothing else ever ends."""

    def logits_of(input_ids: Tensor, position: Tensor) -> Tensor:
        logits = never_end(input_ids, position)
        is_place = (position == place) & (input_ids == 5).any(dim=1, keepdim=True)
        logits[..., OTHER_END] = torch.where(is_place, 50.0, NEVER)
        return logits

    return logits_of


def sample(
    model, prompts: list[list[int]], *, seeds: Sequence[int] | None = None, pad: int = 0, ends=ENDS, **kwargs
) -> Rollout:
    """Sample from left-padded prompts; keyword arguments of `SamplingSettings` and `sample_block` alike."""
    names = {field.name for field in dataclasses.fields(SamplingSettings)}
    settings = {name: kwargs.pop(name) for name in list(kwargs) if name in names}
    length = max(len(prompt) for prompt in prompts)
    return sample_block(
        model,
        torch.tensor([[pad] * (length - len(prompt)) + prompt for prompt in prompts], dtype=torch.long),
        torch.tensor([[0] * (length - len(prompt)) + [1] * len(prompt) for prompt in prompts]),
        mask_token_id=MASK,
        end_token_ids=ends,
        settings=SamplingSettings(**{"num_denoising_steps": 2, "block_length": 4, "temperature": 1.0} | settings),
        row_seeds=seeds or list(range(len(prompts))),
        **kwargs,
    )


def prompt_of(length: int) -> list[int]:
    """Ordinary tokens, different ones for every length."""
    return [5 + (7 * i + 3 * length + i * i * length) % 59 for i in range(length)]


def test_the_peers_job_takes_129_calls_5152_backbone_and_2560_vocabulary_positions():
    model = tiny_sdar()
    counts: Counter[str] = Counter()
    rows = []

    def watched(**inputs: Any) -> Any:
        head_fn = inputs.pop("head_fn")
        counts["calls"] += 1
        counts["backbone"] += inputs["input_ids"].numel()
        rows.append(len(inputs["input_ids"]))

        def head(hidden: Tensor, weight: Tensor, **rest: Any) -> Any:
            counts["vocabulary"] += len(hidden)
            return head_fn(hidden, weight, **rest)

        return model(**inputs, head_fn=head)

    rollout = sample(
        watched, [prompt_of(64)] * 8, max_completion_length=128, num_denoising_steps=4, suppress_eos="sampling"
    )

    assert rollout.num_forwards == counts["calls"] == 1 + 32 * 4 == 129
    assert rollout.num_backbone_positions == counts["backbone"] == 64 + 8 * (32 * 16 + 31 * 4) == 5152
    assert rollout.num_vocab_positions == counts["vocabulary"] == 8 * 32 * (4 + 3 + 2 + 1) == 2560
    assert rows == [1] + [8] * 128
    assert rollout.num_decoded == rollout.num_tokens == rollout.num_row_steps == 8 * 128


CASES: list[tuple[int, dict[str, Any]]] = [
    (1, {"max_completion_length": 5, "num_denoising_steps": 1}),
    (3, {"max_completion_length": 8, "num_denoising_steps": 2}),
    (4, {"max_completion_length": 11, "num_denoising_steps": 3}),
    (4, {"max_completion_length": 10, "confidence_threshold": 0.09}),
    (4, {"max_completion_length": 9, "num_denoising_steps": 4, "remasking": "margin", "suppress_eos": "sampling"}),
    (4, {"max_completion_length": 9, "num_denoising_steps": 2, "remasking": "entropy"}),
    (4, {"max_completion_length": 12, "confidence_threshold": 0.06, "suppress_eos": "early_commit"}),
    (8, {"max_completion_length": 19, "num_denoising_steps": 3, "suppress_eos": "early_commit"}),
    (8, {"max_completion_length": 6, "confidence_threshold": 0.08}),
    (32, {"max_completion_length": 35, "num_denoising_steps": 3}),
]


@pytest.mark.parametrize(("block_length", "settings"), CASES)
def test_cached_rollouts_are_the_uncached_definition_token_for_token(block_length, settings):
    # the last tokens of the vocabulary are end tokens too, so that rows end at different blocks
    ends = (*ENDS, 60, 61, 62, 63)
    model = tiny_sdar(block_size=block_length, dtype=torch.float64, seed=block_length)
    options: dict[str, Any] = {"num_denoising_steps": 2} | settings
    options["threshold"] = options.pop("confidence_threshold", None)
    decoding = naive.BlockDecoding(block_length=block_length, mask_token_id=MASK, end_token_ids=ends, **options)
    lengths = [*range(10)] if block_length < 32 else [*range(20, 55)]
    assert {length % block_length for length in lengths} == {*range(block_length)}
    prompts = [prompt_of(length) for length in lengths]
    prompts = [prompts[i] for i in sorted(range(len(prompts)), key=lambda i: (7 * i % 5, i))]  # long ones among short
    expected = [naive.block_rollout(model, prompt, decoding) for prompt in prompts]
    settings = settings | {"block_length": block_length, "temperature": 0.0, "ends": ends, "pad": END}

    for size in (1, 5):
        found = []
        for start in range(0, len(prompts), size):
            rollout = sample(model, prompts[start : start + size], **settings)
            found += zip(rollout.window_ids.tolist(), rollout.commit_step.tolist(), strict=True)
        assert found == expected

    num_decoded = {sum(step >= 0 for step in steps) for _, steps in expected}
    assert len(num_decoded) > 1 or settings.get("suppress_eos") == "sampling"  # rows did end apart


MIXED_PROMPTS = [[5, 6], [7, 8, 9, 10, 11, 12, 13, 14, 15], [], [END, 20, 21, 22], [30, 31, 32, 33, 34, END]]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("remasking", ["low_confidence", "random"])
@pytest.mark.parametrize("confidence_threshold", [None, 0.07])
def test_a_row_does_not_depend_on_its_batch(temperature, remasking, confidence_threshold):
    if confidence_threshold is not None:
        remasking = {"low_confidence": "low_confidence", "random": "margin"}[remasking]
    model = tiny_sdar()
    settings: dict[str, Any] = {
        "max_completion_length": 13,
        "num_denoising_steps": 3,
        "temperature": temperature,
        "remasking": remasking,
        "confidence_threshold": confidence_threshold,
        "ends": (*ENDS, 60, 61, 62, 63),
    }
    seeds = [11, 12, 13, 14, 15]

    together = sample(model, MIXED_PROMPTS, seeds=seeds, pad=END, **settings)
    order = [3, 0, 4, 2, 1]
    shuffled = sample(
        model, [MIXED_PROMPTS[i] for i in order], seeds=[seeds[i] for i in order], vocab_chunk_rows=3, **settings
    )

    assert together.block_offset.tolist() == [2, 1, 0, 0, 2]
    assert torch.equal(shuffled.window_ids, together.window_ids[order])
    assert torch.equal(shuffled.commit_step, together.commit_step[order])
    for row, (prompt, seed) in enumerate(zip(MIXED_PROMPTS, seeds, strict=True)):
        alone = sample(model, [prompt], seeds=[seed], **settings)
        assert alone.completion_ids[0] == together.completion_ids[row]
        assert torch.equal(alone.commit_step[0], together.commit_step[row])


def test_completions_of_a_prompt_share_its_prefill_and_differ_by_seed():
    model = tiny_sdar()
    rows = []
    model.model.register_forward_pre_hook(
        lambda module, args, kwargs: rows.append(tuple(kwargs["input_ids"].shape)), with_kwargs=True
    )
    first, second = prompt_of(9), prompt_of(14)
    sizes: dict[str, Any] = {"max_completion_length": 8, "suppress_eos": "sampling"}

    rollout = sample(model, [first, second, first, second, first, second], seeds=[1, 2, 3, 4, 5, 6], **sizes)

    # whole blocks of 8 and 12 tokens; then blocks of 4 with tails of 1 and 2, so the last ends after 2 positions
    assert rows == [(2, 12), (6, 4), (6, 4), (6, 8), (6, 4), (6, 6), (6, 2)]
    assert len({tuple(ids) for ids in rollout.window_ids.tolist()}) == 6
    for row, prompt in enumerate([first, second] * 3):
        alone = sample(model, [prompt], seeds=[row + 1], **sizes)
        assert torch.equal(alone.window_ids[0], rollout.window_ids[row])


def test_prompts_with_the_same_whole_blocks_share_them_whatever_their_tails():
    model = ScriptedModel(never_end)

    sample(model, [[5, 6, 7, 8, 9], [5, 6, 7, 8], [5, 6, 7, 8, 10, 11], [5, 6]], max_completion_length=4)

    assert model.seen("input_ids")[0] == [[5, 6, 7, 8]]


@pytest.mark.parametrize("length", [8, 9, 10, 11])
def test_blocks_are_counted_from_the_first_prompt_token_whatever_the_padding(length):
    prompt, other = prompt_of(length), prompt_of(23)
    model = ScriptedModel(never_end)

    rollout = sample(model, [prompt, other], max_completion_length=12, num_denoising_steps=4)

    tail = length % 4
    assert rollout.block_offset.tolist() == [tail, 3]
    first = model.calls[1]
    assert first["num_cached"] == 20
    assert first["input_ids"][0].tolist() == prompt[8:] + [MASK] * (4 - tail)
    assert first["position"].tolist() == [[8, 9, 10, 11], [20, 21, 22, 23]]
    # one token a step: blocks of the window end where positions are multiples of 4
    borders = [0, 4 - tail, 8 - tail, 12 - tail, 12]
    for start, stop in zip(borders, borders[1:], strict=False):
        assert sorted(rollout.commit_step[0, start:stop].tolist()) == [*range(stop - start)]


@pytest.mark.parametrize("confidence_threshold", [None, 0.9])
@pytest.mark.parametrize("token", [MASK, 7])
def test_prompt_tokens_in_a_block_are_never_masked_sampled_or_overwritten(confidence_threshold, token):
    prompts = [[5, 6, 8, 9, 10], [MASK, END, 8, 9, MASK, END, 11], [6, 8]]  # a mask token in a prompt is a token
    model = ScriptedModel(favour(token))

    rollout = sample(
        model,
        prompts,
        max_completion_length=6,
        num_denoising_steps=1,
        confidence_threshold=confidence_threshold,
        suppress_eos="sampling",
    )

    tails = [[10], [MASK, END, 11], [6, 8]]
    first_block = [call for call in model.calls[1:] if call["position"][0, -1] == 7]
    assert first_block
    for call in first_block:
        for ids, is_selected, tail in zip(call["input_ids"], call["is_selected"], tails, strict=True):
            assert ids[: len(tail)].tolist() == tail
            assert not is_selected[: len(tail)].any()
    assert [len(ids) for ids in rollout.completion_ids] == [6, 6, 6]
    assert MASK not in rollout.window_ids  # a model that predicts the mask fills its blocks nevertheless


def test_only_masked_positions_of_the_active_block_reach_the_head():
    model = ScriptedModel(never_end)

    rollout = sample(model, [prompt_of(9)] * 2, max_completion_length=7, num_denoising_steps=2)

    # 3 positions in the first block behind a tail of one: 2 + 1; then 4: 2 + 2
    selected = [call["is_selected"].sum(dim=1).tolist() for call in model.calls]
    assert selected == [[0, 0][:1], [3, 3], [1, 1], [4, 4], [2, 2]]
    for call in model.calls:
        assert (call["input_ids"][call["is_selected"]] == MASK).all()
        assert (call["copy_index"][call["is_selected"]] == 1).all()
    assert rollout.num_vocab_positions == 20
    assert rollout.commit_step[0, :3].tolist().count(0) == 2


def test_a_finished_block_is_stored_by_the_next_blocks_first_pass_and_the_last_one_never():
    model = ScriptedModel(never_end)

    rollout = sample(model, [prompt_of(8)], max_completion_length=10, num_denoising_steps=2)

    assert [call["input_ids"].shape[1] for call in model.calls] == [8, 4, 4, 8, 4, 6, 2]
    assert model.seen("num_cached") == [0, 8, 8, 8, 12, 12, 16]
    assert model.seen("copy_index")[3] == [[0] * 4 + [1] * 4]
    assert model.calls[3]["input_ids"][0].tolist() == rollout.window_ids[0, :4].tolist() + [MASK] * 4
    assert rollout.num_forwards == 7


def test_rows_of_one_batch_end_their_ragged_last_blocks_at_their_own_places():
    model = ScriptedModel(never_end)

    rollout = sample(model, [[5, 6, 7], [8], [9, 10]], max_completion_length=6, num_denoising_steps=1)

    # texts of 9, 7 and 8 positions: the first alone has a third block, of one position
    assert model.seen("copy_index") == [
        [[1] * 4] * 3,
        [[0] * 4 + [1] * 4, [0] * 4 + [1, 1, 1, -1], [0] * 4 + [1] * 4],
        [[0] * 4 + [1]],
    ]
    assert [len(ids) for ids in rollout.completion_ids] == [6, 6, 6]
    assert (rollout.commit_step == 0).all()
    assert rollout.num_vocab_positions == rollout.num_decoded == 18


def test_rows_that_are_done_with_a_block_wait_without_being_projected():
    def logits_of(input_ids: Tensor, position: Tensor) -> Tensor:
        logits = never_end(input_ids, position)
        logits[(input_ids == 5).any(dim=1), :, 7] = 50.0
        return logits

    model = ScriptedModel(logits_of)
    rollout = sample(model, [[5], [6]], max_completion_length=3, confidence_threshold=0.9)

    assert rollout.commit_step[0].tolist() == [0] * 3
    assert sorted(rollout.commit_step[1].tolist()) == [0, 1, 2]
    assert [call["is_selected"].sum(dim=1).tolist() for call in model.calls] == [[3, 3], [0, 2], [0, 1]]
    assert rollout.num_row_steps == 1 + 3


def test_confident_blocks_take_one_forward_each():
    rollout = sample(ScriptedModel(favour(7)), [[5, 6, 9, 10]] * 2, max_completion_length=12, confidence_threshold=0.9)

    assert rollout.num_forwards == 1 + 3
    assert rollout.num_vocab_positions == 24
    assert rollout.num_decoded / rollout.num_row_steps == 4  # a row's tokens per forward
    assert not rollout.commit_step.any()


def test_rows_with_an_end_token_in_a_finished_block_leave_the_batch():
    model = ScriptedModel(end_at(5))

    rollout = sample(model, [[5, END], [6, END]], max_completion_length=10)

    # no prompt has a whole block, so nothing is run ahead; END in the prompts ends nothing
    assert [len(call["input_ids"]) for call in model.calls] == [2, 2, 2, 2, 1, 1]
    assert rollout.num_backbone_positions == 2 * (4 + 4 + 8 + 4) + (8 + 4)
    assert rollout.num_vocab_positions == 2 * (2 + 1 + 4 + 2) + (4 + 2)
    assert rollout.completion_ids[0][-1] == OTHER_END
    assert [len(ids) for ids in rollout.completion_ids] == [4, 10]
    assert MASK not in rollout.window_ids[0, :6]  # the end block is whole, also past the end token
    assert (rollout.window_ids[0, 6:] == MASK).all()
    assert (rollout.commit_step[0, 6:] == -1).all()
    assert rollout.num_tokens == 14
    assert rollout.num_decoded == 16


def test_columns_that_pad_every_row_left_are_dropped():
    model = ScriptedModel(end_at(3))

    sample(model, [[5, 8, 9], [6]], max_completion_length=6)

    # the row whose text has 9 positions ends in its first block, the other's 7 leave 3 for its second
    assert [tuple(call["input_ids"].shape) for call in model.calls] == [(2, 4), (2, 4), (1, 4 + 3), (1, 3)]


def test_rows_that_leave_first_while_nothing_is_cached_do_not_stay_in_the_cache():
    rollout = sample(ScriptedModel(end_at(1)), [[5], [6], [7, 8]], max_completion_length=6)

    assert [len(ids) for ids in rollout.completion_ids] == [1, 6, 6]


def test_sampling_stops_when_every_row_has_ended():
    model = ScriptedModel(favour(END))

    rollout = sample(model, [[5], [6]], max_completion_length=12)

    assert len(model.calls) == 2
    assert rollout.completion_ids == [[END], [END]]


@pytest.mark.parametrize(
    ("num_prompt", "choice"),
    [
        (4, {}),  # both tokens in one block
        (7, {}),  # one each in two blocks
        (2, {"top_k": 3, "temperature": 0.7}),  # both behind a tail of two
        (7, {"top_p": 0.8, "temperature": 1.3}),
        (4, {"confidence_threshold": 0.3, "suppress_eos": "sampling"}),
    ],
)
def test_frequencies_are_the_enumerated_law_within_three_standard_errors(num_prompt, choice):
    num_rows = 3000
    model = tiny_sdar(vocab_size=8, initializer_range=0.2)
    prompt = [3 + i % 5 for i in range(num_prompt)]
    settings = {"max_completion_length": 2, "num_denoising_steps": 2, "temperature": 1.0} | choice
    threshold = settings.pop("confidence_threshold", None)
    options = naive.BlockDecoding(
        block_length=4, mask_token_id=MASK, end_token_ids=ENDS, threshold=threshold, **settings
    )
    law = naive.block_rollout_law(model, prompt, options)
    assert math.fsum(law.values()) == pytest.approx(1)

    rollout = sample(
        model, [prompt] * num_rows, seeds=range(1, 1 + num_rows), confidence_threshold=threshold, **settings
    )

    rows = zip(rollout.window_ids.tolist(), rollout.commit_step.tolist(), strict=True)
    counts = Counter((tuple(ids), tuple(steps)) for ids, steps in rows)
    assert set(counts) <= set(law)
    for place in (0, 1):
        for token in range(8):
            p = math.fsum(q for (ids, _), q in law.items() if ids[place] == token)
            frequency = sum(n for (ids, _), n in counts.items() if ids[place] == token) / num_rows
            assert abs(frequency - p) <= 3 * math.sqrt(p * abs(1 - p) / num_rows)
    # tokens and steps jointly: a chi-square over the likely outcomes, whose standard error is sqrt(2 * degrees)
    cells = [(counts[outcome], p * num_rows) for outcome, p in law.items() if p * num_rows >= 10]
    degrees = len(cells)
    assert degrees >= 8
    assert math.fsum((found - number) ** 2 / number for found, number in cells) <= degrees + 3 * math.sqrt(2 * degrees)


def test_rollouts_differ_by_seed_at_temperature_one_and_agree_at_zero():
    def rollouts(temperature: float, seeds: Sequence[int]) -> list[list[int]]:
        model = ScriptedModel(favour(7, by=0.01))
        return sample(
            model, [[5, 6]] * 8, seeds=seeds, temperature=temperature, max_completion_length=8
        ).window_ids.tolist()

    warm = rollouts(1.0, range(8))
    assert len({tuple(ids) for ids in warm}) == 8
    assert rollouts(1.0, range(8)) == warm
    assert not {tuple(ids) for ids in warm} & {tuple(ids) for ids in rollouts(1.0, range(8, 16))}
    assert len({tuple(ids) for ids in rollouts(0.0, range(8))}) == 1


@pytest.mark.parametrize("prompts", [[[]], [[], []], [[], prompt_of(6)]])
def test_empty_prompts_are_completed(prompts):
    model = tiny_sdar(dtype=torch.float64)
    options = naive.BlockDecoding(4, max_completion_length=6, num_denoising_steps=2, mask_token_id=MASK)

    rollout = sample(model, prompts, max_completion_length=6, temperature=0.0, ends=())

    assert rollout.window_ids.tolist() == [naive.block_rollout(model, prompt, options)[0] for prompt in prompts]


def test_a_batch_without_rows_gives_a_rollout_without_rows():
    rollout = sample_block(
        tiny_sdar(),
        torch.empty(0, 5, dtype=torch.long),
        torch.empty(0, 5),
        mask_token_id=MASK,
        end_token_ids=ENDS,
        settings=SamplingSettings(max_completion_length=8, block_length=4),
        row_seeds=[],
    )

    assert rollout.completion_ids == []
    assert rollout.window_ids.shape == (0, 8)
    assert rollout.num_forwards == 0


def test_a_block_may_be_longer_than_the_completion():
    model = tiny_sdar(block_size=16, dtype=torch.float64)
    options = naive.BlockDecoding(16, max_completion_length=5, num_denoising_steps=2, mask_token_id=MASK)

    rollout = sample(
        model, [prompt_of(13), prompt_of(3)], block_length=16, max_completion_length=5, temperature=0.0, ends=()
    )

    assert rollout.window_ids.tolist() == [naive.block_rollout(model, prompt_of(n), options)[0] for n in (13, 3)]


class Ranks:
    """What `any_rank_active` hears on one rank, given what the other one says in turn when it is alone."""

    def __init__(self, said_there: Sequence[bool] = ()) -> None:
        self.said_there = said_there
        self.said: list[bool] = []

    def __call__(self, is_active: bool) -> bool:
        turn = len(self.said)
        self.said.append(is_active)
        return is_active or (turn < len(self.said_there) and self.said_there[turn])


LONGER_THERE = [
    ([[5], [6, 7]], [prompt_of(9)]),  # there alone has whole blocks to run first
    ([prompt_of(9)], [[5]]),  # here alone
    ([[5]], [[6, 7]]),  # neither
    ([prompt_of(4)], [prompt_of(8), prompt_of(13)]),  # both
]


@pytest.mark.parametrize(("here", "there"), LONGER_THERE)
@pytest.mark.parametrize("is_scripted", [True, False])
def test_ranks_run_the_same_number_of_forwards_of_the_same_kind(here, there, is_scripted):
    kinds: list[list[list[str]]] = [[], []]
    # rows here end in their first block, rows there never do
    scripts = [ScriptedModel(favour(END)), ScriptedModel(never_end)]
    tiny = tiny_sdar()
    lengths = (10, 10) if is_scripted else (3, 10)

    def sample_on(rank: int, ranks: Ranks) -> Rollout:
        def watched(**inputs: Any) -> Any:
            kinds[rank].append(sorted(inputs))
            return (scripts[rank] if is_scripted else tiny)(**inputs)

        kinds[rank].clear()
        return sample(
            watched,
            (here, there)[rank],
            max_completion_length=lengths[rank],
            any_rank_active=ranks,
            suppress_eos=None if is_scripted else "sampling",
        )

    alone = [Ranks(), Ranks()]
    expected = [sample_on(rank, alone[rank]) for rank in (0, 1)]
    found = [sample_on(rank, Ranks(alone[1 - rank].said)) for rank in (0, 1)]

    num_prefills = int(any(len(prompt) >= 4 for prompt in here + there))
    num_steps = max(sum(ranks.said[1:]) for ranks in alone)
    assert num_steps == sum(alone[1].said[1:]) > sum(alone[0].said[1:])
    assert [rollout.num_forwards for rollout in found] == [num_prefills + num_steps] * 2
    assert kinds[0] == kinds[1]
    assert len(kinds[0]) == num_prefills + num_steps
    assert all(torch.equal(a.window_ids, b.window_ids) for a, b in zip(found, expected, strict=True))


@pytest.mark.parametrize("attn_implementation", ["eager", "flex_attention"])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, when it imports its compiler
def test_attention_implementations_agree(attn_implementation):
    model = tiny_sdar(attn_implementation=attn_implementation, dtype=torch.float64)
    prompts = [prompt_of(6), prompt_of(11), [5], prompt_of(130)]
    settings: dict[str, Any] = {"max_completion_length": 9, "temperature": 0.0}

    with torch.compiler.set_stance("force_eager"):  # a kernel for every length would take minutes to build
        rollout = sample(model, prompts, **settings)

    expected = sample(tiny_sdar(dtype=torch.float64), prompts, **settings)
    assert torch.equal(rollout.window_ids, expected.window_ids)
    assert torch.equal(rollout.commit_step, expected.commit_step)


def test_the_cache_holds_what_a_clean_pass_over_the_text_would():
    model, prompts = tiny_sdar(dtype=torch.float64), [prompt_of(9), prompt_of(3)]
    last: dict[str, Any] = {}

    def watched(**inputs: Any) -> Any:
        last.update(inputs)
        return model(**inputs)

    rollout = sample(watched, prompts, max_completion_length=12, ends=())

    layout, cache = last["layout"], last["past_key_values"]
    assert cache.get_seq_length() == 8 + 12  # the whole blocks of the longer prompt, and all blocks but the last
    for row, prompt in enumerate(prompts):
        is_clean = layout.copy_index[row, :20] == 0
        num = int(is_clean.sum())
        text = torch.tensor([[*prompt, *rollout.window_ids[row].tolist()][:num]])
        expected = model(input_ids=text, use_cache=True).past_key_values
        for layer, expected_layer in zip(cache.layers, expected.layers, strict=True):
            # the rotary embedding is float32
            torch.testing.assert_close(layer.keys[row][:, is_clean], expected_layer.keys[0], atol=1e-6, rtol=0)
            torch.testing.assert_close(layer.values[row][:, is_clean], expected_layer.values[0], atol=1e-6, rtol=0)


def test_no_query_attends_to_padding_or_to_a_later_block():
    model = ScriptedModel(never_end)
    masks = []
    forward = model.forward

    def watched(**inputs: Any) -> Any:
        layout, num = inputs["layout"], inputs["input_ids"].shape[1]
        masks.append((layout, dense_mask(layout, num_queries=num, block_length=4)))
        return forward(**inputs)

    sample(watched, [prompt_of(9), [5], prompt_of(6)], max_completion_length=6)

    stops = [[8, 4]] + [[15, 7, 12]] * 4  # of the rows' texts, in the pass over whole blocks and in the others
    for (layout, may_attend), stop in zip(masks, stops, strict=True):
        num_queries, num_keys = may_attend.shape[2:]
        for row, query in layout.last(num_queries).copy_index.ge(0).nonzero().tolist():
            block = layout.position[row, num_keys - num_queries + query].item() // 4
            seen = layout.position[row][may_attend[row, 0, query]].tolist()
            # each position before its block once, its own block as far as the row has it, and nothing else
            assert sorted(seen) == [*range(int(min(4 * block + 4, stop[row])))]


def test_no_autograd_graph_is_built_in_train_mode_with_gradients_on():
    model = tiny_sdar().train()
    has_graph = []
    model.model.register_forward_hook(
        lambda module, args, output: has_graph.append(output.last_hidden_state.requires_grad)
    )

    with torch.enable_grad():
        rollout = sample(model, [prompt_of(6)], max_completion_length=8)

    evaluated = sample(tiny_sdar(), [prompt_of(6)], max_completion_length=8)
    assert torch.equal(rollout.window_ids, evaluated.window_ids)
    assert has_graph == [False] * rollout.num_forwards
    assert model.training
    assert torch.is_grad_enabled()


def test_gradient_checkpointing_changes_nothing():
    model = tiny_sdar().train()
    model.gradient_checkpointing_enable()

    rollout = sample(model, [prompt_of(6)], max_completion_length=8)

    assert torch.equal(rollout.window_ids, sample(tiny_sdar(), [prompt_of(6)], max_completion_length=8).window_ids)


@pytest.mark.parametrize(("prompt", "num"), [([5], 4), (prompt_of(9), 8)])
def test_a_model_that_leaves_the_cache_empty_is_refused(prompt, num):
    model = tiny_sdar()

    def without_cache(**inputs: Any) -> Any:
        return model(**inputs | {"past_key_values": None})

    with pytest.raises(ValueError, match=f"Expected {num} positions in the cache .* got 0.*BlockDiffusionMixin"):
        sample(without_cache, [prompt], max_completion_length=8)


def test_the_global_generator_is_neither_read_nor_moved():
    state = torch.get_rng_state()
    first = sample(ScriptedModel(never_end), [[5]], max_completion_length=8)
    assert torch.equal(torch.get_rng_state(), state)

    with torch.random.fork_rng():
        torch.manual_seed(1)
        again = sample(ScriptedModel(never_end), [[5]], max_completion_length=8)

    assert torch.equal(first.window_ids, again.window_ids)


def test_bf16_models_are_sampled_in_float32():
    rollout = sample(tiny_sdar(dtype=torch.bfloat16), MIXED_PROMPTS, max_completion_length=8)

    assert MASK not in [token for ids in rollout.completion_ids for token in ids]
    assert rollout.window_ids.dtype == torch.long


def test_a_model_that_returns_nan_stops_the_rollout():
    def logits_of(input_ids: Tensor, position: Tensor) -> Tensor:
        logits = torch.zeros(*input_ids.shape, VOCAB_SIZE)
        return logits.masked_fill((input_ids[:, 0] == 6)[:, None, None], math.nan)

    with pytest.raises(ValueError, match=r"finite logits, got NaN or infinity in rows \[1\]"):
        sample(ScriptedModel(logits_of), [[5], [6]], max_completion_length=3)


def test_progress_counts_up_to_the_whole_window():
    seen = []

    sample(
        ScriptedModel(end_at(3)),
        [[5, 8, 9], [6, 8]],
        max_completion_length=6,
        progress=lambda *pair: seen.append(pair),
    )

    # one position is masked in the first row, which then skips the other 5 of its window, and two in the second
    assert seen == [(2, 12), (3, 12), (10, 12), (12, 12)]
