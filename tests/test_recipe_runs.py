# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Every recipe that ships, cut to a tiny model, two steps and short completions; all else is the recipe's own.

Without quantisation, since bitsandbytes is no dependency of the tests, and with a stand-in for vLLM.
"""

import json
from contextlib import nullcontext
from pathlib import Path

import datasets
import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer

import trl_stabledrl
from tests.model_tools import CASES, weights_on_disk
from tests.test_recipes import ROWS
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from tests.vllm_double import vllm_double
from trl_stabledrl.cli.main import main
from trl_stabledrl.data import TASKS

RECIPES = [
    path
    for path in sorted(trl_stabledrl.recipes_folder().glob("*.yaml"))
    if path.stem not in ("quickstart", "lab", "lab_sdar")
]
IDS = torch.arange(5, 20)[None]
CUT = {
    "dtype": "float32",
    "bf16": False,
    "use_cpu": True,
    "max_steps": 2,
    "num_train_prompts": 4,
    "num_eval_prompts": 2,
    "per_device_train_batch_size": 2,
    "gradient_accumulation_steps": 2,
    "per_device_eval_batch_size": 4,
    "num_generations": 4,
    "max_completion_length": 8,
    "num_denoising_steps": 2,
    "logging_steps": 1,
    "save_steps": 2,
    "eval_steps": 2,
    "load_in_4bit": False,
    "disable_tqdm": True,
    "dataloader_pin_memory": False,
}


@pytest.fixture(scope="module")
def folders(tmp_path_factory):
    made = {}
    for name, case in CASES.items():
        made[name] = case.folder(tmp_path_factory.mktemp("models") / name)
        tiny_tokenizer(chat_template=True).save_pretrained(made[name])
    return made


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)

    def load_dataset(source, config_name=None, *, split):
        return datasets.Dataset.from_list([ROWS[source]] * 8)

    monkeypatch.setattr("trl_stabledrl.data._load.load_dataset", load_dataset)


def cut(path: Path, model: Path) -> str:
    """
    Write the recipe with small numbers, and one more reward.

    A random model never earns the others, and a group without a difference in reward would not train it.
    """
    recipe = yaml.safe_load(path.read_text())
    Path("length_reward.py").write_text(
        "def fn(completion_ids, **kwargs):\n    return [sum(ids) % 8 / 8 for ids in completion_ids]\n"
    )
    recipe["reward_funcs"] = [*recipe.get("reward_funcs", TASKS[recipe["task"]].reward_names), "length_reward.fn"]
    if "reward_weights" in recipe:
        recipe["reward_weights"] = [*recipe["reward_weights"], 1.0]
    if "block_length" in recipe:
        recipe["block_length"] = 4
    if "vllm_max_model_length" in recipe:
        recipe["vllm_max_model_length"] = 512  # the tiny model's positions
    Path("recipe.yaml").write_text(yaml.safe_dump(recipe | CUT | {"model_name_or_path": str(model)}))
    return "recipe.yaml"


@pytest.mark.parametrize("path", RECIPES, ids=lambda path: path.stem)
def test_recipe_trains_saves_and_reloads(path, folders):
    recipe = yaml.safe_load(path.read_text())
    case = CASES[path.stem.partition("_")[0]]
    model = folders[case.name]
    changed = {*CUT, "model_name_or_path", "block_length", "reward_funcs", "reward_weights", "vllm_max_model_length"}
    uses_vllm = recipe.get("rollout_backend") == "vllm"

    with vllm_double() if uses_vllm else nullcontext([]) as engines:
        assert main(["train", "--config", cut(path, model)]) == 0

    assert len(engines) == uses_vllm
    for engine in engines:
        calls = [call.split()[0] for call in engine.calls]
        assert calls.count("generate") >= 3  # self-check, two updates
        assert calls[-1] == "sleep"
    out = Path(recipe["output_dir"])
    state = json.loads((out / "checkpoint-2" / "trainer_state.json").read_text())
    assert state["global_step"] == 2
    assert all(logs["grad_norm"] > 0 for logs in state["log_history"] if "grad_norm" in logs)
    assert any("eval_reward" in logs for logs in state["log_history"])
    start = AutoModelForCausalLM.from_pretrained(model)(IDS).logits
    for folder in (out, out / "checkpoint-2"):
        assert AutoTokenizer.from_pretrained(folder).chat_template == CHAT_TEMPLATE
        resolved = yaml.safe_load((folder / "resolved_config.yaml").read_text())
        assert all(resolved[name] == value for name, value in recipe.items() if name not in changed)
        if recipe.get("use_peft"):
            assert not weights_on_disk(folder).keys() & case.tensors(case.config).keys()
        else:
            # a published checkpoint in every respect: what reads one reads this
            assert weights_on_disk(folder).keys() == case.tensors(case.config).keys()
            config = json.loads((folder / "config.json").read_text())
            assert config.items() >= {name: case.config[name] for name in ("vocab_size", "auto_map")}.items()
            assert AutoConfig.from_pretrained(folder).mask_token_id == 2
        trained = AutoModelForCausalLM.from_pretrained(folder)(IDS).logits
        assert trained.isfinite().all()
        assert not torch.equal(trained, start)
