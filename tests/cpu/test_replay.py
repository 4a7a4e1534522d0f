"""Replay in the client: after a resume, the same requests get the tokens that were sampled before it."""

from __future__ import annotations

import asyncio
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from replay_worlds import PARAMS, SESSION, Program, World, checkpoint, content, interrupted, tokens_in, world
from scripted import EOS, hashed_token

from skyrl_train.errors import CheckpointError, NoEngineError
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import (
    InferenceEngineInput,
    SamplingParams,
    StopReason,
    StructuredOutput,
    TokenChunk,
)
from skyrl_train.inference.replay import (
    RecordedResponse,
    ReplayCache,
    ReplayTotals,
    ResponseSoFar,
    SessionRecord,
    packed,
    request_digest,
)
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.rollout.buffer import from_line, to_line


async def whole(program: Program) -> tuple[dict[Any, Any], int]:
    """The responses of a program that nothing interrupts, and their number of tokens."""
    async with world() as it:
        got = content(await program.run(it.client))
        return got, it.engine.sampled


async def rerun(record: list[dict[str, Any]], program: Program, **options: Any) -> tuple[dict[Any, Any], World]:
    async with world(record, **options) as it:
        it.client.replay_cache.begin(4, [SESSION])
        return content(await program.run(it.client)), it


# Replayed tokens ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("streamed", [False, True])
@pytest.mark.parametrize(("branches", "choices"), [(1, 1), (1, 3), (3, 1), (2, 2)])
async def test_a_program_interrupted_at_any_moment_gets_the_same_responses_and_nothing_is_sampled_twice(
    streamed: bool, branches: int, choices: int
) -> None:
    shape: dict[str, Any] = {"streamed": streamed, "branches": branches, "choices": choices}
    expected, tokens = await whole(Program(**shape))
    rng = random.Random(f"{shape}")
    for ticks in [0, 1, *(rng.randrange(2, 70) for _ in range(4)), 1000]:
        async with world(free_running=False) as it:
            record = await interrupted(it, Program(**shape), ticks)
            assert tokens_in(record) == it.engine.sampled, "each token is in the record as soon as the client has it"
        got, it = await rerun(record, Program(**shape))
        assert got == expected
        assert it.engine.sampled == tokens - it.recorded_tokens
        totals = it.client.replay_cache.totals
        assert (totals.replayed_tokens, totals.mismatches, totals.discarded_tokens) == (it.recorded_tokens, 0, 0)
        assert it.client.generated_tokens == it.engine.sampled, "replayed tokens are not generated again"


async def test_a_replayed_response_keeps_its_sampled_versions_and_continues_under_the_new_one() -> None:
    program = Program(turns=2, params=replace(PARAMS, min_tokens=20))
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(program.run(it.client))
        await it.tick_until(lambda: it.engine.sampled == 5)
        await it.publish(1)
        await it.tick_until(lambda: it.engine.sampled == 30)  # the second turn has begun
        record = checkpoint(it)
        first = program.got[0, 0, 0]
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    assert first.versions == [0] * 5 + [1] * (len(first.versions) - 5)
    async with world(record, version=4) as it:
        assert it.client.replay_cache.oldest_version(4) == 0 and it.client.replay_cache.oldest_version(5) is None
        it.client.replay_cache.begin(4, [SESSION])
        again = Program(turns=2, params=program.params)
        await again.run(it.client)
    assert content({(0, 0, 0): again.got[0, 0, 0]}) == content({(0, 0, 0): first})
    known = 30 - len(first.versions)
    second = again.got[0, 1, 0].versions
    assert 0 < known < len(second) and second == [1] * known + [4] * (len(second) - known)


@given(st.integers(0, 40), st.sampled_from([(), ("a",), ("fJ", "0")]), st.booleans())
@settings(max_examples=20)
def test_stop_strings_and_texts_are_those_of_an_uninterrupted_response(
    ticks: int, stop: tuple[str, ...], streamed: bool
) -> None:
    async def check() -> None:
        shape: dict[str, Any] = {"turns": 2, "streamed": streamed, "params": replace(PARAMS, stop=stop, min_tokens=0)}
        expected, _ = await whole(Program(**shape))
        async with world(free_running=False) as it:
            record = await interrupted(it, Program(**shape), ticks)
        got, _ = await rerun(record, Program(**shape))
        assert got == expected

    asyncio.run(check())


async def test_alternatives_come_back_with_their_tokens() -> None:
    params = replace(PARAMS, top_logprobs=3, min_tokens=20)
    request = GenerationRequest([5, 6], params, SESSION)
    async with world() as it:
        expected = await it.client.complete(request)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(it.client.complete(request))
        await it.tick_until(lambda: it.engine.sampled == 9)
        record = checkpoint(it)
        running.cancel()
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION])
        got = await it.client.complete(request)
        assert got.top_logprobs == expected.top_logprobs and got.token_ids == expected.token_ids
        assert it.engine.prompts == [[5, 6, *got.token_ids[:9]]]


async def test_a_stream_yields_the_record_at_once_and_then_the_sampled_tokens() -> None:
    request = GenerationRequest([5, 6], replace(PARAMS, max_tokens=3000, min_tokens=3000), SESSION)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(it.client.complete(request))
        await it.tick_until(lambda: it.engine.sampled == 2500)
        record = checkpoint(it)
        running.cancel()
    async with world(record, free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        stream = it.client.stream(request)
        sizes = []
        while sum(sizes) < 2500:  # nothing is sampled meanwhile
            sizes.append(len((await anext(stream)).token_ids))
            assert tokens_in(checkpoint(it)) == 2500, "a checkpoint in between has all of it"
        assert sum(sizes) == 2500 and len(sizes) > 1, "a long record comes in pieces: the loop turns in between"
        await stream.aclose()


async def test_a_response_that_is_wholly_recorded_needs_no_engine() -> None:
    program = Program()
    async with world(free_running=False) as it:
        record = await interrupted(it, program, 1000)
    async with world(record, free_running=False) as it:
        await it.client.pause_generation(next(iter(it.client.capabilities.pause_modes)))
        it.client.replay_cache.begin(4, [SESSION])
        again = Program()
        await again.run(it.client)
        assert content(again.got) == content(program.got) and not it.engine.requests
        assert all(generation.segments == 0 for generation in again.got.values())


async def test_a_response_with_a_grammar_is_recorded_once_it_has_ended() -> None:
    """Its state in the grammar cannot be handed over, so it would begin again in any case."""
    record = ReplayCache()
    record.begin(4, [SESSION])
    params = SamplingParams.parse({"max_tokens": 8})
    request = GenerationRequest([5], replace(params, structured=StructuredOutput("json_object")), SESSION)
    response = Continuation(request.prompt_token_ids, request.params)
    with record.recorded(request, response) as known:
        assert list(known) == []
        segment = response.next_segment()
        assert segment is not None
        response.add(TokenChunk([7, 8], [-1.0, -1.0], [0, 0]), segment.number)
        assert [row["requests"][0]["versions"] for row in (s.to_json() for s in record.snapshot())] == [[]]
        response.add(TokenChunk([9], [-1.0], [0], StopReason.STOP), segment.number)
        assert record.snapshot()[0].to_json()["requests"][0]["versions"] == [[0, 3]]


# Mismatches ---------------------------------------------------------------------------------------------------------


async def test_the_first_request_that_differs_throws_the_rest_of_the_record_away() -> None:
    """After a mismatch, nothing of the old rollout is mixed into the new one, not even requests that would match again."""
    stateless = [[5, 6], [5, 7], [5, 8], [5, 9]]

    async def ask(it: World, prompts: list[list[int]]) -> list[list[int]]:
        it.client.replay_cache.begin(4, [SESSION])
        asked = [await it.client.complete(GenerationRequest(p, PARAMS, SESSION)) for p in prompts]
        return [generation.token_ids for generation in asked]

    async with world() as it:
        answers = await ask(it, stateless)
        record = checkpoint(it)
    sizes = [len(answer) for answer in answers]
    async with world(record, version=3) as it:
        drifted = await ask(it, [[5, 6], [5, 77], [5, 8], [5, 9]])
        totals = it.client.replay_cache.totals
        assert it.engine.prompts == [[5, 77], [5, 8], [5, 9]], "turn 0 is served, the others are sampled"
        assert drifted[0] == answers[0]
        assert (totals.replayed_tokens, totals.mismatches, totals.discarded_tokens) == (sizes[0], 1, sum(sizes[1:]))
        metrics = it.client.replay_cache.metrics()
        assert metrics["async/replay_mismatches"] == 1 and metrics["async/replayed_tokens"] == sizes[0]


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": 0.5},
        {"max_tokens": 25},
        {"min_tokens": 2},
        {"top_p": 0.9},
        {"top_k": 5},
        {"min_p": 0.1},
        {"seed": 12},
        {"seed": None},
        {"stop": ("x",)},
        {"stop_token_ids": (3,)},
        {"ignore_eos": True},
        {"top_logprobs": 1},
    ],
)
async def test_another_sampling_parameter_is_another_request(change: dict[str, Any]) -> None:
    async with world() as it:
        it.client.replay_cache.begin(4, [SESSION])
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        record = checkpoint(it)
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION])
        await it.client.complete(GenerationRequest([5, 6], replace(PARAMS, **change), SESSION))
        assert it.client.replay_cache.totals.mismatches == 1 and len(it.engine.requests) == 1


def test_a_request_is_told_by_prompt_parameters_choice_and_adapter_and_by_nothing_else() -> None:
    request = GenerationRequest([5, 6], PARAMS, SESSION)
    others = [
        replace(request, prompt_token_ids=[6, 5]),
        replace(request, prompt_token_ids=[5]),
        replace(request, choice=1),
        replace(request, adapter="a"),
    ]
    assert len({request_digest(each) for each in (request, *others)}) == 5
    same = replace(request, session_id="other", oldest_version=3, params=replace(PARAMS, n=4))
    assert request_digest(same) == request_digest(request)


async def test_a_branch_continues_from_the_record_while_another_is_beyond_it() -> None:
    """The next request of the faster branch is new but no mismatch: the record of the slower branch stays valid."""
    shape: dict[str, Any] = {"branches": 2, "turns": 4}
    expected, tokens = await whole(Program(**shape))
    async with world(free_running=False) as it:
        record = await interrupted(it, Program(**shape), 30)

    held = asyncio.Event()
    again = Program(**shape)

    async def hold_branch_one(branch: int, turn: int) -> None:
        if branch == 1 and turn == 1:
            await held.wait()

    again.before_turn = hold_branch_one
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(again.run(it.client))
        await again.answered.wait_until(lambda: (0, 3, 0) in again.got)  # branch 0 has run to its end
        held.set()
        await running
        assert content(again.got) == expected
        assert it.engine.sampled == tokens - it.recorded_tokens
        assert it.client.replay_cache.totals.mismatches == 0


async def test_equal_requests_are_served_in_their_order() -> None:
    async def ask(it: World, times: int) -> list[list[int]]:
        it.client.replay_cache.begin(4, [SESSION])
        unseeded = GenerationRequest([5, 6], replace(PARAMS, seed=None), SESSION)
        return [(await it.client.complete(unseeded)).token_ids for _ in range(times)]

    draws = iter(range(10_000))
    async with world() as it:
        it.engine._next_token = lambda tokens, seed: hashed_token(tokens, next(draws))
        answers = await ask(it, 3)
        assert len({tuple(answer) for answer in answers}) == 3
        record = checkpoint(it)
    async with world(record) as it:
        again = await ask(it, 4)
        assert again[:3] == answers and len(it.engine.requests) == 1
        assert it.client.replay_cache.totals.mismatches == 0, "a record that was used up is no mismatch"


# Attempts and groups ------------------------------------------------------------------------------------------------


async def test_another_attempt_is_never_replayed() -> None:
    """Without seeds its requests are equal to those of the attempt that failed."""
    request = GenerationRequest([5, 6], replace(PARAMS, seed=None), SESSION)
    async with world() as it:
        for attempt in range(2):
            it.client.replay_cache.begin(4, [SESSION], attempt)
            await it.client.complete(request)
            assert len(it.engine.requests) == attempt + 1
        record = checkpoint(it)
    async with world(record) as it:
        assert it.client.replay_cache.attempt(4) == 1 and it.client.replay_cache.attempt(5) == 0
        it.client.replay_cache.begin(4, [SESSION], 0)
        await it.client.complete(request)
        assert len(it.engine.requests) == 1 and it.client.replay_cache.totals.replayed_tokens == 0
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION], 1)
        await it.client.complete(request)
        assert not it.engine.requests


async def test_the_same_attempt_begun_again_in_the_same_process_is_replayed() -> None:
    """A group that lost all engines is generated again; the tokens of its sessions are kept."""
    program = Program(turns=2, params=replace(PARAMS, min_tokens=20))
    expected, tokens = await whole(program)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(Program(turns=2, params=program.params).run(it.client))
        await it.tick_until(lambda: it.engine.sampled == 30)
        it.engine.die()
        with pytest.raises(ExceptionGroup) as failure:
            await running
        assert failure.value.subgroup(NoEngineError) is not None
        record = checkpoint(it)
        assert tokens_in(record) == 30, "a request that failed keeps its tokens"
        it.client.replay_cache.begin(4, [SESSION])
        assert tokens_in(checkpoint(it)) == 30
    got, it = await rerun(record, Program(turns=2, params=program.params))
    assert got == expected and it.engine.sampled == tokens - 30


async def test_a_group_that_has_ended_leaves_nothing_behind() -> None:
    async with world() as it:
        replay_cache = it.client.replay_cache
        replay_cache.begin(4, [SESSION, "prompt@4_1"])
        replay_cache.begin(5, ["other@5_0"])
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        await it.client.complete(GenerationRequest([5, 6], PARAMS, "other@5_0"))
        replay_cache.end(4)
        replay_cache.end(4)
        [row] = checkpoint(it)
        assert row["session"] == "other@5_0" and row["group"] == 5
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))  # a late request of the group
        replay_cache.end(5)
        assert checkpoint(it) == [] and not replay_cache._sessions


async def test_sessions_that_nobody_began_are_not_recorded_and_off_means_off() -> None:
    async with world() as it:
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        await it.client.complete(GenerationRequest([5, 6], PARAMS))
        assert checkpoint(it) == []
        it.client.replay_cache.begin(4, [SESSION])
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        record = checkpoint(it)
    async with world(record, replay=False) as it:
        assert it.client.replay_cache.oldest_version(4) is None
        it.client.replay_cache.begin(4, [SESSION])
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        assert len(it.engine.requests) == 1 and checkpoint(it) == []


async def test_a_record_that_is_still_waiting_or_being_served_is_part_of_the_next_checkpoint() -> None:
    program = Program(turns=5)
    expected, tokens = await whole(program)
    async with world(free_running=False) as it:
        record = await interrupted(it, Program(turns=5), 60)
    async with world(record, free_running=False) as it:
        assert checkpoint(it) == record, "not begun yet"
        again = Program(turns=5)
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(again.run(it.client))
        await again.answered.wait_until(lambda: bool(again.got))  # one turn is served, the others wait
        assert checkpoint(it) == record
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        killed_again = checkpoint(it)
    got, it = await rerun(killed_again, Program(turns=5))
    assert got == expected and it.engine.sampled == tokens - it.recorded_tokens


async def test_a_request_that_its_program_cancelled_continues_from_its_recorded_tokens() -> None:
    request = GenerationRequest([5, 6], replace(PARAMS, min_tokens=20), SESSION)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(it.client.complete(request))
        await it.tick_until(lambda: it.engine.sampled == 6)
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
        record = checkpoint(it)
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION])
        got = await it.client.complete(request)
        assert it.engine.prompts == [[5, 6, *got.token_ids[:6]]]


async def test_batches_with_n_responses_per_prompt_are_replayed() -> None:
    batch = InferenceEngineInput(
        prompt_token_ids=[[5, 6], [5, 7]],
        sampling_params=replace(PARAMS, n=2, min_tokens=20),
        session_ids=[SESSION, "prompt@4_1"],
    )
    async with world() as it:
        expected = await it.client.generate(batch)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION, "prompt@4_1"])
        running = asyncio.create_task(it.client.generate(batch))
        await it.tick_until(lambda: it.engine.sampled == 4 * 7)
        record = checkpoint(it)
        running.cancel()
    async with world(record) as it:
        it.client.replay_cache.begin(4, [SESSION, "prompt@4_1"])
        assert await it.client.generate(batch) == expected
        assert sorted(map(len, it.engine.prompts)) == [9, 9, 9, 9]


# The cost of a record -----------------------------------------------------------------------------------------------


async def test_a_long_conversation_is_recorded_once_and_not_once_per_turn() -> None:
    async with world() as it:
        it.client.replay_cache.begin(4, [SESSION])
        prompt = [5] * 2000
        for _ in range(20):
            answer = await it.client.complete(GenerationRequest(prompt, PARAMS, SESSION))
            prompt = [*prompt, *answer.token_ids]
        [snapshot] = it.client.replay_cache.snapshot()
        responses = [packed(response) for _, response in snapshot.moment.entries()]
        held = sum(
            len(r.token_ids) + len(r.logprobs) + len(digest)
            for (digest, _), r in zip(snapshot.moment.entries(), responses, strict=True)
        )
        sampled = it.engine.sampled
        assert held == 12 * sampled + 16 * 20


def test_a_snapshot_does_not_change_when_more_is_sampled() -> None:
    response = Continuation([5], PARAMS)
    segment = response.next_segment()
    assert segment is not None
    response.add(TokenChunk([7, 8], [-1.0, -2.0], [0, 1]), segment.number)
    then = ResponseSoFar.of(response)
    response.add(TokenChunk([EOS], [-3.0], [1], StopReason.STOP), segment.number)
    [chunk] = packed(then).chunks()
    assert chunk == TokenChunk([7, 8], [-1.0, -2.0], [0, 1], None)


async def test_a_snapshot_does_not_change_when_a_response_has_ended_and_its_caller_changes_it() -> None:
    request = GenerationRequest([5, 6], replace(PARAMS, top_logprobs=1), SESSION)
    async with world(free_running=False) as it:
        it.client.replay_cache.begin(4, [SESSION])
        running = asyncio.create_task(it.client.complete(request))
        await it.tick_until(lambda: it.engine.sampled == 3)
        expected, [snapshot] = checkpoint(it), it.client.replay_cache.snapshot()
        await it.tick_until(running.done)
        got = running.result()
        whole = checkpoint(it)
        for of in (got.token_ids, got.logprobs, got.versions, got.top_logprobs):
            assert of is not None
            of.clear()  # a generator that cuts a response off, say, while the checkpoint is written
        assert [snapshot.to_json()] == expected
        assert checkpoint(it) == whole


tokens = st.tuples(st.integers(0, 2**31 - 1), st.floats(allow_nan=False), st.integers(-1, 2**40))


@given(st.lists(tokens, max_size=30), st.sampled_from([None, StopReason.STOP, StopReason.LENGTH]), st.booleans())
def test_a_response_comes_back_from_json_as_it_was(
    sampled: list[tuple[int, float, int]], stop_reason: StopReason | None, with_top: bool
) -> None:
    ids, logprobs, versions = [list(part) for part in zip(*sampled, strict=True)] if sampled else ([], [], [])
    top = (
        [[(token, logprob), (1, -2.5)][: 1 + token % 2] for token, logprob in zip(ids, logprobs, strict=True)]
        if with_top
        else None
    )
    response = packed(ResponseSoFar(ids, logprobs, versions, top, len(ids), stop_reason))
    again = RecordedResponse.from_json(from_line(to_line(response.to_json())))
    assert again == response and again.tokens == len(ids)
    assert [version for version, count in again.versions for _ in range(count)] == versions
    chunks = list(again.chunks())
    if not ids and stop_reason is None:
        assert chunks == []
    else:
        assert chunks == [TokenChunk(ids, logprobs, versions, stop_reason, top)]


@pytest.mark.parametrize(
    "change",
    [
        lambda row: row.pop("group"),
        lambda row: row.update(requests=3),
        lambda row: row["requests"][0].update(tokens="AAAA"),
        lambda row: row["requests"][0].update(logprobs=""),
        lambda row: row["requests"][0].update(versions=[[0, 1]]),
        lambda row: row["requests"][0].update(stop_reason="tired"),
        lambda row: row["requests"][0].update(request="no hex"),
        lambda row: row["requests"][0].pop("tokens"),
    ],
)
async def test_a_broken_record_says_how_to_go_on_without_it(change: Any) -> None:
    async with world() as it:
        it.client.replay_cache.begin(4, [SESSION])
        await it.client.complete(GenerationRequest([5, 6], PARAMS, SESSION))
        [row] = checkpoint(it)
    change(row)
    with pytest.raises(CheckpointError, match=r"rollout\.replay=false"):
        ReplayCache().load([row])


# The rule, for all schedules ----------------------------------------------------------------------------------------

answers = st.lists(st.tuples(st.integers(0, 3), st.integers(0, 5), st.booleans()), max_size=8)


@given(answers, st.lists(st.tuples(st.integers(0, 4), st.booleans()), max_size=12))
def test_every_recorded_token_is_served_once_or_discarded_once(
    recorded: list[tuple[int, int, bool]], asked: list[tuple[int, bool]]
) -> None:
    """``recorded``: number, size, ended. ``asked``: number of each request of the new run, and whether it ends at once."""

    def response(size: int, ended: bool) -> RecordedResponse:
        reason = StopReason.STOP if ended else None
        return packed(ResponseSoFar([1] * size, [-1.0] * size, [0] * size, None, size, reason))

    totals = ReplayTotals()
    session = SessionRecord(totals, [(bytes([number]), response(size, ended)) for number, size, ended in recorded])
    waiting = [(number, size, ended) for number, size, ended in recorded]
    saw_more, thrown, mismatches = False, 0, 0
    running = []
    for number, ends in asked:
        live = Continuation([5], SamplingParams(max_tokens=64))
        request = session.begin(bytes([number]), live)
        match = next((entry for entry in waiting if entry[0] == number), None)
        if match is not None:
            waiting.remove(match)
            assert (request.known.tokens, request.known.stop_reason is not None) == match[1:]
        else:
            assert request.known == RecordedResponse()
            if waiting and not saw_more:
                mismatches += 1
                thrown += sum(size for _, size, _ in waiting)
                waiting.clear()
        for chunk in request.known.chunks():
            live.resume_from(chunk)
        if ends:
            if live.stop_reason is None:
                segment = live.next_segment()
                assert segment is not None
                live.add(TokenChunk([EOS], [-1.0], [1], StopReason.STOP), segment.number)
            saw_more |= match is None or not match[2]
            session.end(request)
        else:
            running.append(request)
        assert sum(packed(entry).tokens for _, entry in session.now().entries()) >= sum(size for _, size, _ in waiting)
    session.discard()
    thrown += sum(size for _, size, _ in waiting)
    assert totals.mismatches == mismatches <= 1
    assert totals.discarded_tokens == thrown
    assert totals.replayed_tokens + totals.discarded_tokens == sum(size for _, size, _ in recorded)
