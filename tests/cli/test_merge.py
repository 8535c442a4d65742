# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl merge`, and what `train` and `generate` do with an adapter in the place of a model."""

import json
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file
from transformers import AutoTokenizer

from tests.cli.test_train import error_of
from tests.model_tools import CASES, LORA_TARGETS, load, weights_on_disk, with_adapter
from tests.tiny import CHAT_TEMPLATE, tiny_tokenizer
from trl_stabledrl.cli.main import main
from trl_stabledrl.models import LLaDAModelLM, SDARForCausalLM

peft = pytest.importorskip("peft")
pytestmark = pytest.mark.usefixtures("in_its_own_folder")

IDS = torch.arange(5, 20)[None]
FAMILIES = [("llada", {}), ("llada", {"weight_tying": True}), ("sdar", {}), ("sdar", {"tie_word_embeddings": True})]
# largest difference of the four 3.7e-5, of logits up to 4.4: the sum of two products is rounded elsewhere
TOLERANCE = 7.4e-5


@pytest.fixture
def adapter(tmp_path, model_folder) -> Path:
    """An adapter of the recipes' model."""
    with_adapter(load(model_folder)).save_pretrained(tmp_path / "adapter")
    return tmp_path / "adapter"


def reward_anything() -> str:
    """A reward that differs within a group, where a random model never earns the task's."""
    Path("any_reward.py").write_text(
        "def fn(completion_ids, **kwargs):\n    return [sum(ids) % 8 / 8 for ids in completion_ids]\n"
    )
    return "any_reward.fn"


@pytest.fixture
def no_weights(adapter, monkeypatch):
    """Fail when weights are loaded, once there is an adapter."""

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    for model_class in (LLaDAModelLM, SDARForCausalLM):
        monkeypatch.setattr(model_class, "from_pretrained", refuse)


@pytest.mark.parametrize(("name", "changes"), FAMILIES)
def test_saved_reloaded_and_merged_adapters_give_the_same_logits(name, changes, tmp_path, capsys):
    case = CASES[name]
    base, adapter, merged = (tmp_path / part for part in ("base", "adapter", "merged"))
    case.folder(base, **changes)
    model = with_adapter(load(base))
    logits = model(IDS).logits
    model.save_pretrained(adapter)
    tiny_tokenizer(chat_template=True).save_pretrained(adapter)

    assert main(["merge", "--adapter", str(adapter), "--output_dir", str(merged)]) == 0

    assert f"Merged {adapter} into {base}, float32: {merged}" in capsys.readouterr().out
    assert (logits - load(base)(IDS).logits).abs().max() > 0.1
    assert torch.equal(peft.PeftModel.from_pretrained(load(base), adapter)(IDS).logits, logits)
    torch.testing.assert_close(load(merged)(IDS).logits, logits, rtol=0, atol=TOLERANCE)
    factors, before = load_file(adapter / "adapter_model.safetensors"), load(base).state_dict()
    for key, tensor in load(merged).state_dict().items():
        expected = before[key].double()
        if key.split(".")[-2] in LORA_TARGETS:
            a, b = (factors[f"base_model.model.{key}".replace("weight", f"lora_{end}.weight")] for end in "AB")
            expected = expected + 4 * b.double() @ a.double()  # alpha 8, rank 2
        torch.testing.assert_close(tensor.double(), expected, rtol=0, atol=1e-6)
    config = case.config | changes
    published = case.tensors(config)
    found = weights_on_disk(merged)
    assert {n: t.shape for n, t in found.items()} == {n: t.shape for n, t in published.items()}
    assert (
        json.loads((merged / "config.json").read_text()).items()
        >= {
            field: value for field, value in config.items() if field not in ("transformers_version", "torch_dtype")
        }.items()
    )
    assert AutoTokenizer.from_pretrained(merged).chat_template == CHAT_TEMPLATE
    assert not list(merged.glob("adapter*"))
    assert (
        main(["generate", "--model_name_or_path", str(merged), "--prompt", "1+1=", "--max_completion_length=4"]) == 0
    )


def test_merge_takes_dtype_and_base_from_the_flags(adapter, model_folder, tmp_path):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "moved/away"}))
    flags = ["--adapter", str(adapter), "--output_dir", "merged", "--model_name_or_path", str(model_folder)]

    assert main(["merge", *flags, "--dtype", "bfloat16"]) == 0

    assert {tensor.dtype for tensor in weights_on_disk(tmp_path / "merged").values()} == {torch.bfloat16}
    # the adapter has no tokenizer of its own
    assert AutoTokenizer.from_pretrained("merged").get_vocab() == tiny_tokenizer().get_vocab()


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("flags", "parts"),
    [
        ([], ["output_dir is missing"]),
        (["--output_dir", "out"], ["adapter is missing"]),
        (["--output_dir", "out", "--adapter", "nowhere"], ["adapter='nowhere' is no adapter", "adapter_config.json"]),
        (["--output_dir", "out", "--adapter", "MODEL"], ["is a whole model already"]),
        (["--output_dir", "full", "--adapter", "adapter"], ["output_dir='full' is not empty", "it holds kept"]),
        (["--output_dir", "full/kept", "--adapter", "adapter"], ["output_dir='full/kept' is a file"]),
        (["--output_dir", "out", "--adapter", "adapter", "--model_name_or_path", "away"], ["'away'"]),
        (["--output_dir", "out", "--adapter", "adapter", "--model_name_or_path", "adapter"], ["an adapter itself"]),
        (
            ["--output_dir", "out", "--adapter", "adapter", "--model_name_or_path", "OTHER"],
            ["has shape (32, 2)", "needs (64, 2)"],
        ),
        (["--output_dir", "out", "--adapter", "adapter", "--dtype", "int8"], ["dtype", "int8"]),
        (["--output_dir", "out", "--adaptor", "adapter"], ["'--adaptor'", "'--adapter'"]),
    ],
)
def test_merge_ends_in_one_line_before_weights_are_loaded(flags, parts, adapter, model_folder, tmp_path, capsys):
    (tmp_path / "full").mkdir()
    (tmp_path / "full" / "kept").write_text("another run's")
    other = CASES["llada"].folder(tmp_path / "other", d_model=64)
    paths = {"MODEL": str(model_folder), "OTHER": str(other)}

    assert main(["merge", *(str(paths.get(flag, flag)) for flag in flags)]) == 2

    message = error_of(capsys)
    assert all(part in message for part in parts), message
    assert not (tmp_path / "out").exists()
    assert (tmp_path / "full" / "kept").read_text() == "another run's"


def test_a_merged_weight_that_is_not_finite_stops_the_merge(model_folder, tmp_path, capsys):
    model = with_adapter(load(model_folder))
    next(p for name, p in model.named_parameters() if "lora_B" in name).data[0, 0] = torch.inf
    model.save_pretrained("adapter")

    assert main(["merge", "--adapter", "adapter", "--output_dir", "out"]) == 2

    assert "NaNs detected in the merged weights" in error_of(capsys)
    assert not (tmp_path / "out").exists()


def test_lora_run_is_trained_further_and_merged_from_the_command_line(recipe, tmp_path, capsys):
    steps = {
        "reward_funcs": reward_anything(),
        "max_steps": 2,
        "learning_rate": 0.01,
        "num_iterations": 2,
        "logging_steps": 1,
    }
    assert main(["train", "--config", recipe(use_peft=True, **steps)]) == 0
    first = load(tmp_path / "out")(IDS).logits
    assert sorted(json.loads(Path("out/adapter_config.json").read_text())["target_modules"]) == sorted(LORA_TARGETS)

    further = recipe(model_name_or_path="out", output_dir="further", beta=0.1, **steps)
    capsys.readouterr()
    assert main(["train", "--config", further]) == 0

    assert "adapter out, trained further" in " ".join(capsys.readouterr().out.split())
    logs = json.loads(Path("further/checkpoint-2/trainer_state.json").read_text())["log_history"]
    kl = [entry["kl"] for entry in logs if "kl" in entry]
    assert kl[0] == pytest.approx(0.0, abs=1e-6)
    second = load(tmp_path / "further")(IDS).logits
    assert (second - first).abs().max() > 1e-4

    assert main(["merge", "--adapter", "further/checkpoint-2", "--output_dir", "merged"]) == 0
    torch.testing.assert_close(load(tmp_path / "merged")(IDS).logits, second, rtol=0, atol=TOLERANCE)
    assert main(["generate", "--model_name_or_path", "further", "--prompt", "1+1=", "--max_completion_length=4"]) == 0


def test_an_adapter_goes_on_with_its_own_settings(adapter, recipe, capsys):
    same = {"use_peft": True, "lora_r": 2, "lora_alpha": 8}
    config = recipe(model_name_or_path=str(adapter), **same)

    assert main(["train", "--config", config, "--dry_run"]) == 0
    assert main(["train", "--config", config, "--dry_run", "--lora_target_modules", *LORA_TARGETS[::-1]]) == 0
    for flags, message in (
        (["--lora_r", "4"], "lora_r is 4, but the adapter"),
        (["--lora_alpha", "32"], "lora_alpha is 32"),
        (["--lora_target_modules", "q_proj"], "lora_target_modules is q_proj"),
        (["--use_dora"], "use_dora is True"),
    ):
        assert main(["train", "--config", config, "--dry_run", *flags]) == 2
        error = error_of(capsys)
        assert message in error
        assert "Leave use_peft out" in error
    assert main(["train", "--config", config, "--dry_run", "--use_peft", "false", "--lora_r", "4"]) == 0


@pytest.mark.usefixtures("no_weights")
@pytest.mark.parametrize(
    ("changes", "parts"),
    [
        (
            {"use_peft": True, "lora_modules_to_save": ["lm_head"]},
            ["modules_to_save has 'lm_head'", "Take lm_head out"],
        ),
        ({"load_in_4bit": True}, ["trl-stabledrl[qlora]"]),
        ({"load_in_8bit": True, "use_peft": True}, ["load_in_8bit needs bitsandbytes"]),
    ],
)
def test_unusable_adapter_options_are_refused(changes, parts, recipe, monkeypatch, capsys):
    from importlib.util import find_spec

    monkeypatch.setattr("importlib.util.find_spec", lambda name: None if name == "bitsandbytes" else find_spec(name))

    assert main(["train", "--config", recipe(**changes)]) == 2

    message = error_of(capsys)
    assert all(part in message for part in parts), message


@pytest.mark.usefixtures("no_weights")
def test_quantised_weights_need_an_adapter(recipe, monkeypatch, capsys):
    monkeypatch.setattr("trl_stabledrl.cli.job.require", lambda *args, **kwargs: None)

    assert main(["train", "--config", recipe(load_in_4bit=True)]) == 2
    assert "load_in_4bit=True without use_peft" in error_of(capsys)
    assert main(["train", "--config", recipe(load_in_4bit=True, use_peft=True), "--dry_run"]) == 0


@pytest.mark.usefixtures("no_weights")
def test_adapter_of_a_model_that_is_gone_is_refused(adapter, recipe, capsys):
    config = adapter / "adapter_config.json"
    config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": "moved/away"}))

    assert main(["train", "--config", recipe(model_name_or_path=str(adapter))]) == 2

    assert f"model_name_or_path='{adapter}' is an adapter of 'moved/away'" in error_of(capsys)


def test_resolved_config_of_an_adapter_run_repeats_it(adapter, recipe, tmp_path):
    changes = {"model_name_or_path": str(adapter), "learning_rate": 0.01, "reward_funcs": reward_anything()}
    assert main(["train", "--config", recipe(**changes)]) == 0

    assert main(["train", "--config", "out/resolved_config.yaml", "--output_dir", "again"]) == 0

    resolved = yaml.safe_load(Path("out/resolved_config.yaml").read_text())
    assert resolved["model_name_or_path"] == str(adapter)
    weights = [(tmp_path / folder / "adapter_model.safetensors").read_bytes() for folder in ("out", "again")]
    assert weights[0] == weights[1]
    assert weights[0] != (adapter / "adapter_model.safetensors").read_bytes()
