"""The screens of ``skyrl-train watch``: a run's panel, timeline, samples, failures, settings and logs, one key for each."""

from __future__ import annotations

import itertools
import math
import time
from collections.abc import Callable, Sequence
from typing import Any, ClassVar

from rich.style import Style
from rich.text import Text
from textual import work
from textual.app import App, ComposeResult
from textual.binding import Binding, BindingType
from textual.containers import VerticalScroll
from textual.widgets import DataTable, Footer, Static, TabbedContent, TabPane
from textual.worker import get_current_worker

from skyrl_train.errors import SkyRLError
from skyrl_train.observability.readers.incidents import incidents, log_end, log_files
from skyrl_train.observability.readers.panel import WatchedRun
from skyrl_train.observability.readers.samples import step_rows, whole_sequence
from skyrl_train.observability.readers.settings import settings_table
from skyrl_train.observability.run_folder import LOGS, TRAINER_LOG
from skyrl_train.observability.screen import Progress, RunPanel, StepReport, visible

# Of policy versions, as on the page: neighbours differ in lightness, too, and red is left for failures.
PALETTE = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9")
SCREENS = ("run", "timeline", "samples", "failures", "settings", "log")
LABEL = 8  # characters before a lane
STEPS, MAX_LANES = 3, 60  # of the timeline
LOG_LINES = 500
LATEST_S = 20.0  # longest time between two drawings of a screen that changes
READING = "Reading ..."
SAMPLE_COLUMNS = (  # beside the step
    ("group_index", "group"), ("sample", "sample"), ("reward", "reward"), ("lag", "lag"), ("stop_reason", "end"),
    ("prompt", "prompt"), ("response", "response"),
)  # fmt: skip
Drawn = Text | dict[str, Any] | None
TRAINING = {"update_policy": "█", "accumulate": "█", "finish_update": "█", "wait_for_batch": "·"}


class RunScreens(App[None]):
    """Shows ``watched`` until the reader leaves. The run's files are read in a thread.

    Args:
        poll_s: time between two looks at the run.
        share: of a core, for drawing what has changed; an expensive screen is drawn less often.
    """

    CSS = "DataTable { height: 40%; } #timeline-text { width: auto; }"
    TITLE = "skyrl-train watch"
    BINDINGS: ClassVar[list[BindingType]] = [
        *(Binding(str(number), f"show('{name}')", name) for number, name in enumerate(SCREENS, 1)),
        Binding("comma", "other_step(-1)", "before"),
        Binding("full_stop", "other_step(1)", "next"),
        Binding("e", "other_phase", "train/eval"),
        Binding("q", "quit", "leave"),
    ]

    def __init__(self, watched: WatchedRun, poll_s: float, share: float = 0.02) -> None:
        super().__init__()
        self._watched = watched
        self._poll_s, self._share = poll_s, share
        self._progress = Progress(watched.total_steps, 0, watched.elapsed_s, watched.rewards)
        self._panel = RunPanel(watched.title, self._progress)
        self._phase, self._step = "train", 0  # whose samples are shown; 0: of the newest step
        self._samples: dict[str, Any] = {}
        self._reading = self._look_again = False
        self._drawn: tuple[object, ...] = ()  # what the shown screen is made of
        self._draw_at = 0.0  # not before, the same screen is drawn again
        self._began: tuple[float, float] | None = None  # the last drawing: when, and the process's CPU time by then

    def compose(self) -> ComposeResult:
        with TabbedContent(initial="run"):
            with TabPane("1 run", id="run"):
                yield Static(READING, id="panel")
            with TabPane("2 timeline", id="timeline"), VerticalScroll():
                yield Static(READING, id="timeline-text")
            with TabPane("3 samples", id="samples"):
                yield DataTable(id="sample-rows", cursor_type="row")
                with VerticalScroll():
                    yield Static(READING, id="sample")
            with TabPane("4 failures", id="failures"), VerticalScroll():
                yield Static(READING, id="failures-text")
            with TabPane("5 settings", id="settings"), VerticalScroll():
                yield Static(READING, id="settings-text")
            with TabPane("6 log", id="log"), VerticalScroll():
                yield Static(READING, id="log-text")
        yield Footer()

    def on_mount(self) -> None:
        self.look()
        self.set_interval(self._poll_s, self.look)

    def action_show(self, name: str) -> None:
        """Show a screen."""
        self.query_one(TabbedContent).active = name
        for part in self.query(f"#{name} DataTable, #{name} VerticalScroll").results():
            self.call_after_refresh(part.focus)  # once it is shown, so that arrows move in it
            break
        self.look()

    def action_other_step(self, by: int) -> None:
        """Show the samples of the recorded step before or after the shown one."""
        steps = self._samples.get("steps", [])
        if self._samples.get("step") in steps:
            place = steps.index(self._samples["step"]) + by
            # Behind the newest step there is nothing, and it stays the newest one as the run goes on.
            self._step = steps[max(0, place)] if place < len(steps) - 1 else 0
            self.look()

    def action_other_phase(self) -> None:
        """Show the samples of evaluations instead of training, or of training again."""
        if len(self._samples.get("phases", [])) > 1 or self._phase == "eval":
            self._phase, self._step = "eval" if self._phase == "train" else "train", 0
            self.look()

    def on_data_table_row_highlighted(self, event: DataTable.RowHighlighted) -> None:
        """Show the sample under the cursor."""
        number = int(event.row_key.value or 0)
        if event.row_key.value is not None and number < len(self._samples["rows"]):
            if event.cursor_row > 0:  # the reader has chosen one: a newer step must not take its place
                self._step = self._samples["step"]
            row = self._samples["rows"][number]
            if "row" in row:
                self.read_sample(self._samples["phase"], self._samples["step"], row["row"])
            else:  # an older version of the library recorded texts only
                prompt, response = (visible(str(row.get(name, ""))) for name in ("prompt", "response"))
                self.query_one("#sample", Static).update(Text.assemble((prompt, "dim"), response))

    def look(self) -> None:
        """Read the run in a thread, and draw the screen that is shown, unless nothing has changed."""
        if self._reading:  # once more behind it: the reader may have gone to another screen
            self._look_again = True
            return
        self._reading, self._look_again = True, False
        if self._began is not None:  # textual renders after _draw(), so the cost of a drawing is known only now
            at, cpu_s = self._began
            cost_s = time.process_time() - cpu_s
            self._draw_at, self._began = at + min(LATEST_S, cost_s / self._share), None
        self._read(self.query_one(TabbedContent).active, (self._phase, self._step), self.size.width - 4)

    @work(thread=True)
    def _read(self, shown: str, of: tuple[str, int], width: int) -> None:
        drawn: Drawn = None
        due = time.monotonic() >= self._draw_at or self._drawn[:3] != (shown, of, width)
        if due:
            self._began = time.monotonic(), time.process_time()
        try:
            report = self._watched.poll()
            state = (shown, of, width, *self._watched.parts.values()) if due else self._drawn
            if state != self._drawn or (due and shown == "log"):  # logs are no part of it
                samples = step_rows(self._watched.path, *of) | {"phase": of[0]} if shown == "samples" else None
                drawn = samples or self._text(shown, width)
        except (OSError, SkyRLError) as error:  # it was removed, or a network file system fails for a while
            report, state, drawn = None, (), Text(visible(f"The run cannot be read now: {error}"))
        if not get_current_worker().is_cancelled:  # the reader has left
            self.call_from_thread(self._draw, shown, report, drawn, state, due)

    def _text(self, name: str, width: int) -> Text | None:
        watched = self._watched
        match name:
            case "timeline":
                return timeline_text(watched.store.window(None, None, STEPS), width)
            case "failures":
                return failures_text(incidents(watched.store))
            case "settings":
                return settings_text(settings_table(watched.settings))
            case "log":
                logs = watched.path / LOGS
                names = [file["name"] for file in log_files(logs)]
                file = TRAINER_LOG if TRAINER_LOG in names else next(iter(names), "")
                text = (log_end(logs, file) if file else None) or "Nothing is logged yet."
                return Text("\n".join(visible(text).splitlines()[-LOG_LINES:]))
        return None

    def _draw(self, shown: str, report: StepReport | None, drawn: Drawn, state: tuple[object, ...], due: bool) -> None:
        self._reading, self._drawn = False, state
        if not self.is_running:  # the reader has left, and the widgets are gone
            return
        self._panel.start_up = self._watched.start_up
        self._progress.total_steps = self._watched.total_steps  # without max_steps, the run tells it as training begins
        if report is not None:
            self._panel.update(report)
        else:
            self._panel.waiting(self._watched.in_flight, self._watched.failures, self._watched.oldest_s)
        if isinstance(drawn, Text):
            widget = {"run": "panel", "samples": "sample"}.get(shown, f"{shown}-text")
            self.query_one(f"#{widget}", Static).update(drawn)
        elif drawn is not None:
            self._draw_samples(drawn)
        elif shown == "run" and due:
            self.query_one("#panel", Static).update(self._panel.draw())
        if self._look_again:
            self.look()

    @work(thread=True, exclusive=True, group="sample")
    def read_sample(self, phase: str, step: int, row: int) -> None:
        """Read a sample, and draw it token for token."""
        sample = whole_sequence(self._watched.path, phase, step, row)
        if sample is not None and not get_current_worker().is_cancelled:
            self.call_from_thread(self._draw_sample, sample_text(sample))

    def _draw_sample(self, drawn: Text) -> None:
        if self.is_running:  # else the reader has left, and the widgets are gone
            self.query_one("#sample", Static).update(drawn)

    def _draw_samples(self, samples: dict[str, Any]) -> None:
        before, self._samples = self._samples, samples
        if all(samples[part] == before.get(part) for part in ("phase", "step", "rows")):
            return
        table = self.query_one("#sample-rows", DataTable)
        table.clear(columns=True)
        evaluated = samples["phase"] == "eval"
        table.add_columns("version" if evaluated else "step", *(label for _, label in SAMPLE_COLUMNS))
        for number, row in enumerate(samples["rows"]):
            texts = [samples["step"], *(row.get(name) for name, _ in SAMPLE_COLUMNS)]
            cells = (_number(text) if isinstance(text, float) else "" if text is None else str(text) for text in texts)
            table.add_row(*(Text(" ".join(visible(cell).split())) for cell in cells), key=str(number))
        if not table.row_count:
            of = "evaluations" if evaluated else "training"
            self.query_one("#sample", Static).update(f"No samples of {of} are recorded yet.")


class TrainingScreens(RunScreens):
    """The screens in the terminal of the command that trains: Ctrl-C asks the run to stop, and a second one ends it at once.

    Args:
        stop: asks the run to stop after its step.

    Attributes:
        at_once: whether the reader asked a second time, and has left the screens therefore.
    """

    BINDINGS: ClassVar[list[BindingType]] = [Binding("ctrl+c", "stop_run", "stop the run", priority=True)]

    def __init__(self, watched: WatchedRun, poll_s: float, stop: Callable[[], object]) -> None:
        super().__init__(watched, poll_s)
        self._stop, self._asked, self._over = stop, False, False
        self.at_once = False

    def action_stop_run(self) -> None:
        """Stop the run."""
        if self._asked:
            self.at_once = True
            self.exit()
        else:
            self._asked = True
            self.notify("stopping after this step; once more to stop at once", timeout=math.inf)
            self._stop()

    def leave(self) -> None:
        """Leave the screens. Callable from any thread, at any time."""
        self._over = True
        if self.is_running:
            self.call_from_thread(self.exit)

    def on_ready(self) -> None:
        if self._over:  # the run has ended meanwhile
            self.exit()


def _number(value: float | None) -> str:
    return "-" if value is None else f"{value:.3f}"


def version_style(version: int) -> Style:
    """Return the style of what a policy version has sampled."""
    return Style(bgcolor=PALETTE[version % len(PALETTE)] if version >= 0 else "#888888", color="white")


def timeline_text(window: dict[str, Any] | None, width: int) -> Text:
    """Draw the trainer and a lane per group, the newest first: the digits and colours are policy versions; ┈ responses that
    are under way or were left out, ░ a tool or an environment, ─ ready and waiting, ▼ trained, ✗ without a result.

    Args:
        window: what ``EventStore.window`` returns.
        width: columns of the screen.
    """
    if window is None:
        return Text("This run has recorded no events yet.")
    t0, t1 = window["t0"], window["t1"]
    columns = max(10, width - LABEL)

    def column(at: float) -> int:
        return int(min(columns - 1, max(0, (at - t0) / max(t1 - t0, 1e-9) * columns)))

    trainer = [" "] * columns
    for name, _, begin, end in window["spans"]:
        for place in range(column(begin), column(end) + 1) if end >= t0 and begin <= t1 else ():
            # The activities of a weight sync lie beside training.
            trainer[place] = TRAINING.get(name) or (trainer[place] if trainer[place] != " " else "~")
    lines = [Text(f"{'trainer':{LABEL}}{''.join(trainer)}")]
    # Those that ended as the window begins belong to the step before, unless there are no others.
    groups = [group for group in window["groups"] if group["end"] > t0] or window["groups"]
    lines += [_lane(group, columns, column) for group in reversed(groups[-MAX_LANES:])]
    total, which = (len(groups), "newest") if window["density"] is None else (window["all_groups"], "longest")
    if (lanes := min(len(groups), MAX_LANES)) < total:
        lines.append(Text(f"{lanes} of {total} groups are shown, the {which}; the page shows all", style="dim"))
    seconds = Text(
        f"{'':{LABEL}}{t1 - t0:.1f} s; █ training, · waiting for groups, ~ weight sync and others", style="dim"
    )
    legend = Text(f"{'':{LABEL}}digit: version, ┈ not recorded, ░ tool, ─ ready, ▼ trained, ✗ no result", style="dim")
    return Text("\n").join([seconds, legend, *lines])


def _lane(group: dict[str, Any], columns: int, column: Callable[[float], int]) -> Text:
    cells: list[tuple[str, Style]] = [(" ", Style())] * columns

    def fill(begin: float, end: float, cell: str, style: Style) -> None:
        for place in range(column(begin), column(end) + 1):
            cells[place] = cell, style

    if not group["requests"]:
        fill(group["begin"], group.get("finished", group["end"]), "┈", Style(dim=True))
    if "finished" in group:
        fill(group["finished"], group["end"], "─", Style(dim=True))
    for kind in ("environments", "tools"):
        for _, begin, end, *_ in group[kind]:
            fill(begin, end, "░", Style())
    for request in group["requests"]:
        for version, _, begin, end, _ in request[6]:
            fill(begin, end, str(version)[-1], version_style(version))
    ends = {"trained": ("▼", Style(color="green")), "failed": ("✗", Style(color="red"))}
    if group["state"] not in ("running", "generated", "buffered"):
        cell, style = ends.get(group["state"], ("✗", Style(dim=True)))
        fill(group["end"], group["end"], cell, style)
    lane = Text(f"#{group['group']}".ljust(LABEL))
    for style, equal in itertools.groupby(cells, key=lambda cell: cell[1]):
        lane.append("".join(cell for cell, _ in equal), style)
    return lane


def sample_text(sample: dict[str, Any]) -> Text:
    """Draw a row of the recorded samples: the prompt, and each token of the response in the colour of its policy version."""
    reward = f"reward {_number(sample['reward'])}, lag {sample['lag']}, end: {sample['stop_reason']}"
    text = Text(visible(f"{reward}, prompt {sample['uid']}\n\n"), style="bold")
    text.append(visible(sample["prompt"] or ""), "dim")
    ids = sample["response_token_ids"] or []
    pieces: Sequence[str] = sample["response_pieces"] or [f"<{token}>" for token in ids]
    versions = sample["versions"] or itertools.repeat(-1)
    for piece, sampled, version in zip(pieces, sample["sampled"] or itertools.repeat(True), versions, strict=False):
        text.append(visible(piece), version_style(version) if sampled else "dim")
    return text


def failures_text(found: dict[str, Any] | None) -> Text:
    """Draw alarms, failed groups and attempts, and warnings, the newest of each first."""
    if found is None:
        return Text("This run has recorded no events yet.")
    text = Text()
    for row in found["alarms"]:
        until = f" to {row['ended']}" if row["ended"] is not None else ""
        what = visible(f"{row['level']} {row['id']} from step {row['step']}{until}: ")
        text.append(what, "bold red" if row["level"] == "alarm" else "bold")
        text.append(visible(f"{row['finding']} {row['action']}\n"))
    for row in found["failures"]:
        text.append(
            f"{row['count']} x {'failed for good' if row['kind'] == 'failed' else 'failed attempt'}: ", "bold red"
        )
        text.append(visible(f"{row['reason']}\n"))
        if row["place"]:
            text.append(f"    at {visible(row['place'])}\n", "dim")
        text.append(f"    again: {visible(row['again'])}\n", "dim")
    for row in found["warnings"]:
        text.append(visible(f"{row['count']} x {row['level'].lower()}, "), "bold")
        text.append(f"{_when(row['last'])}: {visible(row['text'])}\n")
    return text if text else Text("Nothing failed.")


def _when(at: float) -> str:
    return time.strftime("%H:%M:%S", time.localtime(at))


def settings_text(rows: Sequence[dict[str, Any]]) -> Text:
    """Draw the settings that differ from their defaults."""
    lines = [
        Text.assemble(
            (visible(row["key"]), "bold"), visible(f" = {row['value']!r}"), (visible(f"  ({row['default']!r})"), "dim")
        )
        for row in rows
        if row["differs"]
    ]
    return Text("\n").join([Text("Settings that differ from their defaults, which stand in brackets.\n"), *lines])
