"""Weights for a vLLM server: small messages over HTTP, the bytes through memory or a folder that both sides see."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.remote_link import ServerLink
from skyrl_train.inference.weight_update import WeightUpdate


class RemoteWeights:
    """Speaks to the worker extension through ``/collective_rpc``: each worker opens an update by itself."""

    def __init__(self, link: ServerLink) -> None:
        self._link = link

    async def receive(self, update: WeightUpdate) -> str | None:
        """Lets every worker check and map the update; returns why it cannot be loaded, or None."""
        from skyrl_train.inference.engines.vllm.messages import to_message

        if update.adapter is not None:
            return f"The update brings {update.adapter}; requests to a server name none. Set trainer.policy.model.lora.rank=0."
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
        with _shared_file(_folder_of(update), update.num_bytes) as (path, descriptor):
            for refusal in await self._on_workers("skyrl_read_back", path, update.num_bytes):
                if refusal is not None:
                    raise EngineError(refusal)
            return await asyncio.to_thread(_checksum, descriptor, update.num_bytes)

    async def _on_workers(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        answer = await self._link.post("/collective_rpc", {"method": method, "args": arguments}, patient=patient)
        results: list[Any] = answer["results"]
        return results


def _folder_of(update: WeightUpdate) -> Path | None:
    """Where both sides can open a file if the update came by one; None: they share memory."""
    from skyrl_train.inference import delta_weights, disk_weights

    if update.transport == disk_weights.TRANSPORT_NAME:
        return Path(update.location).parent
    if update.transport == delta_weights.TRANSPORT_NAME:
        return Path(delta_weights.Chain.parse(update).links[0].path).parent
    return None


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
