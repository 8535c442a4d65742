# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Models and tokenizers that tests build in memory or in a temporary folder."""

import json
import string
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from tokenizers import Regex, Tokenizer, decoders, pre_tokenizers
from tokenizers.models import WordLevel
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel, PreTrainedTokenizerFast

from trl_stabledrl.models import LLaDAConfig, LLaDAModelLM, SDARConfig, SDARForCausalLM

PAD, END, MASK, UNKNOWN, TURN_END = "<|pad|>", "<|endoftext|>", "<|mdm_mask|>", "<|unk|>", "<|eot_id|>"
SPECIAL_TOKENS = (PAD, END, MASK, UNKNOWN, TURN_END)  # ids 0 to 4
CHARACTERS = string.digits + string.ascii_lowercase + " +-*/=?:,.\n"
CHAT_TEMPLATE = (
    "{% for message in messages %}{{ message['role'] }}:{{ message['content'] }}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}assistant:{% endif %}"
)

# config.json of GSAI-ML/LLaDA-8B-Instruct, field by field
PUBLISHED_CONFIG: dict[str, Any] = {
    "activation_type": "silu",
    "alibi": False,
    "alibi_bias_max": 8.0,
    "architectures": ["LLaDAModelLM"],
    "attention_dropout": 0.0,
    "attention_layer_norm": False,
    "attention_layer_norm_with_affine": True,
    "auto_map": {
        "AutoConfig": "configuration_llada.LLaDAConfig",
        "AutoModelForCausalLM": "modeling_llada.LLaDAModelLM",
        "AutoModel": "modeling_llada.LLaDAModelLM",
    },
    "bias_for_layer_norm": False,
    "block_group_size": 1,
    "block_type": "llama",
    "d_model": 4096,
    "embedding_dropout": 0.0,
    "embedding_size": 126464,
    "eos_token_id": 126081,
    "flash_attention": False,
    "include_bias": False,
    "include_qkv_bias": False,
    "init_cutoff_factor": None,
    "init_device": "meta",
    "init_fn": "mitchell",
    "init_std": 0.02,
    "input_emb_norm": False,
    "layer_norm_type": "rms",
    "layer_norm_with_affine": True,
    "mask_token_id": 126336,
    "max_sequence_length": 4096,
    "mlp_hidden_size": 12288,
    "mlp_ratio": 4,
    "model_type": "llada",
    "multi_query_attention": None,
    "n_heads": 32,
    "n_kv_heads": 32,
    "n_layers": 32,
    "pad_token_id": 126081,
    "precision": "amp_bf16",
    "residual_dropout": 0.0,
    "rms_norm_eps": 1e-05,
    "rope": True,
    "rope_full_precision": True,
    "rope_theta": 500000.0,
    "scale_logits": False,
    "transformers_version": "4.46.3",
    "use_cache": False,
    "vocab_size": 126464,
    "weight_tying": False,
}
TINY_SIZES: dict[str, Any] = {
    "d_model": 32,
    "embedding_size": 64,
    "eos_token_id": 1,
    "mask_token_id": 2,
    "max_sequence_length": 64,
    "mlp_hidden_size": 48,
    "n_heads": 4,
    "n_kv_heads": 4,
    "n_layers": 2,
    "pad_token_id": 0,
    "vocab_size": 64,
}

# config.json of JetLM/SDAR-8B-Chat, field by field; later releases add block_size and mask_token_id
PUBLISHED_SDAR_CONFIG: dict[str, Any] = {
    "architectures": ["SDARForCausalLM"],
    "attention_bias": False,
    "attention_dropout": 0.0,
    "auto_map": {
        "AutoConfig": "configuration_sdar.SDARConfig",
        "AutoModel": "modeling_sdar.SDARModel",
        "AutoModelForCausalLM": "modeling_sdar.SDARForCausalLM",
    },
    "bos_token_id": 151643,
    "debug": False,
    "eos_token_id": 151643,
    "ep_size": 1,
    "fuse_cross_entropy": True,
    "head_dim": 128,
    "hidden_act": "silu",
    "hidden_size": 4096,
    "initializer_range": 0.02,
    "intermediate_size": 12288,
    "max_position_embeddings": 32768,
    "max_window_layers": 36,
    "micro_forward": False,
    "model_type": "sdar",
    "num_attention_heads": 32,
    "num_hidden_layers": 36,
    "num_key_value_heads": 8,
    "rms_norm_eps": 1e-06,
    "rope_scaling": None,
    "rope_theta": 1000000,
    "skip_checkpoint": False,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "float32",
    "transformers_version": "4.52.4",
    "use_cache": True,
    "use_deepep": False,
    "use_sliding_window": False,
    "vocab_size": 151936,
}
TINY_SDAR_SIZES: dict[str, Any] = {
    "bos_token_id": 1,
    "eos_token_id": 1,
    "head_dim": 8,
    "hidden_size": 32,
    "intermediate_size": 48,
    "mask_token_id": 2,
    "max_position_embeddings": 512,
    "max_window_layers": 2,
    "num_attention_heads": 4,
    "num_hidden_layers": 2,
    "num_key_value_heads": 2,
    "vocab_size": 64,
}


def tiny_llada(
    *,
    vocab_size: int = 64,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int | None = None,
    mask_token_id: int | None = 2,
    eos_token_id: int | list[int] | None = 1,
    pad_token_id: int | None = 0,
    tie_word_embeddings: bool = False,
    initializer_range: float = 0.1,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> LLaDAModelLM:
    """Build a LLaDA whose logits are far from uniform; the same weights, rounded, whatever the dtype."""
    config = LLaDAConfig(
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        mask_token_id=mask_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        max_position_embeddings=512,
    )
    model = _built(config, attn_implementation, dtype, seed)
    assert isinstance(model, LLaDAModelLM)
    return model


def tiny_sdar(
    *,
    block_size: int = 4,
    vocab_size: int = 64,
    hidden_size: int = 32,
    intermediate_size: int = 48,
    num_hidden_layers: int = 2,
    num_attention_heads: int = 4,
    num_key_value_heads: int = 2,
    head_dim: int = 8,
    mask_token_id: int | None = 2,
    eos_token_id: int | list[int] | None = 1,
    pad_token_id: int | None = 0,
    tie_word_embeddings: bool = False,
    initializer_range: float = 0.1,
    attn_implementation: str = "sdpa",
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> SDARForCausalLM:
    """Build an SDAR whose logits are far from uniform; the same weights, rounded, whatever the dtype."""
    config = SDARConfig(
        block_size=block_size,
        vocab_size=vocab_size,
        hidden_size=hidden_size,
        intermediate_size=intermediate_size,
        num_hidden_layers=num_hidden_layers,
        num_attention_heads=num_attention_heads,
        num_key_value_heads=num_key_value_heads,
        head_dim=head_dim,
        mask_token_id=mask_token_id,
        eos_token_id=eos_token_id,
        pad_token_id=pad_token_id,
        tie_word_embeddings=tie_word_embeddings,
        initializer_range=initializer_range,
        max_position_embeddings=512,
    )
    model = _built(config, attn_implementation, dtype, seed)
    assert isinstance(model, SDARForCausalLM)
    return model


def _built(config: Any, attn_implementation: str, dtype: torch.dtype, seed: int) -> PreTrainedModel:
    with torch.random.fork_rng(devices=[]):  # tests must not depend on which models were built before them
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32, attn_implementation=attn_implementation)
        if dtype != torch.float32:
            # not model.to(dtype), which would also round the rotary embedding's frequencies; loading does not
            weights = model.state_dict()
            model = AutoModelForCausalLM.from_config(config, dtype=dtype, attn_implementation=attn_implementation)
            model.load_state_dict(weights)
    return model.eval()


def tiny_tokenizer(*, characters: str = CHARACTERS, chat_template: bool = False) -> PreTrainedTokenizerFast:
    """Build a tokenizer of one token per character, with pad 0, end 1, mask 2, unknown 3 and end of turn 4."""
    vocabulary = {token: i for i, token in enumerate((*SPECIAL_TOKENS, *characters))}
    backend = Tokenizer(WordLevel(vocabulary, unk_token=UNKNOWN))
    backend.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    backend.decoder = decoders.Fuse()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token=PAD,
        eos_token=END,
        mask_token=MASK,
        unk_token=UNKNOWN,
        additional_special_tokens=[TURN_END],
        padding_side="left",
        clean_up_tokenization_spaces=False,
        chat_template=CHAT_TEMPLATE if chat_template else None,
    )


def published_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return float32 tensors under LLaDA's published names, from a closed formula."""
    width, inner = config["d_model"], config["mlp_hidden_size"]
    kv_width = width // config["n_heads"] * (config["n_kv_heads"] or config["n_heads"])
    shapes: dict[str, tuple[int, ...]] = {"model.transformer.wte.weight": (config["embedding_size"], width)}
    for i in range(config["n_layers"]):
        layer = f"model.transformer.blocks.{i}"
        shapes |= {
            f"{layer}.attn_norm.weight": (width,),
            f"{layer}.q_proj.weight": (width, width),
            f"{layer}.k_proj.weight": (kv_width, width),
            f"{layer}.v_proj.weight": (kv_width, width),
            f"{layer}.attn_out.weight": (width, width),
            f"{layer}.ff_norm.weight": (width,),
            f"{layer}.ff_proj.weight": (inner, width),
            f"{layer}.up_proj.weight": (inner, width),
            f"{layer}.ff_out.weight": (width, inner),
        }
    shapes["model.transformer.ln_f.weight"] = (width,)
    if not config["weight_tying"]:
        shapes["model.transformer.ff_out.weight"] = (config["embedding_size"], width)
    return _closed_form(shapes)


def published_sdar_tensors(config: dict[str, Any]) -> dict[str, Tensor]:
    """Return float32 tensors under SDAR's published names, which are Qwen3's, from a closed formula."""
    width, inner, head_dim = config["hidden_size"], config["intermediate_size"], config["head_dim"]
    query_width, kv_width = (config[name] * head_dim for name in ("num_attention_heads", "num_key_value_heads"))
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (config["vocab_size"], width)}
    for i in range(config["num_hidden_layers"]):
        layer = f"model.layers.{i}"
        shapes |= {
            f"{layer}.input_layernorm.weight": (width,),
            f"{layer}.self_attn.q_proj.weight": (query_width, width),
            f"{layer}.self_attn.k_proj.weight": (kv_width, width),
            f"{layer}.self_attn.v_proj.weight": (kv_width, width),
            f"{layer}.self_attn.o_proj.weight": (width, query_width),
            f"{layer}.self_attn.q_norm.weight": (head_dim,),
            f"{layer}.self_attn.k_norm.weight": (head_dim,),
            f"{layer}.post_attention_layernorm.weight": (width,),
            f"{layer}.mlp.gate_proj.weight": (inner, width),
            f"{layer}.mlp.up_proj.weight": (inner, width),
            f"{layer}.mlp.down_proj.weight": (width, inner),
        }
    shapes["model.norm.weight"] = (width,)
    if not config["tie_word_embeddings"]:
        shapes["lm_head.weight"] = (config["vocab_size"], width)
    return _closed_form(shapes)


def _closed_form(shapes: dict[str, tuple[int, ...]]) -> dict[str, Tensor]:
    tensors = {}
    for k, (name, shape) in enumerate(shapes.items()):
        i = torch.arange(torch.Size(shape).numel(), dtype=torch.float64)
        wave = torch.sin(0.37 * i * i + 1.3 * i + k).reshape(shape)  # the square keeps the waves from repeating
        tensors[name] = (1 + 0.3 * wave if len(shape) == 1 else 0.3 * wave).float()
    return tensors


def published_sdar_folder(path: str | Path, *, absent: tuple[str, ...] = (), **changes: Any) -> Path:
    """
    Write an SDAR checkpoint as published, with tiny sizes and without the fields in `absent`, by no class of ours.

    The remote code that its `auto_map` names is there too, and raises if anything imports it.
    """
    config = PUBLISHED_SDAR_CONFIG | TINY_SDAR_SIZES | changes
    config = {name: value for name, value in config.items() if name not in absent}
    return _published_folder(path, config, published_sdar_tensors(config), name="sdar")


def published_llada_folder(path: str | Path, **changes: Any) -> Path:
    """
    Write a checkpoint as published, with tiny sizes, without any class of ours.

    The remote code that its `auto_map` names is there too, and raises if anything imports it.
    """
    config = PUBLISHED_CONFIG | TINY_SIZES | changes
    return _published_folder(path, config, published_tensors(config), name="llada")


def _published_folder(path: str | Path, config: dict[str, Any], tensors: dict[str, Tensor], *, name: str) -> Path:
    path = Path(path)
    path.mkdir(parents=True, exist_ok=True)
    (path / "config.json").write_text(json.dumps(config, indent=2))
    save_file(tensors, path / "model.safetensors", metadata={"format": "pt"})
    tiny_tokenizer().save_pretrained(path)
    for module in (f"configuration_{name}", f"modeling_{name}"):
        (path / f"{module}.py").write_text('raise RuntimeError("the checkpoint\'s remote code was run")\n')
    return path
