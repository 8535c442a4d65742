# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""The family that docs/extending.md shows works as that page says."""

import importlib
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
import yaml
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM

from tests.model_tools import restored_families
from tests.tiny import tiny_tokenizer
from tests.trainer_tools import largest_difference, letter_tokenizer, run_of
from trl_stabledrl import generate
from trl_stabledrl.models import FAMILIES, family_of, mask_token_id_of

ROOT = Path(__file__).resolve().parents[1]


def example() -> str:
    (block,) = re.findall(r"^```python\n(.*?)^```", (ROOT / "docs/extending.md").read_text(), re.MULTILINE | re.DOTALL)
    return block


@pytest.fixture
def toy(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[ModuleType]:
    """The page's example, imported from a file in the current folder and forgotten afterwards."""
    (tmp_path / "toy_mdlm.py").write_text(example())
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    with restored_families():
        yield importlib.import_module("toy_mdlm")
    for name in ("toy_mdlm", "my_rewards"):
        sys.modules.pop(name, None)


def toy_model(toy: ModuleType, *, vocab_size: int = 12, dtype: torch.dtype = torch.float64) -> Any:
    config = toy.ToyConfig(
        vocab_size=vocab_size,
        hidden_size=16,
        intermediate_size=24,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.2,
        mask_token_id=2,
        eos_token_id=1,
        pad_token_id=0,
    )
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return AutoModelForCausalLM.from_config(config, dtype=dtype)


def test_the_toy_family_trains_for_a_step_as_the_definition_says(toy, tmp_path):
    model = toy_model(toy)
    before = {name: value.clone() for name, value in model.state_dict().items()}

    run = run_of(tmp_path / "run", model=model)

    assert family_of(model.config) is toy.FAMILY
    assert (run.trainer.args.mask_law, run.trainer.args.num_mc_samples) == ("uniform", 2)
    assert run.trainer.state.global_step == 1
    assert largest_difference(run) < 1e-6  # measured 4.4e-8: RMSNorm is float32
    assert any(not torch.equal(value, before[name]) for name, value in model.state_dict().items())


def test_the_toy_family_saves_and_loads_through_the_auto_classes(toy, tmp_path):
    model = toy_model(toy, dtype=torch.float32).eval()
    model.save_pretrained(tmp_path / "saved")
    ids = torch.tensor([[5, 9, 2, 2, 7, 11]])
    for auto_class in (AutoModel, AutoModelForCausalLM):
        again = auto_class.from_pretrained(tmp_path / "saved")
        assert type(again) is toy.ToyForMaskedDiffusion
        assert torch.equal(again(ids).logits, model(ids).logits)
    assert mask_token_id_of(AutoConfig.from_pretrained(tmp_path / "saved")) == 2

    changed = ids.clone()
    changed[0, -1] = 4
    difference = (model(ids).logits - model(changed).logits).abs().amax(dim=-1)
    assert (difference > 1e-3).all()  # the last token reaches every position
    completions = generate(model, letter_tokenizer(), ["ab", "c"], max_completion_length=6, block_length=3)
    assert len(completions) == 2


def test_a_reward_module_brings_its_family_to_the_command_line(toy, tmp_path, monkeypatch, capsys):
    from trl_stabledrl.cli.main import main

    model = toy_model(toy, vocab_size=64, dtype=torch.float32)
    model.save_pretrained(tmp_path / "checkpoint")
    tiny_tokenizer().save_pretrained(tmp_path / "checkpoint")
    reward = "import toy_mdlm\n\n\ndef fn(completions, **kwargs):\n    return [0.5] * len(completions)\n"
    (tmp_path / "my_rewards.py").write_text(reward)
    recipe = {
        "model_name_or_path": str(tmp_path / "checkpoint"),
        "task": "addition",
        "reward_funcs": ["my_rewards.fn"],
        "output_dir": str(tmp_path / "out"),
        "max_completion_length": 8,
        "per_device_train_batch_size": 8,
        "num_generations": 4,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "disable_tqdm": True,
    }
    (tmp_path / "recipe.yaml").write_text(yaml.safe_dump(recipe))
    FAMILIES.remove(toy.FAMILY)  # as in a process that has not imported it
    sys.modules.pop("toy_mdlm")

    assert main(["train", "--config", "recipe.yaml", "--reward_funcs", "exact_match_reward", "--dry_run"]) == 2
    assert "'toy_mdlm', which belongs to no known family" in capsys.readouterr().err
    assert main(["train", "--config", "recipe.yaml", "--dry_run"]) == 0
    assert ": Toy, " in capsys.readouterr().out
    assert main(["train", "--config", "recipe.yaml"]) == 0
    assert (tmp_path / "out" / "model.safetensors").is_file()


def test_a_file_beside_the_other_models_is_all_a_checkout_needs(tmp_path):
    copied = tmp_path / "trl_stabledrl"
    shutil.copytree(ROOT / "trl_stabledrl", copied, ignore=shutil.ignore_patterns("__pycache__"))
    (copied / "models" / "toy_mdlm.py").write_text(example())
    ask = (
        "import trl_stabledrl; from transformers import AutoConfig; from trl_stabledrl.models import FAMILIES; "
        "print(trl_stabledrl.__file__, [f.name for f in FAMILIES], type(AutoConfig.for_model('toy_mdlm')).__module__)"
    )
    done = subprocess.run(
        [sys.executable, "-W", "error", "-c", ask], cwd=tmp_path, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.split(maxsplit=1)[0] == str(copied / "__init__.py")
    assert "['LLaDA', 'SDAR', 'Toy'] trl_stabledrl.models.toy_mdlm" in done.stdout
