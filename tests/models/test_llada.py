# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import json
from typing import Any

import pytest
import torch
from transformers import AutoConfig, LlamaForCausalLM

from tests.model_tools import any_mask, assert_equal_tensors, load, weights_on_disk
from tests.naive_llada import naive_llada_logits
from tests.tiny import (
    PUBLISHED_CONFIG,
    TINY_SIZES,
    published_llada_folder,
    published_tensors,
    tiny_llada,
    tiny_tokenizer,
)
from trl_stabledrl.models import LLaDAConfig

IDS = torch.tensor([5, 9, 2, 2, 17, 60, 2, 33])
# logits of tokens 0, 2, 31, 63 at positions 0, 2, 7 of IDS, by tests/naive_llada.py on the closed-form weights
GOLDEN_TOKENS, GOLDEN_POSITIONS = [0, 2, 31, 63], [0, 2, 7]
GOLDEN_LOGITS = [
    [-0.17187, 0.856834, 0.4542, -0.053867],
    [0.706773, -2.239885, 1.280337, 1.095361],
    [0.798207, -2.124446, 1.337309, 0.954775],
]


def test_golden_logits_of_the_separate_definition(tmp_path):
    config = PUBLISHED_CONFIG | TINY_SIZES
    naive = naive_llada_logits(published_tensors(config), config, IDS)
    golden = torch.tensor(GOLDEN_LOGITS, dtype=torch.float64)
    torch.testing.assert_close(naive[GOLDEN_POSITIONS][:, GOLDEN_TOKENS], golden, rtol=0, atol=1e-6)

    logits = load(published_llada_folder(tmp_path))(IDS[None]).logits[0]

    # measured 2.8e-6, where logits reach 3.2
    torch.testing.assert_close(logits[GOLDEN_POSITIONS][:, GOLDEN_TOKENS].double(), golden, rtol=0, atol=6e-6)


@pytest.mark.parametrize(("implementation", "tolerance"), [("sdpa", 4e-6), ("eager", 4e-6)])
@pytest.mark.parametrize("changes", [{}, {"n_kv_heads": 2}, {"weight_tying": True}, {"rope_theta": 100.0}])
def test_logits_equal_the_separate_definition(tmp_path, changes, implementation, tolerance):
    config = PUBLISHED_CONFIG | TINY_SIZES | changes
    naive = naive_llada_logits(published_tensors(config), config, IDS)

    model = load(published_llada_folder(tmp_path, **changes), dtype=torch.float64, attn_implementation=implementation)

    # measured 1.8e-6 and 1.9e-6: RoPE, RMSNorm and eager's softmax are float32 inside stock Llama
    torch.testing.assert_close(model(IDS[None]).logits[0], naive, rtol=0, atol=tolerance)


def test_a_model_built_in_memory_saves_under_published_names(tmp_path):
    model = tiny_llada(num_key_value_heads=2)
    model.save_pretrained(tmp_path)

    config = json.loads((tmp_path / "config.json").read_text())
    assert {name: config[name] for name in TINY_SIZES if name != "max_sequence_length"} == (
        {name: value for name, value in TINY_SIZES.items() if name != "max_sequence_length"} | {"n_kv_heads": 2}
    )
    assert config.keys() - PUBLISHED_CONFIG.keys() == {"dtype"}
    assert PUBLISHED_CONFIG.keys() - config.keys() == {"auto_map"}  # no remote code lies beside it
    assert weights_on_disk(tmp_path).keys() == published_tensors(PUBLISHED_CONFIG | TINY_SIZES).keys()
    assert_equal_tensors(load(tmp_path).state_dict(), model.state_dict())


def test_both_spellings_build_the_same_config():
    shared = {"vocab_size": 64, "rope_theta": 7.0}
    llama_names: dict[str, Any] = {
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 128,
        "initializer_range": 0.1,
        "tie_word_embeddings": True,
    }
    published_names: dict[str, Any] = {
        "embedding_size": 64,
        "d_model": 32,
        "mlp_hidden_size": 48,
        "n_layers": 2,
        "n_heads": 4,
        "n_kv_heads": 2,
        "max_sequence_length": 128,
        "init_std": 0.1,
        "weight_tying": True,
    }
    llama, published = LLaDAConfig(**shared, **llama_names), LLaDAConfig(**shared, **published_names)
    assert llama.to_dict() == published.to_dict()
    assert llama.head_dim == 8
    assert llama.d_model == llama.hidden_size == 32
    assert published.to_dict()["hidden_size"] == 32


@pytest.mark.parametrize("name", ["published", "llama"])
def test_saved_config_reloads_equal(tmp_path, name):
    config = LLaDAConfig(**(PUBLISHED_CONFIG if name == "published" else {"vocab_size": 9, "rope_theta": 3.0}))
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is LLaDAConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    llama, reloaded = config.to_dict(), again.to_dict()
    differing = {name for name in llama.keys() | reloaded.keys() if llama.get(name) != reloaded.get(name)}
    assert differing <= {"transformers_version", "_name_or_path"}  # where it was read from


def test_defaults_are_the_published_model():
    default = LLaDAConfig().to_dict()
    published = LLaDAConfig(**PUBLISHED_CONFIG).to_dict()
    token_ids = {"eos_token_id", "pad_token_id", "mask_token_id"}  # these belong to a vocabulary, not to the class
    assert {name for name in published if published[name] != default.get(name)} == {
        *token_ids,
        "architectures",
        "auto_map",
    }
    assert default["rope_parameters"]["rope_theta"] == 500_000.0


def test_feed_forward_width_follows_the_ratio_where_it_is_null():
    config = LLaDAConfig(**PUBLISHED_CONFIG | TINY_SIZES | {"mlp_hidden_size": None, "mlp_ratio": 3})
    assert config.intermediate_size == 96


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("activation_type", "gelu"),
        ("alibi", True),
        ("attention_layer_norm", True),
        ("bias_for_layer_norm", True),
        ("block_group_size", 2),
        ("block_type", "sequential"),
        ("clip_qkv", 8.0),
        ("embedding_dropout", 0.1),
        ("include_bias", True),
        ("include_qkv_bias", True),
        ("input_emb_norm", True),
        ("is_causal", True),
        ("layer_norm_type", "default"),
        ("layer_norm_with_affine", False),
        ("multi_query_attention", True),
        ("residual_dropout", 0.1),
        ("rope", False),
        ("scale_logits", True),
        ("attention_bias", True),
        ("mlp_bias", True),
    ],
)
def test_settings_that_llama_cannot_express_raise(field, value):
    name = {"activation_type": "hidden_act"}.get(field, field)
    with pytest.raises(ValueError, match=rf"{name} is {value!r}, but .* can only be"):
        LLaDAConfig(**PUBLISHED_CONFIG | {field: value})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"embedding_size": 126000}, "embedding_size is 126000 and vocab_size is 126464"),
        ({"hidden_size": 64}, "d_model is 4096 and hidden_size is 64"),
        ({"n_heads": 33}, r"hidden_size \(d_model\) is 4096, num_attention_heads \(n_heads\) 33"),
        ({"n_kv_heads": 5}, r"n_heads\) is 32 and num_key_value_heads \(n_kv_heads\) 5"),
        ({"rope_parameters": {"rope_type": "linear", "factor": 2.0}}, "rope_type 'linear'"),
    ],
)
def test_contradictory_sizes_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        LLaDAConfig(**PUBLISHED_CONFIG | changes)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_every_position_sees_every_other(implementation):
    model = tiny_llada(attn_implementation=implementation)
    assert isinstance(model, LlamaForCausalLM)
    changed = IDS.clone()
    changed[-1] = 7
    difference = (model(IDS[None]).logits - model(changed[None]).logits).abs().amax(dim=-1)
    assert (difference > 1e-3).all()


def test_an_attention_that_takes_no_dense_mask_is_refused():
    model = tiny_llada()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take a dense 4-D attention_mask"):
        model(IDS[None], attention_mask=any_mask(len(IDS)))


def test_chat_template_ends_turns():
    tokenizer = tiny_tokenizer(chat_template=True)
    messages = [{"role": "user", "content": "1 + 1"}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "user:1 + 1<|eot_id|>assistant:"
