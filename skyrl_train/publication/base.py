"""A weight update and the way it travels: gather (trainer), transfer (to the engine), load (swap).

backend.named_weights() ──gather──> staging copy ──WeightUpdate──> engine.receive_weights ──> engine.load_weights
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterable
from typing import TYPE_CHECKING

from skyrl_train.inference.weight_update import WeightUpdate

if TYPE_CHECKING:
    import torch


class WeightTransport(ABC):
    """The trainer's side of a transport."""

    name: str

    @abstractmethod
    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Copies the weights to a contiguous staging area that the trainer no longer touches. May block: call it off the loop.

        The area of an update stays valid until the next but one ``gather`` (double buffer).
        """

    @abstractmethod
    def close(self) -> None:
        """Frees the staging areas."""
