"""The data of a weight update, and the trainer's side of the transport that carries it. Imports no torch.

backend.named_weights() ──gather──> staging copy ──WeightUpdate──> engine.receive_weights ──> engine.load_weights
"""

from __future__ import annotations

import dataclasses
from abc import ABC, abstractmethod
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar

from skyrl_train.models.adapter_spec import AdapterSpec

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True, slots=True)
class TensorSpec:
    """The place of one parameter in the staging copy.

    ``dtype`` is torch's name ("float32"); ``offset`` is in bytes.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str
    offset: int


@dataclass(frozen=True, slots=True)
class WeightUpdate:
    """One version of the policy's weights, ready to be received. Small: the bytes travel by ``transport``.

    Attributes:
        location: where the transport's receiver finds the bytes: a path to map, or an address. Opaque to others.
        checksum: CRC-32 over the bytes of the staging copy; None when checking is off.
        changed_fraction: the fraction of the bytes that differ from the version before; None where it is unknown.
        adapter: set when the tensors are a LoRA adapter, under peft's names, of the engine's base model. None: they are
            the whole model.
        machine: where engines map the staging copy instead of receiving a broadcast (``shared_area.machine``); "": nowhere.
        receivers: the processes that receive a broadcast together; 0: the engine receives alone. An update stays the same
            one, whoever receives it.
    """

    version: int
    transport: str
    location: str
    num_bytes: int
    tensors: tuple[TensorSpec, ...]
    checksum: str | None = None
    changed_fraction: float | None = None
    adapter: AdapterSpec | None = None
    machine: str = ""
    receivers: int = dataclasses.field(default=0, compare=False)

    def is_mapped_on(self, machine: str) -> bool:
        """Return whether engines on ``machine`` map the staging copy instead of receiving a broadcast; never on ""."""
        return bool(self.machine) and self.machine == machine

    def to_message(self) -> dict[str, Any]:
        """Return the update as mappings, lists, numbers and text; the inverse of :meth:`from_message`."""
        message = {field.name: getattr(self, field.name) for field in dataclasses.fields(self)}
        message["tensors"] = [[spec.name, list(spec.shape), spec.dtype, spec.offset] for spec in self.tensors]
        message["adapter"] = None if self.adapter is None else [self.adapter.rank, self.adapter.scale]
        return message

    @classmethod
    def from_message(cls, message: Mapping[str, Any]) -> WeightUpdate:
        """Return the update that :meth:`to_message` described."""
        specs = (TensorSpec(name, tuple(shape), dtype, offset) for name, shape, dtype, offset in message["tensors"])
        adapter = None if message["adapter"] is None else AdapterSpec(*message["adapter"])
        return cls(**{**message, "tensors": tuple(specs), "adapter": adapter})


class WeightTransport(ABC):
    """The trainer's side of a transport.

    ``name`` is what engines know the transport by. A transport from outside the package has an import path here, of the
    function ``open_update(update, device)`` that returns the weights in the engine's process.

    ``on_every_rank``: every rank of a sharded policy gathers whole weights, for the engines on its own GPU. Otherwise rank 0
    does, for all engines.
    """

    name: str
    on_every_rank: ClassVar[bool] = False

    @abstractmethod
    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copy the weights to a contiguous staging copy, which later training steps do not touch.

        May block: call it in a thread. The staging copy of an update stays valid until the next but one ``gather``
        (double buffer).
        """

    def merged(self, updates: Sequence[WeightUpdate]) -> WeightUpdate:
        """Return the updates that all ranks have gathered (``on_every_rank``) as one."""
        return updates[0]

    def release(self) -> bool:
        """Free the staging copies that lie on devices, until the next ``gather``. No engine may still receive them.

        Returns:
            Whether updates that were gathered before cannot be received any more.
        """
        return False

    @abstractmethod
    def close(self) -> None:
        """Free the staging copies."""
