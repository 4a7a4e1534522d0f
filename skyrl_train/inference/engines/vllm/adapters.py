"""The LoRA adapters of an engine that requests may name."""

from __future__ import annotations

import itertools
from typing import Any

from skyrl_train.errors import EngineError, RequestError
from skyrl_train.inference.engines.vllm.frontend import Frontend, lora_request


class Adapters:
    """By name, what vLLM calls them (its ``LoRARequest``). A number that vLLM has seen is never used again."""

    def __init__(self) -> None:
        self._loaded: dict[str, Any] = {}
        self._numbers = itertools.count(1)

    def named(self, name: str) -> Any:
        """What a request names.

        Raises:
            RequestError: it is not loaded.
        """
        if name not in self._loaded:
            raise RequestError(f"There is no adapter {name!r}; load_adapter() it first.")
        return self._loaded[name]

    async def load(self, vllm: Frontend, name: str, path: str) -> None:
        """Loads the adapter in the folder ``path``, in the place of one that has this name."""
        adapter = lora_request(name, next(self._numbers), path)
        await vllm.add_adapter(adapter)
        previous = self._loaded.get(name)
        self._loaded[name] = adapter
        if previous is not None:
            await vllm.remove_adapter(previous)

    async def unload(self, vllm: Frontend, name: str) -> None:
        """Forgets an adapter.

        Raises:
            EngineError: it is not loaded.
        """
        if name not in self._loaded:
            raise EngineError(f"There is no adapter {name!r}; loaded: {', '.join(sorted(self._loaded)) or 'none'}.")
        await vllm.remove_adapter(self._loaded.pop(name))

    def forget(self) -> None:
        """vLLM was started again and has none."""
        self._loaded.clear()
