"""Trains the policy, and the critic, sharded over Ray actors (FSDP2), on one machine or many.

minibatch ──share_out──> each rank's sequences ──> RankTrainer on every rank, in step ──> the metrics of rank 0 (= all)
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.models.folder import is_local
from skyrl_train.training.backend import CriticBackend, Minibatch, Training, TrainingBackend, TrainingSequence
from skyrl_train.training.distributed.shares import PackedSequences, share_out
from skyrl_train.training.distributed.worker import ModelSettings, Role
from skyrl_train.training.distributed.worker_group import WorkerGroup

if TYPE_CHECKING:
    from skyrl_train.inference.weight_update import WeightUpdate
    from skyrl_train.publication.base import WeightTransport


class RayTraining(Training):
    """What the policy and the critic share: a group of workers, each with a shard.

    Every method raises TrainingWorkerError if a worker is gone.
    """

    def __init__(self, role: Role, models: Mapping[Role, ModelSettings], group: WorkerGroup) -> None:
        """
        Args:
            role: of the model that is trained here.
            models: what the workers are to hold for this.
            group: ended if one of the models cannot be loaded.
        """
        self._role, self._group = role, group
        try:
            for of, settings in models.items():
                path = settings.model_path
                place = str(Path(path).absolute()) if is_local(path) else path  # workers are in other folders
                group.call_alike("hold", of, replace(settings, model_path=place))
        except BaseException:
            group.close()
            raise

    @property
    def group(self) -> WorkerGroup:
        """The workers."""
        return self._group

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`RankTrainer.update`."""
        metrics: dict[str, float] = self._train("update", minibatch)
        return metrics

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`RankTrainer.accumulate`."""
        self._train("accumulate", part)

    def finish(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = self._group.call_alike("finish", self._role, step)[0]
        return metrics

    def discard(self) -> None:
        self._group.call_alike("discard", self._role)

    def snapshot(self) -> dict[str, object]:
        """See :meth:`TrainingBackend.snapshot`; the copies stay with the workers, until the next snapshot."""
        return {"number": self._group.call_alike("snapshot", self._role)[0]}

    def save(self, snapshot: dict[str, object], folder: Path) -> None:
        """See :meth:`TrainingBackend.save`; every rank writes its shards. ``folder`` must be on a disk that all nodes share.

        Raises:
            OSError: the disk is full or the folder cannot be written.
            CheckpointError: another snapshot was taken since.
        """
        self._group.call_alike("save", self._role, snapshot["number"], folder.absolute())

    def load(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.load`; of a checkpoint by any number of workers."""
        self._group.call_alike("load", self._role, folder.absolute())

    def close(self) -> None:
        """Ends the workers, and with them every model that they hold and what rank 0 has staged."""
        self._group.close()

    def _score(self, role: Role, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """What that model of the workers says of each token, in the order of the sequences."""
        shares, packed = self._shares(sequences)
        results = [torch.zeros(0)] * len(sequences)
        of_ranks = self._group.call("score", [(role, of) for of in packed])
        for share, rows in zip(shares, of_ranks[:: self._group.ranks_per_share], strict=True):
            for index, row in zip(share, rows, strict=True):
                results[index] = torch.from_numpy(row.copy())
        return results

    def _train(self, method: str, part: Minibatch) -> Any:
        _, packed = self._shares(part.sequences)
        return self._group.call(method, [(self._role, of, replace(part, sequences=())) for of in packed])[0]

    def _shares(self, sequences: Sequence[TrainingSequence]) -> tuple[list[list[int]], list[PackedSequences]]:
        """Which sequences each share has, and what each rank is sent: neighbours the same share, for a slice of it each."""
        each = self._group.ranks_per_share
        shares = share_out([len(sequence) for sequence in sequences], self._group.size // each)
        packed = [PackedSequences.of([sequences[index] for index in share]) for share in shares]
        return shares, [of_share for of_share in packed for _ in range(each)]


class RayBackend(RayTraining, TrainingBackend):
    """A policy whose parameters, gradients and moments lie on several ranks; see :class:`RankTrainer` for what each does.

    Losses and weights are those of the local backend, but for the order in which gradients are added up: metrics agree
    within 1e-5, and weights within 1e-3 of what they moved. Every method raises TrainingWorkerError if a worker is gone.
    """

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        temperature: float,
        seed: int,
        reference: TrainerConfig | None = None,
    ) -> None:
        """Starts ``trainer.fsdp.num_workers`` actors. Arguments and errors as of :class:`LocalBackend`, and those of
        :class:`WorkerGroup`; ``model_path`` is opened on every node.

        Args:
            reference: how the ranks hold and score the model of ``model_path`` as it is, beside the policy; None: they do not.
        """
        policy = ModelSettings(model_path, trainer_config, total_steps, temperature, seed)
        models = {Role.policy: policy}
        if reference is not None:  # never trained: no rank holds gradients or moments of it
            models[Role.reference] = replace(policy, trainer=reference)
        super().__init__(Role.policy, models, WorkerGroup(trainer_config, "trainer.fsdp"))
        self._transports: list[WeightTransport] = []

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.policy, sequences)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.reference, sequences)

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TrainingBackend.named_weights`; each travels here as it is asked for."""
        for name in self._group.call_alike("weight_names")[0]:
            yield name, self._group.call_alike("weight", name)[0]

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        """See :meth:`TrainingBackend.stage`: in the process of rank 0, on this machine. The transport given here is sent
        there as it was made, and must not be used in this process.
        """
        if all(known is not transport for known in self._transports):
            self._transports.append(transport)
        key = next(i for i, known in enumerate(self._transports) if known is transport)
        update: WeightUpdate = self._group.call_alike("stage", key, transport, version)[0]
        return update

    def export_hf(self, folder: Path) -> None:
        """See :meth:`TrainingBackend.export_hf`; rank 0 writes it, from a whole copy of the policy in main memory.

        Raises:
            CheckpointError: the folder cannot be written; what was there stays.
        """
        self._group.call_alike("export_hf", folder.absolute())


class RayCritic(RayTraining, CriticBackend):
    """A value model whose parameters, gradients and moments lie on several ranks; see :class:`CriticTrainer`."""

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        seed: int,
        workers: WorkerGroup | None = None,
    ) -> None:
        """Arguments and errors as of :class:`LocalCritic`, and those of :class:`WorkerGroup`; ``model_path`` is opened on every
        node.

        Args:
            workers: those of the policy, who hold the critic too, and do one thing at a time; None: starts
                ``trainer.critic.fsdp.num_workers`` actors.
        """
        group = WorkerGroup(trainer_config, "trainer.critic.fsdp") if workers is None else workers
        settings = ModelSettings(model_path, trainer_config, total_steps, 1.0, seed)
        super().__init__(Role.critic, {Role.critic: settings}, group)

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(Role.critic, sequences)
