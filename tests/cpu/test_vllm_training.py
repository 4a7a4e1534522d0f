"""The whole asynchronous loop with vLLM as the engine: one word of the configuration."""

from __future__ import annotations

import json
from contextlib import closing
from pathlib import Path

import pytest
from vllm_forks import fork_child

from skyrl_train.config.compose import compose
from skyrl_train.config.schema import LoraConfig
from skyrl_train.config.validate import validate
from skyrl_train.entrypoints.command_line import main
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport
from skyrl_train.workers.process import ChildProcess
from tests.runs_with_vllm import PLACES, overrides, train
from tests.syncs_with_vllm import ADAPTER, CONTEXT, policy, save_model, serves_each_version


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


@pytest.mark.slow
@pytest.mark.usefixtures("vllm_forks", "reading_back", "trainer_elsewhere", "one_compute_thread")
@pytest.mark.parametrize("lora", [None, ADAPTER], ids=["whole", "adapter"])
@pytest.mark.parametrize(("name", "ranks"), [("shared_memory", 1), ("shared_memory", 2), ("gloo", 2)])
async def test_ranks_serve_each_version_that_the_trainer_sends(
    tmp_path: Path, name: str, ranks: int, lora: LoraConfig | None
) -> None:
    """As the tests for GPUs do."""
    if lora is not None:
        pytest.importorskip("peft")
    folder, rank = save_model(tmp_path / "model"), 0 if lora is None else lora.rank
    engine = VLLMEngine(
        folder,
        max_num_seqs=8,
        max_model_len=CONTEXT,
        tensor_parallel_size=ranks,
        lora_rank=rank,
        load_format="auto" if rank else "dummy",
    )
    transport: WeightTransport
    transport = (
        SharedMemoryTransport(verify=True)
        if name == "shared_memory"
        else GlooTransport(verify=True, address="127.0.0.1")
    )
    with closing(transport):
        await engine.start()
        try:
            trainer = policy(folder, "cpu", "float32", lora)
            reads_back = ranks == 1 or lora is None
            await serves_each_version(
                engine, trainer, lambda version: trainer.stage(transport, version), "float32", reads_back=reads_back
            )
        finally:
            await engine.teardown()


@pytest.mark.parametrize("place", PLACES)
def test_the_runs_for_several_gpus_are_valid(place: str) -> None:
    assert validate(compose("quickstart", overrides(place, on_gpus=True))).errors == []
