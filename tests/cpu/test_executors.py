"""Executors of stages: the same answers, failures and replacements on the loop, in threads, processes and Ray actors."""

from __future__ import annotations

import asyncio
import gc
import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
from ray_worlds import RayNodes
from scripted import settle
from stage_worlds import work

from skyrl_train.errors import ConfigError, StageError
from skyrl_train.workers.executors import (
    CallFailed,
    Executor,
    LoopExecutor,
    RemoteWorker,
    ThreadWorker,
    Work,
    WorkerPool,
    WorkHost,
    process_worker,
)

KINDS: dict[str, Callable[[Work], Any]] = {"thread": ThreadWorker, "process": process_worker}
both = pytest.mark.parametrize("kind", KINDS)


class Meeting:
    """A call that says when it is under way, and ends when it is told to."""

    def __init__(self, path: Path) -> None:
        self._said, self._go = path.with_suffix(".said"), path.with_suffix(".go")
        os.mkfifo(self._said)
        os.mkfifo(self._go)
        self.order = ("meet", str(self._said), str(self._go))

    async def begun(self) -> None:
        await asyncio.to_thread(self._said.read_text)

    async def go_on(self) -> None:
        await asyncio.to_thread(self._go.write_text, "")


@asynccontextmanager
async def executor_of(kind: str, count: int = 1, **arguments: Any) -> AsyncIterator[WorkerPool]:
    executor = WorkerPool([KINDS[kind](work(**arguments)) for _ in range(count)])
    try:
        await executor.start()
        yield executor
    finally:
        await asyncio.wait_for(executor.aclose(), 300)


async def fails(executor: Executor, order: Any, timeout_s: float | None = None) -> CallFailed:
    with pytest.raises(CallFailed) as caught:
        await asyncio.wait_for(executor.call(order, timeout_s), 300)
    return caught.value


@both
async def test_calls_are_answered_by_one_copy_of_the_work_and_its_errors_are_named(kind: str) -> None:
    async with executor_of(kind) as executor:
        pid, thread = await executor.call("where")
        assert (pid == os.getpid()) is (kind == "thread")
        assert await executor.call("count") == 2, "built once"
        failure = await fails(executor, "raise")
        assert failure.reason == "it raised ValueError: scripted"
        assert "in __call__" in failure.__notes__[0], "the traceback of the other side"
        assert (await fails(executor, "exit")).reason == "it raised SystemExit: 3"
        assert await executor.call("await") == 7
        assert await executor.call("generate") == [thread, thread], "its code runs in the worker"
        assert await executor.call("where") == (pid, thread), "none of that cost the worker"
        assert await executor.call("count") == 8


@both
async def test_as_many_calls_run_at_once_as_there_are_workers(kind: str, tmp_path: Path) -> None:
    async with executor_of(kind, count=2) as executor:
        meetings = [Meeting(tmp_path / str(number)) for number in range(2)]
        calls = [asyncio.create_task(executor.call(meeting.order)) for meeting in meetings]
        for meeting in meetings:
            await meeting.begun()
        third = asyncio.create_task(executor.call("count"))
        assert not (await asyncio.wait([third], timeout=0.05))[0], "it waits for its turn"
        await meetings[0].go_on()
        assert await asyncio.wait_for(third, 300) == 2
        await meetings[1].go_on()
        await asyncio.wait_for(asyncio.gather(*calls), 300)


@both
async def test_a_hung_call_ends_at_its_limit_and_its_worker_is_replaced(kind: str) -> None:
    async with executor_of(kind) as executor:
        assert await executor.call("count") == 1
        assert (await fails(executor, "hang", timeout_s=0.1)).reason == "it took longer than 0.1 s"
        assert await executor.call("count") == 1, "a new copy"


@both
async def test_a_call_whose_caller_is_gone_ends_before_the_next_one_begins(kind: str, tmp_path: Path) -> None:
    async with executor_of(kind) as executor:
        meeting = Meeting(tmp_path / "m")
        call = asyncio.create_task(executor.call(meeting.order))
        await meeting.begun()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        after = asyncio.create_task(executor.call("count"))
        await settle()
        await meeting.go_on()
        assert await asyncio.wait_for(after, 300) == 2, "the same copy: nothing was built again"


async def test_an_error_whose_caller_is_gone_is_not_printed(tmp_path: Path) -> None:
    printed: list[dict[str, Any]] = []
    asyncio.get_running_loop().set_exception_handler(lambda loop, context: printed.append(context))
    async with executor_of("thread") as executor:
        meeting = Meeting(tmp_path / "m")
        call = asyncio.create_task(executor.call(("meet and raise", *meeting.order[1:])))
        await meeting.begun()
        call.cancel()
        with pytest.raises(asyncio.CancelledError):
            await call
        await meeting.go_on()
        assert await asyncio.wait_for(executor.call("count"), 300) == 2, "the call before has ended"
    gc.collect()
    assert printed == []


@both
@pytest.mark.parametrize(
    ("arguments", "error"),
    [({"on_start": "raise"}, StageError("ValueError was raised: scripted")), ({"no_such": 1}, StageError("no_such"))],
)
async def test_a_work_that_cannot_be_built_says_why(kind: str, arguments: dict[str, Any], error: Exception) -> None:
    with pytest.raises(type(error), match=str(error)):
        async with executor_of(kind, **arguments):
            pass


@both
async def test_an_error_of_ours_comes_back_as_itself_from_the_start(kind: str) -> None:
    executor = WorkerPool([KINDS[kind](Work("stage_worlds:no_such"))])
    with pytest.raises(ConfigError, match="no_such"):
        await executor.start()
    await executor.aclose()


async def test_a_process_that_dies_fails_its_call_and_is_replaced() -> None:
    async with executor_of("process") as executor:
        pid, _ = await executor.call("where")
        assert (await fails(executor, "die")).reason == "its process ended with exit code -9"
        assert (await executor.call("where"))[0] != pid


async def test_a_value_that_cannot_be_pickled_fails_only_its_own_call() -> None:
    async with executor_of("process") as executor:
        pid, _ = await executor.call("where")
        assert "pickle" in (await fails(executor, "unpicklable")).reason
        assert "pickle" in (await fails(executor, threading.Lock())).reason
        assert (await executor.call("where"))[0] == pid


async def test_a_process_that_dies_while_it_is_built_is_an_error_of_the_stage() -> None:
    with pytest.raises(StageError, match="its process ended with exit code -9"):
        async with executor_of("process", on_start="die"):
            pass


async def test_closing_ends_a_process_in_the_middle_of_a_call(tmp_path: Path) -> None:
    async with executor_of("process") as executor:
        pid, _ = await executor.call("where")
        meeting = Meeting(tmp_path / "m")
        call = asyncio.create_task(executor.call(meeting.order))
        await meeting.begun()
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    with pytest.raises(asyncio.CancelledError):
        await call


def test_a_process_is_gone_when_its_parent_is_killed() -> None:
    code = """
import asyncio, time
from scripted import settle
from stage_worlds import work
from skyrl_train.workers.executors import process_worker

async def main():
    worker = process_worker(work())
    await worker.start()
    print((await worker.call("where"))[0], flush=True)
    time.sleep(1000)

asyncio.run(main())
"""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)}
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True, env=environment)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    watch = os.pidfd_open(child)
    parent.send_signal(signal.SIGKILL)
    parent.wait()
    parent.stdout.close()
    poll = select.poll()
    poll.register(watch, select.POLLIN)
    poll.poll()  # until the kernel says that the child has ended
    os.close(watch)


# The event loop -------------------------------------------------------------------------------------------------------

ran: list[str] = []


def looping() -> Callable[[str], Any]:
    async def obey(order: str) -> Any:
        ran.append(order)
        if order == "raise":
            raise ValueError("scripted")
        if order == "time out":
            raise TimeoutError("of its own")
        if order == "cancel":
            raise asyncio.CancelledError
        if order == "hang":
            try:
                await asyncio.Event().wait()
            finally:
                ran.append("cleaned up")
        if order.startswith("divide"):
            return (6 // int(number) for number in order.split()[1:])
        return order

    return obey


async def test_on_the_loop_calls_run_at_once_and_are_cancelled_with_their_callers() -> None:
    executor = LoopExecutor(Work("test_executors:looping"))
    await executor.start()
    ran.clear()
    hanging = asyncio.create_task(executor.call("hang"))
    assert await executor.call("echo") == "echo"
    hanging.cancel()
    with pytest.raises(asyncio.CancelledError):
        await hanging
    assert "cleaned up" in ran
    assert (await fails(executor, "raise")).reason == "it raised ValueError: scripted"
    assert (await fails(executor, "time out")).reason == "it raised TimeoutError: of its own"
    assert (await fails(executor, "cancel")).reason == "it cancelled itself"
    assert (await fails(executor, "hang", timeout_s=0.01)).reason == "it took longer than 0.01 s"
    assert ran.count("cleaned up") == 2
    assert await executor.call("divide 2 3") == [3, 2]
    assert "ZeroDivisionError" in (await fails(executor, "divide 2 0")).reason
    await executor.aclose()


# Ray ------------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("given", "expected"), [({}, "False"), ({"RAY_ENABLE_UV_RUN_RUNTIME_ENV": "1"}, "True")])
def test_workers_do_not_install_packages_unless_the_user_asks(given: dict[str, str], expected: str) -> None:
    code = (
        "import skyrl_train.workers.ray\n"
        "from ray._private.ray_constants import RAY_ENABLE_UV_RUN_RUNTIME_ENV\n"
        "print(RAY_ENABLE_UV_RUN_RUNTIME_ENV)"
    )
    without = {name: value for name, value in os.environ.items() if name != "RAY_ENABLE_UV_RUN_RUNTIME_ENV"}
    done = subprocess.run(
        [sys.executable, "-c", code], env={**without, **given}, capture_output=True, text=True, check=True
    )
    assert done.stdout.split() == [expected]


async def test_an_actor_answers_fails_and_is_replaced_like_a_process(ray_nodes: RayNodes) -> None:
    from skyrl_train.workers.ray import RayBlockingLink, RayPlacement

    by_file = Work(f"{Path(__file__).with_name('stage_worlds.py')}:Obey")  # the actor has another search path
    executor = WorkerPool([RemoteWorker(by_file, lambda: RayBlockingLink(WorkHost, RayPlacement(num_cpus=0)))])
    try:
        await executor.start()
        pid, _ = await executor.call("where")
        assert pid != os.getpid()
        assert await executor.call("count") == 2
        assert (await fails(executor, "raise")).reason == "it raised ValueError: scripted"
        assert "its actor ended" in (await fails(executor, "die")).reason
        assert (await executor.call("where"))[0] != pid
    finally:
        await executor.aclose()
