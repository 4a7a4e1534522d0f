"""``skyrl-train simulate``: speed, staleness and idle time of every mode, in virtual time, before a run or after one."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from skyrl_train.errors import ConfigError, SkyRLError

if TYPE_CHECKING:
    from rich.console import Console
    from rich.table import Table

    from skyrl_train.simulation.measured import MeasuredRun
    from skyrl_train.simulation.run import Outcome
    from skyrl_train.simulation.what_if import Scenario, Setup

WIDTH = 120  # columns of the tables where there is no terminal
POLICIES = ("mask", "accept", "wait", "drop")
BOUNDS = (1, 2, 4, 8)
DEPTHS = (1.0, None)  # None: it adapts
WORK, DEVICES, FAULTS = "The work", "The devices", "Faults of engines, in seconds of the simulation"


def simulate(
    run: Annotated[
        Path | None, typer.Argument(help="A run: its work and its devices take the place of the defaults below.")
    ] = None,
    groups: Annotated[
        int | None, typer.Option(min=1, help="Prompts of a training step; default: 16.", rich_help_panel=WORK)
    ] = None,
    samples: Annotated[
        int | None, typer.Option(min=1, help="Responses to each prompt; default: 8.", rich_help_panel=WORK)
    ] = None,
    median: Annotated[
        float | None,
        typer.Option(min=1, help="Tokens of the median response (log-normal); default: 500.", rich_help_panel=WORK),
    ] = None,
    tail: Annotated[
        float | None,
        typer.Option(min=1, help="The longest response over the mean one; default: 8.", rich_help_panel=WORK),
    ] = None,
    devices: Annotated[
        int | None, typer.Option(min=1, help="Devices, to generate or to train; default: 8.", rich_help_panel=DEVICES)
    ] = None,
    slots: Annotated[
        int | None,
        typer.Option(min=2, help="Requests that an engine decodes at once; default: 64.", rich_help_panel=DEVICES),
    ] = None,
    alone: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Tokens/s of an engine with one request; default: 60.", rich_help_panel=DEVICES),
    ] = None,
    full: Annotated[
        float | None,
        typer.Option(
            min=1e-6, help="Tokens/s of an engine with all slots in use; default: 2000.", rich_help_panel=DEVICES
        ),
    ] = None,
    train: Annotated[
        float | None,
        typer.Option(min=1e-6, help="Tokens/s that a device trains; default: 8000.", rich_help_panel=DEVICES),
    ] = None,
    sync_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds in which engines receive new weights while they serve; default: 2.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    pause_s: Annotated[
        float | None,
        typer.Option(
            min=0, help="Seconds for which engines pause to load them; default: 0.2.", rich_help_panel=DEVICES
        ),
    ] = None,
    switch_s: Annotated[
        float | None,
        typer.Option(
            min=0,
            help="Seconds to give all devices to training and back, in modes that use them in turns; default: 10.",
            rich_help_panel=DEVICES,
        ),
    ] = None,
    die_every: Annotated[
        float | None, typer.Option(min=1e-3, help="Mean time between deaths of an engine.", rich_help_panel=FAULTS)
    ] = None,
    restart_s: Annotated[
        float, typer.Option(min=0, help="Time that a dead engine needs to start again.", rich_help_panel=FAULTS)
    ] = 60.0,
    slow_every: Annotated[
        float | None,
        typer.Option(min=1e-3, help="Mean time between slow periods of an engine.", rich_help_panel=FAULTS),
    ] = None,
    slow_for: Annotated[float, typer.Option(min=0, help="Length of a slow period.", rich_help_panel=FAULTS)] = 60.0,
    slow_by: Annotated[
        float, typer.Option(min=1, help="Factor by which a slow engine is slower.", rich_help_panel=FAULTS)
    ] = 3.0,
    bound: Annotated[
        int | None, typer.Option("--max-staleness-steps", min=1, help="S of the first table; default: 4.")
    ] = None,
    steps: Annotated[
        int,
        typer.Option(
            min=8, help="Steps to simulate; of a run, the last ones. The first and the last quarter do not count."
        ),
    ] = 20,
    seed: Annotated[int, typer.Option(min=0, help="Of the lengths and the faults.")] = 0,
    plot: Annotated[Path | None, typer.Option(help="Draw both tables into a file (.png, .svg or .pdf).")] = None,
) -> int:
    """Compare the modes in virtual time, before a run or after one: speed, staleness, idle time; the best split, S and depth.

    The real trainers and rules run on modelled engines: a device works at the speed that you state, or that a run has recorded.
    """
    import logging
    import math
    from dataclasses import replace

    import numpy as np
    from rich.console import Console

    from skyrl_train.simulation.engine import EngineSpeed
    from skyrl_train.simulation.faults import NEVER, Faults
    from skyrl_train.simulation.lengths import constant, log_normal
    from skyrl_train.simulation.measured import measure_run
    from skyrl_train.simulation.run import Workload
    from skyrl_train.simulation.training import TrainingSpeed
    from skyrl_train.simulation.what_if import Scenario, Setup, coarsened, recommended

    numbers = (
        median, tail, alone, full, train, sync_s, pause_s, switch_s, die_every, restart_s, slow_every, slow_for, slow_by,
    )  # fmt: skip
    if not all(number is None or math.isfinite(number) for number in numbers):
        raise ConfigError("The options take finite numbers.")
    if plot is not None:
        check_plot(plot)
    console = Console(markup=False, highlight=False, soft_wrap=True)
    if not console.is_terminal:
        console.width = WIDTH

    # The work and the devices: options, then the run's, then defaults.
    measured = None if run is None else measure_run(run, steps)
    if measured is None:
        work = Workload(
            lengths=constant(1, 1),
            batch_groups=16,
            steps=steps,
            engine=EngineSpeed(slots=64, step_s=0.0, transfer_s=2.0, load_s=0.2),
            training=TrainingSpeed(per_token_s=1 / 8000),
            samples=8,
        )
        alone, full, median, tail = alone or 60.0, full or 2000.0, median or 500.0, tail or 8.0
        devices, switch_s = devices or 8, 10.0 if switch_s is None else switch_s
    else:
        work = measured.workload
        devices = devices or measured.devices
        switch_s = measured.switch_s if switch_s is None else switch_s
        bound = bound or measured.bound
    bound = bound or 4
    each = 1 if measured is None else measured.engine_devices
    if devices < each:
        raise ConfigError(f"An engine of this run has {each} devices. Set --devices={each} or more.")
    if devices == each and switch_s is None:
        raise ConfigError(
            f"{'One device generates and trains' if each == 1 else f'{each} devices generate and train'} in turns: give the "
            "seconds of a turn's change with --switch-s."
        )
    work = replace(work, batch_groups=groups or work.batch_groups, samples=samples or work.samples)
    if median is not None or tail is not None:
        count, lengths = work.batch_groups * work.samples * work.steps, work.lengths
        shape = log_normal(count, 1e6, tail or lengths.tail, seed)
        mean = (median or float(np.median(lengths.values))) * shape.mean / float(np.median(shape.values))
        work = replace(work, lengths=log_normal(count, mean, tail or lengths.tail, seed), turns=None)
    engine = replace(work.engine, slots=slots or work.engine.slots)
    if alone is not None or full is not None:
        alone = alone or engine.steps_per_s(1)
        full = full or engine.slots * engine.steps_per_s(engine.slots)
        if not alone <= full <= engine.slots * alone:
            raise ConfigError(
                f"An engine with {engine.slots} requests makes as many tokens as with one, up to {engine.slots} times as many: "
                f"--alone {alone:g} and --full {full:g} do not fit together."
            )
        per_request_s = (engine.slots / full - 1 / alone) / max(1, engine.slots - 1)
        engine = replace(engine, step_s=max(0.0, 1 / alone - per_request_s), step_per_request_s=per_request_s)
    engine = replace(
        engine,
        transfer_s=engine.transfer_s if sync_s is None else sync_s,
        load_s=engine.load_s if pause_s is None else pause_s,
        restart_s=restart_s,
    )
    training, trainers = work.training, 1 if measured is None else measured.trainers
    if train is not None:
        training, trainers = replace(training, per_token_s=1 / train), 1
    faults = None
    if die_every is not None or slow_every is not None:
        faults = Faults(die_every or NEVER, slow_every or NEVER, slow_for, slow_by, seed)
    work, unit = coarsened(replace(work, engine=engine, training=training, faults=faults))
    scenario = Scenario(work, trainers, devices, switch_s, each)
    describe(console, scenario, unit, measured)

    logging.disable(logging.ERROR)  # of the modelled engines' deaths
    try:
        with console.status("simulating"):
            rows: dict[Setup, Outcome | SkyRLError] = {}
            plane: dict[Setup, Outcome | SkyRLError] = {}
            for mode in ("sync", "partial_rollout"):
                setup, outcome = scenario.fastest(scenario.splits(Setup(mode, bound=bound)))
                rows[setup] = outcome
            if scenario.most_engines:
                setup, outcome = scenario.fastest(scenario.splits(Setup("one_step_off")))
                rows[setup] = outcome
                setup, outcome = scenario.fastest(scenario.splits(Setup("fully_async", bound=bound)))
                rows[setup] = outcome
                # The others on the best split of the default policy.
                others = [replace(setup, policy=policy) for policy in POLICIES[1:]]
                others.append(replace(setup, streaming=max(1, work.batch_groups // 4)))
                rows |= {other: scenario.simulate(other) for other in others}
                for s in sorted({*BOUNDS, bound}):
                    for d in (d for d in DEPTHS if d is None or d <= s):
                        point = replace(setup, bound=s, depth=d)
                        plane[point] = rows[point] if point in rows else scenario.simulate(point)
    finally:
        logging.disable(logging.NOTSET)
    console.print(mode_table(rows, unit))
    if plane:
        console.print()
        console.print(bound_table(plane, unit))
    results = {**rows, **plane}
    if (best := recommended(results)) is not None:
        console.print(f"\nBest: {described(best)}")
        console.print(
            "(the freshest of those within 2 % of the most trained tokens/s; accept is left out, because it keeps no bound)"
        )
        console.print(" ".join(f"{name}={value}" for name, value in best.settings.items()))
    for setup, outcome in results.items():
        if isinstance(outcome, SkyRLError):
            console.print(f"\n{name_of(setup)}, {split_of(setup)}, stops: {outcome}")
    if plot is not None:
        draw(plot, rows, plane, unit)
        console.print(f"\n{plot}")
    return 0


def describe(console: Console, scenario: Scenario, unit: float, measured: MeasuredRun | None) -> None:
    """Print the work and the devices, and how well a measured run is reproduced."""
    import numpy as np

    from skyrl_train.observability.report.sections import number
    from skyrl_train.simulation.run import simulate
    from skyrl_train.simulation.what_if import coarsened

    work = scenario.workload
    lengths, engine, training = work.lengths.values * unit, work.engine, work.training
    median, mean, longest = map(number, (float(np.median(lengths)), float(lengths.mean()), float(lengths.max())))
    rates = [number(unit * n * engine.steps_per_s(n)) for n in (1, engine.slots)]
    per_device = training.per_token_s * scenario.trainers
    per_step = f"{number(training.per_step_s)} s for each step"
    if per_device == 0.0:
        speed = f"{per_step}, on any number of devices"
    else:
        speed = f"{number(unit / per_device)} tokens/s on each device"
        speed += f", and {per_step}" if training.per_step_s else ""
    console.print(
        f"work      {work.batch_groups} prompts x {work.samples} responses a step; tokens of a response: median {median}, "
        f"mean {mean}, longest {longest}\n"
        f"engines   {rates[0]} tokens/s with one request, {rates[1]} with {engine.slots}; new weights arrive in "
        f"{number(engine.transfer_s)} s, and pause an engine for {number(engine.load_s)} s\n"
        f"training  {speed}\n"
        f"devices   {scenario.devices}"
        f"{f', of which an engine has {scenario.engine_devices}' if scenario.engine_devices > 1 else ''}"
    )
    if scenario.switch_s is not None:
        console.print(f"          in turns: {number(scenario.switch_s)} s to give all of them to training and back")
    if (faults := work.faults) is not None:
        console.print(
            f"faults    an engine dies every {number(faults.die_every_s)} s and restarts in {number(engine.restart_s)} s; it is "
            f"{number(faults.slow_by)} times slower for {number(faults.slow_for_s)} s every {number(faults.slow_every_s)} s"
        )
    if measured is not None:
        own, unit = coarsened(measured.workload)
        outcome = simulate(own, *measured.settings, "rollout.replay=false", edge=measured.edge)
        console.print(
            f"check     the run took {number(measured.step_s)} s a step, with a mean lag of {number(measured.mean_lag)}; "
            f"simulated with its own settings: {number(outcome.step_s)} s ({outcome.step_s / measured.step_s - 1:+.0%}), and "
            f"{number(outcome.mean_lag)}"
        )
    console.print()


def split_of(setup: Setup) -> str:
    """Return the devices of a setup in words."""
    engines = str(setup.engines) if setup.engine_devices == 1 else f"{setup.engines} x {setup.engine_devices}"
    return f"{engines} in turns" if setup.trainers is None else f"{engines} + {setup.trainers}"


def name_of(setup: Setup) -> str:
    """Return the mode of a setup, with its staleness policy if the mode has one."""
    policy = f", {setup.policy}" if setup.mode in ("fully_async", "partial_rollout") else ""
    return setup.mode + policy + (", streaming" if setup.streaming is not None else "")


def described(setup: Setup) -> str:
    """Return a setup in words, with S if the mode has that setting."""
    bound = f", S = {setup.bound}" if setup.mode in ("fully_async", "partial_rollout") else ""
    return f"{name_of(setup)}, {split_of(setup)} devices{bound}"


def mode_table(rows: Mapping[Setup, Outcome | SkyRLError], unit: float) -> Table:
    """Return the comparison of modes and staleness policies."""
    from rich.table import Table

    from skyrl_train.observability.report.sections import number
    from skyrl_train.simulation.run import Outcome

    table = Table(box=None, pad_edge=False)
    table.add_column("mode, staleness policy", no_wrap=True)
    for header in (
        "engines +\ntraining", "a step\ntakes", "samples/s", "trained\ntokens/s", "lag:\nmean", "\np90",
        "\nmax trained", "masked\ntokens", "engines\nidle", "training\nidle",
    ):  # fmt: skip
        table.add_column(header, justify="right", no_wrap=True)
    for setup, outcome in rows.items():
        if not isinstance(outcome, Outcome):
            table.add_row(name_of(setup), split_of(setup), "stops", *[""] * 8)
            continue
        table.add_row(
            name_of(setup), split_of(setup), f"{number(outcome.step_s)} s", number(outcome.samples_per_s),
            number(outcome.trained_tokens_per_s * unit), f"{outcome.mean_lag:.1f}", str(outcome.lag_quantile(0.9)),
            str(outcome.max_trained_lag), f"{outcome.masked_share:.0%}", f"{outcome.engines_idle:.0%}",
            f"{outcome.training_idle:.0%}",
        )  # fmt: skip
    return table


def bound_table(plane: Mapping[Setup, Outcome | SkyRLError], unit: float) -> Table:
    """Return tokens per second, mean lag and masked tokens over S and D."""
    from rich.table import Table

    from skyrl_train.observability.report.sections import number
    from skyrl_train.simulation.run import Outcome

    first = next(iter(plane))
    title = f"{name_of(first)}, {split_of(first)} devices: trained tokens/s, mean lag, masked tokens"
    table = Table("S", title=title, title_justify="left", title_style="", box=None, pad_edge=False)
    for depth in DEPTHS:
        table.add_column("D adapts" if depth is None else f"D = {depth:g}", justify="right", no_wrap=True)
    for bound in sorted({setup.bound for setup in plane}):
        cells = {setup.depth: outcome for setup, outcome in plane.items() if setup.bound == bound}
        table.add_row(
            str(bound),
            *(
                f"{number(outcome.trained_tokens_per_s * unit)}, {outcome.mean_lag:.1f}, {outcome.masked_share:.0%}"
                if isinstance(outcome := cells.get(depth), Outcome)
                else "stops"
                if depth in cells
                else ""
                for depth in DEPTHS
            ),
        )
    return table


def check_plot(path: Path) -> None:
    """Check that a picture can be drawn, before the work that it shows.

    Raises:
        ConfigError: matplotlib is missing or does not know the format.
    """
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise ConfigError("--plot needs matplotlib: install the extra `plot` (./uvw run --extra plot ...).") from error
    formats = Figure().canvas.get_supported_filetypes()
    if path.suffix.removeprefix(".") not in formats:
        raise ConfigError(f"--plot {path}: the file's ending names its format, one of {', '.join(sorted(formats))}.")


def draw(
    path: Path, rows: Mapping[Setup, Outcome | SkyRLError], plane: Mapping[Setup, Outcome | SkyRLError], unit: float
) -> None:
    """Draw the modes as bars, and tokens per second over lag for each S and D.

    Raises:
        ConfigError: the file cannot be written.
    """
    from matplotlib.figure import Figure

    from skyrl_train.simulation.run import Outcome

    figure = Figure(figsize=(11, 4.2), layout="constrained")
    bars, lines = figure.subplots(1, 2)
    outcomes = {setup: outcome for setup, outcome in rows.items() if isinstance(outcome, Outcome)}
    labels = [f"{name_of(setup)}\n{split_of(setup)}" for setup in outcomes]
    drawn = bars.barh(labels, [outcome.trained_tokens_per_s * unit for outcome in outcomes.values()], color="tab:blue")
    bars.bar_label(drawn, [f"lag {outcome.mean_lag:.1f}" for outcome in outcomes.values()], padding=3)
    bars.invert_yaxis()
    bars.margins(x=0.2)
    bars.set(xlabel="trained tokens/s", title="modes and staleness policies")
    for depth in DEPTHS:
        points = [
            (outcome.mean_lag, outcome.trained_tokens_per_s * unit, setup.bound)
            for setup, outcome in plane.items()
            if setup.depth == depth and isinstance(outcome, Outcome)
        ]
        lines.plot(
            [lag for lag, _, _ in points],
            [rate for _, rate, _ in points],
            marker="o",
            label="D adapts" if depth is None else f"D = {depth:g}",
        )
        for lag, rate, bound in points if depth is None else ():
            lines.annotate(f"S = {bound}", (lag, rate), xytext=(4, -10), textcoords="offset points", fontsize=8)
    lines.set(xlabel="mean lag (steps)", ylabel="trained tokens/s", title="fully_async, mask: bound and depth")
    lines.margins(x=0.1)  # room for the label of the last point
    lines.set_ylim(bottom=0)
    lines.grid(alpha=0.3)
    if plane:
        lines.legend(loc="lower right")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        figure.savefig(path)
    except OSError as error:
        raise ConfigError(f"The picture cannot be written: {error}. Name another file with --plot.") from error
