"""Prompts from files that are read as needed.

    files ──RowStream──> StatefulDataLoader ──reader thread──> records ahead ──record(group index)──> loader
                                │
                                └── a mark every CHUNK_ROWS rows: a position from which to read again

Group index ``o`` is row ``o`` of the stream, all epochs one after the other. A checkpoint contains no rows, only the last mark
at or before the frontier. After a resume, the few rows from there on are read again, so that they are the same objects with
the same types; the data set's fingerprint guarantees that they are the same rows. After a broken row, only the issued rows
have to be the same: the broken row must be fixed, and all rows after it may change.

| loop | consumes | waits for | is unblocked by | produces |
|---|---|---|---|---|
| read-ahead | rows | room ahead of what is issued | a group index that is issued | records |
"""

from __future__ import annotations

import asyncio
import hashlib
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils.data import IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.rollout.data.dataset import START, Place, RecordMaker, RowFile, open_rows, record_json
from skyrl_train.rollout.data.samplers import PromptSource
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import RolloutGroup

CHUNK_ROWS = 32  # rows read at once, and between two marks
ROWS_AHEAD = 256  # rows read beyond the issued ones

# A group index, the position of its row (None: at the start), the digest of all rows before it.
Mark = tuple[int, dict[str, Any] | None, str]
BEGINNING: Mark = (0, None, "")


@dataclass(eq=False)
class RowStream(IterableDataset[PromptRecord]):
    """All rows of all files, ``epochs`` times. Blocking."""

    files: Sequence[RowFile]
    maker: RecordMaker
    epochs: int

    def __iter__(self) -> RowIterator:
        return RowIterator(self)


class RowIterator(Iterator[PromptRecord]):
    """One pass over a :class:`RowStream`, from any place."""

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
        """Return the position of the next row; JSON-able."""
        return {"epoch": self._epoch, "file": self._file, "place": list(self._place), "index": self._index}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Continue from :meth:`state_dict`."""
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
            record = self._stream.maker.make(row, self._index, file.source)
            self._place, self._index = row.next, self._index + 1
            yield record
        if self._place == START:
            raise DataError(f"{file.name} has no rows. Remove it from data.train_data or fill it.")


class StreamingPrompts(PromptSource):
    """Prompts in the order of the files, ``epochs`` times.

    Uids from the files are not checked for uniqueness, which would need all of them in memory; group indices identify groups.

    Attributes:
        checks: called with each prompt that is read, in another thread. :meth:`prepare` raises their errors.
        fit: called with each prompt before; returns it, a shorter one, or None to leave it out.
        closed: whether it is closed, and can be read no more.

    Raises:
        DataError: a file is missing or has an unknown format.
    """

    def __init__(self, names: Iterable[str], maker: RecordMaker, epochs: int) -> None:
        self._arguments = (tuple(names), maker, epochs)
        files = [open_rows(name) for name in self._arguments[0]]
        digests = hashlib.sha256(b"".join(file.source.encode() + b"\0" + file.digest() for file in files))
        self.fingerprint = digests.hexdigest()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torchdata calls a deprecated torch function
            self._rows = StatefulDataLoader(
                RowStream(files, maker, epochs),
                batch_size=None,
                collate_fn=lambda record: record,
                generator=torch.Generator(),  # without one it would consume random numbers of training
            )
        self.checks: list[Callable[[PromptRecord], None]] = []
        self.fit: Callable[[PromptRecord], PromptRecord | None] = lambda record: record
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="prompts")
        self._iterator: Iterator[PromptRecord] | None = None  # used only in that thread
        self._records: dict[int, PromptRecord] = {}
        self._marks: deque[Mark] = deque()  # ascending
        self._begun = BEGINNING  # the mark from which reading begins
        self._read = 0  # group indices below this were read
        self._issued = 0
        # Digest of all rows before a group index, from the next index to be issued to the next to be read.
        self._digests = {0: ""}
        self._expected: str | None = None  # expected digest of the issued rows, in files that were fixed after an error
        self._is_open: Callable[[int], bool] = lambda group_index: True
        self._error: BaseException | None = None  # reason why no rows from _read on will ever be read
        self._room = Signal()
        self._reading: asyncio.Task[None] | None = None
        self.closed = False

    def reopened(self) -> StreamingPrompts:
        """Return the same prompts, of which nothing is read yet."""
        prompts = StreamingPrompts(*self._arguments)
        prompts.checks, prompts.fit = self.checks, self.fit
        return prompts

    # Calls of the loader -------------------------------------------------------------------------------------------

    def identity(self) -> dict[str, Any]:
        return {"dataset_len": None, "fingerprint": self.fingerprint, "sampler": "sequential"}

    async def start(self, changed: Callable[[], None]) -> None:
        # After a resume, read up to the next index: groups that were in flight need their prompts at once.
        while self._read <= self._issued and self.end is None and self._error is None:
            await self._read_chunk()
        if self._error is not None:
            raise self._error
        if self.end == 0:  # a file without rows is an error of its own
            raise DataError(
                "All prompts of data.train_data are too long and were left out (data.on_long_prompt=filter). Raise "
                "generator.max_input_length, or set data.on_long_prompt=truncate to cut their beginnings off."
            )
        if self._read < self._issued:
            raise DataError(
                f"data.train_data ends after {self._read} prompts, but {self._issued} were issued before the checkpoint; "
                "resume with the files of the original run"
            )
        # The issued rows must be the same in fixed files, because their outcomes are in the ledger.
        if self._expected not in (None, self._digests[self._issued]):
            raise CheckpointError(
                f"data.train_data has changed within its first {self._issued} rows, which the run has begun or trained already; "
                "fix only the broken row and later rows, or start a new run with another trainer.run_dir"
            )
        self._reading = asyncio.create_task(self._read_ahead(changed), name="prompts")
        self._reading.add_done_callback(lambda task: self._reading_ended(task, changed))

    async def aclose(self) -> None:
        self.closed = True
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        self._thread.shutdown(wait=False, cancel_futures=True)

    def ready(self, group_index: int) -> bool:
        return group_index < self._read or self.end is not None or self._error is not None

    def prepare(self, group_index: int) -> None:
        if group_index >= self._read and self._error is not None:
            raise self._error
        # An index that is issued again after a resume is smaller, and is counted already.
        if group_index == self._issued:
            del self._digests[group_index]
            self._issued += 1
        self._room.notify()

    def record(self, group_index: int) -> PromptRecord:
        return self._records[group_index]

    def settled(self, group_indices: Iterable[int], frontier: int, groups: Iterable[RolloutGroup]) -> None:
        for group_index in group_indices:
            self._records.pop(group_index, None)
        # Keep the last mark at or before the frontier: a resume reads from there.
        while len(self._marks) > 1 and self._marks[1][0] <= frontier:
            self._marks.popleft()

    def state_dict(self) -> dict[str, Any]:
        group_index, place, digest = self._marks[0] if self._marks else self._begun
        state = {"group_index": group_index, "place": place, "digest": digest}
        issued = self._digests.get(self._issued)
        # To fix a broken row changes the fingerprint; the digest of the issued rows is compared instead.
        if self._error is None or issued is None:
            return state
        return {**state, "broken": {"fingerprint": self.fingerprint, "issued": issued}}

    def load_state_dict(self, state: Mapping[str, Any], is_open: Callable[[int], bool], issued: int) -> None:
        broken = state.get("broken", {"fingerprint": self.fingerprint})
        if broken["fingerprint"] == self.fingerprint:
            self._begun = (int(state["group_index"]), state["place"], state.get("digest", ""))
        else:  # the positions have changed: read all rows again and compare them
            self._expected = broken["issued"]
        self._read, place, digest = self._begun
        self._digests = {self._read: digest}
        self._issued, self._is_open = issued, is_open
        if place is not None:
            self._rows.load_state_dict(place)

    # Reading ------------------------------------------------------------------------------------------------------

    async def _read_ahead(self, changed: Callable[[], None]) -> None:
        """Read ahead. Consumes rows; waits for room; unblocked by an issued group index; produces records."""
        while self.end is None and self._error is None:
            await self._room.wait_until(lambda: self._read < self._issued + ROWS_AHEAD)
            await self._read_chunk()
            changed()

    def _reading_ended(self, task: asyncio.Task[None], changed: Callable[[], None]) -> None:
        """Record why reading ended, so that the loader does not wait for rows forever."""
        if self.closed:
            return
        if task.cancelled():
            self._error = DataError("the task that reads data.train_data was cancelled from outside the trainer")
        else:
            self._error = self._error or task.exception()
        changed()

    async def _read_chunk(self) -> None:
        loop = asyncio.get_running_loop()
        digest = self._digests[self._read]
        place, records, digests, end = await loop.run_in_executor(self._thread, self._next_chunk, digest)
        self._marks.append((self._read, place, digest))
        for record, digest in zip(records, digests, strict=True):
            # Of the rows read again after a resume, only those without an outcome are needed.
            if self._read >= self._issued or self._is_open(self._read):
                self._records[self._read] = record
            if self._read < self._issued:
                del self._digests[self._read]
            self._read += 1
            self._digests[self._read] = digest
        if isinstance(end, StopIteration):
            self.end = self._read
        elif end is not None:
            end.add_note("Fix that row and keep all rows before it as they are; the same command then resumes the run.")
            self._error = end

    def _next_chunk(self, digest: str) -> tuple[dict[str, Any], list[PromptRecord], list[str], Exception | None]:
        """Read the next rows. Runs in the reader thread.

        Args:
            digest: of all rows before.

        Returns:
            The position of the chunk, its records, the digest after each of them, and the exception that ended the chunk
            early (StopIteration at the end of the data), if any.
        """
        if self._iterator is None:
            self._iterator = iter(self._rows)
        # Before the first row of the chunk: a resume reads the whole chunk again.
        place = self._rows.state_dict()
        records: list[PromptRecord] = []
        digests: list[str] = []
        try:
            for _ in range(CHUNK_ROWS):
                record = self.fit(next(self._iterator))
                if record is None:
                    continue
                for check in self.checks:
                    check(record)
                records.append(record)
                digest = hashlib.sha256((digest + record_json(record)).encode()).hexdigest()
                digests.append(digest)
        except Exception as error:  # the end of the data, or a broken row; raised when that row is issued
            return place, records, digests, error
        return place, records, digests, None
