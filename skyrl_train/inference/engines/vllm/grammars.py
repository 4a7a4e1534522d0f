"""Our grammars in vLLM's scheduler, so that a response continues where it was and the trainer can repeat its masks.

    EngineRequest ──grammar_spec──> structured_outputs.json ──vLLM's StructuredOutputManager──> GrammarBackend
                                                                 bit mask of each step <── ResponseGrammar

vLLM asks a backend for the masks of a step while the model computes it. Its own backends begin a grammar after the prompt, and
the prompt of a continued request has a part of the response. Ours is told of that part. A backend has no way in from outside but
the scheduler's constructor: :func:`scheduler` is the value of vLLM's ``scheduler_cls``.
"""

from __future__ import annotations

import copy
import logging
import threading
from collections.abc import Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch
from llguidance import LLTokenizer
from vllm.v1.structured_output.backend_guidance import GuidanceBackend
from vllm.v1.structured_output.backend_types import StructuredOutputGrammar, StructuredOutputOptions

from skyrl_train.errors import GrammarError
from skyrl_train.inference.engines.vllm.requests import read_grammar_spec
from skyrl_train.inference.grammar import GrammarMatcher, Grammars
from skyrl_train.inference.interface import StructuredOutput

logger = logging.getLogger(__name__)


def scheduler(*, vllm_config: Any, structured_output_manager: Any, **arguments: Any) -> Any:
    """Return vLLM's own scheduler. Its requests may have our grammars, besides the structured outputs of other clients."""
    model_config = vllm_config.model_config
    if not model_config.skip_tokenizer_init:
        structured_output_manager.backend = GrammarBackend(
            vllm_config, structured_output_manager.tokenizer, model_config.get_vocab_size()
        )
        # A grammar of ours covers the reasoning, too. With a reasoning parser, vLLM would mask nothing before its end.
        structured_output_manager.enable_in_reasoning = True
    config = copy.copy(vllm_config.scheduler_config)
    config.scheduler_cls = None
    return config.get_scheduler_cls()(
        vllm_config=vllm_config, structured_output_manager=structured_output_manager, **arguments
    )


class GrammarBackend(GuidanceBackend):
    """The grammars of an engine. vLLM compiles them in threads beside its steps.

    Other clients' grammars are vLLM's own of the same library, with our description of the tokenizer.
    """

    def __post_init__(self) -> None:
        # In place of the base class, which would describe the tokenizer here, before vLLM begins.
        config = self.vllm_config.structured_outputs_config
        self.disable_any_whitespace = config.disable_any_whitespace
        self.disable_additional_properties = config.disable_additional_properties
        self._loading = threading.Lock()

    @cached_property
    def _grammars(self) -> Grammars:
        return Grammars(self.tokenizer, self.vllm_config.model_config.hf_config)

    @cached_property
    def ll_tokenizer(self) -> LLTokenizer:
        """The tokenizer, as the base class uses it."""
        return self._grammars.tokens

    def compile_grammar(
        self, request_type: StructuredOutputOptions, grammar_spec: str, stop_token_ids: set[int] | None = None
    ) -> StructuredOutputGrammar:
        """Return the grammar of one response, after the tokens that the request continues.

        Raises:
            GrammarError: it cannot be compiled, or does not allow these tokens. vLLM fails the request.
        """
        with self._loading:  # by one of vLLM's threads: it takes seconds, and Python 3.12 lets all of them begin
            grammars = self._grammars
        asked = read_grammar_spec(grammar_spec) if request_type is StructuredOutputOptions.JSON else None
        if asked is None:  # of another client
            return super().compile_grammar(request_type, grammar_spec)
        structured = StructuredOutput(asked["kind"], asked["value"])
        return ResponseGrammar(grammars.matcher(structured, asked["token_ids"], asked["stop_token_ids"]))


class ResponseGrammar(StructuredOutputGrammar):
    """The position of one response in its grammar, as vLLM drives it."""

    def __init__(self, matcher: GrammarMatcher) -> None:
        self._matcher = matcher
        self._ended = False

    def accept_tokens(self, request_id: str, tokens: Sequence[int]) -> bool:
        """Take sampled tokens. Returns False for tokens that are not allowed, and vLLM then fails the request."""
        try:
            for token in tokens:
                self._ended = self._matcher.ended_by(token)
                if not self._ended:
                    self._matcher.consume([token])
        except GrammarError as error:
            logger.warning("Request %s: %s", request_id, error)
            return False
        return True

    def validate_tokens(self, tokens: list[int]) -> list[int]:
        """Return the first tokens of a draft, as far as they are allowed."""
        return tokens[: self._matcher.count_allowed(tokens)]

    def rollback(self, num_tokens: int) -> None:
        """Forget the last tokens, which were a draft."""
        self._matcher.rollback(num_tokens - self._ended)  # an end token was not consumed
        self._ended = False

    def fill_bitmask(self, bitmask: torch.Tensor, batch_index: int) -> None:
        """Write the mask of the next token into a row of ``bitmask``, int32 ``[rows, words]``."""
        row = bitmask[batch_index].numpy().view(np.uint8)
        row[:] = 0
        try:
            mask = self._matcher.compute_mask()
            row[: len(mask)] = mask
        except GrammarError:
            # An exception here would end the engine. The matcher stays in error, so that it refuses the token sampled now.
            row[:] = 0xFF

    def is_terminated(self) -> bool:
        """Return whether an end token was sampled."""
        return self._ended

    def reset(self) -> None:
        """Do nothing: vLLM begins no response again with the same grammar."""
