"""One training run in this process, from a configuration to its result; the command line and ``skyrl_train.train`` share it.

config ──load_inputs──> RunInputs ──train──> run folder, engines, trainer ──> RunResult
"""

from __future__ import annotations

import asyncio
import functools
import gc
import hashlib
import importlib
import json
import logging
import os
import platform
import subprocess
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator
from contextlib import ExitStack, asynccontextmanager, closing, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from skyrl_train.build.processes import StartedProcesses, started_processes
from skyrl_train.config.compare import changes
from skyrl_train.config.schema import RunConfig
from skyrl_train.config.validate import raise_errors
from skyrl_train.entrypoints.beside import Readers
from skyrl_train.entrypoints.inputs import RunInputs, check_implementations
from skyrl_train.entrypoints.stop_signals import StopSignals
from skyrl_train.errors import ConfigError, RolloutError, SkyRLError, TrainingWorkerError
from skyrl_train.observability.gpus import gpu_metrics
from skyrl_train.observability.readers.settings import without_key
from skyrl_train.observability.report.files import try_to_write_report
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import (
    CONFIG,
    FINISHED,
    METRICS,
    TRAINER_LOG,
    RunChoice,
    RunFolder,
    choose_run_folder,
    left_behind,
    read_config,
    read_jsonl,
    replace_file,
    trains_now,
)
from skyrl_train.observability.screen import RunSummary, spent_s, summarize
from skyrl_train.observability.trackers.feed import TrackerFeed
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.runtime.process import DaemonThreadPool, add_log_file, gc_paused, gc_tuned
from skyrl_train.training.checkpoint import POINTER
from skyrl_train.version import __version__

if TYPE_CHECKING:
    from skyrl_train.trainer import PPOTrainer

logger = logging.getLogger(__name__)
T = TypeVar("T")
GIT_LIMIT_S = 5.0
MAX_WARNING = 2000  # characters of a warning in the record
GPU_INTERVAL_S = 10.0  # nvidia-smi takes some tens of milliseconds of a core
SCREEN_INTERVAL_S = 1.0  # how often the screen is told about the work between two steps

_running = threading.Lock()  # held while a run trains in this process


@dataclass(frozen=True)
class RunResult:
    """How a run ended.

    Attributes:
        path: the run folder.
        finished: whether the run has trained its last step; False after a requested stop.
        was_finished: whether the folder held a finished run already, so that nothing was trained now.
        seconds: that the run took, earlier attempts at it included.
    """

    path: Path
    finished: bool
    was_finished: bool
    summary: RunSummary
    seconds: float


class StopRequest:
    """Asks a run to stop after its current step, with a checkpoint. Usable from any thread, before and during the run.

    Attributes:
        requested: whether the run was asked to stop.
    """

    def __init__(self) -> None:
        self.requested = False
        self._lock = threading.Lock()
        self._on_request: Callable[[], object] | None = None

    def request(self) -> None:
        """Stop the run after its current step."""
        with self._lock:
            self.requested = True
            # Called after the lock is released: the function may take other locks.
            on_request = self._on_request
        if on_request is not None:
            on_request()

    @contextmanager
    def calls(self, stop: Callable[[], None]) -> Iterator[None]:
        """Inside the block, a request calls ``stop`` on the running event loop; at once if there was one before."""
        loop = asyncio.get_running_loop()
        with self._lock:
            self._on_request = functools.partial(loop.call_soon_threadsafe, stop)
            requested = self.requested
        if requested:
            stop()
        try:
            yield
        finally:
            with self._lock:
                self._on_request = None


def train(
    inputs: RunInputs,
    console: Console,
    stop: StopRequest | None = None,
    started: float | None = None,
    readers: Readers | None = None,
) -> RunResult:
    """Train in the run folder that the configuration names or continues. Blocks until the run has ended.

    In the main thread SIGTERM and Ctrl-C request a stop, and a second one ends the process.

    Args:
        stop: requests a stop from elsewhere.
        started: when the command began, on the monotonic clock; by default now.
        readers: of the run, which begin when its folder exists.

    Raises:
        ConfigError: a run is under way in this process, this machine's memory cannot hold the training's state, or the run
            folder cannot be used.
        SkyRLError: the run failed; its last checkpoint stands.
    """
    # Otherwise the system would kill this process, and maybe others.
    raise_errors(inputs.memory.impossible)
    began = time.monotonic() if started is None else started
    request, config = StopRequest() if stop is None else stop, inputs.config
    if not _running.acquire(blocking=False):
        raise ConfigError("A run is under way in this process. Wait for it, or start this one in another process.")
    with ExitStack() as stack:
        stack.callback(_running.release)
        stack.callback(gc.unfreeze)
        console.print("Starting: libraries, model, engines.", highlight=False)
        with gc_paused():
            check_implementations(config)
            importlib.import_module("skyrl_train.build.checks").check_machine(config)
            processes = stack.enter_context(started_processes(config))  # before the other imports: theirs run meanwhile
            importlib.import_module("skyrl_train.build.trainer")
        abandoned = left_behind(config)  # before the folder of the new run exists
        choice = choose_run_folder(config, inputs.plan.total_steps)
        if choice.finished:
            summary = summarize(read_jsonl(choice.path / METRICS))
            return RunResult(choice.path, finished=True, was_finished=True, summary=summary, seconds=0.0)
        if abandoned and not choice.resuming and config.trainer.run_dir is None:
            console.print(abandoned, markup=False, highlight=False, soft_wrap=True)
        if config.trainer.init_from is not None and not choice.resuming:
            from skyrl_train.build.export import find_source  # imports torch

            try:
                find_source(config.trainer.init_from, config)
            except SkyRLError:  # the folder stays free for the corrected command
                with suppress(OSError):
                    choice.path.rmdir()
                raise
        return_to_step(choice, config)
        # Read before the folder gets the new configuration.
        changed = changes(read_config(choice.path), config) if choice.resuming else []
        # The folder stays locked over all restarts.
        run_folder = stack.enter_context(closing(RunFolder(choice.path, config)))
        stack.enter_context(log_file(run_folder.logs / TRAINER_LOG))
        page_url = None
        if readers is not None:
            readers.begin(run_folder.path)
            page_url = readers.url
        trackers = TrackerFeed(run_folder.path, config)
        stack.callback(trackers.close)  # after the report, which they get
        stack.callback(try_to_write_report, run_folder.path)
        stack.callback(run_folder.close)  # before the report: only then are all events and samples on the disk
        stack.enter_context(recorded_process(run_folder))
        logger.info("%s the run in %s", "resuming" if choice.resuming else "starting", run_folder.path)
        logger.info("start-up: libraries, data and checks took %.1f s", time.monotonic() - began)
        logger.info("the plan:\n%s", inputs.plan.describe())
        for note in inputs.prompt_limit.notes:
            logger.info("data: %s", note)
        for warning in inputs.plan.warnings:
            logger.warning("%s", warning)
        for change in changed:
            text = f"resumes with {change}" + (f"; {change.warning}" if change.warning else "")
            logger.log(logging.WARNING if change.warning else logging.INFO, "%s", text)
            console.print(text, markup=False, highlight=False, soft_wrap=True)
        try:
            finished, start_step = train_restarting(
                lambda reporter, processes: run_loop(_train(inputs, run_folder, reporter, processes, request)),
                config,
                lambda: Reporter(config, run_folder, console, inputs.plan.total_steps, trackers, page_url),
                processes,
                console,
                request,
            )
        except BaseException:
            # The screen shows the message only.
            logger.exception("the run has failed")
            raise
        # Read from the file: earlier commands have written some of the steps.
        summary = summarize(read_jsonl(run_folder.metrics.path))
        if finished:
            # From now on the same command starts a new run.
            replace_file(run_folder.path / FINISHED, json.dumps(asdict(summary), indent=2) + "\n")
        seconds = spent_s(read_jsonl(run_folder.metrics.path), start_step, time.monotonic() - began)
        if summary.only_reward is not None:
            logger.warning("all samples have the reward %g: there was nothing to learn", summary.only_reward)
        logger.info("the run has %s after %.0f s: %s", "finished" if finished else "stopped", seconds, summary)
        return RunResult(run_folder.path, finished, was_finished=False, summary=summary, seconds=seconds)


def return_to_step(choice: RunChoice, config: RunConfig) -> None:
    """Let the run resume from the checkpoint of ``trainer.resume_step``, unless its last command had this value too.

    Raises:
        ConfigError: there is no run or no such checkpoint, or another process trains in the folder.
        CheckpointError: the checkpoint is damaged.
    """
    step = config.trainer.resume_step
    if step is None:
        return
    if not choice.resuming:
        raise ConfigError(
            f"trainer.resume_step={step}: {choice.path} has no run to resume. Name a run in trainer.run_dir; a new run starts "
            "from the policy of another one with trainer.init_from=RUN:STEP."
        )
    if read_config(choice.path).trainer.resume_step == step:
        return
    if trains_now(choice.path):
        raise ConfigError(f"trainer.resume_step={step}: a process trains in {choice.path}. Stop it first.")
    checkpoint = load_run(choice.path).checkpoint(step)
    replace_file(checkpoint.parent / POINTER, checkpoint.name + "\n")


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """Like ``asyncio.run``, but a task that calls ``exit()`` fails the run, with any exit code.

    Raises:
        RolloutError: a task called ``exit()``.
    """
    try:
        return asyncio.run(main)
    except SystemExit as error:
        raise RolloutError(
            f"A task beside the run's own called exit({error.code}), which ends the run; its last checkpoint stands. Catch "
            "SystemExit where a generator runs other people's code in tasks."
        ) from error


def train_restarting(
    train: Callable[[Reporter, StartedProcesses], bool],
    config: RunConfig,
    new_reporter: Callable[[], Reporter],
    processes: StartedProcesses,
    console: Console,
    stop: StopRequest,
) -> tuple[bool, int]:
    """Train; after the death of a training worker, continue from the last checkpoint with new workers and engines.

    Returns:
        Whether the run trained its last step, and the step that it started after.

    Raises:
        TrainingWorkerError: workers died more than ``trainer.max_restarts`` times, or after a stop was requested (what
            stops a run often stops its workers too).
        Exception: any other failure, at its first occurrence.
    """
    start_step: int | None = None
    for left in range(config.trainer.max_restarts, -1, -1):
        reporter = new_reporter()
        try:
            finished = train(reporter, processes)
        except TrainingWorkerError as error:
            if not left or stop.requested:
                raise
            text = f"{error}\nThe run starts again from its last checkpoint; restarts left: {left - 1}."
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            processes = StartedProcesses()  # those given here have ended with the run: the next one starts its own
        else:
            return finished, reporter.start_step if start_step is None else start_step
        finally:
            reporter.close()
        start_step = reporter.start_step if start_step is None else start_step
    raise AssertionError("the last round returns or raises")


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Write this library's log from INFO on to ``path``."""
    library = logging.getLogger("skyrl_train")
    level = library.level
    handler = add_log_file(path)
    try:
        yield
    finally:
        library.setLevel(level)
        library.removeHandler(handler)
        handler.close()


@contextmanager
def recorded_process(run_folder: RunFolder) -> Iterator[None]:
    """Record this process, and during the block this library's warnings and errors, as events."""
    git = None
    with suppress(OSError, subprocess.SubprocessError):
        git = subprocess.run(
            ["git", "rev-parse", "HEAD"], capture_output=True, check=True, text=True, timeout=GIT_LIMIT_S
        ).stdout.strip()
    run_folder.events.record(
        "process",
        host=platform.node(),
        pid=os.getpid(),
        version=__version__,
        python=platform.python_version(),
        config=hashlib.sha256((run_folder.path / CONFIG).read_bytes()).hexdigest(),
        git=git,
        command=[without_key(argument) for argument in sys.argv],
    )

    class Warnings(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            text = record.getMessage()[:MAX_WARNING]
            run_folder.events.record("warning", level=record.levelname, source=record.name, text=text)

    handler = Warnings(logging.WARNING)
    logging.getLogger("skyrl_train").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("skyrl_train").removeHandler(handler)


@asynccontextmanager
async def watched(trainer: PPOTrainer, reporter: Reporter) -> AsyncIterator[None]:
    """Every second, tell the screen what ``trainer`` is busy with (so that a run without finished steps shows why), and record
    the state of its engines; every ten seconds, look at this machine's GPUs."""

    async def record() -> None:
        while True:
            await asyncio.sleep(SCREEN_INTERVAL_S)
            trainer.reports.observe(await trainer.components.client.record_engines(SCREEN_INTERVAL_S))

    async def look_at_gpus() -> None:
        while metrics := await asyncio.to_thread(gpu_metrics):  # none: this machine has none
            trainer.reports.observe(metrics)
            await asyncio.sleep(GPU_INTERVAL_S)

    async def watch() -> None:
        while True:
            await asyncio.sleep(SCREEN_INTERVAL_S)
            counts, groups = trainer.rollout.staleness.counts, trainer.rollout.group_generator
            reporter.waiting(counts.running, counts.failed, groups.retries, groups.oldest_s)

    watching = [asyncio.create_task(watch(), name="screen"), asyncio.create_task(record(), name="engine-states")]
    if "cuda" in str((trainer.config.trainer.device, trainer.config.generator.inference_engine.device)):
        watching.append(asyncio.create_task(look_at_gpus(), name="gpus"))
    try:
        yield
    finally:
        for task in watching:
            task.cancel()
        await asyncio.gather(*watching, return_exceptions=True)


async def _train(
    inputs: RunInputs,
    run_folder: RunFolder,
    reporter: Reporter,
    processes: StartedProcesses,
    stop: StopRequest,
) -> bool:
    """Build the trainer and train; return whether the run trained its last step."""
    from skyrl_train.build.trainer import build_trainer

    asyncio.get_running_loop().set_default_executor(DaemonThreadPool())
    dataset = inputs.dataset
    if not isinstance(dataset, PromptDataset) and dataset.closed:  # by a run whose training worker has died
        dataset = dataset.reopened()
    try:
        trainer = await build_trainer(
            inputs.config, inputs.plan, dataset, run_folder, reporter, processes, inputs.evaluation_prompts
        )
    except BaseException as error:
        # As the trainer does from now on: without an end, readers take the run for one that was killed.
        stopped = isinstance(error, asyncio.CancelledError | KeyboardInterrupt)
        step = max((row["step"] for row in read_jsonl(run_folder.metrics.path)), default=0)
        run_folder.events.record(
            "end",
            step=step,
            reason="stopped" if stopped else "failed",
            error=None if stopped else f"{type(error).__name__}: {error}",
        )
        raise

    def stop_trainer() -> None:
        reporter.note("stopping after this step; once more to stop at once")
        trainer.request_stop()

    # Python delivers signals to the main thread only; elsewhere (a notebook's cell) the caller requests the stop.
    in_main_thread = threading.current_thread() is threading.main_thread()
    with gc_tuned(), stop.calls(stop_trainer), ExitStack() as stack:
        if in_main_thread:
            stack.enter_context(StopSignals(stop.request, before_end=reporter.close))
        async with watched(trainer, reporter):
            await trainer.train()
    return trainer.finished and not trainer.evaluation.cancelled
