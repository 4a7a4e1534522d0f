"""A sharded policy's part of a checkpoint: safetensors files, one per rank, that any number of ranks can read.

live shards ──snapshot──> copies in main memory ──write (in the background)──> shard-0000R-*.safetensors
                                 files ──read (each rank what its shards need)──> copies ──> live shards

Written and read by torch.distributed.checkpoint. The files hold tensors and JSON only: reading them runs no code.
"""

from __future__ import annotations

import warnings
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.errors import CheckpointError
from skyrl_train.models.lora import base_fingerprint, policy_weights
from skyrl_train.training.distributed.sharding import local
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.snapshots import Buffers
from skyrl_train.training.state import POLICY_FILE, REMEDY, check_base, check_weights

State = dict[str, torch.Tensor]
_POLICY, _OPTIMIZER, _RNG = "policy.", "optimizer.", "rng."


def copy_of(model: PreTrainedModel, optimizer: PolicyOptimizer, cpu_mesh: DeviceMesh, buffers: Buffers) -> State:
    """What ``buffers`` will hold of all that is saved: weights, moments, and this rank's generator states."""
    state = {
        name: _on_cpu(tensor, buffers.copy_of(name, local(tensor)), cpu_mesh)
        for name, tensor in _live(model, optimizer).items()
    }
    state[f"{_RNG}{dist.get_rank()}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"{_RNG}{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state()
    return state


def write(state: State, folder: Path, group: dist.ProcessGroup) -> None:
    """Writes this rank's shards into ``folder``, which all ranks share. Called by all of them.

    Args:
        group: a group of the CPU's that nothing else uses meanwhile.

    Raises:
        OSError: the disk is full or the folder cannot be written; on every rank.
    """
    try:
        save_shards(
            state,
            storage_writer=HuggingFaceStorageWriter(str(folder), save_distributed=True),
            process_group=group,
        )
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), OSError(str(causes[0]))) from error


def read(model: PreTrainedModel, optimizer: PolicyOptimizer, folder: Path, cpu_mesh: DeviceMesh) -> State:
    """This rank's shards of what ``write`` left, whatever number of ranks wrote it. Changes nothing; no rank waits for
    another.

    Raises:
        CheckpointError: the folder is incomplete, broken, or of another model.
    """
    if (folder / POLICY_FILE).exists():
        raise CheckpointError(f"{folder} was written by trainer.strategy=local; this run has fsdp2. {REMEDY}")
    try:
        reader = HuggingFaceStorageReader(str(folder))
        found = reader.read_metadata().state_dict_metadata
        saved = {name: of for name, of in found.items() if isinstance(of, TensorStorageMetadata)}
        if not saved:
            raise CheckpointError(f"{folder} is incomplete: it has no shards. {REMEDY}")
        wanted = {name: _like(tensor, cpu_mesh) for name, tensor in _live(model, optimizer).items()}
        _check(folder, {k: v for k, v in saved.items() if not k.startswith(_RNG)}, wanted)
        rng = [name for name in saved if name.startswith(f"{_RNG}{dist.get_rank()}.")]
        wanted |= {name: torch.zeros(saved[name].size, dtype=torch.uint8) for name in rng}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # that no rank waits for another is what is wanted
            load_shards(wanted, storage_reader=reader, no_dist=True)
    except (OSError, SafetensorError, CheckpointException, KeyError, ValueError) as error:
        raise CheckpointError(f"{folder} cannot be read ({_first_line(error)}). {REMEDY}") from error
    check_base(folder, wanted, _live(model, optimizer))
    return wanted


@torch.no_grad()
def restore(state: State, model: PreTrainedModel, optimizer: PolicyOptimizer) -> None:
    """Puts what ``read`` returned in the place of the live weights, moments and generator states."""
    optimizer.make_moments()
    for name, live in _live(model, optimizer).items():
        local(live).copy_(local(state[name]))
    of_rank = {name.rsplit(".", 1)[1]: value for name, value in state.items() if name.startswith(_RNG)}
    if "cpu" in of_rank:
        torch.set_rng_state(of_rank["cpu"])
    if "cuda" in of_rank and torch.cuda.is_available():
        torch.cuda.set_rng_state(of_rank["cuda"])


def _live(model: PreTrainedModel, optimizer: PolicyOptimizer) -> State:
    """The tensors that are trained and what the optimizer knows of them, by their names in a checkpoint."""
    optimizer.make_moments()
    policy = dict(policy_weights(model)) | base_fingerprint(model)
    weights = {f"{_POLICY}{name}": tensor.detach() for name, tensor in policy.items()}
    moments = {
        f"{_OPTIMIZER}{name}.{kind}": tensor
        for name, kinds in optimizer.moments().items()
        for kind, tensor in kinds.items()
    }
    return weights | moments


def _like(tensor: torch.Tensor, cpu_mesh: DeviceMesh) -> torch.Tensor:
    return _on_cpu(tensor, torch.zeros_like(local(tensor), device="cpu"), cpu_mesh)


def _on_cpu(tensor: torch.Tensor, part: torch.Tensor, cpu_mesh: DeviceMesh) -> torch.Tensor:
    """``part`` as this rank's part of a tensor that lies as ``tensor`` does."""
    if not isinstance(tensor, DTensor):
        return part
    placed: torch.Tensor = DTensor.from_local(
        part, cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def _check(folder: Path, saved: Mapping[str, TensorStorageMetadata], wanted: State) -> None:
    there = {name: torch.empty(of.size, dtype=of.properties.dtype, device="meta") for name, of in saved.items()}
    check_weights(folder, there, wanted)
    for name, of in saved.items():
        if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
            raise CheckpointError(f"{folder} is incomplete: a part of {name!r} is missing. {REMEDY}")


def _first_line(error: BaseException) -> str:
    return (str(error).strip().splitlines() or [type(error).__name__])[0]
