"""Weights, rejections, proximal policies and metrics against loops from their formulas (SEMANTICS 7)."""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise

import pytest
import torch
from algorithm_worlds import Batch, Token, batches, few
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.algorithms.off_policy import (
    CORRECTIONS,
    Corrected,
    OffPolicyCorrection,
    interpolated_logprobs,
    keeps_sequence,
    m2po_rejected,
    m2po_statistics,
    mismatch_metrics,
    rejected_tokens,
)
from skyrl_train.algorithms.tokens import MinibatchTokens, PolicyTokens, TokenStatistics
from skyrl_train.config.schema import (
    AlgorithmConfig,
    OffPolicyCorrectionConfig,
    RejectionConfig,
    RejectionLevel,
)


def log_r(token: Token) -> float:
    return token.proximal - token.behaviour


def corrected(batch: Batch, **settings: object) -> Corrected:
    config = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(**settings))
    return OffPolicyCorrection(config)(batch.tokens())


def statistics_of(result: Corrected, tokens: int) -> TokenStatistics:
    return TokenStatistics.of(tokens, result.sums, result.maxima)


# Weights --------------------------------------------------------------------------------------------------------------


@few
@given(batches, st.floats(0.1, 10), st.floats(0.1, 10))
def test_truncated_weights(batch: Batch, cap: float, sequence_cap: float) -> None:
    caps = {"token_tis_ratio_clip_high": cap, "sequence_tis_ratio_clip_high": sequence_cap}
    products = [math.exp(max(-20, min(sum(map(log_r, s)), 20))) for s in batch.sequences for _ in s]
    geometric = [math.exp(sum(map(log_r, s)) / len(s)) for s in batch.sequences for _ in s]
    assert corrected(batch, tis_ratio_type="token", **caps).weights.tolist() == pytest.approx(
        [min(math.exp(log_r(t)), cap) for t in batch.flat]
    )
    for name, ratios in (("sequence", products), ("geometric", geometric)):
        result = corrected(batch, tis_ratio_type=name, **caps)
        assert result.weights.tolist() == pytest.approx([min(ratio, sequence_cap) for ratio in ratios])
        assert result.kept.all() and not result.weights.requires_grad
    assert corrected(batch, tis_ratio_type=None).weights.tolist() == [1.0] * len(batch.flat)


@few
@given(batches, st.floats(0, 1), st.floats(1, 5))
def test_icepop_keeps_the_ratio_within_its_bounds_and_rejects_the_rest(batch: Batch, low: float, high: float) -> None:
    result = corrected(batch, tis_ratio_type="icepop", icepop_ratio_low=low, icepop_ratio_high=high)
    ratios = torch.tensor([log_r(t) for t in batch.flat], dtype=torch.float64).exp().tolist()
    assert result.kept.tolist() == [low <= r <= high for r in ratios]
    assert result.weights.tolist() == pytest.approx([r if low <= r <= high else 0.0 for r in ratios])


# Rejections -----------------------------------------------------------------------------------------------------------

VALUES: dict[str, Callable[[Token], float]] = {
    "k1": lambda t: -log_r(t),
    "k2": lambda t: log_r(t) ** 2 / 2,
    "k3": lambda t: math.exp(log_r(t)) - 1 - log_r(t),
    "probability_difference": lambda t: math.exp(t.current) - math.exp(t.behaviour),
}


def statistic(name: str, level: str, sequence: list[Token]) -> list[float]:
    """Of a whole sequence one value; else, and where any token decides, one per token."""
    if name == "ratio":
        logs = [log_r(t) for t in sequence]
        if level == "sequence_mean":
            return [math.exp(sum(logs) / len(logs))]
        return [math.exp(sum(logs))] if level == "sequence_sum" else [math.exp(value) for value in logs]
    values = [VALUES[name](t) for t in sequence]
    if level == "sequence_mean":
        return [sum(values) / len(values)]
    return [sum(values)] if level == "sequence_sum" else values


@pytest.mark.parametrize("level", list(RejectionLevel))
@pytest.mark.parametrize("name", ["ratio", *VALUES])
@given(batch=batches, low=st.none() | st.floats(-1, 0.9), width=st.none() | st.floats(0.01, 3))
@settings(max_examples=15)  # of each of twenty rules
def test_a_rule_rejects_what_is_out_of_its_bounds(
    name: str, level: RejectionLevel, batch: Batch, low: float | None, width: float | None
) -> None:
    high = None if width is None else (low or 0.0) + width
    found = rejected_tokens(batch.tokens(), RejectionConfig(name, level, low, high)).tolist()
    bounds = [bound for bound in (low, high) if bound is not None]
    start = 0
    for sequence in batch.sequences:
        values = statistic(name, level, sequence)
        mine, start = found[start : start + len(sequence)], start + len(sequence)
        if any(abs(value - bound) < 1e-9 for value in values for bound in bounds):
            continue  # rounding decides
        outside = [(low is not None and v < low) or (high is not None and v > high) for v in values]
        expected = outside if level is RejectionLevel.token else [any(outside)] * len(sequence)
        assert mine == expected


@few
@given(batches, st.floats(0.001, 0.5))
def test_the_probability_difference_mask_of_dppo_rejects_only_what_leads_further_away(
    batch: Batch, delta: float
) -> None:
    rule = RejectionConfig("probability_difference", RejectionLevel.token, -delta, delta, away_only=True)
    found = rejected_tokens(batch.tokens(), rule).tolist()
    for token, rejected in zip(batch.flat, found, strict=True):
        difference, up = math.exp(token.current) - math.exp(token.behaviour), token.current > token.behaviour
        away = (token.advantage > 0 and up) or (token.advantage < 0 and token.current < token.behaviour)
        if abs(abs(difference) - delta) > 1e-9:
            assert rejected is (abs(difference) > delta and away)


def test_a_log_prob_that_is_no_number_is_out_of_all_bounds() -> None:
    batch = Batch([[Token(-1.0, math.nan, -1.0, 1.0), Token(-1.0, -1.0, -1.0, 1.0)]])
    assert rejected_tokens(batch.tokens(), RejectionConfig(high=2.0)).tolist() == [True, False]


@pytest.mark.parametrize(
    ("level", "high", "kept"),
    [
        (RejectionLevel.sequence_mean, 1.1, True),
        (RejectionLevel.sequence_mean, 0.9, False),
        (RejectionLevel.sequence_max, 1.9, False),
        (RejectionLevel.token, 1.9, True),  # not a rule about sequences
    ],
)
def test_rules_about_sequences_decide_which_one_is_kept(level: RejectionLevel, high: float, kept: bool) -> None:
    behaviour, proximal = torch.tensor([-1.0, -1.0]), torch.tensor([-1.0, -3.0])
    assert keeps_sequence(behaviour, proximal, [RejectionConfig("k1", level, high=high)]) is kept


@few
@given(batches, st.floats(0, 2))
def test_m2po_rejects_as_few_tokens_as_bound_the_mean_second_moment(batch: Batch, limit: float) -> None:
    tokens = batch.tokens()
    numbers = m2po_statistics(
        MinibatchTokens(tokens.proximal_logprobs, tokens.behaviour_logprobs, tokens.advantages), limit
    )
    moments = [log_r(t) ** 2 for t in batch.flat]
    kept = [not r for r in m2po_rejected(batch.tokens(**numbers)).tolist()]
    chosen = sorted(m for m, k in zip(moments, kept, strict=True) if k)
    assert not chosen or sum(chosen) / len(chosen) <= limit + 1e-12
    left = sorted(m for m, k in zip(moments, kept, strict=True) if not k)
    assert not left or not chosen or left[0] > chosen[-1], "the largest ones go"
    if left:  # with the next one, and those that equal it, the mean would be above the limit
        more = chosen + [m for m in left if m == left[0]]
        assert sum(more) / len(more) > limit - 1e-12


# Proximal policies ----------------------------------------------------------------------------------------------------


@few
@given(st.lists(st.tuples(st.floats(-6, 0), st.floats(-6, 0), st.integers(0, 6)), min_size=1))
def test_the_interpolated_policy_lies_between_behaviour_and_current_by_version(
    rows: list[tuple[float, float, int]],
) -> None:
    behaviour, current = (torch.tensor([row[i] for row in rows], dtype=torch.float64) for i in range(2))
    found = interpolated_logprobs(behaviour, current.requires_grad_(), torch.tensor([row[2] for row in rows]))
    expected = []
    for b, theta, lag in rows:
        v_theta, v_prox, v_b = 10, 9, 10 - lag
        share = min(max((v_prox - v_b) / (v_theta - v_b), 0), 1) if lag else 0.0
        expected.append(b + share * (theta - b))
    assert found.tolist() == pytest.approx(expected, rel=1e-5, abs=1e-5), "the shares are in float32"
    assert not found.requires_grad


def test_the_older_a_token_is_the_nearer_is_its_proximal_policy_to_the_current_one() -> None:
    lags = torch.arange(1, 9)
    found = interpolated_logprobs(torch.full((8,), -2.0), torch.full((8,), -1.0), lags).tolist()
    assert found[0] == -2.0 and all(a < b < -1.0 for a, b in pairwise(found))


# Metrics --------------------------------------------------------------------------------------------------------------


@few
@given(batches, st.floats(0.1, 10), st.floats(0.5, 2))
def test_metrics_are_those_of_the_untruncated_ratio_and_count_what_each_rule_rejects(
    batch: Batch, cap: float, high: float
) -> None:
    rules = [RejectionConfig(high=high), RejectionConfig("k3", RejectionLevel.sequence_mean, high=0.5)]
    result = corrected(batch, token_tis_ratio_clip_high=cap, rejections=rules)
    ratios = torch.tensor([log_r(t) for t in batch.flat], dtype=torch.float64).exp().tolist()
    n = len(ratios)
    found = mismatch_metrics(n, statistics_of(result, n).values())
    expected = {
        "off_policy/ratio_mean": sum(ratios) / n,
        "off_policy/ratio_max": max(ratios),
        "off_policy/clipped_fraction": sum(r > cap for r in ratios) / n,
        "off_policy/ess": sum(ratios) ** 2 / (n * sum(r * r for r in ratios)),
        "off_policy/chi2": sum(r * r for r in ratios) / n - 1,
        "off_policy/kl_k1": -sum(math.log(r) for r in ratios) / n,
        "off_policy/kl_k3": sum(r - 1 - math.log(r) for r in ratios) / n,
    }
    rejected = {f"{r.statistic}_{r.level}": rejected_tokens(batch.tokens(), r).tolist() for r in rules}
    rejected["any"] = [not kept for kept in result.kept.tolist()]
    assert rejected["any"] == [a or b for a, b in zip(*list(rejected.values())[:2], strict=True)]
    starts = [sum(map(len, batch.sequences[:i])) for i in range(len(batch.sequences))]
    for name, of in rejected.items():
        whole = [all(of[start : start + len(s)]) for start, s in zip(starts, batch.sequences, strict=True)]
        expected[f"off_policy/rejected_tokens/{name}"] = sum(of)
        expected[f"off_policy/rejected_sequences/{name}"] = sum(whole)
    assert found == pytest.approx(expected, abs=1e-9)


@few
@given(batches, st.integers(0, 3))
def test_no_split_between_sequences_changes_weights_rejections_or_metrics(batch: Batch, cut: int) -> None:
    settings = {
        "tis_ratio_type": "sequence",
        "rejections": [RejectionConfig("k1", RejectionLevel.sequence_sum, -1.0, 1.0)],
    }
    whole = corrected(batch, **settings)
    parts = [corrected(Batch(s), **settings) for s in (batch.sequences[:cut], batch.sequences[cut:]) if s]
    assert torch.equal(whole.kept, torch.cat([part.kept for part in parts]))
    torch.testing.assert_close(whole.weights, torch.cat([part.weights for part in parts]), rtol=1e-12, atol=0)
    together = TokenStatistics()
    for part in parts:
        together.add(statistics_of(part, len(part.weights)))
    assert together.tokens == len(batch.flat)
    assert together.values() == pytest.approx(statistics_of(whole, len(batch.flat)).values(), rel=1e-9, abs=1e-9)


# Bounds and edges -----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("low", "high", "kept"), [(0.5, 0.5, True), (0.5, None, True), (None, 0.5, True), (0.75, None, False)]
)
def test_a_value_on_a_bound_is_within_the_bounds(low: float | None, high: float | None, kept: bool) -> None:
    tokens = Batch([[Token(-1.0, -1.5, -1.0, 1.0)]]).tokens()
    assert rejected_tokens(tokens, RejectionConfig("k1", RejectionLevel.token, low, high)).tolist() == [not kept]


def test_a_ratio_is_never_below_0_and_never_at_most_0() -> None:
    tokens = Batch([[Token(-1.0, -9.0, -1.0, 1.0)]]).tokens()
    assert rejected_tokens(tokens, RejectionConfig(low=0.0)).tolist() == [False]
    assert rejected_tokens(tokens, RejectionConfig(high=0.0)).tolist() == [True]


@pytest.mark.parametrize("name", ["token", "sequence", "geometric"])
def test_a_ratio_at_the_cap_is_not_truncated(name: str) -> None:
    batch = Batch([[Token(-1.0, -1.0, -1.0, 1.0)], [Token(-1.0, -0.5, -1.0, 1.0)]])
    settings = OffPolicyCorrectionConfig(
        tis_ratio_type=name, token_tis_ratio_clip_high=1.0, sequence_tis_ratio_clip_high=1.0
    )
    weights = CORRECTIONS.get(name)(batch.tokens(), AlgorithmConfig(off_policy_correction=settings))
    assert (weights.weights.tolist(), weights.truncated.tolist()) == ([1.0, 1.0], [False, True])


def test_icepop_keeps_a_ratio_on_its_bounds() -> None:
    settings = OffPolicyCorrectionConfig(tis_ratio_type="icepop", icepop_ratio_low=1.0, icepop_ratio_high=1.0)
    tokens = Batch([[Token(-1.0, -1.0, -1.0, 1.0)]]).tokens()
    weights = CORRECTIONS.get("icepop")(tokens, AlgorithmConfig(off_policy_correction=settings))
    assert weights.weights.tolist() == [1.0] and weights.rejected is not None and not weights.rejected.any()


def test_m2po_keeps_tokens_whose_mean_second_moment_is_the_limit() -> None:
    tokens = Batch([[Token(-1.0, -1.5, -1.0, 1.0)]]).tokens()
    of_minibatch = MinibatchTokens(tokens.proximal_logprobs, tokens.behaviour_logprobs, tokens.advantages)
    assert m2po_statistics(of_minibatch, 0.25) == {"m2po_threshold": 0.25}
    assert m2po_statistics(of_minibatch, 0.2) == {"m2po_threshold": -1.0}


def test_a_bound_on_the_second_moment_rejects_and_counts_tokens() -> None:
    batch = Batch([[Token(-1.0, -1.0, -1.0, 1.0), Token(-1.0, -2.0, -1.0, 1.0)]])
    config = AlgorithmConfig(off_policy_correction=OffPolicyCorrectionConfig(m2po_threshold=0.04))
    result = OffPolicyCorrection(config)(batch.tokens(m2po_threshold=0.04))
    assert result.kept.tolist() == [True, False]
    assert result.sums["off_policy/rejected_tokens/m2po"].tolist() == [False, True]


def test_a_sequence_without_tokens_has_the_sum_and_the_mean_0() -> None:
    values = torch.tensor([1.0, 3.0])
    tokens = PolicyTokens(values, values, values, values, torch.tensor([0, 2]), 3)
    assert tokens.sequence_sum(values).tolist() == tokens.sequence_mean(values).tolist() == [1.0, 0.0, 3.0]
    assert tokens.sequence_max(values).tolist() == [1.0, -math.inf, 3.0]


def test_statistics_of_parts_add_up_and_carry_no_gradient() -> None:
    together = TokenStatistics()
    assert together.values() == {}
    for tokens, values in ((0, []), (2, [1.0, 4.0]), (1, [3.0])):
        of = torch.tensor(values, requires_grad=True)
        part = TokenStatistics.of(tokens, {"sum": of}, {"largest": of})
        assert not any(value.requires_grad for value in (*part.sums.values(), *part.maxima.values()))
        together.add(part)
    assert (together.tokens, together.values()) == (3, {"sum": 8.0, "largest": 4.0})
