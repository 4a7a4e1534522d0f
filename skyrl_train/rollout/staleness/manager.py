"""Admission and selection: how far generation may run ahead, and which groups the trainer may take.

    capacity ──admit──> running ──finish──> buffered ──select, train──> trained
                           │                   │
                           ├──fail───> failed  │
                           ├──filter─> filtered│
                           └──drop───> dropped <── drop

Two numbers, both in steps, control it. The *depth* ``D`` (``generate_ahead_steps``, any fraction) paces generation: while
version ``v`` is served, groups are admitted until ``(D + v + k) * B`` are accepted or running, where ``k`` is the number of
steps between two weight syncs; so a group typically lags ``D`` steps. By default ``D`` adapts: with it, none of the last
``_MEASURED_STEPS`` steps would have waited for a group. The *bound* ``S >= D + k - 1`` (``max_staleness_steps``)
is the promise: a group whose oldest token has version ``v`` may train at the latest in step ``v + S + 1``, its *deadline*.
Selection takes the earliest deadlines first. When a group needs more time, the staleness policy decides what happens
(``policies.py``). If it lets such groups train late, the next group takes the late one's place in the pipeline, and the late
group trains when it finishes.

Why ``wait`` keeps the bound (``docs/design/staleness.md`` has the proof): call a state *feasible* before step ``t``, of which
``c`` batch slots are taken, when for every ``d >= t`` at most ``(d - t + 1) * B - c`` outstanding groups have a deadline of
``d`` or earlier. Admission keeps a state feasible, because a new group has the latest deadline of all and ``S >= D + k - 1``.
``wait`` fills slots only if the rest stays feasible, so none of its groups is ever late. Once all outstanding groups have
finished, earliest-deadline-first selection makes that true, so waiting always ends.

Pure: no task, no clock, no torch. All calls come from the control loop, except where a method says otherwise.
"""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field, replace
from typing import TYPE_CHECKING, Any, Literal

from skyrl_train.errors import StalenessError
from skyrl_train.rollout.staleness.policies import StalenessPolicy, StalenessView

if TYPE_CHECKING:
    from skyrl_train.rollout.buffer import BufferedGroup

_FIRST_DEPTH = 2.0  # steps; of a run whose depth adapts, until it has measured
_MEASURED_STEPS = 16  # the depth suffices for each of so many past steps
_RESIZABLE = ("max_staleness_steps", "generate_ahead_steps", "max_running")


@dataclass(slots=True)
class RolloutCounts:
    """Groups by state since the beginning of training, including resumes. ``submitted`` is the sum of all others."""

    submitted: int = 0
    running: int = 0
    buffered: int = 0
    trained: int = 0
    failed: int = 0
    filtered: int = 0
    dropped: int = 0

    @property
    def accepted(self) -> int:
        """Groups that hold or held a batch slot."""
        return self.trained + self.buffered

    def move(self, source: str, target: str) -> None:
        """Move one group between two states.

        Raises:
            StalenessError: no group is in ``source``; a slot would be released twice.
        """
        left = getattr(self, source) - 1
        if left < 0:
            raise StalenessError(f"a group moved from {source} to {target}, but none was {source}")
        setattr(self, source, left)
        setattr(self, target, getattr(self, target) + 1)


@dataclass(slots=True)
class GroupsByVersion:
    """Groups with a policy version each, and the number of groups of each version. Both are read-only for others."""

    versions: dict[int, int] = field(default_factory=dict)  # group index -> version
    counts: Counter[int] = field(default_factory=Counter)  # version -> groups, without zeros

    def add(self, group_index: int, version: int) -> None:
        """Add a group that is not there."""
        self.versions[group_index] = version
        self.counts[version] += 1

    def pop(self, group_index: int) -> int:
        """Remove a group and return its version.

        Raises:
            KeyError: it is not there.
        """
        version = self.versions.pop(group_index)
        self.counts[version] -= 1
        if not self.counts[version]:
            del self.counts[version]
        return version


@dataclass(frozen=True, slots=True)
class Overdue:
    """Groups that the staleness policy gives up."""

    running: list[int]  # group indices to cancel
    buffered: list[BufferedGroup]  # groups to remove from the buffer


class StalenessManager:
    """Decides admission and selection and keeps the counts.

    Args:
        batch_groups: ``B``, groups per optimizer step.
        max_staleness_steps: ``S``, the bound on the lag of a group.
        generate_ahead_steps: ``D >= 0``, in steps; may be fractional. None: it adapts, up to ``S - k + 1``.
        max_running: ``W``, groups in generation at once.
        total_steps: no more groups are admitted than these steps train.
        policy: decides about groups that exceed the bound.
        weight_sync_interval: ``k``, optimizer steps between two weight syncs; needs ``S >= D + k - 1``.
        overlap: whether a step may begin before the engines serve the previous version.

    Attributes:
        counts: groups by state.
        step: ``t``, the step that trains next, on top of the weights after step ``t - 1``. Read-only.
        ahead: ``D`` until the next weight sync. Read-only.

    Raises:
        ValueError: the sizes cannot work together.
    """

    def __init__(
        self,
        *,
        batch_groups: int,
        max_staleness_steps: int,
        generate_ahead_steps: float | None,
        max_running: int,
        total_steps: int,
        policy: StalenessPolicy,
        weight_sync_interval: int = 1,
        overlap: bool = False,
    ) -> None:
        if batch_groups < 1 or weight_sync_interval < 1:
            raise ValueError("need B >= 1 and k >= 1")
        self.batch_groups = batch_groups
        self.weight_sync_interval = weight_sync_interval
        self.overlap = overlap
        self.policy = policy
        self._check_sizes(max_staleness_steps, generate_ahead_steps, max_running)
        self.max_staleness_steps = max_staleness_steps
        self.generate_ahead_steps = generate_ahead_steps
        self.max_running = max_running
        self._resized = False  # since the run began
        self.counts = RolloutCounts()
        self._total_groups = total_steps * batch_groups
        self._running = GroupsByVersion()  # by the version of their admission
        self._buffered = GroupsByVersion()  # by the version of their oldest token; without the selected ones
        self._selected = GroupsByVersion()  # groups with a slot in the current step
        self.step = 1
        self._promised = max_staleness_steps  # the largest S since the step began, for groups that were selected before
        self._last_due = 0  # the last version whose weight sync was due
        self._served = 0  # the last version that all engines serve; admission builds on it
        # For each of the last steps, the least depth with which it would not have waited.
        self._sufficient = deque([_FIRST_DEPTH], maxlen=_MEASURED_STEPS)
        self.ahead = self._depth()

    def _check_sizes(self, max_staleness_steps: int, generate_ahead_steps: float | None, max_running: int) -> None:
        if max_running < 1:
            raise ValueError("need W >= 1")
        depth = 0 if generate_ahead_steps is None else generate_ahead_steps
        if not 0 <= depth <= max_staleness_steps - self.weight_sync_interval + 1:
            raise ValueError(
                f"need 0 <= D and S >= D + k - 1; S = {max_staleness_steps}, D = {depth}, "
                f"k = {self.weight_sync_interval}"
            )

    def resize(
        self,
        *,
        max_staleness_steps: int | None = None,
        generate_ahead_steps: float | None = None,
        max_running: int | None = None,
    ) -> None:
        """Change S, D or W during the run. Groups that are selected for the current step stay selected.

        None keeps a value. A depth that adapts does so until it is given, and is then fixed.
        A smaller depth or W takes effect as groups end; no running group is cancelled for it. Afterwards there may be
        capacity, and :meth:`overdue` groups.

        Raises:
            ValueError: the sizes cannot work together; nothing has changed.
            StalenessError: the policy could not keep the smaller bound for the outstanding groups; nothing has changed. It
                can a few steps later, with a smaller depth.
        """
        bound = self.max_staleness_steps if max_staleness_steps is None else max_staleness_steps
        depth = self.generate_ahead_steps if generate_ahead_steps is None else generate_ahead_steps
        running = self.max_running if max_running is None else max_running
        # All checks come before the first assignment, so that an error changes nothing.
        self._check_sizes(bound, depth, running)
        if bound < self.max_staleness_steps and not self.policy.sustains(
            replace(self.view(), max_staleness_steps=bound)
        ):
            raise StalenessError(
                f"groups that were admitted with max_staleness_steps = {self.max_staleness_steps} cannot all be trained "
                f"within {bound}; lower generate_ahead_steps first, and the bound some steps later"
            )
        self.max_staleness_steps, self.generate_ahead_steps, self.max_running = bound, depth, running
        self._resized = True
        self.ahead = self._depth()
        # Groups that were selected under the larger bound may still train in this step.
        self._promised = max(self._promised, bound)

    # Admission ----------------------------------------------------------------------------------------------------

    @property
    def budget_spent(self) -> bool:
        """True if as many groups have finished as may be accepted before the next weight sync.

        More rollouts would only age in the buffer. (``capacity`` cannot tell: it is used up as soon as it appears.)
        """
        return self.counts.accepted >= self._max_accepted()

    def capacity(self) -> int:
        """Return how many groups may be admitted now."""
        accepted, running = self.counts.accepted, self.counts.running
        paced = self._max_accepted() - accepted - self._running_in_time()
        return max(0, min(self.max_running - running, paced, self._total_groups - accepted - running))

    @property
    def generation_slots(self) -> int:
        """Groups that may run at once: W, or the ones that the depth admits between two weight syncs if they are fewer."""
        return min(self.max_running, self._groups_ahead() + self.weight_sync_interval * self.batch_groups)

    def _running_in_time(self) -> int:
        """Return the number of running groups whose deadline has not passed with the served policy.

        The others do not count for admission: groups that are admitted now take their places in the pipeline. There are none
        under a policy that keeps every deadline or drops such groups.
        """
        deadline_passed = self._served - self.max_staleness_steps  # versions below this one
        return sum(groups for version, groups in self._running.counts.items() if version >= deadline_passed)

    def _max_accepted(self) -> int:
        """Groups that may be accepted before the next weight sync, without late ones."""
        whole_steps = self._served + self.weight_sync_interval
        return min(self._groups_ahead() + whole_steps * self.batch_groups, self._total_groups)

    def _groups_ahead(self) -> int:
        return int(self.ahead * self.batch_groups + 1e-9)  # 0.29 * 100 is slightly less than 29

    def _depth(self) -> float:
        """Return ``D``: the given one, or the one that suffices for each of the last steps, within the bound."""
        if self.generate_ahead_steps is not None:
            return self.generate_ahead_steps
        return max(0.0, min(max(self._sufficient), self.max_staleness_steps - self.weight_sync_interval + 1))

    def _measure_depth(self) -> None:
        """Record the least depth with which step ``t``, which may begin now, would not wait.

        With depth ``D``, ``(D + v + k) * B`` groups have been admitted under version ``v`` or earlier. ``(t - 1) * B`` of them
        are trained and some still run; the rest is finished, and step ``t`` needs ``B`` of it.
        """
        running = self._running_in_time() / self.batch_groups
        self._sufficient.append(self.step - self._served - self.weight_sync_interval + running)

    def may_admit(self, version: int) -> bool:
        """Return whether a group may continue from recorded tokens of ``version`` after a resume. If not, it starts over."""
        return self.policy.admit(self.view(), version)

    def admit(self, group_index: int, version: int) -> None:
        """Start to generate a group.

        Args:
            version: the served version, or the version of the oldest token that the group continues from.
        """
        if self.capacity() < 1:
            raise StalenessError(f"group {group_index} was admitted without capacity")
        if any(group_index in groups.versions for groups in (self._running, self._buffered, self._selected)):
            raise StalenessError(f"group {group_index} was admitted twice")
        # The caller discards recorded tokens that are too old; here they are a bug.
        if version < self._served and not self.may_admit(version):
            raise StalenessError(f"group {group_index} continues from version {version}, which is too old")
        self._running.add(group_index, version)
        self.counts.submitted += 1
        self.counts.running += 1

    def finish(self, group_index: int, oldest_version: int | None = None) -> None:
        """Move a complete group to the buffer.

        Args:
            oldest_version: of its tokens; may be newer than the version at admission, which is the default.
        """
        version = self._leave(self._running, group_index, "buffered")
        self._buffered.add(group_index, version if oldest_version is None else oldest_version)

    def release(self, group_index: int, outcome: Literal["failed", "filtered", "dropped"]) -> None:
        """Release the slot of a running group with this outcome. A group may also be dropped while it is buffered."""
        buffered = outcome == "dropped" and group_index not in self._running.versions
        self._leave(self._buffered if buffered else self._running, group_index, outcome)

    def discard_finished(self) -> None:
        """Forget all groups that have finished and are not trained, as if they had never been submitted."""
        self.counts.submitted -= self.counts.buffered
        self.counts.buffered = 0
        self._buffered, self._selected = GroupsByVersion(), GroupsByVersion()

    def _leave(self, groups: GroupsByVersion, group_index: int, target: str) -> int:
        source = "running" if groups is self._running else "buffered"
        if group_index not in groups.versions:
            raise StalenessError(f"group {group_index} is not {source}, so it cannot become {target}")
        self.counts.move(source, target)
        return groups.pop(group_index)

    # Selection ----------------------------------------------------------------------------------------------------

    def select(
        self, buffered: Iterable[BufferedGroup], *, committed: int = 0, at_least: int | None = None
    ) -> list[BufferedGroup] | None:
        """Select the next groups for the current step, ordered by group index. None: the trainer has to wait.

        Args:
            buffered: finished groups, without those that are selected for this step already.
            committed: number of groups that were selected since this step began.
            at_least: fewest groups to return; None: all that the step lacks. More are returned where possible.

        Raises:
            StalenessError: the calls came in a wrong order.
        """
        # Every due sync has ended before a step begins; only with overlap may the last one still run.
        unserved = self._last_due - self._served
        if unserved > (self.weight_sync_interval if self.overlap else 0):
            raise StalenessError(f"step {self.step} begins, but version {self._last_due} is not served yet")
        if committed == 0:  # a step begins: groups that an earlier, failed step had selected are buffered again
            for group_index in list(self._selected.versions):
                self._buffered.add(group_index, self._selected.pop(group_index))
        if committed != len(self._selected.versions):
            raise StalenessError(
                f"{committed} groups are said to have slots in this step, but {len(self._selected.versions)} have"
            )

        finished = list(buffered)
        free = self.batch_groups - committed
        wanted = free if at_least is None else min(at_least, free)
        if len(finished) < wanted:
            return None
        view = self.view()
        # The policy sees all outstanding groups: it may leave slots free although enough groups have finished.
        filled = self._slots_to_fill(view, wanted, free)
        if filled < wanted:
            return None
        # overdue() removes these groups between two steps; until then they must not train.
        evicted = {v for v in {group.oldest_version for group in finished} if self.policy.evict(view, v)}
        finished = [group for group in finished if group.oldest_version not in evicted]
        if len(finished) < wanted:
            return None
        chosen = self.policy.select(view, finished)[:filled]
        # A user's policy may return anything, so their number and each choice are checked.
        if len(chosen) < wanted:
            raise StalenessError(
                f"{type(self.policy).__name__}.select returned {len(chosen)} of {len(finished)} groups, and the step needs "
                f"{wanted}; it has to return all of them, in the order in which they train"
            )
        for group in chosen:
            if group.group_index not in self._buffered.versions:
                raise StalenessError(
                    f"group {group.group_index} was selected, but is not buffered, or was selected twice"
                )
            self._selected.add(group.group_index, self._buffered.pop(group.group_index))
        # In the order of the training stream: a step must not depend on the order in which groups finish.
        return sorted(chosen, key=lambda group: group.group_index)

    def expected(self, buffered: Iterable[BufferedGroup]) -> list[BufferedGroup] | None:
        """Return the groups that the step after the current one will select, ordered by group index. Takes no slot.

        None: that is not settled yet. It is settled when a whole batch of finished groups has older versions than every running
        group: what finishes later has a later deadline. (A policy with another order may still select others.)
        """
        oldest_running = min(self._running.counts, default=self.step)
        finished = sum(groups for version, groups in self._buffered.counts.items() if version < oldest_running)
        if finished < self.batch_groups:
            return None
        view = replace(self.view(), step=self.step + 1, slots=self.batch_groups)
        if self.policy.must_wait(view, self.batch_groups):
            return None
        selected = self._selected.versions
        free = [
            group
            for group in buffered
            if group.group_index not in selected and not self.policy.evict(view, group.oldest_version)
        ]
        chosen = self.policy.select(view, free)[: self.batch_groups]
        return sorted(chosen, key=lambda group: group.group_index) if len(chosen) == self.batch_groups else None

    def _slots_to_fill(self, view: StalenessView, fewest: int, most: int) -> int:
        """Return the largest number of slots that the policy fills now; less than ``fewest``: the trainer has to wait."""
        if self.policy.must_wait(view, fewest):
            return fewest - 1
        while fewest < most:  # must_wait is monotonic, so bisect
            middle = (fewest + most + 1) // 2
            if self.policy.must_wait(view, middle):
                most = middle - 1
            else:
                fewest = middle
        return fewest

    def overdue(self, buffered: Iterable[BufferedGroup]) -> Overdue:
        """Return the groups that the policy gives up. Call it after a step, after a resume and after :meth:`resize`.

        Groups that are selected for the current step keep their slots.
        """
        view, running, selected = self.view(), self._running.versions, self._selected.versions
        free = (group for group in buffered if group.group_index not in selected)
        return Overdue(
            running=[group_index for group_index, version in running.items() if self.policy.evict(view, version)],
            buffered=[group for group in free if self.policy.evict(view, group.oldest_version)],
        )

    def view(self) -> StalenessView:
        """Return what a policy sees now. The mappings are the manager's own, so it is valid until the manager changes."""
        return StalenessView(
            step=self.step,
            batch_groups=self.batch_groups,
            slots=self.batch_groups - len(self._selected.versions),
            max_staleness_steps=self.max_staleness_steps,
            running=self._running.counts,
            finished=self._buffered.counts,
        )

    # A step -------------------------------------------------------------------------------------------------------

    @property
    def oldest_trained_version(self) -> int | None:
        """Sampled tokens of older versions get loss mask 0 in the current step; None: all are trained. Any thread."""
        return self.oldest_trained_version_in(self.step)

    def oldest_trained_version_in(self, step: int) -> int | None:
        """Return :attr:`oldest_trained_version` of another step, with the present bound. Any thread."""
        return self.policy.oldest_trained_version(step, self.max_staleness_steps)

    def assert_bound(self, batch: Iterable[BufferedGroup]) -> None:
        """Check the promise of the policy for groups that are about to train. Any thread.

        Raises:
            StalenessError: the policy promises the bound and a trained token exceeds it.
        """
        if not self.policy.bounded:
            return
        oldest_trained = self.oldest_trained_version
        for group in batch:
            # Tokens with loss mask 0 do not train, so they do not count.
            oldest = group.oldest_version if oldest_trained is None else max(group.oldest_version, oldest_trained)
            lag = (self.step - 1) - oldest
            if lag > self._promised:
                raise StalenessError(
                    f"group {group.group_index} reached step {self.step} with lag {lag} > S = {self._promised}"
                )

    def train(self, batch: Iterable[BufferedGroup]) -> None:
        """Record that the groups of the step are trained."""
        for group in batch:
            selected = group.group_index in self._selected.versions
            self._leave(self._selected if selected else self._buffered, group.group_index, "trained")

    @property
    def weight_sync_due(self) -> bool:
        """True if a weight sync is due after the current step."""
        return self.step >= self._last_due + self.weight_sync_interval

    def advance(self) -> None:
        """End the step. If a weight sync is due, it begins now."""
        due = self.weight_sync_due
        if due:
            self._last_due = self.step
        self.step += 1
        self._promised = self.max_staleness_steps
        if not due or self.overlap:  # otherwise the next step begins when the version is served
            self._measure_depth()

    def served(self, version: int) -> None:
        """Record that all engines serve ``version``: admission continues, as far ahead as the policy allows.

        A version that was not due (a resumed run begins with one) opens nothing.

        Raises:
            StalenessError: the step of the version has not ended, or the depth that the policy returned is not >= 0.
        """
        if version >= self.step:
            raise StalenessError(f"version {version} is served before step {version} has ended")
        if not self._served < version <= self._last_due:
            return
        if not self.overlap:
            self._measure_depth()
        self._served = version
        most = self._depth()
        depth = self.policy.depth(self.view(), most, self.weight_sync_interval)
        if not depth >= 0:  # NaN included; with a negative depth the trainer would wait for groups forever
            raise StalenessError(
                f"{type(self.policy).__name__}.depth returned {depth!r}; a staleness policy returns 0 to "
                f"generate_ahead_steps = {most:g} steps"
            )
        self.ahead = min(depth, most)

    # Checkpoints --------------------------------------------------------------------------------------------------

    def state_dict(self) -> dict[str, Any]:
        """Return the counts, the last due version and the depth, and the sizes if they were changed.

        Groups that were admitted under the changed sizes are kept. Groups in flight are issued again, so they do not count.
        """
        state: dict[str, Any] = {**asdict(self.counts), "published": self._last_due}  # a resumed run begins with a sync
        # A depth that adapts may have been larger when the running groups were admitted. With this one the resumed run admits
        # all of them at once; a recording that waited could become too old.
        admitted_steps = (self.counts.accepted + self._running_in_time()) / self.batch_groups
        state["ahead"] = max(self._depth(), admitted_steps - self._last_due - self.weight_sync_interval)
        state["submitted"] -= state["running"]
        state["running"] = 0
        return {**state, "resized": {name: getattr(self, name) for name in _RESIZABLE}} if self._resized else state

    def load_state_dict(self, state: Mapping[str, Any], step: int, buffered: Iterable[BufferedGroup]) -> None:
        """Restore the counts and sizes before ``step``, with the engines about to serve version ``step - 1``.

        Raises:
            StalenessError: the policy cannot keep the bound for the groups of the checkpoint, or their number differs from
                its counts.
        """
        self.counts = RolloutCounts(**{key: state[key] for key in asdict(self.counts) if key in state})
        for name, size in state.get("resized", {}).items():
            setattr(self, name, size)
            self._resized = True
        # Nothing runs after a resume: groups that were in flight are admitted again.
        self._running, self._buffered, self._selected = GroupsByVersion(), GroupsByVersion(), GroupsByVersion()
        for group in buffered:
            self._buffered.add(group.group_index, group.oldest_version)
        if len(self._buffered.versions) != self.counts.buffered:
            raise StalenessError(
                f"the checkpoint counts {self.counts.buffered} finished groups and contains {len(self._buffered.versions)}; "
                "remove it to resume from an older one"
            )
        self.step = step
        self._promised = self.max_staleness_steps
        self._last_due = state["published"]
        if step > self._last_due + self.weight_sync_interval:
            self._last_due = step - 1  # the weight sync was due and failed; the resume makes up for it
        # A version that was not due opens no admission, although the resumed engines may serve it.
        self._served = self._last_due
        self._sufficient = deque([state.get("ahead", _FIRST_DEPTH)], maxlen=_MEASURED_STEPS)
        self.ahead = self._depth()
        if not self.policy.sustains(self.view()):
            raise StalenessError(
                f"the checkpoint contains finished groups that cannot all be trained within "
                f"max_staleness_steps = {self.max_staleness_steps}; resume with the bound of the original run"
            )
