# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""LLaDA as transformers' Llama with bidirectional attention, under the names of its published checkpoints."""

from typing import Any

from transformers import LlamaConfig, LlamaForCausalLM
from transformers.core_model_loading import WeightConverter, WeightRenaming

from .bidirectional import SelectedPositionsMixin
from .families import Family, register_family

FAMILY = Family(
    name="LLaDA",
    model_types=("llada",),
    attention="full",
    mask_token_id=126336,
    end_token_ids=(126081, 126348),
    block_length=32,
    tokens_per_step=2,
    mask_law="block_suffix",
    mc_sampling="complementary",
    num_mc_samples=2,
)

# published name -> Llama's; `embedding_size` and `rope_theta` are handled apart
PUBLISHED_NAMES = {
    "activation_type": "hidden_act",
    "d_model": "hidden_size",
    "init_std": "initializer_range",
    "max_sequence_length": "max_position_embeddings",
    "mlp_hidden_size": "intermediate_size",
    "n_heads": "num_attention_heads",
    "n_kv_heads": "num_key_value_heads",
    "n_layers": "num_hidden_layers",
    "weight_tying": "tie_word_embeddings",
}

# Settings of the architecture that Llama fixes, with the values that mean what Llama does.
SUPPORTED_VALUES: dict[str, tuple[Any, ...]] = {
    "alibi": (False,),
    "attention_layer_norm": (False,),
    "bias_for_layer_norm": (False, None),
    "block_group_size": (1,),
    "block_type": ("llama",),
    "clip_qkv": (None,),
    "embedding_dropout": (0.0,),
    "include_bias": (False,),
    "include_qkv_bias": (False, None),
    "input_emb_norm": (False,),
    "layer_norm_type": ("rms",),
    "layer_norm_with_affine": (True,),
    "multi_query_attention": (None, False),
    "residual_dropout": (0.0,),
    "rope": (True,),
    "scale_logits": (False,),
    # Llama's own, which the published names cannot express
    "attention_bias": (False,),
    "hidden_act": ("silu",),
    "is_causal": (False,),
    "mlp_bias": (False,),
    "pretraining_tp": (1, None),
}

# Llama's fields that a published file does not have: each has one possible value, or another spelling
UNPUBLISHED_FIELDS = (
    "attention_bias",
    "clip_qkv",
    "head_dim",
    "is_causal",  # transformers leaves it on the instance after a forward
    "mlp_bias",
    "pretraining_tp",
    "rope_parameters",
)


class LLaDAConfig(LlamaConfig):
    r"""
    Configuration of a LLaDA model: Llama's fields, read and written under the names of the published checkpoints.

    Both spellings are accepted, in the constructor and as attributes (`config.d_model` is `config.hidden_size`).
    `save_pretrained` writes the published spelling and keeps every published field, so that whatever reads the
    published checkpoint reads ours. Settings that Llama cannot express raise.

    Args:
        vocab_size (`int`, *optional*, defaults to `126464`):
            Rows of the embedding, published as `vocab_size` and `embedding_size`.
        hidden_size (`int`, *optional*, defaults to `4096`):
            Width, published as `d_model`.
        intermediate_size (`int`, *optional*, defaults to `12288`):
            Width of the feed-forward layers, published as `mlp_hidden_size`. Where that is null, `mlp_ratio` times
            the width.
        mask_token_id (`int`, *optional*):
            Token that stands for a masked position.
        rope_theta (`float`, *optional*, defaults to `500000.0`):
            Base of the rotary embedding.

    The remaining fields are those of the published configuration; see `SUPPORTED_VALUES` for what they may be.
    """

    model_type = "llada"
    default_theta = 500_000.0
    attribute_map = {**PUBLISHED_NAMES, "embedding_size": "vocab_size"}

    vocab_size: int = 126464
    hidden_size: int = 4096
    intermediate_size: int = 12288
    max_position_embeddings: int = 4096
    rms_norm_eps: float = 1e-5
    use_cache: bool = False
    bos_token_id: int | None = None
    eos_token_id: int | list[int] | None = None
    mask_token_id: int | None = None

    alibi: bool = False
    alibi_bias_max: float = 8.0
    attention_layer_norm: bool = False
    attention_layer_norm_with_affine: bool = True
    bias_for_layer_norm: bool | None = False
    block_group_size: int = 1
    block_type: str = "llama"
    clip_qkv: float | None = None
    embedding_dropout: float = 0.0
    flash_attention: bool = False
    include_bias: bool = False
    include_qkv_bias: bool | None = False
    init_cutoff_factor: float | None = None
    init_device: str | None = "meta"
    init_fn: str = "mitchell"
    input_emb_norm: bool = False
    is_causal: bool = False
    layer_norm_type: str = "rms"
    layer_norm_with_affine: bool = True
    mlp_ratio: int | float = 4
    multi_query_attention: bool | None = None
    precision: str | None = "amp_bf16"
    residual_dropout: float = 0.0
    rope: bool = True
    rope_full_precision: bool = True
    scale_logits: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Translate published names, before Llama derives its head size from them."""
        embedding_size = kwargs.pop("embedding_size", None)
        if embedding_size is not None and embedding_size != self.vocab_size:
            raise ValueError(
                f"embedding_size is {embedding_size} and vocab_size is {self.vocab_size}. They must be equal: correct "
                "the config to the number of rows of the embedding."
            )
        if "mlp_hidden_size" in kwargs or "d_model" in kwargs:
            width = kwargs.get("d_model", self.hidden_size)
            if kwargs.get("mlp_hidden_size") is None and self.intermediate_size == type(self).intermediate_size:
                kwargs["mlp_hidden_size"] = int(self.mlp_ratio * width)
            elif kwargs.get("mlp_hidden_size") is None:
                kwargs.pop("mlp_hidden_size", None)
        for published, field in PUBLISHED_NAMES.items():
            if published not in kwargs:
                continue
            value, current = kwargs.pop(published), self.__dict__[field]
            if current not in (type(self).__dataclass_fields__[field].default, value):
                raise ValueError(
                    f"{published} is {value} and {field} is {current}. They are two names of one setting: pass one."
                )
            setattr(self, field, value)
        super().__post_init__(**kwargs)
        self._check_supported()

    def _check_supported(self) -> None:
        for field, allowed in SUPPORTED_VALUES.items():
            if self.__dict__[field] not in allowed:
                raise ValueError(
                    f"{field} is {self.__dict__[field]!r}, but trl_stabledrl runs LLaDA on transformers' Llama, where "
                    f"it can only be {' or '.join(map(repr, allowed))}. This checkpoint needs its own modelling code."
                )
        if self.hidden_size != self.num_attention_heads * (self.head_dim or 0):
            raise ValueError(
                f"hidden_size (d_model) is {self.hidden_size}, num_attention_heads (n_heads) "
                f"{self.num_attention_heads} and head_dim {self.head_dim}. The width must be the product of the "
                "other two."
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1) != 0:
            raise ValueError(
                f"num_attention_heads (n_heads) is {self.num_attention_heads} and num_key_value_heads (n_kv_heads) "
                f"{self.num_key_value_heads}. The first must be a multiple of the second."
            )
        rope_type = (self.rope_parameters or {}).get("rope_type", "default")
        if rope_type != "default":
            raise ValueError(
                f"rope_parameters has rope_type {rope_type!r}, which the published names cannot express. Only "
                "'default' is allowed: remove rope_parameters and set rope_theta."
            )

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what `config.json` holds: the published names. `to_dict` keeps Llama's, which PEFT reads."""
        self._check_supported()
        saved = super().to_diff_dict()
        for published, field in PUBLISHED_NAMES.items():
            saved.pop(field, None)
            saved[published] = self.__dict__[field]
        saved["embedding_size"] = self.vocab_size
        saved["rope_theta"] = (self.rope_parameters or {})["rope_theta"]
        for field in UNPUBLISHED_FIELDS:
            saved.pop(field, None)
        if self.bos_token_id is None:
            saved.pop("bos_token_id", None)
        return saved


# Each name whole, with its layer number: `blocks.0.ff_out` and `transformer.ff_out` differ, and renames that chain
# would find each other's results when they are turned round for saving.
_LAYER_RENAMES = {
    "attn_norm": "input_layernorm",
    "ff_norm": "post_attention_layernorm",
    "q_proj": "self_attn.q_proj",
    "k_proj": "self_attn.k_proj",
    "v_proj": "self_attn.v_proj",
    "attn_out": "self_attn.o_proj",
    "ff_proj": "mlp.gate_proj",
    "up_proj": "mlp.up_proj",
    "ff_out": "mlp.down_proj",
}


def key_renames() -> list[WeightConverter | WeightRenaming]:
    """Return the renames from the published tensor names to Llama's, for transformers to apply and to turn round."""
    outer = {"wte": "model.embed_tokens", "ln_f": "model.norm", "ff_out": "lm_head"}
    renames: list[WeightConverter | WeightRenaming] = []
    renames += [WeightRenaming(rf"^model\.transformer\.{old}\.", f"{new}.") for old, new in outer.items()]
    for old, new in _LAYER_RENAMES.items():
        renames.append(WeightRenaming(rf"^model\.transformer\.blocks\.(\d+)\.{old}\.", rf"model.layers.\1.{new}."))
    return renames


class LLaDAModelLM(SelectedPositionsMixin, LlamaForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    r"""
    LLaDA for masked diffusion: transformers' Llama with bidirectional attention and published checkpoint names.

    The class bears the published architecture's name, so that a saved config names the same architecture. Adapters
    take Llama's module names: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`.

    Args:
        config ([`LLaDAConfig`]):
            Configuration of the model.
    """

    config_class = LLaDAConfig
    config: LLaDAConfig  # pyright: ignore[reportIncompatibleVariableOverride]


register_family(FAMILY, LLaDAConfig, LLaDAModelLM, key_renames=key_renames())
