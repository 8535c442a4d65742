# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""`trl-stabledrl generate`: completions of a checkpoint on the terminal."""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, cast, get_args

import torch
from rich.console import Console
from transformers import AutoModelForCausalLM

from ..core.unmasking import Remasking
from ..inference import generate, sampling_settings
from ..models.facts import load_tokenizer
from ..models.families import family_of
from ..samplers import Rollout, SamplingSettings, SuppressEos
from ..trace import write_trace
from .console import UserError, blamed_on
from .job import read_config, show_help
from .parser import RecipeParser

PROG = "trl-stabledrl generate"
INTRO = """
Complete prompts with a masked diffusion language model.

  trl-stabledrl generate --model_name_or_path outputs/llada_8b_gsm8k --prompt "What is 6 times 7?"

With --trace trace.html a page replays in a browser how the tokens were committed.
"""


@dataclass
class GenerateArguments:
    r"""
    Arguments of the `generate` command: where the model is, and the options of [`trl_stabledrl.generate`].

    Args:
        model_name_or_path (`str`, *optional*):
            Checkpoint or adapter: folder or name on the Hub.
        prompt (`list[str]`, *optional*):
            One or more prompts.
        use_chat_template (`bool`, *optional*, defaults to `True`):
            Send each prompt as a user's message, when the tokenizer has a chat template.
        trace (`str`, *optional*):
            File to write a page to that replays how the tokens were committed.
        device (`str`, *optional*):
            Device of the model. Defaults to a GPU if there is one.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Data type of the weights; `"auto"` is the checkpoint's.

    The others are those of [`trl_stabledrl.generate`].
    """

    model_name_or_path: str | None = field(default=None, metadata={"help": "Checkpoint: folder or name on the Hub."})
    prompt: list[str] | None = field(default=None, metadata={"help": "One or more prompts."})
    use_chat_template: bool = field(
        default=True,
        metadata={"help": "Send each prompt as a user's message, when the tokenizer has a chat template."},
    )
    trace: str | None = field(
        default=None, metadata={"help": "HTML file that replays in a browser how the tokens were committed."}
    )
    max_completion_length: int = field(default=256, metadata={"help": "Tokens of the window."})
    block_length: int | None = field(default=None, metadata={"help": "Tokens per block. Defaults to the family's."})
    num_denoising_steps: int | None = field(
        default=None, metadata={"help": "Denoising steps per block. Defaults to the family's."}
    )
    temperature: float = field(default=0.0, metadata={"help": "0 is greedy."})
    top_k: int = field(default=0, metadata={"help": "Keep only the most likely tokens; 0 keeps all."})
    top_p: float = field(default=1.0, metadata={"help": "Keep the most likely tokens up to this probability."})
    remasking: str = field(
        default="low_confidence",
        metadata={"help": "Which predictions are committed first.", "choices": [*get_args(Remasking)]},
    )
    confidence_threshold: float | None = field(
        default=None, metadata={"help": "Commit every token at least this confident instead of an even share."}
    )
    suppress_eos: str | None = field(
        default=None,
        metadata={
            "help": "Never sample end tokens, or commit them last in their block.",
            "choices": [*get_args(SuppressEos)],
        },
    )
    guidance_scale: float = field(default=0.0, metadata={"help": "Strength of classifier-free guidance."})
    batch_size: int = field(default=8, metadata={"help": "Prompts per batch."})
    seed: int = field(default=0, metadata={"help": "Seed of the rows' own generators."})
    show_progress: bool = field(default=True, metadata={"help": "Show a bar when it takes more than a few seconds."})
    device: str | None = field(default=None, metadata={"help": "Defaults to a GPU if there is one."})
    dtype: str = field(
        default="auto",
        metadata={"help": "Data type of the weights.", "choices": ["auto", "bfloat16", "float16", "float32"]},
    )


_LOADING = ("model_name_or_path", "prompt", "use_chat_template", "trace", "device", "dtype")


def run(argv: Sequence[str]) -> int:
    """
    Print one completion per prompt.

    Args:
        argv (`Sequence[str]`):
            Arguments of the command.

    Returns:
        `int`:
            Exit status.
    """
    parser = RecipeParser((GenerateArguments,), prog=PROG)
    names = list(parser.hints)
    groups: list[tuple[str, type, Sequence[str]]] = [("Options", GenerateArguments, names)]
    if show_help(parser, argv, intro=INTRO, groups=groups):
        return 0
    (arguments,) = parser.parse(argv)
    path = arguments.model_name_or_path
    if not path:
        raise UserError("model_name_or_path is missing: name a checkpoint, such as GSAI-ML/LLaDA-8B-Instruct.")
    if not arguments.prompt:
        raise UserError('prompt is missing: --prompt "What is 6 times 7?"')
    if arguments.trace is not None and not Path(arguments.trace).resolve().parent.is_dir():
        raise UserError(
            f"trace={arguments.trace!r} is in a folder that does not exist. Make it, or name another file."
        )
    config, adapter = read_config(path)
    with blamed_on(f"model_name_or_path={path!r}", ValueError, OSError, KeyError):
        family, tokenizer = family_of(config), load_tokenizer(path, adapter, revision=None)
    options = {name: value for name, value in vars(arguments).items() if name not in _LOADING}
    # before the weights are loaded
    sampling_settings(family, **{f.name: options[f.name] for f in fields(SamplingSettings) if f.name in options})
    with blamed_on(f"device={arguments.device!r}", RuntimeError):
        device = torch.device(arguments.device or ("cuda" if torch.cuda.is_available() else "cpu"))
    with blamed_on(f"model_name_or_path={path!r}", ValueError, OSError):
        model = AutoModelForCausalLM.from_pretrained(path, dtype=arguments.dtype)
    model.to(device).eval()  # pyright: ignore[reportArgumentType]  # transformers wraps `to`
    prompts: Any = arguments.prompt
    if tokenizer.chat_template and arguments.use_chat_template:
        prompts = [[{"role": "user", "content": text}] for text in prompts]
    if arguments.trace is None:
        completions = generate(model, tokenizer, prompts, **options)
    else:
        completions, rollouts = generate(model, tokenizer, prompts, return_rollouts=True, **options)
        with blamed_on(f"trace={arguments.trace!r}", OSError):
            write_trace(arguments.trace, model, tokenizer, prompts, cast(list[Rollout], rollouts))
    console = Console(highlight=False)
    for prompt, completion in zip(arguments.prompt, completions, strict=True):
        if len(arguments.prompt) > 1:
            console.print(f"> {prompt}", style="bold cyan", markup=False, soft_wrap=True)
        console.print(completion, markup=False, soft_wrap=True)
    if arguments.trace is not None:  # not among the completions, which may go into a file
        Console(stderr=True, highlight=False).print(f"Trace: {arguments.trace}", markup=False, soft_wrap=True)
    return 0
