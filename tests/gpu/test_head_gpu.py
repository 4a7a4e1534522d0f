"""The head's kernels on a GPU: exact log-probs, entropies and gradients, of which each tile is read once."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from skyrl_train.training.head import LogitRule, token_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TOKENS, HIDDEN, VOCABULARY = 9001, 96, 20011  # several tiles both ways, the last ones smaller
RULES = [LogitRule(), LogitRule(temperature=0.7), LogitRule(scale=3.0, cap=5.0, temperature=1.3)]


def scores_and_gradients(
    dtype: torch.dtype, rule: LogitRule, bias: bool, entropy: bool, fp32: bool = False
) -> list[torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)

    def draw(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=generator, device="cuda").bfloat16().to(dtype)

    hidden = draw(TOKENS, HIDDEN).mul_(0.3).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, device="cuda", dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(draw(*parameter.shape))
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator, device="cuda")
    of_logprobs, of_entropies = draw(TOKENS), draw(TOKENS)
    logprobs, entropies = token_scores(hidden, head, targets, rule, fp32=fp32, differentiate_entropy=entropy)
    loss = (of_logprobs * logprobs).sum() + ((of_entropies * entropies).sum() if entropy else 0.0)
    return [logprobs, entropies, *torch.autograd.grad(loss, [hidden, *head.parameters()])]


@pytest.mark.parametrize("entropy", [False, True])
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("rule", RULES, ids=str)
def test_float32_values_and_gradients_are_those_of_float64(rule: LogitRule, bias: bool, entropy: bool) -> None:
    exact = scores_and_gradients(torch.float64, rule, bias, entropy)
    for ours, expected in zip(scores_and_gradients(torch.float32, rule, bias, entropy), exact, strict=True):
        assert relative_error(ours, expected) < 1e-5


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_16_bit_values_and_gradients_are_as_close_as_their_rounding(dtype: torch.dtype) -> None:
    exact = scores_and_gradients(torch.float64, RULES[0], False, True)
    rounding = torch.finfo(dtype).eps
    for ours, expected in zip(scores_and_gradients(dtype, RULES[0], False, True), exact, strict=True):
        assert relative_error(ours, expected) < rounding
    # A float32 head rounds its inputs' products no more; its results for the hidden states are rounded once.
    wide = scores_and_gradients(dtype, RULES[0], False, True, fp32=True)
    assert relative_error(wide[0], exact[0]) < 1e-5
    assert relative_error(wide[1], exact[1]) < 1e-5


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


def test_each_tile_is_read_once_by_a_kernel() -> None:
    scores_and_gradients(torch.bfloat16, RULES[0], False, True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scores_and_gradients(torch.bfloat16, RULES[0], False, True)
    counts = {event.key: event.count for event in profiled.key_averages()}
    tiles = counts["_accumulate"]
    assert tiles > 4 and counts["_differentiate"] == tiles
    passes = [key for key in counts if "exp" in key or "softmax" in key]
    assert not passes, "plain operations pass over a tile many times"
