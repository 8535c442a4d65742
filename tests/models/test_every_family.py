# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What holds of every family's model; what is peculiar to one is in its own file."""

import copy
import itertools
import json
import logging

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor, distributed, multiprocessing
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer
from transformers.utils import logging as transformers_logging

from tests.model_tools import (
    CASES,
    LORA_TARGETS,
    any_mask,
    assert_equal_tensors,
    is_some_selected,
    load,
    project,
    weights_on_disk,
    with_adapter,
)
from trl_stabledrl.models import check_vocabulary

IDS = torch.tensor([5, 9, 2, 2, 17, 60, 2, 33])


@pytest.mark.parametrize("variant", range(3))
@pytest.mark.parametrize("max_shard_size", ["1GB", "20KB"])
def test_published_checkpoint_round_trips_bit_for_bit(case, tmp_path, variant, max_shard_size):
    published, saved = case.folder(tmp_path / "published", **case.variants[variant]), tmp_path / "saved"
    model, report = load(published, output_loading_info=True)
    assert isinstance(model, case.model_class)
    assert not report["missing_keys"]
    assert not report["unexpected_keys"]
    model(IDS[None])  # transformers leaves an attribute on the config after a forward

    model.save_pretrained(saved, max_shard_size=max_shard_size)

    assert (len(list(saved.glob("*.safetensors"))) > 1) == (max_shard_size == "20KB")
    assert_equal_tensors(weights_on_disk(saved), weights_on_disk(published))
    again = load(saved)
    assert_equal_tensors(again.state_dict(), model.state_dict())
    assert torch.equal(again(IDS[None]).logits, model(IDS[None]).logits)


def test_saved_config_holds_every_published_field(case, tmp_path):
    extra = {"a_field_of_a_later_release": [1, 2]}
    published, saved = case.folder(tmp_path / "published", **extra), tmp_path / "saved"

    load(published).save_pretrained(saved)

    before, after = (json.loads((path / "config.json").read_text()) for path in (published, saved))
    for config in (before, after):
        config.pop("transformers_version")
    assert after == before | case.saved_beside


@pytest.mark.parametrize("auto_class", [AutoModel, AutoModelForCausalLM])
def test_trust_remote_code_ends_in_our_class_and_says_so_once(case, tmp_path, auto_class, caplog):
    path = case.folder(tmp_path)  # its remote code raises when imported
    transformers_logging.warning_once.cache_clear()

    with caplog.at_level(logging.WARNING, logger="trl_stabledrl"):
        models = [auto_class.from_pretrained(path, trust_remote_code=True) for _ in range(2)]

    assert all(type(model) is case.model_class for model in models)
    assert type(AutoConfig.from_pretrained(path, trust_remote_code=True)) is case.config_class
    name = case.model_class.__name__
    assert [record.message for record in caplog.records if "trust_remote_code" in record.message] == [
        f"trust_remote_code=True was ignored: {name} is a registered class, no remote code is run."
    ]


def test_published_tokenizer_and_model_agree(case, tmp_path):
    path = case.folder(tmp_path)
    tokenizer = AutoTokenizer.from_pretrained(path)
    text = "12 + 3 =\n15"
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text
    check_vocabulary(load(path).config, tokenizer, 64)


def test_state_dict_under_published_names_loads_as_trainer_resumes(case, tmp_path):
    trained, resumed = case.tiny(seed=1), case.tiny(seed=2)
    trained.save_pretrained(tmp_path)

    result = resumed.load_state_dict(load_file(tmp_path / "model.safetensors"), strict=False)

    assert not result.missing_keys
    assert not result.unexpected_keys
    assert_equal_tensors(resumed.state_dict(), trained.state_dict())
    resumed.load_state_dict(trained.state_dict())  # the host's names, strictly


def test_rows_that_differ_from_the_config_are_an_error_with_both_numbers(case, tmp_path):
    path = case.folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | dict.fromkeys(case.vocab_sizes, 70)))

    with pytest.raises(ValueError, match=r"has shape \(64, 32\) in .* and \(70, 32\) by its config"):
        load(path)
    assert load(path, ignore_mismatched_sizes=True).get_input_embeddings().num_embeddings == 70


def test_absent_tensors_are_an_error(case, tmp_path):
    path = case.folder(tmp_path)
    config = json.loads((path / "config.json").read_text())
    (path / "config.json").write_text(json.dumps(config | {case.num_layers: 3}))
    with pytest.raises(ValueError, match=r"lacks the tensors of \['model.layers.2.input_layernorm.weight'"):
        load(path)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_left_padding_changes_nothing(case, batch, implementation):
    ids, padded, attention_mask = batch
    model = case.tiny(attn_implementation=implementation)
    unpadded = model(ids).logits
    position_ids = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)

    derived = model(padded, attention_mask=attention_mask).logits[:, 3:]
    given = model(padded, attention_mask=attention_mask, position_ids=position_ids).logits[:, 3:]
    as_float = model(padded, attention_mask=attention_mask.float()).logits[:, 3:]

    torch.testing.assert_close(derived, unpadded, rtol=0, atol=2e-6)  # measured 6.0e-7
    assert torch.equal(given, derived)
    assert torch.equal(as_float, derived)


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_a_row_of_padding_changes_nothing(case, batch, implementation):
    ids, padded, attention_mask = batch
    model = case.tiny(attn_implementation=implementation)
    zeros = torch.zeros(1, padded.shape[1], dtype=torch.long)

    logits = model(torch.cat([padded, zeros]), attention_mask=torch.cat([attention_mask, zeros])).logits

    assert logits.isfinite().all()
    torch.testing.assert_close(logits[:3, 3:], model(ids).logits, rtol=0, atol=2e-6)


def test_inputs_embeds_count_positions_from_the_first_real_token_too(case, batch):
    ids, padded, attention_mask = batch
    model = case.tiny()
    embedded = model.get_input_embeddings()(padded)
    logits = model(inputs_embeds=embedded, attention_mask=attention_mask).logits[:, 3:]
    torch.testing.assert_close(logits, model(ids).logits, rtol=0, atol=2e-6)


@pytest.mark.parametrize("dtype", [torch.float64, torch.bfloat16])
@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_boolean_4d_mask_is_honoured_exactly(case, tmp_path, implementation, dtype):
    may_attend = any_mask(len(IDS))
    naive = case.naive_logits(case.tensors(case.config), case.config, IDS, may_attend=may_attend[0, 0])

    model = load(case.folder(tmp_path), dtype=dtype, attn_implementation=implementation)
    logits = model(IDS[None], attention_mask=may_attend).logits[0].double()

    # measured 5.7e-7 and 0.061, where ignoring the mask moves the logits by 2.4
    torch.testing.assert_close(logits, naive, rtol=0, atol=2e-6 if dtype == torch.float64 else 0.13)
    assert (model(IDS[None]).logits[0] - naive).abs().max() > 1.0


@pytest.mark.parametrize("dtype", [torch.float32, torch.long])
def test_a_4d_mask_of_numbers_is_refused(case, dtype):
    with pytest.raises(ValueError, match=r"attention_mask has 4 axes and dtype .*Pass attention_mask.bool\(\)"):
        case.tiny()(IDS[None], attention_mask=any_mask(len(IDS)).to(dtype))


def test_a_3d_mask_is_refused(case):
    with pytest.raises(ValueError, match="attention_mask has 3 axes"):
        case.tiny()(IDS[None], attention_mask=torch.ones(1, 8, 8, dtype=torch.bool))


def test_eager_equals_sdpa(case, batch):
    _, padded, attention_mask = batch
    eager, sdpa = (
        case.tiny(attn_implementation=name)(padded, attention_mask=attention_mask).logits[:, 3:]
        for name in ("eager", "sdpa")
    )
    torch.testing.assert_close(eager, sdpa, rtol=0, atol=2e-6)  # measured 7.2e-7


def test_labels_are_refused(case):
    with pytest.raises(ValueError, match="labels was given"):
        case.tiny()(IDS[None], labels=IDS[None])


def test_generate_points_to_ours(case):
    model = case.tiny()
    with pytest.raises(NotImplementedError, match="trl_stabledrl.generate"):
        model.generate(IDS[None])
    assert model.generation_config is not None
    model.generation_config.pad_token_id = 0  # as GRPOTrainer sets it


def test_selected_positions_are_the_rows_of_the_full_projection(case, batch):
    _, padded, attention_mask = batch
    model = case.tiny()
    is_selected = is_some_selected(padded.shape)
    full = model(padded, attention_mask=attention_mask).logits
    calls = []

    def head_fn(hidden: Tensor, weight: Tensor) -> dict[str, Tensor]:
        calls.append((hidden.shape, weight.shape))
        return {"logits": hidden @ weight.T}

    selected = model(input_ids=padded, attention_mask=attention_mask, is_selected=is_selected, head_fn=head_fn)

    rows = [full[b, s] for b in range(3) for s in range(13) if is_selected[b, s]]
    torch.testing.assert_close(selected["logits"], torch.stack(rows), rtol=0, atol=1e-6)
    assert calls == [((len(rows), 32), (64, 32))]


def test_nothing_selected_still_reaches_every_parameter(case):
    model = case.tiny()
    nothing = torch.zeros(1, 8, dtype=torch.bool)

    logits = model(input_ids=IDS[None], is_selected=nothing, head_fn=project)
    logits.sum().backward()

    assert logits.shape == (0, 64)
    for name, parameter in model.named_parameters():
        assert parameter.grad is not None, name
        assert not parameter.grad.any(), name


def test_gradients_equal_those_through_the_full_projection(case, batch):
    ids, _, _ = batch
    is_selected = is_some_selected(ids.shape)
    model = case.tiny(tie_word_embeddings=True, dtype=torch.float64)
    reference = copy.deepcopy(model)

    model(input_ids=ids, is_selected=is_selected, head_fn=project).square().sum().backward()
    reference(ids).logits[is_selected].square().sum().backward()

    for ours, full in zip(model.parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, full.grad, rtol=1e-9, atol=1e-9)


@pytest.mark.parametrize("use_reentrant", [True, False])
@pytest.mark.filterwarnings("ignore:torch.utils.checkpoint")
def test_gradient_checkpointing_changes_no_gradient(case, batch, use_reentrant):
    _, padded, attention_mask = batch
    is_selected = is_some_selected(padded.shape)
    model = case.tiny().train()
    checkpointed = copy.deepcopy(model)
    checkpointed.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    checkpointed.enable_input_require_grads()

    for each in (model, checkpointed):
        logits = each(input_ids=padded, attention_mask=attention_mask, is_selected=is_selected, head_fn=project)
        logits.square().mean().backward()

    assert checkpointed.is_gradient_checkpointing
    for ours, plain in zip(checkpointed.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(ours.grad, plain.grad, rtol=0, atol=0)


@pytest.mark.parametrize("use_reentrant", [True, False])
def test_without_gradients_checkpointing_is_off_and_comes_back(case, batch, use_reentrant):
    ids, _, _ = batch
    model = case.tiny().train()
    expected = model(ids).logits
    model.gradient_checkpointing_enable({"use_reentrant": use_reentrant})
    with torch.no_grad():
        logits = model(ids).logits  # the reentrant kind would warn that it has nothing to replay
    assert torch.equal(logits, expected)
    assert all(layer.gradient_checkpointing for layer in model.model.layers)


def compare_sharded_gradients(rank: int, folder: str) -> None:
    torch.set_num_threads(1)
    distributed.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=2)
    ids = torch.randint(5, 64, (2, 10), generator=torch.Generator().manual_seed(0))
    is_selected = is_some_selected((2, 10))

    def head_fn(hidden: Tensor, weight: Tensor) -> Tensor:
        return project(hidden, weight).log_softmax(dim=-1)[:, 7].sum()

    for case, is_head_apart, is_tied in itertools.product(CASES.values(), [False, True], [False, True]):
        if is_head_apart and is_tied:
            continue
        model, reference = (case.tiny(tie_word_embeddings=is_tied) for _ in range(2))
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
            where = f"{case.name}'s {name} on rank {rank}, head apart {is_head_apart}, tied {is_tied}"
            torch.testing.assert_close(sharded.grad.full_tensor(), whole.grad, rtol=1e-5, atol=1e-6, msg=where)
    distributed.destroy_process_group()


def test_gradients_under_fsdp2_equal_one_process(tmp_path):
    multiprocessing.spawn(compare_sharded_gradients, (str(tmp_path),), nprocs=2)


def test_bfloat16_runs_near_float32(case, batch):
    ids, _, _ = batch
    model = case.tiny(dtype=torch.bfloat16).train()
    logits = model(input_ids=ids, is_selected=torch.ones_like(ids, dtype=torch.bool), head_fn=project)
    logits.float().square().mean().backward()

    assert logits.dtype == torch.bfloat16
    assert model.model.rotary_emb.inv_freq.dtype == torch.float32
    # measured 0.027, where logits have a standard deviation of 0.6
    torch.testing.assert_close(logits.float(), case.tiny()(ids).logits.flatten(0, 1), rtol=0, atol=0.06)
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
def test_selection_that_does_not_fit_is_refused(case, arguments, message):
    with pytest.raises(ValueError, match=message):
        case.tiny()(input_ids=IDS[None], **arguments)


def test_selection_passes_through_the_fused_head_of_trl(case, batch):
    from trl.trainer.utils import add_fused_lm_head

    ids, padded, attention_mask = batch
    model = case.tiny()
    is_selected = is_some_selected(padded.shape) & attention_mask.bool()
    inputs = {"input_ids": padded, "attention_mask": attention_mask}
    before = model(**inputs, is_selected=is_selected, head_fn=project)

    add_fused_lm_head(model)

    assert torch.equal(model(**inputs, is_selected=is_selected, head_fn=project), before)
    position = (attention_mask.cumsum(dim=-1) - 1).clamp(min=0)
    block = position // 4 if case.name == "sdar" else torch.zeros_like(position)
    is_real = attention_mask.bool()
    may_attend = (block[:, :, None] >= block[:, None]) & (is_real[:, None] == is_real[:, :, None])
    fused = model(  # TRL's forward, which goes past ours: it gets the whole mask
        input_ids=padded,
        attention_mask=may_attend[:, None],
        position_ids=position,
        shift_labels=padded.masked_fill(~is_selected, -100),
        fused_lm_head=True,
    )
    expected = before.log_softmax(dim=-1).gather(-1, padded[is_selected][:, None])[:, 0]
    torch.testing.assert_close(fused.log_probs[is_selected], expected, rtol=0, atol=2e-6)  # measured 4.8e-7


def test_selection_passes_through_an_adapter(case, batch):
    ids, _, _ = batch
    is_selected = is_some_selected(ids.shape)
    plain = case.tiny()(ids).logits
    model = with_adapter(case.tiny())

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


def test_adapter_round_trips_and_merges_into_published_names(case, batch, tmp_path):
    peft = pytest.importorskip("peft")
    ids, _, _ = batch
    model = with_adapter(case.tiny())
    logits = model(input_ids=ids).logits

    model.save_pretrained(tmp_path / "adapter")
    again = peft.PeftModel.from_pretrained(case.tiny(), tmp_path / "adapter")
    assert torch.equal(again(input_ids=ids).logits, logits)

    model.merge_and_unload().save_pretrained(tmp_path / "merged")
    assert weights_on_disk(tmp_path / "merged").keys() == case.tensors(case.config).keys()
    # measured 3.8e-6 and 6.7e-6: the sum of the two products is rounded elsewhere
    torch.testing.assert_close(load(tmp_path / "merged")(ids).logits, logits, rtol=0, atol=1.4e-5)


@pytest.mark.parametrize("changes", [{"target_modules": [*LORA_TARGETS, "lm_head"]}, {"modules_to_save": ["lm_head"]}])
def test_an_adapter_on_the_head_is_refused(case, changes):
    model = with_adapter(case.tiny(), **changes)
    is_selected = torch.ones(1, 8, dtype=torch.bool)
    with pytest.raises(ValueError, match="Take lm_head out of the adapter's target_modules and modules_to_save"):
        model(input_ids=IDS[None], is_selected=is_selected, head_fn=project)


def test_tiny_model_leaves_the_global_generator_alone(case):
    before = torch.get_rng_state()
    first, second, other = case.tiny(), case.tiny(), case.tiny(seed=1)
    assert torch.equal(torch.get_rng_state(), before)
    assert_equal_tensors(first.state_dict(), second.state_dict())
    assert not torch.equal(first.lm_head.weight, other.lm_head.weight)
    assert type(first) is case.model_class
