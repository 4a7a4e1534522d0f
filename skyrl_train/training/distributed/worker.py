"""One rank of a sharded policy, in a process of its own. Knows nothing of Ray, so that it can run anywhere.

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


@dataclass(frozen=True, slots=True)
class WorkerSettings:
    """What every rank is built from; the arguments of :class:`LocalBackend`."""

    model_path: str
    trainer: TrainerConfig
    total_steps: int
    temperature: float
    seed: int
    critic: bool = False  # a value model; ``trainer`` is of :func:`skyrl_train.config.derive.critic_trainer` then
    reference: TrainerConfig | None = None  # of a copy of the policy that stays as it is, beside it


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


class TrainingWorker:
    """A rank. ``host_store`` on rank 0, then ``join`` on all, then any other method, always on all."""

    def __init__(self) -> None:
        self._store: TCPStore | None = None
        self._snapshots: Snapshots[checkpoint.State] = Snapshots()
        self._transports: dict[int, WeightTransport] = {}

    def host_store(self, host: str, num_ranks: int) -> Rendezvous:
        """Makes this rank the one that the others meet at; ``host`` is this machine's address."""
        self._store = TCPStore(host, 0, num_ranks, is_master=True, wait_for_workers=False, timeout=WAIT_LIMIT)
        return Rendezvous(host, self._store.port)

    def join(self, rank: int, num_ranks: int, meeting: Rendezvous, settings: WorkerSettings) -> Returned | Refused:
        """Becomes ``rank`` and loads its part of the model."""
        device = resolve_device(settings.trainer.device)
        store = self._store or TCPStore(meeting.host, meeting.port, num_ranks, timeout=WAIT_LIMIT)
        # What ranks tell each other is on the CPU, and so are checkpoints; parameters are where they are trained.
        backend = "cpu:gloo,cuda:nccl" if device.type == "cuda" else "cpu:gloo"
        dist.init_process_group(backend, store=store, rank=rank, world_size=num_ranks, timeout=WAIT_LIMIT)
        shard_size = settings.trainer.fsdp.shard_size
        self._mesh: DeviceMesh = shard_mesh(device.type, num_ranks, shard_size)
        self._cpu_mesh = self._mesh if device.type == "cpu" else shard_mesh("cpu", num_ranks, shard_size)
        self._writers = dist.new_group(backend="gloo", timeout=WAIT_LIMIT)  # checkpoints are written beside training
        self._ranks = ProcessRanks(_sequence_ranks(settings.trainer.fsdp.sequence_parallel_size))
        self._settings = settings
        return _outcome(lambda: self._build(settings))

    def leave(self) -> None:
        """Leaves the group of ranks."""
        for transport in self._transports.values():
            transport.close()
        self._transports.clear()
        dist.destroy_process_group()
        self._store = None

    # ---- training

    def forward_logprobs(self, sequences: PackedSequences) -> Returned | Refused:
        """Log-probs of each token of this rank's sequences, float32 arrays ``[T]``."""
        trainer = self._trainer
        assert isinstance(trainer, RankTrainer), "these workers train a critic"
        return _outcome(lambda: [row.numpy() for row in trainer.forward_logprobs(sequences.unpack())])

    def forward_values(self, sequences: PackedSequences) -> Returned | Refused:
        """Values of each token of this rank's sequences, float32 arrays ``[T]``; of a critic."""
        trainer = self._trainer
        assert isinstance(trainer, CriticTrainer), "these workers train a policy"
        return _outcome(lambda: [row.numpy() for row in trainer.forward_values(sequences.unpack())])

    def reference_logprobs(self, sequences: PackedSequences) -> Returned | Refused:
        """As :meth:`forward_logprobs`, of the model as it was loaded."""
        reference = self._reference
        assert isinstance(reference, RankTrainer), "these workers train a critic"
        return _outcome(lambda: [row.numpy() for row in reference.forward_logprobs(sequences.unpack())])

    def update(self, sequences: PackedSequences, of: Minibatch) -> Returned | Refused:
        """A step on the minibatch ``of`` which these are this rank's sequences; its metrics."""
        return _outcome(lambda: self._trainer.update(replace(of, sequences=sequences.unpack())))

    def accumulate(self, sequences: PackedSequences, of: Minibatch) -> Returned | Refused:
        """Adds the gradient of a part of a step."""
        return _outcome(lambda: self._trainer.accumulate(replace(of, sequences=sequences.unpack())))

    def finish(self, step: int) -> Returned | Refused:
        """Makes the step; its metrics."""
        return _outcome(lambda: self._trainer.finish(step))

    def discard(self) -> Returned | Refused:
        """Forgets what was accumulated."""
        return _outcome(self._trainer.discard)

    # ---- weights and checkpoints

    def _whole(self, weights: Iterable[tuple[str, torch.Tensor]]) -> Iterator[tuple[str, torch.Tensor]]:
        for name, weight in weights:
            yield name, whole(self._published(weight))

    def weight_names(self) -> Returned | Refused:
        """The parameters' HF names, in their order."""
        return Returned([name for name, _ in policy_weights(self._trainer.model)])

    def weight(self, name: str) -> Returned | Refused:
        """One parameter, brought together; on the CPU of rank 0, None on the others."""
        full = whole(self._published(dict(policy_weights(self._trainer.model))[name])).cpu()
        return Returned(full if dist.get_rank() == 0 else None)

    def stage(self, key: int, transport: WeightTransport, version: int) -> Returned | Refused:
        """Rank 0 copies the weights to the staging area of the transport with this ``key``, parameter by parameter.

        Args:
            transport: as it was made; the first one with this key stays open here.
        """
        weights = self._whole(policy_weights(self._trainer.model))

        def copy() -> WeightUpdate | None:
            try:
                if dist.get_rank() == 0:
                    update = self._transports.setdefault(key, transport).gather(weights, version)
                    return replace(update, adapter=adapter_of(self._trainer.model))
            finally:
                deque(weights, maxlen=0)  # all ranks bring every weight together, also if the copy has failed
            return None

        return _outcome(lambda: self._ranks.together(copy))

    def snapshot(self) -> Returned | Refused:
        """Begins to copy this rank's state to main memory, in the place of the copy before it; the snapshot's number."""
        trainer = self._trainer
        return Returned(
            self._snapshots.take(
                lambda buffers: checkpoint.copy_of(trainer.model, trainer.optimizer, self._cpu_mesh, buffers)
            )
        )

    def save(self, number: int, folder: Path) -> Returned | Refused:
        """Writes the snapshot of this ``number``; other methods may run meanwhile."""
        try:
            checkpoint.write(self._snapshots.state(number), folder, self._writers)
        except (OSError, CheckpointError) as error:  # on all ranks alike
            return Refused(error)
        return Returned(None)

    def load(self, folder: Path) -> Returned | Refused:
        """Restores what any number of ranks wrote."""

        def load() -> None:
            trainer = self._trainer
            state = self._ranks.together(
                lambda: checkpoint.read(trainer.model, trainer.optimizer, folder, self._cpu_mesh)
            )
            trainer.discard()
            self._snapshots.copied()
            checkpoint.restore(state, trainer.model, trainer.optimizer)

        return _outcome(load)

    def export_hf(self, folder: Path) -> Returned | Refused:
        """Rank 0 writes the policy as a folder that transformers opens."""
        first, model = dist.get_rank() == 0, self._trainer.model
        plain = merged_weights(self._whole(model.named_parameters()), adapter_of(model))
        weights = {name: weight.cpu() for name, weight in plain if first}
        adapter: dict[str, torch.Tensor] = {}
        if adapter_of(model) is not None:
            adapter = {name: weight.cpu() for name, weight in self._whole(policy_weights(model)) if first}
        return _outcome(
            lambda: self._ranks.together(lambda: self._write_hf(weights, adapter, folder) if first else None)
        )

    def _build(self, settings: WorkerSettings) -> None:
        torch.manual_seed(settings.seed)
        self._trainer = self._trainer_of(settings, self._snapshots)
        if settings.reference is not None:  # never trained: no rank holds gradients or moments of it
            self._reference = self._trainer_of(replace(settings, trainer=settings.reference), Snapshots())

    def _trainer_of(
        self, settings: WorkerSettings, snapshots: Snapshots[checkpoint.State]
    ) -> RankTrainer | CriticTrainer:
        path, trainer, steps = settings.model_path, settings.trainer, settings.total_steps
        model = load_sharded(path, trainer, self._mesh, self._ranks, partial(_adapted, settings=settings))

        def built() -> RankTrainer | CriticTrainer:
            if settings.critic:
                return CriticTrainer(model, trainer, steps, self._ranks, snapshots)
            return RankTrainer(model, path, trainer, steps, settings.temperature, self._ranks, snapshots)

        return self._ranks.together(built)

    def _published(self, parameter: torch.Tensor) -> torch.Tensor:
        """The weight that the policy computes with: the parameter, or its rounding."""
        return parameter.detach().to(resolve_dtype(self._settings.trainer.policy.dtype))

    def _write_hf(self, weights: dict[str, torch.Tensor], adapter: dict[str, torch.Tensor], folder: Path) -> None:
        unfinished = folder.with_name(f".tmp-{folder.name}")
        path = self._settings.model_path
        try:
            shutil.rmtree(unfinished, ignore_errors=True)
            model = build_empty(path, self._settings.trainer.policy.dtype, "cpu")
            model.load_state_dict(weights, strict=False)  # a tied weight has one name of two
            with quiet_transformers():
                model.save_pretrained(unfinished)
                load_tokenizer(path).save_pretrained(unfinished)
            if adapter:
                write_adapter(self._trainer.model, adapter, unfinished / "adapter")
            shutil.rmtree(folder, ignore_errors=True)
            os.replace(unfinished, folder)
        except (OSError, SafetensorError) as error:
            shutil.rmtree(unfinished, ignore_errors=True)
            raise CheckpointError(
                f"The policy cannot be exported to {folder} on {socket.gethostname()}: {error}. Free space or choose "
                "another place; the run's checkpoints hold the same weights."
            ) from error


def _adapted(model: PreTrainedModel, settings: WorkerSettings) -> PreTrainedModel:
    """The model with what is trained of it: a critic's head, or the policy's adapter, if it has one."""
    if settings.critic:
        return put_value_head(model)
    lora = settings.trainer.policy.model.lora
    return add_adapter(model, lora, seed=settings.seed, dtype=torch.float32) if lora.rank else model


def _sequence_ranks(size: int) -> SequenceRanks | None:
    if size == 1:
        return None
    group, _ = dist.new_subgroups(size, timeout=WAIT_LIMIT)
    return SequenceRanks(group, dist.get_rank(group), size)


def _outcome(function: Callable[[], Any]) -> Returned | Refused:
    try:
        return Returned(function())
    except AgreedError as agreed:
        error = agreed.error
        # As it is where its class takes one message, so that it can travel.
        return Refused(error if isinstance(error, SkyRLError | ValueError | OSError) else RuntimeError(repr(error)))
