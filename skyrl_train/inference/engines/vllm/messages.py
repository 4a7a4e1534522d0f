"""A weight update as plain data, for the way to vLLM's workers."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate
from skyrl_train.models.adapter_spec import AdapterSpec


def to_message(update: WeightUpdate) -> dict[str, Any]:
    """An update as plain data: mappings, lists, numbers and text."""
    return {
        "version": update.version,
        "transport": update.transport,
        "location": update.location,
        "num_bytes": update.num_bytes,
        "checksum": update.checksum,
        "adapter": None if update.adapter is None else [update.adapter.rank, update.adapter.scale],
        "tensors": [[spec.name, list(spec.shape), spec.dtype, spec.offset] for spec in update.tensors],
    }


def from_message(message: Mapping[str, Any]) -> WeightUpdate:
    """The inverse of :func:`to_message`."""
    return WeightUpdate(
        version=message["version"],
        transport=message["transport"],
        location=message["location"],
        num_bytes=message["num_bytes"],
        tensors=tuple(
            TensorSpec(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in message["tensors"]
        ),
        checksum=message["checksum"],
        adapter=None if message["adapter"] is None else AdapterSpec(*message["adapter"]),
    )
