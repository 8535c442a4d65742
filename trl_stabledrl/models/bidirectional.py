# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What a masked diffusion model adds to a causal language model's class. Axis letters: see `core/__init__.py`."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers import Cache, DynamicCache, PreTrainedConfig
from transformers.modeling_layers import GradientCheckpointingLayer

from .._compat import CACHE_ARGUMENT, gathered_head
from ..core.attention import (
    ContextAttention,
    Layout,
    check_context_attention,
    clean_layout,
    dense_mask,
    sparse_mask,
)
from .cache import FrozenCache
from .loading import CheckedLoadingMixin


def disable_attention_dropout(model: nn.Module) -> None:
    r"""
    Set the dropout of the attention weights to zero.

    It is a number there and no module, so that TRL's `disable_dropout` does not find it.

    Args:
        model (`nn.Module`):
            A model, wrapped or not, changed in place.
    """
    for module in model.modules():
        settings: dict[str, Any] = module.__dict__
        if "attention_dropout" in settings:  # Llama's, Qwen3's and their kin's attention
            settings["attention_dropout"] = 0.0


@contextmanager
def dense_attention(model: Any) -> Iterator[None]:
    r"""
    Use SDPA in place of FlexAttention while the context is open.

    For rollouts: FlexAttention's kernels are compiled for long sequences of one shape, and a denoising step has a few
    queries and one key more each time.

    Args:
        model ([`~transformers.PreTrainedModel`] or [`~peft.PeftModel`]):
            Model, not wrapped for training.
    """
    if model.config._attn_implementation != "flex_attention":
        yield
        return
    model.set_attn_implementation("sdpa")
    try:
        yield
    finally:
        model.set_attn_implementation("flex_attention")


class SelectedPositionsMixin(CheckedLoadingMixin):
    r"""
    Forward of a bidirectional model that projects only the positions asked for.

    Put it before a `*ForCausalLM` class of transformers. Without `head_fn` the forward is the host's, with three
    differences: position ids are derived from a 2-D attention mask, a 4-D mask must be boolean and is honoured by
    every attention implementation, and `labels` are refused, because the host would shift them.

    The projection happens inside the forward, since only there DDP, FSDP and ZeRO-3 know that the head is used, and
    the head is gathered once, since ranks with different numbers of positions would otherwise run different numbers
    of collectives.
    """

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        if config.to_dict().get("is_causal", True):
            raise ValueError(
                f"{type(config).__name__} does not have is_causal=False, without which {type(self).__name__} would "
                "read from left to right. Give the config class a field `is_causal: bool = False`."
            )
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,  # a tensor or FlexAttention's BlockMask
        position_ids: Tensor | None = None,
        *,  # the hosts put their cache fourth, under a name that changes with the version
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        is_selected: Tensor | None = None,
        head_fn: Callable[[Tensor, Tensor], Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        r"""
        Run the model, and where `head_fn` is given hand it the selected hidden states and the head's weight.

        Args:
            input_ids (`Tensor`, *optional*):
                Token ids, `(B, S)`.
            attention_mask (`Tensor` or `BlockMask`, *optional*):
                `(B, S)` with zeros at padding, or boolean `(B, 1, S, S)` with `True` where a query may attend.
            position_ids (`Tensor`, *optional*):
                `(B, S)`. Counted from the first real token of each row where absent.
            inputs_embeds (`Tensor`, *optional*):
                `(B, S, D)`, in place of `input_ids`.
            labels (`Tensor`, *optional*):
                Refused: the host would shift them by one.
            is_selected (`Tensor`, *optional*):
                Boolean `(B, S)`, the N positions to project. Goes with `head_fn`.
            head_fn (`Callable`, *optional*):
                Called once with `(hidden, weight)` of shapes `(N, D)`, in row-major order, and `(V, D)`. With N = 0
                `hidden` is empty but still part of the graph.

        Returns:
            What `head_fn` returns, or the host's output.
        """
        if labels is not None:
            raise ValueError(
                "labels was given, but a masked diffusion model predicts each position itself and transformers would "
                "shift the labels by one. Leave labels out and score through trl_stabledrl.score or head_fn."
            )
        if (is_selected is None) != (head_fn is None):
            given, absent = ("head_fn", "is_selected") if is_selected is None else ("is_selected", "head_fn")
            raise ValueError(f"{given} was given without {absent}. Pass both, or neither for the plain forward.")
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None:
            raise ValueError("Neither input_ids nor inputs_embeds was given. Pass one of them.")
        if position_ids is None and isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            # the mask is longer than the input where a cache holds earlier tokens
            position_ids = (attention_mask.long().cumsum(dim=-1) - 1).clamp(min=0)[:, -tokens.shape[1] :]
        kwargs |= {
            "input_ids": input_ids,
            "attention_mask": self._honoured_mask(attention_mask, num_rows=len(tokens)),
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if head_fn is None or is_selected is None:
            with self._checkpointed_as_needed(kwargs.get(CACHE_ARGUMENT)):
                return super().forward(**kwargs)

        if is_selected.dtype != torch.bool or is_selected.shape != tokens.shape[:2]:
            raise ValueError(
                f"is_selected has dtype {is_selected.dtype} and shape {tuple(is_selected.shape)}. It must be boolean "
                f"and of the input's shape {tuple(tokens.shape[:2])}."
            )
        head = self.get_output_embeddings()
        if not isinstance(head, nn.Linear) or head.bias is not None:
            raise ValueError(
                f"The vocabulary projection is a {type(head).__name__}, but only a plain Linear without bias can be "
                "read by its weight. Take lm_head out of the adapter's target_modules and modules_to_save."
            )
        kwargs |= {"use_cache": False, "return_dict": True}
        with self._checkpointed_as_needed(kwargs.get(CACHE_ARGUMENT)):
            hidden = self.base_model(**kwargs).last_hidden_state  # (B, S, D)
        weight = head.weight
        if isinstance(weight, DTensor):  # FSDP2, where the head is sharded apart from the root module
            # its own hooks do not run, so the average over ranks and the cast are ours to ask for: by default every
            # rank would keep its shard of its own gradient, as if all ranks had the same rows
            weight = weight.full_tensor(grad_placements=[Partial("avg")] * weight.device_mesh.ndim).to(hidden.dtype)
        # a device_map can leave the last layer and the head on two devices
        hidden = hidden[is_selected.to(hidden.device)].to(weight.device)  # (N, D)
        with gathered_head(weight):
            return head_fn(hidden, weight)

    @contextmanager
    def _checkpointed_as_needed(self, cache: Cache | None) -> Iterator[None]:
        """
        Switch gradient checkpointing off where no gradient is asked for, and keep it from dropping the cache.

        The host drops every cache under checkpointing, with a warning alone, since a replay would add to it again.
        """
        layers = [
            module
            for module in self.modules()
            if isinstance(module, GradientCheckpointingLayer) and module.training and module.gradient_checkpointing
        ]
        if not torch.is_grad_enabled():
            setting, value = "gradient_checkpointing", False
        elif isinstance(cache, FrozenCache):
            setting, value = "_can_checkpoint_with_cache", True
        elif cache is None or not layers:
            yield
            return
        else:
            raise ValueError(
                f"The cache is a {type(cache).__name__}, to which the replay of gradient checkpointing would add the "
                "same positions again. Pass FrozenCache(cache), run under torch.no_grad(), or switch gradient "
                "checkpointing off."
            )
        for layer in layers:
            layer.__dict__[setting] = value
        try:
            yield
        finally:
            for layer in layers:
                layer.__dict__[setting] = not value

    def _honoured_mask(self, attention_mask: Any, *, num_rows: int) -> Any:
        """Bring a mask into the form that this model's attention implementation reads as intended."""
        if not isinstance(attention_mask, Tensor) or attention_mask.ndim == 2:
            return attention_mask
        if attention_mask.ndim != 4 or attention_mask.dtype != torch.bool:
            raise ValueError(
                f"attention_mask has {attention_mask.ndim} axes and dtype {attention_mask.dtype}. Allowed are a 2-D "
                "padding mask and a boolean 4-D mask, True where a query may attend: any other dtype would be added "
                "to the attention scores, where 0 and 1 mask nothing. Pass attention_mask.bool()."
            )
        implementation = self.config._attn_implementation
        if implementation == "sdpa":
            return attention_mask
        if implementation == "flex_attention":  # which reads it row by row, and the first head's alone
            if attention_mask.shape[1] != 1:
                raise ValueError(
                    f"attention_mask has {attention_mask.shape[1]} heads, but flex_attention has one mask for all. "
                    "Load the model with attn_implementation='sdpa'."
                )
            attention_mask = attention_mask.expand(num_rows, -1, -1, -1)
        if implementation in ("eager", "flex_attention"):  # both add a dense mask to the scores
            additive = torch.zeros_like(attention_mask, dtype=self.dtype)
            return additive.masked_fill(~attention_mask, torch.finfo(self.dtype).min)
        raise ValueError(
            f"attn_implementation={implementation!r} cannot take a dense 4-D attention_mask. Load the model with "
            "attn_implementation='sdpa', or pass a 2-D padding mask."
        )

    def generate(self, *args: Any, **kwargs: Any) -> NoReturn:
        """Refuse: the host's decoding goes left to right."""
        raise NotImplementedError(
            f"{type(self).__name__}.generate would decode left to right, which a masked diffusion model was not "
            "trained for. Use trl_stabledrl.generate(model, tokenizer, prompts, ...)."
        )


BLOCK_ATTENTION = ("eager", "sdpa", "flex_attention")
"""Attention implementations that take the mask of block diffusion."""

ATTENTION = (*BLOCK_ATTENTION, "flash_attention_2", "flash_attention_3", "flash_attention_4")
"""Those of Transformers."""


def check_block_attention(config: PreTrainedConfig) -> None:
    r"""
    Raise unless a configuration's layers can attend by blocks.

    Args:
        config ([`~transformers.PreTrainedConfig`]):
            With a `block_size`.
    """
    settings = config.to_dict()
    block_size = settings.get("block_size")
    if type(block_size) is not int or block_size < 1:
        raise ValueError(
            f"block_size is {block_size!r}. It must be a whole number of at least 1, the tokens per block that the "
            "model was trained with: 4 to 64 in published checkpoints."
        )
    others = sorted({kind for kind in settings.get("layer_types") or () if kind != "full_attention"})
    if others:
        raise ValueError(
            f"layer_types has {', '.join(map(repr, others))}, but block diffusion needs layers that see every block "
            "before theirs. Only 'full_attention' is allowed: set use_sliding_window to false and remove layer_types."
        )
    _check_implementation(config)


def _check_implementation(config: PreTrainedConfig) -> None:
    implementation = config._attn_implementation
    if implementation not in (None, *BLOCK_ATTENTION):
        raise ValueError(
            f"attn_implementation={implementation!r} cannot attend by blocks. Use 'sdpa' on any device, "
            "'flex_attention' on a GPU, or 'eager'."
        )


class BlockDiffusionMixin(SelectedPositionsMixin):
    r"""
    Forward of a block diffusion model: blocks see themselves both ways, and the blocks before them.

    Put it before a `*ForCausalLM` class of transformers whose config has a `block_size`. A 2-D attention mask, or
    none, gives block-causal attention with blocks counted from the first real token of each row. `layout` says of
    every position whether it is clean or which noised copy it belongs to, so that many noised copies share one clean
    text in one pass. With a cache, mask and layout cover the cached positions too. The cache that is passed grows in
    place; none is made where none is passed.
    """

    def __init__(self, config: PreTrainedConfig, *args: Any, **kwargs: Any):
        check_block_attention(config)
        super().__init__(config, *args, **kwargs)

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Any = None,
        position_ids: Tensor | None = None,
        *,
        inputs_embeds: Tensor | None = None,
        layout: Layout | None = None,
        context_attention: ContextAttention = "block_causal",
        num_detached: int = 0,
        past_key_values: Cache | None = None,
        use_cache: bool = False,
        **kwargs: Any,
    ) -> Any:
        r"""
        Run the model; see [`SelectedPositionsMixin.forward`] for what is not described here.

        Args:
            input_ids (`Tensor`, *optional*):
                Token ids, `(B, Q)`.
            attention_mask (`Tensor` or `BlockMask`, *optional*):
                `(B, L)` with zeros at padding, `L` the cached positions and the `Q` of the input, or boolean
                `(B, 1, Q, L)`, which is taken as it is.
            position_ids (`Tensor`, *optional*):
                `(B, Q)`. By default counted from the first real token of each row.
            inputs_embeds (`Tensor`, *optional*):
                `(B, Q, D)`, in place of `input_ids`.
            layout ([`~core.attention.Layout`], *optional*):
                Of all `L` positions, in place of `attention_mask`.
            context_attention (`str`, *optional*, defaults to `"block_causal"`):
                See [`~core.attention.may_attend`].
            num_detached (`int`, *optional*, defaults to `0`):
                Positions at the start, none of them selected, whose keys and values get no gradient: they are run
                first, without a graph. Goes with `layout`.
            past_key_values ([`~transformers.Cache`], *optional*):
                Keys and values of earlier positions, to which those of the input are added, unless it is a
                [`FrozenCache`]. Training with gradient checkpointing takes none but that.
            use_cache (`bool`, *optional*, defaults to `False`):
                Whether to return the cache too, and to make one where none is passed.
        """
        _check_implementation(self.config)  # again: set_attn_implementation may have changed it
        check_context_attention(context_attention)
        tokens = inputs_embeds if input_ids is None else input_ids
        if tokens is None:
            raise ValueError("Neither input_ids nor inputs_embeds was given. Pass one of them.")
        if num_detached > 0:
            if layout is None or input_ids is None or past_key_values is not None:
                raise ValueError(
                    f"num_detached={num_detached} needs input_ids and their layout, and no other cache. Pass these."
                )
            past_key_values = self._detached_context(input_ids[:, :num_detached], layout, context_attention)
            input_ids = input_ids[:, num_detached:]
            if kwargs.get("is_selected") is not None:
                kwargs["is_selected"] = kwargs["is_selected"][:, num_detached:]
            tokens = input_ids
        num_queries = tokens.shape[1]
        num_keys = num_queries + (0 if past_key_values is None else past_key_values.get_seq_length())
        if layout is not None:
            if attention_mask is not None:
                raise ValueError("layout and attention_mask were both given. A layout knows the padding: pass one.")
        elif attention_mask is None:
            layout = clean_layout(torch.ones(len(tokens), num_keys, dtype=torch.bool, device=tokens.device))
        elif isinstance(attention_mask, Tensor) and attention_mask.ndim == 2:
            if attention_mask.shape[1] != num_keys:
                raise ValueError(
                    f"attention_mask has {attention_mask.shape[1]} positions, but the cache and the input have "
                    f"{num_keys} together. Pass the mask of all of them."
                )
            layout = clean_layout(attention_mask.bool())
        if layout is None and context_attention != "block_causal":
            raise ValueError(
                f"context_attention={context_attention!r} was given with a mask of queries and keys, which says it "
                "all. Pass a layout or a 2-D attention_mask, or leave context_attention out."
            )
        if layout is not None:
            attention_mask = self._staircase_mask(layout, num_queries, context_attention)
            position_ids = layout.last(num_queries).position if position_ids is None else position_ids
        return super().forward(
            input_ids,
            attention_mask,
            position_ids,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache,
            **{CACHE_ARGUMENT: past_key_values},
            **kwargs,
        )

    def _staircase_mask(self, layout: Layout, num_queries: int, context_attention: ContextAttention) -> Any:
        """Tiles for FlexAttention, and a boolean mask for the others."""
        build = sparse_mask if self.config._attn_implementation == "flex_attention" else dense_mask
        return build(
            layout,
            num_queries=num_queries,
            block_length=self.config.block_size,
            context_attention=context_attention,
        )

    def _detached_context(self, input_ids: Tensor, layout: Layout, context_attention: ContextAttention) -> FrozenCache:
        """Keys and values of the first positions, computed without a graph and without the head."""
        context = Layout(*(part[:, : input_ids.shape[1]] for part in layout))
        cache = DynamicCache()
        with torch.no_grad(), self._checkpointed_as_needed(cache):
            self.base_model(
                input_ids=input_ids,
                attention_mask=self._honoured_mask(
                    self._staircase_mask(context, input_ids.shape[1], context_attention), num_rows=len(input_ids)
                ),
                position_ids=context.position,
                use_cache=False,
                **{CACHE_ARGUMENT: cache},
            )
        return FrozenCache(cache)
