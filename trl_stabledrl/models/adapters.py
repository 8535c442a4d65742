# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""PEFT adapters: which folder holds one, what one may change, and how training continues from it."""

import copy
import json
import re
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from accelerate.utils import is_peft_model
from safetensors import SafetensorError
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.utils import find_adapter_config_file

from .._compat import shapes_only
from .families import Family

if TYPE_CHECKING:
    from peft import PeftConfig

WEIGHT_FILES = ("model*.safetensors*", "pytorch_model*.bin*")
"""Of a whole model."""

# names of the host models' modules
_HEAD, _EMBEDDING = "lm_head", "embed_tokens"


@dataclass(frozen=True)
class Adapter:
    """
    An adapter on disk or on the Hub.

    Attributes:
        path (`str`):
            Its folder or name.
        base (`str`):
            The model it belongs to, as `adapter_config.json` names it.
        base_revision (`str`, *optional*):
            Revision of that model.
    """

    path: str
    base: str
    base_revision: str | None


def adapter_at(path: str, *, revision: str | None = None) -> Adapter | None:
    """
    Find out whether a path holds an adapter instead of a model.

    Args:
        path (`str`):
            Folder or name on the Hub.
        revision (`str`, *optional*):
            Revision on the Hub.

    Returns:
        [`Adapter`] or `None`
    """
    config_file = find_adapter_config_file(path, revision=revision)
    if config_file is None:
        return None
    whole = [file.name for pattern in WEIGHT_FILES for file in Path(path).glob(pattern)]
    if whole:
        raise ValueError(
            f"{path} holds an adapter and a whole model beside it, {sorted(whole)[0]}. transformers would load both "
            "as one model that cannot be trained. Move the adapter's files to a folder of their own."
        )
    config = json.loads(Path(config_file).read_text())
    base = config.get("base_model_name_or_path")
    if not base:
        raise ValueError(
            f"adapter_config.json of {path} does not say which model the adapter belongs to. Set "
            "base_model_name_or_path in it to that model's folder or name on the Hub."
        )
    return Adapter(path, base, config.get("revision"))


def with_default_targets(peft_config: "PeftConfig", family: Family) -> "PeftConfig":
    """
    Fill in the modules that a LoRA adapter changes where the user named none: PEFT knows no default for our models.

    Args:
        peft_config ([`~peft.PeftConfig`]):
            Configuration of a new adapter, left as it is.
        family ([`Family`]):
            The model's family.

    Returns:
        [`~peft.PeftConfig`]
    """
    settings = vars(peft_config)
    has_default = "target_modules" in settings and settings["target_modules"] is None
    if not has_default or settings.get("target_parameters"):
        return peft_config
    peft_config = copy.deepcopy(peft_config)
    vars(peft_config)["target_modules"] = set(family.lora_target_modules)
    return peft_config


def check_peft_config(peft_config: "PeftConfig", config: PreTrainedConfig) -> None:
    """
    Raise unless a diffusion model can be trained with such an adapter.

    Args:
        peft_config ([`~peft.PeftConfig`]):
            Configuration of the adapter.
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of the model it changes.
    """
    if peft_config.is_prompt_learning:
        raise ValueError(
            f"peft_config is a {type(peft_config).__name__}, which puts tokens of its own before the prompt: masks "
            "and blocks are counted without them. Use an adapter of the weights, such as LoraConfig."
        )
    is_tied = bool(config.to_dict().get("tie_word_embeddings"))
    for field in ("target_modules", "modules_to_save"):
        value = vars(peft_config).get(field) or ()
        for name in [value] if isinstance(value, str) else sorted(value):
            module = name.rpartition(".")[2]
            if module == _HEAD:
                raise ValueError(
                    f"{field} has {name!r}, but the vocabulary projection is read by its weight, past any adapter on "
                    f"it. Take {name} out of {field}."
                )
            if module == _EMBEDDING and is_tied:
                raise ValueError(
                    f"{field} has {name!r}, but the model ties it to the vocabulary projection, which is read by its "
                    f"weight, past any adapter on it. Take {name} out of {field}."
                )


def check_adapter(model: Any, *, needs_reference: bool) -> None:
    """
    Raise where a model with an adapter could not be trained, or not against the adapter's start.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A path, of which nothing is known yet, or a model.
        needs_reference (`bool`):
            Whether a frozen copy of the adapter will be the reference.
    """
    if isinstance(model, str):
        return
    if not is_peft_model(model):
        if model._hf_peft_config_loaded:
            raise ValueError(
                "model holds an adapter that transformers loaded itself, which trainers take for a part of the model "
                "and load without gradients. Pass model=PeftModel.from_pretrained(base, adapter, is_trainable=True), "
                "or the adapter's folder as model=."
            )
        return
    for peft_config in model.peft_config.values():
        check_peft_config(peft_config, model.config)
    if not any(parameter.requires_grad for parameter in model.parameters()):
        raise ValueError(
            "model is a PeftModel in which no parameter requires a gradient: adapters are loaded for inference unless "
            "is_trainable says otherwise, and nothing would be trained. Load it with PeftModel.from_pretrained(base, "
            "adapter, is_trainable=True)."
        )
    names = sorted(model.peft_config)
    if needs_reference and ("default" not in names or "ref" in names or model.active_adapters != ["default"]):
        raise ValueError(
            f"beta is above 0, so TRL copies the adapter 'default' to a frozen 'ref', but model has the adapters "
            f"{', '.join(map(repr, names))}, with {', '.join(map(repr, model.active_adapters))} active. Load the one "
            "to be trained alone and without adapter_name, or set beta=0."
        )


def checked_peft_config(
    peft_config: "PeftConfig | None", *, adapter: Adapter | None, family: Family, config: PreTrainedConfig
) -> "PeftConfig | None":
    """
    Complete the configuration of a new adapter and raise where it could not be trained.

    Args:
        peft_config ([`~peft.PeftConfig`], *optional*):
            Of the adapter to be made.
        adapter ([`Adapter`], *optional*):
            What the model's path turned out to be.
        family ([`Family`]):
            The model's family.
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.

    Returns:
        [`~peft.PeftConfig`] or `None`
    """
    if peft_config is None:
        return None
    if adapter is not None:
        raise ValueError(
            f"model={adapter.path!r} is an adapter of {adapter.base}, and peft_config asks for a new one on top. "
            "To continue the adapter leave peft_config out. To start a new one merge this one first: trl-stabledrl "
            f"merge --adapter {adapter.path} --output_dir ..."
        )
    peft_config = with_default_targets(peft_config, family)
    check_peft_config(peft_config, config)
    return _with_known_targets(peft_config, family, config)


def _with_known_targets(peft_config: "PeftConfig", family: Family, config: PreTrainedConfig) -> "PeftConfig":
    """
    Raise where no module is called as `target_modules` says.

    A string is a pattern to PEFT; TRL makes one of a list with one name, which as a pattern matches nothing.
    """
    targets = vars(peft_config).get("target_modules") or ()
    if targets == "all-linear":
        return peft_config
    with shapes_only():
        modules = [name for name, _ in AutoModelForCausalLM.from_config(config).named_modules()]
    if isinstance(targets, str):
        if any(re.fullmatch(targets, name) for name in modules):
            return peft_config
        peft_config = copy.deepcopy(peft_config)
        targets = vars(peft_config)["target_modules"] = {targets}
    for target in sorted(targets):
        if not any(f".{name}".endswith(f".{target}") for name in modules):
            raise ValueError(
                f"target_modules has {target!r}, which no module of the model is called. The projections of "
                f"{family.name} are {', '.join(family.lora_target_modules)}."
            )
    return peft_config


def check_adapter_tensors(
    path: str, peft_config: "PeftConfig", config: PreTrainedConfig, *, revision: str | None = None
) -> None:
    """
    Raise unless an adapter's tensors are those that its model needs: PEFT leaves the ones that are absent as they are.

    Args:
        path (`str`):
            The adapter's folder or name on the Hub.
        peft_config ([`~peft.PeftConfig`]):
            Its configuration.
        config ([`~transformers.PreTrainedConfig`]):
            Configuration of the model, of which no weight is needed.
        revision (`str`, *optional*):
            Revision of the adapter.
    """
    from peft import get_peft_model
    from peft.utils.save_and_load import get_peft_model_state_dict, load_peft_weights

    blank = copy.deepcopy(peft_config)
    blank.base_model_name_or_path = None  # PEFT warns where it is not the model's
    if "init_lora_weights" in vars(blank):  # some ways to initialise need the model's weights
        vars(blank)["init_lora_weights"] = False
    with shapes_only():
        model: Any = get_peft_model(AutoModelForCausalLM.from_config(config), blank)
    expected = {
        name: tuple(tensor.shape)
        for name, tensor in get_peft_model_state_dict(model, save_embedding_layers=False).items()
    }
    try:
        weights = load_peft_weights(path, "cpu", revision=revision)
    except SafetensorError as error:
        raise ValueError(
            f"The weights of the adapter {path} cannot be read ({error}): the file is cut off or damaged. Copy it "
            "again."
        ) from error
    found = {name: tuple(tensor.shape) for name, tensor in weights.items()}
    for name in sorted(expected.keys() & found.keys()):
        if found[name] != expected[name]:
            raise ValueError(
                f"{name} has shape {found[name]} in the adapter {path}, but its model needs {expected[name]}. Name "
                "the model that the adapter was trained on."
            )
    for names, problem in (
        (expected.keys() - found.keys(), "lacks tensors that its model needs"),
        (found.keys() - expected.keys(), "has tensors that its model has no place for"),
    ):
        if names:
            raise ValueError(
                f"The adapter {path} {problem}: {sorted(names)[0]}, {len(names)} in all. Check that its files are "
                "whole, and that the model is the one it was trained on."
            )


def load_trainable(adapter: Adapter, *, model_init_kwargs: Any, quantization_config: Any = None) -> Any:
    """
    Load a model and an adapter of it to be trained further.

    Args:
        adapter ([`Adapter`]):
            From [`adapter_at`].
        model_init_kwargs (`dict`, *optional*):
            Options of the model's `from_pretrained`. `revision` is the adapter's.
        quantization_config (*optional*):
            Quantisation of the model.

    Returns:
        [`~peft.PeftModel`]
    """
    from peft import PeftConfig, PeftModel

    options = {"dtype": "float32", **(model_init_kwargs or {})}  # TRL's default
    revision = options.pop("revision", None)
    base_revision = adapter.base_revision or "main"
    config = AutoConfig.from_pretrained(adapter.base, revision=base_revision)
    peft_config = PeftConfig.from_pretrained(adapter.path, revision=revision)
    check_peft_config(peft_config, config)
    check_adapter_tensors(adapter.path, peft_config, config, revision=revision)
    if quantization_config is not None:
        options["quantization_config"] = quantization_config
    base = AutoModelForCausalLM.from_pretrained(adapter.base, revision=base_revision, **options)
    return PeftModel.from_pretrained(
        base,
        adapter.path,
        is_trainable=True,
        revision=revision,
        # float32 adapters beside bfloat16 weights break ZeRO-3's gathering; TRL does the same for new ones
        autocast_adapter_dtype=not (is_deepspeed_zero3_enabled() and quantization_config is None),
    )


def match_reference(model: Any) -> None:
    """
    Give the frozen copy of an adapter the adapter's data type, without which a score by one is not that by the other.

    TRL makes the copy first, and then rounds the adapters of a quantised model to bfloat16: those to be trained alone.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A model that TRL's trainer has prepared, changed in place.
    """
    if not is_peft_model(model) or "ref" not in model.peft_config:
        return
    for name, parameter in model.named_parameters():
        if ".ref." in name:
            parameter.data = parameter.data.to(model.get_parameter(name.replace(".ref.", ".default.")).dtype)
