"""Comparison of configurations: a run may continue from checkpoints of the same run only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.schema import FleetConfig, RunConfig

_WORKER_SETTINGS = (  # settings of fsdp
    "num_workers",
    "sequence_parallel_size",
    "shard_size",
    "cpu_offload",
    "reshard_after_forward",
    "ray_num_cpus",
    "ray_num_gpus",
    "environment",
    "start_timeout_s",
)
# Settings of where a run is stored, how it is observed, where it computes and how long it waits. They do not change what is
# learned, so a run may continue with another value.
NOT_PART_OF_THE_RUN = frozenset(
    {
        *(f"trainer.{whose}fsdp.{name}" for whose in ("", "critic.") for name in _WORKER_SETTINGS),
        "trainer.device",
        "trainer.critic.device",
        "trainer.critic.placement",
        "trainer.run_name",
        "trainer.runs_dir",
        "trainer.run_dir",
        "trainer.resume",
        "trainer.ckpt_interval",
        "trainer.max_ckpts_to_keep",
        "trainer.ckpt_path",
        "trainer.samples_per_step",
        "trainer.max_restarts",
        "trainer.trackers",
        "trainer.eval.interval",
        "trainer.eval.before_train",
        "trainer.eval.max_parallel",
        "trainer.eval.num_engines",
        "trainer.failures.rollout_timeout_s",
        "trainer.failures.max_rollout_retries",
        "trainer.failures.on_rollout_failure",
        "trainer.failures.max_failed_rollouts",
        "trainer.failures.max_nonfinite_steps",
        "trainer.failures.max_engine_failures",
        "trainer.failures.stuck_after_s",
        "rollout.replay",
        "rollout.buffer_memory_bytes",
        "rollout.num_actors",
        "rollout.ray_num_cpus",
        "rollout.stages.reward.executor",
        "rollout.stages.reward.max_parallel",
        "rollout.stages.reward.timeout_s",
        "rollout.stages.reward.ray_num_cpus",
        "rollout.stages.reward.ray_num_gpus",
        "rollout.stages.reference.device",
        "rollout.stages.reference.executor",
        "rollout.stages.reference.max_parallel",
        "rollout.stages.reference.num_workers",
        "rollout.stages.reference.cpu_offload",
        "rollout.stages.reference.ray_num_cpus",
        "rollout.stages.reference.ray_num_gpus",
        "generator.pause_timeout_s",
        *(f"generator.inference_engine.fleet.{field.name}" for field in dataclasses.fields(FleetConfig)),
        "generator.verify_weights",
    }
)


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Return the dotted names of the settings that differ, without those that do not change what is learned."""
    left, right = dict(_leaves(dataclasses.asdict(a), "")), dict(_leaves(dataclasses.asdict(b), ""))
    # A setting may exist on one side only: free dictionaries have any keys.
    missing = object()
    keys = {**left, **right}
    return [key for key in keys if key not in NOT_PART_OF_THE_RUN and left.get(key, missing) != right.get(key, missing)]


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value
