"""Writes the record of a run: producers put events into a queue, and a thread encodes them and appends them to files.

    control loop ──record / detail──> bounded queue ──thread, once a second──> events/000007.jsonl
                                                                                 │ full
                                                                                 └──> 000007.jsonl.zst, next: 000008.jsonl

Nothing here stops or slows a run. If the queue or the disk is full, events are lost and counted (event ``lost``).
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from io import FileIO
from pathlib import Path
from typing import Any

import orjson

from skyrl_train.events.sampling import GroupSampler

logger = logging.getLogger(__name__)

EVENTS = "events"  # the folder, in the run folder
FLUSH_S = 1.0
SEGMENT_BYTES = 4 << 20
QUEUE_EVENTS = 65_536
CLOSE_LIMIT_S = 10.0  # a disk that does not answer must not keep a finished run from ending
_NAMED_GROUPS = 10_000  # in one ``lost`` event
_COLLECTED = 10_000  # details of a process without a run folder that wait to be taken
_ONE_LINE = orjson.OPT_SERIALIZE_NUMPY | orjson.OPT_APPEND_NEWLINE
_TIMES = ("t0", "t1")  # of environments, tools and agents

Detail = tuple[str, str | None, dict[str, Any]]  # kind, session, fields
_Waiting = tuple[str, float, float, dict[str, Any]]  # kind, t, m, fields


class EventLog:
    """Appends events to the segments in ``folder``. Thread and files begin with the first event.

    The methods that record may be called from any thread; :meth:`wants` and :meth:`detail` from the control loop only.

    Args:
        folder: None: nothing is recorded.
        max_per_s: limit of detail events (requests, environments, tools, agents) per second.
        clock: for ``m`` and all times within events, in seconds.
        queue_events: events that may wait for the thread.
        segment_bytes: size from which a segment is closed and compressed.
    """

    def __init__(
        self,
        folder: Path | None,
        max_per_s: int = 0,
        *,
        clock: Callable[[], float] = time.monotonic,
        queue_events: int = QUEUE_EVENTS,
        segment_bytes: int = SEGMENT_BYTES,
    ) -> None:
        self.now = clock
        self._folder = folder
        self._queue: deque[_Waiting] = deque()
        self._queue_events = queue_events
        self._segment_bytes = segment_bytes
        self._sampler = GroupSampler(max_per_s)
        self._closed = folder is None
        self._starting = threading.Lock()
        self._thread: threading.Thread | None = None
        self._wake = threading.Event()
        # Totals, because two threads count: the thread remembers which part it has reported.
        self._overflowed = 0
        self._overflowed_groups: deque[int | str] = deque(maxlen=_NAMED_GROUPS)
        # Of the thread alone.
        self._file: FileIO | None = None
        self._number = 0
        self._size = 0
        self._unwritten = 0
        self._unwritten_groups: set[int | str] = set()
        self._reported = (0, 0)  # lost, sampled out
        self._failing = False

    # Recording ----------------------------------------------------------------------------------------------------

    def record(self, kind: str, **fields: Any) -> None:
        """Record an event. ``fields`` are JSON-able and do not change afterwards."""
        self.put(kind, fields)

    def put(self, kind: str, fields: dict[str, Any]) -> None:
        """Record an event as :meth:`record` does. A dict display costs half as much as keywords, where events come with each
        group or response."""
        if self._closed:
            return
        if len(self._queue) >= self._queue_events:
            self._overflowed += 1
            self._overflowed_groups.extend(_groups_of(fields))
            return
        self._queue.append((kind, time.time(), self.now(), fields))
        if self._thread is None:
            self._start()
        elif len(self._queue) == self._queue_events // 4:
            self._wake.set()

    @contextlib.contextmanager
    def span(self, name: str, step: int | None = None) -> Iterator[None]:
        """Record the block as an activity of the trainer (``SPANS``), however it ends."""
        t0 = self.now()
        try:
            yield
        finally:
            self.record("span", name=name, step=step, t0=t0, t1=self.now())

    @contextlib.contextmanager
    def timed(self, kind: str, **fields: Any) -> Iterator[None]:
        """Record the block as an event of ``kind`` with ``t0``, ``t1`` and ``ok``, however it ends."""
        t0, ok = self.now(), False
        try:
            yield
            ok = True
        finally:
            self.record(kind, **fields, t0=t0, t1=self.now(), ok=ok)

    def wants(self, session: str | None) -> bool:
        """Count a coming detail event of a sample, and return whether it will be recorded (with :meth:`detail`)."""
        return not self._closed and self._sampler.wants(group_name(session), self.now())

    def detail(self, kind: str, session: str | None, fields: dict[str, Any]) -> None:
        """Record an event of a sample that :meth:`wants` has asked for.

        Args:
            session: the sample's session id (``TrajectoryID.to_string()``), or the name of another session.
            fields: see :meth:`record`. The names of the sample are added to it.
        """
        name = group_name(session)
        if self._closed or not self._sampler.chosen(name):
            return
        # Details leave room in the queue for the life of groups, which is never sampled.
        if len(self._queue) >= self._queue_events // 2:
            self._overflowed += 1
            self._sampler.give_up(name)
            return
        fields["session"] = session or ""
        fields["group"], fields["sample"] = sample_of(session)
        self.put(kind, fields)

    def take_over(self, details: Sequence[Detail]) -> None:
        """Record details of another process, from :meth:`CollectedEvents.take`, as far as they are wanted."""
        now = self.now()
        for kind, session, fields in details:
            if self.wants(session):
                self.detail(kind, session, fields | {name: now - fields[name] for name in _TIMES})

    def _start(self) -> None:
        with self._starting:
            if self._thread is None and not self._closed:
                self._thread = threading.Thread(target=self._run, name="events", daemon=True)
                self._thread.start()

    def close(self) -> None:
        """Write what is in the queue and close the segment. Nothing is recorded afterwards. Idempotent."""
        with self._starting:
            self._closed = True
        self._wake.set()
        if self._thread is not None:
            self._thread.join(CLOSE_LIMIT_S)

    # The thread ---------------------------------------------------------------------------------------------------

    def _run(self) -> None:
        assert self._folder is not None, "a log without a folder records nothing"
        self._number = max(segment_paths(self._folder), default=0)  # continue after the segments that are there
        compress_closed(self._folder, self._number)
        closed = False
        while not closed:
            self._wake.wait(FLUSH_S)
            self._wake.clear()
            closed = self._closed  # read before the queue: what was recorded before close() is in it
            batch = []
            while self._queue:
                batch.append(self._queue.popleft())
            self._write(batch)
        self._close_segment()

    def _write(self, batch: Sequence[_Waiting]) -> None:
        """Append a batch and what was lost since the last one. A disk that is full or gone loses the batch."""
        lost = self._lost_fields()
        waiting = batch if lost is None else [*batch, ("lost", time.time(), self.now(), lost)]
        if not waiting:
            return
        lines = []
        for kind, t, m, fields in waiting:
            try:
                lines.append(encode({"kind": kind, "t": t, "m": m, **fields}))
            except (TypeError, RecursionError) as error:  # what a user's engine says of itself may be anything
                logger.warning("an event %r cannot be encoded, and is lost: %s", kind, error)
                self._unwritten += 1
                self._unwritten_groups.update(_groups_of(fields))
        try:
            self._append(b"".join(lines))
        except OSError as error:
            self._unwritten += len(batch)
            for *_, fields in batch:
                self._unwritten_groups.update(_groups_of(fields))
            if lost is not None:  # said again with the next batch
                self._unwritten_groups.update(lost["groups"])
                self._reported = (self._reported[0] - lost["events"], self._reported[1] - lost["sampled_out"])
            if not self._failing:
                logger.warning("events cannot be recorded; the run continues without them: %s", error)
            self._failing = True
        else:
            self._failing = False

    def _lost_fields(self) -> dict[str, Any] | None:
        lost, sampled_out = self._overflowed + self._unwritten, self._sampler.left_out
        groups, self._unwritten_groups = self._unwritten_groups, set()
        while self._sampler.given_up:
            groups.add(_group_of(self._sampler.given_up.popleft()))
        while self._overflowed_groups:
            groups.add(self._overflowed_groups.popleft())
        if (lost, sampled_out) == self._reported and not groups:
            return None
        before, self._reported = self._reported, (lost, sampled_out)
        return {
            "events": lost - before[0],
            "sampled_out": sampled_out - before[1],
            "groups": sorted(groups, key=str)[:_NAMED_GROUPS],
        }

    def _append(self, content: bytes) -> None:
        """Write whole lines to the open segment.

        Raises:
            OSError: none of them is written.
        """
        assert self._folder is not None
        if self._file is None:
            self._folder.mkdir(parents=True, exist_ok=True)
            self._number += 1
            self._file, self._size = FileIO(self._folder / f"{self._number:06}.jsonl", "x"), 0
        try:
            written = 0
            while written < len(content):  # a write may be partial
                written += os.write(self._file.fileno(), memoryview(content)[written:])
        except OSError:
            with contextlib.suppress(OSError):
                self._file.truncate(self._size)
                self._file.seek(self._size)
            raise
        self._size += len(content)
        if self._size >= self._segment_bytes:
            self._close_segment()

    def _close_segment(self) -> None:
        if self._file is not None and self._folder is not None:
            self._file.close()
            self._file = None
            compress_closed(self._folder, self._number)


NO_EVENTS = EventLog(None)


class CollectedEvents(EventLog):
    """Collects the details that happen in a process without a run folder, for the process that has it.

    The clocks of two machines differ: times travel as seconds before they are taken.

    Attributes:
        collected: the latest details that have not been taken, with times of this process's clock.
    """

    def __init__(self) -> None:
        super().__init__(None)
        self.collected: deque[Detail] = deque(maxlen=_COLLECTED)

    def wants(self, session: str | None) -> bool:
        return True  # the other process decides

    def detail(self, kind: str, session: str | None, fields: dict[str, Any]) -> None:
        self.collected.append((kind, session, fields))

    def take(self) -> list[Detail]:
        """Return the details since the last call."""
        now, collected = self.now(), list(self.collected)
        self.collected.clear()
        return [
            (kind, session, fields | {name: now - fields[name] for name in _TIMES})
            for kind, session, fields in collected
        ]


def group_name(session: str | None) -> str:
    """Return the sampler's name of a session's group: the name of its prompt's turn in the stream, or the session itself."""
    if not session:
        return ""
    name = session.rpartition("_")[0]
    return name if "@" in name else session


def sample_of(session: str | None) -> tuple[int | None, int | None]:
    """Return group index and sample number of a session id; None if it belongs to an evaluation or an outside program."""
    name, _, sample = (session or "").rpartition("_")
    group = name.rpartition("@")[2] if "@" in name else ""
    return (int(group), int(sample)) if group.isdecimal() and sample.isdecimal() else (None, None)


def _group_of(name: str) -> int | str:
    group = name.rpartition("@")[2]
    return int(group) if "@" in name and group.isdecimal() else name


def _groups_of(fields: dict[str, Any]) -> list[int | str]:
    if "session" in fields:
        return [_group_of(group_name(fields["session"]))]
    return [fields["group"]] if "group" in fields else list(fields.get("groups", ()))


def encode(event: dict[str, Any]) -> bytes:
    """Encode an event, whose first key is its kind, on one line.

    NaN and infinities become null, and values that JSON lacks their text.
    """
    try:
        return orjson.dumps(event, default=str, option=_ONE_LINE)
    except TypeError:  # text that is not valid Unicode, integers above 64 bits
        return orjson.dumps(encodable(event), default=str, option=_ONE_LINE)


def encodable(value: Any) -> Any:
    """Return plain data that orjson encodes: text without lone surrogates, and integers above 64 bits as text."""
    if isinstance(value, str):
        return value.encode("utf-8", "replace").decode()
    if isinstance(value, int) and abs(value) >= 1 << 63:
        return str(value)
    if isinstance(value, dict):
        return {encodable(str(key)): encodable(inner) for key, inner in value.items()}
    return [encodable(inner) for inner in value] if isinstance(value, list | tuple) else value


# Segments ----------------------------------------------------------------------------------------------------------


def segment_paths(folder: Path) -> dict[int, Path]:
    """Return the segments in ``folder`` by number, in their order. One that is being compressed is there twice: the result has
    its compressed form."""
    paths = {}
    for path in sorted(folder.glob("*.jsonl*")):  # .jsonl comes before .jsonl.zst
        number, _, kind = path.name.partition(".")
        if number.isdecimal() and kind in ("jsonl", "jsonl.zst"):
            paths[int(number)] = path
    return dict(sorted(paths.items()))


def compress_closed(folder: Path, last: int) -> None:
    """Compress the plain segments up to number ``last``, also those of a killed process. A failure leaves them plain."""
    for number, path in segment_paths(folder).items():
        if number > last or path.suffix == ".zst":
            continue
        unfinished = path.with_name(f"{path.name}.zst.tmp")
        try:
            import pyarrow  # 0.1 s, which the start of a run does not need

            with pyarrow.CompressedOutputStream(str(unfinished), "zstd") as stream:
                stream.write(path.read_bytes())
            os.replace(unfinished, path.with_name(f"{path.name}.zst"))
            path.unlink()
        except (ImportError, OSError) as error:  # too little memory fails the import of a library
            logger.warning("%s stays uncompressed: %s", path, error)
            with contextlib.suppress(OSError):
                unfinished.unlink()
