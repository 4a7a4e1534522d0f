"""Requests and answers of vLLM's ``/inference/v1/generate`` as JSON: pure conversions, token ids in and out."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import EngineError, RequestError
from skyrl_train.inference.engines.vllm.requests import Asked
from skyrl_train.inference.interface import (
    EngineCapabilities,
    InferenceEngineInput,
    SamplingParams,
    StopReason,
    StructuredOutput,
    TopLogprobs,
)

GENERATE_PATH = "/inference/v1/generate"
# What vLLM sends in place of a log-prob that it does not have.
_NO_LOGPROB = -9999.0
_STOP_REASONS = {
    "stop": StopReason.STOP,
    "repetition": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class Part:
    """What one answer, or one event of a stream, says. ``spans`` come with the last part only."""

    token_ids: list[int]
    logprobs: list[float]
    top_logprobs: TopLogprobs | None
    stop_reason: StopReason | None
    spans: Spans | None


@dataclass(frozen=True, slots=True)
class Spans:
    """Which weight version sampled which tokens of a request: ``(version, index of its first token)``, in order."""

    starts: tuple[tuple[int, int], ...]

    @property
    def newest(self) -> int | None:
        """The version of the newest token; None before the first."""
        return self.starts[-1][0] if self.starts else None

    def versions(self, first: int, count: int) -> list[int]:
        """The versions of tokens ``first`` .. ``first + count - 1``.

        Raises:
            EngineError: the spans do not cover them.
        """
        if count and (not self.starts or self.starts[0][1] > first):
            raise EngineError("The vLLM server did not say which weight version sampled the tokens.")
        return [
            next(version for version, start in reversed(self.starts) if start <= index)
            for index in range(first, first + count)
        ]


def parse_version(label: str) -> int:
    """The policy version behind vLLM's label; -1 for weights that this library did not publish."""
    try:
        return int(label)
    except ValueError:
        return -1


def external_id(request_id: str) -> str:
    """The name under which the server knows a request of ours."""
    return f"generate-tokens-{request_id}"


def asked_of(engine_input: InferenceEngineInput, can: EngineCapabilities, *, stream: bool) -> list[Asked]:
    """The requests of one call. What only the server knows (its vocabulary), the server refuses.

    Raises:
        RequestError: one of them cannot be served.
        EngineError: there are no token ids.
    """
    prompts = engine_input.get("prompt_token_ids")
    if prompts is None:
        raise EngineError("An engine takes prompt_token_ids; the client renders conversations to tokens.")
    params = SamplingParams.parse(engine_input.get("sampling_params"))
    if params.n != 1:
        raise RequestError(f"An engine samples one response per request, got n={params.n}; the client splits them.")
    if params.top_logprobs > can.max_top_logprobs:
        raise RequestError(
            f"top_logprobs is {params.top_logprobs}, this server gives at most {can.max_top_logprobs}; start it with a "
            "larger --max-logprobs."
        )
    if engine_input.get("adapter") is not None:
        raise RequestError("A remote vLLM server takes no adapters here; ask capabilities.adapters first.")
    priority = int(engine_input.get("priority", 0)) if can.priorities else 0
    asked = []
    for prompt in prompts:
        tokens = list(map(int, prompt))
        if not 0 < len(tokens) < can.max_model_len:
            raise RequestError(
                f"A prompt of {len(tokens)} tokens does not fit: it needs at least one token, and room for a response "
                f"within max_model_len={can.max_model_len}."
            )
        asked.append(Asked(tokens, params, stream, priority))
    return asked


def request_body(
    request_id: str, prompt: Sequence[int], params: SamplingParams, *, salt: str, stream: bool, priority: int
) -> dict[str, Any]:
    """The body of one request."""
    return {
        "request_id": request_id,
        "token_ids": list(prompt),
        "cache_salt": salt,
        "priority": priority,
        "stream": stream,
        "sampling_params": {
            "max_tokens": params.max_tokens,
            "min_tokens": params.min_tokens,
            "temperature": params.temperature,
            "top_p": params.top_p,
            "top_k": max(0, params.top_k),
            "min_p": params.min_p,
            "seed": params.seed,
            "stop_token_ids": list(params.stop_token_ids),
            "ignore_eos": params.ignore_eos,
            # The server sends this many entries, of which the sampled token is one.
            "logprobs": params.top_logprobs + 1 if params.top_logprobs else 0,
            "detokenize": False,
            "structured_outputs": None if params.structured is None else _structured(params.structured),
        },
    }


def _structured(structured: StructuredOutput) -> dict[str, Any]:
    match structured.kind:
        case "json_object":
            return {"json_object": True}
        case "json_schema":
            return {"json": structured.value}
        case kind:
            return {kind: structured.value}


def parse_part(answer: Mapping[str, Any], num_top: int) -> Part:
    """Reads a whole answer or one event of a stream.

    Args:
        num_top: the alternatives per token that were asked for.

    Raises:
        RequestError: the server refuses the request.
        EngineError: the server failed the request, or left out a log-prob.
    """
    if "error" in answer:
        if answer["error"].get("code", 500) < 500:
            raise RequestError(refusal(answer))
        raise EngineError(f"The vLLM server failed a request: {error_message(answer)}")
    choice = answer["choices"][0]
    token_ids: list[int] = choice["token_ids"] or []
    content = (choice["logprobs"] or {}).get("content") or []
    logprobs = [entry["logprob"] for entry in content]
    if len(logprobs) != len(token_ids) or _NO_LOGPROB in logprobs:
        raise EngineError(f"The vLLM server gave {len(token_ids)} tokens, but not a log-prob for each.")
    reason = choice["finish_reason"]
    if reason is not None and reason not in _STOP_REASONS:
        raise EngineError(f"The vLLM server ended a request with {reason!r}; its own log says more.")
    spans = choice.get("weight_versions")
    return Part(
        token_ids,
        logprobs,
        [_most_likely(entry["top_logprobs"], num_top) for entry in content] if num_top else None,
        None if reason is None else _STOP_REASONS[reason],
        None if spans is None else Spans(tuple((parse_version(span["version"]), span["start"]) for span in spans)),
    )


def _most_likely(entries: Sequence[Mapping[str, Any]], count: int) -> list[tuple[int, float]]:
    found = {entry["token_id"]: entry["logprob"] for entry in entries}
    return sorted(found.items(), key=lambda entry: -entry[1])[:count]


def refusal(answer: Mapping[str, Any]) -> str:
    """What a caller reads whose request the server does not take."""
    return f"vLLM refuses the request: {error_message(answer)}"


def error_message(answer: Mapping[str, Any]) -> str:
    """What an error's body says, in any of the shapes that vLLM uses."""
    error = answer.get("error", answer.get("detail", "no reason given"))
    return str(error.get("message", error)) if isinstance(error, Mapping) else str(error)
