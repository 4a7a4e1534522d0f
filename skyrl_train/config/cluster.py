"""The processors that a run needs: on the machine of its command, and in a Ray cluster. Pure; nothing is started.

cluster_needs  GPUs of the command's machine, and the actors that Ray places
nodes_for      the number of alike nodes that hold the actors
node_cpus      the CPUs that each of them needs
node_memory    the main memory that each of them needs, estimated
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.memory import MemoryEstimate
from skyrl_train.config.schema import RunConfig, TrainingStrategy

_GIB = 2**30
_PROCESS_BYTES = 2 * _GIB  # of a process that has imported torch
_SPARE_BYTES = 8 * _GIB  # of the trainer's process and of Ray, beside models
UNKNOWN_BYTES = 64 * _GIB  # if only loading the model would tell its size
_COMMAND_CPUS = 2  # one thread trains, one runs the event loop
# Roles of actors
POLICY_RANKS, CRITIC_RANKS, REFERENCE_ACTORS = (
    "ranks of the policy",
    "ranks of the critic",
    "actors of the reference policy",
)
ENGINES, REPLICA = "engines", "replica of the policy"


@dataclass(frozen=True, slots=True)
class RayActors:
    """Actors of a run that are alike."""

    role: str  # in the plural
    number: int
    cpus: float  # that Ray reserves for each
    gpus: float


@dataclass(frozen=True, slots=True)
class ClusterNeeds:
    """What a run computes on.

    Attributes:
        local_gpus: GPUs of the command's machine for processes that Ray does not know of.
        engine_processes: of engines on that machine.
        actors: in Ray; empty: the run does not use Ray.
    """

    local_gpus: int
    engine_processes: int
    actors: tuple[RayActors, ...]

    @property
    def ray_gpus(self) -> float:
        """The GPUs that Ray reserves."""
        return round(sum(each.number * each.gpus for each in self.actors), 4)


def cluster_needs(config: RunConfig) -> ClusterNeeds:
    """Derive the processors from a valid configuration."""
    trainer, rollout, engine = config.trainer, config.rollout, config.generator.inference_engine
    evaluation_engines, engines = derive.num_evaluation_engines(config), derive.num_all_engines(config)
    actors, devices, engine_processes = [], [], 0
    trained = [(POLICY_RANKS, trainer)]
    if derive.needs_critic(trainer.algorithm) and not derive.critic_is_colocated(trainer):
        trained.append((CRITIC_RANKS, derive.critic_trainer(trainer)))
    for role, each in trained:
        if each.strategy is TrainingStrategy.fsdp2:
            fsdp = each.fsdp
            actors.append(RayActors(role, fsdp.num_workers, fsdp.ray_num_cpus, derive.fsdp_num_gpus(each)))
        else:
            devices.append(each.device)
    reference = rollout.stages.reference
    if derive.reference_is_local(config):
        devices.append(derive.reference_device(config))
    elif derive.needs_reference(trainer.algorithm) and reference.executor in ("ray", "workers"):
        number = reference.num_workers if reference.executor == "workers" else reference.max_parallel
        gpus = derive.reference_num_gpus(config)
        actors.append(RayActors(REFERENCE_ACTORS, number, reference.ray_num_cpus, gpus))
    if derive.has_replica(config):
        if rollout.stages.proximal.executor == "ray":
            gpus = derive.replica_num_gpus(config)
            actors.append(RayActors(REPLICA, 1, rollout.stages.proximal.ray_num_cpus, gpus))
        else:
            devices.append(derive.replica_device(config))
    if engine.executor == "ray":
        # In turns with the ranks, whose CPUs and GPUs are reserved.
        shared = derive.engines_share_ranks(config)
        cpus, gpus = (0.0, 0.0) if shared else (engine.ray_num_cpus, derive.engine_ray_num_gpus(engine))
        actors.append(RayActors(ENGINES, engines, cpus, gpus))
    elif engine.backend != "vllm_remote":
        # vLLM has a front end, and a scheduler with the model.
        engine_processes = engines * (2 if engine.backend == "vllm" else 1)
        if engine.backend == "embedded" or engine.device == "cpu":
            devices.append(engine.device)
        else:
            devices += [f"cuda:{gpu}" for index in range(engines) for gpu in derive.engine_devices(engine, index)]
    reward = rollout.stages.reward
    if reward.function is not None and reward.executor == "ray":
        actors.append(RayActors("reward actors", reward.max_parallel, reward.ray_num_cpus, reward.ray_num_gpus))
    if rollout.num_actors:
        number = rollout.num_actors * (2 if evaluation_engines else 1)
        actors.append(RayActors("rollout actors", number, rollout.ray_num_cpus, 0.0))
    indices = [int(device.partition(":")[2] or 0) for device in devices if device != "cpu"]
    return ClusterNeeds(max(indices, default=-1) + 1, engine_processes, tuple(actors))


def nodes_for(needs: ClusterNeeds, gpus_per_node: int) -> int:
    """Return how many nodes hold the actors' GPUs: the largest first, each on the first node that has room for it.

    Raises:
        ValueError: an actor needs more GPUs than a node has.
    """
    nodes: list[float] = []  # free GPUs of each
    for gpus in sorted((each.gpus for each in needs.actors for _ in range(each.number)), reverse=True):
        if gpus > gpus_per_node:
            raise ValueError(f"an actor needs {gpus:g} GPUs")
        for index, free in enumerate(nodes):
            if free >= gpus:
                nodes[index] = round(free - gpus, 4)  # as finely as Ray counts
                break
        else:
            nodes.append(gpus_per_node - gpus)
    return max(1, len(nodes))


def node_cpus(needs: ClusterNeeds, nodes: int, gpus_per_node: int) -> int:
    """Return the CPUs of each node, enough for any way in which the actors may be spread over the GPUs."""
    free, reserved = float(gpus_per_node), 0.0
    # A node needs the most if its GPUs are given to the actors with the most CPUs for each GPU.
    for each in sorted((each for each in needs.actors if each.gpus), key=lambda each: -each.cpus / each.gpus):
        number = min(each.number, free / each.gpus)
        free, reserved = free - number * each.gpus, reserved + number * each.cpus
    without = [each for each in needs.actors if not each.gpus]
    share = sum(each.number * each.cpus for each in without) / nodes
    reserved += max([share, *(each.cpus for each in without)])
    return math.ceil(round(reserved, 4)) + _COMMAND_CPUS + needs.engine_processes


def node_memory(config: RunConfig, needs: ClusterNeeds, memory: MemoryEstimate | None, nodes: int) -> int:
    """Return the bytes of main memory of each node, shared memory included: an estimate from above.

    Rank 0 holds the whole model in float32 while it loads. Snapshots, and the weights on their way to the engines, are in main
    memory; so is all training on the CPU. A state that leaves its GPU in turns is pinned: each tensor takes the next power of
    two, less than twice its bytes.
    """
    processes = 1 + needs.engine_processes + math.ceil(sum(each.number for each in needs.actors) / nodes)
    other = _SPARE_BYTES + processes * _PROCESS_BYTES
    if memory is None:
        return other + UNKNOWN_BYTES
    trainer, engine = config.trainer, config.generator.inference_engine
    # Of one node: ranks fill the nodes in their order. The ranks of each copy of the policy (HSDP) have one of its state.
    ranks, copies = 1, 1
    if trainer.strategy is TrainingStrategy.fsdp2:
        ranks = min(trainer.fsdp.num_workers, math.ceil(max(trainer.fsdp.num_workers, needs.ray_gpus) / nodes))
        copies = math.ceil(ranks / derive.fsdp_shard_size(trainer))
    models = 4 * memory.num_parameters + memory.critic_snapshot_bytes + memory.staging_bytes
    models += copies * memory.snapshot_bytes
    if trainer.device == "cpu" or trainer.fsdp.cpu_offload:
        models += copies * (memory.policy_bytes + memory.gradient_bytes + memory.optimizer_bytes) + memory.critic_bytes
    elif trainer.placement.colocate_all:
        models += 2 * copies * (memory.policy_bytes + memory.optimizer_bytes)
    if trainer.device == "cpu":
        models += ranks * memory.pass_bytes + memory.critic_activation_bytes
    if derive.reference_device(config) == "cpu" or derive.reference_offload(config):
        models += memory.reference_bytes + memory.apart_reference_bytes
    if derive.has_replica(config) and derive.replica_device(config) == "cpu":
        models += memory.replica_bytes
    if engine.device == "cpu":
        models += memory.engine_weight_bytes + memory.kv_cache_bytes
    return other + models
