"""The rollout plane of a trainer: from the prompts to the finished groups that wait to be trained.

    prompts ──> workers (admitted by staleness) ──> runner: generator, stages ──> buffer ──choose──> a step ──trained
                      ^                                                                                        │
                      └──────────────── capacity, as steps are trained and versions published ─────────────────┘

It runs on the trainer's event loop and knows neither updates nor publications: the trainer tells it of them.
"""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from skyrl_train.concurrency import Signal, close_within
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.rollout.buffer import BufferedGroup, RolloutBuffer
from skyrl_train.rollout.dataloader import build_loader
from skyrl_train.rollout.filters import make_filter
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.logprob_stages import backend_stages
from skyrl_train.rollout.runner import GroupRunner
from skyrl_train.rollout.stages import StagePipeline
from skyrl_train.rollout.staleness import StalenessManager
from skyrl_train.rollout.stragglers import resolve_straggler_policy
from skyrl_train.rollout.workers import GenerationWorkers
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.thread import TrainingThread

CLOSE_LIMIT_S = 30.0  # what a generator may take to close


class RolloutPlane:
    """Generates groups, and holds them until they are trained.

    Args:
        training: where the stages run that compute in the training backend.
        changed: see :class:`GenerationWorkers`.
        on_group_end: called when a group has ended, whatever became of it.

    Attributes:
        prompts: the data loader, with its ledger of what became of each ordinal.
        staleness: who may be admitted and trained.
        buffer: finished groups, untrained.
        stages: what a group goes through between its generation and the buffer.
        runner: generates one group.
        workers: the tasks that run groups.
    """

    def __init__(
        self,
        config: RunConfig,
        plan: Plan,
        parts: TrainerParts,
        training: TrainingThread,
        *,
        changed: Signal,
        on_group_end: Callable[[], None],
    ) -> None:
        trainer = config.trainer
        self._parts = parts
        self._changed = changed
        self._batch_groups = plan.policy_mini_batch_size
        self.prompts = build_loader(parts.dataset, config.data, trainer.seed)
        self.staleness = _staleness(plan)
        self.buffer = RolloutBuffer(config.rollout.buffer_memory_bytes, parts.spill_folder)
        self.stages = _stages(config, parts, training)
        self.runner = GroupRunner(
            parts.generator,
            self.prompts,
            parts.client,
            trainer.failures,
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling_params=asdict(config.generator.sampling_params),
            env_class=config.environment.env_class,
            seed=trainer.seed,
            recordings=parts.client.recordings,
            stages=self.stages,
            on_failure=parts.reporter.attempt_failed,
        )
        self.workers = GenerationWorkers(
            self.runner,
            self.prompts,
            self.staleness,
            self.buffer,
            trainer.failures,
            policy_version=lambda: parts.client.policy_version,
            changed=changed,
            admission_version=self._admission_version,
            signal_filter=make_filter(trainer.algorithm, trainer.policy_mini_batch_size),
            on_group_end=on_group_end,
        )

    async def start(self) -> None:
        """Starts generator and data loader; no group is generated yet."""
        self._parts.generator.pace(lambda: not self.staleness.budget_spent)
        await self._parts.generator.start()
        await self.prompts.start(self._changed.notify)

    @property
    def out_of_prompts(self) -> bool:
        """Whether the data has ended and all minibatches that it fills are trained; a smaller rest is left over."""
        left = self.staleness.counts.running + len(self.buffer)
        return self.workers.exhausted and left < self._batch_groups

    def choose(self, committed: Collection[int] = (), at_least: int | None = None) -> list[BufferedGroup] | None:
        """The finished groups that the next step takes now, in ordinal order; None while there are too few of them.

        Args:
            committed: the ordinals that the step has already.
            at_least: groups that are enough; None: all that the step lacks.
        """
        missing = self._batch_groups - len(committed)
        enough = missing if at_least is None else min(at_least, missing)
        if len(self.buffer) - len(committed) < enough:  # asked after each group that ends, with thousands in flight
            return None
        free = (group for group in self.buffer if group.ordinal not in committed)
        return self.staleness.select(free, committed=len(committed), at_least=at_least)

    def trained(self, batch: Sequence[RolloutGroup]) -> None:
        """The policy was updated with ``batch``, which leaves the buffer."""
        self.buffer.take(batch)
        self.staleness.train(batch)
        self.prompts.settle([group.ordinal for group in batch], "trained", batch)

    def resize(
        self,
        *,
        max_staleness_steps: int | None = None,
        pipeline_depth: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Changes S, D or W while the run goes on; from the control loop. None: as it is. A checkpoint remembers it.

        Raises:
            ValueError, StalenessError: see :meth:`StalenessManager.resize`; nothing has changed.
        """
        self.staleness.resize(
            max_staleness_steps=max_staleness_steps, pipeline_depth=pipeline_depth, max_running=num_workers
        )
        self.workers.slots.set_capacity(self.staleness.max_running)
        self.workers.drop_overdue()
        self._changed.notify()

    def state_dict(self) -> dict[str, Any]:
        """What a checkpoint holds of it beside its groups and recordings. JSON-able."""
        return {
            "prompts": self.prompts.state_dict(),
            "workers": self.workers.state_dict(),
            "retries": self.runner.retries,
            "counts": self.staleness.state_dict(),
        }

    async def restore(
        self,
        state: Mapping[str, Any],
        groups: Iterable[RolloutGroup],
        recordings: Iterable[Mapping[str, Any]],
        next_step: int,
    ) -> None:
        """Goes on from a checkpoint.

        Args:
            state: as of :meth:`state_dict`; what else it holds is ignored.
            groups: finished ones, untrained.
            recordings: what unfinished groups have sampled.
            next_step: the step that is trained first.

        Raises:
            CheckpointError: it is of another data set or seed.
        """
        await self.buffer.restore(groups)
        self._parts.client.recordings.load(recordings)
        self.prompts.load_state_dict(state["prompts"], buffered=[group.ordinal for group in self.buffer])
        self.workers.load_state_dict(state["workers"])
        self.runner.retries = state.get("retries", 0)  # checkpoints of earlier versions do not have them
        self.staleness.load_state_dict(state["counts"], next_step, self.buffer)
        self.workers.slots.set_capacity(self.staleness.max_running)
        self.workers.drop_overdue()

    @property
    def closings(self) -> tuple[Callable[[], Awaitable[None]], ...]:
        """What closes its parts, in the order in which they end."""
        generator = self._parts.generator
        return (
            self.workers.close,
            self.stages.aclose,
            self.buffer.aclose,
            self.prompts.aclose,
            lambda: close_within(generator.aclose(), "the closing of the generator", CLOSE_LIMIT_S),
        )

    def _admission_version(self, ordinal: int) -> int:
        """The version that a group starts from: the policy's, or that of the oldest token which a checkpoint has of it."""
        now, recordings = self._parts.client.policy_version, self._parts.client.recordings
        recorded = recordings.oldest_version(ordinal)
        if recorded is None:
            return now
        if self.staleness.may_admit(recorded):
            return recorded
        recordings.end(ordinal)  # its tokens are too old to be trained: it begins afresh
        return now


def _staleness(plan: Plan) -> StalenessManager:
    return StalenessManager(
        batch_groups=plan.policy_mini_batch_size,
        max_staleness_steps=plan.max_staleness_steps,
        pipeline_depth=plan.pipeline_depth,
        max_running=plan.num_workers,
        total_steps=plan.total_steps,
        policy=resolve_straggler_policy(plan.straggler_policy),
        steps_per_publication=plan.steps_per_publication,
        overlap=plan.overlap_publication,
    )


def _stages(config: RunConfig, parts: TrainerParts, training: TrainingThread) -> StagePipeline:
    in_backend = backend_stages(
        config,
        reference=lambda sequences: training.run(parts.backend.reference_logprobs, sequences),
        current=lambda sequences: training.run(parts.backend.forward_logprobs, sequences),
    )
    return StagePipeline([*parts.stages, *in_backend])
