"""The child processes that a run starts before its own imports. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.schema import RunConfig, TrainingStrategy
from skyrl_train.inference.engines.embedded.engine import EngineProcess
from skyrl_train.training.process import TrainingProcess


@dataclass(frozen=True, slots=True)
class StartedProcesses:
    """Processes that wait for their settings."""

    engines: Sequence[EngineProcess] = ()  # embedded engines, those of an evaluation last
    training: TrainingProcess | None = None


@contextmanager
def started_processes(config: RunConfig) -> Iterator[StartedProcesses]:
    """Start the processes of embedded engines and of training, as far as the configuration has them; end them on leaving."""
    engine, trainer = config.generator.inference_engine, config.trainer
    number = engine.num_engines + derive.num_evaluation_engines(config)
    wanted = number if (engine.backend, engine.executor) == ("embedded", "process") else 0
    training = None
    with ExitStack() as stack:
        engines = [EngineProcess(fork=engine.device == "cpu") for _ in range(wanted)]
        for process in engines:
            stack.callback(process.stop)
        is_local = trainer.strategy is TrainingStrategy.local
        if is_local and derive.training_executor(trainer, engine) == "process":
            training = TrainingProcess(fork=trainer.device == "cpu")
            stack.callback(training.stop)
        yield StartedProcesses(engines, training)
