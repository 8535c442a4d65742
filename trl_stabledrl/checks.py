# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What is looked at before anything is loaded."""

import json
import os
from collections.abc import Iterable
from difflib import get_close_matches
from importlib import metadata
from pathlib import Path
from typing import Any, get_args

import torch
from datasets import Dataset, IterableDataset
from packaging.version import Version
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


OLDEST, NEWEST = Version("0.28"), Version("0.31")

OWN_OPTIONS = {
    "model": "model_name_or_path",
    "tokenizer": "model_name_or_path",
    "tensor_parallel_size": "vllm_tensor_parallel_size",
    "gpu_memory_utilization": "vllm_gpu_memory_utilization",
    "max_model_len": "vllm_max_model_length",
    "enable_sleep_mode": "vllm_enable_sleep_mode",
    "model_impl": "vllm_model_impl",
}
"""Arguments of `vllm.LLM` that the trainer's configuration has options for."""

FIXED_ARGUMENTS = ("distributed_executor_backend", "seed", "quantization", "trust_remote_code", "scheduler_cls")
"""Arguments of `vllm.LLM` that must be what they are for the engine to live in the trainer."""


def installed_vllm() -> str | None:
    """Version of the installed vLLM, which is not imported."""
    try:
        return metadata.version("vllm")
    except metadata.PackageNotFoundError:
        return None


def check_vllm() -> None:
    """Raise unless a supported vLLM is installed."""
    version = installed_vllm()
    if version is None:
        raise ImportError(
            "rollout_backend='vllm' needs vLLM, which is not installed: pip install 'trl-stabledrl[vllm]'. Or set "
            "rollout_backend='transformers'."
        )
    found = Version(version)
    if not OLDEST <= Version(f"{found.major}.{found.minor}") <= NEWEST:
        raise ImportError(
            f"rollout_backend='vllm' works with vLLM {OLDEST} to {NEWEST}, found {found}: pip install "
            "'trl-stabledrl[vllm]'. Or set rollout_backend='transformers'."
        )


def check_engine_kwargs(engine_kwargs: dict[str, Any]) -> None:
    """Raise where arguments of `vllm.LLM` have an option of their own, or cannot be chosen."""
    for name in engine_kwargs:
        if name in OWN_OPTIONS:
            raise ValueError(f"vllm_engine_kwargs has {name!r}, which is set by {OWN_OPTIONS[name]}. Use that.")
        if name in FIXED_ARGUMENTS:
            raise ValueError(f"vllm_engine_kwargs has {name!r}, which the trainer decides. Leave it out.")


def check_vllm_rollouts(model: Any, config: Any, args: Any, *, has_adapter: bool, is_quantized: bool) -> None:
    """Raise where vLLM cannot decode for this run: nothing of it is imported, and no weight is loaded."""
    check_vllm()
    if not (model if isinstance(model, str) else config.name_or_path):
        raise ValueError(
            "rollout_backend='vllm' reads the configuration from the path that the model came from; this "
            "model was built in memory and has none. Save it and pass the folder as model=, or set "
            "rollout_backend='transformers'."
        )
    if is_quantized or getattr(config, "quantization_config", None) is not None:
        raise ValueError(
            "rollout_backend='vllm' cannot be given the weights of a quantized model (QLoRA). Set "
            "rollout_backend='transformers', or train LoRA on the plain weights."
        )
    if has_adapter and (args.fsdp or os.environ.get("ACCELERATE_USE_FSDP", "").lower() in ("true", "1")):
        raise ValueError(
            "rollout_backend='vllm' with LoRA under FSDP: merging sharded weights would not leave them as they were. "
            "Use DeepSpeed ZeRO or DDP, train all parameters, or set rollout_backend='transformers'."
        )
    positions = getattr(config, "max_position_embeddings", None)
    if args.vllm_max_model_length is not None and args.vllm_max_model_length <= args.max_completion_length:
        raise ValueError(
            f"vllm_max_model_length={args.vllm_max_model_length} holds prompt and completion, but "
            f"max_completion_length is {args.max_completion_length} already. Raise it by the longest prompt's tokens."
        )
    if args.vllm_max_model_length is not None and positions and args.vllm_max_model_length > positions:
        raise ValueError(
            f"vllm_max_model_length={args.vllm_max_model_length} is more than the model's {positions} positions. "
            f"Use at most {positions}."
        )
