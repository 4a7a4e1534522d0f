"""Each policy loss and its gradient against a loop written straight from its formula (SEMANTICS 7.4)."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable

import pytest
import torch
from algorithm_worlds import Batch, Token, batches, few, gradient
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.algorithms.losses import POLICY_LOSSES, ppo_clip, token_draws
from skyrl_train.algorithms.tokens import MINIBATCH_STATISTICS, MinibatchTokens, bounded_ratio
from skyrl_train.config.derive import clip_bounds
from skyrl_train.config.schema import AlgorithmConfig, CispoConfig, ClipCovConfig, KlCovConfig, SapoConfig

low_bounds, high_bounds = st.floats(0, 0.9), st.floats(0, 3)


def ratio(token: Token) -> float:
    return math.exp(token.current - token.proximal)


def surrogate(u: float, advantage: float, low: float, high: float) -> tuple[float, float]:
    """PPO's loss, and its derivative by log pi (u' = u)."""
    bounded = min(max(u, 1 - low), 1 + high)
    inside = u * advantage <= bounded * advantage
    return -min(u * advantage, bounded * advantage), -u * advantage if inside else 0.0


def check(name: str, batch: Batch, config: AlgorithmConfig, expected: Callable[[Token], tuple[float, float]]) -> None:
    """Losses and gradients are those of ``expected``, token by token."""
    tokens = batch.tokens()
    loss = POLICY_LOSSES.get(name)(tokens, config).loss
    values = [expected(token) for token in batch.flat]
    assert loss.tolist() == pytest.approx([value for value, _ in values], rel=1e-9, abs=1e-9)
    assert gradient(loss, tokens) == pytest.approx([slope for _, slope in values], rel=1e-9, abs=1e-9)


@few
@given(batches, low_bounds, high_bounds)
def test_ppo_clip(batch: Batch, low: float, high: float) -> None:
    config = AlgorithmConfig(eps_clip_low=low, eps_clip_high=high)
    check("ppo_clip", batch, config, lambda t: surrogate(ratio(t), t.advantage, low, high))
    tokens = batch.tokens()
    result = ppo_clip(tokens, config)
    assert result.ratio.tolist() == pytest.approx([ratio(t) for t in batch.flat])
    for clipped, token in zip(result.clipped.tolist(), batch.flat, strict=True):
        u = ratio(token)
        if min(abs(u - (1 - low)), abs(u - (1 + high)), abs(token.advantage)) > 1e-9:
            assert clipped is ((u > 1 + high and token.advantage > 0) or (u < 1 - low and token.advantage < 0))


@few
@given(batches, low_bounds, high_bounds, st.floats(1.01, 10))
def test_dual_clip(batch: Batch, low: float, high: float, c: float) -> None:
    def expected(t: Token) -> tuple[float, float]:
        once, slope = surrogate(ratio(t), t.advantage, low, high)
        if t.advantage < 0 and once > -c * t.advantage:
            return -c * t.advantage, 0.0
        return once, slope

    check("dual_clip", batch, AlgorithmConfig(eps_clip_low=low, eps_clip_high=high, clip_ratio_c=c), expected)


@few
@given(batches, low_bounds, high_bounds)
def test_cispo(batch: Batch, low: float, high: float) -> None:
    def expected(t: Token) -> tuple[float, float]:
        weight = min(max(ratio(t), 1 - low), 1 + high)
        return -weight * t.advantage * t.current, -weight * t.advantage

    check("cispo", batch, AlgorithmConfig(cispo=CispoConfig(low, high)), expected)


@few
@given(batches, st.floats(0.1, 5), st.floats(0.1, 5))
def test_sapo(batch: Batch, positive: float, negative: float) -> None:
    def expected(t: Token) -> tuple[float, float]:
        u, tau = ratio(t), positive if t.advantage > 0 else negative
        gate = 1 / (1 + math.exp(-tau * (u - 1)))
        return -4 / tau * gate * t.advantage, -4 * gate * (1 - gate) * u * t.advantage

    check("sapo", batch, AlgorithmConfig(sapo=SapoConfig(positive, negative)), expected)


@few
@given(batches)
def test_importance_sampling(batch: Batch) -> None:
    check("importance_sampling", batch, AlgorithmConfig(), lambda t: (-ratio(t) * t.advantage,) * 2)


@few
@given(batches, low_bounds, high_bounds, st.lists(st.floats(-2, 2), min_size=4, max_size=4))
def test_gspo_is_its_sequence_form_where_a_sequence_has_one_advantage(
    batch: Batch, low: float, high: float, of_sequences: list[float]
) -> None:
    batch = Batch([[t._replace(advantage=a) for t in s] for s, a in zip(batch.sequences, of_sequences, strict=False)])
    tokens = batch.tokens()
    result = POLICY_LOSSES.get("gspo")(tokens, AlgorithmConfig(eps_clip_low=low, eps_clip_high=high))
    means = tokens.sequence_mean(result.loss)

    reference = batch.tokens()
    losses, start = [], 0
    for sequence, advantage in zip(batch.sequences, of_sequences, strict=False):
        part = slice(start, start + len(sequence))
        start += len(sequence)
        s = (reference.logprobs[part] - reference.proximal_logprobs[part]).mean().exp()
        losses.append(-torch.minimum(s * advantage, s.clamp(1 - low, 1 + high) * advantage))
    assert means.tolist() == pytest.approx([loss.item() for loss in losses], rel=1e-9, abs=1e-9)
    assert gradient(means, tokens) == pytest.approx(gradient(torch.stack(losses), reference), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize(("loss", "low", "high"), [("gspo", 3e-4, 4e-4), ("ppo_clip", 0.2, 0.2)])
def test_each_clipped_loss_has_bounds_of_its_own_unless_others_are_set(loss: str, low: float, high: float) -> None:
    assert clip_bounds(AlgorithmConfig(policy_loss_type=loss)) == (low, high)
    assert clip_bounds(AlgorithmConfig(policy_loss_type=loss, eps_clip_high=0.28)) == (low, 0.28)
    assert clip_bounds(AlgorithmConfig(policy_loss_type=loss, eps_clip_low=0.0)) == (0.0, high)


def of_minibatch(name: str, batch: Batch, config: AlgorithmConfig) -> dict[str, float]:
    tokens = batch.tokens()
    return MINIBATCH_STATISTICS.get(name)(
        MinibatchTokens(tokens.proximal_logprobs, tokens.behaviour_logprobs, tokens.advantages), config
    )


def covariances(batch: Batch) -> list[float]:
    flat = batch.flat
    mean_logprob = math.fsum(t.proximal for t in flat) / len(flat)
    mean_advantage = math.fsum(t.advantage for t in flat) / len(flat)
    return [(t.proximal - mean_logprob) * (t.advantage - mean_advantage) for t in flat]


@few
@given(batches, st.floats(0, 1), st.floats(0, 3))
def test_kl_cov_penalises_the_tokens_of_the_highest_covariance(batch: Batch, share: float, coef: float) -> None:
    config = AlgorithmConfig(kl_cov=KlCovConfig(share, coef))
    facts = of_minibatch("kl_cov", batch, config)
    tokens = batch.tokens(**facts)
    result = POLICY_LOSSES.get("kl_cov")(tokens, config)
    cov = covariances(batch)
    highest = sorted(cov, reverse=True)[: math.ceil(share * len(cov))]
    expected, slopes = [], []
    for token, value in zip(batch.flat, cov, strict=True):
        chosen, moved = bool(highest) and value >= highest[-1], token.current - token.proximal
        expected.append(-ratio(token) * token.advantage + chosen * coef * abs(moved))
        slopes.append(-ratio(token) * token.advantage + chosen * coef * ((moved > 0) - (moved < 0)))
    assert result.loss.tolist() == pytest.approx(expected, rel=1e-9, abs=1e-9)
    assert gradient(result.loss, tokens) == pytest.approx(slopes, rel=1e-9, abs=1e-9)


@few
@given(batches, st.floats(0, 1), st.floats(-2, 1), st.floats(0, 3))
def test_clip_cov_leaves_out_some_tokens_within_the_bounds(
    batch: Batch, share: float, low: float, width: float
) -> None:
    config = AlgorithmConfig(clip_cov=ClipCovConfig(share, low, low + width))
    facts = of_minibatch("clip_cov", batch, config)
    tokens = batch.tokens(**facts)
    candidates = [low <= value <= low + width for value in covariances(batch)]
    if any(candidates):
        assert facts["clip_cov_chance"] == min(1, share * len(candidates) / sum(candidates))
    chosen = [c and d < facts["clip_cov_chance"] for c, d in zip(candidates, token_draws(tokens).tolist(), strict=True)]
    rest = ppo_clip(batch.tokens(), config)
    result = POLICY_LOSSES.get("clip_cov")(tokens, config)
    assert result.loss.tolist() == [0.0 if c else x for c, x in zip(chosen, rest.loss.tolist(), strict=True)]
    slopes = gradient(result.loss, tokens)
    assert all(slope == 0 for slope, c in zip(slopes, chosen, strict=True) if c)


def draw(token: Token, place: int) -> float:
    """SplitMix64 (Steele, Lea and Flood 2014) in Python's integers, over the place and the bits of two float32."""
    state = place
    for value in (token.behaviour, token.advantage):
        (bits,) = struct.unpack("<i", struct.pack("<f", value))
        state = (state ^ bits) % 2**64  # a sign bit fills the upper half
        state = (state ^ (state >> 30)) * 0xBF58476D1CE4E5B9 % 2**64
        state = (state ^ (state >> 27)) * 0x94D049BB133111EB % 2**64
        state ^= state >> 31
    return (state % 2**53) / 2**53


@few
@given(batches)
def test_a_draw_is_a_hash_of_the_tokens_data_and_its_place(batch: Batch) -> None:
    expected = [draw(token, place) for sequence in batch.sequences for place, token in enumerate(sequence)]
    assert token_draws(batch.tokens()).tolist() == expected


def test_draws_are_even_and_belong_to_the_token_wherever_its_sequence_is_trained() -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.rand(2000, 4, generator=generator, dtype=torch.float64).tolist()
    sequences = [[Token(*row) for row in values[i : i + 50]] for i in range(0, 2000, 50)]
    draws = token_draws(Batch(sequences).tokens())
    alone = torch.cat([token_draws(Batch([sequence]).tokens()) for sequence in sequences])
    assert torch.equal(draws, alone)
    assert torch.histc(draws, 10, 0, 1).tolist() == pytest.approx([200] * 10, abs=60)
    same = token_draws(Batch([[Token(0.0, 0.0, 0.0, 1.0)] * 100]).tokens())
    assert len(set(same.tolist())) == 100, "tokens that are sure differ by their place"


def test_no_gradient_reaches_the_proximal_policy_and_a_far_ratio_stays_finite() -> None:
    far = bounded_ratio(torch.tensor([0.0, -500.0]), torch.tensor([-500.0, 0.0]))
    assert far.tolist() == pytest.approx([math.exp(20), math.exp(-20)])
    for name in POLICY_LOSSES.names():
        facts = {"mean_logprob": 0.0, "mean_advantage": 0.0, "clip_cov_chance": 0.5, "kl_cov_threshold": 0.0}
        tokens = Batch([[Token(-500.0, -0.1, -0.1, -1.0), Token(-0.1, -500.0, -0.1, 2.0)]]).tokens(**facts)
        loss, ratios, _ = POLICY_LOSSES.get(name)(tokens, AlgorithmConfig())
        assert not ratios.requires_grad, name
        assert all(map(math.isfinite, loss.tolist() + gradient(loss, tokens))), name


def test_a_covariance_on_a_bound_is_within_the_bounds() -> None:
    tokens = Batch([[Token(-1.0, -1.0, -1.0, 1.0), Token(-2.0, -2.0, -1.0, 2.0)]]).tokens(
        mean_logprob=0.0, mean_advantage=0.0, clip_cov_chance=1.0
    )
    for low, high, clipped in [(-4, -1, [True, True]), (-3, -1, [True, False]), (-4, -2, [False, True])]:
        config = AlgorithmConfig(clip_cov=ClipCovConfig(1.0, low, high))
        assert POLICY_LOSSES.get("clip_cov")(tokens, config).clipped.tolist() == clipped
