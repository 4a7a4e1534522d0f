"""Log-probs and entropies in tiles are those of full logits, and so are their gradients."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.training import head as of_head
from skyrl_train.training.head import LogitRule, token_scores

TOKENS, HIDDEN, VOCABULARY = 23, 5, 11
RULES = [
    LogitRule(),
    LogitRule(temperature=0.7),
    LogitRule(scale=0.25),
    LogitRule(cap=1.5),
    LogitRule(scale=3.0, cap=2.0, temperature=1.3),
]


@pytest.fixture(autouse=True, params=[4, VOCABULARY], ids=["blocks", "whole vocabulary"])
def small_tiles(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(of_head, "_BLOCK_COLUMNS", request.param)
    monkeypatch.setitem(of_head._TILE_BYTES, "cpu", 4 * request.param * 8)


def case(bias: bool, dtype: torch.dtype) -> tuple[torch.Tensor, torch.nn.Linear, torch.Tensor, torch.Tensor]:
    """Hidden states, head, targets, and weights ``[2, TOKENS]`` that make a loss of log-probs and entropies."""
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(TOKENS, HIDDEN, generator=generator, dtype=torch.float64).to(dtype).requires_grad_()
    head = torch.nn.Linear(HIDDEN, VOCABULARY, bias=bias, dtype=dtype)
    with torch.no_grad():
        for parameter in head.parameters():
            parameter.copy_(torch.randn(parameter.shape, generator=generator, dtype=torch.float64))
    targets = torch.randint(0, VOCABULARY, (TOKENS,), generator=generator)
    return hidden, head, targets, torch.randn(2, TOKENS, generator=generator, dtype=torch.float64)


def by_full_logits(
    hidden: torch.Tensor, head: torch.nn.Linear, targets: torch.Tensor, rule: LogitRule
) -> tuple[torch.Tensor, torch.Tensor]:
    logits = head(hidden) * rule.scale
    if rule.cap is not None:
        logits = rule.cap * torch.tanh(logits / rule.cap)
    distribution = torch.log_softmax(logits / rule.temperature, dim=1)
    logprobs = torch.stack([distribution[i, target] for i, target in enumerate(targets.tolist())])
    return logprobs, -(distribution.exp() * distribution).sum(dim=1)


@pytest.mark.parametrize("rule", RULES, ids=str)
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("differentiate_entropy", [False, True])
def test_values_and_gradients_are_those_of_full_logits(
    rule: LogitRule, bias: bool, differentiate_entropy: bool
) -> None:
    hidden, head, targets, weights = case(bias, torch.float64)
    inputs = [hidden, *head.parameters()]
    expected = by_full_logits(hidden, head, targets, rule)
    loss = weights[0] @ expected[0] + (weights[1] @ expected[1] if differentiate_entropy else 0.0)
    expected_gradients = torch.autograd.grad(loss, inputs)

    scores = token_scores(hidden, head, targets, rule, fp32=False, differentiate_entropy=differentiate_entropy)
    assert scores[1].requires_grad is differentiate_entropy
    loss = weights[0] @ scores[0] + (weights[1] @ scores[1] if differentiate_entropy else 0.0)
    gradients = torch.autograd.grad(loss, inputs)
    for a, b in zip([*scores, *gradients], [*expected, *expected_gradients], strict=True):
        torch.testing.assert_close(a, b, atol=1e-12, rtol=1e-12)


def test_a_float32_head_computes_in_float32_what_bfloat16_rounds() -> None:
    hidden, head, targets, weights = case(True, torch.bfloat16)
    wide = [value.detach().float().requires_grad_() for value in (hidden, head.weight, head.bias)]
    linear = torch.nn.Linear(HIDDEN, VOCABULARY)
    linear.weight, linear.bias = torch.nn.Parameter(wide[1].detach()), torch.nn.Parameter(wide[2].detach())
    expected = by_full_logits(wide[0], linear, targets, LogitRule())
    errors = {}
    for fp32 in (False, True):
        logprobs, _ = token_scores(hidden, head, targets, LogitRule(), fp32=fp32, differentiate_entropy=False)
        assert logprobs.dtype == torch.float32
        errors[fp32] = float((logprobs - expected[0]).abs().max().detach())
    assert errors[True] < 1e-4 < 1e-3 < errors[False]  # 1e-6 and 2e-2
    gradients = torch.autograd.grad(weights[0].float() @ logprobs, [hidden, *head.parameters()])
    of_wide = torch.autograd.grad(weights[0].float() @ expected[0], [wide[0], *linear.parameters()])
    for a, b in zip(gradients, of_wide, strict=True):
        assert a.dtype == torch.bfloat16  # as the weights; sums over chunks are in float32 until then
        torch.testing.assert_close(a, b.bfloat16(), atol=1e-2, rtol=1e-2)


class LargestTensor(TorchDispatchMode):
    """The elements of the largest tensor that any operation makes, those of ``but`` shapes left out."""

    def __init__(self, *but: tuple[int, ...]) -> None:
        super().__init__()
        self.elements, self._but = 0, {torch.Size(shape) for shape in but}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, torch.Tensor) and result._base is None and result.shape not in self._but:
                self.elements = max(self.elements, result.numel())
        return results


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("differentiate_entropy", [False, True])
def test_temporary_memory_depends_neither_on_tokens_nor_on_the_vocabulary(
    monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype, differentiate_entropy: bool
) -> None:
    monkeypatch.setattr(of_head, "_BLOCK_COLUMNS", 64)
    monkeypatch.setitem(of_head._TILE_BYTES, "cpu", 64 * 16 * 4)
    largest = set()
    for tokens, vocabulary in ((32, 128), (256, 128), (32, 2048)):
        hidden = torch.randn(tokens, 4, dtype=dtype, requires_grad=True)
        head = torch.nn.Linear(4, vocabulary, dtype=dtype)
        targets = torch.randint(0, vocabulary, (tokens,))
        # Inputs, gradients, and the numbers of each token are the caller's; all else is tiles.
        with LargestTensor((tokens, 4), (vocabulary, 4), (vocabulary,), (tokens,)) as seen:
            scores = token_scores(
                hidden, head, targets, LogitRule(), fp32=True, differentiate_entropy=differentiate_entropy
            )
            (scores[0].sum() + scores[1].sum()).backward()
        assert hidden.grad is not None and head.weight.grad is not None
        largest.add(seen.elements)
    assert largest == {64 * 16}
