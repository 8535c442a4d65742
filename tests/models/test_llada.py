# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
import copy
import importlib
import json
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, multiprocessing, nn
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, LlamaForCausalLM
from transformers.utils import logging as transformers_logging

import trl_stabledrl.models
from tests.naive_llada import naive_llada_logits
from tests.tiny import (
    PUBLISHED_CONFIG,
    TINY_SIZES,
    published_llada_folder,
    published_tensors,
    tiny_llada,
    tiny_tokenizer,
)
from trl_stabledrl.models import LLaDAConfig, LLaDAModelLM

IDS = torch.tensor([5, 9, 2, 2, 17, 60, 2, 33])
# logits of tokens 0, 2, 31, 63 at positions 0, 2, 7 of IDS, by tests/naive_llada.py on the closed-form weights
GOLDEN_TOKENS, GOLDEN_POSITIONS = [0, 2, 31, 63], [0, 2, 7]
GOLDEN_LOGITS = [
    [-0.17187, 0.856834, 0.4542, -0.053867],
    [0.706773, -2.239885, 1.280337, 1.095361],
    [0.798207, -2.124446, 1.337309, 0.954775],
]

LORA_TARGETS = ["q_proj", "k_proj", "v_proj", "o_proj", "gate_proj", "up_proj", "down_proj"]


def load(path: str | Path, **kwargs: Any) -> Any:
    return AutoModelForCausalLM.from_pretrained(path, **kwargs)


def project(hidden: Tensor, weight: Tensor) -> Tensor:
    return hidden @ weight.T


def weights_on_disk(path: Path) -> dict[str, Tensor]:
    return {name: tensor for file in path.glob("*.safetensors") for name, tensor in load_file(file).items()}


def assert_equal_tensors(left: dict[str, Tensor], right: dict[str, Tensor]) -> None:
    assert left.keys() == right.keys()
    for name, tensor in left.items():
        assert torch.equal(tensor, right[name]), name


@pytest.fixture
def batch(generator: torch.Generator) -> tuple[Tensor, Tensor, Tensor]:
    """Rows of ids without padding, the same behind 4 padding tokens, and the padded rows' mask."""
    ids = torch.randint(5, 64, (3, 10), generator=generator)
    padded = torch.cat([torch.zeros(3, 4, dtype=torch.long), ids], dim=1)
    return ids, padded, (padded != 0).long()


def is_some_selected(shape: tuple[int, ...]) -> Tensor:
    return torch.rand(shape, generator=torch.Generator().manual_seed(1)) > 0.5


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


@pytest.mark.parametrize("changes", [{}, {"weight_tying": True}, {"n_kv_heads": 2, "n_layers": 12}])
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_published_checkpoint_round_trips_bit_for_bit(tmp_path, changes, max_shard_size):
    published, saved = published_llada_folder(tmp_path / "published", **changes), tmp_path / "saved"
    model, report = load(published, output_loading_info=True)
    assert isinstance(model, LLaDAModelLM)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model(IDS[None])  # transformers leaves an attribute on the config after a forward

    model.save_pretrained(saved, max_shard_size=max_shard_size)

    assert (len(list(saved.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    assert_equal_tensors(weights_on_disk(saved), weights_on_disk(published))
    again = load(saved)
    assert_equal_tensors(again.state_dict(), model.state_dict())
    assert torch.equal(again(IDS[None]).logits, model(IDS[None]).logits)


def test_saved_config_holds_every_published_field(tmp_path):
    extra = {"a_field_of_a_later_release": [1, 2]}
    published, saved = published_llada_folder(tmp_path / "published", **extra), tmp_path / "saved"

    load(published).save_pretrained(saved)

    before, after = (json.loads((path / "config.json").read_text()) for path in (published, saved))
    assert after.pop("dtype") == "float32"
    for config in (before, after):
        config.pop("transformers_version")
    assert after == before


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


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_trust_remote_code_ends_in_our_class_and_says_so_once(tmp_path, auto_class, caplog):
    path = published_llada_folder(tmp_path)  # its remote code raises when imported
    transformers_logging.warning_once.cache_clear()

    with caplog.at_level(logging.WARNING, logger="trl_stabledrl"):
        models = [auto_class.from_pretrained(path, trust_remote_code=True) for _ in range(2)]

    assert all(type(model) is LLaDAModelLM for model in models)
    assert type(AutoConfig.from_pretrained(path, trust_remote_code=True)) is LLaDAConfig
    assert [record.message for record in caplog.records if "trust_remote_code" in record.message] == [
        "trust_remote_code=True was ignored: LLaDA runs in trl_stabledrl's own classes, no remote code is run."
    ]


def test_registration_can_be_repeated(tmp_path):
    trl_stabledrl.models._register()
    importlib.reload(trl_stabledrl.models)
    assert type(load(published_llada_folder(tmp_path))) is LLaDAModelLM


def test_published_tokenizer_and_model_agree(tmp_path):
    path = published_llada_folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "12 + 3 =\n15"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    trl_stabledrl.models.check_vocabulary(load(path).config, tokenizer, 64)


def test_state_dict_under_published_names_loads_as_trainer_resumes(tmp_path):
    trained, resumed = tiny_llada(seed=1), tiny_llada(seed=2)
    trained.save_pretrained(tmp_path)

    result = resumed.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)

    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal_tensors(resumed.state_dict(), trained.state_dict())
    resumed.load_state_dict(trained.state_dict())  # Llama's names, strictly


def test_rows_that_differ_from_the_config_are_an_error_with_both_numbers(tmp_path):
    path = published_llada_folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"vocab_size": 70, "embedding_size": 70}))

    with pytest.raises(ValueError, match=r"has shape \(64, 32\) in .* and \(70, 32\) by its config"):
        load(path)
    assert load(path, ignore_mismatched_sizes=True).get_input_embeddings().num_embeddings == 70


def test_absent_tensors_are_an_error(tmp_path):
    path = published_llada_folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {"n_layers": 3}))
    with pytest.raises(ValueError, match=r"lacks the tensors of \['model.layers.2.input_layernorm.weight'"):
        load(path)


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
    changed = IDS.clone()
    changed[-1] = 7
    difference = (model(IDS[None]).logits - model(changed[None]).logits).abs().amax(dim=-1)
    assert (difference > 1e-3).all()


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_changes_nothing(batch, implementation):
    ids, padded, attention_mask = batch
    model = tiny_llada(attn_implementation=implementation)
    unpadded = model(ids).logits
    position_ids = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)

    derived = model(padded, attention_mask=attention_mask).logits[:, 4:]
    given = model(padded, attention_mask=attention_mask, position_ids=position_ids).logits[:, 4:]
    as_float = model(padded, attention_mask=attention_mask.float()).logits[:, 4:]

    # measured 0.0; the sums of attention may be split differently on another machine
    torch.testing.assert_close(derived, unpadded, rtol=0, atol=1e-6)
    assert torch.equal(given, derived)
    assert torch.equal(as_float, derived)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_row_of_padding_changes_nothing(batch, implementation):
    ids, padded, attention_mask = batch
    model = tiny_llada(attn_implementation=implementation)
    zeros = torch.zeros(1, padded.shape[1], dtype=torch.long)

    logits = model(torch.cat([padded, zeros]), attention_mask=torch.cat([attention_mask, zeros])).logits

    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:3, 4:], model(ids).logits, rtol=0, atol=1e-6)


def test_inputs_embeds_count_positions_from_the_first_real_token_too(batch):
    ids, padded, attention_mask = batch
    model = tiny_llada()
    embedded = model.get_input_embeddings()(padded)
    logits = model(inputs_embeds=embedded, attention_mask=attention_mask).logits[:, 4:]
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=1e-6)


def any_mask(length: int) -> Tensor:
    """A 4-D mask without structure in which every query sees something."""
    may_attend = torch.rand(1, 1, length, length, generator=torch.Generator().manual_seed(2)) > 0.5
    return may_attend | torch.eye(length, dtype=torch.bool)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_boolean_4d_mask_is_honoured_exactly(tmp_path, implementation, dtype):
    may_attend = any_mask(len(IDS))
    config = PUBLISHED_CONFIG | TINY_SIZES
    naive = naive_llada_logits(published_tensors(config), config, IDS, may_attend=may_attend[0, 0])

    model = load(published_llada_folder(tmp_path), dtype=dtype, attn_implementation=implementation)
    logits = model(IDS[None], attention_mask=may_attend).logits[0].double()

    # measured 5.7e-7 and 0.061, where ignoring the mask moves the logits by 2.4
    torch.testing.assert_close(logits, naive, rtol=0, atol=2e-6 if dtype == torch.float64 else 0.13)
    assert (model(IDS[None]).logits[0] - naive).abs().max() > 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
def test_a_4d_mask_of_numbers_is_refused(dtype):
    with pytest.raises(ValueError, match=r"attention_mask has 4 axes and dtype .*Pass attention_mask.bool\(\)"):
        tiny_llada()(IDS[None], attention_mask=any_mask(len(IDS)).to(dtype))


def test_a_3d_mask_is_refused():
    with pytest.raises(ValueError, match="attention_mask has 3 axes"):
        tiny_llada()(IDS[None], attention_mask=torch.ones(1, 8, 8, dtype=torch.bool))


def test_an_attention_that_takes_no_dense_mask_is_refused():
    model = tiny_llada()
    model.config._attn_implementation = "flash_attention_2"
    with pytest.raises(ValueError, match="'flash_attention_2' cannot take a dense 4-D attention_mask"):
        model(IDS[None], attention_mask=any_mask(len(IDS)))


def test_eager_equals_sdpa(batch):
    _, padded, attention_mask = batch
    eager, sdpa = (
        tiny_llada(attn_implementation=name)(padded, attention_mask=attention_mask).logits[:, 4:]
        for name in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager, sdpa, rtol=0, atol=2e-6)  # measured 7.2e-7


def test_labels_are_refused():
    with pytest.raises(ValueError, match="labels was given"):
        tiny_llada()(IDS[None], labels=IDS[None])


def test_generate_points_to_ours():
    model = tiny_llada()
    with pytest.raises(NotImplementedError, match="trl_stabledrl.generate"):
        model.generate(IDS[None])
    assert model.generation_config is not None
    model.generation_config.pad_token_id = 0  # as GRPOTrainer sets it


def test_selected_positions_are_the_rows_of_the_full_projection(batch):
    _, padded, attention_mask = batch
    model = tiny_llada()
    is_selected = is_some_selected(padded.shape)
    full = model(padded, attention_mask=attention_mask).logits
    calls = []

    def head_fn(hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
        calls.append((hidden.shape, weight.shape))
        return {"logits": hidden @ weight.T}

    selected = model(input_ids=padded, attention_mask=attention_mask, is_selected=is_selected, head_fn=head_fn)

    rows = [full[b, s] for b in range(3) for s in range(14) if is_selected[b, s]]
    torch.testing.assert_close(selected["logits"], torch.stack(rows), rtol=0, atol=1e-6)
    assert calls == [((len(rows), 32), (64, 32))]


def test_nothing_selected_still_reaches_every_parameter():
    model = tiny_llada()
    nothing = torch.zeros(1, 8, dtype=torch.bool)

    logits = model(input_ids=IDS[None], is_selected=nothing, head_fn=project)
    logits.sum().backward()

    assert logits.shape == (0, 64)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_gradients_equal_those_through_the_full_projection(batch):
    ids, _, _ = batch
    is_selected = is_some_selected(ids.shape)
    model = tiny_llada(tie_word_embeddings=True, dtype=torch.float64)
    reference = copy.deepcopy(model)

    model(input_ids=ids, is_selected=is_selected, head_fn=project).square().sum().backward()
    reference(ids).logits[is_selected].square().sum().backward()

    for ours, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, full.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_gradient_checkpointing_changes_no_gradient(batch, use_reentrant):
    _, padded, attention_mask = batch
    is_selected = is_some_selected(padded.shape)
    model = tiny_llada().train()
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed.enable_input_require_grads()

    for each in (model, checkpointed):
        logits = each(input_ids=padded, attention_mask=attention_mask, is_selected=is_selected, head_fn=project)
        logits.square().mean().backward()

    assert checkpointed.is_gradient_checkpointing
    for ours, plain in zip(checkpointed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=0)


def compare_sharded_gradients(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ids = torch.randint(5, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    is_selected = is_some_selected((2, 10))

    def head_fn(hidden: Tensor, weight: Tensor) -> Tensor:
        return project(hidden, weight).log_softmax(dim=-1)[:, 7].sum()

    for is_head_apart, is_tied in [(False, False), (True, False), (False, True)]:
        model, reference = (tiny_llada(tie_word_embeddings=is_tied) for _ in range(2))
        for layer in model.model.layers:
            fully_shard(layer)
        if is_head_apart:
            fully_shard(model.lm_head)
        fully_shard(model)

        # the second rank has nothing to score
        local = is_selected if rank == 0 else torch.zeros_like(is_selected)
        model(input_ids=ids, is_selected=local, head_fn=head_fn).backward()
        (reference(input_ids=ids, is_selected=is_selected, head_fn=head_fn) / 2).backward()  # the mean over ranks

        for (name, sharded), whole in zip(model.named_parameters(), reference.parameters(), strict=True):
            assert isinstance(sharded.grad, DTensor)
            case = f"{name} on rank {rank}, head apart {is_head_apart}, tied {is_tied}"
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6, msg=case)
    distributed.destroy_process_group()


def test_gradients_under_fsdp2_equal_one_process(tmp_path):
    multiprocessing.spawn(compare_sharded_gradients, (str(tmp_path),), nprocs=2)


def test_bfloat16_runs_near_float32(batch):
    ids, _, _ = batch
    model = tiny_llada(dtype=torch.bfloat16).train()
    logits = model(input_ids=ids, is_selected=torch.ones_like(ids, dtype=torch.bool), head_fn=project)
    logits.float().square().mean().backward()

    assert logits.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    # measured 0.027, where logits have a standard deviation of 0.6
    torch.testing.assert_close(logits.float(), tiny_llada()(ids).logits.flatten(0, 1), rtol=0, atol=0.06)
    assert all(p.grad is not None and p.grad.isfinite().all() for p in model.parameters())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"head_fn": project}, "head_fn was given without is_selected"),
        ({"is_selected": torch.ones(1, 8, dtype=torch.bool)}, "is_selected was given without head_fn"),
        ({"head_fn": project, "is_selected": torch.ones(1, 8)}, r"is_selected has dtype torch.float32"),
        ({"head_fn": project, "is_selected": torch.ones(8, dtype=torch.bool)}, r"shape \(8,\)"),
    ],
)
def test_selection_that_does_not_fit_is_refused(arguments, message):
    with pytest.raises(ValueError, match=message):
        tiny_llada()(input_ids=IDS[None], **arguments)


def test_selection_passes_through_the_fused_head_of_trl(batch):
    from trl.trainer.utils import add_fused_lm_head

    ids, padded, attention_mask = batch
    model = tiny_llada()
    is_selected = is_some_selected(padded.shape)
    inputs = {"input_ids": padded, "attention_mask": attention_mask}
    before = model(**inputs, is_selected=is_selected, head_fn=project)

    add_fused_lm_head(model)

    assert torch.equal(model(**inputs, is_selected=is_selected, head_fn=project), before)
    fused = model(
        **inputs,
        position_ids=(attention_mask.cumsum(dim=-1) - 1).clamp(min=0),
        shift_labels=padded.masked_fill(~is_selected, -100),
        fused_lm_head=True,
    )
    expected = before.log_softmax(dim=-1).gather(-1, padded[is_selected][:, None])[:, 0]
    torch.testing.assert_close(fused.log_probs[is_selected], expected, rtol=0, atol=2e-6)  # measured 4.8e-7


def with_adapter(model: nn.Module, **changes: Any) -> Any:
    peft = pytest.importorskip("peft")
    settings = {"r": 2, "target_modules": LORA_TARGETS, "init_lora_weights": False, "task_type": "CAUSAL_LM"}
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        return peft.get_peft_model(model, peft.LoraConfig(**settings | changes))


def test_selection_passes_through_an_adapter(batch):
    ids, _, _ = batch
    is_selected = is_some_selected(ids.shape)
    plain = tiny_llada()(ids).logits
    model = with_adapter(tiny_llada())

    logits = model(input_ids=ids).logits
    selected = model(input_ids=ids, is_selected=is_selected, head_fn=project)
    selected.square().mean().backward()

    trainable = [name for name, parameter in model.named_parameters() if parameter.requires_grad]
    assert len(trainable) == 2 * len(LORA_TARGETS) * 2  # layers, modules, A and B
    assert (logits - plain).abs().max() > 0.1
    torch.testing.assert_close(selected, logits[is_selected], rtol=0, atol=1e-6)
    assert all(parameter.grad.any() for parameter in model.parameters() if parameter.requires_grad)
    with pytest.raises(NotImplementedError, match="trl_stabledrl.generate"):
        model.generate(input_ids=ids)


def test_adapter_round_trips_and_merges_into_published_names(batch, tmp_path):
    peft = pytest.importorskip("peft")
    ids, _, _ = batch
    model = with_adapter(tiny_llada())
    logits = model(input_ids=ids).logits

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(tiny_llada(), tmp_path / "adapter")
    assert torch.equal(again(input_ids=ids).logits, logits)

    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert weights_on_disk(tmp_path / "merged").keys() == published_tensors(PUBLISHED_CONFIG | TINY_SIZES).keys()
    # measured 3.8e-6: the sum of the two products is rounded elsewhere
    torch.testing.assert_close(load(tmp_path / "merged")(ids).logits, logits, rtol=0, atol=8e-6)


@pytest.mark.parametrize("changes", [{"target_modules": [*LORA_TARGETS, "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_the_head_is_refused(changes):
    model = with_adapter(tiny_llada(), **changes)
    is_selected = torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="Take lm_head out of the adapter's target_modules and modules_to_save"):
        model(input_ids=IDS[None], is_selected=is_selected, head_fn=project)


def test_tiny_model_leaves_the_global_generator_alone():
    before = torch.get_rng_state()
    first, second, other = tiny_llada(), tiny_llada(), tiny_llada(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal_tensors(first.state_dict(), second.state_dict())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert isinstance(first, LlamaForCausalLM)


def test_chat_template_ends_turns():
    tokenizer = tiny_tokenizer(chat_template=True)
    messages = [{"role": "user", "content": "1 + 1"}]
    ids: Any = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=True, return_dict=False)
    assert tokenizer.decode(ids) == "user:1 + 1<|eot_id|>assistant:"
