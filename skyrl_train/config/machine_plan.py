"""A run on a cluster that need not be here: who computes where, what each GPU holds, and the times to expect. No torch.

    machine_plan(plan, Cluster) ──> placement · memory of each GPU · seconds of a weight sync · MFU, tokens/s, bottleneck

Memory is :mod:`skyrl_train.config.memory`'s. Times are estimates on paper: sizes of the model over the figures of a data sheet,
times the shares of them that were measured on one H100 (docs/tutorials/first_gpu_run.md). Expect a factor of 1.5.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from skyrl_train.config import derive
from skyrl_train.config.cluster import CRITIC_RANKS, ENGINES, POLICY_RANKS, ClusterNeeds, cluster_needs, node_memory
from skyrl_train.config.hardware import Cluster
from skyrl_train.config.memory import (
    CONTEXT_BYTES,
    Machine,
    MemoryEstimate,
    activation_bytes,
    kv_element_bytes,
    local_reference_bytes,
    memory_warnings,
    served_weight_bytes,
)
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape, model_shape
from skyrl_train.config.placement import NodeResources, PlacedActor, place_actors
from skyrl_train.config.plan import Plan, Rows, table
from skyrl_train.config.schema import RunConfig, TrainerConfig, TrainerMode, TrainingStrategy
from skyrl_train.errors import ConfigError

_GIB = 2**30
_ENGINE = "generator.inference_engine"

# ---- shares of a data sheet's figures that are reached, and other measured figures: H100 SXM, docs/tutorials/first_gpu_run.md

COPY_SHARE = 0.86  # of memory (2,882 of 3,350 GB/s) and of the bus (55 of 64 GB/s)
LINK_SHARE = 0.8  # of NVLink and of the network, for collectives of large tensors
# Products of [16384, h] and [h, 3 h]: the share of the GPU's bf16 figure, by h
GEMM_SHARES = ((1024, 0.51), (2048, 0.66), (8192, 0.755))
# Elementwise operations of a forward and a backward pass move the kept activations so many times through the GPU's memory. It
# makes the 0.6B model's update the measured one (1.633 s for 68,983 tokens), and its price of checkpointing (7.4 us a token) too.
ACTIVATION_PASSES = 20
ADAM_BYTES = 36  # per parameter: gradient, weight and two moments are read, and all but the gradient written; scaling
# A step of vLLM's decoding takes at least so long, and so much longer for each request (1, 16 and 128 requests of 0.6B)
DECODE_STEP_S, DECODE_REQUEST_S = 0.0021, 40e-6
DECODE_COPY_SHARE = 0.8  # of memory, for weights and KV cache
TENSOR_PARALLEL_LAYER_S = 30e-6  # two all-reduces of a few rows
PREFILL_SHARE = 0.5  # of the bf16 figure
RELOAD_TENSOR_S = 0.45e-3  # vLLM's reload, per tensor: 161.6 ms for 311 tensors of 1.2 GB
IN_PLACE_SHARE = 0.21  # of that, per tensor that is loaded in place: benchmarks/vllm_load.py on a CPU
PAUSE_S = 0.015  # until all requests are paused, and until they run again
MAP_S = 0.015  # an engine opens the trainer's memory
GLOO_BYTES_S = 1.5e9  # of a process that sends: TCP and copies by a CPU (on paper)
SLEEP_S, WAKE_S = 0.04, 0.2  # vLLM's engines in turns with the trainer
# Processor seconds of the control process for a turn through the endpoint and for each of its tokens, with the endpoint in that
# process or in rollout actors; for a trajectory: benchmarks/control_scale.py
ENDPOINT_TURN, ACTORS_TURN = (2.3e-3, 11.5e-6), (0.9e-3, 1.2e-6)
TRAJECTORY_S = 0.8e-3
CONTROL_LIMIT = 0.6  # of a core; above it, requests wait for each other
ENGINE_OWN_BYTES = 2 * _GIB  # of vLLM's share: activations of a prefill, context
ASLEEP_BYTES = int(1.8 * _GIB)  # of both processes' contexts and CUDA graphs while an engine sleeps


@dataclass(frozen=True, slots=True)
class GPULoad:
    """The memory of each of ``number`` alike GPUs, by its contents."""

    who: str
    number: int
    parts: Mapping[str, int]  # bytes
    available: int

    @property
    def total(self) -> int:
        return sum(self.parts.values())


@dataclass(frozen=True, slots=True)
class SyncTimes:
    """Seconds of a weight sync: training waits for ``gather``, engines sample during ``transfer`` and wait in ``paused``."""

    gather: float
    transfer: float
    paused: float

    @property
    def total(self) -> float:
        return self.gather + self.transfer + self.paused


@dataclass(frozen=True, slots=True)
class StepTimes:
    """A step in seconds, and rates, for the assumed lengths."""

    prompt_tokens: int  # assumed, on average
    response_tokens: int  # assumed, on average
    training_s: float
    training_tokens_s: float  # of prompts and responses, over all ranks
    mfu: float  # of the training alone, by the data sheet's figure
    generation_s: float
    generation_tokens_s: float  # sampled, over all engines
    sync_s: float  # that training waits for, on average
    turns_s: float  # engines and trainer change places, on average
    step_s: float
    control_share: float  # of a core that the control process needs
    control: str  # the same in words, with a remedy if it is too much
    bottleneck: str


@dataclass(frozen=True, slots=True)
class MachinePlan:
    """A run on a cluster.

    Attributes:
        actors: with their nodes; empty if they do not fit, or if all is in the command's processes.
        loads: of each kind of GPU.
        syncs: by transport, of those that reach the engines without files.
        transport: the run's.
        step: None where no estimate is made: an unknown shape, training on the CPU or with its state there.
        problems: why the run does not fit.
        tight: where it may not fit, with the most activations.
        main_memory_bytes: of each node, from above.
        on_one_gpu: trainer and engines compute on the same GPU at the same time.
    """

    cluster: Cluster
    needs: ClusterNeeds
    actors: tuple[PlacedActor, ...]
    loads: tuple[GPULoad, ...]
    syncs: Mapping[str, SyncTimes]
    sync_bytes: int
    transport: str
    step: StepTimes | None
    main_memory_bytes: int
    on_one_gpu: bool
    problems: tuple[str, ...]
    tight: tuple[str, ...]

    def describe(self) -> str:
        """Return the table of ``skyrl-train plan --on``."""
        return table(
            [
                (f"placement on {self.cluster}", self._placement_rows()),
                ("memory of each GPU", self._memory_rows()),
                ("weight sync, estimated", self._sync_rows()),
                ("speed, estimated", self._speed_rows()),
            ]
        )

    def _placement_rows(self) -> Rows:
        rows: Rows = []
        if self.needs.local_gpus:
            first = "GPU 0" if self.needs.local_gpus == 1 else f"GPUs 0 to {self.needs.local_gpus - 1}"
            rows.append(("the command's machine", f"{first}, for its own processes"))
        for node in range(self.cluster.nodes):
            held = Counter(actor.role for actor in self.actors if actor.node == node)
            gpus = {role: sum(a.gpus for a in self.actors if a.node == node and a.role == role) for role in held}
            text = ", ".join(f"{number} {role} ({gpus[role]:g} GPUs)" for role, number in held.items())
            if text:
                rows.append((f"node {node}", text))
        return [*rows, ("main memory", f"up to {_gib(self.main_memory_bytes)} of each node")]

    def _memory_rows(self) -> Rows:
        rows = [
            (
                f"{load.who}, {load.number} GPU{'s' * (load.number > 1)}",
                f"{_gib(load.total)} of {_gib(load.available)} "
                f"({', '.join(f'{name} {_gib(held)}' for name, held in load.parts.items())})",
            )
            for load in self.loads
        ]
        if self.on_one_gpu and rows:
            together = sum(load.total for load in self.loads if load.who in ("training", "engine"))
            rows.append(("together, on one GPU", f"{_gib(together)} of {_gib(self.loads[0].available)}"))
        return rows or [("estimate", "unknown until the model is loaded")]

    def _sync_rows(self) -> Rows:
        if not self.syncs:
            return [("estimate", "unknown until the model is loaded")]
        rows: Rows = [("bytes", f"{self.sync_bytes / 1e9:.2f} GB to each engine")]
        for name, times in self.syncs.items():
            chosen = " (this run)" if name == self.transport else ""
            rows.append(
                (
                    name,
                    f"{_s(times.total)}: gather {_s(times.gather)}, transfer {_s(times.transfer)}, paused "
                    f"{_s(times.paused)}{chosen}",
                )
            )
        through_files = [name for name, transport in derive.TRANSPORTS.items() if transport.folder]
        chosen = f" (this run: {self.transport})" if self.transport in through_files else ""
        rows.append((", ".join(through_files), f"not estimated: as fast as the file system of their folder{chosen}"))
        if self.transport not in derive.TRANSPORTS:
            rows.append((self.transport, "not estimated: your own (this run)"))
        return rows

    def _speed_rows(self) -> Rows:
        step = self.step
        if step is None:
            return [("estimate", "none for this model, or for a training state in main memory")]
        waits = f"training waits {_s(step.sync_s)} for the weight sync"
        if self.transport not in self.syncs:
            waits = "without the weight sync, which is not estimated"
        return [
            ("lengths", f"assumed: prompts of {step.prompt_tokens} and responses of {step.response_tokens} tokens"),
            (
                "training",
                f"{step.training_s:.2f} s a step, {step.training_tokens_s:,.0f} tokens/s, MFU {step.mfu:.0%}",
            ),
            ("generation", f"{step.generation_s:.2f} s a step, {step.generation_tokens_s:,.0f} sampled tokens/s"),
            *([("turns", f"{step.turns_s:.2f} s a step: sleep, offload, wake up")] if step.turns_s else []),
            ("step", f"{step.step_s:.2f} s; {waits}"),
            ("control process", step.control),
            ("bottleneck", step.bottleneck),
        ]


def machine_plan(plan: Plan, cluster: Cluster, response_tokens: int | None = None) -> MachinePlan:
    """Place a run on ``cluster``, and estimate memory and times.

    Args:
        response_tokens: mean length of the responses; None: half of the longest.

    Raises:
        ConfigError: the run computes nothing on GPUs.
    """
    config, memory, shape = plan.config, plan.memory, model_shape(plan.config.trainer.policy.model)
    needs = cluster_needs(config)
    if not needs.local_gpus and not needs.ray_gpus:
        raise ConfigError(
            "A machine was named, but this run computes nothing on GPUs. Set trainer.device=cuda and "
            f"{_ENGINE}.device=cuda, or leave out --on."
        )
    nodes = [NodeResources(cluster.gpus_per_node) for _ in range(cluster.nodes)]
    nodes[0] = NodeResources(cluster.gpus_per_node - needs.local_gpus)
    actors = place_actors(needs, nodes)
    problems: list[str] = []
    if nodes[0].gpus < 0 or actors is None:
        problems.append(
            f"{cluster} do not hold the run: it needs {needs.local_gpus} GPUs on the command's machine and {needs.ray_gpus:g} "
            f"in Ray ({', '.join(f'{each.number} {each.role} of {each.gpus:g}' for each in needs.actors if each.gpus)}). Each "
            "actor has its GPUs on one node. Use more nodes, or lower trainer.fsdp.num_workers, "
            f"{_ENGINE}.num_engines or {_ENGINE}.tensor_parallel_size."
        )
    loads: tuple[GPULoad, ...] = ()
    syncs: dict[str, SyncTimes] = {}
    step = None
    sync_bytes = 0
    tight: tuple[str, ...] = ()
    if memory is not None and shape is not None:
        machine = Machine(2**62, (cluster.gpu.memory_bytes,) * cluster.gpus_per_node)
        warnings = memory_warnings(config, memory, machine)
        problems += warnings.insufficient
        tight = tuple(warnings.tight)
        loads = (
            *_training_loads(config, memory, cluster),
            *_scoring_loads(config, memory, cluster),
            *_engine_loads(plan, memory, shape, cluster),
        )
        problems += _overfull(config, plan, loads, shape, cluster)
        sync_bytes = memory.num_trained * BYTES_PER_ELEMENT[config.generator.inference_engine.dtype]
        far, reaching = _far_engines(config, actors or ()), _reaching_transports(config)
        if far and "shared_memory" in reaching:
            reaching.remove("shared_memory")
            if derive.weight_transport(config) == "shared_memory":
                problems.append(
                    f"{far} engines are on other nodes than the trainer, and cannot open its shared memory. Set "
                    f"generator.weight_transport={' or '.join(reaching)}."
                )
        syncs = {
            name: _sync_times(config, shape, sync_bytes, cluster, name, far, _nodes_of(POLICY_RANKS, actors or ()))
            for name in reaching
        }
        chosen = syncs.get(derive.weight_transport(config))
        if chosen is not None and chosen.transfer > config.generator.pause_timeout_s:
            problems.append(
                f"A weight sync by {derive.weight_transport(config)} would take {_s(chosen.transfer)}, longer than "
                f"generator.pause_timeout_s={config.generator.pause_timeout_s:g}: engines would leave the routing. Set "
                "generator.weight_transport=nccl, or raise the limit."
            )
        step = _step_times(plan, memory, shape, cluster, actors or (), loads, chosen, response_tokens)
    return MachinePlan(
        cluster,
        needs,
        tuple(actors or ()),
        loads,
        syncs,
        sync_bytes,
        derive.weight_transport(config),
        step,
        node_memory(config, needs, memory, cluster.nodes),
        derive.engines_share_trainer_gpu(config) and not config.trainer.placement.colocate_all,
        tuple(problems),
        tight,
    )


# ---- memory


def _training_loads(config: RunConfig, memory: MemoryEstimate, cluster: Cluster) -> list[GPULoad]:
    """Return the loads of the policy's and of a separate critic's GPUs. Engines that share a GPU are in ``_engine_loads``."""
    trainer, available = config.trainer, cluster.gpu.memory_bytes
    if trainer.device == "cpu":
        return []
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    transport = derive.TRANSPORTS.get(derive.weight_transport(config))
    staging = memory.staging_bytes if transport is not None and transport.gpu else 0
    state = memory.rank_elsewhere_bytes if trainer.fsdp.cpu_offload and sharded else memory.rank_bytes
    parts = {"weights, gradients, moments": state}
    if trainer.placement.colocate_all:  # one copy, between two steps, which is freed before the next
        copies = 0 if transport is None else transport.copies
        parts["activations, or staging"] = max(memory.pass_bytes, staging // max(1, copies))
        parts["contexts"] = ASLEEP_BYTES
    else:
        if staging:
            parts["staging (rank 0)" if sharded else "staging"] = staging
        if memory.gathered_bytes:
            parts["gathered layers"] = memory.gathered_bytes
        parts["activations"] = memory.activation_bytes + memory.head_gradient_bytes
        parts["context"] = CONTEXT_BYTES
    parts |= {who: held for who, _, held, device in _scoring_copies(config, memory) if device == _training_gpu(config)}
    loads = [GPULoad("training", trainer.fsdp.num_workers if sharded else 1, parts, available)]
    if memory.critic_bytes and not derive.critic_shares_memory(trainer):
        critic = derive.critic_trainer(trainer)
        number = critic.fsdp.num_workers if sharded else 1
        if critic.device != "cpu" and not critic.fsdp.cpu_offload:
            held = -(-memory.critic_bytes // memory.critic_ranks)
            loads.append(
                GPULoad(
                    "critic",
                    number,
                    {
                        "weights, gradients, moments": held,
                        "activations": memory.critic_activation_bytes,
                        "context": CONTEXT_BYTES,
                    },
                    available,
                )
            )
    return loads


def _scoring_loads(config: RunConfig, memory: MemoryEstimate, cluster: Cluster) -> list[GPULoad]:
    """Return the loads of GPUs with a reference policy or a replica of the policy, but without training."""
    return [
        GPULoad(who, number, {"weights": held, "context": CONTEXT_BYTES}, cluster.gpu.memory_bytes)
        for who, number, held, device in _scoring_copies(config, memory)
        if device != _training_gpu(config)
    ]


def _scoring_copies(config: RunConfig, memory: MemoryEstimate) -> list[tuple[str, int, int, str]]:
    """Return each model on GPUs that only scores, outside of the policy's ranks: its name, the number of its GPUs, the bytes on
    each, and the GPU on the command's machine, or ``cuda`` in Ray."""
    copies: list[tuple[str, int, int, str]] = []
    reference, device = config.rollout.stages.reference, derive.reference_device(config)
    if memory.apart_reference_bytes and device != "cpu":
        if derive.reference_is_local(config):
            copies.append(("reference", 1, local_reference_bytes(config, memory), derive.full_device_name(device)))
        elif reference.executor == "ray":
            copies.append(("reference", reference.max_parallel, memory.apart_reference_bytes, device))
        elif not derive.reference_offload(config):
            each = -(-memory.apart_reference_bytes // reference.num_workers)
            copies.append(("reference", reference.num_workers, each, device))
    device = derive.replica_device(config)
    if derive.has_replica(config) and device != "cpu":
        in_ray = config.rollout.stages.proximal.executor == "ray"
        copies.append(("replica", 1, memory.replica_bytes, device if in_ray else derive.full_device_name(device)))
    return copies


def _training_gpu(config: RunConfig) -> str | None:
    """Return the GPU of the command's machine on which the policy trains; None: it has none there."""
    trainer = config.trainer
    local = trainer.strategy is TrainingStrategy.local and trainer.device != "cpu"
    return derive.full_device_name(trainer.device) if local else None


def _engine_loads(plan: Plan, memory: MemoryEstimate, shape: ModelShape, cluster: Cluster) -> list[GPULoad]:
    config, available = plan.config, cluster.gpu.memory_bytes
    engine = config.generator.inference_engine
    gpus = derive.engine_num_gpus(engine)
    if not gpus:
        return []
    of_run, number = engine.num_engines * gpus, derive.num_all_engines(config) * gpus
    weights = memory.engine_weight_bytes // of_run
    if engine.backend != "vllm":
        return [GPULoad("engine", number, {"weights": weights, "KV cache": memory.kv_cache_bytes // of_run}, available)]
    utilization = float(engine.engine_args.get("gpu_memory_utilization", derive.VLLM_UTILIZATION))
    given = engine.engine_args.get("kv_cache_memory_bytes")
    cache = int(utilization * available) - weights - ENGINE_OWN_BYTES if given is None else int(given)
    parts = {"weights": weights, "KV cache": cache, "own": ENGINE_OWN_BYTES}
    if derive.weight_transport(config) == "nccl":  # each worker receives a whole copy, outside of vLLM's share
        parts["receive buffer"] = memory.num_trained * BYTES_PER_ELEMENT[engine.dtype]
    return [GPULoad("engine", number, parts, available)]


def _kv_bytes_per_token(config: RunConfig, shape: ModelShape) -> int:
    """Return the bytes of a token on each GPU of an engine: heads are divided, and repeated where they are fewer."""
    engine = config.generator.inference_engine
    heads = -(-shape.num_kv_heads // engine.tensor_parallel_size)
    layers = -(-shape.num_layers // engine.pipeline_parallel_size)
    return 2 * layers * heads * shape.head_dim * kv_element_bytes(engine)


def _overfull(
    config: RunConfig, plan: Plan, loads: tuple[GPULoad, ...], shape: ModelShape, cluster: Cluster
) -> list[str]:
    """Return what memory_warnings does not see: engines on their own GPUs, and a critic's."""
    problems = []
    for load in loads:
        if load.who == "engine" and config.generator.inference_engine.backend == "vllm":
            tokens = load.parts["KV cache"] // _kv_bytes_per_token(config, shape)
            if tokens < plan.max_model_len:
                problems.append(
                    f"Each GPU of an engine has {_gib(max(0, load.parts['KV cache']))} for its KV cache, and one request of "
                    f"{plan.max_model_len} tokens needs {_gib(plan.max_model_len * _kv_bytes_per_token(config, shape))}. Raise "
                    f"{_ENGINE}.tensor_parallel_size or {_ENGINE}.engine_args.gpu_memory_utilization."
                )
        if load.who in ("engine", "critic") and load.total > load.available:
            remedy = "Use more GPUs for it, or a smaller model."
            if "receive buffer" in load.parts:
                remedy = f"Lower {_ENGINE}.engine_args.gpu_memory_utilization by the receive buffer of nccl."
            problems.append(
                f"Each GPU of {'an engine' if load.who == 'engine' else 'the critic'} needs {_gib(load.total)} of "
                f"{_gib(load.available)}. {remedy}"
            )
        elif load.who == "training" and config.trainer.placement.colocate_all and load.total > load.available:
            problems.append(
                f"Each training GPU needs {_gib(load.total)} of {_gib(load.available)} while the engines sleep. Set "
                "generator.weight_transport=shared_memory, trainer.policy.gradient_checkpointing=true, or use more GPUs."
            )
    return problems


# ---- weight syncs


def _far_engines(config: RunConfig, actors: Sequence[PlacedActor]) -> int:
    """Return how many engines are on other nodes than training rank 0, which is on the command's node, the first one."""
    if derive.engines_share_ranks(config):
        ranks = _nodes_of(POLICY_RANKS, actors)
        return sum(node > 0 for node in ranks) // derive.engine_num_gpus(config.generator.inference_engine)
    return sum(node > 0 for node in _nodes_of(ENGINES, actors))


def _reaching_transports(config: RunConfig) -> list[str]:
    """Return the transports that reach engines on the trainer's node from where the policy trains, and that need no disk."""
    engine, trainer = config.generator.inference_engine, config.trainer
    names = [
        name
        for name, transport in derive.TRANSPORTS.items()
        if engine.backend in transport.backends and not transport.folder
    ]
    if engine.device == "cpu" or trainer.device == "cpu":
        return [name for name in names if not derive.TRANSPORTS[name].gpu]
    shared = trainer.placement.colocate_all or (
        trainer.strategy is TrainingStrategy.local
        and engine.executor == "process"
        and derive.engine_device_names(engine) == {derive.full_device_name(trainer.device)}
    )
    if shared:  # NCCL takes one process for each GPU
        names.remove("nccl")
    else:
        names.remove("cuda_ipc")
    return names


def _sync_times(
    config: RunConfig,
    shape: ModelShape,
    num_bytes: int,
    cluster: Cluster,
    transport: str,
    far: int,
    nodes: Sequence[int],
) -> SyncTimes:
    """Estimate a sync of ``num_bytes`` to all engines, ``far`` of them on other nodes, from ranks on ``nodes``."""
    gpu, trainer, engine = cluster.gpu, config.trainer, config.generator.inference_engine
    bus, memory = COPY_SHARE * gpu.bus_bytes_s, COPY_SHARE * gpu.memory_bytes_s
    tensors = 12 * shape.num_layers + 3 if not trainer.policy.model.lora.rank else 14 * shape.num_layers
    on_device = derive.TRANSPORTS[transport].gpu
    # FSDP2 gathers each weight on its GPUs in the policy's dtype; the copy to main memory runs beside that.
    ranks = derive.fsdp_shard_size(trainer) if trainer.strategy is TrainingStrategy.fsdp2 else 1
    gathered = num_bytes * BYTES_PER_ELEMENT[trainer.policy.dtype] / BYTES_PER_ELEMENT[engine.dtype]
    collect = gathered * (ranks - 1) / ranks / _collective_bytes_s(trainer, cluster, nodes)
    copy = 2 * num_bytes / memory if on_device else num_bytes / bus
    gather = collect + copy if on_device else max(collect, copy)
    in_place = not trainer.policy.model.lora.rank and "quantization" not in engine.engine_args
    tensor_s = RELOAD_TENSOR_S * (IN_PLACE_SHARE if in_place else 1.0)
    load = (2 * num_bytes / memory if on_device else num_bytes / bus) + tensors * tensor_s
    workers = engine.num_engines * max(1, derive.engine_num_gpus(engine))
    far_workers = far * max(1, derive.engine_num_gpus(engine))
    transfer = MAP_S
    if transport == "nccl":
        slowest = min(gpu.link_bytes_s, gpu.network_bytes_s) if far else gpu.link_bytes_s
        transfer = num_bytes / (LINK_SHARE * slowest) if workers else 0.0
    elif transport == "gloo" and far:
        # A binary tree of which the trainer is the root; engines on its machine map its memory.
        transfer = math.ceil(math.log2(far_workers + 1)) * num_bytes / GLOO_BYTES_S
    return SyncTimes(gather, transfer, load + PAUSE_S)


def _collective_bytes_s(trainer: TrainerConfig, cluster: Cluster, nodes: Sequence[int] = ()) -> float:
    """Return the bytes that each rank receives per second in a collective of all ranks that share a parameter.

    Args:
        nodes: of each rank; empty: the ranks fill the nodes.
    """
    gpu, ranks = cluster.gpu, derive.fsdp_shard_size(trainer)
    nodes = nodes or _filled(trainer, cluster)
    rates = [gpu.link_bytes_s]
    for first in range(0, len(nodes), ranks):
        # Each node receives the others' parts once, by the network cards of its ranks, and passes them on by its links.
        spread = Counter(nodes[first : first + ranks]).values()
        rates += [gpu.network_bytes_s * here * (ranks - 1) / (ranks - here) for here in spread if here < ranks]
    return LINK_SHARE * min(rates)  # the slowest node decides


def _copies_bytes_s(trainer: TrainerConfig, cluster: Cluster, nodes: Sequence[int]) -> float:
    """Return the bytes that each rank sends, and receives, per second in a sum over the ranks with the same parameters."""
    gpu, ranks = cluster.gpu, derive.fsdp_shard_size(trainer)
    nodes = nodes or _filled(trainer, cluster)
    apart = any(len(set(nodes[first::ranks])) > 1 for first in range(ranks))
    return LINK_SHARE * (min(gpu.link_bytes_s, gpu.network_bytes_s) if apart else gpu.link_bytes_s)


def _filled(trainer: TrainerConfig, cluster: Cluster) -> list[int]:
    """Return the node of each rank, if the ranks alone fill the nodes."""
    return [rank // cluster.gpus_per_node for rank in range(trainer.fsdp.num_workers)]


def _nodes_of(role: str, actors: Sequence[PlacedActor]) -> list[int]:
    return [actor.node for actor in actors if actor.role == role]


# ---- speed


def gemm_share(hidden_size: int) -> float:
    """Return the share of the bf16 figure that products with this inner size reach, between measured sizes linearly in its
    logarithm."""
    sizes = [size for size, _ in GEMM_SHARES]
    if hidden_size <= sizes[0]:
        return GEMM_SHARES[0][1] * hidden_size / sizes[0]
    for (low, low_share), (high, high_share) in pairwise(GEMM_SHARES):
        if hidden_size <= high:
            along = math.log(hidden_size / low) / math.log(high / low)
            return low_share + along * (high_share - low_share)
    return GEMM_SHARES[-1][1]


def training_flops(
    shape: ModelShape, tokens: float, scored: float, pairs: float, *, frozen_weights: bool = False
) -> float:
    """Return the operations of a forward and a backward pass, without what checkpointing repeats.

    6 per weight and token, and 4 per weight that has no gradient (under an adapter); 12 per layer, dimension of the heads, and
    pair of tokens of which one sees the other; 6 or 4 per weight of the head and scored token.
    """
    head = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - (1 if shape.tied_embeddings else 2) * head
    attention = 12 * shape.num_layers * shape.num_heads * shape.head_dim * pairs
    per_weight = 4 if frozen_weights else 6
    return per_weight * layers * tokens + attention + per_weight * head * scored


def update_seconds(
    trainer: TrainerConfig,
    shape: ModelShape,
    tokens: float,
    scored: float,
    length: float,
    cluster: Cluster,
    nodes: Sequence[int] = (),
) -> float:
    """Estimate one update by all ranks of ``trainer``.

    Args:
        tokens: of the minibatch, of which ``scored`` are trained, in sequences of ``length``.
        nodes: of each rank; empty: the ranks fill the nodes.
    """
    gpu, fsdp = cluster.gpu, trainer.fsdp
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    ranks = fsdp.num_workers if sharded else 1
    element = BYTES_PER_ELEMENT[trainer.policy.dtype]
    # TF32 has half of the bf16 figure; float32 without it about 1/15 (H100: 67 of 989, A100: 19.5 of 312).
    peak = gpu.bf16_flops * (1.0 if element == 2 else 0.5 if trainer.tf32 else 1 / 15)
    memory = COPY_SHARE * gpu.memory_bytes_s
    pairs = tokens * length / 2
    operations = training_flops(shape, tokens, scored, pairs, frozen_weights=trainer.policy.model.lora.rank > 0)
    kept = _kept_bytes_per_token(trainer, shape) * tokens
    moved = ACTIVATION_PASSES * kept / memory
    if derive.gradient_checkpointing(trainer, shape.num_parameters):  # the forward pass of the layers again: a third
        operations += training_flops(shape, tokens, 0, pairs) / 3
        moved *= 4 / 3
    compute = (operations / (peak * gemm_share(shape.hidden_size)) + moved) / ranks
    trained = shape.adapter_parameters(trainer.policy.model.lora) if trainer.policy.model.lora.rank else None
    parameters = shape.num_parameters if trained is None else trained
    share = derive.fsdp_shard_size(trainer) if sharded else 1
    optimizer = parameters / share * ADAM_BYTES / memory
    if not sharded or ranks == 1:
        return compute + optimizer
    micro_batches = max(1.0, math.ceil(tokens * fsdp.sequence_parallel_size / ranks / trainer.micro_batch_tokens))
    gathers = 2 if fsdp.reshard_after_forward else 1
    travelled = (gathers * element * shape.num_parameters + 4 * parameters) * (share - 1) / share * micro_batches
    exchanged = travelled / _collective_bytes_s(trainer, cluster, nodes)
    if (copies := ranks / share) > 1:  # each rank adds its part of the gradients up with those of the other copies
        added = 2 * 4 * parameters / share * (copies - 1) / copies * micro_batches
        exchanged += added / _copies_bytes_s(trainer, cluster, nodes)
    # Layers are gathered while the one before computes.
    return max(compute, exchanged) + optimizer


def _kept_bytes_per_token(trainer: TrainerConfig, shape: ModelShape) -> int:
    alone = replace(
        trainer,
        strategy=TrainingStrategy.local,
        policy=replace(trainer.policy, gradient_checkpointing=False),
    )
    return activation_bytes(alone, shape, 1)


def decode_tokens_s(config: RunConfig, shape: ModelShape, requests: float, context: float, cluster: Cluster) -> float:
    """Estimate the tokens that one engine samples per second, for so many requests at once of ``context`` tokens each."""
    engine, gpu = config.generator.inference_engine, cluster.gpu
    gpus = max(1, derive.engine_num_gpus(engine))
    read = served_weight_bytes(engine, shape) / gpus + requests * context * _kv_bytes_per_token(config, shape)
    reading = read / (DECODE_COPY_SHARE * gpu.memory_bytes_s)
    products = 2 * shape.num_parameters * requests / gpus / (gpu.bf16_flops * gemm_share(shape.hidden_size))
    step = DECODE_STEP_S + requests * DECODE_REQUEST_S + max(reading, products)
    if engine.tensor_parallel_size > 1:
        step += shape.num_layers * TENSOR_PARALLEL_LAYER_S
    return requests / step


def _step_times(
    plan: Plan,
    memory: MemoryEstimate,
    shape: ModelShape,
    cluster: Cluster,
    actors: Sequence[PlacedActor],
    loads: tuple[GPULoad, ...],
    sync: SyncTimes | None,
    response_tokens: int | None,
) -> StepTimes | None:
    config = plan.config
    trainer, generator, engine = config.trainer, config.generator, config.generator.inference_engine
    cache = next((load.parts["KV cache"] for load in loads if load.who == "engine"), 0)
    if trainer.device == "cpu" or trainer.fsdp.cpu_offload or cache <= 0:
        return None
    longest = min(generator.max_turns * generator.sampling_params.max_tokens, plan.max_model_len)
    response = response_tokens or -(-longest // 2)
    prompt = max(1, min(generator.max_input_length // 2, plan.max_model_len - response))
    samples = plan.policy_mini_batch_size * plan.n_samples_per_prompt
    length = prompt + response
    # Training
    tokens, scored = float(samples * length), float(samples * response)
    nodes = _nodes_of(POLICY_RANKS, actors)
    training = update_seconds(trainer, shape, tokens, scored, length, cluster, nodes)
    ranks = trainer.fsdp.num_workers if trainer.strategy is TrainingStrategy.fsdp2 else 1
    adapter = trainer.policy.model.lora.rank > 0
    flops = training_flops(shape, tokens, scored, tokens * length / 2, frozen_weights=adapter)
    mfu = flops / (training * ranks * cluster.gpu.bf16_flops)
    rate = tokens / training
    if derive.reference_is_colocated(config):
        training += update_seconds(trainer, shape, tokens, scored, length, cluster, nodes) / 3
    if memory.critic_bytes:
        critic = derive.critic_trainer(trainer)
        one = replace(model_shape(derive.critic_model(trainer)) or shape, vocab_size=1)
        of_critic = update_seconds(
            critic,
            one,
            tokens,
            scored,
            length,
            cluster,
            nodes if derive.critic_is_colocated(trainer) else _nodes_of(CRITIC_RANKS, actors),
        )
        training = training + of_critic if derive.critic_shares_memory(trainer) else max(training, of_critic)
    # Generation
    in_flight = plan.num_workers if plan.mode is not TrainerMode.sync else plan.train_batch_size
    context = prompt + response / 2
    fits = cache / _kv_bytes_per_token(config, shape) / context
    requests = max(1.0, min(engine.max_num_seqs, in_flight * plan.n_samples_per_prompt / engine.num_engines, fits))
    sampled = engine.num_engines * decode_tokens_s(config, shape, requests, context, cluster)
    gpus = engine.num_engines * max(1, derive.engine_num_gpus(engine))
    # A group's prompt is computed once.
    prefill = plan.policy_mini_batch_size * prompt * 2 * shape.num_parameters / gpus
    generation = samples * response / sampled + prefill / (PREFILL_SHARE * cluster.gpu.bf16_flops)
    # Together. Weights are synced, and turns taken, every k steps.
    k = plan.weight_sync_interval
    waits = 0.0 if sync is None else (sync.gather if plan.overlap_weight_sync else sync.total) / k
    turns = 0.0
    if trainer.placement.colocate_all:
        state = memory.rank_bytes - -(-memory.gradient_bytes // memory.num_ranks)
        turns = (SLEEP_S + WAKE_S + 2 * state / (COPY_SHARE * cluster.gpu.bus_bytes_s)) / k
    alternating = plan.mode in (TrainerMode.sync, TrainerMode.partial_rollout) or trainer.placement.colocate_all
    shared = derive.engines_share_trainer_gpu(config)
    if alternating or shared:
        step = training + generation + waits + turns
        slower, part = ("training", training / step) if training > generation else ("generation", generation / step)
        why = "trainer and engines take turns" if alternating else "trainer and engines compute on one GPU"
        bottleneck = f"{slower}, {part:.0%} of a step; {why}"
    else:
        step = max(training + waits, generation)
        slower = "training" if training + waits >= generation else "generation"
        idle = 1 - min(training + waits, generation) / step
        other = "engines have" if slower == "training" else "training has"
        bottleneck = f"{slower}; {other} nothing to do for {idle:.0%} of a step"
    share = samples * control_seconds(config, response) / step
    control = _control(config, share)
    return StepTimes(
        prompt, response, training, rate, mfu, generation, sampled, waits, turns, step, share, control, bottleneck
    )


def control_seconds(config: RunConfig, response_tokens: int) -> float:
    """Return the processor time that the control process takes for a trajectory of one turn."""
    turn_s, token_s = ACTORS_TURN if config.rollout.num_actors else ENDPOINT_TURN
    return TRAJECTORY_S + turn_s + token_s * response_tokens


def _control(config: RunConfig, share: float) -> str:
    """Describe what the control process has to do, and where to put it if it is too much."""
    busy = f"busy for {share:.0%} of the time, if each response is a turn through the endpoint"
    if share <= CONTROL_LIMIT:
        return busy
    if not config.rollout.num_actors:
        return f"{busy}; move environments and agents to actors: rollout.num_actors"
    return f"{busy}, more than {CONTROL_LIMIT:.0%}: expect engines that wait for it"


def _gib(num_bytes: float) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"


def _s(seconds: float) -> str:
    return f"{seconds * 1000:.0f} ms" if seconds < 1 else f"{seconds:.1f} s"
