"""Replay of rollouts that a checkpoint found unfinished: what was sampled for them is not sampled again.

    begin(group) ──> requests of its sessions ──sampled──> record ──snapshot──> checkpoint
                            ^                                                      │ load
                            └──the same request: what was sampled for it <── record of the last run

After a resume the generator plays a group from its beginning. As long as its programs ask what they asked before, they are
given what was sampled then, in no time: ids, log-probs and versions. The response that was on its way goes on from its
tokens. The first request that the record does not know ends the replay of its session: the rest of that record is thrown
away, and everything else is sampled.

*The same request* means: the same prompt tokens, sampling parameters, choice and adapter. Requests are found by that and
not by their order, because a session may have several at once. Requests that are equal are served in the order in which
they were begun. What is found does not depend on what was sampled for it, so that serving it again biases nothing.

A request that is not found is a mismatch as long as its session has seen nothing but the record. Afterwards (a response
that was on its way has ended, say) it may be what that led to, while another branch of the session still follows the
record: nothing is thrown away then.

Prompts are kept as digests: a record is as large as what was sampled. All calls come from the control loop.
"""

from __future__ import annotations

import dataclasses
import hashlib
import itertools
import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from operator import attrgetter
from typing import Any

from skyrl_train.errors import CheckpointError
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import SamplingParams, TokenChunk
from skyrl_train.inference.recorded_response import RecordedResponse, ResponseSoFar, packed
from skyrl_train.inference.requests import GenerationRequest

_DIGEST_BYTES = 16
# All parameters but ``n``: each response is a request of its own.
_sampled_as = attrgetter(*(f.name for f in dataclasses.fields(SamplingParams) if f.name != "n"))
_ENCODER = json.JSONEncoder(default=dataclasses.asdict)  # json.dumps would make one for each request
# One request and what is known of its response.
_Entry = tuple[bytes, RecordedResponse]


def request_digest(request: GenerationRequest) -> bytes:
    """Equal for equal requests, in any process. Priorities and the session are no part of it."""
    how = [request.choice, request.adapter, *_sampled_as(request.params)]
    digest = hashlib.blake2b(array("q", request.prompt_token_ids), digest_size=_DIGEST_BYTES)
    digest.update(_ENCODER.encode(how).encode("ascii"))
    return digest.digest()


@dataclass(slots=True)
class ReplayTotals:
    """Since the process began. ``discarded_tokens``: recorded, and thrown away or not asked for again."""

    replayed_tokens: int = 0
    mismatches: int = 0
    discarded_tokens: int = 0


@dataclass(slots=True, eq=False)
class _Request:
    """A request of this run. ``known`` is what the record had of its response, later all that was sampled.

    Between the two, from its end until somebody needs it packed, that is in ``sampled``: most groups end before anybody does,
    and packing takes time for every token.
    """

    number: int  # in the order in which the session's requests were begun
    digest: bytes
    known: RecordedResponse
    running: Continuation | None
    sampled: ResponseSoFar | None = None

    def so_far(self) -> RecordedResponse | ResponseSoFar:
        """What there is now; while a recorded response is being served again, that is still the record."""
        if self.running is None:
            return self.sampled or self.known
        now = ResponseSoFar.of(self.running)
        return now if now.tokens >= self.known.tokens or now.stop_reason is not None else self.known

    @property
    def was_served_whole(self) -> bool:
        """Whether the caller was given exactly what the record has, to its end."""
        running, known = self.running, self.known
        if running is None or running.stop_reason is None or known.stop_reason is None:
            return False
        return len(running.token_ids) == known.tokens

    def settle(self) -> None:
        """Keeps what there is now."""
        now = self.so_far()
        if isinstance(now, ResponseSoFar):
            self.sampled = now

    def packed(self) -> RecordedResponse:
        """What was kept, packed once. Any thread."""
        sampled = self.sampled
        if sampled is not None:
            self.known = packed(sampled)
            self.sampled = None
        return self.known


class SessionRecord:
    """The requests of one session: what was recorded in an earlier run, and what this one asks.

    Args:
        recorded: in the order in which they were begun.
    """

    def __init__(self, totals: ReplayTotals, recorded: Iterable[_Entry] = ()) -> None:
        self._totals = totals
        self._numbers = itertools.count()
        self._running: dict[int, _Request] = {}
        self._ended: list[_Request] = []  # they never change, and only more are added
        self._waiting: dict[bytes, deque[RecordedResponse]] = {}  # to be asked for again
        self._saw_more = False  # than the record
        for digest, response in recorded:
            self._waiting.setdefault(digest, deque()).append(response)

    def begin(self, digest: bytes, response: Continuation) -> _Request:
        """A request of the session begins. Its ``known`` is what the record has of it; nothing, if it has nothing."""
        request = _Request(next(self._numbers), digest, self._take(digest), response)
        self._running[request.number] = request
        self._totals.replayed_tokens += request.known.tokens
        return request

    def _take(self, digest: bytes) -> RecordedResponse:
        responses = self._waiting.get(digest)
        if responses is None:
            if self._waiting and not self._saw_more:
                self._totals.mismatches += 1
                self.discard()
            return RecordedResponse()
        response = responses.popleft()
        if not responses:
            del self._waiting[digest]
        return response

    def end(self, request: _Request) -> None:
        """The request has ended, was cancelled or failed. What was sampled for it is kept in any case."""
        if not request.was_served_whole:
            self._saw_more = True
            request.settle()
        request.running = None
        del self._running[request.number]
        self._ended.append(request)

    def discard(self) -> None:
        """Throws away what was not asked for again."""
        self._totals.discarded_tokens += sum(r.tokens for responses in self._waiting.values() for r in responses)
        self._waiting.clear()

    def now(self) -> SessionMoment:
        """All requests that are worth keeping, as they are now. Costs a step per request that runs, whatever has ended."""
        return SessionMoment(
            ended=self._ended,
            num_ended=len(self._ended),
            running=tuple((request.number, request.digest, request.so_far()) for request in self._running.values()),
            waiting=tuple((digest, r) for digest, responses in self._waiting.items() for r in responses),
        )


@dataclass(frozen=True, slots=True)
class SessionMoment:
    """A session's requests at one moment; it shares the list of those that had ended with the session."""

    ended: Sequence[_Request]
    num_ended: int
    running: tuple[tuple[int, bytes, RecordedResponse | ResponseSoFar], ...]
    waiting: tuple[tuple[bytes, RecordedResponse], ...]

    def __bool__(self) -> bool:
        return bool(self.num_ended or self.running or self.waiting)

    def entries(self) -> list[tuple[bytes, RecordedResponse | ResponseSoFar]]:
        """The requests of this run in the order in which they were begun, then those that may still come. Any thread."""
        ended = [(request.number, request.digest, request.packed()) for request in self.ended[: self.num_ended]]
        begun = sorted([*ended, *self.running], key=lambda entry: entry[0])
        return [*((digest, response) for _, digest, response in begun), *self.waiting]


@dataclass(slots=True)
class _Group:
    attempt: int
    sessions: dict[str, SessionRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A session at one moment."""

    group: int
    attempt: int
    session_id: str
    moment: SessionMoment

    def to_json(self) -> dict[str, Any]:
        """JSON-able. Takes time in proportion to the tokens; any thread may call it."""
        return {
            "group": self.group,
            "attempt": self.attempt,
            "session": self.session_id,
            "requests": [{"request": digest.hex(), **packed(now).to_json()} for digest, now in self.moment.entries()],
        }


class Recordings:
    """Records the sessions of groups between ``begin`` and ``end``, and replays what was loaded.

    A group is a number (its ordinal): its sessions begin and end together. Requests of other sessions are neither recorded
    nor replayed.

    Args:
        enabled: False: all calls do nothing.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._groups: dict[int, _Group] = {}
        self._sessions: dict[str, SessionRecord] = {}  # of the groups that have begun in this process
        self._totals = ReplayTotals()

    @property
    def totals(self) -> ReplayTotals:
        """What was replayed so far (a copy)."""
        return dataclasses.replace(self._totals)

    # Groups -------------------------------------------------------------------------------------------------------

    def begin(self, group: int, session_ids: Iterable[str], attempt: int = 0) -> None:
        """An attempt at a group begins: its sessions are recorded from now on.

        What is recorded of the same attempt (by an earlier process, or by one here that lost its engines) is served again.
        What is recorded of another attempt is thrown away: that attempt has failed.
        """
        if not self._enabled:
            return
        before = self._groups.pop(group, None)
        if before is not None and before.attempt != attempt:
            self._forget(before)
            before = None
        known = {} if before is None else before.sessions
        begun = self._groups[group] = _Group(attempt)
        for session_id in session_ids:
            earlier = known.pop(session_id, None)
            recorded = () if earlier is None else [(d, packed(response)) for d, response in earlier.now().entries()]
            begun.sessions[session_id] = self._sessions[session_id] = SessionRecord(self._totals, recorded)
        if before is not None:
            self._forget(before)  # of fewer samples than then

    def end(self, group: int) -> None:
        """A group has finished, failed, or was given up: its records are dropped. Idempotent."""
        ended = self._groups.pop(group, None)
        if ended is not None:
            self._forget(ended)

    def attempt(self, group: int) -> int:
        """The attempt that is recorded of a group: the one to begin with after a resume; 0 where none is."""
        known = self._groups.get(group)
        return 0 if known is None else known.attempt

    def oldest_version(self, group: int) -> int | None:
        """The oldest policy version among the recorded tokens of a group; None where there are none.

        A group that is admitted again is as old as its oldest token.
        """
        known = self._groups.get(group)
        responses = (
            packed(response)
            for session in (() if known is None else known.sessions.values())
            for _, response in session.now().entries()
        )
        return min((v for response in responses if (v := response.oldest_version) is not None), default=None)

    def _forget(self, group: _Group) -> None:
        for session_id, session in group.sessions.items():
            session.discard()
            self._sessions.pop(session_id, None)

    # Requests -----------------------------------------------------------------------------------------------------

    @contextmanager
    def recorded(self, request: GenerationRequest, response: Continuation) -> Iterator[Iterator[TokenChunk]]:
        """Records ``response`` for the time of the context, and yields what is known of it: to be taken over first."""
        session = None if request.session_id is None else self._sessions.get(request.session_id)
        if session is None:
            yield iter(())
            return
        begun = session.begin(request_digest(request), response)
        try:
            yield begun.known.chunks()
        finally:
            session.end(begun)

    # Checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[SessionSnapshot]:
        """All sessions as they are now, those included that wait for their group to begin again.

        Costs a few steps per request; tokens are packed by :meth:`SessionSnapshot.to_json`.
        """
        snapshots = (
            SessionSnapshot(number, group.attempt, session_id, session.now())
            for number, group in self._groups.items()
            for session_id, session in group.sessions.items()
        )
        # Of a later attempt, the number alone is worth keeping: retries are counted across resumes.
        return [snapshot for snapshot in snapshots if snapshot.moment or snapshot.attempt]

    def load(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Takes what :meth:`SessionSnapshot.to_json` wrote, to be served once the groups begin.

        Raises:
            CheckpointError: a row is broken.
        """
        if not self._enabled:
            return
        try:
            for row in rows:
                group = self._groups.setdefault(int(row["group"]), _Group(int(row["attempt"])))
                recorded = [(bytes.fromhex(r["request"]), RecordedResponse.from_json(r)) for r in row["requests"]]
                group.sessions[str(row["session"])] = SessionRecord(self._totals, recorded)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint's record of unfinished rollouts is broken ({error!r}). Set rollout.replay=false to generate "
                "them from their beginnings."
            ) from error

    def metrics(self) -> dict[str, float]:
        """Totals since the process began, by metric name."""
        return {
            "async/replayed_tokens": self._totals.replayed_tokens,
            "async/replay_mismatches": self._totals.mismatches,
            "async/replay_discarded_tokens": self._totals.discarded_tokens,
        }
