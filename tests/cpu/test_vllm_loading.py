"""Updates in vLLM's own models: in place where vLLM computes with the parameters, and always what its reload gives."""

from __future__ import annotations

import asyncio
import dataclasses
import os
import select
import signal
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from vllm_engines import CONTEXT, LORA, PROMPT, SLOTS, TOLERANCE, Served, greedy_after, request, save_folder, tiny_model
from vllm_engines import token_logprobs as reference
from vllm_loading_worlds import fails, in_vllm_process, loads, scaled

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

MODELS = [("qwen3", False), ("qwen3", True), ("qwen2", False)]  # tied embeddings; biases
FORGOTTEN = [
    "model.layers.1.self_attn.k_proj.bias",  # zero, and a part of a parameter
    "model.layers.0.mlp.up_proj.weight",
    "model.norm.weight",
    "lm_head.weight",
    None,  # it raises in the middle
]


@pytest.fixture(scope="module")
def loaded(vllm_forks: None) -> dict[tuple[Any, ...], dict[str, Any]]:
    """What became of each model, packed or not."""
    cases = [*((*model, False) for model in MODELS), ("qwen3", False, True)]
    return dict(zip(cases, in_vllm_process(loads, cases), strict=True))


@pytest.mark.parametrize(("kind", "tied"), MODELS)
def test_later_updates_are_loaded_in_place_as_by_the_reload(loaded: Any, kind: str, tied: bool) -> None:
    found = loaded[kind, tied, False]
    assert found["in_place"] is True
    assert found["reloads"] == [1, 0], "the first update is loaded both ways"
    assert found["equal"]
    matrices = [name for name in found["changed"] if name.endswith("proj.weight")]
    assert len(matrices) == 2 * 4, "of two layers: q, k and v in one, o, gate and up in one, down"


def test_packed_weights_are_loaded_by_the_reload(loaded: Any) -> None:
    found = loaded["qwen3", False, True]
    assert (found["in_place"], found["reloads"]) == (False, [1, 1])


def test_a_loader_that_fails_in_place_is_not_used_again(vllm_forks: None) -> None:
    for found in in_vllm_process(fails, [("qwen2", forgotten) for forgotten in FORGOTTEN]):
        assert found == {"in_place": False, "reloads": 3, "equal": True}


@pytest.mark.slow  # imports both implementations of another architecture
def test_vllm_computes_with_what_an_update_has_beside_parameters(vllm_forks: None) -> None:
    """Also where it serves a class of transformers, which it has changed in its process."""
    for found in in_vllm_process(scaled, [("vllm",), ("transformers",)]):
        assert found["why"] is None and found["found"] == found["sent"] and len(found["sent"]) == 2


@pytest_asyncio.fixture(loop_scope="session")
async def unpacked_vllm(vllm_forks: None, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Served]:
    """An engine of two ranks that compute with their parameters; it takes users' adapters, so that vLLM wraps its layers."""
    monkeypatch.setattr(arguments, "WORKER_EXTENSION", "vllm_unpacked.UnpackedExtension")
    folder = save_folder(tmp_path / "model")
    engine = VLLMEngine(folder, tensor_parallel_size=2, max_model_len=CONTEXT, max_num_seqs=SLOTS, **LORA)
    served = Served(engine, folder, False, SharedMemoryTransport(verify=True))
    await engine.start()
    yield served
    await engine.teardown()
    served.transport.close()


@pytest.mark.slow  # starts an engine of its own
@pytest.mark.asyncio(loop_scope="session")
async def test_two_ranks_load_in_place_under_requests(unpacked_vllm: Served) -> None:
    served = unpacked_vllm
    link, _ = served.engine._alive()
    company = [asyncio.create_task(served.engine.generate(request([9, 3 + i], max_tokens=200))) for i in range(2)]
    for seed in (1, 2, 3):
        await served.sync_weights(seed)
        assert await link.on_workers("skyrl_in_place") == [True, True]
        output = await served.engine.generate(request(max_tokens=40))
        tokens, model = output["response_ids"][0], tiny_model(seed)
        assert tokens == greedy_after(model, PROMPT, tokens)
        assert output["response_logprobs"][0] == pytest.approx(reference(model, PROMPT, tokens), abs=TOLERANCE)
        assert output["response_versions"] == [[served.version] * 40]
    for output in await asyncio.gather(*company):
        assert len(output["response_ids"][0]) == 200


@pytest.mark.slow  # starts an engine of its own
@pytest.mark.asyncio(loop_scope="session")
async def test_two_ranks_answer_the_call_after_one_that_failed(unpacked_vllm: Served, tmp_path: Path) -> None:
    """vLLM raises what the first rank says, and takes the answer of the second for that of its next call."""
    served = unpacked_vllm
    await served.sync_weights(1)
    with pytest.raises(EngineError, match="No adapter found"):
        await served.engine.load_adapter("broken", str(tmp_path))
    assert (await served.engine.health()).alive
    update = await served.gather(tiny_model(2))
    elsewhere = dataclasses.replace(update, transport="disk", location=str(tmp_path / "gone"))
    link, _ = served.engine._alive()
    assert len(set(await link.on_workers("skyrl_receive", elsewhere.to_message()))) == 1
    broken = dataclasses.replace(update, transport="vllm_unpacked:raises")
    assert await link.on_workers("skyrl_receive", broken.to_message()) == ["ValueError: not here"] * 2
    assert (await served.engine.health()).alive
    await served.sync_weights(3)
    output = await served.engine.generate(request(max_tokens=20))
    assert output["response_ids"][0] == greedy_after(tiny_model(3), PROMPT, output["response_ids"][0])


@pytest.mark.slow  # starts an engine of its own
@pytest.mark.asyncio(loop_scope="session")
async def test_a_rank_that_hangs_ends_with_its_engine(unpacked_vllm: Served) -> None:
    """vLLM's process, which would end it, has died: the rank would keep its memory."""
    engine = unpacked_vllm.engine
    link, _ = engine._alive()
    _, second = await engine.worker_pids()
    ended = select.poll()
    ended.register(os.pidfd_open(second), select.POLLIN)
    os.kill(second, signal.SIGSTOP)
    (process,) = link._llm.engine_core.resources.engine_manager.processes
    process.kill()
    process.join()
    assert not ended.poll(0)
    await engine.teardown()
    assert ended.poll(0)
