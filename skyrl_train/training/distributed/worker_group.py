"""The ranks of sharded models as Ray actors, which start, run each call and end together.

driver ──Call (arguments per rank)──> actor of rank 0 .. n-1 ──Result | Raised | its death──> driver

A rank that dies ends the whole group: the others wait for it inside the collective that they are in.
"""

from __future__ import annotations

import logging
import os
import threading
from collections.abc import Sequence
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayActorError, RayError

from skyrl_train.config.cluster import POLICY_RANKS, ClusterNeeds, RayActors
from skyrl_train.config.derive import fsdp_num_gpus
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import TrainingWorkerError, first_line
from skyrl_train.runtime.process import write_output_to
from skyrl_train.training.collectives import AgreedError
from skyrl_train.training.distributed.worker import TrainingWorker
from skyrl_train.training.messages import recovery_advice
from skyrl_train.workers.messages import Call, Raised, Result
from skyrl_train.workers.ray import RayPlacement, connect
from skyrl_train.workers.reservation import Reservation

logger = logging.getLogger(__name__)

# After one rank has failed: time for Ray to report the death of the rank that caused it.
CAUSE_WAIT_S = 5.0
# Methods that run beside others: they have a separate process group and, in each rank, a separate thread.
CONCURRENT_METHODS = frozenset({"save"})
# Time for the ranks to remove what they have staged, before they are killed.
LEAVE_LIMIT_S = 10.0


@dataclass(frozen=True, slots=True)
class RankLocation:
    """The machine and process of a rank."""

    node: str  # address
    pid: int


class WorkerGroup:
    """The actors that hold one model or several. Its methods block, and may be called from several threads.

    Args:
        trainer: ``device`` and ``fsdp`` give the number of ranks and their resources.
        key: the setting of ``fsdp``, for messages.
        log: the beginning of the paths of the workers' logs (``training`` for ``training-0.log``); None: Ray keeps their output.
        placements: of the ranks, the first on this machine; None: the group reserves resources for itself.

    Raises:
        ConfigError: (constructor) Ray cannot be reached, or this process has started Ray and the machine lacks resources.
        TrainingWorkerError: the cluster has no room for the workers, or one of them has died; then all are ended.
    """

    def __init__(
        self,
        trainer: TrainerConfig,
        key: str,
        log: Path | None = None,
        placements: Sequence[RayPlacement] | None = None,
    ) -> None:
        self._end: str | None = None  # why the group has ended
        self._recovery = recovery_advice(trainer)
        # Calls of two threads that reached the ranks in different orders would leave them in two collectives forever.
        self._calling = threading.Lock()
        self._actors: list[Any] = []
        self._placements = placements
        self._reservation: Reservation | None = None
        self.locations: list[RankLocation] = []  # by rank
        self.size = trainer.fsdp.num_workers
        self.ranks_per_share = trainer.fsdp.sequence_parallel_size  # neighbours that get the same sequences
        connect()
        try:
            self._start(trainer, key, log)
        except BaseException:
            self._kill("The training workers did not start.")
            raise

    def call(self, method: str, arguments: Sequence[tuple[Any, ...]]) -> list[Any]:
        """Return the results of ``method`` on all ranks. One call at a time, except ``save``, which runs beside others.

        Args:
            arguments: one tuple per rank.

        Raises:
            TrainingWorkerError: a rank is gone.
            Exception: the error that all ranks agreed on; they are as before the call.
        """
        with nullcontext() if method in CONCURRENT_METHODS else self._calling:
            if self._end is not None:
                raise TrainingWorkerError(self._end)
            pairs = zip(self._actors, arguments, strict=True)
            calls = [_submit(actor, method, *of_rank) for actor, of_rank in pairs]
            outcomes = self._outcomes(calls, method)
        for outcome in outcomes:
            if isinstance(outcome, Raised):
                raise outcome.error
        return [outcome.value for outcome in outcomes if isinstance(outcome, Result)]

    def call_alike(self, method: str, *arguments: Any) -> list[Any]:
        """Run :meth:`call` with the same arguments on every rank."""
        return self.call(method, [arguments] * self.size)

    def close(self) -> None:
        """End all workers; the ones that still answer remove their staged weights. Idempotent."""
        if self._end is None:
            try:
                ray.get([_submit(actor, "leave") for actor in self._actors], timeout=LEAVE_LIMIT_S)
            except (RayError, GetTimeoutError) as error:
                logger.warning("the training workers did not shut down and are killed: %s", _cause(error))
        self._kill("The training workers were closed.")

    def _kill(self, why: str) -> None:
        self._end = self._end or why
        for actor in self._actors:
            ray.kill(actor)
        self._actors = []
        if self._reservation is not None:
            self._reservation.release()
            self._reservation = None

    def _start(self, trainer: TrainerConfig, key: str, log: Path | None) -> None:
        placements = self._placements
        if placements is None:
            ranks = RayActors(POLICY_RANKS, self.size, trainer.fsdp.ray_num_cpus, fsdp_num_gpus(trainer))
            keys = f"{key}.num_workers or {key}.ray_num_cpus"
            self._reservation = Reservation(ClusterNeeds(0, 0, (ranks,)), trainer.fsdp.start_timeout_s, keys)
            placements = self._reservation.placements(POLICY_RANKS)
        actors = [_actor(trainer, placement, number, log) for number, placement in enumerate(placements)]
        self._actors = actors
        limit_s = trainer.fsdp.start_timeout_s
        places = _get([actor.location.remote() for actor in actors], limit_s)
        # Ranks of one node are neighbours; rank 0 stays on the driver's machine, where engines map what it stages.
        order = sorted(range(len(actors)), key=lambda i: (places[i].node != places[0].node, places[i].node, i))
        self._actors, self.locations = [actors[i] for i in order], [places[i] for i in order]
        (store,) = _get([_submit(self._actors[0], "host_store", self.locations[0].node, self.size)], limit_s)
        self.call("join", [(rank, self.size, store.value, trainer, key) for rank in range(self.size)])

    def _outcomes(self, calls: list[Any], method: str) -> list[Result | Raised]:
        rank_of = {call: rank for rank, call in enumerate(calls)}
        outcomes: dict[int, Result | Raised] = {}
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
        """End the group. The cause is the rank whose process has died, else the first rank that raised."""
        dead = [rank for rank, error in failures.items() if isinstance(error, RayActorError)]
        rank = (dead or list(failures))[0]
        location, cause = self.locations[rank], failures[rank]
        how = "ended" if dead else "failed"
        why = (
            f"The training worker of rank {rank} (of {self.size}, node {location.node}, pid {location.pid}) {how} in {method}: "
            f"{_cause(cause)}. The other ranks cannot continue without it. {self._recovery}"
        )
        self._kill(why)
        error = TrainingWorkerError(why)
        error.__cause__ = cause
        return error


class _RankActor(TrainingWorker):
    """A rank in a Ray actor. ``log_file``: for all output of its process, if its node has the folder."""

    def __init__(self, log_file: str | None) -> None:
        if log_file is not None:
            with suppress(OSError):
                write_output_to(Path(log_file))
        super().__init__()

    def location(self) -> RankLocation:
        return RankLocation(ray.util.get_node_ip_address(), os.getpid())

    def answer(self, call: Call) -> Result | Raised:
        try:
            return Result(call.id, getattr(self, call.method)(*call.arguments))
        except AgreedError as agreed:
            return Raised.of(call.id, agreed.error)


def _submit(actor: Any, method: str, *arguments: Any) -> Any:
    """Start a call; returns the reference of its outcome."""
    answer = actor.answer
    if method in CONCURRENT_METHODS:
        answer = answer.options(concurrency_group="concurrent")
    return answer.remote(Call(0, method, arguments))


def _actor(trainer: TrainerConfig, placement: RayPlacement, number: int, log: Path | None) -> Any:
    remote = ray.remote(concurrency_groups={"concurrent": 1})(_RankActor)
    environment = {"OMP_NUM_THREADS": str(max(1, int(trainer.fsdp.ray_num_cpus))), **trainer.fsdp.environment}
    log_file = None if log is None else f"{log.absolute()}-{number}.log"
    return remote.options(**replace(placement, environment=environment).options()).remote(log_file)


def _get(calls: list[Any], limit_s: float) -> list[Any]:
    try:
        return list(ray.get(calls, timeout=limit_s))
    except (RayError, GetTimeoutError) as error:
        raise TrainingWorkerError(f"The training workers did not start: {_cause(error)}") from error


def _cause(error: BaseException) -> str:
    """Return the message of a remote call's error, without its traceback."""
    return first_line(getattr(error, "cause", None) or error)
