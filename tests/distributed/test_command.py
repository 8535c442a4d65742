# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl train` with the shipped ZeRO-3 launch file, on two processes without an accelerator."""

import json
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from torch import Tensor

import trl_stabledrl
from tests.distributed.processes import finished, free_port
from tests.model_tools import CASES, ModelCase, weights_on_disk
from tests.trainer_tools import flat, relative_difference
from trl_stabledrl.cli.main import main

# ZeRO-3 shards tensors of 100,000 numbers and more: here the embeddings, the head and the feed-forward layers
SIZES = {
    "llada": {"d_model": 256, "mlp_hidden_size": 512, "vocab_size": 512, "embedding_size": 512},
    "sdar": {"hidden_size": 256, "intermediate_size": 512, "vocab_size": 512},
}
REWARD = """
def reward(completion_ids, **kwargs):
    return [sum(ids) * 5 % 8 / 8 for ids in completion_ids]
"""
LOADED = """
import sys, torch, transformers, trl_stabledrl
model = transformers.AutoModelForCausalLM.from_pretrained(sys.argv[1])
transformers.AutoTokenizer.from_pretrained(sys.argv[1])
torch.save(model(torch.arange(5, 17)[None]).logits, "logits.pt")
"""


def recipe_of(model_folder: Path) -> dict[str, Any]:
    return {
        "model_name_or_path": str(model_folder),
        "task": "addition",
        "reward_funcs": ["arbitrary.reward"],
        "max_completion_length": 8,
        "num_generations": 4,
        "learning_rate": 0.3,
        "optim": "sgd",
        "lr_scheduler_type": "constant",
        "max_steps": 3,
        "save_steps": 2,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
        "report_to": "none",
    }


def launch_file(folder: Path) -> Path:
    """Only what a machine without accelerators needs is changed."""
    shipped = yaml.safe_load((trl_stabledrl.recipes_folder() / "accelerate" / "zero3.yaml").read_text())
    changes = {"num_processes": 2, "use_cpu": True, "mixed_precision": "no", "main_process_port": free_port()}
    path = folder / "zero3_on_cpus.yaml"
    path.write_text(yaml.safe_dump(shipped | changes))
    return path


def assert_complete(folder: Path, case: ModelCase, published: dict[str, Tensor], config: dict[str, Any]) -> None:
    """What reads the published checkpoint reads this one."""
    tensors = weights_on_disk(folder)
    assert {name: tensor.shape for name, tensor in tensors.items()} == {n: t.shape for n, t in published.items()}
    saved = json.loads((folder / "config.json").read_text())
    for name in config.keys() - {"transformers_version", "use_cache", "torch_dtype"}:
        assert saved[name] == config[name], name
    assert (folder / "tokenizer.json").is_file()


@pytest.mark.parametrize("case", CASES.values(), ids=CASES)
def test_zero3_trains_saves_resumes_and_ends_where_one_process_does(case, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))
    model_folder = case.folder(tmp_path / "model", **SIZES[case.name])
    config = json.loads((model_folder / "config.json").read_text())
    published = weights_on_disk(model_folder)
    (tmp_path / "arbitrary.py").write_text(REWARD)
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text(yaml.safe_dump(recipe_of(model_folder)))
    command = ["train", "--config", str(recipe)]
    two = [sys.executable, "-m", "trl_stabledrl.cli.main", *command, "--output_dir", "two"]
    two += ["--accelerate_config", str(launch_file(tmp_path)), "--per_device_train_batch_size", "2"]
    two += ["--gradient_accumulation_steps", "2"]

    finished([*two, "--max_steps", "2"], folder=tmp_path)
    assert_complete(tmp_path / "two" / "checkpoint-2", case, published, config)
    text = finished([*two, "--resume_from_checkpoint", "true"], folder=tmp_path)
    assert "Trained 3 steps." in text
    assert main([*command, "--output_dir", "one", "--per_device_train_batch_size", "8"]) == 0

    assert_complete(tmp_path / "two", case, published, config)
    trained, expected = (weights_on_disk(tmp_path / name) for name in ("two", "one"))
    update, expected_update = (
        flat(tensors[name] - published[name] for name in published) for tensors in (trained, expected)
    )
    assert expected_update.norm() > 1e-2
    assert relative_difference(update, expected_update) < 1e-4
    finished([sys.executable, "-c", LOADED, str(tmp_path / "two")], folder=tmp_path)
    expected_logits = case.naive_logits(trained, case.config | config, torch.arange(5, 17))
    logits = torch.load(tmp_path / "logits.pt")[0]
    torch.testing.assert_close(logits.double(), expected_logits, rtol=0, atol=1e-3)
