# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The lab's recipe cut down to a second, and made-up results of it."""

import json
from pathlib import Path
from typing import Any

import yaml

import trl_stabledrl
from trl_stabledrl.lab_report import LAB_FILE, Results

RECIPE = trl_stabledrl.recipes_folder() / "lab.yaml"


def small_recipe(folder: Path, **changes: Any) -> Path:
    """Everything that costs time cut down."""
    recipe = yaml.safe_load(RECIPE.read_text())
    recipe |= {"num_train_prompts": 32, "num_eval_prompts": 8}
    recipe["model"] |= {"hidden_size": 16, "intermediate_size": 16, "num_hidden_layers": 1}
    recipe["sft"] |= {"max_steps": 2, "per_device_train_batch_size": 8}
    recipe["rl"] |= {"max_steps": 2, "per_device_train_batch_size": 8, "num_generations": 4}
    recipe["variance"] |= {"updates": [1, 2], "num_prompts": 2, "num_repeats": 3}
    path = folder / "small_lab.yaml"
    path.write_text(yaml.safe_dump(recipe | changes, sort_keys=False))
    return path


def step_of(number: int, **changes: Any) -> dict[str, Any]:
    return {
        "step": number,
        "reward": 0.4,
        "grad_norm": 1.0,
        "ratio/p99": 2.0,
        "ratio/max": 3.0,
        "drift": 0.5,
        "log_ratio/std_centred": 0.5,
        "weights/ess": 0.8,
        "weights/saturated": 0.1,
        "update/negative_share": 0.5,
        "update/max_share": 0.1,
        **changes,
    }


def made_up(
    folder: Path, runs: dict[str, dict[str, Any]], *, steps: dict[str, list[dict[str, Any]]] | None = None
) -> Results:
    """
    Results of runs that nobody made: per method `after` (final accuracies by seed) and `peak`, alike under both
    regimes, and the logged steps of each.
    """
    recipe = yaml.safe_load(RECIPE.read_text())
    own = {name: recipe.pop(name) for name in ("methods", "stress", "variance")}
    folder.mkdir(parents=True, exist_ok=True)
    (folder / LAB_FILE).write_text(json.dumps({"setting": recipe, **own}))
    for method, run in runs.items():
        for regime in run.get("regimes", ("normal", "stress")):
            for seed, after in enumerate(run["after"]):
                path = folder / "runs" / f"{method}_{regime}_seed{seed}"
                path.mkdir(parents=True)
                result = {"method": method, "regime": regime, "seed": seed, "accuracy_before": 0.4,
                          "accuracy_after": after, "peak_grad_norm": run.get("peak", 2.0), "ratio_p99": 2.0,
                          "ratio_max": 3.0, "collapsed": after < 0.1}  # fmt: skip
                (path / "result.json").write_text(json.dumps(result))
                rows = (steps or {}).get(method, [step_of(number) for number in range(1, 9)])
                (path / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    return Results(folder)
