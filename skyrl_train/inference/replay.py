"""Replay of unfinished rollouts after a resume: tokens in the checkpoint are not sampled again.

    begin(group) ──> requests of its sessions ──sampled──> record ──snapshot──> checkpoint
                            ^                                                      │ load
                            └──the same request: what was sampled for it <── record of the last run

After a resume the generator runs a group from its beginning. As long as it repeats its earlier requests, the cache
returns the recorded token ids, log-probs and versions at once. A response that was unfinished continues from its recorded
tokens. The first request that the record does not contain ends the replay of its session: the rest of that record is
discarded, and later requests are sampled.

Two requests are the same if they have the same prompt tokens, sampling parameters, choice and adapter. Lookup uses this
identity and not the order, because a session may have several requests at once. Equal requests are served in the order
in which they began. Lookup does not depend on the sampled tokens, so that replay does not bias the distribution.

A request that is not found is a mismatch only while the session has replayed nothing but recorded tokens. After that
(an unfinished response has ended, for example), the request may be a consequence of new tokens while another branch of
the session still follows the record; then nothing is discarded.

Prompts are stored as digests, so that a record is about as large as the sampled tokens. All calls come from the control
loop.
"""

from __future__ import annotations

import base64
import dataclasses
import hashlib
import itertools
import json
from array import array
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import groupby, islice
from operator import attrgetter
from typing import Any

import numpy as np

from skyrl_train.errors import CheckpointError
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import SamplingParams, StopReason, TokenChunk, TopLogprobs
from skyrl_train.inference.requests import GenerationRequest

_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f8")
# A long response is replayed in slices of this many tokens, so that the event loop runs in between.
_SLICE_TOKENS = 1024
_DIGEST_BYTES = 16
# All parameters but ``n``: each response has its own request.
_sampled_as = attrgetter(*(f.name for f in dataclasses.fields(SamplingParams) if f.name != "n"))
_ENCODER = json.JSONEncoder(default=dataclasses.asdict)  # json.dumps would create one per request


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """The tokens sampled for one request, packed. ``stop_reason`` is None if it had not ended.

    ``token_ids`` is int32 and ``logprobs`` float64, little-endian. ``versions`` has (version, tokens in a row) in order.
    """

    token_ids: bytes = b""
    logprobs: bytes = b""
    versions: tuple[tuple[int, int], ...] = ()
    stop_reason: StopReason | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def tokens(self) -> int:
        """The number of sampled tokens."""
        return len(self.token_ids) // _TOKEN.itemsize

    def chunks(self) -> Iterator[TokenChunk]:
        """Yield the response in slices; the last one has the stop reason."""
        if not self.tokens and self.stop_reason is None:
            return
        token_ids, logprobs = (
            np.frombuffer(packed, dtype) for packed, dtype in ((self.token_ids, _TOKEN), (self.logprobs, _LOGPROB))
        )
        # Runs (version, count) become one version per token. reshape keeps an empty list two-dimensional.
        versions = np.repeat(*np.array(self.versions, np.int64).reshape(-1, 2).T)
        # At least one slice: a response that ended without tokens still has to deliver its stop reason.
        for start in range(0, max(self.tokens, 1), _SLICE_TOKENS):
            piece = slice(start, start + _SLICE_TOKENS)
            yield TokenChunk(
                token_ids[piece].tolist(),
                logprobs[piece].tolist(),
                versions[piece].tolist(),
                self.stop_reason if start + _SLICE_TOKENS >= self.tokens else None,
                None if self.top_logprobs is None else self.top_logprobs[piece],
            )

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object. Numbers are packed as base64, which also keeps log-probs of -inf."""
        row: dict[str, Any] = {
            "tokens": _text(self.token_ids),
            "logprobs": _text(self.logprobs),
            "versions": [list(run) for run in self.versions],
            "stop_reason": self.stop_reason,
        }
        if self.top_logprobs is not None:
            alternatives = [alternative for each in self.top_logprobs for alternative in each]
            row["top_logprobs"] = {
                "counts": [len(each) for each in self.top_logprobs],
                "tokens": _text(np.array([token for token, _ in alternatives], _TOKEN).tobytes()),
                "logprobs": _text(np.array([logprob for _, logprob in alternatives], _LOGPROB).tobytes()),
            }
        return row

    @classmethod
    def from_json(cls, row: Mapping[str, Any]) -> RecordedResponse:
        """Read the result of :meth:`to_json`.

        Raises:
            KeyError, TypeError, ValueError: the row is malformed or inconsistent.
        """
        top, reason = row.get("top_logprobs"), row["stop_reason"]
        response = cls(
            _bytes(row["tokens"]),
            _bytes(row["logprobs"]),
            tuple((int(version), int(count)) for version, count in row["versions"]),
            None if reason is None else StopReason(reason),
            None if top is None else _alternatives(top),
        )
        # All lists must describe the same tokens: a record that is cut short would replay wrong log-probs.
        lengths = {
            len(response.token_ids) / _TOKEN.itemsize,
            len(response.logprobs) / _LOGPROB.itemsize,
            sum(count for _, count in response.versions),
            response.tokens if response.top_logprobs is None else len(response.top_logprobs),
        }
        if len(lengths) > 1:
            raise ValueError(f"a recorded response has lists of the lengths {sorted(lengths)}")
        return response


def _alternatives(row: Mapping[str, Any]) -> TopLogprobs:
    tokens = np.frombuffer(_bytes(row["tokens"]), _TOKEN).tolist()
    logprobs = np.frombuffer(_bytes(row["logprobs"]), _LOGPROB).tolist()
    # One shared iterator: each position takes its count of alternatives from the front.
    flat = iter([*zip(tokens, logprobs, strict=True)])
    alternatives = [list(islice(flat, count)) for count in row["counts"]]
    if sum(row["counts"]) != len(tokens):
        raise ValueError(f"{sum(row['counts'])} alternatives are counted, and {len(tokens)} recorded")
    return alternatives


def _text(packed_numbers: bytes) -> str:
    return base64.b64encode(packed_numbers).decode("ascii")


def _bytes(text: str) -> bytes:
    return base64.b64decode(text, validate=True)


@dataclass(frozen=True, slots=True)
class ResponseSoFar:
    """A snapshot of a running response without a copy.

    It holds the lists of a :class:`Continuation`, which only grow at their ends, and their length at that moment. It may
    therefore be packed later and in any thread.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: TopLogprobs | None
    tokens: int
    stop_reason: StopReason | None

    @classmethod
    def of(cls, response: Continuation) -> ResponseSoFar:
        """Take a snapshot. An unfinished response with a grammar counts as empty, because it would start over."""
        tokens = 0 if response.may_restart and response.stop_reason is None else len(response.token_ids)
        return cls(
            response.token_ids,
            response.logprobs,
            response.versions,
            response.top_logprobs,
            tokens,
            response.stop_reason,
        )


def packed(response: RecordedResponse | ResponseSoFar) -> RecordedResponse:
    """Pack a snapshot. Takes time in proportion to its tokens, unless it is packed already."""
    if isinstance(response, RecordedResponse):
        return response
    # The lists may have grown since the snapshot; only their first ``end`` entries belong to it.
    end = response.tokens
    return RecordedResponse(
        np.array(response.token_ids[:end], _TOKEN).tobytes(),
        np.array(response.logprobs[:end], _LOGPROB).tobytes(),
        tuple((version, len(list(run))) for version, run in groupby(response.versions[:end])),
        response.stop_reason,
        None if response.top_logprobs is None else response.top_logprobs[:end],
    )


# The digest of a request and its recorded response.
_Entry = tuple[bytes, RecordedResponse]


def request_digest(request: GenerationRequest) -> bytes:
    """Return a digest that is equal for equal requests, in every process. It leaves out priority and session."""
    # Everything that shapes the distribution is part of the identity; priority and session are not.
    how = [request.choice, request.adapter, *_sampled_as(request.params)]
    digest = hashlib.blake2b(array("q", request.prompt_token_ids), digest_size=_DIGEST_BYTES)
    digest.update(_ENCODER.encode(how).encode("ascii"))
    return digest.digest()


@dataclass(slots=True)
class ReplayTotals:
    """Totals since the process began. ``discarded_tokens`` were recorded and not requested again."""

    replayed_tokens: int = 0
    mismatches: int = 0
    discarded_tokens: int = 0


@dataclass(slots=True, eq=False)
class RecordedRequest:
    """A request of this run. ``known`` is its recorded response; after packing, the sampled one.

    A finished response stays unpacked in ``sampled`` until a checkpoint needs it: packing takes time for every token, and
    most groups end before the next checkpoint.
    """

    number: int  # in the order in which the session's requests began
    digest: bytes
    known: RecordedResponse
    sampled: ResponseSoFar | None = None

    def so_far(self, response: Continuation) -> RecordedResponse | ResponseSoFar:
        """Return the state of the running ``response``; while the record is being replayed, that is the record."""
        # A response that is still being replayed is shorter than its record. A checkpoint taken now must not lose the
        # rest.
        now = ResponseSoFar.of(response)
        return now if now.tokens >= self.known.tokens or now.stop_reason is not None else self.known


class SessionRecord:
    """The requests of one session, both those recorded by an earlier run and those that this run makes.

    Args:
        recorded: in the order in which they began.
    """

    def __init__(self, totals: ReplayTotals, recorded: Iterable[_Entry] = ()) -> None:
        self._totals = totals
        self._numbers = itertools.count()
        self._running: dict[int, tuple[RecordedRequest, Continuation]] = {}
        self._ended: list[RecordedRequest] = []  # they never change, and only more are added
        self._waiting: dict[bytes, deque[RecordedResponse]] = {}  # recorded, not requested yet
        self._left_record = False  # whether tokens beyond the record were sampled
        for digest, response in recorded:
            self._waiting.setdefault(digest, deque()).append(response)

    def begin(self, digest: bytes, response: Continuation) -> RecordedRequest:
        """Begin a request. Its ``known`` is the recorded response, empty if there is none."""
        known = RecordedResponse()
        # Equal requests share one queue, because nothing tells them apart but the order in which they began.
        if responses := self._waiting.get(digest):
            known = responses.popleft()
            if not responses:
                del self._waiting[digest]
        # Only a session that has replayed nothing but recorded tokens can mismatch; see the module docstring.
        elif self._waiting and not self._left_record:
            self._totals.mismatches += 1
            self.discard()
        request = RecordedRequest(next(self._numbers), digest, known)
        self._running[request.number] = (request, response)
        self._totals.replayed_tokens += known.tokens
        return request

    def end(self, request: RecordedRequest) -> None:
        """End a request that finished, failed or was cancelled. Its tokens are kept in each case."""
        (_, response), known = self._running.pop(request.number), request.known
        # Served whole, to its end: the record is exact and stays packed. Otherwise new tokens were sampled, or the request
        # was cut off.
        served_whole = known.stop_reason is not None and response.stop_reason is not None
        if not served_whole or len(response.token_ids) != known.tokens:
            self._left_record = True
            now = request.so_far(response)
            request.sampled = now if isinstance(now, ResponseSoFar) else None
        self._ended.append(request)

    def discard(self) -> None:
        """Discard the recorded responses that were not requested again."""
        self._totals.discarded_tokens += sum(r.tokens for responses in self._waiting.values() for r in responses)
        self._waiting.clear()

    def now(self) -> SessionMoment:
        """Take a snapshot of all requests. The cost depends on running requests only, not on finished ones."""
        return SessionMoment(
            ended=self._ended,
            num_ended=len(self._ended),
            running=tuple((number, r.digest, r.so_far(response)) for number, (r, response) in self._running.items()),
            waiting=tuple((digest, r) for digest, responses in self._waiting.items() for r in responses),
        )


@dataclass(frozen=True, slots=True)
class SessionMoment:
    """A snapshot of a session's requests. It shares the list of finished ones with the session."""

    ended: Sequence[RecordedRequest]
    num_ended: int
    running: tuple[tuple[int, bytes, RecordedResponse | ResponseSoFar], ...]
    waiting: tuple[tuple[bytes, RecordedResponse], ...]

    def entries(self) -> list[tuple[bytes, RecordedResponse | ResponseSoFar]]:
        """Return the requests of this run in the order in which they began, then the recorded ones. Any thread may call it."""
        ended: list[tuple[int, bytes, RecordedResponse | ResponseSoFar]] = []
        for request in self.ended[: self.num_ended]:
            # Packed once: the next checkpoint finds it packed. ``known`` is set before ``sampled`` is cleared, because
            # another thread may read in between.
            sampled = request.sampled
            if sampled is not None:
                request.known, request.sampled = packed(sampled), None
            ended.append((request.number, request.digest, request.known))
        begun = sorted([*ended, *self.running], key=lambda entry: entry[0])
        return [*((digest, response) for _, digest, response in begun), *self.waiting]


@dataclass(slots=True)
class _Group:
    attempt: int
    sessions: dict[str, SessionRecord] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class SessionSnapshot:
    """A snapshot of a session."""

    group: int
    attempt: int
    session_id: str
    moment: SessionMoment

    def to_json(self) -> dict[str, Any]:
        """Return a JSON object. Takes time in proportion to the tokens; any thread may call it."""
        return {
            "group": self.group,
            "attempt": self.attempt,
            "session": self.session_id,
            "requests": [{"request": digest.hex(), **packed(now).to_json()} for digest, now in self.moment.entries()],
        }


class ReplayCache:
    """Records the sessions of groups between ``begin`` and ``end``, and replays loaded records.

    Groups are identified by their group index; the sessions of a group begin and end together. Requests of other sessions
    are neither recorded nor replayed.

    Args:
        enabled: False turns every call into a no-op.

    Attributes:
        totals: counts since the process began.
    """

    def __init__(self, *, enabled: bool = True) -> None:
        self._enabled = enabled
        self._groups: dict[int, _Group] = {}
        self._sessions: dict[str, SessionRecord] = {}  # of the groups that have begun in this process
        self.totals = ReplayTotals()  # changes while groups run

    # Groups -------------------------------------------------------------------------------------------------------

    def begin(self, group: int, session_ids: Iterable[str], attempt: int = 0) -> None:
        """Begin an attempt at a group: record its sessions from now on.

        Records of the same attempt (from an earlier process, or from one here that lost its engines) are replayed. Records
        of another attempt are discarded, because that attempt has failed.
        """
        if not self._enabled:
            return
        # A record of another attempt belongs to a trajectory that failed: replaying it would repeat the failure.
        before = self._groups.pop(group, None)
        if before is not None and before.attempt != attempt:
            self._forget(before)
            before = None
        known = {} if before is None else before.sessions
        begun = self._groups[group] = _Group(attempt)
        for session_id in session_ids:
            # Recorded and new requests of the earlier process, in their order, become the record to replay.
            earlier = known.pop(session_id, None)
            recorded = () if earlier is None else [(d, packed(response)) for d, response in earlier.now().entries()]
            begun.sessions[session_id] = self._sessions[session_id] = SessionRecord(self.totals, recorded)
        if before is not None:
            self._forget(before)  # sessions that this attempt does not have

    def end(self, group: int) -> None:
        """Drop the records of a group that has finished, failed or was abandoned. Idempotent."""
        ended = self._groups.pop(group, None)
        if ended is not None:
            self._forget(ended)

    def attempt(self, group: int) -> int:
        """Return the recorded attempt of a group, with which it begins after a resume; 0 without a record."""
        known = self._groups.get(group)
        return 0 if known is None else known.attempt

    def oldest_version(self, group: int) -> int | None:
        """Return the oldest policy version among the recorded tokens of a group; None without tokens.

        A group that is admitted again is as old as its oldest token.
        """
        known = self._groups.get(group)
        return min(
            (
                version
                for session in (() if known is None else known.sessions.values())
                for _, response in session.now().entries()
                for version, _ in packed(response).versions
            ),
            default=None,
        )

    def discard_before(self, version: int) -> None:
        """Discard the records of groups with tokens of policies before ``version``: these groups begin again."""
        for group in list(self._groups):
            oldest = self.oldest_version(group)
            if oldest is not None and oldest < version:
                self.end(group)

    def _forget(self, group: _Group) -> None:
        for session_id, session in group.sessions.items():
            session.discard()
            self._sessions.pop(session_id, None)

    # Requests -----------------------------------------------------------------------------------------------------

    @contextmanager
    def recorded(self, request: GenerationRequest, response: Continuation) -> Iterator[Iterator[TokenChunk]]:
        """Record ``response`` during the context. Yields its recorded tokens, which the response must take first."""
        session = None if request.session_id is None else self._sessions.get(request.session_id)
        if session is None:
            yield iter(())
            return
        # A request of a session is recorded even if it is cancelled: its tokens are replayed after a resume.
        begun = session.begin(request_digest(request), response)
        try:
            yield begun.known.chunks()
        finally:
            session.end(begun)

    # Checkpoints --------------------------------------------------------------------------------------------------

    def snapshot(self) -> list[SessionSnapshot]:
        """Take a snapshot of all sessions, including those whose group has not begun again.

        Costs a few steps per request; tokens are packed by :meth:`SessionSnapshot.to_json`.
        """
        snapshots = []
        for number, group in self._groups.items():
            for session_id, session in group.sessions.items():
                now = session.now()
                # The number of a retry is kept even without requests: retries are counted across resumes.
                if now.num_ended or now.running or now.waiting or group.attempt:
                    snapshots.append(SessionSnapshot(number, group.attempt, session_id, now))
        return snapshots

    def load(self, rows: Iterable[Mapping[str, Any]]) -> None:
        """Load the results of :meth:`SessionSnapshot.to_json`; they are replayed when their groups begin.

        Raises:
            CheckpointError: a row is broken.
        """
        if not self._enabled:
            return
        try:
            for row in rows:
                # Rows of one group share an attempt; the first row creates the group.
                group = self._groups.setdefault(int(row["group"]), _Group(int(row["attempt"])))
                recorded = [(bytes.fromhex(r["request"]), RecordedResponse.from_json(r)) for r in row["requests"]]
                group.sessions[str(row["session"])] = SessionRecord(self.totals, recorded)
        except (KeyError, TypeError, ValueError) as error:
            raise CheckpointError(
                f"The checkpoint's record of unfinished rollouts is broken ({error!r}). Set rollout.replay=false to generate "
                "them from their beginnings."
            ) from error

    def metrics(self) -> dict[str, float]:
        """Return the totals since the process began, by metric name."""
        return {
            "async/replayed_tokens": self.totals.replayed_tokens,
            "async/replay_mismatches": self.totals.mismatches,
            "async/replay_discarded_tokens": self.totals.discarded_tokens,
        }
