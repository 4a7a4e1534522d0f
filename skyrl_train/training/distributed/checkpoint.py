"""The checkpoint of a sharded model: safetensors files, one per rank, that any number of ranks can read.

live shards ──snapshot──> copies in main memory ──write (in the background)──> shard-0000R-*.safetensors
                                 files ──read (each rank what its shards need)──> copies ──> live shards

Written and read by torch.distributed.checkpoint. The files hold tensors and JSON only: reading them runs no code.
"""

from __future__ import annotations

import io
import os
import warnings
from collections.abc import Generator, Mapping
from contextlib import contextmanager
from pathlib import Path

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.filesystem import FileSystem
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader, HuggingFaceStorageWriter
from torch.distributed.checkpoint.metadata import TensorStorageMetadata
from torch.distributed.checkpoint.state_dict_loader import load as load_shards
from torch.distributed.checkpoint.state_dict_saver import save as save_shards
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel

from skyrl_train.errors import READ_AGAIN, CheckpointError, first_line, may_pass
from skyrl_train.models.lora import base_fingerprint, policy_weights
from skyrl_train.runtime.checksums import ChecksumWriter
from skyrl_train.training.distributed.sharding import local_shard
from skyrl_train.training.export import SHARDED_POLICY
from skyrl_train.training.optimizer import PolicyOptimizer
from skyrl_train.training.state import POLICY_FILE, REMEDY, Buffers, check_base, check_weights

ShardState = dict[str, torch.Tensor]  # by name in the checkpoint
_OPTIMIZER, _RNG = "optimizer.", "rng."


def copy_of(model: PreTrainedModel, optimizer: PolicyOptimizer, cpu_mesh: DeviceMesh, buffers: Buffers) -> ShardState:
    """Return the state to save, with its tensors in ``buffers``: weights, moments, and this rank's generator states."""
    state = {
        name: _on_cpu(tensor, buffers.copy_of(name, local_shard(tensor)), cpu_mesh)
        for name, tensor in _live(model, optimizer).items()
    }
    state[f"{_RNG}{dist.get_rank()}.cpu"] = torch.get_rng_state()
    if torch.cuda.is_available():
        state[f"{_RNG}{dist.get_rank()}.cuda"] = torch.cuda.get_rng_state()
    return state


class _ChecksummedFiles(FileSystem):
    """Opens the files that torch writes, and keeps their checksums by name."""

    def __init__(self) -> None:
        self.checksums: dict[str, str] = {}

    @contextmanager
    def create_stream(self, path: str | os.PathLike[str], mode: str) -> Generator[io.IOBase, None, None]:
        assert mode == "wb", mode
        with ChecksumWriter(Path(path)) as file:
            yield file
        self.checksums[Path(path).name] = file.checksum


def write(state: ShardState, folder: Path, group: dist.ProcessGroup) -> dict[str, str]:
    """Write this rank's shards into ``folder``, which all ranks share. Called by all ranks.

    Args:
        group: a CPU (gloo) group that nothing else uses meanwhile.

    Returns:
        The checksums of this rank's files, by name.

    Raises:
        OSError: the disk is full or the folder cannot be written; on every rank.
    """
    writer = HuggingFaceStorageWriter(str(folder), save_distributed=True)
    writer.fs = files = _ChecksummedFiles()
    try:
        save_shards(state, storage_writer=writer, process_group=group)
    except CheckpointException as error:
        causes = [cause for cause, _ in error.failures.values()]
        raise next((cause for cause in causes if isinstance(cause, OSError)), OSError(str(causes[0]))) from error
    return files.checksums


def read(model: PreTrainedModel, optimizer: PolicyOptimizer, folder: Path, cpu_mesh: DeviceMesh) -> ShardState:
    """Read this rank's shards of a checkpoint that any number of ranks wrote. Changes nothing; no rank waits for another.

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
        wanted = {
            name: _on_cpu(tensor, torch.zeros_like(local_shard(tensor), device="cpu"), cpu_mesh)
            for name, tensor in _live(model, optimizer).items()
        }
        _check(folder, {k: v for k, v in saved.items() if not k.startswith(_RNG)}, wanted)
        # Generator states belong to a rank, not to a shard: with more ranks than wrote it, the others keep their seeds.
        rng = [name for name in saved if name.startswith(f"{_RNG}{dist.get_rank()}.")]
        wanted |= {name: torch.zeros(saved[name].size, dtype=torch.uint8) for name in rng}
        with warnings.catch_warnings():
            # torch warns that no rank waits for another, which is intended: ranks may read different files.
            warnings.simplefilter("ignore", UserWarning)
            load_shards(wanted, storage_reader=reader, no_dist=True)
    except CheckpointException as error:
        raise _unreadable(folder, next(cause for cause, _ in error.failures.values())) from error
    except (OSError, SafetensorError, KeyError, ValueError) as error:
        raise _unreadable(folder, error) from error
    check_base(folder, wanted, _live(model, optimizer))
    return wanted


def _unreadable(folder: Path, error: BaseException) -> CheckpointError:
    return CheckpointError(
        f"{folder} cannot be read ({first_line(error)}). {READ_AGAIN if may_pass(error) else REMEDY}"
    )


@torch.no_grad()
def restore(state: ShardState, model: PreTrainedModel, optimizer: PolicyOptimizer) -> None:
    """Copy the result of ``read`` into the live weights, moments and generator states."""
    optimizer.make_moments()
    for name, live in _live(model, optimizer).items():
        local_shard(live).copy_(local_shard(state[name]))
    of_rank = {name.rsplit(".", 1)[1]: value for name, value in state.items() if name.startswith(_RNG)}
    if "cpu" in of_rank:
        torch.set_rng_state(of_rank["cpu"])
    if "cuda" in of_rank and torch.cuda.is_available():
        torch.cuda.set_rng_state(of_rank["cuda"])


def _live(model: PreTrainedModel, optimizer: PolicyOptimizer) -> ShardState:
    """Return the trained tensors and their optimizer state, by their names in a checkpoint."""
    optimizer.make_moments()
    policy = dict(policy_weights(model)) | base_fingerprint(model)
    weights = {f"{SHARDED_POLICY}{name}": tensor.detach() for name, tensor in policy.items()}
    moments = {
        f"{_OPTIMIZER}{name}.{kind}": tensor
        for name, kinds in optimizer.moments().items()
        for kind, tensor in kinds.items()
    }
    return weights | moments


def _on_cpu(tensor: torch.Tensor, part: torch.Tensor, cpu_mesh: DeviceMesh) -> torch.Tensor:
    """Return ``part`` as this rank's part of a tensor that is sharded as ``tensor`` is."""
    if not isinstance(tensor, DTensor):
        return part
    placed: torch.Tensor = DTensor.from_local(
        part, cpu_mesh, tensor.placements, run_check=False, shape=tensor.shape, stride=tensor.stride()
    )
    return placed


def _check(folder: Path, saved: Mapping[str, TensorStorageMetadata], wanted: ShardState) -> None:
    # Shapes and dtypes are compared without reading the files: an error must change nothing, and loading takes minutes.
    there = {name: torch.empty(of.size, dtype=of.properties.dtype, device="meta") for name, of in saved.items()}
    check_weights(folder, there, wanted)
    for name, of in saved.items():
        if sum(chunk.sizes.numel() for chunk in of.chunks) != of.size.numel():
            raise CheckpointError(f"{folder} is incomplete: a part of {name!r} is missing. {REMEDY}")
