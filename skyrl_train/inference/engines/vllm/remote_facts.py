"""What a vLLM server says of itself, and whether it can serve a trainer."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.inference.engines.vllm.remote_server import machine
from skyrl_train.inference.engines.vllm.remote_wire import parse_version
from skyrl_train.inference.interface import EngineCapabilities, PauseMode


@dataclass(frozen=True, slots=True)
class Facts:
    """The answer of ``GET /skyrl/engine``; see :mod:`remote_server`."""

    instance: str
    machine: str
    dead: bool
    max_model_len: int
    logprobs_mode: str
    max_logprobs: int
    priorities: bool
    prefix_caching: bool
    structured_output: bool
    token_endpoint: bool
    server_processes: int
    weight_reception: bool
    weight_version: str = ""
    paused: bool = False
    unfinished: int = 0
    held: int = 0

    @classmethod
    def parse(cls, answer: Mapping[str, Any]) -> Facts:
        """Reads the JSON; what a newer server says beyond this is ignored."""
        return cls(**{name: answer[name] for name in cls.__dataclass_fields__ if name in answer})

    @property
    def policy_version(self) -> int:
        """The published version that the server holds, -1 if none."""
        return parse_version(self.weight_version)

    def check(self, url: str) -> None:
        """Raises:
        ConfigError: the server was started without something that is needed here; the message says how to start it.
        """
        missing = [
            what
            for what, there in (
                ("--enable-scale-out", self.token_endpoint),
                (
                    "--worker-extension-cls skyrl_train.inference.engines.vllm.worker.WorkerExtension",
                    self.weight_reception,
                ),
                ("--logprobs-mode processed_logprobs", self.logprobs_mode == "processed_logprobs"),
                ("--api-server-count 1", self.server_processes == 1),
            )
            if not there
        ]
        if missing:
            raise ConfigError(f"The vLLM server at {url} was started without {', '.join(missing)}; start it with that.")

    @property
    def transports(self) -> frozenset[str]:
        """How weights can get there. Whether a folder is shared shows when the first update is received."""
        return frozenset({"disk", "delta", *(("shared_memory",) if self.machine == machine() else ())})

    def capabilities(self) -> EngineCapabilities:
        """What the engine behind the server can do."""
        return EngineCapabilities(
            pause_modes=frozenset(PauseMode),
            transports=self.transports,
            max_model_len=self.max_model_len,
            max_top_logprobs=self.max_logprobs - 1,
            structured_output=self.structured_output,
            priorities=self.priorities,
        )
