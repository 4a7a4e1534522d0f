"""The transports that come with the library: where each lives, which engines it reaches, what it needs."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from skyrl_train.config import derive
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.schema.training import TrainingStrategy

_KEY = "generator.weight_transport"


@dataclass(frozen=True, slots=True)
class Transport:
    """``path``: of the class, imported only where it is used. ``backends``: engines that accept it.

    ``folder``: it needs ``generator.weight_folder``. ``gpu``: trainer and engines must be on GPUs. ``copies``: of the
    weights that it holds in the trainer's memory.
    """

    path: str
    backends: frozenset[str]
    folder: bool = False
    gpu: bool = False
    copies: int = 2


_HERE, _EVERYWHERE = frozenset({"embedded", "vllm"}), frozenset({"embedded", "vllm", "vllm_remote"})
TRANSPORTS: Mapping[str, Transport] = {
    "shared_memory": Transport("skyrl_train.publication.shared_memory:SharedMemoryTransport", _EVERYWHERE),
    "disk": Transport("skyrl_train.publication.disk:DiskTransport", _EVERYWHERE, folder=True, copies=0),
    "delta": Transport("skyrl_train.publication.delta:DeltaTransport", _EVERYWHERE, folder=True, copies=1),
    "gloo": Transport("skyrl_train.publication.process_group:GlooTransport", _HERE),
    "nccl": Transport("skyrl_train.publication.process_group:NcclTransport", frozenset({"embedded"}), gpu=True),
    "cuda_ipc": Transport("skyrl_train.publication.cuda_ipc:CudaIpcTransport", _HERE, gpu=True),
}


def staging_copies(config: RunConfig) -> int:
    """Copies of the weights in the trainer's memory; 2 of a user's own transport, which can say no number."""
    transport = TRANSPORTS.get(derive.weight_transport(config))
    return 2 if transport is None else transport.copies


def problems(config: RunConfig) -> Iterator[str]:
    """Why the weights could not travel as configured, a sentence each, with the remedy."""
    generator = config.generator
    name = derive.weight_transport(config)
    transport = TRANSPORTS.get(name)
    if transport is None:
        return  # a user's own, or unknown: another rule says so
    engine = generator.inference_engine
    if engine.backend in _EVERYWHERE and engine.backend not in transport.backends:
        reachable = [known for known, other in TRANSPORTS.items() if engine.backend in other.backends]
        yield f"{_KEY}={name} does not reach engines of backend {engine.backend}. Set it to {' or '.join(reachable)}."
    if transport.folder and generator.weight_folder is None:
        yield (
            f"{_KEY}={name} needs a folder that trainer and engines see under the same path: set "
            "generator.weight_folder=/path/to/it."
        )
    if not transport.folder and generator.weight_folder is not None:
        fitting = [known for known, other in TRANSPORTS.items() if other.folder]
        yield (
            f"generator.weight_folder with {_KEY}={name}: nothing is written there. Leave the folder out, or set "
            f"{_KEY}={' or '.join(fitting)}."
        )
    if transport.gpu:
        yield from _on_gpus(config, name)


def _on_gpus(config: RunConfig, name: str) -> Iterator[str]:
    engine = config.generator.inference_engine
    on_cpu = [
        f"{key}={device}"
        for key, device in (
            ("trainer.device", config.trainer.device),
            ("generator.inference_engine.device", engine.device if engine.backend == "embedded" else "cuda"),
        )
        if not device.startswith("cuda")
    ]
    if on_cpu:
        yield f"{_KEY}={name} is for GPUs, and {' and '.join(on_cpu)}. Set {_KEY}=shared_memory."
    if name == "cuda_ipc" and config.trainer.strategy is TrainingStrategy.fsdp2:
        yield (
            f"{_KEY}=cuda_ipc with trainer.strategy=fsdp2: the weights are staged on the GPU that Ray gave to rank 0, and the "
            f"engine is on another. Set {_KEY}=shared_memory."
        )
    if name == "cuda_ipc" and engine.placement != "process":
        yield (
            f"{_KEY}=cuda_ipc with generator.inference_engine.placement={engine.placement}: the memory is opened by another "
            f"process on the same GPU. Set placement=process, or {_KEY}=shared_memory."
        )
