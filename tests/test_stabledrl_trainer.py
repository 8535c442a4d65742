# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback

from tests import naive
from tests.tiny import published_llada_folder
from tests.trainer_tools import (
    END,
    GROUP,
    PROMPTS,
    Run,
    config_of,
    flat,
    largest_difference,
    letter_tokenizer,
    naive_gradients,
    objective_of,
    prompts_of,
    relative_difference,
    reward_of,
    rows_of,
    run_of,
    tiny_model,
)
from trl_stabledrl import StableDRLConfig, StableDRLTrainer, stabledrl_trainer
from trl_stabledrl.engines import transformers as engine

TOLERANCE = 1e-6
"""Relative. The weights, the old scores and Llama's RMSNorm are float32, in a float64 model."""


def layout(b: int, a: int, s: int, **options: Any) -> dict[str, Any]:
    """Rows per micro-step, micro-steps per optimizer step and per generation."""
    return {
        "per_device_train_batch_size": b,
        "gradient_accumulation_steps": a,
        "steps_per_generation": s,
    } | options


# The gradient of an optimizer step is that of the definition, for every layout


# largest relative difference to the definition: 3.5e-8, 5.4e-8, 9.4e-8, 7.2e-8, 2.1e-7, 1.4e-7, 6.8e-8, 3.5e-7, 1.9e-7
@pytest.mark.parametrize(
    ("num_prompts", "num_iterations", "num_steps", "layouts"),
    [
        (4, 1, 1, [(16, 1, 1), (4, 4, 4), (2, 8, 8), (1, 16, 16), (4, 4, 1), (2, 8, 4), (2, 8, 2)]),
        (4, 1, 2, [(8, 1, 2), (2, 4, 8)]),
        (4, 1, 4, [(4, 1, 4), (1, 4, 16)]),
        (4, 2, 2, [(16, 1, 1), (4, 4, 4), (1, 16, 16)]),
        (4, 2, 3, [(8, 1, 2), (2, 4, 8)]),
        (4, 2, 5, [(4, 1, 4)]),
        (3, 2, 2, [(12, 1, 1), (4, 3, 3), (3, 4, 4)]),
        (2, 3, 3, [(8, 1, 1), (2, 4, 4)]),
        (2, 3, 6, [(2, 2, 4)]),
    ],
)
def test_every_layout_gives_the_gradient_of_the_definition(num_prompts, num_iterations, num_steps, layouts, tmp_path):
    expected: list[Tensor] = []
    rollouts: list[list[int]] = []
    metrics: dict[str, Any] = {}
    for sizes in layouts:
        options = layout(*sizes, num_iterations=num_iterations, max_steps=num_steps)
        run = run_of(tmp_path, prompts=PROMPTS[:num_prompts], **options)
        found = [ids for generation in run.recorder.generations for ids in generation.completions]
        if not expected:
            expected, rollouts = naive_gradients(run), found
        assert found[: len(rollouts)] == rollouts
        for gradient, definition in zip(run.gradients, expected, strict=True):
            assert definition.norm() > 1e-3
            assert relative_difference(gradient, definition) < TOLERANCE, sizes
        # what is logged describes the optimizer step, not the micro-steps it happens to have
        if sizes[2] >= sizes[1]:
            names = ("ratio/max", "ratio/median", "log_ratio/std", "weights/ess", "weights/max", "unscorable", "drift")
            logged = {name: run.recorder.logged(name) for name in names}
            metrics = metrics or logged
            for name, values in metrics.items():
                assert logged[name] == pytest.approx(values, rel=1e-5, abs=1e-7), (sizes, name)


def test_a_short_last_window_is_exact(tmp_path):
    options = layout(2, 4, 2, max_steps=4, learning_rate=0.2)
    run = run_of(tmp_path, prompts=PROMPTS[:3], **options)  # 6 micro-steps an epoch: windows of 4, 2, 4 and 2

    expected = naive_gradients(run)
    assert len(run.recorder.generations) == 6
    for gradient, definition in zip(run.gradients, expected, strict=True):
        assert definition.norm() > 1e-3
        assert relative_difference(gradient, definition) < TOLERANCE  # 5.8e-8


def test_the_order_that_trl_shuffles_the_rows_into_changes_nothing(tmp_path, monkeypatch):
    options = layout(2, 2, 4, num_iterations=2, max_steps=2)
    shuffled = run_of(tmp_path, **options)
    monkeypatch.setattr("trl.trainer.grpo_trainer.shuffle_sequence_dict", lambda batch: batch)
    ordered = run_of(tmp_path, **options)
    monkeypatch.setattr(
        "trl.trainer.grpo_trainer.shuffle_sequence_dict",
        lambda batch: {k: v.flip(0) if isinstance(v, Tensor) and v.dim() else v for k, v in batch.items()},
    )
    flipped = run_of(tmp_path, **options)

    assert torch.equal(shuffled.parameters, ordered.parameters)
    assert torch.equal(flipped.parameters, ordered.parameters)


# largest relative difference of all options: 2.1e-7
@pytest.mark.parametrize(
    "options",
    [
        {"surrogate": "sandwich"},
        {"surrogate": "sandwich", "mask_law": "uniform", "eubo_beta": 1.0},
        {"clip_mode": "upper", "ratio_cap": 1.05, "mask_coupling": "independent"},
        {"epsilon": 0.05, "mask_coupling": "independent"},
        {"ratio_normalization": "sequence"},
        {"mask_sharing": "group"},
        {"mask_coupling": "independent", "surrogate": "sandwich", "mc_sampling": "independent", "clip_mode": "upper"},
        {"mask_coupling": "independent", "mask_sharing": "group", "ratio_normalization": "sequence"},
        {"mask_law": "uniform", "mc_sampling": "stratified", "num_mc_samples": 3},
        {"mask_law": "semi_ar", "mc_sampling": "independent", "num_mc_samples": 1},
        {"mask_law": "full"},
        {"tail": "eos", "score_temperature": 0.7},
        {"tail": "hidden", "gradient_checkpointing": True},
        {"scale_rewards": "group", "pad_to_multiple_of": 4},
        {"scale_rewards": "batch"},
    ],
    ids=lambda options: "-".join(f"{value}" for value in options.values()),
)
def test_every_option_gives_the_gradient_of_the_definition(options, tmp_path):
    # two groups a generation, one an optimizer step, half of one a micro-step
    run = run_of(tmp_path, **layout(2, 2, 4, num_iterations=2, max_steps=3), **options)

    expected = naive_gradients(run, scale=options.get("scale_rewards", "none"))
    for gradient, definition in zip(run.gradients, expected, strict=True):
        assert definition.norm() > 1e-3
        assert relative_difference(gradient, definition) < TOLERANCE
    if "ratio_cap" in options or "epsilon" in options:
        assert max(run.recorder.logged("clip_ratio/high")) > 0
        assert (max(run.recorder.logged("clip_ratio/low")) > 0) == ("epsilon" in options)


@pytest.fixture(scope="module")
def float64_folder(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("model")
    tiny_model().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def model_from(folder: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)


# largest relative difference: 2.0e-7
@pytest.mark.parametrize("sizes", [(2, 2, 4), (4, 2, 2)])  # half a group a micro-step, and a whole one
@pytest.mark.parametrize(
    "options",
    [
        {"kl_estimator": "k2"},
        {"kl_estimator": "k3"},
        {"kl_estimator": "k3", "mask_coupling": "independent", "surrogate": "sandwich"},
    ],
    ids=["k2", "k3", "k3-independent-sandwich"],
)
def test_the_kl_gives_the_gradient_of_the_definition(options, sizes, tmp_path, float64_folder):
    model = model_from(float64_folder)
    run = run_of(
        tmp_path,
        model=model,
        beta=0.5,
        learning_rate=0.2,
        **layout(*sizes, num_iterations=2, max_steps=3),
        **options,
    )

    assert largest_difference(run) < TOLERANCE
    kl = run.recorder.logged("kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-12)  # the policy is its own reference
    assert min(kl[1:]) > 1e-3


def test_the_first_loss_is_minus_the_weighted_surrogates_and_may_be_small_where_the_gradient_is_not(tmp_path):
    run = run_of(tmp_path, logging_steps=1)

    args, generation = run.trainer.args, run.recorder.generations[0]
    with torch.no_grad():
        expected = naive.update_loss(
            generation.model, rows_of(generation, 0, args, "none"), objective_of(args), iteration=0
        )
    assert run.recorder.logged("loss")[0] == pytest.approx(expected.item(), abs=1e-5)
    assert run.gradients[0].norm() > 0.1


# Masks and ratios


class Watched(StableDRLTrainer):
    """Keeps the iteration of each micro-step's loss, and the masks of each row and iteration."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.iterations: list[int] = []
        self.masks: dict[tuple[int, int], list[Any]] = {}
        super().__init__(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        self.iterations.append(inputs["iteration"])
        return super()._compute_loss(model, inputs)


def with_masks_kept(monkeypatch, masks: dict[tuple[int, int], Any], draws: list[Any] | None = None) -> None:
    plan_masks = stabledrl_trainer.plan_masks

    def keeping(rows, settings, *, iteration=0):
        plan = plan_masks(rows, settings, iteration=iteration)
        for i, key in enumerate(rows.noise_key.tolist()):
            found = (plan.is_noised[i].tolist(), plan.is_noised_prompt[i, :, -1:].tolist(), plan.weight[i].tolist())
            assert masks.setdefault((key, iteration), found) == found  # the same wherever the row is scored
        return plan

    monkeypatch.setattr(stabledrl_trainer, "plan_masks", keeping)
    monkeypatch.setattr("trl_stabledrl.likelihood.plan_masks", keeping)


def test_masks_do_not_depend_on_how_a_generation_is_cut(tmp_path, monkeypatch):
    found = []
    for s in (1, 2, 4):
        model = tiny_model()
        model.config.attention_dropout = 0.1
        for layer in model.model.layers:
            layer.self_attn.attention_dropout = 0.1
        masks: dict[tuple[int, int], Any] = {}
        with monkeypatch.context() as patched:
            with_masks_kept(patched, masks)
            run = run_of(
                tmp_path,
                model=model,
                trainer_class=Watched,
                num_generations=2,
                learning_rate=0.0,
                num_iterations=2,
                max_steps=2 * s,
                **layout(8 // s, 1, s),
            )
        found.append(masks)
        assert run.trainer.iterations == [0] * s + [1] * s  # once per pass, not once per micro-step
        assert run.recorder.logged("ratio/max")[0] == 1.0
        assert run.recorder.logged("log_ratio/std")[0] == 0.0
        # frozen weights and no dropout: later ratios are one up to the float32 the old scores are kept in
        assert run.recorder.logged("ratio/max") == pytest.approx([1.0] * 2 * s, abs=1e-6)

    assert found[0] == found[1] == found[2]
    rows = {row for row, _ in found[0]}
    assert rows == set(range(8))
    assert any(found[0][row, 0] != found[0][row, 1] for row in rows)


def test_rows_of_later_generations_have_masks_of_their_own(tmp_path, monkeypatch):
    masks: dict[tuple[int, int], Any] = {}
    with_masks_kept(monkeypatch, masks)
    run_of(tmp_path, max_steps=2, learning_rate=0.0)

    assert {row for row, _ in masks} == set(range(32))


def test_the_global_generators_are_neither_read_nor_reseeded(tmp_path):
    states: list[Tensor] = []

    class Guarded(StableDRLTrainer):
        def _compute_loss(self, model, inputs):
            before = torch.get_rng_state()
            loss = super()._compute_loss(model, inputs)
            states.append(torch.get_rng_state())
            assert torch.equal(before, states[-1])
            return loss

    class Noise(TrainerCallback):
        def on_train_begin(self, args, state, control, **kwargs):
            torch.manual_seed(123)

    options = layout(4, 2, 4, max_steps=2)
    guarded = run_of(tmp_path, trainer_class=Guarded, **options)
    disturbed = run_of(tmp_path, callbacks=[Noise()], **options)

    assert states
    assert torch.equal(guarded.parameters, disturbed.parameters)


def test_another_seed_is_another_run(tmp_path):
    first, second = (run_of(tmp_path, seed=seed, shuffle_dataset=False) for seed in (42, 43))

    assert first.recorder.generations[0].prompts == second.recorder.generations[0].prompts
    assert first.recorder.generations[0].completions != second.recorder.generations[0].completions


def test_equal_completions_of_a_group_are_different_samples(tmp_path):
    run = run_of(tmp_path)

    assert len({tuple(ids) for ids in run.recorder.generations[0].completions}) > 8
    assert run.recorder.logged("rollout/unique_fraction")[0] == pytest.approx(15 / 16)
    prompts = run.recorder.generations[0].prompts
    pairs = {(tuple(p), tuple(c)) for p, c in zip(prompts, run.recorder.generations[0].completions, strict=True)}
    assert len(pairs) == 15


# Rows that cannot be scored

LOST = 5
"""A token whose embedding is NaN; `PROMPTS_WITHOUT_IT` do not hold it."""
PROMPTS_WITHOUT_IT = ["cd", "c", "defgd", "gg"]


@pytest.fixture
def poisoned(monkeypatch) -> Any:
    """A model that cannot see one token, though its rollouts are those of the sound one."""
    sound = tiny_model().get_input_embeddings().weight.detach()
    sample = engine.sample

    def sample_soundly(model, *args, **kwargs):
        weight = model.get_input_embeddings().weight
        with torch.no_grad():
            broken = weight[LOST].clone()
            weight[LOST] = sound[LOST]
            rollout = sample(model, *args, **kwargs)
            weight[LOST] = broken
        return rollout

    monkeypatch.setattr(engine, "sample", sample_soundly)

    def make() -> Any:
        model = tiny_model()
        with torch.no_grad():
            model.get_input_embeddings().weight[LOST] = torch.nan
        return model

    return make


def lost_draws(run: Run, *, iteration: int = 0) -> dict[int, list[bool]]:
    """Which draws of which rows of the first generation see the token that gives NaN."""
    args, generation = run.trainer.args, run.recorder.generations[0]
    objective = objective_of(args)
    found = {}
    for row in rows_of(generation, 0, args, "none"):
        draws = naive.draws_of(
            objective.law,
            objective.sampling,
            seed=objective.seed,
            key=row.index,
            iteration=iteration,
            num_draws=objective.num_draws,
            length=len(row.completion),
            block_length=objective.block_length,
            prompt_length=len(row.prompt),
        )
        sees = [any(t == LOST and j not in d.noised for j, t in enumerate(row.completion)) for d in draws]
        if any(sees):
            found[row.index] = sees
    return found


# which draws of which rows are lost, by seed
LOST_DRAWS = {
    1: {2: [True, False], 15: [False, True]},  # rows 0 and 1 have been propagated with a quarter each
    2: {0: [False, True]},  # the first draw has been propagated when the second is found
    10: {0: [True, True], 2: [False, True], 4: [True, True], 14: [False, True]},
}


# largest relative difference: 2.3e-7
@pytest.mark.parametrize(
    ("seed", "options"),
    [
        (10, layout(16, 1, 1)),  # found in the pass that supplies the weights
        (10, layout(4, 4, 4)),  # the same, one group a micro-step
        (10, layout(2, 2, 8, max_steps=4)),  # found by the pass before the micro-steps
        (10, layout(2, 8, 8, mask_coupling="independent", num_iterations=2, max_steps=2)),
        (1, layout(1, 16, 16)),  # found late
        (2, layout(1, 16, 16)),
        (2, layout(2, 8, 8)),
        (1, layout(2, 8, 8, surrogate="sandwich", gradient_checkpointing=True)),
    ],
    ids=str,
)
def test_a_row_without_a_finite_likelihood_leaves_the_others_as_they_would_be_without_it(
    seed, options, tmp_path, poisoned
):
    run = run_of(tmp_path, model=poisoned(), prompts=PROMPTS_WITHOUT_IT, seed=seed, learning_rate=0.2, **options)

    lost = lost_draws(run)
    assert lost == LOST_DRAWS[seed]
    expected = naive_gradients(run)
    for gradient, definition in zip(run.gradients, expected, strict=True):
        assert relative_difference(gradient, definition) < TOLERANCE
    if run.trainer.args.max_steps == 1:
        assert run.recorder.logged("unscorable") == [len(lost)]
    weights = run.trainer.model.get_input_embeddings().weight.detach()
    assert weights[torch.arange(len(weights)) != LOST].isfinite().all()
    assert all(p.isfinite().all() for n, p in run.trainer.model.named_parameters() if "embed" not in n)


@pytest.mark.parametrize("sizes", [(16, 1, 1), (4, 4, 4), (1, 16, 16)])
def test_a_step_without_a_finite_likelihood_stops_the_run_and_names_step_and_rows(sizes, tmp_path):
    model = tiny_model()

    class Break(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            with torch.no_grad():
                model.model.norm.weight.fill_(torch.nan)

    with pytest.raises(
        RuntimeError, match=r"Step 1: all 16 scored rows .* \(rows \[0, 1, 2, .* 15\]\).*learning_rate"
    ):
        run_of(tmp_path, model=model, callbacks=[Break()], num_iterations=2, max_steps=2, **layout(*sizes))


def test_a_group_without_a_finite_likelihood_does_not_stop_the_others(tmp_path, poisoned):
    # the first prompt holds the token: none of its rows can be scored
    runs = [
        run_of(tmp_path, model=poisoned(), prompts=["a", "c", "dd", "gg"], **layout(*sizes))
        for sizes in [(4, 4, 4), (2, 8, 8)]
    ]

    assert all(run.recorder.logged("unscorable")[0] >= GROUP for run in runs)
    for run in runs:
        assert largest_difference(run) < TOLERANCE


def test_truncated_completions_can_be_left_out(tmp_path):
    run = run_of(tmp_path, mask_truncated_completions=True, num_iterations=2, max_steps=2, **layout(2, 8, 8))

    def without_truncated(row: naive.Row) -> naive.Row:
        is_ended = row.completion[-1] in (END, 0)  # TRL lets a padding token end a completion as well
        return row if is_ended else dataclasses.replace(row, completion=[])

    num_truncated = sum(ids[-1] not in (END, 0) for ids in run.recorder.generations[0].completions)
    assert num_truncated == 2
    assert run.recorder.logged("unscorable") == [2.0, 2.0]
    assert largest_difference(run, edit=without_truncated) < TOLERANCE


def test_a_step_of_truncated_completions_alone_changes_nothing(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[0] = 0.0  # never the most probable: to TRL a padding token ends a completion
    options = layout(4, 4, 4, suppress_eos="sampling", top_k=1)
    run = run_of(tmp_path, model=model, mask_truncated_completions=True, **options)

    assert run.recorder.logged("completions/clipped_ratio") == [1.0]
    assert run.gradients[0].eq(0).all()
    assert run.recorder.logged("unscorable") == [16.0]


# Rewards


@pytest.mark.parametrize("scale_rewards", ["none", "group", "batch"])
def test_groups_with_equal_rewards_contribute_exactly_zero(scale_rewards, tmp_path):
    # seven float32 numbers 0.7 have a mean that is not 0.7, and TRL divides what is left by 1e-4
    run = run_of(
        tmp_path,
        prompts=PROMPTS[:2],
        reward=lambda ids: 0.7,
        scale_rewards=scale_rewards,
        num_generations=7,
        **layout(14, 1, 1),
    )

    assert run.gradients[0].eq(0).all()
    assert run.recorder.logged("zero_std_groups") == [2.0]


def test_identical_completions_contribute_zero_and_are_counted(tmp_path):
    run = run_of(tmp_path, temperature=0.0, prompts=["ab"] * 4)

    assert len({tuple(ids) for ids in run.recorder.generations[0].completions}) == 1
    assert run.gradients[0].eq(0).all()
    assert run.recorder.logged("zero_std_groups") == [4.0]
    assert run.recorder.logged("rollout/unique_fraction") == [1 / 16]


def test_completions_of_an_end_token_alone_are_scored(tmp_path):
    model = tiny_model()
    with torch.no_grad():
        model.lm_head.weight[END] += 3 * model.model.norm.weight  # and the direction of every hidden state
        model.lm_head.weight[END] *= 50
    run = run_of(tmp_path, model=model)

    assert [END] in run.recorder.generations[0].completions
    assert run.gradients[0].isfinite().all()
    assert run.recorder.logged("unscorable") == [0.0]


def test_rows_without_a_reward_count_for_nothing(tmp_path):
    def reward(ids):
        return None if sum(ids) % 3 == 0 else reward_of(ids)

    run = run_of(tmp_path, reward=reward, num_iterations=2, max_steps=2, **layout(2, 8, 8))

    assert None in run.recorder.generations[0].rewards
    assert largest_difference(run) < TOLERANCE


def test_rewards_that_are_all_none_contribute_zero(tmp_path):
    run = run_of(tmp_path, reward=lambda ids: None)

    assert run.gradients[0].eq(0).all()
    assert run.recorder.logged("zero_std_groups") == [4.0]


@pytest.mark.parametrize("num_rewards", [1, 15, 17])
def test_a_reward_function_of_the_wrong_length_is_named_with_both_numbers(num_rewards, tmp_path):
    def careless(completions, **kwargs):
        return [1.0] * (num_rewards if len(completions) == 16 else len(completions) - 1)

    trainer = StableDRLTrainer(
        tiny_model(),
        careless,
        config_of(tmp_path),
        prompts_of(),
        eval_dataset=prompts_of(),
        processing_class=letter_tokenizer(),
    )
    with pytest.raises(ValueError, match=f"'careless' returned {num_rewards} rewards, but 16 were expected"):
        trainer.train()
    with pytest.raises(ValueError, match="'careless' returned 7 rewards, but 8 were expected"):
        trainer.evaluate()


def test_several_reward_functions_are_summed_with_their_weights(tmp_path):
    def length(completion_ids, **kwargs):
        return [len(ids) / 8 for ids in completion_ids]

    def total(completion_ids, **kwargs):
        return [sum(ids) % 8 / 8 for ids in completion_ids]

    single = run_of(tmp_path, reward=lambda ids: 2 * len(ids) / 8 - 0.5 * (sum(ids) % 8 / 8))
    model = tiny_model()
    trainer = StableDRLTrainer(
        model,
        [length, total],
        config_of(tmp_path, reward_weights=[2.0, -0.5]),
        prompts_of(),
        processing_class=letter_tokenizer(),
    )
    trainer.train()

    torch.testing.assert_close(flat(model.parameters()), single.parameters, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("given", "means"), [("false", "none"), ("True", "group"), (False, "none"), ("Batch", "batch")]
)
def test_scale_rewards_may_be_a_word_or_a_truth_value(given, means, tmp_path):
    assert config_of(tmp_path, scale_rewards=given).scale_rewards == means


def test_columns_of_the_dataset_reach_the_reward_functions(tmp_path):
    seen: list[Any] = []

    def reward(completions, answer, trainer_state, **kwargs):
        seen.extend(answer)
        return [0.0] * len(completions)

    data = prompts_of().add_column("answer", list("wxyz"))
    trainer = StableDRLTrainer(tiny_model(), reward, config_of(tmp_path), data, processing_class=letter_tokenizer())
    trainer.train()

    assert Counter(seen) == dict.fromkeys("wxyz", GROUP)


# Passes


class Counted(StableDRLTrainer):
    """Counts forward passes, and positions that are projected in them, by phase."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.forwards: Counter[str] = Counter()
        self.positions: Counter[str] = Counter()
        self.phase = "rollout"
        super().__init__(*args, **kwargs)
        models: list[Any] = [self.model, self.ref_model]
        for model in models:
            if model is not None:
                model.register_forward_pre_hook(self._count, with_kwargs=True)

    def _count(self, module: Any, args: Any, kwargs: Any) -> None:
        if self.model.training:
            self.forwards[self.phase] += 1
            self.positions[self.phase] += int(kwargs["is_selected"].sum())
            assert torch.is_grad_enabled() == (self.phase == "loss")

    @contextmanager
    def _counting(self, phase: str) -> Iterator[None]:
        before, self.phase = self.phase, phase
        yield
        self.phase = before

    def _score_iterations(self, model, batch, iterations, batch_size):
        with self._counting("reference" if model is self.ref_model else "old"):
            return super()._score_iterations(model, batch, iterations, batch_size)

    def _weigh(self, *args, **kwargs):
        with self._counting("prepass"):
            super()._weigh(*args, **kwargs)

    def _compute_loss(self, model, inputs):
        with self._counting("loss"):
            return super()._compute_loss(model, inputs)


def scored_positions(run: Run, iteration: int) -> int:
    """Of the first generation, under the masks of one iteration."""
    args = run.trainer.args
    objective = objective_of(args)
    return sum(
        len(draw.scored)
        for row in rows_of(run.recorder.generations[0], 0, args, "none")
        for draw in naive.draws_of(
            objective.law,
            objective.sampling,
            seed=objective.seed,
            key=row.index,
            iteration=iteration,
            num_draws=objective.num_draws,
            length=len(row.completion),
            block_length=objective.block_length,
            prompt_length=len(row.prompt),
        )
    )


@pytest.mark.parametrize(
    ("options", "forwards", "iterations"),
    [
        # on policy every ratio is one: two draws of each micro-step and nothing else
        (layout(16, 1, 1), {"loss": 2}, {"loss": [0]}),
        (layout(1, 16, 16), {"loss": 32}, {"loss": [0]}),
        (layout(4, 4, 1), {"loss": 8}, None),
        # the second iteration needs its old scores, and no pass before it where micro-steps hold whole groups
        (layout(4, 4, 4, num_iterations=2, max_steps=2), {"old": 8, "loss": 16}, {"old": [1], "loss": [0, 1]}),
        (
            layout(2, 8, 8, num_iterations=2, max_steps=2),
            {"old": 16, "prepass": 16, "loss": 32},
            {"old": [1], "prepass": [1], "loss": [0, 1]},
        ),
        # the second optimizer step is off policy: old scores of the only iteration, one pass over the second half
        (layout(2, 4, 8, max_steps=2), {"old": 16, "prepass": 8, "loss": 16}, {"old": [0], "loss": [0]}),
        (layout(4, 2, 4, max_steps=2), {"old": 8, "loss": 8}, {"old": [0], "loss": [0]}),
        # ratios under independent masks are noise from the first step on
        (
            layout(2, 8, 8, mask_coupling="independent"),
            {"old": 16, "prepass": 16, "loss": 16},
            {"old": [-1], "prepass": [0], "loss": [0]},
        ),
    ],
    ids=str,
)
def test_no_pass_is_paid_that_is_not_needed(options, forwards, iterations, tmp_path):
    run = run_of(tmp_path, trainer_class=Counted, **options)

    counted = dict(run.trainer.forwards)
    assert counted.pop("rollout") > 0
    assert counted == forwards
    for phase, drawn in (iterations or {}).items():
        assert run.trainer.positions[phase] == sum(scored_positions(run, iteration) for iteration in drawn)


def test_the_kl_pays_for_reference_scores_and_for_a_row_score_to_replay(tmp_path, float64_folder):
    options = layout(2, 8, 8, beta=0.1)
    run = run_of(tmp_path, trainer_class=Counted, model=model_from(float64_folder), **options)

    counted = dict(run.trainer.forwards)
    del counted["rollout"]
    assert counted == {"reference": 16, "prepass": 16, "loss": 16}


# Evaluation, logs, callbacks


def test_evaluation_between_inner_iterations_leaves_the_run_bit_equal(tmp_path):
    options = layout(4, 4, 4, num_iterations=2, max_steps=3)
    alone = run_of(tmp_path, **options)
    evaluated = run_of(tmp_path, eval_prompts=PROMPTS[:3], eval_strategy="steps", eval_steps=1, **options)

    assert torch.equal(alone.parameters, evaluated.parameters)
    assert all(torch.equal(x, y) for x, y in zip(alone.gradients, evaluated.gradients, strict=True))
    assert len(evaluated.recorder.generations) == 2
    assert len(evaluated.recorder.logged("eval_loss")) == 3
    assert set(evaluated.recorder.logged("eval_ratio/max")) == {1.0}


# G = 3: the first row index of an evaluation has to begin a group
@pytest.mark.parametrize(("group", "rows"), [(4, 8), (3, 6), (1, 5)])
def test_evaluation_measures_whole_groups_on_policy_and_repeatably(group, rows, tmp_path):
    run = run_of(
        tmp_path,
        eval_prompts=PROMPTS,
        num_generations_eval=group,
        per_device_eval_batch_size=rows,
        mask_sharing="group",
        learning_rate=0.0,
    )
    first, second = run.trainer.evaluate(), run.trainer.evaluate()

    for name in ("eval_loss", "eval_reward", "eval_elbo/mean", "eval_weights/ess", "eval_rollout/unique_fraction"):
        assert first[name] == second[name]
    assert first["eval_weights/ess"] == pytest.approx(1.0)
    assert first["eval_weights/max"] == pytest.approx(1 / group)
    assert first["eval_ratio/max"] == 1.0
    assert not any(name.startswith("eval_seconds") for name in first)


def test_evaluation_that_would_split_a_group_is_refused(tmp_path):
    run = run_of(tmp_path, eval_prompts=PROMPTS, num_generations_eval=3, is_trained=False)
    with pytest.raises(ValueError, match=r"8 \* 1 = 8 rows .* num_generations_eval=3.*per_device_eval_batch_size=3"):
        run.trainer.evaluate()


METRICS = {
    *(f"ratio/{name}" for name in ("mean", "median", "p99", "max")),
    *("log_ratio/std", "log_ratio/std_centred", "clip_ratio/low", "clip_ratio/high"),
    *("weights/ess", "weights/max", "weights/saturated", "drift", "elbo/mean", "elbo/std", "unscorable"),
    *("zero_std_groups", "entropy", "grad_norm", "reward", "reward_std", "loss"),
    *(f"rollout/{name}" for name in ("tokens_per_second", "tokens_per_forward", "unique_fraction", "truncated")),
    *(f"seconds/{name}" for name in ("rollout", "reward", "old_likelihood", "weights", "forward_backward")),
    "seconds/optimizer",
}


def test_every_documented_metric_is_logged(tmp_path):
    run = run_of(tmp_path, **layout(2, 8, 8, num_iterations=2, max_steps=2))

    assert set(run.recorder.logs[0]) >= METRICS
    phases = [name for name in METRICS if name.startswith("seconds/")]
    assert all(run.recorder.logs[0][name] > 0 for name in phases)
    entropy = run.recorder.logged("entropy")[0]
    assert 0 < entropy < torch.tensor(12.0).log()
    assert run.recorder.logged("rollout/tokens_per_forward")[0] == pytest.approx(6 / 3.5, rel=0.3)
    lengths = [len(ids) for ids in run.recorder.generations[0].completions]
    assert run.recorder.logged("completions/mean_length")[0] == pytest.approx(sum(lengths) / 16)


def test_elbo_and_truncation_metrics_are_those_of_the_rows(tmp_path):
    run = run_of(tmp_path, **layout(16, 1, 1))

    args, generation = run.trainer.args, run.recorder.generations[0]
    with torch.no_grad():
        elbos = [
            len(row.completion) * naive.row_scores(generation.model, row, objective_of(args), iteration=0)[0].item()
            for row in rows_of(generation, 0, args, "none")
        ]
    assert run.recorder.logged("elbo/mean")[0] == pytest.approx(sum(elbos) / 16, abs=1e-5)
    assert run.recorder.logged("elbo/std")[0] == pytest.approx(torch.tensor(elbos).std(correction=0).item(), abs=1e-4)
    truncated = sum(ids[-1] != END for ids in generation.completions) / 16
    assert run.recorder.logged("rollout/truncated") == [truncated]


def test_completions_can_be_logged(tmp_path, capsys):
    import pandas as pd

    run = run_of(tmp_path, log_completions=True)

    table = pd.read_parquet(tmp_path / "completions" / "completions_00001.parquet")
    assert len(table) == 16
    assert list(table["reward"]) == run.recorder.generations[0].rewards
    tokenizer = letter_tokenizer()
    assert list(table["completion"]) == tokenizer.batch_decode(
        run.recorder.generations[0].completions, skip_special_tokens=True
    )
    assert "Completion" in capsys.readouterr().out


# What an update does


def elbo_of(run: Run, model: Any, index: int) -> float:
    args, generation = run.trainer.args, run.recorder.generations[0]
    objective = dataclasses.replace(objective_of(args), num_draws=32)
    with torch.no_grad():
        row = rows_of(generation, 0, args, "none")[index]
        return naive.row_scores(model, row, objective, iteration=0)[0].item()


def test_one_update_raises_the_elbo_of_a_good_completion_and_lowers_that_of_a_bad_one(tmp_path):
    run = run_of(
        tmp_path,
        prompts=["ab"],
        learning_rate=0.05,
        **layout(4, 1, 1),
    )

    advantages = [row.advantage for row in rows_of(run.recorder.generations[0], 0, run.trainer.args, "none")]
    best, worst = advantages.index(max(advantages)), advantages.index(min(advantages))
    assert advantages[best] > 0 > advantages[worst]
    model = run.recorder.live.eval()
    assert elbo_of(run, model, best) > elbo_of(run, run.recorder.pristine, best)
    assert elbo_of(run, model, worst) < elbo_of(run, run.recorder.pristine, worst)


def test_the_update_of_a_prompt_is_at_most_its_largest_advantage_times_its_largest_gradient(tmp_path):
    run = run_of(
        tmp_path, prompts=["ab"], mask_coupling="independent", num_iterations=3, max_steps=3, **layout(4, 1, 1)
    )

    args = run.trainer.args
    rows = rows_of(run.recorder.generations[0], 0, args, "none")
    for iteration, (gradient, model) in enumerate(zip(run.gradients, run.recorder.models, strict=True)):
        norms = []
        for row in rows:
            model.zero_grad()
            naive.row_scores(model, row, objective_of(args), iteration=iteration)[0].backward()
            norms.append(flat(p.grad for p in model.parameters() if p.grad is not None).norm().item())
        bound = max(abs(row.advantage) * norm for row, norm in zip(rows, norms, strict=True))
        assert 0 < gradient.norm() <= bound * (1 + 1e-6)


def test_lora_starts_from_its_reference_and_leaves_the_base_untouched(tmp_path):
    from peft import LoraConfig

    model = tiny_model()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    lora = LoraConfig(r=4, target_modules=["q_proj", "v_proj"], lora_dropout=0.1)
    run = run_of(
        tmp_path,
        model=model,
        beta=0.1,
        peft_config=lora,
        prompts=PROMPTS[:1],
        learning_rate=0.5,
        gradient_checkpointing=True,
        **layout(2, 2, 2, num_iterations=2, max_steps=3),
    )

    kl = run.recorder.logged("kl")
    assert kl[0] == pytest.approx(0.0, abs=1e-12)
    assert min(kl[1:]) > 1e-4
    assert run.recorder.logged("ratio/max")[0] == 1.0
    assert all(gradient.norm() > 0 for gradient in run.gradients)
    after = {
        name.removeprefix("base_model.model.").replace(".base_layer", ""): value
        for name, value in run.trainer.model.state_dict().items()
        if "lora" not in name
    }
    assert after.keys() == before.keys()
    assert all(torch.equal(before[name], after[name]) for name in before)


# The class as its users meet it


def test_the_swap_example_runs_with_a_folder_as_model(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    model = published_llada_folder("LLaDA-8B-Instruct")
    Path("prompts.jsonl").write_text('{"prompt": "2+2=", "answer": "4"}\n{"prompt": "3+3=", "answer": "6"}\n')

    # begin of the docstring's example
    from datasets import load_dataset

    from trl_stabledrl import StableDRLConfig, StableDRLTrainer
    from trl_stabledrl.rewards import gsm8k_reward

    trainer = StableDRLTrainer(
        model=str(model),
        reward_funcs=gsm8k_reward,
        args=StableDRLConfig(
            output_dir="llada-gsm8k",
            use_cpu=True,
            max_completion_length=8,
            max_steps=1,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        ),
        train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),
    )
    trainer.train()
    # end of it
    assert trainer.state.global_step == 1
    assert trainer.args.block_length == 8
    assert (Path("llada-gsm8k") / "checkpoint-1" / "model.safetensors").is_file()


def test_the_docstring_has_the_example_that_is_run():
    documentation = StableDRLTrainer.__doc__ or ""
    for line in (
        "from trl_stabledrl import StableDRLConfig, StableDRLTrainer",
        "from trl_stabledrl.rewards import gsm8k_reward",
        'model="GSAI-ML/LLaDA-8B-Instruct",',
        "reward_funcs=gsm8k_reward,",
        'args=StableDRLConfig(output_dir="llada-gsm8k"),',
        'train_dataset=load_dataset("json", data_files="prompts.jsonl", split="train"),',
        "trainer.train()",
    ):
        assert line in documentation


def test_without_arguments_the_run_is_named_after_the_model(float64_folder, monkeypatch, tmp_path):
    monkeypatch.chdir(tmp_path)
    # TRL's default, bfloat16, asks for a GPU that has it or for use_cpu
    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    for model in (str(float64_folder), model_from(float64_folder)):
        trainer = StableDRLTrainer(model, lambda completions, **kwargs: [0.0], train_dataset=prompts_of())

        assert type(trainer.args) is StableDRLConfig
        assert trainer.args.output_dir == f"{float64_folder.name}-StableDRL"
        assert (trainer.args.mask_law, trainer.args.mc_sampling) == ("block_suffix", "complementary")
        assert (trainer.args.num_mc_samples, trainer.args.block_length) == (2, 32)
        assert trainer.args.num_denoising_steps == 16
        tokenizer: Any = trainer.processing_class
        assert tokenizer.mask_token_id == 2


def test_callbacks_and_optimizers_are_the_users(tmp_path):
    steps: list[int] = []

    class Mine(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            steps.append(state.global_step)

    model = tiny_model()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, lambda step: 1.0)
    before = flat(model.parameters())
    recorder_free = StableDRLTrainer(
        model,
        lambda completion_ids, **kwargs: [reward_of(ids) for ids in completion_ids],
        config_of(tmp_path),
        prompts_of(),
        processing_class=letter_tokenizer(),
        callbacks=[Mine()],
        optimizers=(optimizer, scheduler),
    )
    recorder_free.train()
    reference = run_of(tmp_path)

    assert steps == [1]
    torch.testing.assert_close(flat(model.parameters()), before - 0.5 * reference.gradients[0])


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"reward_funcs": None}, "reward_funcs is empty"),
        ({"reward_funcs": []}, "reward_funcs is empty"),
        ({"train_dataset": None}, "train_dataset is missing"),
        ({"train_dataset": prompts_of([])}, "train_dataset is empty"),
        ({"train_dataset": prompts_of().rename_column("prompt", "question")}, "train_dataset has no column 'prompt'"),
        ({"eval_dataset": prompts_of([])}, "eval_dataset is empty"),
    ],
)
def test_what_cannot_be_trained_on_is_refused_before_a_model_is_loaded(changes, message, tmp_path, monkeypatch):
    def load(*args, **kwargs):
        raise AssertionError("a model was loaded")

    monkeypatch.setattr("trl.trainer.grpo_trainer.create_model_from_path", load)
    options: dict[str, Any] = {
        "model": "no/such-model",
        "reward_funcs": lambda completions, **kwargs: [0.0],
        "args": config_of(tmp_path),
        "train_dataset": prompts_of(),
    }
    with pytest.raises(ValueError, match=message):
        StableDRLTrainer(**options | changes)


def test_the_configuration_of_another_trainer_is_refused(tmp_path):
    from trl import GRPOConfig

    args = GRPOConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=r"GRPOConfig.*StableDRLTrainer needs a StableDRLConfig"):
        StableDRLTrainer(tiny_model(), lambda **kwargs: [], args, prompts_of())  # pyright: ignore[reportArgumentType]


def test_a_tokenizer_that_does_not_fit_the_model_is_refused(tmp_path):
    with pytest.raises(ValueError, match=r"11 .*embedding has\s+10 rows|12 tokens.*10 rows"):
        run_of(tmp_path, model=tiny_model(vocab_size=10), is_trained=False)


def test_a_model_of_another_family_is_refused(tmp_path):
    from transformers import LlamaConfig, LlamaForCausalLM

    model = LlamaForCausalLM(LlamaConfig(vocab_size=12, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
                                         num_attention_heads=1))  # fmt: skip
    with pytest.raises(ValueError, match="'llama', which belongs to no known family"):
        run_of(tmp_path, model=model, is_trained=False)
