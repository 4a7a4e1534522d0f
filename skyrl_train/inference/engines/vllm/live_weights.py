"""The weights inside a vLLM worker: swapped layer by layer by vLLM's own reload, and read back from what serves them.

vLLM stores what it computes with: fused (q, k and v are one matrix), split over ranks, and on a CPU packed into a form that
cannot be looked at. Two things make a read-back possible all the same. While the first update is loaded, every copy from it
into a parameter is noted; played backwards, these copies tell where each byte of an update has gone. And a packed matrix is
read by multiplying the identity with it, by the very kernel that serves it.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from skyrl_train.errors import EngineError
from skyrl_train.inference.shared_weights import tensor_view
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate


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


class LiveWeights:
    """``model`` is vLLM's; loads and reads happen between two steps."""

    def __init__(self, model: torch.nn.Module, vllm_config: Any, device: torch.device) -> None:
        self._model = model
        self._vllm_config = vllm_config
        self._device = device
        self._copies: tuple[_Copy, ...] | None = None
        self._layout: tuple[TensorSpec, ...] = ()
        # It warns of each module without weights of its own; that none is missing has been checked.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def load(self, update: WeightUpdate, weights: Mapping[str, torch.Tensor]) -> None:
        """Swaps in a checked update. What is raised from here leaves a model that cannot be used."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        with (
            torch.no_grad(),
            torch.device(self._device),
            set_current_vllm_config(self._vllm_config),
            _without_adapters(self._model),
        ):
            recorder = None if self._layout == update.tensors else _Recorder(self._model, weights)
            with recorder or nullcontext():
                initialize_layerwise_reload(self._model)
                self._model.load_weights(weights.items())  # type: ignore[operator]
                finalize_layerwise_reload(self._model, self._vllm_config.model_config)
            if recorder is not None:
                self._copies, self._layout = tuple(recorder.copies), update.tensors
            _pack_again(self._model)

    def read_back(self, staging: torch.Tensor) -> None:
        """Writes what is served into ``staging`` (uint8, contiguous), laid out like the update loaded last.

        Only what this rank holds is written; a single rank must hold all. A packed matrix gives 0.0 for a weight of -0.0.

        Raises:
            EngineError: nothing was loaded yet, or a part cannot be read.
        """
        if self._copies is None:
            raise EngineError("The engine has no weights of an update yet; publish the policy first.")
        specs = {spec.name: spec for spec in self._layout}
        lost = specs.keys() - {copy.name for copy in self._copies}
        if lost and self._vllm_config.parallel_config.world_size == 1:
            raise EngineError(f"vLLM changes {min(lost)!r} while it loads it, so that it cannot be read back.")
        with torch.no_grad(), _without_adapters(self._model):
            for parameter, copies in _by_parameter(self._copies).items():
                for served in self._served(parameter, copies[0].shape):
                    for copy in copies:
                        view = tensor_view(staging, specs[copy.name])
                        copy.source.within(view).copy_(copy.target.within(served))

    def _served(self, parameter: str, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """The tensors that serve a parameter, in checkpoint shape: itself, and the packed form beside or instead of it."""
        module_name, _, attribute = parameter.rpartition(".")
        module = self._model.get_submodule(module_name)
        value = getattr(module, attribute).detach()
        if tuple(value.shape) == shape:
            for other in self._packed_twins(value):
                if not torch.equal(_unpack(other, shape, value.dtype), value + 0.0):
                    raise EngineError(
                        f"A packed copy of {parameter!r} differs from it; the engine serves two versions."
                    )
            return [value.contiguous()]
        if attribute == "weight" and hasattr(module, "cpu_linear") and len(shape) == 2:
            return [_unpack(module, shape, value.dtype)]
        raise EngineError(f"vLLM keeps {parameter!r} in a form that cannot be read back.")

    def _packed_twins(self, weight: torch.Tensor) -> Iterator[torch.nn.Module]:
        """Modules that compute with a packed copy of ``weight``, which they still have."""
        for module in self._model.modules():
            own = getattr(module, "weight", None)
            if hasattr(module, "cpu_linear") and own is not None and own.data_ptr() == weight.data_ptr():
                yield module


class _Recorder(TorchDispatchMode):
    """Notes each copy from the memory of ``weights`` into a parameter of ``model``."""

    def __init__(self, model: torch.nn.Module, weights: Mapping[str, torch.Tensor]) -> None:
        super().__init__()
        self.copies: list[_Copy] = []
        self._model = model
        self._weights = sorted((weight.data_ptr(), weight.nbytes, name) for name, weight in weights.items())
        self._offsets = {name: int(weight.storage_offset()) for name, weight in weights.items()}
        self._parameters: dict[int, tuple[str, tuple[int, ...]]] = {}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.ops.aten.copy_.default:
            self._note(args[0], args[1])
        return func(*args, **(kwargs or {}))

    def _note(self, target: torch.Tensor, source: torch.Tensor) -> None:
        if target.is_meta or source.is_meta or target.shape != source.shape:
            return
        name = self._name_of(source)
        if name is None:
            return
        owner = self._owner_of(target)
        if owner is not None:
            region = _Region.of(source, self._offsets[name])
            self.copies.append(_Copy(name, region, owner[0], owner[1], _Region.of(target)))

    def _name_of(self, source: torch.Tensor) -> str | None:
        """The weight in whose memory ``source`` begins."""
        address = source.data_ptr()
        return next((name for start, size, name in self._weights if start <= address < start + size), None)

    def _owner_of(self, target: torch.Tensor) -> tuple[str, tuple[int, ...]] | None:
        """The parameter whose memory ``target`` is part of. vLLM makes them while it loads, so each miss looks again."""
        address = target.untyped_storage().data_ptr()
        self._parameters = {
            parameter.untyped_storage().data_ptr(): (name, tuple(parameter.shape))
            for name, parameter in self._model.named_parameters(remove_duplicate=False)
            if not parameter.is_meta
        }
        return self._parameters.get(address)


@contextmanager
def _without_adapters(model: torch.nn.Module) -> Iterator[None]:
    """While open, layers that vLLM has wrapped for LoRA stand in the model as they are: its loaders know no wrappers."""
    wrapped = [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), torch.nn.Module)
    ]
    for parent, name, module in wrapped:
        setattr(parent, name, module.base_layer)
    try:
        yield
    finally:
        for parent, name, module in wrapped:
            setattr(parent, name, module)


def _pack_again(model: torch.nn.Module) -> None:
    """Renews packed copies of weights that the model also has unpacked (tied embeddings): vLLM's reload misses those."""
    stale = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and isinstance(module.weight, torch.Tensor) and module.weight.numel() > 0
    ]
    if stale:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in stale:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


def _unpack(module: torch.nn.Module, shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    """The matrix ``shape`` behind a packed linear layer, by multiplication with the identity: exact, one term per sum."""
    kernel: Any = module.cpu_linear
    product: torch.Tensor = kernel(torch.eye(shape[1], dtype=dtype), module.weight, None)
    return product.t().contiguous()


def _by_parameter(copies: tuple[_Copy, ...]) -> dict[str, list[_Copy]]:
    grouped: dict[str, list[_Copy]] = {}
    for copy in copies:
        grouped.setdefault(copy.parameter, []).append(copy)
    return grouped
