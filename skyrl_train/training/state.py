"""The state of a trained model: snapshots in main memory, and the files of the local backend's checkpoint.

take ──(returns)──thread──> buffers, reused by the next snapshot ──copied()──> they may be written to files
       training continues: forward and backward passes ──copied()──> the optimizer moves the weights

Allocating memory for a copy costs as much as filling it, and filling it takes a good part of a step. Only calls that change the
state (the optimizer step, ``load``) have to wait, and usually the copy is done by then.
"""

from __future__ import annotations

import mmap
import pickle
import tempfile
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any, Generic, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file

from skyrl_train.errors import READ_AGAIN, CheckpointError, first_line
from skyrl_train.models.lora import FINGERPRINT
from skyrl_train.runtime.checksums import ChecksumWriter
from skyrl_train.weight_sync.disk import raw_bytes, safetensors_header
from skyrl_train.weight_sync.pinning import Registration, using
from skyrl_train.weight_sync.update import TensorSpec

POLICY_FILE = "policy.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
REMEDY = "Resume with the model and settings it was made with, or start a new run with trainer.resume=never."
S = TypeVar("S")
T = TypeVar("T")


class Snapshots(Generic[S]):
    """The latest snapshot of a state ``S``; it overwrites the one before."""

    def __init__(self) -> None:
        self._number = 0
        self._state: S | None = None
        self._buffers: dict[str, _Buffer] = {}
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="snapshot")
        self._copying: Future[None] | None = None

    def take(self, arrange: Callable[[Buffers], S]) -> int:
        """Begin to copy; return the snapshot's number.

        Args:
            arrange: lays the live state out as it will be written, with ``buffers.copy_of(name, tensor)`` for each of its
                tensors. These must not change until :meth:`copied` has returned.
        """
        self.copied()  # the buffers are about to be overwritten
        self._number += 1
        buffers = Buffers(self._buffers)
        self._state = arrange(buffers)
        for name, buffer in self._buffers.items():
            if buffers.in_use.get(name) is not buffer:
                buffer.registration.release()
        self._buffers = buffers.in_use
        # On a GPU, the copy begins when everything queued so far has run.
        device = next((source.device for source, _ in buffers.copies if source.is_cuda), None)
        queued = None if device is None else torch.cuda.current_stream(device).record_event()
        self._copying = self._thread.submit(_copy, buffers.copies, queued)
        return self._number

    def copied(self) -> None:
        """Wait until nothing is being copied: the live state may change."""
        if self._copying is not None:
            self._copying.result()

    def state(self, number: int) -> S:
        """Return the complete snapshot of this number.

        Raises:
            CheckpointError: a later snapshot has replaced it.
        """
        if number != self._number or self._state is None:
            raise CheckpointError("a later snapshot has replaced this one; write each before taking the next")
        self.copied()
        return self._state

    def close(self) -> None:
        """End the copying thread, and unregister the memory from CUDA, which would keep it for the life of the process."""
        self._thread.shutdown()
        for buffer in self._buffers.values():
            buffer.registration.release()


@dataclass(frozen=True, slots=True)
class _Buffer:
    """Main memory for the copy of a tensor. For one on a GPU it is registered before the first copy, which then runs beside the
    GPU's computation.

    torch's pinned memory would be rounded up to a power of two, and the thread that trains would wait for it: seconds for large
    models.
    """

    tensor: torch.Tensor
    registration: Registration = field(default_factory=Registration)


Copies = list[tuple[torch.Tensor, _Buffer]]  # from, to


class Buffers:
    """Memory for the tensors of one snapshot, reused from the one before where shape and dtype are the same."""

    def __init__(self, before: Mapping[str, _Buffer]) -> None:
        self._before = before
        self.in_use: dict[str, _Buffer] = {}
        self.copies: Copies = []

    def copy_of(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return the main memory to which ``tensor`` (of this process, not sharded) will be copied. Use each name once."""
        source, buffer = tensor.detach(), self._before.get(name)
        if buffer is None or (buffer.tensor.shape, buffer.tensor.dtype) != (source.shape, source.dtype):
            buffer = _Buffer(_memory_for(source))
        self.in_use[name] = buffer
        self.copies.append((source, buffer))
        return buffer.tensor

    def copy_of_all(self, name: str, value: Any) -> Any:
        """Apply :meth:`copy_of` to every tensor in nested dicts, lists and tuples; return everything else as it is."""
        if isinstance(value, torch.Tensor):
            return self.copy_of(name, value)
        if isinstance(value, dict):
            return {key: self.copy_of_all(f"{name}.{key}", item) for key, item in value.items()}
        if isinstance(value, (list, tuple)):
            return type(value)(self.copy_of_all(f"{name}.{index}", item) for index, item in enumerate(value))
        return value


def _copy(copies: Copies, queued: torch.cuda.Event | None) -> None:
    if queued is None:
        for source, buffer in copies:
            buffer.tensor.copy_(source)
        return
    device = next(source.device for source, _ in copies if source.is_cuda)
    for source, buffer in copies:
        if source.is_cuda and source.numel():
            buffer.registration.cover(buffer.tensor, device)
    stream = torch.cuda.Stream(device)  # beside the stream in which training continues
    with using(stream):
        stream.wait_event(queued)
        for source, buffer in copies:
            buffer.tensor.copy_(source, non_blocking=True)
    stream.synchronize()


def _memory_for(source: torch.Tensor) -> torch.Tensor:
    """Return main memory for a copy of a tensor; for one on a GPU in pages of its own, so that they can be registered."""
    if not (source.is_cuda and source.numel()):
        return torch.empty(source.shape, dtype=source.dtype, device="cpu")
    pages = mmap.mmap(-1, source.nbytes)  # the tensor keeps it open
    return torch.frombuffer(pages, dtype=source.dtype).view(source.shape)


def host_tensor(like: torch.Tensor) -> torch.Tensor:
    """Return memory, not yet filled, for a tensor that leaves its device for a while.

    For a tensor on a GPU it is pinned. For one in main memory it is a file that is mapped and has no name, so the system may
    write it to the disk of ``tempfile.gettempdir()`` and use its memory.
    """
    if like.is_cuda:
        return torch.empty_like(like, device="cpu", pin_memory=True)
    if like.numel() == 0:
        return torch.empty_like(like)
    with tempfile.NamedTemporaryFile(prefix="skyrl-offload-") as file:
        flat = torch.from_file(file.name, shared=True, size=like.numel(), dtype=like.dtype)
    return flat.view(like.shape)


@dataclass(frozen=True, slots=True)
class BackendState:
    """Policy weights by HF name, the optimizer's state, and generator states ("cpu", on a GPU also "cuda").

    The learning-rate schedule is a function of the step and needs no state.
    """

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rng: dict[str, torch.Tensor]


def write_state(state: BackendState, folder: Path) -> dict[str, str]:
    """Write both files into ``folder``; return their checksums by name.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    # Not by safetensors' save_file, which does not show the bytes that it writes. Larger items first keep all aligned.
    weights = sorted(state.weights.items(), key=lambda item: (-item[1].element_size(), item[0]))
    specs, offset = [], 0
    for name, weight in weights:
        specs.append(TensorSpec(name, tuple(weight.shape), str(weight.dtype).removeprefix("torch."), offset))
        offset += weight.nbytes
    with ChecksumWriter(folder / POLICY_FILE) as policy:
        policy.write(safetensors_header(specs, {"format": "pt"}))
        for _, weight in weights:
            policy.write(raw_bytes(weight.contiguous()))
    try:
        with ChecksumWriter(folder / OPTIMIZER_FILE) as optimizer:
            torch.save({"optimizer": state.optimizer, "rng": state.rng}, optimizer)
    except RuntimeError as error:  # torch's writer hides the OSError that it met first
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None
    return {POLICY_FILE: policy.checksum, OPTIMIZER_FILE: optimizer.checksum}


def read_state(folder: Path, like: BackendState, misfit: Callable[[dict[str, Any]], str | None]) -> BackendState:
    """Read and validate both files; change nothing.

    Args:
        like: a state of the live model; the files must match its names, shapes and dtypes.
        misfit: returns why an optimizer state does not fit, or None.

    Raises:
        CheckpointError: a file is missing or broken, or belongs to another model.
    """
    if not (folder / POLICY_FILE).exists() and any(folder.glob("shard-*.safetensors")):
        raise CheckpointError(f"{folder} was written by trainer.strategy=fsdp2; this run has local. {REMEDY}")
    # Everything is validated before the caller changes the live model.
    weights = _reading(folder / POLICY_FILE, load_file)
    check_weights(folder, weights, like.weights)
    check_base(folder, weights, like.weights)
    load_payload = partial(torch.load, map_location="cpu", weights_only=True)
    payload: dict[str, Any] = _reading(folder / OPTIMIZER_FILE, load_payload)
    try:
        state = BackendState(weights, payload["optimizer"], dict(payload["rng"]))
        reason = misfit(state.optimizer)
        own, saved = torch.get_rng_state(), state.rng["cpu"]
        if reason is None and (saved.shape, saved.dtype) != (own.shape, own.dtype):
            reason = "random state of another torch"
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE} is not an optimizer state: {error!r}. {REMEDY}") from error
    if reason is not None:
        raise CheckpointError(f"{folder} belongs to another model: {reason}. {REMEDY}")
    return state


def _reading(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is incomplete: {path.name} is missing. {REMEDY}") from error
    except OSError as error:
        raise CheckpointError(f"{path} cannot be read now: {error}. {READ_AGAIN}") from error
    except (SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read ({first_line(error)}). {REMEDY}") from error


def check_weights(folder: Path, saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    """Compare names, shapes and dtypes.

    Raises:
        CheckpointError: they differ.
    """
    for name in sorted(saved.keys() | mine.keys()):
        if name not in mine:
            raise CheckpointError(f"{folder} belongs to another model: it has {name!r}, this one does not. {REMEDY}")
        if name not in saved:
            raise CheckpointError(f"{folder} belongs to another model: it lacks {name!r}. {REMEDY}")
        there, here = (
            f"{'x'.join(map(str, weight.shape))} {str(weight.dtype).removeprefix('torch.')}"
            for weight in (saved[name], mine[name])
        )
        if there != here:
            raise CheckpointError(
                f"{folder} belongs to another model: {name!r} is {there} there and {here} here. {REMEDY}"
            )


def check_base(folder: Path, saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    """Compare the base models of two adapters; do nothing where all weights are trained.

    Raises:
        CheckpointError: they differ, or the adapters' scales do.
    """
    for name in (name for name in mine if name.endswith(FINGERPRINT)):
        if not torch.equal(saved[name].cpu(), mine[name].cpu()):
            raise CheckpointError(
                f"{folder} has an adapter of another base model, or one with another trainer.policy.model.lora.alpha. {REMEDY}"
            )
