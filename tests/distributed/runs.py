# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs of the trainer that are the same on one process and on several, and what is kept of them to be compared."""

import contextlib
import copy
import dataclasses
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import PartialState
from accelerate.utils import DistributedType
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.tiny import tiny_llada, tiny_sdar
from tests.trainer_tools import END, LETTERS, config_of, flat, letter_tokenizer, prompts_of, reward_of
from trl_stabledrl import StableDRLTrainer, stabledrl_trainer
from trl_stabledrl.engines import transformers as engine
from trl_stabledrl.likelihood import plan_masks

PROMPTS = ("ab", "c", "defga", "gg")
EARLY, ENDLESS = "e", "f"
"""First letters of prompts whose rollouts all end in the first block, or never end."""
_DEEPSPEED: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_allow_untested_optimizer": True,  # SGD, whose step is the gradient
    "steps_per_print": 10**9,
}
_ZERO3 = {
    "stage": 3,
    # no parameter is so small that it would be left whole, and none is kept between two uses
    "stage3_param_persistence_threshold": 0,
    "stage3_max_live_parameters": 0,
    "stage3_max_reuse_distance": 0,
}
_FSDP2 = {
    "version": 2,
    "auto_wrap_policy": "TRANSFORMER_BASED_WRAP",
    "reshard_after_forward": True,
    "state_dict_type": "FULL_STATE_DICT",
}
SHARDING: dict[str, dict[str, Any]] = {
    "none": {},
    "zero2": {"deepspeed": {**_DEEPSPEED, "zero_optimization": {"stage": 2}}},
    "zero3": {"deepspeed": {**_DEEPSPEED, "zero_optimization": _ZERO3}},
    "fsdp2": {"fsdp": True, "fsdp_config": _FSDP2},
}
"""Options of the configuration."""


@dataclasses.dataclass(frozen=True)
class Job:
    """A run, given by plain values, since it crosses processes."""

    name: str
    family: str = "llada"
    dtype: str = "float64"
    prompts: tuple[str, ...] = PROMPTS
    options: tuple[tuple[str, Any], ...] = ()
    """Of the configuration; those on one process give the same rows to an optimizer step."""
    sharding: str = "none"
    is_tied: bool = False
    is_loaded: bool = False
    """Whether the model is a checkpoint, so that there can be a reference, and not one built in memory."""
    has_adapter: bool = False
    """Whether LoRA weights are trained beside frozen ones."""
    lengths: tuple[int, ...] = ()
    """Of the completions, one for each row of a generation, which then are not sampled; negative where one has no end
    token."""
    lost_row: int = -1
    """Row whose score is not finite."""
    is_silent: bool = False
    """Whether all completions get the same reward."""
    token_chunk: int | None = None
    """Positions that the vocabulary projection takes at once."""

    def with_options(self, **options: Any) -> "Job":
        return dataclasses.replace(self, options=tuple((dict(self.options) | options).items()))


def job(name: str, *, family: str = "llada", **changes: Any) -> Job:
    """Fields of a [`Job`], and options of its configuration."""
    names = {field.name for field in dataclasses.fields(Job)}
    fields = {key: changes.pop(key) for key in list(changes) if key in names}
    return Job(name, family, **fields).with_options(**changes)


@dataclasses.dataclass
class Step:
    """An optimizer step: rows by their run-wide index, in the order they came."""

    rows: dict[int, dict[str, Any]] = dataclasses.field(default_factory=dict)
    loss: float = 0.0
    gradient: Tensor | None = None
    """Averaged over processes; None where the parameters are sharded."""
    parameters: Tensor | None = None
    """After the step."""


@dataclasses.dataclass
class Record:
    start: Tensor
    """Parameters before the first step."""
    steps: list[Step]
    logs: list[dict[str, float]]


class _Watcher(TrainerCallback):
    def __init__(self, sharding: str) -> None:
        self.sharding = sharding
        self.model: Any = None
        self.record = Record(torch.empty(0), [], [])
        self.step = Step()

    def parameters(self) -> Tensor:
        parameters = list(self.model.parameters())
        if self.sharding == "fsdp2":
            assert all(isinstance(parameter, DTensor) for parameter in parameters)
            return flat(parameter.full_tensor() for parameter in parameters)
        if self.sharding != "zero3":
            return flat(parameters)
        import deepspeed

        assert all(parameter.numel() == 0 for parameter in parameters)
        with deepspeed.zero.GatheredParameters(parameters):
            return flat(parameters)

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.record.start = self.parameters()

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if self.sharding in ("none", "fsdp2"):  # DeepSpeed has made its step by now
            gradients = [torch.zeros_like(p) if p.grad is None else p.grad for p in self.model.parameters()]
            self.step.gradient = flat(g.full_tensor() if isinstance(g, DTensor) else g for g in gradients)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.step.parameters = self.parameters()
        self.record.steps.append(self.step)
        self.step = Step()

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        is_time = {name: "second" in name or "time" in name for name in logs}
        self.record.logs.append({name: value for name, value in logs.items() if not is_time[name]})


def _trainer_class(job: Job, watcher: _Watcher) -> type[StableDRLTrainer]:
    class Trainer(StableDRLTrainer):
        def _generate_single_turn(self, prompt_ids: Any, *args: Any, **kwargs: Any) -> Any:
            if not job.lengths:
                return super()._generate_single_turn(prompt_ids, *args, **kwargs)
            rows = self._row_index(len(prompt_ids)).tolist()
            return [scripted(row, job.lengths[row % len(job.lengths)]) for row in rows], None

        def _score(self, model: Any, batch: Any, rows: Any, draws: Any) -> Any:
            score = super()._score(model, batch, rows, draws)
            return dataclasses.replace(score, elbo=lost(job, rows, score.elbo))

        def compute_loss(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
            loss = super().compute_loss(model, inputs, *args, **kwargs)
            watcher.step.loss += loss.item()
            plan = plan_masks(self._rows(inputs), self.likelihood_settings, iteration=inputs["iteration"])
            lengths = inputs["completion_mask"].sum(-1).tolist()
            for i, row in enumerate(inputs["row_index"].tolist()):
                assert row not in watcher.step.rows
                old = inputs.get("old_per_token_logps")
                watcher.step.rows[row] = {
                    "completion": inputs["completion_ids"][i, : lengths[i]].tolist(),
                    "is_noised": plan.is_noised[i].tolist(),
                    "num_scored": int(plan.is_scored[i].sum()),
                    "advantage": inputs["advantages"][i].item(),
                    "weight": inputs["weight"][i].item(),
                    "log_ratio": inputs["log_ratio"][i].item(),
                    "old_elbo": [] if old is None else old[i].tolist(),
                }
            return loss

    return Trainer


def scripted(row: int, length: int) -> list[int]:
    """Letters that depend on the row alone, and an end token."""
    ids = [5 + (row * 3 + i * i) % len(LETTERS) for i in range(abs(length))]
    return ids if length < 0 else [*ids[:-1], END]


def lost(job: Job, rows: Any, elbo: Tensor) -> Tensor:
    is_lost = (rows.noise_key == job.lost_row) & (rows.completion_length > 0)
    return torch.where(is_lost if elbo.ndim == 1 else is_lost[:, None], torch.nan, elbo)


_begin = PartialState.__init__


def as_if_with_accelerators(self: PartialState, *args: Any, **kwargs: Any) -> None:
    """Without any, accelerate ignores what it is told of FSDP, and wraps the model for data parallelism."""
    _begin(self, *args, **kwargs)
    if self.distributed_type == DistributedType.MULTI_CPU:
        self.distributed_type = DistributedType.MULTI_GPU


def _sampler(job: Job, tokenizer: Any) -> Callable[..., Any]:
    """Rollouts by kind of prompt; all rows of a process have one kind, or a process has all rows."""
    from trl_stabledrl.samplers import sample

    kinds = {tokenizer(letter)["input_ids"][0]: letter for letter in (EARLY, ENDLESS)}

    def sample_by_kind(model: Any, prompt_ids: Tensor, prompt_mask: Tensor, **options: Any) -> Any:
        first = [ids[mask][0].item() for ids, mask in zip(prompt_ids, prompt_mask.bool(), strict=True)]
        found = [kinds.get(token) for token in first]
        rollouts = []
        start = 0
        while start < len(found):
            stop = next((i for i in range(start, len(found)) if found[i] != found[start]), len(found))
            part = {**options, "row_seeds": options["row_seeds"][start:stop]}
            if found[start] == EARLY:
                part["end_token_ids"] = [token for token in range(12) if token != options["mask_token_id"]]
            elif found[start] == ENDLESS:
                part["settings"] = dataclasses.replace(options["settings"], suppress_eos="sampling")
            rollouts.append(sample(model, prompt_ids[start:stop], prompt_mask[start:stop], **part))
            start = stop
        counters = ("num_forwards", "num_tokens", "num_decoded", "num_row_steps")
        return dataclasses.replace(
            rollouts[0],
            completion_ids=[ids for rollout in rollouts for ids in rollout.completion_ids],
            **{name: sum(vars(rollout)[name] for rollout in rollouts) for name in counters},
        )

    return sample_by_kind


def recorded(job: Job, folder: Path) -> Record:
    """Train, in every process alike; `folder` holds checkpoints by family."""
    unset_hf_deepspeed_config()  # an earlier run's, under which the model would be sharded as it is made
    is_sdar = job.family == "sdar"
    tokenizer = letter_tokenizer()
    model: Any = str(folder / job.family)
    if not job.is_loaded:
        dtype = getattr(torch, job.dtype)
        tiny = tiny_sdar if is_sdar else tiny_llada
        model = tiny(vocab_size=12, dtype=dtype, initializer_range=0.2, tie_word_embeddings=job.is_tied)
    options: dict[str, Any] = {"block_length": None, "num_denoising_steps": None} if is_sdar else {}
    options |= {"shuffle_dataset": False} | copy.deepcopy(SHARDING[job.sharding]) | dict(job.options)

    def reward(prompts: Any, completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        return [0.5 if job.is_silent else reward_of(ids) for ids in completion_ids]

    watcher = _Watcher(job.sharding)
    score_elbo = stabledrl_trainer.score_elbo

    def score_elbo_or_lose(model: Any, rows: Any, *args: Any, **kwargs: Any) -> Tensor:
        return lost(job, rows, score_elbo(model, rows, *args, **kwargs))

    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # which says what accelerate shards
        if job.sharding == "fsdp2":
            stack.enter_context(patch.object(PartialState, "__init__", as_if_with_accelerators))
        stack.enter_context(patch.object(engine, "sample", _sampler(job, tokenizer)))
        stack.enter_context(patch.object(stabledrl_trainer, "score_elbo", score_elbo_or_lose))
        if job.token_chunk is not None:
            stack.enter_context(patch("trl.kernels.chunked_logprob.TOKEN_CHUNK_SIZE", job.token_chunk))
        args = config_of(folder / "output", **options)
        trainer = _trainer_class(job, watcher)(
            model,
            reward,
            args,
            prompts_of(job.prompts),
            processing_class=tokenizer,
            callbacks=[watcher],
            peft_config=LoraConfig(r=2, task_type="CAUSAL_LM") if job.has_adapter else None,
        )
        watcher.model = trainer.model
        trainer.train()
    return watcher.record
