"""Groups of training workers that are quick to start: on processes that another group has started, or in this one."""

from __future__ import annotations

from pathlib import Path

import ray
from training_worlds import config

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.training.distributed.worker import TrainingWorker
from skyrl_train.training.distributed.worker_group import WorkerGroup
from skyrl_train.training.messages import ModelSettings, Role
from skyrl_train.workers.messages import Call

FSDP = "trainer.fsdp"


class TwoProcesses:
    """Two processes that hold the ranks of all groups of a session. They start on first use, and again after their end.

    Attributes:
        latest: the group that has the processes now.
    """

    def __init__(self) -> None:
        self._started: WorkerGroup | None = None
        self.latest: WorkerGroup | None = None

    def groups(self, *, to_keep: bool = False) -> type[WorkerGroup]:
        """Makes groups of any settings on these processes. A new group takes them from the one before.

        Args:
            to_keep: the next group owns the processes, and ends them.
        """
        if self._started is None:
            self._started = WorkerGroup(config(fsdp__ray_num_cpus=0.5), FSDP)
        started, processes = self._started, self
        if to_keep:
            self._started = None

        class Group(WorkerGroup):
            def _start(self, trainer: TrainerConfig, key: str, log: Path | None) -> None:
                self._actors, self.locations = started._actors, started.locations
                self._reservation = started._reservation
                ray.get([actor.answer.remote(Call(0, "leave")) for actor in self._actors])
                node = self.locations[0].node
                store = ray.get(self._actors[0].answer.remote(Call(0, "host_store", (node, self.size))))
                self.call("join", [(rank, self.size, store.value, trainer, key) for rank in range(self.size)])
                processes.latest = self

            def close(self) -> None:
                if to_keep:
                    super().close()

            def _kill(self, why: str) -> None:
                if to_keep:
                    super()._kill(why)

        return Group

    def close(self) -> None:
        if self._started is not None:
            self._started.close()


def one_rank(trainer: TrainerConfig, **models: ModelSettings) -> TrainingWorker:
    """A rank that is alone, in this process, and holds these models by their roles."""
    worker = TrainingWorker()
    meeting = worker.host_store("127.0.0.1", 1)
    worker.join(0, 1, meeting, trainer, FSDP)
    for role, settings in models.items():
        worker.hold(Role(role), settings)
    return worker
