"""What travels when the policy changes: the receiving half of publication.

A :class:`WeightUpdate` is a small description that crosses process borders; the bytes travel by the transport it names.
"""

from __future__ import annotations

from dataclasses import dataclass

from skyrl_train.models.adapter_spec import AdapterSpec


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """Where one parameter lies in the staging copy. ``dtype`` is torch's name ("float32"); ``offset`` is in bytes."""

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the policy's weights, ready to be received.

    ``location`` means something to the transport only (a path to map, an address). ``checksum`` is over the bytes of the
    staging copy, or None when checking is off. ``changed_fraction``: of the bytes, since the version before; None where
    nobody has compared them. ``adapter``: the tensors are a LoRA adapter, under peft's names, of the base model that the
    engine has; None: they are the model.
    """

    version: int
    transport: str
    location: str
    num_bytes: int
    tensors: tuple[TensorSpec, ...]
    checksum: str | None = None
    changed_fraction: float | None = None
    adapter: AdapterSpec | None = None
