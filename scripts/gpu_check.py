# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
`scripts/gpu_check.py`: one staircase pass, forward and backward, of an SDAR-8B-shaped stack of layers on one GPU, with
FlexAttention and with SDPA under a dense mask.

One row: prompt of 512 tokens, completion of 2,048, 4 noised copies, blocks of 4, bfloat16, gradient checkpointing. As
many layers as fit, unless `--num_hidden_layers` says otherwise; the vocabulary is the published one. Before it is
timed, each form's gradient on a small stack is compared with the other's. `--json` prints one line: for each form
`seconds` (median of the repetitions) and `peak_memory_gb` (10^9 bytes); `relative_gradient_difference`; and `speedup`,
SDPA's seconds over FlexAttention's. We have not run this on a GPU yet.
"""

import argparse
import gc
import json
import statistics
import sys
import time
from dataclasses import dataclass
from typing import Any

import torch

from trl_stabledrl.likelihood import LikelihoodSettings, Rows, plan_masks, score_draws
from trl_stabledrl.models import SDARConfig, SDARForCausalLM

FORMS = ("flex_attention", "sdpa")
MASK = 151_669
BYTES_PER_PARAMETER = 4  # bfloat16 weight and gradient
LAYER_PARAMETERS = 4096 * 128 * (2 * 32 + 2 * 8) + 3 * 4096 * 12_288
RESERVED = 30 * 10**9  # embedding, head, their gradients, activations and the dense mask


@dataclass(frozen=True)
class Sizes:
    """Shape of the stack and of the row; the defaults are SDAR-8B's and the recipe's."""

    num_hidden_layers: int
    prompt_length: int = 512
    completion_length: int = 2048
    num_mc_samples: int = 4
    hidden_size: int = 4096
    intermediate_size: int = 12_288
    num_attention_heads: int = 32
    num_key_value_heads: int = 8
    head_dim: int = 128
    vocab_size: int = 151_936


def build_model(sizes: Sizes, *, form: str, device: str, dtype: torch.dtype) -> SDARForCausalLM:
    """A random stack in train mode with gradient checkpointing."""
    config = SDARConfig(
        vocab_size=sizes.vocab_size,
        hidden_size=sizes.hidden_size,
        intermediate_size=sizes.intermediate_size,
        num_hidden_layers=sizes.num_hidden_layers,
        num_attention_heads=sizes.num_attention_heads,
        num_key_value_heads=sizes.num_key_value_heads,
        head_dim=sizes.head_dim,
        mask_token_id=min(MASK, sizes.vocab_size - 1),
    )
    with torch.random.fork_rng(devices=[] if device == "cpu" else [device]), torch.device(device):
        torch.manual_seed(0)
        model = SDARForCausalLM._from_config(config, attn_implementation=form)
    model.to(dtype).train()  # pyright: ignore[reportArgumentType, reportCallIssue]  # transformers wraps `to`
    model.gradient_checkpointing_enable({"use_reentrant": False})
    return model


def build_rows(sizes: Sizes, *, device: str) -> Rows:
    """One row whose completion fills its window."""
    generator = torch.Generator().manual_seed(0)
    prompt = torch.randint(0, sizes.vocab_size - 1, (1, sizes.prompt_length), generator=generator)
    completion = torch.randint(0, sizes.vocab_size - 1, (1, sizes.completion_length), generator=generator)
    return Rows(
        prompt, torch.ones_like(prompt).bool(), completion, torch.ones_like(completion).bool(), torch.zeros(1).long()
    ).to(torch.device(device))


def forward_backward(model: SDARForCausalLM, rows: Rows, sizes: Sizes) -> None:
    """Leave the gradient of the mean log-probability of all scored tokens in the model."""
    settings = LikelihoodSettings(
        mask_token_id=min(MASK, sizes.vocab_size - 1),
        mask_law="staircase",
        mc_sampling="cyclic",
        num_mc_samples=sizes.num_mc_samples,
        block_length=model.config.block_size,
        window_length=sizes.completion_length,
        seed=0,
    )
    plan = plan_masks(rows, settings)
    logps = score_draws(model, rows, plan, settings).logps
    (-(plan.weight * logps).sum() / sizes.num_mc_samples).backward()


def measure(sizes: Sizes, *, form: str, device: str, dtype: torch.dtype, num_repetitions: int) -> dict[str, float]:
    """Seconds and memory of one pass, after one that compiles."""
    model, rows = build_model(sizes, form=form, device=device, dtype=dtype), build_rows(sizes, device=device)
    seconds = []
    is_cuda = device != "cpu"
    for repetition in range(num_repetitions + 1):
        model.zero_grad(set_to_none=True)
        if is_cuda:
            torch.cuda.synchronize()
            if repetition == 1:
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        forward_backward(model, rows, sizes)
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    peak = torch.cuda.max_memory_allocated() / 1e9 if is_cuda else float("nan")
    return {"seconds": round(statistics.median(seconds[1:]), 4), "peak_memory_gb": round(peak, 3)}


def gradient(sizes: Sizes, *, form: str, device: str) -> torch.Tensor:
    model = build_model(sizes, form=form, device=device, dtype=torch.float32)
    forward_backward(model, build_rows(sizes, device=device), sizes)
    return torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])


def gradients_differ_by(*, device: str, forms: tuple[str, str] = FORMS) -> float:
    """Relative difference of the two forms' gradients on a stack small enough for float32."""
    sizes = Sizes(2, 45, 131, 2, 128, 192, 4, 2, 32, 512)
    first, second = (gradient(sizes, form=form, device=device) for form in forms)
    return ((first - second).norm() / second.norm()).item()


def layers_that_fit(total_memory: int) -> int:
    """Number of SDAR-8B layers whose weights and gradients leave room for the rest, at most the model's 36."""
    return max(1, min(36, (total_memory - RESERVED) // (LAYER_PARAMETERS * BYTES_PER_PARAMETER)))


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="FlexAttention beside SDPA, on one GPU, at the size of SDAR-8B.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--num_hidden_layers", type=int, help="default: as many as fit, at most 36")
    parser.add_argument("--num_repetitions", type=int, default=5)
    options = parser.parse_args(argv)
    if not torch.cuda.is_available():
        print(
            "scripts/gpu_check.py needs a CUDA device: FlexAttention has no backward pass on a CPU.", file=sys.stderr
        )
        return 1
    device = "cuda"
    sizes = Sizes(options.num_hidden_layers or layers_that_fit(torch.cuda.get_device_properties(0).total_memory))
    found: dict[str, Any] = {
        "device": torch.cuda.get_device_name(0),
        "num_hidden_layers": sizes.num_hidden_layers,
        "relative_gradient_difference": gradients_differ_by(device=device),
    }
    for form in FORMS:
        found[form] = measure(
            sizes, form=form, device=device, dtype=torch.bfloat16, num_repetitions=options.num_repetitions
        )
        gc.collect()
        torch.cuda.empty_cache()
    found["speedup"] = round(found["sdpa"]["seconds"] / found["flex_attention"]["seconds"], 2)
    if options.json:
        print(json.dumps(found))
        return 0
    print(f"{found['device']}, {sizes.num_hidden_layers} layers of SDAR-8B")
    print(f"gradients of the two forms differ by {found['relative_gradient_difference']:.1e} (small stack, float32)")
    for form in FORMS:
        print(f"{form:<15} {found[form]['seconds']:.3f} s, {found[form]['peak_memory_gb']:.1f} GB")
    print(f"FlexAttention is {found['speedup']} times as fast.")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
