# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""What depends on the version of a host library, each entry with the condition that removes it."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate import Accelerator
from accelerate.utils import is_peft_model
from torch import Tensor
from transformers.integrations.deepspeed import is_deepspeed_zero3_enabled
from transformers.modeling_utils import set_zero3_state

CACHE_ARGUMENT = "past_key_values"
"""Argument of a model that takes its cache. Remove when transformers < 5.24 is dropped: from there it is `cache`."""


@contextmanager
def gathered_head(weight: Tensor) -> Iterator[None]:
    r"""
    Hold the whole projection weight in memory while the context is open, also under DeepSpeed ZeRO-3.

    ZeRO-3 leaves a parameter with no elements outside the forward of the module that owns it, and we read the head's
    weight without calling the head. Opening this context is a collective: every rank must do it equally often.

    Remove when `trl.trainer.utils.maybe_gather_lm_head_ctx` becomes public in TRL: then import it from there.

    Args:
        weight (`Tensor`):
            Weight of the vocabulary projection, `(V, D)`.
    """
    if not is_deepspeed_zero3_enabled():
        yield
        return
    # imported here: the models must load without TRL's trainers, which take seconds to import
    from trl.trainer.utils import maybe_gather_lm_head_ctx

    with maybe_gather_lm_head_ctx(weight):  # pyright: ignore[reportArgumentType]  # a plain tensor under FSDP2
        yield


def fused_log_probs(hidden: Tensor, weight: Tensor, targets: Tensor, *, temperature: float) -> tuple[Tensor, Tensor]:
    r"""
    Log-probability of each target and entropy of each distribution, by the kernel behind TRL's fused head.

    The logits are tiles of at most 4096 positions and about [`TILE_NUMBERS`] numbers, statistics are float32, and the
    backward pass recomputes the tiles.

    Remove when the kernel is exported by `trl` itself: then import it from there.

    Args:
        hidden (`Tensor`):
            Hidden states of shape `(N, D)`.
        weight (`Tensor`):
            Weight of the head, `(V, D)`.
        targets (`Tensor`):
            Token at each position, `(N,)`.
        temperature (`float`):
            Temperature the logits are divided by.

    Returns:
        `tuple[Tensor, Tensor]`:
            float32 log-probabilities and entropies of shape `(N,)`, in nats.
    """
    from trl.kernels import ChunkedLogProbFunction

    # without Triton about eight copies of a tile are alive at once
    tile_numbers = TILE_NUMBERS >> 3 if hidden.device.type == "cpu" else TILE_NUMBERS
    tile_width = max(256, min(len(weight), tile_numbers // max(len(hidden), 1)))
    log_probs, entropy, *_ = ChunkedLogProbFunction.apply(
        hidden, weight, None, targets, temperature, tile_width, None, 1.0, ("entropy",)
    )
    return log_probs, entropy


TILE_NUMBERS = 8 << 20
"""Logits held at once while scoring, 32 MB in float32; on a CPU in an eighth of the width, for the copies it makes."""


@contextmanager
def unwrapped_for_generation(model: Any, accelerator: Accelerator, args: Any) -> Iterator[Any]:
    r"""
    Model to sample from: unwrapped, without gradient checkpointing, its ZeRO-3 shards gathered if `args` say so.

    Remove when `trl.models.unwrap_model_for_generation` no longer changes its arguments between minor versions.
    """
    from trl.models import unwrap_model_for_generation

    with (
        unwrap_model_for_generation(
            model,
            accelerator,
            gather_deepspeed3_params=args.ds3_gather_for_generation,
            gradient_checkpointing_kwargs=args.gradient_checkpointing_kwargs,
        ) as unwrapped,
        torch.no_grad(),
    ):
        yield unwrapped


@contextmanager
def shapes_only() -> Iterator[None]:
    r"""
    Make models without storage while the context is open, also once ZeRO-3 is set up.

    There `from_config` would shard what it makes, which is a collective, and initialise numbers that do not exist.

    Remove when Transformers' `from_config` leaves models on the meta device as they are under ZeRO-3.
    """
    with set_zero3_state(), torch.device("meta"):
        yield


def is_reference_active(model: Any) -> bool:
    r"""
    Whether a PEFT model currently computes the reference: adapters off, or the frozen copy that TRL names `ref`.

    Remove when `GRPOTrainer` tells `_get_per_token_logps_and_entropies` which policy it asks for.
    """
    if not is_peft_model(model):
        return False
    from peft import get_model_status

    status = get_model_status(model)
    return status.enabled is False or status.active_adapters == ["ref"]
