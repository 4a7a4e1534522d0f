"""One request inside vLLM, and its tokens' versions. Knows nothing of vLLM's calls."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import SamplingParams, StopReason, TokenChunk, TopLogprobs

# Why vLLM ended a request; "error" is not among them, it is raised.
_STOP_REASONS = {
    "stop": StopReason.STOP,
    "repetition": StopReason.STOP,
    "length": StopReason.LENGTH,
    "abort": StopReason.ABORT,
}


@dataclass(frozen=True, slots=True)
class Asked:
    """What one call asks vLLM for, until it is answered. ``chunk_tokens``: of a streamed chunk."""

    prompt: list[int]
    params: SamplingParams
    stream: bool
    chunk_tokens: int = 1
    priority: int = 0
    adapter: Any = None  # vLLM's LoRARequest


@dataclass(eq=False, slots=True)
class Flight:
    """A request in vLLM.

    Attributes:
        key: vLLM's own id of the request.
        queue: where its outputs arrive.
        restart: nothing was sampled for it when the weights changed; it starts over under the new ones.
    """

    asked: Asked
    key: str
    queue: Any
    version: int
    restart: bool = False
    delivered: int = 0
    _changes: list[tuple[int, int]] = field(default_factory=list)

    def weights_changed(self, sampled: int, version: int) -> None:
        """``sampled`` tokens are of earlier versions; those that follow are of ``version``."""
        self._changes.append((sampled, version))

    def versions(self, count: int) -> list[int]:
        """The versions of the next ``count`` tokens that are delivered."""
        versions: list[int] = []
        for index in range(self.delivered, self.delivered + count):
            version = self.version
            for start, later in self._changes:
                if index >= start:
                    version = later
            versions.append(version)
        return versions

    def chunk(self, completion: Any) -> TokenChunk:
        """The tokens that are new in ``completion`` (vLLM's ``CompletionOutput``).

        Raises:
            EngineError: vLLM failed this request, or gave no log-probs.
        """
        reason = completion.finish_reason
        if reason is not None and reason not in _STOP_REASONS:
            raise EngineError(f"vLLM ended a request with {reason!r}; look above for its own message.")
        token_ids = list(completion.token_ids)
        logprobs, top = _logprobs(completion.logprobs, token_ids, self.asked.params.top_logprobs)
        versions = self.versions(len(token_ids))
        self.delivered += len(token_ids)
        return TokenChunk(token_ids, logprobs, versions, None if reason is None else _STOP_REASONS[reason], top)


def _logprobs(flat: Any, token_ids: Sequence[int], num_top: int) -> tuple[list[float], TopLogprobs | None]:
    """Splits vLLM's ``FlatLogprobs``: per position the sampled token first, then the most likely ones."""
    if len(flat if flat is not None else ()) != len(token_ids):
        raise EngineError(f"vLLM gave {len(token_ids)} tokens and {len(flat or ())} log-probs.")
    logprobs: list[float] = []
    top: TopLogprobs | None = [] if num_top else None
    for position in range(len(token_ids)):
        start, end = flat.start_indices[position], flat.end_indices[position]
        logprobs.append(flat.logprobs[start])
        if top is not None:
            # The sampled token may stand twice, or once for both.
            entries = dict(zip(flat.token_ids[start:end], flat.logprobs[start:end], strict=True))
            top.append(sorted(entries.items(), key=lambda entry: -entry[1])[:num_top])
    return logprobs, top
