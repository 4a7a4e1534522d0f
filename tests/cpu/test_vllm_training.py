"""The whole asynchronous loop with vLLM as the engine: one word of the configuration."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from vllm_forks import fork_child

from skyrl_train.config.compose import compose
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.command_line import main
from skyrl_train.workers.process import ChildProcess
from tests.runs_with_vllm import PLACES, overrides, train


@pytest.mark.usefixtures("vllm_forks")
def test_the_quickstart_trains_with_vllm_and_updates_its_weights_in_flight(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The engine's process and the trainer's are forked, too."""
    monkeypatch.setattr(ChildProcess, "_spawn", fork_child)
    folder = tmp_path / "run"
    settings = [
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.engine_args={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
        "generator.verify_weights=true",
        "trainer.trackers=[]",
        "trainer.max_steps=2",
        f"trainer.run_dir={folder}",
    ]
    assert main(["train", "quickstart", *settings]) == 0
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    # The engine's log-probs are the trainer's: the mismatch that the correction sees is rounding and staleness.
    assert 0 <= rows[0]["off_policy/kl_k3"] < 1e-6


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_forks", "trainer_elsewhere")
@pytest.mark.parametrize("place", PLACES)
def test_a_run_trains_with_vllm_that_weights_reach_by_a_broadcast(tmp_path: Path, place: str) -> None:
    """As the tests for GPUs do by NCCL."""
    rows = train(tmp_path, place, on_gpus=False)
    assert 0 <= rows[0]["off_policy/kl_k3"] < 1e-6
    assert len(rows) > 1 and all(
        row["time/transfer"] > 0 for row in rows[1:]
    )  # each is reported with the step after it


@pytest.mark.parametrize("place", PLACES)
def test_the_runs_for_several_gpus_are_valid(place: str) -> None:
    assert validate(compose("quickstart", overrides(place, on_gpus=True))).errors == []
