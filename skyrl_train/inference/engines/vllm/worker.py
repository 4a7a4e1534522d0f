"""The part of the engine in vLLM's worker processes: it receives and loads weights, writes to a log, ends with its owner.

vLLM mixes :class:`WorkerExtension` into its own worker class (``worker_extension_cls``), so all names here carry a prefix.
Calls come through ``collective_rpc``, between two steps; arguments and results are plain data. What may fail returns why: after
an exception of one rank, vLLM leaves the answers of the ranks behind it unread, and takes them for those of its next call.
"""

from __future__ import annotations

import os
import select
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from skyrl_train.inference.engines.vllm.arguments import LOG_VARIABLE, OWNER_VARIABLE
from skyrl_train.inference.engines.vllm.weight_loader import WeightLoader
from skyrl_train.runtime.process import write_output_to
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.update import WeightUpdate


class WorkerExtension:
    """Methods that vLLM's worker gains."""

    # Attributes of vLLM's worker.
    device: torch.device
    rank: int
    model_runner: Any
    vllm_config: Any
    add_lora: Callable[[Any], bool]

    def skyrl_process(self) -> tuple[str, int]:
        """Return the machine of this worker, as :func:`machine` identifies it, and its process id."""
        return machine(), os.getpid()

    def skyrl_held_requests(self) -> int:
        """Return the number of requests in the worker's own batch: those that were scheduled and have not ended."""
        # vLLM's two generations of model runners keep them under different names.
        states = getattr(self.model_runner, "req_states", None)
        return len(self.model_runner.requests if states is None else states.req_id_to_index)

    def skyrl_kv_cache_usage(self) -> float:
        """Return the share of the KV cache's blocks that the requests in the batch hold."""
        runner = self.model_runner
        blocks = max(1, int(runner.kv_cache_config.num_blocks) - 1)  # block 0 stands for none
        states = getattr(runner, "req_states", None)
        if states is None:
            used = {block for state in runner.requests.values() for group in state.block_ids for block in group} - {0}
            return len(used) / blocks
        # Their numbers of blocks only: the blocks of a common prefix count for each request.
        places = [*states.req_id_to_index.values()]
        return min(1.0, float(runner.block_tables.num_blocks.np[:, places].sum()) / blocks)

    def skyrl_begin_broadcast(self, update: dict[str, Any], assignment: dict[str, Any]) -> None:
        """Begin to receive a broadcast update in a thread, in the group that ``BroadcastClient.assignments`` named."""
        self.skyrl_loader().begin(WeightUpdate.from_message(update), assignment, self.rank)

    def skyrl_receive(self, update: dict[str, Any]) -> str | None:
        """Check an update (see ``WeightUpdate.to_message``) and open it; returns why it cannot be loaded, or None."""
        return self.skyrl_loader().receive(WeightUpdate.from_message(update))

    def skyrl_add_adapter(self, name: str, number: int, path: str) -> str | None:
        """Load the adapter of a ``LoRARequest`` with these fields; returns why that is not possible, or None."""
        from vllm.lora.request import LoRARequest

        try:
            added = self.add_lora(LoRARequest(lora_name=name, lora_int_id=number, lora_path=path))
        except Exception as error:  # vLLM's reader raises many kinds
            return str(error) or repr(error)
        return None if added else "vLLM did not add it"

    def skyrl_load(self, version: int) -> float:
        """Load the received update; returns the seconds that it took. A failure leaves no usable model."""
        return self.skyrl_loader().load(version)

    def skyrl_loader(self) -> WeightLoader:
        """Return this worker's loader; the first call makes it, when vLLM has its model."""
        loader: WeightLoader | None = getattr(self, "_skyrl_loader", None)
        if loader is None:
            loader = self._skyrl_loader = WeightLoader(self.model_runner, self.vllm_config, self.device)
        return loader


def _end_with(owner: int) -> None:
    """Sleep until the process ``owner`` has ended, then kill this one, which may be busy in native code."""
    try:
        descriptor = os.pidfd_open(owner)
    except ProcessLookupError:
        os.kill(os.getpid(), signal.SIGKILL)
        return
    # The descriptor becomes readable when the process ends, so this needs neither polling nor the interpreter's main thread.
    watch = select.poll()
    watch.register(descriptor, select.POLLIN)
    watch.poll()
    os.kill(os.getpid(), signal.SIGKILL)


def _begin() -> None:
    """Watch the process that started the engine, and write to its log. vLLM imports this module as its worker starts: the
    earliest moment."""
    owner, log_file = os.environ.get(OWNER_VARIABLE), os.environ.get(LOG_VARIABLE)
    if owner is None or int(owner) == os.getpid():
        return
    if log_file is not None:
        with suppress(OSError):  # another machine, without the folder
            write_output_to(Path(log_file))
    if hasattr(os, "pidfd_open"):
        threading.Thread(target=_end_with, args=(int(owner),), name="owner-watch", daemon=True).start()


_begin()
