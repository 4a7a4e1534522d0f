"""Weights for a vLLM server: small messages over HTTP, the bytes through memory or a folder that both sides see."""

from __future__ import annotations

import asyncio
import contextlib
import dataclasses
import itertools
import mmap
import os
import tempfile
import uuid
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.remote_link import ServerLink
from skyrl_train.inference.weight_update import WeightUpdate

SHARED_MEMORY = "shared_memory"


class RemoteWeights:
    """Speaks to the worker extension through ``/collective_rpc``.

    Args:
        staging_folder: a folder that the server sees under the same path, or None: the server runs on this machine and
            maps the trainer's memory.
    """

    def __init__(self, link: ServerLink, staging_folder: Path | None) -> None:
        self._link = link
        self._folder = staging_folder
        name = f"skyrl-{uuid.uuid4().hex}"
        self._files = itertools.cycle([f"{name}-0", f"{name}-1"])  # the one being served from, and the next one

    async def receive(self, update: WeightUpdate) -> str | None:
        """Lets every worker check and map the update; returns why it cannot be loaded, or None."""
        from skyrl_train.inference.engines.vllm.messages import to_message

        if update.transport != SHARED_MEMORY:
            return f"This engine receives by {SHARED_MEMORY}, not by {update.transport!r}."
        if self._folder is not None:
            try:
                update = await asyncio.to_thread(_copy, update, self._folder / next(self._files))
            except OSError as error:
                return f"The weights of version {update.version} cannot be staged in {self._folder}: {error}."
        refusals = await self._on_workers("skyrl_receive", to_message(update))
        return next((refusal for refusal in refusals if refusal is not None), None)

    async def load(self, version: int) -> None:
        """Swaps the received update in, however long that takes. A failure leaves no usable model."""
        await self._on_workers("skyrl_load", version, patient=True)

    async def read_back(self, update: WeightUpdate) -> str:
        """The checksum of what is served, laid out like ``update``, which was loaded last.

        Raises:
            EngineError: it cannot be read.
        """
        with _shared_file(self._folder, update.num_bytes) as (path, descriptor):
            for refusal in await self._on_workers("skyrl_read_back", path, update.num_bytes):
                if refusal is not None:
                    raise EngineError(refusal)
            return await asyncio.to_thread(_checksum, descriptor, update.num_bytes)

    def close(self) -> None:
        """Removes what was staged."""
        if self._folder is not None:
            for _ in range(2):
                (self._folder / next(self._files)).unlink(missing_ok=True)

    async def _on_workers(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        answer = await self._link.post("/collective_rpc", {"method": method, "args": arguments}, patient=patient)
        results: list[Any] = answer["results"]
        return results


def _copy(update: WeightUpdate, target: Path) -> WeightUpdate:
    """Writes the update's bytes to ``target``; returns the update that lies there."""
    with Path(update.location).open("rb") as source, target.open("wb") as copy:
        left = update.num_bytes
        while left > 0:
            sent = os.sendfile(copy.fileno(), source.fileno(), None, left)
            if sent == 0:
                raise OSError(f"{update.location} ends {left} bytes too early")
            left -= sent
    return dataclasses.replace(update, location=str(target))


@contextlib.contextmanager
def _shared_file(folder: Path | None, num_bytes: int) -> Iterator[tuple[str, int]]:
    """A file of ``num_bytes`` under a path that the server can open, and its descriptor here."""
    if folder is None:
        descriptor = os.memfd_create("skyrl-served", os.MFD_CLOEXEC)
        path = f"/proc/{os.getpid()}/fd/{descriptor}"
    else:
        descriptor, path = tempfile.mkstemp(prefix="skyrl-served-", dir=folder)
    try:
        os.ftruncate(descriptor, num_bytes)
        yield path, descriptor
    finally:
        os.close(descriptor)
        if folder is not None:
            Path(path).unlink()


def _checksum(descriptor: int, num_bytes: int) -> str:
    import torch

    from skyrl_train.inference.shared_weights import checksum

    return checksum(torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8))
