"""The engines that sample, and what happens to those that fail: ``generator.inference_engine``."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any


@dataclass
class FleetConfig:
    """What happens to engines that fall silent or die."""

    max_restarts: int = 3  # of each engine; it has them again after five healthy minutes
    probe_interval_s: float = 10.0  # between two health probes, and the limit of one
    max_failed_probes: int = 3  # in a row; then the engine counts as dead
    wait_timeout_s: float = 60.0  # requests wait so long while no engine serves; then the run stops


@dataclass
class InferenceEngineConfig:
    """The engines that sample, and what each of them has."""

    backend: str = "embedded"  # embedded | vllm | vllm_remote | path.to.Factory
    placement: str = "process"  # process (its own) | thread (of the trainer's process; embedded only) | ray (an actor)
    num_engines: int = 1
    device: str = "cpu"
    dtype: str = "float32"  # of the served weights: float32 | bfloat16
    max_num_seqs: int = 128  # requests decoded at once, per engine
    max_model_len: int | None = None  # tokens per request; None: prompt and response limits, within the model's
    batch_invariant: bool = False  # embedded: a request's tokens do not depend on what else is in the batch (slower)
    tensor_parallel_size: int = 1  # vllm, per engine
    pipeline_parallel_size: int = 1  # vllm, per engine
    data_parallel_size: int = 1  # vllm, per engine
    engine_args: dict[str, Any] = field(default_factory=dict)  # any further argument of vLLM's AsyncEngineArgs
    environment: dict[str, str] = field(default_factory=dict)  # variables of the engine's processes: vllm, or in Ray
    remote_urls: list[str] = field(default_factory=list)  # vllm_remote: one server per engine
    remote_api_key_variable: str = "VLLM_API_KEY"  # the environment variable that holds the servers' key
    ray_num_cpus: float = 1.0  # reserved for each engine in a Ray actor
    ray_num_gpus: float = 0.0
    fleet: FleetConfig = field(default_factory=FleetConfig)
