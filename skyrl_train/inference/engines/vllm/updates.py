"""An engine's weight updates: received, checked, loaded by every worker, read back."""

from __future__ import annotations

import asyncio
import mmap
import os
from collections.abc import Collection

from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.engines.vllm.frontend import Frontend
from skyrl_train.inference.engines.vllm.messages import to_message
from skyrl_train.inference.engines.vllm.swaps import Swaps
from skyrl_train.inference.engines.vllm.traffic import Traffic
from skyrl_train.inference.weight_update import WeightUpdate


class Updates:
    """Of ``vllm``'s workers; ``traffic`` learns which version it samples from. ``lora_rank``: of the adapter that updates
    bring; 0: they bring the model.

    Attributes:
        last_load_s: seconds that the slowest worker took for the swap of the update loaded last.
    """

    def __init__(self, vllm: Frontend, traffic: Traffic, transports: Collection[str], lora_rank: int) -> None:
        self._vllm = vllm
        self._traffic = traffic
        self._transports = frozenset(transports)
        self._lora_rank = lora_rank
        self._reception = _Reception()
        self._receiving = asyncio.Lock()
        self._swaps = Swaps("a vLLM engine")
        self.last_load_s = 0.0

    async def receive(self, update: WeightUpdate) -> None:
        """Checks an update and maps its memory in every worker; whatever is wrong with it, ``load`` raises."""
        await self._swaps.receive(update, self._refusal)

    async def load(self, update: WeightUpdate) -> None:
        """Swaps a received update into every worker.

        Raises:
            EngineError: it was not received, or is not this model's: the old weights stay.
            EngineDeadError: a worker failed half-way.
        """
        await self._swaps.load(update, self._swap)

    async def settled(self) -> None:
        """Returns when no swap is under way, also none whose caller has given up."""
        await self._swaps.settled()

    async def served_checksum(self) -> str:
        """Of the weights being served, laid out like the update loaded last.

        Raises:
            EngineError: nothing was loaded yet, or a part cannot be read.
        """
        update = self._swaps.require_loaded()
        import torch

        from skyrl_train.inference.shared_weights import checksum

        descriptor = os.memfd_create("skyrl-served", os.MFD_CLOEXEC)
        try:
            os.ftruncate(descriptor, update.num_bytes)
            location = f"/proc/{os.getpid()}/fd/{descriptor}"
            for refusal in await self._vllm.on_workers("skyrl_read_back", location, update.num_bytes):
                if refusal is not None:
                    raise EngineError(refusal)
            staging = torch.frombuffer(mmap.mmap(descriptor, update.num_bytes), dtype=torch.uint8)
            return await asyncio.to_thread(checksum, staging)
        finally:
            os.close(descriptor)

    def close(self) -> None:
        """Leaves the trainer, and frees what was received."""
        self._reception.close()

    async def _refusal(self, update: WeightUpdate) -> str | None:
        """Lets every worker map the update; why it cannot be loaded, or None."""
        if update.transport not in self._transports:
            return f"This engine receives by {', '.join(sorted(self._transports))}, not by {update.transport!r}."
        rank = 0 if update.adapter is None else update.adapter.rank
        if rank != self._lora_rank:
            wanted = f"an adapter of rank {self._lora_rank}" if self._lora_rank else "whole models"
            return (
                f"The update brings {update.adapter or 'a whole model'}, the engine serves {wanted}; trainer and engine must "
                "have the same trainer.policy.model.lora."
            )
        try:
            async with self._receiving:  # also one whose caller has given up
                here = await asyncio.to_thread(self._reception.bring, update)
            refusals = await self._vllm.on_workers("skyrl_receive", to_message(here))
        except EngineError as error:
            return str(error)
        return next((one for one in refusals if one is not None), None)

    async def _swap(self, update: WeightUpdate) -> None:
        try:
            self.last_load_s = max(await self._vllm.on_workers("skyrl_load", update.version))
        except EngineError as error:
            self._vllm.kill(f"an update failed half-way: {error}")
            raise EngineDeadError(f"The vLLM engine is gone: an update failed half-way: {error}") from error
        await self._traffic.weights_changed(update.version)


class _Reception:
    """Brings updates to this machine and reads them here, where no request waits for it."""

    def __init__(self) -> None:
        import torch

        from skyrl_train.inference.landing import Landing
        from skyrl_train.inference.receivers import WeightReceiver

        self._landing = Landing()
        self._receiver = WeightReceiver(torch.device("cpu"))

    def bring(self, update: WeightUpdate) -> WeightUpdate:
        """The update as the workers find it.

        Raises:
            EngineError: it did not come, or differs from its checksum.
        """
        from skyrl_train.inference.cuda_ipc_weights import TRANSPORT_NAME as CUDA_IPC

        if update.transport == CUDA_IPC:
            return update
        here = self._landing.land(update)
        self._receiver.open_update(here)
        return here

    def close(self) -> None:
        self._receiver.close()
        self._landing.close()
