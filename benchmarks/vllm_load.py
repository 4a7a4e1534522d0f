"""How long a weight sync pauses vLLM for each tensor: by vLLM's reload, and in place, in turns.

    python benchmarks/vllm_load.py [--layers 28] [--hidden-size 128] [--rounds 10] [--device cuda]

The model is a Qwen3 in bf16 whose tensors are so small that their bytes take no time. On a CPU, vLLM would pack its weights, so
that they cannot be loaded in place; here it does not, as on a GPU. Each time is a median.
"""

from __future__ import annotations

import argparse
import statistics
import tempfile
import time
from contextlib import ExitStack
from types import SimpleNamespace
from unittest import mock

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.inference.engines.vllm import weight_loader
from skyrl_train.inference.engines.vllm.weight_loader import WeightLoader

RELOAD, IN_PLACE = "vLLM's reload", "in place"


def save_config(folder: str, layers: int, hidden_size: int) -> None:
    config = AutoConfig.for_model(
        "qwen3",
        vocab_size=128,
        hidden_size=hidden_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=32,
        intermediate_size=hidden_size,
        max_position_embeddings=128,
        tie_word_embeddings=False,
        architectures=["Qwen3ForCausalLM"],
    )
    config.save_pretrained(folder)


def make_loader(folder: str, device: torch.device) -> WeightLoader:
    """Return the loader of a vLLM model without an engine."""
    from vllm.config import set_current_vllm_config
    from vllm.distributed import init_distributed_environment, initialize_model_parallel
    from vllm.engine.arg_utils import EngineArgs
    from vllm.model_executor.model_loader import get_model

    config = EngineArgs(
        folder, dtype="bfloat16", load_format="dummy", enforce_eager=True, skip_tokenizer_init=True
    ).create_engine_config()
    with set_current_vllm_config(config):
        init_distributed_environment(1, 0, f"file://{folder}/meeting", 0, "gloo")
        initialize_model_parallel()
        model = get_model(vllm_config=config)
    return WeightLoader(SimpleNamespace(get_model=lambda: model, lora_manager=None), config, device)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--layers", type=int, default=28)
    parser.add_argument("--hidden-size", type=int, default=128)
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--device", default="cpu", choices=["cpu", "cuda"])
    options = parser.parse_args()
    device = torch.device(options.device)
    with tempfile.TemporaryDirectory() as folder, ExitStack() as unpacked:
        if device.type == "cpu":
            from vllm import _custom_ops
            from vllm.model_executor.layers import utils
            from vllm.v1.worker import cpu_worker  # noqa: F401  makes torch's accelerator calls work without one

            unpacked.enter_context(mock.patch.object(_custom_ops, "_supports_onednn", False))
            unpacked.enter_context(mock.patch.object(utils, "check_cpu_sgl_kernel", return_value=False))
            unpacked.enter_context(mock.patch.object(weight_loader, "PACKING_DEVICES", ()))
        save_config(folder, options.layers, options.hidden_size)
        loader = make_loader(folder, device)
        trained = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(folder), dtype=torch.bfloat16)
        weights = {name: weight.detach().to(device) for name, weight in trained.named_parameters()}
        loader.load_weights(weights, in_place=False)
        assert loader.loads_in_place(weights), "the model is loaded in place"
        times: dict[str, list[float]] = {}
        for _ in range(options.rounds):
            for name in (RELOAD, IN_PLACE):
                started = time.perf_counter()
                loader.load_weights(weights, in_place=name is IN_PLACE)
                times.setdefault(name, []).append(time.perf_counter() - started)
    seconds = {name: statistics.median(of_name) for name, of_name in times.items()}
    print(f"{len(weights)} tensors on {device}, {options.rounds} rounds")
    for name, each in seconds.items():
        print(f"{name}: {1e3 * each:.1f} ms, {1e3 * each / len(weights):.3f} ms a tensor")
    print(f"{IN_PLACE} / {RELOAD}: {seconds[IN_PLACE] / seconds[RELOAD]:.2f}")


if __name__ == "__main__":
    main()
