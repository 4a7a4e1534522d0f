"""One rank of sharded models, in a process of its own. Knows nothing of Ray, so that it can run anywhere.

The driver calls the same method on all ranks at once. What a method raises on every rank alike (a refused sequence, a
checkpoint of another model) is returned, as ``Refused``; what one raises alone leaves the others waiting for it, and the
driver ends the group.
"""

from __future__ import annotations

import os
import shutil
import socket
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass, replace
from datetime import timedelta
from enum import StrEnum
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from safetensors import SafetensorError
from torch.distributed import TCPStore  # type: ignore[attr-defined]
from torch.distributed.device_mesh import DeviceMesh
from transformers import PreTrainedModel

from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.errors import CheckpointError, SkyRLError
from skyrl_train.models.folder import build_empty, load_tokenizer, quiet_transformers, resolve_device, resolve_dtype
from skyrl_train.models.lora import adapter_of, add_adapter, merged_weights, policy_weights, write_adapter
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.critic import CriticTrainer
from skyrl_train.training.distributed import checkpoint
from skyrl_train.training.distributed.process_ranks import AgreedError, ProcessRanks
from skyrl_train.training.distributed.sharding import load_sharded, shard_mesh, whole
from skyrl_train.training.distributed.shares import PackedSequences
from skyrl_train.training.rank_trainer import RankTrainer
from skyrl_train.training.sequence_parallel import SequenceRanks
from skyrl_train.training.snapshots import Snapshots
from skyrl_train.training.value_model import put_value_head

if TYPE_CHECKING:
    from skyrl_train.inference.weight_update import WeightUpdate
    from skyrl_train.publication.base import WeightTransport

# How long a rank waits for the others, who may be reading the model or gathering what is published.
WAIT_LIMIT = timedelta(minutes=30)


class Role(StrEnum):
    """What a model is to the run. Ranks hold one of each, at most."""

    policy = "policy"
    reference = "reference"  # a copy of the policy that stays as it is
    critic = "critic"  # a value model


@dataclass(frozen=True, slots=True)
class ModelSettings:
    """What every rank builds its part of a model from; the arguments of :class:`LocalBackend`."""

    model_path: str
    trainer: TrainerConfig  # of a critic, that of :func:`skyrl_train.config.derive.critic_trainer`
    total_steps: int
    temperature: float
    seed: int


@dataclass(frozen=True, slots=True)
class Rendezvous:
    """Where the ranks meet: a store that rank 0 serves."""

    host: str
    port: int


@dataclass(frozen=True, slots=True)
class Returned:
    """What a method returned."""

    value: Any


@dataclass(frozen=True, slots=True)
class Refused:
    """What a method raised on every rank alike; the group goes on."""

    error: Exception


@dataclass(frozen=True, slots=True)
class _Held:
    """A model of which this rank has a part."""

    settings: ModelSettings
    trainer: RankTrainer | CriticTrainer
    snapshots: Snapshots[checkpoint.State]


class TrainingWorker:
    """A rank. ``host_store`` on rank 0, then ``join`` on all, ``hold`` for each model, then any other method, always on all."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._held: dict[Role, _Held] = {}
        self._transports: dict[int, WeightTransport] = {}

    def host_store(self, host: str, num_ranks: int) -> Rendezvous:
        """Makes this rank the one that the others meet at; ``host`` is this machine's address."""
        self._store = TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=WAIT_LIMIT)
        return Rendezvous(host, self._store.port)

    def join(self, rank: int, num_ranks: int, meeting: Rendezvous, trainer: TrainerConfig, key: str) -> Returned:
        """Becomes ``rank``.

        Args:
            trainer: ``device`` and ``fsdp`` say how the ranks lie.
            key: where ``fsdp`` is set, for messages.
        """
        device = resolve_device(trainer.device)
        store = self._store or TCPStore(meeting.host, meeting.port, num_ranks, timeout=WAIT_LIMIT)
        # What ranks tell each other is on the CPU, and so are checkpoints; parameters are where they are trained.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=WAIT_LIMIT)
        shard_size = trainer.fsdp.shard_size
        self._mesh: DeviceMesh = shard_mesh(device.type, num_ranks, shard_size)
        self._cpu_mesh = self._mesh if device.type == "cpu" else shard_mesh("cpu", num_ranks, shard_size)
        self._writers = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)  # checkpoints are written beside training
        self._ranks = ProcessRanks(
            _sequence_ranks(trainer.fsdp.sequence_parallel_size, f"{key}.sequence_parallel_size")
        )
        return Returned(None)

    def hold(self, role: Role, settings: ModelSettings) -> Returned | Refused:
        """Loads this rank's part of a model."""
        return _outcome(lambda: self._build(role, settings))

    def leave(self) -> None:
        """Leaves the group of ranks."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        self._held.clear()
        dist.destroy_process_group()
        self._store = None

    # ---- training

    def score(self, role: Role, sequences: PackedSequences) -> Returned | Refused:
        """Log-probs, of a critic values, of each token of this rank's sequences, float32 arrays ``[T]``."""
        trainer = self._held[role].trainer
        score = trainer.forward_values if isinstance(trainer, CriticTrainer) else trainer.forward_logprobs
        return _outcome(lambda: [row.numpy() for row in score(sequences.unpack())])

    def update(self, role: Role, sequences: PackedSequences, of: Minibatch) -> Returned | Refused:
        """A step on the minibatch ``of`` which these are this rank's sequences; its metrics."""
        return _outcome(lambda: self._held[role].trainer.update(replace(of, sequences=sequences.unpack())))

    def accumulate(self, role: Role, sequences: PackedSequences, of: Minibatch) -> Returned | Refused:
        """Adds the gradient of a part of a step."""
        return _outcome(lambda: self._held[role].trainer.accumulate(replace(of, sequences=sequences.unpack())))

    def finish(self, role: Role, step: int) -> Returned | Refused:
        """Makes the step; its metrics."""
        return _outcome(lambda: self._held[role].trainer.finish(step))

    def discard(self, role: Role) -> Returned | Refused:
        """Forgets what was accumulated."""
        return _outcome(self._held[role].trainer.discard)

    # ---- weights and checkpoints

    def _whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            yield name, whole(self._published(weight))

    def weight_names(self) -> Returned | Refused:
        """The policy's parameters' HF names, in their order."""
        return Returned([name for name, _ in policy_weights(self._policy)])

    def weight(self, name: str) -> Returned | Refused:
        """One parameter of the policy, brought together; on the CPU of rank 0, None on the others."""
        full = whole(self._published(dict(policy_weights(self._policy))[name])).cpu()
        return Returned(full if dist.get_rank() == 0 else None)

    def stage(self, key: int, transport: WeightTransport, version: int) -> Returned | Refused:
        """Rank 0 copies the policy's weights to the staging area of the transport with this ``key``, parameter by parameter.

        Args:
            transport: as it was made; the first one with this key stays open here.
        """
        weights = self._whole(policy_weights(self._policy))

        def copy() -> WeightUpdate | None:
            try:
                if dist.get_rank() == 0:
                    update = self._transports.setdefault(key, transport).gather(weights, version)
                    return replace(update, adapter=adapter_of(self._policy))
            finally:
                deque(weights, maxlen=0)  # all ranks bring every weight together, also if the copy has failed
            return None

        return _outcome(lambda: self._ranks.together(copy))

    def snapshot(self, role: Role) -> Returned | Refused:
        """Begins to copy this rank's state to main memory, in the place of the copy before it; the snapshot's number."""
        trainer = self._held[role].trainer
        return Returned(
            self._held[role].snapshots.take(
                lambda buffers: checkpoint.copy_of(trainer.model, trainer.optimizer, self._cpu_mesh, buffers)
            )
        )

    def save(self, role: Role, number: int, folder: Path) -> Returned | Refused:
        """Writes the snapshot of this ``number``; other methods may run meanwhile."""
        try:
            checkpoint.write(self._held[role].snapshots.state(number), folder, self._writers)
        except (OSError, CheckpointError) as error:  # on all ranks alike
            return Refused(error)
        return Returned(None)

    def load(self, role: Role, folder: Path) -> Returned | Refused:
        """Restores what any number of ranks wrote."""

        def load() -> None:
            trainer = self._held[role].trainer
            state = self._ranks.together(
                lambda: checkpoint.read(trainer.model, trainer.optimizer, folder, self._cpu_mesh)
            )
            trainer.discard()
            self._held[role].snapshots.copied()
            checkpoint.restore(state, trainer.model, trainer.optimizer)

        return _outcome(load)

    def export_hf(self, folder: Path) -> Returned | Refused:
        """Rank 0 writes the policy as a folder that transformers opens."""
        first, model = dist.get_rank() == 0, self._policy
        plain = merged_weights(self._whole(model.named_parameters()), adapter_of(model))
        weights = {name: weight.cpu() for name, weight in plain if first}
        adapter: dict[str, torch.Tensor] = {}
        if adapter_of(model) is not None:
            adapter = {name: weight.cpu() for name, weight in self._whole(policy_weights(model)) if first}
        return _outcome(
            lambda: self._ranks.together(lambda: self._write_hf(weights, adapter, folder) if first else None)
        )

    @property
    def _policy(self) -> PreTrainedModel:
        return self._held[Role.policy].trainer.model

    def _build(self, role: Role, settings: ModelSettings) -> None:
        torch.manual_seed(settings.seed)
        path, trainer, steps = settings.model_path, settings.trainer, settings.total_steps
        whose = "trainer.critic" if role is Role.critic else "trainer.policy"
        adapt = partial(_adapted, role=role, settings=settings)
        model = load_sharded(path, trainer, self._mesh, self._ranks, adapt, whose)
        snapshots: Snapshots[checkpoint.State] = Snapshots()

        def built() -> RankTrainer | CriticTrainer:
            if role is Role.critic:
                return CriticTrainer(model, trainer, steps, self._ranks, snapshots)
            return RankTrainer(model, path, trainer, steps, settings.temperature, self._ranks, snapshots)

        self._held[role] = _Held(settings, self._ranks.together(built), snapshots)

    def _published(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight that the policy computes with: the parameter, or its rounding."""
        return parameter.detach().to(resolve_dtype(self._held[Role.policy].settings.trainer.policy.dtype))

    def _write_hf(self, weights: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], folder: Path) -> None:
        unfinished = folder.with_name(f".tmp-{folder.name}")
        settings = self._held[Role.policy].settings
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            model = build_empty(settings.model_path, settings.trainer.policy.dtype, "cpu")
            model.load_state_dict(weights, strict=False)  # a tied weight has one name of two
            with quiet_transformers():
                model.save_pretrained(unfinished)
                load_tokenizer(settings.model_path).save_pretrained(unfinished)
            if adapter:
                write_adapter(self._policy, adapter, unfinished / "adapter")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"The policy cannot be exported to {folder} on {socket.gethostname()}: {error}. Free space or choose "
                "another place; the run's checkpoints hold the same weights."
            ) from error


def _adapted(model: PreTrainedModel, role: Role, settings: ModelSettings) -> PreTrainedModel:
    """The model with what is trained of it: a critic's head, or the policy's adapter, if it has one."""
    if role is Role.critic:
        return put_value_head(model)
    lora = settings.trainer.policy.model.lora
    return add_adapter(model, lora, seed=settings.seed, dtype=torch.float32) if lora.rank else model


def _sequence_ranks(size: int, setting: str) -> SequenceRanks | None:
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=WAIT_LIMIT)
    return SequenceRanks(group, dist.get_rank(group), size, setting)


def _outcome(function: Callable[[], Any]) -> Returned | Refused:
    try:
        return Returned(function())
    except AgreedError as agreed:
        error = agreed.error
        # As it is where its class takes one message, so that it can travel.
        return Refused(error if isinstance(error, SkyRLError | ValueError | OSError) else RuntimeError(repr(error)))
