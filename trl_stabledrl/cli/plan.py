# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The memory plan of a recipe, and what has to fit together for it, without weights or data."""

import json
import math
import os
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import yaml
from accelerate.commands.config.config_args import default_config_file
from rich.console import Console
from rich.table import Table
from rich.text import Text
from transformers import PreTrainedConfig
from trl import DatasetMixtureConfig, ModelConfig, get_peft_config

from ..memory import (
    PHASES,
    EngineMemory,
    MemoryPlan,
    Phase,
    Sharding,
    Workload,
    memory_plan,
    model_shape,
    workload_of,
)
from ..models.adapters import Adapter, checked_peft_config
from ..models.bidirectional import ATTENTION, BLOCK_ATTENTION
from ..models.families import Family, family_of
from ..stabledrl_config import StableDRLConfig
from .console import UserError, blamed_on, checking, counted, show_facts
from .job import Model, check_quantization, read_config, short
from .launch import find_accelerate_config, launch_names
from .parser import ACCELERATE_CONFIG, RecipeParser, find_recipe, read_recipe
from .train import TrainArguments, make_parser

PROG = "trl-stabledrl env"
PROMPT_LENGTH = 512
GPU_MEMORY_GB = 80.0
GB = 10**9
# share of a device's memory above which the driver and the allocator's gaps may not find room
_TIGHT = 0.93


@dataclass(frozen=True)
class Launch:
    """How a run would be started: a part of accelerate's configuration."""

    sharding: Sharding
    on_cpu: bool = False
    notes: tuple[str, ...] = ()

    @property
    def description(self) -> str:
        names = {"none": "one process", "ddp": "a whole copy each", "fsdp2": "FSDP2"}
        kind = names.get(self.sharding.backend, f"DeepSpeed ZeRO-{self.sharding.backend[-1]}")
        if self.sharding.offloads_parameters:
            kind += ", parameters and optimizer on the host"
        elif self.sharding.offloads_optimizer:
            kind += ", optimizer on the host"
        if self.sharding.backend != "none":
            kind = f"{counted(self.sharding.num_processes, 'process', 'processes')}, {kind}"
        return kind + (", on the CPU" if self.on_cpu else "")


def launch_of(config: Mapping[str, Any]) -> Launch:
    """
    Understand a configuration of accelerate.

    Args:
        config (`Mapping[str, Any]`):
            As in its YAML files.

    Returns:
        [`Launch`]
    """
    num_processes = int(config.get("num_processes") or 1)
    kind = str(config.get("distributed_type") or ("NO" if num_processes == 1 else "MULTI_GPU")).upper()
    on_cpu = bool(config.get("use_cpu")) or kind == "MULTI_CPU"
    if kind == "DEEPSPEED":
        return Launch(_zero_sharding(config.get("deepspeed_config") or {}, num_processes), on_cpu)
    if kind == "FSDP":
        fsdp: Mapping[str, Any] = config.get("fsdp_config") or {}
        if on_cpu:
            note = "On a CPU accelerate turns FSDP into copies of the whole model on every process."
            return Launch(Sharding("ddp", num_processes), on_cpu, (note,))
        notes = ()
        if int(fsdp.get("fsdp_version") or 1) < 2:
            notes = ("FSDP 1 has not been tried with this package. Set fsdp_version: 2.",)
        is_offloaded = _is_true(fsdp.get("fsdp_offload_params"))
        sharding = Sharding("fsdp2", num_processes, offloads_optimizer=is_offloaded, offloads_parameters=is_offloaded)
        return Launch(sharding, on_cpu, notes)
    return Launch(Sharding("none" if num_processes == 1 else "ddp", num_processes), on_cpu)


def _zero_sharding(config: Mapping[str, Any], num_processes: int) -> Sharding:
    file = config.get("deepspeed_config_file")
    zero: dict[str, Any] = {
        "stage": config.get("zero_stage", 2),
        "offload_optimizer": {"device": config.get("offload_optimizer_device")},
        "offload_param": {"device": config.get("offload_param_device")},
    }
    if file not in (None, "none"):
        with blamed_on(f"deepspeed_config_file {file}", OSError, ValueError):
            zero |= json.loads(Path(str(file)).read_text()).get("zero_optimization", {})
    on_host = {
        name: str((zero.get(name) or {}).get("device") or "none") != "none"
        for name in ("offload_optimizer", "offload_param")
    }
    if str(zero["stage"]) not in ("0", "1", "2", "3"):
        raise UserError(f"zero_stage {zero['stage']} is not known. Use 0, 1, 2 or 3.")
    stage = int(zero["stage"])
    backend: Any = "ddp" if stage == 0 else f"zero{stage}"
    bucket = zero.get("reduce_bucket_size")
    return Sharding(
        backend,
        num_processes,
        offloads_optimizer=on_host["offload_optimizer"],
        offloads_parameters=on_host["offload_param"] and stage == 3,
        bucket_size=int(bucket) if isinstance(bucket, (int, float)) else Sharding.bucket_size,
    )


def _is_true(value: Any) -> bool:
    return str(value).lower() == "true"


def launch_from_options(options: Sequence[str]) -> Launch:
    """
    Read the options of the launcher, and the configuration file they name.

    Args:
        options (`Sequence[str]`):
            As `train` would pass them on.

    Returns:
        [`Launch`]
    """
    values: dict[str, str] = {}
    name = ""
    for token in options:
        if token.startswith("--"):
            name, equals, value = token.removeprefix("--").partition("=")
            name = name.replace("-", "_")
            values[name] = value if equals else "true"
        else:
            values[name] = token
    config: dict[str, Any] = {}
    path = default_config_file if Path(default_config_file).is_file() else None
    if ACCELERATE_CONFIG in values:
        path = find_accelerate_config(values[ACCELERATE_CONFIG])
    path = values.get("config_file", path)
    if path is not None:
        with blamed_on(str(path), OSError, yaml.YAMLError):
            config = yaml.safe_load(Path(path).read_text()) or {}
        if not isinstance(config, dict):
            raise UserError(f"{path} is no accelerate configuration: it holds a {type(config).__name__}, not keys.")
    config |= {name: values[name] for name in ("num_processes", "use_cpu", "cpu") if name in values}
    config["use_cpu"] = _is_true(config.pop("cpu", config.get("use_cpu")))
    if path is None and "num_processes" not in config and not config["use_cpu"]:
        config["num_processes"] = max(1, torch.cuda.device_count())  # as the launcher would
    num_processes = 1 if config.get("num_processes") is None else config["num_processes"]
    if not str(num_processes).isdigit() or int(num_processes) < 1:
        raise UserError(f"num_processes {num_processes}: a whole number of at least 1 is needed.")
    if _is_true(values.get("use_deepspeed")):
        config["distributed_type"] = "DEEPSPEED"
    if _is_true(values.get("use_fsdp")):
        config["distributed_type"] = "FSDP"
    for section, prefixes in (
        ("deepspeed_config", ("zero_", "offload_", "deepspeed_config")),
        ("fsdp_config", "fsdp_"),
    ):
        found = {name: value for name, value in values.items() if name.startswith(prefixes)}
        config[section] = {**(config.get(section) or {}), **found}
    return launch_of(config)


def launch_from_environment(num_processes: int) -> Launch:
    """
    How the launcher of this process was configured.

    Args:
        num_processes (`int`):
            Processes of the run.

    Returns:
        [`Launch`]
    """
    env = os.environ
    config: dict[str, Any] = {"num_processes": num_processes, "use_cpu": _is_true(env.get("ACCELERATE_USE_CPU"))}
    if _is_true(env.get("ACCELERATE_USE_DEEPSPEED")):
        config["distributed_type"] = "DEEPSPEED"
        names = ("zero_stage", "offload_optimizer_device", "offload_param_device")
        found = {name: env.get(f"ACCELERATE_DEEPSPEED_{name.upper()}") for name in names}
        found["deepspeed_config_file"] = env.get("ACCELERATE_DEEPSPEED_CONFIG_FILE")
        config["deepspeed_config"] = {name: value for name, value in found.items() if value is not None}
    elif _is_true(env.get("ACCELERATE_USE_FSDP")):
        config["distributed_type"] = "FSDP"
        names = ("fsdp_version", "fsdp_offload_params")
        config["fsdp_config"] = {name: env.get(name.upper()) for name in names}
    return launch_of(config)


def _planned_config(num_processes: int) -> type[StableDRLConfig]:
    """The configuration as a process of a run of so many would see it, though none of them exists."""

    @dataclass
    class StableDRLConfigOfARun(StableDRLConfig):
        __doc__ = StableDRLConfig.__doc__

        @property
        def world_size(self) -> int:
            return num_processes

        def _check_group_size(self) -> None:
            with _announced(num_processes):
                super()._check_group_size()

        def _check_rollout_backend(self) -> None:
            with _announced(num_processes):
                super()._check_rollout_backend()

    return StableDRLConfigOfARun


@contextmanager
def _announced(num_processes: int) -> Iterator[None]:
    before = os.environ.get("WORLD_SIZE")
    os.environ["WORLD_SIZE"] = str(num_processes)
    try:
        yield
    finally:
        if before is None:
            del os.environ["WORLD_SIZE"]
        else:
            os.environ["WORLD_SIZE"] = before


@dataclass(frozen=True)
class Planned:
    """A recipe, checked, with its memory."""

    facts: list[tuple[str, str]]
    plan: MemoryPlan
    launch: Launch
    notes: tuple[str, ...]
    engine: tuple[str, ...] = ()
    engine_fits: bool = True


def plan_of(
    args: Any,
    model_args: ModelConfig,
    *,
    config: PreTrainedConfig,
    family: Family,
    peft_config: Any,
    launch: Launch,
    bf16: bool,
    prompt_length: int = PROMPT_LENGTH,
    gpu_memory_gb: float | None = None,
) -> Planned:
    """
    Plan the memory of a run, and check what goes with what.

    Args:
        args ([`StableDRLConfig`]):
            Resolved configuration.
        model_args ([`~trl.ModelConfig`]):
            Names the model.
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        family ([`Family`]):
            Its family.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Of the adapter that is trained.
        launch ([`Launch`]):
            How the run is started.
        bf16 (`bool`):
            Whether it runs under mixed precision.
        prompt_length (`int`, *optional*, defaults to 512):
            Tokens of the longest prompt.
        gpu_memory_gb (`float`, *optional*):
            Memory of a GPU; the visible device's, or 80, by default.

    Returns:
        [`Planned`]
    """
    gb = capacity(launch, gpu_memory_gb)
    init: dict[str, Any] = {"dtype": model_args.dtype, "attn_implementation": model_args.attn_implementation}
    given = args.model_init_kwargs or {}
    init |= json.loads(given) if isinstance(given, str) else given
    attention = init["attn_implementation"]
    if attention is None:
        attention = "flex_attention" if family.attention == "block" and not launch.on_cpu else "sdpa"
    _check_attention(attention, family, on_cpu=launch.on_cpu)
    dtype = config.dtype if init["dtype"] in ("auto", None) else init["dtype"]
    parameter_bytes = 2 if str(dtype).removeprefix("torch.") in ("bfloat16", "float16") else 4
    work = workload_of(
        args,
        is_adapter=peft_config is not None,
        prompt_length=prompt_length,
        parameter_bytes=parameter_bytes,
        compute_bytes=2 if bf16 or args.fp16 else parameter_bytes,
        attention=attention,
        quantized_bits=4 if model_args.load_in_4bit else 8 if model_args.load_in_8bit else 0,
        on_cpu=launch.on_cpu,
        gpu_bytes=None if gb is None else int(gb * GB),
    )
    shape = model_shape(config, peft_config)
    notes = [*launch.notes]
    limit = config.to_dict().get("max_position_embeddings")
    if limit is not None and prompt_length + work.window_length > limit:
        notes.append(
            f"prompt_length + max_completion_length = {prompt_length + work.window_length} positions, but the model "
            f"was trained for max_position_embeddings={limit}."
        )
    engine, engine_fits = [], True
    plan = memory_plan(shape, work, launch.sharding)
    if plan.engine is not None:
        context = args.vllm_max_model_length or limit or prompt_length + work.window_length
        if gb is None:
            notes.append("vLLM's memory on a CPU is not counted.")
        else:
            engine, engine_fits = _engine_lines(plan.engine, work, context, gb)
        if prompt_length + work.window_length > context:
            notes.append(
                f"A prompt of {prompt_length} tokens and its completion do not fit into vllm_max_model_length="
                f"{context}: it would stop the run. Set {prompt_length + work.window_length} or more."
            )
    if work.quantized_bits and launch.sharding.shards_parameters:
        notes.append(
            f"Quantised weights under {launch.sharding.backend} have not been tried with this package: a copy on each "
            "GPU (ddp) has."
        )
    tokens = f"{prompt_length} + {work.window_length}"
    if work.is_staircase:
        tokens += (
            f", scored as {work.num_clean} clean and {work.num_draws} x {work.num_noised // work.num_draws} noised"
        )
    elif work.num_draws > 1:
        tokens += f", {work.num_draws} draws in one graph"
    trained = "all of them trained" if peft_config is None else f"{short(shape.num_trained)} trained"
    facts = [
        ("model", f"{family.name}, {short(shape.num_parameters)} parameters, {trained}"),
        ("launch", launch.description),
        ("precision", f"weights {8 * parameter_bytes} bit, passes {8 * work.compute_bytes} bit, {attention}"),
        ("rows", f"{work.num_rows} per pass and process, {work.num_rollout_rows} per rollout and process"),
        ("tokens", f"{tokens} (the prompt is assumed: --prompt_length)"),
    ]
    return Planned(facts, plan, launch, tuple(notes), tuple(engine), engine_fits)


def _engine_lines(engine: EngineMemory, work: Workload, context: int, gb: float) -> tuple[list[str], bool]:
    """What vLLM's share holds, in sentences, and whether it would start with it."""
    assert work.vllm is not None
    left = engine.num_bytes - engine.weight_bytes
    share = f"vLLM's share: {_gb(engine.num_bytes)} GB, of which {_gb(engine.weight_bytes)} are weights."
    needed = engine.weight_bytes + context * engine.token_bytes
    if engine.num_bytes < needed:
        what = "its weights" if left < 0 else f"one sequence of the {context} tokens that it may have"
        remedy = f"vllm_gpu_memory_utilization of {math.ceil(100 * needed / (gb * GB)) / 100:g} or more"
        remedy += ", or a higher vllm_tensor_parallel_size" if left < 0 else ", or a lower vllm_max_model_length"
        return [f"{share} There is no room for {what}. Remedy: {remedy}."], False
    length = work.prompt_length + work.window_length
    num_sequences, num_rows = engine.num_sequences(length), work.num_rollout_rows * work.vllm.num_shards
    waits = ", some of which wait" if num_rows > num_sequences else ""
    room = f"hold {num_sequences} sequences of {length} tokens at most"
    line = f"{share} The other {_gb(left)}, less work space and graphs, {room}; a rollout has {num_rows}{waits}."
    return [line], True


def _check_attention(attention: str, family: Family, *, on_cpu: bool) -> None:
    if attention not in ATTENTION and "/" not in attention:  # which names a kernel on the Hub
        raise UserError(
            f"attn_implementation={attention!r} is not known. Use one of {', '.join(map(repr, ATTENTION))}."
        )
    if family.attention == "block" and attention not in BLOCK_ATTENTION:
        raise UserError(
            f"attn_implementation={attention!r} cannot attend by blocks, as {family.name} does. Use "
            f"{', '.join(map(repr, BLOCK_ATTENTION))}."
        )
    if attention == "flex_attention" and on_cpu:
        raise UserError(
            "attn_implementation='flex_attention' has no backward pass on a CPU. Use 'sdpa', or leave it out."
        )


def plan_recipe(
    recipe: str,
    flags: Sequence[str],
    *,
    prompt_length: int = PROMPT_LENGTH,
    gpu_memory_gb: float | None = None,
) -> Planned:
    """
    Check a recipe for a number of processes, and plan its memory.

    Args:
        recipe (`str`):
            Path, or name of a recipe that ships with the package.
        flags (`Sequence[str]`):
            Options of `train` that override it, those of the launcher included.
        prompt_length (`int`, *optional*, defaults to 512):
            Tokens of the longest prompt.
        gpu_memory_gb (`float`, *optional*):
            Memory of a GPU; the visible device's, or 80, by default.

    Returns:
        [`Planned`]
    """
    if prompt_length < 0:
        raise UserError(f"--prompt_length {prompt_length} must be 0 or above.")
    path = find_recipe(recipe)
    own, launch_args = make_parser().split([*flags, "--config", str(path)])
    launch = launch_from_options(launch_args)
    types = (TrainArguments, _planned_config(launch.sharding.num_processes), ModelConfig, DatasetMixtureConfig)
    parser = RecipeParser(types, prog=PROG, launch_names=launch_names)
    on_cpu = launch.on_cpu or _is_true(_value_of("use_cpu", own, read_recipe(path)))
    with checking():
        # a machine without a GPU refuses bf16, unless it is told to stay on the CPU
        _, args, model_args, _ = parser.parse([*own, "--use_cpu", "true"])
        path = model_args.model_name_or_path
        if not path:
            raise UserError("model_name_or_path is missing: name a checkpoint, such as GSAI-ML/LLaDA-8B-Instruct.")
        config, adapter = read_config(path, revision=model_args.model_revision)
        check_quantization(model_args, adapter, needs_library=False)
        family = family_of(config)
        asked = get_peft_config(model_args)
        peft_config = checked_peft_config(asked, adapter=None, family=family, config=config)
        if adapter is not None and asked is None:
            peft_config = _peft_config_of(adapter)
        args.resolve(family)
        bf16 = parser.parsed["bf16"]  # of the recipe: `args` has it for this machine
        return plan_of(
            args,
            model_args,
            config=config,
            family=family,
            peft_config=peft_config,
            launch=replace(launch, on_cpu=on_cpu),
            bf16=not (args.fp16 or on_cpu) if bf16 is None else bf16,
            prompt_length=prompt_length,
            gpu_memory_gb=gpu_memory_gb,
        )


def _value_of(name: str, flags: Sequence[str], recipe: Mapping[str, Any]) -> Any:
    """Value of a boolean option, by its flag or else the recipe."""
    value = recipe.get(name)
    for token, following in zip(flags, [*flags[1:], "--"], strict=True):
        flag, equals, text = token.partition("=")
        if flag == f"--{name}":
            value = text if equals else "true" if following.startswith("--") else following
    return value


def show_plan(recipe: str, flags: Sequence[str], *, prompt_length: int, gpu_memory_gb: float | None) -> int:
    """
    Print the memory plan of a recipe.

    Args:
        recipe (`str`):
            Path or name.
        flags (`Sequence[str]`):
            Options of `train` that override it.
        prompt_length (`int`):
            Tokens of the longest prompt.
        gpu_memory_gb (`float`, *optional*):
            Memory of a GPU; the visible device's, or 80, by default.

    Returns:
        `int`:
            1 where it does not fit, else 0.
    """
    planned = plan_recipe(recipe, flags, prompt_length=prompt_length, gpu_memory_gb=gpu_memory_gb)
    show_facts(f"Memory plan of {recipe}", planned.facts)
    console = Console(highlight=False, width=min(Console().width, 80))
    console.print()
    console.print(_table(planned.plan))
    lines, fits = verdict(planned, capacity(planned.launch, gpu_memory_gb))
    console.print()
    for line in lines:
        console.print(Text(line))
    for note in planned.notes:
        console.print(Text(f"note: {note}"))
    return 0 if fits else 1


def capacity(launch: Launch, gpu_memory_gb: float | None) -> float | None:
    """GB of a process's device; None where a run on the CPU has no such limit."""
    if gpu_memory_gb is not None:
        if not 0 < gpu_memory_gb < float("inf"):
            raise UserError(f"--gpu_memory_gb {gpu_memory_gb:g} must be above 0.")
        return gpu_memory_gb
    if launch.on_cpu:
        return None
    if torch.cuda.is_available():
        return torch.cuda.get_device_properties(0).total_memory / GB
    return GPU_MEMORY_GB


def _table(plan: MemoryPlan) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0), header_style="bold")
    table.add_column("GB per process", overflow="fold")
    for phase in PHASES:
        table.add_column(phase, justify="right", no_wrap=True)
    for term in plan.terms:
        cells = [_gb(term.num_bytes[phase]) if term.num_bytes.get(phase) else "" for phase in PHASES]
        table.add_row(term.name, *cells)
    totals = [Text(_gb(plan.total(phase)), "bold green" if phase == plan.peak_phase else "bold") for phase in PHASES]
    table.add_row(Text("together", "bold"), *totals)
    return table


def _gb(num_bytes: int) -> str:
    value = num_bytes / GB
    return f"{value:.1f}" if value >= 9.95 else f"{value:.2f}" if value >= 0.01 else "0.00"


def verdict(planned: Planned, gb: float | None) -> tuple[list[str], bool]:
    """
    Say whether a plan fits, what takes most and what would help.

    Args:
        planned ([`Planned`]):
            The plan.
        gb (`float`, *optional*):
            Memory of the device in GB.

    Returns:
        `tuple[list[str], bool]`:
            Sentences, and whether it fits.
    """
    plan = planned.plan
    of = "" if gb is None else f" of {gb:g}" if gb == int(gb) else f" of {gb:.1f}"
    lines = [f"Peak: {_gb(plan.peak)}{of} GB, in {plan.peak_phase}."]
    too_full: list[Phase] = [] if gb is None else [phase for phase in PHASES if plan.total(phase) > gb * GB]
    if too_full or not planned.engine_fits:
        lines[0] += " It does not fit."
    elif gb is not None and plan.peak > _TIGHT * gb * GB:
        lines[0] += " It is tight: driver, libraries and gaps take 1 to 5 GB that are not counted."
    elif gb is not None:
        lines[0] += " It fits."
    for phase in too_full or [plan.peak_phase]:
        first, *others = plan.ranked(phase)[: 2 if too_full else 1]
        lines.append(f"Largest in {phase}: {first.name}, {_gb(first.num_bytes[phase])} GB. Remedy: {first.remedy}.")
        lines += [f"  then {term.name}, {_gb(term.num_bytes[phase])} GB. Remedy: {term.remedy}." for term in others]
    lines += planned.engine
    if plan.host_bytes:
        every = plan.host_bytes * planned.launch.sharding.num_processes
        lines.append(f"Host memory: {_gb(plan.host_bytes)} GB per process, {_gb(every)} GB for all of them.")
    return lines, not too_full and planned.engine_fits


def dry_run_facts(args: Any, model_args: ModelConfig, model: Model, peft_config: Any) -> list[tuple[str, str]]:
    """
    The memory plan in short, for the summary of a dry run in the processes that a run would have.

    Args:
        args ([`StableDRLConfig`]):
            Resolved configuration.
        model_args ([`~trl.ModelConfig`]):
            Names the model.
        model ([`~cli.job.Model`]):
            What is known of it.
        peft_config ([`~peft.PeftConfig`], *optional*):
            Of a new adapter.

    Returns:
        `list[tuple[str, str]]`:
            Names and values.
    """
    launch = launch_from_environment(args.world_size)
    planned = plan_of(
        args,
        model_args,
        config=model.config,
        family=model.family,
        peft_config=peft_config if model.adapter is None else _peft_config_of(model.adapter),
        launch=replace(launch, on_cpu=launch.on_cpu or args.use_cpu),
        bf16=bool(args.bf16),
    )
    lines, _ = verdict(planned, capacity(planned.launch, None))
    prompt = f"With prompts of {PROMPT_LENGTH} tokens; in full: {PROG} --recipe ..."
    return [("memory", " ".join(line.strip() for line in [*lines, *planned.notes, prompt]))]


def _peft_config_of(adapter: Adapter) -> Any:
    from peft import PeftConfig

    return PeftConfig.from_pretrained(adapter.path)
