# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Models: importing this package makes transformers' Auto classes load the families it knows."""

from transformers import AutoConfig, AutoModel, AutoModelForCausalLM
from transformers.conversion_mapping import register_checkpoint_conversion_mapping

from .bidirectional import SelectedPositionsMixin
from .families import (
    FAMILIES,
    Family,
    check_vocabulary,
    end_token_ids_of,
    family_of,
    mask_token_id_of,
)
from .llada import LLaDAConfig, LLaDAModelLM, key_renames


def _register() -> None:
    """Tell transformers of our classes and tensor names; again after a reload does no harm."""
    # A class registered from outside transformers wins over a checkpoint's `auto_map`, whatever `trust_remote_code`
    # says: the Auto classes call it "explicit local code" and never fetch the remote file. So nothing needs patching
    # here, and `LLaDAModelLM.from_pretrained` is left to say that the argument had no effect.
    AutoConfig.register(LLaDAConfig.model_type, LLaDAConfig, exist_ok=True)
    # the published auto_map names the model with its head for AutoModel too: scripts read `.logits` from it
    AutoModel.register(LLaDAConfig, LLaDAModelLM, exist_ok=True)
    AutoModelForCausalLM.register(LLaDAConfig, LLaDAModelLM, exist_ok=True)
    register_checkpoint_conversion_mapping(LLaDAConfig.model_type, key_renames(), overwrite=True)


_register()

__all__ = [
    "FAMILIES",
    "Family",
    "LLaDAConfig",
    "LLaDAModelLM",
    "SelectedPositionsMixin",
    "check_vocabulary",
    "end_token_ids_of",
    "family_of",
    "mask_token_id_of",
]
