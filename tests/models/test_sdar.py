# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import copy
import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import AutoConfig, AutoModel, DynamicCache, Qwen3ForCausalLM, StaticCache

from tests.model_tools import SDAR, any_mask, assert_equal_tensors, load, project, weights_on_disk, with_adapter
from tests.naive_sdar import naive_sdar_logits
from tests.tiny import (
    PUBLISHED_SDAR_CONFIG,
    TINY_SDAR_SIZES,
    published_sdar_folder,
    published_sdar_tensors,
    tiny_sdar,
    tiny_tokenizer,
)
from trl_stabledrl.core.attention import Layout, clean_layout
from trl_stabledrl.models import FrozenCache, SDARConfig, SDARForCausalLM, check_vocabulary, mask_token_id_of

IDS = torch.tensor([5, 9, 2, 2, 17, 60, 2, 33, 8, 2])
# logits of tokens 0, 2, 31, 63 at positions 0, 3, 4, 9 of IDS with blocks of 4, by tests/naive_sdar.py on the
# closed-form weights
GOLDEN_TOKENS, GOLDEN_POSITIONS = [0, 2, 31, 63], [0, 3, 4, 9]
GOLDEN_LOGITS = [
    [-1.517177, -0.197977, -0.796228, -0.050059],
    [-2.277361, 0.783679, 0.006343, -1.090098],
    [-0.726328, 1.738156, 1.480237, -2.22639],
    [-0.583117, -0.016592, -1.250778, 0.316318],
]


def some_ids(num_rows: int, length: int) -> Tensor:
    return torch.randint(5, 64, (num_rows, length), generator=torch.Generator().manual_seed(3))


def saved_config(path: Path) -> dict[str, Any]:
    return json.loads((path / "config.json").read_text())


def test_golden_logits_of_the_separate_definition(tmp_path):
    naive = naive_sdar_logits(published_sdar_tensors(SDAR.config), SDAR.config, IDS)
    golden = torch.tensor(GOLDEN_LOGITS, dtype=torch.float64)
    torch.testing.assert_close(naive[GOLDEN_POSITIONS][:, GOLDEN_TOKENS], golden, rtol=0, atol=1e-6)

    logits = load(published_sdar_folder(tmp_path))(IDS[None]).logits[0]

    # measured 9.6e-7, where logits reach 3.5
    torch.testing.assert_close(logits[GOLDEN_POSITIONS][:, GOLDEN_TOKENS].double(), golden, rtol=0, atol=2e-6)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"num_key_value_heads": 4},
        {"head_dim": 4},  # heads narrower than the width
        {"tie_word_embeddings": True},
        {"rope_theta": 100.0},
        {"block_size": 1},
        {"block_size": 3},
        {"block_size": 64},
    ],
)
def test_logits_equal_the_separate_definition(tmp_path, changes, implementation):
    config = SDAR.config | changes
    naive = naive_sdar_logits(published_sdar_tensors(config), config, IDS)

    model = load(published_sdar_folder(tmp_path, **changes), dtype=torch.float64, attn_implementation=implementation)

    # measured 9.1e-7 and 1.3e-6: RoPE, RMSNorm and eager's softmax are float32 inside stock Qwen3
    torch.testing.assert_close(model(IDS[None]).logits[0], naive, rtol=0, atol=3e-6)


@pytest.mark.parametrize("block_size", [1, 3, 4, 8])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_token_moves_its_own_block_and_later_ones_alone(implementation, block_size):
    model = tiny_sdar(block_size=block_size, attn_implementation=implementation)
    ids = some_ids(1, 12)
    before = model(ids).logits[0]
    for position in range(12):
        changed = ids.clone()
        changed[0, position] = 4
        difference = (model(changed).logits[0] - before).abs().amax(dim=-1)
        start = position // block_size * block_size
        assert not difference[:start].any(), position
        assert (difference[start:] > 1e-4).all(), position


@pytest.mark.parametrize("num_padding", [1, 2, 3, 4, 5])
def test_left_padding_moves_no_block_border(num_padding):
    model = tiny_sdar()
    ids = some_ids(2, 9)
    padded = torch.cat([torch.zeros(2, num_padding, dtype=torch.long), ids], dim=1)
    is_real = (padded != 0).long()
    logits = model(padded, attention_mask=is_real).logits[:, num_padding:]
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-6)  # measured 0.0


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_training", [False, True])
def test_cached_blocks_equal_the_whole_text(implementation, is_training):
    model = tiny_sdar(attn_implementation=implementation, dtype=torch.float64).train(is_training)
    if is_training:
        model.gradient_checkpointing_enable()  # under which the host would drop the cache
    ids = some_ids(2, 14)
    is_real = torch.ones(2, 14, dtype=torch.long)
    is_real[0, :3] = 0  # row 0 has 11 tokens: its blocks end at columns 7, 11 and 14
    whole = model(ids, attention_mask=is_real).logits

    with torch.no_grad():
        for row, borders in enumerate([(0, 7, 11, 14), (0, 4, 12, 14)]):
            cache = DynamicCache()
            for start, end in zip(borders, borders[1:], strict=False):
                inputs: dict[str, Any] = {
                    "input_ids": ids[row : row + 1, start:end],
                    "attention_mask": is_real[row : row + 1, :end],
                    "past_key_values": cache,
                }
                everything = torch.ones(1, end - start, dtype=torch.bool)
                logits = model(**inputs, is_selected=everything, head_fn=project)
                is_text = is_real[row, start:end].bool()
                expected = whole[row, start:end]
                # measured 4.4e-16
                torch.testing.assert_close(logits[is_text], expected[is_text], rtol=0, atol=1e-14)
                assert cache.get_seq_length() == end


def test_the_plain_forward_takes_a_cache_too_and_makes_none_unasked():
    model = tiny_sdar()
    ids = some_ids(2, 8)
    cache = DynamicCache()
    first = model(ids[:, :4], past_key_values=cache)
    second = model(ids[:, 4:], past_key_values=cache, use_cache=True)

    torch.testing.assert_close(second.logits, model(ids).logits[:, 4:], rtol=0, atol=1e-6)
    assert first.past_key_values is None
    assert second.past_key_values is cache
    assert model(ids).past_key_values is None
    assert model(ids, use_cache=True).past_key_values.get_seq_length() == 8


def test_a_layout_says_who_sees_whom():
    # blocks of 4: clean 0..5, then a noised copy of tokens 4 and 5, which sees the clean tokens 0 to 3 and itself
    model = tiny_sdar(dtype=torch.float64)
    ids = some_ids(1, 6)
    noised = torch.tensor([[2, 2]])
    layout = Layout(torch.tensor([[0] * 6 + [1] * 2]), torch.tensor([[0, 1, 2, 3, 4, 5, 4, 5]]))

    together = model(torch.cat([ids, noised], dim=1), layout=layout).logits[0]

    torch.testing.assert_close(together[:6], model(ids).logits[0], rtol=0, atol=1e-14)
    apart = model(torch.cat([ids[:, :4], noised], dim=1)).logits[0, 4:]
    torch.testing.assert_close(together[6:], apart, rtol=0, atol=1e-14)


def test_clean_tokens_can_be_read_in_order():
    model = tiny_sdar(dtype=torch.float64)
    token_causal = model(IDS[None], context_attention="causal").logits
    one_token_blocks = tiny_sdar(dtype=torch.float64, block_size=1)(IDS[None]).logits
    torch.testing.assert_close(token_causal, one_token_blocks, rtol=0, atol=1e-14)


def logits_and_gradients(model: Any, ids: Tensor, cache: Any) -> tuple[Tensor, list[Tensor]]:
    model.zero_grad()
    everything = torch.ones(len(ids), ids.shape[1], dtype=torch.bool)
    logits = model(input_ids=ids, past_key_values=cache, is_selected=everything, head_fn=project)
    logits.square().mean().backward()
    return logits, [parameter.grad for parameter in model.parameters()]


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_gradients_through_a_frozen_cache_survive_checkpointing(use_reentrant):
    model = tiny_sdar(dtype=torch.float64).train()
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed.enable_input_require_grads()
    ids = some_ids(2, 11)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :8], past_key_values=cache)
    frozen = FrozenCache(cache)

    logits, gradients = logits_and_gradients(model, ids[:, 8:], frozen)
    for _ in range(2):  # the cache is as it was: a second pass reads the same
        again, checkpointed_gradients = logits_and_gradients(checkpointed, ids[:, 8:], frozen)
        assert torch.equal(again, logits)
        for ours, plain in zip(checkpointed_gradients, gradients, strict=True):
            torch.testing.assert_close(ours, plain, rtol=0, atol=0)

    assert frozen.get_seq_length() == cache.get_seq_length() == 8
    torch.testing.assert_close(logits.view(2, 3, -1), model(ids).logits[:, 8:], rtol=0, atol=1e-14)
    # the flag that lets the cache through is down again, so that the host's own guard holds
    assert not any(layer._can_checkpoint_with_cache for layer in checkpointed.model.layers)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
@pytest.mark.parametrize("is_checkpointed", [False, True])
def test_a_detached_start_equals_a_frozen_cache_of_it(implementation, is_checkpointed):
    model = tiny_sdar(dtype=torch.float64, attn_implementation=implementation).train()
    ids = some_ids(2, 11)
    layout = clean_layout(ids > 0)
    with torch.no_grad():
        cache = DynamicCache()
        model(ids[:, :8], past_key_values=cache)
    logits, gradients = logits_and_gradients(model, ids[:, 8:], FrozenCache(cache))
    model.zero_grad()
    if is_checkpointed:
        model.gradient_checkpointing_enable()

    is_last = torch.arange(11).expand(2, -1) >= 8
    detached = model(input_ids=ids, layout=layout, num_detached=8, is_selected=is_last, head_fn=project)
    detached.square().mean().backward()

    assert torch.equal(detached, logits)
    for parameter, expected in zip(model.parameters(), gradients, strict=True):
        torch.testing.assert_close(parameter.grad, expected, rtol=0, atol=0)
    attached = model(input_ids=ids, layout=layout, is_selected=is_last, head_fn=project)
    torch.testing.assert_close(attached, logits, rtol=0, atol=1e-6)  # eager's softmax is float32
    assert torch.equal(model(ids, layout=layout, num_detached=8).logits.flatten(0, 1), logits)
    with pytest.raises(ValueError, match="num_detached=8 needs input_ids and their layout, and no other cache"):
        model(ids, num_detached=8)


def test_no_gradient_reaches_what_was_frozen():
    model = tiny_sdar(dtype=torch.float64)
    ids = some_ids(1, 6)
    cache = DynamicCache()
    model(ids[:, :4], past_key_values=cache)  # with a graph
    layer: Any = cache.layers[0]
    assert layer.keys.requires_grad
    _, gradients = logits_and_gradients(model, ids[:, 4:], FrozenCache(cache))
    with torch.no_grad():
        detached = DynamicCache()
        model(ids[:, :4], past_key_values=detached)
    _, expected = logits_and_gradients(model, ids[:, 4:], detached)
    for ours, theirs in zip(gradients, expected, strict=True):
        assert torch.equal(ours, theirs)


def test_a_frozen_cache_of_one_row_does_not_follow_later_changes():
    model = tiny_sdar()
    ids = some_ids(1, 8)
    cache = DynamicCache()
    with torch.no_grad():
        model(ids[:, :4], past_key_values=cache)
        frozen = FrozenCache(cache)
        before = model(ids[:, 4:], past_key_values=frozen).logits
        model(ids[:, 4:], past_key_values=cache)
        assert cache.get_seq_length() == 8
        assert torch.equal(model(ids[:, 4:], past_key_values=FrozenCache(frozen)).logits, before)


def test_a_growing_cache_is_refused_where_it_would_be_dropped():
    model = tiny_sdar().train()
    model.gradient_checkpointing_enable()
    with pytest.raises(ValueError, match=r"DynamicCache, to which the replay .* Pass FrozenCache\(cache\)"):
        model(IDS[None], past_key_values=DynamicCache())
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def test_caches_that_hold_other_positions_cannot_be_frozen():
    model = tiny_sdar()
    with pytest.raises(ValueError, match="StaticLayer, which holds other positions"):
        FrozenCache(StaticCache(config=model.config, max_cache_len=8))
    with pytest.raises(ValueError, match="cache is empty"):
        FrozenCache(DynamicCache(config=model.config))


@pytest.mark.parametrize("num_padding", [0, 3])
@pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile")
@pytest.mark.filterwarnings("ignore:`torch.jit.script:DeprecationWarning")  # torch's own, when it imports its compiler
def test_flex_attention_equals_sdpa(num_padding):
    # uncompiled: the compiled CPU kernel is right too (6e-7) but takes 30 s to build, and torch 2.13 cannot build a
    # second one for another length
    ids = some_ids(2, 150)  # more than one tile of 128
    is_real = torch.ones(2, 150, dtype=torch.long)
    is_real[0, :num_padding] = 0
    sdpa, flex = (tiny_sdar(attn_implementation=name) for name in ("sdpa", "flex_attention"))
    with torch.no_grad(), torch.compiler.set_stance("force_eager"):
        whole, ours = (model(ids, attention_mask=is_real).logits for model in (sdpa, flex))
        caches = DynamicCache(), DynamicCache()
        split = 132 + num_padding
        for model, cache in zip((sdpa, flex), caches, strict=True):
            model(ids[:1, :split], attention_mask=is_real[:1, :split], past_key_values=cache)
        cached = [
            model(ids[:1, split:], attention_mask=is_real[:1], past_key_values=cache).logits
            for model, cache in zip((sdpa, flex), caches, strict=True)
        ]
        dense = [model(ids[:, :20], attention_mask=any_mask(20)).logits for model in (sdpa, flex)]
    is_text = is_real.bool()
    torch.testing.assert_close(ours[is_text], whole[is_text], rtol=0, atol=4e-6)  # measured 1.2e-6
    torch.testing.assert_close(cached[1], cached[0], rtol=0, atol=4e-6)
    torch.testing.assert_close(dense[1], dense[0], rtol=0, atol=4e-6)


def test_flex_attention_takes_one_mask_for_all_heads():
    model = tiny_sdar(attn_implementation="flex_attention")
    per_head = any_mask(10).expand(1, 4, -1, -1)
    with pytest.raises(ValueError, match="4 heads, but flex_attention has one mask for all"):
        model(IDS[None], attention_mask=per_head)


@pytest.mark.parametrize("implementation", ["flash_attention_2", "flash_attention_3", "paged|eager", "of_my_own"])
def test_attention_that_cannot_see_blocks_is_refused(tmp_path, implementation):
    message = "cannot attend by blocks. Use 'sdpa' on any device, 'flex_attention' on a GPU, or 'eager'"
    with pytest.raises(ValueError, match=message):
        tiny_sdar(attn_implementation=implementation)
    with pytest.raises(ValueError, match=message):
        load(published_sdar_folder(tmp_path), attn_implementation=implementation)
    model = tiny_sdar()
    model.config._attn_implementation = implementation
    with pytest.raises(ValueError, match=message):
        model(IDS[None])


@pytest.mark.parametrize("block_size", [0, -4, 2.5, True, "4"])
def test_a_block_size_that_is_none_is_refused(tmp_path, block_size):
    message = rf"block_size is {block_size!r}\. It must be a whole number of at least 1"
    with pytest.raises(ValueError, match=message):
        SDARConfig(block_size=block_size)
    path = published_sdar_folder(tmp_path, block_size=block_size)
    with pytest.raises(ValueError, match=message):
        AutoConfig.from_pretrained(path)
    config = SDARConfig()
    config.block_size = block_size
    with pytest.raises(ValueError, match=message):
        SDARForCausalLM(config)


@pytest.mark.parametrize("block_size", [1, 2, 3, 4, 8, 16, 32, 64])
def test_block_sizes(block_size, tmp_path):
    path = published_sdar_folder(tmp_path, block_size=block_size)
    assert load(path)(IDS[None]).logits.isfinite().all()
    assert AutoConfig.from_pretrained(path).block_size == block_size


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"use_sliding_window": True, "sliding_window": 8, "max_window_layers": 1},
            "layer_types has 'sliding_attention'",
        ),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "layer_types has 'sliding_attention'"),
        ({"is_causal": True}, "is_causal is True"),
        ({"num_key_value_heads": 3}, "num_attention_heads is 4 and num_key_value_heads 3"),
    ],
)
def test_settings_that_block_diffusion_cannot_have_raise(changes, message):
    with pytest.raises(ValueError, match=message):
        SDARConfig(**PUBLISHED_SDAR_CONFIG | TINY_SDAR_SIZES | changes)


def test_masks_that_do_not_fit_are_refused():
    model = tiny_sdar()
    cache = DynamicCache()
    model(IDS[None], past_key_values=cache)
    with pytest.raises(
        ValueError, match="attention_mask has 1 positions, but the cache and the input have 11 together"
    ):
        model(IDS[None, :1], attention_mask=torch.ones(1, 1), past_key_values=cache)
    layout = clean_layout(torch.ones(1, 10, dtype=torch.bool))
    with pytest.raises(ValueError, match="layout and attention_mask were both given"):
        model(IDS[None], attention_mask=torch.ones(1, 10), layout=layout)
    with pytest.raises(ValueError, match="Neither input_ids nor inputs_embeds"):
        model(attention_mask=torch.ones(1, 10))


def test_fields_that_a_published_config_may_lack(tmp_path):
    path = published_sdar_folder(tmp_path, absent=("mask_token_id",))  # block_size is never there
    config = AutoConfig.from_pretrained(path)
    assert (config.block_size, config.mask_token_id) == (4, 151669)
    assert config.rope_parameters["rope_theta"] == 1_000_000
    with pytest.raises(ValueError, match="mask_token_id is 151669, but the model has 64 tokens"):
        mask_token_id_of(config, tiny_tokenizer())
    published = SDARConfig(**PUBLISHED_SDAR_CONFIG)
    assert mask_token_id_of(published) == 151669


@pytest.mark.parametrize(
    ("name", "fields", "expected"),
    [
        ("SDAR-8B-Chat-b32", {}, 32),
        ("models--JetLM--SDAR-8B-Chat-b32/snapshots/0a1b", {}, 32),  # what `snapshot_download` returns
        ("JetLM--SDAR-8B-Chat-b64", {}, 64),
        ("SDAR-4B-Chat-b16", {"block_size": 8}, 8),
        ("SDAR-8B-Chat", {}, 4),
        ("my-run-b32", {}, 4),
    ],
)
def test_a_published_name_gives_the_block_size_that_its_config_lacks(tmp_path, name, fields, expected):
    path = published_sdar_folder(tmp_path / name, **fields)
    assert AutoConfig.from_pretrained(path).block_size == expected
    assert SDARConfig.from_pretrained(path).block_size == expected
    assert load(path).config.block_size == SDARForCausalLM.from_pretrained(path).config.block_size == expected
    assert AutoConfig.from_pretrained(path, block_size=2).block_size == 2


def test_a_context_attention_that_nobody_would_read_is_refused():
    model = tiny_sdar()
    with pytest.raises(ValueError, match="context_attention='full' is not known. Use one of block_causal, causal"):
        model(IDS[None], context_attention="full")
    may_attend = torch.ones(1, 1, len(IDS), len(IDS), dtype=torch.bool)
    with pytest.raises(ValueError, match="context_attention='causal' was given with a mask of queries and keys"):
        model(IDS[None], may_attend, context_attention="causal")


def test_scaled_rotary_embeddings_keep_their_published_spelling(tmp_path):
    scaling = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 128}
    published = published_sdar_folder(tmp_path / "published", rope_scaling=scaling)
    model = load(published)
    model.save_pretrained(tmp_path / "saved")
    saved = saved_config(tmp_path / "saved")
    assert saved["rope_scaling"] == scaling
    assert saved["rope_theta"] == 1_000_000
    assert torch.equal(load(tmp_path / "saved")(IDS[None]).logits, model(IDS[None]).logits)
    assert not torch.equal(load(published_sdar_folder(tmp_path / "plain"))(IDS[None]).logits, model(IDS[None]).logits)


def test_a_model_built_in_memory_saves_under_published_names(tmp_path):
    model = tiny_sdar(dtype=torch.bfloat16)
    model.save_pretrained(tmp_path)

    config = saved_config(tmp_path)
    named = TINY_SDAR_SIZES.keys() - {"bos_token_id", "max_window_layers"}
    assert {name: config[name] for name in named} == {name: TINY_SDAR_SIZES[name] for name in named}
    assert config["rope_theta"] == 1_000_000
    assert config["torch_dtype"] == "bfloat16"
    assert config.keys() - PUBLISHED_SDAR_CONFIG.keys() == {"block_size", "mask_token_id", "pad_token_id"}
    # those that mean nothing to the model, and no remote code lies beside it
    assert PUBLISHED_SDAR_CONFIG.keys() - config.keys() == {
        "auto_map",
        "bos_token_id",
        "debug",
        "ep_size",
        "fuse_cross_entropy",
        "micro_forward",
        "skip_checkpoint",
        "use_deepep",
    }
    assert weights_on_disk(tmp_path).keys() == published_sdar_tensors(SDAR.config).keys()
    again = load(tmp_path, dtype="auto")
    assert again.dtype == torch.bfloat16
    assert_equal_tensors(again.state_dict(), model.state_dict())
    assert type(again) is SDARForCausalLM
    assert isinstance(again, Qwen3ForCausalLM)


@pytest.mark.parametrize("is_tied", [False, True])
def test_heads_are_tied_or_not(tmp_path, is_tied):
    published = published_sdar_folder(tmp_path / "published", tie_word_embeddings=is_tied)
    model = load(published)
    assert (model.lm_head.weight is model.model.embed_tokens.weight) == is_tied
    model.save_pretrained(tmp_path / "saved")
    assert ("lm_head.weight" in weights_on_disk(tmp_path / "saved")) == (not is_tied)
    again = load(tmp_path / "saved")
    assert (again.lm_head.weight is again.model.embed_tokens.weight) == is_tied


def test_defaults_are_the_published_model():
    default, published = SDARConfig().to_dict(), SDARConfig(**PUBLISHED_SDAR_CONFIG).to_dict()
    sizes = {"num_hidden_layers", "num_key_value_heads", "intermediate_size", "max_window_layers", "layer_types"}
    of_a_checkpoint = {"architectures", "auto_map", "bos_token_id", "eos_token_id", "dtype"}
    ignored = {"debug", "ep_size", "fuse_cross_entropy", "micro_forward", "skip_checkpoint", "use_deepep"}
    differing = {name for name in published if published[name] != default.get(name)}
    assert differing == sizes | of_a_checkpoint | ignored  # sizes: Qwen3Config's, which belong to no checkpoint


def test_saved_config_reloads_equal(tmp_path):
    fields: dict[str, Any] = PUBLISHED_SDAR_CONFIG | {"block_size": 16}
    config = SDARConfig(**fields)
    config.save_pretrained(tmp_path)
    again = AutoConfig.from_pretrained(tmp_path)
    assert type(again) is SDARConfig
    assert again.to_diff_dict() == config.to_diff_dict()
    before, after = config.to_dict(), again.to_dict()
    differing = {name for name in before.keys() | after.keys() if before.get(name) != after.get(name)}
    assert differing <= {"transformers_version", "_name_or_path"}  # where it was read from


def test_trado_checkpoints_are_sdar(tmp_path):
    # config.json of Gen-Verse/TraDo: the same architecture and names
    path = published_sdar_folder(tmp_path, block_size=4, eos_token_id=[1, 4], pad_token_id=1)
    config = saved_config(path)
    assert config["model_type"] == "sdar"
    model = load(path)
    assert type(model) is SDARForCausalLM
    model.save_pretrained(tmp_path / "saved")
    after = saved_config(tmp_path / "saved")
    assert (after["eos_token_id"], after["pad_token_id"]) == ([1, 4], 1)
    assert_equal_tensors(weights_on_disk(tmp_path / "saved"), weights_on_disk(path))


def test_vocabulary_of_model_and_tokenizer_must_agree():
    for vocab_size in (64, 52, 40):
        model: Any = tiny_sdar(vocab_size=vocab_size)
        num_rows = model.get_input_embeddings().num_embeddings
        if vocab_size >= 52:
            check_vocabulary(model.config, tiny_tokenizer(), num_rows)
    with pytest.raises(ValueError, match="52 tokens, but the embedding has 40 rows"):
        check_vocabulary(model.config, tiny_tokenizer(), num_rows)


def test_an_adapter_sees_blocks_and_caches():
    model = with_adapter(tiny_sdar(dtype=torch.float64))
    ids = some_ids(2, 11)
    whole = model(input_ids=ids).logits
    cache = DynamicCache()
    with torch.no_grad():
        model(input_ids=ids[:, :8], past_key_values=cache)
    last = torch.ones(2, 3, dtype=torch.bool)
    layout = clean_layout(torch.ones(2, 11, dtype=torch.bool))
    selected = model(
        input_ids=ids[:, 8:], layout=layout, past_key_values=FrozenCache(cache), is_selected=last, head_fn=project
    )
    torch.testing.assert_close(selected.view(2, 3, -1), whole[:, 8:], rtol=0, atol=1e-14)
    changed = ids.clone()
    changed[:, 9] = 4
    assert torch.equal(model(input_ids=changed).logits[:, :8], whole[:, :8])


FRESH_PROCESS = """
import importlib, sys
import torch
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
import trl_stabledrl

for auto_class in (AutoModel, AutoModelForCausalLM):
    model = auto_class.from_pretrained(sys.argv[1])
    assert type(model).__name__ == "SDARForCausalLM", type(model)
    assert type(model).__module__ == "trl_stabledrl.models.sdar", type(model)
assert "trl" not in sys.modules
assert not {"flash_attn", "einops"} & sys.modules.keys()
print(repr(model(torch.arange(5, 15)[None]).logits.double().sum().item()))

import trl_stabledrl.models
for module in (trl_stabledrl.models.sdar, trl_stabledrl.models.llada, trl_stabledrl.models):
    importlib.reload(module)
assert [family.name for family in trl_stabledrl.models.FAMILIES] == ["LLaDA", "SDAR"]
again = AutoModelForCausalLM.from_pretrained(sys.argv[1])
assert type(again) is trl_stabledrl.models.sdar.SDARForCausalLM
"""


def test_a_fresh_process_loads_and_reloads(tmp_path):
    path = published_sdar_folder(tmp_path)
    command = [sys.executable, "-W", "error", "-c", FRESH_PROCESS, str(path)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    expected = load(path)(torch.arange(5, 15)[None]).logits.double().sum().item()
    assert float(done.stdout) == pytest.approx(expected, abs=1e-4)
    assert type(AutoModel.from_pretrained(path)) is SDARForCausalLM
