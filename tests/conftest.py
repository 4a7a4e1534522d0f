"""How the tests are spread over processes (``pytest -n 2``), the tests of one room (``--room staleness``), and a random order
(``--shuffle 1``)."""

from __future__ import annotations

import os
import random
import sys
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
from rooms import ROOMS, room_of

# The tests start dozens of processes. Where the environment forbids writing bytecode, each of them compiles torch and
# transformers again, which takes 10 s.
os.environ.pop("PYTHONDONTWRITEBYTECODE", None)
sys.dont_write_bytecode = False

# A file's tests run in one process. Files that share a slow start (real vLLM engines, Ray) share a process too.
SHARED = {
    "test_vllm": "vllm",
    "test_ray": "ray",
    "test_executors": "ray",
    "test_rollout_actors": "ray",
    "test_distributed": "ray",
}


def pytest_addoption(parser: pytest.Parser) -> None:
    parser.addoption("--room", help="read and run the tests of one room only; 'list' prints the rooms")
    parser.addoption("--shuffle", type=int, metavar="SEED", help="run the tests in a random order")


def pytest_configure(config: pytest.Config) -> None:
    room = config.getoption("--room")
    if room is not None and room not in ROOMS:
        problem = "" if room == "list" else f"there is no room {room!r}. "
        pytest.exit(f"{problem}Rooms: {', '.join(sorted(ROOMS))}", returncode=0 if room == "list" else 2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    room = config.getoption("--room")
    if room is None or collection_path.is_dir() or not collection_path.name.startswith("test_"):
        return None
    return True if room_of(collection_path.name) != room else None


def pytest_collection_modifyitems(config: pytest.Config, items: list[pytest.Item]) -> None:
    seed = config.getoption("--shuffle")
    if seed is not None:
        order = random.Random(seed)
        # A file's tests stay together: the fixtures of a file are set up once.
        places = {path: order.random() for path in sorted({item.path for item in items})}
        order.shuffle(items)
        items.sort(key=lambda item: places[item.path])
    items.sort(key=lambda item: item.get_closest_marker("ends_shared_engines") is not None)


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePosixPath(nodeid.partition("::")[0]).stem
            return next((group for start, group in SHARED.items() if name.startswith(start)), name)

    return Groups(config, log)
