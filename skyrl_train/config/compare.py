"""Comparison of configurations: a run may continue from checkpoints of the same run only."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

from skyrl_train.config.schema import RunConfig

# Settings, and sections with all their settings, of where a run is stored, how it is observed, where it computes and how long it
# waits. They do not change what is learned, so a run may continue with another value.
NOT_PART_OF_THE_RUN = (
    "trainer.fsdp",
    "trainer.critic.fsdp",
    "trainer.device",
    "trainer.critic.device",
    "trainer.critic.placement",
    "trainer.placement",
    "trainer.run_name",
    "trainer.runs_dir",
    "trainer.run_dir",
    "trainer.resume",
    "trainer.ckpt_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.ckpt_path",
    "trainer.samples_per_step",
    "trainer.max_events_per_s",
    "trainer.max_restarts",
    "trainer.trackers",
    "trainer.eval.interval",
    "trainer.eval.before_train",
    "trainer.eval.max_parallel",
    "trainer.eval.num_engines",
    "trainer.failures",
    "rollout.replay",
    "rollout.buffer_memory_bytes",
    "rollout.num_actors",
    "rollout.ray_num_cpus",
    "rollout.stages.reward.executor",
    "rollout.stages.reward.max_parallel",
    "rollout.stages.reward.timeout_s",
    "rollout.stages.reward.ray_num_cpus",
    "rollout.stages.reward.ray_num_gpus",
    "rollout.stages.reference",
    "generator.pause_timeout_s",
    "generator.inference_engine.fleet",
    "generator.verify_weights",
)


def differences(a: RunConfig, b: RunConfig) -> list[str]:
    """Return the dotted names of the settings that differ, without those that do not change what is learned."""
    left, right = dict(_leaves(dataclasses.asdict(a), "")), dict(_leaves(dataclasses.asdict(b), ""))
    # A setting may exist on one side only: free dictionaries have any keys.
    missing = object()
    return [
        key
        for key in {**left, **right}
        if left.get(key, missing) != right.get(key, missing)
        and not any(key == name or key.startswith(f"{name}.") for name in NOT_PART_OF_THE_RUN)
    ]


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value
