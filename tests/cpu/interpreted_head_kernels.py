"""Compare the head's kernels with plain operations; needs ``TRITON_INTERPRET=1`` in the environment."""

from __future__ import annotations

import sys
from typing import Any

import torch

from skyrl_train.training import head_kernels
from skyrl_train.training.head import LogitRule, PlainSums, plain_gradient_

ROWS, VOCABULARY = 5, 11
CASES = [
    (LogitRule(), False, torch.bfloat16, False),
    (LogitRule(temperature=0.7), True, torch.float32, True),
    (LogitRule(scale=3.0, cap=2.0, temperature=1.3), True, torch.float32, False),
]


def compare(rule: LogitRule, differentiate_entropy: bool, dtype: torch.dtype, summed: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(ROWS, VOCABULARY, generator=generator).mul(4).to(dtype)
    targets = torch.randint(0, VOCABULARY, (ROWS,), generator=generator)
    # The gradient of a plain sum is one element that stands for all rows.
    of_logprobs, of_entropies = torch.randn(2, 1 if summed else ROWS, generator=generator).expand(2, ROWS)
    targets = torch.stack([targets, targets], dim=1)[:, 0]  # strided
    blocks = [slice(0, 5), slice(5, VOCABULARY)]
    exact, sums = PlainSums(ROWS, torch.empty(0, dtype=torch.float64)), head_kernels.Sums(ROWS, torch.empty(0))
    for block in blocks:
        exact.add(outputs[:, block].clone(), targets, block.start, rule)
        sums.add(outputs[:, block], targets, block.start, rule)
    for ours, expected in zip(sums.scores(), exact.scores(), strict=True):
        torch.testing.assert_close(ours, expected.float(), atol=2e-5, rtol=2e-5)
    partition, _, entropies = (score.float() for score in exact.scores())
    for block in blocks:
        of_each = of_entropies if differentiate_entropy else None
        arguments = (targets, block.start, rule, partition, entropies, of_logprobs, of_each)
        expected = plain_gradient_(outputs[:, block].clone(), *arguments).to(dtype)
        rounding = torch.finfo(dtype).eps
        torch.testing.assert_close(
            head_kernels.gradient_(outputs[:, block].contiguous(), *arguments),
            expected,
            atol=2e-5,
            rtol=4 * rounding + 2e-5,
        )


class DeviceOf:
    """In place of ``torch.cuda.device_of``: notes whose GPU is the current one."""

    current: torch.Tensor | None = None

    def __init__(self, tensor: torch.Tensor) -> None:
        self._tensor = tensor

    def __enter__(self) -> None:
        DeviceOf.current = self._tensor

    def __exit__(self, *_: object) -> None:
        DeviceOf.current = None


class OnTheGpuOfItsLogits:
    """A kernel that starts nowhere else. Triton starts it on the current GPU."""

    def __init__(self, kernel: Any) -> None:
        self._kernel = kernel

    def __getitem__(self, grid: tuple[int]) -> Any:
        def start(logits: torch.Tensor, *arguments: Any, **constants: Any) -> None:
            assert DeviceOf.current is logits, "it would start on another GPU"
            self._kernel[grid](logits, *arguments, **constants)

        return start


torch.cuda.device_of = DeviceOf  # type: ignore[assignment, misc]
for name in ("_accumulate", "_differentiate"):
    setattr(head_kernels, name, OnTheGpuOfItsLogits(getattr(head_kernels, name)))
head_kernels._COLUMNS = 4
for case in CASES:
    compare(*case)
sys.stdout.write(f"{len(CASES)} cases\n")
