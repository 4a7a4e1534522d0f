"""The child processes that a run starts before its own imports. Imports no torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass

from skyrl_train.build.checks import trains_with_code_of_program
from skyrl_train.config import derive
from skyrl_train.config.schema import RunConfig, TrainerConfig
from skyrl_train.inference.engines.embedded.engine import EngineProcess
from skyrl_train.training.process import TrainingProcess
from skyrl_train.workers.process import single_threaded


@dataclass(frozen=True, slots=True)
class StartedProcesses:
    """Processes that wait for their settings. A model whose process is None trains in a thread, unless ``trainer.executor`` is
    ``process``."""

    engines: Sequence[EngineProcess] = ()  # embedded engines, those of an evaluation last
    policy: TrainingProcess | None = None
    critic: TrainingProcess | None = None


@contextmanager
def started_processes(config: RunConfig) -> Iterator[StartedProcesses]:
    """Start the processes of embedded engines and of training, as far as the configuration has them; end them on leaving."""
    engine, trainer = config.generator.inference_engine, config.trainer
    number = engine.num_engines + derive.num_evaluation_engines(config)
    wanted = number if (engine.backend, engine.executor) == ("embedded", "process") else 0
    with ExitStack() as stack:

        def training(of: TrainerConfig) -> TrainingProcess | None:
            if derive.training_executor(of, engine) != "process":
                return None
            # Without a fork it is a new interpreter, which has nothing that the program has registered.
            if of.executor is None and not single_threaded() and trains_with_code_of_program(config):
                return None
            process = TrainingProcess(fork=of.device == "cpu")
            stack.callback(process.stop)
            return process

        engines = []
        for _ in range(wanted):
            engines.append(EngineProcess(fork=engine.device == "cpu"))
            stack.callback(engines[-1].stop)
        has_critic = derive.needs_critic(trainer.algorithm)
        critic = training(derive.critic_trainer(trainer)) if has_critic else None
        yield StartedProcesses(engines, training(trainer), critic)
