"""Main memory that a GPU reads and writes by itself, because its pages are registered with CUDA.

A copy between a GPU and other memory goes through a small buffer of the driver: the thread that asks for it waits, and the bus
is idle for much of the time. Copies of registered memory are asynchronous: ask for all of them, and wait once.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext

import torch

_PORTABLE = 1  # cudaHostRegisterPortable: registered for every device of the process

logger = logging.getLogger(__name__)


class Registration:
    """Memory that is registered with CUDA; none at first."""

    def __init__(self) -> None:
        self.num_bytes = 0  # CUDA was asked to register as many; it may have refused
        self._registered: tuple[torch.Tensor, torch.device] | None = None

    @property
    def device(self) -> torch.device | None:
        """The GPU whose copies of the memory are asynchronous; None: there is none."""
        return None if self._registered is None else self._registered[1]

    def cover(self, memory: torch.Tensor, device: torch.device) -> None:
        """Register contiguous main memory, in place of a shorter part of the same memory.

        Where CUDA refuses, copies of the memory are as correct, and slower; the first time, the log says so.
        """
        if memory.nbytes <= self.num_bytes:
            return
        self.release()
        self.num_bytes = memory.nbytes
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            error = cudart.cudaHostRegister(memory.data_ptr(), memory.nbytes, _PORTABLE)
            if error == cudart.cudaError.success:
                self._registered = memory, device
            else:
                _forget_error(device)
                _say_once(str(cudart.cudaGetErrorString(error)))

    def release(self) -> None:
        """Wait for copies of the memory and unregister it. Idempotent; the memory must still be mapped."""
        self.num_bytes = 0
        if self._registered is None:
            return
        memory, device = self._registered
        self._registered = None
        wait_for_copies(device)
        cudart = torch.cuda.cudart()
        with torch.cuda.device(device):
            if cudart.cudaHostUnregister(memory.data_ptr()) != cudart.cudaError.success:
                _forget_error(device)


@contextmanager
def using(stream: torch.cuda.Stream | None) -> Iterator[None]:
    """Let this thread ask for its work on ``stream``; None: as before.

    A new thread begins on the first GPU. Back from a stream of another one, torch's own context manager would make it the current
    GPU again, and CUDA then takes half a GiB of it for this process, which computes elsewhere.
    """
    with nullcontext() if stream is None else torch.cuda.device(stream.device), torch.cuda.stream(stream):
        yield


def wait_for_copies(device: torch.device) -> None:
    """Return when all that was asked of the thread's current stream of ``device`` is done."""
    done = torch.cuda.Event(blocking=True)  # the thread sleeps; by default it would keep a core busy
    done.record(torch.cuda.current_stream(device))
    done.synchronize()


def _forget_error(device: torch.device) -> None:
    """Clear the error that a failed call has left: torch would report it from this thread's next kernel."""
    try:
        torch.zeros(1, device=device).add_(1)
    except RuntimeError:
        logger.debug("cleared the error of a failed registration")


@functools.cache
def _say_once(reason: str) -> None:
    logger.warning("CUDA does not register the memory for weights (%s): they are copied more slowly.", reason)
