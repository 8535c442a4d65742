# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What a checkpoint holds, and that nothing less than a whole one gets its name."""

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoTokenizer, Trainer, TrainerCallback

from tests.resume_runs import layout, model_of, run
from tests.tiny import published_llada_folder, published_sdar_folder, tiny_tokenizer
from tests.trainer_tools import config_of, letter_tokenizer, prompts_of
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer, StableDRLTrainer
from trl_stabledrl.checkpoints import check_is_loadable, check_tensors, last_complete_checkpoint, load_rollouts

IDS = torch.tensor([[5, 6, 2, 2]])
ONCE: dict[str, Any] = layout(16, 1, 1, max_steps=1)


def trainer_of(kind: str, model: str, folder: Path, **changes: Any) -> Any:
    tokenizer = tiny_tokenizer(chat_template=True)
    if kind == "sft":
        args = DiffusionSFTConfig(
            output_dir=str(folder),
            max_completion_length=8,
            per_device_train_batch_size=2,
            max_steps=1,
            save_steps=1,
            bf16=False,
            use_cpu=True,
            report_to="none",
            disable_tqdm=True,
            dataloader_pin_memory=False,
            **changes,
        )
        rows = Dataset.from_dict({"prompt": ["1+1=", "2+1="], "completion": ["2", "3"]})
        return DiffusionSFTTrainer(model, args, train_dataset=rows, processing_class=tokenizer)
    options: dict[str, Any] = {"block_length": None, "num_denoising_steps": None, "max_completion_length": 8}
    return StableDRLTrainer(
        model,
        lambda completions, **kwargs: [float(len(c)) for c in completions],
        config_of(folder, **ONCE | options | changes),
        prompts_of(["1+1=", "2+1=", "3", "4"]),
        processing_class=tokenizer,
    )


@pytest.mark.parametrize("kind", ["rl", "sft"])
@pytest.mark.parametrize("publish", [published_llada_folder, published_sdar_folder])
def test_a_checkpoint_needs_nothing_from_where_the_run_came_from(publish, kind, tmp_path):
    source = publish(tmp_path / "source")
    names = set(load_file(source / "model.safetensors"))
    trainer = trainer_of(kind, str(source), tmp_path / "out")
    trainer.train()
    trainer.save_model(str(tmp_path / "final"))
    with torch.no_grad():
        expected = trainer.model.eval()(input_ids=IDS).logits
    shutil.rmtree(source)

    for folder in (tmp_path / "out" / "checkpoint-1", tmp_path / "final"):
        loaded = AutoModelForCausalLM.from_pretrained(folder, dtype=trainer.model.dtype)
        with torch.no_grad():
            assert torch.equal(loaded(input_ids=IDS).logits, expected)
        assert set(load_file(folder / "model.safetensors")) == names
        assert AutoTokenizer.from_pretrained(folder).chat_template == tiny_tokenizer(chat_template=True).chat_template
        assert (folder / "generation_config.json").is_file()
        # every field of the configuration, with what the family decided
        args = json.loads((folder / "training_args.json").read_text())
        assert args["mask_law"] == trainer.likelihood_settings.mask_law is not None
        assert args["max_completion_length"] == 8
        card = (folder / "README.md").read_text()
        assert trainer._name in card
        assert ("papers/2603.06743" in card) == (kind == "rl")
        assert ("eprint       = {arXiv:2603.06743}" in card) == (kind == "rl")


def test_an_adapter_is_saved_with_tokenizer_card_and_configuration(tmp_path):
    from peft import LoraConfig, PeftModel

    config = LoraConfig(r=4, target_modules=["q_proj", "v_proj"])
    found = run(tmp_path, peft_config=config, **ONCE)

    folder = tmp_path / "checkpoint-1"
    loaded = PeftModel.from_pretrained(model_of(), str(folder)).eval()
    with torch.no_grad():
        assert torch.equal(loaded(input_ids=IDS).logits, found.trainer.model.eval()(input_ids=IDS).logits)
    assert len(AutoTokenizer.from_pretrained(folder)) == len(letter_tokenizer())
    card = (folder / "README.md").read_text()
    assert "papers/2603.06743" in card
    assert "library_name: peft" in card
    assert json.loads((folder / "training_args.json").read_text())["num_mc_samples"] == 2


class Look(TrainerCallback):
    """Notes the folders of a run whenever a file of a checkpoint is about to be written or is there."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.seen: list[tuple[str, list[str]]] = []

    def look(self, when: str) -> None:
        self.seen.append((when, sorted(path.name for path in self.folder.glob("checkpoint-*"))))

    def on_save(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.look("saved")


def test_an_older_checkpoint_goes_when_the_newer_one_is_there(tmp_path, monkeypatch):
    look = Look(tmp_path)

    def looking(method: Any) -> Any:
        def looked_at(*args: Any, **kwargs: Any) -> Any:
            look.look("saving")
            return method(*args, **kwargs)

        return looked_at

    for name in ("save_model", "_save_optimizer_and_scheduler", "_save_rng_state"):
        monkeypatch.setattr(Trainer, name, looking(getattr(Trainer, name)))

    run(tmp_path, callbacks=[look], **layout(16, 1, 1, max_steps=3, save_total_limit=1))

    expected = [*[("saving", [])] * 3, ("saved", ["checkpoint-1"])]
    expected += [*[("saving", ["checkpoint-1"])] * 3, ("saved", ["checkpoint-2"])]
    expected += [*[("saving", ["checkpoint-2"])] * 3, ("saved", ["checkpoint-3"])]
    assert look.seen == expected
    assert not (tmp_path / "_saving").exists()


def test_the_best_checkpoint_is_kept_under_its_own_name(tmp_path):
    options = layout(16, 1, 1, max_steps=3, save_total_limit=2, eval_strategy="steps", eval_steps=1)
    options |= {"metric_for_best_model": "eval_reward", "greater_is_better": False}

    found = run(tmp_path, eval_prompts=["ab", "c"], **options)

    rewards = found.recorder.logged("eval_reward")
    best = tmp_path / f"checkpoint-{1 + rewards.index(min(rewards))}"
    assert Path(found.trainer.state.best_model_checkpoint) == best
    assert json.loads((best / "trainer_state.json").read_text())["best_model_checkpoint"] == str(best)
    assert {path.name for path in tmp_path.glob("checkpoint-*")} == {best.name, "checkpoint-3"}


def test_a_checkpoint_is_pushed_once_it_is_complete(tmp_path, monkeypatch):
    pushed: list[tuple[str, bool]] = []

    def push(self: Any, folder: str) -> None:
        pushed.append((folder, Path(folder, "stabledrl_state.json").is_file()))

    monkeypatch.setattr(Trainer, "init_hf_repo", lambda self, **kwargs: setattr(self, "hub_model_id", "me/model"))
    monkeypatch.setattr(Trainer, "_push_from_checkpoint", push)
    monkeypatch.setattr(Trainer, "_finish_current_push", lambda self: None)
    run(tmp_path, push_to_hub=True, **ONCE)
    assert pushed == [(str(tmp_path / "checkpoint-1"), True)]


def test_a_run_that_goes_over_a_checkpoint_again_replaces_it(tmp_path):
    options = layout(16, 1, 1, max_steps=2)
    run(tmp_path, **options)
    before = (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes()
    (tmp_path / "checkpoint-2" / "model.safetensors").write_bytes(b"")
    (tmp_path / "checkpoint-2" / "left").write_text("over")

    run(tmp_path, resume=str(tmp_path / "checkpoint-1"), **options)

    assert (tmp_path / "checkpoint-2" / "model.safetensors").read_bytes() == before
    assert not (tmp_path / "checkpoint-2" / "left").exists()


def test_a_reader_may_edit_what_describes_a_checkpoint(tmp_path):
    run(tmp_path, **ONCE)
    folder = tmp_path / "checkpoint-1"
    (folder / "README.md").write_text("")
    (folder / "notes.txt").write_text("kept")
    (folder / "config.json").write_text((folder / "config.json").read_text() + "\n")
    assert last_complete_checkpoint(tmp_path) == folder


def test_a_state_that_never_reached_the_disk_is_no_checkpoint(tmp_path):
    run(tmp_path, **ONCE)
    (tmp_path / "checkpoint-1" / "stabledrl_state.json").write_text("")
    with pytest.raises(
        ValueError, match=r"holds no complete checkpoint \(checkpoint-1: stabledrl_state.json is cut off"
    ):
        last_complete_checkpoint(tmp_path)


# Tensors that must not be saved


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (torch.empty(0), r"tensor model\.layers\.0\.mlp\.up_proj\.weight is of shape \(0,\), expected \("),
        (torch.empty(3, 3), r"model\.layers\.0\.mlp\.up_proj\.weight is of shape \(3, 3\), expected \("),
    ],
)
@pytest.mark.parametrize("kind", ["rl", "sft"])
def test_an_empty_or_misshaped_tensor_stops_the_save_by_name(kind, value, message, tmp_path):
    source = published_llada_folder(tmp_path / "source")
    trainer = trainer_of(kind, str(source), tmp_path / "out", save_strategy="no")
    trainer.save_model(str(tmp_path / "final"))
    before = {path: path.read_bytes() for path in (tmp_path / "final").iterdir()}
    trainer.model.model.layers[0].mlp.up_proj.weight.data = value

    with pytest.raises(RuntimeError, match=message):
        trainer.save_model(str(tmp_path / "final"))

    assert {path: path.read_bytes() for path in (tmp_path / "final").iterdir()} == before


def test_tensors_gathered_from_several_processes_are_looked_at():
    model = model_of()
    whole = {name: parameter.detach() for name, parameter in model.named_parameters()}
    check_tensors(model, whole)
    with pytest.raises(RuntimeError, match=r"model\.norm\.weight is of shape \(0,\), expected \("):
        check_tensors(model, whole | {"model.norm.weight": torch.empty(0)})
    with pytest.raises(RuntimeError, match=r"Nothing was saved: tensor .* is absent, .*zero3_save_16bit_model: true"):
        check_tensors(model, {})


def test_an_adapter_without_elements_is_found_and_its_frozen_base_may_be_absent():
    from peft import LoraConfig, get_peft_model

    model = get_peft_model(model_of(), LoraConfig(r=4, target_modules=["q_proj"]))
    adapter = {name: p.detach() for name, p in model.named_parameters() if p.requires_grad}
    check_tensors(model, adapter)
    name = next(name for name in adapter if "lora_B" in name)
    with pytest.raises(RuntimeError, match="lora_B"):
        check_tensors(model, adapter | {name: torch.empty(0)})
    model.get_parameter(name).data = torch.empty(0)
    with pytest.raises(RuntimeError, match="lora_B"):
        check_tensors(model, None)


def test_a_checkpoint_without_loadable_weights_gets_no_name(tmp_path, monkeypatch):
    """What FSDP leaves with SHARDED_STATE_DICT."""
    monkeypatch.setattr(Trainer, "_save", lambda self, output_dir=None, state_dict=None: None)
    with pytest.raises(RuntimeError, match="holds no weights .*FULL_STATE_DICT"):
        run(tmp_path, **ONCE)
    assert not list(tmp_path.glob("checkpoint-*"))
    (tmp_path / "adapter_model.safetensors").write_bytes(b"")
    check_is_loadable(tmp_path)


# Pending rollouts, for any number of processes


class FourProcesses:
    num_processes = 4
    device = torch.device("cpu")

    def __init__(self, process_index: int) -> None:
        self.process_index = process_index


def test_each_process_reads_its_rows_in_the_order_of_the_rows(tmp_path):
    run(tmp_path, **layout(4, 4, 4, num_iterations=2, max_steps=1))
    path = tmp_path / "checkpoint-1" / "stabledrl_rollouts.safetensors"

    parts = [load_rollouts(path, num_slices=2, accelerator=FourProcesses(rank)) for rank in range(4)]  # pyright: ignore[reportArgumentType]

    # 16 rows: micro-step 0 of the processes, then micro-step 1
    rows = [[part[index]["row_index"].tolist() for part in parts] for index in range(2)]
    assert rows == [[[0, 1], [2, 3], [4, 5], [6, 7]], [[8, 9], [10, 11], [12, 13], [14, 15]]]
    everyone = load_file(path)
    assert torch.equal(parts[1][1]["completion_ids"], everyone["completion_ids"][10:12])
    assert set(parts[0][0]) == set(everyone)


def test_processes_that_found_different_checkpoints_stop(monkeypatch):
    from trl_stabledrl import checkpoints

    monkeypatch.setattr(checkpoints, "gathered", lambda accelerator, rows: torch.tensor([3, 6]))
    with pytest.raises(RuntimeError, match=r"resume at steps \[3, 6\]"):
        checkpoints.check_same_checkpoint(FourProcesses(0), 3)  # pyright: ignore[reportArgumentType]
