"""Random runs of the rules of admission and freshness in virtual time: no task, no torch, some milliseconds each.

    prompts ──admit──> running ──end──> buffer ──trainer──> trained
                          │ engine loss: starts again        │ publication: at once, or during the next step
                          └ failed, filtered, dropped        └ checkpoint ──kill──> resume, with recordings

The trainer is a generator that yields the time it needs, or WAIT until it is notified. It and the admission look at their
conditions only when they are notified, at the places where the real loops are; ``_check`` fails if there
was an opening without a notification.
"""

from __future__ import annotations

import heapq
import random
from collections import Counter
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy

WAIT: Final = None
SUPERSEDED: Final = "superseded"  # an event of something that is no more; misfortunes come with what happens only
MAX_RESIZES: Final = 3
Trainer = Generator[float | None, None, None]


@dataclass(frozen=True)
class World:
    """Everything that a run depends on. Times are in ticks; chances are per event."""

    seed: int = 0
    policy: str = "wait"
    b: int = 2
    s: int = 2
    d: float | None = 1.0
    w: int = 8
    k: int = 1
    steps: int = 8
    overlap: bool = False
    streaming: int | None = None
    mean_ticks: float = 3.0  # of a group
    tail: float = 1.0  # sigma of the log-normal lengths
    step_ticks: float = 2.0
    weight_sync_ticks: float = 0.5
    queued: float = 0.2  # of the groups: they begin later than they are admitted
    fails: float = 0.0  # of the groups
    filtered: float = 0.0  # of the groups
    engine_loss: float = 0.0
    update_fails: float = 0.0  # per step; the run stops with a checkpoint and is resumed
    checkpoint: float = 0.3  # per step
    resize: float = 0.0
    kills: int = 0

    @staticmethod
    def drawn(seed: int, policy: str) -> World:
        """A world whose every number is drawn."""
        rng = random.Random(seed)
        k = rng.choice((1, 1, 1, 2, 3))
        b = rng.randint(1, 5)
        s = k - 1 + rng.choice((0, 1, 1, 2, 2, 3, 6))
        room = s - k + 1
        streaming = rng.choice((None, None, 1, rng.randint(1, b)))
        return World(
            seed=seed,
            policy=policy,
            b=b,
            s=s,
            d=rng.choice((None, None, 0, room, min(1, room), rng.uniform(0, room), rng.randint(0, 4 * room) / 4)),
            w=rng.choice((1, b, 2 * b, 50)),
            k=k,
            steps=rng.randint(1, 12),
            overlap=rng.random() < 0.4,
            streaming=streaming,
            mean_ticks=rng.choice((0.3, 1.0, 4.0)),
            tail=rng.choice((0.0, 1.0, 2.0, 3.0)),
            step_ticks=rng.choice((0.0, 0.3, 1.0)),
            weight_sync_ticks=rng.choice((0.0, 0.3, 3.0)),
            queued=rng.choice((0.0, 0.3)),
            fails=rng.choice((0.0, 0.0, 0.15)),
            filtered=rng.choice((0.0, 0.0, 0.4)),
            engine_loss=rng.choice((0.0, 0.0, 0.05)),
            update_fails=rng.choice((0.0, 0.0, 0.1)),
            checkpoint=rng.choice((0.2, 1.0)),
            resize=rng.choice((0.0, 0.0, 0.1)),
            kills=rng.choice((0, 0, 1, 3)),
        )


@dataclass(frozen=True)
class Finished:
    """A group in the buffer."""

    group_index: int
    versions: tuple[int, ...]  # of its tokens

    @property
    def oldest_version(self) -> int:
        return min(self.versions)


@dataclass
class Running:
    """A group that is being generated."""

    ends: float
    outcome: str
    versions: list[int] = field(default_factory=list)  # of the tokens so far


@dataclass(frozen=True)
class Checkpoint:
    step: int
    sizes: World
    counts: dict[str, int]
    buffered: tuple[Finished, ...]
    settled: dict[int, str]
    next_group_index: int
    replay_cache: dict[int, tuple[tuple[int, ...], float, str]]  # group index -> versions so far, ticks left, outcome


class Resume(Exception):
    """The process has ended, and another one begins at the last checkpoint."""


class Run:
    """One run from its first step to its last, through all kills. ``play`` returns when it is over and was right."""

    def __init__(self, world: World) -> None:
        self.world = world
        self.rng = random.Random(world.seed)
        self.now = 0.0
        self.kills_left, self.resizes_left = world.kills, MAX_RESIZES
        self.lags: list[int] = []  # of the groups that were trained
        self.partly_masked = self.wholly_masked = 0  # groups
        self.foreseen = 0  # steps whose groups were settled during the step before
        self.waits = 0  # times that the trainer had enough groups and waited
        self.fresh_starts = 0  # recordings that could not go on
        self.largest_bound = world.s
        self.resumes = 0
        self.settled: dict[int, str] = {}
        self.saved: Checkpoint | None = None
        self._begin()

    def play(self) -> Run:
        while True:
            try:
                self._live()
            except Resume:
                self.resumes += 1
                self._begin()
            else:
                self._check_end()
                return self

    # The process --------------------------------------------------------------------------------------------------

    def _begin(self) -> None:
        saved = self.saved
        self.sizes = sizes = self.world if saved is None else saved.sizes
        self.m = StalenessManager(
            batch_groups=sizes.b,
            max_staleness_steps=sizes.s,
            generate_ahead_steps=sizes.d,
            max_running=sizes.w,
            total_steps=sizes.steps,
            policy=resolve_staleness_policy(sizes.policy),
            weight_sync_interval=sizes.k,
            overlap=sizes.overlap,
        )
        self.events: list[tuple[float, int, Callable[[], str | None]]] = []
        self.scheduled = 0
        self.running: dict[int, Running] = {}
        self.taken: list[Finished] = []  # groups with a slot in the current step
        self.expected: list[Finished] | None = None  # the groups of the next step, once that was settled
        self.delivering = False
        self.lacks: int | None = None  # groups that the trainer waits for
        self.trainer_is = "ready"  # or "waiting" for a notification, or "busy" for some time
        self.buffer = {} if saved is None else {group.group_index: group for group in saved.buffered}
        self.settled = {} if saved is None else dict(saved.settled)
        self.outcomes = Counter(self.settled.values())
        self.next_group_index = 0 if saved is None else saved.next_group_index
        self.replay_cache = {} if saved is None else dict(saved.replay_cache)
        known = self.settled.keys() | self.buffer.keys()
        self.reissue = [group_index for group_index in range(self.next_group_index) if group_index not in known]
        self.served = 0 if saved is None else saved.step - 1
        if saved is not None:
            self._resume(saved)
        self.m.served(self.served)
        self._notify()

    def _resume(self, saved: Checkpoint) -> None:
        self.m.load_state_dict(saved.counts, saved.step, self.buffer.values())
        self._drop_overdue()
        all_fit, before = len(self.reissue) <= self.m.capacity(), self.fresh_starts
        # Not if D or W were made smaller, nor if a late group has no recording: it is no longer late and takes a place.
        assert all_fit or self.resizes_left < MAX_RESIZES or self.sizes.policy in ("mask", "accept")
        self._admit()
        if all_fit:
            assert not self.reissue and not self.replay_cache
            assert self.sizes.policy == "drop" or self.fresh_starts == before, "what was feasible when saved still is"

    def _live(self) -> None:
        trainer = self._trainer()
        self._move(trainer)
        while self.m.step <= self.world.steps or self.delivering:
            assert self.events, "deadlock: nothing will ever happen again"
            self.now, _, happen = heapq.heappop(self.events)
            if happen() is not SUPERSEDED:
                self._misfortunes()
            self._move(trainer)
            self._check()

    def _move(self, trainer: Trainer) -> None:
        """Runs the trainer until it needs time, or waits."""
        while self.trainer_is == "ready":
            ticks = next(trainer, WAIT)
            if ticks is WAIT:
                self.trainer_is = "waiting"
            elif ticks > 0:
                self.trainer_is = "busy"
                self._at(ticks, self._wake)

    def _wake(self) -> None:
        self.trainer_is = "ready"

    def _notify(self) -> None:
        self._admit()
        if self.trainer_is == "waiting":
            self._wake()

    def _at(self, ticks: float, happen: Callable[[], str | None]) -> None:
        self.scheduled += 1
        heapq.heappush(self.events, (self.now + ticks, self.scheduled, happen))

    # Groups -------------------------------------------------------------------------------------------------------

    def _admit(self) -> None:
        while self.m.capacity() > 0:
            if self.reissue:
                group_index = self.reissue.pop(0)
            else:
                group_index, self.next_group_index = self.next_group_index, self.next_group_index + 1
            recording = self.replay_cache.pop(group_index, None)
            if recording is not None and not self.m.may_admit(min(recording[0])):
                self.fresh_starts += 1
                recording = None
            if recording is None:
                self._admit_afresh(group_index)
            else:
                versions, ticks, outcome = recording
                self.m.admit(group_index, min(versions))
                self._generate(group_index, Running(self.now + ticks, outcome, list(versions)))

    def _admit_afresh(self, group_index: int) -> None:
        self.m.admit(group_index, self.served)
        outcome = self.rng.choices(
            ("finished", "failed", "filtered"),
            (1 - self.world.fails - self.world.filtered, self.world.fails, self.world.filtered),
        )[0]
        ticks = self._length()
        if self.rng.random() < self.world.queued:
            self._generate(group_index, Running(self.now + ticks, outcome))
        else:
            self._generate(group_index, Running(self.now + ticks, outcome, [self.served]))

    def _length(self) -> float:
        return self.world.mean_ticks * self.rng.lognormvariate(0.0, self.world.tail)

    def _generate(self, group_index: int, group: Running) -> None:
        self.running[group_index] = group
        self._at(group.ends - self.now, lambda: self._end(group_index, group))

    def _end(self, group_index: int, group: Running) -> str | None:
        if self.running.get(group_index) is not group:
            return SUPERSEDED  # it was cancelled or started again
        del self.running[group_index]
        if group.outcome == "finished":
            self.buffer[group_index] = finished = Finished(group_index, tuple(group.versions or [self.served]))
            self.m.finish(group_index, finished.oldest_version)
        else:
            self._settle(group_index, group.outcome)
            self.m.release(group_index, group.outcome)
        self._notify()
        return None

    def _settle(self, group_index: int, outcome: str) -> None:
        assert group_index not in self.settled, "nothing is settled twice"
        self.settled[group_index] = outcome
        self.outcomes[outcome] += 1

    def _drop_overdue(self) -> None:
        overdue = self.m.overdue(self.buffer.values())
        for group_index in overdue.running:
            del self.running[group_index]
        for group in overdue.buffered:
            del self.buffer[group.group_index]
        for group_index in [*overdue.running, *(group.group_index for group in overdue.buffered)]:
            self._settle(group_index, "dropped")
            self.m.release(group_index, "dropped")

    # The trainer --------------------------------------------------------------------------------------------------

    def _trainer(self) -> Trainer:
        while self.m.step <= self.world.steps:
            yield from self._train_step()
            yield from self._publish()
            self._drop_overdue()
            self._notify()
            if self.rng.random() < self.world.checkpoint:
                self._save()

    def _train_step(self) -> Trainer:
        self.taken = []
        while (missing := self.world.b - len(self.taken)) > 0:
            at_least = None if self.world.streaming is None else min(self.world.streaming, missing)
            while (part := self._select(at_least)) is None:
                self.lacks = at_least or missing
                yield WAIT
            self.lacks = None
            self._consume(part)
            self.taken += part
            if self.world.streaming is not None:
                yield self.world.step_ticks * len(part) / self.world.b
        yield self.world.step_ticks
        if self.rng.random() < self.world.update_fails:
            self._save()
            raise Resume
        for group in self.taken:
            del self.buffer[group.group_index]
            self._settle(group.group_index, "trained")
        self.m.train(self.taken)
        self.taken = []

    def _select(self, at_least: int | None) -> Sequence[Finished] | None:
        free = [group for group in self.buffer.values() if group not in self.taken]
        chosen = self.m.select(free, committed=len(self.taken), at_least=at_least)
        if self.expected is not None and self.world.streaming is None:
            assert chosen == self.expected, "what was settled during the step before does not change"
            self.foreseen += 1
            self.expected = None
        wanted = self.world.b - len(self.taken) if at_least is None else at_least
        if chosen is None and len(free) >= wanted:
            assert self.sizes.policy in ("wait", "drop"), "nothing waits for a slow group under the other policies"
            self.waits += 1
        if chosen is not None:
            assert wanted <= len(chosen) <= self.world.b - len(self.taken)
            assert list(chosen) == sorted(chosen, key=lambda group: group.group_index)
        return chosen

    def _consume(self, part: Sequence[Finished]) -> None:
        """The promises, checked from the tokens."""
        self.m.assert_bound(part)
        for group in part:
            lag = (self.m.step - 1) - group.oldest_version
            self.lags.append(lag)
            if self.sizes.policy in ("wait", "drop"):
                assert lag <= self.m.max_staleness_steps
            if self.sizes.policy == "mask":
                assert self.m.oldest_trained_version is not None
                trained = [version for version in group.versions if version >= self.m.oldest_trained_version]
                assert all((self.m.step - 1) - version <= self.m.max_staleness_steps for version in trained)
                assert len(trained) == len(group.versions) or lag > self.m.max_staleness_steps, (
                    "only tokens that are too old"
                )
                self.partly_masked += 0 < len(trained) < len(group.versions)
                self.wholly_masked += not trained

    def _publish(self) -> Trainer:
        due, version = self.m.weight_sync_due, self.m.step
        self.m.advance()
        if due:
            while self.delivering:
                yield WAIT
            self.delivering = True
            self._at(self.world.weight_sync_ticks, lambda: self._served(version))
            while self.delivering and not self.world.overlap:
                yield WAIT

    def _served(self, version: int) -> None:
        self.served, self.delivering = version, False
        for group in self.running.values():
            group.versions.append(version)
        self.m.served(version)
        self._notify()

    # What goes wrong ----------------------------------------------------------------------------------------------

    def _save(self) -> None:
        self.saved = Checkpoint(
            step=self.outcomes["trained"] // self.world.b + 1,
            sizes=self.sizes,
            counts=self.m.state_dict(),
            buffered=tuple(self.buffer.values()),
            settled=dict(self.settled),
            next_group_index=self.next_group_index,
            replay_cache={
                **self.replay_cache,
                **{o: (tuple(g.versions), g.ends - self.now, g.outcome) for o, g in self.running.items() if g.versions},
            },
        )

    def _misfortunes(self) -> None:
        if self.rng.random() < self.world.engine_loss:
            for group_index in [group_index for group_index in self.running if self.rng.random() < 0.5]:
                group = self.running[group_index]
                self._generate(group_index, Running(self.now + self._length(), group.outcome, [self.served]))
        if self.resizes_left and self.rng.random() < self.world.resize:
            self._resize()
        if self.kills_left and self.rng.random() < 0.03:
            self.kills_left -= 1
            raise Resume

    def _resize(self) -> None:
        self.resizes_left -= 1
        bound = self.world.k - 1 + self.rng.randint(0, 5)
        adapts = self.sizes.d is None and self.rng.random() < 0.5  # a given depth ends it
        depth = None if adapts else self.rng.uniform(0, bound - self.world.k + 1)
        before = (self.m.max_staleness_steps, self.m.generate_ahead_steps, self.m.max_running)
        workers = self.rng.choice((1, self.world.b, 20))
        try:
            self.m.resize(max_staleness_steps=bound, generate_ahead_steps=depth, max_running=workers)
        except StalenessError:
            assert self.sizes.policy == "wait" and bound < before[0]
            assert before == (self.m.max_staleness_steps, self.m.generate_ahead_steps, self.m.max_running)
        else:
            self.sizes = replace(self.sizes, s=bound, d=depth, w=workers)
            self.largest_bound = max(self.largest_bound, bound)
            self.expected = None
            self._drop_overdue()
            self._notify()

    # What must hold -----------------------------------------------------------------------------------------------

    def _check(self) -> None:
        c = self.m.counts
        assert 0 <= self.m.ahead <= self.m.max_staleness_steps - self.world.k + 1
        assert (c.running, c.buffered) == (len(self.running), len(self.buffer))
        assert all(
            self.outcomes[name] == count
            for name, count in (
                ("trained", c.trained),
                ("failed", c.failed),
                ("filtered", c.filtered),
                ("dropped", c.dropped),
            )
        )
        assert c.submitted == c.running + c.buffered + c.trained + c.failed + c.filtered + c.dropped
        assert c.dropped == 0 or self.sizes.policy == "drop"
        assert self.m.capacity() == 0, "lost wake-up: there is room, and the admission was not told"
        if self.taken and self.expected is None:
            self.expected = self.m.expected(self.buffer.values())
        if self.lacks is not None:
            assert self._select(self.lacks) is None, "lost wake-up: there is a batch, and the trainer was not told"

    def _check_end(self) -> None:
        c = self.m.counts
        assert c.trained == self.world.steps * self.world.b and c.running == c.buffered == 0
        assert sorted(self.settled) == list(range(self.next_group_index)), "nothing is lost"
        assert c.submitted == self.next_group_index
