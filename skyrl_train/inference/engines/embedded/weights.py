"""The weights that an engine serves: checked as a whole, then swapped in place: a bad update changes nothing."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import EngineError
from skyrl_train.inference.shared_weights import checksum, tensor_view
from skyrl_train.inference.weight_update import WeightUpdate
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.models.lora import adapter_of, policy_weights


def check_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor], adapter: AdapterSpec | None) -> None:
    """Checks that ``weights`` is exactly the model: every parameter (a tied one under any of its names), nothing else. Of a
    model with an adapter: exactly that ``adapter``.

    Raises:
        EngineError: a name is unknown or missing, a shape or dtype differs, two names of a tied weight disagree, or one of
            the two has an adapter that the other has not.
    """
    if adapter != adapter_of(model):
        raise EngineError(
            f"The update brings {adapter or 'a whole model'}, the engine serves {adapter_of(model) or 'one'}; trainer and engine "
            "must have the same trainer.policy.model.lora."
        )
    known = _named_tensors(model)
    names: dict[int, str] = {}  # which name brought the tensor at this address
    for name, weight in weights.items():
        own = known.get(name)
        if own is None:
            raise EngineError(f"The model has no weight {name!r}; trainer and engine must use the same model folder.")
        if own.shape != weight.shape:
            raise EngineError(
                f"Weight {name!r} has shape {tuple(weight.shape)}, the engine's model has {tuple(own.shape)}; "
                "trainer and engine must use the same model folder."
            )
        if weight.dtype != model.dtype:
            raise EngineError(
                f"Weight {name!r} is {weight.dtype}, the engine serves {model.dtype}; publish in "
                "generator.inference_engine.dtype."
            )
        twin = names.setdefault(own.data_ptr(), name)
        if twin != name and not torch.equal(weight, weights[twin]):
            raise EngineError(
                f"Weights {twin!r} and {name!r} are tied in the engine's model, but differ in the update."
            )
    missing = [name for name, own in policy_weights(model) if own.data_ptr() not in names]
    if missing:
        raise EngineError(f"The update misses {len(missing)} weights of the model, the first is {missing[0]!r}.")


def load_weights(model: PreTrainedModel, weights: Mapping[str, torch.Tensor]) -> None:
    """Copies checked weights into the model's own tensors (tied ones stay tied)."""
    known = _named_tensors(model)
    with torch.no_grad():
        for name, weight in weights.items():
            known[name].copy_(weight)


def served_checksum(model: PreTrainedModel, update: WeightUpdate) -> str:
    """The checksum of what the model holds now, laid out like ``update``: equal to its own if served bit for bit."""
    staging = torch.zeros(update.num_bytes, dtype=torch.uint8)
    known = _named_tensors(model)
    for spec in update.tensors:
        tensor_view(staging, spec).copy_(known[spec.name])
    return checksum(staging)


def _named_tensors(model: PreTrainedModel) -> dict[str, torch.Tensor]:
    """Parameters under all their names, and the buffers that a checkpoint would hold; or those of the adapter."""
    if adapter_of(model) is not None:
        return dict(policy_weights(model))
    return {**dict(model.named_parameters(remove_duplicate=False)), **model.state_dict()}
