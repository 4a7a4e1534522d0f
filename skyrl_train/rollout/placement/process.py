"""Stages that compute in processes of their own."""

from __future__ import annotations

import asyncio
from typing import Any

from skyrl_train.child_process import ChildProcess, encode, read_frame
from skyrl_train.rollout.placement.base import Outcome, Raised, Work
from skyrl_train.rollout.placement.workers import Worker, WorkerGone

MODULE = "skyrl_train.rollout.placement.child"


class ProcessWorker(Worker):
    """A process: no interpreter lock is shared, and what hangs or crashes takes nothing else with it."""

    def __init__(self, work: Work) -> None:
        self._work = work
        self._process: ChildProcess | None = None
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    @property
    def pid(self) -> int | None:
        """The process's id, while it is meant to run."""
        return None if self._process is None else self._process.pid

    async def start(self) -> None:
        self._process = await asyncio.to_thread(ChildProcess, MODULE)
        self._reader, self._writer = await asyncio.open_connection(sock=self._process.connection)
        try:
            built = await self.call(self._work)
        except WorkerGone as gone:
            built = Raised.of(gone)
        if isinstance(built, Raised):
            await self.stop()
            raise built.start_failed()

    async def call(self, argument: Any) -> Outcome:
        if self._process is None or self._reader is None or self._writer is None:
            raise WorkerGone("its process was stopped")
        try:
            frame = encode(argument)
        except Exception as error:  # whatever somebody's object does when it is pickled
            return Raised.of(error)
        try:
            self._writer.write(frame)
            await self._writer.drain()
            outcome: Outcome = await read_frame(self._reader)
        except (asyncio.IncompleteReadError, OSError):
            code = await asyncio.to_thread(self._process.exit_code)
            raise WorkerGone(f"its process ended with exit code {code}") from None
        except Exception as error:  # whatever somebody's result does when it is unpickled
            return Raised.of(error)
        return outcome

    async def stop(self) -> None:
        writer, process = self._writer, self._process
        self._reader = self._writer = self._process = None
        if writer is not None:
            writer.close()
        if process is not None:
            await asyncio.to_thread(process.stop)
