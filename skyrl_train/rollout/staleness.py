"""Admission and freshness: how far generation may run ahead, and which groups the trainer may take (SEMANTICS 4).

    capacity ──admit──> running ──finish──> buffered ──select, train──> trained
                           │                   │
                           ├──fail───> failed  │
                           ├──filter─> filtered│
                           └──drop───> dropped <── drop

Two numbers, both in steps. The *depth* ``D`` (any fraction) paces generation: while version ``v`` is published, groups are
admitted until ``(D + v + k) * B`` are accepted or run, with ``k`` the steps from one publication to the next; so a group
typically lags ``D``. The *bound* ``S >= D + k - 1`` is the promise: a group whose oldest token has version ``v`` may train at
the latest in step ``v + S + 1``, its *deadline*. Selection is earliest deadline first. What gives way where a group needs
more time than that is the straggler policy's choice (``rollout/stragglers``); where the bound or the signal does, such a
group loses its place in the pipeline to the next one, and is trained when it comes.

Why ``wait`` keeps the bound (``docs/design/staleness.md`` has the proof): call a state *feasible* before step ``t``, of which
``c`` seats are taken, when for every ``d >= t`` at most ``(d - t + 1) * B - c`` outstanding groups have a deadline of ``d`` or
earlier. Admission keeps it, because a new group's deadline is the latest of all and ``S >= D + k - 1``; ``wait`` gives out
seats only if the rest stays feasible, so that none of its groups is ever late. Earliest-deadline-first makes that true once all
outstanding groups have finished, so waiting always ends.

Pure: no task, no clock, no torch. Everything is called from the control loop, except where a method says otherwise.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from typing import Any, Generic

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.counts import GroupsByVersion, RolloutCounts
from skyrl_train.rollout.stragglers import FinishedGroup, Group, Outlook, StragglerPolicy

_SIZES = ("max_staleness_steps", "pipeline_depth", "max_running")  # what may change while a run goes on


@dataclass(frozen=True, slots=True)
class Overdue(Generic[Group]):
    """What the straggler policy gives up now."""

    running: list[int]  # ordinals, to be cancelled
    buffered: list[Group]  # to be taken out of the buffer


class StalenessManager:
    """Decides admission and selection; keeps the counts.

    Args:
        batch_groups: ``B``, groups per optimizer step.
        max_staleness_steps: ``S``, the bound on the lag of a group.
        pipeline_depth: ``D >= 0``, in steps; it need not be whole.
        max_running: ``W``, groups generated at once.
        total_steps: no more groups are admitted than these steps train.
        policy: what gives way.
        steps_per_publication: ``k``, optimizer steps from one publication to the next; needs ``S >= D + k - 1``.
        overlap: whether a step may begin while the version before it is still on its way to the engines.

    Raises:
        ValueError: the sizes cannot work together.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness_steps: int,
        pipeline_depth: float,
        max_running: int,
        total_steps: int,
        policy: StragglerPolicy,
        steps_per_publication: int = 1,
        overlap: bool = False,
    ) -> None:
        if batch_groups < 1 or steps_per_publication < 1:
            raise ValueError("need B >= 1 and k >= 1")
        self.batch_groups = batch_groups
        self.steps_per_publication = steps_per_publication
        self.overlap = overlap
        self.policy = policy
        self._check_sizes(max_staleness_steps, pipeline_depth, max_running)
        self.max_staleness_steps = max_staleness_steps
        self.pipeline_depth = pipeline_depth
        self.max_running = max_running
        self._resized = False  # since the run began
        self.counts = RolloutCounts()
        self._total_groups = total_steps * batch_groups
        self._running = GroupsByVersion()  # under which they were admitted
        self._buffered = GroupsByVersion()  # of their oldest token; without those that have a seat in the current step
        self._seated = GroupsByVersion()
        self._step = 1
        self._promised = max_staleness_steps  # the largest S since the step began, for those that had a seat already
        self._begun = 0  # the last version whose publication was due
        self._published = 0  # the last one that the engines serve; admission builds on it
        self._ahead = pipeline_depth  # the depth until the next publication

    def _check_sizes(self, max_staleness_steps: int, pipeline_depth: float, max_running: int) -> None:
        if max_running < 1:
            raise ValueError("need W >= 1")
        if not 0 <= pipeline_depth <= max_staleness_steps - self.steps_per_publication + 1:
            raise ValueError(
                f"need 0 <= D and S >= D + k - 1; S = {max_staleness_steps}, D = {pipeline_depth}, "
                f"k = {self.steps_per_publication}"
            )

    @property
    def step(self) -> int:
        """``t``: the step that trains next, on top of the weights after step ``t - 1``."""
        return self._step

    def deadline(self, version: int) -> int:
        """The last step in which a group with this oldest version keeps the bound."""
        return version + self.max_staleness_steps + 1

    def resize(
        self,
        *,
        max_staleness_steps: int | None = None,
        pipeline_depth: float | None = None,
        max_running: int | None = None,
    ) -> None:
        """Changes S, D or W while the run goes on. Groups that have a seat in the current step keep it.

        A smaller depth or W takes effect as groups end; nothing that runs is cancelled for it. Afterwards there may be
        capacity, and :meth:`overdue` groups.

        Raises:
            ValueError: the sizes cannot work together; nothing has changed.
            StalenessError: the policy could not keep the smaller bound for what is outstanding; nothing has changed. A few
                steps later, with a smaller depth, it can.
        """
        bound = self.max_staleness_steps if max_staleness_steps is None else max_staleness_steps
        depth = self.pipeline_depth if pipeline_depth is None else pipeline_depth
        running = self.max_running if max_running is None else max_running
        self._check_sizes(bound, depth, running)
        if bound < self.max_staleness_steps and not self.policy.sustains(
            replace(self._outlook(), max_staleness_steps=bound)
        ):
            raise StalenessError(
                f"groups that were admitted with max_staleness_steps = {self.max_staleness_steps} cannot all be trained "
                f"within {bound}; lower pipeline_depth first, and the bound some steps later"
            )
        self.max_staleness_steps, self.pipeline_depth, self.max_running = bound, depth, running
        self._resized = True
        self._ahead = depth
        self._promised = max(self._promised, bound)

    # Admission ----------------------------------------------------------------------------------------------------

    @property
    def budget_spent(self) -> bool:
        """Whether as many groups have finished as may ever be accepted before the next publication: whatever else is
        generated now waits until it is old. (``capacity`` is used up as soon as there is some, and would not tell.)"""
        return self.counts.accepted >= self._acceptable

    def capacity(self) -> int:
        """How many groups may be admitted now."""
        accepted, running = self.counts.accepted, self.counts.running
        paced = self._acceptable - accepted - (running - self._late)
        return max(0, min(self.max_running - running, paced, self._total_groups - accepted - running))

    @property
    def _late(self) -> int:
        """Running groups whose deadline has passed with the policy that is served: what is admitted now takes their places in
        the pipeline. (None under a policy that keeps every deadline, or gives such groups up.)"""
        return sum(
            groups for version, groups in self._running.counts.items() if self.deadline(version) <= self._published
        )

    @property
    def _acceptable(self) -> int:
        """Groups that may be accepted before the next publication, beside those that are late."""
        ahead = int(self._ahead * self.batch_groups + 1e-9)  # 0.29 * 100 is a little less than 29
        whole_steps = self._published + self.steps_per_publication
        return min(ahead + whole_steps * self.batch_groups, self._total_groups)

    def _depth_of_policy(self) -> float:
        """Steps that generation may run ahead from now on.

        Raises:
            StalenessError: the policy's answer is no depth. With one below 0 the trainer would wait for groups for ever.
        """
        depth = self.policy.depth(self._outlook(), self.pipeline_depth, self.steps_per_publication)
        if not depth >= 0:  # NaN included
            raise StalenessError(
                f"{type(self.policy).__name__}.depth answered {depth!r}; a straggler policy gives 0 to pipeline_depth = "
                f"{self.pipeline_depth:g} steps"
            )
        return min(depth, self.pipeline_depth)

    def may_admit(self, version: int) -> bool:
        """Whether a group whose recorded tokens go back to ``version`` may go on with them (after a resume); if not, it
        starts afresh."""
        return self.policy.admit(self._outlook(), version)

    def admit(self, ordinal: int, version: int) -> None:
        """A group starts to be generated under ``version``: the one that the engines serve, or that of the oldest token
        that it goes on from."""
        if self.capacity() < 1:
            raise StalenessError(f"group {ordinal} was admitted without capacity")
        if any(ordinal in groups for groups in (self._running, self._buffered, self._seated)):
            raise StalenessError(f"group {ordinal} was admitted twice")
        if version < self._published and not self.may_admit(version):
            raise StalenessError(f"group {ordinal} goes on from version {version}, for which it is too late")
        self._running.add(ordinal, version)
        self.counts.submitted += 1
        self.counts.running += 1

    def finish(self, ordinal: int, oldest_version: int | None = None) -> None:
        """A group is complete and waits in the buffer. Its oldest token may be newer than the version at admission, which
        counts where nothing else is said."""
        version = self._leave(self._running, ordinal, "buffered")
        self._buffered.add(ordinal, version if oldest_version is None else oldest_version)

    def fail(self, ordinal: int) -> None:
        """A group will never be complete; its seat is free for the next prompt."""
        self._leave(self._running, ordinal, "failed")

    def filter(self, ordinal: int) -> None:
        """A group is complete, has no signal and is not kept; its seat is free for the next prompt."""
        self._leave(self._running, ordinal, "filtered")

    def drop(self, ordinal: int) -> None:
        """The straggler policy gave a group up, running or buffered; its seat is free for the next prompt."""
        self._leave(self._running if ordinal in self._running else self._buffered, ordinal, "dropped")

    def _leave(self, groups: GroupsByVersion, ordinal: int, target: str) -> int:
        source = "running" if groups is self._running else "buffered"
        if ordinal not in groups:
            raise StalenessError(f"group {ordinal} is not {source}, so it cannot become {target}")
        self.counts.move(source, target)
        return groups.pop(ordinal)

    # Selection ----------------------------------------------------------------------------------------------------

    def select(
        self, buffered: Iterable[Group], *, committed: int = 0, at_least: int | None = None
    ) -> list[Group] | None:
        """The next groups for the current step in ordinal order, or None when the trainer has to wait.

        Args:
            buffered: the finished groups, without those that have a seat in this step already.
            committed: how many have one: those that were selected since this step began.
            at_least: the fewest worth training; by default all that the step lacks. More are returned where there are more.
        """
        self._check_order_of_calls(committed)
        finished = list(buffered)
        seats = self.batch_groups - committed
        wanted = seats if at_least is None else min(at_least, seats)
        outlook = self._outlook()
        given = self._seats_to_give(outlook, wanted, min(seats, len(finished)))
        if given < wanted:
            return None
        evicted = {v for v in {group.oldest_version for group in finished} if self.policy.evict(outlook, v)}
        finished = [group for group in finished if group.oldest_version not in evicted]
        if len(finished) < wanted:
            return None
        chosen = self.policy.select(outlook, finished)[:given]
        for group in chosen:
            if group.ordinal not in self._buffered:
                raise StalenessError(f"group {group.ordinal} was selected, but is not buffered, or was selected twice")
            self._seated.add(group.ordinal, self._buffered.pop(group.ordinal))
        return sorted(chosen, key=lambda group: group.ordinal)

    def _seats_to_give(self, outlook: Outlook, fewest: int, most: int) -> int:
        """The largest number of seats that the policy gives out now; less than ``fewest`` if the trainer has to wait."""
        if most < fewest or self.policy.must_wait(outlook, fewest):
            return fewest - 1
        while fewest < most:
            middle = (fewest + most + 1) // 2
            if self.policy.must_wait(outlook, middle):
                most = middle - 1
            else:
                fewest = middle
        return fewest

    def _check_order_of_calls(self, committed: int) -> None:
        late = self._begun - self._published
        if late > (self.steps_per_publication if self.overlap else 0):
            raise StalenessError(f"step {self._step} begins, but version {self._begun} is not served yet")
        if committed == 0:  # whatever was selected before was not trained
            for ordinal, version in list(self._seated.items()):
                self._seated.pop(ordinal)
                self._buffered.add(ordinal, version)
        if committed != len(self._seated):
            raise StalenessError(
                f"{committed} groups are said to have seats in this step, but {len(self._seated)} have"
            )

    def overdue(self, buffered: Iterable[Group]) -> Overdue[Group]:
        """What the policy gives up now: to be asked when a step is over, after a resume and after :meth:`resize`.

        Groups that have a seat in the current step keep it.
        """
        outlook = self._outlook()
        free = (group for group in buffered if group.ordinal not in self._seated)
        return Overdue(
            running=[ordinal for ordinal, version in self._running.items() if self.policy.evict(outlook, version)],
            buffered=[group for group in free if self.policy.evict(outlook, group.oldest_version)],
        )

    def _outlook(self) -> Outlook:
        return Outlook(
            step=self._step,
            batch_groups=self.batch_groups,
            seats=self.batch_groups - len(self._seated),
            max_staleness_steps=self.max_staleness_steps,
            running=self._running.counts,
            finished=self._buffered.counts,
        )

    # A step -------------------------------------------------------------------------------------------------------

    @property
    def oldest_trained_version(self) -> int | None:
        """Sampled tokens of older versions have loss mask 0 in the current step; None: all are trained. Any thread."""
        return self.policy.oldest_trained_version(self._step, self.max_staleness_steps)

    def assert_bound(self, batch: Iterable[FinishedGroup]) -> None:
        """What the policy promises about groups that are about to be trained. Any thread.

        Raises:
            StalenessError: the policy promises the bound and a trained token exceeds it.
        """
        if not self.policy.bounded:
            return
        oldest_trained = self.oldest_trained_version
        for group in batch:
            oldest = group.oldest_version if oldest_trained is None else max(group.oldest_version, oldest_trained)
            lag = (self._step - 1) - oldest
            if lag > self._promised:
                raise StalenessError(
                    f"group {group.ordinal} reached step {self._step} with lag {lag} > S = {self._promised}"
                )

    def train(self, batch: Iterable[FinishedGroup]) -> None:
        """The step's groups are trained."""
        for group in batch:
            self._leave(self._seated if group.ordinal in self._seated else self._buffered, group.ordinal, "trained")

    @property
    def publication_due(self) -> bool:
        """Whether the weights of the current step are to be published."""
        return self._step >= self._begun + self.steps_per_publication

    def advance(self) -> None:
        """The step is over; if its publication was due, it begins."""
        if self.publication_due:
            self._begun = self._step
        self._step += 1
        self._promised = self.max_staleness_steps

    def published(self, version: int) -> None:
        """All engines serve ``version``: admission goes on, as far ahead as the policy says. One that was not due (a resumed
        run begins with one) opens nothing.

        Raises:
            StalenessError: the version's step is not over, or the policy's depth is none.
        """
        if version >= self._step:
            raise StalenessError(f"version {version} is served before step {version} is over")
        if self._published < version <= self._begun:
            self._published = version
            self._ahead = self._depth_of_policy()

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """The counts and the publication of a checkpoint, and the sizes, where they are no longer those of the settings: groups
        that were admitted under them are kept. In-flight groups are issued again, so they are not counted."""
        state: dict[str, Any] = {**asdict(self.counts), "published": self._begun}  # a resumed run begins by publishing
        state["submitted"] -= state["running"]
        state["running"] = 0
        return {**state, "resized": {name: getattr(self, name) for name in _SIZES}} if self._resized else state

    def load_state_dict(self, state: Mapping[str, Any], step: int, buffered: Iterable[FinishedGroup]) -> None:
        """Restores the counts and sizes before ``step``, with the engines about to serve version ``step - 1``.

        Raises:
            StalenessError: the policy cannot keep the bound for the groups that the checkpoint holds, or they are not as many
                as it counts.
        """
        self.counts = RolloutCounts(**{key: state[key] for key in asdict(self.counts) if key in state})
        for name, size in state.get("resized", {}).items():
            setattr(self, name, size)
            self._resized = True
        self._running, self._buffered, self._seated = GroupsByVersion(), GroupsByVersion(), GroupsByVersion()
        for group in buffered:
            self._buffered.add(group.ordinal, group.oldest_version)
        if len(self._buffered) != self.counts.buffered:
            raise StalenessError(
                f"the checkpoint counts {self.counts.buffered} finished groups and holds {len(self._buffered)}; remove it to "
                "resume from an older one"
            )
        self._step = step
        self._promised = self.max_staleness_steps
        self._begun = state["published"]
        if step > self._begun + self.steps_per_publication:
            self._begun = step - 1  # it was due and had failed; resuming makes up for it
        self._published = self._begun
        self._ahead = self.pipeline_depth
        if not self.policy.sustains(self._outlook()):
            raise StalenessError(
                f"the checkpoint holds finished groups that cannot all be trained within "
                f"max_staleness_steps = {self.max_staleness_steps}; resume with the bound that the run had"
            )
