"""The policy's adapter inside a vLLM worker: vLLM's own LoRA, swapped in place under one number that every request names.

receive: tensors ──a folder in memory that vLLM reads and checks──> its form of the adapter, beside the one that serves
load:    the old one goes, the new one takes its slot: the copies that the kernels read, and nothing else, change
"""

from __future__ import annotations

import json
import math
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.arguments import POLICY_ADAPTER
from skyrl_train.inference.shared_weights import tensor_view
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.models.adapter_spec import AdapterSpec

_MEMORY = Path("/dev/shm")


class LiveAdapter:
    """Of a worker whose ``model_runner`` serves adapters; everything happens between two steps."""

    def __init__(self, model_runner: Any) -> None:
        self._manager: Any = getattr(model_runner, "lora_manager", None)  # of an engine that was started for adapters
        self._received: tuple[WeightUpdate, Any] | None = None
        self._served: WeightUpdate | None = None

    @property
    def serves(self) -> bool:
        """Whether an adapter has been loaded."""
        return self._served is not None

    def receive(self, update: WeightUpdate, spec: AdapterSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Brings an update's adapter (``weights`` under peft's names) into vLLM's form.

        Raises:
            EngineError: vLLM refuses it.
        """
        from vllm.lora.request import LoRARequest

        with tempfile.TemporaryDirectory(dir=_MEMORY if _MEMORY.is_dir() else None) as folder:
            modules = {name.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2] for name in weights}
            settings = {
                "peft_type": "LORA",
                "r": spec.rank,
                "lora_alpha": spec.scale * spec.rank,
                "target_modules": sorted(modules),
                "bias": "none",
            }
            (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
            save_file(
                {name: weight.cpu().clone() for name, weight in weights.items()}, f"{folder}/adapter_model.safetensors"
            )
            try:
                adapter = self._manager._load_adapter(LoRARequest("policy", POLICY_ADAPTER, folder))
            except Exception as error:  # whatever vLLM's reader raises: the adapter that serves is as it was
                raise EngineError(f"vLLM refuses the adapter: {error}") from error
        self._received = update, adapter

    def load(self) -> None:
        """Puts the received adapter in the place of the one that serves. What is raised from here leaves none."""
        assert self._received is not None, "an update is loaded after it was received"
        adapters = self._manager._adapter_manager
        self._served, adapter = self._received
        adapters.remove_adapter(POLICY_ADAPTER)
        if len(adapters) + 1 > adapters.capacity:  # those that users have loaded give way
            adapters.remove_oldest_adapter()
        adapters.add_adapter(adapter)
        adapters.activate_adapter(POLICY_ADAPTER)
        adapters.pin_adapter(POLICY_ADAPTER)  # vLLM would look for its folder when it has given way to another
        self._received = None

    def read_back(self, staging: torch.Tensor) -> None:
        """Writes the A and B that the kernels read into ``staging`` (uint8, contiguous), laid out like the update loaded last.

        Raises:
            EngineError: vLLM has them in a form that does not tell.
        """
        assert self._served is not None and self._served.adapter is not None
        rank, scale = self._served.adapter.rank, self._served.adapter.scale
        if math.frexp(scale)[0] != 0.5:
            raise EngineError(
                f"vLLM has multiplied B by {scale:g}, which is no power of 2, so that it cannot be read back."
            )
        adapters = self._manager._adapter_manager
        slot = adapters.lora_index_to_id.index(POLICY_ADAPTER)
        served: dict[str, torch.Tensor] = {}
        for name, module in adapters.modules.items():
            if not isinstance(module.lora_a_stacked, tuple):
                continue  # embeddings and heads, which the trainer leaves alone
            for part, a, b in zip(
                adapters.packed_modules.get(name, [name]), module.lora_a_stacked, module.lora_b_stacked, strict=False
            ):
                served[f"base_model.model.{part}.lora_A.weight"] = a[slot, 0, :rank]
                served[f"base_model.model.{part}.lora_B.weight"] = b[slot, 0, :, :rank] / scale
        for spec in self._served.tensors:
            if spec.name not in served or tuple(served[spec.name].shape) != spec.shape:
                raise EngineError(f"vLLM keeps {spec.name!r} in a form that cannot be read back.")
            tensor_view(staging, spec).copy_(served[spec.name])
