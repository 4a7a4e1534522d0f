"""Trains: ``python -m skyrl_train.entrypoints.train --config-name=RECIPE [--dry-run] [--strict] key=value ...``.

Exit codes: 0 trained to the end, or stopped by SIGTERM / Ctrl-C with a checkpoint; 1 the run failed; 2 a setting or an
input is wrong; 130 interrupted before training began.
"""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Sequence

from rich.console import Console

from skyrl_train.config.compose import compose, recipe_names
from skyrl_train.config.import_path import forget_files
from skyrl_train.entrypoints.run import check_implementations, load_inputs, print_warnings, train
from skyrl_train.entrypoints.stop_signals import sigterm_as_ctrl_c
from skyrl_train.errors import ConfigError, DataError, ModelError, SkyRLError
from skyrl_train.observability.screen import final_line, train_command

MODULE = "skyrl_train.entrypoints.train"


def main(argv: Sequence[str] | None = None) -> int:
    """Parse the command line, train, and return the exit code."""
    started = time.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = recipe_parser(MODULE, "Trains a policy as a recipe says.")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument(
        "--strict",
        action="store_true",
        help="stop if a setting has no effect, or if this machine's memory does not suffice, instead of warning",
    )
    options = parser.parse_intermixed_args(arguments)
    console = Console()
    forget_files()
    try:
        config = compose(options.config_name, options.overrides, options.config_dir)
        inputs = load_inputs(config)
        if options.dry_run:
            console.print(inputs.plan.describe(), markup=False, highlight=False, soft_wrap=True)
            check_implementations(config)
        # After the plan is printed, so that --dry-run --strict shows both.
        print_warnings(inputs, console, strict=options.strict)
        if options.dry_run:
            return 0
        with sigterm_as_ctrl_c():
            result = train(inputs, console, started=started)
    except KeyboardInterrupt:  # while starting up: once training runs, signals are handled
        Console(stderr=True).print("interrupted before training began; give the same command again")
        return 130
    except SkyRLError as error:
        print_error(error)
        return exit_code(error)
    if result.was_finished:
        line = (
            f"{result.path} has finished training; nothing is left to do. Give another trainer.run_dir to train again."
        )
    else:
        launcher = os.environ.get("SKYRL_TRAIN_LAUNCHER", "")  # set by ./uvw
        run_dir = None if result.finished else str(result.path)  # a finished run is repeated in another folder
        line = final_line(
            result.summary,
            str(result.path),
            finished=result.finished,
            command=train_command(MODULE, arguments, launcher, run_dir=run_dir),
            seconds=result.seconds,
        )
    console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def recipe_parser(module: str, description: str) -> argparse.ArgumentParser:
    """Return a parser of a recipe and its overrides (``config_name``, ``config_dir``, ``overrides``), for intermixed arguments.

    Args:
        module: the command, as in ``python -m``.
    """
    parser = argparse.ArgumentParser(prog=f"python -m {module}", description=description)
    parser.add_argument(
        "--config-name",
        default="quickstart",
        help=f"a recipe ({', '.join(recipe_names())}) or a yaml file; default: quickstart",
    )
    parser.add_argument("--config-dir", help="a folder with recipes of your own")
    parser.add_argument("overrides", nargs="*", help="settings as key=value")
    return parser


def print_error(error: SkyRLError) -> None:
    """Print an error and its notes to standard error."""
    text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
    Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)


def exit_code(error: SkyRLError) -> int:
    """Return 2 for a wrong setting or input, else 1."""
    return 2 if isinstance(error, ConfigError | DataError | ModelError) else 1


if __name__ == "__main__":
    sys.exit(main())
