"""The memory that a run needs, estimated from the model's shape: no torch, no weights.

    estimate_memory      bytes of weights, gradients, optimizer, snapshots, activations, engines
    memory_requirements  what each memory of a machine has to hold of them
    memory_warnings      the requirements that this machine does not meet

Engines count where they share a GPU with the training of this process. Elsewhere they are estimated for the plan, but not
compared with the machine: they may be on other machines.
"""

from __future__ import annotations

import os
import subprocess
from dataclasses import dataclass, field, replace

from skyrl_train.config import derive
from skyrl_train.config.model_shape import BYTES_PER_ELEMENT, ModelShape, model_shape
from skyrl_train.config.schema import InferenceEngineConfig, RunConfig, TrainerConfig, TrainingStrategy

_FLOAT32_BYTES = 4
# Of the CUDA context of the training process, which no allocator counts: 0.52 GiB on an H100 with CUDA 13.
CONTEXT_BYTES = 600 * 2**20
_TOKEN_BYTES = 64  # ids, log-probs and what the loss keeps of them
_GIB, _MIB = 2**30, 2**20
_NVIDIA_SMI_LIMIT_S = 20.0
_REFERENCE = "rollout.stages.reference"
_ENGINE_SHARE = "generator.inference_engine.engine_args.gpu_memory_utilization"

# Bytes of a weight in a linear layer with its scales, by vLLM's names of the quantizations that it computes itself. The others
# need a checkpoint that is quantized already.
_QUANTIZED_BYTES = {
    **dict.fromkeys(("fp8", "fp8_per_tensor", "fp8_per_channel", "fp8_per_block", "int8_per_channel_weight_only"), 1.0),
    "mxfp8": 1 + 1 / 32,
    "nvfp4_per_token": 1 / 2 + 1 / 16,
}

_STATE = "weights, gradients and moments"
_STATE_AND_SNAPSHOTS = "weights, gradients, moments and snapshots"
_SNAPSHOTS = "snapshots for checkpoints"
_OFFLOADED = "the training state in the engines' turn, and snapshots"


# ---- the estimate


@dataclass(frozen=True, slots=True)
class MemoryEstimate:
    """Bytes, from the model's shape. All but the activations stay allocated during training."""

    num_parameters: int
    num_trained: int  # fewer than num_parameters if an adapter is trained
    policy_bytes: int  # the trained weights, with float32 masters if they are narrower
    gradient_bytes: int  # float32
    optimizer_bytes: int  # the two moments of AdamW, float32
    staging_bytes: int  # copies of the weights on their way to the engines, all in rank 0
    engine_weight_bytes: int  # all engines together
    kv_cache_bytes: int  # all embedded engines together, with every slot full
    critic_bytes: int = 0  # weights, gradients and moments of a critic, over all its ranks; 0 if its size is unknown
    # From the first checkpoint on, in main memory, also if training is on GPUs: a copy of weights and moments (of each copy of
    # the policy, if there are several), and of the critic's.
    snapshot_bytes: int = 0
    critic_snapshot_bytes: int = 0
    num_ranks: int = 1  # that share the weights, gradients and moments of a copy
    activation_bytes: int = 0  # of each rank, at most
    head_gradient_bytes: int = 0  # of each rank, beside the most activations: the head's gradient before it is added
    gathered_bytes: int = 0  # of each rank: layers that stay gathered between a forward and a backward pass
    replica_bytes: int = 0  # of a replica of the policy
    critic_activation_bytes: int = 0  # of each rank of a critic that computes in another memory
    reference_bytes: int = 0  # of a reference policy in the policy's ranks
    apart_reference_bytes: int = 0  # of each copy of a reference policy anywhere else
    # Of a reference policy and a critic in the policy's ranks: in the memory of the policy's state, and in the other memory.
    beside_bytes: int = 0
    elsewhere_bytes: int = 0
    critic_ranks: int = 1  # that share a copy of the critic
    checkpointed: frozenset[str] = (
        frozenset()
    )  # the models, policy and critic, whose layers run again in the backward pass

    @property
    def rank_bytes(self) -> int:
        """The bytes of each rank in the memory of the policy's state; the gathered layer it computes with comes on top."""
        state = self.policy_bytes + self.gradient_bytes + self.optimizer_bytes
        return -(-(state + self.beside_bytes) // self.num_ranks)

    @property
    def rank_peak_bytes(self) -> int:
        """The most that each rank's tensors take in the memory of the policy's state, if it computes there."""
        return self.rank_bytes + self.pass_bytes

    @property
    def pass_bytes(self) -> int:
        """The most that a forward and a backward pass need on each rank, beside its state."""
        return self.activation_bytes + self.head_gradient_bytes + self.gathered_bytes

    @property
    def rank_elsewhere_bytes(self) -> int:
        """The bytes of each rank in the other memory: the GPU's if the policy's state is in main memory, else main memory."""
        return -(-self.elsewhere_bytes // self.num_ranks)


def estimate_memory(config: RunConfig, shape: ModelShape | None, max_model_len: int) -> MemoryEstimate | None:
    """Estimate what training and the embedded engines allocate; None if only loading the model would tell its size."""
    trainer, engine, lora = config.trainer, config.generator.inference_engine, config.trainer.policy.model.lora
    transport = derive.TRANSPORTS.get(derive.weight_transport(config))
    copies = 2 if transport is None else transport.copies  # 2 is assumed for a user's own transport
    trained = None if shape is None else shape.adapter_parameters(lora) if lora.rank else shape.num_parameters
    if shape is None or trained is None:
        return None
    kv_elements_per_token = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim  # keys and values
    parameters, served = shape.num_parameters, BYTES_PER_ELEMENT[engine.dtype]
    adapter = trained * served if lora.rank else 0
    frozen = parameters if lora.rank else 0
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    weight = _trained_weight_bytes(trainer.policy.dtype, sharded)
    # The critic: per parameter its weight, the gradient and two moments.
    critic_weight = _trained_weight_bytes(trainer.critic.dtype, sharded) + 3 * _FLOAT32_BYTES
    critic_shape = shape if trainer.critic.model.path is None else model_shape(derive.critic_model(trainer))
    if not derive.needs_critic(trainer.algorithm):
        critic_shape = None
    critic_parameters = 0 if critic_shape is None else critic_shape.num_parameters
    reference, apart_reference = _reference_bytes(config, parameters)
    # Reference and critic in the policy's ranks may be offloaded while the policy is not, or the other way round.
    held = [(reference, derive.reference_offload(config))]
    if derive.critic_is_colocated(trainer):
        held.append((critic_parameters * critic_weight, trainer.critic.fsdp.cpu_offload))
    one_memory = trainer.device == "cpu"
    beside = sum(each for each, offloaded in held if one_memory or offloaded == trainer.fsdp.cpu_offload)
    checkpointed = set()
    if derive.gradient_checkpointing(trainer, parameters):
        checkpointed.add("policy")
    if derive.gradient_checkpointing(derive.critic_trainer(trainer), critic_parameters):
        checkpointed.add("critic")
    activations, critic_activations = _activations(config, shape, critic_shape, max_model_len)
    return MemoryEstimate(
        num_parameters=parameters,
        num_trained=trained,
        policy_bytes=frozen * BYTES_PER_ELEMENT[trainer.policy.dtype] + trained * weight,
        gradient_bytes=trained * _FLOAT32_BYTES,
        optimizer_bytes=trained * 2 * _FLOAT32_BYTES,
        staging_bytes=copies * trained * served,
        engine_weight_bytes=engine.num_engines * (served_weight_bytes(engine, shape) + adapter),
        kv_cache_bytes=engine.num_engines
        * engine.max_num_seqs
        * max_model_len
        * kv_elements_per_token
        * kv_element_bytes(engine),
        critic_bytes=critic_parameters * critic_weight,
        snapshot_bytes=trained * (weight + 2 * _FLOAT32_BYTES),
        critic_snapshot_bytes=critic_parameters * (critic_weight - _FLOAT32_BYTES),
        num_ranks=derive.fsdp_shard_size(trainer) if sharded else 1,
        activation_bytes=activations,
        critic_activation_bytes=critic_activations,
        head_gradient_bytes=0 if lora.rank else _head_gradient_bytes(trainer, shape),
        gathered_bytes=(
            shape.linear_parameters * BYTES_PER_ELEMENT[trainer.policy.dtype]
            if sharded and not trainer.fsdp.reshard_after_forward
            else 0
        ),
        replica_bytes=parameters * served + adapter,
        reference_bytes=reference,
        apart_reference_bytes=apart_reference,
        beside_bytes=beside,
        elsewhere_bytes=sum(each for each, _ in held) - beside,
        critic_ranks=derive.fsdp_shard_size(derive.critic_trainer(trainer)) if sharded else 1,
        checkpointed=frozenset(checkpointed),
    )


def served_weight_bytes(engine: InferenceEngineConfig, shape: ModelShape) -> int:
    """Return the bytes of a model in an engine. Quantized are the linear layers, without the head."""
    element = BYTES_PER_ELEMENT[engine.dtype]
    quantization = engine.engine_args.get("quantization") if engine.backend == "vllm" else None
    linear = shape.linear_parameters
    return round(_QUANTIZED_BYTES.get(str(quantization), element) * linear) + element * (shape.num_parameters - linear)


def kv_element_bytes(engine: InferenceEngineConfig) -> int:
    """Return the bytes of each number in an engine's KV cache."""
    cache = str(engine.engine_args.get("kv_cache_dtype", "auto")) if engine.backend == "vllm" else "auto"
    return 1 if cache.startswith("fp8") else BYTES_PER_ELEMENT[engine.dtype]


def _trained_weight_bytes(dtype: str, sharded: bool) -> int:
    """Return the bytes of one trained weight, with its float32 master if it is narrower."""
    if sharded:  # the shard is the master; only the layer that computes has a narrower copy
        return _FLOAT32_BYTES
    weight = BYTES_PER_ELEMENT[dtype]
    return weight + (_FLOAT32_BYTES if weight < _FLOAT32_BYTES else 0)


def _reference_bytes(config: RunConfig, parameters: int) -> tuple[int, int]:
    """Return the bytes of a reference policy in the policy's ranks, and of each copy of one anywhere else."""
    policy, executor = config.trainer.policy, config.rollout.stages.reference.executor
    if not derive.needs_reference(config.trainer.algorithm):
        return 0, 0
    # Shards are float32; whole copies, and a frozen base model under an adapter, have the policy's dtype.
    sharded = executor in ("colocated", "workers") and not policy.model.lora.rank
    total = parameters * (_FLOAT32_BYTES if sharded else BYTES_PER_ELEMENT[policy.dtype])
    return (total, 0) if executor == "colocated" else (0, total)


def _activations(
    config: RunConfig, policy: ModelShape, critic: ModelShape | None, max_model_len: int
) -> tuple[int, int]:
    """Return the activation bytes in the policy's memory, and of a critic in another memory."""
    trainer = config.trainer
    # A micro-batch cannot have more tokens than a whole minibatch of the longest sequences.
    sequences = trainer.policy_mini_batch_size * config.generator.n_samples_per_prompt
    tokens = min(trainer.micro_batch_tokens, sequences * max_model_len)  # of the largest possible micro-batch
    of_policy = activation_bytes(trainer, policy, tokens)
    if critic is None:
        return of_policy, 0
    of_critic = activation_bytes(derive.critic_trainer(trainer), critic, tokens)
    if not derive.critic_shares_memory(trainer):
        return of_policy, of_critic
    # In the same ranks one of them computes at a time; in this process both may.
    return (max(of_policy, of_critic) if derive.critic_is_colocated(trainer) else of_policy + of_critic), 0


def activation_bytes(trainer: TrainerConfig, shape: ModelShape, tokens: int) -> int:
    """Return the bytes that a rank keeps of a forward pass for its backward pass, at most.

    Per token and layer: two norms, which compute in float32, and their outputs (8 bytes and 4 elements, times the hidden
    size); queries, keys, values, the output of attention and its copy, and the norms of queries and keys if the architecture
    has them (8 bytes and 7 elements, times the size of all heads); gate, activated gate, up and their product (4 elements,
    times the intermediate size). With gradient checkpointing, layers keep their input, and one of them everything. Logits are
    computed in tiles, and again for the backward pass.

    Args:
        tokens: of the micro-batch; with sequence parallelism each rank has its slice.
    """
    element = BYTES_PER_ELEMENT[trainer.policy.dtype]
    sharded = trainer.strategy is TrainingStrategy.fsdp2
    on_rank = -(-tokens // trainer.fsdp.sequence_parallel_size) if sharded else tokens
    hidden = shape.hidden_size
    norms = 2 * _FLOAT32_BYTES * hidden + 4 * element * hidden
    attention = (2 * _FLOAT32_BYTES + 7 * element) * shape.num_heads * shape.head_dim
    scalars = _FLOAT32_BYTES * (3 * shape.num_heads + 2)  # one per norm, and one per head of attention
    layer = norms + attention + scalars + 4 * element * shape.intermediate_size
    checkpointing = derive.gradient_checkpointing(trainer, shape.num_parameters)
    kept = shape.num_layers * element * hidden + layer if checkpointing else shape.num_layers * layer
    # Above the layers: the last norm, a tile of the head, and the numbers of the loss.
    top = (_FLOAT32_BYTES + 2 * element) * hidden + 2 * element * shape.head_dim + _TOKEN_BYTES
    return on_rank * (kept + top)


def _head_gradient_bytes(trainer: TrainerConfig, shape: ModelShape) -> int:
    """Return the bytes of the head's gradient as a backward pass begins: summed in float32, then in the weight's dtype."""
    element = BYTES_PER_ELEMENT[trainer.policy.dtype]
    return shape.vocab_size * shape.hidden_size * (_FLOAT32_BYTES + (element if element < _FLOAT32_BYTES else 0))


# ---- the machine


@dataclass(frozen=True, slots=True)
class Machine:
    """The total memory of a machine, whether or not it is in use."""

    main_memory_bytes: int
    gpu_bytes: tuple[int, ...] = ()  # of each visible GPU; empty: none, or the driver does not say


def this_machine(*, gpus: bool) -> Machine:
    """Ask the system, and for ``gpus`` the driver. Without torch, which would tie the process to a GPU."""
    # All GPUs of the machine; CUDA_VISIBLE_DEVICES is applied below, because nvidia-smi ignores it.
    query = ["nvidia-smi", "--query-gpu=index,uuid,memory.total", "--format=csv,noheader,nounits"]
    gpu_bytes: tuple[int, ...] = ()
    if gpus:
        try:
            answer = subprocess.run(query, capture_output=True, text=True, check=True, timeout=_NVIDIA_SMI_LIMIT_S)
            gpu_bytes = visible_gpus(answer.stdout, os.environ.get("CUDA_VISIBLE_DEVICES"))
        except (OSError, subprocess.SubprocessError):
            pass  # no driver here: nothing is compared with GPUs
    return Machine(os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES"), gpu_bytes)


def visible_gpus(answer: str, visible: str | None) -> tuple[int, ...]:
    """Return the bytes of each GPU in lines of ``index, uuid, MiB``, without those that ``CUDA_VISIBLE_DEVICES`` hides."""
    rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
    named = None if visible is None else [name.strip() for name in visible.split(",") if name.strip()]
    return tuple(
        int(row[2]) * _MIB
        for row in rows
        if len(row) == 3
        and row[2].isdecimal()
        and (named is None or row[0] in named or any(row[1].startswith(name) for name in named))
    )


# ---- requirements and warnings


@dataclass(frozen=True, slots=True)
class MemoryRequirement:
    """A memory, and the bytes of the training that it has to hold."""

    where: str
    kind: str  # of state_bytes, in words
    state_bytes: int  # held during the whole run
    activation_bytes: int  # at most, while a micro-batch is trained
    available_bytes: int
    remedy: str
    models: tuple[str, ...] = ()  # that the activations belong to
    context_bytes: int = 0  # of the process on its GPU
    here: bool = False  # the main memory of the machine that was asked, surely


@dataclass(frozen=True, slots=True)
class MemoryWarnings:
    """Requirements beyond the machine: ``insufficient`` by the state alone, ``tight`` only with the most activations.

    ``impossible`` has the warnings of ``insufficient`` about this machine, whose system would kill the training.
    """

    insufficient: list[str]
    tight: list[str]
    impossible: list[str] = field(default_factory=list)


def memory_warnings(config: RunConfig, memory: MemoryEstimate | None, machine: Machine) -> MemoryWarnings:
    """Compare the memory that training needs with what the machine has."""
    insufficient, tight, impossible = [], [], []
    for need in memory_requirements(config, memory, machine):
        state, available = need.state_bytes, need.available_bytes
        # The state stays allocated during the whole run; activations reach their maximum only with full micro-batches.
        if state > available:
            insufficient.append(
                f"{need.where}: {need.kind} take {_gib(state)}, and there are {_gib(available)}. {need.remedy}"
            )
            impossible += insufficient[-1:] if need.here else []
        elif state + need.activation_bytes + need.context_bytes > available:
            done = frozenset[str]() if memory is None else memory.checkpointed
            keys = [f"trainer.{name}.gradient_checkpointing=true" for name in need.models if name not in done]
            fewer = f"Set {' and '.join(keys)}, lower" if keys else "Lower"
            tight.append(
                f"{need.where}: {_gib(state)} of {need.kind}, and up to {_gib(need.activation_bytes)} of activations, but "
                f"there are {_gib(available)}. {fewer} trainer.micro_batch_tokens, or: {need.remedy}"
            )
    return MemoryWarnings(insufficient, tight, impossible)


def _gib(num_bytes: int) -> str:
    return f"{num_bytes / _GIB:,.1f} GiB"


def memory_requirements(config: RunConfig, memory: MemoryEstimate | None, machine: Machine) -> list[MemoryRequirement]:
    """Return what each memory of this machine, or of another one like it, has to hold.

    Nothing is known, and the list is empty, if the model's size is unknown or the policy trains on GPUs that are not here.
    """
    if memory is None or (config.trainer.device != "cpu" and not machine.gpu_bytes):
        return []
    if config.trainer.strategy is TrainingStrategy.local:
        return [
            *_local_devices(config, memory, machine),
            *_reference_actors(config, memory, machine),
            *_replica_apart(config, memory, machine),
        ]
    return [
        *_policy_ranks(config, memory, machine),
        *_critic_workers(config.trainer, memory, machine),
        *_reference_beside_ranks(config, memory, machine),
        *_reference_actors(config, memory, machine),
        *_replica_apart(config, memory, machine),
    ]


def _local_devices(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """strategy=local: each device with its models, and the main memory with the snapshots."""
    trainer = config.trainer
    # (model, device, state bytes, activation bytes) of each model in this process or in a process next to it
    # Several models may compute on the same device, so their bytes are added by device below.
    device, training = derive.full_device_name(trainer.device), memory.pass_bytes
    transport = derive.TRANSPORTS.get(derive.weight_transport(config))
    staging = memory.staging_bytes if transport is not None and transport.gpu else 0  # else in main memory
    held = [("policy", device, memory.rank_bytes + staging, training)]
    if derive.needs_critic(trainer.algorithm):
        device = derive.full_device_name(derive.critic_trainer(trainer).device)
        held.append(("critic", device, memory.critic_bytes, memory.critic_activation_bytes))
    if derive.reference_is_local(config):
        device = derive.full_device_name(derive.reference_device(config))
        held.append(("reference policy", device, local_reference_bytes(config, memory), 0))
    if derive.has_replica(config) and config.rollout.stages.proximal.executor != "ray":
        device = derive.full_device_name(derive.replica_device(config))
        held.append(("replica of the policy", device, memory.replica_bytes, 0))
    requirements = []
    # Each device once, and the main memory always: it holds the snapshots.
    for device in dict.fromkeys([*(device for _, device, _, _ in held), "cpu"]):
        on_gpu, here = device != "cpu", [each for each in held if each[1] == device]
        if on_gpu and not machine.gpu_bytes:
            continue
        models = [name for name, _, _, _ in here]
        trained = tuple(name for name in models if name in ("policy", "critic"))
        engines = _engine_bytes(config, memory, device, min(machine.gpu_bytes)) if on_gpu and trained else 0
        if on_gpu:
            kind = f"{_STATE}{' and engines' * bool(engines)}" if trained else "weights"
        else:
            kind = _STATE_AND_SNAPSHOTS if trained else "weights and snapshots" if models else _SNAPSHOTS
            kind = _OFFLOADED if trainer.placement.colocate_all and not models else kind
        # The policy stands for the training in the message; without it, name the models.
        if "policy" in models:
            where = f"Training on {trainer.device}"
        else:
            where = f"The {' and '.join(models)} on {device}" if on_gpu else "The main memory"
        if trained:
            remedy = "Use trainer.strategy=fsdp2 on several devices, or a smaller model"
            if engines:
                remedy = f"Leave the engines less ({_ENGINE_SHARE}), or another GPU. {remedy}"
        elif on_gpu:
            remedy = "Use a GPU with more"
        else:
            remedy = "Use a machine with more, or train an adapter (trainer.policy.model.lora)"
        if "reference policy" in models:
            remedy += f", or set {_REFERENCE}.executor=workers{_fewer_copies(config)}"
        requirements.append(
            MemoryRequirement(
                where,
                kind,
                sum(state for _, _, state, _ in here)
                + (engines if on_gpu else _snapshot_bytes(trainer, memory) + _offloaded_bytes(trainer, memory)),
                sum(activations for _, _, _, activations in here),
                min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
                f"{remedy}.",
                trained,
                CONTEXT_BYTES if on_gpu and trained else 0,
                here=not on_gpu,
            )
        )
    return requirements


def _engine_bytes(config: RunConfig, memory: MemoryEstimate, device: str, gpu_bytes: int) -> int:
    """Return what engines, also the evaluation's, take of the GPU ``device`` of this machine, which has ``gpu_bytes``.

    vLLM takes its share of the whole GPU for models of any size, with the KV cache in the rest of the share.
    """
    engine = config.generator.inference_engine
    if (
        engine.executor == "ray" or config.trainer.placement.colocate_all
    ):  # elsewhere, or asleep while the policy trains
        return 0
    if engine.backend == "embedded" and derive.full_device_name(engine.device) == device:
        return (
            (memory.engine_weight_bytes + memory.kv_cache_bytes) * derive.num_all_engines(config) // engine.num_engines
        )
    if engine.backend != "vllm" or engine.device == "cpu":
        return 0
    on_device = sum(
        device == f"cuda:{gpu}"
        for index in range(derive.num_all_engines(config))
        for gpu in derive.engine_devices(engine, index)
    )
    kv_cache = engine.engine_args.get("kv_cache_memory_bytes")
    if kv_cache is not None:
        ranks = engine.num_engines * derive.engine_num_gpus(engine)
        return on_device * (memory.engine_weight_bytes // ranks + int(kv_cache))
    return on_device * int(float(engine.engine_args.get("gpu_memory_utilization", derive.VLLM_UTILIZATION)) * gpu_bytes)


def _policy_ranks(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """strategy=fsdp2: the rank that holds the most; on GPUs also the main memory that all ranks of this machine share."""
    trainer, fsdp = config.trainer, config.trainer.fsdp
    on_gpu, colocated = trainer.device != "cpu", derive.critic_is_colocated(trainer)
    remedy = f"Use more than trainer.fsdp.num_workers={fsdp.num_workers}"
    if derive.fsdp_shard_size(trainer) < fsdp.num_workers:
        remedy += " or a larger trainer.fsdp.shard_size"
    if on_gpu:
        remedy += ", or set trainer.fsdp.cpu_offload=true"
        if colocated and not trainer.critic.fsdp.cpu_offload:
            remedy += ", trainer.critic.fsdp.cpu_offload=true"
    if colocated:
        remedy += ", or trainer.critic.placement=workers"
    # With colocate_all, the weights on their way to the engines are there between two steps.
    name = derive.weight_transport(config)
    on_way = name in derive.TRANSPORTS and derive.TRANSPORTS[name].gpu and not trainer.placement.colocate_all
    staging = memory.staging_bytes if on_way else 0
    if staging:
        remedy += ", or another generator.weight_transport, such as gloo"
    rank = MemoryRequirement(
        f"{'Rank 0' if staging else 'Each'} of {fsdp.num_workers} ranks",
        (_STATE if on_gpu else _STATE_AND_SNAPSHOTS)
        + (f", and the weights on their way by {name}," if staging else ""),
        memory.rank_bytes + staging + (0 if on_gpu else _snapshot_bytes(trainer, memory)),
        memory.pass_bytes,
        min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
        f"{remedy}.",
        ("policy", "critic") if colocated else ("policy",),
        CONTEXT_BYTES if on_gpu else 0,
    )
    if not on_gpu:
        return [rank]
    here = min(fsdp.num_workers, len(machine.gpu_bytes))  # the other ranks are on other machines
    state = memory.rank_bytes if fsdp.cpu_offload else memory.rank_elsewhere_bytes
    reference = local_reference_bytes(config, memory) if derive.reference_device(config) == "cpu" else 0
    workers = f", or set {_REFERENCE}.executor=workers{_fewer_copies(config)}" if reference else ""
    snapshots = _OFFLOADED if trainer.placement.colocate_all else _SNAPSHOTS
    main_memory = MemoryRequirement(
        f"The main memory, with {here} ranks{' and cpu_offload=true' if state else ''}",
        _STATE_AND_SNAPSHOTS if state else "weights and snapshots" if reference else snapshots,
        here * (state + _snapshot_bytes(trainer, memory) + _offloaded_bytes(trainer, memory)) + reference,
        0,
        machine.main_memory_bytes,
        f"Use more nodes{workers}.",
    )
    if not fsdp.cpu_offload:
        return [rank, main_memory]
    # The policy's state is in main memory; the GPU holds a reference or critic that is not offloaded, and activations.
    remedy = "Use more nodes."
    if memory.rank_elsewhere_bytes:
        remedy = "Set cpu_offload=true in rollout.stages.reference and trainer.critic.fsdp too."
    elif staging:
        remedy = "Set another generator.weight_transport, such as gloo."
    return [main_memory, replace(rank, state_bytes=memory.rank_elsewhere_bytes + staging, remedy=remedy)]


def _offloaded_bytes(trainer: TrainerConfig, memory: MemoryEstimate) -> int:
    """Return what each rank's state takes of the main memory while engines have its GPU, without what pinning adds."""
    stays = trainer.strategy is TrainingStrategy.fsdp2 and trainer.fsdp.cpu_offload
    if not trainer.placement.colocate_all or trainer.device == "cpu" or stays:
        return 0
    return -(-(memory.policy_bytes + memory.optimizer_bytes) // memory.num_ranks)


def _snapshot_bytes(trainer: TrainerConfig, memory: MemoryEstimate) -> int:
    """Return what each rank's snapshot takes of the main memory of its machine, on the CPU and on GPUs."""
    with_critic = trainer.strategy is TrainingStrategy.local or derive.critic_is_colocated(trainer)
    together = memory.snapshot_bytes + (memory.critic_snapshot_bytes if with_critic else 0)
    return -(-together // memory.num_ranks)


def _critic_workers(trainer: TrainerConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """strategy=fsdp2: a critic's separate workers. The snapshots of workers on GPUs may be on any machine."""
    critic = derive.critic_trainer(trainer)
    on_gpu = critic.device != "cpu" and not critic.fsdp.cpu_offload
    if not memory.critic_bytes or derive.critic_is_colocated(trainer) or (on_gpu and not machine.gpu_bytes):
        return []
    key, workers = "trainer.critic.fsdp", critic.fsdp.num_workers
    held = memory.critic_bytes + (0 if on_gpu else memory.critic_snapshot_bytes)
    return [
        MemoryRequirement(
            f"Each of the critic's {workers} ranks",
            _STATE if on_gpu else _STATE_AND_SNAPSHOTS,
            -(-held // memory.critic_ranks),
            memory.critic_activation_bytes if on_gpu or critic.device == "cpu" else 0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            f"Use more than {key}.num_workers={workers}{f', or set {key}.cpu_offload=true' if on_gpu else ''}.",
            ("critic",),
        )
    ]


def local_reference_bytes(config: RunConfig, memory: MemoryEstimate) -> int:
    """Return the bytes of all copies of a reference policy in threads or processes on this machine."""
    copies = config.rollout.stages.reference.max_parallel if derive.reference_is_local(config) else 0
    return copies * memory.apart_reference_bytes


def _fewer_copies(config: RunConfig) -> str:
    copies = config.rollout.stages.reference.max_parallel
    return f", or {_REFERENCE}.max_parallel below {copies}" if copies > 1 else ""


def _reference_beside_ranks(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """strategy=fsdp2: a reference policy of this machine on its own GPU, or in main memory beside a rank that trains there."""
    held, device = local_reference_bytes(config, memory), derive.reference_device(config)
    on_gpu = device != "cpu"
    if not held or (on_gpu and not machine.gpu_bytes) or (not on_gpu and config.trainer.device != "cpu"):
        return []
    rank = 0 if on_gpu else memory.rank_bytes + _snapshot_bytes(config.trainer, memory)
    return [
        MemoryRequirement(
            f"The reference policy on {device}" if on_gpu else "The reference policy and a rank",
            "weights" if on_gpu else _STATE_AND_SNAPSHOTS,
            held + rank,
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            f"Set {_REFERENCE}.executor=workers{_fewer_copies(config)}.",
        )
    ]


def _reference_actors(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """A reference policy's Ray actors, with a copy or a shard each."""
    reference = config.rollout.stages.reference
    sharded = reference.executor == "workers"
    on_gpu = derive.reference_device(config) != "cpu" and not (sharded and derive.reference_offload(config))
    if not memory.apart_reference_bytes or derive.reference_is_local(config) or (on_gpu and not machine.gpu_bytes):
        return []
    remedy = f"Set {_REFERENCE}.executor=workers."
    if sharded:
        offload = f", or set {_REFERENCE}.cpu_offload=true" if on_gpu else ""
        remedy = f"Use more than {_REFERENCE}.num_workers={reference.num_workers}{offload}."
    return [
        MemoryRequirement(
            f"Each of the reference's {reference.num_workers if sharded else reference.max_parallel} actors",
            "weights",
            -(-memory.apart_reference_bytes // (reference.num_workers if sharded else 1)),
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            remedy,
        )
    ]


def _replica_apart(config: RunConfig, memory: MemoryEstimate, machine: Machine) -> list[MemoryRequirement]:
    """A replica of the policy in a Ray actor, or beside ranks in a process or a thread of this machine."""
    device, executor = derive.replica_device(config), config.rollout.stages.proximal.executor
    on_gpu = device != "cpu"
    beside_local_training = config.trainer.strategy is TrainingStrategy.local and executor != "ray"
    if not derive.has_replica(config) or beside_local_training or (on_gpu and not machine.gpu_bytes):
        return []
    return [
        MemoryRequirement(
            f"The replica of the policy on {device}",
            "weights",
            memory.replica_bytes,
            0,
            min(machine.gpu_bytes) if on_gpu else machine.main_memory_bytes,
            "Set rollout.stages.proximal.executor=trainer.",
        )
    ]
