"""Sharding of a model's parameters over the ranks (FSDP2), and gathering of single parameters.

rank 0 reads the folder ──one parameter at a time──> every rank's shard      shards ──gathered──> one parameter at a time

Layers are the units: a rank holds its shard of every layer, and all of the layers that it currently computes.
With ``trainer.fsdp.shard_size`` below the number of ranks there are several copies of the shards (HSDP): layers are gathered
among the ranks of a copy, and gradients are added up over all ranks.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, OffloadPolicy, fully_shard
from torch.distributed.tensor import DTensor, distribute_tensor
from transformers import PreTrainedModel

from skyrl_train.config import derive
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.models.folder import build_empty, load_model, resolve_dtype
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.layers import checkpoint_activations, compile_layers
from skyrl_train.training.optimizer import PolicyOptimizer


def shard_mesh(device_type: str, num_ranks: int, shard_size: int | None) -> DeviceMesh:
    """Return the ranks by copy of the policy and position within it; neighbours have shards of one copy. Called by all ranks.

    Args:
        shard_size: ranks per copy; None: all ranks share one copy.
    """
    if shard_size is None or shard_size == num_ranks:
        return init_device_mesh(device_type, (num_ranks,))
    return init_device_mesh(device_type, (num_ranks // shard_size, shard_size), mesh_dim_names=("replicate", "shard"))


def load_sharded(
    model_path: str,
    config: TrainerConfig,
    mesh: DeviceMesh,
    collectives: Collectives,
    adapt: Callable[[PreTrainedModel], PreTrainedModel] = lambda model: model,
    section: str = "trainer.policy",
) -> PreTrainedModel:
    """Load this rank's shards of the model. Called by all ranks.

    Trained parameters are in float32; the base of an adapter, which is not trained, is in ``trainer.policy.dtype``.
    Only rank 0 reads the weights; it has the complete model in main memory meanwhile.

    Args:
        adapt: changes the complete model before it is sharded, with the same result on every rank.
        section: the section of the configuration with the model's settings, for messages.

    Raises:
        ConfigError: the configured compilation or checkpointing of layers is impossible for the model.
        ModelError: the model folder cannot be used. Both through ``collectives``, on all ranks.
    """

    def built() -> tuple[PreTrainedModel, PreTrainedModel | None]:
        lora = config.policy.model.lora
        dtype = config.policy.dtype if lora.rank else "float32"
        with torch.device("meta"):
            empty = build_empty(model_path, dtype, "meta")
        model = adapt(empty)
        if config.policy.compile:
            compile_layers(model)
        if derive.gradient_checkpointing(config, model.num_parameters()):
            checkpoint_activations(model, section)
        source = load_model(model_path, dtype, "cpu") if mesh.get_rank() == 0 else None
        return model, None if source is None else adapt(source)

    model, source = collectives.all_succeed(built)
    shard(model, config, mesh)
    model.to_empty(device="cpu" if config.fsdp.cpu_offload else mesh.device_type)
    for module in model.modules():  # buffers stay where the model computes
        for name, buffer in module.named_buffers(recurse=False):
            setattr(module, name, buffer.to(mesh.device_type))
    _copy_from_first_rank(source, model, mesh)
    return model


def shard(model: PreTrainedModel, config: TrainerConfig, mesh: DeviceMesh) -> None:
    """Make every decoder layer a unit, and the rest (embeddings, the last norm) another one.

    Gradients are sums over the ranks: the loss is normalised by all sequences of the step, not by a rank's sequences.
    """
    narrow = resolve_dtype(config.policy.dtype)
    precision = MixedPrecisionPolicy(
        param_dtype=narrow if narrow != torch.float32 else None, reduce_dtype=torch.float32
    )
    offload = CPUOffloadPolicy(pin_memory=mesh.device_type != "cpu") if config.fsdp.cpu_offload else OffloadPolicy()
    # The layers that transformers declares unsplittable; an architecture without a declaration is one unit.
    layer_classes = set(model._no_split_modules or ())
    for layer in [module for module in model.modules() if type(module).__name__ in layer_classes]:
        fully_shard(
            layer,
            mesh=mesh,
            reshard_after_forward=config.fsdp.reshard_after_forward,
            mp_policy=precision,
            offload_policy=offload,
        )
    # Otherwise the rest stays gathered between two passes, where a snapshot or a weight sync would find it.
    fully_shard(model, mesh=mesh, reshard_after_forward=True, mp_policy=precision, offload_policy=offload)
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.set_gradient_divide_factor(1.0)
            module.set_force_sum_reduction_for_comms(True)  # gloo has no other reduction that keeps the sum


def gathered(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """Gather a sharded weight on its device, in ``dtype``; called by all ranks. An unsharded weight stays where it is."""
    if not isinstance(weight, DTensor):
        return weight.to(dtype)
    # A shard in main memory is pinned: its GPU copies it in its turn, and casts it there.
    shard = weight.to(weight.device_mesh.device_type, non_blocking=True).to(dtype)
    full: torch.Tensor = shard.full_tensor()  # type: ignore[attr-defined]
    return full


@torch.no_grad()
def move_shards(
    model: PreTrainedModel, optimizer: PolicyOptimizer, move: Callable[[torch.Tensor], torch.Tensor]
) -> None:
    """Replace the memory of each parameter's shard, and of its moments, by ``move(shard)``.

    Between two steps only. FSDP2 takes the new shards as after ``model.to(device)``.
    """

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        if not isinstance(tensor, DTensor):
            return tensor  # a buffer: small, and needed where the model computes
        # Not from_local, which would move the shard to the device of the mesh.
        return DTensor(move(tensor.to_local()), tensor._spec, requires_grad=tensor.requires_grad)

    model._apply(moved)
    for state in optimizer.adamw.state.values():
        for name, tensor in state.items():
            if isinstance(tensor, DTensor):
                state[name] = moved(tensor)


def local_shard(weight: torch.Tensor) -> torch.Tensor:
    """Return this rank's shard of a weight, or an unsharded weight unchanged."""
    return weight.to_local() if isinstance(weight, DTensor) else weight


@torch.no_grad()
def _copy_from_first_rank(source: PreTrainedModel | None, target: PreTrainedModel, mesh: DeviceMesh) -> None:
    weights = dict(source.named_parameters()) if source is not None else {}
    for name, parameter in target.named_parameters():
        assert isinstance(parameter, DTensor), "fully_shard leaves no parameter whole"
        there = weights.get(name)
        empty = torch.empty(parameter.shape, dtype=parameter.dtype, device=mesh.device_type)
        full = empty if there is None else there.to(mesh.device_type)
        shards = distribute_tensor(full, mesh, parameter.placements)
        parameter.to_local().copy_(shards.to_local())
    buffers = dict(source.named_buffers()) if source is not None else {}
    for name, buffer in target.named_buffers():
        full = buffers[name].to(mesh.device_type) if source is not None else buffer.to(mesh.device_type)
        dist.broadcast(full, src=0)
        buffer.copy_(full)
