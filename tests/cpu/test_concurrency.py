"""The gate at which thousands of requests wait during an update."""

from __future__ import annotations

import asyncio

from scripted import settle

from skyrl_train.runtime.concurrency import Gate


async def test_an_open_gate_holds_nobody_up() -> None:
    await Gate().wait_open()


async def test_opening_lets_everybody_through_in_order_and_a_few_per_turn() -> None:
    gate, passed, per_turn = Gate(), [], []

    async def go(index: int) -> None:
        await gate.wait_open()
        passed.append(index)

    gate.close()
    tasks = [asyncio.create_task(go(index)) for index in range(5 * Gate.PER_TURN)]
    await settle(2)
    gate.open()
    gate.open()
    while len(passed) < len(tasks):
        before = len(passed)
        await asyncio.sleep(0)
        per_turn.append(len(passed) - before)
    assert passed == list(range(len(tasks)))
    assert max(per_turn) <= Gate.PER_TURN


async def test_a_gate_that_closes_again_keeps_those_that_are_not_through_and_loses_none() -> None:
    gate, passed = Gate(), []

    async def go(index: int) -> None:
        await gate.wait_open()
        passed.append(index)

    gate.close()
    tasks = [asyncio.create_task(go(index)) for index in range(3 * Gate.PER_TURN)]
    await settle(2)
    gate.open()
    await asyncio.sleep(0)
    gate.close()
    await settle()
    assert len(passed) <= 2 * Gate.PER_TURN
    tasks[-1].cancel()
    gate.open()
    await settle()
    assert sorted(passed) == list(range(len(tasks) - 1))


async def test_a_closed_gate_holds_until_it_opens_or_aborts_its_waiters() -> None:
    gate = Gate()
    assert await gate.wait_open()
    gate.close()
    first = asyncio.create_task(gate.wait_open())
    await asyncio.sleep(0)
    assert gate.waiting == 1
    gate.abort_waiters()
    assert await first is False
    second = asyncio.create_task(gate.wait_open())
    await asyncio.sleep(0)
    gate.open()
    gate.close()  # before its turn comes: it waits on
    for _ in range(3):
        await asyncio.sleep(0)
    assert (second.done(), gate.waiting) == (False, 1)
    gate.open()
    assert await second is True
    third = asyncio.create_task(gate.wait_open())
    await third
    assert gate.waiting == 0
