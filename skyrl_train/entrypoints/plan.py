"""``skyrl-train plan``."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict, replace
from pathlib import Path

from rich.console import Console

from skyrl_train.config.hardware import parse_cluster
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.machine_plan import machine_plan
from skyrl_train.config.memory import MemoryWarnings
from skyrl_train.config.plan import table
from skyrl_train.config.validate import raise_errors
from skyrl_train.entrypoints.inputs import RunInputs, check_implementations, load_inputs, print_warnings
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.errors import ConfigError
from skyrl_train.observability.readers.settings import settings_table
from skyrl_train.observability.screen import visible
from skyrl_train.rollout.data.dataset import PromptDataset


def print_plan(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    strict: bool,
    on: str | None = None,
    response_tokens: int | None = None,
    prompts: int = 0,
    library: str | None = None,
) -> None:
    """Print the resolved plan and what is suspicious about it, after checks that need no started process.

    Args:
        on: a machine, see :func:`skyrl_train.config.hardware.parse_cluster`; None: memory is compared with this one.
        response_tokens: see :func:`skyrl_train.config.machine_plan.machine_plan`.
        prompts: how many prompts to print as the model sees them, which loads (or downloads) its tokenizer.
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        SkyRLError: a setting or an input cannot work; with ``strict``, also one without effect, or too little memory.
    """
    console = Console()
    forget_files()
    config = read_settings(recipe, overrides, config_dir, library, console, strict=strict)
    cluster = None if on is None else parse_cluster(on)
    inputs = load_inputs(config, download=prompts > 0)
    console.print(inputs.plan.describe(), markup=False, highlight=False, soft_wrap=True)
    changed = [
        (row["key"], f"{json.dumps(row['value'])} (default {json.dumps(row['default'])})")
        for row in settings_table(asdict(config))
        if row["differs"]
    ]
    if changed:
        title = "settings that differ from their defaults"
        console.print(table([(title, changed)]), markup=False, highlight=False, soft_wrap=True)
    if prompts:
        console.print(_rendered(inputs, prompts), markup=False, highlight=False, soft_wrap=True)
    problems: tuple[str, ...] = ()
    if cluster is not None:
        there = machine_plan(inputs.plan, cluster, response_tokens)
        console.print(there.describe(), markup=False, highlight=False, soft_wrap=True)
        problems, inputs = there.problems, replace(inputs, memory=MemoryWarnings([], list(there.tight)))
    check_implementations(config)
    if config.trainer.init_from is not None:
        from skyrl_train.build.export import find_source  # imports torch

        find_source(config.trainer.init_from, config)
    for problem in problems:
        console.print(f"warning: does not fit: {problem}", markup=False, highlight=False, soft_wrap=True)
    print_warnings(inputs, console, strict=strict)
    if strict:
        raise_errors(problems)


def _rendered(inputs: RunInputs, number: int) -> str:
    """Return the first prompts of the data set as the model sees them.

    Raises:
        ConfigError: an agent renders its own requests, or the prompts are read while the run trains.
    """
    if inputs.config.generator.name == "harness":
        raise ConfigError("An agent writes its own prompts. `skyrl-train try` runs it once and shows them.")
    if not isinstance(inputs.dataset, PromptDataset):
        raise ConfigError("The prompts of a stream are read while a run trains. `skyrl-train try` shows one of them.")
    blocks = []
    for record in inputs.dataset.records[:number]:
        tokens, text = inputs.prompt_limit.rendered(record)
        blocks.append(f"prompt {record.uid}: {tokens} of at most {inputs.prompt_limit.tokens} tokens\n{visible(text)}")
    return "\n".join(blocks)
