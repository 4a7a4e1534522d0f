"""Everything that a run prints: a panel in a terminal, a line now and then elsewhere, and the final line.

trainer ──StepReport──> TerminalView (a RunPanel, redrawn in place)  |  PlainView (lines, for files and pipes)
"""

from __future__ import annotations

import itertools
import math
import shlex
import statistics
import time
import unicodedata
from array import array
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.panel import Panel
from rich.progress import Progress as Spinner
from rich.progress import SpinnerColumn, TextColumn, TimeElapsedColumn
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from skyrl_train.observability.advice import ESS, NO_SIGNAL, TRUNCATED, Advice
from skyrl_train.observability.failures import shortened
from skyrl_train.observability.metrics import is_finite_number

Clock = Callable[[], float]

REFRESH_INTERVAL_S = 0.1
WAITING_INTERVAL_S = 1.0  # time between redraws while no step finishes
PLAIN_INTERVAL_S = 5.0
PLAIN_INTERVAL_MAX_S = 30.0
PLAIN_SHARE = 0.1  # the next line is printed after this share of the elapsed time, within the two bounds above
TREND_STEPS = 10
LAG_WIDTH = 20  # characters of the bar of all groups
TRAINER_WIDTH = 10  # of the bar of a step
BLOCKS = "▁▂▃▄▅▆▇█"
ASCII = "_.-=+*#"
MARKS = {BLOCKS: "█░▒", ASCII: "#.~"}  # of a trainer that trains, waits, or syncs weights

REWARD = "reward/mean"
ENDS = 0.05  # share of the steps over which the first and last rewards are averaged


@dataclass(frozen=True, slots=True)
class Failures:
    """Failures of the whole run so far."""

    groups: int = 0  # failed for good
    allowed: int = 0  # the run stops above this
    retries: int = 0
    last_reason: str = ""

    def __bool__(self) -> bool:
        return self.groups > 0 or self.retries > 0

    def __str__(self) -> str:
        last = f" (last: {shortened(self.last_reason)})" if self.last_reason else ""
        groups, retries = counted(self.groups, "group", "groups"), counted(self.retries, "retry", "retries")
        return f"{groups} ({self.allowed} allowed), {retries}{last}"


@dataclass(frozen=True, slots=True)
class StepReport:
    """The figures of one step on the screen. Rates are per second of wall-clock time; fractions are in [0, 1]."""

    step: int
    reward: float  # mean return of the step's samples
    lag_mean: float = 0.0  # steps
    lag_max: int = 0
    in_flight: int = 0  # groups
    buffered: int = 0  # groups
    ahead: float = math.nan  # steps that generation may run ahead
    generated_tokens_per_s: float = 0.0
    trained_tokens_per_s: float = 0.0
    wait_for_batch: float = 0.0  # share of the step in which training waited for groups
    wait_for_policy: float = 0.0  # share of the step in which generation waited for the next policy
    train: float = 0.0  # share of the step in which it trained
    weight_sync: float = 0.0  # share of the step in which training waited for a weight sync
    checkpoint_step: int | None = None  # the newest checkpoint on disk
    failures: Failures = Failures()
    # In the panel only; NaN and empty where the run has none.
    reward_std: float = math.nan
    entropy: float = math.nan  # nats
    grad_norm: float = math.nan
    ess: float = math.nan  # effective sample size of the importance weights, in (0, 1]
    no_signal: float = math.nan  # share of the groups whose samples have equal rewards
    truncated: float = math.nan  # share of the samples that a length limit ended
    running: float = math.nan  # requests that the engines sample
    waiting: float = math.nan  # requests that wait in the engines
    kv_cache_usage: float = math.nan  # share, of the fullest engine
    oldest_s: float = math.nan  # age of the oldest group in generation
    oldest_lag: int = 0  # steps
    groups_by_lag: Mapping[int, int] = field(default_factory=dict)
    evaluation: str = ""  # the newest one, in one line
    sample: str = ""  # a prompt and its response, in one line
    advice: Sequence[Advice] = ()  # the most urgent first


class Progress:
    """Finished steps, their rewards, and the remaining time at the pace since the start.

    Attributes:
        total_steps: of the whole run; may change, as a reader of the run learns of it.
        rewards: the finite ones of the known steps, in the order of ``steps``.
    """

    def __init__(
        self, total_steps: int, start_step: int, clock: Clock, rewards: Mapping[int, float] | None = None
    ) -> None:
        self.total_steps = total_steps
        self.steps = list(rewards or ())
        self.rewards = list((rewards or {}).values())
        self.step = self._start_step = start_step
        self._clock = clock
        self._started = self._latest_at = clock()

    def update(self, report: StepReport) -> None:
        """Add a finished step."""
        self.step, self._latest_at = report.step, self._clock()
        while self.steps and self.steps[-1] >= report.step:  # a resumed run repeats them
            self.steps.pop()
            self.rewards.pop()
        if math.isfinite(report.reward):
            self.steps.append(report.step)
            self.rewards.append(report.reward)

    def waiting_line(self, in_flight: int, failures: Failures, oldest_s: float) -> str:
        """Return the line for a run in which no step finishes."""
        if self.step >= self.total_steps:
            return "all steps have trained; the last evaluation and checkpoint end"
        standing = "no step yet" if self.step == self._start_step else f"no step since step {self.step}"
        oldest = "" if math.isnan(oldest_s) else f", the oldest for {age(oldest_s)}"
        failed = f", failed {failures}" if failures else ""
        return f"{standing}: {counted(in_flight, 'group', 'groups')} in flight{oldest}{failed}"

    @property
    def trend(self) -> str:
        """The change of the mean reward from the ``TREND_STEPS`` known steps before to the last ones, and over how many steps: a
        reader does not see each step. Empty until there are twice as many."""
        if len(self.rewards) < 2 * TREND_STEPS:
            return ""
        (before, now), (since, until) = (
            (statistics.fmean(values[-2 * TREND_STEPS : -TREND_STEPS]), statistics.fmean(values[-TREND_STEPS:]))
            for values in (self.rewards, self.steps)
        )
        return f"  {now - before:+.3f} in {until - since:.0f} steps"

    @property
    def elapsed_s(self) -> float:
        """Seconds since this process started the run."""
        return self._clock() - self._started

    @property
    def remaining_s(self) -> float:
        """Estimated seconds to the last step; infinite before the first step."""
        done = self.step - self._start_step
        if done < 1:
            return math.inf
        return max(0, self.total_steps - self.step) * (self._latest_at - self._started) / done


class PlainView:
    """Prints the first and the last step and some between them, fewer as the run gets older."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        self._progress = progress
        self._clock = clock
        self._next_at = -math.inf  # time from which a step is printed
        self._alive_at = clock() + PLAIN_INTERVAL_S  # time for a line if no step finishes
        self._unshown: StepReport | None = None
        self.note(f"{title}: {counted(progress.total_steps, 'step', 'steps')}")

    def update(self, report: StepReport) -> None:
        """Print the step if enough time has passed."""
        self._progress.update(report)
        self._unshown = report
        if self._clock() >= self._next_at or report.step >= self._progress.total_steps:
            self._print(self._step_line(report))

    def waiting(self, in_flight: int, failures: Failures, oldest_s: float = math.nan) -> None:
        """Print a line if none was printed for a while. Called about every second.

        Args:
            in_flight: groups in generation.
            oldest_s: age of the oldest of them; NaN: unknown.
        """
        if self._clock() >= self._alive_at:
            report = self._unshown
            waiting = self._progress.waiting_line(in_flight, failures, oldest_s)
            self._print(waiting if report is None else self._step_line(report))

    def note(self, text: str) -> None:
        """Print the line."""
        self._console.print(Text(text), soft_wrap=True)

    def close(self) -> None:
        """Print the last step if it was not printed."""
        if self._unshown is not None:
            self._print(self._step_line(self._unshown))

    def _step_line(self, report: StepReport) -> str:
        facts = "  ".join(f"{name} {value}" for name, value in _facts(report))
        steps, to_go = f"{report.step}/{self._progress.total_steps}", duration(self._progress.remaining_s)
        return f"step {steps}  reward {report.reward:.3f}  {facts}  to go {to_go}"

    def _print(self, line: str) -> None:
        # A long run prints fewer lines, so that its log stays readable.
        interval_s = min(max(PLAIN_SHARE * self._progress.elapsed_s, PLAIN_INTERVAL_S), PLAIN_INTERVAL_MAX_S)
        self._next_at = self._alive_at = self._clock() + interval_s
        self._unshown = None
        self.note(line)


class RunPanel:
    """The panel of a run: its newest step, or how long none has finished."""

    def __init__(self, title: str, progress: Progress, levels: str = BLOCKS) -> None:
        self._title = title
        self._progress = progress
        self._levels = levels
        self._report: StepReport | None = None
        self._waiting: tuple[int, Failures, float] | None = None  # while no step has finished for a second
        self.start_up: Sequence[str] = ()  # lines about the parts of a start-up that has not ended

    def update(self, report: StepReport) -> None:
        """Show a finished step."""
        self._progress.update(report)
        self._report, self._waiting = report, None

    def waiting(self, in_flight: int, failures: Failures, oldest_s: float = math.nan) -> None:
        """Show that no step has finished for a second.

        Args:
            in_flight: groups in generation.
            oldest_s: age of the oldest of them; NaN: unknown.
        """
        self._waiting = (in_flight, failures, oldest_s)

    def draw(self) -> RenderableType:
        """Return what is to be seen now."""
        report, progress = self._report, self._progress
        step, saved = progress.step, ""
        if report is not None and report.checkpoint_step is not None:
            saved = f"checkpoint: step {report.checkpoint_step}, "
        counter = f"step {step}/{progress.total_steps}"
        top = Table.grid(expand=True, padding=(0, 1))
        top.add_column(no_wrap=True, min_width=len(counter))  # in a narrow terminal, the rest of the line is cut
        top.add_column(ratio=1)
        top.add_column(no_wrap=True, justify="right")
        top.add_row(
            counter,
            ProgressBar(total=progress.total_steps, completed=step),
            f"{saved}{duration(progress.elapsed_s)} gone, {duration(progress.remaining_s)} to go",
        )
        start_up = [Text(line) for line in self.start_up]
        if report is None:
            text = "starting ..." if self._waiting is None or start_up else progress.waiting_line(*self._waiting)
            return Panel(Group(top, Text(text), *start_up), title=Text(self._title), title_align="left")
        lines = Table.grid(expand=True, padding=(0, 2))
        lines.add_column(style="bold", no_wrap=True, min_width=len("evaluation"))
        # One line each, so that the panel keeps its height: what does not fit is cut.
        lines.add_column(no_wrap=True, overflow="ellipsis", ratio=1)
        spread = "" if math.isnan(report.reward_std) else f" ±{report.reward_std:.2f}"
        curve = sparkline(progress.rewards, 30, self._levels)
        lines.add_row("reward", Text.assemble(f"{report.reward:.3f}{spread}  ", (curve, "green"), progress.trend))
        if report.evaluation:
            lines.add_row("evaluation", Text(report.evaluation))
        if health := _health(report):
            lines.add_row("health", health)
        facts = dict(_facts(report, self._waiting))
        lines.add_row("lag", Text(f"{facts['lag']}  {self._lags(report.groups_by_lag)}"))
        lines.add_row("trainer", self._trainer(report))
        lines.add_row("engines", Text(_engines(report)))
        lines.add_row("groups", Text(facts["groups"]))
        if "failed" in facts:
            lines.add_row("failed", Text(facts["failed"], style="red"))
        if report.sample:
            lines.add_row("sample", Text(report.sample, style="dim"))
        parts: list[RenderableType] = [top, lines, *start_up]
        if report.advice:  # the whole text: half of a sentence says nothing
            first, more = report.advice[0], len(report.advice) - 1
            style = "red" if first.level == "alarm" else ""
            label = {"alarm": "ALARM", "tuning": "advice"}[first.level]
            rest = f" {first.action}{f' (and {more} more)' if more else ''}"
            parts.append(Text.assemble((label, f"bold {style}"), "  ", (first.finding, style), rest))
        return Panel(Group(*parts), title=Text(self._title), title_align="left")

    def _trainer(self, report: StepReport) -> Text:
        """Draw what the trainer did during the step: a bar, and the share of each activity beside its mark."""
        activities = (("train", report.train), ("wait", report.wait_for_batch), ("sync", report.weight_sync))
        styles = ("green", "dim", "cyan")
        shown = list(zip(MARKS[self._levels], styles, activities, strict=True))
        bar = [(mark * round(TRAINER_WIDTH * share), style) for mark, style, (_, share) in shown]
        room = max(0, TRAINER_WIDTH - sum(len(part) for part, _ in bar))
        shares = [Text.assemble((mark, style), f" {name} {share:.0%} ") for mark, style, (name, share) in shown]
        rate = f" {thousands(report.trained_tokens_per_s)} tokens/s"
        return Text.assemble(*bar, " " * (room + 1), *shares, rate)

    def _lags(self, groups: Mapping[int, int]) -> str:
        """Draw the shares of the groups by lag."""
        total, full = sum(groups.values()), self._levels[-1]
        return "  ".join(
            f"{lag} {full * max(1, round(LAG_WIDTH * number / total))} {number / total:.0%}"
            for lag, number in sorted(groups.items())
        )


class TerminalView:
    """Redraws a panel in place: when a step finishes, at most ten times a second, and once a second otherwise."""

    def __init__(self, console: Console, title: str, progress: Progress, clock: Clock) -> None:
        self._console = console
        levels = BLOCKS if (console.encoding or "").lower().startswith("utf") else ASCII
        self._panel = RunPanel(title, progress, levels)
        self._clock = clock
        self._next_at = -math.inf
        self._waiting_at = -math.inf
        # Without rich's refresh thread, which would take time from training.
        self._live = Live(self._panel.draw(), console=console, auto_refresh=False, transient=False)
        self._live.start(refresh=True)

    def update(self, report: StepReport) -> None:
        """Redraw, at most every ``REFRESH_INTERVAL_S``."""
        self._panel.update(report)
        self._waiting_at = self._clock() + WAITING_INTERVAL_S
        if self._clock() >= self._next_at:
            self._next_at = self._clock() + REFRESH_INTERVAL_S
            self._live.update(self._panel.draw(), refresh=True)

    def waiting(self, in_flight: int, failures: Failures, oldest_s: float = math.nan) -> None:
        """Redraw if no step was drawn for a second. Called about every second.

        Args:
            in_flight: groups in generation.
            oldest_s: age of the oldest of them; NaN: unknown.
        """
        if self._clock() >= self._waiting_at:
            self._panel.waiting(in_flight, failures, oldest_s)
            self._waiting_at = self._clock() + WAITING_INTERVAL_S
            self._live.update(self._panel.draw(), refresh=True)

    def note(self, text: str) -> None:
        """Print the line above the panel."""
        self._console.print(Text(text))

    def close(self) -> None:
        """Draw the last state and leave it on the screen."""
        if self._live.is_started:
            self._live.update(self._panel.draw(), refresh=True)
            self._live.stop()


def make_view(
    console: Console,
    total_steps: int,
    title: str,
    *,
    start_step: int = 0,
    clock: Clock = time.monotonic,
    rewards: Mapping[int, float] | None = None,
) -> TerminalView | PlainView:
    """Return a panel if ``console`` is a terminal, else plain lines.

    Args:
        title: run name and mode.
        start_step: the step from which the run resumes; the remaining time is estimated from the steps after it.
        rewards: of earlier steps, by step, for the curve.
    """
    progress = Progress(total_steps, start_step, clock, rewards)
    if console.is_terminal and not console.is_dumb_terminal:
        return TerminalView(console, title, progress, clock)
    return PlainView(console, title, progress, clock)


def visible(text: str) -> str:
    """Replace characters that are not printed, other than newline and tab, by their escapes: they could steer the terminal."""
    return "".join(
        c if c.isprintable() or c in "\n\t" or unicodedata.category(c) == "Zs" else c.encode("unicode_escape").decode()
        for c in text
    )


def counted(count: int, one: str, many: str) -> str:
    """Return the count with its noun: ``1 step``, ``2 steps``."""
    return f"{count} {one if count == 1 else many}"


def thousands(number: float) -> str:
    """Return a number in thousands if it is large: ``12.3k``."""
    return f"{number / 1000:.1f}k" if number >= 1000 else f"{number:.0f}"


def age(seconds: float) -> str:
    """Return ``4.1 s``, or from a minute on what :func:`duration` returns."""
    return f"{seconds:.1f} s" if seconds < 59.95 else duration(seconds)


def duration(seconds: float) -> str:
    """Return ``m:ss`` or ``h:mm:ss``; ``-:--`` if the duration is not finite."""
    if not math.isfinite(seconds):
        return "-:--"
    minutes, rest = divmod(round(max(0.0, seconds)), 60)
    hours, minutes = divmod(minutes, 60)
    return f"{hours}:{minutes:02}:{rest:02}" if hours else f"{minutes}:{rest:02}"


def _health(report: StepReport) -> Text:
    """Return the figures that tell whether training is sane, with the alarming ones in colour."""
    figures = [
        ("entropy {:.2f}", report.entropy, False),
        ("grad {:.2g}", report.grad_norm, not math.isfinite(report.grad_norm)),
        ("ess {:.2f}", report.ess, report.ess < ESS),
        ("no signal {:.0%}", report.no_signal, report.no_signal > NO_SIGNAL),
        ("truncated {:.0%}", report.truncated, report.truncated > TRUNCATED),
    ]
    shown = [(form.format(value), "red" if alarms else "") for form, value, alarms in figures if not math.isnan(value)]
    return Text("  ").join(Text(text, style=style) for text, style in shown)


def _engines(report: StepReport) -> str:
    figures = [
        (f"{thousands(report.generated_tokens_per_s)} tokens/s", 0.0),
        (f"{report.running:.0f} running", report.running),
        (f"{report.waiting:.0f} waiting", report.waiting),
        (f"KV cache {report.kv_cache_usage:.0%}", report.kv_cache_usage),
        (f"slots idle {report.wait_for_policy:.0%}", 0.0),
    ]
    return ", ".join(text for text, value in figures if not math.isnan(value))


def _facts(report: StepReport, waiting: tuple[int, Failures, float] | None = None) -> list[tuple[str, str]]:
    in_flight, failures, oldest_s = waiting or (report.in_flight, report.failures, report.oldest_s)
    saved = "none yet" if report.checkpoint_step is None else f"step {report.checkpoint_step}"
    ahead = "" if math.isnan(report.ahead) else f", {report.ahead:.1f} steps ahead"
    generated, trained = thousands(report.generated_tokens_per_s), thousands(report.trained_tokens_per_s)
    oldest = "" if math.isnan(oldest_s) else f" (oldest: {age(oldest_s)}, lag {report.oldest_lag})"
    facts = [
        ("lag", f"{report.lag_mean:.1f} (max {report.lag_max})"),
        ("groups", f"{in_flight} in flight{oldest}, {report.buffered} buffered{ahead}"),
        ("tokens/s", f"{generated} generated, {trained} trained"),
        (
            "waiting",
            f"trainer {report.wait_for_batch:.0%} for groups, generation {report.wait_for_policy:.0%} for a policy",
        ),
        ("checkpoint", saved),
    ]
    return [*facts, ("failed", str(failures))] if failures else facts


def sparkline(values: Sequence[float], width: int, levels: str = BLOCKS) -> str:
    """Draw a curve in one line of text, from the smallest value (first of ``levels``) to the largest (last).

    More values than ``width`` are averaged in ``width`` equal parts; fewer take one character each. Values that are not
    finite are left out. Equal values are drawn at the lowest level.
    """
    means = averaged(values, width)
    if not means:
        return ""
    low, high = min(means), max(means)
    # Halved, so that the range of two huge values is finite; divided, because the range of two tiny ones has no inverse.
    span = high / 2 - low / 2
    shares = [(value / 2 - low / 2) / span if span > 0 else 0.0 for value in means]
    return "".join(levels[round(share * (len(levels) - 1))] for share in shares)


def averaged(values: Sequence[float], width: int) -> list[float]:
    """Return the means of ``width`` equal parts of the finite values; all of them if there are fewer."""
    finite = [value for value in values if math.isfinite(value)]
    parts = min(width, len(finite))
    if parts < 1:
        return []
    # Whole numbers, so that every value is in exactly one part and no part is empty.
    edges = [len(finite) * part // parts for part in range(parts + 1)]
    return [math.fsum(finite[a:b]) / (b - a) for a, b in itertools.pairwise(edges)]


# The final line ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class RunSummary:
    """The result of a run. Rewards are None if no step has one."""

    steps: int
    first_reward: float | None  # mean over the first 5 % of the steps, at least one
    last_reward: float | None  # mean over the last 5 %
    best_reward: float | None  # of the best step
    training_s: float  # sum over the surviving steps; without the start of processes
    only_reward: float | None = None  # the reward of every sample of the run; None: they differ, or are unknown


def summarize(rows: Iterable[Mapping[str, Any]]) -> RunSummary:
    """Summarize the rows of ``metrics.jsonl``, also of a run that was resumed."""
    steps, seconds, rewards, extremes = 0, array("d"), array("d"), set[Any]()
    for row in rows:  # once: those of a long run would fill the memory
        steps = max(steps, row["step"])
        seconds.append(row.get("time/step") or 0.0)
        if is_finite_number(row.get(REWARD)):
            rewards.append(row[REWARD])
        if row.get(REWARD) is not None:
            extremes |= {row.get("reward/min"), row.get("reward/max")}
    ends = max(1, round(len(rewards) * ENDS))
    return RunSummary(
        steps=steps,
        first_reward=statistics.fmean(rewards[:ends]) if rewards else None,
        last_reward=statistics.fmean(rewards[-ends:]) if rewards else None,
        best_reward=max(rewards, default=None),
        training_s=math.fsum(seconds),
        only_reward=extremes.pop() if len(extremes) == 1 else None,
    )


def spent_s(rows: Iterable[Mapping[str, Any]], start_step: int, command_s: float) -> float:
    """Return the seconds that a run took: ``command_s`` for this command, plus the steps of earlier commands.

    Args:
        start_step: the step from which this command resumed.
    """
    return command_s + math.fsum(row.get("time/step") or 0.0 for row in rows if row["step"] <= start_step)


def final_lines(
    learned: str | None, run_dir: str, *, finished: bool, report: bool, seconds: float, commands: Mapping[str, str]
) -> str:
    """Return the last lines: whether the run learned, where it is, and the commands that come next.

    Args:
        learned: such as :attr:`skyrl_train.Run.learned`; None: the run has trained no step.
        report: whether the run folder has one.
        seconds: duration of the run.
        commands: by their purpose, a line each.
    """
    done = f"{'Finished' if finished else 'Stopped'} after {duration(seconds)}"
    if learned is None:
        lines = [f"{done}, before the first step: nothing is trained yet. The run folder is {run_dir}."]
    else:
        contents = ": report.html has curves, samples and advice on speed" if report else ""
        lines = [learned, f"{done}. Everything is in {run_dir}{contents}."]
    width = max(map(len, commands)) + 2
    return "\n".join([*lines, *(f"{f'{purpose}:':{width}}{command}" for purpose, command in commands.items())])


@contextmanager
def spinner(console: Console, part: str) -> Iterator[None]:
    """Show in a terminal that ``part`` of a start-up runs, and for how long."""
    with ExitStack() as stack:
        if console.is_terminal and not console.is_dumb_terminal:
            columns = SpinnerColumn(), TextColumn("{task.description}"), TimeElapsedColumn()
            bar = stack.enter_context(Spinner(*columns, console=console, transient=True))
            bar.add_task(part, total=None)
        yield


def start_up_line(part: str, seconds: float) -> str:
    """Return the line about a part of a start-up that has ended."""
    return f"  {part}: {seconds:.1f} s"


@contextmanager
def start_up(console: Console, part: str) -> Iterator[None]:
    """Show that ``part`` of a start-up runs, and print how long it took."""
    began = time.monotonic()
    with spinner(console, part):
        yield
    console.print(start_up_line(part, time.monotonic() - began), markup=False, highlight=False, soft_wrap=True)


def train_command(program: str, arguments: Sequence[str], *, run_dir: str | None = None, resumes: bool = True) -> str:
    """Return ``program train`` with the arguments quoted for a shell, which trains in ``run_dir`` instead of their folder.

    Args:
        program: how the command is started, such as ``./uvw run skyrl-train``.
        resumes: whether there is a run in ``run_dir``, which the command then resumes from its last checkpoint.
    """
    if run_dir is not None:
        from skyrl_train.config.compose import text_override  # imports hydra

        dropped = ["trainer.run_dir", "trainer.resume_step", *(["trainer.resume"] if resumes else [])]
        kept = [argument for argument in arguments if argument.lstrip("+").partition("=")[0] not in dropped]
        arguments = [*kept, text_override("trainer.run_dir", run_dir)]
    return f"{program} train {shlex.join(arguments)}"
