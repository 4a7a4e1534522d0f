"""The local backend's part of a checkpoint: ``policy.safetensors`` and ``optimizer.pt``."""

from __future__ import annotations

import errno
import pickle
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from skyrl_train.errors import CheckpointError
from skyrl_train.models.lora import FINGERPRINT
from skyrl_train.training.snapshots import Buffers

POLICY_FILE = "policy.safetensors"
OPTIMIZER_FILE = "optimizer.pt"
T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class BackendState:
    """Policy weights by HF name, the optimizer's state, and generator states ("cpu", on a GPU also "cuda").

    The schedule is a function of the step and needs none.
    """

    weights: dict[str, torch.Tensor]
    optimizer: dict[str, Any]
    rng: dict[str, torch.Tensor]


def copy_of(state: BackendState, buffers: Buffers) -> BackendState:
    """The state that ``buffers`` will hold."""
    return BackendState(
        weights=buffers.copy_of_all("weights", state.weights),
        optimizer=buffers.copy_of_all("optimizer", state.optimizer),
        rng=buffers.copy_of_all("rng", state.rng),
    )


def write_state(state: BackendState, folder: Path) -> None:
    """Writes both files into ``folder``.

    Raises:
        OSError: the disk is full or the folder cannot be written.
    """
    try:
        save_file(state.weights, folder / POLICY_FILE, metadata={"format": "pt"})
    except SafetensorError as error:  # its I/O errors are no OSError
        full = "No space left" in str(error)
        raise OSError(errno.ENOSPC if full else errno.EIO, str(error), str(folder / POLICY_FILE)) from error
    try:
        with (folder / OPTIMIZER_FILE).open("wb") as file:
            torch.save({"optimizer": state.optimizer, "rng": state.rng}, file)
    except RuntimeError as error:  # torch's writer stumbles over the OSError that it met first
        raise error.__context__ if isinstance(error.__context__, OSError) else error from None


def read_state(folder: Path, like: BackendState, misfit: Callable[[dict[str, Any]], str | None]) -> BackendState:
    """Reads and validates both files; changes nothing.

    Args:
        like: a state of the model that the files must fit, by names, shapes and dtypes.
        misfit: says why an optimizer state does not fit, or None.

    Raises:
        CheckpointError: a file is missing or broken, or belongs to another model.
    """
    if not (folder / POLICY_FILE).exists() and any(folder.glob("shard-*.safetensors")):
        raise CheckpointError(f"{folder} was written by trainer.strategy=fsdp2; this run has local. {REMEDY}")
    weights = _reading(folder / POLICY_FILE, load_file)
    check_weights(folder, weights, like.weights)
    check_base(folder, weights, like.weights)
    payload = _reading(folder / OPTIMIZER_FILE, _load_payload)
    try:
        state = BackendState(weights, payload["optimizer"], dict(payload["rng"]))
        reason = misfit(state.optimizer) or _rng_misfit(state.rng["cpu"])
    except (KeyError, TypeError, AttributeError, IndexError) as error:
        raise CheckpointError(f"{folder / OPTIMIZER_FILE} is not an optimizer state: {error!r}. {REMEDY}") from error
    if reason is not None:
        raise CheckpointError(f"{folder} belongs to another model: {reason}. {REMEDY}")
    return state


REMEDY = "Resume with the model and settings it was made with, or start a new run with trainer.resume=never."


def _reading(path: Path, read: Callable[[Path], T]) -> T:
    try:
        return read(path)
    except FileNotFoundError as error:
        raise CheckpointError(f"{path.parent} is incomplete: {path.name} is missing. {REMEDY}") from error
    except (OSError, SafetensorError, RuntimeError, EOFError, pickle.UnpicklingError) as error:
        raise CheckpointError(f"{path} cannot be read ({_first_line(error)}). {REMEDY}") from error


def _load_payload(path: Path) -> dict[str, Any]:
    payload: dict[str, Any] = torch.load(path, map_location="cpu", weights_only=True)
    return payload


def _rng_misfit(state: torch.Tensor) -> str | None:
    """Why torch would refuse a generator's state, or None: asked before anything is changed."""
    own = torch.get_rng_state()
    return None if (state.shape, state.dtype) == (own.shape, own.dtype) else "random state of another torch"


def check_weights(folder: Path, saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    """Raises:
    CheckpointError: names, shapes or dtypes differ.
    """
    for name in sorted(saved.keys() | mine.keys()):
        if name not in mine:
            raise CheckpointError(f"{folder} belongs to another model: it has {name!r}, this one does not. {REMEDY}")
        if name not in saved:
            raise CheckpointError(f"{folder} belongs to another model: it lacks {name!r}. {REMEDY}")
        there, here = _words(saved[name]), _words(mine[name])
        if there != here:
            raise CheckpointError(
                f"{folder} belongs to another model: {name!r} is {there} there and {here} here. {REMEDY}"
            )


def check_base(folder: Path, saved: Mapping[str, torch.Tensor], mine: Mapping[str, torch.Tensor]) -> None:
    """Compares the base models of two adapters; does nothing where all weights are trained.

    Raises:
        CheckpointError: they differ, or the adapters' scales do.
    """
    for name in (name for name in mine if name.endswith(FINGERPRINT)):
        if not torch.equal(saved[name].cpu(), mine[name].cpu()):
            raise CheckpointError(
                f"{folder} has an adapter of another base model, or one with another trainer.policy.model.lora.alpha. {REMEDY}"
            )


def _words(weight: torch.Tensor) -> str:
    return f"{'x'.join(map(str, weight.shape))} {str(weight.dtype).removeprefix('torch.')}"


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
