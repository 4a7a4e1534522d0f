"""The session store: admission, API keys, expiry, and the memory and time of ten thousand sessions."""

from __future__ import annotations

import asyncio
import gc
import logging
import re
import tracemalloc
import weakref

import pytest
from scripted import least_cpu_s
from session_worlds import ReadableRenderer, ask, assistant, choice, user

from skyrl_train.endpoint.sessions import OpenedSession, SessionLimits, SessionStore
from skyrl_train.errors import ConfigError, QuotaError, SessionError


class Clock:
    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now


def new_store(**limits: float) -> tuple[SessionStore, Clock]:
    clock = Clock()
    return SessionStore(ReadableRenderer(), SessionLimits(**limits), clock=clock), clock


def test_a_key_names_its_session_and_no_other() -> None:
    store, _ = new_store()
    opened = [store.open() for _ in range(3)]
    assert len({each.api_key for each in opened}) == len({each.session.id for each in opened}) == 3
    for each in opened:
        assert re.fullmatch(r"sk-[\w-]{43}", each.api_key)
        assert store.by_key(each.api_key) is store.get(each.session.id) is each.session


@pytest.mark.parametrize("wrong", ["", "sk-", "sk-" + "a" * 43, "a" * 1_000_000, "\ud800", "ü", "\0"])
def test_a_wrong_key_names_nothing(wrong: str) -> None:
    store, _ = new_store()
    store.open()
    assert store.by_key(wrong) is None


def test_a_key_of_another_store_names_nothing() -> None:
    first, second = new_store()[0], new_store()[0]
    second.open()
    assert second.by_key(first.open().api_key) is None


def reachable(root: object) -> set[int]:
    """Every object that can be reached from ``root``, code and types aside."""
    found: dict[int, object] = {}
    waiting = [root]
    while waiting:
        one = waiting.pop()
        if id(one) in found or isinstance(one, type) or callable(one):
            continue
        found[id(one)] = one
        waiting += gc.get_referents(one)
    return {id(one) for one in found.values()} | {hash(one) for one in found.values() if isinstance(one, str)}


def test_a_key_is_kept_nowhere(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.DEBUG)
    store, _ = new_store()
    opened = store.open()
    key = opened.api_key
    session = opened.session
    ask(session, [user("hi")], "yo")
    assert hash(session.id) in reachable(store)
    assert hash(key) not in reachable(store)
    assert key not in repr(opened) + repr(session) + repr(store) + caplog.text
    with pytest.raises(SessionError) as refused:
        store.open(session.id)
    assert key not in str(refused.value)


def test_a_session_can_be_given_a_name_once() -> None:
    store, _ = new_store()
    assert store.open("mine").session.id == "mine"
    with pytest.raises(SessionError, match="exists already"):
        store.open("mine")
    store.close("mine")
    store.open("mine")


@pytest.mark.parametrize("name", ["", "a b", "a\n", "ü", "a" * 201])
def test_a_name_is_short_and_printable(name: str) -> None:
    with pytest.raises(SessionError, match="cannot name a session"):
        new_store()[0].open(name)


def test_a_full_store_says_when_to_come_back() -> None:
    store, _ = new_store(max_sessions=2, retry_after_s=7.0)
    first = store.open().session
    store.open()
    with pytest.raises(QuotaError, match="max_sessions") as refused:
        store.open()
    assert refused.value.retry_after_s == 7.0
    assert len(store) == 2
    store.close(first.id)
    store.open()


def test_admission_rejects_new_sessions_but_no_requests_within_one() -> None:
    waits: list[float | None] = [None, 12.5, None]
    store = SessionStore(ReadableRenderer(), admission=lambda: waits.pop(0))
    session = store.open().session
    with pytest.raises(QuotaError) as refused:
        store.open()
    assert refused.value.retry_after_s == 12.5
    ask(session, [user("hi")], "yo")
    store.open()


def test_idle_sessions_expire_and_used_ones_do_not() -> None:
    store, clock = new_store(idle_expiry_s=10.0)
    idle, planned, rewarded, finished = [store.open(name).session for name in ("i", "p", "r", "f")]
    ask(finished, [user("hi")], "yo")
    store.finish("f")
    clock.now = 5.0
    planned.plan([user("hi")])
    rewarded.set_reward(1.0)
    clock.now = 9.9
    assert store.expire() == []
    clock.now = 10.0
    assert sorted(store.expire()) == ["f", "i"]
    assert store.get("i") is None
    with pytest.raises(SessionError, match="expired after 10 s"):
        idle.plan([user("hi")])


async def test_a_session_with_a_request_in_flight_is_not_idle() -> None:
    store, clock = new_store(idle_expiry_s=10.0)
    session = store.open().session
    done = asyncio.Event()
    request = asyncio.create_task(session.deduplicator.run(b"k", done.wait))
    await asyncio.sleep(0)
    clock.now = 100.0
    assert store.expire() == []
    done.set()
    await request
    assert store.expire() == [session.id]


def test_a_full_store_makes_room_by_itself() -> None:
    store, clock = new_store(max_sessions=1, idle_expiry_s=10.0)
    old = store.open()
    clock.now = 11.0
    store.open()
    assert store.by_key(old.api_key) is None


def test_a_full_store_makes_room_although_it_looked_for_idle_sessions_a_moment_ago() -> None:
    store, clock = new_store(max_sessions=1, idle_expiry_s=10.0)
    clock.now = 5.0
    store.open("old")
    clock.now = 10.0
    with pytest.raises(QuotaError, match="max_sessions"):
        store.open()
    clock.now = 15.0
    store.open("new")
    assert store.get("old") is None


def test_opening_a_session_expires_idle_ones_even_if_there_is_room() -> None:
    store, clock = new_store(idle_expiry_s=10.0)
    for _ in range(3):
        store.open()
    clock.now = 10.0
    store.open()
    assert len(store) == 1


def test_reserved_sessions_skip_admission_and_limits_and_do_not_expire() -> None:
    clock = Clock()
    asked: list[None] = []
    limits = SessionLimits(max_sessions=1, idle_expiry_s=10.0)
    store = SessionStore(ReadableRenderer(), limits, admission=lambda: asked.append(None), clock=clock)
    reserved = [store.open(reserved=True) for _ in range(3)]
    assert not asked
    store.open("other")
    with pytest.raises(QuotaError, match="max_sessions"):
        store.open()
    clock.now = 100.0
    assert store.expire() == ["other"]
    for opened in reserved:
        assert store.by_key(opened.api_key) is opened.session
        store.close(opened.session.id)
    store.open()
    with pytest.raises(QuotaError, match="max_sessions"):
        store.open()


def test_a_session_is_finished_by_its_name_with_a_reward() -> None:
    store, _ = new_store()
    session = store.open().session
    assert not session.finished
    ask(session, [user("hi")], "yo")
    assert store.finish(session.id, 0.5) is session
    assert session.finished
    assert session.sequences()[0].rewards == [0.0, 0.5]


@pytest.mark.parametrize("how", ["close", "expire"])
def test_a_session_that_was_dropped_says_why(how: str) -> None:
    store, clock = new_store()
    session = store.open().session
    if how == "close":
        store.close(session.id)
    else:
        clock.now = 1e9
        store.expire()
    with pytest.raises(SessionError, match="was closed" if how == "close" else "expired after"):
        session.finish()
    assert not session.finished


def test_a_finished_session_takes_nothing_more() -> None:
    store, _ = new_store()
    session = store.open().session
    late = session.plan([user("hi")])
    ask(session, [user("hi")], "yo")
    store.finish(session.id, 1.0)
    for refused in (
        lambda: session.record(late, choice(late, "late")),
        lambda: session.plan([user("hi")]),
        lambda: session.plan_completion([1]),
        lambda: session.set_reward(2.0),
        lambda: store.finish(session.id, 2.0),
    ):
        with pytest.raises(SessionError, match="has finished"):
            refused()
    assert store.finish(session.id).finished
    assert store.finish(session.id, 1.0).finished  # a retry of the same call
    assert session.sequences()[0].rewards[-1] == 1.0


def test_an_unknown_session_cannot_be_finished() -> None:
    store, _ = new_store()
    with pytest.raises(SessionError, match="There is no session 'x'"):
        store.finish("x")
    store.close("x")


def test_closing_frees_the_session_without_waiting_for_the_garbage_collector() -> None:
    store, _ = new_store()
    opened = store.open()
    history = [user("hi")]
    for answer in ("a", "b"):
        ask(opened.session, history, answer)
        history = [*history, assistant(answer), user("more")]
    turn = weakref.ref(opened.session._turns)
    session = weakref.ref(opened.session)
    gc.disable()
    try:
        store.close(opened.session.id)
        assert turn() is None
        key = opened.api_key
        del opened
        assert session() is None
    finally:
        gc.enable()
    assert store.by_key(key) is None
    assert len(store) == 0


@pytest.mark.parametrize(
    "limits", [{"max_sessions": 0}, {"idle_expiry_s": -1}, {"retry_window_s": float("nan")}, {"max_kept_responses": -1}]
)
def test_limits_must_be_positive(limits: dict[str, float]) -> None:
    with pytest.raises(ConfigError, match=next(iter(limits))):
        SessionLimits(**limits)


TURNS, TOKENS = 10, 20


def play(opened: OpenedSession, turns: int = TURNS) -> None:
    history = [{"role": "system", "content": "be brief"}, user("start")]
    for turn in range(turns):
        answer = f"{turn:0{TOKENS}d}"
        ask(opened.session, history, answer)
        history = [*history, assistant(answer), user("go on")]


def test_a_session_of_ten_turns_takes_a_few_kilobytes() -> None:
    """So that 10,000 of them fit anywhere: measured on 50 of them."""
    store, _ = new_store()
    keep = []
    tracemalloc.start()
    try:
        play(store.open())  # allocations that happen once
        before = tracemalloc.get_traced_memory()[0]
        for _ in range(50):
            opened = store.open()
            play(opened)
            keep.append(opened)
        gc.collect()
        per_session = (tracemalloc.get_traced_memory()[0] - before) / 50
    finally:
        tracemalloc.stop()
    assert per_session < 40_000, f"{per_session:.0f} bytes"


def test_planning_is_as_quick_in_a_full_store_and_does_not_grow_faster_than_the_conversation() -> None:
    def seconds_per_turn(store: SessionStore, turns: int) -> float:
        return least_cpu_s(lambda: play(store.open(), turns))[0] / turns

    store, _ = new_store(max_sessions=20_000)
    alone = seconds_per_turn(store, TURNS)
    for _ in range(10_000):
        store.open()
    assert seconds_per_turn(store, TURNS) < 5 * alone + 1e-3
    # Ten times the turns: a request is ten times as long, and so may be its planning; twice that is noise.
    assert seconds_per_turn(store, 10 * TURNS) < 20 * alone + 1e-3
