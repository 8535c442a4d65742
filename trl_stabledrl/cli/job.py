# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What `train` and `sft` share: data, model and output folder looked at before any weight is loaded."""

import os
import platform
from collections.abc import Sequence
from dataclasses import dataclass, field
from enum import Enum
from pathlib import Path
from typing import Any

import torch
import yaml
from datasets import Dataset, IterableDataset, load_dataset
from datasets.exceptions import DatasetsError
from rich.console import Console
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
    TrainerCallback,
)
from trl import DatasetMixtureConfig, ModelConfig, ScriptArguments, get_dataset, get_peft_config

from .. import __version__
from .._compat import shapes_only
from ..checkpoints import STAGING_FOLDER, checkpoints_in
from ..checks import check_dataset, check_output_dir, resume_request
from ..data import TASKS, Task
from ..evaluation import TaskEvaluation, plan_evaluation, training_evaluation_config
from ..models.adapters import Adapter, adapter_at, checked_peft_config
from ..models.facts import load_tokenizer, model_facts
from ..models.families import Family, check_vocabulary, end_token_ids_of, family_of, mask_token_id_of
from .console import UserError, blamed_on, counted
from .launch import require
from .parser import HELP_FLAGS, RecipeParser, show_fields

RESOLVED_CONFIG = "resolved_config.yaml"
"""Every field of a run, beside each checkpoint: a recipe that repeats it."""

DRY_RUN_TITLE = "Dry run: everything that needs no weights is in order."

_BUILDERS = {".csv": "csv", ".json": "json", ".jsonl": "json", ".parquet": "parquet"}


@dataclass
class JobArguments(ScriptArguments):
    r"""
    Arguments that `train` and `sft` have in common, beyond TRL's.

    Args:
        task (`str`, *optional*):
            A task of the package: prompts, rewards and held-out prompts. `dataset_name` replaces its rows.
        num_train_prompts (`int`, *optional*):
            Prompts of the task to train on. Defaults to the task's: all of a dataset, 512 generated ones.
        num_eval_prompts (`int`, *optional*):
            Held-out prompts of the task, when `eval_strategy` asks for evaluations.
        eval_task (`str`, *optional*):
            A task to measure accuracy on, at step 0, every `eval_steps` and at the end: [`TaskEvaluation`].
        num_eval_task_prompts (`int`, *optional*):
            Prompts of its test split. Defaults to 128.
        eval_task_temperature (`float`, *optional*):
            Temperature of its completions. Defaults to 0, greedy.
        dry_run (`bool`, *optional*, defaults to `False`):
            Check everything that needs no weights, print what would be run, and stop.
    """

    task: str | None = field(
        default=None,
        metadata={"help": "Prompts, rewards and held-out prompts in one.", "choices": [*TASKS]},
    )
    dataset_name: str | None = field(
        default=None,
        metadata={
            "help": "Dataset on the Hub, local folder, or .json, .jsonl, .csv or .parquet file, with a column "
            "`prompt`. Replaces the rows of `task`."
        },
    )
    num_train_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of the task to train on. Defaults to all, or 512 generated ones."}
    )
    num_eval_prompts: int | None = field(
        default=None, metadata={"help": "Held-out prompts of the task, when eval_strategy is set."}
    )
    eval_task: str | None = field(
        default=None,
        metadata={"help": "Measure accuracy on this task at step 0 and every eval_steps.", "choices": [*TASKS]},
    )
    num_eval_task_prompts: int | None = field(
        default=None, metadata={"help": "Prompts of eval_task, of its test split. Defaults to 128."}
    )
    eval_task_temperature: float | None = field(
        default=None, metadata={"help": "Temperature of the completions for eval_task. Defaults to 0, greedy."}
    )
    dry_run: bool = field(
        default=False, metadata={"help": "Check everything that needs no weights, print the plan, and stop."}
    )


def find_task(name: str | None) -> Task | None:
    """The task of that name; argparse does not look at choices in a recipe's defaults, so this is checked again."""
    if name is None:
        return None
    if name not in TASKS:
        raise UserError(f"task={name!r} is not known. Use one of {', '.join(TASKS)}.")
    return TASKS[name]


def load_splits(
    arguments: JobArguments, mixture: DatasetMixtureConfig, *, wants_eval: bool
) -> tuple[Dataset | IterableDataset, Dataset | IterableDataset | None]:
    """
    Load the training rows, and the held-out ones when they are asked for.

    Args:
        arguments ([`JobArguments`]):
            Name the task or the dataset.
        mixture ([`~trl.DatasetMixtureConfig`]):
            TRL's `datasets`, which take precedence.
        wants_eval (`bool`):
            Whether evaluations will be run.

    Returns:
        `tuple`:
            Training rows and held-out rows or `None`.
    """
    task = find_task(arguments.task)
    if task is not None and not arguments.dataset_name and not mixture.datasets:
        if arguments.dataset_train_split not in task.splits:
            raise UserError(
                f"task={task.name!r} has no split {arguments.dataset_train_split!r}, only {', '.join(task.splits)}. "
                "Choose another task to train on, and eval_task to measure this one."
            )
        with blamed_on(f"task {task.name}", ValueError, OSError, DatasetsError):
            train = task.prompts(arguments.dataset_train_split, **_count(arguments.num_train_prompts))
            if not wants_eval:
                return train, None
            return train, task.prompts(arguments.dataset_test_split, **_count(arguments.num_eval_prompts))
    for name in ("num_train_prompts", "num_eval_prompts"):
        if vars(arguments)[name] is not None and task is None:
            raise UserError(f"{name} belongs to a task, but none is set. Set task, or cut the dataset beforehand.")
    if mixture.datasets:
        with blamed_on("datasets", ValueError, OSError, DatasetsError):
            splits = get_dataset(mixture)
        return _split(splits, arguments, wants_eval=wants_eval, source="datasets")
    if not arguments.dataset_name:
        raise UserError("no data: set task, dataset_name or datasets. Tasks: " + ", ".join(TASKS))
    path = Path(arguments.dataset_name)
    with blamed_on(f"dataset_name={arguments.dataset_name!r}", ValueError, OSError, DatasetsError):
        if path.is_file():
            if path.suffix not in _BUILDERS:
                raise UserError(f"dataset_name={str(path)!r} must end in one of {', '.join(_BUILDERS)}.")
            if not path.read_bytes().strip(b" \r\n\t[]"):
                raise UserError(f"train_dataset is empty: {path} has 0 rows. Pass at least one prompt.")
            splits = load_dataset(_BUILDERS[path.suffix], data_files=str(path), streaming=arguments.dataset_streaming)
        else:
            splits = load_dataset(
                arguments.dataset_name, name=arguments.dataset_config, streaming=arguments.dataset_streaming
            )
    return _split(splits, arguments, wants_eval=wants_eval, source=repr(arguments.dataset_name))


def _count(num_prompts: int | None) -> dict[str, int]:
    return {} if num_prompts is None else {"num_prompts": num_prompts}


def _split(splits: Any, arguments: JobArguments, *, wants_eval: bool, source: str) -> tuple[Any, Any]:
    def pick(key: str, name: str) -> Any:
        if name not in splits:
            raise UserError(
                f"{source} has no split {name!r}, only {', '.join(splits)}. Set {key}"
                + (", or eval_strategy: 'no'." if key == "dataset_test_split" else ".")
            )
        return splits[name]

    train = pick("dataset_train_split", arguments.dataset_train_split)
    return train, pick("dataset_test_split", arguments.dataset_test_split) if wants_eval else None


def check_rows(train: Any, held_out: Any, *, columns: tuple[str, ...]) -> None:
    """Raise unless both splits have rows with the columns."""
    check_dataset("train_dataset", train, columns=columns)
    if held_out is not None:
        check_dataset("eval_dataset", held_out, columns=columns)


@dataclass(frozen=True)
class Model:
    """Everything about a model that is known without its weights."""

    path: str
    config: PreTrainedConfig
    family: Family
    tokenizer: PreTrainedTokenizerBase
    adapter: Adapter | None = None
    """What `path` holds, if it is no model; `config` is then that of its base model."""

    def facts(self) -> list[tuple[str, str]]:
        """Lines for the summary of a dry run."""
        with shapes_only():
            num_parameters = sum(p.numel() for p in AutoModelForCausalLM.from_config(self.config).parameters())
        ends = ", ".join(map(str, end_token_ids_of(self.config, self.tokenizer)))
        mask = mask_token_id_of(self.config, self.tokenizer)
        return [
            (
                "model",
                f"{self.path if self.adapter is None else self.adapter.base}: {self.family.name}, "
                f"{short(num_parameters)} parameters",
            ),
            *([] if self.adapter is None else [("adapter", f"{self.path}, trained further")]),
            ("tokens", f"mask {mask}, end {ends}, chat template {'yes' if self.tokenizer.chat_template else 'no'}"),
        ]


def look_at_model(model_args: ModelConfig, training_args: Any, *, rows: Any, **tokenizer_options: Any) -> Model:
    """
    Load configuration and tokenizer, and check that a run could use them.

    Args:
        model_args ([`~trl.ModelConfig`]):
            Names the model.
        training_args ([`~transformers.TrainingArguments`]):
            For `trust_remote_code`.
        rows (`datasets.Dataset`):
            Training rows: conversations need a chat template.
        tokenizer_options:
            Passed on to the tokenizer.

    Returns:
        [`Model`]
    """
    path = model_args.model_name_or_path
    if not path:
        raise UserError("model_name_or_path is missing: name a checkpoint, such as GSAI-ML/LLaDA-8B-Instruct.")
    if model_args.use_peft:
        require("peft", extra="peft", used_by="use_peft")
    where = {"revision": model_args.model_revision, "trust_remote_code": training_args.trust_remote_code}
    config, adapter = read_config(path, **where)
    check_quantization(model_args, adapter)
    family = family_of(config)
    with blamed_on(f"tokenizer of model_name_or_path={path!r}", ValueError, OSError, KeyError, TypeError):
        tokenizer = load_tokenizer(path, adapter, **where, **tokenizer_options)
    mask_token_id_of(config, tokenizer)
    end_token_ids_of(config, tokenizer)
    check_vocabulary(config, tokenizer, config.to_dict()["vocab_size"])
    first = next(iter(rows))
    if not isinstance(first["prompt"], str) and not tokenizer.chat_template:
        raise UserError(
            f"the prompts are conversations, but the tokenizer of {path} has no chat template. Set "
            "tokenizer.chat_template and save it beside the model, or give prompts as plain text."
        )
    return Model(path, config, family, tokenizer, adapter)


def read_config(
    path: str, *, revision: str | None = None, trust_remote_code: bool = False
) -> tuple[PreTrainedConfig, Adapter | None]:
    """Configuration of the model at `model_name_or_path`, or of the one that the adapter there belongs to."""
    with blamed_on(f"model_name_or_path={path!r}", ValueError, OSError, KeyError):
        adapter = adapter_at(path, revision=revision)
        if adapter is None:
            config = AutoConfig.from_pretrained(path, revision=revision, trust_remote_code=trust_remote_code)
            return config, None
    require("peft", extra="peft", used_by=f"the adapter {path}")
    with blamed_on(f"model_name_or_path={path!r} is an adapter of {adapter.base!r}", ValueError, OSError, KeyError):
        return AutoConfig.from_pretrained(adapter.base, revision=adapter.base_revision), adapter


def check_quantization(model_args: ModelConfig, adapter: Adapter | None, *, needs_library: bool = True) -> None:
    """Raise where weights would be quantised that nothing could be trained on, or by what is not installed."""
    for name in ("load_in_4bit", "load_in_8bit"):
        if not vars(model_args)[name]:
            continue
        if needs_library:
            require("bitsandbytes", extra="qlora", used_by=name)
        if not model_args.use_peft and adapter is None:
            raise UserError(
                f"{name}=True without use_peft: quantised weights cannot be trained, only an adapter beside them. Set "
                f"use_peft, or leave {name} out."
            )


def adapter_config(model_args: ModelConfig, model: Model) -> Any:
    """
    Configuration of the adapter that a run starts from scratch.

    Args:
        model_args ([`~trl.ModelConfig`]):
            `use_peft` and the options of LoRA.
        model ([`Model`]):
            From [`look_at_model`].

    Returns:
        [`~peft.PeftConfig`] or `None`:
            `None` without `use_peft`, and where the model's path is an adapter, whose own settings go on.
    """
    asked = get_peft_config(model_args)
    if model.adapter is None or asked is None:
        return checked_peft_config(asked, adapter=None, family=model.family, config=model.config)
    from peft import PeftConfig

    with blamed_on(f"adapter {model.path}", ValueError, OSError, KeyError, TypeError):
        found = PeftConfig.from_pretrained(model.path, revision=model_args.model_revision)
    for option, field_name in _LORA_OPTIONS.items():
        wanted, has = vars(asked)[field_name], vars(found).get(field_name)
        if wanted is not None and _unordered(wanted) != _unordered(has):
            raise UserError(
                f"{option} is {_shown(wanted)}, but the adapter {model.path}, which would be trained further, has "
                f"{_shown(has)}. Leave use_peft out to go on with the adapter's own settings, or merge it first to "
                f"start a new one: trl-stabledrl merge --adapter {model.path} --output_dir ..."
            )
    return None


_LORA_OPTIONS = {
    "lora_r": "r",
    "lora_alpha": "lora_alpha",
    "lora_target_modules": "target_modules",
    "lora_modules_to_save": "modules_to_save",
    "use_rslora": "use_rslora",
    "use_dora": "use_dora",
}


def _unordered(value: Any) -> Any:
    if isinstance(value, str):
        return {value}
    return set(value) if isinstance(value, (list, tuple, set)) else value


def _shown(value: Any) -> str:
    return ", ".join(sorted(value)) if isinstance(value, (list, tuple, set)) else str(value)


def set_model_options(model_args: ModelConfig, training_args: Any) -> None:
    """Hand the model's options to the trainer, as TRL's scripts do; `model_init_kwargs` wins."""
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "trust_remote_code": training_args.trust_remote_code,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }


def check_folders(training_args: Any) -> None:
    """
    Raise where the run would write over another, or has nothing to resume; reads the disk only.

    `resume_from_checkpoint` becomes a boolean where it is one.
    """
    training_args.resume_from_checkpoint = resume = resume_request(training_args.resume_from_checkpoint)
    check_output_dir(training_args.output_dir, resume)
    folder = Path(training_args.output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={str(folder)!r} is a file. Choose another output_dir.")
    if isinstance(resume, str) and not Path(resume).is_dir():
        raise UserError(f"resume_from_checkpoint={resume!r}: there is no such folder.")
    # a checkpoint that only lacked its name when the run was killed is one: the trainer gives it back
    if resume is True and not checkpoints_in(folder) and not checkpoints_in(folder / STAGING_FOLDER):
        raise UserError(
            f"resume_from_checkpoint is true, but output_dir={str(folder)!r} holds no checkpoint to resume."
        )
    weights = (
        [*folder.glob("model*.safetensors"), *folder.glob("adapter_model.safetensors")] if folder.is_dir() else []
    )
    if weights and not resume:
        raise UserError(
            f"output_dir={str(folder)!r} already holds a model, {weights[0].name}. Nothing was touched. Choose "
            "another output_dir."
        )


def resolved_yaml(parser: RecipeParser, training_args: Any, *, resolved: Sequence[str] = ()) -> str:
    """
    Write every field of a run as a recipe.

    Args:
        parser ([`RecipeParser`]):
            Parsed the command line and the recipe.
        training_args ([`~transformers.TrainingArguments`]):
            The configuration.
        resolved (`Sequence[str]`, *optional*):
            Fields that the model's family filled in.

    Returns:
        `str`:
            YAML that the same command reads back as the same run.
    """
    values = {name: _plain(value) for name, value in parser.parsed.items() if name != "dry_run"}
    values |= {name: vars(training_args)[name] for name in resolved}
    versions = f"trl-stabledrl {__version__}, torch {torch.__version__}, Python {platform.python_version()}"
    header = f"# {parser.prog}, every field of the run. {versions}. Processes: {training_args.world_size}.\n"
    return header + yaml.safe_dump(values, sort_keys=True, allow_unicode=True)


def _plain(value: Any) -> Any:
    if isinstance(value, Enum):
        return value.value
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return value


def task_evaluation(arguments: JobArguments, training_args: Any, model: Model) -> dict[str, Any] | None:
    """
    Options of the evaluation on `eval_task`, looked at before any weight is loaded.

    Args:
        arguments ([`JobArguments`]):
            Name the task.
        training_args ([`~transformers.TrainingArguments`]):
            When, and how completions are decoded.
        model ([`Model`]):
            From [`look_at_model`].

    Returns:
        `dict` or `None`:
            Arguments of [`TaskEvaluation`] behind the trainer, if one is asked for.
    """
    given = {"limit": arguments.num_eval_task_prompts, "temperature": arguments.eval_task_temperature}
    given = {name: value for name, value in given.items() if value is not None}
    if arguments.eval_task is None:
        for name in ("num_eval_task_prompts", "eval_task_temperature"):
            if vars(arguments)[name] is not None:
                raise UserError(f"{name} belongs to eval_task, but none is set. Set eval_task, or leave {name} out.")
        return None
    options = {"task": arguments.eval_task, **given}
    with blamed_on(f"eval_task={arguments.eval_task!r}", ValueError, OSError, DatasetsError):
        plan_evaluation(model_facts(model.path, model.tokenizer), training_evaluation_config(training_args, **options))
    return options


def task_evaluation_facts(options: dict[str, Any] | None, training_args: Any) -> list[tuple[str, str]]:
    """Line of the summary about the evaluation on `eval_task`."""
    if options is None:
        return []
    config = training_evaluation_config(training_args, **options)
    how = "greedy" if config.temperature == 0 else f"temperature {config.temperature:g}"
    when = f"at step 0, every {training_args.eval_steps:g} and at the end"
    return [("evaluation", f"{config.task}, {counted(config.limit or 0, 'test prompt')}, {how}, {when}")]


class SaveResolvedConfig(TrainerCallback):
    """
    Writes the resolved configuration into the output folder and beside each checkpoint, on the main process.

    Args:
        text (`str`):
            The configuration as YAML.
    """

    def __init__(self, text: str):
        self.text = text

    def on_train_begin(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            _write_beside_older(Path(str(args.output_dir), RESOLVED_CONFIG), self.text)

    def on_save(self, args, state, control, **kwargs):
        if state.is_world_process_zero:
            checkpoint = Path(str(args.output_dir), f"checkpoint-{state.global_step}")
            (checkpoint / RESOLVED_CONFIG).write_text(self.text)


def _write_beside_older(path: Path, text: str) -> None:
    """A resumed run may have other settings: those of the earlier part are kept under a number."""
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_file() and path.read_text() != text:
        number = 1
        while path.with_suffix(f".{number}.yaml").exists():
            number += 1
        path.rename(path.with_suffix(f".{number}.yaml"))
    path.write_text(text)


def add_task_evaluation(trainer: Any, options: dict[str, Any] | None) -> None:
    """Have the trainer evaluate, with options from [`task_evaluation`]."""
    if options is not None:
        trainer.add_callback(TaskEvaluation(trainer, **options))


def train_and_save(trainer: Any, arguments: JobArguments) -> None:
    """
    Train, save the final model and say where it is.

    Args:
        trainer ([`~transformers.Trainer`]):
            Ready to train.
        arguments ([`JobArguments`]):
            For the model card's dataset.
    """
    args = trainer.args
    trainer.train(resume_from_checkpoint=args.resume_from_checkpoint)
    trainer.save_model(args.output_dir)
    if trainer.accelerator.is_main_process:
        steps = counted(trainer.state.global_step, "step")
        text = f"Trained {steps}. Model and {RESOLVED_CONFIG}: {args.output_dir}"
        Console(highlight=False).print(text, markup=False, soft_wrap=True)
    if args.push_to_hub:
        trainer.push_to_hub(dataset_name=arguments.dataset_name)
    trainer.accelerator.end_training()


def show_help(
    parser: RecipeParser, argv: Sequence[str], *, intro: str, groups: Sequence[tuple[str, type, Sequence[str]]]
) -> bool:
    """
    Answer `--help` with the fields that matter first, and `--help_all` with every field.

    Args:
        parser ([`RecipeParser`]):
            The command's parser.
        argv (`Sequence[str]`):
            Command line.
        intro (`str`):
            What the command does, with examples.
        groups (`Sequence[tuple[str, type, Sequence[str]]]`):
            Title, dataclass and field names of each table.

    Returns:
        `bool`:
            Whether help was asked for.
    """
    asked = [token for token in argv if token in HELP_FLAGS]
    if not asked:
        return False
    if asked[0] in ("--help_all", "--help-all"):
        parser.print_help()
        return True
    console = Console(highlight=False)
    console.print(intro.strip(), markup=False, soft_wrap=True)
    console.print()
    for title, kind, names in groups:
        show_fields(console, title, [(kind, name) for name in names])
    if sum(len(names) for *_, names in groups) < len(parser.hints):
        console.print(
            f"All {len(parser.hints)} fields, those of TRL and Transformers included: {parser.prog} --help_all"
        )
    return True


def is_main_process() -> bool:
    """Whether this process should print; known before any process group exists."""
    return os.environ.get("RANK", "0") == "0"


def short(number: int) -> str:
    """A number of parameters: `8.0 B`."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "k")):
        if number >= size:
            return f"{number / size:.1f} {letter}"
    return str(number)
