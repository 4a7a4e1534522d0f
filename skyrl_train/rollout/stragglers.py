"""What gives way when a group needs more than S steps of time (SEMANTICS 4.2): one small object per answer.

| policy | gives way | trained tokens older than S | groups lost |
|---|---|---|---|
| ``wait`` | time: the trainer waits for the straggler | none | none |
| ``burst`` | time, as under ``wait``; while steps are ready, no group begins | none | none |
| ``mask`` | signal: what is too old has loss mask 0 | none | none |
| ``accept`` | the bound: trained, corrected, counted | yes | none |
| ``drop`` | the group: the next prompt takes its seat | none | those that come too late |

A policy of your own is a subclass of :class:`StragglerPolicy`, named by its import path in
``trainer.fully_async.straggler_policy``. Pure: a policy sees numbers of groups by version and answers.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import Protocol, TypeVar

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.errors import ConfigError

SETTING = "trainer.fully_async.straggler_policy"


class FinishedGroup(Protocol):
    """What selection knows of a group in the buffer."""

    @property
    def ordinal(self) -> int:
        """Its place in the training stream."""

    @property
    def oldest_version(self) -> int:
        """The oldest policy version among its sampled tokens."""


Group = TypeVar("Group", bound=FinishedGroup)


@dataclass(frozen=True, slots=True)
class Outlook:
    """What is outstanding (admitted, and neither trained nor with a seat in this step), by version. Read it, do not keep it.

    The version of a running group is the one it was admitted under, which is never newer than its oldest token.
    """

    step: int  # t, which trains next
    batch_groups: int  # B
    seats: int  # of step t that no group has yet
    max_staleness_steps: int  # S
    running: Mapping[int, int]  # version -> groups
    finished: Mapping[int, int]  # version -> groups

    def deadline(self, version: int) -> int:
        """The last step in which a group with this oldest version keeps the bound."""
        return version + self.max_staleness_steps + 1

    def with_running(self, version: int) -> Outlook:
        """The outlook once a group is admitted under ``version``."""
        return replace(self, running=Counter(self.running) + Counter({version: 1}))

    @property
    def ready(self) -> int:
        """Groups that are finished, with a seat in step ``t`` or without."""
        return sum(self.finished.values()) + self.batch_groups - self.seats

    @property
    def feasible(self) -> bool:
        """Whether the steps from ``t`` on have room for every outstanding group by its deadline, whatever finishes when.

        For every deadline ``d >= t``: at most ``(d - t) * B + seats`` groups have to train by then; for earlier ones, none.
        """
        outstanding = Counter(self.running) + Counter(self.finished)
        versions = sorted(outstanding)
        due = accumulate(outstanding[version] for version in versions)
        return all(
            self.deadline(version) >= self.step
            and groups <= (self.deadline(version) - self.step) * self.batch_groups + self.seats
            for version, groups in zip(versions, due, strict=True)
        )


class StragglerPolicy:
    """The questions that the staleness manager asks. As they stand, the bound gives way; override what should not.

    Attributes:
        bounded: the promise that no token older than S is trained; the manager asserts it when a batch is consumed.
    """

    bounded: bool = False

    def depth(self, outlook: Outlook, pipeline_depth: float, steps_per_publication: int) -> float:
        """Steps that generation may run ahead until the next publication: 0 to ``pipeline_depth``.

        Asked when a version that was due begins to be served. At the start, after a resume and after a resize it is
        ``pipeline_depth`` until then.
        """
        return pipeline_depth

    def admit(self, outlook: Outlook, version: int) -> bool:
        """Whether a group whose first tokens are of ``version`` may begin. Asked where it has recorded tokens that are
        older than the published policy; a refusal costs the recording, not the group."""
        return True

    def must_wait(self, outlook: Outlook, seats: int) -> bool:
        """Whether the trainer has to wait rather than give so many seats of this step to finished groups.

        Where it need not wait with some number, it must not have to with a smaller one.
        """
        return False

    def select(self, outlook: Outlook, finished: Sequence[Group]) -> Sequence[Group]:
        """The finished groups in the order in which they should take seats: earliest deadline first, ties by ordinal."""
        return sorted(finished, key=lambda group: (group.oldest_version, group.ordinal))

    def evict(self, outlook: Outlook, version: int) -> bool:
        """Whether an outstanding group of this version is given up: cancelled if it runs, taken out of the buffer if not."""
        return False

    def sustains(self, outlook: Outlook) -> bool:
        """Whether the promise can be kept for all that is outstanding; asked when a run resumes and when S changes."""
        return True

    def oldest_trained_version(self, step: int, max_staleness_steps: int) -> int | None:
        """Sampled tokens of older versions get loss mask 0 in ``step``; None: all are trained. Any thread."""
        return None


STRAGGLER_POLICIES: Registry[type[StragglerPolicy]] = Registry(SETTING)


@STRAGGLER_POLICIES.register("accept")
class AcceptPolicy(StragglerPolicy):
    """The bound gives way: a late group is trained, corrected by its log-probs, and counted."""


@STRAGGLER_POLICIES.register("wait")
class WaitPolicy(StragglerPolicy):
    """Time gives way: the trainer waits until what it leaves behind can still meet every deadline."""

    bounded = True

    def admit(self, outlook: Outlook, version: int) -> bool:
        return outlook.with_running(version).feasible

    def must_wait(self, outlook: Outlook, seats: int) -> bool:
        """With the earliest deadlines chosen, the groups left behind are feasible if and only if the running ones are."""
        return not replace(outlook, seats=outlook.seats - seats, finished={}).feasible

    def sustains(self, outlook: Outlook) -> bool:
        return outlook.feasible


@STRAGGLER_POLICIES.register("burst")
class BurstPolicy(WaitPolicy):
    """``wait``, but while enough steps are ready to be trained without waiting, no new group begins.

    What begins while the trainer goes on without waiting is what it waits for later: a straggler among the groups of each
    version, one after the other. Held back until the trainer needs them, the groups of several steps begin together, and it
    waits for all their stragglers at once. That pays where a response takes several times the S steps; elsewhere generation
    idles for nothing, now and then. Of no effect with D = 0.
    """

    def depth(self, outlook: Outlook, pipeline_depth: float, steps_per_publication: int) -> float:
        """0 if the groups of the steps up to the next publication, and of S / 2 steps, are ready, and no such step waits."""
        enough = max(steps_per_publication, outlook.max_staleness_steps / 2) * outlook.batch_groups
        last = replace(outlook, step=outlook.step + steps_per_publication - 1, seats=outlook.batch_groups)
        return 0 if outlook.ready >= enough and not self.must_wait(last, last.seats) else pipeline_depth


@STRAGGLER_POLICIES.register("mask")
class MaskPolicy(StragglerPolicy):
    """The signal gives way: no group waits and none is lost, but tokens that are too old do not train.

    A group of nothing but such tokens still takes its seat: its samples set the baseline and count in the denominator of
    the loss, as if a correction had rejected their tokens (SEMANTICS 7.3).
    """

    bounded = True

    def oldest_trained_version(self, step: int, max_staleness_steps: int) -> int | None:
        return step - 1 - max_staleness_steps


@STRAGGLER_POLICIES.register("drop")
class DropPolicy(StragglerPolicy):
    """The group gives way: it is cancelled or thrown away once its deadline has passed, and the next prompt is drawn.

    Prompts with long responses are lost more often than others, which the count of dropped groups shows.
    """

    bounded = True

    def admit(self, outlook: Outlook, version: int) -> bool:
        return not self.evict(outlook, version)

    def evict(self, outlook: Outlook, version: int) -> bool:
        return outlook.deadline(version) < outlook.step


def resolve_straggler_policy(name: str) -> StragglerPolicy:
    """The policy of that name, or of the class that an import path names (``package.module:Class``).

    Raises:
        ConfigError: unknown, cannot be imported, or no :class:`StragglerPolicy`.
    """
    if not is_import_path(name):
        return STRAGGLER_POLICIES.get(name)()
    policy_class = import_name(name, SETTING)
    if not (isinstance(policy_class, type) and issubclass(policy_class, StragglerPolicy)):
        raise ConfigError(f"{SETTING}={name!r} is no subclass of {StragglerPolicy.__module__}.StragglerPolicy.")
    try:
        return policy_class()
    except TypeError as error:
        raise ConfigError(f"{SETTING}={name!r}: a policy is made without arguments ({error}).") from error
