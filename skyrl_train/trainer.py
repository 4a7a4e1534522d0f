"""The synchronous trainer, and every phase that other trainers share.

    next_batch ──> train_step ──> publish ──> report ──> checkpoint
        ^                            │
        └── groups under version t-1 ┘   step t = 1, 2, ...

One asyncio loop controls; the backend computes in its own thread, engines in their own processes. A subclass changes when
groups are generated (``start_generation``, ``next_batch``), never what a step does with them.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from skyrl_train.concurrency import Signal
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import (
    CheckpointError,
    EngineError,
    GeneratorOutputError,
    PublicationError,
    RolloutError,
    StalenessError,
)
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.step_metrics import step_metrics
from skyrl_train.publication.publisher import WeightPublisher
from skyrl_train.rollout.buffer import RolloutBuffer
from skyrl_train.rollout.checkpoint import read_rollout_state, write_rollout_state
from skyrl_train.rollout.dataset import PromptDataset
from skyrl_train.rollout.group import RolloutGroup
from skyrl_train.rollout.ledger import PromptLedger
from skyrl_train.rollout.runner import GroupRunner
from skyrl_train.rollout.staleness import STRAGGLER_POLICIES, StalenessManager
from skyrl_train.rollout.workers import GenerationWorkers
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import CheckpointStore, checkpoint_step
from skyrl_train.training.minibatch import build_minibatch

logger = logging.getLogger(__name__)
T = TypeVar("T")


@dataclass(frozen=True)
class TrainerParts:
    """What a trainer is made of; each can be replaced by another implementation of its interface."""

    client: InferenceEngineClient
    generator: GeneratorInterface
    backend: TrainingBackend
    publisher: WeightPublisher
    dataset: PromptDataset
    checkpoints: CheckpointStore
    reporter: Reporter
    export_folder: Path | None = None  # where a finished run leaves its policy as a folder that transformers opens
    clock: Callable[[], float] = field(default=time.perf_counter)


class PPOTrainer:
    """Generates ``train_batch_size`` groups, trains on them minibatch by minibatch, publishes, and only then generates again."""

    def __init__(self, config: RunConfig, plan: Plan, parts: TrainerParts) -> None:
        self.config = config
        self.plan = plan
        self.parts = parts
        self.global_step = 0  # finished optimizer steps; a policy version is the step that it was published after
        self.stop_requested = False
        self.changed = Signal()
        trainer = config.trainer
        self.ledger = PromptLedger(len(parts.dataset), trainer.seed, parts.dataset.fingerprint)
        self.buffer = RolloutBuffer()
        self.staleness = StalenessManager(
            batch_groups=trainer.policy_mini_batch_size,
            max_staleness_steps=plan.max_staleness_steps,
            pipeline_depth=plan.pipeline_depth,
            max_running=plan.num_workers,
            total_steps=plan.total_steps,
            policy=STRAGGLER_POLICIES[trainer.fully_async.straggler_policy](),
            steps_per_publication=plan.train_batch_size // plan.policy_mini_batch_size,
        )
        self.runner = GroupRunner(
            parts.generator,
            parts.dataset,
            self.ledger,
            trainer.failures,
            n_samples_per_prompt=config.generator.n_samples_per_prompt,
            sampling_params=asdict(config.generator.sampling_params),
            env_class=config.environment.env_class,
            seed=trainer.seed,
            policy_version=lambda: parts.client.policy_version,
            on_failure=parts.reporter.attempt_failed,
        )
        self.workers = GenerationWorkers(
            self.runner.run,
            self.ledger,
            self.staleness,
            self.buffer,
            trainer.failures,
            policy_version=lambda: parts.client.policy_version,
            changed=self.changed,
        )
        self._compute = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._saving: asyncio.Task[Path] | None = None
        self._checkpointed_step: int | None = None
        self._step_ended = parts.clock()
        self._tokens_reported = 0
        self._failures_reported = 0

    # The loop -----------------------------------------------------------------------------------------------------

    async def train(self) -> None:
        """Trains until the plan's last step or until :meth:`request_stop`; leaves a checkpoint either way.

        Raises:
            RolloutError, GeneratorOutputError, EngineError, PublicationError: generation cannot go on; the finished steps
                are saved.
            CheckpointError: a checkpoint could not be written; the previous one is untouched.
        """
        try:
            await self.start()
            while self.global_step < self.plan.total_steps:
                waiting_since = self.parts.clock()
                batch = await self.next_batch()
                if batch is None:
                    break
                metrics = {"time/wait_for_batch": self.parts.clock() - waiting_since}
                metrics |= await self.train_step(batch)
                try:
                    metrics |= await self.publish()
                finally:  # the step is trained, published or not
                    self.report(batch, metrics)
                await self.checkpoint_if_due()
            await self.save_checkpoint()
            await self.export_policy()
        except (RolloutError, GeneratorOutputError, EngineError, PublicationError) as error:
            try:
                await self.save_checkpoint()
            except CheckpointError as second:
                error.add_note(f"The steps since the last checkpoint could not be saved either: {second}")
            raise
        finally:
            await self.close()

    def request_stop(self) -> None:
        """Stops admitting; :meth:`train` finishes the step it is in, writes a checkpoint and returns."""
        self.stop_requested = True
        self.workers.stop_admitting()

    # Phases -------------------------------------------------------------------------------------------------------

    async def start(self) -> None:
        """Restores the last checkpoint, if there is one, and brings its weights to the engines."""
        folder = await asyncio.to_thread(self.parts.checkpoints.latest)
        if folder is not None:
            await self.load_checkpoint(folder)
        await self.publish_weights()
        self.parts.generator.pace(lambda: not self.staleness.budget_spent)
        await self.parts.generator.start()
        self.parts.reporter.begin(self.global_step)
        self._step_ended = self.parts.clock()
        self.workers.slots.take_idle_fraction()  # start-up is not idleness
        self.start_generation()

    def start_generation(self) -> None:
        """Called once the engines serve. The synchronous trainer generates only when it needs a batch."""

    async def next_batch(self) -> list[RolloutGroup] | None:
        """The groups of the next step in ordinal order; None when the run was asked to stop.

        Consumes capacity; waits for a whole batch to be generated; unblocked by its last group; produces the batch.
        """
        await self.workers.fill()
        self.workers.raise_if_failed()
        if self.stop_requested:
            return None
        batch = self.staleness.select(self.buffer)
        if batch is None:
            raise StalenessError(f"step {self.staleness.step} has no full batch after all groups have ended")
        return batch

    async def train_step(self, batch: Sequence[RolloutGroup]) -> dict[str, float]:
        """One optimizer step on ``batch``; returns its metrics."""
        self.staleness.assert_bound(batch)
        started = self.parts.clock()
        metrics = await self.off_loop(self._update, batch)
        # At one instant of the loop, and only now: an update that fails leaves its groups where they were.
        self.buffer.take(batch)
        self.staleness.train(batch)
        self.ledger.settle([group.ordinal for group in batch], "trained")
        self.global_step += 1
        return {**metrics, "time/train": self.parts.clock() - started}

    def _update(self, batch: Sequence[RolloutGroup]) -> dict[str, float]:
        minibatch = build_minibatch(batch, self.global_step + 1, self.config.trainer.algorithm)
        return self.parts.backend.update(minibatch)

    async def publish(self) -> dict[str, float]:
        """Brings the new weights to the engines if that is due, then opens the next step's admission."""
        due = self.staleness.publication_due
        metrics = await self.publish_weights() if due else {}
        self.staleness.advance(published=due)
        self.changed.notify()
        return metrics

    async def publish_weights(self) -> dict[str, float]:
        """Publishes the policy as version ``global_step``."""
        return await self.parts.publisher.publish(self.parts.backend.named_weights(), self.global_step)

    def report(self, batch: Sequence[RolloutGroup], metrics: Mapping[str, float]) -> None:
        """Writes the step's metrics and samples, and refreshes the screen."""
        now = self.parts.clock()
        step_s, self._step_ended = now - self._step_ended, now
        tokens, self._tokens_reported = (
            self.parts.client.generated_tokens - self._tokens_reported,
            self.parts.client.generated_tokens,
        )
        full = step_metrics(
            self.global_step,
            batch,
            metrics,
            counts=self.staleness.counts,
            max_staleness_steps=self.plan.max_staleness_steps,
            step_s=step_s,
            idle_fraction=self.workers.slots.take_idle_fraction(),
            generated_tokens=tokens,
            retries=self.runner.retries,
        )
        self.parts.reporter.step(
            self.global_step,
            batch,
            full,
            decode=self.parts.client.decode,
            failed=self.ledger.failed[self._failures_reported :],
            checkpoint_step=self._checkpointed_step,
        )
        self._failures_reported = len(self.ledger.failed)

    # Checkpoints --------------------------------------------------------------------------------------------------

    async def checkpoint_if_due(self) -> None:
        """Every ``ckpt_interval`` steps, takes a snapshot and writes it while training goes on."""
        if self._saving is not None and self._saving.done():
            await self._saved()  # a failed write ends the run
        interval = self.config.trainer.ckpt_interval
        if interval and self.global_step % interval == 0 and self.global_step < self.plan.total_steps:
            await self._begin_save()

    async def save_checkpoint(self) -> None:
        """Writes a checkpoint of the current step, unless it is on disk already, and returns when it is."""
        await self._saved()
        if self._checkpointed_step != self.global_step:
            await self._begin_save()
            await self._saved()

    async def _begin_save(self) -> None:
        await self._saved()
        snapshot = await self.off_loop(self.parts.backend.snapshot)
        state, groups = self.rollout_state(), self.buffer.snapshot()  # at one instant of the loop: they agree
        step = self.global_step

        def write(folder: Path) -> None:
            (folder / "policy").mkdir()
            self.parts.backend.save(snapshot, folder / "policy")
            write_rollout_state(state, groups, folder)

        self._saving = asyncio.create_task(asyncio.to_thread(self.parts.checkpoints.write, step, write))

    async def _saved(self) -> None:
        if self._saving is not None:
            saving, self._saving = self._saving, None
            self._checkpointed_step = checkpoint_step(await saving)

    def rollout_state(self) -> dict[str, Any]:
        """What a checkpoint holds beside the backend's state and the finished groups; JSON-able."""
        return {
            "global_step": self.global_step,
            "ledger": self.ledger.state_dict(),
            "counts": self.staleness.state_dict(),
        }

    async def export_policy(self) -> None:
        """Once trained to the end, leaves the policy as a folder that ``transformers`` opens."""
        if self.parts.export_folder is not None and self.global_step >= self.plan.total_steps:
            await self.off_loop(self.parts.backend.export_hf, self.parts.export_folder)

    async def load_checkpoint(self, folder: Path) -> None:
        """Restores a checkpoint.

        Raises:
            CheckpointError: it is of another model, data set or seed, or of a newer format.
        """
        state, groups = await asyncio.to_thread(read_rollout_state, folder)
        await self.off_loop(self.parts.backend.load, folder / "policy")
        self.global_step = state["global_step"]
        self.buffer.restore(groups)
        self.ledger.load_state_dict(state["ledger"], buffered=[group.ordinal for group in self.buffer])
        self.staleness.load_state_dict(state["counts"], self.global_step + 1, self.buffer)
        self._checkpointed_step = self.global_step
        self._failures_reported = len(self.ledger.failed)

    # The rest -----------------------------------------------------------------------------------------------------

    async def off_loop(self, function: Callable[..., T], *args: Any) -> T:
        """Runs blocking work of the backend in its own thread, one call at a time."""
        return await asyncio.get_running_loop().run_in_executor(self._compute, function, *args)

    async def close(self) -> None:
        """Stops generation and engines; waits for a checkpoint that is being written."""
        await self.workers.close()
        await self.parts.generator.aclose()
        if self._saving is not None:
            await asyncio.gather(self._saving, return_exceptions=True)
        await self.parts.client.teardown()
        self.parts.publisher.close()
        self.parts.reporter.close()
        self._compute.shutdown(wait=True)
