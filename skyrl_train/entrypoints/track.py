"""``skyrl-train track``: send a run to trackers afterwards. It only reads the run, except for the trackers' own files."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from skyrl_train.errors import ConfigError


def track(
    run: Annotated[Path, typer.Argument(help="A run, or a folder of runs: the one written last.")],
    trackers: Annotated[list[str], typer.Argument(help="tensorboard, wandb, mlflow, trackio, swanlab, or your own.")],
    output: Annotated[
        Path | None, typer.Option(help="A folder for the trackers' files; default: the run's logs folder.")
    ] = None,
    again: Annotated[bool, typer.Option("--again", help="Also to trackers that have the run already.")] = False,
) -> int:
    """Send the settings, metrics, samples, evaluations and the report of a run to trackers that it did not have."""
    from rich.console import Console

    from skyrl_train.observability.readers.folders import RunsFolder
    from skyrl_train.observability.run_folder import read_config, trains_now
    from skyrl_train.observability.trackers.backfill import send_run
    from skyrl_train.observability.trackers.feed import tracker_factory, tracker_folder, without_passwords

    runs = RunsFolder(run)
    path = runs.path(runs.newest())
    if trains_now(path):
        raise ConfigError(
            f"{path} trains now. Wait for its end, or stop it and continue it with trainer.trackers=[{','.join(trackers)}]."
        )
    factories = {tracker: tracker_factory(tracker) for tracker in trackers}
    folders = {tracker: tracker_folder(path if output is None else output / path.name, tracker) for tracker in trackers}
    for tracker, folder in folders.items():
        if not again and folder.is_dir() and any(folder.iterdir()):
            raise ConfigError(
                f"{folder} has files: {tracker} has this run, or a part of it. --again sends all steps once more; "
                "TensorBoard replaces them, the others have both."
            )
    try:
        config = read_config(path)
    except OSError as error:
        raise ConfigError(f"{error.filename} cannot be read: {error.strerror}.") from error
    console = Console()
    for tracker, make in factories.items():
        try:
            place = send_run(path, make(folders[tracker], config, 0))
        except (Exception, SystemExit) as error:  # a package may raise anything, and some call exit()
            reason = without_passwords(f"{type(error).__name__}: {error}")
            raise ConfigError(f"{tracker} failed: {reason}. Its files are in {folders[tracker]}.") from error
        where = without_passwords(place) or folders[tracker]
        console.print(f"{tracker}: {where}", markup=False, highlight=False, soft_wrap=True)
    return 0
