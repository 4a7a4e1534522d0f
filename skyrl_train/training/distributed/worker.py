"""One rank of sharded models, in its own process. Independent of Ray, so that it can run anywhere.

The driver calls the same method on all ranks at once. An error that all ranks agree on (a rejected sequence, a
checkpoint of another model) is raised as ``AgreedError``, and all are as before the call. An error on one rank alone leaves the
others waiting in a collective, and the driver ends the group.
"""

from __future__ import annotations

import fcntl
import os
import socket
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt
import torch
import torch.distributed as dist
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import CheckpointError
from skyrl_train.models.folder import resolve_device, resolve_dtype, use_tf32
from skyrl_train.models.lora import (
    adapter_of,
    add_adapter,
    checkpoint_buffers,
    merged_weights,
    policy_weights,
    served_weights,
)
from skyrl_train.training.backend import Minibatch, TokenRecord
from skyrl_train.training.collectives import AgreedError, ProcessGroupCollectives
from skyrl_train.training.critic_worker import CriticWorker, put_value_head
from skyrl_train.training.distributed import checkpoint
from skyrl_train.training.distributed.sharding import gathered, load_sharded, move_shards, shard_mesh
from skyrl_train.training.export import whole_model, write_hf
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role
from skyrl_train.training.policy_worker import PolicyWorker
from skyrl_train.training.sequence_parallel import SequenceRanks
from skyrl_train.training.state import Snapshots, host_tensor
from skyrl_train.weight_sync.control import address_towards

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

# Limit of a rank's wait for the others, which may be reading the model or gathering weights to sync.
WAIT_LIMIT = timedelta(minutes=30)
GLOO_INTERFACE = "GLOO_SOCKET_IFNAME"  # torch reads it when a group is made
_GET_ADDRESS = 0x8915  # SIOCGIFADDR: the IPv4 address of an interface


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Address of the store that rank 0 serves, through which the ranks find each other."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class _HeldModel:
    """A model of which this rank has a part."""

    settings: ModelSettings
    worker: PolicyWorker | CriticWorker
    snapshots: Snapshots[checkpoint.ShardState]


class TrainingWorker:
    """A rank.

    Call ``host_store`` on rank 0, then ``join`` on all ranks, ``hold`` for each model, then any other method; each call except
    ``host_store`` goes to all ranks.

    Raises (``hold`` and all after it):
        AgreedError: the ranks agree on an error; nothing has changed.
    """

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._held: dict[Role, _HeldModel] = {}
        self._transports: dict[int, WeightTransport] = {}
        self._offloaded = False

    def host_store(self, host: str, num_ranks: int) -> Rendezvous:
        """Serve the store through which the ranks meet; ``host`` is this machine's address."""
        self._store = TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=WAIT_LIMIT)
        return Rendezvous(host, self._store.port)

    def join(self, rank: int, num_ranks: int, meeting: Rendezvous, trainer: TrainerConfig, key: str) -> None:
        """Become ``rank`` of the process group.

        Args:
            trainer: ``device`` and ``fsdp`` give the mesh of the ranks.
            key: the setting of ``fsdp``, for messages.
        """
        device = resolve_device(trainer.device)
        if trainer.tf32:
            use_tf32(device)
        store = self._store or TCPStore(meeting.host, meeting.port, num_ranks, timeout=WAIT_LIMIT)
        # Agreements and checkpoints use the CPU's group; parameters use the group of their device.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        shard_size, sequence_ranks, size = trainer.fsdp.shard_size, None, trainer.fsdp.sequence_parallel_size
        with gloo_towards(meeting.host):
            dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=WAIT_LIMIT)
            self._mesh: DeviceMesh = shard_mesh(device.type, num_ranks, shard_size)
            self._cpu_mesh = self._mesh if device.type == "cpu" else shard_mesh("cpu", num_ranks, shard_size)
            # Checkpoints are written beside training.
            self._writers = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)
            if size > 1:
                group, _ = dist.new_subgroups(size, timeout=WAIT_LIMIT)
                sequence_ranks = SequenceRanks(group, dist.get_rank(group), size, f"{key}.sequence_parallel_size")
        self._collectives = ProcessGroupCollectives(sequence_ranks)

    def hold(self, role: Role, settings: ModelSettings) -> None:
        """Load this rank's part of a model."""
        torch.manual_seed(settings.seed)
        path, trainer, steps = settings.model_path, settings.trainer, settings.total_steps
        section = "trainer.critic" if role is Role.critic else "trainer.policy"

        def with_trained_parts(model: PreTrainedModel) -> PreTrainedModel:
            if role is Role.critic:
                return put_value_head(model, path)
            lora = trainer.policy.model.lora
            return add_adapter(model, lora, seed=settings.seed, dtype=torch.float32) if lora.rank else model

        model = load_sharded(path, trainer, self._mesh, self._collectives, with_trained_parts, section)
        snapshots: Snapshots[checkpoint.ShardState] = Snapshots()

        def built() -> PolicyWorker | CriticWorker:
            if role is Role.critic:
                return CriticWorker(model, trainer, steps, self._collectives, snapshots)
            return PolicyWorker(model, path, trainer, steps, settings.temperature, self._collectives, snapshots)

        self._held[role] = _HeldModel(settings, self._collectives.all_succeed(built), snapshots)

    def leave(self) -> None:
        """Leave the group of ranks and drop all models."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._held.clear()
        dist.destroy_process_group()
        self._store = None

    # ---- training

    def score(self, role: Role, sequences: PackedSequences) -> list[npt.NDArray[np.generic]]:
        """Compute log-probs (a critic: values) of each token of this rank's sequences, float32 arrays ``[T]``."""
        worker = self._held[role].worker
        score = worker.forward_values if isinstance(worker, CriticWorker) else worker.forward_logprobs
        return [row.numpy() for row in score(sequences.unpack())]

    def update(self, role: Role, sequences: PackedSequences, of: Minibatch) -> dict[str, float]:
        """Make a step on the minibatch ``of``, of which this rank has ``sequences``; return its metrics."""
        return self._held[role].worker.update(replace(of, sequences=sequences.unpack()))

    def accumulate(self, role: Role, sequences: PackedSequences, of: Minibatch) -> None:
        """Add the gradient of a part of a step."""
        self._held[role].worker.accumulate(replace(of, sequences=sequences.unpack()))

    def finish(self, role: Role, step: int) -> dict[str, float]:
        """Make the step; return its metrics."""
        return self._held[role].worker.finish(step)

    def take_records(self, role: Role) -> dict[int, TokenRecord]:
        """Return the records of this rank's sequences."""
        worker = self._held[role].worker
        return worker.take_records() if isinstance(worker, PolicyWorker) else {}

    def discard(self, role: Role) -> None:
        """Discard the accumulated gradients."""
        self._held[role].worker.discard()

    # ---- weights and checkpoints

    def _gathered_weights(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        """Gather each parameter when the iterator reaches it, in the dtype with which the policy computes."""
        dtype = resolve_dtype(self._held[Role.policy].settings.trainer.policy.dtype)
        for name, parameter in weights:
            yield name, gathered(parameter.detach(), dtype)

    def weight_names(self) -> list[str]:
        """Return the HF names of what is sent to the engines, in its order."""
        return [name for name, _ in served_weights(self._policy)]

    def weight(self, name: str) -> torch.Tensor | None:
        """Gather one of the :meth:`weight_names`: on the CPU of rank 0, None on the others."""
        named = ((known, parameter) for known, parameter in served_weights(self._policy) if known == name)
        _, full = next(self._gathered_weights(named))
        return full.cpu() if dist.get_rank() == 0 else None

    def stage(self, key: int, transport: WeightTransport, version: int) -> WeightUpdate | None:
        """Let rank 0, or every rank, copy the policy's weights to the staging area of the transport with this ``key``,
        parameter by parameter.

        Args:
            transport: in its initial state; the first one with this key stays open here.

        Returns:
            The update of a rank that has copied them.
        """
        weights = self._gathered_weights(served_weights(self._policy))

        def copy() -> WeightUpdate | None:
            try:
                if dist.get_rank() == 0 or transport.on_every_rank:
                    update = self._transports.setdefault(key, transport).gather(weights, version)
                    return replace(update, adapter=adapter_of(self._policy))
            finally:
                deque(weights, maxlen=0)  # all ranks gather every weight, also if the copy has failed
            return None

        return self._collectives.all_succeed(copy)

    def release_staging(self, key: int) -> bool:
        """Free the staging copies of the transport with this ``key`` on this rank's device."""
        return key in self._transports and self._transports[key].release()

    def offload_states(self) -> None:
        """Move the shards of all models and moments out of this rank's device: from a GPU to pinned memory, from main memory to
        files of ``tempfile``. Models with ``cpu_offload`` stay where they are. Idempotent.
        """
        if self._offloaded:
            return
        for held in self._on_device():
            assert not held.worker.has_open_step, "gradients of a step that has begun would stay"
            held.snapshots.copied()  # a copy under way would keep the memory

            def outside(shard: torch.Tensor) -> torch.Tensor:
                # Complete when it returns: FSDP2 copies a shard at once that is smaller than those of other ranks, to pad it.
                return host_tensor(shard).copy_(shard)

            move_shards(held.worker.model, held.worker.optimizer, outside)
        self._offloaded = True
        if self._mesh.device_type == "cuda":
            torch.cuda.empty_cache()  # for the engines' processes

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`. Idempotent."""
        if not self._offloaded:
            return
        device = torch.device(self._mesh.device_type)
        for held in self._on_device():

            def inside(shard: torch.Tensor) -> torch.Tensor:
                return torch.empty_like(shard, device=device).copy_(shard, non_blocking=True)

            move_shards(held.worker.model, held.worker.optimizer, inside)
        self._offloaded = False

    def _on_device(self) -> list[_HeldModel]:
        return [held for held in self._held.values() if not held.settings.trainer.fsdp.cpu_offload]

    def snapshot(self, role: Role) -> int:
        """Begin to copy this rank's state to main memory, over the copy before it; return the snapshot's number."""
        held, mesh = self._held[role], self._cpu_mesh
        return held.snapshots.take(
            lambda buffers: checkpoint.copy_of(held.worker.model, held.worker.optimizer, mesh, buffers)
        )

    def save(self, role: Role, number: int, folder: Path) -> dict[str, str]:
        """Write the snapshot with this ``number``; other methods may run meanwhile. Return this rank's files' checksums."""
        try:
            return checkpoint.write(self._held[role].snapshots.state(number), folder, self._writers)
        except (OSError, CheckpointError) as error:  # raised on all ranks alike
            raise AgreedError(error) from error

    def load(self, role: Role, folder: Path) -> None:
        """Restore a checkpoint that any number of ranks wrote."""
        held = self._held[role]
        model, optimizer = held.worker.model, held.worker.optimizer
        state = self._collectives.all_succeed(lambda: checkpoint.read(model, optimizer, folder, self._cpu_mesh))
        held.worker.discard()
        held.snapshots.copied()
        checkpoint.restore(state, model, optimizer)

    def export_hf(self, folder: Path) -> None:
        """Let rank 0 write the policy as a folder that transformers opens."""
        first, model = dist.get_rank() == 0, self._policy
        plain = merged_weights(self._gathered_weights(model.named_parameters()), adapter_of(model))
        weights = {name: weight.cpu() for name, weight in plain if first}
        weights |= {name: buffer.cpu() for name, buffer in checkpoint_buffers(model) if first}
        adapter: dict[str, torch.Tensor] = {}
        if adapter_of(model) is not None:
            adapter = {name: weight.cpu() for name, weight in self._gathered_weights(policy_weights(model)) if first}

        def write() -> None:
            settings = self._held[Role.policy].settings
            whole = whole_model(weights, settings.model_path, settings.trainer.policy.dtype)
            write_hf(whole, model, adapter, settings.model_path, folder)

        self._collectives.all_succeed(write if first else lambda: None)

    @property
    def _policy(self) -> PreTrainedModel:
        return self._held[Role.policy].worker.model


@contextmanager
def gloo_towards(host: str) -> Iterator[None]:
    """While open, gloo takes the network interface that leads to ``host``, unless the user has named one.

    By default gloo takes the address of this machine's name, which on many machines is 127.0.1.1: no other node can reach it.
    """
    interface = _interface_towards(host)
    if interface is None or GLOO_INTERFACE in os.environ:
        yield
        return
    os.environ[GLOO_INTERFACE] = interface
    try:
        yield
    finally:
        del os.environ[GLOO_INTERFACE]


def _interface_towards(host: str) -> str | None:
    """Return the name of the network interface whose IPv4 address leads to ``host``; None if there is no such address."""
    address = address_towards(host)
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(probe, _GET_ADDRESS, struct.pack("256s", name.encode()))
            except OSError:  # it has no address
                continue
            if socket.inet_ntoa(answer[20:24]) == address:
                return name
    return None
