# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file, save_file
from torch import Tensor
from transformers import AutoModelForCausalLM

from tests.model_tools import LORA_TARGETS, with_adapter
from tests.tiny import tiny_llada, tiny_sdar
from tests.trainer_tools import config_of, letter_tokenizer, prompts_of, reward_of, run_of
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer, StableDRLTrainer
from trl_stabledrl.models.adapters import match_reference

peft = pytest.importorskip("peft")

FAMILIES = {"llada": tiny_llada, "sdar": tiny_sdar}
ADAM = {"optim": "adamw_torch", "learning_rate": 0.02, "weight_decay": 0.1}
IDS = torch.arange(1, 12)[None]


@pytest.fixture(params=[*FAMILIES])
def build(request):
    """Build the model of a family; so few tokens that half of the completions end before their window."""
    return lambda **changes: FAMILIES[request.param](**{"vocab_size": 12, "initializer_range": 0.2} | changes)


@pytest.fixture
def base(build, tmp_path) -> Path:
    folder = tmp_path / "base"
    build().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    return folder


def lora(**changes: Any) -> Any:
    return peft.LoraConfig(**{"r": 2, "task_type": "CAUSAL_LM"} | changes)


def reward(completion_ids: list[list[int]], **kwargs: Any) -> list[float]:
    return [reward_of(ids) for ids in completion_ids]


def trainer_of(folder: Path, model: Any, *, peft_config: Any = None, **options: Any) -> Any:
    return StableDRLTrainer(
        model,
        reward,
        config_of(folder, **ADAM | options),
        prompts_of(),
        processing_class=letter_tokenizer(),
        peft_config=peft_config,
    )


def load(path: Path, adapter: Path | None = None, **options: Any) -> Any:
    model = AutoModelForCausalLM.from_pretrained(path)
    return model if adapter is None else peft.PeftModel.from_pretrained(model, adapter, **options)


def tensors_of(model: Any, *, adapter: str | None) -> dict[str, Tensor]:
    """Copies of the tensors of one adapter, or of the base model."""
    kept = {}
    for name, tensor in model.state_dict().items():
        owner = next((part for part in name.split(".") if part in ("default", "ref")), None)
        if owner == adapter:
            bare = name.removeprefix("base_model.model.").replace(".base_layer", "").replace(f".{adapter}", "")
            kept[bare] = tensor.clone()
    return kept


def assert_same(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    assert left
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


def logged(trainer: Any, name: str) -> list[float]:
    return [logs[name] for logs in trainer.state.log_history if name in logs]


# The reference


def test_a_new_adapter_has_the_bare_model_as_reference(build, base, tmp_path):
    before = build().state_dict()
    trainer = trainer_of(tmp_path / "run", str(base), peft_config=lora(), beta=0.1, max_steps=4)

    trainer.train()

    assert trainer.ref_model is None
    assert logged(trainer, "kl")[0] == pytest.approx(0.0, abs=1e-6)
    assert min(logged(trainer, "kl")[1:]) > 1e-5
    assert_same(tensors_of(trainer.model, adapter=None), before)


@pytest.mark.parametrize("way", ["script", "folder"])
def test_an_adapter_trained_further_has_its_start_as_reference(way, build, base, tmp_path):
    first = trainer_of(tmp_path / "first", str(base), peft_config=lora(), max_steps=4)
    first.train()
    first.save_model(tmp_path / "adapter")
    start = tensors_of(first.model, adapter="default")
    before = build().state_dict()
    model = load(base, tmp_path / "adapter", is_trainable=True) if way == "script" else str(tmp_path / "adapter")

    second = trainer_of(tmp_path / "second", model, beta=0.1, max_steps=4)
    assert_same(tensors_of(second.model, adapter="default"), start)
    second.train()

    assert second.ref_model is None
    assert logged(second, "kl")[0] == pytest.approx(0.0, abs=1e-6)  # against the bare model it would not be
    with second.model.disable_adapter():
        bare = second.model(IDS).logits
    assert (load(base, tmp_path / "adapter")(IDS).logits - bare).abs().max() > 0.01
    assert min(logged(second, "kl")[1:]) > 1e-5
    assert_same(tensors_of(second.model, adapter=None), before)
    assert_same(tensors_of(second.model, adapter="ref"), start)
    assert all(not torch.equal(t, start[n]) for n, t in tensors_of(second.model, adapter="default").items())
    trained = {id(p) for group in second.optimizer.param_groups for p in group["params"]}
    assert trained == {id(p) for n, p in second.model.named_parameters() if ".default." in n}


def test_one_model_is_loaded_whatever_the_reference(base, tmp_path, monkeypatch):
    loaded: list[Any] = []
    model_class: Any = type(load(base))
    original = model_class.from_pretrained.__func__

    def from_pretrained(cls, *args, **kwargs):
        loaded.append(args[0])
        return original(cls, *args, **kwargs)

    monkeypatch.setattr(model_class, "from_pretrained", classmethod(from_pretrained))
    with_adapter(load(base)).save_pretrained(tmp_path / "adapter")
    num_base = sum(p.numel() for p in load(base).parameters())
    num_adapter = sum(t.numel() for t in load_file(tmp_path / "adapter" / "adapter_model.safetensors").values())
    loaded.clear()

    new = trainer_of(tmp_path / "new", str(base), peft_config=lora(), beta=0.1)
    assert len(loaded) == 1
    further = trainer_of(tmp_path / "further", str(tmp_path / "adapter"), beta=0.1)
    assert len(loaded) == 2
    whole = trainer_of(tmp_path / "whole", str(base), beta=0.1)
    assert len(loaded) == 4  # the policy and its reference

    assert sum(p.numel() for p in new.model.parameters()) == num_base + num_adapter
    assert sum(p.numel() for p in further.model.parameters()) == num_base + 2 * num_adapter
    assert (new.ref_model, further.ref_model) == (None, None)
    assert whole.ref_model is not None


def test_the_reference_has_the_data_type_of_the_adapter(build):
    # as TRL leaves them beside a quantised model
    model = with_adapter(build())
    model.add_adapter("ref", model.peft_config["default"])
    for name, parameter in model.named_parameters():
        if ".default." in name:
            model.get_parameter(name.replace(".default.", ".ref.")).data.copy_(parameter.data)
            parameter.data = parameter.data.bfloat16()

    match_reference(model)

    assert_same(tensors_of(model, adapter="ref"), tensors_of(model, adapter="default"))
    assert {tensor.dtype for tensor in tensors_of(model, adapter="ref").values()} == {torch.bfloat16}


# Training


def test_lora_trains_the_projections_of_the_family_and_is_saved_whole(build, base, tmp_path):
    trainer = trainer_of(tmp_path / "run", str(base), peft_config=lora(), max_steps=1)

    trainer.train()
    trainer.save_model(tmp_path / "adapter")

    config = build().config
    width, inner, head = config.hidden_size, config.intermediate_size, config.head_dim
    queries, keys = config.num_attention_heads * head, config.num_key_value_heads * head
    per_layer = 2 * (width + queries) + 2 * (width + keys) + 3 * (width + inner)  # both ends of each projection
    num_trained = sum(p.numel() for p in trainer.model.parameters() if p.requires_grad)
    assert num_trained == 2 * 2 * per_layer  # layers and rank
    lora_b = [p for name, p in trainer.model.named_parameters() if "lora_B" in name]
    assert len(lora_b) == 2 * len(LORA_TARGETS)
    assert any(p.any() for p in lora_b)
    assert sorted(json.loads((tmp_path / "adapter" / "adapter_config.json").read_text())["target_modules"]) == sorted(
        LORA_TARGETS
    )
    logits = trainer.model(IDS).logits
    assert (logits - load(base)(IDS).logits).abs().max() > 0.01
    assert torch.equal(load(base, tmp_path / "adapter")(IDS).logits, logits)
    assert torch.equal(load(tmp_path / "adapter")(IDS).logits, logits)


def test_targets_of_the_user_are_kept_and_the_config_is_left_alone(base, tmp_path):
    for changes in ({"target_modules": ["q_proj"]}, {"target_modules": "all-linear"}, {}):
        config = lora(**changes)
        before = config.target_modules
        trainer = trainer_of(tmp_path / "run", str(base), peft_config=config)
        changed = {name.split(".")[-4] for name, _ in trainer.model.named_parameters() if "lora_A" in name}
        assert changed == ({"q_proj"} if before == {"q_proj"} else set(LORA_TARGETS))
        if not changes:
            assert config.target_modules is None


def test_gradient_checkpointing_changes_nothing(build, tmp_path):
    found = []
    for is_checkpointed in (False, True):
        model = build(dtype=torch.float64)
        run = run_of(
            tmp_path,
            model=model,
            peft_config=lora(),
            learning_rate=0.1,
            num_iterations=2,
            max_steps=4,
            gradient_checkpointing=is_checkpointed,
        )
        assert run.gradients[-1].norm() > 1e-4
        found.append(run.parameters)
    assert torch.equal(*found)


def test_dropout_of_the_adapter_is_off(build, tmp_path):
    # dropped out, a score of the same rows by the same weights is another each time
    run = run_of(
        tmp_path,
        model=with_adapter(build(dtype=torch.float64), lora_dropout=0.1),
        learning_rate=0.0,
        num_iterations=2,
        max_steps=4,
        beta=0.1,
    )

    assert any(isinstance(m, torch.nn.Dropout) for m in run.trainer.model.modules())
    assert run.recorder.logged("ratio/max") == pytest.approx([1.0] * 4, abs=1e-6)  # float32 scores
    assert run.recorder.logged("log_ratio/std") == pytest.approx([0.0] * 4, abs=1e-6)
    assert run.recorder.logged("kl") == pytest.approx([0.0] * 4, abs=1e-6)


@pytest.mark.parametrize("is_continued", [False, True])
def test_an_interrupted_run_goes_on_with_the_adapter_it_saved(is_continued, base, tmp_path):
    with_adapter(load(base)).save_pretrained(tmp_path / "start")
    model, peft_config = (str(tmp_path / "start"), None) if is_continued else (str(base), lora())
    options = {"beta": 0.1, "num_iterations": 2, "save_strategy": "steps", "save_steps": 2}

    whole = trainer_of(tmp_path / "whole", model, peft_config=peft_config, max_steps=6, **options)
    whole.train()
    parts = trainer_of(tmp_path / "parts", model, peft_config=peft_config, max_steps=6, **options)
    shutil.copytree(tmp_path / "whole" / "checkpoint-2", tmp_path / "parts" / "checkpoint-2")
    parts.train(resume_from_checkpoint=str(tmp_path / "parts" / "checkpoint-2"))

    for adapter in ("default", "ref") if is_continued else ("default",):
        assert_same(tensors_of(whole.model, adapter=adapter), tensors_of(parts.model, adapter=adapter))
    assert logged(whole, "kl") == logged(parts, "kl")
    assert len(logged(parts, "kl")) == 6


def test_supervised_training_goes_on_from_an_adapter(base, tmp_path):
    rows = Dataset.from_dict({"prompt": ["ab", "c"], "completion": ["abc", "d"]})
    with_adapter(load(base)).save_pretrained(tmp_path / "start")
    start = load(base, tmp_path / "start")(IDS).logits

    def sft(model: Any, **options: Any) -> Any:
        args = DiffusionSFTConfig(
            str(tmp_path / "sft"),
            max_completion_length=4,
            max_steps=1,
            learning_rate=0.05,
            use_cpu=True,
            bf16=False,
            report_to="none",
            save_strategy="no",
            disable_tqdm=True,
            dataloader_pin_memory=False,
        )
        return DiffusionSFTTrainer(model, args, train_dataset=rows, processing_class=letter_tokenizer(), **options)

    trainer = sft(str(tmp_path / "start"))
    assert torch.equal(trainer.model.eval()(IDS).logits, start)
    trainer.train()
    assert (trainer.model.eval()(IDS).logits - start).abs().max() > 0.01
    new = sft(str(base), peft_config=lora())
    assert {name.split(".")[-4] for name, p in new.model.named_parameters() if p.requires_grad} == set(LORA_TARGETS)
    with pytest.raises(ValueError, match="is_trainable=True"):
        sft(load(base, tmp_path / "start"))


# What could not be trained


def test_an_adapter_loaded_without_gradients_is_refused(base, tmp_path):
    with_adapter(load(base)).save_pretrained(tmp_path / "adapter")

    with pytest.raises(ValueError, match=r"no parameter requires a gradient.*is_trainable=True"):
        trainer_of(tmp_path / "run", load(base, tmp_path / "adapter"))
    with pytest.raises(ValueError, match=r"transformers loaded itself.*is_trainable=True"):
        trainer_of(tmp_path / "run", load(tmp_path / "adapter"))
    trainer_of(tmp_path / "run", load(base, tmp_path / "adapter", is_trainable=True))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"modules_to_save": ["lm_head"]}, "modules_to_save has 'lm_head'.*Take lm_head out of modules_to_save"),
        ({"target_modules": [*LORA_TARGETS, "lm_head"]}, "target_modules has 'lm_head'.*Take lm_head out"),
        ({"target_modules": "lm_head"}, "target_modules has 'lm_head'"),
    ],
)
def test_the_head_is_not_adapted(changes, message, base, tmp_path, monkeypatch):
    trained = with_adapter(load(base), **changes)
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path / "run", trained)

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(type(load(base)), "from_pretrained", refuse)
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path / "run", str(base), peft_config=lora(**changes))


def test_an_embedding_is_adapted_only_where_it_is_not_the_head(build, tmp_path):
    for is_tied in (False, True):
        build(tie_word_embeddings=is_tied).save_pretrained(tmp_path / "model")
        peft_config = lora(target_modules=["q_proj"], modules_to_save=["model.embed_tokens"])
        if is_tied:
            with pytest.raises(ValueError, match="ties it to the vocabulary projection"):
                trainer_of(tmp_path / "run", str(tmp_path / "model"), peft_config=peft_config)
        else:
            trainer_of(tmp_path / "run", str(tmp_path / "model"), peft_config=peft_config).train()


def test_prompt_tuning_is_refused(base, tmp_path):
    peft_config = peft.PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)
    with pytest.raises(ValueError, match=r"PromptTuningConfig.*such as LoraConfig"):
        trainer_of(tmp_path / "run", str(base), peft_config=peft_config)


def test_a_reference_needs_the_adapter_alone_and_under_its_usual_name(base, tmp_path):
    with_adapter(load(base)).save_pretrained(tmp_path / "adapter")
    named = load(base, tmp_path / "adapter", adapter_name="mine", is_trainable=True)
    with pytest.raises(ValueError, match=r"adapters 'mine', with 'mine' active.*without adapter_name"):
        trainer_of(tmp_path / "run", named, beta=0.1)
    trainer_of(tmp_path / "run", named, beta=0.0)
    taken = load(base, tmp_path / "adapter", is_trainable=True)
    taken.load_adapter(tmp_path / "adapter", "ref")
    with pytest.raises(ValueError, match=r"adapters 'default', 'ref'"):
        trainer_of(tmp_path / "run", taken, beta=0.1)


def test_an_adapter_on_top_of_an_adapter_is_refused(base, tmp_path):
    with_adapter(load(base)).save_pretrained(tmp_path / "adapter")
    with pytest.raises(ValueError, match="leave peft_config out.*trl-stabledrl merge --adapter"):
        trainer_of(tmp_path / "run", str(tmp_path / "adapter"), peft_config=lora())


@pytest.mark.parametrize(
    ("damage", "message"),
    [
        ("absent", r"lacks tensors that its model needs: .*layers\.0.*, 1 in all"),
        ("shape", r"has shape \(5, 32\) in the adapter .* needs \(2, 32\)"),
        ("unknown", r"has tensors that its model has no place for: other, 1 in all"),
        ("no base", "does not say which model"),
    ],
)
def test_a_damaged_adapter_is_refused_before_the_model_is_loaded(damage, message, base, tmp_path, monkeypatch):
    with_adapter(load(base)).save_pretrained(tmp_path / "adapter")
    weights, config = (tmp_path / "adapter" / name for name in ("adapter_model.safetensors", "adapter_config.json"))
    tensors = load_file(weights)
    name = sorted(tensors)[0]
    if damage == "absent":
        del tensors[name]
    elif damage == "shape":
        tensors[next(n for n in tensors if "q_proj.lora_A" in n)] = torch.zeros(5, 32)
    elif damage == "unknown":
        tensors["other"] = torch.zeros(1)
    else:
        config.write_text(json.dumps(json.loads(config.read_text()) | {"base_model_name_or_path": None}))
    save_file(tensors, weights)

    def refuse(*args, **kwargs):
        raise AssertionError("weights were loaded")

    monkeypatch.setattr(type(load(base)), "from_pretrained", refuse)
    with pytest.raises(ValueError, match=message):
        trainer_of(tmp_path / "run", str(tmp_path / "adapter"))


def test_a_model_with_an_adapter_beside_it_is_refused(base, tmp_path):
    with_adapter(load(base)).save_pretrained(base)
    with pytest.raises(ValueError, match=r"a whole model beside it, model\.safetensors.*folder of their own"):
        trainer_of(tmp_path / "run", str(base))


def test_a_checkpoint_of_another_adapter_or_none_is_not_gone_on_with(base, tmp_path):
    whole, adapter = tmp_path / "whole", tmp_path / "adapter"
    trainer_of(whole, str(base), max_steps=1, save_strategy="steps", save_steps=1).train()
    options: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 1}
    trainer_of(adapter, str(base), peft_config=lora(target_modules=["q_proj"]), **options | {"max_steps": 1}).train()

    for folder, peft_config, message in [
        (adapter, lora(target_modules=["k_proj"]), r"with target_modules=\['q_proj'\], but this run has \['k_proj'\]"),
        (adapter, lora(target_modules=["q_proj"], r=4), "with r=2, but this run has 4"),
        (adapter, None, "holds an adapter, but this run trains the whole model"),
        (whole, lora(), "holds a whole model, but this run trains an adapter"),
    ]:
        trainer = trainer_of(folder, str(base), peft_config=peft_config, **options)
        with pytest.raises(ValueError, match=message):
            trainer.train(resume_from_checkpoint=True)


def test_one_target_given_as_text_is_a_name(build, base, tmp_path):
    trainer = trainer_of(tmp_path, str(base), peft_config=lora(target_modules="q_proj"))

    names = {name.split(".")[-4] for name, _ in trainer.model.named_parameters() if "lora_A" in name}
    assert names == {"q_proj"}
