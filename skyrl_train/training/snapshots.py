"""A copy of the live state in main memory, made while training goes on as far as it changes nothing.

take ──(returns)──thread──> buffers, used again by the next one ──copied()──> they may be written
       training goes on: forward and backward passes ──copied()──> the optimizer moves the weights

Allocating memory for a copy costs as much as filling it, and filling it takes a good part of a step. Only the optimizer
(and whoever else changes the state) has to wait, and by then the copy is done.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from typing import Any, Generic, TypeVar

import torch

from skyrl_train.errors import CheckpointError

S = TypeVar("S")
Copies = list[tuple[torch.Tensor, torch.Tensor]]  # from, to


class Snapshots(Generic[S]):
    """The newest snapshot of a state ``S``; the one before it is overwritten."""

    def __init__(self) -> None:
        self._number = 0
        self._state: S | None = None
        self._buffers: dict[str, torch.Tensor] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._copying: Future[None] | None = None

    def take(self, arrange: Callable[[Buffers], S]) -> int:
        """Begins to copy; returns the snapshot's number.

        Args:
            arrange: lays the live state out as it will be written, with ``buffers.copy_of(name, tensor)`` for each of its
                tensors, which must not change until :meth:`copied` has returned.
        """
        self.copied()
        self._number += 1
        buffers = Buffers(self._buffers)
        self._state = arrange(buffers)
        self._buffers = buffers.in_use
        self._copying = self._thread.submit(_copy, buffers.copies, _now(buffers.copies))
        return self._number

    def copied(self) -> None:
        """Returns when nothing is being copied: the live state may change."""
        if self._copying is not None:
            self._copying.result()

    def state(self, number: int) -> S:
        """The snapshot of this number, whole.

        Raises:
            CheckpointError: a later one has taken its place.
        """
        if number != self._number or self._state is None:
            raise CheckpointError("a later snapshot has taken this one's place; write each before taking the next")
        self.copied()
        return self._state


class Buffers:
    """Where the tensors of one snapshot go: memory of the one before it, where there is some of the same kind."""

    def __init__(self, before: Mapping[str, torch.Tensor]) -> None:
        self._before = before
        self.in_use: dict[str, torch.Tensor] = {}
        self.copies: Copies = []

    def copy_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """What ``tensor`` (of this process, not sharded) will be copied to, in main memory. Each name once."""
        source, buffer = tensor.detach(), self._before.get(name)
        if buffer is None or (buffer.shape, buffer.dtype) != (source.shape, source.dtype):
            buffer = torch.empty(source.shape, dtype=source.dtype, device="cpu", pin_memory=source.is_cuda)
        self.in_use[name] = buffer
        self.copies.append((source, buffer))
        return buffer

    def copy_of_all(self, name: str, value: Any) -> Any:
        """The same of every tensor in nested dicts, lists and tuples; everything else as it is."""
        if isinstance(value, torch.Tensor):
            return self.copy_of(name, value)
        if isinstance(value, dict):
            return {key: self.copy_of_all(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.copy_of_all(f"{name}.{index}", item) for index, item in enumerate(value))
        return value


def _now(copies: Copies) -> torch.cuda.Event | None:
    """What the GPU has been asked to do so far, where the tensors are on one."""
    device = next((source.device for source, _ in copies if source.is_cuda), None)
    return None if device is None else torch.cuda.current_stream(device).record_event()


def _copy(copies: Copies, before: torch.cuda.Event | None) -> None:
    if before is None:
        for source, buffer in copies:
            buffer.copy_(source)
        return
    device = next(source.device for source, _ in copies if source.is_cuda)
    stream = torch.cuda.Stream(device)  # beside the one that training goes on in
    with torch.cuda.stream(stream):
        stream.wait_event(before)
        for source, buffer in copies:
            buffer.copy_(source, non_blocking=True)
    stream.synchronize()
