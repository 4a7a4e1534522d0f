"""A group of the trainer and the processes that take its weights, in which one broadcast reaches all of them.

torch's process groups do the work, over gloo or NCCL. Here is all that differs between the two; to everybody else both block
until their part of the broadcast has ended, and raise ``RuntimeError`` within the time limit if it cannot end.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from datetime import timedelta
from typing import Any

import torch
import torch.distributed

from skyrl_train.weight_sync.pinning import using

GLOO, NCCL = "gloo", "nccl"
TRAINER_RANK = 0
# Buckets under way at once. NCCL is asked for several, so that none waits for the host. gloo cannot end those that wait when the
# group is left, and gains nothing from them.
IN_FLIGHT = {GLOO: 1, NCCL: 4}

_DIST: Any = torch.distributed  # the parts of it used here have no type stubs
_environment = threading.Lock()


class BroadcastGroup:
    """Membership of one process in the group ``name``. The constructor returns when all ``size`` members are there.

    Args:
        store: where the members find each other; no other thread may use this object meanwhile.
        address: of this process, as the other members reach it (gloo).
        device: where the bytes lie: the CPU with gloo, this process's GPU with NCCL.
        timeout_s: for the other members to come, and for each bucket.

    Raises:
        RuntimeError: another member did not come in time.
    """

    def __init__(
        self,
        backend: str,
        store: Any,
        name: str,
        rank: int,
        size: int,
        address: str,
        device: torch.device,
        timeout_s: float,
    ) -> None:
        self.name = name
        self._in_flight = IN_FLIGHT[backend]
        self._group: Any  # None: it was left
        # Apart from the streams of training or sampling, so that neither waits for the other.
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        timeout, names = timedelta(seconds=timeout_s), _DIST.PrefixStore(name, store)
        if backend == NCCL:
            self._group = _nccl_group(names, rank, size, timeout)
        else:
            options = _DIST.ProcessGroupGloo._Options()
            options._timeout = timeout
            options._devices = [_DIST.ProcessGroupGloo.create_device(hostname=address)]
            self._group = _DIST.ProcessGroupGloo(names, rank, size, options)

    def broadcast(self, staging: torch.Tensor, bucket_bytes: int) -> None:
        """Send ``staging`` (uint8 ``[num_bytes]``) from the trainer, or fill it, in buckets; return when all bytes are here.

        Raises:
            RuntimeError: a member is gone, or a bucket took too long. The group is of no use any more: leave it.
        """
        error = self._transfer(staging, bucket_bytes)
        if error is not None:
            # A new exception: the frames of torch's would keep the connections open, and the other members waiting.
            raise RuntimeError(error)

    def _transfer(self, staging: torch.Tensor, bucket_bytes: int) -> str | None:
        """Return why the broadcast failed, or None."""
        group, under_way = self._group, deque[Any]()
        if group is None:
            return "the group was left"
        try:
            with using(self._stream):
                for bucket in staging.split(bucket_bytes):
                    under_way.append(group.broadcast(bucket, TRAINER_RANK))
                    if len(under_way) == self._in_flight:
                        under_way.popleft().wait()
                for work in under_way:
                    work.wait()
        except RuntimeError as error:
            return str(error)
        return None

    def leave(self) -> None:
        """End the membership; members that wait for this one get an error. Idempotent."""
        group, self._group = self._group, None
        if group is not None:
            group.abort()  # NCCL's transfers; gloo closes its connections with the last reference, after the one under way


def _nccl_group(store: Any, rank: int, size: int, timeout: timedelta) -> Any:
    """Join an NCCL group whose failures end neither this process nor its other groups.

    By default a watchdog thread ends the process after an error or a timeout. With the variable below torch starts no watchdog
    for the group: ``wait()`` blocks, aborts the communicator after ``timeout`` and raises, as gloo's does. Torch reads it in
    the constructor only.
    """
    # NCCL would wait without a limit for a member that does not come, so all of them meet here first.
    store.set(f"here/{rank}", "")
    store.wait([f"here/{other}" for other in range(size)], timeout)
    options = _DIST.ProcessGroupNCCL.Options()
    options._timeout = timeout
    variable = "TORCH_NCCL_BLOCKING_WAIT"
    with _environment:
        before = os.environ.get(variable)
        os.environ[variable] = "1"
        try:
            return _DIST.ProcessGroupNCCL(store, rank, size, options)
        finally:
            if before is None:
                del os.environ[variable]
            else:
                os.environ[variable] = before
