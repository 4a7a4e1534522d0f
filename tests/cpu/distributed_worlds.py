"""Groups of training workers that are quick to start: on processes that another group has started, or in this one."""

from __future__ import annotations

import ray

from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.training.distributed.worker import ModelSettings, Returned, Role, TrainingWorker
from skyrl_train.training.distributed.worker_group import WorkerGroup

FSDP = "trainer.fsdp"


def same_processes(group: WorkerGroup) -> type[WorkerGroup]:
    """Makes groups of other settings on the processes of ``group``, which holds nothing from then on."""
    actors, seats = group._actors, group.seats

    class Group(WorkerGroup):
        def _start(self, trainer: TrainerConfig, key: str) -> None:
            self._actors, self.seats = actors, seats
            ray.get([actor.leave.remote() for actor in actors])
            meeting = ray.get(actors[0].host_store.remote(seats[0].node, self.size))
            self.call("join", [(rank, self.size, meeting, trainer, key) for rank in range(self.size)])

        def close(self) -> None:
            """They are those of ``group``."""

        def _kill(self, why: str) -> None:
            """The same."""

    return Group


def one_rank(trainer: TrainerConfig, **models: ModelSettings) -> TrainingWorker:
    """A rank that is alone, in this process, and holds these models by their roles."""
    worker = TrainingWorker()
    meeting = worker.host_store("127.0.0.1", 1)
    assert worker.join(0, 1, meeting, trainer, FSDP) == Returned(None)
    for role, settings in models.items():
        assert worker.hold(Role(role), settings) == Returned(None)
    return worker
