"""vLLM sleeps while the policy trains. It does so on a GPU only: here its scheduler stops, and it keeps its memory."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.entrypoints.command_line import main
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.engines.vllm import engine as vllm_engine
from skyrl_train.inference.engines.vllm.adapter import AsyncLLMAdapter
from skyrl_train.inference.engines.vllm.arguments import capabilities
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.types import PauseMode


@pytest.mark.usefixtures("vllm_forks")
def test_each_kind_of_vllms_memory_wakes_once_a_turn(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls: list[str] = []
    asleep: set[str] = set()
    load = AsyncLLMAdapter.load_weights

    def able(*arguments: Any, **named: Any) -> EngineCapabilities:
        return dataclasses.replace(capabilities(*arguments, **named), sleep=True)

    async def sleep(link: AsyncLLMAdapter, level: int) -> None:
        assert not asleep
        calls.append(f"sleep {level}")
        asleep.update(("weights", "kv_cache"))
        await link.pause(PauseMode.KEEP)

    async def wake_up(link: AsyncLLMAdapter, tags: list[str], *, last: bool) -> None:
        assert asleep >= set(tags), "vLLM would map memory that is mapped"
        calls.append(f"wake {' '.join(tags)}")
        asleep.difference_update(tags)
        assert last is (not asleep), "vLLM schedules by itself once all its memory is back"

    async def load_weights(link: AsyncLLMAdapter, version: int) -> float:
        assert asleep == ({"kv_cache"} if version else set())
        calls.append(f"load {version}")
        return await load(link, version)

    # In this process, which looks into it.
    monkeypatch.setattr(
        "skyrl_train.build.engines.ProcessEngine", lambda factory, arguments, log_file: VLLMEngine(**arguments)
    )
    monkeypatch.setattr(vllm_engine, "capabilities", able)
    monkeypatch.setattr(AsyncLLMAdapter, "sleep", sleep)
    monkeypatch.setattr(AsyncLLMAdapter, "wake_up", wake_up)
    monkeypatch.setattr(AsyncLLMAdapter, "load_weights", load_weights)
    settings = [
        "trainer.mode=partial_rollout",
        "generator.inference_engine.backend=vllm",
        "generator.inference_engine.engine_args={kv_cache_memory_bytes: 67108864, enforce_eager: true}",
        "generator.verify_weights=true",
        "trainer.trackers=[]",
        "trainer.max_steps=2",
        f"trainer.run_dir={tmp_path / 'run'}",
    ]
    assert main(["train", "quickstart", *settings]) == 0
    expected = ["load 0"]
    for version in (1, 2):
        expected += ["sleep 2", "wake weights", f"load {version}", "wake kv_cache"]
    assert calls == expected
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2]
    # The engine's log-probs are those of the policies that it says; tokens of the first step have no other.
    assert 0 <= rows[0]["off_policy/kl_k3"] < 1e-6
