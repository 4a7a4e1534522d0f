"""Which tensors make up a model: an update is compared with them before anything is touched."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

from skyrl_train.errors import EngineError
from skyrl_train.inference.weight_update import WeightUpdate


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
    """Checks that an update is the whole model and nothing else, in the engine's dtype (torch's name).

    Raises:
        EngineError: a name is unknown or missing, or a shape or dtype differs.
    """
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
        if spec.dtype != dtype:
            raise EngineError(
                f"Weight {spec.name!r} is {spec.dtype}, the engine serves {dtype}; publish in "
                "generator.inference_engine.dtype."
            )
        brought.add(tensors.same_as[spec.name])
    missing = [name for name, first in tensors.same_as.items() if first not in brought]
    if missing:
        raise EngineError(f"The update misses {len(missing)} weights of the model, the first is {missing[0]!r}.")
