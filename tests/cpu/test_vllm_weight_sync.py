"""Weight syncs to a real vLLM: it serves exactly the sent weights, also where its own reload forgets something."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from contextlib import closing
from pathlib import Path

import pytest
import torch
from safetensors.torch import save_file
from vllm_engines import PROMPT, TOLERANCE, Served, full_greedy, greedy_after, request, tiny_model
from vllm_engines import token_logprobs as reference

from skyrl_train.errors import EngineError, RequestError
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.process_group import GlooTransport

pytestmark = pytest.mark.asyncio(loop_scope="session")


async def serves(served: Served, seed: int) -> None:
    output = await served.engine.generate(request(max_tokens=40))
    tokens, model = output["response_ids"][0], tiny_model(seed, served.tied)
    assert tokens == greedy_after(model, PROMPT, tokens)
    assert output["response_logprobs"][0] == pytest.approx(reference(model, PROMPT, tokens), abs=TOLERANCE)
    assert output["response_versions"] == [[served.version] * 40]


async def test_without_weights_there_are_no_answers(tied_vllm: Served) -> None:
    assert isinstance(tied_vllm.before_weights, RequestError) and "no weights yet" in str(tied_vllm.before_weights)


@pytest.mark.parametrize("seeds", [[1], [2, 3, 2]])
async def test_synced_weights_are_served_bit_for_bit(vllm: Served, seeds: list[int]) -> None:
    for seed in seeds:
        update = await vllm.sync_weights(seed)
        assert await vllm.served_checksum(update) == update.checksum
        await serves(vllm, seed)


async def test_one_broadcast_reaches_the_workers_of_all_engines_while_they_sample(
    vllm: Served, started_vllm: dict[str, Served], monkeypatch: pytest.MonkeyPatch, trainer_elsewhere: None
) -> None:
    both = [vllm, started_vllm["twin"]]
    with closing(GlooTransport(verify=True, address="127.0.0.1", bucket_bytes=100_000)) as transport:
        groups = []
        for seed in (4, 5):
            version = max(one.version for one in both) + 1
            update = transport.gather(tiny_model(seed).named_parameters(), version)
            running = [asyncio.create_task(one.engine.generate(request(max_tokens=100))) for one in both]
            together = dataclasses.replace(update, receivers=2)
            await asyncio.gather(*(one.engine.receive_weights(together) for one in both))
            assert transport._server is not None and transport._server._kept is not None
            groups.append(transport._server._kept[0])
            for one in both:
                one.version = version
                await one.load(update, PauseMode.KEEP)
                assert await one.served_checksum(update) == update.checksum
            await asyncio.gather(*running)
        assert groups[0] is groups[1]
        # What is wrong with an update is said when it is loaded, and the engines go on with what they have.
        damaged = dataclasses.replace(
            transport.gather(tiny_model(4).named_parameters(), 10_000), checksum="crc32:00000000"
        )
        await vllm.engine.receive_weights(damaged)
        with pytest.raises(EngineError, match="checksum"):
            await vllm.load(damaged, PauseMode.KEEP)
        await vllm.engine.resume()
        await serves(vllm, 5)
        # On the trainer's machine they map its memory, and nobody is asked.
        monkeypatch.undo()
        vllm.version += 1
        update = transport.gather(tiny_model(4).named_parameters(), vllm.version)
        transport._server.close()
        await vllm.engine.receive_weights(update)
        await vllm.load(update, PauseMode.KEEP)
        await serves(vllm, 4)


async def test_tied_embeddings_are_served_by_both_their_users(tied_vllm: Served) -> None:
    for seed in (1, 2):
        update = await tied_vllm.sync_weights(seed)
        assert "lm_head.weight" not in {spec.name for spec in update.tensors}
        assert await tied_vllm.served_checksum(update) == update.checksum
        await serves(tied_vllm, seed)


async def test_the_read_back_sees_one_changed_weight(vllm: Served) -> None:
    """The checksum is of the served weights, not of the sent ones: other weights in the same memory do not change it."""
    update = await vllm.sync_weights(1)
    vllm.transport.gather(tiny_model(2).named_parameters(), 10_000)
    assert await vllm.served_checksum(update) == update.checksum
    changed = dict(tiny_model(1).named_parameters())
    name = "model.layers.1.self_attn.k_proj.weight"
    changed[name] = changed[name].detach().clone()
    changed[name][3, 5] += 1e-3
    vllm.version += 1
    other = vllm.transport.gather(changed.items(), vllm.version)
    await vllm.engine.receive_weights(other)
    await vllm.engine.pause(PauseMode.KEEP)
    await vllm.engine.load_weights(other)
    await vllm.engine.resume()
    assert await vllm.served_checksum(other) == other.checksum != update.checksum


async def test_an_adapter_serves_the_requests_that_name_it(tied_vllm: Served, tmp_path: Path) -> None:
    await tied_vllm.sync_weights(1)
    engine = tied_vllm.engine
    base = full_greedy(tiny_model(1, True), PROMPT, 12)
    with pytest.raises(EngineError):
        await engine.load_adapter("broken", str(tmp_path))
    await engine.load_adapter("tuned", save_adapter(tmp_path / "a", seed=0))
    tuned = (await engine.generate({**request(), "adapter": "tuned"}))["response_ids"][0]
    plain = (await engine.generate(request()))["response_ids"][0]
    assert (plain, tuned == base) == (base, False)
    # Under the same name another adapter: nothing of the first one is left, not even in the prefix cache.
    await engine.load_adapter("tuned", save_adapter(tmp_path / "b", seed=1))
    again = (await engine.generate({**request(), "adapter": "tuned"}))["response_ids"][0]
    assert again not in (tuned, base)
    update = await tied_vllm.sync_weights(2)
    assert await tied_vllm.served_checksum(update) == update.checksum
    await serves(tied_vllm, 2)
    await engine.unload_adapter("tuned")
    with pytest.raises(RequestError, match="tuned"):
        await engine.generate({**request(), "adapter": "tuned"})
    with pytest.raises(EngineError, match="tuned"):
        await engine.unload_adapter("tuned")
    await serves(tied_vllm, 2)


def save_adapter(folder: Path, seed: int) -> str:
    """A rank-4 adapter of every q and v projection, in peft's format."""
    folder.mkdir()
    generator = torch.Generator().manual_seed(seed)
    tensors = {}
    for layer in range(2):
        for module, outputs in (("q_proj", 128), ("v_proj", 64)):
            prefix = f"base_model.model.model.layers.{layer}.self_attn.{module}"
            tensors[f"{prefix}.lora_A.weight"] = torch.randn(4, 64, generator=generator)
            tensors[f"{prefix}.lora_B.weight"] = torch.randn(outputs, 4, generator=generator)
    save_file(tensors, folder / "adapter_model.safetensors")
    config = {"peft_type": "LORA", "r": 4, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"], "bias": "none"}
    (folder / "adapter_config.json").write_text(json.dumps(config))
    return str(folder)
