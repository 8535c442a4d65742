# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
"""
Masked diffusion models in lm-evaluation-harness, under the model type `trl_stabledrl`.

The harness finds a model type only once its module is imported. This module's command imports it and hands over to the
harness's own command line, whose arguments it takes:

    python -m trl_stabledrl.lm_eval_adapter --model trl_stabledrl --model_args pretrained=FOLDER --tasks gsm8k

From Python, import this module before calling `lm_eval.simple_evaluate(model="trl_stabledrl", ...)`.
"""

import hashlib
import json
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from accelerate import PartialState
from accelerate.utils import gather, gather_object
from tqdm.auto import tqdm
from transformers import AutoModelForCausalLM
from transformers.utils import logging

from . import __version__
from .core.masking import MaskLaw, McSampling
from .core.unmasking import Remasking
from .decoding import sampling_settings
from .inference import generate, score
from .models.facts import model_facts
from .samplers import SuppressEos

try:
    from lm_eval.api.model import TemplateLM  # pyright: ignore[reportMissingImports]
    from lm_eval.api.registry import register_model  # pyright: ignore[reportMissingImports]
    from lm_eval.utils import (  # pyright: ignore[reportMissingImports]
        get_rolling_token_windows,
        make_disjoint_window,
    )
except ModuleNotFoundError as error:
    if (error.name or "").partition(".")[0] != "lm_eval":
        raise
    _MESSAGE = "`trl_stabledrl.lm_eval_adapter` needs lm-eval. Install it with `pip install 'trl-stabledrl[eval]'`."
    if __name__ == "__main__":
        raise SystemExit(_MESSAGE) from None
    raise ImportError(_MESSAGE) from None

logger = logging.get_logger(__name__)

_LENGTHS = ("max_gen_toks", "max_new_tokens", "max_tokens", "max_completion_tokens")
_SAMPLING = ("do_sample", "temperature", "top_k", "top_p")
_DECODING = (
    "block_length",
    "num_denoising_steps",
    "remasking",
    "confidence_threshold",
    "suppress_eos",
    "guidance_scale",
    "seed",
)


class DiffusionLM(TemplateLM):
    r"""
    A masked diffusion model as lm-evaluation-harness sees one.

    Generation tasks are decoded by [`trl_stabledrl.generate`] in a window of `max_gen_toks` tokens and cut at the
    first stop string. Log-likelihoods are evidence lower bounds from [`trl_stabledrl.score`]: below the likelihood,
    and noisy. They compare with each other, as multiple choice does, and not with an autoregressive model's.

    A request's draws are keyed by its own tokens, so that results do not depend on `batch_size`, `--limit`, the order
    of the requests or the number of processes. The choices of a question share their masks, which takes noise out of
    their differences.

    Args:
        pretrained (`str`):
            Checkpoint or adapter: folder or name on the Hub.
        revision (`str`, *optional*):
            Revision on the Hub.
        dtype (`str`, *optional*, defaults to `"auto"`):
            Data type of the weights; `"auto"` is the checkpoint's.
        device (`str`, *optional*):
            Device of the model. Defaults to a GPU if there is one; every process has its own.
        batch_size (`int`, *optional*, defaults to `8`):
            Requests per forward pass. The harness's command passes 1 unless told otherwise.
        max_batch_size (`int`, *optional*):
            Not honoured, since there is no automatic batch size.
        max_completion_length (`int`, *optional*, defaults to `256`):
            Tokens to generate where a task does not say.
        block_length (`int`, *optional*):
            Tokens per block. Defaults to the family's. This and the next six are defaults of a task's
            `generation_kwargs` and of `--gen_kwargs`.
        num_denoising_steps (`int`, *optional*):
            Steps per block. Defaults to the family's.
        remasking (`str`, *optional*, defaults to `"low_confidence"`):
            Which predictions are committed first.
        confidence_threshold (`float`, *optional*):
            Commit every token at least this confident instead of an even share per step.
        suppress_eos (`str`, *optional*):
            `"sampling"` or `"early_commit"`.
        guidance_scale (`float`, *optional*, defaults to `0.0`):
            Strength of classifier-free guidance.
        seed (`int`, *optional*, defaults to `0`):
            Seed of sampling and of the likelihood's masks.
        num_mc_samples (`int`, *optional*, defaults to `32`):
            Draws per log-likelihood.
        mask_law (`str`, *optional*):
            Law of the masks, as in [`trl_stabledrl.score`].
        mc_sampling (`str`, *optional*):
            How the draws relate, as in [`trl_stabledrl.score`].
        check_greedy (`bool`, *optional*, defaults to `True`):
            Whether `is_greedy` of a log-likelihood is found: true where decoding as many tokens as the continuation
            has, at temperature 0 and with the settings above, gives just these tokens. Costs about as many forward
            passes as a continuation has tokens; `False` says so of none, for tasks that do not ask, as multiple
            choice.
    """

    def __init__(
        self,
        pretrained: str,
        *,
        revision: str | None = None,
        dtype: str = "auto",
        device: str | None = None,
        batch_size: int | str = 8,
        max_batch_size: int | None = None,
        max_completion_length: int = 256,
        block_length: int | None = None,
        num_denoising_steps: int | None = None,
        remasking: Remasking = "low_confidence",
        confidence_threshold: float | None = None,
        suppress_eos: SuppressEos | None = None,
        guidance_scale: float = 0.0,
        seed: int = 0,
        num_mc_samples: int = 32,
        mask_law: MaskLaw | None = None,
        mc_sampling: McSampling | None = None,
        check_greedy: bool = True,
    ) -> None:
        super().__init__()
        if max_batch_size is not None:
            raise ValueError(f"max_batch_size={max_batch_size} is not honoured. Set batch_size alone.")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise ValueError(f"batch_size={batch_size!r} must be an integer >= 1: none is found automatically.")
        self.batch_size = int(batch_size)
        self.max_completion_length = max_completion_length
        self.decoding: dict[str, Any] = {
            "block_length": block_length,
            "num_denoising_steps": num_denoising_steps,
            "remasking": remasking,
            "confidence_threshold": confidence_threshold,
            "suppress_eos": suppress_eos,
            "guidance_scale": guidance_scale,
            "seed": seed,
        }
        self.likelihood: dict[str, Any] = {
            "mask_law": mask_law,
            "mc_sampling": mc_sampling,
            "num_mc_samples": num_mc_samples,
            "seed": seed,
        }
        self.check_greedy = check_greedy
        self.facts = model_facts(pretrained, revision=revision)
        self.tokenizer: Any = self.facts.tokenizer
        self.pretrained, self.revision = pretrained, revision
        # before the weights are loaded
        self._check_decoding({**self.decoding, "max_completion_length": max_completion_length})
        if mask_law is not None:
            self.facts.family.check_mask_law(mask_law)

        state = PartialState(cpu=device is not None and torch.device(device).type == "cpu")
        self._rank, self._world_size, self._barrier = state.process_index, state.num_processes, state.wait_for_everyone
        own = torch.device(str(state.device))
        if self._world_size > 1 and device is not None and torch.device(device) not in (own, torch.device(own.type)):
            raise ValueError(f"device={device!r}, but this process has {str(own)!r}. Leave device out.")
        self._device = own if device is None or self._world_size > 1 else torch.device(device)
        where: dict[str, Any] = {} if revision is None else {"revision": revision}
        model: Any = AutoModelForCausalLM.from_pretrained(pretrained, dtype=dtype, **where)
        self.model = model.to(self._device).eval()

    def all_gather(self, tensor: Any) -> Any:
        """Tensors of every process, one behind the other."""
        return gather(tensor) if self._world_size > 1 else tensor

    def gather_object(self, obj: Any, dst: int = 0) -> Any:
        """Objects of every process, on process `dst` alone."""
        found: Any = gather_object([obj]) if self._world_size > 1 else [obj]
        return found if self._rank == dst else None

    def barrier(self) -> None:
        """Wait for every process."""
        self._barrier()

    @property
    def max_length(self) -> int:
        """Tokens of prompt and completion together that the model was made for."""
        return self.facts.config.max_position_embeddings

    @property
    def eot_token_id(self) -> int:
        """Token that ends a text."""
        end = self.tokenizer.eos_token_id
        return self.facts.end_token_ids[0] if end is None else end

    @property
    def prefix_token_id(self) -> int:
        """Context of texts that have none: the token that begins a text, or else the one that ends the text before."""
        begin = self.tokenizer.bos_token_id
        return self.eot_token_id if begin is None else begin

    @property
    def tokenizer_name(self) -> str:
        """Name under which the harness caches requests that went through the chat template."""
        return self.tokenizer.name_or_path.replace("/", "__")

    def get_model_info(self) -> dict[str, Any]:
        """Everything that produced the results, for the harness's record."""
        return {
            "family": self.facts.family.name,
            "model_num_parameters": self.model.num_parameters(),
            "model_dtype": str(self.model.dtype),
            "model_revision": self.revision,
            "trl_stabledrl_version": __version__,
            "num_processes": self._world_size,
            "max_completion_length": self.max_completion_length,
            **self.decoding,
            **self.likelihood,
            "check_greedy": self.check_greedy,
        }

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """Tokenize, without a second beginning where the chat template has put one."""
        if add_special_tokens is None:
            begin = self.tokenizer.bos_token
            add_special_tokens = not (begin and string.startswith(str(begin)))
        return self.tokenizer(text=string, add_special_tokens=add_special_tokens)["input_ids"]

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        """Turn a conversation into the text the model was trained on."""
        if not self.tokenizer.chat_template:
            raise ValueError(f"{self.pretrained!r} has no chat template. Leave out apply_chat_template.")
        return self.tokenizer.apply_chat_template(
            chat_history,
            tokenize=False,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=not add_generation_prompt,
        )

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """
        Complete contexts and cut the completions at the first stop string.

        Args:
            requests (`Sequence[lm_eval.api.instance.Instance]`):
                Each with the arguments `(context, generation_kwargs)`.
            disable_tqdm (`bool`, *optional*, defaults to `False`):
                Whether to show no bar.

        Returns:
            `list[str]`
        """
        texts = [""] * len(requests)
        prompts: list[list[int]] = []
        stops: list[list[str]] = []
        row_index: list[int] = []
        places: dict[str, list[int]] = defaultdict(list)  # by options
        num_asked: Counter[str] = Counter()
        for place, request in enumerate(requests):
            context, gen_kwargs = request.args
            options, until = self._options(gen_kwargs)
            prompt = self.tok_encode(context) or [self.prefix_token_id]
            prompts.append(self._shortened(prompt, num_behind=options["max_completion_length"]))
            stops.append(until)
            name = json.dumps(options, sort_keys=True)
            question = json.dumps([prompts[-1], name])
            row_index.append(request_key(prompts[-1], num_asked[question]))  # a repeated request is another sample
            num_asked[question] += 1
            places[name].append(place)
        with self._bar(len(requests), "generate_until", disable_tqdm) as bar:
            for name, group in places.items():
                options = json.loads(name)
                for chunk in self._chunks(group, [len(prompt) for prompt in prompts]):
                    found = self._generated([prompts[i] for i in chunk], [row_index[i] for i in chunk], options)
                    for place, ids in zip(chunk, found, strict=True):
                        texts[place] = self._cut(ids, stops[place])
                        self.cache_hook.add_partial("generate_until", requests[place].args, texts[place])
                    bar.update(len(chunk))
        return texts

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """
        Bound the log-likelihood of whole texts.

        A text within `max_length` is one bound, given the token that begins a text. A longer one is cut into windows
        of that length, each scored given the token before it, the last given as many as fit: the sum bounds the
        product of these likelihoods.

        Args:
            requests (`Sequence[lm_eval.api.instance.Instance]`):
                Each with the arguments `(text,)`.
            disable_tqdm (`bool`, *optional*, defaults to `False`):
                Whether to show no bar.

        Returns:
            `list[float]`:
                In nats.
        """
        pairs: list[tuple[list[int], list[int]]] = []
        owners: list[int] = []
        for place, request in enumerate(requests):
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length - 1,  # the context's token takes a place too
                context_len=1,
            )
            pairs.extend(make_disjoint_window(window) for window in windows)
            owners.extend([place] * (len(pairs) - len(owners)))
        totals = [0.0] * len(requests)
        keys = [request_key([*context, *continuation]) for context, continuation in pairs]
        with self._bar(len(pairs), "loglikelihood_rolling", disable_tqdm) as bar:
            for chunk in self._chunks(range(len(pairs)), [len(context) + len(rest) for context, rest in pairs]):
                elbos = self._elbos([pairs[i] for i in chunk], [keys[i] for i in chunk])
                for place, elbo in zip(chunk, elbos, strict=True):
                    totals[owners[place]] += elbo
                bar.update(len(chunk))
        for request, total in zip(requests, totals, strict=True):
            self.cache_hook.add_partial("loglikelihood_rolling", request.args, total)
        return totals

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """Bounds of continuations, and whether greedy decoding gives them; called by the host's `loglikelihood`."""
        pairs = [(self._shortened(context, num_behind=len(rest)), rest) for _, context, rest in requests]
        keys = [request_key(context) for context, _ in pairs]
        is_greedy = self._is_greedy(pairs, keys, disable_tqdm) if self.check_greedy else [False] * len(pairs)
        elbos = [0.0] * len(pairs)
        with self._bar(len(pairs), "loglikelihood", disable_tqdm) as bar:
            for chunk in self._chunks(range(len(pairs)), [len(context) + len(rest) for context, rest in pairs]):
                found = self._elbos([pairs[i] for i in chunk], [keys[i] for i in chunk])
                for place, elbo in zip(chunk, found, strict=True):
                    elbos[place] = elbo
                    self.cache_hook.add_partial("loglikelihood", requests[place][0], (elbo, is_greedy[place]))
                bar.update(len(chunk))
        return list(zip(elbos, is_greedy, strict=True))

    def _is_greedy(
        self, pairs: Sequence[tuple[list[int], list[int]]], keys: Sequence[int], disable_tqdm: bool
    ) -> list[bool]:
        is_greedy = [False] * len(pairs)
        places: dict[int, list[int]] = defaultdict(list)  # by length: the window is the continuation's
        for place, (_, continuation) in enumerate(pairs):
            places[len(continuation)].append(place)
        with self._bar(len(pairs), "is_greedy", disable_tqdm) as bar:
            for length, group in places.items():
                options = {**self.decoding, "max_completion_length": length, "temperature": 0.0}
                if options["block_length"] is not None and self.facts.family.attention == "full":
                    options["block_length"] = min(options["block_length"], length)
                for chunk in self._chunks(group, [len(context) for context, _ in pairs]):
                    found = self._generated([pairs[i][0] for i in chunk], [keys[i] for i in chunk], options)
                    for place, ids in zip(chunk, found, strict=True):
                        is_greedy[place] = ids == pairs[place][1]
                    bar.update(len(chunk))
        return is_greedy

    def _generated(self, prompts: list[list[int]], row_index: list[int], options: dict[str, Any]) -> list[list[int]]:
        _, rollouts = generate(
            self.model,
            self.tokenizer,
            prompts,
            row_index=row_index,
            batch_size=len(prompts),
            show_progress=False,
            return_rollouts=True,
            **options,
        )
        (rollout,) = rollouts
        assert not isinstance(rollout, str)
        return rollout.completion_ids

    def _elbos(self, pairs: list[tuple[list[int], list[int]]], row_index: list[int]) -> list[float]:
        contexts, continuations = [context for context, _ in pairs], [continuation for _, continuation in pairs]
        found = score(
            self.model,
            self.tokenizer,
            contexts,
            continuations,
            row_index=row_index,
            batch_size=len(pairs),
            block_length=self.decoding["block_length"],
            **self.likelihood,
        )
        return found.elbo.tolist()

    def _options(self, gen_kwargs: dict[str, Any]) -> tuple[dict[str, Any], list[str]]:
        """Options of [`generate`] and the stop strings that a task's `generation_kwargs` ask for."""
        asked = {name: value for name, value in gen_kwargs.items() if value is not None}
        until = asked.pop("until", [])
        lengths = [int(asked.pop(name)) for name in _LENGTHS if name in asked]
        sampling = {name: asked.pop(name) for name in _SAMPLING if name in asked}
        decoding = {name: asked.pop(name) for name in _DECODING if name in asked}
        if asked.pop("num_beams", 1) != 1 or asked:
            known = ", ".join(("until", *_LENGTHS, *_SAMPLING, *_DECODING))
            raise ValueError(f"generation_kwargs={gen_kwargs} ask for what is not honoured. Known are: {known}.")
        is_sampled = sampling.get("do_sample", float(sampling.get("temperature", 0.0)) > 0)
        options: dict[str, Any] = {
            **self.decoding,
            **decoding,
            "max_completion_length": (lengths or [self.max_completion_length])[0],
            "temperature": float(sampling.get("temperature", 1.0)) if is_sampled else 0.0,
            "top_k": int(sampling.get("top_k", 0)) if is_sampled else 0,
            "top_p": float(sampling.get("top_p", 1.0)) if is_sampled else 1.0,
        }
        self._check_decoding(options)
        return options, [until] if isinstance(until, str) else list(until)

    def _check_decoding(self, options: dict[str, Any]) -> None:
        sampling_settings(self.facts.family, **{name: value for name, value in options.items() if name != "seed"})

    def _cut(self, ids: list[int], until: Sequence[str]) -> str:
        """Text up to the first stop string; one that is a special token is no part of the text, but ends it too."""
        special = self.tokenizer.get_added_vocab()
        stop_ids = {special[stop] for stop in until if stop in special}
        length = next((place for place, token in enumerate(ids) if token in stop_ids), len(ids))
        text = self.tokenizer.decode(ids[:length], skip_special_tokens=True)
        for stop in until:
            if stop:
                text = text.partition(stop)[0]
        return text

    def _shortened(self, prompt: list[int], *, num_behind: int) -> list[int]:
        """The end of a prompt that does not fit the model together with what stands behind it."""
        room = self.max_length - num_behind
        if room < 1:
            raise ValueError(
                f"{num_behind} tokens leave no room for a prompt in the model's {self.max_length}. Lower max_gen_toks."
            )
        if len(prompt) > room:
            logger.warning_once(
                f"Prompts longer than {room} tokens lose their beginning, to fit the model's {self.max_length} "
                f"together with {num_behind} behind them. Use fewer examples, or lower max_gen_toks."
            )
        return prompt[-room:]

    def _chunks(self, places: Iterable[int], sizes: Sequence[int]) -> list[list[int]]:
        """Batches of the longest first, so that too large ones fail at once."""
        order = sorted(places, key=lambda place: -sizes[place])
        return [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]

    def _bar(self, total: int, title: str, is_disabled: bool) -> "tqdm[Any]":
        return tqdm(total=total, desc=title, disable=is_disabled or self._rank != 0)


def request_key(ids: Sequence[int], num_before: int = 0) -> int:
    """63 bits that are a function of token ids, and of how often they were asked for before."""
    text = json.dumps([list(ids), num_before])
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:8]) >> 1


register_model("trl_stabledrl")(DiffusionLM)  # a decorator would hide its type

if __name__ == "__main__":
    from lm_eval.__main__ import cli_evaluate  # pyright: ignore[reportMissingImports]

    cli_evaluate()
