# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl sft`: supervised masked-diffusion training from a recipe, for warm starts."""

import sys
from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from datasets import Dataset
from trl import DatasetMixtureConfig, ModelConfig, SFTConfig, get_quantization_config

from ..sft_config import DiffusionSFTConfig
from .console import UserError, checking, counted, run_cleanly, show_facts
from .job import (
    DRY_RUN_TITLE,
    JobArguments,
    SaveResolvedConfig,
    adapter_config,
    add_task_evaluation,
    check_folders,
    check_rows,
    find_task,
    is_main_process,
    load_splits,
    look_at_model,
    resolved_yaml,
    set_model_options,
    show_help,
    task_evaluation,
    task_evaluation_facts,
    train_and_save,
)
from .launch import launch_names
from .parser import RecipeParser

PROG = "trl-stabledrl sft"
INTRO = """
Train a masked diffusion language model on prompts and completions, to start StableDRL from.

  trl-stabledrl sft --config my_recipe.yaml --accelerate_config zero3
  trl-stabledrl sft --model_name_or_path GSAI-ML/LLaDA-8B-Base --dataset_name rows.jsonl \\
    --output_dir outputs/sft --use_peft

Recipes and launch options are those of `trl-stabledrl train`.
The rows need the columns `prompt` and `completion`, both plain text or both chat messages.
"""
_FAMILY_FIELDS = ("mask_law", "block_length")
_COMMON_FIELDS = (
    "output_dir",
    "max_steps",
    "num_train_epochs",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "eval_strategy",
    "eval_steps",
    "save_steps",
    "resume_from_checkpoint",
    "report_to",
    "use_cpu",
    "seed",
)


def make_parser() -> RecipeParser:
    """
    Parser of the command, as the files in `trl/scripts` have one.

    Returns:
        [`RecipeParser`]
    """
    types = (JobArguments, DiffusionSFTConfig, ModelConfig, DatasetMixtureConfig)
    return RecipeParser(types, prog=PROG, launch_names=launch_names)


def help_groups() -> list[tuple[str, type, Sequence[str]]]:
    """Fields that `--help` shows."""
    inherited = {f.name for f in fields(SFTConfig)}
    own = [f.name for f in fields(DiffusionSFTConfig) if f.name not in inherited]
    script = ["task", "dataset_name", "num_train_prompts", "num_eval_prompts", "eval_task", "dry_run"]
    model = ["model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r"]
    return [
        ("Model", ModelConfig, model),
        ("Data", JobArguments, script),
        ("Masked diffusion", DiffusionSFTConfig, own),
        ("Training", DiffusionSFTConfig, _COMMON_FIELDS),
    ]


def run(argv: Sequence[str]) -> int:
    """
    Train in this process.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    parser = make_parser()
    if show_help(parser, argv, intro=INTRO, groups=help_groups()):
        return 0
    with checking():
        arguments, training_args, model_args, mixture = parser.parse(argv)
        check_folders(training_args)
        train, held_out = load_splits(arguments, mixture, wants_eval=training_args.eval_strategy != "no")
        train, held_out = _with_completion(train, arguments), _with_completion(held_out, arguments)
        check_rows(train, held_out, columns=("prompt", "completion"))
        model = look_at_model(model_args, training_args, rows=train)
        peft_config = adapter_config(model_args, model)
        training_args.resolve(model.family)
        evaluation = task_evaluation(arguments, training_args, model)
    if is_main_process():
        facts = [*model.facts(), *_plan(training_args, train, held_out)]
        facts += task_evaluation_facts(evaluation, training_args)
        show_facts(DRY_RUN_TITLE if arguments.dry_run else "Masked-diffusion SFT", facts)
    if arguments.dry_run:
        return 0
    set_model_options(model_args, training_args)
    # TRL's trainers take seconds to import, and nothing before this line needs them
    from ..sft_trainer import DiffusionSFTTrainer

    trainer = DiffusionSFTTrainer(
        model=model.path,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=model.tokenizer,
        callbacks=[SaveResolvedConfig(resolved_yaml(parser, training_args, resolved=_FAMILY_FIELDS))],
        quantization_config=get_quantization_config(model_args),
        peft_config=peft_config,
    )
    add_task_evaluation(trainer, evaluation)
    train_and_save(trainer, arguments)
    return 0


def _with_completion(rows: Any, arguments: JobArguments) -> Any:
    """Name the task's right answers `completion`, and keep what training reads."""
    task = find_task(arguments.task)
    if rows is None or task is None or not isinstance(rows, Dataset) or "completion" in rows.column_names:
        return rows
    if task.target_column is None:
        raise UserError(
            f"task {task.name} has no completions to train on, since its completions hold reasoning. Give rows with "
            "prompt and completion as dataset_name."
        )
    return rows.select_columns(["prompt", task.target_column]).rename_column(task.target_column, "completion")


def _plan(args: DiffusionSFTConfig, train: Any, held_out: Any) -> list[tuple[str, str]]:
    num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    sizes = [
        f"{len(rows)} {name}" if isinstance(rows, Dataset) else f"streamed {name}"
        for rows, name in ((train, "rows"), (held_out, "held out"))
        if rows is not None
    ]
    return [
        ("data", ", ".join(sizes)),
        (
            "update",
            f"{num_rows} rows ({counted(args.world_size, 'process', 'processes')} x "
            f"{args.per_device_train_batch_size} x {counted(args.gradient_accumulation_steps, 'micro-step')})",
        ),
        (
            "likelihood",
            f"{args.mask_law}, {counted(args.num_mc_samples, f'{args.mc_sampling} draw')}, window of "
            f"{args.max_completion_length} tokens",
        ),
    ]


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of a process that runs the command itself: `scripts/sft.py`, or what a launcher starts.

    Args:
        argv (`Sequence[str]`, *optional*):
            Arguments of the command. Defaults to the process's own.

    Returns:
        `int`:
            Exit status.
    """
    return run_cleanly(lambda: run(sys.argv[1:] if argv is None else argv))


if __name__ == "__main__":
    raise SystemExit(main())
