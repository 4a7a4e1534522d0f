"""vLLM on a GPU, with a Qwen3 of random weights in bf16: continuation, pause modes, weight sync both ways, sleep.

``SKYRL_GPU_MODEL`` picks the shape: "0.6b" (default), "1.7b" or "3b". Latencies are printed and recorded as properties of the
test report. The variables of ``ENVIRONMENT`` suit installations without FlashInfer and DeepGEMM kernels, too.
"""

from __future__ import annotations

import asyncio
import os
import time
from collections.abc import AsyncIterator, Callable
from typing import Any

import pytest
import pytest_asyncio
import torch
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_read_back import EXTENSION, served_checksum

from skyrl_train.errors import ConfigError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.cuda_ipc import CudaIpcTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.timeout(900),
]
SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "3b": {"hidden_size": 2560, "num_hidden_layers": 28, "num_attention_heads": 20, "intermediate_size": 9728},
}
SHAPE = os.environ.get("SKYRL_GPU_MODEL", "0.6b")
# Updates must reach what CUDA graphs have recorded. Nothing is compiled, which would take longer than all tests.
GRAPHS = {"mode": 0, "cudagraph_mode": "FULL_DECODE_ONLY", "cudagraph_capture_sizes": [1, 2, 4, 8, 16, 32, 64]}
ENVIRONMENT = {"VLLM_USE_FLASHINFER_SAMPLER": "0", "VLLM_USE_DEEP_GEMM": "0"}
CONTEXT = 1024
MEAN_TOLERANCE = 2e-2  # of log-probs in bf16, vLLM's kernels against the plain model's
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz "
PROMPT = [5, 9, 13]


class World:
    """The engine, the trainer's model on the same GPU, and both transports."""

    def __init__(self, folder: str, model: PreTrainedModel) -> None:
        self.folder, self.model, self.version = folder, model, -1
        self.engine = VLLMEngine(
            folder,
            dtype="bfloat16",
            max_num_seqs=64,
            max_model_len=CONTEXT,
            devices=[0],
            engine_args={"gpu_memory_utilization": 0.4, "compilation_config": GRAPHS, "enable_sleep_mode": True},
            environment=ENVIRONMENT,
        )
        self.transports: dict[str, WeightTransport] = {
            "shared_memory": SharedMemoryTransport("bfloat16", verify=True),
            "cuda_ipc": CudaIpcTransport("bfloat16", verify=True),
        }

    def change(self, scale: float) -> None:
        """Moves every matrix a little, as a step of training would."""
        generator = torch.Generator("cuda").manual_seed(self.version + 7)
        with torch.no_grad():
            for parameter in self.model.parameters():
                if parameter.dim() > 1:
                    noise = torch.randn(parameter.shape, generator=generator, device="cuda", dtype=torch.bfloat16)
                    parameter.add_(noise, alpha=scale)

    async def receive(self, transport: str) -> tuple[WeightUpdate, dict[str, float]]:
        """Returns the next version, received, and the milliseconds of each part."""
        self.version += 1
        started = time.perf_counter()
        update = await asyncio.to_thread(self.transports[transport].gather, self.model.named_parameters(), self.version)
        gathered = time.perf_counter()
        await self.engine.receive_weights(update)
        return update, {"gather": 1e3 * (gathered - started), "transfer": 1e3 * (time.perf_counter() - gathered)}

    async def load(self, update: WeightUpdate, mode: PauseMode) -> dict[str, float]:
        """Returns the milliseconds of each part."""
        started = time.perf_counter()
        await self.engine.pause(mode)
        await self.engine.load_weights(update)
        await self.engine.resume()
        paused = time.perf_counter() - started
        assert await served_checksum(self.engine, update) == update.checksum, "served bit for bit"
        return {"paused": 1e3 * paused, "load": 1e3 * self.engine.last_load_s}

    def logprobs(self, prompt: list[int], tokens: list[int]) -> torch.Tensor:
        """One plain forward pass, [T]."""
        sequence = torch.tensor([prompt + tokens], device="cuda")
        with torch.inference_mode():
            logits = self.model(input_ids=sequence, use_cache=False).logits[0].float()
        return logits[len(prompt) - 1 : -1].log_softmax(-1).gather(-1, sequence[0, len(prompt) :, None])[:, 0].cpu()

    def agrees(self, prompt: list[int], tokens: list[int], logprobs: list[float], first: int = 0) -> None:
        error = (self.logprobs(prompt, tokens) - torch.tensor(logprobs)).abs()[first:]
        assert error.mean() < MEAN_TOLERANCE


def request(*prompts: list[int], **params: Any) -> InferenceEngineInput:
    params = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0, "seed": 3, **params}
    return InferenceEngineInput(prompt_token_ids=list(prompts) or [PROMPT], sampling_params=params)


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def started(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[World]:
    pytest.importorskip("vllm", reason="needs the extra vllm")
    folder = str(tmp_path_factory.mktemp("vllm") / "model")
    await asyncio.to_thread(save_model, folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).to("cuda").eval()
    world = World(folder, model)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "WORKER_EXTENSION", EXTENSION)
        await world.engine.start()
    yield world
    await world.engine.teardown()
    for transport in world.transports.values():
        transport.close()


def save_model(folder: str) -> None:
    heads = {"num_key_value_heads": 4, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": CONTEXT}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": SHAPE == "0.6b"}
    config = AutoConfig.for_model("qwen3", **SHAPES[SHAPE], **heads, **ends)
    with torch.random.fork_rng(), torch.device("cuda"):
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    character_tokenizer(ALPHABET).save_pretrained(folder)


@pytest_asyncio.fixture(loop_scope="module")
async def world(started: World) -> AsyncIterator[World]:
    if started.version < 0:
        update, _ = await started.receive("shared_memory")
        await started.load(update, PauseMode.KEEP)
    yield started
    health = await started.engine.health()
    assert (health.alive, health.paused, health.waiting) == (True, False, 0)


async def test_the_worker_computes_on_its_gpu_and_sees_all_of_them(world: World) -> None:
    link, _ = world.engine._alive()
    assert await link.on_workers("skyrl_device") == ["cuda:0"]
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    assert await link.on_workers("skyrl_variable", "CUDA_VISIBLE_DEVICES") == [visible]


async def test_updates_are_loaded_in_place(world: World) -> None:
    link, _ = world.engine._alive()
    assert await link.on_workers("skyrl_in_place") == [True]


async def test_a_gpu_that_is_not_there_is_refused(world: World) -> None:
    count = torch.cuda.device_count()
    with pytest.raises(ConfigError, match=f"for GPU {count}, and there (is|are) {count} here"):
        await VLLMEngine(world.folder, dtype="bfloat16", devices=[count]).start()


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
async def test_an_engine_may_have_another_gpu_than_the_trainer(world: World) -> None:
    engine_args = {"gpu_memory_utilization": 0.3, "enforce_eager": True}
    engine = VLLMEngine(
        world.folder,
        dtype="bfloat16",
        devices=[1],
        engine_args=engine_args,
        environment=ENVIRONMENT,
        max_model_len=CONTEXT,
    )
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "WORKER_EXTENSION", EXTENSION)
        await engine.start()
    try:
        link, _ = engine._alive()
        assert await link.on_workers("skyrl_device") == ["cuda:1"]
        assert len((await engine.generate(request()))["response_ids"][0]) == 64
    finally:
        await engine.teardown()


async def test_log_probs_match_the_plain_forward_pass(world: World) -> None:
    prompts = [[5], [6, 7], list(range(3, 40))]
    for params in ({"temperature": 0.0}, {"temperature": 0.8}):
        output = await world.engine.generate(request(*prompts, **params))
        for prompt, tokens, logprobs in zip(prompts, output["response_ids"], output["response_logprobs"], strict=True):
            if params["temperature"] == 0.0:
                world.agrees(prompt, tokens, logprobs)
            assert len(tokens) == 64
            assert output["response_versions"][0] == [world.version] * 64


@pytest.mark.parametrize("transport", ["shared_memory", "cuda_ipc"])
@pytest.mark.parametrize("mode", list(PauseMode))
async def test_each_pause_mode_swaps_weights_under_requests(
    world: World, mode: PauseMode, transport: str, record_property: Callable[[str, object], None]
) -> None:
    old = world.version
    # Received before the requests begin: while a checksum of all weights is made, a fast engine would end them.
    await asyncio.to_thread(world.change, 1e-3)
    update, milliseconds = await world.receive(transport)
    stream = world.engine.stream(request(max_tokens=300, temperature=0.0))
    company = [asyncio.create_task(world.engine.generate(request([7 + i], max_tokens=200))) for i in range(32)]
    first = await anext(stream)
    tokens, logprobs, versions = list(first.token_ids), list(first.logprobs), list(first.versions)
    milliseconds |= await world.load(update, mode)
    async for chunk in stream:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
        versions += chunk.versions
    outputs = await asyncio.gather(*company)
    assert versions == sorted(versions)
    new = versions.count(old + 1)
    assert (new > 0) == (mode in (PauseMode.KEEP, PauseMode.RECOMPUTE))
    if mode is PauseMode.RECOMPUTE:
        world.agrees(PROMPT, tokens, logprobs, first=len(tokens) - new)
    if mode is PauseMode.ABORT:
        assert {output["stop_reasons"][0] for output in outputs} == {"abort"}
    after = await world.engine.generate(request(temperature=0.0))
    world.agrees(PROMPT, after["response_ids"][0], after["response_logprobs"][0])
    for name, value in milliseconds.items():
        record_property(f"{SHAPE}/{transport}/{mode.value}/{name}_ms", round(value, 2))
    print(f"{SHAPE} {transport} {mode.value}: " + ", ".join(f"{k} {v:.1f} ms" for k, v in milliseconds.items()))  # noqa: T201


async def test_requests_outlive_any_number_of_updates(world: World) -> None:
    client = InferenceEngineClient([world.engine], character_tokenizer(ALPHABET), world.folder)
    asked = [[3 + i, 9] for i in range(24)]
    calls = asyncio.gather(*(client.generate(request(prompt, max_tokens=256, temperature=0.0)) for prompt in asked))
    for mode in [*PauseMode, *PauseMode]:
        world.version += 1
        update = await asyncio.to_thread(
            world.transports["cuda_ipc"].gather, world.model.named_parameters(), world.version
        )
        await client.receive_weights(update)
        await client.load_weights(update, mode)
    for prompt, output in zip(asked, await calls, strict=True):
        assert (len(output["response_ids"][0]), output["stop_reasons"]) == (256, ["length"])
        assert output["response_versions"][0] == sorted(output["response_versions"][0])
        world.agrees(prompt, output["response_ids"][0], output["response_logprobs"][0])


async def test_memory_is_freed_asleep_and_requests_go_on_afterwards(world: World) -> None:
    stream = world.engine.stream(request(max_tokens=200, temperature=0.0))
    tokens, logprobs = [], []
    first = await anext(stream)
    tokens += first.token_ids
    logprobs += first.logprobs
    await world.engine.pause(PauseMode.KEEP)
    free = torch.cuda.mem_get_info()[0]
    await world.engine.sleep(1)
    assert torch.cuda.mem_get_info()[0] > free + (1 << 30)
    await world.engine.wake_up()
    link, _ = world.engine._alive()
    assert await link._llm.engine_core.is_scheduler_paused_async(), "an update may come before requests go on"
    await world.engine.resume()
    async for chunk in stream:
        tokens += chunk.token_ids
        logprobs += chunk.logprobs
    assert len(tokens) == 200
    world.agrees(PROMPT, tokens, logprobs)


async def test_weights_may_come_while_only_their_memory_is_back(world: World) -> None:
    await world.engine.pause(PauseMode.ABORT)
    await world.engine.sleep(2)
    await world.engine.wake_up(["weights"])
    await asyncio.to_thread(world.change, 1e-3)
    world.version += 1
    update = await asyncio.to_thread(world.transports["cuda_ipc"].gather, world.model.named_parameters(), world.version)
    await world.engine.receive_weights(update)
    await world.engine.load_weights(update)
    await world.engine.wake_up(["kv_cache"])
    await world.engine.resume()
    output = await world.engine.generate(request(temperature=0.0))
    world.agrees(PROMPT, output["response_ids"][0], output["response_logprobs"][0])
