# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import json
from typing import Any

import pytest
import torch

from scripts import bench
from trl_stabledrl import _compat
from trl_stabledrl.core.masking import MaskLaw, draw_mask_plan
from trl_stabledrl.samplers import common

TINY = bench.Job(
    vocab_size=2500,  # a square, so that the grid of the two-stage race has no empty cells
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=2,
    prompt_length=5,
    completion_length=16,
    block_length=8,
    num_denoising_steps=4,
    num_generations=4,
)
NOTHING = dict.fromkeys(bench.PHASES, 0)


def planned(job: bench.Job, *, law: MaskLaw, seed: int, iteration: int) -> list[int]:
    """Scored tokens of the generation, draw by draw."""
    plan = draw_mask_plan(
        torch.arange(job.num_generations),
        torch.full((job.num_generations,), job.completion_length),
        torch.ones(job.num_generations, job.prompt_length, dtype=torch.bool),
        window_length=job.completion_length,
        law=law,
        sampling="complementary",
        num_draws=job.num_mc_samples,
        block_length=job.block_length,
        seed=seed,
        iteration=iteration,
    )
    return plan.is_scored.sum(dim=(0, 2)).tolist()


def projected_in_rollout(job: bench.Job) -> int:
    """Each step projects what is masked of the block, and commits an even share of it."""
    share = job.block_length // job.num_denoising_steps
    masked = range(job.block_length, 0, -share)
    return job.num_generations * job.completion_length // job.block_length * sum(masked)


def by_phase(**values: int) -> dict[str, int]:
    return {**NOTHING, **values, "total": sum(values.values())}


@pytest.mark.parametrize(("law", "seed"), [("block_suffix", 0), ("block_suffix", 7), ("semi_ar", 3)])
def test_a_cycle_costs_one_projected_position_per_masked_or_scored_token(law: MaskLaw, seed, monkeypatch):
    monkeypatch.setattr(common, "_CHUNK_LOGITS", 4 * TINY.vocab_size)
    monkeypatch.setattr(_compat, "TILE_NUMBERS", 8 * 4 * TINY.vocab_size)  # a CPU takes an eighth of it

    figures = bench.bench_llada(TINY, seed=seed, mask_law=law)

    first, second = (planned(TINY, law=law, seed=seed, iteration=iteration) for iteration in (0, 1))
    rollout = projected_in_rollout(TINY)
    assert rollout == 4 * 2 * (8 + 6 + 4 + 2)
    scored = {"old": sum(second), "loss": sum(first) + sum(second)}
    assert figures["vocab_positions"] == by_phase(rollout=rollout, **scored)
    assert figures["recomputed_positions"] == scored["loss"]
    # old: the second iteration alone, since the first has ratio 1; one pass per draw
    calls = {"rollout": 2 * 4, "old": 2, "loss": 2 * 2}
    assert figures["model_calls"] == by_phase(**calls)
    assert figures["backbone_positions"] == by_phase(**{phase: n * 4 * (5 + 16) for phase, n in calls.items()})
    assert figures["graphs"] == by_phase(loss=calls["loss"])  # none in rollouts
    # tiles are at least 256 tokens wide, so that many scored rows make them larger than asked for
    tiles = [n * max(256, 4 * TINY.vocab_size // n) for n in first + second]
    assert figures["largest_logits_mb"] == round(4 * max(4 * TINY.vocab_size, *tiles) / 1e6, 3)


def test_logits_stay_below_34_mb_at_the_published_vocabulary():
    job = dataclasses.replace(
        bench.Job(),
        hidden_size=8,
        intermediate_size=8,
        num_hidden_layers=1,
        num_attention_heads=1,
        prompt_length=2,
        completion_length=32,
        num_denoising_steps=1,
        num_iterations=1,
    )

    figures = bench.bench_llada(job)

    assert figures["vocab_positions"]["rollout"] == 8 * 32  # four chunks
    assert 30 < figures["largest_logits_mb"] < 34
    assert figures["vocab_positions"]["old"] == figures["model_calls"]["old"] == 0


@pytest.mark.parametrize(("law", "expected", "most"), [("block_suffix", 12_146, 13_400), ("semi_ar", 9_496, 9_650)])
def test_the_default_job_stays_within_its_bounds_for_a_hundred_seeds(law: MaskLaw, expected, most):
    job = bench.Job()
    rollout = projected_in_rollout(job)
    assert rollout == 8704

    totals = []
    for seed in range(100):
        first, second = (sum(planned(job, law=law, seed=seed, iteration=iteration)) for iteration in (0, 1))
        totals.append(rollout + first + 2 * second)

    assert max(totals) <= most
    # measured standard deviations over 1,000 seeds: 385 and 34
    deviation = {"block_suffix": 385, "semi_ar": 34}[law]
    assert abs(sum(totals) / 100 - expected) < 3 * deviation / 10


def test_json_is_one_line_and_the_tables_name_every_figure(capsys, monkeypatch):
    monkeypatch.setenv("COLUMNS", "160")
    sizes = {**dataclasses.asdict(TINY), "vocab_size": 64, "num_iterations": 1}
    flags = [f"--{name}={value}" for name, value in sizes.items()]

    assert bench.main(["llada", "--json", "--mask_law=semi_ar", "--seed=3", *flags]) == 0

    printed = capsys.readouterr().out
    figures: dict[str, Any] = json.loads(printed)
    assert printed.count("\n") == 1
    assert figures["job"] == sizes
    assert (figures["seed"], figures["mask_law"]) == (3, "semi_ar")
    for name in ("model_calls", "backbone_positions", "vocab_positions", "cpu_seconds"):
        assert set(figures[name]) == {*bench.PHASES, "total"}
    assert {"recomputed_positions", "largest_logits_mb", "peak_rss_gb"} <= set(figures)
    assert figures["cpu_seconds"]["total"] == pytest.approx(
        sum(figures["cpu_seconds"][phase] for phase in bench.PHASES), abs=0.05
    )

    figures["vocab_positions"]["total"] = 12_000
    bench.show(figures, peers=bench.PEERS)

    table = capsys.readouterr().out
    assert "StableDRL" in table
    assert "107,520 (9.0x)" in table
    bench.show(figures, peers=())
    assert "The peers were measured on the default job only." in capsys.readouterr().out


def test_a_block_diffusion_cycle_shares_prompt_cache_and_clean_text():
    job = dataclasses.replace(
        TINY, prompt_length=10, completion_length=17, block_length=4, num_denoising_steps=4, num_generations=3
    )

    figures = bench.bench_sdar(job, seed=1)

    # 2 of the prompt's 10 tokens share a block with 2 of the completion; 3 whole blocks follow, and 3 tokens
    blocks, masked = [2, 4, 4, 4, 3], 3 + 3 * 10 + 6
    steps = sum(blocks)
    prefill, stored = 8, 3 * 4 * (len(blocks) - 1)
    positions = 3 * sum(size * steps for size, steps in zip([4, 4, 4, 4, 3], blocks, strict=True))
    assert figures["model_calls"] == by_phase(rollout=1 + steps, old=1, loss=2)
    assert figures["vocab_positions"]["rollout"] == 3 * masked
    assert figures["backbone_positions"]["rollout"] == prefill + positions + stored
    # clean: the prompt, and the completion up to its last block; each copy: 2 prompt tokens and the completion
    per_pass = 3 * (10 + 14 + 2 * (2 + 17))
    assert figures["backbone_positions"]["old"] == per_pass
    assert figures["backbone_positions"]["loss"] == 2 * per_pass
    assert figures["graphs"] == by_phase(loss=2)
    assert figures["recomputed_positions"] == figures["vocab_positions"]["loss"]


def test_the_default_block_diffusion_job_is_within_its_bounds(monkeypatch):
    job = dataclasses.replace(
        bench.SDAR_JOB, vocab_size=121, hidden_size=16, intermediate_size=24, num_hidden_layers=1
    )

    figures = bench.bench_sdar(job)

    assert figures["model_calls"]["rollout"] == 129
    assert figures["vocab_positions"]["rollout"] == 8 * 32 * (4 + 3 + 2 + 1) == 2560
    assert figures["backbone_positions"]["rollout"] == 64 + 8 * (32 * 16 + 31 * 4) == 5152
    assert figures["backbone_positions"]["old"] == 8 * (64 + 124 + 2 * 128) <= 8 * (192 + 2 * 131)
    # pairs score every token once, and once more where both members are full
    assert 1024 <= figures["vocab_positions"]["old"] <= 2048
    assert figures["vocab_positions"]["loss"] >= 2 * 1024
