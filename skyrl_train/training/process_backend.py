"""Training in a child process: the control loop, the trainer and the engines each have an interpreter lock of their own.

    driver                                                        child process
    ProcessBackend, ProcessCritic ──Call──> socket ──> answer ──> LocalBackend, LocalCritic
                                  <──Result | Raised──

A second socket and a thread at its end carry ``save``, which runs beside training.
"""

from __future__ import annotations

import gc
import os
import signal
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import TrainingWorkerError
from skyrl_train.runtime.process import write_output_to
from skyrl_train.training.backend import (
    CriticBackend,
    Minibatch,
    TokenRecord,
    Training,
    TrainingBackend,
    TrainingSequence,
)
from skyrl_train.training.local_backend import LocalBackend, LocalCritic, limit_memory
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role, recovery_advice, transport_key
from skyrl_train.training.process import TrainingProcess
from skyrl_train.workers.messages import Call, Raised, Result
from skyrl_train.workers.process import SocketChannel

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

BESIDE = b"beside"  # travels with the second socket
EXIT_WAIT_S = 1.0  # time between a process closing its sockets and its exit code


# The driver's side ----------------------------------------------------------------------------------------------------


class ProcessTraining(Training):
    """The common part of policy and critic: the child process that holds the model.

    Every method raises what the method of the same name of :class:`LocalBackend` raises, and TrainingWorkerError if the
    process is gone.

    Attributes:
        pid: the process.
    """

    def __init__(
        self, role: Role, settings: ModelSettings, process: TrainingProcess | None, log_file: Path | None
    ) -> None:
        """
        Args:
            process: one that was started earlier; None: start one.
            log_file: for all output of the process; None: it shares this process's streams.
        """
        self._process = TrainingProcess() if process is None else process
        self.pid = self._process.pid
        self._recovery = recovery_advice(settings.trainer)
        beside, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self._process.connection, [BESIDE], [theirs.fileno()])
        self._calls, self._saves = _CallSocket(self._process.connection), _CallSocket(beside)
        try:
            self._call("load_model", role, settings, log_file)
        except BaseException:
            self._process.stop()
            raise

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        metrics: dict[str, float] = self._call("update", *_packed(minibatch))
        return metrics

    def accumulate(self, part: Minibatch) -> None:
        self._call("accumulate", *_packed(part))

    def finish(self, step: int) -> dict[str, float]:
        metrics: dict[str, float] = self._call("finish", step)
        return metrics

    def discard(self) -> None:
        self._call("discard")

    def snapshot(self) -> dict[str, object]:
        snapshot: dict[str, object] = self._call("snapshot")
        return snapshot

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        checksums: dict[str, str] = self._call("save", snapshot, folder.absolute(), over=self._saves)
        return checksums

    def load(self, folder: Path) -> None:
        self._call("load", folder.absolute())

    def offload_states(self) -> None:
        self._call("offload_states")

    def reload_states(self) -> None:
        self._call("reload_states")

    def close(self) -> None:
        """End the process, which first removes the weights that it has staged. Idempotent."""
        with suppress(TrainingWorkerError):  # it is gone
            self._call("close")
        self._saves.connection.close()
        self._process.stop()

    def _score(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.from_numpy(row) for row in self._call("score", PackedSequences.of(sequences))]

    def _call(self, method: str, *arguments: Any, over: _CallSocket | None = None) -> Any:
        try:
            return (over or self._calls).call(method, *arguments)
        except EOFError as error:
            code = self._process.wait(EXIT_WAIT_S)
            # Only the kernel kills it like that without being asked.
            hint = " The system may have run out of memory." if code == -signal.SIGKILL else ""
            raise TrainingWorkerError(
                f"The training process (pid {self.pid}) ended with exit code {code} in {method}.{hint} {self._recovery}"
            ) from error


class ProcessBackend(ProcessTraining, TrainingBackend):
    """A :class:`LocalBackend` in a child process. Equal inputs give bit-identical weights, in the process and in a thread."""

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        temperature: float,
        seed: int,
        process: TrainingProcess | None = None,
        log_file: Path | None = None,
        memory_fraction: float | None = None,
    ) -> None:
        """Other arguments and errors as for :class:`LocalBackend` and :class:`ProcessTraining`.

        Args:
            memory_fraction: of its GPU that the process may use; None: all.
        """
        settings = ModelSettings(model_path, trainer_config, total_steps, temperature, seed, memory_fraction)
        super().__init__(Role.policy, settings, process, log_file)
        self._transports: list[WeightTransport] = []

    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(sequences)

    def take_records(self) -> dict[int, TokenRecord]:
        records: dict[int, TokenRecord] = self._call("take_records")
        return records

    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """See :meth:`TrainingBackend.named_weights`; they are copied to this process."""
        yield from self._call("named_weights")

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        """See :meth:`TrainingBackend.stage`. The transport is sent to the process in its initial state, and must not be used
        in this one."""
        key = transport_key(self._transports, transport)
        update: WeightUpdate = self._call("stage", key, transport, version)
        return update

    def release_staging(self, transport: WeightTransport) -> bool:
        released: bool = self._call("release_staging", transport_key(self._transports, transport))
        return released

    def export_hf(self, folder: Path) -> None:
        self._call("export_hf", folder.absolute())


class ProcessCritic(ProcessTraining, CriticBackend):
    """A :class:`LocalCritic` in a child process."""

    def __init__(
        self,
        model_path: str,
        trainer_config: TrainerConfig,
        total_steps: int,
        process: TrainingProcess | None = None,
        log_file: Path | None = None,
    ) -> None:
        """Arguments and errors as for :class:`LocalCritic` and :class:`ProcessTraining`."""
        settings = ModelSettings(model_path, trainer_config, total_steps, 1.0, trainer_config.seed)
        super().__init__(Role.critic, settings, process, log_file)

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return self._score(sequences)


class _CallSocket:
    """One call at a time over a socket. The caller waits in the read itself: a thread that reads for it would have to wait for
    the interpreter lock twice."""

    def __init__(self, connection: socket.socket) -> None:
        self.connection = connection
        self._channel = SocketChannel(connection)
        self._calling = threading.Lock()

    def call(self, method: str, *arguments: Any) -> Any:
        """Raises: EOFError: the other end is closed; any error of the method."""
        with self._calling:
            self._channel.send([Call(0, method, arguments)])
            (answer,) = self._channel.receive(block=True)
        if isinstance(answer, Raised):
            raise answer.error
        assert isinstance(answer, Result), "the answer to a call"
        return answer.value


def _packed(minibatch: Minibatch) -> tuple[PackedSequences, Minibatch]:
    return PackedSequences.of(minibatch.sequences), replace(minibatch, sequences=())


# In the process -------------------------------------------------------------------------------------------------------


class _ModelHost:
    """Answers the calls of the driver whose arguments or results travel in another form; ``model`` answers all others."""

    def __init__(self) -> None:
        self._transports: dict[int, WeightTransport] = {}

    def load_model(self, role: Role, settings: ModelSettings, log_file: Path | None) -> None:
        """Load the model. Called once, first."""
        if log_file is not None:
            write_output_to(log_file)
        path, trainer, steps = settings.model_path, settings.trainer, settings.total_steps
        if settings.memory_fraction is not None:
            limit_memory(trainer.device, settings.memory_fraction)
        if role is Role.critic:
            self.model: LocalBackend | LocalCritic = LocalCritic(path, trainer, steps)
        else:
            self.model = LocalBackend(path, trainer, steps, settings.temperature, settings.seed)
        # A full collection that walks all that was imported and built would stall the step that it falls into.
        gc.collect()
        gc.freeze()

    def update(self, sequences: PackedSequences, of: Minibatch) -> dict[str, float]:
        return self.model.update(replace(of, sequences=sequences.unpack()))

    def accumulate(self, sequences: PackedSequences, of: Minibatch) -> None:
        self.model.accumulate(replace(of, sequences=sequences.unpack()))

    def score(self, sequences: PackedSequences) -> list[npt.NDArray[np.generic]]:
        model = self.model
        score = model.forward_logprobs if isinstance(model, LocalBackend) else model.forward_values
        return [row.numpy() for row in score(sequences.unpack())]

    def named_weights(self) -> list[tuple[str, torch.Tensor]]:
        assert isinstance(self.model, LocalBackend), "a critic's weights go nowhere"
        return [(name, weight.cpu()) for name, weight in self.model.named_weights()]

    def stage(self, key: int, transport: WeightTransport, version: int) -> WeightUpdate:
        """``transport``: in its initial state; the first one with this key stays open here."""
        assert isinstance(self.model, LocalBackend), "a critic's weights go nowhere"
        return self.model.stage(self._transports.setdefault(key, transport), version)

    def release_staging(self, key: int) -> bool:
        return key in self._transports and self._transports[key].release()

    def close(self) -> None:
        for transport in self._transports.values():
            transport.close()


def serve(channel: SocketChannel) -> None:
    """Serve one model until the driver is gone."""
    # A scheduler may send it to all processes of a job: the driver decides when training ends.
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    torch.set_num_threads(int(os.environ["OMP_NUM_THREADS"]))  # a forked process has its parent's number
    _, descriptors, _, _ = socket.recv_fds(channel.connection, len(BESIDE), 1)
    if not descriptors:  # the driver ends without having used this process
        return
    beside = SocketChannel(socket.socket(fileno=descriptors[0]))
    host = _ModelHost()
    threading.Thread(target=_answer, args=(beside, host), name="beside", daemon=True).start()
    _answer(channel, host)


def _answer(channel: SocketChannel, host: _ModelHost) -> None:
    with suppress(EOFError):
        while True:
            for call in channel.receive(block=True):
                assert isinstance(call, Call), "the driver sends nothing else"
                outcome: Result | Raised
                try:
                    answers = host if hasattr(_ModelHost, call.method) else host.model
                    outcome = Result(call.id, getattr(answers, call.method)(*call.arguments))
                except Exception as error:
                    outcome = Raised.of(call.id, error)
                channel.send([outcome])
