"""What holds for every test here."""

from __future__ import annotations

import os
from collections.abc import Iterator

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # before torch is imported, as the commands do: threads that outnumber cores crawl

import pytest
from hypothesis import settings
from vllm_engines import started_vllm, tied_vllm, vllm  # noqa: F401  one of each per session

# Machines are shared and slow at times, so an example's wall-clock time says nothing. In CI the examples are the same each
# time; everywhere else new ones are tried.
settings.register_profile("here", deadline=None)
settings.register_profile("ci", deadline=None, derandomize=True)
settings.load_profile("ci" if os.environ.get("CI") else "here")


# Under xdist (-n), a file's tests run in one process. So do all files whose tests share something that takes long to start or
# that one machine has once: real vLLM engines, and Ray.
SHARED = {
    "test_vllm": "vllm",
    "test_ray": "ray",
    "test_placement": "ray",
    "test_rollout_actors": "ray",
    "test_distributed": "ray",
}


@pytest.hookimpl(tryfirst=True)  # xdist reads the marks in the same hook
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Says which tests belong to one process."""
    for item in items:
        name = item.path.stem
        group = next((group for start, group in SHARED.items() if name.startswith(start)), name)
        item.add_marker(pytest.mark.xdist_group(group))


@pytest.fixture(scope="session", autouse=True)
def _not_launched_by_uvw() -> Iterator[None]:
    """The commands that a run prints depend on how it was launched; tests that look at them are launched by pytest."""
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("SKYRL_TRAIN_LAUNCHER", raising=False)
        yield
