# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from tests import naive
from tests.tiny import tiny_llada
from trl_stabledrl.core.elbo import elbo_per_token_by_draw
from trl_stabledrl.core.masking import MaskPlan
from trl_stabledrl.likelihood import (
    LikelihoodSettings,
    Rows,
    Tail,
    noised_inputs,
    plan_masks,
    score_draws,
    score_elbo,
    scored_log_probs,
)

LAWS = ("uniform", "block_suffix", "semi_ar", "full")  # the staircase: test_staircase.py
END, MASK, PAD = 1, 2, 0
WINDOW = 8
PROMPTS = [[5, 6, 7, 8, 9], [10, END, 11], [12], [13, 14, 15, 16]]  # the end id also occurs inside a prompt
COMPLETIONS = [[20, 21, 22, 23, 24, 25, 26, 27], [30, 31, END], [40, 41, 42, 43, END], [END]]


def settings_of(**changes: Any) -> LikelihoodSettings:
    options: dict[str, Any] = {
        "mask_token_id": MASK,
        "mask_law": "block_suffix",
        "mc_sampling": "complementary",
        "num_mc_samples": 2,
        "block_length": 3,
        "window_length": WINDOW,
        "seed": 0,
        "end_token_id": END,
    }
    return LikelihoodSettings(**options | changes)


def rows_of(
    prompts: Sequence[Sequence[int]] = PROMPTS,
    completions: Sequence[Sequence[int]] = COMPLETIONS,
    *,
    keys: Sequence[int] | None = None,
    padding: int = 0,
    width: int | None = None,
    pad: int = PAD,
) -> Rows:
    longest = max(map(len, prompts)) + padding
    width = width or max(map(len, completions))
    prompt_ids = [[pad] * (longest - len(ids)) + list(ids) for ids in prompts]
    completion_ids = [list(ids) + [pad] * (width - len(ids)) for ids in completions]
    return Rows(
        torch.tensor(prompt_ids),
        torch.tensor([[0] * (longest - len(ids)) + [1] * len(ids) for ids in prompts]).bool(),
        torch.tensor(completion_ids),
        torch.tensor([[1] * len(ids) + [0] * (width - len(ids)) for ids in completions]).bool(),
        torch.tensor(keys or range(len(prompts))),
    )


def naive_log_probs(model: Any, plan: MaskPlan, settings: LikelihoodSettings, i: int, m: int) -> Tensor:
    """Of row i under draw m, as (W,), zero where not scored."""
    padding = plan.is_noised_prompt.shape[-1]
    noised = [j - padding for j in plan.is_noised_prompt[i, m].nonzero()[:, 0].tolist()]
    noised += plan.is_noised[i, m].nonzero()[:, 0].tolist()
    values = naive.token_log_probs(
        model,
        PROMPTS[i],
        COMPLETIONS[i],
        noised=noised,
        mask_token_id=MASK,
        window_length=settings.window_length,
        tail=settings.tail,
        end_token_id=END,
        temperature=settings.temperature,
    )
    padded = torch.cat([values, values.new_zeros(settings.window_length - len(values))])
    return padded * plan.is_scored[i, m]


def naive_scores(model: Any, plan: MaskPlan, settings: LikelihoodSettings) -> Tensor:
    num_draws = plan.is_noised.shape[1]
    rows = [[naive_log_probs(model, plan, settings, i, m) for m in range(num_draws)] for i in range(len(PROMPTS))]
    return torch.stack([torch.stack(row) for row in rows])  # (B, M, W)


def gradients_of(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


# largest difference seen: 0.0 in float64, 9.6e-7 nats in float32; in another batch shape a matmul may sum differently
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 2e-6)])
@pytest.mark.parametrize("tail", get_args(Tail))
@pytest.mark.parametrize("law", LAWS)
def test_scores_are_those_of_one_unpadded_row_at_a_time(law, tail, dtype, tolerance):
    model, rows = tiny_llada(dtype=dtype), rows_of()
    settings = settings_of(mask_law=law, tail=tail, num_mc_samples=1 if law == "full" else 2)
    plan = plan_masks(rows, settings)

    with torch.no_grad():
        scores = score_draws(model, rows, plan, settings)
        expected = naive_scores(model, plan, settings)

    assert scores.logps.dtype == dtype
    assert scores.logps[~plan.is_scored].eq(0).all()
    torch.testing.assert_close(scores.logps, expected, rtol=0, atol=tolerance)


class CountingModel(nn.Module):
    """Counts the rows of hidden states that the head is asked to project."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model
        self.num_projected: list[int] = []

    def forward(self, *, head_fn: Callable[[Tensor, Tensor], Any], **kwargs: Any) -> Any:
        def counted(hidden: Tensor, weight: Tensor) -> Any:
            self.num_projected.append(len(hidden))
            return head_fn(hidden, weight)

        return self.model(head_fn=counted, **kwargs)


@pytest.mark.parametrize("law", LAWS)
def test_only_scored_positions_are_projected(law):
    rows = rows_of(padding=2)
    settings = settings_of(mask_law=law, num_mc_samples=1 if law == "full" else 2)
    plan = plan_masks(rows, settings)
    model = CountingModel(tiny_llada())

    score_draws(model, rows, plan, settings)

    assert model.num_projected == plan.is_scored.sum(dim=(0, 2)).tolist()
    assert sum(model.num_projected) > 0


# 0.0 in float64 and 4.8e-7 nats in float32, where the kernels choose their order of summation by the batch's shape
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-12), (torch.float32, 1e-6)])
@pytest.mark.parametrize("tail", get_args(Tail))
@pytest.mark.parametrize("sharing", ["row", "group"])
def test_a_score_does_not_depend_on_the_batch_it_is_in(sharing, tail, dtype, tolerance):
    model, settings = tiny_llada(dtype=dtype), settings_of(tail=tail)
    keys = [7, 8, 9, 10] if sharing == "row" else [3, 3, 3, 3]
    expected = score_elbo(model, rows_of(keys=keys), settings)

    def assert_same(found: Tensor, rows: Sequence[int] = range(4)) -> None:
        torch.testing.assert_close(found, expected[list(rows)], rtol=0, atol=tolerance)

    for batch_size in (1, 2, 3):
        assert_same(score_elbo(model, rows_of(keys=keys), settings, batch_size=batch_size))
    assert_same(score_elbo(model, rows_of(keys=keys, padding=5), settings))
    assert_same(score_elbo(model, rows_of(keys=keys, pad=END), settings))  # pad id == end id
    for order in ([2, 0, 3, 1], [1, 3], [2]):
        part = rows_of(
            [PROMPTS[i] for i in order], [COMPLETIONS[i] for i in order], keys=[keys[i] for i in order], width=8
        )
        assert_same(score_elbo(model, part, settings), order)
        # narrower completions than the window: the batch's longest neighbour plays no part
        part = rows_of([PROMPTS[i] for i in order], [COMPLETIONS[i] for i in order], keys=[keys[i] for i in order])
        assert_same(score_elbo(model, part, settings), order)
    # a neighbour without any token
    more = rows_of([*PROMPTS, []], [*COMPLETIONS, []], keys=[*keys, 11])
    found = score_elbo(model, more, settings)
    assert_same(found[:4])
    assert found[4].isnan().all()


@pytest.mark.parametrize("tail", get_args(Tail))
def test_what_stands_after_the_end_token_changes_nothing(tail):
    model, settings, rows = tiny_llada(), settings_of(tail=tail), rows_of()
    rubbish = torch.where(rows.completion_mask, rows.completion_ids, 33)

    found = score_elbo(model, dataclasses.replace(rows, completion_ids=rubbish), settings)

    assert torch.equal(found, score_elbo(model, rows, settings))


def test_the_tails_differ_and_the_hidden_one_is_no_window_at_all():
    model, rows = tiny_llada(dtype=torch.float64), rows_of()
    scores = {tail: score_elbo(model, rows, settings_of(tail=tail)) for tail in get_args(Tail)}

    assert (scores["mask"] - scores["eos"]).abs()[1:].min() > 1e-4
    assert (scores["mask"] - scores["hidden"]).abs()[1:].min() > 1e-4
    assert torch.equal(scores["mask"][0], scores["hidden"][0])  # as long as the window
    torch.testing.assert_close(
        score_elbo(model, rows, settings_of(tail="hidden", window_length=20)), scores["hidden"], rtol=0, atol=1e-12
    )


def test_inputs_are_what_the_sampler_saw():
    rows, settings = rows_of(), settings_of(mask_law="full", num_mc_samples=1, tail="eos")
    inputs = noised_inputs(rows, plan_masks(rows, settings), 0, settings)

    assert inputs["input_ids"][1].tolist() == [PAD, PAD, 10, END, 11, MASK, MASK, MASK, END, END, END, END, END]
    assert inputs["attention_mask"][1].tolist() == [0, 0] + [1] * 11
    assert inputs["position_ids"][1].tolist() == [0, 0, *range(11)]


def test_scores_divide_the_logits_by_the_score_temperature():
    model, rows, settings = tiny_llada(dtype=torch.float64), rows_of(), settings_of(temperature=0.6)
    plan = plan_masks(rows, settings)
    with torch.no_grad():
        found, expected = score_draws(model, rows, plan, settings).logps, naive_scores(model, plan, settings)

    torch.testing.assert_close(found, expected, rtol=0, atol=1e-12)
    assert not torch.equal(found, score_draws(model, rows, plan, settings_of()).logps)


@pytest.mark.parametrize("temperature", [1.0, 0.6])
def test_entropies_are_those_of_the_scored_distributions(temperature):
    model, rows, settings = tiny_llada(dtype=torch.float64), rows_of(), settings_of(temperature=temperature)
    plan = plan_masks(rows, settings)

    scores = score_draws(model, rows, plan, settings)
    inputs = noised_inputs(rows, plan, 1, settings)
    log_probs = (model(**inputs).logits[:, -WINDOW:] / temperature).log_softmax(dim=-1)

    expected = -(log_probs.exp() * log_probs).sum(-1) * plan.is_scored[:, 1]
    torch.testing.assert_close(scores.entropy[:, 1], expected.detach(), rtol=0, atol=1e-12)
    assert not scores.entropy.requires_grad


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float64, 1e-6), (torch.float32, 1e-5)])
@pytest.mark.parametrize("tail", get_args(Tail))
def test_gradients_are_those_of_one_unpadded_row_at_a_time(tail, dtype, tolerance):
    model, rows, settings = tiny_llada(dtype=dtype), rows_of(padding=1), settings_of(tail=tail)
    plan = plan_masks(rows, settings)
    coefficients = torch.tensor([1.0, -2.0, 0.5, 3.0], dtype=dtype)

    def loss_of(logps: Tensor) -> Tensor:
        return (coefficients * elbo_per_token_by_draw(logps, plan.weight.to(dtype)).mean(dim=1)).sum()

    found = gradients_of(model, loss_of(score_draws(model, rows, plan, settings).logps))
    expected = gradients_of(model, loss_of(naive_scores(model, plan, settings)))

    assert expected.norm() > 0.1
    assert (found - expected).norm() <= tolerance * expected.norm()


def random_head(generator: torch.Generator, num: int, *, vocab_size: int, width: int = 16) -> list[Tensor]:
    hidden = torch.randn(num, width, generator=generator).requires_grad_()
    weight = torch.randn(vocab_size, width, generator=generator).requires_grad_()
    return [hidden, weight, torch.randint(0, vocab_size, (num,), generator=generator)]


# largest difference seen between float32 and float64: log-probability 4.3e-6, entropy 8.1e-6, gradients 1.1e-5
@pytest.mark.parametrize("num", [0, 1, 63, 64, 65, 200])
@pytest.mark.parametrize("temperature", [1.0, 0.7])
def test_the_fused_and_the_plain_projection_agree_with_the_definition(num, temperature, generator):
    hidden, weight, targets = random_head(generator, num, vocab_size=700)
    coefficients = torch.randn(num, generator=generator)
    double = [x.detach().double().requires_grad_() for x in (hidden, weight)]

    results = []
    for h, w in ((hidden, weight), (double[0], double[1])):
        log_probs, entropy = scored_log_probs(h, w, targets, temperature=temperature)
        gradients = torch.autograd.grad((log_probs * coefficients).sum(), [h, w])
        assert not entropy.requires_grad
        results.append([log_probs, entropy, *gradients])
    logits = double[0] @ double[1].T / temperature
    all_log_probs = logits.log_softmax(dim=-1)
    expected = [
        all_log_probs[torch.arange(num), targets],
        -(all_log_probs.exp() * all_log_probs).sum(-1),
        *torch.autograd.grad((all_log_probs[torch.arange(num), targets] * coefficients).sum(), double),
    ]

    for fused, plain, value in zip(*results, expected, strict=True):
        assert fused.dtype == torch.float32
        assert plain.dtype == torch.float64
        torch.testing.assert_close(plain, value.detach(), rtol=1e-12, atol=1e-12)
        torch.testing.assert_close(fused, value.detach().float(), rtol=2e-5, atol=2e-5)


def test_bfloat16_hidden_states_are_scored_in_float32(generator):
    hidden, weight, targets = random_head(generator, 40, vocab_size=700)
    hidden, weight = hidden.detach().bfloat16(), weight.detach().bfloat16()

    log_probs, entropy = scored_log_probs(hidden, weight, targets, temperature=1.0)

    # the logits themselves may be rounded to bfloat16: 3 significant digits of about 10; the log-sum may not
    expected = (hidden.double() @ weight.double().T).log_softmax(dim=-1)[torch.arange(40), targets]
    assert log_probs.dtype == entropy.dtype == torch.float32
    assert (log_probs - expected).abs().max() < 0.1


class LargestTensor(TorchDispatchMode):
    """Keeps the largest tensor, in bytes, that has the vocabulary's size but is not of the head's shape."""

    def __init__(self, head_shape: torch.Size) -> None:
        super().__init__()
        self.head_shape, self.num_bytes = head_shape, 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        for value in result if isinstance(result, (tuple, list)) else [result]:
            if isinstance(value, Tensor) and value.shape not in (self.head_shape, self.head_shape[::-1]):
                self.num_bytes = max(self.num_bytes, value.numel() * value.element_size())
        return result


def test_logits_of_a_large_vocabulary_are_never_held_at_once(generator):
    hidden, weight, targets = random_head(generator, 160, vocab_size=126_464, width=4)

    with LargestTensor(weight.shape) as largest:
        log_probs, _ = scored_log_probs(hidden, weight, targets, temperature=1.0)
        log_probs.sum().backward()

    assert 4e6 < largest.num_bytes <= 34e6  # whole: 81 MB


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
@pytest.mark.parametrize("tail", get_args(Tail))
def test_a_batch_with_nothing_to_score_gives_differentiable_zeros(tail, dtype):
    model, settings = tiny_llada(dtype=dtype), settings_of(tail=tail)
    rows = rows_of([[5, 6], [7], []], [[], [], []], width=4)
    plan = plan_masks(rows, settings)

    scores = score_draws(model, rows, plan, settings)
    elbo_per_token_by_draw(scores.logps, plan.weight.to(dtype)).sum().backward()

    assert not scores.logps.any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name
    assert score_elbo(model, rows, settings).isnan().all()


@pytest.mark.parametrize("tail", get_args(Tail))
def test_an_excluded_row_leaves_the_others_as_they_were(tail):
    model, settings, rows = tiny_llada(dtype=torch.float64), settings_of(tail=tail), rows_of()
    is_excluded = torch.tensor([False, True, False, False])

    emptied = rows.without(is_excluded, filler=MASK)
    found = score_elbo(model, emptied, settings)

    assert found[1].isnan().all()
    expected = score_elbo(model, rows, settings)
    torch.testing.assert_close(found[[0, 2, 3]], expected[[0, 2, 3]], rtol=0, atol=1e-12)
    assert not emptied.prompt_ids[1].eq(10).any()


def test_the_global_generator_is_neither_read_nor_advanced():
    model, rows, settings = tiny_llada(), rows_of(), settings_of()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = score_draws(model, rows, plan_masks(rows, settings), settings).logps
    first.sum().backward()
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)

    assert torch.equal(score_draws(model, rows, plan_masks(rows, settings), settings).logps, first)


def test_training_mode_without_dropout_is_bit_equal_to_evaluation_mode():
    model, rows, settings = tiny_llada(), rows_of(), settings_of()

    assert torch.equal(score_elbo(model.train(), rows, settings), score_elbo(model.eval(), rows, settings))


def test_equal_policies_under_equal_masks_have_a_ratio_of_exactly_one():
    model, rows, settings = tiny_llada(), rows_of(), settings_of()
    plan = plan_masks(rows, settings)
    old = score_elbo(model, rows, settings, batch_size=4)

    new = elbo_per_token_by_draw(score_draws(model.train(), rows, plan, settings).logps, plan.weight)

    assert torch.equal(new.detach(), old)
    assert not torch.equal(score_elbo(model, rows, settings, iteration=1), old)


class CopyModel(nn.Module):
    """Predicts, at each position, the token that stands there in `clean_ids`."""

    def __init__(self, clean_ids: Tensor) -> None:
        super().__init__()
        self.clean_ids = clean_ids
        self.weight = nn.Parameter(40.0 * torch.eye(64))

    def forward(self, *, is_selected: Tensor, head_fn: Callable[[Tensor, Tensor], Any], **_: Any) -> Any:
        hidden = nn.functional.one_hot(self.clean_ids, 64).float()
        return head_fn(hidden[is_selected], self.weight)


def test_logits_are_not_shifted():
    rows = rows_of()
    clean_ids = torch.cat([rows.prompt_ids, rows.completion_ids], dim=1)

    at_own_index = score_elbo(CopyModel(clean_ids), rows, settings_of())
    one_later = score_elbo(CopyModel(clean_ids.roll(-1, dims=1)), rows, settings_of())

    assert at_own_index.abs().max() < 1e-6
    assert one_later.max() < -10


def test_one_draw_at_a_time_is_all_draws_together():
    model, rows, settings = tiny_llada(), rows_of(), settings_of(num_mc_samples=4)
    plan = plan_masks(rows, settings)

    together = score_draws(model, rows, plan, settings)
    alone = [score_draws(model, rows, plan, settings, draws=[m]) for m in range(4)]

    assert torch.equal(together.logps, torch.cat([score.logps for score in alone], dim=1))
    assert together.logps.shape == (4, 4, WINDOW)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": "pad"}, "tail='pad' is not known. Use one of mask, eos, hidden"),
        ({"tail": "eos", "end_token_id": None}, "tail='eos' fills the window with end tokens: pass end_token_id"),
        ({"temperature": 0.0}, "score_temperature=0.0 must be above 0: a greedy distribution has no logarithm"),
        ({"temperature": float("nan")}, "score_temperature=nan must be above 0"),
        ({"block_length": 0}, "block_length=0 must be at least 1"),
    ],
)
def test_settings_without_meaning_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)


def test_a_completion_longer_than_the_window_is_refused():
    with pytest.raises(ValueError, match="A completion is 8 tokens long, but the window holds .*=7"):
        plan_masks(rows_of(), settings_of(window_length=7))
