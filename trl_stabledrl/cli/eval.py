# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl eval`: scores of a model or adapter on a task, and a comparison of several evaluations."""

import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any

from accelerate.utils import DistributedType
from datasets.exceptions import DatasetsError
from rich.console import Console
from transformers import AutoModelForCausalLM

from ..evaluation import EvaluationPlan, check_output_dir, plan_evaluation, process_state, run_plan
from ..evaluation_config import EvaluationConfig
from ..evaluation_records import COMPLETIONS_FILE, RESULTS_FILE
from ..evaluation_report import draw_comparison, load_runs, show_comparison, show_run
from ..models.adapters import Adapter, adapter_at, load_trainable
from ..models.facts import ModelFacts, load_tokenizer, model_facts
from .console import UserError, blamed_on, checking, counted, run_cleanly, show_facts
from .job import DRY_RUN_TITLE, is_main_process, read_config, show_help
from .launch import launch_names, require
from .parser import RecipeParser

PROG = "trl-stabledrl eval"
COMPARE = "compare"
INTRO = """
Evaluate a masked diffusion language model, or an adapter of one, on a task.

  trl-stabledrl eval --model_name_or_path GSAI-ML/LLaDA-8B-Instruct --task gsm8k \\
    --max_completion_length 128 256 512 --output_dir outputs/eval/base
  trl-stabledrl eval --adapter outputs/llada_8b_gsm8k_lora --task gsm8k --output_dir outputs/eval/lora
  trl-stabledrl eval compare outputs/eval/base outputs/eval/lora --output eval.png

With several GPUs each holds the whole model and completes its share; --num_processes 2 or --accelerate_config ddp.
An evaluation that was interrupted goes on where the same command is given again, and repeats nothing.
"""
COMPARE_INTRO = """
Compare finished evaluations of one task: their scores, and the differences to the first, item by item.

  trl-stabledrl eval compare outputs/eval/base outputs/eval/lora --output eval.png
"""
INTERRUPTED = 130
"""Exit status after Ctrl-C, as shells have it."""


@dataclass(kw_only=True)
class EvalArguments(EvaluationConfig):
    r"""
    Arguments of the `eval` command: where the model is, and the options of [`trl_stabledrl.EvaluationConfig`].

    Args:
        model_name_or_path (`str`, *optional*):
            Checkpoint or adapter: folder or name on the Hub. Defaults to the model that `adapter` names.
        adapter (`str`, *optional*):
            Adapter on that model: folder or name on the Hub.
        model_revision (`str`, *optional*):
            Revision of `model_name_or_path` on the Hub.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Data type of the weights; `"auto"` is the checkpoint's.
        use_cpu (`bool`, *optional*, defaults to `False`):
            Stay on the CPU.
        dry_run (`bool`, *optional*, defaults to `False`):
            Check everything that needs no weights, print what would be run, and stop.
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint or adapter."})
    adapter: str | None = field(default=None, metadata={"help": "Adapter on that model: folder or name on the Hub."})
    model_revision: str | None = field(default=None, metadata={"help": "Revision of the model on the Hub."})
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of the weights; auto is the checkpoint's.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )
    use_cpu: bool = field(default=False, metadata={"help": "Stay on the CPU."})
    dry_run: bool = field(
        default=False, metadata={"help": "Check everything that needs no weights, print the plan, and stop."}
    )


@dataclass
class CompareArguments:
    r"""
    Arguments of `eval compare`, behind the folders.

    Args:
        output (`str`, *optional*, defaults to `"eval_compare.png"`):
            Picture to write.
    """

    output: str = field(default="eval_compare.png", metadata={"help": "Picture to write, .png, .svg or .pdf."})


def make_parser() -> RecipeParser:
    """
    Parser of the command.

    Returns:
        [`RecipeParser`]
    """
    return RecipeParser((EvalArguments,), prog=PROG, launch_names=launch_names)


def help_groups() -> list[tuple[str, type, Sequence[str]]]:
    """Fields that `--help` shows."""
    config = [f.name for f in fields(EvaluationConfig)]
    model = [f.name for f in fields(EvalArguments) if f.name not in config]
    return [("Model", EvalArguments, model), ("Task and decoding", EvalArguments, config)]


def run(argv: Sequence[str]) -> int:
    """
    Evaluate in this process, or compare.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    if argv and argv[0] == COMPARE:
        return compare(argv[1:])
    parser = make_parser()
    if show_help(parser, argv, intro=INTRO, groups=help_groups()):
        return 0
    with checking():
        (arguments,) = parser.parse(argv)
        if not arguments.output_dir and not arguments.dry_run:
            raise UserError(
                "output_dir is missing: name a folder for the results. Given again, an interrupted evaluation goes on."
            )
        base, adapter = _find_model(arguments)
        facts = _look_at_model(arguments, base, adapter)
        names = {"model": base, "revision": arguments.model_revision, "adapter": adapter.path if adapter else None}
        with blamed_on(f"task {arguments.task}", ValueError, OSError, DatasetsError):
            plan = plan_evaluation(facts, arguments, names=names)
        if plan.task.reward_names[0] == "math_reward":
            require("math_verify", extra="math", used_by=f"task {arguments.task}")
        if arguments.output_dir:
            check_output_dir(arguments.output_dir, plan.settings)
        if not arguments.dry_run:
            _make_folder(arguments.output_dir)
    if arguments.dry_run:
        if is_main_process():
            show_facts(DRY_RUN_TITLE, _facts(plan, base, adapter))
        return 0
    state = process_state(use_cpu=arguments.use_cpu)
    if state.distributed_type in (DistributedType.DEEPSPEED, DistributedType.FSDP):
        raise UserError(
            f"an evaluation does not shard the model, but accelerate is configured for {state.distributed_type}. Use "
            "--accelerate_config ddp: each process holds a whole copy."
        )
    if state.is_main_process:
        show_facts("Evaluation", _facts(plan, base, adapter))
    model = _load(arguments, base, adapter).to(state.device).eval()
    try:
        evaluation = run_plan(model, plan)
    except KeyboardInterrupt:
        if state.is_main_process:
            text = f"Interrupted. What is done is in {arguments.output_dir}: the same command goes on from there."
            Console(stderr=True, highlight=False).print(text, markup=False, soft_wrap=True)
        return INTERRUPTED
    if state.is_main_process:
        console = Console(highlight=False)
        show_run(console, evaluation.results, evaluation.speed)
        text = f"Written to {arguments.output_dir}: {RESULTS_FILE}, {COMPLETIONS_FILE}"
        console.print(text, markup=False, soft_wrap=True)
    return 0


def _make_folder(folder: str) -> None:
    """Before the weights are loaded, so that an hour of decoding does not end where nothing can be written."""
    with blamed_on(f"output_dir={folder!r}", OSError):
        Path(folder).mkdir(parents=True, exist_ok=True)
        if not os.access(folder, os.W_OK):
            raise UserError(f"output_dir={folder!r} cannot be written to. Choose another folder.")


def _find_model(arguments: EvalArguments) -> tuple[str, Adapter | None]:
    """The whole model, and the adapter on it."""
    path = arguments.model_name_or_path
    if not path and not arguments.adapter:
        raise UserError("model_name_or_path is missing: name a checkpoint, such as GSAI-ML/LLaDA-8B-Instruct.")
    found = None
    if path:
        _, found = read_config(path, revision=arguments.model_revision)
    if not arguments.adapter:
        assert path  # checked above
        return (path, None) if found is None else (found.base, found)
    require("peft", extra="peft", used_by="adapter")
    with blamed_on(f"adapter={arguments.adapter!r}", ValueError, OSError):
        adapter = adapter_at(arguments.adapter)
    if adapter is None:
        raise UserError(
            f"adapter={arguments.adapter!r} is no adapter: it has no adapter_config.json. Name the folder of a LoRA "
            "run, or give a whole model as model_name_or_path."
        )
    if found is not None:
        raise UserError(
            f"model_name_or_path={path!r} is an adapter itself, of {found.base}, and adapter names another. Merge the "
            "first one: trl-stabledrl merge --adapter ..."
        )
    if path:
        adapter = Adapter(adapter.path, path, arguments.model_revision)
    return adapter.base, adapter


def _look_at_model(arguments: EvalArguments, base: str, adapter: Adapter | None) -> ModelFacts:
    source = base if adapter is None else adapter.path
    revision = arguments.model_revision if adapter is None else adapter.base_revision
    with blamed_on(f"model {base!r}", OSError, KeyError, TypeError, ValueError):
        tokenizer = load_tokenizer(source, adapter, revision=revision if adapter is None else None)
        return model_facts(base, tokenizer, revision=revision)


def _load(arguments: EvalArguments, base: str, adapter: Adapter | None) -> Any:
    with blamed_on(f"model {base!r}", ValueError, OSError):
        if adapter is not None:
            return load_trainable(adapter, model_init_kwargs={"dtype": arguments.dtype})
        return AutoModelForCausalLM.from_pretrained(
            base, revision=arguments.model_revision or "main", dtype=arguments.dtype
        )


def _facts(plan: EvaluationPlan, base: str, adapter: Adapter | None) -> list[tuple[str, str]]:
    config = plan.config
    tokens = max(map(len, plan.prompt_ids))
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    steps = (
        f"all tokens above {config.confidence_threshold:g} in each step"
        if config.confidence_threshold is not None
        else ", ".join(f"{one.num_denoising_steps} steps per block of {one.block_length}" for one in _distinct(plan))
    )
    return [
        ("model", f"{base}: {plan.facts.family.name}"),
        *([] if adapter is None else [("adapter", adapter.path)]),
        (
            "task",
            f"{plan.task.name}, {config.split}: {counted(len(plan.rows), 'item')} of at most {tokens} prompt tokens"
            + (f", {config.prompt_style} prompts" if config.prompt_style else ""),
        ),
        (
            "completions",
            f"{plan.num_completions}: {counted(config.num_samples, 'sample')} of each item in windows of "
            f"{', '.join(map(str, plan.decoding))} tokens",
        ),
        ("decoding", f"{how}, {steps}, {config.remasking}"),
    ]


def _distinct(plan: EvaluationPlan) -> list[Any]:
    settings = {(one.block_length, one.num_denoising_steps): one for one in plan.decoding.values()}
    return list(settings.values())


def compare(argv: Sequence[str]) -> int:
    """
    Print and draw how evaluations differ.

    Args:
        argv (`Sequence[str]`):
            Folders, then options.

    Returns:
        `int`:
            Exit status.
    """
    parser = RecipeParser((CompareArguments,), prog=f"{PROG} {COMPARE}")
    groups: list[tuple[str, type, Sequence[str]]] = [("Options", CompareArguments, ["output"])]
    if show_help(parser, argv, intro=COMPARE_INTRO, groups=groups):
        return 0
    first_option = next((index for index, token in enumerate(argv) if token.startswith("--")), len(argv))
    folders, options = list(argv[:first_option]), argv[first_option:]
    (arguments,) = parser.parse(options)
    if len(folders) < 2:
        raise UserError(
            f"eval compare needs two or more folders, got {len(folders)}: trl-stabledrl eval compare A B --output "
            "x.png"
        )
    path = Path(arguments.output)
    if path.suffix not in (".png", ".svg", ".pdf"):
        raise UserError(f"output={arguments.output!r} must end in .png, .svg or .pdf.")
    runs = load_runs(folders)
    path.parent.mkdir(parents=True, exist_ok=True)
    console = Console(highlight=False)
    show_comparison(console, runs)
    if draw_comparison(path, runs):
        console.print(f"Picture: {path}", markup=False, soft_wrap=True)
    else:
        console.print("No picture: it needs matplotlib (pip install 'trl-stabledrl[lab]').", markup=False)
    return 0


def main(argv: Sequence[str] | None = None) -> int:
    """
    Entry point of a process that a launcher starts.

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
