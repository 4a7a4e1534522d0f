"""One Ray for all tests of a process: this machine as two nodes, whose workers are forked."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import pytest
from forks import Forks, asking_python

if TYPE_CHECKING:
    from distributed_worlds import TwoProcesses

HERE_CPUS, FAR_CPUS = 4, 3
FAR = "far"  # a resource that only the other node has
STORE_BYTES = 80 << 20


class RayNodes:
    """The head, which this process has started, and another node, which can be lost."""

    def __init__(self, forks: Forks) -> None:
        import ray
        from ray.cluster_utils import Cluster

        ray.init(
            address="local",
            num_cpus=HERE_CPUS,
            object_store_memory=STORE_BYTES,
            include_dashboard=False,
            log_to_driver=False,
            # A dead node is noticed after a few looks: by default 5, every 3 s. A busy one has 10 s to answer each.
            # By default workers get what other processes leave over, which on a busy machine is nearly nothing.
            _system_config={
                "health_check_initial_delay_ms": 500,
                "health_check_period_ms": 300,
                "worker_niceness": 0,
            },
            runtime_env={"py_executable": asking_python(forks.address)},
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


@pytest.fixture(scope="session")
def ray_nodes(forks: Forks) -> Iterator[RayNodes]:
    """Ray, with the head only; without Ray, skips the test."""
    pytest.importorskip("ray")
    nodes = RayNodes(forks)
    yield nodes
    nodes.close()


@pytest.fixture(scope="session")
def two_processes(ray_nodes: RayNodes) -> Iterator[TwoProcesses]:
    """Two processes for training ranks."""
    from distributed_worlds import TwoProcesses

    processes = TwoProcesses()
    yield processes
    processes.close()
