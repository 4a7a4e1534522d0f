"""Training in a child process: the numbers and errors of a thread, and a clear end when the process dies."""

from __future__ import annotations

import os
import signal
import socket
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from forks import Forks
from training_worlds import backend, config, minibatch, same

from skyrl_train.algorithms.losses import POLICY_LOSSES
from skyrl_train.build import processes
from skyrl_train.build.checks import TRAINING_REGISTRIES
from skyrl_train.build.processes import started_processes
from skyrl_train.config.compose import compose
from skyrl_train.errors import CheckpointError, ModelError, TrainingWorkerError
from skyrl_train.training.backend import TokenRecord, TrainingBackend
from skyrl_train.training.local_backend import LocalCritic
from skyrl_train.training.process import TrainingProcess
from skyrl_train.training.process_backend import ProcessBackend, ProcessCritic
from skyrl_train.weight_sync.disk import DiskTransport

pytestmark = pytest.mark.usefixtures("one_compute_thread")


@pytest.fixture(scope="module")
def alone(folder: str) -> Iterator[ProcessBackend]:
    """A process for the tests that leave it as usable as they found it."""
    made = ProcessBackend(folder, config(), total_steps=10, temperature=1.0, seed=0)
    yield made
    made.close()


def train(policy: TrainingBackend, folder: Path) -> list[object]:
    """Everything that a run asks of its backend, and all answers."""
    first, second = minibatch(seed=1, step=1), minibatch(seed=2, step=2)
    first = replace(first, sequences=[replace(first.sequences[0], record=7), *first.sequences[1:]])
    answers: list[object] = [policy.update(first), policy.take_records()]
    halves = [replace(second, sequences=part, num_groups=2) for part in (second.sequences[:4], second.sequences[4:])]
    policy.accumulate(minibatch(seed=3, step=2))
    policy.discard()
    for half in halves:
        policy.accumulate(half)
    answers.append(policy.finish(2))
    policy.offload_states()
    policy.reload_states()
    snapshot = policy.snapshot()
    saved = folder / "state"
    saved.mkdir(parents=True)
    answers += [policy.save(snapshot, saved), policy.update(minibatch(seed=4, step=3))]
    policy.load(saved)
    answers += [policy.update(minibatch(seed=5, step=3)), policy.forward_logprobs(minibatch(seed=9).sequences)]
    policy.export_hf(folder / "policy")
    answers.append((folder / "policy" / "model.safetensors").read_bytes())
    return answers


def plain(answer: object) -> object:
    """``answer`` with lists in place of tensors and arrays, and without times."""
    match answer:
        case torch.Tensor() | np.ndarray():
            return answer.tolist()
        case TokenRecord() | list():
            return [plain(part) for part in answer]
        case dict():
            return {key: plain(value) for key, value in answer.items() if "per_second" not in str(key)}
    return answer


def test_a_process_answers_like_a_thread_bit_for_bit(alone: ProcessBackend, folder: str, tmp_path: Path) -> None:
    here = backend(folder)
    ours, theirs = train(here, tmp_path / "thread"), train(alone, tmp_path / "process")
    assert list(map(plain, theirs)) == list(map(plain, ours))
    assert same(dict(alone.named_weights()), dict(here.named_weights()))


def test_a_critic_in_a_process_values_like_one_in_a_thread(folder: str) -> None:
    settings = config()
    here, there = LocalCritic(folder, settings, 10), ProcessCritic(folder, settings, 10)
    try:
        batch = minibatch()
        returns = [replace(s, values=s.advantages * 0, returns=s.advantages) for s in batch.sequences]
        metrics = [plain(critic.update(replace(batch, sequences=returns))) for critic in (here, there)]
        assert metrics[0] == metrics[1]
        assert plain(there.forward_values(returns)) == plain(here.forward_values(returns))
    finally:
        there.close()


class FreedOnDemand(DiskTransport):
    """As if its copies lay on a device."""

    def release(self) -> bool:
        while self._files:
            self._files.pop().unlink()
        return True


def test_staging_copies_are_released_in_the_process_that_holds_them(alone: ProcessBackend, tmp_path: Path) -> None:
    transport = FreedOnDemand(str(tmp_path))
    assert not alone.release_staging(transport), "there are none yet"
    place = Path(alone.stage(transport, 0).location)
    assert place.is_file()
    assert alone.release_staging(transport) and not place.exists()
    assert Path(alone.stage(transport, 1).location).is_file()


def test_weights_are_staged_in_the_process_until_it_closes(folder: str, tmp_path: Path) -> None:
    policy = ProcessBackend(folder, config(), total_steps=10, temperature=1.0, seed=0)
    try:
        transport = DiskTransport(str(tmp_path))
        places = [Path(policy.stage(transport, version).location) for version in (0, 1)]
        assert all(place.is_file() for place in places)
    finally:
        policy.close()
    assert not any(place.exists() for place in places)
    policy.close()  # does nothing


def test_an_error_arrives_with_its_class_and_leaves_the_process_usable(alone: ProcessBackend, tmp_path: Path) -> None:
    (tmp_path / "empty").mkdir()
    with pytest.raises(CheckpointError):
        alone.load(tmp_path / "empty")
    with pytest.raises(ValueError, match="accumulated") as raised:
        alone.finish(99)
    assert "in finish" in raised.value.__notes__[0]  # the traceback of the process
    with pytest.raises(OSError, match="No such file"):
        alone.save(alone.snapshot(), tmp_path / "missing" / "folder")
    assert len(alone.forward_logprobs(minibatch().sequences)) == len(minibatch().sequences)


def test_a_model_that_cannot_be_loaded_ends_the_process(tmp_path: Path) -> None:
    process = TrainingProcess()
    with pytest.raises(ModelError):
        ProcessBackend(str(tmp_path), config(), 10, 1.0, 0, process)
    assert process.wait(0) is not None


def test_a_scheduler_that_ends_all_processes_leaves_training_to_the_driver(alone: ProcessBackend) -> None:
    os.kill(alone.pid, signal.SIGTERM)
    assert alone.forward_logprobs(minibatch().sequences)


def test_a_process_that_is_not_needed_ends_without_a_word(capfd: pytest.CaptureFixture[str]) -> None:
    process = TrainingProcess()
    process.connection.shutdown(socket.SHUT_WR)
    process.wait()
    assert capfd.readouterr().err == ""
    process.stop()


def test_a_program_with_threads_trains_in_a_process_unless_the_process_would_lack_the_loss(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name in ("TrainingProcess", "EngineProcess"):
        monkeypatch.setattr(processes, name, lambda fork: SimpleNamespace(stop=lambda: None))
    monkeypatch.setitem(POLICY_LOSSES._entries, "of_this_program", lambda inputs: None)

    def in_a_process(loss: str, *, threads: bool) -> bool:
        monkeypatch.setattr(processes, "single_threaded", lambda: not threads)
        with started_processes(compose("quickstart", [f"trainer.algorithm.policy_loss_type={loss}"])) as started:
            return started.policy is not None

    assert in_a_process("gspo", threads=True)
    assert not in_a_process("of_this_program", threads=True)
    assert not in_a_process("__main__:loss", threads=True)
    assert in_a_process("of_this_program", threads=False)  # a fork


def test_the_librarys_own_names_are_not_of_the_program() -> None:
    of_program = [
        name for registry in TRAINING_REGISTRIES.values() for name in registry.names() if registry.is_of_program(name)
    ]
    assert of_program == []


def test_counting_the_prompts_leaves_a_program_that_can_be_forked(
    forks: Forks, folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("TOKENIZERS_PARALLELISM", raising=False)
    program = (
        "import importlib, sys\n"
        "import skyrl_train.entrypoints\n"
        "importlib.reload(skyrl_train.entrypoints)\n"  # the fork was imported with another environment
        "from skyrl_train.config.compose import compose\n"
        "from skyrl_train.entrypoints.inputs import load_inputs\n"
        "from skyrl_train.workers.process import single_threaded\n"
        f"load_inputs(compose('quickstart', ['trainer.policy.model.path={folder}']))\n"
        "sys.exit(0 if single_threaded() else 'it has other threads')\n"
    )
    assert forks.Popen([sys.executable, "-c", program]).wait() == 0


def test_the_death_of_the_process_names_its_cause_and_the_remedy(folder: str) -> None:
    policy = ProcessBackend(folder, config(), total_steps=10, temperature=1.0, seed=0)
    os.kill(policy.pid, signal.SIGKILL)
    with pytest.raises(TrainingWorkerError, match=r"exit code -9 in update.* out of memory.*trainer\.max_restarts"):
        policy.update(minibatch())
    with pytest.raises(TrainingWorkerError):
        policy.discard()
    policy.close()
