"""Builds the configured inference engines, the client in front of them, and the transport of their weights.

backend embedded | vllm | vllm_remote | path.to.Factory    executor process | thread | ray
"""

from __future__ import annotations

import inspect
import os
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from transformers import PreTrainedTokenizerBase

from skyrl_train.config import derive
from skyrl_train.config.import_path import import_name
from skyrl_train.config.plan import Plan
from skyrl_train.config.schema import InferenceEngineConfig, RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.inference.chat import ChatRenderer
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.engines.embedded.engine import EngineProcess
from skyrl_train.inference.engines.proxy import ProcessEngine
from skyrl_train.inference.interface import InferenceEngineInterface
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.weight_sync.update import WeightTransport

if TYPE_CHECKING:  # Ray need not be installed
    from skyrl_train.workers.ray import RayPlacement

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
    workers: Sequence[EngineProcess] = (),
    logs: Path | None = None,
    events: EventLog = NO_EVENTS,
    placements: Sequence[RayPlacement] = (),
) -> InferenceEngineClient:
    """Build a client with the engines of these numbers. Nothing is started.

    Args:
        workers: processes for the first embedded engines that were started earlier.
        logs: folder for the output of engines' processes; None: they write to this process's streams, or to Ray's folder.
        events: the record of the run.
        placements: of all engines' actors, by their numbers; empty: Ray places them.
    """
    engine = config.generator.inference_engine
    return InferenceEngineClient(
        [
            build_engine(
                config,
                plan,
                model_path,
                index,
                workers[index] if index < len(workers) else None,
                logs,
                placements[index] if placements else None,
            )
            for index in numbers
        ],
        tokenizer,
        model_path,
        pause_timeout_s=config.generator.pause_timeout_s,
        engine_wait_timeout_s=engine.fleet.wait_timeout_s,
        limits=FleetLimits(max_failed_probes=engine.fleet.max_failed_probes, max_restarts=engine.fleet.max_restarts),
        probe_interval_s=engine.fleet.probe_interval_s,
        renderer=ChatRenderer.configured(config.generator, tokenizer, model_path),
        replay=config.rollout.replay,
        events=events,
    )


def build_engine(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    index: int,
    worker: EngineProcess | None = None,
    logs: Path | None = None,
    placement: RayPlacement | None = None,
) -> InferenceEngineInterface:
    """Build engine number ``index``. Each has its own seed, so that replicas give different answers.

    Args:
        worker: a process for an embedded engine that was started earlier.
        logs: see :func:`build_client`.
        placement: of an engine in a Ray actor; None: Ray places it.

    Raises:
        ConfigError: the backend is unknown, or a package that it needs is not installed.
    """
    engine = config.generator.inference_engine
    # Absolute: an actor has another working folder.
    log_file = None if logs is None else str(logs.absolute() / f"engine-{index}.log")
    # Only the chosen backend is imported.
    if engine.backend == "embedded":
        return _embedded(config, plan, model_path, index, worker, log_file, placement)
    if engine.backend == "vllm":
        return _vllm(config, plan, model_path, index, log_file, placement)
    if engine.backend == "vllm_remote":
        from skyrl_train.inference.engines.vllm.remote import RemoteVLLMEngine

        return RemoteVLLMEngine(engine.remote_urls[index], api_key=os.environ.get(engine.remote_api_key_variable))
    factory = import_name(engine.backend, "generator.inference_engine.backend")
    built: InferenceEngineInterface = factory(config, plan, model_path, index)
    return built


def _embedded(
    config: RunConfig,
    plan: Plan,
    model_path: str,
    index: int,
    worker: EngineProcess | None,
    log_file: str | None,
    placement: RayPlacement | None,
) -> InferenceEngineInterface:
    engine, lora = config.generator.inference_engine, config.trainer.policy.model.lora
    arguments: dict[str, Any] = {
        "device": engine.device,
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": plan.max_model_len,
        "batch_invariant": engine.batch_invariant,
        "seed": derive_seed(config.trainer.seed, index),
        "lora": lora if lora.rank else None,  # the adapter that weight syncs send; None: they send the whole model
    }
    if engine.executor == "ray":
        arguments |= {"model_path": model_path, "executor": "thread"}
        return _in_ray(engine, EMBEDDED, arguments, log_file, placement)
    return EmbeddedEngine(model_path, executor=engine.executor, worker=worker, log_file=log_file, **arguments)


def _vllm(
    config: RunConfig, plan: Plan, model_path: str, index: int, log_file: str | None, placement: RayPlacement | None
) -> InferenceEngineInterface:
    engine, lora = config.generator.inference_engine, config.trainer.policy.model.lora
    # Arguments of VLLMEngine itself; all others in engine_args go to vLLM's AsyncEngineArgs.
    own = {"kv_cache_memory_bytes", "enable_lora", "load_format", "keep_prefix_cache_across_versions", "num_threads"}
    arguments: dict[str, Any] = {
        "dtype": engine.dtype,
        "max_num_seqs": engine.max_num_seqs,
        "max_model_len": plan.max_model_len,
        # vLLM accepts seeds of 32 bits.
        "seed": derive_seed(config.trainer.seed, index) % (1 << VLLM_SEED_BITS),
        "tensor_parallel_size": engine.tensor_parallel_size,
        "pipeline_parallel_size": engine.pipeline_parallel_size,
        # In an actor, Ray chooses the GPUs and hides the others.
        "devices": None
        if engine.executor == "ray" and engine.device != "cpu"
        else derive.engine_devices(engine, index),
        # The first weight sync brings all weights; only with an adapter does the engine read the base model from its folder.
        "load_format": "auto" if lora.rank else "dummy",
        "lora_rank": lora.rank,
        **{key: value for key, value in engine.engine_args.items() if key in own},
        "engine_args": {
            **({"enable_sleep_mode": True} if config.trainer.placement.colocate_all else {}),
            **{key: value for key, value in engine.engine_args.items() if key not in own},
        },
        "environment": dict(engine.environment),
        "log_file": log_file,
    }
    if engine.executor == "ray":
        return _in_ray(engine, VLLM, {"model_path": model_path, **arguments}, log_file, placement)
    return ProcessEngine(VLLM, {"model_path": model_path, **arguments}, log_file=log_file)


def _in_ray(
    engine: InferenceEngineConfig,
    factory: str,
    arguments: dict[str, Any],
    log_file: str | None,
    placement: RayPlacement | None,
) -> InferenceEngineInterface:
    try:
        from skyrl_train.inference.engines.ray_engine import RayEngine
        from skyrl_train.workers.ray import RayPlacement
    except ImportError as error:
        raise ConfigError(
            "generator.inference_engine.executor=ray needs Ray: install the extra `ray` (./uvw run --extra ray ...)."
        ) from error
    if placement is None:
        placement = RayPlacement(num_cpus=engine.ray_num_cpus, num_gpus=derive.engine_ray_num_gpus(engine))
    environment = {**engine.environment, **placement.environment}
    return RayEngine(factory, arguments, replace(placement, environment=environment, log_file=log_file))


def build_transport(config: RunConfig) -> WeightTransport:
    """Build the transport that brings weights to the engines: a built-in one, or a user's class by its import path.

    Its constructor gets ``dtype``, ``verify``, ``folder``, ``device`` (the trainer's) and ``timeout_s`` as far as it names
    them, and all of ``generator.weight_transport_kwargs``.

    Raises:
        ConfigError: there is no such class, or its constructor takes other arguments.
    """
    name, generator = derive.weight_transport(config), config.generator
    cls = import_name(derive.TRANSPORTS[name].path if name in derive.TRANSPORTS else name, "generator.weight_transport")
    # A user's transport need not take arguments that it has no use for: it gets those that its constructor names.
    offered: dict[str, Any] = {
        "dtype": generator.inference_engine.dtype,
        "verify": generator.verify_weights,
        "folder": generator.weight_folder,
        "device": config.trainer.device,
        "timeout_s": generator.pause_timeout_s,
    }
    try:
        named = inspect.signature(cls).parameters
        arguments = {key: value for key, value in offered.items() if key in named}
        transport: WeightTransport = cls(**{**arguments, **generator.weight_transport_kwargs})
    except TypeError as error:
        raise ConfigError(
            f"generator.weight_transport={name!r} cannot be constructed: {error}. The constructor receives each of "
            f"{', '.join(offered)} that it names, and generator.weight_transport_kwargs."
        ) from error
    return transport
