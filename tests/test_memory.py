# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The plan against what is measured: every tensor that torch makes, counted while it lives."""

import contextlib
import dataclasses
import weakref
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from tests.tiny import tiny_llada, tiny_sdar
from tests.trainer_tools import PROMPTS, config_of, letter_tokenizer, prompts_of, reward_of, tiny_model
from trl_stabledrl import StableDRLTrainer
from trl_stabledrl.likelihood import LikelihoodSettings, Rows, plan_masks, score_elbo, score_rows, scored_log_probs
from trl_stabledrl.memory import MemoryPlan, Sharding, Workload, memory_plan, model_shape, workload_of
from trl_stabledrl.samplers import SamplingSettings, sample

TOLERANCE = 0.15
LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


class LiveBytes(TorchDispatchMode):
    """Bytes of the tensors made under this mode that are alive, and the most there ever were."""

    def __init__(self) -> None:
        super().__init__()
        self.known: set[int] = set()
        self.live = self.peak = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        for value in tree_leaves((args, kwargs)):
            self._meet(value, is_new=False)
        result = func(*args, **(kwargs or {}))
        for value in tree_leaves(result):
            self._meet(value, is_new=True)
        return result

    def _meet(self, value: Any, *, is_new: bool) -> None:
        if not isinstance(value, Tensor):
            return
        storage = value.untyped_storage()
        key = storage._cdata
        if key in self.known:
            return
        num_bytes = storage.nbytes() if is_new else 0
        self.known.add(key)
        self.live += num_bytes
        self.peak = max(self.peak, self.live)
        weakref.finalize(storage, self._lose, key, num_bytes).atexit = False

    def _lose(self, key: int, num_bytes: int) -> None:
        self.known.discard(key)
        self.live -= num_bytes


def bytes_of(tensors: Any) -> int:
    return sum(tensor.nbytes for tensor in tensors)


@dataclasses.dataclass
class Job:
    """A model with optimizer states, and the passes of a trainer on random rows."""

    model: Any
    work: Workload
    config: Any
    peft_config: Any = None
    autocast: bool = False

    def __post_init__(self) -> None:
        work = self.work
        self.settings = LikelihoodSettings(
            mask_token_id=2,
            mask_law="staircase" if work.is_staircase else "uniform",
            mc_sampling="cyclic" if work.is_staircase else "independent",
            num_mc_samples=work.num_draws,
            block_length=work.block_length,
            window_length=work.window_length,
            seed=0,
        )
        self.trained = [parameter for parameter in self.model.parameters() if parameter.requires_grad]
        self.optimizer = torch.optim.AdamW(self.trained, lr=1e-6)

    def rows(self, num_rows: int) -> Rows:
        prompt_mask = torch.ones(num_rows, self.work.prompt_length, dtype=torch.bool)
        prompt_mask[1::2, 0] = False  # padding, so that there is a mask
        return Rows(
            torch.full(prompt_mask.shape, 5),
            prompt_mask,
            torch.full((num_rows, self.work.window_length), 6),
            torch.ones(num_rows, self.work.window_length, dtype=torch.bool),
            torch.arange(num_rows),
        )

    def precision(self) -> Any:
        return torch.autocast("cpu", dtype=torch.bfloat16) if self.autocast else contextlib.nullcontext()

    def scoring(self) -> None:
        with torch.no_grad(), self.precision():
            score_elbo(self.model, self.rows(self.work.num_rows), self.settings)

    def backward(self) -> None:
        rows = self.rows(self.work.num_rows)
        draws = list(range(self.work.num_draws))
        with self.precision():
            scores = score_rows(self.model, rows, plan_masks(rows, self.settings), draws, self.settings)
        scores.elbo.sum().backward()

    def update(self) -> None:
        self.optimizer.step()

    def rollout(self) -> None:
        rows = self.rows(self.work.num_rollout_rows)
        settings = SamplingSettings(
            max_completion_length=self.work.window_length,
            block_length=self.work.block_length,
            num_denoising_steps=1,
            temperature=1.0,
            suppress_eos="sampling",
        )
        with self.precision():
            sample(
                self.model,
                rows.prompt_ids,
                rows.prompt_mask,
                mask_token_id=2,
                end_token_ids=(1,),
                settings=settings,
                row_seeds=range(len(rows)),
                attention="block" if self.work.is_staircase else "full",
            )

    def measured(self, phase: str) -> int:
        """Peak of a phase of the second optimizer step, in its second micro-step."""
        self.backward()
        self.optimizer.step()
        if phase in ("rollout", "scoring"):
            self.optimizer.zero_grad()
        states = [value for state in self.optimizer.state.values() for value in state.values() if value.dim() > 0]
        gradients = [parameter.grad for parameter in self.trained if parameter.grad is not None]
        held = bytes_of(self.model.parameters()) + bytes_of(states) + bytes_of(gradients)
        with LiveBytes() as meter:
            {"rollout": self.rollout, "scoring": self.scoring, "backward": self.backward, "update": self.update}[
                phase
            ]()
        return held + meter.peak

    def plan(self) -> MemoryPlan:
        return memory_plan(model_shape(self.config, self.peft_config), self.work, Sharding())


def job_of(
    make: Callable[..., Any],
    *,
    dtype: torch.dtype = torch.float32,
    lora: bool = False,
    autocast: bool = False,
    sizes: dict[str, int],
    **work: Any,
) -> Job:
    model: Any = make(dtype=dtype, **sizes).train()
    config, peft_config = model.config, None
    if lora:
        from peft import LoraConfig, get_peft_model

        peft_config = LoraConfig(r=8, target_modules=LORA_TARGETS)
        model = get_peft_model(model, peft_config)
    number_bytes = 2 if dtype == torch.bfloat16 else 4
    options: dict[str, Any] = {
        "num_rows": 4,
        "num_rollout_rows": 2,
        "num_prompts": 2,
        "prompt_length": 31,
        "window_length": 96,
        "block_length": 4 if make is tiny_sdar else 32,
        "num_draws": 4 if make is tiny_sdar else 1,
        "is_staircase": make is tiny_sdar,
        "parameter_bytes": number_bytes,
        "compute_bytes": 2 if autocast else number_bytes,
        "checkpoints": False,
        "attention": "sdpa",
        "on_cpu": True,
    }
    job = Job(model, Workload(**options | work), config, peft_config, autocast)
    if job.work.checkpoints:
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
        if lora:
            model.enable_input_require_grads()
    return job


NARROW = {"vocab_size": 64, "hidden_size": 64, "intermediate_size": 192, "num_hidden_layers": 4}
WIDE = {"vocab_size": 1000, "hidden_size": 192, "intermediate_size": 768, "num_hidden_layers": 6}
FEW = {"num_rows": 1, "num_rollout_rows": 1, "num_prompts": 1, "prompt_length": 7, "window_length": 8}
CASES: dict[str, tuple[str, str, dict[str, Any]]] = {
    # phase, the term that makes most of it, the job
    "optimizer states": (
        "update",
        "optimizer states (adamw_torch)",
        {"make": tiny_llada, "sizes": WIDE, "block_length": 4, **FEW},
    ),
    "gradients": ("backward", "optimizer states (adamw_torch)", {"make": tiny_sdar, "sizes": WIDE, **FEW}),
    "frozen weights": (
        "update",
        "parameters",
        {"make": tiny_llada, "sizes": WIDE, "lora": True, **FEW, "block_length": 4},
    ),
    "activations of LLaDA": ("backward", "activations", {"make": tiny_llada, "sizes": NARROW}),
    "activations of LLaDA, checkpointed": (
        "backward",
        "activations",
        {"make": tiny_llada, "sizes": NARROW | {"num_hidden_layers": 8}, "num_rows": 8, "checkpoints": True},
    ),
    "activations of LLaDA, two draws": (
        "backward",
        "activations",
        {"make": tiny_llada, "sizes": NARROW, "num_draws": 2},
    ),
    "activations of LLaDA in bfloat16": (
        "backward",
        "activations",
        {"make": tiny_llada, "sizes": NARROW, "dtype": torch.bfloat16},
    ),
    "activations of LLaDA under autocast": (
        "backward",
        "activations",
        {"make": tiny_llada, "sizes": NARROW, "autocast": True, "num_rows": 8},
    ),
    "activations of LLaDA with LoRA": (
        "backward",
        "activations",
        {"make": tiny_llada, "sizes": NARROW, "lora": True, "dtype": torch.bfloat16, "autocast": True},
    ),
    "activations of SDAR": ("backward", "activations", {"make": tiny_sdar, "sizes": NARROW, "num_rows": 2}),
    "activations of SDAR, checkpointed": (
        "backward",
        "activations",
        {"make": tiny_sdar, "sizes": NARROW | {"num_hidden_layers": 8}, "num_rows": 2, "checkpoints": True},
    ),
    "masks of SDAR": (
        "backward",
        "attention masks (sdpa)",
        {
            "make": tiny_sdar,
            "sizes": NARROW | {"hidden_size": 16, "intermediate_size": 16, "num_attention_heads": 2, "head_dim": 4},
            "num_rows": 1,
            "window_length": 192,
        },
    ),
    "scoring": (
        "scoring",
        "activations",
        {"make": tiny_llada, "sizes": NARROW | {"intermediate_size": 1024}, "num_rows": 16},
    ),
    "projection": (
        "scoring",
        "vocabulary projection",
        {"make": tiny_llada, "sizes": NARROW | {"vocab_size": 4000, "hidden_size": 32}, "num_rows": 16},
    ),
    "cache of SDAR": (
        "rollout",
        "key/value cache",
        {
            "make": tiny_sdar,
            "sizes": NARROW | {"num_key_value_heads": 4, "head_dim": 32, "num_hidden_layers": 6},
            "num_rollout_rows": 32,
            "num_prompts": 32,
            "window_length": 16,
        },
    ),
    "cache of SDAR, fewer key heads": (
        "rollout",
        "key/value cache",
        {
            "make": tiny_sdar,
            "sizes": NARROW | {"num_key_value_heads": 2, "head_dim": 64, "num_hidden_layers": 6},
            "num_rollout_rows": 32,
            "num_prompts": 32,
            "window_length": 16,
        },
    ),
    "rollout of LLaDA": ("rollout", "decoding passes", {"make": tiny_llada, "sizes": NARROW, "num_rollout_rows": 32}),
}


@pytest.mark.parametrize(("phase", "largest", "options"), CASES.values(), ids=CASES)
def test_the_plan_is_what_is_measured(phase, largest, options):
    job = job_of(**options)

    measured, plan = job.measured(phase), job.plan()

    assert plan.ranked(phase)[0].name == largest
    assert plan.total(phase) == pytest.approx(measured, rel=TOLERANCE)


@pytest.mark.parametrize(
    ("make", "phase", "name", "changes"),
    [
        (tiny_llada, "backward", "num_hidden_layers", {}),
        (tiny_llada, "backward", "num_hidden_layers", {"dtype": torch.bfloat16}),
        (tiny_llada, "backward", "num_hidden_layers", {"lora": True}),
        (tiny_sdar, "backward", "num_hidden_layers", {"num_rows": 1}),
        (tiny_sdar, "rollout", "num_hidden_layers", {"num_rollout_rows": 8, "window_length": 16}),
    ],
    ids=["LLaDA", "LLaDA in bfloat16", "LLaDA with LoRA", "SDAR", "cache of SDAR"],
)
def test_a_layer_adds_what_the_plan_says(make, phase, name, changes):
    # a difference of two plans, in which all that is not a layer's drops out: measured at most 0.5 % off
    few, many = (job_of(make, sizes=NARROW | {name: number}, **changes) for number in (2, 6))

    measured = many.measured(phase) - few.measured(phase)

    assert many.plan().total(phase) - few.plan().total(phase) == pytest.approx(measured, rel=0.01)


def test_the_gradient_of_the_head_is_summed_up_in_float32():
    work = job_of(tiny_llada, sizes=NARROW, num_rows=1, window_length=16).work
    sizes: dict[str, Any] = NARROW | {"vocab_size": 40_000, "hidden_size": 256}
    plan = memory_plan(
        model_shape(tiny_llada(**sizes).config),
        dataclasses.replace(work, checkpoints=True),
        Sharding(),
    )
    hidden, head = torch.randn(16, 256, requires_grad=True), torch.randn(40_000, 256, requires_grad=True)
    targets = torch.arange(16)

    with LiveBytes() as meter:
        log_probs, _ = scored_log_probs(hidden, head, targets, temperature=1.0)
        log_probs.sum().backward()

    found = {term.name: term.num_bytes.get("backward", 0) for term in plan.terms}
    assert found["gradient of the head"] == 4 * 40_000 * 256
    assert found["gradient of the head"] + found["vocabulary projection"] == pytest.approx(meter.peak, rel=TOLERANCE)


@pytest.mark.parametrize(
    "changes",
    [
        {"gradient_accumulation_steps": 4, "per_device_train_batch_size": 4},
        {"num_iterations": 2},  # groups whole in each micro-step: both draws share a graph
        {"surrogate": "sandwich", "gradient_checkpointing": True},
    ],
    ids=["accumulation", "inner iterations", "sandwich"],
)
def test_a_training_run_takes_what_the_plan_says(changes, tmp_path):
    model: Any = tiny_model(
        vocab_size=64, hidden_size=64, intermediate_size=192, num_hidden_layers=4, dtype=torch.float32
    )
    options = {"max_completion_length": 32, "block_length": 16, "max_steps": 2, "optim": "adamw_torch"}
    trainer = StableDRLTrainer(
        model,
        lambda completion_ids, **columns: [reward_of(ids) for ids in completion_ids],
        config_of(tmp_path, learning_rate=1e-6, **options | changes),
        prompts_of(),
        processing_class=letter_tokenizer(),
    )

    with LiveBytes() as meter:
        trainer.train()

    work = workload_of(
        trainer.args,
        is_adapter=False,
        prompt_length=max(map(len, PROMPTS)),
        parameter_bytes=4,
        compute_bytes=4,
        attention="sdpa",
        on_cpu=True,
    )
    plan = memory_plan(model_shape(model.config), work, Sharding())
    assert plan.peak == pytest.approx(meter.peak + bytes_of(model.parameters()), rel=TOLERANCE)
