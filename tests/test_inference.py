# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import math
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch import Tensor

from tests import naive
from tests.tiny import tiny_llada, tiny_tokenizer
from trl_stabledrl.inference import encode_prompts, generate, score

END, MASK = 1, 2
PROMPTS = ["1+1=", "7", "abcdef"]
COMPLETIONS = ["123", "ab", "x-y?z"]
CHAT = [{"role": "user", "content": "hi"}]


def model_of(**kwargs: Any) -> Any:
    return tiny_llada(dtype=torch.float64, **kwargs)


def ids_of(text: str) -> list[int]:
    return tiny_tokenizer()(text=text)["input_ids"]


def log_probs_of(model: Any, prompt: str, completion: Sequence[int], **kwargs: Any) -> naive.RowLogProbs:
    return naive.RowLogProbs(model, ids_of(prompt), completion, mask_token_id=MASK, **kwargs)


def score_tiny(model: Any, prompts: Any = PROMPTS, completions: Any = COMPLETIONS, **kwargs: Any) -> Any:
    return score(model, tiny_tokenizer(), prompts, completions, **kwargs)


@pytest.mark.parametrize("sampling", ["independent", "stratified", "complementary"])
@pytest.mark.parametrize(("law", "block_length"), [("uniform", None), ("semi_ar", 2)])
def test_scores_are_the_enumerated_bound_within_their_own_standard_error(law, block_length, sampling):
    model = model_of()
    found = score_tiny(model, mask_law=law, mc_sampling=sampling, block_length=block_length, num_mc_samples=120)

    for i, (prompt, text) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = [*ids_of(text), END]
        expected = naive.random_order_elbo(len(ids), block_length or 8, log_probs_of(model, prompt, ids))
        assert found.num_tokens[i] == len(ids)
        assert 0.01 < found.standard_error[i] < 3
        assert abs(found.elbo[i].item() - expected) <= 3 * found.standard_error[i].item()
        assert found.elbo_per_token[i].item() == pytest.approx(found.elbo[i].item() / len(ids))


def test_the_full_law_scores_the_log_softmax_at_all_positions():
    model = model_of()
    found = score_tiny(model, mask_law="full", num_mc_samples=1, add_end_token=False)

    for i, (prompt, text) in enumerate(zip(PROMPTS, COMPLETIONS, strict=True)):
        ids = ids_of(text)
        expected = sum(log_probs_of(model, prompt, ids)(frozenset(range(len(ids)))))
        assert found.elbo[i].item() == pytest.approx(expected, rel=1e-6)
    assert found.standard_error.isnan().all()


@pytest.mark.parametrize("tail", ["mask", "eos", "hidden"])
def test_a_window_stands_behind_the_completion_as_in_a_rollout(tail):
    model = model_of()
    found = score_tiny(model, mask_law="full", num_mc_samples=1, max_completion_length=9, tail=tail)

    ids = [*ids_of("ab"), END]
    log_probs = log_probs_of(model, "7", ids, window_length=9, tail=tail, end_token_id=END)
    assert found.elbo[1].item() == pytest.approx(sum(log_probs(frozenset(range(3)))), rel=1e-6)


@pytest.mark.parametrize("window", [None, 12])
def test_a_score_depends_on_the_row_and_its_place_alone(window):
    model = model_of()
    options: dict[str, Any] = {"num_mc_samples": 4, "max_completion_length": window}
    expected = score_tiny(model, **options)

    def assert_same(found: Any, rows: Sequence[int] = (0, 1, 2)) -> None:
        for name in ("elbo", "standard_error"):
            value: Tensor = getattr(expected, name)
            torch.testing.assert_close(getattr(found, name)[list(rows)], value[list(rows)], rtol=0, atol=1e-12)

    for batch_size in (1, 2, 3):
        assert_same(score_tiny(model, batch_size=batch_size, **options))
    longer = score_tiny(model, [*PROMPTS[:2], "a much longer prompt"], [*COMPLETIONS[:2], "0123456789"], **options)
    assert_same(longer, (0, 1))
    assert_same(score_tiny(model, PROMPTS[:1], COMPLETIONS[:1], **options), (0,))
    assert (score_tiny(model, seed=1, **options).elbo - expected.elbo).abs().min() > 0


def test_the_standard_error_is_that_of_the_mean_of_independent_pairs():
    model, num = model_of(), 6
    found = score_tiny(model, num_mc_samples=num, add_end_token=False)
    # the same draws, three pairs apart: the masks are a function of seed, row and draw
    means = [score_tiny(model, num_mc_samples=2 * pairs, add_end_token=False).elbo for pairs in (1, 2, 3)]

    pairs = torch.stack([means[0], 2 * means[1] - means[0], 3 * means[2] - 2 * means[1]])
    torch.testing.assert_close(found.elbo, pairs.mean(dim=0))
    for i in range(3):
        values = pairs[:, i].tolist()
        variance = sum((x - sum(values) / 3) ** 2 for x in values) / 2
        assert found.standard_error[i].item() == pytest.approx(math.sqrt(variance / 3), rel=1e-6)


@pytest.mark.parametrize(("sampling", "num"), [("complementary", 2), ("independent", 1), ("stratified", 1)])
def test_one_independent_estimate_has_no_standard_error(sampling, num):
    found = score_tiny(model_of(), mc_sampling=sampling, num_mc_samples=num)

    assert found.standard_error.isnan().all()
    assert found.elbo.isfinite().all()


def test_the_standard_error_covers_the_truth_as_often_as_it_says():
    model, num_seeds = model_of(), 60
    expected = naive.random_order_elbo(4, 8, log_probs_of(model, "1+1=", [*ids_of("123"), END]))

    # one row many times: every place has masks of its own
    found = score_tiny(model, ["1+1="] * num_seeds, ["123"] * num_seeds, num_mc_samples=64, batch_size=60)

    z = (found.elbo - expected) / found.standard_error
    # mean 0 and variance about 1 (Student's t with 31 degrees of freedom: 1.07), at 3 standard errors of each
    assert abs(z.mean().item()) <= 3 * math.sqrt(1.07 / num_seeds)
    assert abs(z.var().item() - 1.07) <= 3 * 1.07 * math.sqrt(2 / num_seeds)


def test_completions_as_ids_end_with_their_first_end_token_and_get_none():
    model = model_of()
    options: dict[str, Any] = {"num_mc_samples": 2}

    as_text = score_tiny(model, ["7"], ["ab"], **options)
    as_ids = score_tiny(model, ["7"], [[*ids_of("ab"), END]], **options)
    longer = score_tiny(model, ["7"], [[*ids_of("ab"), END, 20, 21]], **options)
    unfinished = score_tiny(model, ["7"], [ids_of("ab")], **options)

    assert torch.equal(as_text.elbo, as_ids.elbo)
    assert torch.equal(as_text.elbo, longer.elbo)
    assert as_text.num_tokens.tolist() == [3]
    assert unfinished.num_tokens.tolist() == [2]


def test_chat_prompts_go_through_the_template_with_the_generation_prompt():
    tokenizer = tiny_tokenizer(chat_template=True)
    rendered = "user:hi<|eot_id|>assistant:"

    (encoded,) = encode_prompts(tokenizer, [CHAT])

    assert tokenizer.decode(encoded) == rendered
    model = model_of()
    chat = score(model, tokenizer, [CHAT], ["ab"], num_mc_samples=2)
    plain = score(model, tokenizer, [rendered], ["ab"], num_mc_samples=2)
    assert torch.equal(chat.elbo, plain.elbo)
    options: dict[str, Any] = {"max_completion_length": 4, "block_length": 4, "show_progress": False}
    assert generate(model, tokenizer, [CHAT], **options) == generate(model, tokenizer, [rendered], **options)


def generated(model: Any, prompts: Sequence[str] = PROMPTS, **kwargs: Any) -> list[list[int]]:
    """Token ids of each completion, up to its own length."""
    options: dict[str, Any] = {"max_completion_length": 8, "block_length": 4, "num_denoising_steps": 2}
    _, rollouts = generate(
        model, tiny_tokenizer(), prompts, **options | kwargs, show_progress=False, return_rollouts=True
    )
    return [ids for rollout in rollouts for ids in rollout.completion_ids]  # pyright: ignore[reportAttributeAccessIssue]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_completions_do_not_depend_on_the_batch_they_are_in(temperature):
    model = model_of()
    expected = generated(model, temperature=temperature, batch_size=3)

    for batch_size in (1, 2):
        assert generated(model, temperature=temperature, batch_size=batch_size) == expected
    assert generated(model, [*PROMPTS, "a longer neighbour"], temperature=temperature)[:3] == expected
    assert generated(model, temperature=temperature) == expected
    assert not any(MASK in row for row in expected)
    assert all(1 <= len(row) <= 8 for row in expected)


def test_greedy_completions_ignore_the_seed_and_sampled_ones_do_not():
    model = model_of()
    greedy = [generated(model, seed=seed) for seed in (0, 1)]
    sampled = [generated(model, temperature=1.0, seed=seed) for seed in (0, 1)]

    assert greedy[0] == greedy[1]
    assert sampled[0] != sampled[1]
    same = generated(model, ["7"] * 8, temperature=1.0)
    assert len({tuple(row) for row in same}) > 1
    assert len({tuple(row) for row in generated(model, ["7"] * 8)}) == 1


def test_texts_are_the_decoded_completions_in_the_order_of_the_prompts():
    model, tokenizer = model_of(), tiny_tokenizer()
    options: dict[str, Any] = {"max_completion_length": 8, "block_length": 4}

    texts = generate(model, tokenizer, PROMPTS, **options, batch_size=2, show_progress=False)

    rows = generated(model, batch_size=2, num_denoising_steps=2)
    assert texts == [tokenizer.decode(row, skip_special_tokens=True) for row in rows]


def test_the_global_generator_is_neither_read_nor_moved():
    model = model_of()
    torch.manual_seed(1)
    state = torch.get_rng_state()
    first = generated(model, temperature=1.0), score_tiny(model, num_mc_samples=2).elbo
    assert torch.equal(torch.get_rng_state(), state)
    torch.manual_seed(2)

    assert generated(model, temperature=1.0) == first[0]
    assert torch.equal(score_tiny(model, num_mc_samples=2).elbo, first[1])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"prompts": []}, r"prompts=\[\] must be a list with at least one prompt"),
        ({"prompts": "one"}, "prompts='one' must be a list with at least one prompt. Put a single one in a list"),
        ({"completions": ["1"]}, "There are 3 prompts but 1 completions. Pass one for each"),
        ({"completions": ["1", [], "2"]}, r"completion \[\] has no tokens, so there is nothing to score"),
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"num_mc_samples": 0}, "num_mc_samples=0 must be at least 1"),
        ({"num_mc_samples": 3}, "num_mc_samples=3 is odd, but mc_sampling='complementary'"),
        ({"mask_law": "full"}, "num_mc_samples=32 with mask_law='full' would repeat one and the same mask"),
        ({"mask_law": "staircase"}, "mask_law='staircase' does not apply to LLaDA, whose attention is 'full'"),
        ({"mask_law": "stairs"}, "mask_law='stairs' does not apply to LLaDA"),
        ({"max_completion_length": 2}, "A completion is 6 tokens long, but the window holds max_completion_length=2"),
        ({"score_temperature": 0.0}, "score_temperature=0.0 must be above 0"),
        ({"tail": "pad", "max_completion_length": 9}, "tail='pad' is not known. Use one of mask, eos, hidden"),
        ({"mask_law": "semi_ar", "block_length": 0}, "block_length=0 must be at least 1"),
    ],
)
def test_scoring_what_cannot_be_scored_is_refused(changes, message):
    options: dict[str, Any] = {"prompts": PROMPTS, "completions": COMPLETIONS} | changes
    prompts, completions = options.pop("prompts"), options.pop("completions")
    if isinstance(prompts, str) or not prompts:
        completions = completions[: len(prompts)]
    with pytest.raises(ValueError, match=message):
        score(model_of(), tiny_tokenizer(), prompts, completions, **options)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"batch_size": 0}, "batch_size=0 must be at least 1"),
        ({"block_length": 0}, "block_length"),
        ({"block_length": 9}, "block_length"),
        ({"num_denoising_steps": 0}, "num_denoising_steps"),
        ({"max_completion_length": 0}, "max_completion_length"),
        ({"temperature": -1.0}, "temperature"),
    ],
)
def test_generating_with_settings_that_cannot_work_is_refused(changes, message):
    with pytest.raises(ValueError, match=message):
        generated(model_of(), **changes)


@pytest.mark.parametrize(
    ("completions", "options", "message"),
    [
        (["1"], {"tail": "zzz"}, "tail='zzz' is not known"),
        ("1", {}, "completions='1' must be a list"),
        ([[5, 999]], {}, r"\[5, 999\] is neither text nor token ids below"),
        ([[{"role": "assistant", "content": "1"}]], {}, "Pass the text of a chat message"),
    ],
)
def test_score_refuses_what_it_cannot_read(completions, options, message):
    with pytest.raises(ValueError, match=message):
        score(tiny_llada(), tiny_tokenizer(), ["12"], completions, **options)
