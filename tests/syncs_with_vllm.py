"""Weight syncs to vLLM, of one rank or two, of a whole policy or of its adapter: on GPUs, and the same on a CPU."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_read_back import served_checksum

from skyrl_train.config.schema import LoraConfig, TrainerConfig
from skyrl_train.inference.engines.vllm import VLLMEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.lora import policy_weights
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.update import WeightUpdate

CONTEXT = 256
PROMPT = [5, 9, 13]
VERSIONS = 3
ALPHABET = "0123456789abcdefghijklmnopqrstuvwxyz "
ADAPTER = LoraConfig(rank=4, alpha=8.0)  # alpha / rank is a power of 2, so that B can be read back
# Of the mean difference of log-probs: vLLM's kernels round in another order. Those of two versions differ by ten times as much.
TOLERANCES = {"float32": 2e-4, "bfloat16": 2e-2}


def save_model(folder: Path) -> str:
    """A small Qwen3 whose matrices can be split over two ranks."""
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=3 + len(set(ALPHABET)),
        hidden_size=256,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=64,
        intermediate_size=512,
        max_position_embeddings=CONTEXT,
        tie_word_embeddings=False,
        eos_token_id=1,
        bos_token_id=None,
        pad_token_id=0,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.float32)
        for parameter in model.parameters():
            if parameter.dim() > 1:
                parameter.data.normal_(std=0.03)
    model.save_pretrained(folder)
    character_tokenizer(ALPHABET).save_pretrained(folder)
    return str(folder)


def policy(folder: str, device: str, dtype: str, lora: LoraConfig | None = None) -> LocalBackend:
    """The trainer; with ``lora`` it trains an adapter."""
    config = TrainerConfig(device=device)
    config.policy.dtype = dtype
    config.policy.model.lora = lora or LoraConfig()
    return LocalBackend(folder, config, total_steps=10, temperature=1.0, seed=0)


@torch.no_grad()
def move(trainer: LocalBackend, seed: int) -> None:
    """Give the policy, or the B of its adapter, other random weights."""
    generator = torch.Generator().manual_seed(seed)
    for name, weight in policy_weights(trainer.model):
        if weight.dim() > 1 and ".lora_A." not in name:
            scale = 0.1 if ".lora_B." in name else 0.03
            weight.copy_(scale * torch.randn(weight.shape, generator=generator))


def logprobs(trainer: LocalBackend, tokens: list[int]) -> torch.Tensor:
    """Of ``tokens`` after the prompt, by the trainer's forward pass, [T]."""
    ids = torch.tensor([*PROMPT, *tokens])
    nothing = torch.zeros(len(ids))
    sequence = TrainingSequence(ids, nothing > 0, nothing, nothing, torch.full_like(ids, -1), 0)
    return trainer.forward_logprobs([sequence])[0][len(PROMPT) :].float().cpu()


async def serves_each_version(
    engine: VLLMEngine,
    trainer: LocalBackend,
    stage: Callable[[int], WeightUpdate],
    dtype: str,
    *,
    reads_back: bool = True,
) -> list[float]:
    """Sync several policies one after the other; the engine's log-probs must be those of each.

    Args:
        stage: brings the trainer's weights of the moment into an update.
        reads_back: also compare the checksum of the bytes that all ranks serve.

    Returns:
        The mean difference of each version's log-probs.
    """
    tokens: list[int] = []
    errors = []
    for version in range(VERSIONS):
        before = logprobs(trainer, tokens)
        move(trainer, version)
        change = (logprobs(trainer, tokens) - before).abs().mean()
        assert not tokens or change > 10 * TOLERANCES[dtype], "an engine with the last version would pass"
        update = stage(version)
        await engine.receive_weights(update)
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(update)
        await engine.resume()
        if reads_back:
            assert await served_checksum(engine, update) == update.checksum
        params: dict[str, Any] = {"max_tokens": 64, "ignore_eos": True, "temperature": 1.0, "seed": 3}
        output = await engine.generate(InferenceEngineInput(prompt_token_ids=[PROMPT], sampling_params=params))
        tokens = output["response_ids"][0]
        assert output["response_versions"] == [[version] * 64]
        errors.append(float((logprobs(trainer, tokens) - torch.tensor(output["response_logprobs"][0])).abs().mean()))
        assert errors[-1] < TOLERANCES[dtype]
    return errors
