# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    GenerationConfig,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen3Config,
)

from tests.model_tools import LORA_TARGETS
from tests.tiny import tiny_llada, tiny_tokenizer
from trl_stabledrl.models import (
    FAMILIES,
    BlockDiffusionMixin,
    Family,
    LLaDAConfig,
    SDARConfig,
    SelectedPositionsMixin,
    check_vocabulary,
    end_token_ids_of,
    family_of,
    mask_token_id_of,
    register_family,
)


def llada_config(**changes: Any) -> LLaDAConfig:
    sizes: dict[str, Any] = {
        "hidden_size": 8,
        "num_attention_heads": 1,
        "intermediate_size": 8,
        "num_hidden_layers": 1,
    }
    return LLaDAConfig(**sizes | changes)


def tokenizer_with(special: dict[int, bool], **attributes: Any) -> Any:
    """Stand-in for the published tokenizers, which are too large to build: added tokens by id, and whether special."""
    added = {i: SimpleNamespace(special=is_special) for i, is_special in special.items()}
    settings = {"mask_token_id": None, "eos_token_id": None, "all_special_ids": [], "added_tokens_decoder": added}
    return SimpleNamespace(**settings | attributes)


def test_llada_is_known_with_the_published_values():
    family = family_of(llada_config())
    assert dataclasses.asdict(family) == {
        "name": "LLaDA",
        "model_types": ("llada",),
        "attention": "full",
        "mask_token_id": 126336,
        "end_token_ids": (126081, 126348),
        "block_length": 32,
        "mask_law": "block_suffix",
        "mc_sampling": "complementary",
        "num_mc_samples": 2,
        "tokens_per_step": 2,
        "lora_target_modules": tuple(LORA_TARGETS),
        "rollout_backends": ("transformers",),
    }
    with pytest.raises(dataclasses.FrozenInstanceError):
        family.block_length = 4  # pyright: ignore[reportAttributeAccessIssue]


def test_sdar_is_known_with_the_published_values_and_the_blocks_of_the_model():
    assert dataclasses.asdict(family_of(SDARConfig())) == {
        "name": "SDAR",
        "model_types": ("sdar",),
        "attention": "block",
        "mask_token_id": 151669,
        "end_token_ids": (151643, 151645),
        "block_length": 4,
        "mask_law": "staircase",
        "mc_sampling": "cyclic",
        "num_mc_samples": 4,
        "tokens_per_step": 1,
        "lora_target_modules": tuple(LORA_TARGETS),
        "rollout_backends": ("transformers", "vllm"),
    }
    assert family_of(SDARConfig(block_size=32)).block_length == 32


def test_laws_follow_the_attention():
    llada, sdar = family_of(llada_config()), family_of(SDARConfig())
    assert set(llada.mask_laws) == {"uniform", "block_suffix", "semi_ar", "full"}
    assert sdar.mask_laws == ("staircase",)
    assert (llada.sft_mask_law, sdar.sft_mask_law) == ("uniform", "staircase")
    with pytest.raises(ValueError, match="mask_law='staircase' does not apply to LLaDA, whose attention is 'full'"):
        dataclasses.replace(llada, mask_law="staircase")
    with pytest.raises(ValueError, match="mask_law='uniform' does not apply to SDAR"):
        dataclasses.replace(sdar, mask_law="uniform")
    with pytest.raises(
        ValueError, match="attention='sliding' of family LLaDA is not known. Use one of 'full', 'block'"
    ):
        dataclasses.replace(llada, attention="sliding")


def toy_family(**changes: Any) -> Family:
    return dataclasses.replace(family_of(llada_config()), **{"name": "Toy", "model_types": ("toy",)} | changes)


class ToyConfig(LlamaConfig):
    model_type = "toy"
    is_causal: bool = False


class ToyModel(SelectedPositionsMixin, LlamaForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    config_class = ToyConfig


class TakenConfig(LlamaConfig):
    model_type = "sdar"


class ForgetfulConfig(LlamaConfig):
    pass


class ToyBlockModel(BlockDiffusionMixin, LlamaForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    config_class = ToyConfig


def test_a_registered_family_is_found_and_replaced_by_its_name(restored_families):
    num_known = len(FAMILIES)
    for block_length in (16, 8):  # as a reload would
        register_family(toy_family(block_length=block_length), ToyConfig, ToyModel)
    assert len(FAMILIES) == num_known + 1
    assert family_of(ToyConfig()).block_length == 8
    tiny = ToyConfig(vocab_size=9, hidden_size=8, intermediate_size=8, num_hidden_layers=1, num_attention_heads=1)
    assert type(AutoModelForCausalLM.from_config(tiny)) is ToyModel
    tiny.is_causal = True
    with pytest.raises(ValueError, match="ToyConfig does not have is_causal=False, without which ToyModel would read"):
        AutoModelForCausalLM.from_config(tiny)


@pytest.mark.parametrize(
    ("family", "config_class", "model_class", "message"),
    [
        ({}, ForgetfulConfig, ToyModel, r"ForgetfulConfig has model_type 'llama', but family Toy has .*\('toy',\)"),
        ({"model_types": ("sdar",)}, TakenConfig, ToyModel, "'sdar' of family Toy already belongs to family SDAR"),
        ({"model_types": ("toy", "llada")}, ToyConfig, ToyModel, "'llada' of family Toy already belongs to .* LLaDA"),
        ({"model_types": ("llama",)}, ForgetfulConfig, ToyModel, "'llama' of family Toy is transformers' own"),
        ({}, ToyConfig, ToyBlockModel, "attention='full', but ToyBlockModel .* Derive the model from SelectedPosit"),
        (
            {"attention": "block", "mask_law": "staircase"},
            ToyConfig,
            ToyModel,
            "attention='block', but ToyModel attends otherwise. Derive the model from BlockDiffusionMixin",
        ),
    ],
)
def test_a_family_that_contradicts_itself_or_another_is_refused(
    restored_families, family, config_class, model_class, message
):
    before = list(FAMILIES)
    with pytest.raises(ValueError, match=message):
        register_family(toy_family(**family), config_class, model_class)
    assert before == FAMILIES
    assert AutoConfig.for_model("llama").__class__ is LlamaConfig


def test_no_model_type_belongs_to_two_families():
    model_types = [model_type for family in FAMILIES for model_type in family.model_types]
    assert len(model_types) == len(set(model_types))


def test_an_unknown_family_is_an_error_naming_the_known_ones():
    with pytest.raises(ValueError, match="model_type is 'llama', .* Known are: .*'llada'"):
        family_of(LlamaConfig())


def test_mask_token_comes_from_the_config_first():
    assert mask_token_id_of(llada_config(mask_token_id=7), tiny_tokenizer()) == 7
    assert mask_token_id_of(llada_config(), tiny_tokenizer()) == 2
    assert mask_token_id_of(llada_config(mask_token_id=0), tiny_tokenizer()) == 0


def test_published_mask_token_counts_only_where_it_is_one():
    assert mask_token_id_of(llada_config()) == 126336
    assert mask_token_id_of(llada_config(), tokenizer_with({126336: True})) == 126336
    for config, tokenizer in [
        (llada_config(vocab_size=64), None),
        (llada_config(), tokenizer_with({126336: False})),
        (llada_config(), tokenizer_with({})),
    ]:
        with pytest.raises(ValueError, match="this proxy does not apply"):
            mask_token_id_of(config, tokenizer)


def test_a_model_without_a_mask_token_is_told_why():
    tokenizer = tiny_tokenizer()
    tokenizer.mask_token = None
    with pytest.raises(ValueError, match="'qwen3'.* proxy does not apply.*such as DiffusionGemma, are not covered"):
        mask_token_id_of(Qwen3Config(), tokenizer)


def test_mask_token_outside_the_vocabulary_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="mask_token_id is 126336, but the model has 64 tokens"):
        mask_token_id_of(llada_config(vocab_size=64, mask_token_id=126336))


def test_end_tokens_are_the_union_of_all_sources():
    tokenizer = tiny_tokenizer()
    config = llada_config(vocab_size=64, eos_token_id=[1, 4])
    assert end_token_ids_of(config, tokenizer) == (1, 4)
    generation_config = GenerationConfig(eos_token_id=9)
    assert end_token_ids_of(config, tokenizer, generation_config=generation_config) == (1, 4, 9)
    assert end_token_ids_of(llada_config(vocab_size=64, eos_token_id=0), tokenizer) == (0, 1)
    model = tiny_llada()
    assert end_token_ids_of(model.config, tokenizer, generation_config=model.generation_config) == (1,)


def test_published_end_tokens_count_only_where_they_are_special():
    published = tokenizer_with({126081: True, 126348: True}, eos_token_id=126081)
    assert end_token_ids_of(llada_config(), published) == (126081, 126348)
    # the same ids in another vocabulary are ordinary words
    assert end_token_ids_of(llada_config(), tokenizer_with({126348: False}, eos_token_id=5)) == (5,)
    assert end_token_ids_of(llada_config(vocab_size=126100), published) == (126081,)
    assert end_token_ids_of(llada_config(vocab_size=64), tiny_tokenizer()) == (1,)


def test_no_end_token_is_an_error():
    tokenizer = tiny_tokenizer()
    tokenizer.eos_token = None
    with pytest.raises(ValueError, match="name an end token"):
        end_token_ids_of(llada_config(vocab_size=64), tokenizer)


def test_end_token_outside_the_vocabulary_is_an_error_with_both_numbers():
    with pytest.raises(ValueError, match="eos_token_id of the config is 64, but the model has 64 tokens"):
        end_token_ids_of(llada_config(vocab_size=64, eos_token_id=64), tiny_tokenizer())


def test_vocabulary_sizes_must_agree():
    tokenizer = tiny_tokenizer(characters="0123456789")  # 15 ids
    check_vocabulary(llada_config(vocab_size=15), tokenizer, 15)
    check_vocabulary(llada_config(vocab_size=20), tokenizer, 20)  # padded, as published
    check_vocabulary(llada_config(vocab_size=3), None, 3)
    with pytest.raises(ValueError, match="15 tokens, but the embedding has 14 rows"):
        check_vocabulary(llada_config(vocab_size=14), tokenizer, 14)
    with pytest.raises(ValueError, match="config is 15, but the embedding has 16 rows"):
        check_vocabulary(llada_config(vocab_size=15), tokenizer, 16)
