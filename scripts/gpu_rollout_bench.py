# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
`scripts/gpu_rollout_bench.py`: tokens per second of SDAR's rollouts by vLLM, with CUDA graphs and without, and by
Transformers, on one GPU, with random weights of SDAR's shapes.

Every cell decodes the same prompts of `--prompt_length` tokens to exactly `--completion_length` more: there are no end
tokens, which random weights would meet anywhere. A threshold would commit what a trained model is sure of, and random
weights are sure of nothing; `--tokens_per_step 2` stands for it. vLLM runs as in training: beside the policy, whose
weights it is given before each rollout (timed apart), and only after a few greedy tokens of both engines agreed.

Each engine and block length has a process of its own, with a time limit: a crash or a hang loses that one. Results are
appended to `results.jsonl` in `--output_dir` as they come; at the end there are a table and `results.png`.
`--preload MODULE` imports a module first, in every process. We have not run this on a GPU yet; on a CPU it runs with
`PYTHONPATH=. python scripts/gpu_rollout_bench.py --model tiny --preload tests.vllm_engine.harness --engines vllm_eager
transformers` in an environment of `make test-vllm`.
"""

import argparse
import importlib
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any

SHAPES: dict[str, dict[str, int]] = {
    "8b": {"hidden_size": 4096, "intermediate_size": 12_288, "num_hidden_layers": 36, "num_attention_heads": 32},
    "4b": {"hidden_size": 2560, "intermediate_size": 9728, "num_hidden_layers": 36, "num_attention_heads": 32},
    "1.7b": {"hidden_size": 2048, "intermediate_size": 6144, "num_hidden_layers": 28, "num_attention_heads": 16},
    "tiny": {"hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 2, "num_attention_heads": 2},
}
ENGINES = ("vllm", "vllm_eager", "transformers")
PUBLISHED = {"vocab_size": 151_936, "mask_token_id": 151_669, "num_key_value_heads": 8, "head_dim": 128}
TINY = {"vocab_size": 512, "mask_token_id": 511, "num_key_value_heads": 1, "head_dim": 32}


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description="SDAR's rollouts by vLLM beside those by Transformers, on one GPU.")
    parser.add_argument("--model", choices=SHAPES, default="8b")
    parser.add_argument("--engines", nargs="+", choices=ENGINES, default=list(ENGINES))
    parser.add_argument("--block_length", nargs="+", type=int, default=[4, 32])
    parser.add_argument("--num_rows", nargs="+", type=int, default=[64, 256])
    parser.add_argument("--tokens_per_step", nargs="+", type=int, default=[1, 2])
    parser.add_argument("--prompt_length", type=int, default=256)
    parser.add_argument("--completion_length", type=int, default=256)
    parser.add_argument("--num_repetitions", type=int, default=1, help="the median is reported")
    parser.add_argument(
        "--gpu_memory_utilization", type=float, default=0.6, help="vLLM's share; the policy has the rest"
    )
    parser.add_argument("--max_seconds", type=float, default=240.0, help="of each process")
    parser.add_argument("--output_dir", type=Path, default=Path("outputs/gpu_rollout_bench"))
    parser.add_argument("--preload", help="module to import first")
    parser.add_argument("--worker", nargs=2, metavar=("ENGINE", "BLOCK"), help=argparse.SUPPRESS)
    return parser


def cells_of(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Every combination, those of one process side by side."""
    names = ("engine", "block_length", "num_rows", "tokens_per_step")
    values = product(options.engines, options.block_length, options.num_rows, options.tokens_per_step)
    return [dict(zip(names, value, strict=True)) for value in values]


# In the process of an engine


@contextmanager
def as_it_is(model: Any) -> Iterator[Any]:
    yield model


def build_model(options: argparse.Namespace, block_length: int) -> Any:
    """A random policy on the device, and a folder with its configuration, which is all that vLLM reads."""
    import torch

    from trl_stabledrl.models import SDARConfig, SDARForCausalLM

    is_tiny = options.model == "tiny"
    shape: dict[str, Any] = {**SHAPES[options.model], **(TINY if is_tiny else PUBLISHED)}
    config = SDARConfig(block_size=block_length, **shape)
    config.architectures = ["SDARForCausalLM"]
    folder = options.output_dir / f"{options.model}_block{block_length}"
    config.save_pretrained(folder)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    torch.manual_seed(0)
    with torch.device(device):
        model = SDARForCausalLM._from_config(config, attn_implementation="sdpa")
    model.to(torch.float32 if device == "cpu" else torch.bfloat16)  # pyright: ignore[reportArgumentType, reportCallIssue]
    model.name_or_path = str(folder)
    return model.eval().requires_grad_(False)


def work(options: argparse.Namespace, engine_name: str, block_length: int) -> None:
    """Measure all cells of one engine and block length, and append each to the results."""
    import torch
    from accelerate import Accelerator

    from trl_stabledrl.engines import TransformersEngine
    from trl_stabledrl.samplers import SamplingSettings

    model = build_model(options, block_length)
    generator = torch.Generator().manual_seed(0)
    shape = (max(options.num_rows), options.prompt_length)
    prompts = torch.randint(0, model.config.vocab_size - 300, shape, generator=generator).tolist()
    start = time.perf_counter()
    plain = TransformersEngine(
        lambda: as_it_is(model),
        attention="block",
        mask_token_id=model.config.mask_token_id,
        end_token_ids=(),
        settings=SamplingSettings(max_completion_length=options.completion_length, block_length=block_length),
        device=model.device,
        any_rank=None,
    )
    engine: Any = plain
    if engine_name != "transformers":
        engine = vllm_engine(options, model, Accelerator(), plain, is_eager=engine_name == "vllm_eager")
    seconds_to_start = round(time.perf_counter() - start, 2)
    for tokens_per_step in options.tokens_per_step:
        engine.settings = plain.settings = replace(
            plain.settings, num_denoising_steps=-(-block_length // tokens_per_step), temperature=1.0
        )
        engine.generate(prompts[:4], row_seeds=[*range(len(prompts[:4]))])  # compiles, and compares the engines
        for num_rows in options.num_rows:
            cell = {
                "engine": engine_name,
                "block_length": block_length,
                "num_rows": num_rows,
                "tokens_per_step": tokens_per_step,
            }
            found = measure(options, engine, prompts[:num_rows])
            append(options, cell | found | {"seconds_to_start": seconds_to_start} | facts())


def vllm_engine(options: argparse.Namespace, model: Any, accelerator: Any, reference: Any, *, is_eager: bool) -> Any:
    from trl_stabledrl.engines.vllm import VLLMEngine

    tokenizer: Any = None  # token ids go in and come out
    kwargs: dict[str, Any] = {"load_format": "dummy", "enforce_eager": is_eager}
    if options.model == "tiny":
        kwargs["num_gpu_blocks_override"] = 4096
    return VLLMEngine(
        model,
        accelerator,
        tokenizer,
        reference=reference,
        self_check=True,
        engine_kwargs=kwargs,
        gpu_memory_utilization=options.gpu_memory_utilization,
        max_model_length=options.prompt_length + options.completion_length + 64,
        max_num_seqs=max(options.num_rows),
    )


def measure(options: argparse.Namespace, engine: Any, prompts: list[list[int]]) -> dict[str, Any]:
    import torch

    is_cuda = torch.cuda.is_available()
    seconds: list[float] = []
    sync_seconds = 0.0
    num_tokens = 0
    for repetition in range(options.num_repetitions):
        if hasattr(engine, "_sync"):
            start = time.perf_counter()
            engine._sync(None)
            sync_seconds = time.perf_counter() - start
            engine._version = "now"
        if is_cuda:
            torch.cuda.synchronize()
        start = time.perf_counter()
        seeds = [1000 * repetition + row for row in range(len(prompts))]
        num_tokens = engine.generate(prompts, row_seeds=seeds, policy_version="now").num_tokens
        if is_cuda:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    assert num_tokens == len(prompts) * options.completion_length
    median = statistics.median(seconds)
    return {
        "tokens_per_second": round(num_tokens / median, 1),
        "seconds": round(median, 3),
        "sync_seconds": round(sync_seconds, 3),
        # of the device: the cache that vLLM reserves included
        "peak_memory_gb": round(torch.cuda.max_memory_reserved() / 1e9, 2) if is_cuda else None,
    }


def facts() -> dict[str, Any]:
    from importlib import metadata

    import torch

    versions: dict[str, Any] = {}
    for package in ("vllm", "transformers", "torch"):
        try:
            versions[package] = metadata.version(package)
        except metadata.PackageNotFoundError:
            versions[package] = None
    return {"device": torch.cuda.get_device_name(0) if torch.cuda.is_available() else "CPU"} | versions


def append(options: argparse.Namespace, result: dict[str, Any]) -> None:
    with (options.output_dir / "results.jsonl").open("a") as file:
        file.write(json.dumps({"model": options.model} | result) + "\n")


# In the process that was started


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()] if path.is_file() else []


def read_results(path: Path) -> list[dict[str, Any]]:
    """The last result of each cell."""
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for result in read_lines(path):
        found[tuple(result[name] for name in ("model", "engine", "block_length", "num_rows", "tokens_per_step"))] = (
            result
        )
    return list(found.values())


def show(results: Sequence[dict[str, Any]]) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table(title="SDAR rollouts, tokens per second")
    for name in ("model", "engine", "block", "rows", "a step", "tokens/s", "s", "sync s", "GB"):
        table.add_column(name, justify="left" if name in ("model", "engine") else "right", no_wrap=True)
    for result in results:
        cells = [result["model"], result["engine"], *(str(result[name]) for name in
                 ("block_length", "num_rows", "tokens_per_step"))]  # fmt: skip
        if "error" in result:
            table.add_row(*cells, "failed", "", "", "")
            continue
        peak = result["peak_memory_gb"]
        table.add_row(
            *cells,
            f"{result['tokens_per_second']:,.0f}",
            f"{result['seconds']:.2f}",
            f"{result['sync_seconds']:.2f}",
            "" if peak is None else f"{peak:.1f}",
        )
    Console().print(table)
    for error in {result["error"] for result in results if "error" in result}:
        print(error, file=sys.stderr)


def draw(results: Sequence[dict[str, Any]], path: Path) -> None:
    """Bars of tokens per second, a group for each block length, number of rows and tokens a step."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    done = [result for result in results if "error" not in result]
    key = ("block_length", "num_rows", "tokens_per_step")
    groups = sorted({tuple(result[name] for name in key) for result in done})
    figure, axes = pyplot.subplots(figsize=(max(6.0, 1.3 * len(groups)), 4.2), layout="constrained")
    for number, engine in enumerate(ENGINES):
        heights = {tuple(result[name] for name in key): result["tokens_per_second"] for result in done
                   if result["engine"] == engine}  # fmt: skip
        places = [place + (number - 1) * 0.27 for place, group in enumerate(groups) if group in heights]
        values = [heights[group] for group in groups if group in heights]
        if values:
            bars = axes.bar(places, values, width=0.25, label=engine.replace("_", ", "))
            axes.bar_label(bars, labels=[f"{value:,.0f}" for value in values], fontsize=7, padding=1)
    labels = [f"block {block}\n{rows} rows\n{tokens} a step" for block, rows, tokens in groups]
    axes.set_xticks(range(len(groups)), labels, fontsize=8)
    axes.set_ylabel("tokens per second")
    axes.set_title(f"SDAR-{done[0]['model']} on {done[0]['device']}", loc="left")
    axes.spines[["top", "right"]].set_visible(False)
    axes.margins(y=0.12)
    axes.legend(frameon=False, ncols=3, loc="upper left", bbox_to_anchor=(0, -0.22))
    figure.savefig(path, dpi=150)
    pyplot.close(figure)


def main(argv: list[str] | None = None) -> int:
    arguments = sys.argv[1:] if argv is None else argv
    options = make_parser().parse_args(arguments)
    if options.preload:
        importlib.import_module(options.preload)
    options.output_dir.mkdir(parents=True, exist_ok=True)
    if options.worker:
        work(options, options.worker[0], int(options.worker[1]))
        return 0
    for engine, block_length in dict.fromkeys((cell["engine"], cell["block_length"]) for cell in cells_of(options)):
        print(f"{engine}, block {block_length} ...", flush=True)
        before = len(read_lines(options.output_dir / "results.jsonl"))
        command = [sys.executable, __file__, *arguments, "--worker", engine, str(block_length)]
        try:
            status = subprocess.run(command, timeout=options.max_seconds, env=dict(os.environ)).returncode
            reason = f"{engine}, block {block_length}: exit status {status}, its messages are above"
        except subprocess.TimeoutExpired:
            status, reason = 1, f"{engine}, block {block_length}: not done after {options.max_seconds:g} s"
        if status:
            done = read_lines(options.output_dir / "results.jsonl")[before:]
            for cell in cells_of(options):
                is_here = (cell["engine"], cell["block_length"]) == (engine, block_length)
                if is_here and not any(cell.items() <= result.items() for result in done):
                    append(options, cell | {"error": reason})
    results = [result for result in read_results(options.output_dir / "results.jsonl") if
               result["model"] == options.model]  # fmt: skip
    show(results)
    if any("error" not in result for result in results):
        try:
            draw(results, options.output_dir / "results.png")
        except ModuleNotFoundError:
            print("No picture without matplotlib: pip install 'trl-stabledrl[lab]'", file=sys.stderr)
        print(f"Results are in {options.output_dir}")
    return int(any("error" in result for result in results))


if __name__ == "__main__":
    raise SystemExit(main())
