"""Finished groups that wait to be trained: in memory and, beyond a limit, on the disk.

    put ──> in memory ──(limit passed: the latest deadlines)──> file ──load──> trained ──take──> gone

Selection needs an ordinal and a version, and those stay in memory. The number of groups has no limit here: admission bounds
it, so a trainer that falls behind holds generation up before this buffer grows.
"""

from __future__ import annotations

import asyncio
import heapq
import logging
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import TypeAlias

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.spill import SpilledGroup, SpillFolder
from skyrl_train.rollout.stragglers import FinishedGroup

logger = logging.getLogger(__name__)

BufferedGroup: TypeAlias = RolloutGroup | SpilledGroup

# What a token takes in the arrays of a sequence; and a number that a stage adds, in a list of CPython.
_BYTES_PER_PROMPT_TOKEN = 8
_BYTES_PER_RESPONSE_TOKEN = 8 + 1 + 8 + 8 + 8
_BYTES_PER_ADDED_NUMBER = 8 + 24
_BYTES_PER_SEQUENCE = 1024


class RolloutBuffer:
    """Holds groups by ordinal; which of them train next is the staleness manager's choice.

    Files are read and written in threads; nothing here blocks the event loop, which makes all the calls.

    Args:
        memory_bytes: what groups in memory may take, as :func:`size_bytes` estimates it; None: no limit.
        folder: where the others wait; not touched without a limit. Files of an earlier buffer in it are removed.
    """

    def __init__(self, memory_bytes: int | None = None, folder: Path | None = None) -> None:
        if memory_bytes is not None and folder is None:
            raise ValueError("a memory limit needs a folder for what is beyond it")
        self._limit = memory_bytes
        self._folder = SpillFolder(folder) if folder is not None else None
        self._contents = _Contents()
        self._leaving: dict[int, int] = {}  # ordinal -> bytes, of groups in memory that are being written
        self._writes: set[asyncio.Future[None]] = set()
        self._thread: ThreadPoolExecutor | None = None

    def __len__(self) -> int:
        return len(self._contents.groups)

    def __iter__(self) -> Iterator[BufferedGroup]:
        return iter(self._contents.groups.values())

    @property
    def memory_bytes(self) -> int:
        """What the groups that are in memory take, those included that are being written; an estimate."""
        return self._contents.memory_bytes

    @property
    def num_spilled(self) -> int:
        """Groups that are on the disk."""
        return sum(isinstance(group, SpilledGroup) for group in self)

    def put(self, group: RolloutGroup) -> None:
        """Adds a finished group."""
        self._contents.put(group)
        if self._folder is None or self._limit is None:
            return
        while self.memory_bytes - sum(self._leaving.values()) > self._limit:
            latest = self._contents.pop_latest()
            self._leaving[latest.ordinal] = size_bytes(latest)
            # Not the future's result: futures of threads are cyclic garbage, and the file lives as long as its group.
            spilled: list[SpilledGroup] = []
            write = partial(self._write, latest, spilled)
            writing = asyncio.get_running_loop().run_in_executor(self._writer(), write)
            self._writes.add(writing)
            writing.add_done_callback(partial(self._written, latest, spilled))

    async def load(self, chosen: Iterable[FinishedGroup]) -> list[RolloutGroup]:
        """The groups themselves, in the order given; they stay in the buffer."""
        groups = [self._contents.groups[handle.ordinal] for handle in chosen]
        if any(isinstance(group, SpilledGroup) for group in groups):
            return await asyncio.to_thread(lambda: [_read(group) for group in groups])
        return [_read(group) for group in groups]

    def take(self, groups: Iterable[FinishedGroup]) -> None:
        """Removes groups: they were trained, or are given up."""
        for group in groups:
            self._contents.remove(group.ordinal)
            self._leaving.pop(group.ordinal, None)

    def snapshot(self) -> tuple[BufferedGroup, ...]:
        """The groups as they are now. They never change, and can be read as long as the snapshot is held."""
        return tuple(self)

    async def restore(self, groups: Iterable[RolloutGroup]) -> None:
        """Replaces the contents before anything is put; ``groups`` is iterated in a thread.

        Raises:
            StalenessError: two of them have the same ordinal.
        """
        self._contents = await asyncio.to_thread(self._read_in, groups)

    def _read_in(self, groups: Iterable[RolloutGroup]) -> _Contents:
        contents, limit = _Contents(), self._limit
        for group in groups:
            contents.put(group)
            while self._folder is not None and limit is not None and contents.memory_bytes > limit:
                latest = contents.pop_latest()
                try:
                    contents.replace(self._folder.write(latest))
                except OSError as error:
                    contents.rank(latest)
                    logger.error("finished groups cannot be put on the disk and stay in memory: %s", error)
                    limit = None
        return contents

    async def flushed(self) -> None:
        """Returns when no file is being written any more."""
        while self._writes:
            await asyncio.wait(self._writes)

    async def aclose(self) -> None:
        """Stops writing. Idempotent."""
        await self.flushed()
        if self._thread is not None:
            self._thread.shutdown(wait=False)

    def _writer(self) -> ThreadPoolExecutor:
        if self._thread is None:
            self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="spill")
        return self._thread

    def _write(self, group: RolloutGroup, spilled: list[SpilledGroup]) -> None:
        assert self._folder is not None
        spilled.append(self._folder.write(group))

    def _written(self, group: RolloutGroup, spilled: list[SpilledGroup], written: asyncio.Future[None]) -> None:
        self._writes.discard(written)
        if written.cancelled():
            return
        error = written.exception()
        if error is not None:  # it counts as leaving from now on, so that it is not tried again and again
            logger.error("group %d cannot be put on the disk and stays in memory: %s", group.ordinal, error)
        elif self._leaving.pop(group.ordinal, None) is not None:  # else it was taken meanwhile
            self._contents.replace(spilled.pop())


@dataclass
class _Contents:
    """Groups by ordinal, and which of those in memory has the latest deadline."""

    groups: dict[int, BufferedGroup] = field(default_factory=dict)
    memory_bytes: int = 0
    _latest: list[tuple[int, int]] = field(default_factory=list)  # heap of (-version, -ordinal); some have left

    def put(self, group: RolloutGroup) -> None:
        if group.ordinal in self.groups:
            raise StalenessError(f"group {group.ordinal} finished twice")
        self.groups[group.ordinal] = group
        self.memory_bytes += size_bytes(group)
        if len(self._latest) > 2 * len(self.groups):  # mostly groups that have left: without this it would only grow
            self._latest = [entry for entry in self._latest if -entry[1] in self.groups]
            heapq.heapify(self._latest)
        self.rank(group)

    def rank(self, group: RolloutGroup) -> None:
        """Makes a group in memory one of those that :meth:`pop_latest` returns."""
        heapq.heappush(self._latest, (-group.oldest_version, -group.ordinal))

    def pop_latest(self) -> RolloutGroup:
        """The group in memory with the latest deadline; it is returned once and stays until it is replaced or removed."""
        while True:
            group = self.groups.get(-heapq.heappop(self._latest)[1])
            if isinstance(group, RolloutGroup):
                return group

    def replace(self, spilled: SpilledGroup) -> None:
        """From memory to the disk."""
        self.remove(spilled.ordinal)
        self.groups[spilled.ordinal] = spilled

    def remove(self, ordinal: int) -> None:
        group = self.groups.pop(ordinal)
        if isinstance(group, RolloutGroup):
            self.memory_bytes -= size_bytes(group)


def size_bytes(group: RolloutGroup) -> int:
    """About what a group takes in memory."""
    sequences = [sequence for sample in group.samples for sequence in sample.sequences]
    return sum(
        _BYTES_PER_SEQUENCE
        + _BYTES_PER_PROMPT_TOKEN * sequence.num_prompt_tokens
        + _BYTES_PER_RESPONSE_TOKEN * sequence.num_response_tokens
        + _BYTES_PER_ADDED_NUMBER
        * sum(len(of or ()) for of in (sequence.reference_logprobs, sequence.proximal_logprobs, sequence.values))
        for sequence in sequences
    )


def _read(group: BufferedGroup) -> RolloutGroup:
    return group if isinstance(group, RolloutGroup) else group.read()
