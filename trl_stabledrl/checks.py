# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is loaded."""

import json
from collections.abc import Iterable
from difflib import get_close_matches
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset, IterableDataset
from transformers.trainer_utils import get_last_checkpoint


def check_choice(name: str, value: Any, choices: Any) -> None:
    """Raise unless `value` is None or one of the strings of a `Literal`."""
    if value is not None and value not in get_args(choices):
        raise ValueError(f"{name}={value!r} is not known. Use one of {', '.join(map(repr, get_args(choices)))}.")


def unknown_key(key: str, known: Iterable[str]) -> str:
    """Message for a key that nobody reads, with the nearest known one."""
    nearest = get_close_matches(key, list(known), n=1, cutoff=0.0)
    return f"Unknown key '{key}'. The nearest known one is '{nearest[0]}'." if nearest else f"Unknown key '{key}'."


def check_dataset(name: str, dataset: Any, *, columns: tuple[str, ...] = ("prompt",)) -> None:
    """Raise unless `dataset` is a dataset with rows and the given columns."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        raise ValueError(
            f"{name} is {'missing' if dataset is None else f'a {type(dataset).__name__}'}. Pass a datasets.Dataset "
            f"with the columns {', '.join(columns)}."
        )
    if isinstance(dataset, Dataset) and len(dataset) == 0:
        raise ValueError(f"{name} is empty: it has 0 rows. Pass at least one prompt.")
    found = dataset.column_names
    if found is None:  # a stream whose columns are only known once it is read
        return
    for column in columns:
        if column not in found:
            raise ValueError(
                f"{name} has no column '{column}', only {', '.join(found) or 'none'}. Rename the column that holds "
                f"it: dataset.rename_column(old, '{column}')."
            )


def check_datasets(train_dataset: Any, eval_dataset: Any, *, columns: tuple[str, ...]) -> None:
    """[`check_dataset`] of both, the latter if there is one."""
    check_dataset("train_dataset", train_dataset, columns=columns)
    for part in eval_dataset.values() if isinstance(eval_dataset, dict) else [eval_dataset]:
        if part is not None:
            check_dataset("eval_dataset", part, columns=columns)


def check_num_prompts(train_dataset: Any, args: Any) -> None:
    """Raise where the rows do not make one generation: TRL leaves an incomplete one out, and would train nothing."""
    needed = args.generation_batch_size // args.num_generations
    if isinstance(train_dataset, Dataset) and len(train_dataset) < needed:
        raise ValueError(
            f"train_dataset has {len(train_dataset)} prompts, fewer than a generation takes: generation_batch_size / "
            f"num_generations = {args.generation_batch_size} / {args.num_generations} = {needed}. Add prompts, or "
            "lower per_device_train_batch_size, steps_per_generation or gradient_accumulation_steps."
        )


def check_args(args: Any, config_class: type, *, trainer: str) -> None:
    """Raise unless `args` is the trainer's own configuration."""
    if not isinstance(args, config_class):
        raise TypeError(
            f"args is a {type(args).__name__}, but {trainer} needs a {config_class.__name__}: it takes every option "
            f"of {config_class.__mro__[1].__name__} that a diffusion model can honour, and refuses the others by name."
        )


def check_reference_path(model: Any) -> None:
    """Raise where TRL could not load the reference: it reads it from the path the policy was loaded from."""
    if not model.config.name_or_path:
        raise ValueError(
            "beta is above 0, so a reference model is needed, and it is loaded from the path the model came from; "
            "this model was built in memory and has none. Save it and pass the folder as model=, train with "
            "peft_config (the reference is then the model without the adapter), or set beta=0."
        )


def _init_kwargs(model_init_kwargs: dict[str, Any] | str | None) -> dict[str, Any]:
    """A string is JSON, as on the command line."""
    values = json.loads(model_init_kwargs) if isinstance(model_init_kwargs, str) else model_init_kwargs
    return dict(values or {})


def revision_of(model_init_kwargs: dict[str, Any] | str | None) -> str | None:
    """The hub revision that a config asks for."""
    return _init_kwargs(model_init_kwargs).get("revision")


def with_flex_attention(model_init_kwargs: dict[str, Any] | str | None) -> dict[str, Any]:
    """
    Load with FlexAttention where there is a GPU and nothing else was asked for: it skips what a staircase masks out,
    and needs no mask of the sequence's length squared. On a CPU it has no backward pass.
    """
    values = _init_kwargs(model_init_kwargs)
    if torch.cuda.is_available() and values.get("attn_implementation") is None:
        values["attn_implementation"] = "flex_attention"
    return values


def default_bf16(bf16: bool | None, *, use_cpu: bool) -> bool | None:
    """TRL's default is bf16, which Transformers refuses where there is no accelerator: float32 there."""
    return False if bf16 is None and (use_cpu or not torch.accelerator.is_available()) else bf16


def resume_request(value: str | bool | None) -> str | bool | None:
    """`resume_from_checkpoint` as flags and YAML give it: "true" and "false" are no folders."""
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    return value


def check_output_dir(output_dir: str | None, resume_from_checkpoint: str | bool | None) -> None:
    """Raise where `output_dir` holds checkpoints of a run that this one does not continue."""
    if resume_from_checkpoint or output_dir is None or not Path(output_dir).is_dir():
        return
    last = get_last_checkpoint(output_dir)
    if last is not None:
        raise ValueError(
            f"output_dir={output_dir!r} already holds a checkpoint, {Path(last).name}, and resume_from_checkpoint is "
            "not set. Nothing was touched. Pass resume_from_checkpoint=true to continue that run, or choose another "
            "output_dir."
        )
