"""The part of ``skyrl-train doctor`` that looks at all nodes of a Ray cluster, with a process on each.

cluster ──connect──> a Probe per node ──look──> folders and versions, compared ──ping──> gloo, and NCCL between GPUs
"""

from __future__ import annotations

import importlib.metadata
import os
import platform
import socket
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

from packaging.requirements import Requirement

from skyrl_train.config.cluster import cluster_needs
from skyrl_train.config.schema import RunConfig, TrainingStrategy
from skyrl_train.config.validate import validate
from skyrl_train.errors import ConfigError, first_line

LIMIT_S = 120.0  # for the processes to start and to look
PING_LIMIT_S = 60.0  # for the nodes to find each other
PINGS = 5  # of which the quickest counts

DISTRIBUTION = "skyrl-async"
Finding = tuple[str, str, str]  # name of the check, result, and remedy: empty if the check has passed


@dataclass(frozen=True)
class NodeReport:
    """What a process on a node has seen.

    Attributes:
        node: its name.
        versions: of Python and packages; "missing" for those that are not installed.
        unwritable: why the folder of the runs cannot be written; empty: it can be.
        shared: whether the node sees a file that the command has just written there; None: it could not write one.
        no_model: whether the folder of the model is missing.
    """

    node: str
    versions: dict[str, str]
    unwritable: str
    shared: bool | None
    no_model: bool


class Probe:
    """A process on a node."""

    def look(self, packages: Sequence[str], runs: str, written: str | None, model: str | None) -> NodeReport:
        """Return the versions of ``packages``, and what the node sees of these paths."""
        unwritable = ""
        try:
            tempfile.TemporaryFile(dir=existing(Path(runs))).close()
        except OSError as error:
            unwritable = str(error)
        versions = {"Python": platform.python_version()} | {name: version_of(name) for name in packages}
        shared = None if written is None else Path(written).exists()
        return NodeReport(
            socket.gethostname(), versions, unwritable, shared, model is not None and not Path(model).exists()
        )

    def host_store(self, ranks: int) -> tuple[str, int]:
        """Serve the store through which the ranks of :meth:`ping` meet. Returns its address and port."""
        import ray
        from torch.distributed import TCPStore  # type: ignore[attr-defined]

        host = ray.util.get_node_ip_address()
        limit = timedelta(seconds=PING_LIMIT_S)
        self._store = TCPStore(host, 0, ranks, is_master=True, wait_for_workers=False, timeout=limit)
        return host, self._store.port

    def ping(self, rank: int, ranks: int, host: str, port: int, backend: str) -> float | None:
        """Add up a number over all ranks, and return the milliseconds of the quickest of five. None: ``nccl``, and no GPU."""
        import torch
        import torch.distributed as dist
        from torch.distributed import PrefixStore, TCPStore  # type: ignore[attr-defined]

        from skyrl_train.training.distributed.worker import gloo_towards

        if backend == "nccl" and not torch.cuda.is_available():
            return None
        limit = timedelta(seconds=PING_LIMIT_S)
        store = getattr(self, "_store", None) or TCPStore(host, port, ranks, timeout=limit)
        with gloo_towards(host):
            dist.init_process_group(
                backend, store=PrefixStore(backend, store), rank=rank, world_size=ranks, timeout=limit
            )
        try:
            times = []
            for _ in range(PINGS):
                number = torch.ones(1, device="cuda" if backend == "nccl" else "cpu")
                began = time.perf_counter()
                dist.all_reduce(number)
                if number.item() != ranks:
                    raise RuntimeError(f"{ranks} ranks added up to {number.item():g}")
                times.append(time.perf_counter() - began)
            return 1000 * min(times)
        finally:
            dist.destroy_process_group()


def existing(folder: Path) -> Path:
    """Return the folder, or the nearest of its parents that exists."""
    return next(path for path in (folder, *folder.parents) if path.exists())


def version_of(package: str) -> str:
    """Return the version of an installed package, or "missing"."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return "missing"


def cluster(config: RunConfig) -> Iterator[Finding]:
    """All nodes of the Ray cluster on which a recipe computes: folders, versions, and whether they reach each other."""
    if validate(config).errors or not cluster_needs(config).actors:
        return
    try:
        import ray
        from ray._private.utils import read_ray_address
        from ray.exceptions import RayError

        from skyrl_train.workers.ray import connect
    except ImportError:
        yield "Ray", "the recipe uses it, and it is not installed", f"pip install '{DISTRIBUTION}[cluster]'"
        return
    with ExitStack() as stack:
        if not ray.is_initialized():
            if os.environ.get("RAY_ADDRESS", "local") == "local" and read_ray_address() is None:
                yield (
                    "cluster",
                    "no Ray cluster runs here and RAY_ADDRESS names none: the run starts Ray on this machine",
                    "",
                )
                return
            stack.callback(ray.shutdown)
            try:
                connect()
            except ConfigError as error:
                yield "cluster", "cannot be reached", str(error)
                return
        nodes = [node for node in ray.nodes() if node["Alive"]]
        on_gpus = config.trainer.strategy is TrainingStrategy.fsdp2 and "cuda" in str(config.trainer.device)
        probes = []
        for node in nodes:
            actor = ray.remote(Probe).options(
                num_cpus=0,
                num_gpus=1 if on_gpus and node["Resources"].get("GPU", 0) >= 1 else 0,
                scheduling_strategy=ray.util.scheduling_strategies.NodeAffinitySchedulingStrategy(
                    node["NodeID"], soft=False
                ),
                runtime_env={"env_vars": dict(config.trainer.fsdp.environment)},
            )
            probes.append(actor.remote())
            stack.callback(ray.kill, probes[-1])
        runs = Path(config.trainer.run_dir or config.trainer.runs_dir).absolute()
        model = config.trainer.policy.model.path
        model = model if model is not None and Path(model).exists() else None
        packages = sorted({Requirement(text).name for text in required()} | {"ray", "vllm", DISTRIBUTION})
        written = None
        with suppress(OSError):  # the check of this machine has said so
            written = stack.enter_context(tempfile.NamedTemporaryFile(dir=existing(runs), prefix=".doctor-")).name
        reports = []
        for node, probe in zip(nodes, probes, strict=True):
            name = node["NodeManagerHostname"]
            try:
                call = probe.look.remote(packages, str(runs), written, model and str(Path(model).absolute()))
                reports.append(ray.get(call, timeout=LIMIT_S))
            except ray.exceptions.GetTimeoutError:
                free = "a free GPU, or " if on_gpus else ""
                yield (
                    "node",
                    f"{name} has started no process in {LIMIT_S:.0f} s",
                    f"It needs {free}an end of its load: ray status",
                )
            except RayError as error:
                yield (
                    "node",
                    f"{name}: {first_line(error)}",
                    f"pip install '{DISTRIBUTION}=={version_of(DISTRIBUTION)}' there",
                )
        # Also with ckpt_path: one node sends the files there.
        sharded = config.trainer.strategy is TrainingStrategy.fsdp2
        yield from compared(reports, str(runs), model, must_share=sharded)
        if len(reports) < len(nodes) or len(nodes) == 1:
            return
        for backend in ("gloo", "nccl") if on_gpus else ("gloo",):
            name = f"{backend} between {len(nodes)} nodes"
            try:
                host, port = ray.get(probes[0].host_store.remote(len(probes)), timeout=LIMIT_S)
                calls = [probe.ping.remote(rank, len(probes), host, port, backend) for rank, probe in enumerate(probes)]
                took: list[Any] = ray.get(calls, timeout=LIMIT_S + PING_LIMIT_S)
            except RayError as error:
                cause = first_line(getattr(error, "cause", None) or error)
                remedy = (
                    f"Open all ports between the nodes, or name the network that joins them: trainer.fsdp.environment="
                    f"{{{backend.upper()}_SOCKET_IFNAME: INTERFACE}}"
                )
                yield name, cause, remedy
                continue
            if None in took:
                without = ", ".join(report.node for report, one in zip(reports, took, strict=True) if one is None)
                yield name, f"PyTorch sees no GPU on {without}", "Install the driver, or a PyTorch for CUDA, there"
            else:
                yield name, f"{max(took):.2g} ms to add up a number", ""


def required() -> list[str]:
    """Return the requirements of this library; none where it is not installed."""
    try:
        return importlib.metadata.requires(DISTRIBUTION) or []
    except importlib.metadata.PackageNotFoundError:
        return []


def compared(reports: Sequence[NodeReport], runs: str, model: str | None, *, must_share: bool) -> Iterator[Finding]:
    """Compare what the nodes have seen.

    Args:
        runs: the folder of the runs.
        model: the folder of the model; None: it has none.
        must_share: whether the nodes have to see the same folder of runs.
    """
    if not reports:
        return
    alike = True
    for package in reports[0].versions:
        places: dict[str, list[str]] = {}
        for report in reports:
            places.setdefault(report.versions[package], []).append(report.node)
        if len(places) > 1:
            alike = False
            found = ", ".join(f"{version} on {' and '.join(nodes)}" for version, nodes in places.items())
            remedy = "Install the same Python on all nodes"
            if package != "Python":
                wanted = next(version for version in places if version != "missing")
                remedy = f"pip install {package}=={wanted} on the others"
            yield f"{package} of the nodes", found, remedy
    if alike:
        yield "versions of the nodes", f"the same on {len(reports)}", ""
    for report in reports:
        if report.unwritable:
            yield (
                "runs of the nodes",
                f"{report.node}: {report.unwritable}",
                "Let it write there, or set trainer.runs_dir",
            )
        elif report.shared is False and must_share:
            yield (
                "runs of the nodes",
                f"{report.node} does not see what this machine writes in {runs}",
                "Ranks write checkpoints: name a folder on a disk that all nodes share in trainer.runs_dir",
            )
        if report.no_model:
            yield "model of the nodes", f"{report.node} has no {model}", "Copy it there, to the same path"
    if not any(report.unwritable or (report.shared is False and must_share) for report in reports):
        shared = "the same on all nodes" if all(report.shared for report in reports) else "writable on all nodes"
        yield "runs of the nodes", f"{runs} is {shared}", ""
