"""The embedded engine on a GPU keeps the contract that it keeps on the CPU."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
import torch

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA")]
# TF32 and bf16 round differently in one row and in many.
TOLERANCE = {"float32": 5e-3, "bfloat16": 8e-2}
PROMPTS = [[3, 4, 5], [6], [7, 8, 9, 10, 11, 12], [4, 4]]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("embedded") / "model"
    build_model_folder(BuildModelConfig(), Path(path), seed=0)
    return str(path)


def full_logprobs(model: torch.nn.Module, prompt: list[int], tokens: list[int]) -> torch.Tensor:
    """One plain forward pass over the whole sequence."""
    sequence = torch.tensor([prompt + tokens], device="cuda")
    with torch.inference_mode():
        logprobs = model(input_ids=sequence, use_cache=False).logits[0].float().log_softmax(-1)
    return logprobs[len(prompt) - 1 : -1].gather(-1, sequence[0, len(prompt) :, None])[:, 0].cpu()


async def sync_weights(
    engine: EmbeddedEngine, transport: SharedMemoryTransport, model: torch.nn.Module, version: int
) -> None:
    update = await asyncio.to_thread(transport.gather, model.named_parameters(), version)
    await engine.receive_weights(update)
    await engine.load_weights(update)
    assert await engine.served_checksum() == update.checksum, "served bit for bit"


@pytest.mark.parametrize("executor", ["thread", "process"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
async def test_logprobs_match_the_plain_forward_pass(folder: str, dtype: str, executor: str) -> None:
    model, transport = load_model(folder, dtype, "cuda").eval(), SharedMemoryTransport(dtype, verify=True)
    engine = EmbeddedEngine(folder, executor=executor, device="cuda", dtype=dtype, max_num_seqs=3)
    await engine.start()
    try:
        await engine.pause(PauseMode.KEEP)
        await sync_weights(engine, transport, model, 0)
        await engine.resume()
        params = {"max_tokens": 60, "ignore_eos": True, "seed": 5}
        output = await engine.generate(InferenceEngineInput(prompt_token_ids=PROMPTS, sampling_params=params))
        for prompt, tokens, logprobs in zip(PROMPTS, output["response_ids"], output["response_logprobs"], strict=True):
            error = (full_logprobs(model, prompt, tokens) - torch.tensor(logprobs)).abs()
            assert error.max() < TOLERANCE[dtype]
    finally:
        await engine.teardown()
        transport.close()


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_versions_tell_which_weights_sampled_each_token(folder: str, dtype: str, mode: PauseMode) -> None:
    model, transport = load_model(folder, dtype, "cuda").eval(), SharedMemoryTransport(dtype, verify=True)
    engine = EmbeddedEngine(folder, executor="thread", device="cuda", dtype=dtype)
    await engine.start()
    try:
        await engine.pause(PauseMode.KEEP)
        await sync_weights(engine, transport, model, 0)
        await engine.resume()
        params = {"max_tokens": 300, "ignore_eos": True}
        stream = engine.stream(InferenceEngineInput(prompt_token_ids=[[3, 4]], sampling_params=params))
        versions = list((await anext(stream)).versions)
        await engine.pause(mode)
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.mul_(1.01)
        await sync_weights(engine, transport, model, 1)
        await engine.resume()
        async for chunk in stream:
            versions += chunk.versions
        assert versions == sorted(versions)
        assert set(versions) == ({0, 1} if mode in (PauseMode.KEEP, PauseMode.RECOMPUTE) else {0})
    finally:
        await engine.teardown()
        transport.close()


async def test_batch_invariant_on_a_gpu_too(folder: str) -> None:
    model, transport = load_model(folder, "float32", "cuda").eval(), SharedMemoryTransport()
    engine = EmbeddedEngine(folder, executor="thread", device="cuda", batch_invariant=True)
    await engine.start()
    try:
        await engine.pause(PauseMode.KEEP)
        update = transport.gather(model.named_parameters(), 0)
        await engine.receive_weights(update)
        await engine.load_weights(update)
        await engine.resume()
        params = {"max_tokens": 40, "ignore_eos": True, "seed": 3}
        together = await engine.generate(InferenceEngineInput(prompt_token_ids=PROMPTS, sampling_params=params))
        for index, prompt in enumerate(PROMPTS):
            alone = await engine.generate(InferenceEngineInput(prompt_token_ids=[prompt], sampling_params=params))
            assert alone["response_ids"][0] == together["response_ids"][index]
            assert alone["response_logprobs"][0] == together["response_logprobs"][index]
    finally:
        await engine.teardown()
        transport.close()
