"""Groups of training workers that are quick to start: on processes that another group has started, or in this one."""

from __future__ import annotations

import ray

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.training.distributed.worker import ModelSettings, Role, TrainingWorker
from skyrl_train.training.distributed.worker_group import WorkerGroup
from skyrl_train.workers.messages import Call

FSDP = "trainer.fsdp"


def same_processes(group: WorkerGroup) -> type[WorkerGroup]:
    """Makes groups of other settings on the processes of ``group``, which holds nothing from then on."""
    actors, locations = group._actors, group.locations

    class Group(WorkerGroup):
        def _start(self, trainer: TrainerConfig, key: str) -> None:
            self._actors, self.locations = actors, locations
            ray.get([actor.answer.remote(Call(0, "leave")) for actor in actors])
            store = ray.get(actors[0].answer.remote(Call(0, "host_store", (locations[0].node, self.size))))
            self.call("join", [(rank, self.size, store.value, trainer, key) for rank in range(self.size)])

        def close(self) -> None:
            """They are those of ``group``."""

        def _kill(self, why: str) -> None:
            """The same."""

    return Group


def one_rank(trainer: TrainerConfig, **models: ModelSettings) -> TrainingWorker:
    """A rank that is alone, in this process, and holds these models by their roles."""
    worker = TrainingWorker()
    meeting = worker.host_store("127.0.0.1", 1)
    worker.join(0, 1, meeting, trainer, FSDP)
    for role, settings in models.items():
        worker.hold(Role(role), settings)
    return worker
