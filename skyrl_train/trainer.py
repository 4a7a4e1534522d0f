"""The synchronous trainer, and every phase that other trainers share.

    next_batch ──> update ──> publish ──> report ──> checkpoint
        ^                        │
        └ groups under version t-1   step t = 1, 2, ...

One asyncio loop controls; the backend computes in its own thread, engines in their own processes. A subclass changes when
groups are generated and when engines are interrupted (``start_generation``, ``next_batch``, ``publish``), never what a
step does with its groups.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from skyrl_train.algorithms.kl_control import KlControl
from skyrl_train.checkpoint_saving import POLICY_FOLDER, CheckpointSaving, RolloutSnapshot
from skyrl_train.concurrency import Signal, close_within
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import (
    CheckpointError,
    ConfigError,
    GeneratorOutputError,
    NonFiniteStepsError,
    StalenessError,
)
from skyrl_train.evaluation.engines import SharedEngines
from skyrl_train.evaluation.runner import Evaluation
from skyrl_train.observability.step_metrics import step_metrics
from skyrl_train.publication.deliveries import Deliveries
from skyrl_train.rollout.buffer import BufferedGroup, RolloutBuffer
from skyrl_train.rollout.checkpoint import read_recordings, read_rollout_state
from skyrl_train.rollout.dataloader import build_loader
from skyrl_train.rollout.filters import groups_to_train, make_filter
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.logprob_stages import backend_stages
from skyrl_train.rollout.reward_stage import RewardStage
from skyrl_train.rollout.runner import GroupRunner
from skyrl_train.rollout.stages import StagePipeline
from skyrl_train.rollout.staleness import StalenessManager
from skyrl_train.rollout.stragglers import resolve_straggler_policy
from skyrl_train.rollout.watchdog import LoopMonitor, Phase, Watchdog
from skyrl_train.rollout.workers import GenerationWorkers
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.minibatch import build_minibatch, kl_to_reference
from skyrl_train.training.nonfinite import NonFiniteSteps

if TYPE_CHECKING:  # it imports torchdata, which only a streaming run needs
    pass

logger = logging.getLogger(__name__)
T = TypeVar("T")

CLOSE_LIMIT_S = 30.0  # what a generator may take to close


@dataclass(frozen=True)
class TrainedStep:
    """A finished optimizer step: its groups in the order in which they were trained, and what its phases measured."""

    batch: Sequence[RolloutGroup]
    metrics: dict[str, float]


class PPOTrainer:
    """Generates ``train_batch_size`` groups, trains on them minibatch by minibatch, publishes, and only then generates again."""

    def __init__(self, config: RunConfig, plan: Plan, parts: TrainerParts) -> None:
        self.config = config
        self.plan = plan
        self.parts = parts
        self.global_step = 0  # finished optimizer steps; a policy version is the step that it was published after
        self.stop_requested = False
        self.changed = Signal()
        trainer, client = config.trainer, parts.client
        self.phase = Phase(parts.clock, "it starts")
        self.watchdog = Watchdog(trainer.failures.stuck_after_s, parts.clock, self.describe, self._say_stuck)
        self.prompts = build_loader(parts.dataset, config.data, trainer.seed)
        self.buffer = RolloutBuffer(config.rollout.buffer_memory_bytes, parts.spill_folder)
        self.staleness = StalenessManager(
            batch_groups=trainer.policy_mini_batch_size,
            max_staleness_steps=plan.max_staleness_steps,
            pipeline_depth=plan.pipeline_depth,
            max_running=plan.num_workers,
            total_steps=plan.total_steps,
            policy=resolve_straggler_policy(plan.straggler_policy),
            steps_per_publication=plan.steps_per_publication,
            overlap=plan.overlap_publication,
        )
        self.kl_control = KlControl(trainer.algorithm)
        self.nonfinite = NonFiniteSteps(trainer.failures.max_nonfinite_steps)
        in_backend = backend_stages(
            config,
            reference=lambda sequences: self.off_loop(parts.backend.reference_logprobs, sequences),
            current=lambda sequences: self.off_loop(parts.backend.forward_logprobs, sequences),
        )
        self.stages = StagePipeline([*parts.stages, *in_backend])
        self.runner = GroupRunner(
            parts.generator,
            self.prompts,
            client,
            trainer.failures,
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling_params=asdict(config.generator.sampling_params),
            env_class=config.environment.env_class,
            seed=trainer.seed,
            recordings=client.recordings,
            stages=self.stages,
            on_failure=parts.reporter.attempt_failed,
        )
        self.workers = GenerationWorkers(
            self.runner,
            self.prompts,
            self.staleness,
            self.buffer,
            trainer.failures,
            policy_version=lambda: client.policy_version,
            changed=self.changed,
            admission_version=self._admission_version,
            signal_filter=make_filter(trainer.algorithm, trainer.policy_mini_batch_size),
            on_group_end=self.watchdog.progress,
        )
        self.evaluation = Evaluation(
            config,
            parts.evaluation_engines or SharedEngines(parts.generator, client),
            parts.evaluation_prompts,
            sink=parts.reporter,
            changed=self.changed,
            score=next((stage.run for stage in parts.stages if isinstance(stage, RewardStage)), None),
            on_progress=self.watchdog.progress,
            clock=parts.clock,
        )
        self.deliveries = Deliveries(
            parts.publisher,
            client,
            parts.backend.stage,
            hold=self.evaluation.hold,
            served=self._served,
            changed=self.changed,
            clock=parts.clock,
        )
        self.saving = CheckpointSaving(
            parts.checkpoints,
            parts.backend,
            snapshot=lambda: self.off_loop(parts.backend.snapshot),
            collect=self.rollout_snapshot,
            changed=self.changed,
        )
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._weights_in_doubt = False  # an update began and has not ended well
        self._started = False
        self._watching: asyncio.Task[None] | None = None
        self._step_ended = parts.clock()
        self._tokens_reported = 0
        self._reported: dict[str, int] = {}  # of prompts that were not trained, by outcome

    # The loop -----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Trains until the plan's last step or until :meth:`request_stop`; leaves a checkpoint either way.

        Raises:
            Exception: whatever ended a part of the run, as itself. The finished steps are saved, unless it was the update
                that failed: the policy's weights are in doubt then, and the previous checkpoint stands.
            CheckpointError: a checkpoint could not be written; the previous one is untouched.
            NonFiniteStepsError: too many steps were skipped; the checkpoint from before them stands.
        """
        with LoopMonitor(self.config.trainer.failures.stuck_after_s, logger.error):
            await self._train()

    async def _train(self) -> None:
        try:
            await self.start()
            while self.global_step < self.plan.total_steps:
                trained = await self.train_step()
                if trained is None:
                    break
                await self._publish_and_report(trained)
                await self.checkpoint_if_due()
            await self.deliveries.delivered()
            await self.save_checkpoint()
            await self.evaluate_last_policy()
            await self.export_policy()
        except (CheckpointError, NonFiniteStepsError):  # the checkpoint before stands
            raise
        except Exception as error:
            await self._save_what_is_finished(error)
            raise
        finally:
            unclosed = await self.close()
        if unclosed:
            raise unclosed[0]

    async def _publish_and_report(self, trained: TrainedStep) -> None:
        try:
            trained.metrics.update(await self.publish())
        except Exception as error:  # the step is trained all the same
            try:
                self.report(trained)
            except Exception as second:
                error.add_note(f"The step could not be reported either: {second!r}")
            raise
        self.report(trained)
        self.nonfinite.observe(self.global_step, trained.metrics)

    async def _save_what_is_finished(self, error: Exception) -> None:
        if self._weights_in_doubt or not self._started:
            return
        try:
            await self.save_checkpoint()
        except Exception as second:  # whatever it is, the first one is why the run ends
            error.add_note(f"The steps since the last checkpoint could not be saved either: {second}")

    def request_stop(self) -> None:
        """Stops admitting; :meth:`train` finishes the step it is in, writes a checkpoint and returns."""
        self.stop_requested = True
        self.workers.stop_admitting()
        self.evaluation.stop()

    def resize(
        self,
        *,
        max_staleness_steps: int | None = None,
        pipeline_depth: float | None = None,
        num_workers: int | None = None,
    ) -> None:
        """Changes S, D or W while the run goes on; from the control loop. None: as it is. A checkpoint does not remember it.

        Raises:
            ValueError, StalenessError: see :meth:`StalenessManager.resize`; nothing has changed.
        """
        self.staleness.resize(
            max_staleness_steps=max_staleness_steps, pipeline_depth=pipeline_depth, max_running=num_workers
        )
        self.workers.slots.set_capacity(self.staleness.max_running)
        self.workers.drop_overdue()
        self.changed.notify()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train: the plan's last step is done, or the data has ended."""
        return self.global_step >= self.plan.total_steps or self.out_of_prompts

    @property
    def out_of_prompts(self) -> bool:
        """Whether the data has ended and all minibatches that it fills are trained; a smaller rest is left over."""
        left = self.staleness.counts.running + len(self.buffer)
        return self.workers.exhausted and left < self.config.trainer.policy_mini_batch_size

    # Phases -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restores the last checkpoint, if there is one, and brings its weights to the engines."""
        folder = await asyncio.to_thread(self.parts.checkpoints.latest)
        if folder is not None:
            await self.load_checkpoint(folder)
        await self.deliveries.publish(self.global_step)
        self.parts.generator.pace(lambda: not self.staleness.budget_spent)
        await self.parts.generator.start()
        await self.prompts.start(self.changed.notify)
        self.parts.reporter.begin(self.global_step)
        await self.evaluation.start(self.global_step, self.parts.reporter.evaluated_steps)
        self._step_ended = self.parts.clock()
        self.workers.slots.take_idle_fraction()  # start-up is not idleness
        self._started = True
        self._watching = asyncio.create_task(self.watchdog.run(), name="watchdog")
        self.start_generation()

    def _admission_version(self, ordinal: int) -> int:
        """The version that a group starts from: the policy's, or that of the oldest token which a checkpoint has of it."""
        now, recorded = self.parts.client.policy_version, self.parts.client.recordings.oldest_version(ordinal)
        if recorded is None:
            return now
        if self.staleness.may_admit(recorded):
            return recorded
        self.parts.client.recordings.end(ordinal)  # its tokens are too old to be trained: it begins afresh
        return now

    def start_generation(self) -> None:
        """Called once the engines serve. The synchronous trainer generates only when it needs a batch."""

    async def train_step(self) -> TrainedStep | None:
        """One optimizer step on a whole batch; None when the run was asked to stop."""
        waiting_since = self.parts.clock()
        self.phase.enter(f"step {self.global_step + 1} waits for groups")
        chosen = await self.next_batch()
        if chosen is None:
            return None
        self.phase.enter(f"step {self.global_step + 1} trains")
        batch = await self.buffer.load(chosen)
        started = self.parts.clock()
        metrics = await self.compute(self._update, batch)
        times = {"time/wait_for_batch": started - waiting_since, "time/train": self.parts.clock() - started}
        return self.book(batch, {**metrics, **times})

    async def next_batch(self) -> list[BufferedGroup] | None:
        """The groups of the next step in ordinal order; None when the run was asked to stop.

        Consumes capacity; waits for a whole batch to be generated; unblocked by its last group; produces the batch.
        """
        await self.workers.fill()
        self.raise_if_failed()
        if self.stop_requested:
            return None
        batch = self.staleness.select(self.buffer)
        if batch is None and not self.out_of_prompts:
            raise StalenessError(f"step {self.staleness.step} has no full batch after all groups have ended")
        return batch

    async def wait_for_groups(
        self, committed: Sequence[RolloutGroup] = (), at_least: int | None = None
    ) -> list[BufferedGroup] | None:
        """Finished groups for the next step, which has ``committed`` already; None when the run was asked to stop.

        Consumes finished groups; waits until ``at_least`` of them (by default: all that the step lacks) may be trained;
        unblocked by a group that finishes or fails, and by a publication; produces the groups in ordinal order.
        """
        chosen: list[BufferedGroup] | None = None
        taken = {group.ordinal for group in committed}
        missing = self.config.trainer.policy_mini_batch_size - len(taken)
        enough = missing if at_least is None else min(at_least, missing)

        def ready() -> bool:
            nonlocal chosen
            if self.stop_requested or self._failure() is not None:
                return True
            if len(self.buffer) - len(taken) < enough:  # asked after each group that ends, with thousands in flight
                return self.out_of_prompts
            free = (group for group in self.buffer if group.ordinal not in taken)
            chosen = self.staleness.select(free, committed=len(taken), at_least=at_least)
            return chosen is not None or self.out_of_prompts

        await self.changed.wait_until(ready)
        self.raise_if_failed()
        return None if self.stop_requested else chosen

    def _update(self, batch: Sequence[RolloutGroup]) -> dict[str, float]:
        return self.parts.backend.update(self.minibatch(batch))

    def minibatch(self, groups: Sequence[RolloutGroup]) -> Minibatch:
        """What the backend trains on of these groups of the step."""
        self.staleness.assert_bound(groups)
        algorithm = self.config.trainer.algorithm
        trained = groups_to_train(groups, algorithm, seed=self.config.trainer.seed, step=self.global_step + 1)
        if self.kl_control.observes:
            self.kl_control.observe(*kl_to_reference(trained, algorithm))
        return build_minibatch(
            trained,
            self.global_step + 1,
            algorithm,
            oldest_trained_version=self.staleness.oldest_trained_version,
            kl_factor=self.kl_control.factor,
        )

    def book(self, batch: Sequence[RolloutGroup], metrics: dict[str, float]) -> TrainedStep:
        """The policy was updated with ``batch``. At one instant of the loop, and only now: an update that fails leaves its
        groups where they were."""
        self.buffer.take(batch)
        self.staleness.train(batch)
        self.prompts.settle([group.ordinal for group in batch], "trained", batch)
        self.global_step += 1
        self.watchdog.progress()
        return TrainedStep(batch, metrics | self.kl_control.step_ended())

    async def publish(self) -> dict[str, float]:
        """Sends the new weights on their way to the engines if that is due; returns when the next step may begin.

        Where publications overlap, that is once the weights are copied; the times are then those of the version before.
        """
        self.phase.enter(f"version {self.global_step} is published")
        due, metrics = self.staleness.publication_due, {}
        self.staleness.advance()
        await self.evaluation.trained(self.global_step)
        if due:
            metrics = await self.deliveries.begin(self.global_step)
            if not self.plan.overlap_publication:
                metrics = await self.deliveries.delivered()
        self.workers.drop_overdue()
        self.changed.notify()
        return metrics

    async def _served(self, version: int) -> None:
        self.staleness.published(version)
        await self.evaluation.served(version)

    def report(self, trained: TrainedStep) -> None:
        """Writes the step's metrics and samples, and refreshes the screen."""
        now = self.parts.clock()
        step_s, self._step_ended = now - self._step_ended, now
        tokens, self._tokens_reported = (
            self.parts.client.generated_tokens - self._tokens_reported,
            self.parts.client.generated_tokens,
        )
        trained.metrics.update(self.stages.take_metrics())
        full = step_metrics(
            self.global_step,
            trained.batch,
            trained.metrics,
            counts=self.staleness.counts,
            totals={
                "async/failed_and_masked": self.workers.failed_and_masked,
                "async/engine_failures": self.runner.engine_failures,
                "async/retries": self.runner.retries,
                **self.parts.client.recordings.metrics(),
            },
            max_staleness_steps=self.staleness.max_staleness_steps,
            step_s=step_s,
            idle_fraction=self.workers.slots.take_idle_fraction(),
            generated_tokens=tokens,
        )
        self.parts.reporter.step(
            self.global_step,
            trained.batch,
            full,
            decode=self.parts.client.decode,
            untrained=self._newly_untrained(),
            checkpoint_step=self.saving.step,
        )

    def _newly_untrained(self) -> dict[str, list[int]]:
        """The ordinals that failed, were filtered or dropped since the last call."""
        lists = {"failed": self.prompts.failed, "filtered": self.prompts.filtered, "dropped": self.prompts.dropped}
        new = {outcome: ordinals[self._reported.get(outcome, 0) :] for outcome, ordinals in lists.items()}
        self._reported = {outcome: len(ordinals) for outcome, ordinals in lists.items()}
        return new

    # Checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint_if_due(self) -> None:
        """Every ``ckpt_interval`` steps, takes a snapshot and writes it while training goes on.

        Not while steps are skipped: the policy may have diverged, and the checkpoint before may be the last good one.
        """
        await self.saving.check()  # a failed write ends the run
        interval = self.config.trainer.ckpt_interval
        if self.nonfinite.in_a_row:
            return
        if interval and self.global_step % interval == 0 and self.global_step < self.plan.total_steps:
            await self.saving.begin()

    async def save_checkpoint(self) -> None:
        """Writes a checkpoint of the current step, unless it is on disk already, and returns when it is."""
        await self.saving.written()
        if self.saving.step != self.global_step or self.global_step < self.plan.total_steps:
            # Within a step, groups finish and fail and unfinished ones sample on: a checkpoint of its beginning is not enough.
            await self.saving.begin()
            await self.saving.written()

    def rollout_snapshot(self) -> RolloutSnapshot:
        """What a checkpoint holds beside the backend's state. At one instant of the loop, so that all of it agrees."""
        state = {
            "global_step": self.global_step,
            "reported": self._reported,
            "prompts": self.prompts.state_dict(),
            "workers": self.workers.state_dict(),
            "retries": self.runner.retries,
            "counts": self.staleness.state_dict(),
            "kl_factor": self.kl_control.factor,
            "nonfinite_in_a_row": self.nonfinite.in_a_row,
        }
        return RolloutSnapshot(self.global_step, state, self.buffer.snapshot(), self.parts.client.recordings.snapshot())

    async def export_policy(self) -> None:
        """Once trained to the end, leaves the policy as a folder that ``transformers`` opens."""
        if self.parts.export_folder is not None and self.finished:
            await self.off_loop(self.parts.backend.export_hf, self.parts.export_folder)

    async def evaluate_last_policy(self) -> None:
        """Once trained to the end, evaluates the last policy, unless that has been done."""
        if self.finished:
            await self.evaluation.hold()
            if self.parts.client.policy_version != self.global_step:  # no publication was due any more
                await self.deliveries.publish(self.global_step)
            await self.evaluation.conclude(self.global_step)

    async def load_checkpoint(self, folder: Path) -> None:
        """Restores a checkpoint.

        Raises:
            CheckpointError: it is of another model, data set or seed, or of a newer format.
        """
        state, groups = await asyncio.to_thread(read_rollout_state, folder)
        recordings = await asyncio.to_thread(read_recordings, folder) if self.config.rollout.replay else []
        await self.off_loop(self.parts.backend.load, folder / POLICY_FOLDER)
        self.global_step = state["global_step"]
        await self.buffer.restore(groups)
        self.parts.client.recordings.load(recordings)
        self.prompts.load_state_dict(state["prompts"], buffered=[group.ordinal for group in self.buffer])
        self.workers.load_state_dict(state["workers"])
        self.runner.retries = state.get("retries", 0)  # checkpoints of earlier versions do not have them
        self.staleness.load_state_dict(state["counts"], self.global_step + 1, self.buffer)
        self.workers.drop_overdue()
        self.saving.step = self.global_step
        self._reported = dict(state.get("reported", {}))
        self.kl_control.factor = float(state.get("kl_factor", 1.0))
        self.nonfinite.in_a_row = int(state.get("nonfinite_in_a_row", 0))

    # The rest -----------------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What the run is busy with, a line each."""
        return [
            self.phase.describe(),
            *self.workers.describe(),
            *self.evaluation.describe(),
            *self.parts.client.describe(),
        ]

    def _say_stuck(self, message: str) -> None:
        logger.warning("%s", message)
        self.parts.reporter.note(message)

    async def compute(self, function: Callable[..., T], *args: Any) -> T:
        """Runs work of the backend that may move the policy; see :meth:`train` for what its failure means."""
        self._weights_in_doubt = True
        try:
            result = await self.off_loop(function, *args)
        except (ConfigError, GeneratorOutputError, StalenessError):  # found before anything moved
            self._weights_in_doubt = False
            raise
        self._weights_in_doubt = False
        return result

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Runs blocking work of the backend in its own thread, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, *args)

    def _failure(self) -> BaseException | None:
        """What stopped a part of the run that works in the background, if anything did."""
        watching = self._watching
        stuck = watching.exception() if watching is not None and watching.done() and not watching.cancelled() else None
        return self.workers.error or self.deliveries.error or self.saving.error or stuck or self.evaluation.error

    def raise_if_failed(self) -> None:
        """Raises what stopped a part of the run that works in the background, if anything did."""
        failure = self._failure()
        if failure is not None:
            raise failure

    async def close(self) -> list[Exception]:
        """Stops generation and engines; waits for a checkpoint that is being written. Every part is closed, whatever the
        others do; returns what they raised."""
        if self._watching is not None:
            self._watching.cancel()
        self.deliveries.cancel()
        parts = self.parts
        errors: list[Exception] = []
        closings: tuple[Callable[[], Awaitable[None]], ...] = (
            self.evaluation.aclose,
            self.workers.close,
            self.stages.aclose,
            self.buffer.aclose,
            self.prompts.aclose,
            lambda: close_within(parts.generator.aclose(), "the closing of the generator", CLOSE_LIMIT_S),
            self.saving.ended,
            self.deliveries.ended,
            parts.client.teardown,
            lambda: asyncio.to_thread(self._compute.shutdown),
            lambda: asyncio.to_thread(parts.backend.close),
        )
        for close in closings:
            try:
                await close()
            except Exception as error:
                logger.exception("a part of the run does not close")
                errors.append(error)
        parts.publisher.close()
        parts.reporter.close()
        return errors
