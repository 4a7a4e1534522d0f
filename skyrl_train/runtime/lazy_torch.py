"""``from skyrl_train.runtime.lazy_torch import torch``: torch, imported when one of its names is first used.

For modules whose rules a configuration names. ``skyrl-train plan`` looks the names up and calls no rule, so it needs no torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

__all__ = ["torch"]


class _Torch:
    def __getattr__(self, name: str) -> Any:
        value = getattr(importlib.import_module("torch"), name)
        setattr(self, name, value)  # from now on it costs what it costs with a module
        return value


if not TYPE_CHECKING:
    torch = _Torch()
