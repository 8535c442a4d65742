# SPDX-FileCopyrightText: 2026 The trl_stabledrl authors
# SPDX-License-Identifier: Apache-2.0
# vLLM has an environment of its own (make test-vllm):
# pyright: reportMissingImports=false
"""
vLLM's schedulers with prompts that end anywhere.

A prompt is prefilled up to the border of its last whole block. What is left of it, its tail, is pinned at the start of
the first block that is denoised; the engine counts it among the tokens that the request generates, and nobody else
sees it: it neither stops the request nor leaves the scheduler.
"""

from copy import copy
from typing import Any

from vllm.logger import init_logger
from vllm.v1.core.sched.async_scheduler import AsyncScheduler
from vllm.v1.core.sched.scheduler import Scheduler
from vllm.v1.engine import EngineCoreOutput, EngineCoreOutputs
from vllm.v1.request import Request, RequestStatus
from vllm.v1.utils import ConstantList

from .requests import TAIL, parse_request

logger = init_logger(__name__)


class _BlockScheduling:
    """What both of vLLM's schedulers need for block diffusion."""

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)  # pyright: ignore[reportCallIssue]
        self.block_length: int = vllm_config.diffusion_config.canvas_length
        self.refused: list[Request] = []
        if vllm_config.model_config.max_model_len % self.block_length:
            raise ValueError(
                f"max_model_len={vllm_config.model_config.max_model_len} is not a multiple of the block length, "
                f"{self.block_length}. Name a multiple of it."
            )

    def add_request(self: Any, request: Request) -> None:
        """Queue a request with its prompt cut at a block's border; one that cannot be served ends with an error."""
        if request.request_id in self.requests:
            raise ValueError(f"Request {request.request_id} is streamed in parts, which block diffusion cannot do.")
        try:
            _cut_prompt(request, self.block_length)
        except ValueError as error:
            logger.error("Request %s is refused: %s", request.request_id, error)
            super().add_request(request)  # pyright: ignore[reportAttributeAccessIssue]
            self.finish_requests(request.request_id, RequestStatus.FINISHED_ERROR)
            request.stop_reason = str(error)
            self.refused.append(request)
        else:
            super().add_request(request)  # pyright: ignore[reportAttributeAccessIssue]

    def update_from_output(self: Any, *args: Any, **kwargs: Any) -> dict[int, EngineCoreOutputs]:
        """Report the refused requests with the others' tokens."""
        outputs = super().update_from_output(*args, **kwargs)  # pyright: ignore[reportAttributeAccessIssue]
        for request in self.refused:
            found = outputs.setdefault(request.client_index, EngineCoreOutputs())
            found.outputs.append(
                EngineCoreOutput(
                    request_id=request.request_id,
                    new_token_ids=[],
                    finish_reason=request.get_finished_reason(),
                    stop_reason=request.stop_reason,
                )
            )
        self.refused.clear()
        return outputs

    def _update_request_with_output(
        self: Any, request: Request, new_token_ids: list[int], *args: Any, **kwargs: Any
    ) -> tuple[list[int], bool]:
        update = super()._update_request_with_output  # pyright: ignore[reportAttributeAccessIssue]
        num_pinned = len(_tail_of(request)) - request.num_output_tokens
        if num_pinned <= 0:
            return update(request, new_token_ids, *args, **kwargs)
        request.append_output_token_ids(new_token_ids[:num_pinned])
        is_stale = args[0] if args else kwargs.get("is_stale", False)
        if isinstance(self, AsyncScheduler) and not is_stale:
            request.num_output_placeholders -= num_pinned
        return update(request, new_token_ids[num_pinned:], *args, **kwargs)


class SyncBlockScheduler(_BlockScheduling, Scheduler):
    """One step at a time."""


class AsyncBlockScheduler(_BlockScheduling, AsyncScheduler):
    """The next step is prepared while the device works on this one."""


class BlockScheduler:
    """Makes the scheduler that the resolved configuration asks for: the wrong one would never finish a request."""

    def __new__(cls, vllm_config: Any, *args: Any, **kwargs: Any) -> Any:
        """Return a [`SyncBlockScheduler`] or [`AsyncBlockScheduler`]."""
        is_async = vllm_config.scheduler_config.async_scheduling
        return (AsyncBlockScheduler if is_async else SyncBlockScheduler)(vllm_config, *args, **kwargs)


def _tail_of(request: Request) -> list[int]:
    params: Any = request.sampling_params
    return (params.extra_args or {}).get(TAIL, [])


def _cut_prompt(request: Any, block_length: int) -> None:
    params = request.sampling_params
    if params is None or request.prompt_token_ids is None or request.mm_features:
        raise ValueError("Only completions of token ids are served: no pooling, prompt embeddings, images or audio.")
    parse_request(params, block_length=block_length, request_id=request.request_id)
    length = len(request.prompt_token_ids)
    start = length - length % block_length  # of the first block to denoise
    if start == 0:
        raise ValueError(
            f"The prompt has {length} tokens, less than a block of {block_length}: the engine has nothing to prefill. "
            "Lengthen it, with a chat template for example; the trainer decodes such prompts with transformers."
        )
    tail = list(request.prompt_token_ids[start:])
    # a list of its own: a completion's parameters are shared with the other completions of its prompt
    request.sampling_params = copy(params)
    request.sampling_params.extra_args = (params.extra_args or {}) | {TAIL: tail}
    if not tail:
        return
    # hashes are of whole pages, which are whole blocks: those of the prompt stay right
    request.prompt_token_ids = list(request.prompt_token_ids[:start])
    request.num_prompt_tokens = start
    request._all_token_ids = list(request.prompt_token_ids)
    request.all_token_ids = ConstantList(request._all_token_ids)
    request.max_tokens += len(tail)
