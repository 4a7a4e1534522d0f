"""What runs in vLLM's worker processes: it receives weights, swaps them in, reads them back, and ends with its owner.

vLLM mixes :class:`WorkerExtension` into its own worker class (``worker_extension_cls``), so that all names here carry a
prefix. Calls come through ``collective_rpc``, between two steps; arguments and results are plain data.
"""

from __future__ import annotations

import os
import select
import signal
import threading
import time
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.arguments import OWNER_VARIABLE
from skyrl_train.inference.engines.vllm.live_adapter import LiveAdapter
from skyrl_train.inference.engines.vllm.live_weights import LiveWeights
from skyrl_train.inference.engines.vllm.messages import from_message
from skyrl_train.inference.engines.vllm.model_tensors import ModelTensors, check_update
from skyrl_train.inference.receivers import WeightReceiver
from skyrl_train.inference.shared_weights import SharedMemoryReceiver
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate

if TYPE_CHECKING:
    from collections.abc import Mapping


class WorkerExtension:
    """Methods that vLLM's worker gains. Those that can be refused return the reason, or None: nothing was touched then."""

    # What vLLM's worker has.
    device: torch.device
    model_runner: Any
    vllm_config: Any

    def skyrl_pid(self) -> int:
        """This worker's process id."""
        return os.getpid()

    def skyrl_held_requests(self) -> int:
        """Requests in the worker's own batch: those that have been scheduled and have not ended."""
        return len(_request_states(self.model_runner))

    def skyrl_receive(self, update: dict[str, Any]) -> str | None:
        """Checks what the update claims to be and maps its memory; see :func:`messages.to_message` for ``update``."""
        return self._skyrl_reception().receive(from_message(update))

    def skyrl_load(self, version: int) -> float:
        """Swaps the received update in; returns the seconds that it took. A failure leaves no usable model."""
        return self._skyrl_reception().load(version)

    def skyrl_read_back(self, location: str, num_bytes: int) -> str | None:
        """Writes the weights being served into the shared memory at ``location``, laid out like the update loaded last."""
        return self._skyrl_reception().read_back(location, num_bytes)

    def _skyrl_reception(self) -> Reception:
        reception: Reception | None = getattr(self, "_skyrl_received", None)
        if reception is None:
            reception = Reception(self.model_runner, self.vllm_config, self.device)
            self._skyrl_received = reception
        return reception


class Reception:
    """A worker's updates: at most one received, and the one loaded last."""

    def __init__(self, model_runner: Any, vllm_config: Any, device: torch.device) -> None:
        model_config = vllm_config.model_config
        self._live = LiveWeights(model_runner.get_model(), vllm_config, device)
        self._live_adapter = LiveAdapter(model_runner)
        self._tensors: ModelTensors | None = None
        self._model_path = str(model_config.model)
        self._trust_remote_code = bool(model_config.trust_remote_code)
        self._dtype = str(model_config.dtype).removeprefix("torch.")
        self._device = device
        self._receiver = WeightReceiver(device)
        self._received: tuple[WeightUpdate, Mapping[str, torch.Tensor]] | None = None

    def receive(self, update: WeightUpdate) -> str | None:
        """Returns why the update cannot be loaded, or None."""
        try:
            if self._tensors is None:
                self._tensors = ModelTensors.of_model(self._model_path, self._trust_remote_code)
            check_update(update, self._tensors, self._dtype)
            weights = self._receiver.open_update(update)
            if update.adapter is None:
                self._tensors.check_ties(weights)
            else:
                self._live_adapter.receive(update, update.adapter, weights)
        except EngineError as error:
            self._received = None
            return str(error)
        self._received = (update, weights)
        return None

    def load(self, version: int) -> float:
        """Raises EngineError where ``version`` is not the received one; anything else that is raised is a half-loaded model."""
        if self._received is None or self._received[0].version != version:
            raise EngineError(f"Version {version} was not received; call receive_weights() first.")
        started = time.perf_counter()
        update, weights = self._received
        self._received = None
        if update.adapter is None:
            self._live.load(update, weights)
        else:
            self._live_adapter.load()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def read_back(self, location: str, num_bytes: int) -> str | None:
        """Returns why it cannot be done, or None."""
        update = WeightUpdate(
            -1, "shared_memory", location, num_bytes, (TensorSpec("staging", (num_bytes,), "uint8", 0),)
        )
        receiver = SharedMemoryReceiver()
        try:
            staging = receiver.open_update(update)["staging"]
            if self._live_adapter.serves:
                self._live_adapter.read_back(staging)
            else:
                self._live.read_back(staging)
        except EngineError as error:
            return str(error)
        finally:
            receiver.close()
        return None


def _request_states(model_runner: Any) -> Any:
    """The requests that vLLM's model runner holds; its two generations keep them under different names."""
    states = getattr(model_runner, "req_states", None)
    return model_runner.requests if states is None else states.req_id_to_index


def _end_with(owner: int) -> None:
    """Sleeps until the process ``owner`` has ended; then nobody wants this one, whatever it is in the middle of."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    watch.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _watch_owner() -> None:
    """vLLM imports this module as its worker starts, which is the earliest moment for a watch on who started the engine."""
    owner = os.environ.get(OWNER_VARIABLE)
    if owner is not None and int(owner) != os.getpid() and hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(int(owner),), name="owner-watch", daemon=True).start()


_watch_owner()
