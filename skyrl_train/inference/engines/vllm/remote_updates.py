"""A remote engine's weight updates: small messages over HTTP, the bytes through memory or a folder that both sides see."""

from __future__ import annotations

import asyncio
import contextlib
import mmap
import os
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from skyrl_train.errors import EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm.remote_facts import Facts
from skyrl_train.inference.engines.vllm.remote_link import ServerLink
from skyrl_train.inference.engines.vllm.remote_traffic import RemoteTraffic
from skyrl_train.inference.engines.vllm.swaps import Swaps
from skyrl_train.inference.weight_update import WeightUpdate


class RemoteUpdates:
    """Received, loaded by every worker of the server (each opens an update by itself), read back; over all the engine's lives.

    Args:
        url: of the server.
        alive: the way to it; raises EngineDeadError where there is none.
        traffic: learns which version it samples from.
    """

    def __init__(self, url: str, alive: Callable[[], ServerLink], traffic: RemoteTraffic) -> None:
        self._url = url
        self._alive = alive
        self._traffic = traffic
        self._broken = ""  # the instance that an update left without a usable model
        self._swaps = Swaps("a remote vLLM engine")

    def check(self, facts: Facts) -> None:
        """Raises:
        EngineDeadError: the model of this server was damaged by a failed update.
        """
        if facts.instance == self._broken:
            raise EngineDeadError(
                f"An update failed half-way in the vLLM server at {self._url}; start a new server there."
            )

    def forget(self) -> None:
        """The server holds nothing of what was loaded."""
        self._swaps.forget()

    async def receive(self, update: WeightUpdate) -> None:
        """Checks an update and maps its memory in every worker; whatever is wrong with it, ``load`` raises."""
        await self._swaps.receive(update, self._refusal)

    async def load(self, update: WeightUpdate, *, held: bool) -> None:
        """Swaps a received update into every worker.

        Args:
            held: see :meth:`RemoteTraffic.weights_changed`.

        Raises:
            EngineError: it was not received, or is not this model's: the old weights stay.
            EngineDeadError: a worker failed half-way.
        """
        await self._swaps.load(update, lambda received: self._swap(received, held))

    async def settled(self) -> None:
        """Returns when no swap is under way, also none whose caller has given up."""
        await self._swaps.settled()

    async def served_checksum(self) -> str:
        """Of the weights being served, laid out like the update loaded last.

        Raises:
            EngineError: nothing was loaded yet, or it cannot be read.
        """
        update = self._swaps.require_loaded()
        with _shared_file(_folder_of(update), update.num_bytes) as (path, descriptor):
            for refusal in await self._on_workers("skyrl_read_back", path, update.num_bytes):
                if refusal is not None:
                    raise EngineError(refusal)
            return await asyncio.to_thread(_checksum, descriptor, update.num_bytes)

    async def _refusal(self, update: WeightUpdate) -> str | None:
        """Lets every worker map the update; why it cannot be loaded, or None."""
        from skyrl_train.inference.engines.vllm.messages import to_message

        if update.transport not in self._alive().facts.transports:
            return (
                f"Weights by {update.transport!r} do not reach the vLLM server at {self._url}; it must run on this "
                "machine as this user, or set generator.weight_folder to a folder that both machines see."
            )
        if update.adapter is not None:
            return f"The update brings {update.adapter}; requests to a server name none. Set trainer.policy.model.lora.rank=0."
        refusals = await self._on_workers("skyrl_receive", to_message(update))
        return next((refusal for refusal in refusals if refusal is not None), None)

    async def _swap(self, update: WeightUpdate, held: bool) -> None:
        link = self._alive()
        try:
            await self._on_workers("skyrl_load", update.version, patient=True)  # however long that takes
            await link.post("/update_weight_version", {"new_version": str(update.version)})
        except (EngineError, RequestError) as error:
            self._broken = link.facts.instance
            link.die(f"an update failed half-way ({error})")
            raise link.dead() from error
        await self._traffic.weights_changed(update.version, held=held)

    async def _on_workers(self, method: str, *arguments: Any, patient: bool = False) -> list[Any]:
        answer = await self._alive().post("/collective_rpc", {"method": method, "args": arguments}, patient=patient)
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
