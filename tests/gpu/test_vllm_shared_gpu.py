"""Two engines of vLLM that start at the same time on one GPU. Nothing else may compute there: run it without ``-n``."""

from __future__ import annotations

import asyncio
from pathlib import Path

import pytest
from test_vllm_gpu import CONTEXT, ENVIRONMENT, request, save_model

from skyrl_train.inference.engines.vllm import VLLMEngine

BYTES = 2  # of an element in bfloat16


def cache_bytes(engine: VLLMEngine) -> int:
    """Bytes of the KV cache that vLLM has made room for."""
    vllm = engine._alive()[0]._llm.vllm_config
    model = vllm.model_config.hf_config
    token = 2 * model.num_hidden_layers * model.num_key_value_heads * model.head_dim * BYTES
    return int(vllm.cache_config.num_gpu_blocks) * int(vllm.cache_config.block_size) * token


@pytest.mark.timeout(600)
async def test_engines_that_share_a_gpu_each_have_the_part_they_were_given(tmp_path: Path) -> None:
    pytest.importorskip("vllm", reason="needs the extra vllm")
    folder = str(tmp_path / "model")
    await asyncio.to_thread(save_model, folder)
    weights = (tmp_path / "model" / "model.safetensors").stat().st_size
    engines = [
        VLLMEngine(
            folder,
            dtype="bfloat16",
            max_num_seqs=8,
            max_model_len=CONTEXT,
            devices=[0],
            engine_args={"gpu_memory_utilization": 0.2, "enforce_eager": True},
            environment=ENVIRONMENT,
        )
        for _ in range(2)
    ]
    try:
        await asyncio.gather(*(engine.start() for engine in engines))
        # Started at the same time, one takes the weights of the other, or its whole cache, for its own.
        first, second = map(cache_bytes, engines)
        assert abs(first - second) < weights / 2
        for output in await asyncio.gather(*(engine.generate(request()) for engine in engines)):
            assert len(output["response_ids"][0]) == 64
    finally:
        await asyncio.gather(*(engine.teardown() for engine in engines))
