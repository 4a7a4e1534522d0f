"""Builds the minibatch of each step, if possible while the step before it trains.

    groups that the next step will train ──prepare──> thread ──┐
    groups of a step ─────────────────────────────────build────┴──> the groups that train in their slots, minibatch

A minibatch is a function of its inputs alone, so it does not matter when it is built. A prepared one whose inputs turn out
differently is discarded.
"""

from __future__ import annotations

from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass

from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.rollout.filters import groups_to_train
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup


@dataclass(frozen=True, eq=False, slots=True)
class MinibatchInputs:
    """What a minibatch depends on, beside the settings."""

    groups: Sequence[RolloutGroup]
    step: int
    oldest_trained_version: int | None  # see :func:`build_minibatch`
    kl_factor: float

    @property
    def key(self) -> tuple[object, ...]:
        """Equal for inputs that give the same minibatch. A user's trainer may train other groups under the same indices."""
        return tuple(self.groups), self.step, self.oldest_trained_version, self.kl_factor


class MinibatchBuilder:
    """Builds minibatches. ``prepare`` is called on the control loop, ``build`` in the training thread.

    Args:
        seed: of the run; decides which groups replace those without signal.
    """

    def __init__(self, algorithm: AlgorithmConfig, seed: int) -> None:
        self._algorithm = algorithm
        self._seed = seed
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="minibatch")
        # By step: the next one may be prepared before the training thread has come to the current one.
        self._prepared: dict[int, tuple[tuple[object, ...], Future[tuple[list[RolloutGroup], Minibatch]]]] = {}

    def prepare(self, inputs: MinibatchInputs) -> None:
        """Begin to build a minibatch in a thread. Call it once per step at most."""
        self._prepared[inputs.step] = inputs.key, self._thread.submit(self._build, inputs)

    def build(self, inputs: MinibatchInputs) -> tuple[list[RolloutGroup], Minibatch]:
        """Return the groups that train in the batch slots of ``inputs.groups``, and the minibatch of them.

        Raises:
            GeneratorOutputError: see :func:`build_minibatch`.
        """
        key, prepared = self._prepared.pop(inputs.step, (None, None))
        return prepared.result() if prepared is not None and key == inputs.key else self._build(inputs)

    def _build(self, inputs: MinibatchInputs) -> tuple[list[RolloutGroup], Minibatch]:
        trained = groups_to_train(inputs.groups, self._algorithm, seed=self._seed, step=inputs.step)
        minibatch = build_minibatch(
            trained,
            inputs.step,
            self._algorithm,
            oldest_trained_version=inputs.oldest_trained_version,
            kl_factor=inputs.kl_factor,
        )
        return trained, minibatch

    def close(self) -> None:
        """End the thread."""
        self._thread.shutdown()
