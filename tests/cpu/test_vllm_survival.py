"""A killed vLLM process. The last file that uses the shared engines: the twin does not survive it."""

from __future__ import annotations

import asyncio
import os
import select
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from test_vllm_continuation import check, client_of
from vllm_engines import PROMPT, Served, request, save_folder, tiny_model

from skyrl_train.errors import EngineDeadError
from skyrl_train.types import PauseMode

pytestmark = pytest.mark.ends_shared_engines
on_the_session_loop = pytest.mark.asyncio(loop_scope="session")


@on_the_session_loop
async def test_the_requests_of_a_killed_engine_go_on_where_one_lives(
    vllm: Served, started_vllm: dict[str, Served]
) -> None:
    twin = started_vllm["twin"]
    await twin.sync_weights(0)
    if twin.version == vllm.version:  # the versions of a response tell whether both have sampled it
        await twin.sync_weights(0)
    client, length = client_of(twin, vllm), 300
    # Before the requests, which a busy machine would have finished by then.
    update = await twin.gather(tiny_model(0))
    (pid,) = await twin.engine.worker_pids()
    stream = twin.engine.stream(request(max_tokens=length))
    await anext(stream)
    asked = [[3 + i % 40, 5] for i in range(16)]
    calls = [asyncio.create_task(client.generate(request(prompt, max_tokens=length))) for prompt in asked]
    await twin.sampled(1500)
    os.kill(pid, signal.SIGKILL)
    with pytest.raises(EngineDeadError):
        async for _ in stream:
            pass
    for call in (
        twin.engine.generate(request()),
        twin.engine.pause(PauseMode.KEEP),
        twin.engine.load_weights(update),
        twin.engine.worker_pids(),
        twin.engine.abort_generation(),
    ):
        with pytest.raises(EngineDeadError):
            await call
    assert not (await twin.engine.health()).alive
    outputs = await asyncio.gather(*calls)
    continued = any(len(set(output["response_versions"][0])) > 1 for output in outputs)
    assert continued == twin.engine.capabilities.chunked_streaming, "without chunks, requests begin again"
    for prompt, output in zip(asked, outputs, strict=True):
        # The twins' version numbers differ, so versions tell who sampled what; the weights are the same.
        output["response_versions"] = [sorted(output["response_versions"][0])]
        check(output, prompt, length)
    await twin.engine.teardown()


@on_the_session_loop
async def test_pending_calls_fail_when_an_engine_is_torn_down(tied_vllm: Served) -> None:
    await tied_vllm.sync_weights(0)
    await tied_vllm.engine.pause(PauseMode.KEEP)
    waiting = asyncio.create_task(tied_vllm.engine.generate(request(PROMPT)))
    await asyncio.sleep(0)
    (pid,) = await tied_vllm.engine.worker_pids()
    await tied_vllm.engine.teardown()
    with pytest.raises(EngineDeadError, match="torn down"):
        await waiting
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    await tied_vllm.engine.teardown()
    assert not (await tied_vllm.engine.health()).alive


def test_a_worker_writes_all_its_output_to_the_log_of_the_engine(tmp_path: Path) -> None:
    code = "import os; import skyrl_train.inference.engines.vllm.worker; print('said'); os.write(2, b'native')"
    for folder in (tmp_path, tmp_path / "of another machine"):
        variables = {
            "SKYRL_TRAIN_ENGINE_OWNER": str(os.getpid()),
            "SKYRL_TRAIN_ENGINE_LOG": str(folder / "engine-0.log"),
        }
        worker = subprocess.run(
            [sys.executable, "-c", code], env=os.environ | variables, capture_output=True, check=True
        )
        assert (b"said" in worker.stdout, b"native" in worker.stderr) == (not folder.exists(), not folder.exists())
    assert (tmp_path / "engine-0.log").read_bytes().split() == [b"said", b"native"]


def test_a_worker_ends_with_the_process_that_started_the_engine() -> None:
    owner = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    worker = subprocess.Popen(
        [sys.executable, "-c", "import skyrl_train.inference.engines.vllm.worker; print('up', flush=True); input()"],
        env={**os.environ, "SKYRL_TRAIN_ENGINE_OWNER": str(owner.pid)},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    try:
        assert worker.stdout.readline() == b"up\n"
        assert worker.poll() is None
        owner.kill()
        owner.wait()  # a pidfd tells of the end at once, whether or not anybody has waited for it
        assert worker.wait() == -signal.SIGKILL
    finally:
        for process in (owner, worker):
            process.kill()
            process.wait()


HOST = """
import asyncio, sys
from skyrl_train.inference.engines.vllm import VLLMEngine

async def main():
    engine = VLLMEngine(sys.argv[1], max_model_len=64, max_num_seqs=4)
    await engine.start()
    print("worker", (await engine.worker_pids())[0], flush=True)
    await asyncio.get_running_loop().create_future()

if __name__ == "__main__":
    asyncio.run(main())
"""


@pytest.mark.slow
def test_a_killed_host_leaves_no_process_of_vllms(tmp_path) -> None:
    script = tmp_path / "host.py"
    script.write_text(HOST)
    host = subprocess.Popen([sys.executable, script, save_folder(tmp_path / "model")], stdout=subprocess.PIPE)
    pid = next(int(line.split()[1]) for line in host.stdout if line.startswith(b"worker "))
    worker = os.pidfd_open(pid)
    host.kill()
    host.wait()
    select.select([worker], [], [])  # until it has ended too
    os.close(worker)
