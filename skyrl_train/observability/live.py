"""What a run looks like while it trains: a panel in a terminal, a line now and then everywhere else.

trainer ──StepReport──> View ──> TerminalView (rich, redrawn in place)  |  PlainView (lines, for files and pipes)
"""

from __future__ import annotations

import math
import time
from abc import ABC, abstractmethod
from collections.abc import Callable
from dataclasses import dataclass

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skyrl_train.observability.sparkline import ASCII, BLOCKS, sparkline

Clock = Callable[[], float]

REFRESH_INTERVAL_S = 0.1
PLAIN_INTERVAL_S = 5.0


@dataclass(frozen=True, slots=True)
class StepReport:
    """What the screen shows of one step. Rates are per second of wall-clock time; fractions are in [0, 1]."""

    step: int
    reward: float  # mean return of the step's samples
    lag_mean: float = 0.0  # steps
    lag_max: int = 0
    in_flight: int = 0  # groups
    buffered: int = 0  # groups
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    wait_for_batch: float = 0.0  # share of the step that training waited for groups
    wait_for_policy: float = 0.0  # share of the step that generation waited for the next policy
    checkpoint_step: int | None = None  # the newest checkpoint on disk


class View(ABC):
    """Shows the progress of one run."""

    @abstractmethod
    def update(self, report: StepReport) -> None:
        """Shows a finished step."""

    @abstractmethod
    def note(self, text: str) -> None:
        """Shows a line that stays: a resume, a checkpoint, a warning."""

    @abstractmethod
    def close(self) -> None:
        """Leaves the last state on the screen. Idempotent."""


def make_view(
    console: Console, total_steps: int, title: str, *, start_step: int = 0, clock: Clock = time.monotonic
) -> View:
    """A panel where ``console`` is a terminal, plain lines elsewhere.

    Args:
        title: run name and mode.
        start_step: the step that the run resumes from; the time to go is estimated from the steps after it.
    """
    progress = Progress(total_steps, start_step, clock)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(console, title, progress, clock)
    return PlainView(console, title, progress, clock)


class Progress:
    """Steps done, the curve of the rewards, and how long the rest takes at the pace since the start."""

    def __init__(self, total_steps: int, start_step: int, clock: Clock) -> None:
        self.total_steps = total_steps
        self.rewards: list[float] = []
        self._start_step = start_step
        self._clock = clock
        self._started = clock()
        self._latest_at = self._started
        self._step = start_step

    def update(self, report: StepReport) -> None:
        """Takes a finished step."""
        self._step, self._latest_at = report.step, self._clock()
        self.rewards.append(report.reward)

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of this process's part of the run."""
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds to go; infinite before the first step."""
        done = self._step - self._start_step
        if done < 1:
            return math.inf
        return max(0, self.total_steps - self._step) * (self._latest_at - self._started) / done


class PlainView(View):
    """One line for the first and the last step and every few seconds between them."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        self._progress = progress
        self._clock = clock
        self._next_at = -math.inf
        self._unshown: StepReport | None = None
        self.note(f"{title}: {progress.total_steps} steps")

    def update(self, report: StepReport) -> None:
        """Prints the step if enough time has passed."""
        self._progress.update(report)
        self._unshown = report
        if self._clock() >= self._next_at or report.step >= self._progress.total_steps:
            self._show(report)

    def note(self, text: str) -> None:
        """Prints the line."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Prints the last step if it was not yet."""
        if self._unshown is not None:
            self._show(self._unshown)

    def _show(self, report: StepReport) -> None:
        self._next_at = self._clock() + PLAIN_INTERVAL_S
        self._unshown = None
        self.note(plain_line(report, self._progress.total_steps, self._progress.remaining_s))


class TerminalView(View):
    """A panel that is redrawn in place, at most ten times a second and only when a step has finished."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        self._title = title
        self._progress = progress
        self._clock = clock
        self._levels = BLOCKS if (console.encoding or "").lower().startswith("utf") else ASCII
        self._next_at = -math.inf
        self._report: StepReport | None = None
        # No thread of its own: it would take time from the training that it shows.
        self._live = Live(self._panel(), console=console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)

    def update(self, report: StepReport) -> None:
        """Redraws, unless it did a moment ago."""
        self._progress.update(report)
        self._report = report
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + REFRESH_INTERVAL_S
            self._live.update(self._panel(), refresh=True)

    def note(self, text: str) -> None:
        """Prints the line above the panel."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draws the last state and leaves it."""
        if self._live.is_started:
            self._live.update(self._panel(), refresh=True)
            self._live.stop()

    def _panel(self) -> RenderableType:
        report, progress = self._report, self._progress
        step = 0 if report is None else report.step
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(no_wrap=True)
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_row(
            f"step {step}/{progress.total_steps}",
            ProgressBar(total=progress.total_steps, completed=step),
            f"{duration(progress.elapsed_s)} gone, {duration(progress.remaining_s)} to go",
        )
        if report is None:
            return Panel(Group(top, Text("starting ...")), title=Text(self._title), title_align="left")
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold", no_wrap=True)
        facts.add_column()
        curve = sparkline(progress.rewards, 40, self._levels)
        facts.add_row("reward", Text.assemble(f"{report.reward:.3f}  ", (curve, "green")))
        for name, value in _facts(report):
            facts.add_row(name, value)
        return Panel(Group(top, facts), title=Text(self._title), title_align="left")


def plain_line(report: StepReport, total_steps: int, remaining_s: float) -> str:
    """One step in one line."""
    facts = "  ".join(f"{name} {value}" for name, value in _facts(report))
    return f"step {report.step}/{total_steps}  reward {report.reward:.3f}  {facts}  to go {duration(remaining_s)}"


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``; ``-:--`` where it is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _facts(report: StepReport) -> list[tuple[str, str]]:
    saved = "none yet" if report.checkpoint_step is None else f"step {report.checkpoint_step}"
    return [
        ("lag", f"{report.lag_mean:.1f} (max {report.lag_max})"),
        ("groups", f"{report.in_flight} in flight, {report.buffered} buffered"),
        ("tokens/s", f"{_rate(report.generated_tokens_per_s)} generated, {_rate(report.trained_tokens_per_s)} trained"),
        (
            "waiting",
            f"trainer {report.wait_for_batch:.0%} for groups, generation {report.wait_for_policy:.0%} for a policy",
        ),
        ("checkpoint", saved),
    ]


def _rate(per_second: float) -> str:
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"
