"""The KL term: estimators against loops from their formulas, their gradients against exact expectations, and the loss."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from training_worlds import (
    backend,
    config,
    minibatch,
    same,
    token_fields,
    weights,
)

from skyrl_train.algorithms.kl import KL_ESTIMATORS, k1, k2, k3
from skyrl_train.algorithms.tokens import MAX_LOG_RATIO
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.objective import Objective

pytestmark = pytest.mark.usefixtures("one_compute_thread")

logprob = st.floats(-6, 0, allow_nan=False)
pairs = st.lists(st.tuples(logprob, logprob), min_size=1, max_size=8)


# Estimators -----------------------------------------------------------------------------------------------------------


def of_formula(name: str, policy: float, reference: float) -> float:
    """Schulman's formulas with r = q(x) / p(x)."""
    log_r = reference - policy
    return {"k1": -log_r, "k2": log_r * log_r / 2, "k3": (math.exp(log_r) - 1) - log_r}[name]


@given(pairs)
@pytest.mark.parametrize("name", ["k1", "k2", "k3"])
def test_an_estimator_is_its_formula(name: str, tokens: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(tokens, dtype=torch.float64).T
    estimates = KL_ESTIMATORS.get(name)(policy, reference)
    assert estimates.tolist() == pytest.approx([of_formula(name, *token) for token in tokens], rel=1e-12, abs=1e-12)


def distributions(seed: int, size: int = 7) -> tuple[torch.Tensor, torch.Tensor]:
    """Logits of a policy, with gradient, and log-probs of a reference, over a small vocabulary."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(size, generator=generator, dtype=torch.float64).requires_grad_()
    return logits, torch.randn(size, generator=generator, dtype=torch.float64).log_softmax(0)


def kl(p: torch.Tensor, q: torch.Tensor) -> torch.Tensor:
    """Of distributions given by their log-probs."""
    return (p.exp() * (p - q)).sum()


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("estimate", [k1, k3])
def test_k1_and_k3_are_the_divergence_on_average(
    estimate: Callable[[torch.Tensor, torch.Tensor], torch.Tensor], seed: int
) -> None:
    logits, q = distributions(seed)
    p = logits.detach().log_softmax(0)
    assert float((p.exp() * estimate(p, q)).sum()) == pytest.approx(float(kl(p, q)), rel=1e-12)


@pytest.mark.parametrize("seed", range(5))
def test_as_losses_k2_and_k3_have_the_gradients_of_two_divergences_and_k1_has_none(seed: int) -> None:
    logits, q = distributions(seed)
    sampled = logits.detach().softmax(0)  # how often each token is sampled is no part of a loss's gradient

    def gradient(of: Callable[[torch.Tensor], torch.Tensor]) -> torch.Tensor:
        (result,) = torch.autograd.grad(of(logits.log_softmax(0)), logits)
        return result

    zero = torch.zeros_like(logits)
    torch.testing.assert_close(gradient(lambda p: (sampled * k1(p, q)).sum()), zero, rtol=0, atol=1e-14)
    torch.testing.assert_close(gradient(lambda p: (sampled * k2(p, q)).sum()), gradient(lambda p: kl(p, q)))
    torch.testing.assert_close(gradient(lambda p: (sampled * k3(p, q)).sum()), gradient(lambda p: kl(q, p)))


@given(pairs)
def test_k3_is_never_negative_also_in_float32(tokens: list[tuple[float, float]]) -> None:
    policy, reference = torch.tensor(tokens, dtype=torch.float32).T
    assert bool((k3(policy, reference) >= -1e-12).all()), "rounding aside"


def test_k3_of_a_token_that_the_policy_has_all_but_given_up_is_finite() -> None:
    policy = torch.tensor([-300.0], requires_grad=True)
    value = k3(policy, torch.tensor([-0.1]))
    value.sum().backward()
    assert value.item() == pytest.approx(math.exp(MAX_LOG_RATIO) - 1 - MAX_LOG_RATIO, rel=1e-6)
    assert policy.grad is not None and policy.grad.item() <= 0, "to lower the loss must not be to give it up further"


# The loss -------------------------------------------------------------------------------------------------------------


def loss_by_hand(tokens: list[tuple[float, ...]], algorithm: AlgorithmConfig) -> float:
    """Sum over tokens of weight * (w * (policy loss + coef * KL)), the policy's first pass, so that its ratio is 1."""
    total = 0.0
    for policy, behaviour, reference, advantage, weight in tokens:
        w = min(math.exp(policy - behaviour), algorithm.off_policy_correction.token_tis_ratio_clip_high)
        if algorithm.off_policy_correction.tis_ratio_type is None:
            w = 1.0
        estimate = of_formula(algorithm.kl_estimator_type, policy, reference)
        total += weight * w * (-advantage + algorithm.kl_loss_coef * estimate)
    return total


token = st.tuples(logprob, logprob, logprob, st.floats(-3, 3), st.floats(0.1, 1))


@given(
    st.lists(token, min_size=1, max_size=6),
    st.sampled_from(["k2", "k3"]),
    st.floats(0.001, 2),
    st.sampled_from(["token", None]),
)
def test_the_kl_term_is_weighted_like_the_policy_loss(
    tokens: list[tuple[float, ...]], name: str, coef: float, correction: str | None
) -> None:
    algorithm = AlgorithmConfig(kl_loss_coef=coef, kl_estimator_type=name)
    algorithm.off_policy_correction.tis_ratio_type = correction
    policy, behaviour, reference, advantages, token_weights = torch.tensor(tokens, dtype=torch.float64).T
    fields = token_fields(advantages, behaviour, token_weights, reference_logprobs=reference)
    objective = Objective(algorithm)
    loss, statistics = objective.loss(policy, torch.zeros_like(policy), fields)
    assert loss.item() == pytest.approx(loss_by_hand(tokens, algorithm), rel=1e-9, abs=1e-9)
    estimates = [of_formula(name, of, to) for of, _, to, _, _ in tokens]
    metrics = objective.metrics(statistics, scale=1.0)
    assert metrics["policy/kl_to_reference"] == pytest.approx(sum(estimates) / len(tokens), rel=1e-9, abs=1e-12)
    assert metrics["loss/policy"] == pytest.approx(
        loss_by_hand(tokens, dataclasses.replace(algorithm, kl_loss_coef=0.0)), rel=1e-9, abs=1e-9
    ), "the policy loss is told without the KL term"


def test_without_a_coefficient_there_is_no_kl_term_and_no_metric() -> None:
    objective = Objective(AlgorithmConfig())
    values = torch.full((3,), -1.0)
    _, statistics = objective.loss(values, values, token_fields(values, values, values, reference_logprobs=values))
    assert not objective.needs_reference
    assert "policy/kl_to_reference" not in objective.metrics(statistics, scale=1.0)


# The backend ----------------------------------------------------------------------------------------------------------


def with_reference(batch: Minibatch, seed: int = 5) -> Minibatch:
    generator = torch.Generator().manual_seed(seed)
    sequences = [
        dataclasses.replace(s, reference_logprobs=(-2.5 + torch.randn(len(s), generator=generator)) * s.loss_mask)
        for s in batch.sequences
    ]
    return dataclasses.replace(batch, sequences=sequences)


def gradients_of_one_update(of: LocalBackend, batch: Minibatch) -> dict[str, torch.Tensor]:
    """The gradients accumulated for the batch, scaled as the optimizer step would scale them."""
    of.accumulate(batch)
    counted = sum(s.counts.tokens for s in batch.sequences)
    grads = {name: p.grad / counted for name, p in of.model.named_parameters() if p.grad is not None}
    of.discard()
    return grads


def test_the_gradient_of_an_update_has_the_kl_term_of_every_trained_token(folder: str) -> None:
    batch = with_reference(minibatch())
    coef = 0.3
    trained = backend(folder, algorithm__kl_loss_coef=coef, algorithm__kl_estimator_type="k2")
    without = backend(folder)
    difference = gradients_of_one_update(trained, batch)
    for name, grad in gradients_of_one_update(without, batch).items():
        difference[name] = difference[name] - grad

    model, total, count = without.model, torch.zeros(()).double(), 0
    model.zero_grad()
    for s in batch.sequences:
        logprobs = model(input_ids=s.token_ids[None]).logits[0].double().log_softmax(-1)
        for t in s.loss_mask.nonzero().flatten().tolist():
            current = logprobs[t - 1, s.token_ids[t]]
            w = min(math.exp(current.item() - s.behaviour_logprobs[t].item()), 2.0)
            assert s.reference_logprobs is not None
            total = total + coef * w * (current - s.reference_logprobs[t].double()) ** 2 / 2
            count += 1
    (total / count).backward()
    for name, parameter in model.named_parameters():
        if parameter.grad is not None:
            torch.testing.assert_close(difference[name], parameter.grad, rtol=1e-3, atol=1e-6)


def test_a_step_in_parts_has_the_same_kl_term(folder: str) -> None:
    batch = with_reference(minibatch())
    # With a larger eps AdamW does not show the rounding of the smallest gradients in full.
    settings = {"algorithm__kl_loss_coef": 0.5, "policy__optimizer_config__adam_eps": 1e-3}
    whole, parts = (backend(folder, **settings) for _ in range(2))
    metrics = whole.update(batch)
    for index in range(batch.num_groups):
        sequences = [s for s in batch.sequences if s.group_index == index]
        parts.accumulate(Minibatch(sequences, 1, batch.step))
    in_parts = parts.finish(batch.step)
    assert in_parts["policy/kl_to_reference"] == pytest.approx(metrics["policy/kl_to_reference"], rel=1e-5)
    after = weights(parts)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(after[name], weight, rtol=0, atol=1e-4)  # of 1e-2 that it moved


def test_reference_logprobs_change_nothing_where_no_loss_asks_for_them(folder: str) -> None:
    one, other = backend(folder), backend(folder)
    one.update(minibatch())
    other.update(with_reference(minibatch()))
    assert same(weights(one), weights(other))


def test_a_kl_term_without_reference_logprobs_is_rejected_before_anything_moves(folder: str) -> None:
    trained = backend(folder, algorithm__kl_loss_coef=0.5)
    before = weights(trained)
    with pytest.raises(GeneratorOutputError, match="no reference log-probs"):
        trained.update(minibatch())
    assert same(before, weights(trained))


def test_masked_tokens_have_no_kl_term(folder: str) -> None:
    batch = with_reference(minibatch())
    masked = dataclasses.replace(
        batch,
        sequences=[
            dataclasses.replace(
                s,
                loss_mask=torch.zeros_like(s.loss_mask),
                counted_tokens=int(s.loss_mask.sum()),
                reference_logprobs=None,
            )
            for s in batch.sequences
        ],
    )
    trained = backend(folder, algorithm__kl_loss_coef=0.5)
    before = weights(trained)
    metrics = trained.update(masked)
    assert metrics["loss/policy"] == 0.0 and same(before, weights(trained))


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["kl_loss_coef=0.1", "kl_estimator_type=k1"], "Set kl_estimator_type=k3 or k2"),
        (["kl_loss_coef=-0.1"], "must be at least 0"),
    ],
)
def test_impossible_settings_are_rejected_with_a_remedy(overrides: list[str], remedy: str) -> None:
    keys = [f"trainer.algorithm.{o}".replace("algorithm.../", "") for o in overrides]
    with pytest.raises(ConfigError, match=remedy):
        raise_errors(validate(compose("quickstart", keys)).errors)


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (["proximal_policy=arrival", "../mode=sync"], "Set proximal_policy=step"),
    ],
)
def test_a_setting_without_effect_is_a_warning(overrides: list[str], remedy: str) -> None:
    keys = [f"trainer.algorithm.{o}".replace("algorithm.../", "") for o in overrides]
    found = validate(compose("quickstart", keys))
    assert found.errors == [] and any(remedy in warning for warning in found.warnings), found


def test_a_misspelled_estimator_is_named() -> None:
    broken = config(algorithm__kl_loss_coef=0.1, algorithm__kl_estimator_type="k4").algorithm
    with pytest.raises(ConfigError, match="k4"):
        Objective(broken)
