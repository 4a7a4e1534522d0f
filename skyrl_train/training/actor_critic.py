"""A policy and its critic as one training backend: both make the same steps, each on its own device.

minibatch ──┬──> critic (its own thread; its device, its workers, or the policy's) ──┬──> metrics of both
            └──> policy (the caller's thread)                                      ──┘
sequences ──submit_values──> the critic's thread, between two of its steps ──> values
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import torch

from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError, HalfStepError
from skyrl_train.training.backend import CriticBackend, Minibatch, TokenRecord, TrainingBackend, TrainingSequence
from skyrl_train.training.state import REMEDY

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

CRITIC_FOLDER = "critic"  # of its state, within the policy's folder
T = TypeVar("T")
# Errors that a backend raises before anything has moved.
_REJECTIONS = (ConfigError, GeneratorOutputError, ValueError)


class ActorCritic(TrainingBackend):
    """The policy's backend, with a critic that trains on the same sequences at the same time.

    Within a step, neither needs results of the other, so both compute concurrently, and values are computed while the policy
    trains. Workers that hold both models execute the calls one after the other. Weight sync and export use the policy alone; a
    checkpoint holds both.

    Args:
        policy: closed together with this backend.
        critic: likewise.
        in_parts: a step may be accumulated part by part: it has one pass, and a loss that needs no whole minibatch.
    """

    def __init__(self, policy: TrainingBackend, critic: CriticBackend, *, in_parts: bool = True) -> None:
        self._policy = policy
        self._critic = critic
        self._in_parts = in_parts
        # One thread: values are computed between two steps of the critic, never within one.
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="critic")

    def submit_values(self, sequences: Sequence[TrainingSequence]) -> Future[list[torch.Tensor]]:
        """Run :meth:`CriticBackend.forward_values` as soon as the critic is free."""
        return self._thread.submit(self._critic.forward_values, sequences)

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._policy.forward_logprobs(sequences)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._policy.reference_logprobs(sequences)

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`Training.update`, also for the errors of either model.

        Where a step may be in parts, no model moves before the passes of both have succeeded.

        Raises:
            HalfStepError: one of them rejected the minibatch after the other had trained on it.
        """
        if self._in_parts:
            return super().update(minibatch)
        return self._step_both(lambda: self._critic.update(minibatch), lambda: self._policy.update(minibatch))

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`Training.accumulate`. If one rejects the part, both discard the step."""
        try:
            self._run_both(lambda: self._critic.accumulate(part), lambda: self._policy.accumulate(part))
        except BaseException:
            self.discard()
            raise

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`Training.finish` and :meth:`update`."""
        return self._step_both(lambda: self._critic.finish(step), lambda: self._policy.finish(step))

    def discard(self) -> None:
        self._run_both(self._critic.discard, self._policy.discard)

    def take_records(self) -> dict[int, TokenRecord]:
        return self._policy.take_records()

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._policy.named_weights()

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        return self._policy.stage(transport, version)

    def snapshot(self) -> dict[str, object]:
        policy, critic = self._run_both(self._critic.snapshot, self._policy.snapshot)
        return {"policy": policy, "critic": critic}

    def save(self, snapshot: dict[str, Any], folder: Path) -> dict[str, str]:
        """See :meth:`Training.save`; the critic's state is in a folder within."""
        checksums = self._policy.save(snapshot["policy"], folder)
        (folder / CRITIC_FOLDER).mkdir()
        of_critic = self._critic.save(snapshot["critic"], folder / CRITIC_FOLDER)
        return checksums | {f"{CRITIC_FOLDER}/{name}": checksum for name, checksum in of_critic.items()}

    def load(self, folder: Path) -> None:
        """See :meth:`Training.load`.

        Raises:
            CheckpointError: the folder has no critic (nothing has changed), or the critic of another model (the policy is
                loaded).
        """
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no critic: its run used another trainer.algorithm.advantage_estimator than gae. {REMEDY}"
            )
        self._policy.load(folder)
        # In the critic's thread, after the values that were asked for before.
        self._thread.submit(self._critic.load, folder / CRITIC_FOLDER).result()

    def export_hf(self, folder: Path) -> None:
        self._policy.export_hf(folder)

    def close(self) -> None:
        """Cancel calls that wait for the critic, and close both backends."""
        # Before the workers end: the thread may be in a call of theirs.
        self._thread.shutdown(cancel_futures=True)
        try:
            self._critic.close()
        finally:
            self._policy.close()

    def _step_both(
        self, critic_step: Callable[[], dict[str, float]], policy_step: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """Return the metrics of both, or raise one error that tells correctly whether anything has moved."""
        critic = self._thread.submit(critic_step)
        try:
            policy = policy_step()
        except _REJECTIONS as error:
            # Waits for the critic: only both outcomes tell whether anything has moved.
            critic_error = critic.exception()
            if critic_error is None:
                raise HalfStepError(f"The critic made a step that the policy rejected: {error}") from error
            if not isinstance(critic_error, _REJECTIONS):  # it failed half-way, and may have moved
                raise critic_error from error
            raise
        except BaseException:
            critic.exception()  # wait: both must have ended
            raise
        try:
            return policy | critic.result()
        except _REJECTIONS as error:
            raise HalfStepError(f"The policy made a step that the critic rejected: {error}") from error

    def _run_both(self, critic_call: Callable[[], Any], policy_call: Callable[[], T]) -> tuple[T, Any]:
        """Return both results, once both calls have ended."""
        critic = self._thread.submit(critic_call)
        try:
            policy = policy_call()
        finally:
            critic.exception()
        return policy, critic.result()
