# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
`scripts/bench.py llada` and `scripts/bench.py sdar`: what one GRPO cycle of [`StableDRLTrainer`] costs, on the jobs
its peers were measured on.

A random model of 4 layers and width 256 in float32 on one CPU thread; one group of 8 completions of 128 tokens for a
prompt of 64; 2 draws, 2 inner iterations, AdamW. LLaDA: 126,464 tokens, blocks of 32 in 16 denoising steps. SDAR:
151,936 tokens, blocks of 4 in 4 static steps, complementary draws. Everything is measured from outside the library, by
hooks on the model and by looking at every tensor operation, and must then agree with the library's own counters. End
tokens are not sampled (`suppress_eos="sampling"`): no row ends early, so that the rollout's counters are the same for
every seed.

`--json` prints one line. Its figures are by phase (`rollout`, `old`, `loss`, `backward`, `optimizer`; `other` is what
lies between them, such as rewards and data loading) and in total:

- `model_calls`, `graphs`: forward passes, and how many of them kept an autograd graph
- `backbone_positions`, `vocab_positions`: token positions through the layers and through the vocabulary projection
- `cpu_seconds`: of the whole process, the measuring included, imports and set-up excluded
- `recomputed_positions`: positions projected again in the backward pass, which `vocab_positions` leaves out
- `largest_logits_mb`: largest float tensor with the vocabulary, or a tile of it, along an axis; 10^6 bytes
- `peak_rss_gb`: largest resident memory of the process, imports included; 10^9 bytes
"""

import argparse
import json
import random
import resource
import sys
import tempfile
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import asdict, dataclass, fields
from typing import Any, get_args
from unittest import mock

import torch
from datasets import Dataset
from rich import box
from rich.console import Console
from rich.table import Table
from tokenizers import Tokenizer, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import PreTrainedTokenizerFast, TrainerCallback

from trl_stabledrl import StableDRLConfig, StableDRLTrainer, stabledrl_trainer
from trl_stabledrl.core.masking import MaskLaw, McSampling
from trl_stabledrl.engines import transformers as engine
from trl_stabledrl.models import LLaDAConfig, LLaDAModelLM, SDARConfig, SDARForCausalLM

PHASES = ("rollout", "old", "loss", "backward", "optimizer", "other")
_MATMULS = (torch.ops.aten.mm, torch.ops.aten.addmm, torch.ops.aten.bmm, torch.ops.aten.baddbmm)


@dataclass(frozen=True)
class Job:
    """Sizes of the job; the defaults are those the peers were measured on."""

    vocab_size: int = 126_464
    hidden_size: int = 256
    intermediate_size: int = 768
    num_hidden_layers: int = 4
    num_attention_heads: int = 4
    prompt_length: int = 64
    completion_length: int = 128
    block_length: int = 32
    num_denoising_steps: int = 16
    num_generations: int = 8
    num_mc_samples: int = 2
    num_iterations: int = 2


SDAR_JOB = Job(vocab_size=151_936, block_length=4, num_denoising_steps=4)


@dataclass(frozen=True)
class Peer:
    """
    What a peer cost on the default job, on the versions of its dependencies that it runs on.

    None projects fewer positions than it embeds: its backbone positions are its vocabulary positions.
    """

    name: str
    model_calls: int
    vocab_positions: int
    largest_logits_mb: int
    cpu_seconds: int | None
    peak_rss_gb: float


# Measured on 2 CPU cores, one thread, 30 Nov 2026
PEERS = (
    Peer("StableDRL", 67, 107_520, 1554, 328, 6.4),
    Peer("d1", 67, 104_448, 1554, 372, 5.9),
    Peer("SPG", 66, 104_448, 1554, 397, 6.4),
    Peer("ESPO", 80, 122_880, 777, 410, 6.3),
    Peer("dllm", 68, 104_448, 777, 651, 11.9),
)

# SDAR's own generate for the rollout, one row at a time, and dLLM-RL for the scores: no peer has both. dLLM-RL ran 16
# rows in batches of 8 for two optimizer steps more, so that its seconds are not those of this job.
SDAR_PEERS = (Peer("SDAR generate + dLLM-RL", 1288 + 2 + 4, 5632 + 15_360, 1556, None, 5.9),)

COMPARED = (
    "model_calls",
    "backbone_positions",
    "vocab_positions",
    "largest_logits_mb",
    "cpu_seconds",
    "peak_rss_gb",
)


class Meter(TorchDispatchMode):
    """
    Watches a model, while it is open as a context: what passes through it, and every tensor that is made.

    Args:
        model (`torch.nn.Module`):
            Model with the selected-positions forward.
        longest_axis (`int`):
            No axis of an activation is longer than this; a longer one is the vocabulary, or a tile of it.
    """

    def __init__(self, model: Any, *, longest_axis: int) -> None:
        super().__init__()
        weight = model.get_output_embeddings().weight
        self.vocab_size, self.hidden_size = weight.shape
        self.head_storage = weight.untyped_storage().data_ptr()
        self.parameters = {parameter.untyped_storage().data_ptr() for parameter in model.parameters()}
        self.longest_axis = longest_axis
        self.model_calls: Counter[str] = Counter()
        self.graphs: Counter[str] = Counter()
        self.backbone_positions: Counter[str] = Counter()
        self.selected_positions: Counter[str] = Counter()
        self.logits_computed: Counter[str] = Counter()
        self.cpu_seconds: defaultdict[str, float] = defaultdict(float)
        self.largest_logits = 0
        self._phases = ["other"]
        self._since = 0.0
        self._has_graph = False  # of the latest pass through the layers
        model.register_forward_pre_hook(self._before_model, with_kwargs=True)
        model.base_model.register_forward_pre_hook(self._before_backbone, with_kwargs=True)
        model.base_model.register_forward_hook(self._after_backbone)

    @property
    def phase(self) -> str:
        return self._phases[-1]

    @contextmanager
    def measure(self, phase: str) -> Iterator[None]:
        """Count what happens inside the context, less what inner contexts count, as part of `phase`."""
        self.enter(phase)
        yield
        self.leave()

    def enter(self, phase: str) -> None:
        self._charge()
        self._phases.append(phase)

    def leave(self) -> None:
        self._charge()
        self._phases.pop()

    def _charge(self) -> None:
        now = time.process_time()
        self.cpu_seconds[self.phase] += now - self._since
        self._since = now

    def __enter__(self):
        self._since = time.process_time()
        return super().__enter__()

    def __exit__(self, *exc_info):
        self._charge()
        return super().__exit__(*exc_info)

    def _before_model(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> Any:
        self.model_calls[self.phase] += 1
        head_fn = kwargs["head_fn"]

        def counted(hidden: Tensor, weight: Tensor) -> Any:
            self.selected_positions[self.phase] += len(hidden)
            found = head_fn(hidden, weight)
            self.graphs[self.phase] += self._has_graph or any(tensor.requires_grad for tensor in found)
            return found

        return args, {**kwargs, "head_fn": counted}

    def _before_backbone(self, module: nn.Module, args: Any, kwargs: dict[str, Any]) -> None:
        self.backbone_positions[self.phase] += kwargs["input_ids"].numel()

    def _after_backbone(self, module: nn.Module, args: Any, output: Any) -> None:
        self._has_graph = output.last_hidden_state.requires_grad

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        if func.overloadpacket in _MATMULS and any(isinstance(a, Tensor) and self._is_projection(a) for a in args):
            self.logits_computed[self.phase] += out.numel()
        for tensor in out if isinstance(out, (tuple, list)) else (out,):
            if isinstance(tensor, Tensor) and tensor.dim() >= 2 and max(tensor.shape) > self.longest_axis:
                self._look_at(tensor)
        return out

    def _look_at(self, tensor: Tensor) -> None:
        # weights, their gradients and optimizer states are long too, but lie along the hidden axis
        is_weight = tensor.shape[-1] == self.hidden_size or tensor.untyped_storage().data_ptr() in self.parameters
        if tensor.is_floating_point() and not is_weight:
            self.largest_logits = max(self.largest_logits, tensor.numel() * tensor.element_size())

    def _is_projection(self, factor: Tensor) -> bool:
        """Whether it is the head's weight, or a tile, turned to make logits; unturned it makes hidden gradients."""
        return factor.untyped_storage().data_ptr() == self.head_storage and factor.shape[-2] == self.hidden_size

    def positions_projected(self) -> dict[str, int]:
        """Positions through the vocabulary projection, by phase, from the logits that were computed."""
        for phase, number in self.logits_computed.items():
            assert number % self.vocab_size == 0, f"{phase}: {number} logits are not {self.vocab_size} per position"
        return {phase: number // self.vocab_size for phase, number in self.logits_computed.items()}


class OptimizerPhase(TrainerCallback):
    """Opens and closes the `optimizer` phase."""

    def __init__(self, meter: Meter) -> None:
        self.meter = meter

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.meter.enter("optimizer")

    def on_optimizer_step(self, args, state, control, **kwargs):
        self.meter.leave()


def build_tokenizer() -> PreTrainedTokenizerFast:
    """One token per word; the model's vocabulary is longer, as in the published checkpoints."""
    words = ["<|pad|>", "<|end|>", "<|mask|>", *(f"w{index}" for index in range(61))]
    backend = Tokenizer(WordLevel({word: index for index, word in enumerate(words)}, unk_token=words[0]))
    backend.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend, pad_token=words[0], eos_token=words[1], mask_token=words[2]
    )


def build_llada(job: Job, *, seed: int) -> LLaDAModelLM:
    """A random LLaDA of the job's sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return LLaDAModelLM(
            LLaDAConfig(
                vocab_size=job.vocab_size,
                hidden_size=job.hidden_size,
                intermediate_size=job.intermediate_size,
                num_hidden_layers=job.num_hidden_layers,
                num_attention_heads=job.num_attention_heads,
                max_position_embeddings=job.prompt_length + job.completion_length,
                pad_token_id=0,
                eos_token_id=1,
                mask_token_id=2,
            )
        )


def build_sdar(job: Job, *, seed: int) -> SDARForCausalLM:
    """A random SDAR of the job's sizes."""
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return SDARForCausalLM(
            SDARConfig(
                vocab_size=job.vocab_size,
                hidden_size=job.hidden_size,
                intermediate_size=job.intermediate_size,
                num_hidden_layers=job.num_hidden_layers,
                num_attention_heads=job.num_attention_heads,
                num_key_value_heads=job.num_attention_heads,
                head_dim=job.hidden_size // job.num_attention_heads,
                max_position_embeddings=job.prompt_length + job.completion_length,
                block_size=job.block_length,
                pad_token_id=0,
                eos_token_id=1,
                mask_token_id=2,
            )
        )


def build_trainer(
    model: Any, job: Job, *, seed: int, output_dir: str, is_quiet: bool = True, **options: Any
) -> StableDRLTrainer:
    """The trainer of one generation: one prompt of exactly the job's length, one optimizer step per iteration."""
    rng = random.Random(f"bench:{seed}")
    prompt = " ".join(f"w{rng.randrange(61)}" for _ in range(job.prompt_length))
    return StableDRLTrainer(
        model=model,
        reward_funcs=lambda completions, **columns: [rng.random() for _ in completions],
        args=StableDRLConfig(
            output_dir,
            per_device_train_batch_size=job.num_generations,
            num_generations=job.num_generations,
            num_iterations=job.num_iterations,
            num_mc_samples=job.num_mc_samples,
            max_steps=job.num_iterations,
            max_completion_length=job.completion_length,
            block_length=job.block_length,
            num_denoising_steps=job.num_denoising_steps,
            temperature=0.9,
            suppress_eos="sampling",
            use_cpu=True,
            bf16=False,
            gradient_checkpointing=False,
            save_strategy="no",
            logging_strategy="no",
            report_to="none",
            disable_tqdm=is_quiet,
            seed=seed,
            **options,
        ),
        train_dataset=Dataset.from_dict({"prompt": [prompt]}),
        processing_class=build_tokenizer(),
    )


def _measured(meter: Meter, phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        with meter.measure(phase):
            return function(*args, **kwargs)

    return wrapper


def _kept(results: list[Any], function: Callable[..., Any]) -> Callable[..., Any]:
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        results.append(function(*args, **kwargs))
        return results[-1]

    return wrapper


def measure(trainer: StableDRLTrainer, meter: Meter) -> dict[str, Any]:
    """
    Train as `trainer` is set up to, and say what it cost.

    Args:
        trainer ([`StableDRLTrainer`]):
            Trainer of the model that `meter` watches.
        meter ([`Meter`]):
            Fresh meter.

    Returns:
        `dict[str, Any]`:
            The figures that the module's docstring lists.
    """
    rollouts: list[Any] = []
    scores: list[Any] = []
    phases = {"_generate_single_turn": "rollout", "_get_per_token_logps_and_entropies": "old", "_compute_loss": "loss"}
    with ExitStack() as stack:
        for method, phase in phases.items():
            stack.enter_context(mock.patch.object(trainer, method, _measured(meter, phase, getattr(trainer, method))))
        for method, phase in {"backward": "backward", "clip_grad_norm_": "optimizer"}.items():
            accelerator = trainer.accelerator
            stack.enter_context(
                mock.patch.object(accelerator, method, _measured(meter, phase, getattr(accelerator, method)))
            )
        for module, function, results in (
            (engine, "sample", rollouts),
            (stabledrl_trainer, "score_rows", scores),
        ):
            stack.enter_context(mock.patch.object(module, function, _kept(results, getattr(module, function))))
        trainer.add_callback(OptimizerPhase(meter))
        stack.enter_context(meter)
        trainer.train()

    projected = meter.positions_projected()
    recomputed = projected.pop("backward", 0)
    # three counts that know nothing of each other: the products computed, what the model was asked for, the library's
    assert projected == dict(meter.selected_positions), (projected, meter.selected_positions)
    assert projected["rollout"] == sum(rollout.num_vocab_positions for rollout in rollouts)
    assert projected["loss"] == sum(int(score.num_scored) for score in scores)
    assert meter.backbone_positions["rollout"] == sum(rollout.num_backbone_positions for rollout in rollouts)
    assert meter.model_calls["rollout"] == sum(rollout.num_forwards for rollout in rollouts)
    in_bytes = 1 if sys.platform == "darwin" else 1024
    return {
        "model_calls": _by_phase(meter.model_calls),
        "graphs": _by_phase(meter.graphs),
        "backbone_positions": _by_phase(meter.backbone_positions),
        "vocab_positions": _by_phase(projected),
        "cpu_seconds": {phase: round(value, 2) for phase, value in _by_phase(meter.cpu_seconds).items()},
        "recomputed_positions": recomputed,
        "largest_logits_mb": round(meter.largest_logits / 1e6, 3),
        "peak_rss_gb": round(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * in_bytes / 1e9, 2),
    }


def _by_phase(values: Any) -> dict[str, Any]:
    return {**{phase: values.get(phase, 0) for phase in PHASES}, "total": sum(values.values())}


def bench_llada(
    job: Job, *, seed: int = 0, mask_law: MaskLaw = "block_suffix", is_quiet: bool = True
) -> dict[str, Any]:
    """Measure the job with a random LLaDA; standard output stays free."""
    figures = _bench(build_llada(job, seed=seed), job, seed=seed, is_quiet=is_quiet, mask_law=mask_law)
    return {"model": "llada", "seed": seed, "mask_law": mask_law, **figures, "job": asdict(job)}


def bench_sdar(
    job: Job, *, seed: int = 0, mc_sampling: McSampling = "complementary", is_quiet: bool = True
) -> dict[str, Any]:
    """Measure the job with a random SDAR; standard output stays free."""
    figures = _bench(build_sdar(job, seed=seed), job, seed=seed, is_quiet=is_quiet, mc_sampling=mc_sampling)
    return {"model": "sdar", "seed": seed, "mask_law": "staircase", **figures, "job": asdict(job)}


def _bench(model: Any, job: Job, *, seed: int, is_quiet: bool, **options: Any) -> dict[str, Any]:
    num_positions = job.num_generations * (job.prompt_length + job.num_mc_samples * job.completion_length)
    with tempfile.TemporaryDirectory() as folder, redirect_stdout(sys.stderr):
        trainer = build_trainer(model, job, seed=seed, output_dir=folder, is_quiet=is_quiet, **options)
        meter = Meter(model, longest_axis=max(num_positions, job.intermediate_size))
        return measure(trainer, meter)


def show(figures: dict[str, Any], *, peers: Sequence[Peer]) -> None:
    """Print two tables: ours by phase, and ours beside the peers'."""
    console = Console(highlight=False)
    columns = (*PHASES, "total")
    table = _table(f"One GRPO cycle, {figures['mask_law']}, seed {figures['seed']}", columns)
    for name in ("model_calls", "graphs", "backbone_positions", "vocab_positions", "cpu_seconds"):
        table.add_row(name.replace("_", " "), *(f"{figures[name][column]:,}" for column in columns))
    console.print(table)
    console.print(f"Positions recomputed in the backward pass: {figures['recomputed_positions']:,}")
    ours = {name: figures[name]["total"] if isinstance(figures[name], dict) else figures[name] for name in COMPARED}
    table = _table("Beside the peers (in brackets: times ours)", COMPARED)
    table.add_row("ours", *(f"{value:,}" for value in ours.values()), style="bold")
    for peer in peers:
        theirs = {**peer.__dict__, "backbone_positions": peer.vocab_positions}
        cells = (_beside(theirs[name], ours[name]) for name in COMPARED)
        table.add_row(peer.name, *cells)
    console.print(table)
    if not peers:
        console.print("The peers were measured on the default job only.")


def _beside(theirs: float | None, ours: float) -> str:
    return "not measured" if theirs is None else f"{theirs:,} ({theirs / ours:.1f}x)"


def _table(title: str, columns: Iterable[str]) -> Table:
    table = Table(title=title, box=box.SIMPLE_HEAD, padding=(0, 1, 0, 0))
    table.add_column("", overflow="fold")
    for column in columns:
        table.add_column(column.replace("_", " "), justify="right", overflow="fold")
    return table


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="What one GRPO cycle costs, on the job the peers were measured on.")
    commands = parser.add_subparsers(dest="model", required=True)
    llada = commands.add_parser("llada", help="random LLaDA, full attention")
    llada.add_argument(
        "--mask_law", choices=[law for law in get_args(MaskLaw) if law != "staircase"], default="block_suffix"
    )
    sdar = commands.add_parser("sdar", help="random SDAR, block diffusion")
    sdar.add_argument("--mc_sampling", choices=get_args(McSampling), default="complementary")
    for command, default in ((llada, Job()), (sdar, SDAR_JOB)):
        command.add_argument("--json", action="store_true", help="print one line of JSON instead of tables")
        command.add_argument("--seed", type=int, default=0, help="of weights, prompt, masks and rollouts")
        for field in fields(Job):
            command.add_argument(f"--{field.name}", type=int, default=default.__dict__[field.name])
    options = vars(parser.parse_args(argv))
    job = Job(**{field.name: options.pop(field.name) for field in fields(Job)})
    torch.set_num_threads(1)
    name, as_json = options.pop("model"), options.pop("json")
    bench, default, peers = (bench_sdar, SDAR_JOB, SDAR_PEERS) if name == "sdar" else (bench_llada, Job(), PEERS)
    figures = bench(job, is_quiet=as_json, **options)
    if as_json:
        print(json.dumps(figures))
    else:
        show(figures, peers=peers if job == default else ())
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
