"""The policy's LoRA adapter inside a vLLM worker, swapped in place under one number that every request names.

receive: tensors ──a folder in memory that vLLM reads and checks──> vLLM's form of the adapter, beside the one that serves
load:    the old one is removed and the new one takes its slot: only the copies that the kernels read change
"""

from __future__ import annotations

import json
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.arguments import POLICY_ADAPTER
from skyrl_train.models.adapter_spec import AdapterSpec

_MEMORY = Path("/dev/shm")


class LoraLoader:
    """For a worker whose ``model_runner`` was started with LoRA; called between two steps."""

    def __init__(self, model_runner: Any) -> None:
        self._manager: Any = getattr(model_runner, "lora_manager", None)
        self._received: Any = None

    def receive(self, adapter: AdapterSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Convert an adapter (``weights`` under peft's names) to vLLM's form.

        Raises:
            EngineError: vLLM rejects it.
        """
        from vllm.lora.request import LoRARequest

        # vLLM's reader takes a folder; one in shared memory costs a copy but no disk access.
        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            modules = {name.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2] for name in weights}
            settings = {
                "peft_type": "LORA",
                "r": adapter.rank,
                "lora_alpha": adapter.scale * adapter.rank,
                "target_modules": sorted(modules),
                "bias": "none",
            }
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            save_file(
                {name: weight.cpu().clone() for name, weight in weights.items()}, f"{folder}/adapter_model.safetensors"
            )
            try:
                self._received = self._manager._load_adapter(LoRARequest("policy", POLICY_ADAPTER, folder))
            except Exception as error:  # vLLM's reader raises many kinds; the adapter that serves is untouched
                raise EngineError(f"vLLM rejects the adapter: {error}") from error

    def load(self) -> None:
        """Replace the adapter that serves by the received one. An exception from here leaves no adapter."""
        assert self._received is not None, "an update is loaded after it was received"
        adapters = self._manager._adapter_manager
        adapters.remove_adapter(POLICY_ADAPTER)
        if len(adapters) + 1 > adapters.capacity:
            adapters.remove_oldest_adapter()  # one of the users'
        adapters.add_adapter(self._received)
        adapters.activate_adapter(POLICY_ADAPTER)
        adapters.pin_adapter(POLICY_ADAPTER)  # else vLLM may evict it, and would then look for its folder
        self._received = None
