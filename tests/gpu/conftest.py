"""Tests that need a CUDA device: each is marked ``gpu`` and, without one, skipped where the summary shows it.

With ``SKYRL_TEST_NEEDS_GPU`` in the environment (CI), nothing is skipped for a missing device or a missing vLLM: pytest fails.
"""

from __future__ import annotations

import importlib.util
import os
from pathlib import Path

import pytest
import torch

HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    available, vllm = torch.cuda.is_available(), importlib.util.find_spec("vllm")
    if os.environ.get("SKYRL_TEST_NEEDS_GPU") and not (available and vllm):
        raise pytest.UsageError(
            f"SKYRL_TEST_NEEDS_GPU is set, and torch.cuda.is_available() is {available}; vLLM is "
            f"{'installed' if vllm else 'missing'}: tests would be skipped."
        )
    skip = pytest.mark.skip(reason="needs a CUDA device; torch.cuda.is_available() is false")
    for item in items:
        if HERE in item.path.parents:
            item.add_marker(pytest.mark.gpu)
            if not available:
                item.add_marker(skip)
