"""``skyrl-train compare``: which of several runs is better, and how they differ. It only reads the runs."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Annotated, Any, Literal

import typer

from skyrl_train.errors import ConfigError, SkyRLError

WIDTH = 120  # columns of the tables where there is no terminal
AXES = {"step": "step", "time": "elapsed", "tokens": "tokens"}  # choice of --by: axis of a comparison


def compare(
    runs: Annotated[list[Path], typer.Argument(help="Runs, or folders of runs.")],
    by: Annotated[
        Literal["step", "time", "tokens"],
        typer.Option(help="Compare the runs after equal steps, times or sampled tokens; also the axis of the curves."),
    ] = "step",
    output: Annotated[Path, typer.Option(help="The HTML file with curves.")] = Path("compare.html"),
    show: Annotated[bool, typer.Option("--open", help="Open it in a browser.")] = False,
) -> int:
    """Compare the rewards of runs at equal steps, time and tokens, their speed, and their settings."""
    import webbrowser

    from rich.console import Console
    from rich.table import Table

    from skyrl_train.observability.readers.comparison import RESAMPLES, best_run
    from skyrl_train.observability.readers.folders import RunsFolder, no_such_run
    from skyrl_train.observability.report.compare import compare_runs, comparison_html
    from skyrl_train.observability.report.sections import number, setting_text, shown
    from skyrl_train.observability.run_folder import replace_file
    from skyrl_train.observability.screen import duration, visible

    folders = [RunsFolder(path) for path in runs]
    names_of = [sorted(folder.names()) for folder in folders]
    if missing := [folder.root for folder, names in zip(folders, names_of, strict=True) if not names]:
        raise no_such_run(*missing)
    paths = [folder.path(name) for folder, names in zip(folders, names_of, strict=True) for name in names]
    if len(paths) < 2:
        raise ConfigError(f"A comparison needs two runs; found: {paths[0]}.")
    comparison = compare_runs(paths)
    names = [visible(name) for name in comparison.names]

    def reward(at: dict[str, Any]) -> str:
        low, high = at.get("low", math.nan), at.get("high", math.nan)
        return number(at.get("reward")) + (f"\n{number(low)} to {number(high)}" if math.isfinite(low) else "")

    titles = {
        "step": lambda budget: f"{number(budget)} steps",
        "elapsed": duration,
        "tokens": lambda budget: f"{number(budget)} tokens",
    }
    chosen = AXES[by]
    axes = [chosen, *(axis for axis in titles if axis != chosen)]
    figures = Table(box=None, pad_edge=False)
    figures.add_column("run", overflow="fold")
    for header in (
        *(f"reward at\n{titles[axis](comparison.at[axis]['budget'])}" for axis in axes),
        "a step\ntakes", "sampled\ntokens/s", "slots\nidle", "lag", f"{'steps' if by == 'step' else by}\nin all",
    ):  # fmt: skip
        figures.add_column(header, justify="right", no_wrap=True)
    budgets = [comparison.at[axis]["runs"] for axis in axes]
    for name, *at, reached in zip(names, *budgets, comparison.at[chosen]["reached"], strict=True):
        numbers = [
            shown(at[0].get("step_s"), "s"),
            number(at[0].get("sampled_per_s")),
            shown(at[0].get("idle"), "share"),
        ]
        in_all = duration(reached) if by == "time" else number(reached)
        figures.add_row(name, *map(reward, at), *numbers, number(at[0].get("lag")), in_all)
    settings = Table("setting", *names, box=None, pad_edge=False)
    for row in comparison.settings:
        settings.add_row(*(visible(text) for text in (row["key"], *map(setting_text, row["values"]))))
    console = Console(markup=False, highlight=False)
    if not console.is_terminal:
        console.width = WIDTH
    console.print(figures)
    console.print(f"\n{best_run(names, comparison.at[chosen], chosen)}", soft_wrap=True)
    console.print(
        "\nRewards: means over the last tenth of the largest budget that all runs with steps have reached. Intervals: 95 %, from "
        f"{RESAMPLES} resamples of blocks of these steps, seed 0; they tell the noise of steps, not of seeds.\n"
    )
    console.print(settings if comparison.settings else "The settings are the same.")
    try:
        replace_file(output, comparison_html(comparison, chosen))
    except SkyRLError as error:
        raise ConfigError(f"{error.__cause__ or error}. Name another file with --output.") from error
    console.print(f"\n{output}", soft_wrap=True)
    if show:
        webbrowser.open(output.resolve().as_uri())
    return 0
