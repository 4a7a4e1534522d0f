"""Passes the metrics and samples of a run to its trackers. Nothing here stops or slows the run.

    control loop ──log──> bounded queue ──a thread per tracker──> Tracker

A tracker that fails or hangs loses its own data only: the run folder has everything.
"""

from __future__ import annotations

import importlib.util
import logging
import queue
import re
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema import RunConfig, TrainerConfig
from skyrl_train.errors import ConfigError
from skyrl_train.observability.run_folder import LOGS, REPORT_HTML
from skyrl_train.observability.trackers.tracker import Tracker, sample_table

logger = logging.getLogger(__name__)

MAX_PENDING = 1000  # calls that wait for a tracker; further ones are left out
SILENT_S = 30.0  # of one call, after which the screen says that the tracker does not answer
CLOSE_LIMIT_S = 60.0  # at the end of a run, for all trackers together

TrackerFactory = Callable[[Path, RunConfig, int], Tracker]

# By name: the class, and the package that it needs. Imported when a run uses it.
_BUILT_IN = {
    "tensorboard": ("TensorBoardTracker", "tensorboard"),
    "wandb": ("WandbTracker", "wandb"),
    "mlflow": ("MlflowTracker", "mlflow"),
    "trackio": ("TrackioTracker", "trackio"),
    "swanlab": ("SwanlabTracker", "swanlab"),
}
_registered: dict[str, TrackerFactory] = {}


def tracker_names() -> list[str]:
    """Return the names that ``trainer.trackers`` accepts, beside import paths."""
    return sorted([*_BUILT_IN, *_registered])


def register_tracker(name: str, factory: TrackerFactory) -> None:
    """Register a tracker as ``name``.

    Raises:
        ConfigError: the name is taken.
    """
    if name in tracker_names():
        raise ConfigError(f"trainer.trackers: {name!r} is registered already; choose another name.")
    _registered[name] = factory


def tracker_factory(name: str) -> TrackerFactory:
    """Return the factory of the tracker ``name``, which is registered or an import path.

    Raises:
        ConfigError: the name is unknown, its package is not installed, or the import path cannot be imported.
    """
    if name in _registered:
        return _registered[name]
    if name in _BUILT_IN:
        cls, package = _BUILT_IN[name]
        if importlib.util.find_spec(package) is None:
            raise ConfigError(
                f"trainer.trackers: {name} needs a package that is not installed. Install it: pip install {package} "
                f"(in a clone: ./uvw run --extra {name} ...)"
            )
        module = f"skyrl_train.observability.trackers.{name}_tracker"
        # Not now: these packages take seconds to import.
        return lambda folder, config, step: import_name(f"{module}:{cls}", "trainer.trackers")(folder, config, step)
    if is_import_path(name):
        factory: TrackerFactory = import_name(name, "trainer.trackers")
        return factory
    raise ConfigError(f"trainer.trackers: {name!r} is unknown.{did_you_mean(name, tracker_names())}")


def tracker_folder(run: Path, name: str) -> Path:
    """Return the folder of a tracker's files."""
    return run / LOGS / name.replace(":", ".").rpartition(".")[2]


class TrackerFeed:
    """The trackers of a run. Its methods return at once, except :meth:`close`, and may be called from any thread.

    Raises:
        ConfigError: see :func:`tracker_factory`.
    """

    def __init__(self, run: Path, config: RunConfig) -> None:
        self._run = run
        self._config = config
        self._factories = [(name, tracker_factory(name)) for name in config.trainer.trackers]
        self._threads: list[_TrackerThread] = []  # between begin and close

    def begin(self, step: int, note: Callable[[str], None]) -> None:
        """Open the trackers for the steps after ``step``. Trackers that an earlier attempt of the run opened are closed first.

        Args:
            note: shows a line on the screen; called in the trackers' threads too.
        """
        if not self._threads:
            self._threads = [
                _TrackerThread(name, make, tracker_folder(self._run, name), self._config)
                for name, make in self._factories
            ]
        for thread in self._threads:
            thread.begin(step, note)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        """See :meth:`Tracker.log`."""
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log(step, metrics))

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        """See :meth:`Tracker.log_samples`.

        Args:
            rows: of ``samples.rows_of``.
        """
        table = sample_table(rows)
        for thread in self._threads:
            thread.put(lambda tracker: tracker.log_samples(phase, step, table))

    def close(self) -> None:
        """Log the report, if the run folder has one, and close the trackers. Idempotent.

        Blocks for at most ``CLOSE_LIMIT_S``, or until Ctrl-C: the run has ended, so an interrupt ends only this wait.
        """
        threads, self._threads = self._threads, []
        report = self._run / REPORT_HTML
        for thread in threads:
            thread.end(report if report.is_file() else None)
        end = time.monotonic() + CLOSE_LIMIT_S
        try:
            for thread in threads:
                thread.join(max(0.0, end - time.monotonic()))
        except KeyboardInterrupt:
            logger.warning("interrupted while trackers take the end of the run; they may lack it")


NO_TRACKERS = TrackerFeed(Path(), RunConfig(trainer=TrainerConfig(trackers=[])))


class _TrackerThread:
    """A tracker with its thread and queue, from ``begin`` to ``end``. None is used again: a thread that hangs keeps them."""

    def __init__(self, name: str, make: TrackerFactory, folder: Path, config: RunConfig) -> None:
        self._name = name
        self._make = make
        self._folder = folder
        self._config = config
        self._queue: queue.SimpleQueue[Callable[[], None] | None] = queue.SimpleQueue()
        self._note: Callable[[str], None] = logger.info
        self._full = False
        self._silent = False
        self._since: float | None = None  # beginning of the call under way
        # Of the thread alone.
        self._tracker: Tracker | None = None
        self._failed = False
        self._thread = threading.Thread(target=self._work, name=f"tracker-{name}", daemon=True)
        self._thread.start()

    def begin(self, step: int, note: Callable[[str], None]) -> None:
        self._note = note
        self._queue.put(self._close)  # a separate call: its failure must not keep the next tracker from opening
        self._queue.put(lambda: self._open(step))

    def put(self, call: Callable[[Tracker], None]) -> None:
        since = self._since
        if since is not None and time.monotonic() - since > SILENT_S and not self._silent:
            self._silent = True
            self._say(f"has not answered for {SILENT_S:.0f} s: its server cannot be reached, or is slow")
        if self._queue.qsize() >= MAX_PENDING:
            if not self._full:
                self._full = True
                self._say("is too slow; some of its data is left out")
            return
        self._queue.put(lambda: None if self._tracker is None else call(self._tracker))

    def end(self, report: Path | None) -> None:
        if report is not None:
            self.put(lambda tracker: tracker.log_report(report))
        self._queue.put(self._close)
        self._queue.put(None)

    def join(self, limit_s: float) -> None:
        self._thread.join(limit_s)
        if self._thread.is_alive():
            self._say("has not taken everything in time")

    def _work(self) -> None:
        while (call := self._queue.get()) is not None:
            self._since = time.monotonic()
            try:
                call()
            except (Exception, SystemExit) as error:  # a package that calls exit() must not end the thread
                # Said once: a network that is down fails each step.
                if not self._failed:
                    self._failed = True
                    self._say(f"failed: {type(error).__name__}: {error}", error)
            self._since = None

    def _open(self, step: int) -> None:
        self._tracker = self._make(self._folder, self._config, step)
        if self._tracker.location:
            self._note(f"  {self._name}: {without_passwords(self._tracker.location)}")

    def _close(self) -> None:
        tracker, self._tracker = self._tracker, None
        if tracker is not None:
            tracker.close()

    def _say(self, text: str, error: BaseException | None = None) -> None:
        text = f"tracker {self._name} {without_passwords(text)}"
        trace = "" if error is None else "\n" + without_passwords("".join(traceback.format_exception(error)).rstrip())
        logger.warning("%s%s", text, trace)
        self._note(f"{text} (the run continues; its folder has everything)")


def without_passwords(text: str) -> str:
    """Return ``text`` without the names and passwords of its addresses, such as MLFLOW_TRACKING_URI: notes and logs are kept."""
    return re.sub(r"://[^/?#\s]*@", "://", text)
