"""The ranks of sharded models as Ray actors: started together, called together, ended together.

driver ──call(method, arguments per rank)──> actor of rank 0 .. n-1 ──Returned | Refused | its end──> driver

One that ends takes the group with it: the others wait for it inside the collective that they are in.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Mapping, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group
from ray.util.scheduling_strategies import PlacementGroupSchedulingStrategy

from skyrl_train.config.derive import fsdp_num_gpus
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import FSDPConfig
from skyrl_train.errors import ConfigError, SkyRLError, TrainingWorkerError
from skyrl_train.inference.engines.ray_actor import cluster_is_own, connect
from skyrl_train.training.distributed.worker import Refused, Returned, Role, TrainingWorker

logger = logging.getLogger(__name__)

# After the first rank has failed: how long the one that caused it may take to be known as dead.
CAUSE_WAIT_S = 5.0
# A group of ranks of its own, and a thread of its own in each of them.
BESIDE_OTHERS = frozenset({"save"})
# How long the ranks may take to remove what they have staged, before they are ended.
LEAVE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class Seat:
    """Where a rank runs."""

    node: str  # address
    pid: int


class WorkerGroup:
    """The actors that hold one model or several. Its methods block, and may be called from several threads.

    Args:
        trainer: ``device`` and ``fsdp`` say how many ranks there are, where, and how they lie.
        key: where ``fsdp`` is set, for messages.

    Raises:
        ConfigError: (constructor) Ray cannot be reached, or this process has started it and the machine has less than they need.
        TrainingWorkerError: the cluster has no room for the workers, or one of them is gone; all have ended then.
    """

    def __init__(self, trainer: TrainerConfig, key: str) -> None:
        self._end: str | None = None  # why the group has ended
        self._way_on = _way_on(trainer.max_restarts)
        # Calls of two threads that reached the ranks in different orders would leave them in two collectives for ever.
        self._calling = threading.Lock()
        self._actors: list[Any] = []
        self._placement: PlacementGroup | None = None
        self.seats: list[Seat] = []
        self.ranks_per_share = trainer.fsdp.sequence_parallel_size  # neighbours that are given the same sequences
        connect()
        try:
            self._start(trainer, key)
        except BaseException:
            self._kill("The training workers did not start.")
            raise

    @property
    def size(self) -> int:
        """The number of ranks."""
        return len(self.seats)

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """What ``method`` returns on each rank. One call at a time, but for ``save``, which runs beside others.

        Args:
            arguments: one tuple per rank.

        Raises:
            TrainingWorkerError: a rank is gone.
            Exception: what all ranks refused the call with; they stand as before it.
        """
        with nullcontext() if method in BESIDE_OTHERS else self._calling:
            if self._end is not None:
                raise TrainingWorkerError(self._end)
            pairs = zip(self._actors, arguments, strict=True)
            calls = [getattr(actor, method).remote(*of_rank) for actor, of_rank in pairs]
            outcomes = self._outcomes(calls, method)
        refused = [outcome for outcome in outcomes if isinstance(outcome, Refused)]
        if refused:
            raise refused[0].error
        return [outcome.value for outcome in outcomes if isinstance(outcome, Returned)]

    def call_alike(self, method: str, *arguments: Any) -> list[Any]:
        """:meth:`call` with the same arguments on every rank."""
        return self.call(method, [arguments] * self.size)

    def close(self) -> None:
        """Ends all workers; those that still answer remove what they have staged. Idempotent."""
        if self._end is None:
            try:
                ray.get([actor.leave.remote() for actor in self._actors], timeout=LEAVE_LIMIT_S)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the training workers do not leave, and are ended: %s", _first_line(error))
        self._kill("The training workers were closed.")

    def _kill(self, why: str) -> None:
        self._end = self._end or why
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._placement is not None:
            remove_placement_group(self._placement)
            self._placement = None

    def _start(self, trainer: TrainerConfig, key: str) -> None:
        self._placement = _reserve(trainer, key)
        actors = [_actor(trainer, self._placement, bundle) for bundle in range(trainer.fsdp.num_workers)]
        self._actors = actors
        places = _answers([actor.seat.remote() for actor in actors], trainer.fsdp.start_timeout_s)
        # Ranks of one node are neighbours; rank 0 stays on the driver's machine, where engines map what it publishes.
        order = sorted(range(len(actors)), key=lambda i: (places[i].node != places[0].node, places[i].node, i))
        self._actors, self.seats = [actors[i] for i in order], [places[i] for i in order]
        store = self._actors[0].host_store.remote(self.seats[0].node, self.size)
        (meeting,) = _answers([store], trainer.fsdp.start_timeout_s)
        self.call("join", [(rank, self.size, meeting, trainer, key) for rank in range(self.size)])

    def _outcomes(self, calls: list[Any], method: str) -> list[Returned | Refused]:
        rank_of = {call: rank for rank, call in enumerate(calls)}
        outcomes: dict[int, Returned | Refused] = {}
        failures: dict[int, RayError] = {}
        waiting = list(calls)
        while waiting:
            done, waiting = ray.wait(waiting, num_returns=1, timeout=CAUSE_WAIT_S if failures else None)
            if not done:
                break
            for call in done:
                try:
                    outcomes[rank_of[call]] = ray.get(call)
                except RayError as error:
                    failures[rank_of[call]] = error
        if failures:
            raise self._broken(failures, method)
        return [outcomes[rank] for rank in range(len(calls))]

    def _broken(self, failures: dict[int, RayError], method: str) -> TrainingWorkerError:
        """Ends the group. The rank whose process is gone is the cause; where none is, the first one that raised."""
        dead = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        rank = (dead or list(failures))[0]
        seat, cause = self.seats[rank], failures[rank]
        how = "ended" if dead else "failed"
        why = (
            f"The training worker of rank {rank} (of {self.size}, node {seat.node}, pid {seat.pid}) {how} in {method}: "
            f"{_first_line(cause)}. The other ranks cannot go on without it. {self._way_on}"
        )
        self._kill(why)
        error = TrainingWorkerError(why)
        error.__cause__ = cause
        return error


def _way_on(max_restarts: int) -> str:
    """What a run does after the death of a rank, and what its user can."""
    if not max_restarts:
        return "Give the same command to go on from the last checkpoint, or set trainer.max_restarts to have that done."
    return (
        f"With trainer.max_restarts={max_restarts}, the run goes on from its last checkpoint until that many restarts are "
        "used up; after them, give the same command."
    )


class _Actor(TrainingWorker):
    """The worker, and where it is."""

    def seat(self) -> Seat:
        return Seat(ray.util.get_node_ip_address(), os.getpid())

    @ray.method(concurrency_group="saving")
    def save(self, role: Role, number: int, folder: Path) -> Returned | Refused:
        return super().save(role, number, folder)


def _reserve(trainer: TrainerConfig, key: str) -> PlacementGroup:
    if cluster_is_own():
        _check_machine(trainer, key, _left())
    bundles = [_bundle(trainer) for _ in range(trainer.fsdp.num_workers)]
    bundles[0][f"node:{ray.util.get_node_ip_address()}"] = 0.001
    group = placement_group(bundles, strategy="PACK")
    if not group.wait(trainer.fsdp.start_timeout_s):
        remove_placement_group(group)
        free = {name: amount for name, amount in ray.available_resources().items() if name in ("CPU", "GPU")}
        raise TrainingWorkerError(
            f"The cluster has no room for the training workers after {key}.start_timeout_s="
            f"{trainer.fsdp.start_timeout_s:g}: {key}.num_workers={trainer.fsdp.num_workers}, each with "
            f"{_bundle(trainer)}, the first on this machine; free now: {free}. Free some, add nodes, or ask for less."
        )
    return group


def _left() -> dict[str, float]:
    """What no group of workers has reserved: those of this run go with it, so that waiting for theirs would not help."""
    left = dict(ray.cluster_resources())
    for group in placement_group_table().values():
        if group["state"] != "REMOVED":
            for bundle in group["bundles"].values():
                for resource, amount in bundle.items():
                    left[resource] = left.get(resource, 0.0) - amount
    return left


def _check_machine(trainer: TrainerConfig, key: str, there: Mapping[str, float]) -> None:
    """Raises:
    ConfigError: ``there`` is not enough, and waiting would not help.
    """
    workers = trainer.fsdp.num_workers
    for resource, amount in _bundle(trainer).items():
        left = round(there.get(resource, 0.0), 4)  # as finely as Ray counts
        if round(workers * amount, 4) > left:
            raise ConfigError(
                f"{key}.num_workers={workers}, each with {amount:g} {resource}, need more than the {left:g} that other training "
                f"workers leave of the Ray that this run has started on its machine. Lower {key}.num_workers or {key}.ray_num_"
                f"{resource.lower()}s, or start a cluster with more (ray start)."
            )


def _bundle(trainer: TrainerConfig) -> dict[str, float]:
    wanted = {"CPU": trainer.fsdp.ray_num_cpus, "GPU": fsdp_num_gpus(trainer)}
    return {name: amount for name, amount in wanted.items() if amount > 0}


def _actor(trainer: TrainerConfig, group: PlacementGroup, bundle: int) -> Any:
    remote = ray.remote(concurrency_groups={"saving": 1})(_Actor)
    return remote.options(
        num_cpus=trainer.fsdp.ray_num_cpus,
        num_gpus=fsdp_num_gpus(trainer),
        runtime_env={"env_vars": _environment(trainer.fsdp)},
        scheduling_strategy=PlacementGroupSchedulingStrategy(
            placement_group=group, placement_group_bundle_index=bundle
        ),
    ).remote()


def _environment(fsdp: FSDPConfig) -> dict[str, str]:
    return {"OMP_NUM_THREADS": str(max(1, int(fsdp.ray_num_cpus))), **fsdp.environment}


def _answers(calls: list[Any], limit_s: float) -> list[Any]:
    try:
        return list(ray.get(calls, timeout=limit_s))
    except (RayError, GetTimeoutError) as error:
        raise TrainingWorkerError(f"The training workers did not start: {_first_line(error)}") from error


def _first_line(error: BaseException) -> str:
    """What a remote call failed with, without its traceback."""
    cause = getattr(error, "cause", None)
    said = cause if isinstance(cause, SkyRLError) else cause or error
    return (str(said).strip().splitlines() or [type(said).__name__])[0]
