# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl train`: StableDRL from a recipe. Run as a module or by `scripts/train.py` in a launched process."""

import inspect
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from typing import Any

from datasets import Dataset
from trl import DatasetMixtureConfig, GRPOConfig, ModelConfig, get_quantization_config

from ..checks import check_num_prompts, check_vllm_rollouts
from ..core.peers import OBJECTIVES
from ..rewards import BUILTIN_REWARDS, RewardFunc, load_reward
from ..stabledrl_config import StableDRLConfig
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
from .launch import launch_names, require
from .parser import RecipeParser

PROG = "trl-stabledrl train"
INTRO = """
Improve a masked diffusion language model by StableDRL, on rewards.

  trl-stabledrl train --config llada_8b_gsm8k --accelerate_config zero3
  trl-stabledrl train --config my_recipe.yaml --learning_rate 2e-6 --reward_funcs my_rewards.fn
  trl-stabledrl train --config my_recipe.yaml --dry_run

A recipe is YAML with one field a line; flags override it. A key that nothing reads stops the run.
With several GPUs the command starts `accelerate launch` itself and passes its options on:
--num_processes 4, --main_process_port 29501, or --accelerate_config with a file or one of
cpu, single_gpu, ddp, zero2, zero3 (recipes/accelerate).
"""
# what TRL hands to every reward function beside the dataset's columns
_REWARD_ARGUMENTS = {"prompts", "completions", "completion_ids", "trainer_state", "log_extra", "log_metric"}
_FAMILY_FIELDS = ("mask_law", "mc_sampling", "num_mc_samples", "block_length", "num_denoising_steps")
_COMMON_FIELDS = (
    "output_dir",
    "max_steps",
    "learning_rate",
    "per_device_train_batch_size",
    "gradient_accumulation_steps",
    "num_generations",
    "num_iterations",
    "max_completion_length",
    "temperature",
    "beta",
    "eval_strategy",
    "eval_steps",
    "save_steps",
    "resume_from_checkpoint",
    "report_to",
    "use_cpu",
    "seed",
)


@dataclass
class TrainArguments(JobArguments):
    r"""
    Arguments of the `train` command.

    Args:
        reward_funcs (`list[str]`, *optional*):
            Built-in rewards by name, or dotted paths of functions. Defaults to the task's.
    """

    reward_funcs: list[str] | None = field(
        default=None,
        metadata={
            "help": f"Names ({', '.join(BUILTIN_REWARDS)}) or dotted paths such as my_rewards.fn, from the current "
            "folder. Defaults to the task's."
        },
    )


def make_parser() -> RecipeParser:
    """
    Parser of the command, as the files in `trl/scripts` have one.

    Returns:
        [`RecipeParser`]
    """
    types = (TrainArguments, StableDRLConfig, ModelConfig, DatasetMixtureConfig)
    return RecipeParser(types, prog=PROG, launch_names=launch_names)


def help_groups() -> list[tuple[str, type, Sequence[str]]]:
    """Fields that `--help` shows: ours first, then those that every run sets."""
    inherited = {f.name for f in fields(GRPOConfig)}
    own = [f.name for f in fields(StableDRLConfig) if f.name not in inherited]
    own.insert(own.index("ratio_cap"), "epsilon")
    script = ["task", "reward_funcs", "dataset_name", "num_train_prompts", "num_eval_prompts", "eval_task", "dry_run"]
    model = ["model_name_or_path", "dtype", "attn_implementation", "use_peft", "lora_r"]
    return [
        ("Model", ModelConfig, model),
        ("Data and rewards", TrainArguments, script),
        ("StableDRL", StableDRLConfig, own),
        ("Training", StableDRLConfig, _COMMON_FIELDS),
    ]


def load_rewards(names: Sequence[str] | None, task_name: str | None) -> list[RewardFunc]:
    """
    Find the reward functions.

    Args:
        names (`Sequence[str]`, *optional*):
            Built-in names or dotted paths.
        task_name (`str`, *optional*):
            Task whose rewards are the default.

    Returns:
        `list[Callable]`
    """
    task = find_task(task_name)
    names = names or (task.reward_names if task is not None else ())
    if not names:
        raise UserError(f"no rewards: set reward_funcs or task. Built-in rewards: {', '.join(BUILTIN_REWARDS)}.")
    if "math_reward" in names:
        require("math_verify", extra="math", used_by="math_reward")
    return [load_reward(name) for name in names]


def check_rewards(rewards: Sequence[RewardFunc], weights: Sequence[float] | None, rows: Any) -> None:
    """Raise where a weight is missing, or a reward needs a column that the rows lack."""
    if weights is not None and len(weights) != len(rewards):
        raise UserError(
            f"reward_weights has {len(weights)} entries for {len(rewards)} reward functions. Give one weight for each."
        )
    columns = rows.column_names
    if columns is None:
        return
    for reward in rewards:
        if inspect.iscoroutinefunction(reward):
            continue
        needed = [
            p.name
            for p in inspect.signature(reward).parameters.values()
            if p.default is p.empty and p.kind not in (p.VAR_KEYWORD, p.VAR_POSITIONAL)
        ]
        missing = [name for name in needed if name not in _REWARD_ARGUMENTS and name not in columns]
        if missing:
            raise UserError(
                f"reward {reward.__name__} needs the column {', '.join(missing)}, but the dataset has only "
                f"{', '.join(columns)}. Rename a column of the dataset, or choose another reward."
            )


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
        rewards = load_rewards(arguments.reward_funcs, arguments.task)
        train, held_out = load_splits(arguments, mixture, wants_eval=training_args.eval_strategy != "no")
        check_rows(train, held_out, columns=("prompt",))
        check_rewards(rewards, training_args.reward_weights, train)
        model = look_at_model(model_args, training_args, rows=train, padding_side="left", truncation_side="left")
        peft_config = adapter_config(model_args, model)
        training_args.resolve(model.family)
        check_num_prompts(train, training_args)
        if training_args.rollout_backend == "vllm":
            check_vllm_rollouts(
                model.path,
                model.config,
                training_args,
                has_adapter=peft_config is not None or model.adapter is not None,
                is_quantized=model_args.load_in_4bit or model_args.load_in_8bit,
            )
        evaluation = task_evaluation(arguments, training_args, model)
    text = resolved_yaml(parser, training_args, resolved=_FAMILY_FIELDS)
    if is_main_process():
        facts = [*model.facts(), *_plan(training_args, train, held_out, rewards)]
        facts += task_evaluation_facts(evaluation, training_args)
        if arguments.dry_run:
            from .plan import dry_run_facts  # imports this module

            facts += dry_run_facts(training_args, model_args, model, peft_config)
        show_facts(DRY_RUN_TITLE if arguments.dry_run else "StableDRL", facts)
    if arguments.dry_run:
        return 0
    set_model_options(model_args, training_args)
    # TRL's trainers take seconds to import, and nothing before this line needs them
    from ..stabledrl_trainer import StableDRLTrainer

    trainer = StableDRLTrainer(
        model=model.path,
        reward_funcs=rewards,
        args=training_args,
        train_dataset=train,
        eval_dataset=held_out,
        processing_class=model.tokenizer,
        callbacks=[SaveResolvedConfig(text)],
        quantization_config=get_quantization_config(model_args),
        peft_config=peft_config,
    )
    add_task_evaluation(trainer, evaluation)
    train_and_save(trainer, arguments)
    return 0


def _plan(args: Any, train: Any, held_out: Any, rewards: Sequence[RewardFunc]) -> list[tuple[str, str]]:
    num_rows = args.per_device_train_batch_size * args.gradient_accumulation_steps * args.world_size
    is_staircase = args.mask_law == "staircase"
    # with block attention the first block may begin inside the prompt
    num_decoded = args.max_completion_length + (args.block_length - 1 if is_staircase else 0)
    num_blocks = -(-num_decoded // args.block_length)
    rollout_rows, steps = args.generation_batch_size, args.steps_per_generation
    num_updates = args.num_iterations * steps / args.gradient_accumulation_steps
    old, weights = scoring_passes(args)
    update = args.num_iterations * passes_per_score(args)
    num_passes = num_blocks * args.num_denoising_steps + is_staircase  # one for the prompts' keys and values
    per_step = f"{args.num_denoising_steps} steps each: {num_passes} forward passes at most"
    if args.confidence_threshold is not None:
        per_step = f"all tokens above {args.confidence_threshold:g} in each step"
    names = [reward.__name__ for reward in rewards]
    weighted = zip(names, args.reward_weights or [1.0] * len(names), strict=True)
    return [
        (
            "data",
            f"{_num_rows(train)} prompts" + (f", {_num_rows(held_out)} held out" if held_out is not None else ""),
        ),
        ("rewards", ", ".join(f"{weight:g} x {name}" for name, weight in weighted)),
        (
            "update",
            f"{num_rows} rows = {num_rows / args.num_generations:g} prompts x {args.num_generations} completions "
            f"({counted(args.world_size, 'process', 'processes')} x {args.per_device_train_batch_size} x "
            f"{counted(args.gradient_accumulation_steps, 'micro-step')})",
        ),
        (
            "rollout",
            f"{rollout_rows} rows every {counted(num_updates, 'update')}; {args.max_completion_length} tokens in "
            f"{counted(num_blocks, 'block')} of {args.block_length}, {per_step}; decoded by {_engine(args)}",
        ),
        (
            "likelihood",
            f"{args.mask_law}, {counted(args.num_mc_samples, f'{args.mc_sampling} draw')}, old policy under "
            + ("the same masks" if args.mask_coupling == "shared" else "its own masks"),
        ),
        (
            "objective",
            f"{args.objective}, {args.surrogate} surrogate, {_clip(args)}, "
            f"{counted(args.num_iterations, 'inner iteration')}",
        ),
        (
            "scoring",
            f"{old + weights + update:g} forward passes per row and rollout: {old:g} old, {weights:g} for weights, "
            f"{update} with gradient",
        ),
    ]


def passes_per_score(args: Any) -> int:
    """Forward passes that score a row once: one per draw, but the draws of a staircase share one."""
    return 1 if args.mask_law == "staircase" else args.num_mc_samples


def scoring_passes(args: Any) -> tuple[float, float]:
    """
    Forward passes without gradient per row and rollout.

    Args:
        args ([`StableDRLConfig`]):
            Resolved configuration.

    Returns:
        `tuple[float, float]`:
            Passes for old scores, and for the weights of groups that no micro-step holds whole.
    """
    mu, draws = args.num_iterations, passes_per_score(args)
    steps, accumulation = args.steps_per_generation, args.gradient_accumulation_steps
    windows = mu * max(1, steps // accumulation)
    holds_whole_groups = args.per_device_train_batch_size * args.world_size % args.num_generations == 0
    if not OBJECTIVES[args.objective].uses_ratio:
        num_weighed = 0 if args.beta == 0.0 or holds_whole_groups else windows
        return 0.0, num_weighed / windows * mu * draws
    is_shared = args.mask_coupling == "shared"
    # the first update after a rollout is on policy: under shared masks nobody looks at its old scores
    old = (mu - 1) * draws if is_shared and steps <= accumulation else mu * draws
    if holds_whole_groups:
        return old, 0.0
    num_weighed = windows - 1 if is_shared and args.beta == 0.0 else windows
    return old, num_weighed / windows * mu * draws


def _clip(args: StableDRLConfig) -> str:
    if args.epsilon is None:
        return "no clip"
    if args.clip_mode == "upper":
        return f"ratios capped at {args.ratio_cap:g}"
    return f"ratios in [{max(0.0, 1 - args.epsilon):g}, {1 + args.epsilon:g}]"


def _engine(args: StableDRLConfig) -> str:
    if args.rollout_backend == "transformers":
        return "transformers"
    shards = args.vllm_tensor_parallel_size
    return (
        "vLLM"
        + (f", {shards} processes to a copy" if shards > 1 else "")
        + (", asleep in between" if args.vllm_enable_sleep_mode else "")
    )


def _num_rows(rows: Any) -> str:
    return str(len(rows)) if isinstance(rows, Dataset) else "streamed"


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of a process that runs the command itself: `scripts/train.py`, or what a launcher starts.

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
