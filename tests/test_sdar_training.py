# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What both trainers, `generate` and `score` do with block diffusion; that they work at all is tested with LLaDA."""

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM

import trl_stabledrl
from tests import naive
from tests.tiny import tiny_sdar
from tests.trainer_tools import (
    END,
    GROUP,
    MASK,
    WINDOW,
    config_of,
    flat,
    letter_tokenizer,
    naive_gradients,
    prompts_of,
    relative_difference,
    run_of,
)
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer, StableDRLTrainer
from trl_stabledrl.models import SDARForCausalLM
from trl_stabledrl.models.families import FAMILIES

BLOCK = 4
TOLERANCE = 1e-6
"""Relative. The weights, the old scores, RoPE and RMSNorm are float32, in a float64 model."""
PROMPTS = ["ab", "c", "defga", "ggfedc"]
"""Every length modulo the block but 0, and one that is longer than it."""


def tiny_model(**changes: Any) -> SDARForCausalLM:
    return tiny_sdar(**{"vocab_size": 12, "dtype": torch.float64, "initializer_range": 0.2} | changes)


def layout(b: int, a: int, s: int) -> dict[str, Any]:
    return {"per_device_train_batch_size": b, "gradient_accumulation_steps": a, "steps_per_generation": s}


def run_sdar(folder: Path, *, model: Any = None, **options: Any) -> Any:
    defaults: dict[str, Any] = {"prompts": PROMPTS, "block_length": None, "num_denoising_steps": None}
    return run_of(folder, model=tiny_model() if model is None else model, **defaults | options)


# largest relative difference to the definition: 4.2e-8, 1.1e-7, 1.8e-7
@pytest.mark.parametrize(
    ("num_iterations", "num_steps", "layouts"),
    [
        (1, 1, [(16, 1, 1), (4, 4, 4), (2, 8, 8), (1, 16, 16), (2, 8, 4)]),
        (2, 2, [(16, 1, 1), (4, 4, 4), (1, 16, 16)]),
        (2, 3, [(8, 1, 2), (2, 4, 8)]),
    ],
)
def test_every_layout_gives_the_gradient_of_the_definition(num_iterations, num_steps, layouts, tmp_path):
    expected: list[Any] = []
    for sizes in layouts:
        run = run_sdar(tmp_path, **layout(*sizes), num_iterations=num_iterations, max_steps=num_steps)
        expected = expected or naive_gradients(run)
        for gradient, definition in zip(run.gradients, expected, strict=True):
            assert definition.norm() > 1e-3
            assert relative_difference(gradient, definition) < TOLERANCE, sizes


# largest relative difference of all options: 1.5e-7
@pytest.mark.parametrize(
    "options",
    [
        {"surrogate": "sandwich"},
        {"mc_sampling": "independent", "num_mc_samples": 1},
        {"mc_sampling": "complementary", "num_mc_samples": 2},
        {"mc_sampling": "stratified", "num_mc_samples": 3},
        {"mask_sharing": "group"},
        {"mask_coupling": "independent", "clip_mode": "upper", "ratio_cap": 1.05},
        {"ratio_normalization": "sequence"},
        {"context_attention": "causal"},
        {"score_temperature": 0.7, "gradient_checkpointing": True},
        {"pad_to_multiple_of": 4, "scale_rewards": "group"},
        {"confidence_threshold": 0.3},
    ],
    ids=lambda options: "-".join(f"{value}" for value in options.values()),
)
def test_every_option_gives_the_gradient_of_the_definition(options, tmp_path):
    run = run_sdar(tmp_path, **layout(2, 2, 4), num_iterations=2, max_steps=3, learning_rate=0.3, **options)

    expected = naive_gradients(run, scale=options.get("scale_rewards", "none"))
    for gradient, definition in zip(run.gradients, expected, strict=True):
        assert definition.norm() > 1e-3
        assert relative_difference(gradient, definition) < TOLERANCE


@pytest.mark.parametrize("block", [1, 3, 8])  # 8: longer than the window
def test_the_models_own_block_is_used(block, tmp_path):
    run = run_sdar(tmp_path, model=tiny_model(block_size=block), num_iterations=2, max_steps=2)

    assert (run.trainer.args.block_length, run.trainer.args.num_denoising_steps) == (block, block)
    for gradient, definition in zip(run.gradients, naive_gradients(run), strict=True):
        assert relative_difference(gradient, definition) < TOLERANCE


def test_defaults_are_the_familys(tmp_path):
    args = run_sdar(tmp_path, is_trained=False).trainer.args

    assert (args.mask_law, args.mc_sampling, args.num_mc_samples) == ("staircase", "cyclic", 4)
    assert (args.block_length, args.num_denoising_steps) == (BLOCK, BLOCK)


def test_detached_context_changes_the_gradient_and_not_the_loss(tmp_path):
    whole, detached, checkpointed = (
        run_sdar(tmp_path, **options)
        for options in (
            {},
            {"detach_context": True},
            {"detach_context": True, "gradient_checkpointing": True},
        )
    )

    assert detached.recorder.logged("loss") == pytest.approx(whole.recorder.logged("loss"), abs=1e-9)
    assert relative_difference(detached.gradients[0], whole.gradients[0]) > 1e-2
    assert relative_difference(checkpointed.gradients[0], detached.gradients[0]) < 1e-7


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"block_length": 8}, "block_length=8 is not the model's own, 4"),
        ({"mask_law": "block_suffix"}, "mask_law='block_suffix' does not apply to SDAR"),
        ({"tail": "eos"}, "tail='eos' does not apply to mask_law='staircase'"),
        ({"guidance_scale": 1.0}, "guidance_scale"),
        ({"mc_sampling": "complementary", "num_mc_samples": 3}, "num_mc_samples=3 is odd"),
        ({"num_denoising_steps": 0}, "num_denoising_steps=0 must be at least 1"),
        ({"context_attention": "both"}, "context_attention='both' is not known"),
    ],
)
def test_what_block_diffusion_cannot_do_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_sdar(tmp_path, **changes)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"mask_law": "staircase", "mc_sampling": "independent"}, "mask_law='staircase' does not apply to LLaDA"),
        ({"mc_sampling": "cyclic", "num_mc_samples": 2}, "mc_sampling='cyclic' with mask_law='block_suffix'"),
        ({"context_attention": "causal"}, "context_attention='causal' and detach_context=False apply to"),
        ({"detach_context": True}, "detach_context=True apply to mask_law='staircase' only"),
    ],
)
def test_what_full_attention_cannot_do_is_refused(changes, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        run_of(tmp_path, **changes)


@pytest.mark.parametrize(
    ("family", "changes", "message"),
    [
        ("SDAR", {"tail": "hidden"}, "tail='hidden' does not apply to mask_law='staircase'"),
        ("LLaDA", {"context_attention": "causal"}, "context_attention='causal' and detach_context=False apply to"),
        ("LLaDA", {"detach_context": True}, "detach_context=True apply to mask_law='staircase' only"),
    ],
)
def test_context_that_a_family_does_not_have_is_refused_without_a_model(family, changes, message, tmp_path):
    """What a dry run looks at."""
    (known,) = (known for known in FAMILIES if known.name == family)
    changes = {"block_length": None, "num_denoising_steps": None} | changes
    with pytest.raises(ValueError, match=message):
        config_of(tmp_path, **changes).resolve(known)


def test_supervised_training_refuses_a_tail_without_a_model(tmp_path):
    (sdar,) = (known for known in FAMILIES if known.name == "SDAR")
    args = DiffusionSFTConfig(output_dir=str(tmp_path), tail="eos", use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="tail='eos' does not apply to mask_law='staircase'"):
        args.resolve(sdar)


def test_a_prompt_that_is_left_out_takes_its_own_reward_with_it(tmp_path):
    """dLLM-RL dropped over-long prompts and paired the rewards of all later rows with the wrong completions."""
    answers = {"ab": "a", "c": "b", "defga": "c", "ggfedc": "d"}
    seen: list[tuple[str, str]] = []

    def reward(prompts: list[str], answer: list[str], **kwargs: Any) -> list[float]:
        seen.extend(zip(prompts, answer, strict=True))
        return [1.0] * len(prompts)

    data = Dataset.from_dict({"prompt": list(answers), "answer": list(answers.values())})
    kept = data.filter(lambda row: row["prompt"] != "defga")
    trainer = StableDRLTrainer(
        tiny_model(),
        reward,
        config_of(tmp_path, block_length=None, num_denoising_steps=None, per_device_train_batch_size=12),
        kept,
        processing_class=letter_tokenizer(),
    )
    trainer.train()

    assert len(seen) == 12
    assert all(answers[prompt] == answer for prompt, answer in seen)


def test_one_update_raises_the_bound_of_a_good_completion(tmp_path):
    model = tiny_model()
    run = run_sdar(
        tmp_path,
        model=model,
        prompts=["ab"],
        reward=lambda ids: float(ids[0] % 2),
        per_device_train_batch_size=GROUP,
        learning_rate=0.05,
    )
    generation = run.recorder.generations[0]
    good = [ids for ids, reward in zip(generation.completions, generation.rewards, strict=True) if reward]
    bad = [ids for ids, reward in zip(generation.completions, generation.rewards, strict=True) if not reward]
    assert good
    assert bad
    before, after = (
        trl_stabledrl.score(scored, letter_tokenizer(), ["ab"] * GROUP, good + bad, max_completion_length=WINDOW).elbo
        for scored in (generation.model, model)
    )

    change = after - before
    assert change[: len(good)].mean() > 0 > change[len(good) :].mean()


def test_supervised_training_gives_the_gradient_of_the_definition(tmp_path):
    rows = [("ab", "cd"), ("c", "defg"), ("de", "a"), ("gggfe", "abcde")]
    data = Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [c for _, c in rows]})
    model = tiny_model()
    start = {name: value.clone() for name, value in model.state_dict().items()}
    args = DiffusionSFTConfig(
        output_dir=str(tmp_path),
        max_completion_length=WINDOW,
        per_device_train_batch_size=4,
        learning_rate=1.0,
        lr_scheduler_type="constant",
        optim="sgd",
        max_grad_norm=0.0,
        max_steps=1,
        bf16=False,
        use_cpu=True,
        report_to="none",
        save_strategy="no",
        disable_tqdm=True,
        dataloader_pin_memory=False,
    )
    order: list[list[int]] = []

    class Watched(DiffusionSFTTrainer):
        def _rows(self, inputs: dict[str, Any]) -> Any:
            found = super()._rows(inputs)
            order.extend(
                ids[is_real].tolist() for ids, is_real in zip(found.completion_ids, found.completion_mask, strict=True)
            )
            return found

    Watched(model, args, train_dataset=data, processing_class=letter_tokenizer()).train()

    assert (args.mask_law, args.block_length) == ("staircase", BLOCK)
    step = -flat(model.state_dict()[name] - value for name, value in start.items())
    reference = tiny_model()
    tokenizer = letter_tokenizer()
    by_completion = {tuple(tokenizer(c)["input_ids"]): tokenizer(p)["input_ids"] for p, c in rows}
    loss, num_tokens = torch.zeros(()), 0
    for index, completion in enumerate(order):
        prompt = by_completion[tuple(completion[:-1])]
        assert completion[-1] == END
        (draw,) = naive.staircase_draws_of(
            "independent",
            seed=args.seed,
            key=index,
            iteration=0,
            num_draws=1,
            length=len(completion),
            block_length=BLOCK,
            prompt_length=len(prompt),
        )
        log_probs = naive.staircase_log_probs(
            reference,
            prompt,
            completion,
            noised=draw.noised,
            block_length=BLOCK,
            mask_token_id=MASK,
            window_length=WINDOW,
        )
        loss = loss - torch.stack([odds * log_probs[j] for j, odds in draw.odds]).sum()
        num_tokens += len(completion)
    (loss / num_tokens).backward()
    expected = {name: p.grad for name, p in reference.named_parameters() if p.grad is not None}
    assert relative_difference(step, flat(expected[name] for name in start)) < TOLERANCE


def test_supervised_training_refuses_blocks_that_are_not_the_models(tmp_path):
    args = DiffusionSFTConfig(output_dir=str(tmp_path), block_length=8, use_cpu=True, bf16=False, report_to="none")
    with pytest.raises(ValueError, match="block_length=8 is not the model's own, 4"):
        DiffusionSFTTrainer(
            tiny_model(),
            args,
            train_dataset=Dataset.from_dict({"prompt": ["a"], "completion": ["b"]}),
            processing_class=letter_tokenizer(),
        )


# Outside a trainer


def test_completions_do_not_depend_on_the_batch_they_are_in():
    model, tokenizer = tiny_model(), letter_tokenizer()
    together = trl_stabledrl.generate(
        model, tokenizer, PROMPTS, max_completion_length=9, temperature=1.0, show_progress=False
    )
    alone = trl_stabledrl.generate(
        model, tokenizer, PROMPTS, max_completion_length=9, temperature=1.0, batch_size=1, show_progress=False
    )

    assert together == alone
    assert len(set(together)) > 1


def test_rollouts_switch_flex_attention_off_and_on_again():
    model, tokenizer = tiny_model(dtype=torch.float32), letter_tokenizer()
    expected = trl_stabledrl.generate(model, tokenizer, PROMPTS, max_completion_length=9, show_progress=False)
    model.set_attn_implementation("flex_attention")
    used: set[Any] = set()
    model.register_forward_pre_hook(lambda module, args: used.add(model.config._attn_implementation))

    found = trl_stabledrl.generate(model, tokenizer, PROMPTS, max_completion_length=9, show_progress=False)

    assert found == expected
    assert used == {"sdpa"}
    assert model.config._attn_implementation == "flex_attention"


def test_a_score_is_the_enumerated_bound_within_its_standard_error():
    model, tokenizer = tiny_model(), letter_tokenizer()
    prompt, completion = "defga", [7, 8, 9, 10, 5]  # blocks of 3 and 2

    found = trl_stabledrl.score(model, tokenizer, [prompt], [completion], num_mc_samples=512)

    prompt_ids = tokenizer(prompt)["input_ids"]
    cache: dict[Any, list[float]] = {}

    def log_probs(noised: Any) -> list[float]:
        if noised not in cache:
            with torch.no_grad():
                values = naive.staircase_log_probs(
                    model, prompt_ids, completion, noised=noised, block_length=BLOCK, mask_token_id=MASK
                )
            cache[noised] = values.tolist()
        return cache[noised]

    outcomes = naive.staircase_outcomes(len(completion), BLOCK, offset=len(prompt_ids) % BLOCK)
    exact = math.fsum(o.probability * o.draw.elbo_per_token(log_probs) for o in outcomes) * len(completion)
    assert found.num_tokens.tolist() == [5]
    assert abs(found.elbo.item() - exact) < 3 * found.standard_error.item()
    assert found.standard_error.item() < 0.2


def test_a_score_does_not_depend_on_its_neighbours():
    model, tokenizer = tiny_model(), letter_tokenizer()
    completions = [[7, 8, END], [7, 8, 9, 10, 5, 6, 7, END], [9], [5, 6, 7, 8, 9]]
    together = trl_stabledrl.score(model, tokenizer, PROMPTS, completions, num_mc_samples=4)
    alone = trl_stabledrl.score(model, tokenizer, PROMPTS, completions, num_mc_samples=4, batch_size=1)

    torch.testing.assert_close(together.elbo, alone.elbo, rtol=0, atol=1e-6)


def test_a_run_goes_on_from_its_folder(tmp_path):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    args = config_of(
        tmp_path / "run", block_length=None, num_denoising_steps=None, save_strategy="steps", save_steps=1, beta=0.1
    )
    trainer = StableDRLTrainer(
        str(folder),
        lambda completions, **kwargs: [float(len(text)) for text in completions],
        args,
        prompts_of(PROMPTS),
    )
    trainer.train()

    saved = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "checkpoint-1", dtype=trainer.model.dtype)
    assert isinstance(saved, SDARForCausalLM)
    assert saved.config.block_size == BLOCK
    ids = torch.tensor([[5, 6, 7, 8, 9]])
    assert torch.equal(saved.eval()(input_ids=ids).logits, trainer.model.eval()(input_ids=ids).logits)
