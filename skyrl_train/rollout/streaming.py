"""Prompts from files that are read as they are needed.

    files ──RowStream──> StatefulDataLoader ──reader thread──> records ahead ──record(ordinal)──> loader
                                │
                                └── a mark every CHUNK_ROWS rows: where to read on from

Ordinal ``o`` is row ``o`` of the stream, all epochs one after the other. A checkpoint holds no rows, only the last mark at
or before the frontier: after a resume the few rows from there on are read again, so that they are the same objects with
the same types, and the data set's fingerprint guards that they are the same rows. Once a broken row was met, only those
that were issued have to be the same: that row has to be mended, and whatever comes after it may be.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| read-ahead | rows | room ahead of what is issued | an ordinal that is issued | records |
"""

from __future__ import annotations

import asyncio
import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from skyrl_train.concurrency import Signal
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.records import RecordMaker, record_json
from skyrl_train.rollout.rows import START, Place, RowFile, open_rows

CHUNK_ROWS = 32  # read in one go, and between two marks
ROWS_AHEAD = 256  # read beyond what is issued

# An ordinal, where its row is (None: at the start), the digest of all rows before it.
Mark = tuple[int, dict[str, Any] | None, str]
BEGINNING: Mark = (0, None, "")


class RowStream(IterableDataset[PromptRecord]):
    """All rows of all files, ``epochs`` times. Blocking."""

    def __init__(self, files: Sequence[RowFile], maker: RecordMaker, epochs: int) -> None:
        self.files = files
        self.maker = maker
        self.epochs = epochs

    def __iter__(self) -> RowIterator:
        return RowIterator(self)


class RowIterator(Iterator[PromptRecord]):
    """One pass over a :class:`RowStream`, from any place on."""

    def __init__(self, stream: RowStream) -> None:
        self._stream = stream
        self._epoch = 0
        self._file = 0
        self._place: Place = START  # of the next row in that file
        self._index = 0  # of the next row in its epoch
        self._records: Iterator[PromptRecord] | None = None

    def __next__(self) -> PromptRecord:
        if self._records is None:
            self._records = self._read()
        return next(self._records)

    def state_dict(self) -> dict[str, Any]:
        """Where the next row is; JSON-able."""
        return {"epoch": self._epoch, "file": self._file, "place": list(self._place), "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Goes on from there."""
        self._epoch, self._file, self._index = state["epoch"], state["file"], state["index"]
        self._place = (state["place"][0], state["place"][1])
        self._records = None

    def _read(self) -> Iterator[PromptRecord]:
        while self._epoch < self._stream.epochs:
            while self._file < len(self._stream.files):
                yield from self._read_file(self._stream.files[self._file])
                self._file, self._place = self._file + 1, START
            self._epoch, self._file, self._index = self._epoch + 1, 0, 0

    def _read_file(self, file: RowFile) -> Iterator[PromptRecord]:
        for row in file.rows(self._place):
            record = self._stream.maker.make(row, self._index, file.path.stem)
            self._place, self._index = row.next, self._index + 1
            yield record
        if self._place == START:
            raise DataError(f"{file.path} has no rows. Remove it from data.train_data or fill it.")


class StreamingPrompts:
    """A source of prompts for the loader; its rows come in the order of the files, ``epochs`` times.

    Uids that a file gives are not checked to be unique, which would take all of them in memory; ordinals tell groups apart.

    Raises:
        DataError: a file is missing or of a kind that is not read.
    """

    def __init__(self, paths: Iterable[Path], maker: RecordMaker, epochs: int) -> None:
        files = [open_rows(path) for path in paths]
        digests = hashlib.sha256(b"".join(file.path.stem.encode() + b"\0" + file.digest() for file in files))
        self.fingerprint = digests.hexdigest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchdata calls a deprecated function of torch
            self._rows = StatefulDataLoader(
                RowStream(files, maker, epochs),
                batch_size=None,
                collate_fn=_as_it_is,
                generator=torch.Generator(),  # without one it would draw from the random numbers of training
            )
        self._checks: list[Callable[[PromptRecord], None]] = []
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._iterator: Iterator[PromptRecord] | None = None  # used in that thread only
        self._records: dict[int, PromptRecord] = {}
        self._marks: deque[Mark] = deque()  # ascending
        self._begun = BEGINNING  # the mark that reading begins at
        self._read = 0  # ordinals below it were read
        self._issued = 0
        # Of all rows before an ordinal, for those from the next to be issued to the next to be read.
        self._digests = {0: ""}
        self._expected: str | None = None  # what that of the next to be issued has to be, in files that were mended
        self._is_open: Callable[[int], bool] = lambda ordinal: True
        self._error: BaseException | None = None  # why the rows from _read on will never be there
        self._end: int | None = None
        self._room = Signal()
        self._reading: asyncio.Task[None] | None = None
        self._closing = False

    def check_each(self, check: Callable[[PromptRecord], None]) -> None:
        """``check`` is called with each row that is read, in another thread, and may raise what :meth:`prepare` then does."""
        self._checks.append(check)

    # What the loader calls -----------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        """See :class:`skyrl_train.rollout.dataloader.PromptSource`, also for the following."""
        return {"dataset_len": None, "fingerprint": self.fingerprint, "sampler": "sequential"}

    async def start(self, changed: Callable[[], None]) -> None:
        while self._read <= self._issued and self._end is None and self._error is None:
            await self._read_chunk()
        if self._error is not None:
            raise self._error
        if self._read < self._issued:
            raise DataError(
                f"data.train_data ends after {self._read} prompts, but {self._issued} were issued before the checkpoint; "
                "resume with the files of the original run"
            )
        if self._expected not in (None, self._digests[self._issued]):
            raise CheckpointError(
                f"data.train_data has changed within its first {self._issued} rows, which the run has begun or trained already; "
                "mend only the broken row and what comes after it, or start a new run with another trainer.run_dir"
            )
        self._reading = asyncio.create_task(self._read_ahead(changed), name="prompts")
        self._reading.add_done_callback(lambda task: self._reading_ended(task, changed))

    async def aclose(self) -> None:
        self._closing = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    @property
    def end(self) -> int | None:
        return self._end

    @property
    def num_prompts(self) -> None:
        """Unknown until all is read."""
        return None

    def ready(self, ordinal: int) -> bool:
        return ordinal < self._read or self._end is not None or self._error is not None

    def prepare(self, ordinal: int) -> None:
        if ordinal >= self._read and self._error is not None:
            raise self._error
        if ordinal == self._issued:
            del self._digests[ordinal]
            self._issued += 1
        self._room.notify()

    def record(self, ordinal: int) -> PromptRecord:
        return self._records[ordinal]

    def settled(self, ordinals: Iterable[int], frontier: int) -> None:
        for ordinal in ordinals:
            self._records.pop(ordinal, None)
        while len(self._marks) > 1 and self._marks[1][0] <= frontier:
            self._marks.popleft()

    def observe(self, group: RolloutGroup) -> None:
        return None

    def state_dict(self) -> dict[str, Any]:
        ordinal, place, digest = self._marks[0] if self._marks else self._begun
        state = {"ordinal": ordinal, "place": place, "digest": digest}
        issued = self._digests.get(self._issued)
        if self._error is None or issued is None:
            return state
        return {**state, "broken": {"fingerprint": self.fingerprint, "issued": issued}}

    def may_change(self, state: Mapping[str, Any]) -> Sequence[str]:
        return ["fingerprint"] if "broken" in state else []

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        broken = state.get("broken", {"fingerprint": self.fingerprint})
        if broken["fingerprint"] == self.fingerprint:
            self._begun = (int(state["ordinal"]), state["place"], state.get("digest", ""))
        else:  # what is where has changed: all of it is read again, and compared
            self._expected = broken["issued"]
        self._read, place, digest = self._begun
        self._digests = {self._read: digest}
        self._issued, self._is_open = issued, is_open
        if place is not None:
            self._rows.load_state_dict(place)

    # Reading ------------------------------------------------------------------------------------------------------

    async def _read_ahead(self, changed: Callable[[], None]) -> None:
        """Consumes rows; waits for room; unblocked by an ordinal that is issued; produces records."""
        while self._end is None and self._error is None:
            await self._room.wait_until(lambda: self._read < self._issued + ROWS_AHEAD)
            await self._read_chunk()
            changed()

    def _reading_ended(self, task: asyncio.Task[None], changed: Callable[[], None]) -> None:
        """Nobody may wait for rows that nobody reads."""
        if self._closing:
            return
        if task.cancelled():
            self._error = DataError("the task that reads data.train_data was cancelled from outside of the trainer")
        else:
            self._error = self._error or task.exception()
        changed()

    async def _read_chunk(self) -> None:
        loop = asyncio.get_running_loop()
        digest = self._digests[self._read]
        place, records, digests, end = await loop.run_in_executor(self._thread, self._next_chunk, digest)
        self._marks.append((self._read, place, digest))
        for record, digest in zip(records, digests, strict=True):
            if self._read >= self._issued or self._is_open(self._read):
                self._records[self._read] = record
            if self._read < self._issued:
                del self._digests[self._read]
            self._read += 1
            self._digests[self._read] = digest
        if isinstance(end, StopIteration):
            self._end = self._read
        elif end is not None:
            end.add_note(
                "The rows before it must stay as they are, so that the same command goes on once it is mended."
            )
            self._error = end

    def _next_chunk(self, digest: str) -> tuple[dict[str, Any], list[PromptRecord], list[str], Exception | None]:
        """Reads on: where the chunk begins, its records, the ``digest`` of all rows continued to each of them, and what came
        after them instead of a row. In the thread."""
        if self._iterator is None:
            self._iterator = iter(self._rows)
        place = self._rows.state_dict()
        records: list[PromptRecord] = []
        digests: list[str] = []
        try:
            for _ in range(CHUNK_ROWS):
                record = next(self._iterator)
                for check in self._checks:
                    check(record)
                records.append(record)
                digest = hashlib.sha256((digest + record_json(record)).encode()).hexdigest()
                digests.append(digest)
        except Exception as error:  # the end, or a broken row: an answer to whoever asks for that row
            return place, records, digests, error
        return place, records, digests, None


def _as_it_is(record: PromptRecord) -> PromptRecord:
    return record
