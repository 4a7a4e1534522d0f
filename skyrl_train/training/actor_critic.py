"""A policy and its critic as one training backend: they make the same steps, each where it is.

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
from skyrl_train.training.backend import CriticBackend, Minibatch, TrainingBackend, TrainingSequence
from skyrl_train.training.state import REMEDY

if TYPE_CHECKING:
    from skyrl_train.inference.weight_update import WeightUpdate
    from skyrl_train.publication.base import WeightTransport

CRITIC_FOLDER = "critic"  # of its state, within that of the policy's
T = TypeVar("T")
# What a backend raises before anything has moved.
_REFUSALS = (ConfigError, GeneratorOutputError, ValueError)


class ActorCritic(TrainingBackend):
    """The policy's backend, with a critic that is trained on the same sequences at the same time.

    Neither needs anything of the other within a step, so both compute at once, and values are computed while the policy
    trains; workers that hold both do one after the other, in the order in which they are asked. What is published and
    exported is the policy alone; a checkpoint holds both.

    Args:
        policy: closed together with this.
        critic: the same.
    """

    def __init__(self, policy: TrainingBackend, critic: CriticBackend) -> None:
        self._policy = policy
        self._critic = critic
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="critic")

    def submit_values(self, sequences: Sequence[TrainingSequence]) -> Future[list[torch.Tensor]]:
        """:meth:`CriticBackend.forward_values` as soon as the critic is free."""
        return self._thread.submit(self._critic.forward_values, sequences)

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._policy.forward_logprobs(sequences)

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._policy.reference_logprobs(sequences)

    # ---- training

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """See :meth:`Training.update`, also for what either raises.

        Raises:
            HalfStepError: one of them refused the minibatch after the other had trained on it.
        """
        return self._moving(lambda: self._critic.update(minibatch), lambda: self._policy.update(minibatch))

    def accumulate(self, part: Minibatch) -> None:
        """See :meth:`Training.accumulate`. Where one refuses the part, both forget the step."""
        of_critic = self._thread.submit(self._critic.accumulate, part)
        try:
            self._with(of_critic, lambda: self._policy.accumulate(part))
        except BaseException:
            self.discard()
            raise

    def finish(self, step: int) -> dict[str, float]:
        """See :meth:`Training.finish` and :meth:`update`."""
        return self._moving(lambda: self._critic.finish(step), lambda: self._policy.finish(step))

    def discard(self) -> None:
        self._with(self._thread.submit(self._critic.discard), self._policy.discard)

    # ---- weights and checkpoints

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        return self._policy.named_weights()

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        return self._policy.stage(transport, version)

    def snapshot(self) -> dict[str, object]:
        policy, critic = self._with(self._thread.submit(self._critic.snapshot), self._policy.snapshot)
        return {"policy": policy, "critic": critic}

    def save(self, snapshot: dict[str, Any], folder: Path) -> None:
        """See :meth:`Training.save`; the critic's state is in a folder of its own within."""
        self._policy.save(snapshot["policy"], folder)
        (folder / CRITIC_FOLDER).mkdir()
        self._critic.save(snapshot["critic"], folder / CRITIC_FOLDER)

    def load(self, folder: Path) -> None:
        """See :meth:`Training.load`.

        Raises:
            CheckpointError: the folder has no critic (nothing has changed), or that of another model (the policy is loaded).
        """
        if not (folder / CRITIC_FOLDER).is_dir():
            raise CheckpointError(
                f"{folder} has no critic: its run had another trainer.algorithm.advantage_estimator than gae. {REMEDY}"
            )
        self._policy.load(folder)
        self._thread.submit(self._critic.load, folder / CRITIC_FOLDER).result()

    def export_hf(self, folder: Path) -> None:
        self._policy.export_hf(folder)

    def close(self) -> None:
        """Ends what waits for the critic, and both backends."""
        self._thread.shutdown(cancel_futures=True)
        try:
            self._critic.close()
        finally:
            self._policy.close()

    def _moving(
        self, of_critic: Callable[[], dict[str, float]], of_policy: Callable[[], dict[str, float]]
    ) -> dict[str, float]:
        """The metrics of both, or one error that says truly whether anything has moved."""
        critic = self._thread.submit(of_critic)
        try:
            policy = of_policy()
        except _REFUSALS as error:
            of_other = critic.exception()
            if of_other is None:
                raise HalfStepError(f"The critic made a step that the policy refused: {error}") from error
            if not isinstance(of_other, _REFUSALS):  # it broke, and may have moved
                raise of_other from error
            raise
        except BaseException:
            critic.exception()  # both have ended
            raise
        try:
            return policy | critic.result()
        except _REFUSALS as error:
            raise HalfStepError(f"The policy made a step that the critic refused: {error}") from error

    def _with(self, of_critic: Future[Any], of_policy: Callable[[], T]) -> tuple[T, Any]:
        """What both return, once both have ended."""
        try:
            policy = of_policy()
        finally:
            of_critic.exception()
        return policy, of_critic.result()
