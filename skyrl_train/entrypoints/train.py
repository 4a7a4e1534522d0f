"""``skyrl-train train`` and ``skyrl-train plan``."""

from __future__ import annotations

import itertools
import os
import shlex
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import IO, cast

from rich.console import Console

from skyrl_train.config.compose import recipe_names
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.schema import ResumeMode
from skyrl_train.entrypoints.beside import Readers
from skyrl_train.entrypoints.inputs import load_inputs, print_warnings
from skyrl_train.entrypoints.run import StopRequest, train
from skyrl_train.entrypoints.run_output import RunOutput
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.entrypoints.stop_signals import INTERRUPTED, stop_signals_as_ctrl_c
from skyrl_train.observability.advice import CONSTANT_STEPS
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import REPORT_HTML
from skyrl_train.observability.screen import final_lines, train_command

NOTHING_LEARNED = 3  # exit code


def train_recipe(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    *,
    strict: bool,
    library: str | None = None,
    watch: bool = False,
    page: str | None = None,
) -> int:
    """Train, print alarms, whether it learned and what comes next, and return the exit code.

    Args:
        watch, page: see :class:`skyrl_train.entrypoints.beside.Readers`.
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`.

    Raises:
        SkyRLError: a setting or an input cannot work, or the run failed.
    """
    started = time.monotonic()
    stop = StopRequest()
    output = None if sys.stdout is None else RunOutput(sys.stdout, stop.request)
    # Without a terminal, a run prints lines. They are held back while the screens have it.
    console = Console(file=cast("IO[str] | None", output), force_terminal=False if watch else None)
    forget_files()
    try:
        readers = Readers(page=page, watch=watch)
        inputs = load_inputs(read_settings(recipe, overrides, config_dir, library, console, strict=strict))
        print_warnings(inputs, console, strict=strict)
        with stop_signals_as_ctrl_c(), readers:
            result = train(inputs, console, stop, started=started, readers=readers)
    except KeyboardInterrupt:  # while starting up: once training runs, signals are handled
        Console(stderr=True).print("interrupted before training began; give the same command again")
        return INTERRUPTED
    code = 0
    if result.was_finished:
        line = (
            f"{result.path} has finished training; nothing is left to do. Give a larger trainer.max_steps to train on, or "
            "another trainer.run_dir to train again."
        )
    else:
        run = load_run(result.path)
        # Advice on speed is on the screen while the run trains, on the page, and in the report.
        for advice in run.advice:
            if advice.level == "alarm":
                console.print(str(advice), markup=False, highlight=False, soft_wrap=True)
        # A run of a few steps tests a set-up; a rare reward may be missing there.
        if result.finished and result.summary.only_reward is not None and result.summary.steps >= CONSTANT_STEPS:
            code = NOTHING_LEARNED
        options = [*(["--strict"] if strict else []), *(["--config-dir", str(config_dir)] if config_dir else [])]
        options += ["--from", library] if library else []
        options += [*(["--watch"] if watch else []), *(["--page", page] if page else [])]
        run_dir: str | None = str(result.path)
        if result.finished:  # it is repeated in another folder
            run_dir = None if inputs.config.trainer.run_dir is None else free_folder(result.path)
        commands = {}
        if result.summary.steps:
            commands["Look at it"] = f"{program()} page {shlex.quote(str(result.path.parent))}"
        if recipe in recipe_names() and result.finished:
            commands["Your own task"] = f"{program()} init my-task --data prompts.jsonl"
        again = train_command(program(), [recipe, *options, *overrides], run_dir=run_dir, resumes=not result.finished)
        if inputs.config.trainer.resume is ResumeMode.never and not result.finished:
            # Of the recipe: an override has gone from the command.
            again += "" if any(each.startswith("trainer.resume=") for each in overrides) else " trainer.resume=latest"
        commands["Train again" if result.finished else "Resume" if result.summary.steps else "Start again"] = again
        line = final_lines(
            run.learned if result.summary.steps else None,
            str(result.path),
            finished=result.finished,
            report=(result.path / REPORT_HTML).is_file(),
            seconds=result.seconds,
            commands=commands,
        )
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    if output is not None and output.broken_pipe and not result.finished:
        Console(stderr=True).print(
            f"Nobody reads the output any more, so the run in {result.path} has stopped. The same command resumes it; to train "
            "without a reader, write the output to a file.",
            markup=False,
            highlight=False,
            soft_wrap=True,
        )
    return code


def free_folder(path: Path) -> str:
    """Return the first of ``path-2``, ``path-3``, ... that does not exist."""
    return next(name for number in itertools.count(2) if not Path(name := f"{path}-{number}").exists())


def program() -> str:
    """Return the words that started this command, such as ``./uvw run skyrl-train``, for the commands that it prints."""
    launcher = os.environ.get("SKYRL_TRAIN_LAUNCHER")  # set by ./uvw
    name = "python -m skyrl_train" if Path(sys.argv[0]).name == "__main__.py" else "skyrl-train"
    return name if launcher is None else f"{shlex.quote(launcher)} run {name}"
