"""``skyrl-train watch``: a run in the terminal. It only reads; runs that train, have ended, or were copied look alike."""

from __future__ import annotations

import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Annotated

import typer

POLL_S = 1.0


def watch(
    run: Annotated[Path, typer.Argument(help="A run, or a folder of runs: the one written last.")] = Path("runs"),
    once: Annotated[bool, typer.Option("--once", help="Print the present state and leave.")] = False,
) -> int:
    """Show a run in the terminal: its panel, timeline, samples, failures, settings and logs. q leaves, and the run continues."""
    from rich.console import Console

    from skyrl_train.observability.readers.panel import WatchedRun
    from skyrl_train.observability.screen import make_view

    watched, console = WatchedRun(run), Console()
    if console.is_terminal and not console.is_dumb_terminal and not once:
        from skyrl_train.observability.screens import RunScreens

        RunScreens(watched, POLL_S).run()
    else:
        total, rewards = watched.total_steps, watched.rewards
        view = make_view(console, total, watched.title, clock=watched.elapsed_s, rewards=rewards)
        said: list[str] = []
        with closing(view), suppress(KeyboardInterrupt):
            while True:
                report = watched.poll()
                for line in watched.start_up:
                    if line not in said:
                        view.note(line)
                said = watched.start_up
                if report is not None:
                    view.update(report)
                view.waiting(watched.in_flight, watched.failures, watched.oldest_s)
                if once or watched.has_ended:
                    break
                time.sleep(POLL_S)
    ended = f"{watched.title}: {watched.header['state']}, step {watched.header['step']}"
    console.print(ended, markup=False, highlight=False, soft_wrap=True)
    return 0
