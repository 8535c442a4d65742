# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""Loading that raises where transformers would only warn."""

from typing import Any

from torch import Tensor
from transformers import PreTrainedModel
from transformers.conversion_mapping import get_checkpoint_conversion_mapping
from transformers.utils import logging

logger = logging.get_logger(__name__)


class CheckedLoadingMixin(PreTrainedModel):
    """Loading of a model whose checkpoints may bear published names, and may hold remote code that is not run."""

    @classmethod
    def from_pretrained(
        cls, pretrained_model_name_or_path: Any, *args: Any, ignore_mismatched_sizes: bool = False, **kwargs: Any
    ) -> Any:
        r"""
        Load as transformers does, and raise where it would only warn about tensors that do not fit the config.

        Args:
            pretrained_model_name_or_path (`str` or `os.PathLike`):
                Folder or name on the Hub.
            ignore_mismatched_sizes (`bool`, *optional*, defaults to `False`):
                Whether tensors of another shape, and absent ones, are replaced by fresh random ones.

        Returns:
            [`~transformers.PreTrainedModel`]:
                The model, with the loading report where `output_loading_info=True`.
        """
        if kwargs.get("trust_remote_code"):
            logger.warning_once(
                f"trust_remote_code=True was ignored: {cls.__name__} is a registered class, no remote code is run."
            )
        with_report = kwargs.pop("output_loading_info", False)
        # transformers names the two shapes in a log record alone; with this flag it reports them to us instead
        loaded: Any = super().from_pretrained(
            pretrained_model_name_or_path, *args, ignore_mismatched_sizes=True, output_loading_info=True, **kwargs
        )
        model, report = loaded
        if not ignore_mismatched_sizes:
            for name, in_checkpoint, in_model in report["mismatched_keys"]:
                raise ValueError(
                    f"{name} has shape {tuple(in_checkpoint)} in {pretrained_model_name_or_path} and "
                    f"{tuple(in_model)} by its config. Correct vocab_size or the sizes in config.json."
                )
            if report["missing_keys"]:
                raise ValueError(
                    f"{pretrained_model_name_or_path} lacks the tensors of {sorted(report['missing_keys'])}, which "
                    "would be left random. Check that all weight files are there and bear the published names."
                )
        return (model, report) if with_report else model

    def load_state_dict(self, state_dict: Any, strict: bool = True, assign: bool = False) -> Any:
        r"""
        Load tensors under the host's or the published names.

        `Trainer` resumes by reading the weight file itself and loading it with `strict=False`: without the renames it
        would find none of the tensors it saved and go on with the initial weights.

        Args:
            state_dict (`Mapping[str, Tensor]`):
                Tensors by name.
            strict (`bool`, *optional*, defaults to `True`):
                Whether absent and unknown names raise.
            assign (`bool`, *optional*, defaults to `False`):
                Whether to take the tensors themselves instead of copying their values.

        Returns:
            `NamedTuple`:
                The absent and the unknown names.
        """
        renamed: dict[str, Tensor] = {}
        renames = get_checkpoint_conversion_mapping(self.config.model_type)
        for name, tensor in state_dict.items():
            for rename in renames or ():
                name, _ = rename.rename_source_key(name)
            renamed[name] = tensor
        return super().load_state_dict(renamed, strict=strict, assign=assign)
