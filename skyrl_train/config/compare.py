"""Compares configurations to decide whether a run can resume with changed settings.

Each setting is in one of three tables, by its name or by the name of a section; the longest name counts.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.config.schema import RunConfig

# Storage, observation, devices, parallelism and time limits of a run. Another value changes rounding and timing only, not the
# objective or the data.
MAY_CHANGE = (
    "trainer.run_name",
    "trainer.runs_dir",
    "trainer.run_dir",
    "trainer.resume",
    "trainer.resume_step",
    "trainer.ckpt_interval",
    "trainer.max_ckpts_to_keep",
    "trainer.hf_save_interval",
    "trainer.ckpt_path",
    "trainer.samples_per_step",
    "trainer.max_events_per_s",
    "trainer.trackers",
    "trainer.max_restarts",
    "trainer.failures",
    "trainer.device",
    "trainer.tf32",
    "trainer.executor",
    "trainer.placement",
    "trainer.fsdp",
    "trainer.micro_batch_tokens",
    "trainer.packing",
    "trainer.policy.compile",
    "trainer.policy.gradient_checkpointing",
    "trainer.critic.device",
    "trainer.critic.placement",
    "trainer.critic.fsdp",
    "trainer.critic.gradient_checkpointing",
    "trainer.eval.interval",
    "trainer.eval.before_train",
    "trainer.eval.max_parallel",
    "trainer.eval.num_engines",
    "trainer.eval.best_metric",
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
    "rollout.stages.proximal",
    "generator.kwargs.endpoint",
    "generator.pause_timeout_s",
    "generator.verify_weights",
    "generator.weight_transport",
    "generator.weight_folder",
    "generator.weight_transport_kwargs",
    "generator.inference_engine",
)

_SCHEDULE = "the learning rate follows the new schedule from here on"
_ENGINE = "the engines may sample with other rounding from here on"
_EVALUATION = "evaluations from here on cannot be compared with the earlier ones"
# Another value changes the rest of the run, as the text says. The steps so far stay.
CHANGES_THE_REST = {
    "trainer.max_steps": _SCHEDULE,
    "trainer.epochs": _SCHEDULE,
    "trainer.policy.optimizer_config.lr": _SCHEDULE,
    "trainer.policy.optimizer_config.scheduler": _SCHEDULE,
    "trainer.policy.optimizer_config.num_warmup_steps": _SCHEDULE,
    "trainer.critic.optimizer_config.lr": _SCHEDULE,
    "trainer.critic.optimizer_config.scheduler": _SCHEDULE,
    "trainer.critic.optimizer_config.num_warmup_steps": _SCHEDULE,
    "trainer.eval": _EVALUATION,
    "generator.inference_engine.backend": _ENGINE,
    "generator.inference_engine.dtype": _ENGINE,
    "generator.inference_engine.engine_args": _ENGINE,
}

# Another value makes another run: another objective, other data, other samples, or a checkpoint that does not fit.
MAKES_ANOTHER_RUN = (
    "trainer.mode",
    "trainer.seed",
    "trainer.init_from",
    "trainer.strategy",
    "trainer.policy_mini_batch_size",
    "trainer.train_batch_size",
    "trainer.update_epochs_per_batch",
    "trainer.policy.model",
    "trainer.policy.optimizer_config",
    "trainer.policy.dtype",
    "trainer.policy.fp32_head",
    "trainer.critic.model",
    "trainer.critic.optimizer_config",
    "trainer.critic.dtype",
    "trainer.algorithm",
    "trainer.fully_async",
    "trainer.partial_rollout",
    "rollout.stages.reward.function",
    "rollout.stages.reward.kwargs",
    "generator.name",
    "generator.kwargs",
    "generator.n_samples_per_prompt",
    "generator.max_turns",
    "generator.max_input_length",
    "generator.sampling_params",
    "generator.chat",
    "generator.chat_template",
    "generator.chat_template_kwargs",
    "generator.pause_mode",
    "generator.inference_engine.max_model_len",
    "environment",
    "data",
)

_CLASSIFIED = {*MAY_CHANGE, *CHANGES_THE_REST, *MAKES_ANOTHER_RUN}
LENGTH = ("trainer.max_steps", "trainer.epochs")
# With both values all prompts stay, so a run of a version without the setting, which had long prompts, resumes with keep.
_SAME_PROMPTS = ("data.on_long_prompt", {"error", "keep"})
# Of one command, not of the run.
_WHERE = ("trainer.run_name", "trainer.runs_dir", "trainer.run_dir", "trainer.resume", "trainer.resume_step")
_ABSENT = object()


@dataclass(frozen=True, slots=True)
class Change:
    """A setting with another value than in the configuration of the run.

    Attributes:
        warning: how the rest of the run differs; empty: not at all, or the run is another one.
        another_run: whether the run cannot resume with this value.
    """

    key: str
    before: Any
    after: Any
    warning: str
    another_run: bool

    def __str__(self) -> str:
        before, after = ("not set" if value is _ABSENT else json.dumps(value) for value in (self.before, self.after))
        if "<lambda>#" in before and "<lambda>#" in after:  # the path of a lambda ends in a digest of its code
            return f"{self.key}: the code of the lambda is not that with which the run began"
        return f"{self.key}: was {before}, now {after}"


def table_entry(key: str) -> str | None:
    """Return the name in the tables that decides about the setting ``key``, or None if there is none."""
    while key not in _CLASSIFIED:
        key, dot, _ = key.rpartition(".")
        if not dot:
            return None
    return key


def changes(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the settings that differ, without the name and place of the run, in the schema's order."""
    left, right = dict(_leaves(dataclasses.asdict(before), "")), dict(_leaves(dataclasses.asdict(after), ""))
    optimizers = (after.trainer.policy.optimizer_config, after.trainer.critic.optimizer_config)
    scheduled = any(optimizer.scheduler != "constant" for optimizer in optimizers)
    found = []
    # A setting may exist on one side only: free dictionaries have any keys, and an empty one has an entry for itself.
    for key in {**left, **right}:
        values = left.get(key, _ABSENT), right.get(key, _ABSENT)
        if values[0] == values[1] or key in _WHERE or values in (({}, _ABSENT), (_ABSENT, {})):
            continue
        entry = table_entry(key)
        # A constant learning rate does not depend on the length.
        warning = "" if key in LENGTH and not scheduled else CHANGES_THE_REST.get(entry or "", "")
        another_run = entry is None or (entry in MAKES_ANOTHER_RUN and (key, {*map(str, values)}) != _SAME_PROMPTS)
        found.append(Change(key, *values, warning, another_run))
    return found


def differences(before: RunConfig, after: RunConfig) -> list[Change]:
    """Return the changed settings with which the run ``before`` cannot resume as ``after``."""
    return [change for change in changes(before, after) if change.another_run]


def explain(differing: Sequence[Change], run: str, remedy: str) -> str:
    """Return the message for a run that cannot resume.

    Args:
        run: where it is, with the setting that names the place.
        remedy: how to resume it, and how to start another one.
    """
    return "\n  ".join([f"{run} has a run with other settings:", *map(str, differing)]) + f"\n{remedy}"


def _leaves(section: Mapping[str, Any], prefix: str) -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        key = f"{prefix}{name}"
        if isinstance(value, Mapping) and value:
            yield from _leaves(value, key + ".")
        else:
            yield key, value
