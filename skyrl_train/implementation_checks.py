"""What only the implementations know of a configuration: the names in their registries, and what they cannot do."""

from __future__ import annotations

from skyrl_train.algorithms.advantages import ADVANTAGE_ESTIMATORS
from skyrl_train.algorithms.kl import KL_ESTIMATORS
from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.algorithms.off_policy.rejections import REJECTION_STATISTICS
from skyrl_train.algorithms.off_policy.weights import CORRECTIONS
from skyrl_train.algorithms.reductions import REDUCTIONS
from skyrl_train.config import derive
from skyrl_train.config.import_path import import_name
from skyrl_train.config.limits import setting
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.transports import TRANSPORTS
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.models.folder import check_place, is_local, known_device, load_config
from skyrl_train.observability.tracking import tracker_names
from skyrl_train.rollout.reward_function import is_async
from skyrl_train.rollout.stragglers import STRAGGLER_POLICIES, resolve_straggler_policy
from skyrl_train.training.objective import Objective
from skyrl_train.training.schedule import SCHEDULES


def known_names() -> dict[str, list[str]]:
    """By setting, the names that its registry knows."""
    return {
        "trainer.algorithm.advantage_estimator": ADVANTAGE_ESTIMATORS.names(),
        "trainer.algorithm.kl_estimator_type": KL_ESTIMATORS.names(),
        "trainer.algorithm.off_policy_correction.tis_ratio_type": CORRECTIONS.names(),
        "trainer.algorithm.off_policy_correction.rejections.statistic": REJECTION_STATISTICS.names(),
        "trainer.algorithm.policy_loss_type": POLICY_LOSSES.names(),
        "trainer.algorithm.loss_reduction": REDUCTIONS.names(),
        "trainer.policy.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.critic.optimizer_config.scheduler": SCHEDULES.names(),
        "trainer.fully_async.straggler_policy": STRAGGLER_POLICIES.names(),
        "trainer.trackers": tracker_names(),
        "generator.weight_transport": list(TRANSPORTS),
    }


def check_objective(config: RunConfig) -> None:
    """Raises:
    ConfigError: the loss cannot be built, or looks at whole minibatches, which ``streaming_min_groups`` does not wait for.
    """
    groups = derive.streaming_min_groups(config)
    if Objective(config.trainer.algorithm).needs_minibatch_facts and groups is not None:
        raise ConfigError(
            f"trainer.fully_async.streaming_min_groups={groups}: the configured loss or correction looks at all groups of a "
            "step before it trains on any. Set streaming_min_groups=null."
        )


def check_devices(config: RunConfig) -> None:
    """Raises:
    ConfigError: torch knows no device of this name. (Whether the machine has it is seen where the run is.)
    """
    for key in (
        "trainer.device",
        "trainer.critic.device",
        "rollout.stages.reference.device",
        "generator.inference_engine.device",
    ):
        name = setting(config, key)
        if name is not None:
            known_device(name, key)


def check_import_paths(config: RunConfig) -> None:
    """What the run would ask for only after models are loaded, or in its first step.

    Raises:
        ConfigError: the import path of an estimator, a schedule, a straggler policy, a reward function, the generator or
            what it plays leads to none.
    """
    trainer, generator, reward = config.trainer, config.generator, config.rollout.stages.reward.function
    ADVANTAGE_ESTIMATORS.get(trainer.algorithm.advantage_estimator)
    for key in ("trainer.policy.optimizer_config.scheduler", "trainer.critic.optimizer_config.scheduler"):
        SCHEDULES.get(setting(config, key), key)
    if derive.is_fully_async(config):
        resolve_straggler_policy(trainer.fully_async.straggler_policy)
    if reward is not None:
        is_async(reward)
    GeneratorSpec(generator, config.environment, model_path="").import_class()
    if config.rollout.num_actors:
        return  # what they play need not be importable here
    agent = generator.kwargs.get("agent")
    if generator.name == "gym":
        resolve_environment(config.environment)
    elif generator.name == "harness" and agent is not None:
        import_name(str(agent), "generator.kwargs.agent", "function")


def check_model_path(config: RunConfig) -> None:
    """Raises:
    ModelError: the path of the policy's or the critic's model looks like a folder, and there is none, or no model that
        transformers knows. (A hub name is asked for later.)
    """
    for key in ("trainer.policy.model.path", "trainer.critic.model.path"):
        path = setting(config, key)
        if path is not None and is_local(path):
            load_config(path, key)
        elif path is not None:
            check_place(path, key)
