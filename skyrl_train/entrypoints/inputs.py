"""The inputs of a run: a checked configuration, its data and its plan. Nothing is started, and nothing that runs is imported.

config ──load_inputs──> RunInputs ──check_implementations──> known to work, as far as this can be said without starting it
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from rich.console import Console

from skyrl_train.config import derive
from skyrl_train.config.memory import MemoryWarnings, memory_warnings, this_machine
from skyrl_train.config.plan import Plan, length_warnings, resolve
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.environments.base import PromptRecord
from skyrl_train.evaluation.data import load_evaluation_prompts
from skyrl_train.rollout.data.dataset import PromptDataset, check_alphabet, check_environment, for_each
from skyrl_train.rollout.data.loader import build_loader, open_prompts
from skyrl_train.rollout.data.prompt_limit import PromptLimit

if TYPE_CHECKING:
    from skyrl_train.rollout.data.streaming import StreamingPrompts


@dataclass(frozen=True)
class RunInputs:
    """A validated configuration, with its data and plan. Nothing has been started."""

    config: RunConfig
    dataset: PromptDataset | StreamingPrompts
    evaluation_prompts: Sequence[PromptRecord]
    plan: Plan
    memory: MemoryWarnings
    prompt_limit: PromptLimit


def load_inputs(config: RunConfig, *, download: bool = True) -> RunInputs:
    """Validate ``config``, open its data, and resolve its plan.

    Args:
        download: False: lengths of prompts are checked only if the tokenizer is on this machine.

    Raises:
        ConfigError: a setting, or a combination of settings, cannot work.
        DataError: a data file is missing or broken.
    """
    raise_errors(validate(config).errors)  # the checks below rely on valid sizes
    dataset = open_prompts(config)
    check_environment(dataset, config)
    limit = PromptLimit(config, download=download)
    if isinstance(dataset, PromptDataset):
        dataset = limit.fit_all(dataset)
    else:
        dataset.fit = limit.fit
    evaluation_prompts = load_evaluation_prompts(config, limit)
    reward = config.rollout.stages.reward
    if reward.function is not None:
        from skyrl_train.rollout.stages.reward import column_check  # executors too

        check = column_check(reward.function, reward.kwargs)
        for_each(dataset, check)
        for_each(evaluation_prompts, check)
    if config.trainer.policy.model.path is None:
        build = config.trainer.policy.model.build
        check_alphabet(dataset, build.alphabet, build.words)
    build_loader(dataset, config.data, config.trainer.seed)  # raises now if the sampler cannot work with this data
    # After the data is open: the number of steps follows from the number of prompts.
    # The length of a stream is unknown until all rows are read.
    plan = resolve(config, len(dataset) if isinstance(dataset, PromptDataset) else None)
    memory = memory_warnings(config, plan.memory, this_machine(gpus=derive.trains_on_gpus(config)))
    return RunInputs(config, dataset, evaluation_prompts, plan, memory, limit)


def print_warnings(inputs: RunInputs, console: Console, *, strict: bool) -> None:
    """Print prompts that were too long, settings without effect, warm-ups longer than the run, and where memory does not, or may
    not, suffice; a line each.

    Raises:
        ConfigError: with ``strict``, if a setting has no effect or the memory does not suffice.
    """
    for note in inputs.prompt_limit.notes:
        console.print(f"data: {note}", markup=False, highlight=False, soft_wrap=True)
    warnings = [
        *inputs.plan.warnings,
        *length_warnings(inputs.plan),
        *(f"memory does not suffice: {warning}" for warning in inputs.memory.insufficient),
        *(f"memory may not suffice: {warning}" for warning in inputs.memory.tight),
    ]
    for warning in warnings:
        console.print(f"warning: {warning}", markup=False, highlight=False, soft_wrap=True)
    if strict:
        raise_errors([*inputs.plan.warnings, *inputs.memory.insufficient])


def check_implementations(config: RunConfig) -> None:
    """Check what only the implementations know. Call it last: their imports take seconds.

    Raises:
        ConfigError: a name is unknown (the message has the nearest known one), or a user's own loss cannot work here.
        ModelError: the model's path looks like a folder, and there is none.
    """
    from skyrl_train.build.checks import (
        check_devices,
        check_import_paths,
        check_model_path,
        check_objective,
        known_names,
    )

    raise_errors(validate(config, known_names()).errors)
    check_devices(config)
    check_objective(config)
    check_import_paths(config)
    check_model_path(config)
