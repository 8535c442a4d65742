# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
How much memory a run will take, as arithmetic: shapes come from a model's configuration, the rest from settings.

Axis letters: see `core/__init__.py`; `D` width, `F` width of the feed-forward layers, `H` heads, `L` positions of a
sequence. GB are 10^9 bytes. What the device's driver, its libraries and the allocator's gaps take is not counted.
"""

import copy
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal, get_args

from transformers import AutoModelForCausalLM, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer
from transformers.training_args import OptimizerNames

from ._compat import TILE_NUMBERS, shapes_only
from .core.peers import OBJECTIVES

Phase = Literal["rollout", "scoring", "backward", "update"]
PHASES: tuple[Phase, ...] = get_args(Phase)
Backend = Literal["none", "ddp", "zero1", "zero2", "zero3", "fsdp2"]

FORWARDS: tuple[Phase, ...] = ("rollout", "scoring", "backward")
PASSES: tuple[Phase, ...] = ("scoring", "backward")

# bytes of optimizer state per trained number: as many copies in the dtype of what is trained, or so many bytes
_STATES = {"sgd": 0, "adafactor": 0, "lion_32bit": 1, "adagrad": 1, "rmsprop": 1}
_BYTES = {"adamw_bnb_8bit": 2, "adamw_8bit": 2, "paged_adamw_8bit": 2, "adamw_torch_8bit": 2, "adamw_torch_4bit": 1}
_SAMPLED_LOGITS = 64 * 126_464  # held at once by the samplers
_TILE_ROWS = 4096  # positions of a tile of TRL's kernel
_LIVE_PARAMETERS = 10**9  # DeepSpeed's stage3_max_live_parameters and sub_group_size


@dataclass(frozen=True)
class ModelShape:
    """
    What of a model decides its memory.

    Attributes:
        vocab_size (`int`):
            `V`.
        hidden_size (`int`):
            `D`.
        intermediate_size (`int`):
            `F`.
        num_layers (`int`):
            Decoder layers.
        num_heads (`int`):
            `H`.
        num_kv_heads (`int`):
            Heads of keys and values.
        head_dim (`int`):
            Width of a head.
        has_head_norms (`bool`):
            Whether queries and keys are normalised head by head.
        num_parameters (`int`):
            Numbers of the model without adapter; tied ones once.
        num_layer_parameters (`int`):
            Those of one layer.
        largest_parameter (`int`):
            Those of the largest matrix.
        num_trained (`int`):
            Numbers that the optimizer changes: all, or those of the adapter.
        has_adapter (`bool`):
            Whether the model itself is frozen.
        adapted (`tuple[str, ...]`):
            Modules of a layer with an adapter, such as `q_proj`.
        adapter_rank (`int`):
            Rank of the adapter.
    """

    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    has_head_norms: bool
    num_parameters: int
    num_layer_parameters: int
    largest_parameter: int
    num_trained: int
    has_adapter: bool = False
    adapted: tuple[str, ...] = ()
    adapter_rank: int = 0

    @property
    def query_size(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_size(self) -> int:
        return self.num_kv_heads * self.head_dim

    @property
    def head_size(self) -> int:
        return self.vocab_size * self.hidden_size


def model_shape(config: PreTrainedConfig, peft_config: Any = None) -> ModelShape:
    """
    Count a model's parameters and those of its adapter, without a weight.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        peft_config ([`~peft.PeftConfig`], *optional*):
            The adapter's.

    Returns:
        [`ModelShape`]
    """
    fields = config.to_dict()
    with shapes_only():
        model: Any = AutoModelForCausalLM.from_config(config)
        layers = [module for module in model.modules() if isinstance(module, GradientCheckpointingLayer)]
        sizes = [parameter.numel() for parameter in model.parameters()]
        num_layer_parameters = sum(parameter.numel() for parameter in layers[0].parameters())
        num_trained, adapted = sum(sizes), ()
        if peft_config is not None:
            num_trained, adapted = _adapter_shape(model, peft_config)
    return ModelShape(
        vocab_size=fields["vocab_size"],
        hidden_size=fields["hidden_size"],
        intermediate_size=fields["intermediate_size"],
        num_layers=len(layers),
        num_heads=fields["num_attention_heads"],
        num_kv_heads=fields["num_key_value_heads"] or fields["num_attention_heads"],
        head_dim=fields.get("head_dim") or fields["hidden_size"] // fields["num_attention_heads"],
        has_head_norms=any(name.endswith("q_norm.weight") for name, _ in layers[0].named_parameters()),
        num_parameters=sum(sizes),
        num_layer_parameters=num_layer_parameters,
        largest_parameter=max(sizes),
        num_trained=num_trained,
        has_adapter=peft_config is not None,
        adapted=adapted,
        adapter_rank=0 if peft_config is None else vars(peft_config).get("r") or 0,
    )


def _adapter_shape(model: Any, peft_config: Any) -> tuple[int, tuple[str, ...]]:
    from peft import get_peft_model
    from peft.tuners.tuners_utils import BaseTunerLayer

    blank = copy.deepcopy(peft_config)
    if "init_lora_weights" in vars(blank):  # some ways to initialise need the model's weights
        vars(blank)["init_lora_weights"] = False
    vars(blank)["inference_mode"] = False  # as an adapter on disk says of itself
    model = get_peft_model(model, blank)
    num_trained = sum(parameter.numel() for parameter in model.parameters() if parameter.requires_grad)
    names = {name.rpartition(".")[2] for name, module in model.named_modules() if isinstance(module, BaseTunerLayer)}
    return num_trained, tuple(sorted(names))


@dataclass(frozen=True)
class Sharding:
    """
    What is spread over processes, and how.

    Attributes:
        backend (`str`, defaults to `"none"`):
            `"none"` for one process, `"ddp"`, `"zero1"`, `"zero2"`, `"zero3"` or `"fsdp2"`.
        num_processes (`int`, defaults to `1`):
            Processes of the run.
        offloads_optimizer (`bool`, defaults to `False`):
            Whether optimizer states, and DeepSpeed's float32 copy, are in the host's memory.
        offloads_parameters (`bool`, defaults to `False`):
            Whether the parameters are there too.
        bucket_size (`int`, defaults to 5e8):
            DeepSpeed's `reduce_bucket_size`, in numbers.
    """

    backend: Backend = "none"
    num_processes: int = 1
    offloads_optimizer: bool = False
    offloads_parameters: bool = False
    bucket_size: int = 5 * 10**8

    @property
    def is_zero(self) -> bool:
        return self.backend.startswith("zero")

    @property
    def shards_parameters(self) -> bool:
        return self.backend in ("zero3", "fsdp2")

    @property
    def parameter_share(self) -> int:
        """In how many parts the parameters are."""
        return self.num_processes if self.shards_parameters else 1

    @property
    def state_share(self) -> int:
        """In how many parts the optimizer's states are."""
        return self.num_processes if self.is_zero or self.backend == "fsdp2" else 1


@dataclass(frozen=True)
class EngineShare:
    """
    What vLLM is given of a device on which a run trains too.

    Attributes:
        num_bytes (`int`):
            What it may take: weights, cache, work space and graphs.
        num_shards (`int`, defaults to `1`):
            Processes that share one copy of the weights.
        sleeps (`bool`, defaults to `False`):
            Whether it gives the memory back between rollouts.
        is_compared (`bool`, defaults to `True`):
            Whether the trained model decodes beside it once, to be compared.
    """

    num_bytes: int
    num_shards: int = 1
    sleeps: bool = False
    is_compared: bool = True


@dataclass(frozen=True)
class Workload:
    """
    What a process computes at once, and in which precision.

    Attributes:
        num_rows (`int`):
            Rows of a micro-step.
        num_rollout_rows (`int`):
            Rows that a rollout decodes together.
        num_prompts (`int`):
            Distinct prompts among them.
        prompt_length (`int`):
            `P`, of the longest prompt.
        window_length (`int`):
            `W`, the most tokens of a completion.
        block_length (`int`):
            Tokens per block of the decoder.
        num_draws (`int`):
            Draws whose graphs are alive together; with a staircase all of them.
        is_staircase (`bool`):
            Whether rows are scored by block diffusion's staircase, and decoded with a cache.
        parameter_bytes (`int`):
            Bytes per number of the weights as they are loaded: 2 or 4.
        compute_bytes (`int`):
            Bytes per number in a forward pass: 2 under bf16 or fp16, else those of the weights.
        checkpoints (`bool`):
            Gradient checkpointing.
        attention (`str`):
            Attention implementation of the training passes.
        optimizer (`str`, defaults to `"adamw_torch"`):
            `optim`.
        accumulates (`bool`, defaults to `True`):
            Whether an optimizer step has several backward passes, so that all but the first find gradients there.
        keeps_gradients (`bool`, defaults to `False`):
            Whether rollouts happen inside an optimizer step.
        has_reference (`bool`, defaults to `False`):
            Whether a frozen copy of the model is loaded.
        gathers_for_generation (`bool`, defaults to `True`):
            `ds3_gather_for_generation`.
        detaches_context (`bool`, defaults to `False`):
            Whether the staircase's clean tokens are run without a graph.
        has_guidance (`bool`, defaults to `False`):
            Whether rollouts run each row twice.
        quantized_bits (`int`, defaults to `0`):
            4 or 8 where the layers' matrices are quantised.
        on_cpu (`bool`, defaults to `False`):
            Whether the run stays on the CPU, where some kernels make more copies.
        may_split_rollouts (`bool`, defaults to `True`):
            Whether an optimizer step may have several rollouts: with one inner iteration.
        vllm ([`EngineShare`], *optional*):
            Where vLLM decodes: its share. Else the trained model decodes.
    """

    num_rows: int
    num_rollout_rows: int
    num_prompts: int
    prompt_length: int
    window_length: int
    block_length: int
    num_draws: int
    is_staircase: bool
    parameter_bytes: int
    compute_bytes: int
    checkpoints: bool
    attention: str
    optimizer: str = "adamw_torch"
    accumulates: bool = True
    keeps_gradients: bool = False
    has_reference: bool = False
    gathers_for_generation: bool = True
    detaches_context: bool = False
    has_guidance: bool = False
    quantized_bits: int = 0
    on_cpu: bool = False
    may_split_rollouts: bool = True
    vllm: EngineShare | None = None

    @property
    def num_clean(self) -> int:
        """Positions of a row that are prompt or clean completion."""
        return self.prompt_length + self.window_length if self.is_staircase else self.prompt_length

    @property
    def num_noised(self) -> int:
        """Positions of a row that are noised copies."""
        if self.is_staircase:
            return self.num_draws * (self.block_length - 1 + self.window_length)
        return self.window_length

    @property
    def length(self) -> int:
        """Positions of a row in a training pass."""
        return self.num_clean + self.num_noised

    @property
    def num_scored(self) -> int:
        """Positions that pass the vocabulary projection together: all of a window, or the staircase's mean."""
        per_row = self.window_length
        if self.is_staircase:
            per_row = self.num_draws * self.window_length * (self.block_length + 1) // (2 * self.block_length)
        return self.num_rows * per_row


@dataclass(frozen=True)
class Term:
    """
    One thing that takes memory.

    Attributes:
        name (`str`):
            What it is.
        num_bytes (`dict[str, int]`):
            Bytes of one process in each phase that has it.
        remedy (`str`):
            What makes it smaller.
    """

    name: str
    num_bytes: Mapping[Phase, int]
    remedy: str


@dataclass(frozen=True)
class EngineMemory:
    """
    What is in vLLM's share of a device.

    Attributes:
        num_bytes (`int`):
            The share.
        weight_bytes (`int`):
            Its copy of the model's weights, or its part of one.
        token_bytes (`int`):
            Keys and values of a token.
    """

    num_bytes: int
    weight_bytes: int
    token_bytes: int

    def num_sequences(self, length: int) -> int:
        """How many sequences of a length the cache holds at most: work space and graphs are in the share too."""
        return max(0, self.num_bytes - self.weight_bytes) // (length * self.token_bytes)


@dataclass(frozen=True)
class MemoryPlan:
    """
    The memory of one process.

    Attributes:
        terms (`tuple[Term, ...]`):
            On the device.
        host_bytes (`int`):
            What offloading puts into the host's memory.
        engine ([`EngineMemory`], *optional*):
            What is in vLLM's share, where it decodes.
    """

    terms: tuple[Term, ...]
    host_bytes: int = 0
    engine: EngineMemory | None = None

    def total(self, phase: Phase) -> int:
        """Bytes alive together in a phase."""
        return sum(term.num_bytes.get(phase, 0) for term in self.terms)

    @property
    def peak_phase(self) -> Phase:
        return max(PHASES, key=self.total)

    @property
    def peak(self) -> int:
        return self.total(self.peak_phase)

    def ranked(self, phase: Phase) -> list[Term]:
        """Terms of a phase, the largest first."""
        found = [term for term in self.terms if term.num_bytes.get(phase, 0) > 0]
        return sorted(found, key=lambda term: -term.num_bytes[phase])


def memory_plan(shape: ModelShape, work: Workload, sharding: Sharding) -> MemoryPlan:
    """
    Add up the memory of one process.

    A phase is counted at its fullest moment: a rollout at its last block, a backward pass where the head's gradient
    is computed and every activation is still alive, an update inside the optimizer's step.

    Args:
        shape ([`ModelShape`]):
            The model.
        work ([`Workload`]):
            What is computed at once.
        sharding ([`Sharding`]):
            What is spread over processes.

    Returns:
        [`MemoryPlan`]
    """
    states, host_bytes = _states(shape, work, sharding)
    terms = [*states, *_gathered(shape, work, sharding), *_passes(shape, work, sharding), *_rollout(shape, work)]
    kept = tuple(term for term in terms if any(term.num_bytes.values()))
    return MemoryPlan(kept, host_bytes, None if work.vllm is None else _engine(shape, work, work.vllm))


def _everywhere(num_bytes: int) -> dict[Phase, int]:
    return dict.fromkeys(PHASES, num_bytes)


def trained_bytes(shape: ModelShape, work: Workload, sharding: Sharding) -> int:
    """Bytes per number of what the optimizer changes, as the backend holds it for a forward pass or its shards."""
    is_mixed = work.compute_bytes < 4
    if sharding.is_zero:
        return work.compute_bytes
    if sharding.backend == "fsdp2":  # accelerate turns trained weights to float32 under mixed precision
        return 4 if is_mixed else work.parameter_bytes
    if shape.has_adapter and not work.quantized_bits:  # PEFT makes new adapters float32, TRL those of QLoRA bfloat16
        return 4
    return 2 if shape.has_adapter else work.parameter_bytes


def _model_bytes(shape: ModelShape, work: Workload, number_bytes: int) -> int:
    """Bytes of a frozen or unquantised model."""
    if not work.quantized_bits:
        return shape.num_parameters * number_bytes
    # bitsandbytes leaves embedding, head and norms; a float32 scale per block of 64, or per row
    num_quantized = shape.num_layers * shape.num_layer_parameters
    scales = num_quantized // 16 if work.quantized_bits == 4 else 4 * num_quantized // shape.hidden_size
    return (shape.num_parameters - num_quantized) * number_bytes + num_quantized * work.quantized_bits // 8 + scales


def _states(shape: ModelShape, work: Workload, sharding: Sharding) -> tuple[list[Term], int]:
    """Parameters, gradients and optimizer states, and what of them is in the host's memory."""
    number_bytes = trained_bytes(shape, work, sharding)
    frozen_bytes = work.compute_bytes if sharding.is_zero else work.parameter_bytes
    trained, share = shape.num_trained, sharding.state_share
    adapter = trained * number_bytes if shape.has_adapter else 0
    model = _model_bytes(shape, work, frozen_bytes if shape.has_adapter else number_bytes)
    parameters = (model + adapter) // sharding.parameter_share
    master = 4 * trained // share if sharding.is_zero else 0
    state_bytes = 4 if sharding.is_zero else number_bytes
    states = _BYTES.get(work.optimizer, _STATES.get(work.optimizer, 2) * state_bytes) * trained // share

    gradients = trained * number_bytes // (share if sharding.backend in ("zero2", "zero3", "fsdp2") else 1)
    held: dict[Phase, int] = {"update": gradients}
    if work.accumulates or sharding.is_zero:
        held["backward"] = gradients
    if work.keeps_gradients or sharding.backend == "zero3":
        held |= {"rollout": gradients, "scoring": gradients}
    buckets = {"ddp": trained * number_bytes, "fsdp2": 0}.get(sharding.backend, 0)
    if sharding.is_zero:
        buckets = sharding.bucket_size * number_bytes
    bucket_phases = PHASES if sharding.backend in ("ddp", "zero3") else ("backward", "update")

    # what the optimizer's step makes: all square roots at once on a GPU, one parameter's on a CPU
    stepped = trained // share
    if sharding.backend == "zero3":
        stepped = min(stepped, _LIVE_PARAMETERS)
    step = 4 * stepped if sharding.is_zero else 0  # float32 gradients
    if sharding.offloads_optimizer:
        step = 0
    elif work.on_cpu and not sharding.is_zero:
        largest = shape.adapter_rank * shape.intermediate_size if shape.has_adapter else shape.largest_parameter
        step += 2 * number_bytes * min(largest, trained) // sharding.parameter_share
    elif work.optimizer != "adamw_torch_fused" and work.optimizer not in _BYTES:
        step += state_bytes * stepped

    host = 0
    if sharding.offloads_optimizer:
        # DeepSpeed 0.19's stage 3 keeps gradients beside the states that they update, and their float32 copies
        host += master + states + gradients + (4 * trained // share if sharding.is_zero else 0)
        master = states = 0
        held = {}
    if sharding.offloads_parameters:
        host += parameters
        parameters = 0
    reference = 0
    if work.has_reference:
        reference = shape.num_parameters * frozen_bytes // sharding.parameter_share

    smaller_states = (
        "lower lora_r" if shape.has_adapter else _SHARDED.get(sharding.backend, "more processes, or use_peft: true")
    )
    smaller_model = "--accelerate_config zero3, or load_in_4bit with use_peft"
    if sharding.shards_parameters:
        smaller_model = "more processes, or --accelerate_config zero3_offload"
    elif work.quantized_bits:
        smaller_model = "a smaller model"
    terms = [
        Term("parameters", _everywhere(parameters), smaller_model),
        Term("float32 copy of the parameters", _everywhere(master), smaller_states),
        Term(f"optimizer states ({work.optimizer})", _everywhere(states), smaller_states),
        Term("gradients", held, smaller_states),
        Term("buckets of gradients", dict.fromkeys(bucket_phases, buckets), "a smaller reduce_bucket_size"),
        Term("optimizer's work space", {"update": step}, "optim: adamw_torch_fused"),
        Term("reference model", _everywhere(reference), "beta: 0, or use_peft: true, which needs no second model"),
    ]
    return terms, host


_SHARDED = {
    "none": "several processes with --accelerate_config zero3, or use_peft: true",
    "ddp": "--accelerate_config zero3, or use_peft: true",
    "zero1": "--accelerate_config zero3, or use_peft: true",
    "zero2": "--accelerate_config zero3, or use_peft: true",
}


def _gathered(shape: ModelShape, work: Workload, sharding: Sharding) -> list[Term]:
    """Weights beyond those that a process holds: what it gathers, casts or dequantises for a pass."""
    e = work.compute_bytes
    model = shape.num_parameters + (shape.num_trained if shape.has_adapter else 0)
    if sharding.backend == "zero3":
        # DeepSpeed gathers ahead and keeps what is used again soon; the head is gathered apart
        live = min(model, max(_LIVE_PARAMETERS, shape.num_layer_parameters + shape.head_size)) * e
        in_rollout = model * e if work.gathers_for_generation else live
        return [
            Term(
                "gathered weights",
                {"rollout": _beside_engine(shape, work, in_rollout), "scoring": live, "backward": live},
                "ds3_gather_for_generation: false (slower rollouts)"
                if work.gathers_for_generation
                else "stage3_max_live_parameters in a DeepSpeed file",
            )
        ]
    if sharding.backend == "fsdp2":  # this layer and the next one; embedding and head stay
        live = min(model, 2 * shape.num_layer_parameters + shape.head_size) * e
        phases: dict[Phase, int] = {"rollout": _beside_engine(shape, work, live), "scoring": live, "backward": live}
        return [Term("gathered weights", phases, "a model with smaller layers")]
    terms = []
    if e < work.parameter_bytes and not sharding.is_zero:
        copies = (shape.num_layers * shape.num_layer_parameters + shape.head_size) * e
        phases = {"rollout": _beside_engine(shape, work, copies), "scoring": copies, "backward": copies}
        terms.append(Term("copies of the weights in half precision", phases, "dtype: bfloat16"))
    if work.quantized_bits:
        largest = max(shape.intermediate_size, shape.query_size) * shape.hidden_size
        terms.append(Term("a dequantised matrix", dict.fromkeys(FORWARDS, largest * e), "dtype: bfloat16"))
    return terms


def saved_bytes(shape: ModelShape, work: Workload, *, adapter_bytes: int = 0) -> int:
    """
    Bytes per position that one layer keeps for its backward pass, apart from masks.

    Args:
        shape ([`ModelShape`]):
            The model.
        work ([`Workload`]):
            What is computed at once.
        adapter_bytes (`int`, defaults to `0`):
            Bytes per number of the adapter, if there is one.

    Returns:
        `int`
    """
    e, d, f = work.compute_bytes, shape.hidden_size, shape.intermediate_size
    q, kv = shape.query_size, shape.kv_size
    trains_weights = not shape.has_adapter

    def inputs(width: int, *consumers: str) -> int:
        """Of linear layers on one input: one copy, or one for each adapter that casts it for itself."""
        if trains_weights:
            return e * width
        adapted = sum(name in shape.adapted for name in consumers)
        return e * width * (adapted if adapter_bytes != e else min(adapted, 1))

    def norm(width: int) -> int:
        """float32 input, and the normalised one where the weight needs it for its gradient."""
        return 4 * width + (e * width if trains_weights else 0)

    # keys and values are repeated for the query's heads where a mask is passed to SDPA
    keys_and_values = 2 * (q if work.attention in ("sdpa", "eager") and _has_mask(work) else kv)
    attention = e * (q + keys_and_values + q) + 4 * shape.num_heads
    if shape.has_head_norms:
        attention += norm(q + kv)
    return (
        2 * norm(d)
        + inputs(d, "q_proj", "k_proj", "v_proj")
        + attention
        + (0 if trains_weights or adapter_bytes == e else inputs(q, "o_proj"))
        + inputs(d, "gate_proj", "up_proj")
        + 3 * e * f
        + inputs(f, "down_proj")
        + e * shape.adapter_rank * len(shape.adapted)
    )


def _has_mask(work: Workload) -> bool:
    """Whether attention is given a mask of queries and keys: of a staircase, or of padded prompts."""
    return work.attention in ("sdpa", "eager")


def _mask_bytes(
    shape: ModelShape, work: Workload, *, num_rows: int, num_queries: int, num_keys: int
) -> tuple[int, int]:
    """Of the boolean mask, and of what each layer makes of it and keeps: SDPA a float one, eager its weights."""
    area = num_rows * num_queries * num_keys
    if not _has_mask(work):
        return 0, 0
    if work.attention == "eager":  # float32 softmax, and its cast
        per_pair = 4 if work.compute_bytes == 4 else 4 + work.compute_bytes
        return area * (1 + work.compute_bytes), area * shape.num_heads * per_pair
    return area, area * work.compute_bytes


def _forward_bytes(shape: ModelShape, work: Workload) -> int:
    """Bytes per position at the fullest moment of a layer without a graph."""
    e, d, f = work.compute_bytes, shape.hidden_size, shape.intermediate_size
    feed_forward = 3 * e * f
    attention = e * (4 * shape.query_size + 2 * shape.kv_size)
    return 2 * e * d + max(feed_forward, attention)


def _passes(shape: ModelShape, work: Workload, sharding: Sharding) -> list[Term]:
    """Activations, masks and the projection of the passes that score rows, with and without gradient."""
    e, d = work.compute_bytes, shape.hidden_size
    number_bytes = trained_bytes(shape, work, sharding)
    num_graphs = 1 if work.is_staircase else work.num_draws
    positions = work.num_rows * work.length
    num_queries = work.num_noised if work.detaches_context else work.length
    with_graph = work.num_rows * num_queries
    per_layer = with_graph * saved_bytes(shape, work, adapter_bytes=number_bytes if shape.has_adapter else 0)
    mask, layer_mask = _mask_bytes(shape, work, num_rows=work.num_rows, num_queries=num_queries, num_keys=work.length)
    kept = with_graph * ((4 + e) * d + 2 * e * shape.head_dim)  # final norm, rotations
    if work.checkpoints:
        kept += with_graph * e * d * shape.num_layers
        kept_masks, in_layer, in_layer_masks = mask, per_layer, layer_mask
    else:
        kept += per_layer * shape.num_layers
        kept_masks, in_layer, in_layer_masks = mask + shape.num_layers * layer_mask, 0, 0
    kept, kept_masks = kept * num_graphs, kept_masks * num_graphs
    if work.detaches_context:
        kept += shape.num_layers * work.num_rows * work.num_clean * 2 * shape.kv_size * e
    in_layer += with_graph * e * (shape.intermediate_size + d)  # gradients on their way

    num_scored = work.num_scored
    # the gradient that TRL's kernel sums up, and its cast
    head = shape.head_size * (4 if number_bytes == 4 else 4 + number_bytes)
    if sharding.backend == "fsdp2":  # and the head itself in half precision
        head = shape.head_size * (4 + 2 * e)
    backward = _fullest(
        {"kept": kept, "masks": kept_masks, "more": in_layer, "more_masks": in_layer_masks},
        {
            "kept": kept,
            "masks": kept_masks,
            "projection": num_graphs * num_scored * e * d
            + _tile_bytes(shape, work, has_graph=True)
            + num_scored * (4 + e) * d,
            "head": 0 if shape.has_adapter else head,
        },
    )
    scoring = _fullest(
        {"kept": positions * _forward_bytes(shape, work), "masks": mask + layer_mask},
        {
            "kept": positions * e * d,
            "masks": mask,
            "projection": _tile_bytes(shape, work, has_graph=False) + num_scored * (e * d + 8 * 4),
        },
    )
    fewer_rows = "lower per_device_train_batch_size and raise gradient_accumulation_steps alike"
    if work.num_rows == 1:
        fewer_rows = "lower num_mc_samples or max_completion_length"

    def parts(*names: str) -> dict[Phase, int]:
        found = {"scoring": scoring, "backward": backward}
        return {phase: sum(found[phase].get(name, 0) for name in names) for phase in PASSES}

    return [
        Term("activations", parts("kept", "more"), fewer_rows if work.checkpoints else "gradient_checkpointing: true"),
        Term(
            f"attention masks ({work.attention})",
            parts("masks", "more_masks"),
            "attn_implementation: flex_attention" if work.is_staircase else fewer_rows,
        ),
        Term("vocabulary projection", parts("projection"), fewer_rows),
        Term("gradient of the head", parts("head"), "use_peft: true, which leaves the head as it is"),
    ]


def _fullest(*moments: dict[str, int]) -> dict[str, int]:
    """The moment of a phase at which most is alive."""
    return max(moments, key=lambda moment: sum(moment.values()))


def _tile_bytes(shape: ModelShape, work: Workload, *, has_graph: bool) -> int:
    """Logits that are alive together while scoring; see [`_compat.fused_log_probs`]."""
    numbers = TILE_NUMBERS >> 3 if work.on_cpu else TILE_NUMBERS
    width = max(256, min(shape.vocab_size, numbers // max(work.num_scored, 1)))
    num_rows = min(work.num_scored, _TILE_ROWS)
    buffer = num_rows * width * work.compute_bytes
    if not work.on_cpu:
        return buffer
    # without Triton float32 copies of what is filled of it
    return buffer + num_rows * min(width, shape.vocab_size) * 4 * (7 if has_graph else 3)


def _rollout(shape: ModelShape, work: Workload) -> list[Term]:
    """The passes that decode, their cache, and sampling; or vLLM, which has all of it in its share."""
    if work.vllm is not None:
        remedy = "a lower vllm_gpu_memory_utilization"
        if work.vllm.sleeps:
            return [Term("vLLM", {"rollout": work.vllm.num_bytes}, remedy)]
        return [Term("vLLM", _everywhere(work.vllm.num_bytes), f"vllm_enable_sleep_mode: true, or {remedy}")]
    e, rows = work.compute_bytes, work.num_rollout_rows
    decoding = work if work.attention != "flex_attention" else _with_dense_attention(work)
    num_masked = rows * work.block_length
    num_chunk = min(num_masked, max(1, _SAMPLED_LOGITS // shape.vocab_size))
    noise = num_masked * 2 * int(shape.vocab_size**0.5) * 8 * 2  # float64, row by row and then together
    buffers = num_chunk * shape.vocab_size * (4 + 4 + (e if e < 4 else 0))  # kept from pass to pass

    def passes(num_rows: int, num_queries: int, num_keys: int) -> int:
        masks = _mask_bytes(shape, decoding, num_rows=num_rows, num_queries=num_queries, num_keys=num_keys)
        positions = num_rows * num_queries
        layers = positions * _forward_bytes(shape, work) + sum(masks)
        return max(layers, positions * e * shape.hidden_size + noise) + buffers

    num_keys = work.prompt_length + work.window_length
    if not work.is_staircase:
        rows *= 2 if work.has_guidance else 1
        moment = {"passes": passes(rows, num_keys, num_keys)}
    else:
        per_token = 2 * shape.kv_size * e
        # a layer's keys are copied to grow, or repeated for the query's heads together with its values
        repeated = 2 * shape.query_size if shape.num_kv_heads < shape.num_heads else 0
        prompts = work.num_prompts * work.prompt_length
        moment = _fullest(
            {
                "passes": passes(work.num_prompts, work.prompt_length, work.prompt_length),
                "cache": prompts * per_token * shape.num_layers,
            },
            {
                "passes": passes(rows, 2 * work.block_length, num_keys),
                "cache": rows * num_keys * (per_token * shape.num_layers + e * max(shape.kv_size, repeated)),
            },
        )
    fewer_rows = "a lower steps_per_generation"
    if not work.may_split_rollouts:
        fewer_rows = "lower steps_per_generation and gradient_accumulation_steps alike, more processes"
    return [
        Term("key/value cache", {"rollout": moment.get("cache", 0)}, fewer_rows),
        Term("decoding passes", {"rollout": moment["passes"]}, fewer_rows),
    ]


def _engine(shape: ModelShape, work: Workload, share: EngineShare) -> EngineMemory:
    num_kv_heads = max(1, shape.num_kv_heads // share.num_shards)
    return EngineMemory(
        share.num_bytes,
        shape.num_parameters * work.compute_bytes // share.num_shards,
        2 * num_kv_heads * shape.head_dim * work.compute_bytes * shape.num_layers,
    )


def _beside_engine(shape: ModelShape, work: Workload, gathered: int) -> int:
    """
    What a rollout has of the weights that a pass of the trained model would gather.

    vLLM is given them tensor by tensor, and compared with that model once. A cache that sleeps is not there yet: what
    fits in its place is not counted again.
    """
    if work.vllm is None or gathered == 0:
        return gathered
    handed_over = shape.largest_parameter * work.compute_bytes
    found = max(handed_over, gathered) if work.vllm.is_compared else handed_over
    if not work.vllm.sleeps:
        return found
    return max(0, _engine(shape, work, work.vllm).weight_bytes + found - work.vllm.num_bytes)


def _with_dense_attention(work: Workload) -> Workload:
    return Workload(**{**vars(work), "attention": "sdpa"})


def workload_of(
    args: Any,
    *,
    is_adapter: bool,
    prompt_length: int,
    parameter_bytes: int,
    compute_bytes: int,
    attention: str,
    quantized_bits: int = 0,
    on_cpu: bool = False,
    gpu_bytes: int | None = None,
) -> Workload:
    """
    What a configuration makes a process compute at once.

    Args:
        args ([`StableDRLConfig`]):
            Resolved configuration.
        is_adapter (`bool`):
            Whether an adapter is trained: its reference is the model without it.
        prompt_length (`int`):
            Tokens of the longest prompt.
        parameter_bytes (`int`):
            Bytes per number of the loaded weights.
        compute_bytes (`int`):
            Bytes per number of a forward pass.
        attention (`str`):
            Attention implementation of the training passes.
        quantized_bits (`int`, defaults to `0`):
            4 or 8 where the base model is quantised.
        on_cpu (`bool`, defaults to `False`):
            Whether the run stays on the CPU.
        gpu_bytes (`int`, *optional*):
            Memory of a GPU, of which vLLM is given a share; without it, none is counted.

    Returns:
        [`Workload`]
    """
    b, a, s = args.per_device_train_batch_size, args.gradient_accumulation_steps, args.steps_per_generation
    is_staircase = args.mask_law == "staircase"
    # see StableDRLTrainer._units and _weigh
    may_be_off_policy = OBJECTIVES[args.objective].uses_ratio and (
        args.mask_coupling != "shared" or args.num_iterations > 1 or s > a
    )
    holds_whole_groups = b * args.world_size % args.num_generations == 0
    shares_graph = (
        is_staircase
        or args.surrogate == "sandwich"
        or (holds_whole_groups and (may_be_off_policy or args.beta != 0.0))
    )
    num_rollout_rows = args.generation_batch_size // args.world_size
    if args.eval_strategy != "no":
        num_rollout_rows = max(num_rollout_rows, args.per_device_eval_batch_size)
    vllm = None
    if args.rollout_backend == "vllm":
        vllm = EngineShare(
            int(args.vllm_gpu_memory_utilization * (gpu_bytes or 0)),
            args.vllm_tensor_parallel_size,
            sleeps=args.vllm_enable_sleep_mode,
            is_compared=args.rollout_self_check,
        )
    return Workload(
        num_rows=b,
        num_rollout_rows=num_rollout_rows,
        num_prompts=-(-num_rollout_rows // args.num_generations),
        prompt_length=prompt_length,
        window_length=args.max_completion_length,
        block_length=args.block_length,
        num_draws=args.num_mc_samples if shares_graph else 1,
        is_staircase=is_staircase,
        parameter_bytes=parameter_bytes,
        compute_bytes=compute_bytes,
        checkpoints=bool(args.gradient_checkpointing),
        attention=attention,
        optimizer=OptimizerNames(args.optim).value,
        accumulates=a > 1 or (not shares_graph and args.num_mc_samples > 1),
        keeps_gradients=a > s,
        has_reference=args.beta != 0.0 and not is_adapter,
        gathers_for_generation=args.ds3_gather_for_generation,
        detaches_context=args.detach_context,
        has_guidance=args.guidance_scale > 0.0,
        quantized_bits=quantized_bits,
        on_cpu=on_cpu,
        may_split_rollouts=args.num_iterations == 1,
        vllm=vllm,
    )
