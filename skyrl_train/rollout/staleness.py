"""Admission and freshness: how far generation may run ahead, and which groups the trainer may take (SEMANTICS 4).

    capacity ──admit──> running ──finish──> buffered ──train──> trained
                           │
                           └──fail──> failed

Two numbers, both in steps. The *depth* ``D`` paces generation: at step ``t`` at most ``(D + t) * B`` groups have ever
been accepted, so a group typically lags ``D``. (Where weights are published every ``k`` steps, the versions are
``0, k, 2k, ...`` and that is ``(D + v + k) * B`` with ``v`` the last one.) The *bound* ``S >= D`` is the promise: a group
whose oldest token has version ``v`` may train at the latest in step ``v + S + 1``, its *deadline*. Selection is earliest
deadline first.

Why ``wait`` keeps the bound (``docs/design/staleness.md`` has the proof): call a state *feasible* before step ``t`` when for
every ``d >= t`` at most ``(d - t + 1) * B`` unfinished or buffered groups have a deadline of ``d`` or earlier. Admission
keeps it (a group admitted at step ``t`` has deadline ``t + S``, and at most ``(D + 1) * B <= (S + 1) * B`` are
outstanding; with ``k``, ``S >= D + k - 1`` gives the same), and ``wait`` trains a batch only if the rest stays feasible for
``t + 1``. Earliest-deadline-first makes that true once all outstanding groups have finished, so waiting always ends.

Pure: no task, no clock, no torch. Everything is called from the control loop.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Protocol

from skyrl_train.config.schema import StragglerPolicyName
from skyrl_train.errors import StalenessError
from skyrl_train.rollout.group import RolloutGroup


@dataclass(slots=True)
class RolloutCounts:
    """Totals since the beginning of training, resumes included. ``submitted = running + buffered + trained + failed``, always."""

    submitted: int = 0
    running: int = 0
    buffered: int = 0
    trained: int = 0
    failed: int = 0

    @property
    def accepted(self) -> int:
        """Groups that hold or held a seat in a minibatch."""
        return self.trained + self.buffered

    def move(self, source: str, target: str) -> None:
        """Moves one group between two states; each slot is released exactly once."""
        left = getattr(self, source) - 1
        if left < 0:
            raise StalenessError(f"a group moved from {source} to {target}, but none was {source}")
        setattr(self, source, left)
        setattr(self, target, getattr(self, target) + 1)


class StragglerPolicy(Protocol):
    """What gives way when a group needs more than S steps of time."""

    name: StragglerPolicyName
    bounded: bool  # whether a trained group may never exceed S

    def may_train(self, step: int, batch_groups: int, remaining_deadlines: Sequence[int]) -> bool:
        """Whether the trainer may go on with its batch, given the ascending deadlines of all other outstanding groups."""


class AcceptPolicy:
    """The bound gives way: a late group is trained, corrected by its log-probs, and counted."""

    name = StragglerPolicyName.accept
    bounded = False

    def may_train(self, step: int, batch_groups: int, remaining_deadlines: Sequence[int]) -> bool:
        return True


class WaitPolicy:
    """Time gives way: the trainer waits until what it leaves behind can still meet every deadline."""

    name = StragglerPolicyName.wait
    bounded = True

    def may_train(self, step: int, batch_groups: int, remaining_deadlines: Sequence[int]) -> bool:
        return all(
            position <= (deadline - step) * batch_groups
            for position, deadline in enumerate(remaining_deadlines, start=1)
        )


STRAGGLER_POLICIES: Mapping[StragglerPolicyName, type[AcceptPolicy] | type[WaitPolicy]] = {
    StragglerPolicyName.accept: AcceptPolicy,
    StragglerPolicyName.wait: WaitPolicy,
}


class StalenessManager:
    """Decides admission and selection; keeps the counts.

    Args:
        batch_groups: ``B``, groups per optimizer step.
        max_staleness_steps: ``S``, the bound on the lag of a group.
        pipeline_depth: ``D``, ``0 <= D <= S``.
        max_running: ``W``, groups generated at once.
        steps_per_publication: ``k``, optimizer steps from one publication to the next; needs ``S >= D + k - 1``.
        total_steps: no more groups are admitted than these steps train.
        policy: what gives way.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness_steps: int,
        pipeline_depth: int,
        max_running: int,
        total_steps: int,
        policy: StragglerPolicy,
        steps_per_publication: int = 1,
    ) -> None:
        if batch_groups < 1 or max_running < 1 or steps_per_publication < 1:
            raise ValueError("need B >= 1, W >= 1 and k >= 1")
        if not 0 <= pipeline_depth <= max_staleness_steps - steps_per_publication + 1:
            raise ValueError("need 0 <= D and S >= D + k - 1")
        self.batch_groups = batch_groups
        self.max_staleness_steps = max_staleness_steps
        self.pipeline_depth = pipeline_depth
        self.max_running = max_running
        self.steps_per_publication = steps_per_publication
        self.policy = policy
        self.counts = RolloutCounts()
        self._total_groups = total_steps * batch_groups
        self._running: dict[int, int] = {}  # ordinal -> policy version at admission
        self._step = 1
        self._published = 0  # the version that admission builds on

    @property
    def step(self) -> int:
        """``t``: the step that trains next, on top of version ``t - 1``."""
        return self._step

    def deadline(self, version: int) -> int:
        """The last step in which a group with this oldest version keeps the bound."""
        return version + self.max_staleness_steps + 1

    @property
    def budget_spent(self) -> bool:
        """Whether as many groups have finished as may ever be accepted before the next publication: whatever else is
        generated now waits until it is old. (``capacity`` is used up as soon as there is some, and would not tell.)"""
        return self.counts.accepted >= self._acceptable

    def capacity(self) -> int:
        """How many groups may be admitted now."""
        seats = self._acceptable - self.counts.accepted - self.counts.running
        return max(0, min(self.max_running - self.counts.running, seats))

    @property
    def _acceptable(self) -> int:
        """Groups that may ever be accepted before the next publication."""
        steps_ahead = self.pipeline_depth + self._published + self.steps_per_publication
        return min(steps_ahead * self.batch_groups, self._total_groups)

    def admit(self, ordinal: int, version: int) -> None:
        """A group starts to be generated under ``version``."""
        if self.capacity() < 1:
            raise StalenessError(f"group {ordinal} was admitted without capacity")
        if ordinal in self._running:
            raise StalenessError(f"group {ordinal} was admitted twice")
        self._running[ordinal] = version
        self.counts.submitted += 1
        self.counts.running += 1

    def finish(self, ordinal: int) -> None:
        """A group is complete and waits in the buffer."""
        self._leave_running(ordinal, "buffered")

    def fail(self, ordinal: int) -> None:
        """A group will never be complete; its seat is free for the next prompt."""
        self._leave_running(ordinal, "failed")

    def _leave_running(self, ordinal: int, target: str) -> None:
        if self._running.pop(ordinal, None) is None:
            raise StalenessError(f"group {ordinal} is not running, so it cannot become {target}")
        self.counts.move("running", target)

    def select(self, buffered: Iterable[RolloutGroup]) -> list[RolloutGroup] | None:
        """The batch for the current step in ordinal order, or None when the trainer has to wait.

        Earliest deadline first; a batch is complete or is not taken at all.
        """
        by_deadline = sorted(buffered, key=lambda group: (group.oldest_version, group.ordinal))
        if len(by_deadline) < self.batch_groups:
            return None
        batch, rest = by_deadline[: self.batch_groups], by_deadline[self.batch_groups :]
        remaining = sorted([group.oldest_version for group in rest] + list(self._running.values()))
        if not self.policy.may_train(self._step, self.batch_groups, [self.deadline(v) for v in remaining]):
            return None
        return sorted(batch, key=lambda group: group.ordinal)

    def assert_bound(self, batch: Sequence[RolloutGroup]) -> None:
        """What the policy promises about a batch that is about to be trained.

        Raises:
            StalenessError: the policy promises the bound and a group exceeds it.
        """
        for group in batch:
            lag = group.lag(self._step)
            if self.policy.bounded and lag > self.max_staleness_steps:
                raise StalenessError(
                    f"group {group.ordinal} reached step {self._step} with lag {lag} > S = {self.max_staleness_steps}"
                )

    def train(self, batch: Sequence[RolloutGroup]) -> None:
        """The batch is trained."""
        for _ in batch:
            self.counts.move("buffered", "trained")

    @property
    def publication_due(self) -> bool:
        """Whether the weights of the current step are to be published."""
        return self._step >= self._published + self.steps_per_publication

    def advance(self, *, published: bool) -> None:
        """The step is over; if its weights are ``published``, as version ``step``, admission goes on."""
        if published:
            self._published = self._step
        self._step += 1

    def state_dict(self) -> dict[str, int]:
        """The counts and the publication of a checkpoint; in-flight groups are issued again, so they are not counted."""
        state = {**asdict(self.counts), "published": self._published}
        state["submitted"] -= state["running"]
        state["running"] = 0
        return state

    def load_state_dict(self, state: Mapping[str, int], step: int, buffered: Iterable[RolloutGroup]) -> None:
        """Restores the counts before ``step``.

        Raises:
            StalenessError: the bound is too small for the groups that the checkpoint holds.
        """
        self.counts = RolloutCounts(**{key: value for key, value in state.items() if key != "published"})
        self._running.clear()
        self._step = step
        self._published = state["published"]
        if step > self._published + self.steps_per_publication:
            self._published = step - 1  # it was due and had failed; resuming makes up for it
        deadlines = sorted(self.deadline(group.oldest_version) for group in buffered)
        if self.policy.bounded and not self.policy.may_train(step - 1, self.batch_groups, deadlines):
            raise StalenessError(
                f"the checkpoint holds finished groups that cannot all be trained within "
                f"max_staleness_steps = {self.max_staleness_steps}; resume with the bound that the run had"
            )
