"""Whole runs with vLLM on other GPUs than the trainer's, which weights reach by NCCL; the CPU's tests run the same by gloo."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.runs_with_vllm import PLACES, train


@pytest.mark.timeout(900)
@pytest.mark.parametrize("place", PLACES)
def test_a_run_trains_with_vllm_on_other_gpus(tmp_path: Path, place: str) -> None:
    pytest.importorskip("vllm", reason="needs the extra vllm")
    needed, _ = PLACES[place]
    if torch.cuda.device_count() < needed:
        pytest.skip(f"needs {needed} GPUs, and there are {torch.cuda.device_count()}")
    rows = train(tmp_path, place, on_gpus=True)
    # Later steps are stale. Engine and trainer round bfloat16 in different orders; other weights would differ by far more.
    assert 0 <= rows[0]["off_policy/kl_k3"] < 0.05
    assert len(rows) > 1 and all(
        row["time/transfer"] > 0 for row in rows[1:]
    )  # each is reported with the step after it
