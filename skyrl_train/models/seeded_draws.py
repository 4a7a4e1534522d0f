"""Separate random generators for code that takes none as an argument, such as the initialisation of a model."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode


class SeededDraws(TorchDispatchMode):
    """Inside the context, torch's random operations of this thread draw from generators with ``seed``.

    torch's global generator is shared by all threads, so seeding it does not help while another thread draws from it. The
    numbers are those that the global generator would give after ``torch.manual_seed(seed)``; its state stays as it is.

    Args:
        distinct: a larger tensor that is filled in place repeats its first so many numbers. A CPU draws 20 to 60 million
            numbers a second, and by one thread: more than a minute for weights that are overwritten anyway. None: no limit.

    Raises:
        NotImplementedError: inside the context, for a random operation that takes no generator.
    """

    def __init__(self, seed: int, distinct: int | None = None) -> None:
        super().__init__()
        self._seed = seed
        self._distinct = distinct
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
        draw, named["generator"] = _with_generator(func), self._generators[device]
        filled = args[0] if func._schema.name.endswith("_") else None  # in place
        if filled is None or self._distinct is None or filled.numel() <= self._distinct:
            return draw(*args, **named)
        numbers = draw(filled.new_empty(self._distinct), *args[1:], **named)
        flat = filled.view(-1)
        rounds, rest = divmod(flat.numel(), self._distinct)
        flat[: flat.numel() - rest].view(rounds, -1).copy_(numbers)
        flat[flat.numel() - rest :].copy_(numbers[:rest])
        return filled


def _with_generator(func: Any) -> Any:
    """Return ``func``, or its overload that takes a generator as well: ``aten.rand.default`` has none, ``aten.rand.generator``
    has one."""
    wanted = [argument.name for argument in func._schema.arguments if argument.name != "generator"]
    for overload in [func, *(getattr(func.overloadpacket, name) for name in func.overloadpacket.overloads())]:
        names = [argument.name for argument in overload._schema.arguments]
        if "generator" in names and [name for name in names if name != "generator"] == wanted:
            return overload
    raise NotImplementedError(f"{func} takes no generator, so its random numbers cannot be made reproducible")
