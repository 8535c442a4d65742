# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""SDAR and TraDo: transformers' Qwen3 with block-causal attention."""

import re
from typing import Any

from transformers import Qwen3Config, Qwen3ForCausalLM

from .bidirectional import BlockDiffusionMixin, check_block_attention
from .families import Family, register_family

FAMILY = Family(
    name="SDAR",
    model_types=("sdar",),  # TraDo's too
    attention="block",
    mask_token_id=151669,
    end_token_ids=(151643, 151645),
    block_length=4,
    tokens_per_step=1,
    mask_law="staircase",
    mc_sampling="cyclic",
    num_mc_samples=4,
    rollout_backends=("transformers", "vllm"),
)

# fields of transformers' own that a published file does not have: each follows from others
UNPUBLISHED_FIELDS = ("is_causal", "layer_types", "rope_parameters")

# as the Hub spells it, and as its cache does: `models--JetLM--SDAR-8B-Chat-b32/snapshots/<commit>`
_PUBLISHED_NAME = re.compile(r"(?:^|[/\\]|--)SDAR-[^/\\]+-b(\d+)(?:[/\\]snapshots[/\\][^/\\]+)?[/\\]?$")


class SDARConfig(Qwen3Config):
    r"""
    Configuration of an SDAR model: Qwen3's, with what block diffusion adds.

    `save_pretrained` writes the spelling of the published checkpoints, such as a plain `rope_theta`, and keeps every
    published field, so that whatever reads the published checkpoint reads ours.

    Args:
        block_size (`int`, *optional*, defaults to `4`):
            Tokens per block. Published configs may lack it: then it is the `32` of a name such as `SDAR-8B-Chat-b32`.
        mask_token_id (`int`, *optional*, defaults to `151669`):
            Token that stands for a masked position. Published configs may lack it.
        rope_theta (`float`, *optional*, defaults to `1000000.0`):
            Base of the rotary embedding.
    """

    model_type = "sdar"
    default_theta = 1_000_000.0

    block_size: int = 4
    mask_token_id: int | None = 151669
    is_causal: bool = False

    def __post_init__(self, **kwargs: Any) -> None:
        """Raise where block diffusion or Qwen3's attention cannot be what the fields say."""
        super().__post_init__(**kwargs)
        self._check()

    def _check(self) -> None:
        check_block_attention(self)
        if self.is_causal:
            raise ValueError(
                "is_causal is True, but SDAR's blocks are read both ways. Leave it False; tokens that see only those "
                "before them are context_attention='causal'."
            )
        if self.num_attention_heads % (self.num_key_value_heads or 1) != 0:
            raise ValueError(
                f"num_attention_heads is {self.num_attention_heads} and num_key_value_heads "
                f"{self.num_key_value_heads}. The first must be a multiple of the second."
            )

    @property
    def canvas_length(self) -> int:
        """Tokens decoded together, under the name by which vLLM knows a diffusion model."""
        return self.block_size

    @classmethod
    def get_config_dict(cls, pretrained_model_name_or_path: Any, **kwargs: Any) -> Any:
        """Read `config.json` and keep the name it was asked by, as [`~transformers.AutoConfig`] does."""
        found, unused = super().get_config_dict(pretrained_model_name_or_path, **kwargs)
        return {"name_or_path": str(pretrained_model_name_or_path)} | found, unused

    @classmethod
    def from_dict(cls, config_dict: dict[str, Any], **kwargs: Any) -> Any:
        """Build the configuration, with the block size of a published name where no field has it."""
        name = str(kwargs.get("name_or_path", config_dict.get("name_or_path", "")))
        published = _PUBLISHED_NAME.search(name)
        if published and "block_size" not in config_dict:
            config_dict = config_dict | {"block_size": int(published[1])}
        return super().from_dict(config_dict, **kwargs)

    def to_diff_dict(self) -> dict[str, Any]:
        """Return what `config.json` holds: the published fields. `to_dict` keeps those of transformers."""
        self._check()
        saved = super().to_diff_dict()
        rope: dict[str, Any] = dict(self.rope_parameters or {})
        saved["rope_theta"] = rope.pop("rope_theta", self.default_theta)
        saved["rope_scaling"] = None if rope.get("rope_type", "default") == "default" else rope
        if "dtype" in saved:
            saved["torch_dtype"] = saved.pop("dtype")
        for field in UNPUBLISHED_FIELDS:
            saved.pop(field, None)
        for field in ("bos_token_id", "pad_token_id"):
            if saved.get(field) is None:
                saved.pop(field, None)
        return saved


class SDARForCausalLM(BlockDiffusionMixin, Qwen3ForCausalLM):  # pyright: ignore[reportIncompatibleMethodOverride]
    r"""
    SDAR for block diffusion, under the names and shapes of the published checkpoints.

    Adapters take Qwen3's module names: `q_proj`, `k_proj`, `v_proj`, `o_proj`, `gate_proj`, `up_proj`, `down_proj`.

    Args:
        config ([`SDARConfig`]):
            Configuration of the model.
    """

    config_class = SDARConfig
    config: SDARConfig  # pyright: ignore[reportIncompatibleVariableOverride]


register_family(FAMILY, SDARConfig, SDARForCausalLM)
