"""The events of a run agree with what the run does and reports."""

from __future__ import annotations

import ast
import asyncio
import dataclasses
import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from hypothesis import given, settings
from hypothesis import strategies as st
from kept_events import KeptEvents, assert_declared
from scripted import ScriptedEngine, settle
from test_client import client_of, publish, request
from test_client_fleet import fleet_of

from skyrl_train.events.kinds import KINDS, SPANS
from skyrl_train.events.log import sample_of
from skyrl_train.inference.interface import EngineHealth
from skyrl_train.observability.run import load_run
from skyrl_train.types import GeneratorInput, GeneratorOutput, PauseMode

PACKAGE = Path(__file__).parents[2] / "skyrl_train"


# Declarations -----------------------------------------------------------------------------------------------------


@functools.cache
def all_calls() -> list[ast.Call]:
    texts = (path.read_text() for path in PACKAGE.rglob("*.py"))
    trees = (ast.parse(text) for text in texts if "events" in text or "training." in text)
    return [node for tree in trees for node in ast.walk(tree) if isinstance(node, ast.Call)]


def calls(*methods: str, of: str) -> list[ast.Call]:
    return [
        node
        for node in all_calls()
        if isinstance(node.func, ast.Attribute)
        and node.func.attr in methods
        and ast.unparse(node.func.value).endswith(of)
    ]


def text(node: ast.AST) -> str:
    assert isinstance(node, ast.Constant) and isinstance(node.value, str)
    return node.value


def test_exactly_the_declared_events_and_activities_are_recorded() -> None:
    kinds, spans = (
        set(),
        {text(call.args[0]) for call in calls("span", of="events") if isinstance(call.args[0], ast.Constant)},
    )
    for call in calls("record", "timed", "put", "detail", of="events"):
        kind = text(call.args[0])
        kinds.add(kind)
        fields = {keyword.arg for keyword in call.keywords if keyword.arg}
        if len(call.args) > 1:  # of put and detail: fields come last, as a dict display
            assert isinstance(call.args[-1], ast.Dict)
            fields |= {text(key) for key in call.args[-1].keys if key}
        assert fields <= {field.name for field in KINDS[kind].fields}
        spans |= {text(keyword.value) for keyword in call.keywords if (kind, keyword.arg) == ("span", "name")}
    # The training thread records the name of what it calls.
    spans |= {ast.unparse(call.args[0]).rpartition(".")[2] for call in calls("run", "update", of="training")}
    assert (kinds | {"lost"}, spans) == (KINDS.keys(), SPANS.keys())


# Runs -------------------------------------------------------------------------------------------------------------


def kept_outputs(h: Harness) -> dict[str, list[int]]:
    """The versions of each response, by session, of the attempt that came last."""
    versions: dict[str, list[int]] = {}

    def after_group(output: GeneratorOutput) -> None:
        for trajectory, of_response in zip(
            output["trajectory_ids"] or [], output["rollout_versions"] or [], strict=True
        ):
            versions[trajectory.to_string()] = of_response

    h.generator.after = after_group
    return versions


@pytest.mark.parametrize("mode", ["sync", "one_step_off", "fully_async", "partial_rollout"])
async def test_the_events_agree_with_what_the_run_reports(tmp_path: Path, mode: str) -> None:
    h = Harness(tmp_path, f"trainer.mode={mode}", "trainer.failures.max_failed_rollouts=8", "trainer.ckpt_interval=3")
    calls_of: Counter[int] = Counter()

    def fail(batch: GeneratorInput) -> None:
        group, _ = sample_of(batch["trajectory_ids"][0].to_string())
        assert group is not None
        calls_of[group] += 1
        if group == 5 or (group == 9 and calls_of[group] == 1):
            raise ValueError(f"scripted failure of {group}")

    h.generator.before = fail
    versions = kept_outputs(h)
    await h.train()
    events = load_run(tmp_path).events
    for event in events:
        assert_declared(event)
    life: dict[int, list[str]] = {}
    for event in events:
        groups = event["groups"] if "groups" in event else [event.get("group")]
        for group in groups:
            life.setdefault(group, []).append(event["kind"])
    trained = [event for event in events if event["kind"] == "trained"]
    assert [(event["step"], event["groups"]) for event in trained] == [
        (row["step"], row["group_indices"]) for row in h.rows
    ]
    assert [max(event["lags"]) for event in trained] == [row["staleness/max"] for row in h.rows]
    assert all(("staleness/oldest_in_flight" in row) is (row["async/in_flight"] > 0) for row in h.rows)
    for group in h.trained:
        of_group = [kind for kind in life[group] if kind not in ("request", "retried")]
        assert of_group == ["admitted", "finished", "trained"]
        assert life[group].count("request") == 2
    assert life[5] == ["admitted", "retried", "failed"] and ("retried" in life[9]) == (9 in life)
    assert [event["kind"] for event in events if event["kind"] in ("run", "resume", "end")] == ["run", "end"]
    assert events.counts["checkpoint"] == 3
    requests = {event["session"]: event for event in events if event["kind"] == "request"}
    for session, of_response in versions.items():
        assert versions_in(requests[session]) == of_response
    spans = Counter(event["name"] for event in events if event["kind"] == "span")
    # one_step_off waits for its next batch before each weight sync.
    waits = 16 if h.config.trainer.mode == "one_step_off" else 8
    assert (spans["update_policy"], spans["wait_for_batch"], spans["gather"]) == (8, waits, 9)
    assert spans["pause"] == spans["load_weights"] == 9


def versions_in(event: dict[str, Any]) -> list[int]:
    """The version of each token of a request, from its segments."""
    return [version for version, tokens, *_ in event["segments"] for _ in range(tokens)]


async def test_a_resumed_run_goes_on_in_its_record(tmp_path: Path) -> None:
    first = Harness(tmp_path, "trainer.ckpt_interval=2")

    def fail_at_step_5(part: object) -> None:
        if first.trainer.global_step == 4:
            raise ZeroDivisionError("scripted")

    first.backend.before_update = fail_at_step_5
    with pytest.raises(ZeroDivisionError):
        await first.train()
    second = Harness(tmp_path, "trainer.ckpt_interval=2")
    await second.train()

    events = load_run(tmp_path).events
    marks = [event for event in events if event["kind"] in ("run", "resume", "end")]
    assert [(mark["kind"], mark["step"]) for mark in marks] == [("run", 0), ("end", 4), ("resume", 4), ("end", 8)]
    assert [mark.get("reason") for mark in marks] == [None, "failed", None, "finished"]
    assert marks[1]["error"] == "ZeroDivisionError: scripted"
    trained, restored = events.frame("trained"), events.frame("restored")
    assert list(trained.group) == second.trained
    # The groups of the second process were finished by the first one, or admitted by the second one.
    later = set(trained.group[trained.attempt == 2])
    admitted = events.frame("admitted")
    assert len(later) == 16 and later <= set(restored.group) | set(admitted.group[admitted.attempt == 2])
    assert set(restored.group).isdisjoint(admitted.group[admitted.attempt == 2])
    assert abs(events.frame("finished").t.diff().dropna().min()) < 3600


# Requests ---------------------------------------------------------------------------------------------------------


@settings(max_examples=40, deadline=None)
@given(
    schedule=st.lists(st.tuples(st.integers(0, 4), st.sampled_from(list(PauseMode))), max_size=6),
    max_tokens=st.integers(1, 24),
    stream=st.booleans(),
)
async def test_segments_have_the_versions_of_the_response_whatever_interrupts_it(
    schedule: list[tuple[int, PauseMode]], max_tokens: int, stream: bool
) -> None:
    engine, events = ScriptedEngine(), KeptEvents()
    client = client_of(engine, events=events)
    await publish(client, 0)
    stops = {"stop": ["zzz"]} if stream else {}
    task = asyncio.ensure_future(client.generate(request(max_tokens=max_tokens, ignore_eos=True, **stops)))
    for version, (ticks, mode) in enumerate(schedule, start=1):
        await settle()
        engine.tick(ticks)
        await settle()
        await publish(client, version, mode)
    while not task.done():
        await settle()
        engine.tick()
    (event,) = events.of("request")
    assert_declared(event)
    assert versions_in(event) == (await task)["response_versions"][0]
    assert event["stop"] == "length" and len(event["seams"]) == len(event["segments"]) - 1
    times = [event["t_submit"], *(t for _, _, *times, _ in event["segments"] for t in times), event["t_end"]]
    assert times == sorted(times)
    assert (event["t_first"] is not None) == stream
    # Between two versions no engine samples: each pause lies between two segments.
    pauses = {span["step"]: (span["t0"], span["t1"]) for span in events.of("span") if span["name"] == "pause"}
    for (_, _, _, t1, _), (version, _, t0, _, _) in zip(event["segments"], event["segments"][1:], strict=False):
        if version in pauses:
            assert t1 <= pauses[version][1] and pauses[version][0] <= t0
    await client.teardown()


@pytest.mark.parametrize(("death", "seam"), [(True, "engine lost"), (False, "moved")])
async def test_a_seam_says_why_a_response_left_its_engine(death: bool, seam: str) -> None:
    a, b, events = ScriptedEngine(), ScriptedEngine(), KeptEvents()
    client, _ = fleet_of(a, b, events=events)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=6, ignore_eos=True, stop=["zzz"])))
    await settle()
    a.tick(2)
    await settle()
    if death:
        a.die()
    else:
        client._pool.missed_update(0, "scripted")
    await settle()
    while not task.done():
        await settle()
        b.tick()
    (event,) = events.of("request")
    assert [segment[:2] + segment[4:] for segment in event["segments"]] == [[0, 2, 0], [0, 4, 1]]
    assert event["seams"] == [seam]
    await client.teardown()


async def test_a_cancelled_request_leaves_an_event_with_its_tokens() -> None:
    engine, events = ScriptedEngine(), KeptEvents()
    client = client_of(engine, events=events)
    await publish(client, 0)
    task = asyncio.ensure_future(client.generate(request(max_tokens=6, ignore_eos=True, stop=["zzz"])))
    await settle()
    engine.tick(2)
    await settle()
    task.cancel()
    await asyncio.gather(task, return_exceptions=True)
    (event,) = events.of("request")
    assert_declared(event)
    assert (event["stop"], versions_in(event)) == ("cancelled", [0, 0])
    await client.teardown()


async def test_each_engine_has_a_state_once_a_second_also_one_that_does_not_answer() -> None:
    a, b, c, events = ScriptedEngine(), ScriptedEngine(), ScriptedEngine(), KeptEvents()
    client, _ = fleet_of(a, b, c, events=events)
    await publish(client, 3)
    b.health = asyncio.Event().wait  # type: ignore[assignment, method-assign]
    c.die()
    client._pool.died(2, "scripted")
    figures = await client.record_engines(limit_s=0.0)
    assert "inference/kv_cache_usage" not in figures
    assert figures["inference/down_share"] == pytest.approx(2 / 3)
    assert "inference/busy_share" not in figures  # before the second look
    looked = events.seconds - 3  # an event per engine takes a second of this clock
    health, events.kept[:] = dataclasses.replace(await a.health(), kv_cache_usage=0.25, busy_s=2.0), []

    async def half_full() -> EngineHealth:
        return health

    a.health = half_full  # type: ignore[method-assign]
    figures = await client.record_engines(limit_s=0.0)
    assert figures["inference/kv_cache_usage"] == 0.25
    assert figures["inference/busy_share"] == 2.0 / (events.seconds - 3 - looked)
    states = {event["engine"]: (event["state"], event["version"]) for event in events.of("engine")}
    for event in events.kept:
        assert_declared(event)
    assert states == {0: ("healthy", 3), 1: ("healthy", None), 2: ("dead", None)}
    health = dataclasses.replace(health, busy_s=0.5)  # it was started again
    assert (await client.record_engines(limit_s=0.0))["inference/busy_share"] == 0.0
    await client.teardown()
