# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl merge`: a LoRA adapter and its base model as one whole checkpoint."""

import shutil
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from rich.console import Console
from transformers import AutoModelForCausalLM, PreTrainedConfig

from ..models.adapters import Adapter, adapter_at, check_adapter_tensors, check_peft_config
from ..models.facts import load_tokenizer
from ..models.families import check_vocabulary, family_of
from .console import UserError, blamed_on, checking
from .job import read_config, show_help
from .launch import require
from .parser import RecipeParser

PROG = "trl-stabledrl merge"
INTRO = """
Merge a LoRA adapter into its base model and save a whole checkpoint, with tokenizer and chat template.

  trl-stabledrl merge --adapter outputs/llada_8b_gsm8k_lora --output_dir outputs/merged

The checkpoint has the published names of tensors and fields. It is made on the CPU, in the memory of one model.
"""


@dataclass
class MergeArguments:
    r"""
    Arguments of the `merge` command.

    Args:
        adapter (`str`, *optional*):
            Adapter: folder, such as a checkpoint of a LoRA run, or name on the Hub.
        output_dir (`str`, *optional*):
            Folder of the merged checkpoint; must be new or empty.
        model_name_or_path (`str`, *optional*):
            Base model. Defaults to the one that the adapter names.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Data type of the merged weights; `"auto"` is the base checkpoint's.
    """

    adapter: str | None = field(
        default=None, metadata={"help": "Adapter: folder, such as a checkpoint of a LoRA run, or name on the Hub."}
    )
    output_dir: str | None = field(
        default=None, metadata={"help": "Folder of the merged checkpoint; must be new or empty."}
    )
    model_name_or_path: str | None = field(
        default=None, metadata={"help": "Base model. Defaults to the one that the adapter names."}
    )
    dtype: str = field(
        default="auto",
        metadata={
            "help": "Data type of the merged weights; auto is the base checkpoint's.",
            "choices": ["auto", "bfloat16", "float16", "float32"],
        },
    )


def run(argv: Sequence[str]) -> int:
    """
    Merge and save.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    parser = RecipeParser((MergeArguments,), prog=PROG)
    groups: list[tuple[str, type, Sequence[str]]] = [("Options", MergeArguments, list(parser.hints))]
    if show_help(parser, argv, intro=INTRO, groups=groups):
        return 0
    (arguments,) = parser.parse(argv)
    with checking():
        folder = _new_folder(arguments.output_dir)
        adapter = _find_adapter(arguments.adapter)
        base = arguments.model_name_or_path or adapter.base
        revision = None if arguments.model_name_or_path else adapter.base_revision
        config = _look_at_base(base, adapter, revision=revision)
        with blamed_on(f"tokenizer of {adapter.path}", ValueError, OSError, KeyError, TypeError):
            tokenizer = load_tokenizer(adapter.path, Adapter(adapter.path, base, revision), revision=None)
        check_vocabulary(config, tokenizer, config.to_dict()["vocab_size"])
    from peft import PeftModel

    with blamed_on(f"model_name_or_path={base!r}", ValueError, OSError):
        model: Any = AutoModelForCausalLM.from_pretrained(
            base, revision=revision or "main", dtype=arguments.dtype, low_cpu_mem_usage=True
        )
    # safe_merge: a merged weight that is not finite raises
    with blamed_on(f"adapter={adapter.path!r}", ValueError):
        merged: Any = PeftModel.from_pretrained(model, adapter.path).merge_and_unload(safe_merge=True)
    merged.save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    card = Path(adapter.path, "README.md")
    if card.is_file():  # with the method's citation
        shutil.copyfile(card, folder / card.name)
    text = f"Merged {adapter.path} into {base}, {merged.dtype}: {folder}".replace("torch.", "")
    Console(highlight=False).print(text, markup=False, soft_wrap=True)
    return 0


def _new_folder(output_dir: str | None) -> Path:
    if not output_dir:
        raise UserError("output_dir is missing: name a new folder for the merged checkpoint.")
    folder = Path(output_dir)
    if folder.exists() and not folder.is_dir():
        raise UserError(f"output_dir={output_dir!r} is a file. Choose another output_dir.")
    if folder.is_dir() and any(folder.iterdir()):
        first = sorted(entry.name for entry in folder.iterdir())[0]
        raise UserError(
            f"output_dir={output_dir!r} is not empty, it holds {first}. Nothing was touched. Choose another "
            "output_dir."
        )
    return folder


def _find_adapter(path: str | None) -> Adapter:
    if not path:
        raise UserError("adapter is missing: name the folder of one, such as --adapter outputs/llada_8b_gsm8k_lora.")
    require("peft", extra="peft", used_by="merge")
    with blamed_on(f"adapter={path!r}", ValueError, OSError):
        adapter = adapter_at(path)
    if adapter is None:
        is_model = (Path(path) / "config.json").is_file()
        raise UserError(
            f"adapter={path!r} is "
            + ("a whole model already" if is_model else "no adapter: it has no adapter_config.json")
            + ". Name the folder of a LoRA run or of one of its checkpoints."
        )
    return adapter


def _look_at_base(base: str, adapter: Adapter, *, revision: str | None) -> PreTrainedConfig:
    """Raise unless the adapter's tensors are those that this model needs; no weight is loaded."""
    from peft import PeftConfig

    config, other = read_config(base, revision=revision)
    if other is not None:
        raise UserError(
            f"model_name_or_path={base!r} is an adapter itself, of {other.base}. Merge it first, and name the result."
        )
    family_of(config)
    with blamed_on(f"adapter={adapter.path!r}", ValueError, OSError, KeyError, TypeError):
        peft_config = PeftConfig.from_pretrained(adapter.path)
    check_peft_config(peft_config, config)
    with blamed_on(f"adapter={adapter.path!r}", ValueError, OSError, KeyError):
        check_adapter_tensors(adapter.path, peft_config, config)
    return config
