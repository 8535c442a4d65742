# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""One of several processes that evaluate: the same evaluations, and runs of the trainer that are evaluated."""

import copy
import pickle
import sys
from pathlib import Path
from typing import Any

import torch
from accelerate.state import AcceleratorState
from transformers.integrations.deepspeed import unset_hf_deepspeed_config

from tests.distributed.runs import SHARDING
from tests.tiny import tiny_llada, tiny_sdar, tiny_tokenizer
from tests.trainer_tools import config_of, flat, letter_tokenizer, prompts_of, reward_of
from trl_stabledrl import StableDRLTrainer
from trl_stabledrl.evaluation import TaskEvaluation, evaluate
from trl_stabledrl.evaluation_config import EvaluationConfig

FAMILIES = {"llada": tiny_llada, "sdar": tiny_sdar}
CASES = [(family, temperature) for family in FAMILIES for temperature in (0.0, 0.7)]
TRAINED = {
    "not evaluated": {},
    "data parallel": {},
    "sharded": SHARDING["zero3"] | {"ds3_gather_for_generation": False},
    "gathered": SHARDING["zero3"],
}


def case_config(temperature: float, folder: Path | None) -> EvaluationConfig:
    """5 items, which no number of processes or batches divides."""
    return EvaluationConfig(
        task="addition",
        limit=5,
        max_completion_length=[4, 6],
        num_samples=2 if temperature else 1,
        temperature=temperature,
        num_resamples=50,
        batch_size=2,
        show_progress=False,
        output_dir=None if folder is None else str(folder),
    )


def case_model(family: str) -> Any:
    return FAMILIES[family](dtype=torch.float64)


def trained(name: str, folder: Path, *, num_processes: int) -> tuple[list[dict[str, float]], torch.Tensor | None]:
    """Logs of the evaluations, and the weights unless they are sharded."""
    unset_hf_deepspeed_config()
    model = tiny_llada(vocab_size=12, dtype=torch.float32, initializer_range=0.2)
    tokenizer = letter_tokenizer()

    def reward(completion_ids: Any, **kwargs: Any) -> list[float]:
        return [reward_of(ids) for ids in completion_ids]

    args = config_of(
        folder,
        max_steps=1,
        eval_steps=1,
        learning_rate=0.1,
        gradient_checkpointing=True,
        per_device_train_batch_size=16 // num_processes,
        per_device_eval_batch_size=2,
        **copy.deepcopy(TRAINED[name]),
    )
    trainer = StableDRLTrainer(model, reward, args, prompts_of(), processing_class=tokenizer)
    if name != "not evaluated":
        trainer.add_callback(TaskEvaluation(trainer, "addition", limit=5, temperature=0.7))
    trainer.train()
    logs = [one for one in trainer.state.log_history if "eval_addition/accuracy" in one]
    logs = [{key: value for key, value in one.items() if "seconds" not in key} for one in logs]
    return logs, None if "deepspeed" in TRAINED[name] else flat(trainer.model.parameters())


def main(folder: Path) -> None:
    torch.set_num_threads(1)
    found = {}
    for family, temperature in CASES:
        config = case_config(temperature, folder / f"{family}-{temperature}")
        evaluation = evaluate(case_model(family), tiny_tokenizer(), config)
        found[family, temperature] = (evaluation.records, evaluation.speed["num_processes"])
        print(family, temperature, flush=True)  # noqa: T201
    for name in TRAINED:
        AcceleratorState._reset_state()
        found[name] = trained(name, folder / "trained", num_processes=2)
        print(name, flush=True)  # noqa: T201
    rank = torch.distributed.get_rank()
    (folder / f"found-{rank}.pickle").write_bytes(pickle.dumps(found))
    torch.distributed.destroy_process_group()


if __name__ == "__main__":
    main(Path(sys.argv[1]))
