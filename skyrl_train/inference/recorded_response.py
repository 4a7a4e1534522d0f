"""One recorded response: what was sampled so far, packed, and to JSON and back without a change.

Continuation ──(its lists, how long they are now)──> ResponseSoFar ──packed──> RecordedResponse <──> JSON
                                                                                     │
Continuation.recall <── TokenChunk ... TokenChunk ───────────────────────────────────┘
"""

from __future__ import annotations

import base64
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import groupby, islice
from typing import Any

import numpy as np

from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import StopReason, TokenChunk, TopLogprobs

_TOKEN, _LOGPROB = np.dtype("<i4"), np.dtype("<f8")
# Of a long response that is served again, so many tokens are read at once, so that the event loop turns in between.
_SLICE_TOKENS = 1024


@dataclass(frozen=True, slots=True)
class RecordedResponse:
    """What was sampled for one request. ``stop_reason`` is None while it had not ended.

    ``token_ids`` is int32 and ``logprobs`` float64, little-endian. ``versions`` has (version, tokens in a row) in order.
    """

    token_ids: bytes = b""
    logprobs: bytes = b""
    versions: tuple[tuple[int, int], ...] = ()
    stop_reason: StopReason | None = None
    top_logprobs: TopLogprobs | None = None

    @property
    def tokens(self) -> int:
        """How many were sampled."""
        return len(self.token_ids) // _TOKEN.itemsize

    @property
    def oldest_version(self) -> int | None:
        """None where nothing was sampled."""
        return min((version for version, _ in self.versions), default=None)

    def chunks(self) -> Iterator[TokenChunk]:
        """All of it in pieces of moderate size; the last one has the stop reason."""
        if not self.tokens and self.stop_reason is None:
            return
        token_ids, logprobs = (
            np.frombuffer(packed, dtype) for packed, dtype in ((self.token_ids, _TOKEN), (self.logprobs, _LOGPROB))
        )
        versions = np.repeat(*np.array(self.versions, np.int64).reshape(-1, 2).T)
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
        """JSON-able; packed numbers are base64, which keeps what JSON has no numbers for (log-probs of -inf)."""
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
        """What :meth:`to_json` wrote.

        Raises:
            KeyError, TypeError, ValueError: it is no such row, or its parts do not fit together.
        """
        top, reason = row.get("top_logprobs"), row["stop_reason"]
        response = cls(
            _bytes(row["tokens"]),
            _bytes(row["logprobs"]),
            tuple((int(version), int(count)) for version, count in row["versions"]),
            None if reason is None else StopReason(reason),
            None if top is None else _alternatives(top),
        )
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
    """A response as it was at one moment, without a copy.

    It holds the lists of a :class:`Continuation`, which only ever grow at their ends, and how long they were. Packing may
    therefore happen later and in any thread.
    """

    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]
    top_logprobs: TopLogprobs | None
    tokens: int
    stop_reason: StopReason | None

    @classmethod
    def of(cls, response: Continuation) -> ResponseSoFar:
        """The response as it is now. Of one that may begin again (a grammar) and has not ended, nothing counts."""
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
    """The response as it was; takes time in proportion to its tokens, unless it is packed already."""
    if isinstance(response, RecordedResponse):
        return response
    end = response.tokens
    return RecordedResponse(
        np.array(response.token_ids[:end], _TOKEN).tobytes(),
        np.array(response.logprobs[:end], _LOGPROB).tobytes(),
        tuple((version, len(list(run))) for version, run in groupby(response.versions[:end])),
        response.stop_reason,
        None if response.top_logprobs is None else response.top_logprobs[:end],
    )
