# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# pyright: reportMissingImports=false
"""The plugin among the others of an installation."""

import importlib
import sys
from typing import Any

import pytest
from vllm import ModelRegistry, plugins
from vllm.model_executor.models.config import MODELS_CONFIG_MAP

from trl_stabledrl import vllm_plugin
from trl_stabledrl.vllm_plugin.engine_config import BlockDiffusionModelConfig

OTHER = """
calls = []

def register():
    from transformers import AutoConfig, PretrainedConfig
    from vllm import ModelRegistry

    class OtherConfig(PretrainedConfig):
        model_type = "other_diffusion"

    calls.append(1)
    AutoConfig.register("other_diffusion", OtherConfig, exist_ok=True)
    ModelRegistry.register_model("OtherDiffusionForCausalLM", "other_diffusion_plugin:Model")
"""


@pytest.fixture
def other_plugin(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> Any:
    """A distribution that is installed beside ours, with an architecture of its own."""
    (tmp_path / "other_diffusion_plugin.py").write_text(OTHER)
    info = tmp_path / "other_diffusion_plugin-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: other-diffusion-plugin\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text("[vllm.general_plugins]\nother = other_diffusion_plugin:register\n")
    monkeypatch.syspath_prepend(tmp_path)
    yield importlib.import_module("other_diffusion_plugin")
    ModelRegistry.models.pop("OtherDiffusionForCausalLM", None)
    sys.modules.pop("other_diffusion_plugin")


@pytest.mark.parametrize("is_turned", [False, True])
def test_both_of_two_plugins_are_loaded_in_either_order(is_turned, other_plugin, monkeypatch):
    found = plugins.load_plugins_by_group("vllm.general_plugins")
    assert {"other", "trl_stabledrl"} <= set(found)
    names = sorted(found, reverse=is_turned)
    monkeypatch.setattr(plugins, "load_plugins_by_group", lambda group: {name: found[name] for name in names})
    monkeypatch.setattr(plugins, "plugins_loaded", False)
    monkeypatch.delitem(ModelRegistry.models, vllm_plugin.ARCHITECTURE, raising=False)
    monkeypatch.delitem(MODELS_CONFIG_MAP, vllm_plugin.ARCHITECTURE, raising=False)
    plugins.load_general_plugins()
    assert other_plugin.calls == [1]
    assert {"OtherDiffusionForCausalLM", vllm_plugin.ARCHITECTURE} <= set(ModelRegistry.get_supported_archs())
    assert MODELS_CONFIG_MAP[vllm_plugin.ARCHITECTURE] is BlockDiffusionModelConfig


def test_registering_again_changes_nothing():
    vllm_plugin.register()
    models, configs = dict(ModelRegistry.models), dict(MODELS_CONFIG_MAP)
    vllm_plugin.register()
    assert ModelRegistry.models == models
    assert configs == MODELS_CONFIG_MAP
