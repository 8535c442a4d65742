# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What we override or rely on in TRL, Transformers, Accelerate and PEFT, so that an upgrade fails here and by name."""

import ast
import inspect
import textwrap
from dataclasses import fields
from typing import Any

import pytest
import torch
import transformers
import trl
from torch import nn
from transformers import Trainer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer

import trl_stabledrl
from tests.trainer_tools import GROUP, WINDOW, config_of, letter_tokenizer, prompts_of, run_of, tiny_model
from trl_stabledrl import DiffusionSFTConfig, DiffusionSFTTrainer, StableDRLConfig, StableDRLTrainer
from trl_stabledrl.checkpoints import CheckpointedTrainer
from trl_stabledrl.stabledrl_config import FORCED_OPTIONS, REFUSED_OPTIONS


def parameters_of(function: Any) -> list[str]:
    """Names, with `=` where there is a default."""
    found = inspect.signature(inspect.unwrap(function)).parameters.values()
    return [p.name + ("" if p.default is p.empty else "=") for p in found]


LOGPS_OF_A_DIFFUSION_MODEL = ["self", "model", "input_ids", "attention_mask", "logits_to_keep", "batch_size="]
TRAIN = ["self", "resume_from_checkpoint=", "trial=", "ignore_keys_for_eval="]
LOOP = ["self", "dataloader", "description", "prediction_loss_only=", "ignore_keys=", "metric_key_prefix="]


@pytest.mark.parametrize(
    ("trainer", "method", "parameters"),
    [
        (GRPOTrainer, "_get_train_sampler", ["self", "dataset="]),
        (
            GRPOTrainer,
            "_generate_single_turn",
            ["self", "prompt_ids", "images", "multimodal_fields", "num_generations", "has_tool_images="],
        ),
        (GRPOTrainer, "_generate_and_score_completions", ["self", "inputs"]),
        (GRPOTrainer, "_calculate_rewards", ["self", "inputs", "prompts", "completions", "completion_ids_list"]),
        (GRPOTrainer, "_prepare_inputs", ["self", "generation_batch"]),
        (GRPOTrainer, "training_step", ["self", "model", "inputs", "num_items_in_batch"]),
        (GRPOTrainer, "compute_loss", ["self", "model", "inputs", "return_outputs=", "num_items_in_batch="]),
        (GRPOTrainer, "_compute_loss", ["self", "model", "inputs"]),
        (GRPOTrainer, "log", ["self", "logs", "start_time="]),
        (GRPOTrainer, "evaluation_loop", LOOP),
        (GRPOTrainer, "train", TRAIN),
        (GRPOTrainer, "_save_checkpoint", ["self", "model", "trial"]),
        (GRPOTrainer, "_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        (SFTTrainer, "compute_loss", ["self", "model", "inputs", "return_outputs=", "num_items_in_batch="]),
        (SFTTrainer, "evaluation_loop", LOOP),
        (SFTTrainer, "train", TRAIN),
        (SFTTrainer, "_save_checkpoint", ["self", "model", "trial"]),
        (SFTTrainer, "_load_optimizer_and_scheduler", ["self", "checkpoint"]),
        (Trainer, "_get_output_dir", ["self", "trial"]),
        (Trainer, "_load_from_checkpoint", ["self", "resume_from_checkpoint", "model="]),
        (
            Trainer,
            "_run_epoch",
            ["self", "model", "epoch", "train_dataloader", "steps_in_epoch", "num_update_steps_per_epoch", "trial"]
            + ["ignore_keys_for_eval", "start_time", "resume_from_checkpoint", "epochs_trained"]
            + ["steps_trained_in_current_epoch"],
        ),
    ],
)
def test_methods_that_are_overridden_have_the_signature_they_had(trainer, method, parameters):
    assert parameters_of(inspect.getattr_static(trainer, method)) == parameters


def test_the_scores_that_are_replaced_are_asked_for_as_they_were():
    parameters = parameters_of(GRPOTrainer._get_per_token_logps_and_entropies)
    assert parameters[: len(LOGPS_OF_A_DIFFUSION_MODEL)] == LOGPS_OF_A_DIFFUSION_MODEL


def test_the_constructor_takes_what_grpo_takes_less_tools_and_environments():
    theirs, ours = parameters_of(GRPOTrainer.__init__), parameters_of(StableDRLTrainer.__init__)
    assert ours == theirs[: len(ours)]
    assert theirs[len(ours) :] == ["tools=", "rollout_func=", "environment_factory="]


def test_the_constructor_of_sft_takes_the_names_that_are_passed_on():
    assert {"model", "args=", "train_dataset=", "eval_dataset=", "processing_class=", "compute_loss_func="} <= set(
        parameters_of(SFTTrainer.__init__)
    )


def overridden(ours: type, theirs: type) -> set[str]:
    own = {**vars(CheckpointedTrainer), **vars(ours)}
    return {name for name in own if not name.startswith("__") and name in dir(theirs)} - {"args", "model"}


def test_nothing_else_is_overridden():
    assert overridden(StableDRLTrainer, GRPOTrainer) == {
        "_tag_names", "_name", "_paper", "_get_train_sampler", "_generate_single_turn",
        "_get_per_token_logps_and_entropies", "_generate_and_score_completions", "_calculate_rewards",
        "_prepare_inputs", "training_step", "_compute_loss", "log", "evaluation_loop", "train", "_save_checkpoint",
        "_run_epoch", "_get_output_dir", "_push_from_checkpoint", "_save", "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
    }  # fmt: skip
    assert overridden(DiffusionSFTTrainer, SFTTrainer) == {
        "loss_is_scaled_for_ga", "_tag_names", "_name", "compute_loss", "training_step", "evaluation_loop", "train",
        "_save_checkpoint", "_run_epoch", "_get_output_dir", "_push_from_checkpoint", "_save", "_load_from_checkpoint",
        "_load_optimizer_and_scheduler",
    }  # fmt: skip


def test_names_of_ours_do_not_collide_with_the_hosts():
    for ours, theirs in ((StableDRLTrainer, GRPOTrainer), (DiffusionSFTTrainer, SFTTrainer)):
        source = ast.parse(textwrap.dedent(inspect.getsource(ours)))
        assigned = {
            node.attr
            for node in ast.walk(source)
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store)
            if isinstance(node.value, ast.Name) and node.value.id == "self"
        }
        hosts = inspect.getsource(theirs) + inspect.getsource(Trainer)
        shared = {name for name in assigned if f"self.{name} " in hosts}
        # TRL's own state, which is set on purpose: end tokens, progress of a resumed run, rows in order, tokens seen
        assert shared <= {"eos_token_ids", "_step", "_buffered_inputs", "_total_train_tokens"}, shared


def test_loss_scaling_is_left_to_the_loss():
    # read by Trainer.training_step: with False it would divide by the accumulation steps once more
    assert "loss_is_scaled_for_ga" in inspect.getsource(Trainer.training_step)
    assert "loss_is_scaled_for_ga = True" in inspect.getsource(GRPOTrainer)
    assert DiffusionSFTTrainer.loss_is_scaled_for_ga is True


def test_a_generation_is_made_and_cut_where_we_expect_it():
    source = inspect.getsource(inspect.unwrap(GRPOTrainer._prepare_inputs))
    for line in (
        "generate_every = self.args.steps_per_generation * self.num_iterations",
        "if self._step % generate_every == 0 or self._buffered_inputs is None:",
        "shuffle_sequence_dict(generation_batch)",
        "split_tensor_dict(generation_batch, self.args.steps_per_generation)",
        "self._buffered_inputs[self._step % self.args.steps_per_generation]",
    ):
        assert line in source
    assert "self._step += 1" in inspect.getsource(GRPOTrainer.training_step)
    generate = inspect.getsource(inspect.unwrap(GRPOTrainer._generate_and_score_completions))
    assert "if self.args.gradient_accumulation_steps % generate_every != 0 or (" in generate
    assert generate.count("self._get_per_token_logps_and_entropies(") == 3  # old, reference model, reference adapter
    assert 'use_adapter(model, adapter_name="ref" if "ref" in model.peft_config else None)' in generate


class Probe(StableDRLTrainer):
    """Looks at what the host hands over."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self.calls: list[dict[str, Any]] = []
        self.seen: dict[str, Any] = {}
        super().__init__(*args, **kwargs)

    def _get_per_token_logps_and_entropies(
        self, model, input_ids, attention_mask, logits_to_keep, batch_size=None, **kwargs
    ):
        self.calls.append({"shape": tuple(input_ids.shape), "keep": logits_to_keep, "size": batch_size} | kwargs)
        return super()._get_per_token_logps_and_entropies(
            model, input_ids, attention_mask, logits_to_keep, batch_size, **kwargs
        )

    def _generate_single_turn(self, prompt_ids, *args, **kwargs):
        self.seen["prompt_ids"] = prompt_ids
        return super()._generate_single_turn(prompt_ids, *args, **kwargs)

    def _generate_and_score_completions(self, inputs):
        self.seen["num_inputs"] = len(inputs)
        self.seen["batch"] = super()._generate_and_score_completions(inputs)
        return self.seen["batch"]

    def _compute_loss(self, model, inputs):
        self.seen["micro_batch"] = inputs
        self.seen["accumulation"] = self.current_gradient_accumulation_steps
        self.seen["is_wrapped"] = model is self.model_wrapped
        return super()._compute_loss(model, inputs)


def test_the_host_hands_over_what_we_read(tmp_path):
    run = run_of(
        tmp_path,
        trainer_class=Probe,
        per_device_train_batch_size=4,
        gradient_accumulation_steps=2,
        steps_per_generation=4,
    )
    trainer, seen = run.trainer, run.trainer.seen

    batch = seen["batch"]
    assert seen["num_inputs"] == 16
    assert all(isinstance(ids, list) and isinstance(ids[0], int) for ids in seen["prompt_ids"])
    length = batch["completion_ids"].shape[1]
    assert {k: tuple(v.shape) for k, v in batch.items()} == {
        "prompt_ids": (16, 5),
        "prompt_mask": (16, 5),
        "completion_ids": (16, length),
        "completion_mask": (16, length),
        "advantages": (16,),
        "num_items_in_batch": (),
        "old_per_token_logps": (16, 1),
        "row_index": (16,),
    }
    assert length <= WINDOW
    (call,) = trainer.calls
    assert (call["shape"], call["keep"], call["size"]) == ((16, 5 + length), length, 4)
    assert set(seen["micro_batch"]) == {
        *batch, "iteration", "is_on_policy", "is_excluded", "weight", "log_ratio", "elbo",
        "entropy", "num_scored", "summed_elbo",
    }  # fmt: skip
    assert seen["accumulation"] == 2
    assert seen["is_wrapped"]
    # attributes
    assert trainer._step == 2
    assert trainer._buffered_inputs is not None
    assert len(trainer._buffered_inputs) == 4
    assert (trainer.num_iterations, trainer.beta, trainer.ref_model) == (1, 0.0, None)
    assert (trainer.num_generations, trainer.num_generations_eval) == (GROUP, GROUP)
    assert set(trainer._metrics) == {"train", "eval"}
    assert trainer.args.generation_batch_size == 16


def test_the_reference_is_asked_for_by_the_model_we_compare_with(tmp_path):
    from peft import LoraConfig

    from trl_stabledrl import _compat

    found: list[bool] = []

    class Asking(Probe):
        def _get_per_token_logps_and_entropies(self, model, *args, **kwargs):
            found.append(model is self.ref_model or _compat.is_reference_active(model))
            return super()._get_per_token_logps_and_entropies(model, *args, **kwargs)

    options: dict[str, Any] = {"beta": 0.1, "num_iterations": 2, "trainer_class": Asking}
    folder = tmp_path / "model"
    tiny_model().save_pretrained(folder)
    model = transformers.AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float64)
    run_of(tmp_path, model=model, **options)
    assert found == [False, True]  # old, then reference
    run_of(tmp_path, peft_config=LoraConfig(r=2, target_modules=["q_proj"]), **options)
    assert found[2:] == [False, True]


def test_a_copied_adapter_is_the_reference_too(tmp_path):
    from peft import LoraConfig, get_peft_model

    from trl_stabledrl import _compat

    lora = LoraConfig(r=2, target_modules=["q_proj"], init_lora_weights=False)
    model: Any = get_peft_model(tiny_model(), lora)
    assert not _compat.is_reference_active(model)
    trainer = StableDRLTrainer(
        model,
        lambda completions, **kwargs: [float(len(c)) for c in completions],
        config_of(tmp_path, beta=0.1),
        prompts_of(),
        processing_class=letter_tokenizer(),
    )
    trainer.train()

    assert "ref" in model.peft_config
    kl = [logs["kl"] for logs in trainer.state.log_history if "kl" in logs]
    assert kl == pytest.approx([0.0], abs=1e-12)  # the adapter is its own reference, not the base model
    with model.disable_adapter():
        assert _compat.is_reference_active(model)
    assert not _compat.is_reference_active(model)


def test_private_helpers_are_where_they_were():
    from trl.kernels import ChunkedLogProbFunction
    from trl.models import unwrap_model_for_generation
    from trl.trainer.utils import RepeatSampler, maybe_gather_lm_head_ctx

    assert parameters_of(ChunkedLogProbFunction.forward) == [
        "ctx", "hidden", "weight", "bias", "targets", "temperature", "chunk_size", "final_logit_softcapping=",
        "logit_scale=", "outputs=",
    ]  # fmt: skip
    assert parameters_of(unwrap_model_for_generation) == [
        "model", "accelerator", "gather_deepspeed3_params=", "generation_kwargs=", "gradient_checkpointing_kwargs=",
    ]  # fmt: skip
    assert parameters_of(maybe_gather_lm_head_ctx) == ["params"]
    sampler = RepeatSampler([1, 2, 3], mini_repeat_count=1, seed=5)
    assert (sampler.shuffle, sampler.seed, sampler.num_samples) == (True, 5, 3)
    assert isinstance(sampler.generator, torch.Generator)


def test_dropout_of_attention_weights_is_a_number_that_trl_does_not_find():
    from trl.trainer.utils import disable_dropout_in_model

    model = tiny_model()
    attention = model.model.layers[0].self_attn
    attention.attention_dropout = 0.1
    disable_dropout_in_model(model)
    assert attention.attention_dropout == 0.1  # then `disable_attention_dropout` is not needed any more
    assert not any(isinstance(module, nn.Dropout) for module in model.modules())


def test_metrics_of_the_host_are_named_as_the_documentation_says(tmp_path):
    run = run_of(tmp_path)
    assert {
        "reward", "reward_std", "frac_reward_zero_std", "rewards/reward/mean", "completions/mean_length",
        "completions/clipped_ratio", "num_tokens", "loss", "grad_norm", "learning_rate", "epoch",
    } <= set(run.recorder.logs[0])  # fmt: skip


def test_versions_are_the_ones_this_was_written_against():
    assert trl.__version__.startswith("1.16.")
    major, minor = (int(part) for part in transformers.__version__.split(".")[:2])
    assert (5, 16) <= (major, minor) < (5, 21)


def test_public_names():
    assert set(trl_stabledrl.__all__) == {
        "DiffusionSFTConfig", "DiffusionSFTTrainer", "EvaluationConfig", "StableDRLConfig", "StableDRLTrainer",
        "TaskEvaluation", "__version__", "evaluate", "generate", "recipes_folder", "score", "write_trace",
    }  # fmt: skip
    assert issubclass(StableDRLTrainer, GRPOTrainer)
    assert issubclass(StableDRLConfig, GRPOConfig)
    assert issubclass(DiffusionSFTTrainer, SFTTrainer)
    assert issubclass(DiffusionSFTConfig, SFTConfig)


def own_fields(ours: type, theirs: type) -> dict[str, Any]:
    inherited: dict[str, Any] = {f.name: f.default for f in fields(theirs)}
    return {f.name: f.default for f in fields(ours) if f.name not in inherited or f.default != inherited[f.name]}


def test_fields_and_defaults_of_the_configurations():
    assert own_fields(StableDRLConfig, GRPOConfig) == {
        "objective": "stabledrl",
        "mask_law": None,
        "mc_sampling": None,
        "num_mc_samples": None,
        "mask_coupling": "shared",
        "mask_sharing": "none",
        "surrogate": "elbo",
        "eubo_beta": 1.5,
        "clip_mode": "both",
        "ratio_cap": 5.0,
        "epsilon": None,
        "ratio_normalization": "token",
        "kl_estimator": None,
        "score_temperature": 1.0,
        "tail": "mask",
        "context_attention": "block_causal",
        "detach_context": False,
        "block_length": None,
        "num_denoising_steps": None,
        "remasking": "low_confidence",
        "confidence_threshold": None,
        "suppress_eos": None,
        "guidance_scale": 0.0,
        "rollout_backend": "transformers",
        "rollout_self_check": True,
        "vllm_engine_kwargs": None,
        "stability_guard": "warn",
        "loss_type": "stabledrl",
        "scale_rewards": "none",
        "disable_dropout": True,
        "vllm_importance_sampling_correction": False,
    }
    assert own_fields(DiffusionSFTConfig, SFTConfig) == {
        "mask_law": None,
        "mc_sampling": "independent",
        "num_mc_samples": 1,
        "block_length": None,
        "max_completion_length": 256,
        "tail": "mask",
        "completion_only_loss": True,
    }


def test_options_that_are_refused_still_exist():
    names = {f.name for f in fields(GRPOConfig)}
    assert set(REFUSED_OPTIONS) | set(FORCED_OPTIONS) <= names
