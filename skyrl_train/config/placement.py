"""Which node each actor of a run computes on. Pure: ``plan --on`` shows it, and the run reserves it from Ray.

policy's ranks   [r0 r1 r2 r3 r4 r5 r6 r7]            neighbours, rank 0 on the command's node
engines                                    [e0 e0 e0 e0 e1 e1 e1 e1]    all ranks of one engine on one node
                 ─────── node 0 ────────── ─────── node 1 ──────────
"""

from __future__ import annotations

import math
from collections.abc import Sequence, Set
from dataclasses import dataclass, replace

from skyrl_train.config.cluster import POLICY_RANKS, ClusterNeeds

_DIGITS = 4  # as finely as Ray counts


@dataclass(frozen=True, slots=True)
class NodeResources:
    """The free resources of a node."""

    gpus: float
    cpus: float = math.inf


@dataclass(frozen=True, slots=True)
class PlacedActor:
    """An actor, and the index of its node."""

    role: str
    index: int  # among the actors of its role
    cpus: float
    gpus: float
    node: int


def place_actors(needs: ClusterNeeds, nodes: Sequence[NodeResources]) -> list[PlacedActor] | None:
    """Place all actors of a run that use GPUs, and its training ranks.

    Training ranks come first and fill the nodes in their order, so that neighbours share a node. The other actors, those with
    the most GPUs first, take the node that they fill best. If that leaves no node for one of them, the largest actors come
    first. Other actors without GPUs are left to Ray.

    Args:
        nodes: the first is the command's. Its GPUs for processes that Ray does not know of must be subtracted.

    Returns:
        The actors in the order of ``needs``; None if they do not fit.
    """
    wanted = [
        PlacedActor(each.role, index, each.cpus, each.gpus, -1)
        for each in needs.actors
        if each.gpus or each.role.startswith("ranks")
        for index in range(each.number)
    ]
    places = range(len(wanted))
    ranks = [place for place in places if wanted[place].role.startswith("ranks")]
    others = sorted(set(places).difference(ranks), key=lambda place: (-wanted[place].gpus, place))
    # A rank that needs the command's node comes before everything that could take it.
    here = {place for place in ranks if wanted[place].role == POLICY_RANKS and wanted[place].index == 0}
    for order in ([*ranks, *others], [*here, *others, *(place for place in ranks if place not in here)]):
        node_of = _fill(wanted, order, here, nodes)
        if node_of is not None:
            return [replace(actor, node=node_of[place]) for place, actor in enumerate(wanted)]
    return None


def _fill(
    actors: Sequence[PlacedActor], order: Sequence[int], here: Set[int], nodes: Sequence[NodeResources]
) -> dict[int, int] | None:
    """Return the node of each actor, taken one by one in ``order``; None if there is no room for one."""
    gpus, cpus = [node.gpus for node in nodes], [node.cpus for node in nodes]
    node_of: dict[int, int] = {}
    for place in order:
        actor = actors[place]
        room = [
            node
            for node in range(1 if place in here else len(nodes))
            if gpus[node] >= actor.gpus and cpus[node] >= actor.cpus
        ]
        if not room:
            return None
        node = room[0] if actor.role.startswith("ranks") else min(room, key=lambda each: (gpus[each], each))
        gpus[node] = round(gpus[node] - actor.gpus, _DIGITS)
        cpus[node] = round(cpus[node] - actor.cpus, _DIGITS)
        node_of[place] = node
    return node_of
