"""Writes the recorded measurements into ``docs/benchmarks.md``, and draws its figures: ``python docs/measurements.py``.

benchmarks/recorded/ ──> the parts of docs/benchmarks.md between <!-- recorded NAME --> or <!-- figures --> and <!-- end -->
                    └──> docs/images/figure_*.svg

Edit the text around these parts by hand, and nothing in them. The figures need the extra ``plot``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby
from pathlib import Path

import matplotlib
from matplotlib.axes import Axes
from matplotlib.figure import Figure

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "benchmarks.md"
IMAGES = ROOT / "docs" / "images"
PART = re.compile(r"<!-- (recorded )?(?P<name>\S+) -->\n.*?<!-- end -->", re.DOTALL)
BLUE, ORANGE, GREEN, GREY = "#0072B2", "#E69F00", "#009E73", "#999999"  # colour-blind people tell them apart


@dataclass(frozen=True)
class Record:
    """What ``benchmarks/record.py`` has kept of one run of a benchmark."""

    command: str
    date: str
    commit: str
    machine: str
    load: Sequence[float]
    output: str

    @classmethod
    def read(cls, name: str) -> Record:
        path = ROOT / "benchmarks" / "recorded" / f"{name}.json"
        return cls(**json.loads(path.read_text(encoding="utf-8")))

    def rows(self, *having: str, table: int = 0) -> list[list[str]]:
        """Return the rows of a table of the output, as texts without emphasis: those with each of some texts in a cell. A row of
        medians is none of them."""
        lines = [[cell.strip(" *`") for cell in line.split("|")[1:-1]] for line in self.output.splitlines()]
        tables = [list(block)[2:] for is_row, block in groupby(lines, key=bool) if is_row]
        return [row for row in tables[table] if row[0] != "median" and set(having) <= set(row)]

    def markdown(self) -> str:
        load = " and ".join(map(str, self.load))
        facts = f"{self.date}, commit {self.commit}, {self.machine}, load {load}"
        output = re.sub(
            r"^(?!- )(.+)\n(?=- )", r"\1\n\n", self.output.strip(), flags=re.MULTILINE
        )  # a list begins after a gap
        return f"`{self.command}`<br>{facts}.\n\n{output}"


def numbers(rows: Sequence[Sequence[str]], column: int, place: int = 0) -> list[float]:
    """Return a number of each cell of a column: the first one, or the one at another place."""
    found = [re.findall(r"-?\d[\d,]*(?:\.\d+)?", row[column]) for row in rows]
    return [float(cell[place].replace(",", "")) for cell in found]


def span(values: Sequence[float], digits: int = 2) -> str:
    return f"{min(values):.{digits}f} to {max(values):.{digits}f}"


def bars(axes: Axes, heights: Mapping[str, Sequence[float]], labels: Sequence[str], colours: Sequence[str]) -> None:
    """Draw groups of bars: one bar of each series under each label."""
    width = 0.8 / len(heights)
    for index, ((name, values), colour) in enumerate(zip(heights.items(), colours, strict=True)):
        places = [place + (index - (len(heights) - 1) / 2) * width for place in range(len(values))]
        axes.bar(places, values, width, label=name, color=colour)
    axes.set_xticks(range(len(labels)), labels)
    axes.legend(loc="upper left", bbox_to_anchor=(1, 1))


def faster_than_sync(axes: Axes) -> str:
    """Is asynchronous training faster than synchronous training, on the same two cores?"""
    rounds = Record.read("async_vs_sync").rows()
    heights = {"sync": numbers(rounds, 1), "fully_async": numbers(rounds, 2)}
    bars(axes, heights, [f"round {row[0]}" for row in rounds], (ORANGE, BLUE))
    axes.set_ylabel("seconds of all steps")
    (loses,) = numbers(Record.read("modes").rows("fully_async", table=2), 3)
    return (
        f"**{span(numbers(rounds, 4))} times**, in {len(rounds)} rounds ([table](#asynchronous-against-synchronous)). "
        f"It loses, with {loses:.2f}, where all responses are equally long and devices are few "
        "([third workload](#modes-with-long-tailed-responses-in-virtual-time))."
    )


def step_of_trl(axes: Axes) -> str:
    """How long is a step, relative to a step of TRL on the same task?"""
    record, series = Record.read("against_trl"), {"TRL": "TRL, 1 thread", "sync": "sync", "fully_async": "fully_async"}
    heights = {label: numbers(record.rows(name), 2) for label, name in series.items()}
    bars(axes, heights, [f"round {row[0]}" for row in record.rows("sync")], (GREY, ORANGE, BLUE))
    axes.set_ylabel("ms per step")
    share = {mode: span(numbers(record.rows(mode), 3)) for mode in ("sync", "fully_async")}
    reached = Record.read("time_to_reward-quickstart").rows("0.9", "fully_async")
    of_trl, of_sync = (1 / numbers(reached, column)[0] for column in (4, 5))
    return (
        f"**{share['fully_async']}** of it asynchronous, {share['sync']} synchronous ([table](#against-trl)). A lag of one step "
        f"costs more steps, so [the time to a reward](#time-to-a-reward) of 0.9 is {of_trl:.2f} of TRL's and {of_sync:.2f} of "
        "`sync`'s."
    )


def throughput_of_peers(axes: Axes) -> str:
    """What throughput has the default schedule, relative to the fastest of SkyRL's, AReaL's and verl's at the same S?"""
    record = Record.read("against_peers")
    for regime, marker, colour in (
        ("generation-bound", "o", BLUE),
        ("balanced", "s", ORANGE),
        ("training-bound", "^", GREEN),
    ):
        cells = record.rows(regime)
        axes.plot(range(len(cells)), numbers(cells, 7), marker, color=colour, label=regime)
        axes.plot(range(len(cells)), numbers(cells, 10), marker, color=colour, fillstyle="none")
    axes.plot([], [], "o", color=GREY, fillstyle="none", label="hollow: at most S steps old")
    axes.axhline(1, color=GREY, linewidth=1, zorder=0)
    labels = [f"S = {row[2]}\ntail {row[0]}" for row in record.rows("balanced")]
    axes.set_xticks(range(len(labels)), labels, fontsize=7)
    axes.set_ylabel("of the fastest peer's")
    axes.legend()
    every, lags, fresh, masked = (numbers(record.rows(), column) for column in (7, 8, 10, 11))
    return (
        f"**{span(every, 3)}** of its trained tokens, and **{span(fresh, 3)}** of those that are at most S steps old, in "
        f"{len(every)} cells ([table](#compared-with-the-schedules-of-skyrl-areal-and-verl)). Where it is faster, its lag is up "
        f"to {max(lags):.2f} times theirs. `mask`, the default, trains no older tokens, which theirs do: that leaves "
        f"{span(masked)} of the tokens of the fastest."
    )


def cost_of_a_request(axes: Axes) -> str:
    """What does a request to a remote vLLM cost the control process, relative to SkyRL's client?"""
    cells = Record.read("remote_wire").rows()
    labels = [f"{row[0]} in flight\n{row[1]} tokens" for row in cells]
    bars(axes, {"ours": numbers(cells, 2), "SkyRL": numbers(cells, 2, 1)}, labels, (BLUE, GREY))
    axes.tick_params(axis="x", labelsize=7)
    axes.set_ylabel("ms of processor time")
    return (
        f"**{span(numbers(cells, 3))}** of its processor time and {span(numbers(cells, 5))} of its memory "
        "([table](#the-client-of-a-remote-vllm-server))."
    )


def speed_of_engines(axes: Axes) -> str:
    """How fast are the engines?"""
    same = {
        "both hide log-probs": Record.read("endpoint_vs_vllm-hidden_logprobs").rows(),
        "both show log-probs": Record.read("endpoint_vs_vllm-logprobs").rows(),
    }
    without, embedded = Record.read("endpoint_vs_vllm").rows(), Record.read("embedded_engine").rows()
    ratios = {
        f"endpoint, {row[0]}: {label}": numbers([row], 2)[0]
        for label, rows in (same | {"vLLM has no log-probs": without}).items()
        for row in rows
    } | {f"embedded engine, {row[0]} in flight": numbers([row], 3)[0] for row in embedded}
    axes.barh(list(ratios), list(ratios.values()), color=[BLUE if name[:3] == "end" else ORANGE for name in ratios])
    axes.axvline(1, color=GREY, linewidth=1)
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize=7)
    axes.set_xlabel("tokens per second, over vLLM's own server or transformers' generate")
    equal = [ratio for rows in same.values() for ratio in numbers(rows, 2)]
    return (
        f"The endpoint has **{span(equal)}** of the tokens per second of vLLM's own server, and {span(numbers(without, 2))} "
        "if that computes no log-probs ([tables](#the-endpoint-against-vllms-own-server)). The embedded engine has "
        f"**{span(numbers(embedded, 3))}** of those of transformers' `generate` "
        "([table](#the-embedded-engine-against-transformers))."
    )


FIGURES: tuple[Callable[[Axes], str], ...] = (
    faster_than_sync,
    step_of_trl,
    throughput_of_peers,
    cost_of_a_request,
    speed_of_engines,
)


def figure(draw: Callable[[Axes], str]) -> tuple[Figure, str]:
    """Return a figure and its text: question, answer and picture."""
    drawn = Figure(figsize=(8, 2.8), layout="constrained")
    answer = draw(drawn.subplots())
    text = f"**{draw.__doc__}**\n{answer}\n\n![{draw.__doc__}](images/figure_{draw.__name__}.svg)"
    return drawn, text


def filled(page: str) -> str:
    """Return the page with its generated parts as the records have them."""

    def part(found: re.Match[str]) -> str:
        text = Record.read(found["name"]).markdown() if found[1] else "\n\n".join(figure(draw)[1] for draw in FIGURES)
        return f"{found[0].splitlines()[0]}\n{text}\n<!-- end -->"

    return PART.sub(part, page)


if __name__ == "__main__":
    PAGE.write_text(filled(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
    matplotlib.rcParams["svg.hashsalt"] = "measurements"  # the same records give the same files
    for draw in FIGURES:
        figure(draw)[0].savefig(IMAGES / f"figure_{draw.__name__}.svg", metadata={"Date": None})
