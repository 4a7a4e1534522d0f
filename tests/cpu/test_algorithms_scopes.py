"""No split of a step changes its loss, for functions of a sequence and of the whole minibatch alike."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from training_worlds import backend, learned, minibatch, same, weights

from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES, TokenLosses, ppo_clip
from skyrl_train.algorithms.off_policy import CORRECTIONS, REJECTION_STATISTICS, TokenWeights
from skyrl_train.algorithms.registry import Registry
from skyrl_train.algorithms.tokens import MINIBATCH_STATISTICS, PolicyTokens
from skyrl_train.config.schema import (
    AlgorithmConfig,
    ClipCovConfig,
    KlCovConfig,
    ProximalPolicy,
    RejectionConfig,
    RejectionLevel,
)
from skyrl_train.errors import ConfigError
from skyrl_train.observability.failures import place_of
from skyrl_train.training.backend import Minibatch

pytestmark = pytest.mark.usefixtures("one_compute_thread")

SEQUENCE = "sequence"
MINIBATCH = "minibatch"


def grouped(batch: Minibatch) -> Minibatch:
    """With what the reduction over prompts needs, and tokens of several versions."""
    sequences = []
    for s in batch.sequences:
        own = [other for other in batch.sequences if other.group_index == s.group_index]
        counted = sum(int(other.loss_mask.sum()) for other in own)
        versions = torch.where(s.loss_mask, torch.arange(len(s)) % 4, -1)
        sequences.append(replace(s, versions=versions, group_tokens=counted, group_sequences=len(own)))
    return replace(batch, sequences=sequences)


CORRECTION = "algorithm__off_policy_correction__"
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "gspo by prompts": (
        SEQUENCE,
        {"algorithm__policy_loss_type": "gspo", "algorithm__loss_reduction": "prompt_mean"},
    ),
    "sequence weights and rejections": (
        SEQUENCE,
        {
            f"{CORRECTION}tis_ratio_type": "geometric",
            f"{CORRECTION}rejections": [RejectionConfig("k1", RejectionLevel.sequence_mean, -0.1, 0.3)],
        },
    ),
    "interpolated": (SEQUENCE, {"algorithm__proximal_policy": ProximalPolicy.interpolated}),
    "clip_cov": (
        MINIBATCH,
        {"algorithm__policy_loss_type": "clip_cov", "algorithm__clip_cov": ClipCovConfig(0.3, 0.0, 5.0)},
    ),
    "kl_cov": (
        MINIBATCH,
        {
            "algorithm__policy_loss_type": "kl_cov",
            "algorithm__kl_cov": KlCovConfig(0.3, 1.0),
            "algorithm__proximal_policy": ProximalPolicy.interpolated,
        },
    ),
    "m2po": (MINIBATCH, {f"{CORRECTION}m2po_threshold": 0.04}),
}


@pytest.mark.parametrize("case", CASES)
def test_a_step_is_the_same_however_it_is_split(folder: str, case: str) -> None:
    scope, settings = CASES[case]
    settings = {
        **settings,
        "policy__optimizer_config__adam_eps": 1e-3,
    }  # AdamW then hides the rounding of small gradients
    batch = replace(grouped(minibatch()), step=5)
    whole, small = backend(folder, **settings), backend(folder, micro_batch_tokens=18, **settings)
    expected, found = whole.update(batch), small.update(batch)
    assert learned(found) == pytest.approx(learned(expected), rel=1e-4, abs=1e-5)
    for name, weight in weights(whole).items():
        torch.testing.assert_close(weights(small)[name], weight, rtol=1e-3, atol=1e-4)
    parts = backend(folder, **settings)
    if scope == MINIBATCH:
        with pytest.raises(ConfigError, match="streaming_min_groups=null"):
            parts.accumulate(batch)
        return
    for index in reversed(range(batch.num_groups)):
        sequences = [s for s in batch.sequences if s.group_index == index]
        parts.accumulate(Minibatch(sequences, 1, batch.step))
    assert learned(parts.finish(batch.step)) == pytest.approx(learned(expected), rel=1e-4, abs=1e-5)


@pytest.mark.parametrize("setting", [{}, {f"{CORRECTION}tis_ratio_type": "icepop"}])
def test_rejected_tokens_are_counted_and_change_nothing_but_the_numerator(
    folder: str, setting: dict[str, object]
) -> None:
    everything = [RejectionConfig("ratio", low=1e6)]
    trained = backend(folder, **{f"{CORRECTION}rejections": everything}, **setting)
    before, batch = weights(trained), minibatch()
    metrics = trained.update(batch)
    tokens = sum(int(s.loss_mask.sum()) for s in batch.sequences)
    assert metrics["off_policy/rejected_tokens/any"] == metrics["policy/tokens"] == tokens
    assert metrics["loss/policy"] == 0.0 == metrics["policy/grad_norm"]
    assert all(torch.equal(weight, before[name]) for name, weight in weights(trained).items())


def mean_loss(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    loss, ratio, clipped = ppo_clip(tokens, config)
    return TokenLosses(loss.mean(), ratio, clipped)


def column_of_losses(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
    loss, ratio, clipped = ppo_clip(tokens, config)
    return TokenLosses(loss[:, None], ratio, clipped)


def mean_divergence(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    return (logprobs - reference_logprobs).square().mean()


def weight_of_all(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenWeights:
    ratio = (tokens.proximal_logprobs - tokens.behaviour_logprobs).exp()
    return TokenWeights(ratio.mean(), ratio > 2)


def mean_ratio(tokens: PolicyTokens) -> torch.Tensor:
    return (tokens.proximal_logprobs - tokens.behaviour_logprobs).exp().mean()


def test_statistics_of_ones_own_that_raise_are_named_before_anything_moves(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(POLICY_LOSSES._entries, "own", ppo_clip)
    monkeypatch.setitem(MINIBATCH_STATISTICS._entries, "own", lambda tokens, config: 1 / 0)
    ours = backend(folder, algorithm__policy_loss_type="own")
    before = weights(ours)
    with pytest.raises(ConfigError, match="policy_loss_type=own raised ZeroDivisionError"):
        ours.update(minibatch())
    assert same(before, weights(ours))


OWN_RULE = {f"{CORRECTION}rejections": [RejectionConfig("own", high=9.0)]}
OWN: dict[Any, tuple[Registry[Any], dict[str, Any], str]] = {
    mean_loss: (POLICY_LOSSES, {"algorithm__policy_loss_type": "own"}, "policy_loss_type=own returned a loss"),
    column_of_losses: (POLICY_LOSSES, {"algorithm__policy_loss_type": "own"}, "policy_loss_type=own returned a loss"),
    mean_divergence: (
        KL_ESTIMATORS,
        {"algorithm__kl_loss_coef": 0.1, "algorithm__kl_estimator_type": "own"},
        "kl_estimator_type=own returned a divergence",
    ),
    weight_of_all: (CORRECTIONS, {f"{CORRECTION}tis_ratio_type": "own"}, "tis_ratio_type=own returned a weight"),
    mean_ratio: (REJECTION_STATISTICS, OWN_RULE, "statistic=own returned a statistic"),
}


@pytest.mark.parametrize("function", OWN)
def test_a_function_of_ones_own_without_a_value_per_token_trains_nothing(
    folder: str, monkeypatch: pytest.MonkeyPatch, function: Any
) -> None:
    """A mean would be broadcast over the tokens, and a column would make a table of them."""
    registry, settings, complaint = OWN[function]
    monkeypatch.setitem(registry._entries, "own", function)
    ours = backend(folder, **settings)
    whole, before = minibatch(), weights(ours)
    sequences = [replace(s, reference_logprobs=s.behaviour_logprobs) for s in whole.sequences]
    with pytest.raises(ConfigError, match=rf"{complaint} of shape \[.*\] for \d+ tokens"):
        ours.update(replace(whole, sequences=sequences))
    assert not ours.has_open_step and same(before, weights(ours))


def test_a_loss_of_ones_own_that_raises_leaves_no_doubt_in_the_first_pass_alone(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After a ConfigError the finished steps are saved."""
    raises = True

    def own(tokens: PolicyTokens, config: AlgorithmConfig) -> TokenLosses:
        moved = (tokens.logprobs - tokens.proximal_logprobs).abs().max() > 0
        return ppo_clip(tokens, config) if not (raises or moved) else TokenLosses(*[1 / 0] * 3)  # type: ignore[list-item]

    monkeypatch.setitem(POLICY_LOSSES._entries, "own", own)
    ours, parts = (backend(folder, algorithm__policy_loss_type="own", update_epochs_per_batch=n) for n in (2, 1))
    before, batch = weights(ours), minibatch()
    for call in (ours.update, parts.update, parts.accumulate):
        with pytest.raises(ConfigError, match="The loss of step 1 raised ZeroDivisionError") as caught:
            call(batch)
        assert place_of(caught.value).endswith("in own")
    assert same(before, weights(ours)) and same(before, weights(parts)) and not parts.has_open_step
    raises = False
    with pytest.raises(RuntimeError, match="in a later pass"):
        ours.update(batch)
    assert not same(before, weights(ours)) and not ours.has_open_step
    parts.accumulate(batch)
    parts.finish(1)
    assert not same(before, weights(parts))


@pytest.mark.parametrize(("full_in", "error"), [(1, ConfigError), (2, ConfigError), (3, torch.OutOfMemoryError)])
def test_a_device_that_lacks_memory_leaves_no_doubt_before_the_first_pass_is_over(
    folder: str, full_in: int, error: type[Exception]
) -> None:
    ours = backend(folder, update_epochs_per_batch=2)  # one pass for the proximal log-probs, and two with gradients
    before, passes = weights(ours), iter(range(1, 10))

    def fill(*_: object) -> None:
        if next(passes) == full_in:
            raise torch.OutOfMemoryError("scripted")

    ours.model.register_forward_pre_hook(fill)
    with pytest.raises(error, match="scripted"):
        ours.update(minibatch())
    assert not ours.has_open_step and same(before, weights(ours)) == (error is ConfigError)


def test_the_error_of_a_loss_ends_with_its_pass(folder: str, monkeypatch: pytest.MonkeyPatch) -> None:
    losses = iter([lambda *_: 1 / 0])
    monkeypatch.setitem(POLICY_LOSSES._entries, "own", lambda *arguments: next(losses, ppo_clip)(*arguments))
    ours = backend(folder, micro_batch_tokens=17, algorithm__policy_loss_type="own")
    passes = iter(range(10))

    def break_second(*_: object) -> None:
        if next(passes) == 1:
            raise MemoryError("scripted")

    handle = ours.model.register_forward_pre_hook(break_second)
    with pytest.raises(MemoryError, match="scripted"):
        ours.update(minibatch())
    handle.remove()
    assert ours.update(minibatch())["policy/skipped_nonfinite"] == 0.0
