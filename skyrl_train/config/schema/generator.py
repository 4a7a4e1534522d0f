"""How samples come about, and how the engines get new weights: ``generator``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from skyrl_train.config.schema.inference_engine import InferenceEngineConfig


@dataclass
class SamplingConfig:
    """Mirrors :class:`skyrl_train.inference.interface.SamplingParams`; ``max_tokens`` bounds one turn."""

    max_tokens: int = 64
    min_tokens: int = 0
    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    stop: list[str] = field(default_factory=list)
    stop_token_ids: list[int] = field(default_factory=list)
    ignore_eos: bool = False


@dataclass
class ChatConfig:
    """How responses are read. None: by the model's family, else by its template and vocabulary."""

    tool_parser: str | None = None  # format of tool calls: qwen3, llama-3, deepseek-v3, ... | none
    reasoning_parser: str | None = None  # think | none


@dataclass
class GeneratorConfig:
    """The generator, what it may use up, and the publication of weights to its engines."""

    name: str = "gym"  # gym | harness | path.to.GeneratorClass
    kwargs: dict[str, Any] = field(default_factory=dict)  # for the generator's constructor
    n_samples_per_prompt: int = 8
    max_turns: int = 1
    max_input_length: int = 256  # tokens of a turn's input, the conversation so far included
    sampling_params: SamplingConfig = field(default_factory=SamplingConfig)
    inference_engine: InferenceEngineConfig = field(default_factory=InferenceEngineConfig)
    chat: ChatConfig = field(default_factory=ChatConfig)
    pause_mode: str = "keep"  # keep | recompute | abort | wait: in-flight requests during a weight update
    pause_timeout_s: float = 60.0  # of each phase of a publication
    verify_weights: bool = False  # checksum each publication
    # shared_memory | disk | delta | gloo | nccl | cuda_ipc | path.to.Transport; None: disk where a folder is named, else
    # shared_memory
    weight_transport: str | None = None
    weight_folder: str | None = None  # disk, delta: what trainer and engines share, under the same path
    weight_transport_kwargs: dict[str, Any] = field(default_factory=dict)  # for the transport's constructor
