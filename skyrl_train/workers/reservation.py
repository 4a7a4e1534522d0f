"""The resources of a run in a Ray cluster, reserved together: training ranks, engines and other actors with GPUs.

cluster_needs ──place_actors (this cluster's nodes)──> one placement group, a bundle per actor ──> RayPlacement of each actor

Reserved one after the other, engines and ranks would take each other's nodes, and each could wait for the other forever.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import ray
from ray.exceptions import GetTimeoutError, RayError
from ray.util.placement_group import PlacementGroup, placement_group, placement_group_table, remove_placement_group

from skyrl_train.config.cluster import POLICY_RANKS, ClusterNeeds
from skyrl_train.config.placement import NodeResources, PlacedActor, place_actors
from skyrl_train.errors import ConfigError, TrainingWorkerError
from skyrl_train.workers.ray import RayPlacement, cluster_is_own, connect, free_resources

_COMMAND = "the command's processes"
_ASK_S = 300.0  # until a process has started on each GPU, and has said its number
_NODE_ID = "ray.io/node-id"  # a label that Ray gives to each node


class Reservation:
    """One placement group with a bundle for each training rank and each actor with GPUs. Blocks until it is there.

    Args:
        needs: of the run, or of a part of it.
        timeout_s: how long the cluster may take to have room.
        keys: the settings that ask for the resources, for messages.

    Raises:
        ConfigError: Ray cannot be reached, or this process has started Ray and the machine has too little.
        TrainingWorkerError: the cluster has no room within the time, or a node that was reserved starts no process.
    """

    def __init__(self, needs: ClusterNeeds, timeout_s: float, keys: str) -> None:
        connect()
        self._group: PlacementGroup | None = None
        nodes = _free_nodes()
        here, own = next(iter(nodes)), needs.local_gpus
        # Ray does not know which GPUs this process and its children use. They are held, so that no other actor gets them.
        held = [PlacedActor(_COMMAND, 0, 0.0, float(own), 0)] if own and nodes[here].gpus >= own else []
        if held:
            nodes[here] = replace(nodes[here], gpus=nodes[here].gpus - own)
        placed = place_actors(needs, list(nodes.values()))
        if placed is None and cluster_is_own():
            others = "other actors"
            if held:
                others += f" and the run's own processes, which have the GPUs up to number {own - 1},"
            raise ConfigError(
                f"{_described(needs)} need more than {others} leave of the Ray that this run has started on its machine: "
                f"free are {_described_nodes(nodes)}. Lower {keys}, or start a cluster with more (ray start)."
            )
        actors = [*held, *(placed if placed is not None else _unplaced(needs))]
        ids = list(nodes)
        # On nodes that do not exist yet, Ray decides; only rank 0 belongs to this machine.
        pinned = [
            {_NODE_ID: ids[actor.node]} if actor.node >= 0 else {_NODE_ID: ids[0]} if _is_first(actor) else {}
            for actor in actors
        ]
        resources = [
            {name: amount for name, amount in (("CPU", actor.cpus), ("GPU", actor.gpus)) if amount > 0}
            or {"CPU": 0.001}
            for actor in actors
        ]
        self._group = placement_group(resources, strategy="PACK", bundle_label_selector=pinned)
        if not self._group.wait(timeout_s):
            self.release()
            raise TrainingWorkerError(
                f"The cluster has no room for {_described(needs)} after {timeout_s:g} s, the first rank on this machine; "
                f"free now: {free_resources()}. Free some, add nodes, or lower {keys}."
            )
        self._actors = actors
        if held:
            hold = RayPlacement(0, own, placement_group=self._group, bundle_index=0)
            (gpus,) = self._gpus_of([hold])
            if {str(gpu) for gpu in gpus} != (mine := _first_gpus(own)):
                self.release()
                raise ConfigError(
                    f"The run's own processes compute on GPU {', '.join(sorted(mine))} of this machine, and Ray has given them "
                    "to another job, or was started with another CUDA_VISIBLE_DEVICES. Set trainer.strategy=fsdp2 with "
                    "trainer.fsdp.num_workers=1, so that Ray chooses the GPU of training too."
                )

    def placements(self, role: str) -> list[RayPlacement]:
        """Return the placement of each actor of a role: its own bundle."""
        return [
            RayPlacement(actor.cpus, actor.gpus, placement_group=self._group, bundle_index=bundle)
            for bundle, actor in enumerate(self._actors)
            if actor.role == role
        ]

    def beside_ranks(self, number: int, gpus_each: int) -> list[RayPlacement]:
        """Return the placements of ``number`` engines on the GPUs of the policy's ranks, ``gpus_each`` for each engine.

        Ray has given the GPUs to the ranks. An engine's actor asks Ray for none, and sees the GPUs of its ranks. Call it before
        the ranks start.

        Raises:
            ConfigError: the GPUs of an engine are on several nodes.
            TrainingWorkerError: a node does not start a process in its bundle, or is lost; the reservation is released.
        """
        ranks = self.placements(POLICY_RANKS)
        # Before the ranks start, which take them.
        gpus = self._gpus_of([replace(rank, num_cpus=0) for rank in ranks])
        node_of = placement_group_table(self._group)["bundles_to_node_id"]
        here = ray.get_runtime_context().get_node_id()
        found = sorted(  # a node has less than ten GPUs, or names them by UUID
            (node_of[rank.bundle_index] != here, node_of[rank.bundle_index], str(of_rank[0]), rank.bundle_index)
            for rank, of_rank in zip(ranks, gpus, strict=True)
        )
        placements = []
        for engine in range(number):
            mine = found[engine * gpus_each : (engine + 1) * gpus_each]
            if len({node for _, node, _, _ in mine}) > 1:
                on_nodes = list(Counter(node for _, node, _, _ in found).values())
                raise ConfigError(
                    f"An engine of {gpus_each} GPUs would span several nodes: the policy's ranks have {on_nodes} GPUs on theirs. "
                    "Lower generator.inference_engine.tensor_parallel_size, or use nodes with more free GPUs."
                )
            visible = {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for _, _, gpu, _ in mine)}
            bundle = mine[0][3]
            placements.append(RayPlacement(0, 0, environment=visible, placement_group=self._group, bundle_index=bundle))
        return placements

    def _gpus_of(self, placements: Sequence[RayPlacement]) -> list[list[Any]]:
        try:
            asked = [_gpus.options(**placement.options()).remote() for placement in placements]
            return list(ray.get(asked, timeout=_ASK_S))
        except (RayError, GetTimeoutError) as error:
            self.release()
            raise TrainingWorkerError(
                f"A reserved node did not start a process that says which GPUs it has ({type(error).__name__}, limit "
                f"{_ASK_S:g} s). `ray status` and the raylet's log on that node say why; then start the run again."
            ) from error

    def release(self) -> None:
        """Give the resources back, and end every actor that still has some. Idempotent."""
        if self._group is not None:
            remove_placement_group(self._group)
            self._group = None


@ray.remote
def _gpus() -> list[Any]:
    """Return the GPUs of a bundle, which stay the same as long as it exists."""
    return list(ray.get_gpu_ids())


def _first_gpus(number: int) -> set[str]:
    """Return Ray's names of the first GPUs that this process sees: those in CUDA_VISIBLE_DEVICES, else the numbers."""
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    return set(visible.split(",")[:number] if visible else map(str, range(number)))


def _is_first(actor: PlacedActor) -> bool:
    return actor.role == POLICY_RANKS and actor.index == 0


def _unplaced(needs: ClusterNeeds) -> list[PlacedActor]:
    endless = place_actors(needs, [NodeResources(1e9)])
    assert endless is not None
    return [PlacedActor(actor.role, actor.index, actor.cpus, actor.gpus, -1) for actor in endless]


def _free_nodes() -> dict[str, NodeResources]:
    """Return what no placement group has reserved of each living node, by Ray's ids; this machine's comes first."""
    left = {
        node["NodeID"]: {name: float(node["Resources"].get(name, 0.0)) for name in ("CPU", "GPU")}
        for node in ray.nodes()
        if node["Alive"]
    }
    for group in placement_group_table().values():
        if group["state"] == "REMOVED":
            continue
        for bundle, resources in group["bundles"].items():
            node = group["bundles_to_node_id"].get(bundle)
            if node in left:
                left[node] = {name: amount - resources.get(name, 0.0) for name, amount in left[node].items()}
    if not cluster_is_own():  # other jobs have actors without a placement group
        for node, free in ray._private.state.available_resources_per_node().items():
            if node in left:
                left[node] = {name: min(amount, free.get(name, 0.0)) for name, amount in left[node].items()}
    here = ray.get_runtime_context().get_node_id()
    order = sorted(left, key=lambda node: (node != here, -left[node]["GPU"], -left[node]["CPU"], node))
    return {node: NodeResources(round(left[node]["GPU"], 4), round(left[node]["CPU"], 4)) for node in order}


def _described(needs: ClusterNeeds) -> str:
    parts = [
        f"{each.number} {each.role} with {each.cpus:g} CPU and {each.gpus:g} GPU each"
        for each in needs.actors
        if each.gpus or each.role.startswith("ranks")
    ]
    return " and ".join(parts)


def _described_nodes(nodes: Mapping[str, NodeResources]) -> str:
    return ", ".join(f"{node.cpus:g} CPU and {node.gpus:g} GPU" for node in nodes.values())
