"""The event of one response: which engine sampled which of its tokens, by which policy version, and when."""

from __future__ import annotations

import asyncio
from bisect import bisect_right
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Self

from skyrl_train.events.log import EventLog
from skyrl_train.inference.pool.fleet import EngineState

if TYPE_CHECKING:
    from skyrl_train.inference.continuation import Continuation
    from skyrl_train.inference.requests import GenerationRequest

# Reasons of a seam. Of several between two segments, the first one here is named.
SEAMS = ("engine lost", "moved", "update", "aborted")
_LOST, _MOVED, _UPDATE, _ABORTED = range(4)


@dataclass(slots=True)
class TracedRequest:
    """A request to an engine. ``before``: tokens that the response had when it was sent. ``left``: why it was abandoned, a
    place in :data:`SEAMS`."""

    engine: int
    before: int
    restarts: int
    began: float
    ended: float | None = None
    left: int = _ABORTED


class RequestTrace:
    """Follows a response in a ``with`` block, at whose end it records the event. Most calls do nothing if the group is not
    sampled.

    Args:
        pauses: for each version, when the engines were paused for it and when they sampled again.
    """

    __slots__ = (
        "_events",
        "_first",
        "_pauses",
        "_request",
        "_requests",
        "_response",
        "_submitted",
        "replayed",
        "wanted",
    )

    def __init__(
        self,
        events: EventLog,
        request: GenerationRequest,
        response: Continuation,
        pauses: Mapping[int, tuple[float, float]],
    ) -> None:
        self.wanted = events.wants(request.session_id)
        if self.wanted:
            self._events, self._request, self._response, self._pauses = events, request, response, pauses
            self._submitted = events.now()
            self._first: float | None = None
            self._requests: list[TracedRequest] = []
            self.replayed = 0

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_: object) -> None:
        if not self.wanted:
            return
        response, now = self._response, self._events.now()
        stop = response.stop_reason
        if kind is not None or stop is None:
            stop_text = "cancelled" if kind in (asyncio.CancelledError, GeneratorExit) else "error"
        else:
            stop_text = str(stop)
        kept = self._requests
        if response.restarts:
            kept = [request for request in kept if request.restarts == response.restarts]
        segments, seams = segments_of(kept, response.versions, self._pauses, now)
        self._events.detail(
            "request",
            self._request.session_id,
            {
                "prompt_tokens": len(response.prompt_token_ids),
                "t_submit": self._submitted,
                "t_first": self._first,
                "t_end": now,
                "stop": stop_text,
                "replayed": self.replayed if not response.restarts else 0,
                "segments": segments,
                "seams": seams,
            },
        )

    def begin(self, engine: int) -> None:
        """A request is sent to ``engine``."""
        if self.wanted:
            tokens, restarts = len(self._response.token_ids), self._response.restarts
            self._requests.append(TracedRequest(engine, tokens, restarts, self._events.now()))

    def progress(self) -> None:
        """Tokens have come in a stream."""
        if self.wanted and self._first is None:
            self._first = self._events.now()

    def end(self, left: EngineState | None) -> None:
        """The request has ended; ``left`` is the state of its engine if it left the routing."""
        if self.wanted:
            request = self._requests[-1]
            request.ended = self._events.now()
            if left is not None:
                request.left = _LOST if left in (EngineState.DEAD, EngineState.STARTING) else _MOVED


def segments_of(
    requests: Sequence[TracedRequest],
    versions: Sequence[int],
    pauses: Mapping[int, tuple[float, float]],
    now: float,
) -> tuple[list[list[Any]], list[str]]:
    """Return ``[version, tokens, t0, t1, engine]`` of each segment, and the reason of the seam before all but the first. Pure.

    A segment is a run of tokens that one request to an engine sampled by one version. Together they are the tokens of the
    response that were not replayed.

    Args:
        versions: of each token of the response. They never decrease within a request to an engine.
        pauses: see :class:`RequestTrace`.
        now: the end of a request that was cancelled or failed.
    """
    segments: list[list[Any]] = []
    seams: list[str] = []
    reason, last = _ABORTED, -1  # why the last segment ended, and its version
    # What an engine sent until the next request was made: not counted earlier, because the last piece may come late.
    ends = [request.before for request in requests[1:]] + [len(versions)]
    for request, end in zip(requests, ends, strict=False):
        at, t0, engine = request.before, request.began, request.engine
        ended = now if request.ended is None else request.ended
        newest = versions[end - 1] if at < end else last
        # Comparisons instead of min() and max(): this runs for each recorded response, on the control loop.
        while at < end:
            version = versions[at]
            if version == newest:
                until, t1, resumed = end, ended, ended
            else:
                until = bisect_right(versions, version, at, end)
                t1, resumed = pauses.get(versions[until]) or (ended, ended)
            if segments:
                seams.append(SEAMS[reason if version == last or reason < _UPDATE else _UPDATE])
            segments.append([version, until - at, t0, t1 if t1 > t0 else t0, engine])
            reason, last = _ABORTED, version
            at, t0 = until, resumed if resumed > t0 else t0
        reason = min(reason, request.left)
    return segments, seams
