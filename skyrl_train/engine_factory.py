"""Builds the configured inference engines, and the client in front of them: the one place that knows every kind.

backend embedded | vllm | vllm_remote | path.to.Factory    placement process | thread | ray
"""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from typing import Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.config.import_path import import_name
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.inference_engine import InferenceEngineConfig
from skyrl_train.config.schema.model import LoraConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded.hosts import WorkerProcess
from skyrl_train.inference.fleet import FleetLimits
from skyrl_train.inference.interface import InferenceEngineInterface
from skyrl_train.inference.randomness import mix

# By import path, because a Ray actor imports the engine by itself.
EMBEDDED = "skyrl_train.inference.engines.embedded:EmbeddedEngine"
VLLM = "skyrl_train.inference.engines.vllm:VLLMEngine"
VLLM_SEED_BITS = 32


def build_client(
    config: RunConfig,
    plan: Plan,
    tokenizer: PreTrainedTokenizerBase,
    model_path: str,
    numbers: Sequence[int],
    workers: Sequence[WorkerProcess] = (),
) -> InferenceEngineClient:
    """A client with the engines of these numbers, none of them started."""
    engine, chat = config.generator.inference_engine, config.generator.chat
    return InferenceEngineClient(
        [
            build_engine(config, plan, model_path, index, workers[index] if index < len(workers) else None)
            for index in numbers
        ],
        tokenizer,
        model_path,
        pause_timeout_s=config.generator.pause_timeout_s,
        engine_wait_timeout_s=engine.fleet.wait_timeout_s,
        limits=FleetLimits(max_failed_probes=engine.fleet.max_failed_probes, max_restarts=engine.fleet.max_restarts),
        probe_interval_s=engine.fleet.probe_interval_s,
        tool_parser=chat.tool_parser,
        reasoning_parser=chat.reasoning_parser,
        replay=config.rollout.replay,
    )


def build_engine(
    config: RunConfig, plan: Plan, model_path: str, index: int, worker: WorkerProcess | None = None
) -> InferenceEngineInterface:
    """Engine number ``index``; each has its own seed, so that replicas do not answer alike.

    Args:
        worker: the process of an embedded engine that was started earlier.

    Raises:
        ConfigError: the backend is unknown, or what it needs is not installed.
    """
    engine = config.generator.inference_engine
    built_in: dict[str, Callable[[], InferenceEngineInterface]] = {
        "embedded": lambda: _embedded(config, plan, model_path, index, worker),
        "vllm": lambda: _vllm(config, plan, model_path, index),
        "vllm_remote": lambda: _vllm_remote(engine, index),
    }
    if engine.backend in built_in:
        return built_in[engine.backend]()
    factory = import_name(engine.backend, "generator.inference_engine.backend")
    built: InferenceEngineInterface = factory(config, plan, model_path, index)
    return built


def _embedded(
    config: RunConfig, plan: Plan, model_path: str, index: int, worker: WorkerProcess | None
) -> InferenceEngineInterface:
    engine = config.generator.inference_engine
    arguments: dict[str, Any] = {
        "device": engine.device,
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "batch_invariant": engine.batch_invariant,
        "seed": mix(config.trainer.seed, index),
        "lora": _lora(config),
    }
    if engine.placement == "ray":
        return _in_ray(engine, EMBEDDED, {"model_path": model_path, "placement": "thread", **arguments})
    return EmbeddedEngine(model_path, placement=engine.placement, worker=worker, **arguments)


def _vllm(config: RunConfig, plan: Plan, model_path: str, index: int) -> InferenceEngineInterface:
    engine = config.generator.inference_engine
    own = {"kv_cache_memory_bytes", "enable_lora", "load_format", "keep_prefix_cache_across_versions", "num_threads"}
    arguments: dict[str, Any] = {
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "seed": mix(config.trainer.seed, index) % (1 << VLLM_SEED_BITS),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        "data_parallel_size": engine.data_parallel_size,
        "load_format": "auto"
        if _lora(config)
        else "dummy",  # the first publication brings the weights, or an adapter of them
        "lora_rank": config.trainer.policy.model.lora.rank,
        **{key: value for key, value in engine.engine_args.items() if key in own},
        "engine_args": {key: value for key, value in engine.engine_args.items() if key not in own},
        "environment": dict(engine.environment),
    }
    if engine.placement == "ray":
        return _in_ray(engine, VLLM, {"model_path": model_path, **arguments})
    from skyrl_train.inference.engines.vllm import VLLMEngine

    return VLLMEngine(model_path, **arguments)


def _lora(config: RunConfig) -> LoraConfig | None:
    """The adapter that publications bring, or None where they bring the model."""
    lora = config.trainer.policy.model.lora
    return lora if lora.rank else None


def _vllm_remote(engine: InferenceEngineConfig, index: int) -> InferenceEngineInterface:
    from skyrl_train.inference.engines.vllm.remote import RemoteVLLMEngine

    return RemoteVLLMEngine(
        engine.remote_urls[index],
        api_key=os.environ.get(engine.remote_api_key_variable),
    )


def _in_ray(engine: InferenceEngineConfig, factory: str, arguments: dict[str, Any]) -> InferenceEngineInterface:
    try:
        from skyrl_train.inference.engines.ray_actor import RayEngine, RayPlacement
    except ImportError as error:
        raise ConfigError(
            "generator.inference_engine.placement=ray needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    placement = RayPlacement(num_cpus=engine.ray_num_cpus, num_gpus=engine.ray_num_gpus, environment=engine.environment)
    return RayEngine(factory, arguments, placement)
