"""An adapter's way to live engines: they serve the trainer's policy, from a few bytes, beside a base that stays."""

from __future__ import annotations

import asyncio
import dataclasses
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from test_lora_training import ALPHA, lora
from training_worlds import backend
from vllm_engines import CONTEXT, PROMPT, TOLERANCE, request, save_folder
from vllm_read_back import served_checksum

from skyrl_train.errors import EngineError, RequestError
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded.core import EmbeddedEngineCore, build_core
from skyrl_train.inference.engines.embedded.engine import EngineSettings
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.interface import InferenceEngineInterface, InferenceEngineOutput
from skyrl_train.models.lora import policy_weights
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.delta import DeltaTransport
from skyrl_train.weight_sync.disk import DiskTransport
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("one_compute_thread"),
]

TRANSPORTS: dict[str, Callable[[str, str], WeightTransport]] = {
    "shared_memory": lambda folder, dtype: SharedMemoryTransport(dtype, verify=True),
    "disk": lambda folder, dtype: DiskTransport(folder, dtype, verify=True),
    "delta": lambda folder, dtype: DeltaTransport(folder, dtype, verify=True),
    "gloo": lambda folder, dtype: GlooTransport(dtype, address="127.0.0.1", verify=True),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return save_folder(tmp_path_factory.mktemp("base") / "model")


def policy(folder: str, seed: int, dtype: str = "float32", **settings: Any) -> LocalBackend:
    """A trainer whose adapter is far from where it starts; the base stays as in the folder."""
    trainer = backend(folder, policy__model__lora=lora(**settings), policy__dtype=dtype)
    move(trainer, seed)
    return trainer


@torch.no_grad()
def move(trainer: LocalBackend, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy_weights(trainer.model):
        if ".lora_B." in name:
            weight.copy_(0.1 * torch.randn(weight.shape, generator=generator))


def trainer_logprobs(trainer: LocalBackend, tokens: list[int]) -> list[float]:
    """Of ``tokens`` after the prompt, as the trainer computes them."""
    ids = torch.tensor([*PROMPT, *tokens])
    nothing = torch.zeros(len(ids))
    sequence = TrainingSequence(ids, nothing > 0, nothing, nothing, torch.full_like(ids, -1), 0)
    return trainer.forward_logprobs([sequence])[0][len(PROMPT) :].tolist()


async def sync_weights(engine: InferenceEngineInterface, update: WeightUpdate) -> None:
    await engine.receive_weights(update)
    await load_weights(engine, update, PauseMode.KEEP)


async def load_weights(engine: InferenceEngineInterface, update: WeightUpdate, mode: PauseMode) -> None:
    await engine.pause(mode)
    try:
        await engine.load_weights(update)
    finally:
        await engine.resume()


def agree(trainer: LocalBackend, output: InferenceEngineOutput, version: int, tolerance: float = TOLERANCE) -> None:
    tokens = output["response_ids"][0]
    assert output["response_logprobs"][0] == pytest.approx(trainer_logprobs(trainer, tokens), abs=tolerance)
    assert output["response_versions"] == [[version] * len(tokens)]


# ---- embedded


@pytest.mark.parametrize("first", [1, 2])
async def test_adapters_of_other_scales_share_no_graph_of_the_engines_process(folder: str, first: int) -> None:
    # The scale is a constant of the captured passes, and an adapter's first weights hide it.
    for alpha in (ALPHA * first, ALPHA * (3 - first)):
        trainer, transport = policy(folder, 1, alpha=alpha), SharedMemoryTransport("float32", verify=True)
        engine = EmbeddedEngine(
            folder, executor="thread", max_model_len=CONTEXT, max_num_seqs=4, lora=lora(alpha=alpha)
        )
        await engine.start()
        try:
            await sync_weights(engine, trainer.stage(transport, 0))
            agree(trainer, await engine.generate(request(max_tokens=20)), 0)
        finally:
            await engine.teardown()
            transport.close()


SLOW = {"disk", "gloo"}  # other tests send whole models by them


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in TRANSPORTS]
)
@pytest.mark.usefixtures("trainer_elsewhere")
async def test_an_embedded_engine_serves_the_trainers_policy(folder: str, tmp_path: Path, name: str) -> None:
    trainer, transport = policy(folder, 1), TRANSPORTS[name](str(tmp_path), "float32")
    whole = sum(p.nbytes for p in trainer.model.parameters())
    engine = EmbeddedEngine(folder, executor="thread", max_model_len=CONTEXT, max_num_seqs=4, lora=lora())
    await engine.start()
    try:
        with pytest.raises(RequestError, match="no weights yet"):
            await engine.generate(request())
        for version in range(3):
            move(trainer, version)
            update = trainer.stage(transport, version)
            assert update.num_bytes < whole / 2
            await sync_weights(engine, update)
            assert await engine.served_checksum() == update.checksum
            output = await engine.generate(request(max_tokens=20))
            agree(trainer, output, version)
        # One that joins late has the base from its folder, and the current adapter from the update.
        late = EmbeddedEngine(folder, executor="thread", max_model_len=CONTEXT, max_num_seqs=4, lora=lora())
        await late.start()
        try:
            await sync_weights(late, update)
            assert (await late.generate(request(max_tokens=20)))["response_ids"] == output["response_ids"]
        finally:
            await late.teardown()
    finally:
        await engine.teardown()
        transport.close()


def core(folder: str, **changes: object) -> EmbeddedEngineCore:
    built = build_core(
        EngineSettings(**{"model_path": folder, "device": "cpu", "dtype": "float32", "max_num_seqs": 2,
                             "max_model_len": CONTEXT, "batch_invariant": False, "seed": 0, "lora": lora(), **changes})
    )  # fmt: skip
    built.pause(PauseMode.KEEP)
    return built


def load(engine: EmbeddedEngineCore, update: WeightUpdate) -> None:
    engine.receive(update)
    engine.load(update)


def test_an_update_moves_the_adapter_and_nothing_else(folder: str) -> None:
    trainer, engine, transport = policy(folder, 1), core(folder), SharedMemoryTransport()
    before = {name: p.clone() for name, p in engine.model.named_parameters()}
    for version in range(20):  # leftovers of earlier updates would add up
        move(trainer, version)
        load(engine, trainer.stage(transport, version))
    for name, weight in engine.model.named_parameters():
        assert torch.equal(weight, trainer.model.get_parameter(name))
        assert ".lora_" in name or torch.equal(weight, before[name])
    transport.close()


def test_an_update_that_is_not_the_engines_adapter_is_refused(folder: str) -> None:
    trainer, transport = policy(folder, 1), SharedMemoryTransport()
    update = trainer.stage(transport, 0)
    with pytest.raises(EngineError, match=r"an adapter of rank 4 and scale 1\.5, the engine serves one"):
        load(core(folder, lora=None), dataclasses.replace(update, version=1))
    engine = core(folder, lora=lora(alpha=2.0))
    with pytest.raises(EngineError, match=r"the engine serves an adapter of rank 4 and scale 0\.5"):
        load(engine, update)
    with pytest.raises(EngineError, match="a whole model, the engine serves an adapter"):
        load(core(folder), backend(folder).stage(transport, 1))
    assert engine.policy_version == -1
    transport.close()


def test_bfloat16_is_served_as_the_trainer_computes_it(folder: str) -> None:
    """A merged weight would round: W + scale * B A has 8 bits."""
    trainer, transport = policy(folder, 1, "bfloat16"), SharedMemoryTransport("bfloat16")
    engine = core(folder, dtype="bfloat16")
    load(engine, trainer.stage(transport, 0))
    ids = torch.tensor([[*PROMPT, 7, 8, 9]])
    with torch.no_grad():
        assert torch.equal(engine.model(input_ids=ids).logits, trainer.model(input_ids=ids).logits)
    transport.close()


def test_an_adapter_crosses_process_borders_as_plain_data(folder: str) -> None:
    transport = SharedMemoryTransport(verify=True)
    update = policy(folder, 1).stage(transport, 0)
    assert WeightUpdate.from_message(update.to_message()) == update
    transport.close()


# ---- vLLM


@pytest_asyncio.fixture(scope="module", loop_scope="session")
async def vllm_adapter(folder: str, vllm_forks: None, reading_back: None) -> AsyncIterator[VLLMEngine]:
    """A real vLLM that has its base from the folder and waits for an adapter."""
    engine = VLLMEngine(folder, max_model_len=CONTEXT, max_num_seqs=8, lora_rank=4, seed=3)
    await engine.start()
    with pytest.raises(RequestError, match="no weights yet"):
        await engine.generate(request())
    yield engine
    await engine.teardown()


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_swaps_adapters_in_flight(folder: str, vllm_adapter: VLLMEngine) -> None:
    engine, transport = vllm_adapter, SharedMemoryTransport(verify=True)
    start = engine.policy_version + 1
    first, second = policy(folder, 1), policy(folder, 2)
    update = first.stage(transport, start)
    await sync_weights(engine, update)
    output = await engine.generate(request(max_tokens=20))
    agree(first, output, start)
    with pytest.raises(EngineError, match="no power of 2"):  # the trainer's scale here is 1.5
        await served_checksum(engine, update)
    # A request under way: each of its tokens is of the version that it names, and has its log-prob.
    update = second.stage(transport, start + 1)
    await engine.receive_weights(update)
    flying = asyncio.create_task(engine.generate(request(max_tokens=150)))
    async with asyncio.timeout(300):
        before = (await engine.health()).generated_tokens
        while (await engine.health()).generated_tokens - before < 20:
            pass
    await load_weights(engine, update, PauseMode.RECOMPUTE)
    output = await flying
    tokens, versions = output["response_ids"][0], output["response_versions"][0]
    assert (len(tokens), set(versions), versions) == (150, {start, start + 1}, sorted(versions))
    by_version = [trainer_logprobs(trainer, tokens) for trainer in (first, second)]
    expected = [by_version[version - start][index] for index, version in enumerate(versions)]
    assert output["response_logprobs"][0] == pytest.approx(expected, abs=TOLERANCE)
    # Back and forth leaves no trace, and cached prefixes serve no other version.
    for version, trainer in enumerate((first, second, first), start + 2):
        await sync_weights(engine, trainer.stage(transport, version))
        agree(trainer, await engine.generate(request(max_tokens=20)), version)
    transport.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_rejects_updates_that_are_not_its_adapter(folder: str, vllm_adapter: VLLMEngine) -> None:
    engine, transport = vllm_adapter, SharedMemoryTransport()
    trainer = policy(folder, 1)
    version = engine.policy_version + 1
    good = trainer.stage(transport, version)
    await sync_weights(engine, good)
    longer = dataclasses.replace(good.tensors[0], shape=(8, 32))
    for change, message in (
        ({"adapter": None}, "a whole model, the engine serves an adapter of rank 4"),
        ({"tensors": good.tensors[1:]}, "and no"),
        ({"tensors": (longer, *good.tensors[1:])}, r"shape \(8, 32\)"),
    ):
        with pytest.raises(EngineError, match=message):
            await sync_weights(engine, dataclasses.replace(good, **change, version=version + 1))  # type: ignore[arg-type]
    agree(trainer, await engine.generate(request(max_tokens=8)), version)
    transport.close()


@pytest.mark.asyncio(loop_scope="session")
async def test_vllm_serves_the_adapters_bytes(folder: str, vllm_adapter: VLLMEngine) -> None:
    transport = SharedMemoryTransport(verify=True)
    trainer = backend(folder, policy__model__lora=lora(alpha=8.0))
    for seed in range(2):
        move(trainer, seed)
        update = trainer.stage(transport, vllm_adapter.policy_version + 1)
        await sync_weights(vllm_adapter, update)
        assert await served_checksum(vllm_adapter, update) == update.checksum
        agree(trainer, await vllm_adapter.generate(request(max_tokens=8)), update.version)
    transport.close()
