# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json

import pytest
import torch

from scripts import bench_staircase as bench


@pytest.fixture(autouse=True)
def small(monkeypatch):
    for name, value in {"VOCAB": 40, "WIDTH": 16, "PROMPT": 8, "ROWS": 2}.items():
        monkeypatch.setattr(bench, name, value)


def test_all_ways_give_the_same_gradient_at_their_own_cost():
    model, rows, plan = bench.prepared()
    positions: list[int] = []
    model.base_model.register_forward_pre_hook(
        lambda module, args, kwargs: positions.append(kwargs["input_ids"].numel()), with_kwargs=True
    )
    gradients, costs = {}, {}
    for way, run in bench.WAYS.items():
        positions.clear()
        model.zero_grad()
        run(model, rows, plan).backward()
        gradients[way] = torch.cat([p.grad.flatten() for p in model.parameters() if p.grad is not None])
        costs[way] = (len(positions), sum(positions))

    for gradient in gradients.values():
        assert gradient.norm() > 0
        torch.testing.assert_close(gradient, gradients["staircase"], rtol=1e-4, atol=1e-5)
    completion, draws, num_blocks = bench.COMPLETION, bench.DRAWS, bench.COMPLETION // bench.BLOCK
    clean = 8 + completion - bench.BLOCK
    assert costs["staircase"] == (1, 2 * (clean + draws * completion))
    assert costs["per_draw"] == (draws, 2 * draws * (clean + completion))
    per_block = sum(8 + bench.BLOCK * (block + 1) for block in range(num_blocks))
    assert costs["per_block"] == (draws * num_blocks, 2 * draws * per_block)


def test_json_is_one_line(capsys, monkeypatch):
    monkeypatch.setattr(bench, "compare", lambda num: {way: {"cpu_seconds": float(num)} for way in bench.WAYS})

    assert bench.main(["--json", "--num_repetitions", "3"]) == 0

    printed = capsys.readouterr().out
    assert printed.count("\n") == 1
    assert json.loads(printed) == {way: {"cpu_seconds": 3.0} for way in bench.WAYS}
