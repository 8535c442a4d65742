# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""One of two processes that train with rollouts by an engine: runs and faults, whose outcomes it writes to a file."""

import contextlib
import copy
import faulthandler
import os
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest.mock import patch

import torch
from accelerate.state import AcceleratorState, PartialState
from peft import LoraConfig
from torch import Tensor
from torch.distributed.tensor import DTensor
from transformers import TrainerCallback
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.distributed.processes import SILENCE
from tests.distributed.runs import SHARDING, as_if_with_accelerators
from tests.trainer_tools import config_of, letter_tokenizer, prompts_of, reward_of
from tests.vllm_double import LLMDouble, vllm_double
from trl_stabledrl import StableDRLTrainer

PROMPTS = ("ab", "gcabd", "dabga", "ggabcabd")
"""Two for each process. The first is shorter than a block, and cannot be decoded by vLLM."""
ADAPTER: dict[str, Any] = {
    "r": 2,
    "lora_alpha": 8,
    "init_lora_weights": False,
    "target_modules": ["q_proj", "v_proj", "down_proj"],
    "modules_to_save": ["norm"],
    "task_type": "CAUSAL_LM",
}
STEPS = 3
KINDS: dict[str, dict[str, Any]] = {
    "DDP": {},
    "ZeRO-3": {"sharding": "zero3"},
    "FSDP2": {"sharding": "fsdp2"},
    "DDP, LoRA": {"has_adapter": True},
    "ZeRO-3, LoRA": {"sharding": "zero3", "has_adapter": True},
    "ZeRO-3, tensor parallel": {
        "sharding": "zero3",
        "ds3_gather_for_generation": False,
        "vllm_tensor_parallel_size": 2,
    },
}


class Watcher(TrainerCallback):
    """Keeps rollouts, trained parameters, and what the engine is handed in the middle of the run."""

    def __init__(self) -> None:
        self.rollouts: list[Any] = []
        self.trainer: Any = None
        self.parameters: dict[str, Tensor] = {}
        self.handed: dict[str, Tensor] = {}
        self.is_untouched = False

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        if args.rollout_backend == "vllm" and state.global_step == 2:
            before = self.pieces()
            engine = self.trainer.rollout_engine
            self.handed = {name: value.detach().clone() for name, value in engine._iter_named_params()}
            after = self.pieces()
            self.is_untouched = len(before) > 0 and all(map(torch.equal, before, after))
            self.parameters = self.whole()

    def pieces(self) -> list[Tensor]:
        """What this process holds of the parameters: partitions where they are sharded."""
        found = []
        for parameter in self.trainer.model.parameters():
            local = parameter.to_local() if isinstance(parameter, DTensor) else parameter
            found += [value.detach().clone() for value in (local, getattr(parameter, "ds_tensor", None))
                      if value is not None]  # fmt: skip
        return found

    def whole(self) -> dict[str, Tensor]:
        found = {}
        for name, parameter in self.trainer.model.named_parameters():
            if isinstance(parameter, DTensor):
                found[name] = parameter.full_tensor().detach().clone()
            elif hasattr(parameter, "ds_tensor"):
                import deepspeed

                with deepspeed.zero.GatheredParameters([parameter]):
                    found[name] = parameter.detach().clone()
            else:
                found[name] = parameter.detach().clone()
        return found


@contextlib.contextmanager
def surroundings(sharding: str) -> Any:
    unset_hf_deepspeed_config()  # an earlier run's, under which the model would be sharded as it is made
    AcceleratorState._reset_state()
    with contextlib.ExitStack() as stack:
        stack.enter_context(patch.dict(os.environ))  # which says what accelerate shards
        if sharding == "fsdp2":
            stack.enter_context(patch.object(PartialState, "__init__", as_if_with_accelerators))
        stack.enter_context(vllm_double())
        yield


def trainer_of(
    folder: Path, *, sharding: str = "none", has_adapter: bool = False, watcher: Watcher | None = None, **changes: Any
) -> StableDRLTrainer:
    watcher = watcher or Watcher()

    def reward(completion_ids: Sequence[Sequence[int]], **kwargs: Any) -> list[float]:
        watcher.rollouts.append([list(ids) for ids in completion_ids])
        return [reward_of(ids) for ids in completion_ids]

    options: dict[str, Any] = {"block_length": None, "num_denoising_steps": None, "shuffle_dataset": False}
    options |= {"per_device_train_batch_size": 8, "max_steps": STEPS, "learning_rate": 0.1}
    torch.manual_seed(0)  # of the adapter
    watcher.trainer = StableDRLTrainer(
        str(folder / "sdar"),
        reward,
        config_of(folder / "output", **options | copy.deepcopy(SHARDING[sharding]) | changes),
        prompts_of(PROMPTS),
        processing_class=letter_tokenizer(),
        callbacks=[watcher],
        peft_config=LoraConfig(**ADAPTER) if has_adapter else None,
    )
    return watcher.trainer


def run_of(folder: Path, backend: str, *, sharding: str = "none", **changes: Any) -> dict[str, Any]:
    if backend == "transformers":
        changes = {name: value for name, value in changes.items() if not name.startswith("vllm_")}
    watcher = Watcher()
    with surroundings(sharding):
        trainer = trainer_of(folder, sharding=sharding, watcher=watcher, rollout_backend=backend, **changes)
        trainer.train()
        return {
            "rollouts": watcher.rollouts,
            "end": watcher.whole(),
            "parameters": watcher.parameters,
            "handed": watcher.handed,
            "is_untouched": watcher.is_untouched,
            "calls": LLMDouble.made[0].calls if LLMDouble.made else [],
        }


def outcome_of(work: Callable[[], Any]) -> Any:
    try:
        return work()
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def failing(*args: Any, **kwargs: Any) -> None:
    raise MemoryError("no page left")


def faults_of(folder: Path, rank: int) -> dict[str, Any]:
    """
    Outcomes of rollouts in which something is wrong on the second process alone. All are of one sharded model: where a
    process were left behind in a collective, the next one would fail or never end.
    """
    found: dict[str, Any] = {}
    with surroundings("zero3"):
        trainer = trainer_of(
            folder,
            sharding="zero3",
            rollout_backend="vllm",
            max_steps=1,
            ds3_gather_for_generation=False,
            vllm_max_model_length=40,
        )
        trainer.train()
        engine: Any = trainer.rollout_engine
        (llm,) = LLMDouble.made
        second = rank == 1
        long, too_long, short = [5, 6, 7, 8, 9], [5] * 38, [6]

        def rollout(*prompts: list[int], one: Any = engine) -> Any:
            seeds = [100 * rank + row for row in range(len(prompts))]
            return outcome_of(lambda: one.generate(prompts, row_seeds=seeds).completion_ids)

        found["right"] = rollout(long, long)
        found["plain"] = rollout(long, long, one=engine.reference)
        found["too long"] = rollout(long, too_long if second else long)
        prompts = [short, long] if second else [long, long]
        found["short"] = rollout(*prompts)
        found["short, plain"] = rollout(*prompts, one=engine.reference)
        found["all short"] = len(rollout(*[short, short] if second else [long, long]))

        generate, load = llm.generate, llm.load_weights
        with patch.object(llm, "generate", failing if second else generate):
            found["a failing engine"] = rollout(long, long)
        found["after it"] = rollout(long, long)
        engine.failure = None

        with patch.object(llm, "load_weights", failing if second else load):
            found["failing weights"] = rollout(long, long)
        found["right again"] = rollout(long, long)

        def broken(*args: Any, **kwargs: Any) -> Any:
            outputs = generate(*args, **kwargs)
            for entry in outputs[0].outputs[0].logprobs[0].values():
                entry.logprob = torch.nan
            return outputs

        with patch.object(llm, "generate", broken if second else generate):
            found["not finite"] = rollout(long, long)

        def load_wrongly(pairs: Any) -> None:
            load([(name, value * 1.5 if "v_proj" in name else value) for name, value in pairs])

        engine.needs_check = True
        with patch.object(llm, "load_weights", load_wrongly if second else load):
            found["another decoding"] = rollout(long, long)
        engine.needs_check = True
        found["nothing to check"] = rollout(*[short] if second else [long])
        found["right at last"] = rollout(long, long)
    return found


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    import deepspeed

    # by itself it would do this after the first checkpoint is loaded where there is no accelerator
    deepspeed.init_distributed("gloo", verbose=False)
    rank = torch.distributed.get_rank()
    records: dict[str, Any] = {}

    def note(name: str, record: Any) -> None:
        records[name] = record
        print(f"{name} is done", flush=True)  # noqa: T201
        faulthandler.dump_traceback_later(SILENCE - 10)  # to show where it hangs

    note("faults", faults_of(folder, rank))
    for name, options in KINDS.items():
        for backend in ("transformers", "vllm"):
            note(f"{name}, {backend}", run_of(folder, backend, **options))
    torch.save(records, folder / f"records-{rank}.pt")
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
