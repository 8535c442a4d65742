# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Runs that are stopped and go on: in this process, in children that kill themselves, in two processes."""

import copy
import os
import signal
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn, cast
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from datasets import Dataset
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import Trainer, TrainerCallback

from tests.distributed.runs import SHARDING, as_if_with_accelerators
from tests.tiny import tiny_llada, tiny_sdar
from tests.trainer_tools import PROMPTS, Run, flat, letter_tokenizer, run_of
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer, checkpoints

SAVED: dict[str, Any] = {
    "optim": "adamw_torch",
    "learning_rate": 1e-2,
    "lr_scheduler_type": "linear",
    "save_strategy": "steps",
    "save_steps": 1,
}
SFT_ROWS = [("ab", "cd"), ("c", "defg"), ("de", "a"), ("ggg", "abcde"), ("a", "b"), ("fa", "gfed"), ("b", "ba")]


def layout(b: int, a: int, s: int, **options: Any) -> dict[str, Any]:
    """Rows per micro-step and process, micro-steps per optimizer step and per generation."""
    sizes = {"per_device_train_batch_size": b, "gradient_accumulation_steps": a, "steps_per_generation": s}
    return SAVED | sizes | options


def model_of(family: str = "llada", *, seed: int = 0) -> Any:
    build = tiny_sdar if family == "sdar" else tiny_llada
    return build(vocab_size=12, dtype=torch.float64, initializer_range=0.2, seed=seed)


def run(folder: Path, *, family: str = "llada", resume: str | bool | None = None, **options: Any) -> Run:
    """Train; a resumed run is given other weights, which its checkpoint has to replace."""
    if family == "sdar":
        options = {"block_length": None, "num_denoising_steps": None} | options
    options = {"prompts": PROMPTS} | options
    model = options.pop("model", None) or model_of(family, seed=0 if resume is None else 3)
    found = run_of(folder, model=model, is_trained=False, **options)
    found.trainer.train(resume_from_checkpoint=resume)
    return found


def sft(folder: Path, *, resume: str | bool | None = None, **options: Any) -> Any:
    args: dict[str, Any] = {
        "output_dir": str(folder),
        "max_completion_length": 6,
        "block_length": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 2,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    rows = Dataset.from_dict({"prompt": [p for p, _ in SFT_ROWS], "completion": [c for _, c in SFT_ROWS]})
    trainer = DiffusionSFTTrainer(
        model_of(seed=0 if resume is None else 3),
        DiffusionSFTConfig(**args | SAVED | options),
        train_dataset=rows,
        eval_dataset=rows,
        processing_class=letter_tokenizer(),
    )
    trainer.train(resume_from_checkpoint=resume)
    return trainer


# Runs that are killed

KILLED: dict[str, Any] = layout(4, 4, 4, num_iterations=2, max_steps=10, save_steps=3, save_total_limit=1)
"""A generation every 2 steps, so that checkpoints 3 and 9 are inside one."""

LAST_COMPLETE = {
    "in training": 6,
    "before the optimizer is written": 3,
    "in the middle of a file": 3,
    "before the checkpoint has its name": 6,
    "while the older one is deleted": 6,
}
"""Where a run is killed, most often in its save at step 6, and the step it can be resumed at."""


def die(*args: Any, **kwargs: Any) -> NoReturn:
    os.kill(os.getpid(), signal.SIGKILL)
    raise AssertionError


class DieInStep(TrainerCallback):
    def __init__(self, step: int) -> None:
        self.step = step

    def on_pre_optimizer_step(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if state.global_step == self.step:
            die()


def die_at_step(function: Callable[..., Any], step: int, *, then: Callable[..., Any] = die) -> Any:
    """`function`, but in the save of one step what kills the process takes its place."""

    def replaced(*args: Any, **kwargs: Any) -> Any:
        is_there = any(f"checkpoint-{step}" in str(value) for value in args)
        return then(*args, **kwargs) if is_there else function(*args, **kwargs)

    return replaced


def half_a_file(value: Any, path: str) -> NoReturn:
    Path(path).write_bytes(b"PK")
    die()


def half_a_folder(folder: Path, **kwargs: Any) -> NoReturn:
    (Path(folder) / "model.safetensors").unlink()
    die()


def killed_run(folder: Path, moment: str) -> None:
    callbacks: list[Any] = []
    patches: list[Any] = []
    if moment == "in training":
        callbacks = [DieInStep(7)]
    elif moment == "before the optimizer is written":
        name = "_save_optimizer_and_scheduler"
        patches = [patch.object(Trainer, name, die_at_step(getattr(Trainer, name), 6))]
    elif moment == "in the middle of a file":
        patches = [patch.object(torch, "save", die_at_step(torch.save, 6, then=half_a_file))]
    elif moment == "before the checkpoint has its name":
        patches = [patch.object(checkpoints, "_publish", die_at_step(checkpoints._publish, 6))]
    else:
        rmtree = "transformers.trainer_utils.shutil.rmtree"
        patches = [patch(rmtree, die_at_step(checkpoints.shutil.rmtree, 3, then=half_a_folder))]
    for each in patches:
        each.start()
    run(folder, callbacks=callbacks, **KILLED)


def kill_all(folder: Path) -> None:
    """Each in a child of its own: the libraries are imported once."""
    for moment in LAST_COMPLETE:
        child = os.fork()
        if child == 0:
            killed_run(folder / moment, moment)
            os._exit(0)
        _, status = os.waitpid(child, 0)
        assert os.WIFSIGNALED(status), moment
        assert os.WTERMSIG(status) == signal.SIGKILL, moment


# Runs on two processes

ONE_PROCESS = {"inside a generation": layout(4, 4, 4, num_iterations=2), "two updates": layout(2, 4, 8)}
TWO_PROCESSES = {
    name: options | {"per_device_train_batch_size": options["per_device_train_batch_size"] // 2}
    for name, options in ONE_PROCESS.items()
}
"""The same rows in each optimizer step."""

ZERO3: dict[str, Any] = {
    "train_batch_size": "auto",
    "train_micro_batch_size_per_gpu": "auto",
    "gradient_accumulation_steps": "auto",
    "gradient_clipping": "auto",
    "zero_optimization": {
        "stage": 3,
        "stage3_param_persistence_threshold": 0,
        "stage3_gather_16bit_weights_on_model_save": True,
    },
}


def sharded_by_torch(folder: Path, *, resume: str | None = None) -> Tensor:
    """As [`sharded`], by FSDP2."""
    AcceleratorState._reset_state()
    model = tiny_llada(vocab_size=12, initializer_range=0.2, seed=0 if resume is None else 3)
    options = layout(2, 4, 4, num_iterations=2, max_steps=4, save_steps=3) | copy.deepcopy(SHARDING["fsdp2"])
    with patch.object(PartialState, "__init__", as_if_with_accelerators), patch.dict(os.environ):
        trainer = run(folder, model=model, resume=resume, **options).trainer
        return flat(cast(DTensor, parameter).full_tensor() for parameter in trainer.model.parameters())


def sharded(folder: Path, *, resume: str | None = None) -> Tensor:
    """Parameters after a run under DeepSpeed's ZeRO-3."""
    import deepspeed

    AcceleratorState._reset_state()
    model = tiny_llada(vocab_size=12, initializer_range=0.2, seed=0 if resume is None else 3)
    options = layout(2, 4, 4, num_iterations=2, deepspeed=copy.deepcopy(ZERO3), max_steps=4, save_steps=3)
    parameters = list(run(folder, model=model, resume=resume, **options).recorder.live.parameters())
    with deepspeed.zero.GatheredParameters(parameters):
        return flat(parameters).clone()


def on_two(folder: Path) -> None:
    """Runs whole, resumed from a checkpoint of two processes, and from one of a single process."""
    found: dict[str, Tensor] = {}
    for name, options in TWO_PROCESSES.items():
        here = folder / name
        runs = {
            "whole": run(here / "two", max_steps=6, **options),
            "resumed": run(here / "again", resume=str(here / "two" / "checkpoint-3"), max_steps=6, **options),
            "from one": run(here / "more", resume=str(here / "one" / "checkpoint-3"), max_steps=6, **options),
        }
        found |= {f"{name}: {kind}": each.parameters for kind, each in runs.items()}
    trainer = sft(folder / "sft" / "two", max_steps=3, gradient_accumulation_steps=1)
    found["sft: whole"] = flat(trainer.model.parameters())
    trainer = sft(
        folder / "sft" / "again",
        resume=str(folder / "sft" / "two" / "checkpoint-1"),
        max_steps=3,
        gradient_accumulation_steps=1,
    )
    found["sft: resumed"] = flat(trainer.model.parameters())
    found["fsdp2: whole"] = sharded_by_torch(folder / "fsdp2" / "two")
    found["fsdp2: resumed"] = sharded_by_torch(
        folder / "fsdp2" / "again", resume=str(folder / "fsdp2" / "two" / "checkpoint-3")
    )
    # last, since it leaves the process sharding what it builds
    found["sharded: whole"] = sharded(folder / "sharded" / "two")
    found["sharded: resumed"] = sharded(
        folder / "sharded" / "again", resume=str(folder / "sharded" / "two" / "checkpoint-3")
    )
    if torch.distributed.get_rank() == 0:
        torch.save(found, folder / "parameters.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    torch.set_num_threads(1)
    {"killed": kill_all, "two": on_two}[sys.argv[1]](Path(sys.argv[2]))
