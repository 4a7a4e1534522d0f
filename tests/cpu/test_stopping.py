"""A run ends when it is asked to, also with a generator that ignores its cancellation."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import threading

import pytest
from rollout_worlds import (
    World,
    ignore_cancellation,
)
from scripted import in_virtual_time, settle

from skyrl_train.entrypoints.run import run_loop
from skyrl_train.errors import RolloutError
from skyrl_train.runtime.concurrency import cancel_within
from skyrl_train.runtime.process import DaemonThreadPool

# Shutdown -------------------------------------------------------------------------------------------------------------


@in_virtual_time
async def test_closing_does_not_wait_for_a_generator_that_ignores_its_cancellation() -> None:
    w = World(n=3)
    w.generator.plays[1] = [ignore_cancellation]
    async with w:
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 3)
        closing = asyncio.create_task(w.dispatcher.close())
        await asyncio.wait_for(closing, 60)
        left = next(line for line in w.group_generator.describe() if "ignores cancellation" in line)
        assert left.startswith("group 1: attempt 1, begun 0 s ago")
        assert not any(t.get_name().startswith("group-1") for t in asyncio.all_tasks()), "asyncio.run would wait for it"


@in_virtual_time
async def test_only_tasks_that_ignore_their_cancellation_are_left_behind() -> None:
    tidied = False

    async def tidy() -> None:
        nonlocal tidied
        try:
            await asyncio.Event().wait()
        finally:
            await settle()
            tidied = True

    async def stubborn() -> None:
        await ignore_cancellation(None)  # type: ignore[arg-type]

    tasks = [asyncio.create_task(tidy()), asyncio.create_task(stubborn())]
    await settle()
    assert await cancel_within(tasks, 0.05) == [tasks[1]]
    assert tidied and tasks[0].cancelled()
    assert await cancel_within(tasks[:1], 0.05) == []


HUNG_PROGRAM = """
import asyncio, threading
from skyrl_train.runtime.concurrency import cancel_within
from skyrl_train.entrypoints.run import run_loop
from skyrl_train.errors import RolloutError
from skyrl_train.runtime.process import DaemonThreadPool

async def stubborn():
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue

async def main():
    loop, begun = asyncio.get_running_loop(), asyncio.Event()
    loop.set_default_executor(DaemonThreadPool(shutdown_limit_s=0.1))

    def never_return():
        loop.call_soon_threadsafe(begun.set)
        threading.Event().wait()

    task = asyncio.create_task(stubborn())
    hung = asyncio.create_task(asyncio.to_thread(never_return))
    await begun.wait()
    await cancel_within([task, hung], 0.1)
    print("ended", flush=True)

asyncio.run(main())
"""


def test_a_program_ends_although_a_task_and_a_thread_never_do() -> None:
    done = subprocess.run([sys.executable, "-c", HUNG_PROGRAM], capture_output=True, text=True, check=False)
    assert done.returncode == 0 and done.stdout == "ended\n", done.stderr


BLOCKED_PROGRAM = """
import asyncio, sys, time
from skyrl_train.entrypoints.stop_signals import StopSignals

async def a_blocking_generator():
    print("blocking", flush=True)
    time.sleep(1000)

async def main():
    with StopSignals(lambda: print("asked", flush=True), lambda: print("ending", flush=True), limit_s=float(sys.argv[1])):
        await asyncio.create_task(a_blocking_generator(), name="group-17-1")

asyncio.run(main())
"""


def blocked_program(limit_s: float) -> subprocess.Popen[str]:
    program = subprocess.Popen(
        [sys.executable, "-c", BLOCKED_PROGRAM, str(limit_s)], stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    )
    assert program.stdout is not None and program.stdout.readline() == "blocking\n"
    return program


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_run_whose_loop_is_blocked_ends_by_itself_after_a_signal_and_says_where(number: signal.Signals) -> None:
    program = blocked_program(limit_s=0.1)
    program.send_signal(number)
    output, errors = program.communicate()
    assert program.returncode == -number
    assert output == "ending\n", "the loop never turned, so that it was not asked"
    assert "group-17-1" in errors and "in a_blocking_generator" in errors


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGHUP])
async def test_the_first_signal_asks_the_loop_to_stop_and_the_handlers_are_put_back(number: signal.Signals) -> None:
    from skyrl_train.entrypoints.stop_signals import StopSignals

    def earlier_handler(number: int, frame: object) -> None:
        raise AssertionError("the signal has reached the handler that was there before")

    found = signal.signal(number, earlier_handler)
    try:
        asked = asyncio.Event()
        with StopSignals(asked.set, lambda: None):
            signal.raise_signal(number)
            signal.raise_signal(number)  # the same one, passed on by a launcher
            await asyncio.wait_for(asked.wait(), 60)
        assert signal.getsignal(number) is earlier_handler
    finally:
        signal.signal(number, found)


async def test_under_nohup_a_closed_terminal_stops_nothing() -> None:
    from skyrl_train.entrypoints.stop_signals import StopSignals

    found = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        asked = asyncio.Event()
        with StopSignals(asked.set, lambda: None):
            signal.raise_signal(signal.SIGHUP)
            await asyncio.sleep(0)
            assert not asked.is_set()
            assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, found)


async def test_calls_that_hang_keep_no_other_call_from_a_thread() -> None:
    released = threading.Event()
    with DaemonThreadPool() as threads:
        loop = asyncio.get_running_loop()
        hung = [loop.run_in_executor(threads, released.wait) for _ in range(40)]
        assert await asyncio.wait_for(loop.run_in_executor(threads, lambda: 42), 60) == 42
        with pytest.raises(ZeroDivisionError):
            await loop.run_in_executor(threads, lambda: 1 / 0)
        released.set()
        assert await asyncio.gather(*hung) == [True] * 40
    with pytest.raises(RuntimeError, match="after shutdown"):
        threads.submit(int)


def test_more_calls_than_threads_wait_for_their_turn() -> None:
    running = most = 0
    lock = threading.Lock()

    def call() -> int:
        nonlocal running, most
        with lock:
            running += 1
            most = max(most, running)
        with lock:
            running -= 1
        return running

    with DaemonThreadPool(max_threads=2) as threads:
        futures = [threads.submit(call) for _ in range(200)]
    assert all(future.done() for future in futures), "the end of the block waits for what was submitted"
    assert most <= 2


def test_a_task_that_calls_exit_ends_a_run_as_a_failed_one() -> None:
    async def leave() -> None:
        sys.exit(0)

    async def run() -> None:
        await asyncio.gather(*(asyncio.create_task(leave()) for _ in range(2)))

    with pytest.raises(RolloutError, match=r"called exit\(0\)"):
        run_loop(run())
