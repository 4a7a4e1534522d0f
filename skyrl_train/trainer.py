"""The synchronous trainer and the phases that all trainers share.

    next_batch ──> update ──> sync_weights ──> report ──> checkpoint
        ^                          │
        └─ groups under version t-1 ─┘          step t = 1, 2, ...

One asyncio loop controls the run. The backend computes in a thread, the engines in threads, processes or actors. A subclass
changes when groups are generated and when engines are interrupted; what a step does with its groups is always the same:

| mode | ``start_generation`` | ``next_batch`` | ``train_step`` | ``sync_weights`` |
|---|---|---|---|---|
| sync | nothing | generates one whole batch | updates on the batch | no request is in flight |
| one_step_off | two batches | the batch of the previous version | the same | after the next batch is generated |
| fully_async | runs all the time | finished groups within the bound | the same, or on parts as they finish | while requests run |
| partial_rollout | more groups than a batch | the first to finish | the same, while the rest is interrupted | the rest resumes |
"""

from __future__ import annotations

import asyncio
import logging
import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, TypeVar

from skyrl_train.algorithms.kl import KlControl
from skyrl_train.checkpoint_saving import POLICY_FOLDER, CheckpointSaving, RolloutSnapshot
from skyrl_train.colocation import Colocation
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import RunConfig, TrainerMode
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError, NonFiniteStepsError, StalenessError
from skyrl_train.evaluation.engines import EvaluationEngines, SharedEngines
from skyrl_train.evaluation.runner import Evaluation
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.minibatch_builder import MinibatchBuilder, MinibatchInputs
from skyrl_train.observability.gpus import TrainingFlops
from skyrl_train.observability.reporter import Reporter
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.checkpoint import read_replay_cache, read_rollout_state
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.rollout.manager import RolloutManager
from skyrl_train.rollout.stages.logprobs import backend_stages
from skyrl_train.rollout.stages.pipeline import Stage
from skyrl_train.rollout.stages.reward import RewardStage
from skyrl_train.runtime.concurrency import Signal, close_all
from skyrl_train.runtime.watchdog import BLOCKED_S, LoopMonitor, Phase, Watchdog
from skyrl_train.sample_recorder import SampleRecorder
from skyrl_train.step_metrics import StepReports, TrainedStep
from skyrl_train.training.backend import Minibatch, TrainingBackend, TrainingThread
from skyrl_train.training.checkpoint import NOT_EVALUATED, Checkpoints, Evaluated
from skyrl_train.training.minibatch import kl_to_reference
from skyrl_train.training.optimizer import NonFiniteSteps
from skyrl_train.types import RolloutGroup
from skyrl_train.weight_sync.syncer import WeightSyncer

if TYPE_CHECKING:  # imports torchdata, which only a streaming run needs
    from skyrl_train.rollout.data.streaming import StreamingPrompts

logger = logging.getLogger(__name__)

MAX_EXPORTS = 2  # at once: one runs, the others wait

T = TypeVar("T")


@dataclass(frozen=True)
class TrainerComponents:
    """The parts of a trainer. Each can be replaced by another implementation of its interface."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    backend: TrainingBackend
    syncer: WeightSyncer
    dataset: PromptDataset | StreamingPrompts
    checkpoints: Checkpoints
    reporter: Reporter
    stages: Sequence[Stage] = ()  # started stages between generation and the buffer
    evaluation_engines: EvaluationEngines | None = None  # None: evaluate on the run's engines
    evaluation_prompts: Sequence[PromptRecord] = ()
    spill_folder: Path | None = None  # for finished groups beyond rollout.buffer_memory_bytes
    export_folder: Path | None = None  # for the final policy, in the format of transformers
    export_checkpoint: Callable[[int], None] = lambda step: None  # of a step, in this format; blocks
    clock: Callable[[], float] = field(default=time.perf_counter)
    events: EventLog = NO_EVENTS  # the record of the run
    training_flops: TrainingFlops | None = None  # of the policy's passes; None: unknown, or on no GPU
    release_resources: Callable[[], None] = lambda: None  # of a cluster, when all that computes has ended; blocks


class PPOTrainer:
    """Generates ``train_batch_size`` groups, trains on them minibatch by minibatch, syncs the weights, and repeats.

    Attributes:
        global_step: finished optimizer steps. Policy version ``v`` has the weights after step ``v``.
        rollout: generates groups and holds them until they are trained.
        training: the thread in which the backend computes.
        minibatches: builds the backend's input from groups.
        samples: chooses the samples of each step that are recorded.
        changed: notified after every event that the trainer may wait for.
        colocation: alternates generation and training on shared devices; None: they have separate ones.
    """

    # A class in which engines must not sample while the policy trains sets this. Each step is then a turn, which begins with the
    # whole batch and ends with a weight sync, unless the batches of several steps are generated before the first of them.
    always_colocated: ClassVar[bool] = False

    def __init__(self, config: RunConfig, plan: Plan, components: TrainerComponents) -> None:
        self.config = config
        self.plan = plan
        self.components = components
        self.global_step = 0
        self.stop_requested = False
        self.changed = Signal()
        failures = config.trainer.failures
        self.phase = Phase(components.clock, "starts")
        self.watchdog = Watchdog(failures.stuck_after_s, components.clock, self.describe, self._report)
        self.training = TrainingThread(components.events)
        self.colocation: Colocation | None = None
        several = plan.weight_sync_interval > 1 and plan.mode is not TrainerMode.sync
        if self.always_colocated and (several or plan.streaming_min_groups is not None):
            raise ConfigError(
                f"{type(self).__name__} is always_colocated: its engines sample nothing from the beginning of a step to a weight "
                "sync. Set trainer.fully_async.weight_sync_interval=1 and streaming_min_groups=null."
            )
        if config.trainer.placement.colocate_all or self.always_colocated:
            self.colocation = Colocation(
                config, components.client, components.syncer, components.backend, self.training, components.clock
            )
        self.kl_control = KlControl(config.trainer.algorithm)
        self.nonfinite = NonFiniteSteps(failures.max_nonfinite_steps)
        # Scores by the backend's own models: the training thread computes them between two updates.
        in_backend = backend_stages(
            config,
            reference=lambda sequences: self.training.run(components.backend.reference_logprobs, sequences),
            current=lambda sequences: self.training.run(components.backend.forward_logprobs, sequences),
        )
        self.rollout = RolloutManager(
            config,
            plan,
            dataset=components.dataset,
            generator=components.generator,
            client=components.client,
            stages=[*components.stages, *in_backend],
            spill_folder=components.spill_folder,
            changed=self.changed,
            on_group_end=self.watchdog.progress,
            on_attempt_failed=components.reporter.attempt_failed,
            clock=components.clock,
            events=components.events,
        )
        self.evaluation = Evaluation(
            config,
            components.evaluation_engines or SharedEngines(components.generator, components.client),
            components.evaluation_prompts,
            reporter=components.reporter,
            changed=self.changed,
            # An evaluation judges by the run's reward function too, not only by the generator's rewards.
            score=next((stage.run for stage in components.stages if isinstance(stage, RewardStage)), None),
            on_progress=self.watchdog.progress,
            clock=components.clock,
            events=components.events,
        )
        # The snapshot is taken in the training thread: no update may change the weights while they are copied.
        self.saving = CheckpointSaving(
            components.checkpoints,
            components.backend,
            snapshot=lambda: self.training.run(components.backend.snapshot),
            collect=self.rollout_snapshot,
            evaluated=self.evaluated,
            export=components.export_checkpoint,
            export_interval=config.trainer.hf_save_interval,
            sync_rows=components.reporter.sync,
            changed=self.changed,
            events=components.events,
        )
        self.minibatches = MinibatchBuilder(config.trainer.algorithm, config.trainer.seed)
        self.samples = SampleRecorder(config.trainer.samples_per_step)
        self.reports = StepReports(
            components.reporter, components.client, self.rollout, components.clock, components.training_flops
        )
        self._reported = 0  # the last step that has its row of metrics
        self._earlier_scores: dict[int, float] = {}  # by step, as the checkpoint has them that the run resumed from
        self._started = False

    # The loop -----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Train until the plan's last step or until :meth:`request_stop`, and leave a checkpoint either way.

        Consumes batches; waits for groups, updates and weight syncs; unblocked by ``changed``; produces policy versions.

        Raises:
            Exception: the first error of any part of the run. The finished steps are saved, except after a failed update,
                when the weights are in doubt, or if one of them cannot be reported: the previous checkpoint stands.
            CheckpointError: a checkpoint could not be written; the previous one is untouched.
            NonFiniteStepsError: too many steps were skipped; the checkpoint from before them stands.
        """
        with LoopMonitor(min(BLOCKED_S, self.config.trainer.failures.stuck_after_s), self._report):
            try:
                await self.start()
                while self.global_step < self.plan.total_steps:
                    trained = await self.train_step()
                    if trained is None:  # stop requested, or no prompts left
                        break
                    await self.sync_and_report(trained)
                    await self.checkpoint_if_due()
                # With overlap_weight_sync, the last sync may still run. Its error is raised here.
                await self.components.syncer.wait()
                await self.save_checkpoint()
                await self.evaluate_last_policy()
                await self.export_policy()
            except (CheckpointError, NonFiniteStepsError):  # the previous checkpoint is the one to resume from
                raise
            except Exception as error:
                await self._save_finished_steps(error)
                raise
            finally:
                self._record_end()
                close_errors = await self.close()
            # Reached only if training succeeded: an error of closing must not replace the error of the run.
            if close_errors:
                raise close_errors[0]

    def request_stop(self) -> None:
        """Stop admitting groups. :meth:`train` finishes the current step, writes a checkpoint and returns."""
        self.stop_requested = True
        self.rollout.dispatcher.stop_admitting()
        self.evaluation.stop()

    @property
    def finished(self) -> bool:
        """True if nothing is left to train: the last step of the plan is done, or the data has ended."""
        return self.global_step >= self.plan.total_steps or self.rollout.out_of_prompts

    # Phases -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restore the newest intact checkpoint, if there is one, load its weights into the engines, and start all parts."""
        # In a thread, because the checkpoints may be in an object store.
        folder = await asyncio.to_thread(self.components.checkpoints.latest, self._report)
        start_up = self.components.reporter.start_up
        if folder is not None:
            with start_up("checkpoint"):
                await self.load_checkpoint(folder)
        with start_up("first weight sync"):
            await self.serve_policy()
        with start_up("generator and data"):
            await self.rollout.start()
        steps = {"step": self.global_step, "total_steps": self.plan.total_steps}
        if folder is None:
            self.components.events.record("run", **steps)
        else:
            self.components.events.record("resume", **steps)
        self.components.reporter.begin(self.global_step)
        await self.evaluation.start(self.global_step, self.components.reporter.evaluated_steps)
        self.reports.begin()
        self._started = True
        # Only now: engines and models may need longer for their start than stuck_after_s.
        self.watchdog.start()
        self.start_generation()

    async def serve_policy(self) -> None:
        """Send the current policy to the engines, which serve requests only after their first weight sync."""
        if self.colocation is None:
            await self.components.syncer.sync(self.global_step)
        else:
            await self.colocation.begin_generation(self.global_step)

    def start_generation(self) -> None:
        """Hook: called once the engines serve. The synchronous trainer generates only when it needs a batch."""

    async def train_step(self) -> TrainedStep | None:
        """Run one optimizer step on a whole batch. None: the run was asked to stop."""
        clock = self.components.clock
        waiting_since = clock()
        self.phase.enter(f"waits for the groups of step {self.global_step + 1}")
        with self.components.events.span("wait_for_batch", self.global_step + 1):
            chosen = await self.next_batch()
        if chosen is None:
            return None
        waited_s = clock() - waiting_since
        turn = {}
        if self.colocation is not None:
            self.phase.enter(f"puts the engines to sleep for step {self.global_step + 1}")
            turn = await self.evaluation.hold()  # its requests must not reach the next policy
            turn |= await self.colocation.begin_training()
        self.phase.enter(f"trains step {self.global_step + 1}")
        # Groups that were spilled to disk are read now; this time counts as waiting for the batch.
        loading_since = clock()
        batch = await self.rollout.buffer.load(chosen)
        started = clock()
        waited_s += started - loading_since
        # Runs until the update ends, at the latest.
        preparing = asyncio.create_task(self.prepare_next_minibatch(), name="prepare-minibatch")
        try:
            metrics = await self.training.update(self.update_policy, batch)
        finally:
            preparing.cancel()
        updated_s = clock() - started
        trained_s = metrics.get("time/train", updated_s)  # a subclass's update_policy need not measure it
        times = {
            "time/wait_for_batch": waited_s,
            "time/prepare_update": updated_s - trained_s,
            "time/train": trained_s,
        }
        return self.finish_step(batch, {**metrics, **turn, **times})

    async def prepare_next_minibatch(self) -> None:
        """Build the minibatch of the next step while this one trains, so that the backend does not wait for it.

        Consumes finished groups, without taking them; waits until it is settled which of them train next; unblocked by a group
        that ends; produces a minibatch, which the next step discards if it trains other groups after all.
        """
        expected: list[RolloutGroup] | None = None

        def settled() -> bool:
            nonlocal expected
            expected = self.rollout.expected_batch()
            return expected is not None

        await self.changed.wait_until(settled)
        assert expected is not None, "it is settled"
        self.minibatches.prepare(self.minibatch_inputs(expected, self.global_step + 2))

    async def next_batch(self) -> list[BufferedGroup] | None:
        """Return the groups of the next step, ordered by group index. None: the run was asked to stop.

        Consumes capacity; waits until a whole batch is generated; unblocked by its last group; produces the batch.
        """
        await self.rollout.dispatcher.fill()
        self.raise_if_failed()
        if self.stop_requested:
            return None
        # All groups of this phase have ended, so a batch is complete unless the prompts are exhausted.
        batch = self.rollout.choose()
        if batch is None and not self.rollout.out_of_prompts:
            raise StalenessError(f"step {self.rollout.staleness.step} has no full batch although all groups have ended")
        return batch

    async def wait_for_groups(
        self, committed: Sequence[RolloutGroup] = (), at_least: int | None = None
    ) -> list[BufferedGroup] | None:
        """Return finished groups for the next step, ordered by group index. None: the run was asked to stop.

        Consumes finished groups; waits until ``at_least`` of them may be trained; unblocked by a group that ends and by a
        weight sync; produces the groups.

        Args:
            committed: groups that the step already has.
            at_least: fewest groups to return; None: all that the step lacks.
        """
        chosen: list[BufferedGroup] | None = None
        taken = {group.group_index for group in committed}

        # Keeps the choice of its last call. To choose is to take batch slots, so the choice is not repeated after the
        # wait.
        def ready() -> bool:
            nonlocal chosen
            if self.stop_requested or self._failure() is not None:
                return True
            chosen = self.rollout.choose(taken, at_least)
            return chosen is not None or self.rollout.out_of_prompts

        await self.changed.wait_until(ready)
        self.raise_if_failed()
        return None if self.stop_requested else chosen

    def update_policy(self, batch: Sequence[RolloutGroup]) -> dict[str, float]:
        """Run one optimizer step on ``batch`` and return its metrics. Runs in the training thread.

        A step in parts (``streaming_min_groups``) calls ``accumulate`` and ``finish_update`` of the trainer instead.
        """
        metrics, trained_s = self.timed(self.components.backend.update, self.minibatch(batch))
        self.samples.collect(self.components.backend)
        return {**metrics, "time/train": trained_s}

    def timed(self, call: Callable[..., T], *args: Any) -> tuple[T, float]:
        """Make a call of the backend. Return its result and the seconds that it took. Runs in the training thread."""
        started = self.components.clock()
        result = call(*args)
        return result, self.components.clock() - started

    def minibatch(self, groups: Sequence[RolloutGroup]) -> Minibatch:
        """Build the backend's input from groups of the current step. Runs in the training thread.

        Raises:
            StalenessError: a trained token is older than the staleness policy promises.
        """
        # Checked once more after the selection: a violation must never reach the weights.
        self.rollout.staleness.assert_bound(groups)
        trained, minibatch = self.minibatches.build(self.minibatch_inputs(groups, self.global_step + 1))
        # The KL of these groups decides the adaptive factor of later steps.
        if self.kl_control.observes:
            self.kl_control.observe(*kl_to_reference(trained, self.config.trainer.algorithm))
        return self.samples.choose(trained, minibatch)

    def minibatch_inputs(self, groups: Sequence[RolloutGroup], step: int) -> MinibatchInputs:
        """Return what the minibatch of ``groups`` depends on in ``step``, as far as it is known now."""
        oldest = self.rollout.staleness.oldest_trained_version_in(step)
        return MinibatchInputs(groups, step, oldest, self.kl_control.factor)

    def finish_step(self, batch: Sequence[RolloutGroup], metrics: dict[str, float]) -> TrainedStep:
        """Record that the policy was updated with ``batch``.

        Called only after a successful update, and without an ``await``: a failed update leaves its groups in the buffer, and
        counts, ledger and buffer never disagree.
        """
        self.rollout.mark_trained(batch)
        self.global_step += 1
        self.watchdog.progress()
        return TrainedStep(batch, metrics | self.kl_control.step_ended(), self.samples.take())

    async def sync_and_report(self, trained: TrainedStep) -> None:
        """Sync the weights, then report the step. A step whose weight sync fails is reported as well: it is trained."""
        try:
            # The step has some of these times already: one_step_off waits for groups before the update and before the sync.
            for name, value in (await self.sync_weights()).items():
                trained.metrics[name] = trained.metrics.get(name, 0.0) + value
        except Exception as error:
            try:
                self.report(trained)
            except Exception as second:
                # The failed weight sync is the cause; the second error must not hide it.
                error.add_note(f"The step could not be reported either: {second!r}")
            raise
        self.report(trained)
        # Last: this raises after too many skipped steps, and the report must contain the step by then.
        self.nonfinite.observe(self.global_step, trained.metrics)

    async def sync_weights(self) -> dict[str, float]:
        """Send the new weights to the engines if a weight sync is due. Return when the next step may begin.

        With ``overlap_weight_sync`` that is when the weights are copied; the returned times belong to the previous sync.
        """
        self.phase.enter(f"sends version {self.global_step} to the engines")
        due, metrics = self.rollout.staleness.weight_sync_due, {}
        self.rollout.staleness.advance()
        # Before the weights move again: an evaluation on separate engines copies them here.
        await self.evaluation.trained(self.global_step)
        if due and self.colocation is not None:
            metrics = await self.colocation.begin_generation(self.global_step)
            await self._on_version_served(self.global_step)
        elif due:
            metrics = await self.components.syncer.begin(
                self.global_step,
                before_send=self.evaluation.hold,
                on_served=self._on_version_served,
                on_end=self.changed.notify,
            )
            # Otherwise the next step begins while the engines load the copied weights.
            if not self.plan.overlap_weight_sync:
                metrics = await self.components.syncer.wait()
        # The step has advanced: deadlines may have passed, and admission may have capacity.
        self.rollout.dispatcher.drop_overdue()
        self.changed.notify()
        return metrics

    async def _on_version_served(self, version: int) -> None:
        self.rollout.served(version)
        await self.evaluation.served(version)

    def report(self, trained: TrainedStep) -> None:
        """Write the step's metrics and samples and refresh the screen."""
        trained.metrics.update(self.saving.disk)
        self.reports.write(self.global_step, trained, checkpoint_step=self.saving.step)
        self._reported = self.global_step

    # Checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint_if_due(self) -> None:
        """Every ``ckpt_interval`` steps, take a snapshot and write it while training continues.

        Also after a step that is exported, or evaluated to find the best checkpoint. Not while steps are skipped: the policy
        may have diverged, and the previous checkpoint may be the last good one.
        """
        await self.saving.check()  # a failed write ends the run
        if self.nonfinite.in_a_row:
            return
        interval, step = self.config.trainer.ckpt_interval, self.global_step
        due = interval > 0 and step % interval == 0
        due |= self.saving.export_due(step)
        due |= self.config.trainer.eval.best_metric is not None and self.evaluation.due(step)
        # save_checkpoint() writes the last step, after its weight sync.
        if not due or step >= self.plan.total_steps:
            return
        if self.saving.export_due(step):
            # Checkpoints that wait for their export stay, and would fill the disk. A stop waits for no export.
            await self.saving.written()
            self.phase.enter(f"may export step {step} when fewer than {MAX_EXPORTS} others run or wait")
            await self.changed.wait_until(lambda: self.stop_requested or len(self.saving.exporting) < MAX_EXPORTS)
        await self.saving.begin()

    async def save_checkpoint(self) -> None:
        """Write a checkpoint of the current step, unless the disk has it, and return when it is written."""
        await self.saving.written()
        # Before the last step, a checkpoint of the same step is not enough: since then, groups have finished or failed and
        # unfinished ones have sampled more tokens.
        if self.saving.step != self.global_step or self.global_step < self.plan.total_steps:
            self.phase.enter(f"writes the checkpoint of step {self.global_step}")
            await self.saving.begin()
            await self.saving.written()

    async def _save_finished_steps(self, error: Exception) -> None:
        """Save what is trained before ``error`` ends the run. A failure to do so becomes a note of ``error``."""
        # Before the start nothing is trained; after a failed update the weights may have half of a step.
        if self.training.weights_in_doubt or not self._started:
            return
        if self._reported < self.global_step:  # after a resume, nothing would report its prompts
            error.add_note(f"Step {self.global_step} has no row of metrics, so it is not saved: it is trained again.")
            return
        if isinstance(error, GeneratorOutputError) and error is not self.rollout.dispatcher.error:
            # Training would reject these groups after each resume, whatever becomes of the generator. (Where a group in
            # generation broke the contract, the finished ones have passed the check.)
            self.rollout.discard_finished()
        try:
            await self.save_checkpoint()
        except Exception as second:
            error.add_note(f"The steps since the last checkpoint could not be saved either: {second}")

    def rollout_snapshot(self) -> RolloutSnapshot:
        """Return the contents of a checkpoint beside the backend's state. No ``await``, so that all of it agrees."""
        metric = self.config.trainer.eval.best_metric
        state = {
            "global_step": self.global_step,
            "reported": self.reports.untrained_reported,
            "totals": dict(self.reports.totals),
            **self.rollout.state_dict(),
            "kl_factor": self.kl_control.factor,
            "nonfinite_in_a_row": self.nonfinite.in_a_row,
            "scores": {} if metric is None else {metric: dict(self.evaluated().scores)},
        }
        replay_cache = self.components.client.replay_cache.snapshot()
        return RolloutSnapshot(self.global_step, state, tuple(self.rollout.buffer), replay_cache)

    def evaluated(self) -> Evaluated:
        """Return the evaluations that decide which checkpoints stay beside the newest ones."""
        metric = self.config.trainer.eval.best_metric
        if metric is None:
            return NOT_EVALUATED
        # The run may have come from another machine, which has the earlier rows of eval.jsonl.
        return Evaluated(self.components.reporter.scores(metric) | self._earlier_scores, self.evaluation.unfinished)

    async def load_checkpoint(self, folder: Path) -> None:
        """Restore a checkpoint.

        Raises:
            CheckpointError: it belongs to another model, data set or seed, or has a newer format.
        """
        # The state comes first: a newer format must be rejected before any part of the run has changed.
        state, groups = await asyncio.to_thread(read_rollout_state, folder)
        replay_cache = await asyncio.to_thread(read_replay_cache, folder) if self.config.rollout.replay else []
        await self.training.run(self.components.backend.load, folder / POLICY_FOLDER)
        self.global_step = self._reported = state["global_step"]
        await self.rollout.restore(state, groups, replay_cache, next_step=self.global_step + 1)
        self.saving.step = self.global_step
        # Checkpoints of earlier versions have no such entries.
        self.reports.untrained_reported = dict(state.get("reported", {}))
        self.reports.totals |= state.get("totals", {})
        self.kl_control.factor = float(state.get("kl_factor", 1.0))
        self.nonfinite.in_a_row = int(state.get("nonfinite_in_a_row", 0))
        scores = state.get("scores", {}).get(self.config.trainer.eval.best_metric, {})
        self._earlier_scores = {int(step): score for step, score in scores.items()}

    # After the last step ------------------------------------------------------------------------------------------

    async def evaluate_last_policy(self) -> None:
        """After the last step, evaluate the final policy, unless that has been done."""
        if self.finished:
            self.phase.enter("evaluates the final policy")
            # An evaluation that runs must end before the engines get other weights.
            await self.evaluation.hold()
            # The last step may not have been due for a weight sync.
            if self.evaluation.needs_engines(self.global_step) and (
                self.components.client.policy_version != self.global_step
            ):
                await self.serve_policy()
            await self.evaluation.conclude(self.global_step)

    async def export_policy(self) -> None:
        """After the last step, write the policy as a folder that ``transformers`` opens."""
        if self.components.export_folder is not None and self.finished:
            self.phase.enter("exports the final policy")
            await self.training.run(self.components.backend.export_hf, self.components.export_folder)

    # Supervision and closing --------------------------------------------------------------------------------------

    def describe(self) -> list[str]:
        """Return what the run is busy with, one line per part."""
        return [
            self.phase.describe(),
            *self.rollout.dispatcher.describe(),
            *self.evaluation.describe(),
            *self.components.client.describe(),
        ]

    def _report(self, message: str) -> None:
        logger.warning("%s", message)
        self.components.reporter.note(message)

    def _failure(self) -> BaseException | None:
        """Return the error that stopped a background part of the run, if any."""
        parts = (self.rollout.dispatcher, self.components.syncer, self.saving, self.watchdog, self.evaluation)
        return next((part.error for part in parts if part.error is not None), None)

    def raise_if_failed(self) -> None:
        """Raise the error that stopped a background part of the run, if any."""
        failure = self._failure()
        if failure is not None:
            raise failure

    def _record_end(self) -> None:
        error = sys.exception()
        reason = "failed" if error is not None else "finished" if self.finished else "stopped"
        text = None if error is None else f"{type(error).__name__}: {error}"
        self.components.events.record("end", step=self.global_step, reason=reason, error=text)

    async def close(self) -> list[Exception]:
        """Stop generation and engines and wait for a checkpoint that is being written.

        Closes every part even when others fail. Returns their errors.
        """
        self.watchdog.stop()
        if steps := self.saving.exporting:
            some = ", ".join(map(str, steps))
            self.components.reporter.note(f"exports of step {some} still run; this run ends after them")

        async def free_staging() -> None:
            self.components.syncer.close()

        # Producers before consumers: no group, evaluation or weight sync may use an engine that is torn down.
        errors = await close_all(
            [
                self.components.syncer.stop,
                self.evaluation.aclose,
                *self.rollout.closings,
                self.saving.ended,
                self.components.client.teardown,
                self.training.aclose,
                lambda: asyncio.to_thread(self.minibatches.close),
                lambda: asyncio.to_thread(self.components.backend.close),
                free_staging,
                lambda: asyncio.to_thread(self.components.release_resources),
            ]
        )
        self.components.reporter.close()
        return errors
