"""One GPU that is too small for both: engines and the trainer use it in turns (``trainer.placement.colocate_all``)."""

from __future__ import annotations

import asyncio
import functools
import gc
import inspect
import json
import sys
import time
from collections.abc import Callable
from contextlib import closing
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console
from test_loop_gpu import train
from transformers import AutoConfig, AutoModelForCausalLM
from vllm_read_back import EXTENSION, served_checksum

from skyrl_train.build.trainer import build_trainer
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.inference.engines.vllm import VLLMEngine, arguments
from skyrl_train.models.tiny import build_model_folder, character_tokenizer
from skyrl_train.observability.reporter import Reporter
from skyrl_train.observability.run_folder import RunFolder, read_jsonl
from skyrl_train.rollout.data.dataset import load_dataset
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.weight_sync.update import WeightUpdate

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="needs CUDA"),
    pytest.mark.timeout(600),
]
GIB = 1 << 30
# vLLM leaves so much. Two processes' contexts and kernels take 1 to 2 GiB of it, and a staging copy of 0.6 B parameters 2 GiB
# while it grows; the training state takes 10 GiB.
LEFT_BYTES = 6 * GIB
STEPS = 3
COLOCATE = "trainer.placement.colocate_all=true"
# A model of random weights solves no task: all its samples would have the same reward, and nothing would be learned.
REWARD = """
def share_of_even_tokens(group):
    return [sum(token % 2 == 0 for token in sample.response_ids) / len(sample.response_ids) for sample in group.samples]
"""


@dataclass(frozen=True)
class Moment:
    """The memory of the GPU before and after a call, in bytes."""

    call: str
    free_before: int
    free_after: int
    trainers_before: int  # allocated by this process
    seconds: float

    def __str__(self) -> str:
        before, after = self.free_before / GIB, self.free_after / GIB
        own = self.trainers_before / GIB
        return f"{self.call}: {self.seconds:.2f} s, {before:.2f} -> {after:.2f} GiB free, {own:.2f} GiB the trainer's before"


def watch(owner: Any, name: str, moments: list[Moment]) -> None:
    """Notes the memory around each call of a method."""
    method = getattr(owner, name)

    def note(began: tuple[int, int, float], arguments: tuple[Any, ...]) -> None:
        free, own, since = began
        call = " ".join([name, *(str(argument) for argument in arguments)])
        moments.append(Moment(call, free, torch.cuda.mem_get_info()[0], own, time.perf_counter() - since))

    def memory() -> tuple[int, int, float]:
        return torch.cuda.mem_get_info()[0], torch.cuda.memory_allocated(), time.perf_counter()

    @functools.wraps(method)
    async def awaited(*arguments: Any) -> Any:
        began = memory()
        result = await method(*arguments)
        note(began, arguments)
        return result

    @functools.wraps(method)
    def called(*arguments: Any) -> Any:
        began = memory()
        result = method(*arguments)
        note(began, arguments)
        return result

    setattr(owner, name, awaited if inspect.iscoroutinefunction(method) else called)


def save_model(folder: Path, alphabet: str) -> None:
    """A Qwen3 of 0.6 B parameters, with random weights."""
    shape = {"hidden_size": 1024, "num_hidden_layers": 28, "num_attention_heads": 16, "intermediate_size": 3072}
    heads = {"num_key_value_heads": 8, "head_dim": 128, "vocab_size": 151_936, "max_position_embeddings": 1024}
    ends = {"eos_token_id": 1, "bos_token_id": None, "pad_token_id": 0, "tie_word_embeddings": True}
    with torch.random.fork_rng(), torch.device("cuda"):
        torch.manual_seed(0)
        config = AutoConfig.for_model("qwen3", **shape, **heads, **ends)
        model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(folder)
    character_tokenizer(alphabet).save_pretrained(folder)


async def test_vllm_and_the_trainer_take_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("vllm", reason="needs the extra vllm")
    monkeypatch.setattr(arguments, "WORKER_EXTENSION", EXTENSION)
    # In this process, which looks into it.
    monkeypatch.setattr(
        "skyrl_train.build.engines.ProcessEngine", lambda factory, arguments, log_file: VLLMEngine(**arguments)
    )
    await asyncio.to_thread(save_model, tmp_path / "model", "0123456789=abcdef")
    gc.collect()
    torch.cuda.empty_cache()
    free, total = torch.cuda.mem_get_info()
    (tmp_path / "reward.py").write_text(REWARD)
    engine_settings = "generator.inference_engine"
    config = compose(
        "quickstart",
        [
            f"trainer.run_dir={tmp_path / 'run'}",
            "trainer.mode=sync",
            COLOCATE,
            f"trainer.max_steps={STEPS}",
            f"trainer.ckpt_interval={STEPS - 1}",
            "trainer.trackers=[]",
            "trainer.device=cuda",
            f"trainer.policy.model.path={tmp_path / 'model'}",
            "trainer.policy.dtype=bfloat16",
            f"rollout.stages.reward.function={tmp_path / 'reward.py'}:share_of_even_tokens",
            "generator.verify_weights=true",
            f"{engine_settings}.backend=vllm",
            f"{engine_settings}.device=cuda",
            f"{engine_settings}.dtype=bfloat16",
            f"+{engine_settings}.engine_args.gpu_memory_utilization={(free - LEFT_BYTES) / total:.4f}",
            f"+{engine_settings}.engine_args.enforce_eager=true",
            # For installations without FlashInfer and DeepGEMM kernels.
            f"+{engine_settings}.environment.VLLM_USE_FLASHINFER_SAMPLER='0'",
            f"+{engine_settings}.environment.VLLM_USE_DEEP_GEMM='0'",
        ],
    )
    dataset = load_dataset(config.data, config.environment)
    plan = resolve(config, len(dataset))
    moments: list[Moment] = []
    updates: list[WeightUpdate] = []
    checksums: list[tuple[str, str | None]] = []
    with closing(RunFolder(tmp_path / "run", config)) as run_folder:
        reporter = Reporter(config, run_folder, Console(file=StringIO()), plan.total_steps)
        trainer = await build_trainer(config, plan, dataset, run_folder, reporter)
        (engine,), backend = trainer.components.client.engines, trainer.components.backend
        assert isinstance(engine, VLLMEngine) and isinstance(backend, LocalBackend)
        load, served = engine.load_weights, trainer._on_version_served

        async def load_weights(update: WeightUpdate) -> None:
            updates.append(update)
            await load(update)

        async def on_version_served(version: int) -> None:
            checksums.append((await served_checksum(engine, updates[-1]), updates[-1].checksum))
            await served(version)

        engine.load_weights = load_weights  # type: ignore[method-assign]
        trainer._on_version_served = on_version_served  # type: ignore[method-assign]
        for owner, name in [
            (engine, "sleep"),
            (engine, "wake_up"),
            (backend, "offload_states"),
            (backend, "reload_states"),
        ]:
            watch(owner, name, moments)
        torch.cuda.reset_peak_memory_stats()
        await trainer.train()
        state_bytes = sum(tensor.nbytes for tensor in backend._states())
        rows = list(read_jsonl(run_folder.metrics.path))
    peak = torch.cuda.max_memory_allocated()
    report = [f"training state {state_bytes / GIB:.2f} GiB, peak {peak / GIB:.2f} GiB", *map(str, moments)]
    report += [str({k: round(v, 3) for k, v in row.items() if k.startswith("time/")}) for row in rows]
    sys.stdout.write("\n".join(report) + "\n")

    # It trained, and vLLM served each policy bit for bit, from the GPU's memory that the trainer shared.
    assert [row["step"] for row in rows] == [1, 2, 3]
    assert all(row["policy/grad_norm"] > 0 and row["policy/skipped_nonfinite"] == 0 for row in rows)
    assert {update.transport for update in updates} == {"cuda_ipc"}
    assert [update.version for update in updates] == [0, 1, 2, 3] and len(checksums) == STEPS
    assert all(of_engine == of_trainer for of_engine, of_trainer in checksums)
    assert len({update.checksum for update in updates}) == STEPS + 1

    # Both at once do not fit: what is free while vLLM is awake is less than training needs.
    awake = [moment.free_after for moment in moments if "kv_cache" in moment.call]
    asleep = [moment.free_after for moment in moments if moment.call.startswith("sleep")]
    # The engine sleeps since before the trainer's models were loaded; as the first policy is sent it is told so again.
    assert len(awake) == len(asleep) == STEPS + 1
    assert max(awake) < peak < min(asleep)
    # While vLLM takes its cache back, the trainer holds rotary tables and workspaces of libraries: 0.09 GiB were measured.
    assert all(moment.trainers_before < state_bytes / 10 for moment in moments if "kv_cache" in moment.call)


def test_the_quickstart_is_the_same_with_and_without_turns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An embedded engine in a process, by CUDA IPC, bit for bit. Kernels that add in any order are excluded."""
    monkeypatch.setenv("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    torch.use_deterministic_algorithms(True)
    try:
        plain = train(tmp_path / "plain", "trainer.mode=sync")
        process = "generator.inference_engine.executor=process"
        colocated = train(tmp_path / "colocated", "trainer.mode=sync", COLOCATE, process)
    finally:
        torch.use_deterministic_algorithms(False)
    assert colocated[0] == plain[0], "tokens"
    assert all(colocated[1][name].equal(weight) for name, weight in plain[1].items())
    rows = [json.loads(line) for line in (tmp_path / "colocated" / "metrics.jsonl").read_text().splitlines()]
    turns = ("time/sleep", "time/reload_states", "time/gather", "time/offload_states", "time/wake_up")
    sys.stdout.write(f"{ ({name: round(sum(row[name] for row in rows) / len(rows), 4) for name in turns}) }\n")


def test_partial_rollouts_take_turns(tmp_path: Path) -> None:
    train(tmp_path / "partial", "trainer.mode=partial_rollout", COLOCATE)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_training_state_leaves_the_gpu_and_comes_back_bit_for_bit(tmp_path: Path, dtype: str) -> None:
    build_model_folder(BuildModelConfig(hidden_size=512, intermediate_size=2048), tmp_path / "model", seed=0)
    config = TrainerConfig(device="cuda")
    config.policy.dtype = dtype
    config.policy.optimizer_config.lr = 1e-3
    backend = LocalBackend(str(tmp_path / "model"), config, total_steps=10, temperature=1.0, seed=0)
    backend.update(minibatch(1))
    states = list(backend._states())
    expected, state_bytes = [state.cpu() for state in states], sum(state.nbytes for state in states)
    held = torch.cuda.memory_allocated()
    backend.offload_states()
    assert held - torch.cuda.memory_allocated() >= state_bytes
    assert all(state.is_pinned() for state in states)
    same = functools.partial(all_equal, expected)
    assert same(states)
    # A checkpoint of what has left has the GPU's random state, and loads into what is there.
    (tmp_path / "checkpoint").mkdir()
    backend.save(backend.snapshot(), tmp_path / "checkpoint")
    backend.reload_states()
    assert all(state.is_cuda for state in states) and same(states)
    backend.update(minibatch(2))
    assert not same(states)
    random = torch.cuda.get_rng_state()
    torch.cuda.manual_seed(7)
    backend.load(tmp_path / "checkpoint")
    assert same(list(backend._states())) and torch.equal(torch.cuda.get_rng_state(), random)


def all_equal(expected: list[torch.Tensor], tensors: list[torch.Tensor]) -> bool:
    return all(torch.equal(one, other.cpu()) for one, other in zip(expected, tensors, strict=True))


def minibatch(step: int) -> Minibatch:
    generator = torch.Generator().manual_seed(step)
    make: Callable[..., torch.Tensor] = functools.partial(torch.randint, 0, 13, (24,), generator=generator)
    mask = torch.arange(24) >= 4
    sequences = [
        TrainingSequence(
            make(), mask, torch.randn(24, generator=generator) * mask, -2.5 * mask, mask.long() - 1, index // 2
        )
        for index in range(8)
    ]
    return Minibatch(sequences, 4, step)
