# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from datasets import Dataset
from torch import Tensor
from transformers import AutoModelForCausalLM, TrainerCallback
from trl import SFTConfig

from tests import naive
from tests.trainer_tools import END, MASK, flat, letter_tokenizer, relative_difference, tiny_model
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer
from trl_stabledrl.models import FAMILIES
from trl_stabledrl.sft_config import REFUSED_OPTIONS

WINDOW, BLOCK = 6, 4
ROWS = [("ab", "cd"), ("c", "defg"), ("de", "a"), ("ggg", "abcde"), ("a", "b"), ("fa", "gfed"), ("b", "ba")]
TEXT = Dataset.from_dict({"prompt": [p for p, _ in ROWS], "completion": [c for _, c in ROWS]})
# used as they are: one row without a prompt, one without an end token
TOKENS = Dataset.from_dict(
    {
        "input_ids": [[5, 6, 7, END], [8, 9, END], [10, 11, 6, 5, 5], [7, 8, 9, 10, END]],
        "completion_mask": [[1, 1, 1, 1], [0, 1, 1], [0, 0, 1, 1, 1], [0, 1, 1, 1, 1]],
    }
)


def config_of(folder: Path | str, **changes: Any) -> DiffusionSFTConfig:
    options: dict[str, Any] = {
        "output_dir": str(folder),
        "max_completion_length": WINDOW,
        "block_length": BLOCK,
        "per_device_train_batch_size": 4,
        "gradient_accumulation_steps": 1,
        "learning_rate": 0.1,
        "lr_scheduler_type": "constant",
        "optim": "sgd",
        "max_grad_norm": 0.0,
        "max_steps": 2,
        "bf16": False,
        "gradient_checkpointing": False,
        "use_cpu": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_steps": 1,
        "disable_tqdm": True,
        "dataloader_pin_memory": False,
    }
    return DiffusionSFTConfig(**options | changes)


class Recorder(TrainerCallback):
    def __init__(self, model: Any) -> None:
        self.model = model
        self.gradients: list[Tensor] = []
        self.parameters: list[dict[str, Tensor]] = []
        self.logs: list[dict[str, Any]] = []

    def on_pre_optimizer_step(self, args, state, control, **kwargs):
        self.gradients.append(flat(p.grad for p in self.model.parameters() if p.grad is not None))
        self.parameters.append({name: value.clone() for name, value in self.model.state_dict().items()})

    def on_log(self, args, state, control, logs=None, **kwargs):
        assert logs
        self.logs.append(logs.copy())

    def logged(self, name: str) -> list[float]:
        return [logs[name] for logs in self.logs if name in logs]


class Watched(DiffusionSFTTrainer):
    """Keeps the examples of each micro-step, in the order they come."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.examples: list[list[tuple[list[int], list[int]]]] = []
        super().__init__(*args, **kwargs)

    def training_step(self, model, inputs, num_items_in_batch=None):
        micro_step = []
        parts = (inputs["input_ids"], inputs["attention_mask"], inputs["labels"])
        for ids, is_real, labels in zip(*(part.tolist() for part in parts), strict=True):
            row = [(t, label != -100) for t, real, label in zip(ids, is_real, labels, strict=True) if real]
            micro_step.append(([t for t, scored in row if not scored], [t for t, scored in row if scored]))
        self.examples.append(micro_step)
        return super().training_step(model, inputs, num_items_in_batch)


def trained(folder: Path, data: Dataset = TEXT, *, model: Any = None, **changes: Any) -> tuple[Watched, Recorder]:
    model = tiny_model() if model is None else model
    recorder = Recorder(model)
    trainer = Watched(
        model,
        config_of(folder, **changes),
        train_dataset=data,
        eval_dataset=data,
        processing_class=letter_tokenizer(),
        callbacks=[recorder],
    )
    trainer.train()
    return trainer, recorder


def naive_elbo(model: Any, index: int, prompt: list[int], completion: list[int], args: DiffusionSFTConfig) -> Tensor:
    """Summed over the completion."""
    assert args.mask_law  # resolved by the trainer
    assert args.block_length
    objective = naive.Objective(
        group_size=1,
        window_length=args.max_completion_length,
        block_length=args.block_length,
        mask_token_id=MASK,
        end_token_id=END,
        law=args.mask_law,
        sampling=args.mc_sampling,
        num_draws=args.num_mc_samples,
        seed=args.seed,
        tail=args.tail,
    )
    row = naive.Row(index, prompt, completion, 0.0, None)
    return len(completion) * naive.row_scores(model, row, objective, iteration=0)[0]


def naive_steps(trainer: Watched, recorder: Recorder) -> list[tuple[float, Tensor]]:
    """Loss and gradient of each optimizer step: minus the ELBO of its rows over the number of their tokens."""
    args = trainer.args
    in_epoch = len(trainer.get_train_dataloader())
    model = tiny_model()
    steps: list[tuple[float, Tensor]] = []
    start = index = 0
    for parameters in recorder.parameters:
        size = min(args.gradient_accumulation_steps, in_epoch - start % in_epoch)
        rows = [row for micro_step in trainer.examples[start : start + size] for row in micro_step]
        start += size
        model.load_state_dict(parameters)
        model.zero_grad()
        elbo = torch.zeros((), dtype=torch.float64)
        for prompt, completion in rows:
            elbo = elbo + naive_elbo(model, index, prompt, completion, args)
            index += 1
        loss = -elbo / sum(len(completion) for _, completion in rows)
        loss.backward()
        steps.append((loss.item(), flat(p.grad for p in model.parameters() if p.grad is not None)))
    return steps


# largest relative difference: 5.2e-8. 7 rows: the last window is short for each but the first two
@pytest.mark.parametrize("sizes", [(7, 1), (1, 7), (4, 1), (2, 2), (1, 4), (2, 4), (3, 2)])
def test_loss_and_gradient_are_the_negative_elbo_per_token_of_the_step(sizes, tmp_path):
    trainer, recorder = trained(
        tmp_path, per_device_train_batch_size=sizes[0], gradient_accumulation_steps=sizes[1], max_steps=3
    )

    logged = recorder.logged("loss")
    for (loss, gradient), found, shown in zip(naive_steps(trainer, recorder), recorder.gradients, logged, strict=True):
        assert relative_difference(found, gradient) < 1e-6
        assert shown == pytest.approx(loss, rel=1e-5)


def test_the_layout_changes_nothing(tmp_path):
    runs = [
        trained(tmp_path, per_device_train_batch_size=b, gradient_accumulation_steps=a, max_steps=4)[1]
        for b, a in [(4, 1), (2, 2), (1, 4)]
    ]
    for run in runs[1:]:
        for found, expected in zip(run.gradients, runs[0].gradients, strict=True):
            assert relative_difference(found, expected) < 1e-6


@pytest.mark.parametrize(
    "options",
    [
        {"mask_law": "block_suffix", "mc_sampling": "complementary", "num_mc_samples": 2},
        {"mask_law": "semi_ar", "mc_sampling": "stratified", "num_mc_samples": 3},
        {"mask_law": "full"},
        {"tail": "eos"},
        {"tail": "hidden", "gradient_checkpointing": True},
    ],
    ids=str,
)
def test_every_option_gives_the_gradient_of_the_definition(options, tmp_path):
    trainer, recorder = trained(tmp_path, **options, per_device_train_batch_size=2, gradient_accumulation_steps=2)
    for (_, gradient), found in zip(naive_steps(trainer, recorder), recorder.gradients, strict=True):
        assert relative_difference(found, gradient) < 1e-6


@pytest.mark.parametrize("sizes", [(4, 1), (1, 4)])
def test_tokenized_rows_are_used_as_they_are(sizes, tmp_path):
    trainer, recorder = trained(
        tmp_path, TOKENS, per_device_train_batch_size=sizes[0], gradient_accumulation_steps=sizes[1]
    )

    seen = [(prompt + completion, len(completion)) for part in trainer.examples for prompt, completion in part][:4]
    expected = [(ids, sum(mask)) for ids, mask in zip(TOKENS["input_ids"], TOKENS["completion_mask"], strict=True)]
    assert sorted(seen) == sorted(expected)
    for (_, gradient), found in zip(naive_steps(trainer, recorder), recorder.gradients, strict=True):
        assert relative_difference(found, gradient) < 1e-6


def test_completions_end_with_an_end_token(tmp_path):
    trainer, _ = trained(tmp_path, max_steps=1, per_device_train_batch_size=7)
    ids = {c: i for c, i in letter_tokenizer().get_vocab().items() if len(c) == 1}
    seen = sorted(trainer.examples[0])
    assert seen == sorted(([ids[x] for x in p], [*(ids[x] for x in c), END]) for p, c in ROWS)


def test_conversations_go_through_the_chat_template(tmp_path):
    data = Dataset.from_dict(
        {
            "prompt": [[{"role": "a", "content": "b"}]],
            "completion": [[{"role": "assistant", "content": "cd"}]],
        }
    )
    tokenizer = letter_tokenizer(chat_template=True)
    trainer = Watched(tiny_model(), config_of(tmp_path, max_steps=1), train_dataset=data, processing_class=tokenizer)
    trainer.train()

    ((prompt, completion),) = trainer.examples[0]
    text = tokenizer.decode(completion)
    assert text.startswith("cd<|eot_id|>")
    assert "b<|eot_id|>" in tokenizer.decode(prompt)


def test_evaluation_uses_the_same_masks_each_time_and_leaves_the_run_alone(tmp_path):
    alone, _ = trained(tmp_path)
    evaluated, recorder = trained(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=7)

    assert torch.equal(flat(alone.model.parameters()), flat(evaluated.model.parameters()))
    assert len(recorder.logged("eval_loss")) == 2
    _, frozen = trained(tmp_path, eval_strategy="steps", eval_steps=1, per_device_eval_batch_size=7, learning_rate=0.0)
    assert len(set(frozen.logged("eval_loss"))) == 1
    first, second = evaluated.evaluate(), evaluated.evaluate()
    assert first["eval_loss"] == second["eval_loss"] == pytest.approx(-first["eval_elbo_per_token"])
    with pytest.raises(ValueError, match="no logits to return"):
        evaluated.compute_loss(evaluated.model, {}, return_outputs=True)


def test_metrics_are_those_of_the_rows(tmp_path):
    trainer, recorder = trained(tmp_path, per_device_train_batch_size=7, max_steps=1)

    assert recorder.logged("elbo_per_token") == pytest.approx([-recorder.logged("loss")[0]], rel=1e-5)
    assert recorder.logged("num_tokens") == [sum(len(p) + len(c) + 1 for p, c in ROWS)]
    assert trainer.num_rows == 7


def test_the_loss_falls_on_a_task(tmp_path):
    rows = [(a + b, b + a) for a in "abcdefg" for b in "abcdefg"]
    data = Dataset.from_dict({"prompt": [p for p, _ in rows], "completion": [c for _, c in rows]})
    _, recorder = trained(
        tmp_path,
        data,
        model=tiny_model(dtype=torch.float32),
        per_device_train_batch_size=49,
        num_mc_samples=2,
        max_steps=40,
        optim="adamw_torch",
        learning_rate=1e-2,
        eval_strategy="no",
    )

    losses = recorder.logged("loss")
    assert sum(losses[-5:]) / 5 < 0.5 * losses[0]  # 2.5 falls to 0.6


def test_lora_trains_the_adapter_alone(tmp_path):
    from peft import LoraConfig

    model = tiny_model()
    before = model.model.layers[0].mlp.up_proj.weight.clone()
    trainer = DiffusionSFTTrainer(
        model,
        config_of(tmp_path),
        train_dataset=TEXT,
        processing_class=letter_tokenizer(),
        peft_config=LoraConfig(r=4, target_modules=["q_proj", "v_proj"]),
    )
    trainer.train()

    assert torch.equal(before, model.model.layers[0].mlp.up_proj.weight)
    assert any(p.abs().sum() > 0 for n, p in trainer.model.named_parameters() if "lora_B" in n)


def test_a_run_can_be_resumed_by_a_word_and_is_not_overwritten_without_one(tmp_path):
    options: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1}
    trained(tmp_path, **options, max_steps=1)
    before = {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()}

    with pytest.raises(ValueError, match="already holds a checkpoint, checkpoint-1"):
        trained(tmp_path, **options, max_steps=2)
    assert {p: p.read_bytes() for p in tmp_path.rglob("*") if p.is_file()} == before
    resumed, recorder = trained(tmp_path, **options, max_steps=2, resume_from_checkpoint="true")
    assert resumed.state.global_step == 2
    assert len(recorder.gradients) == 1


def test_a_folder_may_be_the_model_and_gives_the_tokenizer(tmp_path, monkeypatch):
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    letter_tokenizer().save_pretrained(folder)
    monkeypatch.chdir(tmp_path)
    trainer = DiffusionSFTTrainer(str(folder), config_of("out", max_steps=1), train_dataset=TEXT)
    trainer.train()
    trainer.save_model("out")
    assert AutoModelForCausalLM.from_pretrained("out").config.mask_token_id == MASK

    monkeypatch.setattr("transformers.training_args.is_torch_bf16_gpu_available", lambda: True)
    assert DiffusionSFTTrainer(str(folder), train_dataset=TEXT).args.output_dir == "model-SFT"


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (None, "train_dataset is missing"),
        (TEXT.select([]), "train_dataset is empty"),
        (TEXT.remove_columns("completion"), "no column 'completion', only prompt"),
        (TOKENS.remove_columns("completion_mask"), "no column 'completion_mask', only input_ids"),
    ],
    ids=str,
)
def test_a_dataset_that_cannot_be_trained_on_is_refused(data, message, tmp_path):
    with pytest.raises(ValueError, match=message):
        DiffusionSFTTrainer(tiny_model(), config_of(tmp_path), train_dataset=data, processing_class=letter_tokenizer())


def test_a_completion_longer_than_the_window_is_refused_before_the_first_step(tmp_path):
    data = Dataset.from_dict({"prompt": ["a", "b"], "completion": ["abc", "abcdefg"]})
    with pytest.raises(ValueError, match=r"completion of 8 tokens, but max_completion_length=6\. Enlarge .* to 8"):
        DiffusionSFTTrainer(tiny_model(), config_of(tmp_path), train_dataset=data, processing_class=letter_tokenizer())


def test_the_configuration_of_another_trainer_is_refused(tmp_path):
    args = SFTConfig(str(tmp_path), use_cpu=True, bf16=False)
    with pytest.raises(TypeError, match=r"SFTConfig.*DiffusionSFTTrainer needs a DiffusionSFTConfig"):
        DiffusionSFTTrainer(tiny_model(), args, train_dataset=TEXT)  # pyright: ignore[reportArgumentType]


def test_another_loss_is_refused(tmp_path):
    with pytest.raises(ValueError, match="compute_loss_func is not honoured"):
        DiffusionSFTTrainer(
            tiny_model(), config_of(tmp_path), train_dataset=TEXT, compute_loss_func=lambda *args, **kwargs: 0.0
        )


# Configuration


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("router_aux_loss_coef", 0.1),
        ("packing", True),
        ("padding_free", True),
        ("eval_packing", True),
        ("assistant_only_loss", True),
        ("loss_type", "dft"),
        ("label_smoothing_factor", 0.1),
    ],
)
def test_an_option_that_is_not_honoured_is_refused_with_the_reason(name, value):
    with pytest.raises(ValueError, match=rf"^{name}={value!r} is not honoured by DiffusionSFTTrainer") as error:
        config_of("unused", **{name: value})
    assert REFUSED_OPTIONS[name] in str(error.value)


def test_every_refused_option_exists():
    assert set(REFUSED_OPTIONS) <= {f.name for f in dataclasses.fields(SFTConfig)}


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"completion_only_loss": False}, "completion_only_loss=False is not supported"),
        ({"mask_law": "nonsense"}, "mask_law='nonsense' is not known"),
        ({"mc_sampling": "nonsense"}, "mc_sampling='nonsense' is not known"),
        ({"tail": "nonsense"}, "tail='nonsense' is not known"),
        ({"num_mc_samples": 0}, "num_mc_samples=0 must be at least 1"),
        ({"mc_sampling": "complementary", "num_mc_samples": 1}, "num_mc_samples=1 is odd"),
        ({"block_length": 0}, "block_length=0 must lie between 1 and max_completion_length=6"),
        ({"block_length": 7}, "block_length=7 must lie between 1 and max_completion_length=6"),
    ],
    ids=str,
)
def test_a_value_without_meaning_is_refused(options, message):
    with pytest.raises(ValueError, match=message):
        config_of("unused", **options).resolve(FAMILIES[0])


def test_every_field_has_a_line_of_documentation_and_of_help():
    inherited = {f.name for f in dataclasses.fields(SFTConfig)}
    own = [f for f in dataclasses.fields(DiffusionSFTConfig) if f.name not in inherited]
    documentation = inspect.cleandoc(DiffusionSFTConfig.__doc__ or "")
    documented = re.findall(r"^    (\w+) \(`\w+`, \*optional\*(?:, defaults to `(.*)`)?\):$", documentation, re.M)
    assert documented == [(f.name, "" if f.default is None else json.dumps(f.default)) for f in own]
    assert all(f.metadata["help"].endswith(".") for f in own)


def test_a_window_shorter_than_a_block_needs_no_block_length_where_there_are_no_blocks():
    config = DiffusionSFTConfig("unused", use_cpu=True, bf16=False, max_completion_length=32)
    config.resolve(FAMILIES[0])
    assert (config.mask_law, config.num_mc_samples, config.block_length) == ("uniform", 1, 32)
