"""Messages between this library and a vLLM server: pure conversions between JSON and our types."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.arguments import WORKER_EXTENSION
from skyrl_train.inference.engines.vllm.requests import (
    NO_LOGPROB,
    STOP_REASONS,
    EngineRequest,
    Spans,
    adjustment_fields,
    grammar_spec,
    most_likely,
)
from skyrl_train.inference.interface import EngineCapabilities, StopReason, TopLogprobs
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_area import machine

GENERATE_PATH = "/inference/v1/generate"


@dataclass(frozen=True, slots=True)
class ServerInfo:
    """The answer to ``GET /skyrl/engine``: what a vLLM server is and what it holds; see :mod:`remote_server`."""

    instance: str
    machine: str
    dead: bool
    max_model_len: int
    logprobs_mode: str
    max_logprobs: int
    priorities: bool
    prefix_caching: bool
    structured_output: bool  # by our grammars
    token_endpoint: bool
    server_processes: int
    weight_reception: bool
    speculative_decoding: bool = False
    stop_strings: bool = False
    end_token_ids: Sequence[int] = ()
    data_parallel_size: int = 1
    weight_version: str = ""
    paused: bool = False
    unfinished: int = 0
    held: int = 0
    kv_cache_usage: float | None = None

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> ServerInfo:
        """Read the JSON; what a newer server says beyond this is ignored."""
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__ if name in answer})

    @property
    def policy_version(self) -> int:
        """The policy version that the server holds, -1 if none."""
        return parse_version(self.weight_version)

    def check(self, url: str) -> None:
        """Check that the server can serve a trainer.

        Raises:
            ConfigError: the server was started without something that is needed; the message names the flags.
        """
        needed = {
            "--enable-scale-out": self.token_endpoint,
            f"--worker-extension-cls {WORKER_EXTENSION}": self.weight_reception,
            "--logprobs-mode processed_logprobs": self.logprobs_mode == "processed_logprobs",
            "--api-server-count 1": self.server_processes == 1,
            # vLLM passes on the results of its first engine only: an update that another one refuses would go unnoticed.
            "--data-parallel-size 1": self.data_parallel_size == 1,
        }
        missing = [flag for flag, there in needed.items() if not there]
        if missing:
            raise ConfigError(f"The vLLM server at {url} was started without {', '.join(missing)}; start it with that.")

    def capabilities(self) -> EngineCapabilities:
        """Return what the engine behind the server can do."""
        # Whether a folder is shared shows when the first update is received.
        shared = ("shared_memory",) if self.machine == machine() else ()
        return EngineCapabilities(
            pause_modes=frozenset(PauseMode),
            transports=frozenset({"disk", "delta", *shared}),
            max_model_len=self.max_model_len,
            max_top_logprobs=self.max_logprobs - 1,
            structured_output=self.structured_output,
            grammar_continuation=self.structured_output,
            logit_adjustment=True,
            min_p=not self.speculative_decoding,
            logit_bias=not self.speculative_decoding,
            priorities=self.priorities,
            stop_strings=self.stop_strings,
        )


def parse_version(label: str) -> int:
    """Return the policy version behind vLLM's label; -1 for weights that this library did not send."""
    try:
        return int(label)
    except ValueError:
        return -1


def request_body(request_id: str, request: EngineRequest, salt: str) -> dict[str, Any]:
    """Return the body of a request to ``GENERATE_PATH``: token ids in, token ids out."""
    params, grammar = request.params, grammar_spec(request)
    return {
        "request_id": request_id,
        "token_ids": request.prompt,
        "cache_salt": salt,  # vLLM's prefix cache serves only requests with an equal salt
        "priority": request.priority,
        "stream": request.stream,
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(0, params.top_k),  # vLLM rejects negative values other than -1
            "min_p": params.min_p,
            "seed": params.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            # The server sends this many entries, of which the sampled token is one.
            "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
            "stop": list(params.stop),
            "detokenize": bool(params.stop),
            **adjustment_fields(params.adjustment),
            "structured_outputs": None if grammar is None else {"json": grammar},
        },
    }


@dataclass(frozen=True, slots=True)
class ResponsePart:
    """A whole answer, or one event of a stream. ``spans`` come with the last part only.

    ``cached_tokens`` of the prompt: of whole answers of a server with ``--enable-prompt-tokens-details``, else 0.
    """

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: TopLogprobs | None
    stop_reason: StopReason | None
    spans: Spans | None
    cached_tokens: int = 0


def parse_part(answer: Mapping[str, Any], num_top: int) -> ResponsePart:
    """Read a whole answer or one event of a stream.

    Args:
        num_top: the alternatives per token that were asked for.

    Raises:
        RequestError: the server rejects the request.
        EngineError: the server failed the request, or left out a log-prob.
    """
    if "error" in answer:
        if answer["error"].get("code", 500) < 500:
            raise RequestError(f"vLLM rejects the request: {error_message(answer)}")
        raise EngineError(f"The vLLM server failed a request: {error_message(answer)}")
    choice = answer["choices"][0]
    token_ids: list[int] = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(token_ids) or NO_LOGPROB in logprobs:
        raise EngineError(f"The vLLM server gave {len(token_ids)} tokens, but not a log-prob for each.")
    details = (answer.get("usage") or {}).get("prompt_tokens_details") or {}
    reason = choice["finish_reason"]
    if reason is not None and reason not in STOP_REASONS:
        raise EngineError(f"The vLLM server ended a request with {reason!r}; its own log says more.")
    spans = choice.get("weight_versions")
    top = None
    if num_top:
        # The sampled token stands first, and again in its rank if it is one of the most likely.
        found = [{other["token_id"]: other["logprob"] for other in entry["top_logprobs"]} for entry in content]
        top = [most_likely(others, num_top) for others in found]
    stop_reason = None if reason is None else STOP_REASONS[reason]
    if isinstance(choice.get("stop_reason"), str):
        # The client matches stop strings by itself, also across segments. Where vLLM's text differs, the response continues.
        stop_reason = StopReason.ABORT
    return ResponsePart(
        token_ids,
        logprobs,
        top,
        stop_reason,
        None if spans is None else [(parse_version(span["version"]), span["start"]) for span in spans],
        details.get("cached_tokens") or 0,
    )


def error_message(answer: Mapping[str, Any]) -> str:
    """Return the message in an error's body, in any of the shapes that vLLM uses."""
    error = answer.get("error", answer.get("detail", "no reason given"))
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
