# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import pytest
import yaml

from tests.tiny import published_llada_folder


@pytest.fixture(scope="session")
def model_folder(tmp_path_factory):
    return published_llada_folder(tmp_path_factory.mktemp("models") / "llada")


@pytest.fixture(autouse=True)
def in_its_own_folder(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("datasets.config.HF_DATASETS_CACHE", str(tmp_path / "cache"))


@pytest.fixture
def recipe(tmp_path, model_folder):
    """Write a recipe that trains in a second, with changes; `None` leaves a line out."""

    def write(**changes):
        values = {
            "model_name_or_path": str(model_folder),
            "task": "addition",
            "output_dir": str(tmp_path / "out"),
            "max_completion_length": 8,
            "block_length": 4,
            "num_denoising_steps": 2,
            "per_device_train_batch_size": 8,
            "num_generations": 4,
            "max_steps": 1,
            "save_steps": 1,
            "bf16": False,
            "use_cpu": True,
            "disable_tqdm": True,
            **changes,
        }
        path = tmp_path / "recipe.yaml"
        path.write_text(yaml.safe_dump({key: value for key, value in values.items() if value is not None}))
        return str(path)

    return write


@pytest.fixture
def no_weights(monkeypatch):
    """Fail when weights are loaded."""
    from trl_stabledrl.models import LLaDAModelLM

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(LLaDAModelLM, "from_pretrained", refuse)
