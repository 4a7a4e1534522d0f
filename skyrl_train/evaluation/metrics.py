"""Metrics of an evaluation: pass@k, avg@k, rewards and lengths, over all prompts and per data source. Pure.

eval/pass@1   eval/pass@2 ...   eval/reward ...      over all prompts
eval/<data source>/pass@1 ...                        over the prompts of one source
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from skyrl_train.observability.failures import shortened
from skyrl_train.observability.samples import RecordedGroup
from skyrl_train.observability.screen import counted, duration
from skyrl_train.types import RolloutGroup

# Rewards are sums of floats, some computed in float32: a reward of 1.0 may come out slightly less.
ROUNDING = 1e-6
MAX_FAILURES_IN_ROW = 8  # failures listed in a row of eval.jsonl; the log has all of them


def passed(reward: float, threshold: float) -> bool:
    """Return whether a reward is at least ``threshold``, up to rounding."""
    return reward >= threshold - ROUNDING


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One sample. A sample that failed twice has no reward and has not passed; ``failure`` is the reason."""

    reward: float | None
    passed: bool
    response_tokens: int = 0  # sampled tokens, without tokens of tools and templates
    truncated: bool = False  # ended by a length limit
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """All samples of a prompt, in their order."""

    uid: str
    data_source: str
    samples: tuple[EvaluatedSample, ...]
    recorded: RolloutGroup | None = field(default=None, compare=False)  # its tokens, if they are recorded


@dataclass(frozen=True)
class EvaluationResult:
    """The result for one policy version. ``seconds``: duration of the evaluation."""

    version: int
    prompts: tuple[EvaluatedPrompt, ...]
    seconds: float

    @cached_property
    def metrics(self) -> dict[str, float]:
        """Metrics by name. Prompts without a data source count only in the overall metrics."""
        metrics = _scores("eval", self.prompts)
        for source in sorted({prompt.data_source for prompt in self.prompts} - {""}):
            metrics |= _scores(f"eval/{source}", [p for p in self.prompts if p.data_source == source])
        return {**metrics, "eval/seconds": self.seconds}

    @property
    def row(self) -> dict[str, Any]:
        """The line of ``eval.jsonl``, without its step."""
        failures = self._failures[:MAX_FAILURES_IN_ROW]
        return {"policy_version": self.version, **self.metrics, "failures": failures}

    @property
    def recorded(self) -> list[RecordedGroup]:
        """The prompts whose samples are recorded: the same ones of every version."""
        return [RecordedGroup(prompt.recorded, "first") for prompt in self.prompts if prompt.recorded is not None]

    @property
    def headline(self) -> str:
        """One line for the screen."""
        samples = len(self.prompts[0].samples)
        shown = dict.fromkeys((1, samples))
        scores = [f"pass@{k} {self.metrics[f'eval/pass@{k}']:.3f}" for k in shown]
        if "eval/reward" in self.metrics:
            scores.append(f"reward {self.metrics['eval/reward']:.3f}")
        size = f"{counted(len(self.prompts), 'prompt', 'prompts')} x {counted(samples, 'sample', 'samples')}"
        text = f"evaluation of version {self.version}: {', '.join(scores)} ({size}, {duration(self.seconds)})"
        if self._failures:
            count, last = len(self._failures), shortened(str(self._failures[-1]["reason"]))
            text += f"; {counted(count, 'sample', 'samples')} failed, counted as not passed (last: {last})"
        return text

    @cached_property
    def _failures(self) -> list[dict[str, Any]]:
        return [
            {"uid": prompt.uid, "sample": number, "reason": sample.failure}
            for prompt in self.prompts
            for number, sample in enumerate(prompt.samples)
            if sample.failure
        ]


def powers_up_to(n: int) -> list[int]:
    """Return 1, 2, 4, ... below ``n``, and ``n`` itself."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """Return the unbiased estimate, from ``n`` samples, of the probability that at least one of ``k`` samples passes.

    ``1 - C(n - correct, k) / C(n, k)``: the share of the ``k``-subsets of the ``n`` samples with at least one that passed
    (Chen et al. 2021, "Evaluating large language models trained on code", arXiv 2107.03374).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def avg_at_k(outcomes: Sequence[bool], k: int) -> float:
    """Return the share of the first ``k`` samples that passed: the pass@1 of an evaluation with ``k`` samples.

    With ``k = n`` it is pass@1. The difference for a smaller ``k`` shows the noise of ``k`` samples.
    """
    return sum(outcomes[:k]) / k


def score_names(samples: int, sources: Iterable[str]) -> list[str]:
    """Return the names of the metrics of which a higher value is a better policy.

    Args:
        samples: of each prompt.
        sources: the data sources of the prompts.
    """
    scores = ["reward", *(f"{name}@{k}" for name in ("pass", "avg") for k in powers_up_to(samples))]
    prefixes = ["eval", *(f"eval/{source}" for source in sorted({*sources} - {""}))]
    return [f"{prefix}/{score}" for prefix in prefixes for score in scores]


def _scores(prefix: str, prompts: Sequence[EvaluatedPrompt]) -> dict[str, float]:
    outcomes = [[sample.passed for sample in prompt.samples] for prompt in prompts]
    samples = [sample for prompt in prompts for sample in prompt.samples]
    ended = [(sample, sample.reward) for sample in samples if sample.reward is not None]
    # Every prompt has the same number of samples: a failed one counts as not passed.
    n = len(outcomes[0])
    scores: dict[str, float] = {}
    for k in powers_up_to(n):
        scores[f"pass@{k}"] = statistics.fmean(pass_at_k(n, sum(each), k) for each in outcomes)
    for k in powers_up_to(n):
        scores[f"avg@{k}"] = statistics.fmean(avg_at_k(each, k) for each in outcomes)
    if ended:
        scores["reward"] = statistics.fmean(reward for _, reward in ended)
        scores["response_tokens"] = statistics.fmean(sample.response_tokens for sample, _ in ended)
        scores["truncated"] = statistics.fmean(sample.truncated for sample, _ in ended)
    scores["prompts"] = len(prompts)
    scores["failed"] = len(samples) - len(ended)
    return {f"{prefix}/{name}": value for name, value in scores.items()}
