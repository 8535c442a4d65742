# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What a masked diffusion model adds to a causal language model's class. Axis letters: see `core/__init__.py`."""

from collections.abc import Callable
from typing import Any, NoReturn

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, Partial
from transformers import PreTrainedModel
from transformers.models.llama.modeling_llama import LlamaAttention

from .._compat import gathered_head


def disable_attention_dropout(model: nn.Module) -> None:
    r"""
    Set the dropout of the attention weights to zero.

    It is a number there and no module, so that TRL's `disable_dropout` does not find it.

    Args:
        model (`nn.Module`):
            A model, wrapped or not, changed in place.
    """
    for module in model.modules():
        if isinstance(module, LlamaAttention):
            module.attention_dropout = 0.0


class SelectedPositionsMixin(PreTrainedModel):
    r"""
    Forward of a bidirectional model that projects only the positions asked for.

    Put it before a `*ForCausalLM` class of transformers. Without `head_fn` the forward is the host's, with three
    differences: position ids are derived from a 2-D attention mask, a 4-D mask must be boolean and is honoured by
    every attention implementation, and `labels` are refused, because the host would shift them.

    The projection happens inside the forward, since only there DDP, FSDP and ZeRO-3 know that the head is used, and
    the head is gathered once, since ranks with different numbers of positions would otherwise run different numbers
    of collectives.
    """

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
            "attention_mask": self._honoured_mask(attention_mask),
            "position_ids": position_ids,
            "inputs_embeds": inputs_embeds,
        }
        if head_fn is None or is_selected is None:
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

    def _honoured_mask(self, attention_mask: Any) -> Any:
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
