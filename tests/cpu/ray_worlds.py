"""One Ray for all tests of a process: this machine as two nodes, whose workers are forked."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import ray_forks

if TYPE_CHECKING:
    from distributed_worlds import TwoProcesses

HERE_CPUS, FAR_CPUS = 4, 3
FAR = "far"  # a resource that only the other node has
STORE_BYTES = 80 << 20


class RayNodes:
    """The head, which this process has started, and another node, which can be lost."""

    def __init__(self, sockets: Path) -> None:
        import ray
        from ray.cluster_utils import Cluster

        path = str(sockets / "forks")
        self._forks = subprocess.Popen(
            [sys.executable, ray_forks.__file__, "--serve", path],
            stdin=subprocess.PIPE,  # its end is the server's end
            stdout=subprocess.PIPE,
            env={**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        assert self._forks.stdout is not None and self._forks.stdout.readline()
        ray.init(
            address="local",
            num_cpus=HERE_CPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            # A dead node is noticed after a few looks: by default 5, every 3 s. A busy one has 10 s to answer each.
            _system_config={"health_check_initial_delay_ms": 500, "health_check_period_ms": 300},
            runtime_env={"py_executable": f"{sys.executable} -S -E -s {ray_forks.__file__} {path}"},
        )
        self._cluster = Cluster()
        self._cluster.head_node = ray._private.worker._global_node
        self._cluster.redis_address = None
        self._far: Any = None

    def have_far(self) -> None:
        """The other node is there from now on."""
        if self._far is None:
            self._far = self._cluster.add_node(num_cpus=FAR_CPUS, object_store_memory=STORE_BYTES, resources={FAR: 1})

    def lose_far(self) -> None:
        """The other node's processes are killed. Returns when the head knows it."""
        import ray

        far, self._far = self._far, None
        self._cluster.remove_node(far, allow_graceful=False)
        while FAR in ray.cluster_resources():
            pass  # each look is a round trip; a later test counts the CPUs

    def close(self) -> None:
        import ray

        if self._far is not None:
            self.lose_far()
        ray.shutdown()
        self._forks.kill()
        self._forks.wait()


@pytest.fixture(scope="session")
def ray_nodes(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RayNodes]:
    """Ray, with the head only; without Ray, skips the test."""
    pytest.importorskip("ray")
    nodes = RayNodes(tmp_path_factory.mktemp("ray"))
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def two_processes(ray_nodes: RayNodes) -> Iterator[TwoProcesses]:
    """Two processes for training ranks."""
    from distributed_worlds import TwoProcesses

    processes = TwoProcesses()
    yield processes
    processes.close()
