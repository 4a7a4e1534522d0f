"""Where things run: what cannot work, with its remedy."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from skyrl_train.config import derive
from skyrl_train.config.import_path import is_import_path
from skyrl_train.config.limits import Problems, at_least, changed, more_than_zero
from skyrl_train.config.model_shape import model_shape
from skyrl_train.config.schema.model import ModelConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.trainer import TrainerConfig
from skyrl_train.config.schema.training import TrainingStrategy

# What workers of a reference policy take from ``trainer.fsdp``; the rest of their settings are its own.
_OF_REFERENCE_WORKERS = ("cpu_offload", "reshard_after_forward", "environment", "start_timeout_s")


def _engines(config: RunConfig) -> Problems:
    key, engine = "generator.inference_engine", config.generator.inference_engine
    of_evaluation = config.trainer.eval.num_engines
    if engine.backend == "vllm_remote" and len(engine.remote_urls) != engine.num_engines + of_evaluation:
        beside = f" and trainer.eval.num_engines={of_evaluation}" if of_evaluation else ""
        yield (
            f"{key}.remote_urls names {len(engine.remote_urls)} servers for {key}.num_engines={engine.num_engines}"
            f"{beside}: give one URL per engine{', those of the evaluation last' if of_evaluation else ''}."
        )
    if engine.backend != "vllm_remote" and engine.remote_urls:
        yield f"{key}.remote_urls belongs to {key}.backend=vllm_remote, not to {engine.backend!r}."
    if engine.backend == "vllm_remote" and engine.placement == "ray":
        yield f"{key}.placement=ray: a remote server runs where it was started; leave the placement out."
    if engine.backend == "vllm" and engine.placement == "thread":
        yield f"{key}.placement=thread is for the embedded engine; vLLM has processes of its own: use process or ray."
    parallel = engine.tensor_parallel_size * engine.pipeline_parallel_size * engine.data_parallel_size
    if engine.backend == "embedded" and parallel != 1:
        yield f"{key}: the embedded engine is not parallel; set its *_parallel_size to 1, or use backend=vllm."
    if engine.backend != "vllm" and engine.engine_args:
        yield f"{key}.engine_args belongs to {key}.backend=vllm, not to {engine.backend!r}."


def _training_workers(config: RunConfig) -> Problems:
    trainer, key = config.trainer, "trainer.fsdp"
    yield from at_least(config, 0, "trainer.max_restarts", f"{key}.ray_num_cpus", f"{key}.ray_num_gpus")
    yield from at_least(config, 1, f"{key}.num_workers", f"{key}.sequence_parallel_size")
    yield from more_than_zero(config, f"{key}.start_timeout_s")
    if trainer.strategy is TrainingStrategy.local:
        reference = derive.needs_reference(trainer.algorithm) and config.rollout.stages.reference.placement == "workers"
        if trainer.max_restarts > 0 and not reference:
            yield (
                f"trainer.max_restarts={trainer.max_restarts} with trainer.strategy=local: there is no training worker "
                "that could die. Set trainer.max_restarts=0, or trainer.strategy=fsdp2."
            )
        return
    yield from ranks(trainer, trainer.policy.model, key, "trainer.device", "policy")


def ranks(trainer: TrainerConfig, model: ModelConfig, key: str, device_key: str, whose: str) -> Problems:
    """What is wrong with a group of workers.

    Args:
        trainer: with the settings of the workers in ``device`` and ``fsdp``.
        model: that they are to hold.
        key: where ``fsdp`` is set.
        device_key: where ``device`` is.
        whose: their model's name.
    """
    if trainer.device not in ("cpu", "cuda"):
        yield (
            f"{device_key}={trainer.device} with trainer.strategy=fsdp2: each worker sees the GPU that Ray gives it and "
            f"no other. Set {device_key}=cuda."
        )
    yield from _mesh(trainer, model, key, whose)
    gpus = derive.fsdp_num_gpus(trainer)
    if trainer.device == "cuda" and 0 <= gpus < 1 and trainer.fsdp.num_workers > 1:
        yield (
            f"{key}.ray_num_gpus={gpus:g}: two workers could share a GPU, which NCCL refuses. Set {key}.ray_num_gpus=1, or "
            f"{key}.num_workers=1."
        )
    if trainer.device == "cpu" and gpus > 0:
        yield f"{key}.ray_num_gpus={gpus:g} with {device_key}=cpu: nothing would use them. Set {device_key}=cuda."


def _without_workers(config: RunConfig) -> Problems:
    trainer = config.trainer
    if trainer.strategy is not TrainingStrategy.local:
        return
    reference = derive.needs_reference(trainer.algorithm) and config.rollout.stages.reference.placement == "workers"
    taken = _OF_REFERENCE_WORKERS if reference else ()
    unused = [f"trainer.fsdp.{name}" for name in changed(trainer.fsdp) if name not in taken]
    if derive.needs_critic(trainer.algorithm):
        unused += [f"trainer.critic.fsdp.{name}" for name in changed(trainer.critic.fsdp)]
    if unused:
        yield (
            f"{', '.join(unused)} with trainer.strategy=local: there are no training workers, so nothing takes it. Set "
            "trainer.strategy=fsdp2, or leave it out."
        )


def _mesh(trainer: TrainerConfig, model: ModelConfig, key: str, whose: str) -> Problems:
    workers, shared, split = trainer.fsdp.num_workers, trainer.fsdp.sequence_parallel_size, trainer.fsdp.shard_size
    if shared < 1 or workers < 1:
        return  # which was said
    if workers % shared:
        yield (
            f"{key}.sequence_parallel_size={shared} does not divide {key}.num_workers={workers}. Set {key}.num_workers="
            f"{-(-workers // shared) * shared}, or {key}.sequence_parallel_size to a divisor."
        )
    if split is not None and (split < 1 or workers % split):
        yield (
            f"{key}.shard_size={split} does not divide {key}.num_workers={workers} into copies of the {whose}. Set "
            f"{key}.shard_size to a divisor, or to null for one copy."
        )
    if shared > 1 and trainer.packing is False:
        yield (
            f"{key}.sequence_parallel_size={shared} with trainer.packing=false: padded rows are not cut into slices. "
            "Set trainer.packing=null."
        )
    yield from shared_heads(model, shared, key, whose)


def shared_heads(model: ModelConfig, shared: int, key: str, whose: str) -> Problems:
    """A problem if ``shared`` ranks of a sequence do not divide the model's heads; see :func:`ranks`."""
    shape = model_shape(model) if shared > 1 else None
    if shape is not None and shape.num_heads % shared:
        yield (
            f"{key}.sequence_parallel_size={shared} does not divide the {whose}'s {shape.num_heads} attention heads, which "
            "the ranks share out. Set it to a divisor."
        )


def _stages(config: RunConfig) -> Problems:
    key, reward = "rollout.stages", config.rollout.stages.reward
    yield from at_least(
        config, 1, f"{key}.reward.max_parallel", f"{key}.reference.max_parallel", f"{key}.reference.num_workers"
    )
    yield from _reference_device(config)
    yield from at_least(
        config,
        0,
        *(
            f"{key}.{stage}.ray_{resource}"
            for stage in ("reward", "reference")
            for resource in ("num_cpus", "num_gpus")
        ),
    )
    yield from more_than_zero(config, f"{key}.reward.timeout_s")
    unused = [f"{key}.reward.{name}" for name in changed(reward)] if reward.function is None else []
    if unused:
        yield (
            f"{', '.join(unused)} without {key}.reward.function, so nothing takes it. Name the function, as "
            "package.module:function or file.py:function, or leave it out."
        )
    if reward.function is not None and not is_import_path(reward.function):
        yield (
            f"{key}.reward.function={reward.function}: is no import path. Name it as package.module:function or "
            "file.py:function."
        )


def _reference_device(config: RunConfig) -> Problems:
    key, reference = "rollout.stages.reference", config.rollout.stages.reference
    if not derive.needs_reference(config.trainer.algorithm):
        unused = [f"{key}.{name}" for name in changed(reference)]
        if unused:
            yield (
                f"{', '.join(unused)} without a term that needs a reference policy, so nothing takes it. Set "
                "trainer.algorithm.kl_loss_coef or kl_reward_coef above 0, or leave it out."
            )
        return
    yield from _of_other_places(config)
    yield from _sharded_reference(config)
    if reference.placement == "colocated":
        return
    device = derive.reference_device(config)
    on_gpu, in_actors = device.startswith("cuda"), reference.placement in ("ray", "workers")
    if in_actors:
        yield from _reference_gpus(config, device)
    if on_gpu and not in_actors and reference.device is None and config.trainer.strategy is TrainingStrategy.fsdp2:
        yield (
            f"{key}.placement={reference.placement} with trainer.strategy=fsdp2 on cuda: the GPUs are those that Ray gave to the "
            f"workers. Set {key}.placement=workers or colocated, or name a GPU of its own in {key}.device."
        )


def _reference_gpus(config: RunConfig, device: str) -> Problems:
    """What is wrong with the device of a reference in actors, and with the GPUs that each of them reserves."""
    key, reference = "rollout.stages.reference", config.rollout.stages.reference
    gpus, placed = derive.reference_num_gpus(config), f"{key}.placement={reference.placement}"
    if device not in ("cpu", "cuda"):
        yield (
            f"{placed} on {device}: each actor sees the GPU that Ray gives it and no other. Set {key}.device=cuda, or "
            f"{key}.device=cpu."
        )
    elif device == "cpu" and gpus > 0:
        yield f"{key}.ray_num_gpus={gpus:g} on cpu: nothing would use them. Set {key}.device=cuda, or {key}.ray_num_gpus=0."
    elif device == "cuda" and not gpus > 0:
        yield (
            f"{placed} on cuda with {key}.ray_num_gpus=0: its actor would see no GPU. Set {key}.ray_num_gpus=1, or "
            f"{key}.device=cpu."
        )
    elif device == "cuda" and gpus < 1 and reference.placement == "workers" and reference.num_workers > 1:
        yield (
            f"{key}.ray_num_gpus={gpus:g}: two workers could share a GPU, which NCCL refuses. Set {key}.ray_num_gpus=1, or "
            f"{key}.num_workers=1."
        )


def _of_other_places(config: RunConfig) -> Problems:
    """Settings of a reference that another placement than its own would take."""
    key, reference = "rollout.stages.reference", config.rollout.stages.reference
    takers = {
        "num_workers": ("workers",),
        "ray_num_cpus": ("ray", "workers"),
        "ray_num_gpus": ("ray", "workers"),
    }
    unused = [
        name for name in changed(reference) if reference.placement not in takers.get(name, (reference.placement,))
    ]
    for name in unused:
        yield (
            f"{key}.{name} with {key}.placement={reference.placement}, so nothing takes it. Set {key}.placement="
            f"{' or '.join(takers[name])}, or leave it out."
        )


def _sharded_reference(config: RunConfig) -> Problems:
    key, reference = "rollout.stages.reference", config.rollout.stages.reference
    if reference.cpu_offload is not None and reference.placement not in ("workers", "colocated"):
        yield (
            f"{key}.cpu_offload with {key}.placement={reference.placement}: only sharded weights are moved as they are needed. "
            f"Set {key}.cpu_offload=null, or {key}.placement=workers."
        )
    if reference.max_parallel != 1 and reference.placement in ("workers", "colocated"):
        yield (
            f"{key}.max_parallel={reference.max_parallel} with {key}.placement={reference.placement}: the ranks do one thing "
            f"at a time. Set {key}.max_parallel=1."
        )
    if reference.placement != "colocated":
        return
    if config.trainer.strategy is TrainingStrategy.local:
        yield (
            f"{key}.placement=colocated with trainer.strategy=local: there are no ranks that could hold it. Set "
            f"{key}.placement=process, or trainer.strategy=fsdp2."
        )
    if reference.device is not None:
        yield (
            f"{key}.device={reference.device} with {key}.placement=colocated: it computes where the policy does. Set "
            f"{key}.device=null."
        )


def _actors(config: RunConfig) -> Problems:
    yield from at_least(config, 0, "rollout.num_actors", "rollout.ray_num_cpus")
    port, actors = endpoint_port(config), config.rollout.num_actors
    if config.generator.name == "harness" and actors > 1 and port:
        yield (
            f"generator.kwargs.endpoint.port={port} with rollout.num_actors={actors}: each actor has an endpoint of its own, "
            "and actors may share a machine. Leave the port out (each takes a free one), or set rollout.num_actors=0 where "
            "other programs need to know it."
        )


def endpoint_port(config: RunConfig) -> Any:
    """The port that the harness was told to take; 0 or None where it takes a free one."""
    endpoint = config.generator.kwargs.get("endpoint")
    return endpoint.get("port") if isinstance(endpoint, Mapping) else None


def _checkpoints(config: RunConfig) -> Problems:
    url, key = config.trainer.ckpt_path, "trainer.ckpt_path"
    if url is None:
        return
    if "://" not in url:
        yield (
            f"{key}={url} is no URL. On a disk, checkpoints are in the run folder: set trainer.run_dir or trainer.runs_dir, and "
            f"leave {key} out."
        )
        return
    protocol, _, folder = url.partition("://")
    if not protocol or not folder.strip("/"):
        yield f"{key}={url} names no folder. Set it to one for this run alone, such as s3://bucket/folder."
        return
    if protocol == "memory":
        yield (
            f"{key}={url} is gone when this process ends, and a run could not be resumed from it. Name an object store, or "
            f"leave {key} out."
        )
    from fsspec import get_filesystem_class

    try:
        get_filesystem_class(protocol)
    except (ImportError, ValueError) as error:
        yield f"{key}={url} cannot be opened: {error}. Name a protocol that fsspec knows, and install its package."


RULES: tuple[Callable[[RunConfig], Problems], ...] = (
    _checkpoints,
    _engines,
    _training_workers,
    _without_workers,
    _stages,
    _actors,
)
