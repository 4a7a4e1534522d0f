"""``skyrl-train sweep``: one run for each combination of values, in a folder that the page shows as a group."""

from __future__ import annotations

import itertools
import math
import re
import shlex
import signal
import subprocess
import sys
import threading
from collections.abc import Collection, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.errors import HydraException
from rich.console import Console
from rich.table import Table
from rich.text import Text

from skyrl_train.config.compare import LENGTH, changes, explain
from skyrl_train.config.compose import text_override
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.entrypoints.inputs import check_implementations, load_inputs
from skyrl_train.entrypoints.settings import read_settings
from skyrl_train.entrypoints.stop_signals import INTERRUPTED, stop_signals_as_ctrl_c
from skyrl_train.entrypoints.train import NOTHING_LEARNED, program
from skyrl_train.errors import ConfigError
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import CONFIG, FINISHED, has_begun, read_config
from skyrl_train.observability.screen import RunSummary

MAX_NAME = 200  # bytes of a folder's name, below the 255 that file systems allow
_INTERRUPTED = (INTERRUPTED, -signal.SIGINT)  # exit codes of a run that Ctrl-C reached before training began


@dataclass(frozen=True)
class SweepRun:
    """One run of a sweep."""

    name: str  # of its folder, made of the swept values
    folder: Path
    overrides: tuple[str, ...]


def sweep(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    folder: Path | None,
    jobs: int,
    *,
    library: str | None = None,
) -> int:
    """Train every combination of the values that ``overrides`` list; print a table of results; return the exit code.

    A run that has finished is not trained again, and one that was stopped resumes. A run that fails does not end the others.

    Args:
        overrides: ``key=a,b`` lists values, ``key=0..2`` lists 0, 1 and 2; every other one applies to all runs.
        folder: of the sweep; None: ``runs_dir/RECIPE-sweep``.
        jobs: runs at once.
        library: see :func:`skyrl_train.entrypoints.settings.read_settings`; ``recipe`` is then a file, which names the folder.

    Raises:
        ConfigError: no setting has several values, a setting cannot work, or a folder has another run.
    """
    if library is not None and "=" in recipe:
        raise ConfigError(f"sweep --from {library} takes a yaml file of {library} before the settings, not {recipe}.")
    console, quiet = Console(), Console(quiet=True)
    forget_files()
    fixed, swept = split(overrides)
    if not swept:
        raise ConfigError("No setting has several values. List them: trainer.seed=0..2 or key=a,b.")
    if folder is None:
        config = read_settings(recipe, fixed, config_dir, library, quiet)
        folder = Path(config.trainer.runs_dir) / f"{Path(recipe).stem}-sweep"
    runs: list[SweepRun] = []
    for values in itertools.product(*swept.values()):
        given = [f"{key}={value}" for key, value in zip(swept, values, strict=True)]
        # Other characters would make other folders, or paths that need quotes in a setting; ASCII has one byte each.
        name = re.sub(r"[^\w.+-]", "-", "_".join(short(text, swept) for text in given), flags=re.ASCII)[:MAX_NAME]
        while any(run.name == name for run in runs):  # values that differ in such characters only, or behind MAX_NAME
            name += "-"
        run_dir = text_override("trainer.run_dir", str(folder / name))
        runs.append(SweepRun(name, folder / name, (*fixed, *given, run_dir)))
    # All are checked before the first one trains, which may be hours before the last one.
    read: list[tuple[Any, ...]] = []
    for run in runs:
        # The runs' translations differ in the listed values only, so one is printed.
        config = read_settings(recipe, run.overrides, config_dir, library, console if run is runs[0] else quiet)
        raise_errors(validate(config).errors)
        if (run.folder / CONFIG).is_file() and has_begun(run.folder):
            # A finished run would not get its new length.
            changed = changes(read_config(run.folder), config)
            if differing := [change for change in changed if change.another_run or change.key in LENGTH]:
                raise ConfigError(explain(differing, str(run.folder), "Name another folder with --folder."))
        inputs = (config.data, config.environment, config.trainer.eval, config.rollout.stages.reward)
        if inputs not in read:  # the data may be large, and most sweeps leave it as it is
            load_inputs(config)
            read.append(inputs)
        check_implementations(config)
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"Cannot create {folder}: {error.strerror}. Name another folder with --folder.") from error
    options = [] if config_dir is None else ["--config-dir", str(config_dir)]
    options += ["--from", library] if library else []
    processes: list[subprocess.Popen[bytes]] = []
    stopping = threading.Event()
    starting = threading.Lock()  # held while a run begins, so that a stop finds its process

    def train(run: SweepRun) -> str:
        """Train one run and return how it ended."""
        if (run.folder / FINISHED).is_file():
            return "finished"
        log = run.folder.with_name(f"{run.name}.log")
        with starting:
            if stopping.is_set():
                return "not begun"
            try:
                output = log.open("ab")
            except OSError as error:
                say(f"failed: {run.name}: cannot write {log}: {error.strerror}")
                return "failed to begin"
            say(f"begins: {run.name} (output: {log})")
            with output:
                process = subprocess.Popen(
                    [sys.executable, "-m", "skyrl_train", "train", recipe, *run.overrides, *options],
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,  # Ctrl-C reaches this process alone, which passes it on once
                )
            processes.append(process)
        code = process.wait()
        if (run.folder / FINISHED).is_file():
            state = "finished, nothing learned" if code == NOTHING_LEARNED else "finished"
        elif code == 0 or (stopping.is_set() and code in _INTERRUPTED):
            state = "stopped"
        else:
            state = f"failed with exit code {code}"
        say(f"{state}: {run.name}")
        return state

    def say(text: str) -> None:
        console.print(text, markup=False, highlight=False, soft_wrap=True)

    with stop_signals_as_ctrl_c(), ThreadPoolExecutor(jobs) as pool:
        ends = [pool.submit(train, run) for run in runs]
        try:
            wait(ends)
        except KeyboardInterrupt:
            say("stopping after a checkpoint; the same command continues the sweep")
            with starting:
                stopping.set()
            for process in processes:
                if process.poll() is None:
                    process.send_signal(signal.SIGINT)
    states = [end.result() for end in ends]
    table = Table("run", "state", "steps", "reward at the end", "best step", box=None)
    rows = []
    for run, state in zip(runs, states, strict=True):
        summary = (
            load_run(run.folder).summary if (run.folder / CONFIG).is_file() else RunSummary(0, None, None, None, 0.0)
        )
        rows.append((summary.last_reward, run.name, state, summary))
    for last, name, state, summary in sorted(
        rows, key=lambda row: -math.inf if row[0] is None else row[0], reverse=True
    ):
        rewards = ["" if reward is None else f"{reward:.3f}" for reward in (last, summary.best_reward)]
        table.add_row(Text(name), state, str(summary.steps), *rewards)
    console.print(table)
    where = shlex.quote(str(folder))
    say(f"Compare them with: {program()} compare {where}; in a browser: {program()} page {where}")
    if stopping.is_set():
        return INTERRUPTED
    return 1 if any(state.startswith("failed") for state in states) else 0


def split(overrides: Sequence[str]) -> tuple[list[str], dict[str, list[str]]]:
    """Return the overrides of all runs, and the values of each setting that has several.

    Raises:
        ConfigError: an override cannot be read.
    """
    fixed, swept = [], {}
    for text in overrides:
        key, _, value = text.partition("=")
        if (found := re.fullmatch(r"(-?\d+)\.\.(-?\d+)", value)) and int(found[1]) <= int(found[2]):
            swept[key] = [str(number) for number in range(int(found[1]), int(found[2]) + 1)]
            continue
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException:
            fixed.append(text)  # compose() says what is wrong with it
            continue
        if override.is_sweep_override():
            swept[override.key_or_group] = list(override.sweep_string_iterator())
        else:
            fixed.append(text)
    return fixed, swept


def short(text: str, keys: Collection[str]) -> str:
    """Return ``key=value`` with the last part of the key, if no other key has the same."""
    key, _, value = text.partition("=")
    last = key.rpartition(".")[2]
    return text if sum(other.rpartition(".")[2] == last for other in keys) > 1 else f"{last}={value}"
