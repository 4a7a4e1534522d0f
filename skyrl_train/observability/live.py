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
WAITING_INTERVAL_S = 1.0  # how often the panel is redrawn while no step finishes
PLAIN_INTERVAL_S = 5.0
PLAIN_INTERVAL_MAX_S = 30.0
PLAIN_SHARE = 0.1  # the next line comes when the run has grown older by this share, within the two bounds above
REASON_WIDTH = 160  # characters


@dataclass(frozen=True, slots=True)
class Failures:
    """What went wrong so far, of the whole run."""

    groups: int = 0  # that failed for good
    allowed: int = 0  # before the run stops
    retries: int = 0
    last_reason: str = ""

    def __bool__(self) -> bool:
        return self.groups > 0 or self.retries > 0

    def __str__(self) -> str:
        last = f" (last: {shortened(self.last_reason)})" if self.last_reason else ""
        return f"{self.groups} of {self.allowed} groups, {counted(self.retries, 'retry', 'retries')}{last}"


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
    failures: Failures = Failures()


class View(ABC):
    """Shows the progress of one run."""

    @abstractmethod
    def update(self, report: StepReport) -> None:
        """Shows a finished step."""

    @abstractmethod
    def waiting(self, in_flight: int, failures: Failures) -> None:
        """Called every second or so, whether steps finish or not: what a run that finishes none is busy with.

        Args:
            in_flight: groups that are being generated.
        """

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
        self.step = start_step

    def update(self, report: StepReport) -> None:
        """Takes a finished step."""
        self.step, self._latest_at = report.step, self._clock()
        self.rewards.append(report.reward)

    @property
    def standing(self) -> str:
        """How far it is while no step finishes."""
        return "no step yet" if self.step == self._start_step else f"no step since step {self.step}"

    @property
    def elapsed_s(self) -> float:
        """Seconds since the start of this process's part of the run."""
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float:
        """Seconds to go; infinite before the first step."""
        done = self.step - self._start_step
        if done < 1:
            return math.inf
        return max(0, self.total_steps - self.step) * (self._latest_at - self._started) / done


class PlainView(View):
    """One line for the first and the last step, and now and then between them: the older the run, the fewer."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        self._progress = progress
        self._clock = clock
        self._next_at = -math.inf  # of a step
        self._alive_at = clock() + PLAIN_INTERVAL_S  # of a sign of life without one
        self._unshown: StepReport | None = None
        self.note(f"{title}: {progress.total_steps} {'step' if progress.total_steps == 1 else 'steps'}")

    def update(self, report: StepReport) -> None:
        """Prints the step if enough time has passed."""
        self._progress.update(report)
        self._unshown = report
        if self._clock() >= self._next_at or report.step >= self._progress.total_steps:
            self._show(report)

    def waiting(self, in_flight: int, failures: Failures) -> None:
        """Prints a line when none has been printed for a while."""
        if self._clock() < self._alive_at:
            return
        if self._unshown is not None:
            self._show(self._unshown)
            return
        self._next_at = self._alive_at = self._next_line_at()
        self.note(waiting_line(self._progress.standing, in_flight, failures))

    def note(self, text: str) -> None:
        """Prints the line."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Prints the last step if it was not yet."""
        if self._unshown is not None:
            self._show(self._unshown)

    def _show(self, report: StepReport) -> None:
        self._next_at = self._alive_at = self._next_line_at()
        self._unshown = None
        self.note(plain_line(report, self._progress.total_steps, self._progress.remaining_s))

    def _next_line_at(self) -> float:
        share = PLAIN_SHARE * self._progress.elapsed_s
        return self._clock() + min(max(share, PLAIN_INTERVAL_S), PLAIN_INTERVAL_MAX_S)


class TerminalView(View):
    """A panel that is redrawn in place: when a step has finished, at most ten times a second, and once a second without."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        self._title = title
        self._progress = progress
        self._clock = clock
        self._levels = BLOCKS if (console.encoding or "").lower().startswith("utf") else ASCII
        self._next_at = -math.inf
        self._waiting_at = -math.inf
        self._report: StepReport | None = None
        self._waiting: tuple[int, Failures] | None = None  # while no step has finished for a second
        # No thread of its own: it would take time from the training that it shows.
        self._live = Live(self._panel(), console=console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)

    def update(self, report: StepReport) -> None:
        """Redraws, unless it did a moment ago."""
        self._progress.update(report)
        self._report, self._waiting = report, None
        self._waiting_at = self._clock() + WAITING_INTERVAL_S
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + REFRESH_INTERVAL_S
            self._live.update(self._panel(), refresh=True)

    def waiting(self, in_flight: int, failures: Failures) -> None:
        """Redraws when no step has been drawn for a second."""
        if self._clock() >= self._waiting_at:
            self._waiting = (in_flight, failures)
            self._waiting_at = self._clock() + WAITING_INTERVAL_S
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
        step = progress.step
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
            text = "starting ..." if self._waiting is None else waiting_line(progress.standing, *self._waiting)
            return Panel(Group(top, Text(text)), title=Text(self._title), title_align="left")
        facts = Table.grid(padding=(0, 2))
        facts.add_column(style="bold", no_wrap=True)
        facts.add_column()
        curve = sparkline(progress.rewards, 40, self._levels)
        facts.add_row("reward", Text.assemble(f"{report.reward:.3f}  ", (curve, "green")))
        for name, value in _facts(report, self._waiting):
            facts.add_row(name, Text(value))
        return Panel(Group(top, facts), title=Text(self._title), title_align="left")


def plain_line(report: StepReport, total_steps: int, remaining_s: float) -> str:
    """One step in one line."""
    facts = "  ".join(f"{name} {value}" for name, value in _facts(report))
    return f"step {report.step}/{total_steps}  reward {report.reward:.3f}  {facts}  to go {duration(remaining_s)}"


def waiting_line(standing: str, in_flight: int, failures: Failures) -> str:
    """What a run is busy with while no step finishes, in one line."""
    failed = f", failed {failures}" if failures else ""
    return f"{standing}: {counted(in_flight, 'group', 'groups')} in flight{failed}"


def shortened(reason: str) -> str:
    """``reason`` as one line of bounded length."""
    line = " ".join(reason.split())
    return line if len(line) <= REASON_WIDTH else f"{line[: REASON_WIDTH - 3]}..."


def counted(count: int, one: str, many: str) -> str:
    """``1 step``, ``2 steps``."""
    return f"{count} {one if count == 1 else many}"


def duration(seconds: float) -> str:
    """``m:ss`` or ``h:mm:ss``; ``-:--`` where it is not known."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _facts(report: StepReport, waiting: tuple[int, Failures] | None = None) -> list[tuple[str, str]]:
    in_flight, failures = waiting or (report.in_flight, report.failures)
    saved = "none yet" if report.checkpoint_step is None else f"step {report.checkpoint_step}"
    facts = [
        ("lag", f"{report.lag_mean:.1f} (max {report.lag_max})"),
        ("groups", f"{in_flight} in flight, {report.buffered} buffered"),
        ("tokens/s", f"{_rate(report.generated_tokens_per_s)} generated, {_rate(report.trained_tokens_per_s)} trained"),
        (
            "waiting",
            f"trainer {report.wait_for_batch:.0%} for groups, generation {report.wait_for_policy:.0%} for a policy",
        ),
        ("checkpoint", saved),
    ]
    return [*facts, ("failed", str(failures))] if failures else facts


def _rate(per_second: float) -> str:
    return f"{per_second / 1000:.1f}k" if per_second >= 1000 else f"{per_second:.0f}"
