"""The synchronous trainer, and every phase that other trainers share.

    next_batch ──> update ──> publish ──> report ──> checkpoint
        ^                        │
        └ groups under version t-1   step t = 1, 2, ...

One asyncio loop controls; the backend computes in its own thread, engines in their own processes. A subclass changes when
groups are generated and when engines are interrupted, never what a step does with its groups:

| mode | ``start_generation`` | ``next_batch`` | ``train_step`` | ``publish`` |
|---|---|---|---|---|
| sync | nothing | generates a batch to its last group | updates on the batch | nothing is in flight |
| one_step_off | two batches | the batch of the version before | the same | once the next batch is generated |
| fully_async | for good | groups as they finish, within the bound | the same, or on parts as they come | beside requests |
| partial_rollout | more groups than a batch | the first to finish; interrupts the rest | the same | wakes the engines first |
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence
from pathlib import Path

from skyrl_train.algorithms.kl_control import KlControl
from skyrl_train.checkpoint_saving import POLICY_FOLDER, CheckpointSaving, RolloutSnapshot
from skyrl_train.concurrency import Signal, close_all
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import CheckpointError, NonFiniteStepsError, StalenessError
from skyrl_train.evaluation.engines import SharedEngines
from skyrl_train.evaluation.runner import Evaluation
from skyrl_train.publication.deliveries import Deliveries
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.checkpoint import read_recordings, read_rollout_state
from skyrl_train.rollout.filters import groups_to_train
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.reward_stage import RewardStage
from skyrl_train.rollout.watchdog import LoopMonitor, Phase, Watchdog
from skyrl_train.rollout_plane import RolloutPlane
from skyrl_train.step_reports import StepReports, TrainedStep
from skyrl_train.trainer_parts import TrainerParts
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.minibatch import build_minibatch, kl_to_reference
from skyrl_train.training.nonfinite import NonFiniteSteps
from skyrl_train.training.thread import TrainingThread

logger = logging.getLogger(__name__)


class PPOTrainer:
    """Generates ``train_batch_size`` groups, trains on them minibatch by minibatch, publishes, and only then generates again.

    Attributes:
        global_step: finished optimizer steps; a policy version is the step that it was published after.
        rollout: where groups come from.
        training: where the backend computes.
        deliveries: how versions get to the engines.
        changed: notified after every event that the trainer could wait for.
    """

    def __init__(self, config: RunConfig, plan: Plan, parts: TrainerParts) -> None:
        self.config = config
        self.plan = plan
        self.parts = parts
        self.global_step = 0
        self.stop_requested = False
        self.changed = Signal()
        failures = config.trainer.failures
        self.phase = Phase(parts.clock, "it starts")
        self.watchdog = Watchdog(failures.stuck_after_s, parts.clock, self.describe, self._say_stuck)
        self.training = TrainingThread()
        self.kl_control = KlControl(config.trainer.algorithm)
        self.nonfinite = NonFiniteSteps(failures.max_nonfinite_steps)
        self.rollout = RolloutPlane(
            config, plan, parts, self.training, changed=self.changed, on_group_end=self.watchdog.progress
        )
        self.evaluation = Evaluation(
            config,
            parts.evaluation_engines or SharedEngines(parts.generator, parts.client),
            parts.evaluation_prompts,
            sink=parts.reporter,
            changed=self.changed,
            score=next((stage.run for stage in parts.stages if isinstance(stage, RewardStage)), None),
            on_progress=self.watchdog.progress,
            clock=parts.clock,
        )
        self.deliveries = Deliveries(
            parts.publisher,
            parts.client,
            parts.backend.stage,
            hold=self.evaluation.hold,
            served=self._served,
            changed=self.changed,
            clock=parts.clock,
        )
        self.saving = CheckpointSaving(
            parts.checkpoints,
            parts.backend,
            snapshot=lambda: self.training.run(parts.backend.snapshot),
            collect=self.rollout_snapshot,
            changed=self.changed,
        )
        self.reports = StepReports(parts, self.rollout)
        self._started = False

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
            try:
                await self._run()
            except (CheckpointError, NonFiniteStepsError):  # the checkpoint before stands
                raise
            except Exception as error:
                await self._save_what_is_finished(error)
                raise
            finally:
                unclosed = await self.close()
            if unclosed:
                raise unclosed[0]

    async def _run(self) -> None:
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
        if self.training.weights_in_doubt or not self._started:
            return
        try:
            await self.save_checkpoint()
        except Exception as second:  # whatever it is, the first one is why the run ends
            error.add_note(f"The steps since the last checkpoint could not be saved either: {second}")

    def request_stop(self) -> None:
        """Stops admitting; :meth:`train` finishes the step it is in, writes a checkpoint and returns."""
        self.stop_requested = True
        self.rollout.workers.stop_admitting()
        self.evaluation.stop()

    @property
    def finished(self) -> bool:
        """Whether nothing is left to train: the plan's last step is done, or the data has ended."""
        return self.global_step >= self.plan.total_steps or self.rollout.out_of_prompts

    # Phases -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restores the last checkpoint, if there is one, and brings its weights to the engines."""
        folder = await asyncio.to_thread(self.parts.checkpoints.latest)
        if folder is not None:
            await self.load_checkpoint(folder)
        await self.deliveries.publish(self.global_step)
        await self.rollout.start()
        self.parts.reporter.begin(self.global_step)
        await self.evaluation.start(self.global_step, self.parts.reporter.evaluated_steps)
        self.reports.begin()
        self._started = True
        self.watchdog.start()
        self.start_generation()

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
        batch = await self.rollout.buffer.load(chosen)
        started = self.parts.clock()
        metrics = await self.training.update(self._update, batch)
        times = {"time/wait_for_batch": started - waiting_since, "time/train": self.parts.clock() - started}
        return self.book(batch, {**metrics, **times})

    async def next_batch(self) -> list[BufferedGroup] | None:
        """The groups of the next step in ordinal order; None when the run was asked to stop.

        Consumes capacity; waits for a whole batch to be generated; unblocked by its last group; produces the batch.
        """
        await self.rollout.workers.fill()
        self.raise_if_failed()
        if self.stop_requested:
            return None
        batch = self.rollout.choose()
        if batch is None and not self.rollout.out_of_prompts:
            raise StalenessError(f"step {self.rollout.staleness.step} has no full batch after all groups have ended")
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

        def ready() -> bool:
            nonlocal chosen
            if self.stop_requested or self._failure() is not None:
                return True
            chosen = self.rollout.choose(taken, at_least)
            return chosen is not None or self.rollout.out_of_prompts

        await self.changed.wait_until(ready)
        self.raise_if_failed()
        return None if self.stop_requested else chosen

    def _update(self, batch: Sequence[RolloutGroup]) -> dict[str, float]:
        return self.parts.backend.update(self.minibatch(batch))

    def minibatch(self, groups: Sequence[RolloutGroup]) -> Minibatch:
        """What the backend trains on of these groups of the step."""
        self.rollout.staleness.assert_bound(groups)
        algorithm = self.config.trainer.algorithm
        trained = groups_to_train(groups, algorithm, seed=self.config.trainer.seed, step=self.global_step + 1)
        if self.kl_control.observes:
            self.kl_control.observe(*kl_to_reference(trained, algorithm))
        return build_minibatch(
            trained,
            self.global_step + 1,
            algorithm,
            oldest_trained_version=self.rollout.staleness.oldest_trained_version,
            kl_factor=self.kl_control.factor,
        )

    def book(self, batch: Sequence[RolloutGroup], metrics: dict[str, float]) -> TrainedStep:
        """The policy was updated with ``batch``. At one instant of the loop, and only now: an update that fails leaves its
        groups where they were."""
        self.rollout.trained(batch)
        self.global_step += 1
        self.watchdog.progress()
        return TrainedStep(batch, metrics | self.kl_control.step_ended())

    async def publish(self) -> dict[str, float]:
        """Sends the new weights on their way to the engines if that is due; returns when the next step may begin.

        Where publications overlap, that is once the weights are copied; the times are then those of the version before.
        """
        self.phase.enter(f"version {self.global_step} is published")
        due, metrics = self.rollout.staleness.publication_due, {}
        self.rollout.staleness.advance()
        await self.evaluation.trained(self.global_step)
        if due:
            metrics = await self.deliveries.begin(self.global_step)
            if not self.plan.overlap_publication:
                metrics = await self.deliveries.delivered()
        self.rollout.workers.drop_overdue()
        self.changed.notify()
        return metrics

    async def _served(self, version: int) -> None:
        self.rollout.staleness.published(version)
        await self.evaluation.served(version)

    def report(self, trained: TrainedStep) -> None:
        """Writes the step's metrics and samples, and refreshes the screen."""
        self.reports.write(self.global_step, trained, checkpoint_step=self.saving.step)

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
            **self.reports.state_dict(),
            **self.rollout.state_dict(),
            "kl_factor": self.kl_control.factor,
            "nonfinite_in_a_row": self.nonfinite.in_a_row,
        }
        recordings = self.parts.client.recordings.snapshot()
        return RolloutSnapshot(self.global_step, state, self.rollout.buffer.snapshot(), recordings)

    async def export_policy(self) -> None:
        """Once trained to the end, leaves the policy as a folder that ``transformers`` opens."""
        if self.parts.export_folder is not None and self.finished:
            await self.training.run(self.parts.backend.export_hf, self.parts.export_folder)

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
        await self.training.run(self.parts.backend.load, folder / POLICY_FOLDER)
        self.global_step = state["global_step"]
        await self.rollout.restore(state, groups, recordings, next_step=self.global_step + 1)
        self.reports.load_state_dict(state)
        self.saving.step = self.global_step
        self.kl_control.factor = float(state.get("kl_factor", 1.0))
        self.nonfinite.in_a_row = int(state.get("nonfinite_in_a_row", 0))

    # The rest -----------------------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """What the run is busy with, a line each."""
        return [
            self.phase.describe(),
            *self.rollout.workers.describe(),
            *self.evaluation.describe(),
            *self.parts.client.describe(),
        ]

    def _say_stuck(self, message: str) -> None:
        logger.warning("%s", message)
        self.parts.reporter.note(message)

    def _failure(self) -> BaseException | None:
        """What stopped a part of the run that works in the background, if anything did."""
        errors = (
            part.error for part in (self.rollout.workers, self.deliveries, self.saving, self.watchdog, self.evaluation)
        )
        return next((error for error in errors if error is not None), None)

    def raise_if_failed(self) -> None:
        """Raises what stopped a part of the run that works in the background, if anything did."""
        failure = self._failure()
        if failure is not None:
            raise failure

    async def close(self) -> list[Exception]:
        """Stops generation and engines; waits for a checkpoint that is being written. Every part is closed, whatever the
        others do; returns what they raised."""
        self.watchdog.stop()
        self.deliveries.cancel()
        errors = await close_all(
            [
                self.evaluation.aclose,
                *self.rollout.closings,
                self.saving.ended,
                self.deliveries.ended,
                self.parts.client.teardown,
                self.training.aclose,
                lambda: asyncio.to_thread(self.parts.backend.close),
            ]
        )
        self.parts.publisher.close()
        self.parts.reporter.close()
        return errors
