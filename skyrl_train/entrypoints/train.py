"""Trains: ``python -m skyrl_train.entrypoints.train --config-name=RECIPE [--dry-run] key=value ...``.

Exit codes: 0 trained to the end, or stopped by SIGTERM / Ctrl-C with a checkpoint; 1 the run failed; 2 a setting or an
input is wrong; 130 interrupted before training began.
"""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
import threading
import time
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import asynccontextmanager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

from rich.console import Console

from skyrl_train.config import derive
from skyrl_train.config.compose import compose, recipe_names
from skyrl_train.config.fit import fit
from skyrl_train.config.import_path import forget_files
from skyrl_train.config.machine import this_machine
from skyrl_train.config.plan import Plan, resolve
from skyrl_train.config.refusals import raise_problems, refuse
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.entrypoints.stop_signals import StopSignals, sigterm_as_ctrl_c
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError, ModelError, RolloutError, SkyRLError, TrainingWorkerError
from skyrl_train.evaluation.data import load_evaluation_prompts
from skyrl_train.garbage import settle_collector
from skyrl_train.inference.engines.embedded.hosts import WorkerProcess
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder, choose_run_folder, left_behind
from skyrl_train.observability.summary import final_line, resume_command, spent_s, summarize, train_command
from skyrl_train.rollout.dataloader import build_loader
from skyrl_train.rollout.dataset import PromptDataset, check_alphabet, open_prompts
from skyrl_train.threads import LeavableThreads

if TYPE_CHECKING:
    from skyrl_train.rollout.streaming import StreamingPrompts
    from skyrl_train.trainer import PPOTrainer

MODULE = "skyrl_train.entrypoints.train"
T = TypeVar("T")
WATCH_INTERVAL_S = 1.0  # how often the screen is told what goes on between two steps


def main(argv: Sequence[str] | None = None) -> int:
    """Parses the command line, runs, and returns the exit code."""
    started = time.monotonic()
    arguments = list(sys.argv[1:] if argv is None else argv)
    parser = argparse.ArgumentParser(prog=f"python -m {MODULE}", description="Trains a policy as a recipe says.")
    parser.add_argument(
        "--config-name",
        default="quickstart",
        help=f"a recipe ({', '.join(recipe_names())}) or a yaml file; default: quickstart",
    )
    parser.add_argument("--config-dir", help="a folder with recipes of your own")
    parser.add_argument("--dry-run", action="store_true", help="print the resolved plan and stop")
    parser.add_argument("overrides", nargs="*", help="settings as key=value")
    options = parser.parse_intermixed_args(arguments)
    console = Console()
    forget_files()
    try:
        config = compose(options.config_name, options.overrides, options.config_dir)
        dataset = open_prompts(config)
        evaluation_prompts = load_evaluation_prompts(config)
        if isinstance(dataset, PromptDataset) and config.trainer.policy.model.path is None:
            check_alphabet(dataset, config.trainer.policy.model.build.alphabet)
        build_loader(dataset, config.data, config.trainer.seed)  # says now what is wrong with the sampler
        plan = resolve(config, dataset.num_prompts)
        fits = fit(plan, this_machine(gpus=derive.trains_on_gpus(config)))
        if options.dry_run:
            check_implementations(config)
            console.print(plan.describe(), markup=False, highlight=False, soft_wrap=True)
        for warning in fits.tight:
            console.print(f"memory may not suffice: {warning}", markup=False, highlight=False, soft_wrap=True)
        raise_problems(fits.impossible)
        if options.dry_run:
            return 0
        with sigterm_as_ctrl_c():
            return run(config, plan, dataset, evaluation_prompts, console, arguments, started)
    except KeyboardInterrupt:  # while starting up: once training runs, signals are handled
        Console(stderr=True).print("interrupted before training began; give the same command again")
        return 130
    except SkyRLError as error:
        text = "\n".join([f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())])
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
        return 2 if isinstance(error, ConfigError | DataError | ModelError) else 1


def run(
    config: RunConfig,
    plan: Plan,
    dataset: PromptDataset | StreamingPrompts,
    evaluation_prompts: Sequence[PromptRecord],
    console: Console,
    arguments: Sequence[str],
    started: float,
) -> int:
    """Trains in the run folder that ``config`` names or continues; returns the exit code.

    Args:
        started: when the command was, on the monotonic clock.
    """
    with engine_workers(config) as workers:  # first: their imports take as long as the ones here
        console.print("Starting: libraries, model, engines.", highlight=False)
        check_implementations(config)
        abandoned = left_behind(config)  # looked for before the new run's own folder is there
        choice = choose_run_folder(config)
        if choice.finished:
            console.print(
                f"{choice.path} has finished training; nothing is left to do. Give another trainer.run_dir to train again.",
                markup=False,
                soft_wrap=True,
            )
            return 0
        if abandoned and not choice.resuming and config.trainer.run_dir is None:
            console.print(abandoned, markup=False, highlight=False, soft_wrap=True)
        with RunFolder(choice.path, config) as run_folder, log_file(run_folder.logs / "train.log"):
            asked_to_stop = threading.Event()
            finished, start_step = train_restarting(
                lambda reporter, workers: run_loop(
                    _train(config, plan, dataset, evaluation_prompts, run_folder, reporter, workers, asked_to_stop)
                ),
                config,
                lambda: Reporter(config, run_folder, console, plan.total_steps),
                workers,
                console,
                asked_to_stop,
            )
            rows = run_folder.read_metrics()
            summary = summarize(rows)
            if finished:
                run_folder.mark_finished(summary.to_dict())
            launcher = os.environ.get("SKYRL_TRAIN_LAUNCHER", "")  # set by ./uvw
            again = train_command(MODULE, arguments, launcher)
            resume = resume_command(MODULE, arguments, str(run_folder.path), launcher)
            line = final_line(
                summary,
                str(run_folder.path),
                finished=finished,
                command=again if finished else resume,
                seconds=spent_s(rows, start_step, time.monotonic() - started),
            )
            console.print(line, markup=False, highlight=False, soft_wrap=True)
    return 0


def run_loop(main: Coroutine[Any, Any, T]) -> T:
    """As ``asyncio.run``; but a task that calls ``exit()`` ends the run as a failed one, whatever exit code it gave.

    Raises:
        RolloutError: one did.
    """
    try:
        return asyncio.run(main)
    except SystemExit as error:
        raise RolloutError(
            f"A task beside the run's own called exit({error.code}), which ends the run; its last checkpoint stands. Catch "
            "SystemExit where a generator, in tasks that it makes, runs other people's code."
        ) from error


def train_restarting(
    train: Callable[[Reporter, Sequence[WorkerProcess]], bool],
    config: RunConfig,
    new_reporter: Callable[[], Reporter],
    workers: Sequence[WorkerProcess],
    console: Console,
    asked_to_stop: threading.Event,
) -> tuple[bool, int]:
    """Trains; goes on from the last checkpoint, with new workers and engines, when a training worker has died.

    Returns:
        Whether the run got to its last step, and the step that it started after.

    Raises:
        TrainingWorkerError: one died once more than ``trainer.max_restarts``, or after the run was asked to stop: what stops a
            run often stops its workers too.
        Exception: whatever else ended the run; nothing is tried again then.
    """
    start_step: int | None = None
    for left in range(config.trainer.max_restarts, -1, -1):
        reporter = new_reporter()
        try:
            finished = train(reporter, workers)
        except TrainingWorkerError as error:
            if not left or asked_to_stop.is_set():
                raise
            text = f"{error}\nThe run starts again from its last checkpoint; restarts left: {left - 1}."
            console.print(text, markup=False, highlight=False, soft_wrap=True)
            workers = ()  # those given here have ended with the run: engines start their own
        else:
            return finished, reporter.start_step if start_step is None else start_step
        finally:
            reporter.close()
        start_step = reporter.start_step if start_step is None else start_step
    raise AssertionError("the last round returns or raises")


@contextmanager
def engine_workers(config: RunConfig) -> Iterator[list[WorkerProcess]]:
    """The processes of embedded engines, where there are any; they have ended when this has."""
    engine = config.generator.inference_engine
    number = engine.num_engines + config.trainer.eval.num_engines
    wanted = number if (engine.backend, engine.placement) == ("embedded", "process") else 0
    workers = [WorkerProcess() for _ in range(wanted)]
    try:
        yield workers
    finally:
        for worker in workers:
            worker.stop()


def check_implementations(config: RunConfig) -> None:
    """Checks what only the implementations know; last, because importing them takes seconds.

    Raises:
        ConfigError: a name is unknown; the message names the nearest known one. Or a loss of one's own cannot work so.
        ModelError: the model's path looks like a folder, and there is none.
    """
    os.environ.setdefault("OMP_NUM_THREADS", "1")  # read as torch is imported; the cores are shared with the engines
    from skyrl_train.implementation_checks import (
        check_devices,
        check_import_paths,
        check_model_path,
        check_objective,
        known_names,
    )

    refuse(config, known_names())
    check_devices(config)
    check_objective(config)
    check_import_paths(config)
    check_model_path(config)


@contextmanager
def log_file(path: Path) -> Iterator[None]:
    """Writes this library's log to ``path``."""
    handler = logging.FileHandler(path)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    logging.getLogger("skyrl_train").addHandler(handler)
    try:
        yield
    finally:
        logging.getLogger("skyrl_train").removeHandler(handler)
        handler.close()


@asynccontextmanager
async def watched(trainer: PPOTrainer, reporter: Reporter) -> AsyncIterator[None]:
    """Tells the screen every second what ``trainer`` is busy with, so that a run which finishes no step shows why."""

    async def watch() -> None:
        while True:
            await asyncio.sleep(WATCH_INTERVAL_S)
            counts = trainer.rollout.staleness.counts
            reporter.waiting(counts.running, counts.failed, trainer.rollout.runner.retries)

    watching = asyncio.create_task(watch(), name="screen")
    try:
        yield
    finally:
        watching.cancel()
        await asyncio.gather(watching, return_exceptions=True)


async def _train(
    config: RunConfig,
    plan: Plan,
    dataset: PromptDataset | StreamingPrompts,
    evaluation_prompts: Sequence[PromptRecord],
    run_folder: RunFolder,
    reporter: Reporter,
    workers: Sequence[WorkerProcess],
    asked_to_stop: threading.Event,
) -> bool:
    """Builds the trainer and trains; whether the run got to its last step."""
    from skyrl_train.assembly import build_trainer

    asyncio.get_running_loop().set_default_executor(LeavableThreads())
    trainer = await build_trainer(config, plan, dataset, run_folder, reporter, workers, evaluation_prompts)
    settle_collector()

    def stop() -> None:
        asked_to_stop.set()
        reporter.note("stopping after this step; once more to stop at once")
        trainer.request_stop()

    with StopSignals(stop, before_end=reporter.close):
        async with watched(trainer, reporter):
            await trainer.train()
    return trainer.finished and not trainer.evaluation.cancelled


if __name__ == "__main__":
    sys.exit(main())
