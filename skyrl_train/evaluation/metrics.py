"""What an evaluation says: pass@k, avg@k, rewards and lengths, over all prompts and per data source. Pure.

eval/pass@1   eval/pass@2 ...   eval/reward ...      over all prompts
eval/<data source>/pass@1 ...                        over those of one source
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from skyrl_train.observability.live import counted, duration, shortened

# Rewards are sums of floats, some of them computed in float32: what should be 1.0 may be a little less.
ROUNDING = 1e-6
FAILURES_IN_A_ROW = 8  # reasons that a row of eval.jsonl names; the log has all of them


def passed(reward: float, threshold: float) -> bool:
    """Whether a reward is at least ``threshold``, up to rounding."""
    return reward >= threshold - ROUNDING


@dataclass(frozen=True, slots=True)
class EvaluatedSample:
    """One sample. One that failed twice has no reward and has not passed; ``failure`` says why."""

    reward: float | None
    passed: bool
    response_tokens: int = 0  # sampled, those of tools and templates left out
    truncated: bool = False  # ended by a length limit
    failure: str = ""


@dataclass(frozen=True, slots=True)
class EvaluatedPrompt:
    """All samples of a prompt, in the order of their numbers."""

    uid: str
    data_source: str
    samples: tuple[EvaluatedSample, ...]


@dataclass(frozen=True)
class EvaluationResult:
    """What one policy version is worth. ``seconds``: from the start of its evaluation to its end."""

    version: int
    prompts: tuple[EvaluatedPrompt, ...]
    seconds: float

    @cached_property
    def metrics(self) -> dict[str, float]:
        """By name; of prompts without a data source there are overall figures only."""
        metrics = _scores("eval", self.prompts)
        for source in sorted({prompt.data_source for prompt in self.prompts} - {""}):
            metrics |= _scores(f"eval/{source}", [p for p in self.prompts if p.data_source == source])
        return {**metrics, "eval/seconds": self.seconds}

    @property
    def row(self) -> dict[str, Any]:
        """The line of ``eval.jsonl``, without its step."""
        failures = self._failures[:FAILURES_IN_A_ROW]
        return {"policy_version": self.version, **self.metrics, "failures": failures}

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
    """1, 2, 4, ... below ``n``, and ``n`` itself."""
    return [*(2**i for i in range(n.bit_length()) if 2**i < n), n]


def pass_at_k(n: int, correct: int, k: int) -> float:
    """The chance that at least one of ``k`` samples passes, estimated without bias from ``n`` samples.

    ``1 - C(n - correct, k) / C(n, k)``: the share of the ``k``-subsets of the ``n`` samples that hold one that passed
    (Chen et al. 2021, "Evaluating large language models trained on code", arXiv 2107.03374).
    """
    return 1.0 - math.comb(n - correct, k) / math.comb(n, k)


def avg_at_k(outcomes: Sequence[bool], k: int) -> float:
    """The share of the first ``k`` samples that passed: what an evaluation with ``k`` samples would have measured.

    With ``k = n`` it is pass@1. How far it is off with a smaller ``k`` shows how much noise ``k`` samples leave.
    """
    return sum(outcomes[:k]) / k


def _scores(prefix: str, prompts: Sequence[EvaluatedPrompt]) -> dict[str, float]:
    outcomes = [[sample.passed for sample in prompt.samples] for prompt in prompts]
    samples = [sample for prompt in prompts for sample in prompt.samples]
    ended = [(sample, sample.reward) for sample in samples if sample.reward is not None]
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
