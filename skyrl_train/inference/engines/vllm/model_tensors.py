"""Which tensors make up a model: an update is compared with them before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate


@dataclass(frozen=True, slots=True)
class ModelTensors:
    """The parameters of an architecture as transformers names them: what a trainer publishes.

    ``shapes`` has every name; ``same_as`` maps each to the first name of the tensor that it is tied to (or its own).
    """

    shapes: Mapping[str, tuple[int, ...]]
    same_as: Mapping[str, str]

    @classmethod
    def of_model(cls, model_path: str, trust_remote_code: bool = False) -> ModelTensors:
        """Builds the architecture of a model folder without memory for its weights."""
        from transformers import AutoConfig, AutoModelForCausalLM

        config = AutoConfig.from_pretrained(model_path, trust_remote_code=trust_remote_code)
        with torch.device("meta"):
            model = AutoModelForCausalLM.from_config(config, trust_remote_code=trust_remote_code)
        return cls.of_module(model)

    @classmethod
    def of_module(cls, module: torch.nn.Module) -> ModelTensors:
        """The parameters of ``module``, on any device."""
        first: dict[int, str] = {}
        named = list(module.named_parameters(remove_duplicate=False))
        same_as = {name: first.setdefault(id(parameter), name) for name, parameter in named}
        return cls({name: tuple(parameter.shape) for name, parameter in named}, same_as)

    def adapter_shapes(self, rank: int) -> dict[str, tuple[int, ...]]:
        """The shapes of A and B, under peft's names, for each matrix that could have an adapter of this rank."""
        shapes: dict[str, tuple[int, ...]] = {}
        for name, shape in self.shapes.items():
            if len(shape) == 2 and name.endswith(".weight"):
                module = f"base_model.model.{name.removesuffix('.weight')}"
                shapes[f"{module}.lora_A.weight"] = (rank, shape[1])
                shapes[f"{module}.lora_B.weight"] = (shape[0], rank)
        return shapes

    def check_ties(self, weights: Mapping[str, torch.Tensor]) -> None:
        """Compares the values of weights that are one tensor in the model.

        Raises:
            EngineError: they differ in the update.
        """
        for name, weight in weights.items():
            twin = self.same_as[name]
            if twin != name and twin in weights and not torch.equal(weight, weights[twin]):
                raise EngineError(f"Weights {twin!r} and {name!r} are tied in the model, but differ in the update.")


def check_update(update: WeightUpdate, tensors: ModelTensors, dtype: str) -> None:
    """Checks that an update is the whole model and nothing else, or an adapter of it, in the engine's dtype (torch's name).

    Raises:
        EngineError: a name is unknown or missing, or a shape or dtype differs.
    """
    if update.adapter is not None:
        _check_adapter(update, tensors.adapter_shapes(update.adapter.rank), dtype)
        return
    brought: set[str] = set()
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
            f"Weight {spec.name!r} is {spec.dtype}, the engine serves {dtype}; publish in generator.inference_engine.dtype."
        )
