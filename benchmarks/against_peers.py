"""Our schedule beside SkyRL's, AReaL's and verl's: throughput and lag over S, tails and regimes, on the same modelled machine.

    pip install --no-deps --target FOLDER --requirement tests/oracle/requirements.txt
    python benchmarks/against_peers.py --peers FOLDER

The peers' own code admits their groups: SkyRL's ``_AsyncStalenessManager``, AReaL's ``StalenessManager`` and the methods of
verl's ``FullyAsyncRollouter`` that pause it, each with its bound set to S. Only these definitions are taken from the packages'
files, because the modules around them import whole trainers. Ours is the ``StalenessManager`` with the default settings: the
depth adapts. A peer trains groups of any age, in the order in which it takes them; so does ours with ``accept``. With ``mask``,
the default, it has the same schedule, but tokens older than S do not train.

The machine: a step has B groups of n responses; engines with B * n slots decode in lockstep, older versions first; training takes
its time per token, then the weights are synced in no time. The first line compares this model with the real trainer.

A cell has the throughput over min(generation, training), and the mean lag of the trained groups by their oldest token.
*At equal S* divides our throughput by the fastest peer's. *At equal freshness* divides it by the fastest run of any peer, with
any of the bounds, whose mean lag is at most ours, to two decimals. *Tokens within S* divides the trained tokens that are at most
S steps old, ours by the most that a peer has at equal S. ``mask`` trains no others: *with mask* divides ours by all tokens of the
fastest peer at equal S.
"""

from __future__ import annotations

import argparse
import ast
import asyncio
import heapq
import itertools
import time
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Callable, Coroutine, Mapping
from dataclasses import dataclass, field
from math import floor
from pathlib import Path
from statistics import fmean
from threading import Lock
from types import SimpleNamespace
from typing import Any

from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import log_normal
from skyrl_train.simulation.run import Workload, simulate
from skyrl_train.simulation.training import TrainingSpeed

MEAN_TOKENS = 32
# Training time of a step over its generation time with all slots in use.
REGIMES = {"generation-bound": 0.6, "balanced": 1.0, "training-bound": 1.5}
EQUAL = 0.995  # ratios from here on are no loss


@dataclass(eq=False)
class Group:
    """A group of responses; what the schedules see of it."""

    group_index: int
    unfinished: int  # responses
    oldest_version: int = -1  # of its tokens; -1: it has none yet
    sampled: Counter[int] = field(default_factory=Counter)  # tokens of its finished responses, by version

    @property
    def tokens(self) -> int:
        return self.sampled.total()


class Scheduler(ABC):
    """Decides which groups begin and which train. Calls come in the order of the events."""

    @abstractmethod
    def capacity(self) -> int:
        """Return how many groups may begin; only whether it is positive counts."""

    @abstractmethod
    def begin(self, group: Group, version: int) -> None:
        """A group is admitted."""

    @abstractmethod
    def finish(self, group: Group) -> None:
        """All responses of a group have ended."""

    @abstractmethod
    def take(self) -> list[Group] | None:
        """Return the groups of the next step; None: the trainer waits."""

    @abstractmethod
    def served(self, batch: list[Group], version: int) -> None:
        """``batch`` is trained, and the engines serve ``version``."""


class Ours(Scheduler):
    def __init__(self, batch: int, bound: int, steps: int) -> None:
        self._manager = StalenessManager(
            batch_groups=batch,
            max_staleness_steps=bound,
            generate_ahead_steps=None,
            max_running=(bound + 1) * batch,
            total_steps=steps,
            policy=resolve_staleness_policy("mask"),
        )
        self._buffer: dict[int, Group] = {}

    def capacity(self) -> int:
        return self._manager.capacity()

    def begin(self, group: Group, version: int) -> None:
        self._manager.admit(group.group_index, version)

    def finish(self, group: Group) -> None:
        self._manager.finish(group.group_index, group.oldest_version)
        self._buffer[group.group_index] = group

    def take(self) -> list[Group] | None:
        chosen = self._manager.select(self._buffer.values())  # type: ignore[arg-type]
        return None if chosen is None else [self._buffer.pop(group.group_index) for group in chosen]

    def served(self, batch: list[Group], version: int) -> None:
        self._manager.train(batch)  # type: ignore[arg-type]
        self._manager.advance()
        self._manager.served(version)


class Peer(Scheduler):
    """The queue of finished groups, which all three peers have."""

    def __init__(self, batch: int) -> None:
        self._batch = batch
        self._queue: list[Group] = []

    def finish(self, group: Group) -> None:
        self._queue.append(group)

    def take(self) -> list[Group] | None:
        if len(self._queue) < self._batch:
            return None
        taken, self._queue = self._queue[: self._batch], self._queue[self._batch :]
        return taken


class SkyRL(Peer):
    def __init__(self, packages: Path, batch: int, bound: int) -> None:
        super().__init__(batch)
        names = ("_RolloutStat", "_AsyncStalenessManager")
        found = definitions(packages / "skyrl/train/fully_async_trainer.py", names)
        self._manager = found["_AsyncStalenessManager"]((bound + 1) * batch, batch, bound)

    def capacity(self) -> int:
        return int(self._manager._compute_capacity_unlocked())

    def begin(self, group: Group, version: int) -> None:
        run_at_once(self._manager.acquire_submission_slot())

    def finish(self, group: Group) -> None:
        super().finish(group)
        run_at_once(self._manager.on_rollout_accepted())

    def served(self, batch: list[Group], version: int) -> None:
        run_at_once(self._manager.notify_capacity_change(version + 1))


class AReaL(Peer):
    def __init__(self, packages: Path, batch: int, bound: int) -> None:
        super().__init__(batch)
        self._version = 0
        stat = definitions(packages / "areal/api/io_struct.py", ("RolloutStat",))
        found = definitions(packages / "areal/infra/staleness_manager.py", ("StalenessManager",), stat)
        versions = SimpleNamespace(get_version=lambda: self._version)
        self._manager = found["StalenessManager"](versions, (bound + 1) * batch, batch, bound)

    def capacity(self) -> int:
        return int(self._manager.get_capacity())

    def begin(self, group: Group, version: int) -> None:
        self._manager.on_rollout_enqueued()
        self._manager.on_rollout_submitted()

    def finish(self, group: Group) -> None:
        super().finish(group)
        self._queue.sort(key=lambda group: group.group_index)  # WorkflowExecutor.wait_results: by creation time
        self._manager.on_rollout_accepted()

    def served(self, batch: list[Group], version: int) -> None:
        self._version = version


class Verl(Peer):
    def __init__(self, packages: Path, batch: int, bound: int) -> None:
        super().__init__(batch)
        methods = (
            "set_max_required_samples",
            "_should_pause_generation",
            "reset_staleness",
            "_compute_rollout_resource_utilization",
        )
        rollouter = definitions(
            packages / "verl/experimental/fully_async_policy/fully_async_rollouter.py",
            ("FullyAsyncRollouter",),
            {"print": lambda *_: None},
            methods,
        )["FullyAsyncRollouter"]
        self._rollouter = it = rollouter.__new__(rollouter)
        it.lock, it._resume_event, it.active_tasks, it.paused = asyncio.Lock(), asyncio.Event(), set(), False
        it.required_samples, it.staleness_threshold, it.staleness_samples = batch, bound, 0
        it.config = SimpleNamespace(async_training=SimpleNamespace(trigger_parameter_sync_step=1))
        # As many replicas as it could use: other limits than the bound do not count here.
        it.llm_server_manager = SimpleNamespace(get_active_server_count=lambda: (bound + 1) * batch)
        it.concurrent_samples_per_replica, it.total_rollout_steps = 1, 1
        it._active_count_history, it._step_samples_history, it._STEP_HISTORY_SIZE = [], [], 0
        it._step_generated_samples, it._completed_steps = 0, 0
        it.step_start_time = it.idle_start_time = 0.0
        it.message_queue_client = SimpleNamespace(get_statistics=self._statistics, get_queue_size=self._queue_size)
        run_at_once(it.set_max_required_samples())

    async def _queue_size(self) -> int:
        return len(self._queue)

    async def _statistics(self) -> dict[str, int]:
        return {"queue_size": len(self._queue)}

    def capacity(self) -> int:
        return int(not run_at_once(self._rollouter._should_pause_generation()))

    def begin(self, group: Group, version: int) -> None:
        # As its _processor_worker does.
        self._rollouter.staleness_samples += 1
        self._rollouter.active_tasks.add(group)

    def finish(self, group: Group) -> None:
        super().finish(group)
        self._rollouter.active_tasks.discard(group)

    def served(self, batch: list[Group], version: int) -> None:
        run_at_once(self._rollouter.reset_staleness())


def definitions(
    path: Path, names: tuple[str, ...], known: Mapping[str, Any] | None = None, methods: tuple[str, ...] | None = None
) -> dict[str, Any]:
    """Return the classes of a file; nothing else of it runs. With ``methods``, a class has only these, and no base class."""
    classes = [
        node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef) and node.name in names
    ]
    if methods is not None:
        for each in classes:
            each.bases, each.decorator_list = [], []
            each.body = [node for node in each.body if getattr(node, "name", None) in methods]
    future = ast.ImportFrom("__future__", [ast.alias("annotations")], 0)
    module = ast.fix_missing_locations(ast.Module([future, *classes], type_ignores=[]))
    # The imported names that these definitions use.
    space: dict[str, Any] = {
        "__name__": __name__,
        "asyncio": asyncio,
        "dataclass": dataclass,
        "time": time,
        "Lock": Lock,
    }
    space |= known or {}
    exec(compile(module, str(path), "exec"), space)
    return space


def run_at_once(call: Coroutine[Any, Any, Any]) -> Any:
    """Run a coroutine that has nothing to wait for."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    raise RuntimeError(f"{call} waits")


@dataclass
class SteadyState:
    """A run without its first and last quarter."""

    throughput: float  # over min(generation, training)
    fresh: float  # the part of it that is at most S steps old
    lags: list[int] = field(repr=False)

    @property
    def lag(self) -> float:
        return fmean(self.lags)


def play(workload: Workload, scheduler: Scheduler, bound: int) -> SteadyState:
    """Run the schedule. A decode step takes a second."""
    now, version, free = 0.0, 0, workload.engine.slots
    served_at = [0.0]  # by version
    begun, order = itertools.count(), itertools.count()
    waiting: list[tuple[int, int, Group, int]] = []  # a heap: version at admission, order, group, tokens
    # A heap: the end of a response and its tokens, or of a training step
    events: list[tuple[float, int, tuple[Group, int] | list[Group]]] = []
    steps: list[tuple[float, int, int, list[int]]] = []  # end, tokens, those at most S steps old, lags
    training = False

    def fill() -> None:
        nonlocal free
        while scheduler.capacity() > 0:
            group = Group(next(begun), workload.samples)
            scheduler.begin(group, version)
            for sample in range(workload.samples):
                tokens = workload.lengths[group.group_index * workload.samples + sample]
                heapq.heappush(waiting, (version, next(order), group, tokens))
        while free and waiting:
            _, _, group, tokens = heapq.heappop(waiting)
            if group.oldest_version < 0:
                group.oldest_version = version
            free -= 1
            heapq.heappush(events, (now + tokens, next(order), (group, tokens)))

    fill()
    while len(steps) < workload.steps:
        now, _, ended = heapq.heappop(events)
        if isinstance(ended, tuple):
            group, tokens = ended
            free += 1
            group.unfinished -= 1
            newer = 0
            for of in range(version, -1, -1):
                since = min(tokens, floor(now - served_at[of]))  # its tokens since this version was served
                group.sampled[of] += since - newer
                newer = since
                if newer == tokens:
                    break
            if not group.unfinished:
                scheduler.finish(group)
        else:
            fresh = sum(n for group in ended for of, n in group.sampled.items() if version - of <= bound)
            lags = [version - group.oldest_version for group in ended]
            steps.append((now, sum(group.tokens for group in ended), fresh, lags))
            version, training = version + 1, False
            served_at.append(now)
            scheduler.served(ended, version)
        fill()
        if not training and (batch := scheduler.take()) is not None:
            training = True
            tokens = sum(group.tokens for group in batch)
            heapq.heappush(events, (now + workload.training.per_token_s * tokens, next(order), batch))
    edge = workload.steps // 4
    steady = steps[edge : workload.steps - edge]
    possible = workload.tokens_per_s * (steady[-1][0] - steps[edge - 1][0])
    every, fresh = (sum(step[column] for step in steady) / possible for column in (1, 2))
    return SteadyState(every, fresh, [lag for *_, lags in steady for lag in lags])


def build_workload(options: argparse.Namespace, tail: float, ratio: float) -> Workload:
    """Return a workload with as many slots as a step has responses; ``ratio``: training time over generation time."""
    responses = options.batch * options.samples
    lengths = log_normal(responses * options.steps, MEAN_TOKENS, tail, options.seed)
    engine, training = EngineSpeed(slots=responses, step_s=1.0), TrainingSpeed(per_token_s=ratio / responses)
    return Workload(lengths, options.batch, options.steps, engine, training, samples=options.samples)


def real_trainer(workload: Workload, bound: int) -> float:
    """Return the throughput of the asynchronous trainer itself in virtual time."""
    settings = (f"max_staleness_steps={bound}", "generate_ahead_steps=null")
    edge = workload.steps // 4
    return simulate(workload, *(f"trainer.fully_async.{name}" for name in settings), edge=edge).utilization


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--peers", type=Path, help="folder of the packages; without it, ours alone")
    parser.add_argument("--batch", type=int, default=32, help="B, groups per step")
    parser.add_argument("--samples", type=int, default=8, help="n, responses per group")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--bounds", type=int, nargs="*", default=[1, 2, 4, 8], help="S")
    parser.add_argument("--tails", type=float, nargs="*", default=[2, 8, 20])
    options = parser.parse_args()
    began = time.process_time()

    small = argparse.Namespace(**{**vars(options), "steps": min(options.steps, 16), "batch": min(options.batch, 8)})
    work = build_workload(small, 8, 1.0)
    model = play(work, Ours(small.batch, 4, small.steps), 4).throughput
    print(f"B = {small.batch}, {small.steps} steps, S = 4, tail 8, balanced: model {model:.4f}, ", end="")
    print(f"real trainer {real_trainer(work, 4):.4f}\n")

    peers: dict[str, Callable[[Path, int, int], Scheduler]] = {"SkyRL": SkyRL, "AReaL": AReaL, "verl": Verl}
    if options.peers is None:
        peers = {}
    print(f"B = {options.batch}, n = {options.samples}; throughput / mean lag\n")
    compared = ["at equal S", "lag over the fastest's", "at equal freshness", "tokens within S", "with `mask`"]
    print(f"| tail | regime | S | {' | '.join(['ours', *peers, *compared])} |\n{'|---' * (9 + len(peers))}|")
    lost: list[str] = []
    for tail, (regime, ratio) in itertools.product(options.tails, REGIMES.items()):
        work = build_workload(options, tail, ratio)
        theirs = {
            (name, bound): play(work, make(options.peers, options.batch, bound), bound)
            for name, make in peers.items()
            for bound in options.bounds
        }
        for bound in options.bounds:
            ours = play(work, Ours(options.batch, bound, options.steps), bound)
            at_bound = [theirs[name, bound] for name in peers]
            shown = " | ".join(f"{each.throughput:.3f} / {each.lag:.2f}" for each in (ours, *at_bound))
            fastest = max(at_bound, key=lambda each: each.throughput, default=ours)
            as_fresh = [each.throughput for each in theirs.values() if each.lag <= ours.lag + 0.005]
            at_s = ours.throughput / fastest.throughput
            fresh = f"{ours.throughput / max(as_fresh):.3f}" if as_fresh else "none is as fresh"
            print(
                f"| {tail:g} | {regime} | {bound} | {shown} | {at_s:.3f} | {ours.lag / fastest.lag:.2f} | {fresh} "
                f"| {ours.fresh / max(each.fresh for each in at_bound or [ours]):.3f} | {ours.fresh / fastest.throughput:.3f} |",
                flush=True,
            )
            if at_s < EQUAL:
                lost.append(f"tail {tail:g}, {regime}, S = {bound}: {at_s:.3f} at equal S, {fresh} at equal freshness")
    print(f"\nBelow {EQUAL} at equal S: {len(lost)} cells")
    for cell in lost:
        print(f"- {cell}")
    print(f"\n{time.process_time() - began:.0f} s of processor time")


if __name__ == "__main__":
    main()
