"""Reads the weights that a vLLM worker serves back, to compare them bit for bit with an update.

vLLM stores what it computes with: fused (q, k and v are one matrix), split over ranks, and on a CPU packed into a form that
cannot be looked at. Two things make a read-back possible all the same. While the first update is loaded, every copy from it
into a parameter is recorded; played backwards, these copies tell where each byte of an update has gone. And a packed matrix is
read by multiplying the identity with it, by the kernel that serves it. On a CPU, a weight of -0.0 reads as 0.0.
"""

from __future__ import annotations

import math
import mmap
import os
from collections.abc import Iterator, Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.arguments import POLICY_ADAPTER
from skyrl_train.inference.engines.vllm.engine import VLLMEngineBase
from skyrl_train.inference.engines.vllm.weight_loader import without_lora_layers
from skyrl_train.inference.engines.vllm.worker import WorkerExtension
from skyrl_train.weight_sync.checksum import checksum
from skyrl_train.weight_sync.staging import tensor_view
from skyrl_train.weight_sync.update import TensorSpec, WeightUpdate

EXTENSION = "vllm_read_back.ReadBackExtension"  # the workers import it: this folder must be on their path


async def served_checksum(engine: VLLMEngineBase[Any], update: WeightUpdate) -> str:
    """Return the checksum of the weights being served, laid out like ``update``, the one loaded last.

    Raises:
        EngineError: a part cannot be read.
    """
    descriptor = os.memfd_create("served", os.MFD_CLOEXEC)
    try:
        os.ftruncate(descriptor, update.num_bytes)
        link, _ = engine._alive()
        for error in await link.on_workers("skyrl_read_back", f"/proc/{os.getpid()}/fd/{descriptor}", update.num_bytes):
            if error is not None:
                raise EngineError(error)
        return checksum(torch.frombuffer(mmap.mmap(descriptor, update.num_bytes), dtype=torch.uint8))
    finally:
        os.close(descriptor)


class ReadBackExtension(WorkerExtension):
    """The product's extension, the way back, and a look at the worker."""

    def skyrl_load(self, version: int) -> float:
        loader = self.skyrl_loader()
        received = loader._received
        if received is None or received[0].adapter is not None:
            self._skyrl_served_adapter = None if received is None else received[0]
            return super().skyrl_load(version)
        update, weights = received
        recorder = None
        if getattr(self, "_skyrl_layout", None) != update.tensors:
            recorder = _Recorder(loader._model, weights)
        with recorder or nullcontext():
            seconds = super().skyrl_load(version)
        if recorder is not None:
            self._skyrl_copies, self._skyrl_layout = recorder.copies, update.tensors
        return seconds

    def skyrl_in_place(self) -> bool | None:
        """Return whether updates are loaded in place."""
        return self.skyrl_loader().in_place

    def skyrl_variable(self, name: str) -> str | None:
        """Return a variable of this process's environment."""
        return os.environ.get(name)

    def skyrl_device(self) -> str:
        """Return the device that this worker computes on."""
        return str(self.device)

    def skyrl_read_back(self, location: str, num_bytes: int) -> str | None:
        """Write what is served into the memory at ``location``; returns why that is not possible, or None."""
        descriptor = os.open(location, os.O_RDWR | os.O_CLOEXEC)
        try:
            staging = torch.frombuffer(mmap.mmap(descriptor, num_bytes), dtype=torch.uint8)
            adapter = getattr(self, "_skyrl_served_adapter", None)
            if adapter is not None:
                _read_adapter(self.model_runner.lora_manager, adapter, staging)
            else:
                _read_model(self.skyrl_loader()._model, self._skyrl_copies, self._skyrl_layout, staging)
        except EngineError as error:
            return str(error)
        finally:
            os.close(descriptor)
        return None


@dataclass(frozen=True, slots=True)
class _Region:
    """Part of a tensor's storage, in elements."""

    offset: int
    size: tuple[int, ...]
    stride: tuple[int, ...]

    @classmethod
    def of(cls, tensor: torch.Tensor, offset: int = 0) -> _Region:
        return cls(int(tensor.storage_offset()) - offset, tuple(tensor.size()), tuple(tensor.stride()))

    def within(self, tensor: torch.Tensor) -> torch.Tensor:
        """This part of ``tensor``, which is contiguous."""
        return tensor.as_strided(self.size, self.stride, tensor.storage_offset() + self.offset)


@dataclass(frozen=True, slots=True)
class _Copy:
    """``source`` of the update's weight ``name`` went into ``target`` of the parameter (of checkpoint shape ``shape``)."""

    name: str
    source: _Region
    parameter: str
    shape: tuple[int, ...]
    target: _Region


class _Recorder(TorchDispatchMode):
    """Records each copy from the memory of ``weights`` into a parameter of ``model``."""

    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[_Copy] = []
        self._model = model
        # Address, size in bytes, name, and offset in the storage. A copy on the GPU follows its original.
        self._weights = [
            (weight.data_ptr(), weight.nbytes, name, int(weight.storage_offset())) for name, weight in weights.items()
        ]
        self._moved: list[torch.Tensor] = []  # kept, because their memory would be used again

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._record(args[0], args[1])
        result = func(*args, **(kwargs or {}))
        if func is torch.ops.aten._to_copy.default and (found := self._find(args[0])) is not None:
            self._moved.append(result)
            self._weights.append((result.data_ptr(), result.nbytes, found[0], int(result.storage_offset())))
        return result

    def _find(self, source: torch.Tensor) -> tuple[str, int] | None:
        """Name of the weight that ``source`` is a part of, and the weight's offset in the storage."""
        if source.is_meta:
            return None
        address = source.data_ptr()
        found = ((name, offset) for start, size, name, offset in self._weights if start <= address < start + size)
        return next(found, None)

    def _record(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_meta or target.shape != source.shape or (found := self._find(source)) is None:
            return
        name, offset = found
        # vLLM makes parameters while it loads, so look at those of the moment.
        owners = {
            parameter.untyped_storage().data_ptr(): (parameter_name, tuple(parameter.shape))
            for parameter_name, parameter in self._model.named_parameters(remove_duplicate=False)
            if not parameter.is_meta
        }
        owner = owners.get(target.untyped_storage().data_ptr())
        if owner is not None:
            self.copies.append(_Copy(name, _Region.of(source, offset), *owner, _Region.of(target)))


def _read_model(
    model: torch.nn.Module, copies: list[_Copy], layout: tuple[TensorSpec, ...], staging: torch.Tensor
) -> None:
    """Only what this rank holds is written; a single rank must hold all."""
    specs = {spec.name: spec for spec in layout}
    lost = specs.keys() - {copy.name for copy in copies}
    if lost:
        raise EngineError(f"vLLM changes {min(lost)!r} while it loads it, so that it cannot be read back.")
    by_parameter: dict[str, list[_Copy]] = {}
    for copy in copies:
        by_parameter.setdefault(copy.parameter, []).append(copy)
    with torch.no_grad(), without_lora_layers(model):
        for parameter, of_parameter in by_parameter.items():
            served = _served(model, parameter, of_parameter[0].shape)
            for copy in of_parameter:
                copy.source.within(tensor_view(staging, specs[copy.name])).copy_(copy.target.within(served))


def _served(model: torch.nn.Module, parameter: str, shape: tuple[int, ...]) -> torch.Tensor:
    """The tensor that serves a parameter, in checkpoint shape."""
    module_name, _, attribute = parameter.rpartition(".")
    module = model.get_submodule(module_name)
    value = getattr(module, attribute).detach()
    if tuple(value.shape) == shape:
        for packed in _packed_twins(model, value):
            if not torch.equal(_unpack(packed, shape, value.dtype), value + 0.0):
                raise EngineError(f"A packed copy of {parameter!r} differs from it; the engine serves two versions.")
        return value.contiguous()
    if attribute == "weight" and hasattr(module, "cpu_linear") and len(shape) == 2:
        return _unpack(module, shape, value.dtype)
    raise EngineError(f"vLLM keeps {parameter!r} in a form that cannot be read back.")


def _packed_twins(model: torch.nn.Module, weight: torch.Tensor) -> Iterator[torch.nn.Module]:
    """Modules that compute with a packed copy of ``weight``, which they still have."""
    for module in model.modules():
        own = getattr(module, "weight", None)
        if hasattr(module, "cpu_linear") and own is not None and own.data_ptr() == weight.data_ptr():
            yield module


def _unpack(module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The matrix behind a packed linear layer, by multiplication with the identity: exact, one term per sum."""
    kernel: Any = module.cpu_linear
    product: torch.Tensor = kernel(torch.eye(shape[1], dtype=dtype), module.weight, None)
    return product.t().contiguous()


def _read_adapter(manager: Any, update: WeightUpdate, staging: torch.Tensor) -> None:
    """The A and B that the kernels read."""
    assert update.adapter is not None
    rank, scale = update.adapter.rank, update.adapter.scale
    if math.frexp(scale)[0] != 0.5:
        raise EngineError(
            f"vLLM has multiplied B by {scale:g}, which is no power of 2, so that it cannot be read back."
        )
    adapters = manager._adapter_manager
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
    for spec in update.tensors:
        if spec.name not in served or tuple(served[spec.name].shape) != spec.shape:
            raise EngineError(f"vLLM keeps {spec.name!r} in a form that cannot be read back.")
        tensor_view(staging, spec).copy_(served[spec.name])
