"""Random numbers of code that knows no generator, such as the initialisation of a model, from a generator of their own."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SeededDraws(TorchDispatchMode):
    """Inside the context, torch's random operations of this thread draw from generators with ``seed``.

    torch's global generator is shared by all threads, so seeding it does not help while another thread draws from it. The
    numbers are those that the global generator would give after ``torch.manual_seed(seed)``; its state stays as it is.

    Raises:
        NotImplementedError: inside the context, for a random operation that takes no generator.
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._seed = seed
        self._generators: dict[torch.device, torch.Generator] = {}

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        named = dict(kwargs or {})
        device = next((arg.device for arg in args if isinstance(arg, torch.Tensor)), named.get("device"))
        device = torch.device("cpu") if device is None else device
        random = torch.Tag.nondeterministic_seeded in func.tags and named.get("generator") is None
        if not random or device.type == "meta":  # without values there is nothing to draw
            return func(*args, **named)
        if device not in self._generators:
            self._generators[device] = torch.Generator(device).manual_seed(self._seed)
        return _with_generator(func)(*args, **named | {"generator": self._generators[device]})


def _with_generator(func: Any) -> Any:
    """Return ``func``, or its overload that takes a generator as well: ``aten.rand.default`` has none, ``aten.rand.generator``
    has one."""
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    for overload in [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]:
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    raise NotImplementedError(f"{func} takes no generator, so its random numbers cannot be made reproducible")
