"""The head's kernels on a GPU: exact log-probs, entropies and gradients, of which each tile is read once."""

from __future__ import annotations

import pytest
import torch
from torch.profiler import ProfilerActivity, profile

from skyrl_train.training import head as of_head
from skyrl_train.training.head import LogitRule, token_scores

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
]

TOKENS, HIDDEN, VOCABULARY = 20_001, 96, 20_011  # several tiles both ways, the last ones smaller
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
@pytest.mark.parametrize("fp32", [False, True])
def test_16_bit_values_and_gradients_are_as_close_as_those_of_plain_operations(
    dtype: torch.dtype, fp32: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    exact = scores_and_gradients(torch.float64, RULES[0], False, True)
    ours = scores_and_gradients(dtype, RULES[0], False, True, fp32)
    monkeypatch.setattr(of_head, "_operations", lambda *_: (of_head.PlainSums, of_head.plain_gradient_))
    plain = scores_and_gradients(dtype, RULES[0], False, True, fp32)
    for tensor, of_plain, expected in zip(ours, plain, exact, strict=True):
        assert relative_error(tensor, expected) < 1.1 * relative_error(of_plain, expected) + 1e-6


def relative_error(ours: torch.Tensor, expected: torch.Tensor) -> float:
    return float((ours.double() - expected).norm() / expected.norm())


def test_each_tile_is_read_once_by_a_kernel() -> None:
    scores_and_gradients(torch.bfloat16, RULES[0], False, True)
    with profile(activities=[ProfilerActivity.CUDA]) as profiled:
        scores_and_gradients(torch.bfloat16, RULES[0], False, True)
    counts = {event.key: event.count for event in profiled.key_averages()}
    tiles = counts["_accumulate"]
    assert tiles == 9 and counts["_differentiate"] == tiles
    passes = [key for key in counts if "exp" in key or "softmax" in key]
    assert not passes, "plain operations pass over a tile many times"


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
def test_kernels_start_on_the_gpu_of_their_tensors(monkeypatch: pytest.MonkeyPatch) -> None:
    assert torch.cuda.current_device() == 0
    hidden = torch.randn(TOKENS, HIDDEN, device="cuda:1", dtype=torch.bfloat16, requires_grad=True)
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=False, device="cuda:1", dtype=torch.bfloat16)
    targets = torch.randint(0, VOCABULARY, (TOKENS,), device="cuda:1")

    def scores() -> list[torch.Tensor]:
        logprobs, entropies = token_scores(hidden, head, targets, RULES[0], fp32=False, differentiate_entropy=False)
        return [logprobs, entropies, *torch.autograd.grad(logprobs.sum(), [hidden, head.weight])]

    ours = scores()
    monkeypatch.setattr(of_head, "_operations", lambda *_: (of_head.PlainSums, of_head.plain_gradient_))
    for tensor, of_plain in zip(ours, scores(), strict=True):
        assert relative_error(tensor, of_plain) < 1e-2
