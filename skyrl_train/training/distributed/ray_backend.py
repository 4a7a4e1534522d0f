"""Training of the policy and the critic, sharded over Ray actors (FSDP2), on one machine or many.

minibatch ──share_out──> each rank's sequences ──> PolicyWorker on every rank, in step ──> the metrics of rank 0 (= all)
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.models.place import is_local
from skyrl_train.training.backend import (
    CriticBackend,
    Minibatch,
    TokenRecord,
    Training,
    TrainingBackend,
    TrainingSequence,
)
from skyrl_train.training.distributed.worker_group import WorkerGroup
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role, transport_key

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate
    from skyrl_train.workers.ray import RayPlacement


def share_out(lengths: Sequence[int], num_ranks: int) -> list[list[int]]:
    """Distribute sequences over ranks so that all have about the same number of tokens.

    Each sequence, longest first, goes to the rank with the fewest tokens so far.

    Returns:
        Per rank the indices into ``lengths``, ascending; empty where there are fewer sequences than ranks. No rank has more
        tokens than another by more than the longest sequence.
    """
    shares: list[list[int]] = [[] for _ in range(num_ranks)]
    loads = [(0, rank) for rank in range(num_ranks)]
    for index in sorted(range(len(lengths)), key=lambda i: -lengths[i]):
        tokens, rank = heapq.heappop(loads)
        shares[rank].append(index)
        heapq.heappush(loads, (tokens + lengths[index], rank))
    return [sorted(share) for share in shares]


class RayTraining(Training):
    """The common part of policy and critic: a group of workers, each with a shard.

    Every method raises TrainingWorkerError if a worker is gone.

    Attributes:
        group: the workers.
    """

    def __init__(self, role: Role, models: Mapping[Role, ModelSettings], group: WorkerGroup) -> None:
        """
        Args:
            role: of the model that is trained here.
            models: the models that the workers hold for this backend.
            group: closed if one of the models cannot be loaded.
        """
        self._role, self.group = role, group
        try:
            for of, settings in models.items():
                path = settings.model_path
                # The workers have other working directories.
                place = str(Path(path).absolute()) if is_local(path) else path
                group.call_alike("hold", of, replace(settings, model_path=place))
        except BaseException:
            group.close()
            raise

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`PolicyWorker.update`."""
        metrics: dict[str, float] = self._train("update", minibatch)
        return metrics

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`PolicyWorker.accumulate`."""
        self._train("accumulate", part)

    def finish(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = self.group.call_alike("finish", self._role, step)[0]
        return metrics

    def discard(self) -> None:
        self.group.call_alike("discard", self._role)

    def snapshot(self) -> dict[str, object]:
        """See :meth:`Training.snapshot`; the copies stay in the workers, until the next snapshot."""
        return {"number": self.group.call_alike("snapshot", self._role)[0]}

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        """See :meth:`Training.save`; every rank writes its shards. ``folder`` must be on a disk that all nodes share.

        Raises:
            OSError: the disk is full or the folder cannot be written.
            CheckpointError: another snapshot was taken since.
        """
        of_ranks = self.group.call_alike("save", self._role, snapshot["number"], folder.absolute())
        return {name: checksum for of_rank in of_ranks for name, checksum in of_rank.items()}

    def load(self, folder: Path) -> None:
        """See :meth:`Training.load`; any number of workers may have written the checkpoint."""
        self.group.call_alike("load", self._role, folder.absolute())

    def close(self) -> None:
        """End the workers, with every model that they hold and all weights that rank 0 has staged."""
        self.group.close()

    def _score(self, role: Role, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Return the scores of each token under that model of the workers, in the order of the sequences."""
        shares, packed = self._shares(sequences)
        results = [torch.zeros(0)] * len(sequences)
        of_ranks = self.group.call("score", [(role, of) for of in packed])
        # Ranks that compute slices of one share all return its scores: the first of each is read.
        for share, rows in zip(shares, of_ranks[:: self.group.ranks_per_share], strict=True):
            for index, row in zip(share, rows, strict=True):
                results[index] = torch.from_numpy(row.copy())
        return results

    def _train(self, method: str, part: Minibatch) -> Any:
        _, packed = self._shares(part.sequences)
        return self.group.call(method, [(self._role, of, replace(part, sequences=())) for of in packed])[0]

    def _shares(self, sequences: Sequence[TrainingSequence]) -> tuple[list[list[int]], list[PackedSequences]]:
        """Return the indices of each share's sequences, and the packed sequences for each rank.

        Neighbouring ranks get the same share where each computes a slice of it (sequence parallelism).
        """
        each = self.group.ranks_per_share
        shares = share_out([len(sequence) for sequence in sequences], self.group.size // each)
        packed = [PackedSequences.of([sequences[index] for index in share]) for share in shares]
        return shares, [of_share for of_share in packed for _ in range(each)]


class RayBackend(RayTraining, TrainingBackend):
    """A policy whose parameters, gradients and moments lie on several ranks; see :class:`PolicyWorker`.

    Losses and weights equal the local backend's except for the order in which gradients are added up: metrics agree
    within 1e-5, and weights within 1e-3 of their change. Every method raises TrainingWorkerError if a worker is gone.
    """

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        temperature: float,
        seed: int,
        reference: TrainerConfig | None = None,
        log: Path | None = None,
        placements: Sequence[RayPlacement] | None = None,
    ) -> None:
        """Start ``trainer.fsdp.num_workers`` actors. Arguments and errors as for :class:`LocalBackend` and
        :class:`WorkerGroup`; ``model_path`` is opened on every node.

        Args:
            reference: settings with which the ranks also hold the initial model of ``model_path``; None: they do not.
            log: see :class:`WorkerGroup`.
            placements: see :class:`WorkerGroup`.
        """
        policy = ModelSettings(model_path, trainer_config, total_steps, temperature, seed)
        models = {Role.policy: policy}
        if reference is not None:  # never trained: no rank holds gradients or moments of it
            models[Role.reference] = replace(policy, trainer=reference)
        super().__init__(Role.policy, models, WorkerGroup(trainer_config, "trainer.fsdp", log, placements))
        self._transports: list[WeightTransport] = []

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.policy, sequences)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.reference, sequences)

    def take_records(self) -> dict[int, TokenRecord]:
        of_ranks: list[dict[int, TokenRecord]] = self.group.call_alike("take_records", Role.policy)
        return {record: numbers for of_rank in of_ranks for record, numbers in of_rank.items()}

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TrainingBackend.named_weights`; each weight is sent to this process when the iterator reaches it."""
        for name in self.group.call_alike("weight_names")[0]:
            yield name, self.group.call_alike("weight", name)[0]

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        """See :meth:`TrainingBackend.stage`: in the process of rank 0, on this machine, or of every rank. The transport is sent
        there in its initial state, and must not be used in this process.
        """
        key = transport_key(self._transports, transport)
        updates = self.group.call_alike("stage", key, transport, version)
        return transport.merged([update for update in updates if update is not None])

    def release_staging(self, transport: WeightTransport) -> bool:
        return any(self.group.call_alike("release_staging", transport_key(self._transports, transport)))

    def offload_states(self) -> None:
        """See :meth:`Training.offload_states`; each rank moves its shards."""
        self.group.call_alike("offload_states")

    def reload_states(self) -> None:
        self.group.call_alike("reload_states")

    def export_hf(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.export_hf`; rank 0 writes it, from a complete copy of the policy in main memory.

        Raises:
            CheckpointError: the folder cannot be written; its previous content stays.
        """
        self.group.call_alike("export_hf", folder.absolute())


class RayCritic(RayTraining, CriticBackend):
    """A value model whose parameters, gradients and moments lie on several ranks; see :class:`CriticWorker`."""

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        seed: int,
        workers: WorkerGroup | None = None,
        log: Path | None = None,
        placements: Sequence[RayPlacement] | None = None,
    ) -> None:
        """Arguments and errors as for :class:`LocalCritic` and :class:`WorkerGroup`; ``model_path`` is opened on every node.

        Args:
            workers: the policy's workers, which then hold the critic too and execute one call at a time; None: start
                ``trainer.critic.fsdp.num_workers`` actors.
            log: see :class:`WorkerGroup`.
            placements: of these actors; see :class:`WorkerGroup`.
        """
        group = WorkerGroup(trainer_config, "trainer.critic.fsdp", log, placements) if workers is None else workers
        settings = ModelSettings(model_path, trainer_config, total_steps, 1.0, seed)
        super().__init__(Role.critic, {Role.critic: settings}, group)

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.critic, sequences)
