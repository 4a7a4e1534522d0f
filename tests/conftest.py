"""How the tests are spread over processes (``pytest -n 2``)."""

from __future__ import annotations

from pathlib import PurePosixPath
from typing import Any

import pytest

# A file's tests run in one process. So do those of all files that share what takes long to start: real vLLM engines, and Ray.
SHARED = {
    "test_vllm": "vllm",
    "test_ray": "ray",
    "test_placement": "ray",
    "test_rollout_actors": "ray",
    "test_distributed": "ray",
}


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """Schedules whole groups of tests."""
    from xdist.scheduler import LoadScopeScheduling

    class Groups(LoadScopeScheduling):
        def _split_scope(self, nodeid: str) -> str:
            name = PurePosixPath(nodeid.partition("::")[0]).stem
            return next((group for start, group in SHARED.items() if name.startswith(start)), name)

    return Groups(config, log)
