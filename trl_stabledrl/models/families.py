# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What differs between model families, and what a checkpoint's config and tokenizer leave open."""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal, get_args

from transformers import (
    CONFIG_MAPPING,
    AutoConfig,
    AutoModel,
    AutoModelForCausalLM,
    GenerationConfig,
    PreTrainedConfig,
    PreTrainedTokenizerBase,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.core_model_loading import WeightConverter, WeightRenaming

from trl_stabledrl.core.masking import MaskLaw, McSampling

from .bidirectional import BlockDiffusionMixin, SelectedPositionsMixin

Attention = Literal["full", "block"]
RolloutBackend = Literal["transformers", "vllm"]


@dataclass(frozen=True)
class Family:
    r"""
    Facts of one family of masked diffusion models.

    Args:
        name (`str`):
            Name in messages and recipes.
        model_types (`tuple[str, ...]`):
            Values of `config.model_type` that belong to it.
        attention (`Literal["full", "block"]`):
            Whether every position sees every other, or blocks see earlier blocks.
        mask_token_id (`int`):
            Mask token of the published checkpoints, for configs and tokenizers that do not name one.
        end_token_ids (`tuple[int, ...]`):
            Tokens that end a completion in the published checkpoints.
        block_length (`int`):
            Default number of tokens decoded together. With block attention the config's `block_size` replaces it.
        tokens_per_step (`int`):
            Tokens committed per denoising step by default.
        mask_law (`str`):
            Default law of the masked positions in the likelihood.
        mc_sampling (`str`):
            Default scheme of the Monte Carlo draws.
        num_mc_samples (`int`):
            Default number of Monte Carlo draws.
        lora_target_modules (`tuple[str, ...]`, *optional*):
            Modules that a LoRA adapter changes where none are named. Defaults to the projections of Llama's kin.
        rollout_backends (`tuple[str, ...]`, *optional*, defaults to `("transformers",)`):
            Engines that can decode it while it trains.
    """

    name: str
    model_types: tuple[str, ...]
    attention: Attention
    mask_token_id: int
    end_token_ids: tuple[int, ...]
    block_length: int
    tokens_per_step: int
    mask_law: MaskLaw
    mc_sampling: McSampling
    num_mc_samples: int
    lora_target_modules: tuple[str, ...] = (
        "q_proj",
        "k_proj",
        "v_proj",
        "o_proj",
        "gate_proj",
        "up_proj",
        "down_proj",
    )
    rollout_backends: tuple[RolloutBackend, ...] = ("transformers",)

    def __post_init__(self) -> None:
        """Raise where the facts contradict each other."""
        if self.attention not in get_args(Attention):
            raise ValueError(
                f"attention={self.attention!r} of family {self.name} is not known. Use one of "
                f"{', '.join(map(repr, get_args(Attention)))}."
            )
        self.check_mask_law(self.mask_law)

    @property
    def mask_laws(self) -> tuple[MaskLaw, ...]:
        """Laws whose masks this attention can be scored under."""
        laws: tuple[MaskLaw, ...] = get_args(MaskLaw)
        return tuple(law for law in laws if (law == "staircase") == (self.attention == "block"))

    @property
    def sft_mask_law(self) -> MaskLaw:
        """Law of supervised training: the one the published checkpoints were trained under."""
        return "staircase" if self.attention == "block" else "uniform"

    def check_mask_law(self, mask_law: str) -> None:
        """Raise unless a completion of this family can be scored under the law."""
        if mask_law not in self.mask_laws:
            raise ValueError(
                f"mask_law={mask_law!r} does not apply to {self.name}, whose attention is {self.attention!r}. "
                f"Allowed: {', '.join(map(repr, self.mask_laws))}."
            )

    def check_rollout_backend(self, backend: str) -> None:
        """Raise unless an engine of that name decodes this family."""
        if backend not in self.rollout_backends:
            able = ", ".join(family.name for family in FAMILIES if backend in family.rollout_backends)
            raise ValueError(
                f"rollout_backend={backend!r} (or use_vllm) does not serve {self.name}, only {able or 'no family'}. "
                f"Use {' or '.join(map(repr, self.rollout_backends))}."
            )

    def resolved_block_length(self, block_length: int | None, *, max_completion_length: int) -> int:
        """The decoder's block length, this family's where none is given; raises where it cannot be used."""
        if self.attention == "full":
            return min(self.block_length, max_completion_length) if block_length is None else block_length
        if block_length not in (None, self.block_length):
            raise ValueError(
                f"block_length={block_length} is not the model's own, {self.block_length}: a model with block "
                "attention only knows the blocks it was trained with. Leave block_length out, or load a checkpoint "
                f"of block_size {block_length}."
            )
        return self.block_length


FAMILIES: list[Family] = []
"""The known families, in the order they were registered. [`register_family`] adds to it."""


def register_family(
    family: Family,
    config_class: type[PreTrainedConfig],
    model_class: type[SelectedPositionsMixin],
    *,
    key_renames: Sequence[WeightConverter | WeightRenaming] = (),
) -> None:
    r"""
    Make a family known here and to transformers' Auto classes. Again, as after a reload, replaces the first time.

    A class registered from outside transformers wins over a checkpoint's `auto_map`, whatever `trust_remote_code`
    says: the Auto classes call it "explicit local code" and never fetch the remote file.

    Args:
        family ([`Family`]):
            Facts of the family.
        config_class (`type[PreTrainedConfig]`):
            Its configuration, with a `model_type` of its own.
        model_class (`type[SelectedPositionsMixin]`):
            Its model with a vocabulary projection. A [`BlockDiffusionMixin`] where attention is by blocks.
        key_renames (`Sequence[WeightRenaming]`, *optional*):
            Renames from the published tensor names to the host's, applied on loading and turned round on saving.
    """
    model_type = config_class.model_type
    if model_type not in family.model_types:
        raise ValueError(
            f"{config_class.__name__} has model_type {model_type!r}, but family {family.name} has model_types="
            f"{family.model_types}. Give the config class a model_type of its own and list it in the family."
        )
    if (family.attention == "block") != issubclass(model_class, BlockDiffusionMixin):
        mixin = BlockDiffusionMixin if family.attention == "block" else SelectedPositionsMixin
        raise ValueError(
            f"Family {family.name} has attention={family.attention!r}, but {model_class.__name__} attends otherwise. "
            f"Derive the model from {mixin.__name__}, or correct attention."
        )
    for other in FAMILIES:
        taken = set(other.model_types) & set(family.model_types)
        if taken and other.name != family.name:
            raise ValueError(
                f"model_type {', '.join(map(repr, sorted(taken)))} of family {family.name} already belongs to family "
                f"{other.name}. Choose another model_type."
            )
    if model_type in CONFIG_MAPPING and CONFIG_MAPPING[model_type].__module__.startswith("transformers."):
        raise ValueError(
            f"model_type {model_type!r} of family {family.name} is transformers' own, whose models would all load as "
            f"{model_class.__name__}. Choose another model_type."
        )
    # TRL reads it of every config whose architecture transformers lacks; a published one overrides it
    registered: Any = config_class
    registered.auto_map = {}
    AutoConfig.register(model_type, config_class, exist_ok=True)
    # published auto_maps differ in whether AutoModel names a class with the vocabulary projection; without our forward
    # the mask would be another, so that nothing loads as a bare backbone
    AutoModel.register(config_class, model_class, exist_ok=True)
    AutoModelForCausalLM.register(config_class, model_class, exist_ok=True)
    if key_renames:
        register_checkpoint_conversion_mapping(model_type, list(key_renames), overwrite=True)
    names = [other.name for other in FAMILIES]
    if family.name in names:
        FAMILIES[names.index(family.name)] = family
    else:
        FAMILIES.append(family)


def family_of(config: PreTrainedConfig) -> Family:
    r"""
    Find the family that a model belongs to.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.

    Returns:
        [`Family`]:
            The family with the config's `model_type`.
    """
    for family in FAMILIES:
        if config.model_type in family.model_types:
            if family.attention == "block":  # the blocks a model was trained with are its own
                return replace(family, block_length=config.to_dict()["block_size"])
            return family
    known = ", ".join(repr(model_type) for family in FAMILIES for model_type in family.model_types)
    raise ValueError(
        f"model_type is {config.model_type!r}, which belongs to no known family. Known are: {known}. Choose a "
        "checkpoint of one of them; models that do not predict masked tokens have no likelihood here."
    )


def mask_token_id_of(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None = None) -> int:
    r"""
    Find the token that stands for a masked position: the config's, else the tokenizer's, else the family's.

    The family's published id counts only where the vocabulary reaches it and the tokenizer, if given, holds it as a
    special token: in another vocabulary the same number is an ordinary word.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's tokenizer.

    Returns:
        `int`:
            Id of the mask token.
    """
    settings = config.to_dict()
    vocab_size = settings.get("vocab_size")
    found: Any = settings.get("mask_token_id")
    if found is None and tokenizer is not None:
        found = tokenizer.mask_token_id
    if found is None:
        for family in FAMILIES:
            if config.model_type in family.model_types and _is_confirmed(family.mask_token_id, vocab_size, tokenizer):
                found = family.mask_token_id
    if found is None:
        raise ValueError(
            f"Neither the config (model_type {config.model_type!r}) nor the tokenizer names a mask token, so this "
            "proxy does not apply: the likelihood of a completion is estimated by masking its tokens. Set "
            "mask_token_id in the config or mask_token in the tokenizer. Models that corrupt tokens uniformly instead "
            "of masking them, such as DiffusionGemma, are not covered."
        )
    if vocab_size is not None and not 0 <= found < vocab_size:
        raise ValueError(
            f"mask_token_id is {found}, but the model has {vocab_size} tokens. It must be below that number: correct "
            "mask_token_id in the config, or load the tokenizer that belongs to the model."
        )
    return found


def end_token_ids_of(
    config: PreTrainedConfig,
    tokenizer: PreTrainedTokenizerBase,
    *,
    generation_config: GenerationConfig | None = None,
) -> tuple[int, ...]:
    r"""
    Collect the tokens that end a completion: the tokenizer's, the configs' and the family's published ones.

    A published id counts only where the vocabulary reaches it and the tokenizer holds it as a special token.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            The model's tokenizer.
        generation_config ([`~transformers.GenerationConfig`], *optional*):
            The model's generation configuration.

    Returns:
        `tuple[int, ...]`:
            Ids in ascending order, at least one.
    """
    settings = config.to_dict()
    vocab_size = settings.get("vocab_size")
    sources = {"the tokenizer": tokenizer.eos_token_id, "the config": settings.get("eos_token_id")}
    if generation_config is not None:
        sources["the generation config"] = generation_config.eos_token_id
    found: set[int] = set()
    for source, value in sources.items():
        ids = [] if value is None else [value] if isinstance(value, int) else list(value)
        for token_id in ids:
            if vocab_size is not None and not 0 <= token_id < vocab_size:
                raise ValueError(
                    f"eos_token_id of {source} is {token_id}, but the model has {vocab_size} tokens. It must be below "
                    "that number: correct it, or load the tokenizer that belongs to the model."
                )
        found.update(ids)
    for family in FAMILIES:
        if config.model_type in family.model_types:
            found.update(i for i in family.end_token_ids if _is_confirmed(i, vocab_size, tokenizer))
    if not found:
        raise ValueError(
            "Neither the tokenizer nor the model's configs name an end token, so no completion could end before its "
            "full length. Set eos_token in the tokenizer or eos_token_id in the config."
        )
    return tuple(sorted(found))


def check_vocabulary(config: PreTrainedConfig, tokenizer: PreTrainedTokenizerBase | None, embedding_rows: int) -> None:
    r"""
    Raise where config, embedding and tokenizer do not agree on the size of the vocabulary.

    The embedding may be larger than the tokenizer, as in the published checkpoints, where it is padded.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            The model's tokenizer.
        embedding_rows (`int`):
            Rows of the embedding, such as `model.get_input_embeddings().num_embeddings`.
    """
    vocab_size = config.to_dict()["vocab_size"]
    if vocab_size != embedding_rows:
        raise ValueError(
            f"vocab_size of the config is {vocab_size}, but the embedding has {embedding_rows} rows. They must be "
            "equal: correct the config, or resize with model.resize_token_embeddings."
        )
    if tokenizer is None:
        return
    num_tokens = 1 + max(tokenizer.get_vocab().values())  # not len(): ids may have gaps
    if num_tokens > embedding_rows:
        raise ValueError(
            f"The tokenizer has ids up to {num_tokens - 1}, so {num_tokens} tokens, but the embedding has "
            f"{embedding_rows} rows. Load the tokenizer that belongs to the model, or resize with "
            "model.resize_token_embeddings."
        )


def _is_confirmed(token_id: int, vocab_size: int | None, tokenizer: PreTrainedTokenizerBase | None) -> bool:
    """Whether a published id exists here and is a special token, not an ordinary word of another vocabulary."""
    if vocab_size is not None and token_id >= vocab_size:
        return False
    if tokenizer is None:
        return True
    added = tokenizer.added_tokens_decoder
    return token_id in tokenizer.all_special_ids or (token_id in added and added[token_id].special)
