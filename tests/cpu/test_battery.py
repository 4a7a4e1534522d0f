"""Client libraries with their defaults against the endpoint (``tests/battery``)."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "battery"))
from battery_clients import LIBRARIES, TRAINED
from battery_model import build
from run_battery import BACKENDS, endpoint, has, run_library

from skyrl_train.entrypoints.command_line import main

pytestmark = pytest.mark.slow
# Libraries exclude each other and ours, so other environments may have them: interpreters, separated by colons.
PYTHONS = [sys.executable, *filter(None, os.environ.get("SKYRL_BATTERY_PYTHONS", "").split(":"))]
ENGINES = {
    "embedded": ["generator.inference_engine.executor=thread"],
    "vllm": [
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.engine_args={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
    ],
}


@pytest.fixture(scope="module", params=BACKENDS)
def url(request: pytest.FixtureRequest) -> Iterator[str]:
    if request.param == "vllm":
        pytest.importorskip("vllm")
    with endpoint(request.param) as url:
        yield url


@pytest.mark.parametrize("library", LIBRARIES)
def test_a_library_works_with_its_defaults(library: str, url: str) -> None:
    python = next((python for python in PYTHONS if has(python, library)), None)
    if python is None:
        pytest.skip(f"{library} is not installed: see tests/battery/requirements.txt")
    failures = {result["case"]: result["error"] for result in run_library(python, library, url) if result["error"]}
    assert failures == {}


@pytest.mark.parametrize("library", TRAINED)
@pytest.mark.parametrize("backend", BACKENDS)
def test_an_agent_in_its_default_configuration_trains(
    library: str, backend: str, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    if backend == "vllm":
        request.getfixturevalue("vllm_forks")
    python = next((python for python in PYTHONS if has(python, library)), None)
    if python is None:
        pytest.skip(f"{library} is not installed: see tests/battery/requirements.txt")
    build(tmp_path / "model")
    (tmp_path / "data.jsonl").write_text('{"prompt": [{"role": "user", "content": "go"}]}\n' * 2)
    program = Path(__file__).parents[1] / "battery" / "battery_clients.py"
    settings = [
        "trainer.max_steps=3",
        "trainer.policy_mini_batch_size=1",
        f"trainer.policy.model.path={tmp_path / 'model'}",
        "trainer.trackers=[]",
        f"trainer.run_dir={tmp_path / 'run'}",
        f"data.train_data=[{tmp_path / 'data.jsonl'}]",
        "generator.name=harness",
        f"generator.kwargs.command=[{python},{program},{library}]",
        "generator.n_samples_per_prompt=2",
        "generator.max_input_length=15000",
        "generator.sampling_params.max_tokens=500",
        *ENGINES[backend],
        "generator.inference_engine.max_num_seqs=4",
    ]
    recipe = tmp_path / "recipe.yaml"
    recipe.write_text("defaults: [base, _self_]\n")
    assert main(["train", str(recipe), *settings]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2, 3]
    for row in rows:
        assert row["async/failed"] == row["async/retries"] == 0 and row["policy/tokens"] > 0
    # Without lag, engine and trainer agree under the grammars.
    assert rows[0]["off_policy/engine_gap"] < 1e-4
    assert max(row["policy/grad_norm"] for row in rows) > 0
