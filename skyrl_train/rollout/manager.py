"""The rollout side of a trainer: from the prompts to finished groups that wait to be trained.

    prompts ──> dispatcher (admission by staleness) ──> group generator, stages ──> buffer ──choose──> a step
                      ^                                                                                  │
                      └──────── capacity, as steps are trained and weights are synced ───────────────────┘

Runs on the trainer's event loop. The trainer reports updates and weight syncs; this module starts neither.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import RunConfig
from skyrl_train.events.log import EventLog
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.observability.failures import OnFailure
from skyrl_train.rollout.buffer import BufferedGroup, RolloutBuffer
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.rollout.data.loader import build_loader
from skyrl_train.rollout.dispatcher import Dispatcher
from skyrl_train.rollout.filters import make_filter
from skyrl_train.rollout.group_generator import GroupGenerator
from skyrl_train.rollout.stages.pipeline import Stage, StagePipeline
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy
from skyrl_train.runtime.concurrency import Signal, close_within
from skyrl_train.types import RolloutGroup

if TYPE_CHECKING:  # imports torchdata, which only a streaming run needs
    from skyrl_train.rollout.data.streaming import StreamingPrompts

CLOSE_LIMIT_S = 30.0  # time limit for closing a generator


class RolloutManager:
    """Generates groups and holds them until they are trained.

    Args:
        stages: steps between generation and the buffer, in their order.
        spill_folder: for finished groups beyond ``rollout.buffer_memory_bytes``.
        changed: see :class:`Dispatcher`.
        on_group_end: called when a group has ended with any outcome.
        on_attempt_failed: see :class:`GroupGenerator`.
        events: the record of the run.

    Attributes:
        prompts: the data loader, with the ledger of all group indices.
        staleness: decides which groups may be admitted and trained.
        buffer: finished, untrained groups.
        stages: pipeline between generation and the buffer.
        group_generator: generates one group.
        dispatcher: the tasks that run groups.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        *,
        dataset: PromptDataset | StreamingPrompts,
        generator: GeneratorInterface,
        client: InferenceEngineClient,
        stages: Sequence[Stage],
        spill_folder: Path | None,
        changed: Signal,
        on_group_end: Callable[[], None],
        on_attempt_failed: OnFailure,
        clock: Callable[[], float],
        events: EventLog,
    ) -> None:
        trainer = config.trainer
        self._generator = generator
        self._client = client
        self._changed = changed
        self._events = events
        self._batch_groups = plan.policy_mini_batch_size
        self.prompts = build_loader(dataset, config.data, trainer.seed)
        self.staleness = StalenessManager(
            batch_groups=plan.policy_mini_batch_size,
            max_staleness_steps=plan.max_staleness_steps,
            generate_ahead_steps=plan.generate_ahead_steps,
            max_running=plan.num_workers,
            total_steps=plan.total_steps,
            policy=resolve_staleness_policy(plan.staleness_policy),
            weight_sync_interval=plan.weight_sync_interval,
            overlap=plan.overlap_weight_sync,
        )
        self.buffer = RolloutBuffer(config.rollout.buffer_memory_bytes, spill_folder)
        self.stages = StagePipeline(stages, events=events)
        self.group_generator = GroupGenerator(
            generator,
            self.prompts.source,
            client,
            trainer.failures,
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling_params=asdict(config.generator.sampling_params),
            env_class=config.environment.env_class,
            seed=trainer.seed,
            replay_cache=client.replay_cache,
            stages=self.stages,
            on_failure=on_attempt_failed,
            events=events,
            clock=clock,
        )
        self.dispatcher = Dispatcher(
            self.group_generator,
            self.prompts,
            self.staleness,
            self.buffer,
            trainer.failures,
            admission_version=self._admission_version,
            changed=changed,
            signal_filter=make_filter(trainer.algorithm, trainer.policy_mini_batch_size),
            on_group_end=on_group_end,
            events=events,
        )

    async def start(self) -> None:
        """Start the generator and the data loader. No group is generated yet."""
        # More sessions would only age in the buffer once enough groups have finished.
        self._generator.pace(lambda: not self.staleness.budget_spent)
        await self._generator.start()
        await self.prompts.source.start(self._changed.notify)

    @property
    def out_of_prompts(self) -> bool:
        """True if the data has ended and all full minibatches are trained. A smaller rest stays untrained."""
        left = self.staleness.counts.running + len(self.buffer)
        return self.dispatcher.exhausted and left < self._batch_groups

    def choose(self, committed: Collection[int] = (), at_least: int | None = None) -> list[BufferedGroup] | None:
        """Take the finished groups that the next step may train now, ordered by group index.

        Args:
            committed: group indices that the step already has.
            at_least: fewest groups to return; None: all that the step lacks.

        Returns:
            None: too few groups may be trained.
        """
        missing = self._batch_groups - len(committed)
        enough = missing if at_least is None else min(at_least, missing)
        if len(self.buffer) - len(committed) < enough:  # cheap test first: this runs after each group that ends
            return None
        free = (group for group in self.buffer if group.group_index not in committed)
        return self.staleness.select(free, committed=len(committed), at_least=at_least)

    def expected_batch(self) -> list[RolloutGroup] | None:
        """Return the groups that the next step will train, ordered by group index, while the current one trains.

        None: it is not settled yet, or some of them are on disk.
        """
        expected = self.staleness.expected(self.buffer) or ()
        groups = [group for group in expected if isinstance(group, RolloutGroup)]
        return groups if groups and len(groups) == len(expected) else None

    def mark_trained(self, batch: Sequence[RolloutGroup]) -> None:
        """Record that the policy was updated with ``batch``, and remove it from the buffer."""
        self.buffer.take(batch)
        step, oldest = self.staleness.step, self.staleness.oldest_trained_version or 0
        self._events.record(
            "trained",
            step=step,
            groups=[group.group_index for group in batch],
            lags=[group.lag(step) for group in batch],
            masked=[
                sum(int((sample.sampled_versions < oldest).sum()) for sample in group.samples)
                if group.oldest_version < oldest
                else 0
                for group in batch
            ],
        )
        self.staleness.train(batch)
        # The stand-in for a failed group has no samples from which a sampler could learn.
        sampled = [group for group in batch if not group.masked]
        self.prompts.settle([group.group_index for group in batch], "trained", sampled)

    def discard_finished(self) -> None:
        """Forget all groups that have finished and are not trained, also those that finish from now on: after a resume, their
        prompts are generated again."""
        self.dispatcher.discard_finished()

    def served(self, version: int) -> None:
        """Record that all engines serve ``version``. The depth may change, and the slots of generation with it.

        Raises:
            StalenessError: see :meth:`StalenessManager.served`.
        """
        self.staleness.served(version)
        self.dispatcher.slots.set_capacity(self.staleness.generation_slots)

    def resize(
        self,
        *,
        max_staleness_steps: int | None = None,
        generate_ahead_steps: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Change S, D or W during the run; call it from the control loop. None keeps a value. Checkpoints remember it.

        Raises:
            ValueError, StalenessError: see :meth:`StalenessManager.resize`; nothing has changed.
        """
        self.staleness.resize(
            max_staleness_steps=max_staleness_steps, generate_ahead_steps=generate_ahead_steps, max_running=num_workers
        )
        self.dispatcher.slots.set_capacity(self.staleness.generation_slots)
        # A smaller bound may have made groups overdue.
        self.dispatcher.drop_overdue()
        self._changed.notify()

    def state_dict(self) -> dict[str, Any]:
        """Return the JSON-able state for a checkpoint, without groups and replay cache."""
        return {
            "prompts": self.prompts.state_dict(),
            "workers": {"failed_and_masked": self.dispatcher.failed_and_masked},
            "retries": self.group_generator.retries,
            "counts": self.staleness.state_dict(),
        }

    async def restore(
        self,
        state: Mapping[str, Any],
        groups: Iterable[RolloutGroup],
        replay_cache: Iterable[Mapping[str, Any]],
        next_step: int,
    ) -> None:
        """Restore a checkpoint.

        Args:
            state: from :meth:`state_dict`; other entries are ignored.
            groups: finished, untrained groups.
            replay_cache: tokens that unfinished groups have sampled.
            next_step: the step that trains next.

        Raises:
            CheckpointError: the checkpoint belongs to another data set or seed.
        """
        # Groups first: the ledger and the counts below need to know which group indices are buffered.
        await asyncio.to_thread(self.buffer.restore, groups)
        self._client.replay_cache.load(replay_cache)
        self.prompts.load_state_dict(state["prompts"], buffered=[group.group_index for group in self.buffer])
        self.dispatcher.failed_and_masked = state["workers"]["failed_and_masked"]
        self.group_generator.retries = state.get("retries", 0)  # absent in checkpoints of earlier versions
        self.staleness.load_state_dict(state["counts"], next_step, self.buffer)
        self.dispatcher.slots.set_capacity(self.staleness.generation_slots)
        restored = {group.group_index: group.oldest_version for group in self.buffer}
        self._events.record("restored", groups=list(restored), versions=list(restored.values()))
        # The bound may be smaller than the one of the interrupted run.
        self.dispatcher.drop_overdue()

    @property
    def closings(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """The functions that close the parts, in their order."""
        return (
            # Producers first: no group may finish when its stages or the buffer are closed.
            self.dispatcher.close,
            self.stages.aclose,
            self.buffer.aclose,
            self.prompts.source.aclose,
            lambda: close_within(self._generator.aclose(), "the closing of the generator", CLOSE_LIMIT_S),
        )

    def _admission_version(self, group_index: int) -> int:
        """Return the version that a group starts from: the policy's, or the oldest token's that a checkpoint has of it."""
        now, replay_cache = self._client.policy_version, self._client.replay_cache
        recorded = replay_cache.oldest_version(group_index)
        if recorded is None:
            return now
        if self.staleness.may_admit(recorded):
            self._events.record("replayed", group=group_index, oldest=recorded)
            return recorded
        replay_cache.end(group_index)  # the recorded tokens are too old to train: the group starts from scratch
        return now
