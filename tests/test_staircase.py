# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, get_args

import pytest
import torch
from torch import Tensor, nn
from transformers import Qwen3Config, Qwen3ForCausalLM

from tests import naive
from tests.tiny import tiny_sdar
from trl_stabledrl.core.attention import ContextAttention
from trl_stabledrl.core.elbo import elbo_per_token_by_draw
from trl_stabledrl.core.masking import MaskPlan, McSampling
from trl_stabledrl.likelihood import LikelihoodSettings, Rows, plan_masks, score_draws, score_elbo, score_rows

END, MASK, PAD = 1, 2, 0
CONTEXTS = get_args(ContextAttention)
BLOCKS = [1, 3, 4, 32]
Texts = Sequence[tuple[Sequence[int], Sequence[int]]]
"""Prompt and completion of each row."""


def settings_of(block_length: int = 4, **changes: Any) -> LikelihoodSettings:
    options: dict[str, Any] = {
        "mask_token_id": MASK,
        "mask_law": "staircase",
        "mc_sampling": "independent",
        "num_mc_samples": 2,
        "block_length": block_length,
        "window_length": 10,
        "seed": 0,
    }
    return LikelihoodSettings(**options | changes)


def words(start: int, num: int) -> list[int]:
    """Tokens that no row repeats soon."""
    return [5 + (7 * i + start) % 55 for i in range(num)]


def texts_of(block_length: int, window_length: int) -> Texts:
    """
    Prompts of every length modulo the block, some shorter than it, one empty; completions that fill the window, that
    end in it early, in the last place or at once, at and inside block borders.
    """
    lengths = [window_length, 3, window_length - 1, 1, 6, window_length, 4]
    texts = []
    for i, num_prompt in enumerate(range(block_length + 3)):
        length = lengths[i % len(lengths)]
        completion = words(3 * i, length)
        if i % len(lengths) not in (0, 5):  # those are cut by the window
            completion[-1] = END
        texts.append((words(11 * i, num_prompt), completion))
    return texts


def rows_of(texts: Texts, *, keys: Sequence[int] | None = None, padding: int = 0, width: int | None = None) -> Rows:
    longest = max(len(prompt) for prompt, _ in texts) + padding
    width = width or max(len(completion) for _, completion in texts)
    prompt_ids = [[PAD] * (longest - len(prompt)) + list(prompt) for prompt, _ in texts]
    completion_ids = [list(completion) + [PAD] * (width - len(completion)) for _, completion in texts]
    num_prompt, num_completion = (torch.tensor([len(text[part]) for text in texts]) for part in (0, 1))
    return Rows(
        torch.tensor(prompt_ids, dtype=torch.long),
        torch.arange(longest) >= longest - num_prompt[:, None],
        torch.tensor(completion_ids, dtype=torch.long),
        torch.arange(width) < num_completion[:, None],
        torch.tensor(keys or range(len(texts))),
    )


@lru_cache
def model_of(block_length: int = 4, *, dtype: torch.dtype = torch.float64, **changes: Any) -> Any:
    return tiny_sdar(block_size=block_length, dtype=dtype, **changes)


def noised_by(plan: MaskPlan, i: int) -> list[list[int]]:
    return [row.nonzero()[:, 0].tolist() for row in plan.is_noised[i]]


def naive_logps(
    model: Any, texts: Texts, plan: MaskPlan, settings: LikelihoodSettings, *, is_cached: bool = False
) -> Tensor:
    """Of every row and draw, a forward per block: (B, M, W), zero where not scored."""
    options: dict[str, Any] = {
        "block_length": settings.block_length,
        "mask_token_id": MASK,
        "window_length": settings.window_length,
        "context_attention": settings.context_attention,
        "temperature": settings.temperature,
    }
    rows = []
    for i, (prompt, completion) in enumerate(texts):
        draws = noised_by(plan, i)
        if is_cached:
            values = naive.cached_staircase_log_probs(
                model, prompt, completion, draws=draws, detach_context=settings.detach_context, **options
            )
        else:
            values = torch.stack(
                [naive.staircase_log_probs(model, prompt, completion, noised=draw, **options) for draw in draws]
            )
        rows.append(nn.functional.pad(values, (0, settings.window_length - values.shape[1])))
    return torch.stack(rows) * plan.is_scored


def gradients_of(model: nn.Module, loss: Tensor) -> Tensor:
    return torch.cat([g.flatten() for g in torch.autograd.grad(loss, list(model.parameters()))])


def some_loss(logps: Tensor) -> Tensor:
    """With another coefficient at each place, so that no two errors cancel."""
    generator = torch.Generator().manual_seed(1)
    return (logps * torch.randn(logps.shape, generator=generator, dtype=logps.dtype)).sum()


# Largest differences seen, of which each bound is at least twice. Gradients: norm of the difference over the norm; in
# float64 the weights of the norms and the rotary embedding still get theirs through float32.
NATS = {torch.float64: 1e-12, torch.float32: 2e-6}  # 8.9e-16 and 9.6e-7
GRADIENT = {torch.float64: 2e-7, torch.float32: 1.2e-6}  # 8.8e-8 and 5.9e-7


def assert_same(found: Tensor, expected: Tensor) -> None:
    assert expected.abs().max() > 1
    torch.testing.assert_close(found, expected, rtol=0, atol=NATS[expected.dtype])


def assert_same_gradients(found: Tensor, expected: Tensor, *, tolerance: float | None = None) -> None:
    assert expected.norm() > 1
    assert (found - expected).norm() <= (tolerance or GRADIENT[expected.dtype]) * expected.norm()


def test_the_definition_asks_nothing_of_our_model_but_its_weights():
    """A stock Qwen3 under a 4-D mask gives the same, by one forward per block or with a cache."""
    model = model_of()
    settings = model.config.to_dict()
    ours = ("model_type", "architectures", "block_size", "mask_token_id", "is_causal")
    config = Qwen3Config(**{name: value for name, value in settings.items() if name not in ours})
    stock = Qwen3ForCausalLM._from_config(config, dtype=torch.float64, attn_implementation="sdpa").eval()
    stock.load_state_dict(model.state_dict())
    for num_prompt in range(6):
        for context in CONTEXTS:
            texts = [(words(num_prompt, num_prompt), [*words(9, 6), END])]
            used = settings_of(num_mc_samples=4, context_attention=context)
            plan = plan_masks(rows_of(texts), used)
            with torch.no_grad():
                expected = naive_logps(stock, texts, plan, used)
                assert_same(naive_logps(model, texts, plan, used), expected)
                assert_same(naive_logps(model, texts, plan, used, is_cached=True), expected)


@pytest.mark.parametrize(
    ("num_draws", "context"), [(1, "block_causal"), (2, "block_causal"), (4, "block_causal"), (2, "causal")]
)
@pytest.mark.parametrize("block_length", BLOCKS)
def test_one_pass_gives_the_log_probabilities_and_gradients_of_one_forward_per_block(block_length, num_draws, context):
    model = model_of(block_length)
    settings = settings_of(block_length, num_mc_samples=num_draws, context_attention=context)
    texts = texts_of(block_length, settings.window_length)
    rows = rows_of(texts, padding=2)
    plan = plan_masks(rows, settings)

    found = score_draws(model, rows, plan, settings).logps
    expected = naive_logps(model, texts, plan, settings)

    assert found[~plan.is_scored].eq(0).all()
    assert_same(found, expected)
    assert_same_gradients(gradients_of(model, some_loss(found)), gradients_of(model, some_loss(expected)))


@pytest.mark.parametrize("block_length", BLOCKS)
def test_one_cached_forward_per_block_is_the_same_again(block_length):
    model, settings = model_of(block_length), settings_of(block_length)
    texts = texts_of(block_length, settings.window_length)[-5:]
    plan = plan_masks(rows_of(texts), settings)

    found, expected = (naive_logps(model, texts, plan, settings, is_cached=cached) for cached in (True, False))

    assert_same(found, expected)
    assert_same_gradients(gradients_of(model, some_loss(found)), gradients_of(model, some_loss(expected)))


@pytest.mark.parametrize("block_length", BLOCKS)
def test_float32_is_as_near_as_float32_can_be(block_length):
    model = model_of(block_length, dtype=torch.float32)
    settings = settings_of(block_length, num_mc_samples=4)
    texts = texts_of(block_length, settings.window_length)
    rows = rows_of(texts, padding=2)
    plan = plan_masks(rows, settings)

    found = score_draws(model, rows, plan, settings).logps
    expected = naive_logps(model, texts, plan, settings)

    assert_same(found, expected)
    assert_same_gradients(gradients_of(model, some_loss(found)), gradients_of(model, some_loss(expected)))


@pytest.mark.parametrize("sampling", [name for name in get_args(McSampling) if name != "quadrature"])
@pytest.mark.parametrize("block_length", [3, 4])
def test_the_elbo_is_the_definitions_from_the_noise_key_to_nats(block_length, sampling):
    model = model_of(block_length)
    settings = settings_of(block_length, mc_sampling=sampling, num_mc_samples=4, seed=3, temperature=0.8)
    texts = texts_of(block_length, settings.window_length)
    keys = [100 + 7 * i for i in range(len(texts))]

    found = score_elbo(model, rows_of(texts, keys=keys), settings, iteration=1)

    expected = []
    for (prompt, completion), key in zip(texts, keys, strict=True):
        draws = naive.staircase_draws_of(
            sampling, seed=3, key=key, iteration=1, num_draws=4, length=len(completion), block_length=block_length,
            prompt_length=len(prompt),
        )  # fmt: skip
        log_probs = naive.RowLogProbs(
            model, prompt, completion, function=naive.staircase_log_probs, block_length=block_length,
            mask_token_id=MASK, window_length=settings.window_length, temperature=0.8,
        )  # fmt: skip
        expected.append([draw.elbo_per_token(log_probs) for draw in draws])
    # weights are float32
    torch.testing.assert_close(found.double(), torch.tensor(expected, dtype=torch.float64), rtol=2e-7, atol=0)


@pytest.mark.parametrize("sampling", [name for name in get_args(McSampling) if name != "quadrature"])
def test_both_bounds_of_a_row_are_the_definitions(sampling):
    model, texts = model_of(), texts_of(4, 10)
    settings = settings_of(mc_sampling=sampling, num_mc_samples=4)
    rows = rows_of(texts)
    objective = naive.Objective(
        group_size=1, window_length=10, block_length=4, mask_token_id=MASK, end_token_id=END, law="staircase",
        sampling=sampling, num_draws=4, seed=0, surrogate="sandwich",
    )  # fmt: skip

    found = score_rows(model, rows, plan_masks(rows, settings), range(4), settings, eubo_beta=1.5)
    expected = [
        torch.stack(naive.row_scores(model, naive.Row(i, *text, advantage=-1.0, old=None), objective, iteration=0))
        for i, text in enumerate(texts)
    ]

    elbo, lowered = torch.stack(expected).unbind(dim=1)
    assert found.eubo is not None
    torch.testing.assert_close(found.elbo, elbo, rtol=2e-7, atol=0)  # weights are float32
    torch.testing.assert_close((found.elbo + found.eubo) / 2, lowered, rtol=2e-7, atol=0)
    assert_same_gradients(
        gradients_of(model, some_loss(found.elbo + found.eubo)), gradients_of(model, some_loss(2 * lowered))
    )


def test_a_cyclic_pass_over_every_count_averages_to_less_noise_around_the_same_value():
    model, texts = model_of(), [(words(0, 6), words(5, 10))]
    many = texts * 400
    rows = rows_of(many, keys=range(400))
    means = {}
    for sampling in ("independent", "cyclic"):
        values = score_elbo(model, rows, settings_of(mc_sampling=sampling, num_mc_samples=4)).mean(dim=1)
        means[sampling] = (values.mean().item(), values.std().item() / 20)

    difference = abs(means["cyclic"][0] - means["independent"][0])
    assert difference <= 3 * (means["cyclic"][1] ** 2 + means["independent"][1] ** 2) ** 0.5
    assert means["cyclic"][1] < means["independent"][1]


@pytest.mark.parametrize("num_prompt", [9, 10, 11])
def test_each_token_sees_the_blocks_before_its_own_and_what_is_open_in_it(num_prompt):
    """Found by changing one token of the text at a time; blocks are counted from the prompt's first token."""
    model, settings = model_of(), settings_of(window_length=12, num_mc_samples=4)
    prompt, completion = words(0, num_prompt), [*words(40, 8), END]
    rows = rows_of([(prompt, completion)])
    plan = plan_masks(rows, settings)
    before = score_draws(model, rows, plan, settings).logps[0]

    for place in range(num_prompt + len(completion)):
        text = [*prompt, *completion]
        text[place] = 60
        changed = rows_of([(text[:num_prompt], text[num_prompt:])])
        after = score_draws(model, changed, plan, settings).logps[0]
        for m, noised in enumerate(noised_by(plan, 0)):
            for j in noised:
                mine = (num_prompt + j) // 4
                is_open = place // 4 == mine and place - num_prompt not in noised
                is_seen = place // 4 < mine or is_open or place == num_prompt + j  # itself: what is scored changes
                difference = (after - before)[m, j].abs()
                assert difference > 1e-7 if is_seen else difference < 1e-12, (place, m, j)


def test_blocks_that_start_at_the_completion_would_give_other_scores():
    """A fault seen elsewhere: borders counted from the end of the prompt, which decoding never has."""
    model, settings = model_of(), settings_of()
    for num_prompt in (8, 9, 10, 11):
        prompt, completion = words(0, num_prompt), words(40, 10)
        texts = [(prompt, completion)]
        plan = plan_masks(rows_of(texts), settings)
        found = score_draws(model, rows_of(texts), plan, settings).logps
        noised = noised_by(plan, 0)[0]
        values = []
        for block in naive.blocks_of(10, 4):  # of the completion alone
            seen = [MASK if j in noised else completion[j] for j in block]
            clean = [*prompt, *completion[: block.start]]
            is_seen = torch.tensor(
                [
                    [(query >= len(clean) or key // 4 <= query // 4) for key in range(len(clean) + len(seen))]
                    for query in range(len(clean) + len(seen))
                ]
            )
            is_seen[: len(clean), len(clean) :] = False
            logits = model(input_ids=torch.tensor([[*clean, *seen]]), attention_mask=is_seen[None, None]).logits[0]
            values += [row.log_softmax(-1)[completion[j]] for j, row in zip(block, logits[len(clean) :], strict=True)]
        difference = (torch.stack(values) - found[0, 0]).abs()[noised].max()
        assert difference < 1e-6 if num_prompt == 8 else difference > 0.01


@pytest.mark.parametrize("context", CONTEXTS)
def test_a_clean_token_reaches_the_terms_of_later_blocks_only(context):
    model, settings = model_of(), settings_of(num_mc_samples=4, context_attention=context)
    texts = [(words(0, 5), words(20, 10)), (words(3, 2), words(30, 9)), (words(4, 8), [*words(9, 5), END])]
    rows = rows_of(texts)
    plan = plan_masks(rows, settings)
    before = score_draws(model, rows, plan, settings).logps

    for j in range(10):
        ids = rows.completion_ids.clone()
        ids[:, j] = 60
        after = score_draws(model, dataclasses.replace(rows, completion_ids=ids), plan, settings).logps
        for i, (prompt, completion) in enumerate(texts):
            if j >= len(completion):
                torch.testing.assert_close(after[i], before[i], rtol=0, atol=1e-12)
                continue
            block = torch.tensor([(len(prompt) + k) // 4 for k in range(10)])
            mine = (len(prompt) + j) // 4
            torch.testing.assert_close(after[i][:, block < mine], before[i][:, block < mine], rtol=0, atol=1e-12)
            later = plan.is_scored[i] & (block > mine)
            assert (after[i] - before[i])[later].abs().gt(1e-7).all()


@pytest.mark.parametrize("block_length", BLOCKS)
def test_what_stands_after_the_end_token_changes_nothing(block_length):
    model, settings = model_of(block_length), settings_of(block_length)
    texts = [text for text in texts_of(block_length, 10) if len(text[1]) < 10]
    rows = rows_of(texts, width=10)
    rubbish = torch.where(rows.completion_mask, rows.completion_ids, 33)
    plan = plan_masks(rows, settings)

    found = score_draws(model, dataclasses.replace(rows, completion_ids=rubbish), plan, settings).logps

    assert torch.equal(found, score_draws(model, rows, plan, settings).logps)


def test_mask_tokens_fill_the_end_block_up_to_the_window():
    """Prompt of 6, completion of 4, block 4: the end block has two places after the end, in the window or not."""
    model, texts = model_of(), [(words(0, 6), [*words(20, 3), END])]
    scores = {}
    for window in (4, 5, 6, 7, 20):
        settings = settings_of(window_length=window, num_mc_samples=4)
        plan = plan_masks(rows_of(texts), settings)
        scores[window] = score_draws(model, rows_of(texts), plan, settings).logps[0, :, :4]
    is_last = plan.is_scored[0, :, :4] & torch.tensor([False, False, True, True])

    assert torch.equal(scores[6], scores[7])
    assert torch.equal(scores[6], scores[20])
    for window in (4, 5):
        assert (scores[window] - scores[6])[is_last].abs().gt(1e-7).all()
        torch.testing.assert_close(scores[window][:, :2], scores[6][:, :2], rtol=0, atol=1e-12)


class Counter:
    """Counts the positions that pass the backbone, its calls, and the rows that the head projects."""

    def __init__(self, model: Any) -> None:
        self.model = model
        self.num_positions = self.num_calls = self.num_projected = 0

    def __enter__(self) -> "Counter":
        self.handle = self.model.model.register_forward_pre_hook(self.count, with_kwargs=True)
        return self

    def __exit__(self, *_: Any) -> None:
        self.handle.remove()

    def count(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        ids = kwargs["input_ids"]
        self.num_positions += ids.numel()
        self.num_calls += 1

    def __call__(self, *, head_fn: Callable[[Tensor, Tensor], Any], **kwargs: Any) -> Any:
        def counted(hidden: Tensor, weight: Tensor) -> Any:
            self.num_projected += len(hidden)
            return head_fn(hidden, weight)

        return self.model(head_fn=counted, **kwargs)


# how many times as many positions the usual doubled sequence and one forward per block would take
@pytest.mark.parametrize("detach_context", [False, True])
@pytest.mark.parametrize(
    ("block_length", "num_prompt", "num_completion", "num_draws", "doubled", "by_block"),
    [
        (4, 30, 32, 1, 1.29, 4.22),
        (4, 30, 32, 4, 2.47, 8.07),
        (4, 9, 12, 2, 1.68, 2.26),
        (3, 7, 10, 4, 2.13, 2.94),
        (32, 40, 40, 1, 1.39, 1.24),
        (32, 40, 40, 4, 2.47, 2.20),
    ],
)
def test_the_work_of_a_pass(block_length, num_prompt, num_completion, num_draws, doubled, by_block, detach_context):
    model = model_of(block_length)
    settings = settings_of(
        block_length, window_length=num_completion, num_mc_samples=num_draws, detach_context=detach_context
    )
    texts = [(words(i, num_prompt - i), words(5 + i, num_completion)) for i in range(4)]
    rows = rows_of(texts, padding=1)
    plan = plan_masks(rows, settings)

    with torch.no_grad(), Counter(model) as one_pass:
        score_draws(one_pass, rows, plan, settings)
    with torch.no_grad(), Counter(model) as slow:
        naive_logps(model, texts, plan, settings)

    at_most = 4 * (num_prompt + num_completion + num_draws * (block_length - 1 + num_completion))
    assert one_pass.num_positions <= at_most
    assert one_pass.num_calls == 1 + detach_context  # with a detached context it goes first, by itself
    assert one_pass.num_projected == plan.is_scored.sum()
    num_blocks = sum(len(naive.text_blocks(len(text), num_completion, block_length)) for text, _ in texts)
    assert slow.num_calls == num_draws * num_blocks
    of_doubled = 4 * 2 * num_draws * (num_prompt + num_completion)
    assert of_doubled / one_pass.num_positions == pytest.approx(doubled, abs=0.01)
    assert slow.num_positions / one_pass.num_positions == pytest.approx(by_block, abs=0.01)


def test_the_work_of_the_benchmarks_shape():
    """Prompt 64, completion 128, block 4, eight rows: 8 * (192 + R * 131) positions at most for R copies."""
    model = model_of()
    for num_draws in (1, 2, 4):
        settings = settings_of(window_length=128, num_mc_samples=num_draws)
        rows = rows_of([(words(0, 64), words(i, 128)) for i in range(8)])
        plan = plan_masks(rows, settings)
        with torch.no_grad(), Counter(model) as counter:
            score_draws(counter, rows, plan, settings)

        # the clean text stops before the end block, and the prompt has no tail
        assert counter.num_positions == 8 * (64 + 124 + num_draws * 128) <= 8 * (192 + num_draws * 131)
        assert counter.num_projected == plan.is_scored.sum()


@pytest.mark.parametrize("is_checkpointed", [False, True])
@pytest.mark.parametrize("context", CONTEXTS)
def test_a_detached_context_has_the_values_and_the_gradients_of_a_detached_cache(context, is_checkpointed):
    model = tiny_sdar(dtype=torch.float64)
    if is_checkpointed:
        model.gradient_checkpointing_enable()
        model.train()
    settings = settings_of(context_attention=context, detach_context=True)
    attached = dataclasses.replace(settings, detach_context=False)
    texts = texts_of(4, settings.window_length)
    rows = rows_of(texts, padding=1)
    plan = plan_masks(rows, settings)
    calls: list[bool] = []
    handle = model.model.layers[0].register_forward_pre_hook(lambda *_: calls.append(torch.is_grad_enabled()))

    found = score_draws(model, rows, plan, settings).logps
    gradients = gradients_of(model, some_loss(found))
    assert calls == [False, True, True] if is_checkpointed else [False, True]  # the last one in the backward pass
    whole = score_draws(model, rows, plan, attached).logps
    whole_gradients = gradients_of(model, some_loss(whole))
    handle.remove()
    model.gradient_checkpointing_disable()
    expected = naive_logps(model, texts, plan, settings, is_cached=True)

    assert_same(found, expected)
    assert_same(found, whole)
    assert_same_gradients(gradients, gradients_of(model, some_loss(expected)), tolerance=1e-12)  # 3.4e-16 seen
    expected_whole = gradients_of(model, some_loss(naive_logps(model, texts, plan, attached)))
    assert_same_gradients(whole_gradients, expected_whole)
    assert (gradients - expected_whole).norm() > 0.05 * expected_whole.norm()


@pytest.mark.parametrize("context", CONTEXTS)
def test_eager_attention_gives_the_same(context):
    settings = settings_of(context_attention=context)
    texts = texts_of(4, settings.window_length)
    rows = rows_of(texts, padding=1)
    plan = plan_masks(rows, settings)
    results = []
    for implementation in ("sdpa", "eager"):
        model = model_of(dtype=torch.float32, attn_implementation=implementation)
        logps = score_draws(model, rows, plan, settings).logps
        results.append((logps, gradients_of(model, some_loss(logps))))

    assert_same(results[0][0], results[1][0])
    assert_same_gradients(results[0][1], results[1][1])


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32])
@pytest.mark.parametrize("sharing", ["row", "group"])
def test_a_score_does_not_depend_on_the_batch_it_is_in(sharing, dtype):
    model, settings = model_of(dtype=dtype), settings_of()
    texts = texts_of(4, settings.window_length)
    keys = [7 + i for i in range(7)] if sharing == "row" else [3] * 7
    expected = score_elbo(model, rows_of(texts, keys=keys), settings)

    def assert_same_rows(found: Tensor, rows: Sequence[int] = range(7)) -> None:
        assert_same(found, expected[list(rows)])

    for batch_size in (1, 2, 4):
        assert_same_rows(score_elbo(model, rows_of(texts, keys=keys), settings, batch_size=batch_size))
    assert_same_rows(score_elbo(model, rows_of(texts, keys=keys, padding=5), settings))
    for order in ([2, 0, 3, 1], [1, 3], [6], [3], [0]):
        part = rows_of([texts[i] for i in order], keys=[keys[i] for i in order])
        assert_same_rows(score_elbo(model, part, settings), order)
    more = rows_of([*texts, ([], []), ([5, 6], [])], keys=[*keys, 20, 21])  # neighbours without a token to score
    found = score_elbo(model, more, settings)
    assert_same_rows(found[:7])
    assert found[7:].isnan().all()


@pytest.mark.parametrize("detach_context", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_a_batch_with_nothing_to_score_gives_differentiable_zeros(dtype, detach_context):
    model, settings = tiny_sdar(dtype=dtype), settings_of(detach_context=detach_context)
    rows = rows_of([([5, 6], []), ([7], []), ([], [])], width=4)
    plan = plan_masks(rows, settings)

    scores = score_draws(model, rows, plan, settings)
    elbo_per_token_by_draw(scores.logps, plan.weight.to(dtype)).sum().backward()

    assert not scores.logps.any()
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert parameter.grad.eq(0).all(), name
    assert score_elbo(model, rows, settings).isnan().all()


def test_rows_without_a_token_to_score_neither_count_nor_disturb():
    model, settings = model_of(), settings_of()
    texts = [(words(0, 5), words(9, 10)), (words(1, 6), []), ([], []), (words(2, 2), [END])]
    rows = rows_of(texts)
    plan = plan_masks(rows, settings)

    found = score_draws(model, rows, plan, settings).logps
    expected = naive_logps(model, texts, plan, settings)

    assert_same(found, expected)
    assert not found[1:3].any()
    gradients = gradients_of(model, some_loss(found))
    assert gradients.isfinite().all()
    assert_same_gradients(gradients, gradients_of(model, some_loss(expected)))


def test_some_of_the_draws_are_those_of_all():
    model, settings = model_of(), settings_of(num_mc_samples=4)
    rows = rows_of(texts_of(4, settings.window_length))
    plan = plan_masks(rows, settings)

    together = score_draws(model, rows, plan, settings)
    for chosen in ([0], [3], [1, 2], [2, 0]):
        some = score_draws(model, rows, plan, settings, draws=chosen)
        torch.testing.assert_close(some.logps, together.logps[:, chosen], rtol=0, atol=1e-12)
        torch.testing.assert_close(some.entropy, together.entropy[:, chosen], rtol=0, atol=1e-12)


def test_entropies_are_those_of_the_scored_distributions():
    model, settings = model_of(), settings_of(temperature=0.7)
    prompt, completion = words(0, 5), [*words(20, 6), END]
    rows = rows_of([(prompt, completion)])
    plan = plan_masks(rows, settings)

    scores = score_draws(model, rows, plan, settings)

    expected = torch.zeros(2, 10, dtype=torch.float64)
    for m, noised in enumerate(noised_by(plan, 0)):
        for block in naive.text_blocks(5, 7, 4, window_length=10):
            seen = naive.noised_block(prompt, completion, block, noised, MASK)
            logits = naive.block_logits(model, [*prompt, *completion][: block.start], seen, 4, "block_causal") / 0.7
            for place, row in zip(block, logits.log_softmax(-1), strict=True):
                if place - 5 in noised:
                    expected[m, place - 5] = -(row.exp() * row).sum().detach()
    torch.testing.assert_close(scores.entropy[0], expected, rtol=0, atol=1e-12)
    assert not scores.entropy.requires_grad


def test_training_mode_and_the_global_generator_play_no_part():
    model, settings = tiny_sdar(), settings_of()
    rows = rows_of(texts_of(4, settings.window_length))
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = score_elbo(model, rows, settings)
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)

    assert torch.equal(score_elbo(model.train(), rows, settings), first)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"tail": "eos", "end_token_id": END}, "tail='eos' does not apply to mask_law='staircase'"),
        ({"tail": "hidden"}, "tail='hidden' does not apply to mask_law='staircase'.*Use tail='mask'"),
        ({"context_attention": "full"}, "context_attention='full' is not known. Use one of block_causal, causal"),
        ({"mask_law": "uniform", "context_attention": "causal"}, "apply to mask_law='staircase' only"),
        ({"mask_law": "uniform", "detach_context": True}, "apply to mask_law='staircase' only"),
        ({"mc_sampling": "complementary", "num_mc_samples": 3}, "num_mc_samples=3 is odd"),
    ],
)
def test_settings_that_would_be_ignored_are_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        settings_of(**changes)
