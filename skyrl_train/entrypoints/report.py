"""``skyrl-train report``: the report of any run. It only reads the run, except that the files go into its folder."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.errors import ConfigError, SkyRLError


def report(
    run: Annotated[Path, typer.Argument(help="A run, or a folder of runs: the one written last.")] = Path("runs"),
    output: Annotated[Path | None, typer.Option(help="The folder of the report; default: the run's folder.")] = None,
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> int:
    """Write report.html and report.md of a run, as the run does when it ends."""
    import webbrowser

    from rich.console import Console

    from skyrl_train.observability.readers.folders import RunsFolder
    from skyrl_train.observability.report.files import write_report

    runs = RunsFolder(run)
    newest = runs.path(runs.newest())
    unwritten = "The report cannot be written: {}. Name another folder with --output."
    try:
        if output is not None:
            output.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(unwritten.format(error)) from error
    try:
        path = write_report(newest, output)
    except OSError as error:
        raise ConfigError(f"The run cannot be read: {error}.") from error
    except SkyRLError as error:
        raise ConfigError(unwritten.format(error.__cause__ or error)) from error
    Console().print(str(path), markup=False, highlight=False, soft_wrap=True)
    if show:
        webbrowser.open(path.resolve().as_uri())
    return 0
