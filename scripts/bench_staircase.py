# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
`scripts/bench_staircase.py`: one scoring pass of block diffusion, forward and backward, three ways.

`staircase`: all blocks and draws in one pass (what this package does); `per_draw`: one pass per draw, each with a
clean text of its own, as peers do; `per_block`: one forward per block and draw, each behind the clean text before it,
without a cache, since a cache would hold the graph of every block. All give the same gradient, which is checked.
Random SDAR, one CPU thread; seconds are process CPU seconds, taken in turns so that a busy machine slows all alike;
memory is the peak of a process that runs one way only, less what it held before.
"""

import argparse
import json
import resource
import statistics
import subprocess
import sys
import time
from collections.abc import Callable

import torch

from trl_stabledrl.core.attention import CLEAN, Layout
from trl_stabledrl.core.masking import MaskPlan
from trl_stabledrl.likelihood import LikelihoodSettings, Rows, plan_masks, score_draws, scored_log_probs
from trl_stabledrl.models import SDARConfig, SDARForCausalLM

VOCAB, WIDTH, PROMPT, COMPLETION, BLOCK, DRAWS, ROWS = 20_000, 256, 64, 128, 4, 4, 2
SETTINGS = LikelihoodSettings(
    mask_token_id=2,
    mask_law="staircase",
    mc_sampling="cyclic",
    num_mc_samples=DRAWS,
    block_length=BLOCK,
    window_length=COMPLETION,
    seed=0,
)


def staircase(model: SDARForCausalLM, rows: Rows, plan: MaskPlan) -> torch.Tensor:
    return (plan.weight * score_draws(model, rows, plan, SETTINGS).logps).sum()


def per_draw(model: SDARForCausalLM, rows: Rows, plan: MaskPlan) -> torch.Tensor:
    scores = [score_draws(model, rows, plan, SETTINGS, draws=[draw]).logps for draw in range(DRAWS)]
    return (plan.weight * torch.cat(scores, dim=1)).sum()


def per_block(model: SDARForCausalLM, rows: Rows, plan: MaskPlan) -> torch.Tensor:
    total = torch.zeros(())
    for draw in range(DRAWS):
        for start in range(0, COMPLETION, BLOCK):  # the prompt is a multiple of the block
            block = slice(start, start + BLOCK)
            is_scored = plan.is_scored[:, draw, block]
            noised = rows.completion_ids[:, block].masked_fill(plan.is_noised[:, draw, block], SETTINGS.mask_token_id)
            input_ids = torch.cat([rows.prompt_ids, rows.completion_ids[:, :start], noised], dim=1)
            copy_index = torch.full_like(input_ids, CLEAN)
            copy_index[:, -BLOCK:] = 1
            position = torch.arange(input_ids.shape[1]).expand_as(input_ids)
            targets = rows.completion_ids[:, block][is_scored]
            log_probs, _ = model(
                input_ids=input_ids,
                layout=Layout(copy_index, position),
                is_selected=torch.cat([torch.zeros_like(input_ids[:, :-BLOCK]).bool(), is_scored], dim=1),
                head_fn=lambda hidden, weight, t=targets: scored_log_probs(hidden, weight, t, temperature=1.0),
            )
            total = total + (plan.weight[:, draw, block][is_scored] * log_probs).sum()
    return total


WAYS: dict[str, Callable[[SDARForCausalLM, Rows, MaskPlan], torch.Tensor]] = {
    "staircase": staircase,
    "per_draw": per_draw,
    "per_block": per_block,
}


def prepared() -> tuple[SDARForCausalLM, Rows, MaskPlan]:
    torch.manual_seed(0)
    model = SDARForCausalLM(
        SDARConfig(
            vocab_size=VOCAB,
            hidden_size=WIDTH,
            intermediate_size=3 * WIDTH,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=4,
            head_dim=64,
            mask_token_id=2,
            block_size=BLOCK,
        )
    )
    prompt, completion = torch.randint(3, VOCAB, (ROWS, PROMPT)), torch.randint(3, VOCAB, (ROWS, COMPLETION))
    is_real = torch.ones_like(prompt).bool(), torch.ones_like(completion).bool()
    rows = Rows(prompt, is_real[0], completion, is_real[1], torch.arange(ROWS))
    return model, rows, plan_masks(rows, SETTINGS)


def peak_gb() -> float:
    in_bytes = 1 if sys.platform == "darwin" else 1024
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * in_bytes / 1e9


def alone(way: str) -> float:
    """Growth of the peak memory by one pass, in a process of its own."""
    held = peak_gb()
    WAYS[way](*prepared()).backward()
    return peak_gb() - held


def compare(num_repetitions: int) -> dict[str, dict[str, float]]:
    """Figures of every way; raises where two gradients differ."""
    # first: a process inherits the peak of the one that starts it
    memory = {
        way: float(subprocess.run([sys.executable, __file__, "--alone", way], capture_output=True, check=True).stdout)
        for way in WAYS
    }
    model, rows, plan = prepared()
    positions, gradients = dict.fromkeys(WAYS, 0), {}
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    running = [""]

    def count(module: torch.nn.Module, args: tuple[torch.Tensor, ...], kwargs: dict[str, torch.Tensor]) -> None:
        positions[running[0]] += kwargs["input_ids"].numel()

    model.base_model.register_forward_pre_hook(count, with_kwargs=True)
    for repetition in range(num_repetitions + 1):
        for way, run in WAYS.items():
            model.zero_grad()
            running[0], start = way, time.process_time()
            run(model, rows, plan).backward()
            if repetition > 0:
                seconds[way].append(time.process_time() - start)
            gradients[way] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
    for way, gradient in gradients.items():
        difference = ((gradient - gradients["staircase"]).norm() / gradient.norm()).item()
        assert difference < 1e-4, f"{way}: the gradient differs by {difference}"
    return {
        way: {
            "backbone_positions": positions[way] // (num_repetitions + 1),
            "cpu_seconds": round(statistics.median(seconds[way]), 2),
            "ratio": round(
                statistics.median(a / b for a, b in zip(seconds[way], seconds["staircase"], strict=True)), 2
            ),
            "peak_growth_gb": round(memory[way], 2),
        }
        for way in WAYS
    }


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description="One scoring pass of block diffusion, three ways, on a CPU.")
    parser.add_argument("--json", action="store_true", help="print one line of JSON")
    parser.add_argument("--num_repetitions", type=int, default=5)
    parser.add_argument("--alone", choices=WAYS, help=argparse.SUPPRESS)
    options = parser.parse_args(argv)
    torch.set_num_threads(1)
    if options.alone:
        print(alone(options.alone))
        return 0
    found = compare(options.num_repetitions)
    if options.json:
        print(json.dumps(found))
        return 0
    for way, figures in found.items():
        values = ", ".join(f"{name.replace('_', ' ')} {value:,}" for name, value in figures.items())
        print(f"{way:<10} {values}")
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
