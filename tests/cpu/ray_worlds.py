"""One Ray for all tests that need it: this machine as two nodes, whose workers are forked.

It ends after the last of these tests, because its services keep a tenth of a core busy.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from forks import Forks, asking_python

if TYPE_CHECKING:
    from distributed_worlds import TwoProcesses

HERE_CPUS, FAR_CPUS = 4, 3
GPUS = 8  # that each node says it has: Ray only counts them
FAR = "far"  # a resource that only the other node has
MORE = "more"  # one that only further nodes have
STORE_BYTES = 80 << 20


class RayNodes:
    """The head, which this process has started, and another node, which can be lost."""

    def __init__(self, forks: Forks) -> None:
        import ray
        from ray.cluster_utils import Cluster

        ray.init(
            address="local",
            num_cpus=HERE_CPUS,
            num_gpus=GPUS,
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
            self._far = self._cluster.add_node(
                num_cpus=FAR_CPUS, num_gpus=GPUS, object_store_memory=STORE_BYTES, resources={FAR: 1}
            )

    @contextmanager
    def with_more(self, number: int) -> Iterator[None]:
        """So many more nodes, with the GPUs of the others."""
        import ray

        added = [
            self._cluster.add_node(
                num_cpus=FAR_CPUS, num_gpus=GPUS, object_store_memory=STORE_BYTES, resources={MORE: 1}
            )
            for _ in range(number)
        ]
        try:
            yield
        finally:
            for node in added:
                self._cluster.remove_node(node, allow_graceful=False)
            while MORE in ray.cluster_resources():
                pass  # as in lose_far

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


class SharedRay:
    """Ray, and two processes for training ranks. Each starts on first use, and again after the end."""

    def __init__(self, forks: Forks) -> None:
        self._forks = forks
        self._nodes: RayNodes | None = None
        self._processes: TwoProcesses | None = None

    def nodes(self) -> RayNodes:
        """Ray with the head at least."""
        if self._nodes is None:
            self._nodes = RayNodes(self._forks)
        return self._nodes

    def two_processes(self) -> TwoProcesses:
        from distributed_worlds import TwoProcesses

        self.nodes()
        if self._processes is None:
            self._processes = TwoProcesses()
        return self._processes

    def close(self) -> None:
        if self._processes is not None:
            self._processes.close()
        if self._nodes is not None:
            self._nodes.close()
        self._nodes = self._processes = None
