"""What is simulated, and what came of it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

from skyrl_train.config.plan import Plan
from skyrl_train.simulation.engine import EngineSpeed
from skyrl_train.simulation.lengths import Lengths
from skyrl_train.simulation.training import TrainedTokens, TrainingSpeed


@dataclass(frozen=True)
class Workload:
    """What is to be done and by what: ``steps`` steps of ``batch_groups`` groups of ``samples`` responses each.

    ``engines`` engines of the same speed generate.
    """

    lengths: Lengths
    batch_groups: int
    steps: int
    engine: EngineSpeed
    training: TrainingSpeed
    engines: int = 1
    samples: int = 1

    @property
    def generation_tokens_per_s(self) -> float:
        """What all engines sample with every slot in use."""
        return self.engines * self.engine.slots * self.engine.steps_per_s(self.engine.slots)

    @property
    def training_tokens_per_s(self) -> float:
        """What training takes in when it never waits, for steps of mean size."""
        tokens = self.batch_groups * self.samples * self.lengths.mean
        return tokens / (self.training.per_step_s + self.training.per_token_s * tokens)

    @property
    def tokens_per_s(self) -> float:
        """The slower of the two: no schedule is faster, unless it trains less than it samples."""
        return min(self.generation_tokens_per_s, self.training_tokens_per_s)


@dataclass(frozen=True)
class StepRecord:
    """One step: when it ended, and how old its groups were."""

    step: int
    ended_s: float
    processor_s: float  # of this process until then, not virtual
    lags: tuple[int, ...]  # of its groups, by their oldest sampled token
    metrics: Mapping[str, float]


@dataclass(frozen=True)
class Steps:
    """What a run in virtual time did, step by step.

    The steady state leaves out ``edge`` steps at the beginning, when generation has no lead yet, and as many at the end,
    when nothing more is admitted.
    """

    records: Sequence[StepRecord]
    trained: Sequence[TrainedTokens]
    began_s: float  # the first publication was there
    edge: int

    @property
    def _steady(self) -> slice:
        return slice(self.edge, len(self.records) - self.edge)

    @cached_property
    def total_s(self) -> float:
        """From the first publication to the end of the last step."""
        return self.records[-1].ended_s - self.began_s

    @cached_property
    def steady_s(self) -> float:
        """Length of the steady state."""
        begin_s = self.records[self.edge - 1].ended_s if self.edge else self.began_s
        return self.records[self._steady][-1].ended_s - begin_s

    @property
    def step_s(self) -> float:
        """Seconds per step in the steady state."""
        return self.steady_s / len(self.records[self._steady])

    @property
    def max_trained_lag(self) -> int:
        """Of all tokens that were trained with loss mask 1, at any time."""
        return max(step.max_lag for step in self.trained)

    @property
    def masked_share(self) -> float:
        """Sampled tokens of trained groups that had loss mask 0."""
        return 1 - sum(step.trained for step in self.trained) / sum(step.sampled for step in self.trained)

    @cached_property
    def _lags(self) -> list[int]:
        return [lag for record in self.records[self._steady] for lag in record.lags]

    @property
    def mean_lag(self) -> float:
        """Of groups, by their oldest token."""
        return sum(self._lags) / len(self._lags)

    def share_over(self, bound: int) -> float:
        """Trained groups whose oldest token was older than ``bound`` steps."""
        return sum(lag > bound for lag in self._lags) / len(self._lags)


@dataclass(frozen=True)
class Outcome(Steps):
    """What a simulated run of a workload did."""

    workload: Workload
    plan: Plan
    busy_slot_s: float

    @property
    def tokens_per_s(self) -> float:
        """Sampled tokens of the groups that were trained, per second of the steady state."""
        return sum(step.sampled for step in self.trained[self._steady]) / self.steady_s

    @property
    def utilization(self) -> float:
        """Its rate over what the slower of generation and training could do."""
        return self.tokens_per_s / self.workload.tokens_per_s
