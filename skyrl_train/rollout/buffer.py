"""Finished groups that wait to be trained: in memory and, beyond a limit, on disk. Also their JSON form.

    put ──> in memory ──(above the limit: latest deadlines first)──> file ──load──> trained ──take──> removed

Selection needs only group index and version, which stay in memory. The number of groups has no limit here: admission bounds
it, so a slow trainer stops generation before this buffer grows.
"""

from __future__ import annotations

import asyncio
import contextlib
import heapq
import itertools
import json
import logging
import secrets
import weakref
from collections.abc import Iterable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields
from functools import partial
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import orjson

from skyrl_train.errors import StalenessError
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample

logger = logging.getLogger(__name__)

# Bytes of a token in the arrays of a sequence, and of a number that a stage adds, in a list of CPython.
_BYTES_PER_PROMPT_TOKEN = 8
_BYTES_PER_RESPONSE_TOKEN = 8 + 1 + 8 + 8 + 8
_BYTES_PER_ADDED_NUMBER = 8 + 24
_BYTES_PER_SEQUENCE = 1024


class SpilledGroup:
    """A group on disk, in the file ``path`` as :func:`encode_group` encodes it.

    The file is removed with this object, so a snapshot stays readable after its groups are trained.
    """

    def __init__(self, group: RolloutGroup, path: Path) -> None:
        """Write the file. Blocking."""
        self.group_index = group.group_index
        self.oldest_version = group.oldest_version
        self.path = path
        weakref.finalize(self, _remove_file, path)  # before the write: a full disk leaves half a file
        path.write_bytes(encode_group(group))


def _remove_file(path: Path) -> None:
    with contextlib.suppress(OSError):  # the folder may have been removed first
        path.unlink()


BufferedGroup: TypeAlias = RolloutGroup | SpilledGroup


class RolloutBuffer:
    """Holds groups by group index. The staleness manager chooses which of them train next.

    Files are read and written in threads; no call blocks the event loop. All calls come from the event loop. Groups never
    change, so ``tuple(buffer)`` is a snapshot that stays readable.

    Args:
        memory_bytes: limit for groups in memory, as estimated by :func:`size_bytes`; None: no limit.
        folder: for the other groups; required with a limit. Files of an earlier buffer in it are removed.

    Attributes:
        memory_bytes: estimated size of the groups in memory, including those that are being written.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None) -> None:
        if memory_bytes is not None and folder is None:
            raise ValueError("a memory limit needs a folder for the groups beyond it")
        self._limit = memory_bytes
        self._folder = folder
        self._folder_ready = False  # it exists, without the files of an earlier buffer
        self._file_numbers = itertools.count()
        # Groups of an earlier buffer may still exist and unlink their files, so names must differ.
        self._file_mark = secrets.token_hex(4)
        self._groups: dict[int, BufferedGroup] = {}
        self.memory_bytes = 0
        self._latest: list[tuple[int, int]] = []  # heap of (-version, -group index); may contain groups that have left
        self._leaving: dict[int, int] = {}  # group index -> bytes, for groups in memory that are being written
        self._writes: set[asyncio.Future[None]] = set()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._groups)

    def __iter__(self) -> Iterator[BufferedGroup]:
        return iter(self._groups.values())

    def put(self, group: RolloutGroup) -> None:
        """Add a finished group. Above the limit, start to write the groups with the latest deadlines to disk."""
        self._add(group)
        if self._limit is None:
            return
        # Groups with the latest deadlines train last. Those that are being written count as gone, or they would be chosen again.
        while self.memory_bytes - sum(self._leaving.values()) > self._limit:
            latest = self._pop_latest()
            self._leaving[latest.group_index] = size_bytes(latest)
            if self._thread is None:
                self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spill")
            # The result travels in a list: a future of a thread is cyclic garbage, which would keep the file alive until the
            # next garbage collection.
            spilled: list[SpilledGroup] = []
            write = partial(self._write, latest, spilled)
            writing = asyncio.get_running_loop().run_in_executor(self._thread, write)
            self._writes.add(writing)
            writing.add_done_callback(partial(self._on_written, latest, spilled))

    def _on_written(self, group: RolloutGroup, spilled: list[SpilledGroup], written: asyncio.Future[None]) -> None:
        self._writes.discard(written)
        # The event loop is closing; the group stays in memory.
        if written.cancelled():
            return
        error = written.exception()
        if error is not None:  # the group stays in _leaving, so that it is not tried again and again
            logger.error("group %d cannot be written to disk and stays in memory: %s", group.group_index, error)
        elif self._leaving.pop(group.group_index, None) is not None:  # None: the group was taken meanwhile
            self.take([group])
            self._groups[group.group_index] = spilled.pop()

    def _write(self, group: RolloutGroup, spilled: list[SpilledGroup]) -> None:
        """Write a group to disk and append it to ``spilled``. Blocking; in one thread at a time.

        Raises:
            OSError: the disk is full, or the folder is not writable.
        """
        assert self._folder is not None, "a buffer with a limit has one"
        if not self._folder_ready:
            self._folder.mkdir(parents=True, exist_ok=True)
            # This buffer has written no file yet, so all of them are from a killed process.
            for stale in self._folder.glob("group-*.json"):
                stale.unlink(missing_ok=True)
            self._folder_ready = True
        name = f"group-{group.group_index}-{self._file_mark}-{next(self._file_numbers)}.json"
        spilled.append(SpilledGroup(group, self._folder / name))

    async def load(self, chosen: Iterable[BufferedGroup]) -> list[RolloutGroup]:
        """Return the groups in the given order, read from disk where needed. They stay in the buffer."""
        groups = [self._groups[handle.group_index] for handle in chosen]
        # Most runs never spill; a thread would only cost them time.
        in_memory = [group for group in groups if isinstance(group, RolloutGroup)]
        if len(in_memory) == len(groups):
            return in_memory
        return await asyncio.to_thread(
            lambda: [
                decode_group(group.path.read_bytes()) if isinstance(group, SpilledGroup) else group for group in groups
            ]
        )

    def take(self, groups: Iterable[BufferedGroup]) -> None:
        """Remove groups that were trained or dropped."""
        for group in groups:
            taken = self._groups.pop(group.group_index)
            if isinstance(taken, RolloutGroup):
                self.memory_bytes -= size_bytes(taken)
            # If it is being written, its file is removed as soon as it is complete.
            self._leaving.pop(group.group_index, None)

    def restore(self, groups: Iterable[RolloutGroup]) -> None:
        """Replace the contents, before anything is put. Blocking: call it in a thread.

        Raises:
            StalenessError: two groups have the same group index.
        """
        self._groups, self._latest, self.memory_bytes = {}, [], 0
        # Spill while reading: the groups of a checkpoint together may exceed the memory.
        limit = self._limit
        for group in groups:
            self._add(group)
            while limit is not None and self.memory_bytes > limit:
                latest, spilled = self._pop_latest(), list[SpilledGroup]()
                try:
                    self._write(latest, spilled)
                except OSError as error:
                    heapq.heappush(self._latest, (-latest.oldest_version, -latest.group_index))
                    logger.error("finished groups cannot be written to disk and stay in memory: %s", error)
                    # The next write would fail in the same way.
                    limit = None
                else:
                    self.take([latest])
                    self._groups[latest.group_index] = spilled.pop()

    async def flushed(self) -> None:
        """Wait until no file is being written."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def aclose(self) -> None:
        """Wait for the current writes and end the thread. Idempotent."""
        await self.flushed()
        if self._thread is not None:
            # The thread is idle after flushed(), so there is nothing to wait for.
            self._thread.shutdown(wait=False)

    def _add(self, group: RolloutGroup) -> None:
        if group.group_index in self._groups:
            raise StalenessError(f"group {group.group_index} finished twice")
        self._groups[group.group_index] = group
        self.memory_bytes += size_bytes(group)
        if len(self._latest) > 2 * len(self._groups):  # mostly groups that have left; otherwise the heap only grows
            self._latest = [entry for entry in self._latest if -entry[1] in self._groups]
            heapq.heapify(self._latest)
        heapq.heappush(self._latest, (-group.oldest_version, -group.group_index))

    def _pop_latest(self) -> RolloutGroup:
        """Return the group in memory with the latest deadline, each once. It stays until it is replaced or removed."""
        while True:
            # The heap may contain groups that have left or are on disk already.
            group = self._groups.get(-heapq.heappop(self._latest)[1])
            if isinstance(group, RolloutGroup):
                return group


def size_bytes(group: RolloutGroup) -> int:
    """Estimate the memory of a group, in bytes."""
    return sum(
        _BYTES_PER_SEQUENCE
        + _BYTES_PER_PROMPT_TOKEN * (len(sequence.token_array) - len(sequence.version_array))
        + _BYTES_PER_RESPONSE_TOKEN * len(sequence.version_array)
        + _BYTES_PER_ADDED_NUMBER
        * sum(len(of or ()) for of in (sequence.reference_logprobs, sequence.proximal_logprobs, sequence.values))
        for sample in group.samples
        for sequence in sample.sequences
    )


# JSON --------------------------------------------------------------------------------------------------------------
# Used for spilled groups and checkpoints. Floats survive exactly. orjson, because encoding holds the interpreter lock and
# with it every rollout.


def to_line(value: Mapping[str, Any]) -> bytes:
    """Encode a JSON-able value, in which lists may be numpy arrays, on one line without the line break."""
    try:
        return orjson.dumps(value, option=orjson.OPT_SERIALIZE_NUMPY)
    except TypeError:  # text that is not valid Unicode (half a surrogate pair in a user's uid); json can write it
        return json.dumps(value, default=np.ndarray.tolist).encode("ascii")


def from_line(line: bytes) -> Any:
    """Decode the output of :func:`to_line`.

    Raises:
        ValueError: it is not JSON.
    """
    try:
        return orjson.loads(line)
    except ValueError:
        return json.loads(line)


def encode_group(group: RolloutGroup) -> bytes:
    """Encode a group on one line without the line break."""
    row: dict[str, Any] = {
        **{each.name: getattr(group, each.name) for each in fields(group)},
        "samples": [
            {"sequences": [sequence.row() for sequence in sample.sequences], "reward_parts": sample.reward_parts}
            for sample in group.samples
        ],
    }
    return to_line(row)


def decode_group(line: bytes) -> RolloutGroup:
    """Decode the output of :func:`encode_group`, also of earlier versions of this library.

    Raises:
        ValueError, KeyError, TypeError: the line has another format.
    """
    row: dict[str, Any] = from_line(line)
    samples = tuple(
        # In format 1, a sample was its only sequence.
        Sample(
            tuple(RolloutSequence.of_lists(**sequence) for sequence in sample.get("sequences", [sample])),
            sample.get("reward_parts"),
        )
        for sample in row["samples"]
    )
    return RolloutGroup(**{**row, "samples": samples})
