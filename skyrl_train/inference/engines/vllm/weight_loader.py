"""Weight updates inside a vLLM worker: checked against the model, then loaded in place, or by vLLM's own reload.

vLLM stores weights in the form that it computes with: fused (q, k and v are one matrix), split over ranks, and for some
kernels packed or quantized. Its reload converts the checkpoint's tensors again, layer by layer. Where vLLM computes with the
parameters themselves, the model's own loader can write into them instead, in a fraction of the time; the first update shows
whether the result is the same. A missing tensor would only be a warning, so updates are compared with the architecture before
anything is touched.

An adapter is converted to vLLM's form while it is received, beside the one that serves; the load swaps the two.
"""

from __future__ import annotations

import json
import logging
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file

from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.vllm.arguments import POLICY_ADAPTER
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.models.lora import checkpoint_buffers
from skyrl_train.weight_sync.broadcast_group import GLOO, NCCL
from skyrl_train.weight_sync.broadcast_receiver import BroadcastReceiver
from skyrl_train.weight_sync.checksum import LANES, checksum
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.staging import moved
from skyrl_train.weight_sync.update import TensorSpec, WeightUpdate

logger = logging.getLogger(__name__)
_MEMORY = Path("/dev/shm")


class WeightLoader:
    """Receives and loads updates, one at a time, between two steps of a worker.

    Attributes:
        in_place: whether updates of the whole model are loaded in place; None before the first one.
    """

    def __init__(self, model_runner: Any, vllm_config: Any, device: torch.device) -> None:
        self._model: torch.nn.Module = model_runner.get_model()
        self._lora = LoraLoader(model_runner)
        self._vllm_config = vllm_config
        self._device = device
        self._tensors: ModelTensors | None = None
        self._receiver = WeightReceiver(device)
        self._broadcast_receiver = BroadcastReceiver(device)
        self._received: tuple[WeightUpdate, Mapping[str, torch.Tensor]] | None = None
        self.in_place: bool | None = None
        # It warns of each module without weights; that no weight is missing has been checked here.
        logging.getLogger("vllm.model_executor.model_loader.reload.layerwise").setLevel(logging.ERROR)

    def begin(self, update: WeightUpdate, assignment: Mapping[str, Any], number: int) -> None:
        """Begin to receive a broadcast update in a thread; :meth:`receive` it afterwards."""
        self._received = None  # the staging copy is written to now
        self._broadcast_receiver.begin(update, assignment, number)

    def receive(self, update: WeightUpdate) -> str | None:
        """Check an update and open it; returns why it cannot be loaded, or None. It raises nothing, see :mod:`worker`."""
        from vllm.config import set_current_vllm_config

        config = self._vllm_config.model_config
        self._received = None
        try:
            if self._tensors is None:  # takes seconds for a large model; the first update pays for it, before the pause
                # vLLM may serve transformers' own classes, and has changed them.
                with set_current_vllm_config(self._vllm_config):
                    self._tensors = ModelTensors.of_model(str(config.model), bool(config.trust_remote_code))
            check_update(update, self._tensors, dtype=str(config.dtype).removeprefix("torch."))
            if update.transport in (GLOO, NCCL):  # begin() has begun it
                weights = self._broadcast_receiver.result(update.version)
            else:
                weights = self._receiver.open_update(update)
            if update.adapter is None:
                # Tied weights are loaded one after the other, and only the last would stay: they must be equal.
                self._tensors.check_ties(weights)
            else:
                self._lora.receive(update.adapter, weights)
        except EngineError as error:
            return str(error)
        except Exception as error:  # no memory, no model folder, a transport from outside the package
            logger.exception("version %d cannot be received", update.version)
            return f"{type(error).__name__}: {error}"
        self._received = (update, weights)
        return None

    def load(self, version: int) -> float:
        """Load the received update; returns the seconds that it took.

        Raises:
            EngineError: ``version`` is not the received one; nothing was touched. Any other exception leaves a half-loaded model.
        """
        if self._received is None or self._received[0].version != version:
            raise EngineError(f"Version {version} was not received; call receive_weights() first.")
        started = time.perf_counter()
        update, weights = self._received
        self._received = None
        if update.adapter is not None:
            self._lora.load()
        else:
            self.load_weights(weights, in_place=self.in_place is True)
            if self.in_place is None:
                self.in_place = self.loads_in_place(weights)
                logger.info("weight updates are loaded %s", "in place" if self.in_place else "by vLLM's reload")
        if self._device.type == "cuda":
            # GPU copies are asynchronous; the trainer may overwrite the staging copy only after they have ended.
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - started

    def load_weights(self, weights: Mapping[str, torch.Tensor], in_place: bool) -> None:
        """Load a whole model: the model's loader writes into its parameters, or vLLM converts the weights again."""
        from vllm.config import set_current_vllm_config
        from vllm.model_executor.layers.attention import is_deferred_attention_layer
        from vllm.model_executor.model_loader.reload import finalize_layerwise_reload, initialize_layerwise_reload

        model, config = self._model, self._vllm_config.model_config
        with (
            torch.no_grad(),
            torch.device(self._device),
            set_current_vllm_config(self._vllm_config),
            without_lora_layers(model),
        ):
            if in_place:
                model.load_weights(moved(weights, self._device))  # type: ignore[operator]
                for module in model.modules():
                    if is_deferred_attention_layer(module):  # as vLLM does after each load
                        module.process_weights_after_loading(config.dtype)  # type: ignore[operator]
            else:
                # Each layer is converted once its tensors are complete; a failure in between leaves layers without weights.
                initialize_layerwise_reload(model)
                model.load_weights(moved(weights, self._device))  # type: ignore[operator]
                finalize_layerwise_reload(model, config)
                _pack_again(model)

    def loads_in_place(self, weights: Mapping[str, torch.Tensor]) -> bool:
        """Return whether loading ``weights`` in place gives what vLLM's reload of them has just given.

        The trial begins with the opposite sign of every value, zeros included, so that a weight that it does not load differs.
        Afterwards vLLM serves ``weights`` in either case.
        """
        with torch.no_grad(), without_lora_layers(self._model):
            if not computes_with_parameters(self._model, self._device):
                return False
            parameters = {name: parameter.data for name, parameter in self._model.named_parameters()}
            expected = {name: _checksum(values) for name, values in parameters.items()}
            for values in parameters.values():
                values.neg_()
            try:
                self.load_weights(weights, in_place=True)
            except Exception:  # a model's loader may rely on what the reload prepares
                logger.warning("weights cannot be loaded in place", exc_info=True)
            different = [name for name, values in parameters.items() if _checksum(values) != expected[name]]
            if not different:
                return True
            logger.warning("loaded in place, %d weights differ, the first is %s", len(different), different[0])
            for name in different:
                parameters[name].neg_()  # right if nothing loads it; what the reload loads comes again
            self.load_weights(weights, in_place=False)
            return False


# vLLM computes there with packed copies of the parameters.
PACKING_DEVICES = ("cpu", "xpu")


def computes_with_parameters(model: torch.nn.Module, device: torch.device) -> bool:
    """Return whether vLLM computes with the parameters that the model's loader writes to, and with nothing made of them."""
    from vllm.model_executor.layers.attention import MLAAttention
    from vllm.model_executor.layers.linear import UnquantizedLinearMethod
    from vllm.model_executor.layers.vocab_parallel_embedding import UnquantizedEmbeddingMethod

    # Others quantize a weight, or arrange it anew for a kernel (experts). Latent attention multiplies some in advance.
    plain = (type(None), UnquantizedLinearMethod, UnquantizedEmbeddingMethod)
    return device.type not in PACKING_DEVICES and not any(
        type(getattr(module, "quant_method", None)) not in plain or isinstance(module, MLAAttention)
        for module in model.modules()
    )


def _checksum(values: torch.Tensor) -> str:
    memory = values.contiguous().view(-1).view(torch.uint8)
    # A GPU folds a large one faster than it can be read, and not a small one.
    return checksum(memory if memory.numel() > 4 * LANES else memory.cpu())


@contextmanager
def without_lora_layers(model: torch.nn.Module) -> Iterator[None]:
    """Replace layers that vLLM has wrapped for LoRA by the bare ones: vLLM's weight loaders do not know the wrappers."""
    wrapped = [
        (model.get_submodule(path.rpartition(".")[0]), path.rpartition(".")[2], module)
        for path, module in model.named_modules()
        if isinstance(getattr(module, "base_layer", None), torch.nn.Module)
    ]
    for parent, name, module in wrapped:
        # Collected before the first change: named_modules() walks the modules that change here.
        setattr(parent, name, module.base_layer)
    try:
        yield
    finally:
        for parent, name, module in wrapped:
            setattr(parent, name, module)


def _pack_again(model: torch.nn.Module) -> None:
    """Renew the packed copies of weights that a CPU model also has unpacked (tied embeddings): vLLM's reload misses them."""
    stale = [
        module
        for module in model.modules()
        if hasattr(module, "cpu_linear") and isinstance(module.weight, torch.Tensor) and module.weight.numel() > 0
    ]
    if stale:
        from vllm.model_executor.layers.utils import dispatch_cpu_unquantized_gemm

        for module in stale:
            dispatch_cpu_unquantized_gemm(module, remove_weight=False)


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The weights of an architecture under transformers' names, which are the trainer's.

    Attributes:
        shapes: of every weight, tied ones under all their names.
        same_as: maps each name to the first name of its tensor; tied names share it.
    """

    shapes: Mapping[str, tuple[int, ...]]
    same_as: Mapping[str, str]

    @classmethod
    def of_model(cls, model_path: str, trust_remote_code: bool = False) -> ModelTensors:
        """Build the architecture of a model folder without memory for its weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return cls.of_module(model)

    @classmethod
    def of_module(cls, module: torch.nn.Module) -> ModelTensors:
        """Return the parameters of ``module``, and the buffers of its checkpoints, on any device."""
        first: dict[int, str] = {}
        named: list[tuple[str, torch.Tensor]] = list(module.named_parameters(remove_duplicate=False))
        named += [(name, buffer) for name, buffer in checkpoint_buffers(module) if buffer.is_floating_point()]
        # By identity: tied names share one parameter object.
        same_as = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        return cls({name: tuple(parameter.shape) for name, parameter in named}, same_as)

    def adapter_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """Return the shapes of A and B, under peft's names, for each matrix that could have an adapter of this rank."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            if len(shape) == 2 and name.endswith(".weight"):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                shapes[f"{module}.lora_A.weight"] = (rank, shape[1])
                shapes[f"{module}.lora_B.weight"] = (shape[0], rank)
        return shapes

    def check_ties(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Check that weights which are one tensor in the model are equal.

        Raises:
            EngineError: they differ in the update.
        """
        for name, weight in weights.items():
            twin = self.same_as[name]
            if twin != name and twin in weights and not torch.equal(weight, weights[twin]):
                raise EngineError(f"Weights {twin!r} and {name!r} are tied in the model, but differ in the update.")


def check_update(update: WeightUpdate, tensors: ModelTensors, dtype: str) -> None:
    """Check that an update is the whole model and nothing else, or an adapter of it, in the engine's dtype (torch's name).

    Raises:
        EngineError: a name is unknown or missing, or a shape or dtype differs.
    """
    if update.adapter is not None:
        _check_adapter(update, tensors.adapter_shapes(update.adapter.rank), dtype)
        return
    brought: set[str] = set()  # first names; a tied tensor may come under any of its names
    for spec in update.tensors:
        shape = tensors.shapes.get(spec.name)
        if shape is None:
            raise EngineError(
                f"The model has no weight {spec.name!r}; trainer and engine must use the same model folder."
            )
        if shape != spec.shape:
            raise EngineError(
                f"Weight {spec.name!r} has shape {spec.shape}, the engine's model has {shape}; trainer and engine must "
                "use the same model folder."
            )
        _check_dtype(spec, dtype)
        brought.add(tensors.same_as[spec.name])
    missing = [name for name, first in tensors.same_as.items() if first not in brought]
    if missing:
        raise EngineError(f"The update misses {len(missing)} weights of the model, the first is {missing[0]!r}.")


def _check_adapter(update: WeightUpdate, shapes: Mapping[str, tuple[int, ...]], dtype: str) -> None:
    names = {spec.name for spec in update.tensors}
    for spec in update.tensors:
        shape = shapes.get(spec.name)
        if shape != spec.shape:
            known = "none of that name" if shape is None else f"one of shape {shape}"
            raise EngineError(
                f"The adapter's {spec.name!r} has shape {spec.shape}, the engine's model takes {known}; trainer and engine must "
                "use the same model folder."
            )
        _check_dtype(spec, dtype)
        a, b = ".lora_A.", ".lora_B."
        twin = spec.name.replace(a, b) if a in spec.name else spec.name.replace(b, a)
        if twin not in names:
            raise EngineError(f"The adapter has {spec.name!r} and no {twin!r}.")


def _check_dtype(spec: TensorSpec, dtype: str) -> None:
    if spec.dtype != dtype:
        raise EngineError(
            f"Weight {spec.name!r} is {spec.dtype}, the engine serves {dtype}; gather weights in "
            "generator.inference_engine.dtype."
        )


# The policy's adapter -------------------------------------------------------------------------------------------------


@contextmanager
def adapter_folder(adapter: AdapterSpec, weights: Mapping[str, torch.Tensor]) -> Iterator[str]:
    """Write an adapter (``weights`` under peft's names) to a folder, the form that vLLM's reader takes.

    It is in shared memory, which costs a copy but no disk access; where that has no room, as in a container, with the temporary
    files.
    """
    modules = {name.removesuffix(".weight").rpartition(".lora_")[0].rpartition(".")[2] for name in weights}
    settings = {
        "peft_type": "LORA",
        "r": adapter.rank,
        "lora_alpha": adapter.scale * adapter.rank,
        "target_modules": sorted(modules),
        "bias": "none",
    }
    tensors = {name: weight.cpu().clone() for name, weight in weights.items()}
    places = [_MEMORY, None] if _MEMORY.is_dir() else [None]
    for place in places:
        with tempfile.TemporaryDirectory(dir=place) as folder:
            try:
                (Path(folder) / "adapter_config.json").write_text(json.dumps(settings))
                save_file(tensors, f"{folder}/adapter_model.safetensors")
            except (OSError, SafetensorError):
                if place is None:
                    raise
                continue
            yield folder
            return


class LoraLoader:
    """The policy's adapter in a worker whose ``model_runner`` was started with LoRA; called between two steps.

    It is swapped in place, under one number that every request names: only the copies that the kernels read change.
    """

    def __init__(self, model_runner: Any) -> None:
        self._manager: Any = getattr(model_runner, "lora_manager", None)
        self._received: Any = None

    def receive(self, adapter: AdapterSpec, weights: Mapping[str, torch.Tensor]) -> None:
        """Convert an adapter (``weights`` under peft's names) to vLLM's form.

        Raises:
            EngineError: vLLM rejects it.
        """
        from vllm.lora.request import LoRARequest

        with adapter_folder(adapter, weights) as folder:
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
