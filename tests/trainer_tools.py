# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainers on a model of a few thousand parameters, and the same runs by `tests/naive.py`."""

import copy
import dataclasses
import functools
import gc
import math
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from torch import Tensor
from transformers import TrainerCallback

from tests import naive
from tests.tiny import tiny_llada, tiny_tokenizer
from trl_stabledrl import StableDRLConfig, StableDRLTrainer

# accelerate collects garbage at the start of each run: a third of its time, were the libraries' objects not left out
gc.collect()
gc.freeze()

LETTERS = "abcdefg"
END, MASK = 1, 2
GROUP, WINDOW, BLOCK = 4, 6, 4
PROMPTS = ["ab", "c", "defga", "gg"]
"""Of different length, so that batches are padded."""


def tiny_model(**changes: Any) -> Any:
    """So few tokens that half of the completions end before their window."""
    return tiny_llada(**{"vocab_size": 12, "dtype": torch.float64, "initializer_range": 0.2} | changes)


def letter_tokenizer(**changes: Any) -> Any:
    return tiny_tokenizer(characters=LETTERS, **changes)


def prompts_of(texts: Iterable[str] = PROMPTS) -> Dataset:
    return Dataset.from_dict({"prompt": list(texts)})


def config_of(folder: Path, **changes: Any) -> StableDRLConfig:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "num_generations": GROUP,
        "max_completion_length": WINDOW,
        "block_length": BLOCK,
        "num_denoising_steps": 2,
        "per_device_train_batch_size": 16,
        "gradient_accumulation_steps": 1,
        "per_device_eval_batch_size": 8,
        "learning_rate": 1.0,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "max_steps": 1,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return StableDRLConfig(**options | changes)


def reward_of(ids: Sequence[int]) -> float:
    """An arbitrary eighth: exact in float32, as is the mean of four."""
    return (sum(ids) * 5 + len(ids)) % 8 / 8


def flat(tensors: Iterable[Tensor]) -> Tensor:
    return torch.cat([tensor.detach().flatten() for tensor in tensors])


def with_parameters(model: Any, values: dict[str, Tensor]) -> Any:
    model = copy.deepcopy(model)
    model.load_state_dict(values)
    return model


class Snapshot:
    """A model as it was at some moment, built when it is asked for."""

    def __init__(self, pristine: Any, live: Any) -> None:
        self.pristine = pristine
        self.values = {name: value.clone() for name, value in live.state_dict().items()}

    @functools.cached_property
    def model(self) -> Any:
        return with_parameters(self.pristine, self.values)


@dataclasses.dataclass
class Generation:
    """A rollout, in the order of the rows, and the model that made it."""

    prompts: list[list[int]]
    completions: list[list[int]]
    rewards: list[float | None]
    snapshot: Snapshot

    @property
    def model(self) -> Any:
        return self.snapshot.model


class Recorder(TrainerCallback):
    """Keeps rollouts, gradients, parameters, logs and the micro-batches of a run."""

    def __init__(self, model: Any, tokenizer: Any, reward: Callable[[Sequence[int]], float | None]) -> None:
        self.pristine = copy.deepcopy(model)
        self.live = model
        self.tokenizer = tokenizer
        self.reward = reward
        self.generations: list[Generation] = []
        self.gradients: list[Tensor] = []
        self.snapshots: list[Snapshot] = []
        """Before each optimizer step."""
        self.logs: list[dict[str, Any]] = []

    def reward_function(self) -> Any:
        def reward(prompts: list[Any], completion_ids: list[list[int]], **kwargs: Any) -> list[float | None]:
            rewards = [self.reward(ids) for ids in completion_ids]
            if self.live.training:
                ids = [self.tokenizer(prompt)["input_ids"] for prompt in prompts]
                self.generations.append(Generation(ids, completion_ids, rewards, self.snapshot()))
            return rewards

        return reward

    def snapshot(self) -> Snapshot:
        return Snapshot(self.pristine, self.live)

    @property
    def models(self) -> list[Any]:
        return [snapshot.model for snapshot in self.snapshots]

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        parameters = list(self.live.parameters())
        self.gradients.append(flat(torch.zeros_like(p) if p.grad is None else p.grad for p in parameters))
        self.snapshots.append(self.snapshot())

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        self.logs.append(dict(logs))

    def logged(self, name: str) -> list[float]:
        return [logs[name] for logs in self.logs if name in logs]


@dataclasses.dataclass
class Run:
    trainer: Any  # a StableDRLTrainer, or a class of a test that watches one
    recorder: Recorder

    @property
    def gradients(self) -> list[Tensor]:
        return self.recorder.gradients

    @property
    def parameters(self) -> Tensor:
        return flat(self.recorder.live.parameters())


def run_of(
    folder: Path,
    *,
    model: Any = None,
    prompts: Iterable[str] = PROMPTS,
    reward: Callable[[Sequence[int]], float | None] = reward_of,
    eval_prompts: Iterable[str] | None = None,
    callbacks: Sequence[Any] = (),
    is_trained: bool = True,
    peft_config: Any = None,
    trainer_class: Any = StableDRLTrainer,
    **changes: Any,
) -> Run:
    """Make a trainer and, unless told otherwise, train."""
    model = tiny_model() if model is None else model
    tokenizer = letter_tokenizer()
    recorder = Recorder(model, tokenizer, reward)
    trainer = trainer_class(
        model,
        recorder.reward_function(),
        config_of(folder, **changes),
        prompts_of(prompts),
        eval_dataset=None if eval_prompts is None else prompts_of(eval_prompts),
        processing_class=tokenizer,
        callbacks=[recorder, *callbacks],
        peft_config=peft_config,
    )
    if is_trained:
        trainer.train()
    return Run(trainer, recorder)


def micro_steps_of(run: Run) -> list[list[int]]:
    """Micro-steps of each optimizer step. An epoch ends with a short one where they do not come out even."""
    args = run.trainer.args
    in_epoch = len(run.trainer.get_train_dataloader())
    steps: list[list[int]] = []
    start = 0
    while len(steps) < len(run.gradients):
        inside = start % in_epoch
        size = min(args.gradient_accumulation_steps, in_epoch - inside)
        steps.append(list(range(start, start + size)))
        start += size
    return steps


def objective_of(args: StableDRLConfig) -> naive.Objective:
    low, high = -math.inf, math.inf
    if args.epsilon is not None:
        low, high = math.log1p(-args.epsilon) if args.epsilon < 1 else -math.inf, math.log1p(args.epsilon)
    if args.clip_mode == "upper":
        low, high = -math.inf, math.log(args.ratio_cap)
    assert args.kl_estimator
    assert args.num_generations
    assert args.max_completion_length
    assert args.block_length
    assert args.mask_law
    assert args.mc_sampling
    assert args.num_mc_samples
    return naive.Objective(
        group_size=args.num_generations,
        window_length=args.max_completion_length,
        block_length=args.block_length,
        mask_token_id=MASK,
        end_token_id=END,
        law=args.mask_law,
        sampling=args.mc_sampling,
        num_draws=args.num_mc_samples,
        seed=args.seed,
        tail=args.tail,
        temperature=args.score_temperature,
        context_attention=args.context_attention,
        coupling=args.mask_coupling,
        sharing=args.mask_sharing,
        surrogate=args.surrogate,
        eubo_beta=args.eubo_beta,
        low=low,
        high=high,
        normalization=args.ratio_normalization,
        beta=args.beta,
        kl_estimator=args.kl_estimator,
        name=args.objective,
    )


def rows_of(generation: Generation, number: int, args: StableDRLConfig, scale: str) -> list[naive.Row]:
    """Rows of the `number`-th generation; a reward of None counts for neither mean nor row."""
    assert args.generation_batch_size
    assert args.num_generations
    rewards = generation.rewards
    if None in rewards:
        values: list[float] = []
        for start in range(0, len(rewards), args.num_generations):
            group = rewards[start : start + args.num_generations]
            known = [r for r in group if r is not None]
            values += [0.0 if r is None else r - sum(known) / len(known) for r in group]
    else:
        values = naive.advantages([r for r in rewards if r is not None], args.num_generations, scale=scale)
    start = number * args.generation_batch_size
    return [
        naive.Row(start + i, prompt, completion, advantage, generation.model)
        for i, (prompt, completion, advantage) in enumerate(
            zip(generation.prompts, generation.completions, values, strict=True)
        )
    ]


def naive_gradients(run: Run, *, scale: str = "none", edit: Any = lambda row: row) -> list[Tensor]:
    """The gradient of each optimizer step of a run, by the definition."""
    args = run.trainer.args
    b, s, mu = args.per_device_train_batch_size, args.steps_per_generation, args.num_iterations
    assert s
    generations = run.recorder.generations
    gradients = []
    for micro_steps, model in zip(micro_steps_of(run), run.recorder.models, strict=True):
        (iteration,) = {step // s % mu for step in micro_steps}
        rows = []
        for step in micro_steps:
            number, position = step // (s * mu), step % s
            every_row = rows_of(generations[number], number, args, scale)
            rows += [edit(row) for row in every_row[position * b : (position + 1) * b]]
        model.zero_grad()
        objective = objective_of(args)
        naive.update_loss(model, rows, objective, iteration=iteration, reference=run.recorder.pristine).backward()
        gradients.append(flat(p.grad for p in model.parameters() if p.grad is not None))
    return gradients


def relative_difference(found: Tensor, expected: Tensor) -> float:
    return ((found - expected).norm() / expected.norm()).item()


def largest_difference(run: Run, **options: Any) -> float:
    expected = naive_gradients(run, **options)
    assert expected
    return max(relative_difference(g, e) for g, e in zip(run.gradients, expected, strict=True))
