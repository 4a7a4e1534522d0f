"""What holds for every test here."""

from __future__ import annotations

import gc
import os
import random
import ssl
from collections.abc import Iterator
from contextlib import nullcontext
from typing import TYPE_CHECKING

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported, as the commands do: threads that outnumber cores crawl
os.environ.setdefault("RAY_ENABLE_UV_RUN_RUNTIME_ENV", "0")  # before Ray is imported, as skyrl_train.workers.ray does

import composition
import numpy as np
import pytest
import torch
from forked_runs import ForkedRuns
from forks import FORKS, Forks
from groups import group_of
from ray_worlds import RayNodes, SharedRay
from training_worlds import folder, one_compute_thread  # noqa: F401
from vllm_engines import reading_back, started_vllm, tied_vllm, vllm, vllm_forks  # noqa: F401  one of each per session

from skyrl_train.config import import_path
from skyrl_train.entrypoints import run

if TYPE_CHECKING:
    from distributed_worlds import TwoProcesses


@pytest.fixture(scope="session")
def forks(pytestconfig: pytest.Config) -> Forks:
    """Starts programs in processes that have imported everything."""
    return pytestconfig.stash[FORKS]


@pytest.fixture(scope="session")
def forked_runs(forks: Forks) -> ForkedRuns:
    """Runs commands of the library, and scripts, in such processes."""
    return ForkedRuns(forks)


@pytest.fixture
def trainer_elsewhere(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lets gloo see the trainer on another machine than the engines, which then receive a broadcast.

    It waits for all engines of a transfer, however busy the machine.
    """
    monkeypatch.setattr("skyrl_train.weight_sync.process_group.JOIN_WAIT_S", 600.0)
    monkeypatch.setattr("skyrl_train.weight_sync.process_group.machine", lambda: "another machine")


RAY = pytest.StashKey[SharedRay]()


@pytest.fixture(scope="module")
def ray_nodes(pytestconfig: pytest.Config, forks: Forks) -> RayNodes:
    """Ray, with the head at least; without Ray, skips the test."""
    pytest.importorskip("ray")
    return pytestconfig.stash.setdefault(RAY, SharedRay(forks)).nodes()


@pytest.fixture(scope="module")
def two_processes(pytestconfig: pytest.Config, ray_nodes: RayNodes) -> TwoProcesses:
    """Two processes for training ranks."""
    return pytestconfig.stash[RAY].two_processes()


@pytest.hookimpl(wrapper=True)
def pytest_runtest_teardown(item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
    yield
    if RAY in item.config.stash and (nextitem is None or group_of(nextitem.nodeid) != group_of(item.nodeid)):
        item.config.stash[RAY].close()


@pytest.fixture(scope="session", autouse=True)
def _hosted_objects_are_forked(forks: Forks) -> Iterator[None]:
    """Their processes have imported everything. ``test_quickstart`` starts one from nothing, as a run does."""
    with pytest.MonkeyPatch.context() as patch:
        forks.install(patch)
        yield


@pytest.fixture(scope="session", autouse=True)
def _not_launched_by_uvw() -> Iterator[None]:
    """The commands that a run prints depend on how it was launched; tests that look at them are launched by pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SKYRL_TRAIN_LAUNCHER", raising=False)
        yield


FREEZING = {"freeze": gc.freeze, "unfreeze": gc.unfreeze}


@pytest.fixture(scope="session", autouse=True)
def _no_full_collections() -> Iterator[None]:
    """A run collects all garbage before it trains. In a process that has imported everything, this takes longer than to train.

    At its end a run lets the collector see again what it has frozen. Here that would be all that has been imported, which each
    full collection of the later tests would walk through.
    """
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(run, "gc_tuned", nullcontext)
        for name in FREEZING:
            patch.setattr(gc, name, lambda: None)
        yield


@pytest.fixture
def freezing(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Freezes and unfreezes objects as a run does."""
    for name, function in FREEZING.items():
        monkeypatch.setattr(gc, name, function)
    yield
    FREEZING["freeze"]()


@pytest.fixture(scope="session", autouse=True)
def _no_certificates() -> Iterator[None]:
    """Clients of the tests talk to this machine only, without TLS. Each would read all certificates first, for 60 ms."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ssl.SSLContext, "load_verify_locations", lambda *_, **__: None)
        yield


@pytest.fixture(scope="module", autouse=True)
def _recipes_composed_once(request: pytest.FixtureRequest) -> Iterator[None]:
    """Everywhere but in the tests of the composition itself."""
    with pytest.MonkeyPatch.context() as patch:
        if request.module.__name__ != "test_config_compose":
            composition.install(patch)
        yield


@pytest.fixture(autouse=True)
def _same_random_numbers() -> None:
    """What a test draws from the generators of the process does not depend on the tests before it."""
    random.seed(0)
    np.random.seed(0)
    # Not torch.manual_seed, which records a traceback for each kind of GPU that is not there.
    torch.default_generator.manual_seed(0)


@pytest.fixture(autouse=True)
def _files_run_anew(monkeypatch: pytest.MonkeyPatch) -> None:
    """Files that settings name are run once in a process, and keep what belongs to its event loop (an HTTP client). A test is a
    process to them."""
    monkeypatch.setattr(import_path, "_modules", {})
