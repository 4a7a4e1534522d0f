"""A scripted engine that really takes weights: quick to import (no torch), for the tests of engines in other processes."""

from __future__ import annotations

import asyncio
import os
import sys
import zlib
from pathlib import Path

from scripted import ScriptedEngine

from skyrl_train.errors import EngineError
from skyrl_train.weight_sync.update import WeightUpdate


class ReceivingEngine(ScriptedEngine):
    """Copies the bytes of an update when it is received, and fails the load if they differ from the gathered ones."""

    def __init__(self) -> None:
        super().__init__(free_running=True)
        self.received_bytes = b""
        self.serving = ""

    async def receive_weights(self, update: WeightUpdate) -> None:
        await super().receive_weights(update)
        self.received_bytes = await asyncio.to_thread(Path(update.location).read_bytes)

    async def load_weights(self, update: WeightUpdate) -> None:
        if self.received != update:
            raise EngineError(f"Version {update.version} was not received.")
        checksum = f"crc32:{zlib.crc32(self.received_bytes[: update.num_bytes]):08x}"
        if checksum != update.checksum:
            raise EngineError("The bytes differ from their checksum.")
        await super().load_weights(update)
        self.serving = checksum

    async def served_checksum(self) -> str:
        return self.serving


class Leaving(ReceivingEngine):
    """Writes a file when it is torn down, and may then not return."""

    def __init__(self, file: str, hangs: bool) -> None:
        super().__init__()
        self._file, self._hangs = file, hangs

    async def teardown(self) -> None:
        await super().teardown()
        await asyncio.to_thread(Path(self._file).touch)
        if self._hangs:
            await asyncio.Event().wait()


class Importing(ReceivingEngine):
    """Starts a process, writes its number to a pipe, and never gets ready."""

    def __init__(self, pipe: str) -> None:
        super().__init__()
        self._pipe = pipe

    async def start(self) -> None:
        process = await asyncio.create_subprocess_exec("sleep", "infinity")
        await asyncio.to_thread(Path(self._pipe).write_text, str(process.pid))
        await process.wait()


class Talking(ReceivingEngine):
    """Prints, and writes to the descriptor of standard error."""

    async def start(self) -> None:
        await super().start()
        sys.stdout.write("in Python\n")
        sys.stdout.flush()
        os.write(2, b"beneath Python\n")


def refusing(message: str) -> ReceivingEngine:
    """An engine that cannot be built."""
    raise EngineError(message)
