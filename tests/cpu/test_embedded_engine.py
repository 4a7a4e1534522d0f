"""The engine's proxy: the same contract with a thread and with a process, and the errors when one ends."""

from __future__ import annotations

import asyncio
import gc
import os
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
from scripted import settle

from skyrl_train.config.schema import BuildModelConfig
from skyrl_train.errors import ConfigError, EngineDeadError, EngineError, RequestError
from skyrl_train.inference.engines.embedded import EmbeddedEngine
from skyrl_train.inference.interface import InferenceEngineInput
from skyrl_train.models.folder import load_model
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.types import PauseMode
from skyrl_train.weight_sync.shared_memory import SharedMemoryTransport
from skyrl_train.workers.thread import ThreadLink

pytestmark = pytest.mark.asyncio(loop_scope="module")
LONG = 400  # tokens: a request that does not end while a test looks away


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    path = tmp_path_factory.mktemp("embedded") / "model"
    build_model_folder(BuildModelConfig(hidden_size=32, intermediate_size=48), path, seed=0)
    return str(path)


@pytest.fixture(scope="module")
def transport() -> SharedMemoryTransport:
    return SharedMemoryTransport(verify=True)


async def publish(engine: EmbeddedEngine, folder: str, transport: SharedMemoryTransport, version: int) -> None:
    update = transport.gather(load_model(folder, "float32", "cpu").named_parameters(), version)
    await engine.pause(PauseMode.KEEP)
    await engine.receive_weights(update)
    await engine.load_weights(update)
    assert await engine.served_checksum() == update.checksum
    await engine.resume()


async def started(folder: str, transport: SharedMemoryTransport, executor: str) -> EmbeddedEngine:
    engine = EmbeddedEngine(folder, executor=executor, max_num_seqs=8)
    await engine.start()
    with pytest.raises(RequestError, match="no weights yet"):
        await engine.generate(request())
    await publish(engine, folder, transport, 0)
    return engine


@pytest_asyncio.fixture(scope="module", loop_scope="module", params=["thread", "process"])
async def shared(
    request: pytest.FixtureRequest, folder: str, transport: SharedMemoryTransport
) -> AsyncIterator[EmbeddedEngine]:
    engine = await started(folder, transport, request.param)
    yield engine
    await engine.teardown()


@pytest_asyncio.fixture(loop_scope="module")
async def engine(shared: EmbeddedEngine) -> AsyncIterator[EmbeddedEngine]:
    """The module's engine; each test leaves it as it found it."""
    yield shared
    health = await shared.health()
    assert (health.running, health.waiting, health.paused, health.alive) == (0, 0, False, True)


def request(*prompts: list[int], **params: object) -> InferenceEngineInput:
    return InferenceEngineInput(
        prompt_token_ids=list(prompts) or [[3, 4, 5]], sampling_params={"ignore_eos": True, **params}
    )


async def test_a_batch_comes_back_in_order_with_ids_logprobs_and_versions(engine: EmbeddedEngine) -> None:
    output = await engine.generate(request([3], [4, 5], [6, 7, 8], max_tokens=9, seed=4))
    assert [len(ids) for ids in output["response_ids"]] == [9, 9, 9]
    assert output["response_versions"] == [[engine.policy_version] * 9] * 3
    assert output["stop_reasons"] == ["length"] * 3
    assert output["responses"] == [""] * 3
    for prompt, ids, logprobs in zip(
        [[3], [4, 5], [6, 7, 8]], output["response_ids"], output["response_logprobs"], strict=True
    ):
        single = await engine.generate(request(prompt, max_tokens=9, seed=4))
        assert single["response_ids"] == [ids]
        assert single["response_logprobs"][0] == pytest.approx(logprobs, abs=1e-5)


async def test_a_stream_yields_tokens_as_they_are_sampled(engine: EmbeddedEngine) -> None:
    chunks = [chunk async for chunk in engine.stream(request(max_tokens=7, seed=4))]
    whole = await engine.generate(request(max_tokens=7, seed=4))
    assert len(chunks) == 7
    assert [token for chunk in chunks for token in chunk.token_ids] == whole["response_ids"][0]
    assert [chunk.stop_reason for chunk in chunks] == [None] * 6 + ["length"]


async def test_a_bad_prompt_fails_its_own_call_only(engine: EmbeddedEngine) -> None:
    good = asyncio.create_task(engine.generate(request(max_tokens=30)))
    with pytest.raises(RequestError, match="vocabulary"):
        await engine.generate(request([3], [10_000], max_tokens=LONG))
    with pytest.raises(EngineError, match="prompt_token_ids"):
        await engine.generate(InferenceEngineInput(prompts=[[{"role": "user", "content": "hi"}]]))
    with pytest.raises(RequestError, match="n=2"):
        await engine.generate(request(n=2))
    with pytest.raises(EngineError, match="exactly one prompt"):
        await anext(engine.stream(request([3], [4])))
    assert len((await good)["response_ids"][0]) == 30


async def test_cancelling_a_call_frees_its_slot(engine: EmbeddedEngine) -> None:
    await engine.pause(PauseMode.KEEP)
    call = asyncio.create_task(engine.generate(request([3], [4], max_tokens=LONG)))
    await asyncio.sleep(0)
    assert (await engine.health()).waiting == 2
    call.cancel()
    with pytest.raises(asyncio.CancelledError):
        await call
    assert (await engine.health()).waiting == 0
    await engine.resume()


async def test_closing_a_stream_frees_its_slot(engine: EmbeddedEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    await stream.aclose()
    health = await engine.health()
    assert (health.running, health.waiting) == (0, 0)


async def test_abort_generation_returns_the_partial_tokens(engine: EmbeddedEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    call = asyncio.create_task(engine.generate(request(max_tokens=LONG)))
    tokens = list((await anext(stream)).token_ids)
    await engine.abort_generation()
    async for chunk in stream:
        tokens += chunk.token_ids
        last = chunk.stop_reason
    assert last == "abort"
    assert 0 < len(tokens) < LONG
    assert (await call)["stop_reasons"] == ["abort"]


@pytest.mark.parametrize("mode", [PauseMode.KEEP, PauseMode.RECOMPUTE])
async def test_nothing_is_sampled_while_frozen(engine: EmbeddedEngine, mode: PauseMode) -> None:
    stream = engine.stream(request(max_tokens=60))
    await anext(stream)
    await engine.pause(mode)
    before = (await engine.health()).generated_tokens
    health = await engine.health()
    assert (health.paused, health.generated_tokens, health.running + health.waiting) == (True, before, 1)
    await engine.resume()
    assert [chunk async for chunk in stream][-1].stop_reason == "length"


async def test_wait_returns_when_the_running_request_has_ended(engine: EmbeddedEngine) -> None:
    stream = engine.stream(request(max_tokens=50))
    chunks = [await anext(stream)]
    await engine.pause(PauseMode.WAIT)
    health = await engine.health()
    assert (health.paused, health.running) == (True, 0)
    chunks += [chunk async for chunk in stream]
    assert sum(len(chunk.token_ids) for chunk in chunks) == 50
    await engine.resume()


async def test_resuming_fails_a_wait_that_is_still_draining(engine: EmbeddedEngine) -> None:
    stream = engine.stream(request(max_tokens=LONG))
    await anext(stream)
    waiting = asyncio.create_task(engine.pause(PauseMode.WAIT))
    await asyncio.sleep(0)
    await engine.resume()
    with pytest.raises(EngineError, match="resumed"):
        await waiting
    await stream.aclose()


async def test_a_request_that_an_update_interrupts_has_both_versions(
    engine: EmbeddedEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    old = engine.policy_version
    stream = engine.stream(request(max_tokens=LONG))
    versions = list((await anext(stream)).versions)
    await publish(engine, folder, transport, old + 1)
    assert engine.policy_version == old + 1
    async for chunk in stream:
        versions += chunk.versions
    assert versions == sorted(versions)
    assert set(versions) == {old, old + 1}


async def test_a_failed_load_is_raised_and_the_old_weights_stay(
    engine: EmbeddedEngine, transport: SharedMemoryTransport
) -> None:
    before, version = await engine.served_checksum(), engine.policy_version
    update = transport.gather([], version + 1)
    await engine.pause(PauseMode.KEEP)
    await engine.receive_weights(update)
    with pytest.raises(EngineError, match="misses"):
        await engine.load_weights(update)
    await engine.resume()
    assert (await engine.served_checksum(), engine.policy_version) == (before, version)


async def test_it_sleeps_while_it_is_paused_and_must_be_woken(engine: EmbeddedEngine) -> None:
    assert engine.capabilities.sleep
    with pytest.raises(EngineError, match="call pause"):
        await engine.sleep()
    await engine.pause(PauseMode.ABORT)
    await engine.sleep()
    with pytest.raises(EngineError, match="wake_up"):
        await engine.resume()
    await engine.wake_up()
    await engine.resume()
    await engine.reset_prefix_cache()


async def test_ctrl_c_does_not_reach_the_child(engine: EmbeddedEngine) -> None:
    if engine.pid is not None:
        os.kill(engine.pid, signal.SIGINT)
        assert os.getpgid(engine.pid) != os.getpgid(0), "a terminal's Ctrl-C does not even reach it"
    assert len((await engine.generate(request(max_tokens=3)))["response_ids"][0]) == 3


@pytest.mark.last_in_its_file
async def test_when_the_worker_ends_all_calls_fail_at_once_and_it_can_be_started_again(
    shared: EmbeddedEngine, folder: str, transport: SharedMemoryTransport
) -> None:
    """The last test with the shared engine: a process is killed, a thread (which nobody can kill) is torn down."""
    await shared.pause(PauseMode.KEEP)
    calls = [asyncio.create_task(shared.generate(request())) for _ in range(3)]
    calls.append(asyncio.create_task(anext(shared.stream(request()))))
    await shared.health()
    if shared.pid is not None:
        os.kill(shared.pid, signal.SIGKILL)
    else:
        await shared.teardown()
    with pytest.raises(EngineDeadError):
        await calls[0]
    await settle()
    assert all(call.done() for call in calls), "the end is noticed once, for all of them"
    for call in calls[1:]:
        with pytest.raises(EngineDeadError):
            await call
    for later in (shared.generate(request()), shared.pause(PauseMode.KEEP), shared.resume()):
        with pytest.raises(EngineDeadError):
            await later
    assert not (await shared.health()).alive
    await shared.start()
    assert shared.policy_version == -1
    with pytest.raises(RequestError, match="no weights yet"):
        await shared.generate(request())
    await publish(shared, folder, transport, 1)
    assert len((await shared.generate(request(max_tokens=3)))["response_ids"][0]) == 3


async def test_a_worker_that_fails_says_why(
    folder: str, transport: SharedMemoryTransport, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(self: object) -> None:
        raise RuntimeError("out of memory")

    engine = await started(folder, transport, "thread")
    monkeypatch.setattr("skyrl_train.inference.engines.embedded.core.EmbeddedEngineCore.step", broken)
    with pytest.raises(EngineDeadError, match="RuntimeError: out of memory"):
        await engine.generate(request())
    await engine.teardown()


async def test_teardown_leaves_no_thread_and_no_descriptor_and_fails_pending_calls(
    folder: str, transport: SharedMemoryTransport
) -> None:
    def resources() -> tuple[set[str], int]:
        names = {thread.name for thread in threading.enumerate() if thread.name.startswith("embedded")}
        return names, len(list(Path("/proc/self/fd").iterdir()))

    async def life(version: int) -> None:
        engine = EmbeddedEngine(folder, executor="thread", max_num_seqs=2)
        with pytest.raises(EngineDeadError, match="start"):
            await engine.generate(request())
        await engine.start()
        await publish(engine, folder, transport, version)
        await engine.pause(PauseMode.KEEP)
        call = asyncio.create_task(engine.generate(request()))
        await engine.health()
        await engine.teardown()
        with pytest.raises(EngineDeadError, match="torn down"):
            await call
        await engine.teardown()
        assert not (await engine.health()).alive

    for version in (0, 1):  # with both staging areas in use, and what libraries open once and keep
        await life(version)
    before = resources()
    await life(2)
    assert resources() == before


async def test_a_start_that_fails_says_why_and_leaves_nothing(tmp_path: Path, folder: str) -> None:
    threads = threading.active_count()
    with pytest.raises(EngineDeadError, match="not a model"):
        await EmbeddedEngine(str(tmp_path), executor="thread").start()
    with pytest.raises(EngineDeadError, match="max_model_len=100000"):
        await EmbeddedEngine(folder, executor="thread", max_model_len=100_000).start()
    with pytest.raises(EngineDeadError, match=r"dtype[^.]*\.$"):
        await EmbeddedEngine(folder, executor="thread", dtype="int3").start()
    with pytest.raises(ConfigError, match="executor"):
        EmbeddedEngine(folder, executor="cloud")
    assert threading.active_count() <= threads + 1  # asyncio's own pool may have grown


async def test_a_start_that_is_cancelled_leaves_no_error_that_nobody_reads(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def never(self: ThreadLink, *_: object) -> None:
        await asyncio.Event().wait()

    monkeypatch.setattr(ThreadLink, "start", never)
    unread: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda _, context: unread.append(context))
    try:
        start = asyncio.create_task(EmbeddedEngine(folder, executor="thread").start())
        await asyncio.sleep(0)
        start.cancel()
        await asyncio.wait([start])
        del start  # and with it the engine
        gc.collect()
    finally:
        asyncio.get_running_loop().set_exception_handler(None)
    assert unread == []


PARENT = """
import asyncio, sys
from skyrl_train.inference.engines.embedded import EmbeddedEngine
async def main():
    engine = EmbeddedEngine(sys.argv[1])
    start = asyncio.create_task(engine.start())
    while engine.pid is None:
        await asyncio.sleep(0)
    if sys.argv[2] == "serving":
        await start
    print(engine.pid, flush=True)
    await asyncio.Event().wait()
assert "torch" not in sys.modules, "the proxy of a process must not cost the parent the import of torch"
asyncio.run(main())
"""


@pytest.mark.parametrize("moment", ["importing", pytest.param("serving", marks=pytest.mark.slow)])
async def test_the_child_ends_with_its_parent_however_that_dies(folder: str, moment: str) -> None:
    parent = subprocess.Popen(  # noqa: ASYNC220 (milliseconds, and nothing else runs on this loop)
        [sys.executable, "-c", PARENT, folder, moment],
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
    )
    try:
        child = int(await asyncio.to_thread(parent.stdout.readline))
        watch = os.pidfd_open(child)
    finally:
        parent.kill()
        parent.wait()
        parent.stdout.close()
    await asyncio.wait_for(_readable(watch), 300)
    os.close(watch)


async def _readable(descriptor: int) -> None:
    """Returns when the process behind a pidfd has ended."""
    ended = asyncio.Event()
    loop = asyncio.get_running_loop()
    loop.add_reader(descriptor, ended.set)
    try:
        await ended.wait()
    finally:
        loop.remove_reader(descriptor)
