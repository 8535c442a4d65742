# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What has to be known of a model before it is used, found without loading a weight where a path is given."""

from dataclasses import dataclass
from typing import Any

from transformers import AutoConfig, AutoTokenizer, GenerationConfig, PreTrainedConfig, PreTrainedTokenizerBase
from transformers.models.auto.tokenization_auto import get_tokenizer_config

from .adapters import Adapter, adapter_at
from .families import Family, check_vocabulary, end_token_ids_of, family_of, mask_token_id_of


@dataclass(frozen=True)
class ModelFacts:
    """
    Family, tokenizer and special tokens of a model.

    Attributes:
        config ([`~transformers.PreTrainedConfig`]):
            The model's configuration.
        family ([`~models.families.Family`]):
            The family it belongs to.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`]):
            Its tokenizer.
        mask_token_id (`int`):
            Token that stands for "not yet decoded".
        end_token_ids (`tuple[int, ...]`):
            Tokens that end a completion.
        adapter ([`~models.adapters.Adapter`], *optional*):
            Set where the path holds an adapter: the other facts are then those of its base model.
    """

    config: PreTrainedConfig
    family: Family
    tokenizer: PreTrainedTokenizerBase
    mask_token_id: int
    end_token_ids: tuple[int, ...]
    adapter: Adapter | None = None


def model_facts(
    model: Any, tokenizer: PreTrainedTokenizerBase | None = None, *, revision: str | None = None
) -> ModelFacts:
    """
    Find out what a model is, and raise where model and tokenizer do not fit together.

    Args:
        model (`str` or [`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            A path or hub id of a model or of an adapter, of which only the configuration is read, or a model.
        tokenizer ([`~transformers.PreTrainedTokenizerBase`], *optional*):
            Its tokenizer; loaded from where the model came from when absent.
        revision (`str`, *optional*):
            Revision on the hub, of the adapter where it is one.

    Returns:
        [`ModelFacts`]
    """
    adapter = None
    if isinstance(model, str):
        adapter = adapter_at(model, revision=revision)
        base, base_revision = (model, revision) if adapter is None else (adapter.base, adapter.base_revision)
        # trust_remote_code: the registered classes win over the checkpoint's own code, which is never imported
        config = AutoConfig.from_pretrained(base, revision=base_revision)
        generation_config, num_rows = _generation_config(base, base_revision), config.vocab_size
    else:
        config, generation_config = model.config, model.generation_config
        num_rows = model.get_input_embeddings().num_embeddings
    family = family_of(config)
    if tokenizer is None:
        source = model if isinstance(model, str) else str(config.name_or_path)
        tokenizer = load_tokenizer(source, adapter, revision=revision, padding_side="left", truncation_side="left")
        assert tokenizer is not None
    check_vocabulary(config, tokenizer, num_rows)
    return ModelFacts(
        config=config,
        family=family,
        tokenizer=tokenizer,
        mask_token_id=mask_token_id_of(config, tokenizer),
        end_token_ids=end_token_ids_of(config, tokenizer, generation_config=generation_config),
        adapter=adapter,
    )


def load_tokenizer(path: str, adapter: Adapter | None, *, revision: str | None, **options: Any) -> Any:
    """
    Load the tokenizer beside a model, or beside an adapter, which may have none and then uses its base model's.

    Args:
        path (`str`):
            Folder or name on the Hub.
        adapter ([`~models.adapters.Adapter`], *optional*):
            What `path` holds, if not a model.
        revision (`str`, *optional*):
            Revision of `path`.
        options:
            Passed on.

    Returns:
        [`~transformers.PreTrainedTokenizerBase`]
    """
    if adapter is not None and not get_tokenizer_config(path, revision=revision):
        path, revision = adapter.base, adapter.base_revision
    return AutoTokenizer.from_pretrained(path, revision=revision or "main", **options)


def _generation_config(path: str, revision: str | None) -> GenerationConfig | None:
    """The checkpoint's generation_config.json, which may name end tokens of its own; absent in many."""
    try:
        return GenerationConfig.from_pretrained(path, revision=revision or "main")
    except OSError:
        return None
