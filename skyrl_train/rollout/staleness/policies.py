"""Policies for groups that exceed ``max_staleness_steps``: wait, mask, accept or drop.

| policy | what gives way | trained tokens older than S | lost groups |
|---|---|---|---|
| ``wait`` | time: the trainer waits for the slow group | none | none |
| ``mask`` | signal: tokens that are too old get loss mask 0 | none | none |
| ``accept`` | the bound: stale tokens are trained, corrected and counted | yes | none |
| ``drop`` | the group: the next prompt takes its slot | none | groups that finish too late |

To write your own policy, subclass :class:`StalenessPolicy` and set its import path as
``trainer.fully_async.staleness_policy``. Pure: a policy sees numbers of groups by version and returns an answer.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import TYPE_CHECKING

from skyrl_train.algorithms.registry import Registry
from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.errors import ConfigError

if TYPE_CHECKING:  # policies see group indices and versions only
    from skyrl_train.rollout.buffer import BufferedGroup

SETTING = "trainer.fully_async.staleness_policy"


@dataclass(frozen=True, slots=True)
class StalenessView:
    """Numbers of outstanding groups (admitted, neither trained nor selected for this step) by version.

    Valid only during a call; do not keep it. The version of a running group is the one of its admission, which is never newer
    than its oldest token.

    Attributes:
        step: t, the step that trains next.
        batch_groups: B.
        slots: free batch slots of step t.
        max_staleness_steps: S.
        running: number of running groups by version.
        finished: number of finished groups by version.
    """

    step: int
    batch_groups: int
    slots: int
    max_staleness_steps: int
    running: Mapping[int, int]
    finished: Mapping[int, int]

    def deadline(self, version: int) -> int:
        """Return the last step in which a group with this oldest version keeps the bound."""
        return version + self.max_staleness_steps + 1

    def with_running(self, version: int) -> StalenessView:
        """Return the view after a group is admitted under ``version``."""
        return replace(self, running=Counter(self.running) + Counter({version: 1}))

    @property
    def feasible(self) -> bool:
        """True if every outstanding group fits into the steps from ``t`` until its deadline, in any order of finishing.

        For every deadline ``d >= t``, at most ``(d - t) * B + slots`` groups have to train by then. No deadline has passed.
        """
        outstanding = Counter(self.running) + Counter(self.finished)
        versions = sorted(outstanding)
        # For each version: the groups whose deadline is at most the version's.
        due = accumulate(outstanding[version] for version in versions)
        return all(
            self.deadline(version) >= self.step
            and groups <= (self.deadline(version) - self.step) * self.batch_groups + self.slots
            for version, groups in zip(versions, due, strict=True)
        )


class StalenessPolicy:
    """The decisions that the staleness manager asks for. The defaults train stale groups; override what should differ.

    Attributes:
        bounded: promises that no token older than S is trained; the manager checks it before each update.
    """

    bounded: bool = False

    def depth(self, view: StalenessView, generate_ahead_steps: float, weight_sync_interval: int) -> float:
        """Return the steps that generation may run ahead until the next weight sync: 0 to ``generate_ahead_steps``.

        Called when the engines begin to serve a version that was due, with the depth of the settings, or the adapted one.
        Until the first such call, and after a resume or a resize, that is the depth.
        """
        return generate_ahead_steps

    def admit(self, view: StalenessView, version: int) -> bool:
        """Return whether a group whose first tokens have ``version`` may start.

        Called for groups with recorded tokens that are older than the served policy. False discards the tokens, not the group.
        """
        return True

    def must_wait(self, view: StalenessView, slots: int) -> bool:
        """Return whether the trainer has to wait rather than fill this many slots of the step with finished groups.

        Must be monotonic: if it is False for a number, it is False for every smaller one.
        """
        return False

    def select(self, view: StalenessView, finished: Sequence[BufferedGroup]) -> Sequence[BufferedGroup]:
        """Order finished groups for selection: earliest deadline first, ties by group index."""
        return sorted(finished, key=lambda group: (group.oldest_version, group.group_index))

    def evict(self, view: StalenessView, version: int) -> bool:
        """Return whether to give up outstanding groups of this version: cancel running ones, remove buffered ones."""
        return False

    def sustains(self, view: StalenessView) -> bool:
        """Return whether the promise can be kept for all outstanding groups. Called when a run resumes and when S changes."""
        return True

    def oldest_trained_version(self, step: int, max_staleness_steps: int) -> int | None:
        """Sampled tokens of older versions get loss mask 0 in ``step``; None: all are trained. Any thread."""
        return None


STALENESS_POLICIES: Registry[type[StalenessPolicy]] = Registry(SETTING)
register_staleness_policy = STALENESS_POLICIES.register
"""Decorator ``@register_staleness_policy("name")`` of a subclass of :class:`StalenessPolicy`, which is made without arguments."""


@STALENESS_POLICIES.register("accept")
class AcceptPolicy(StalenessPolicy):
    """The bound gives way: a late group is trained, corrected by its log-probs, and counted."""


@STALENESS_POLICIES.register("wait")
class WaitPolicy(StalenessPolicy):
    """Time gives way: the trainer waits until the remaining groups can still meet every deadline."""

    bounded = True

    def admit(self, view: StalenessView, version: int) -> bool:
        return view.with_running(version).feasible

    def must_wait(self, view: StalenessView, slots: int) -> bool:
        """With the earliest deadlines selected, the remaining groups are feasible if and only if the running ones are."""
        return not replace(view, slots=view.slots - slots, finished={}).feasible

    def sustains(self, view: StalenessView) -> bool:
        return view.feasible


@STALENESS_POLICIES.register("mask")
class MaskPolicy(StalenessPolicy):
    """The signal gives way: no group waits and none is lost, but tokens that are too old do not train.

    A group with only such tokens still takes its slot: its samples contribute to the baseline and to the denominator of the
    loss, as if a correction had rejected their tokens.
    """

    bounded = True

    def oldest_trained_version(self, step: int, max_staleness_steps: int) -> int | None:
        return step - 1 - max_staleness_steps


@STALENESS_POLICIES.register("drop")
class DropPolicy(StalenessPolicy):
    """The group gives way: it is cancelled or removed after its deadline, and the next prompt takes its slot.

    Prompts with long responses are lost more often than others; the number of dropped groups shows how many.
    """

    bounded = True

    def admit(self, view: StalenessView, version: int) -> bool:
        return not self.evict(view, version)

    def evict(self, view: StalenessView, version: int) -> bool:
        return view.deadline(version) < view.step


def resolve_staleness_policy(name: str) -> StalenessPolicy:
    """Return the policy with this name, or an instance of the class at an import path (``package.module:Class``).

    Raises:
        ConfigError: the name is unknown, cannot be imported, or is no :class:`StalenessPolicy`.
    """
    if not is_import_path(name):
        return STALENESS_POLICIES.get(name)()
    policy_class = import_name(name, SETTING)
    if not (isinstance(policy_class, type) and issubclass(policy_class, StalenessPolicy)):
        raise ConfigError(f"{SETTING}={name!r} is not a subclass of {StalenessPolicy.__module__}.StalenessPolicy.")
    try:
        return policy_class()
    except TypeError as error:
        raise ConfigError(f"{SETTING}={name!r} must be constructible without arguments: {error}.") from error
