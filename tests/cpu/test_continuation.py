"""A response across segments: when it ends, and which fields an engine may leave out (SEMANTICS 2.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator
from typing import cast

import pytest
from scripted import ScriptedEngine
from test_client import publish, request
from test_client_fleet import fleet_of

from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.continuation import Continuation, Segment
from skyrl_train.inference.interface import (
    InferenceEngineInput,
    LogitAdjustment,
    SamplingParams,
    StopReason,
    TokenChunk,
)
from skyrl_train.inference.response_text import ResponseText
from skyrl_train.runtime.seeds import derive_seed, segment_seed

STOP = 42


class TellsTheEndLate(ScriptedEngine):
    """Its last chunk would be an empty one, and it dies before that."""

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        async for chunk in super().stream(engine_input):
            if chunk.stop_reason is StopReason.STOP:
                yield dataclasses.replace(chunk, stop_reason=None)
                self.die()
                raise EngineDeadError("scripted death")
            yield chunk


async def test_nothing_is_sampled_behind_a_stop_token_when_its_engine_dies_before_it_says_so() -> None:
    late = TellsTheEndLate(lambda tokens, seed: 7 if len(tokens) < 6 else STOP, free_running=True)
    other = ScriptedEngine(lambda tokens, seed: 9, free_running=True)
    client, _ = fleet_of(late, other)
    await publish(client, 0)
    output = await client.generate(request(max_tokens=12, stop_token_ids=[STOP], stop=["never"]))
    assert output["response_ids"][0][-1] == STOP
    assert STOP not in output["response_ids"][0][:-1]
    assert output["stop_reasons"] == [StopReason.STOP]
    assert not other.requests


@pytest.mark.parametrize(("min_tokens", "ends"), [(0, True), (1, True), (2, False), (3, False)])
def test_a_stop_token_ends_the_response_only_past_min_tokens(min_tokens: int, ends: bool) -> None:
    params = SamplingParams(max_tokens=8, min_tokens=min_tokens, stop_token_ids=(STOP,))
    response = Continuation([1], params)
    segment = response.next_segment()
    assert segment is not None
    response.add(TokenChunk([5, STOP], [-1.0, -1.0], [0, 0]), segment.number)
    assert (response.next_segment() is None) is ends
    assert response.stop_reason is (StopReason.STOP if ends else None)


def test_an_empty_chunk_may_leave_out_the_alternatives_and_no_other_chunk_may() -> None:
    response = Continuation([1], SamplingParams(max_tokens=3, top_logprobs=1))
    segment = response.next_segment()
    assert segment is not None
    response.add(TokenChunk([5], [-1.0], [0], None, [[(5, -1.0)]]), segment.number)
    with pytest.raises(EngineError, match="top_logprobs"):
        response.add(TokenChunk([6], [-1.0], [0]), segment.number)
    response.add(TokenChunk([], [], [], StopReason.STOP), segment.number)
    assert response.stop_reason is StopReason.STOP
    assert response.top_logprobs == [[(5, -1.0)]]


def test_the_next_segment_asks_for_the_rest() -> None:
    params = SamplingParams(max_tokens=8, min_tokens=1, seed=3, n=2, top_logprobs=1)
    response = Continuation([1], params, choice=1)
    seed = derive_seed(3, 1)
    assert response.next_segment() == Segment(1, [1], dataclasses.replace(params, seed=segment_seed(seed, 0), n=1))
    response.add(TokenChunk([5, 6], [-1.0, -2.0], [0, 0], StopReason.ABORT, [[(5, -1.0)], [(6, -2.0)]]), 1)
    rest = dataclasses.replace(params, max_tokens=6, min_tokens=0, seed=segment_seed(seed, 2), n=1)
    assert response.next_segment() == Segment(2, [1, 5, 6], rest)
    assert (response.segments, response.restarts) == (2, 0)
    assert (response.token_ids, response.logprobs, response.versions) == ([5, 6], [-1.0, -2.0], [0, 0])


def test_a_response_with_a_grammar_begins_again_with_nothing() -> None:
    params = SamplingParams(max_tokens=8, structured={"json": {}}, seed=3, top_logprobs=1)
    response = Continuation([1], params)
    first = response.next_segment()
    assert first is not None and response.next_segment() == dataclasses.replace(first, number=2)
    assert response.restarts == 0, "nothing was lost"
    response.add(TokenChunk([5], [-1.0], [0], None, [[(5, -1.0)]]), 2)
    assert response.next_segment() == dataclasses.replace(first, number=3)
    assert (response.token_ids, response.logprobs, response.versions, response.top_logprobs) == ([], [], [], [])
    assert (response.segments, response.restarts) == (3, 1)


@pytest.mark.parametrize(
    ("adjustment", "continued", "restarts"),
    [
        (LogitAdjustment(presence_penalty=1.0), False, 1),
        (LogitAdjustment(frequency_penalty=1.0), False, 1),
        (LogitAdjustment(frequency_penalty=1.0), True, 0),
        (LogitAdjustment(repetition_penalty=2.0, logit_bias=((1, 2.0),)), False, 0),
    ],
)
def test_only_penalties_that_count_begin_again_where_engines_do_not_count_on(
    adjustment: LogitAdjustment, continued: bool, restarts: int
) -> None:
    params = SamplingParams(max_tokens=8, adjustment=adjustment)
    response = Continuation([1], params, count_continuation=continued)
    first = response.next_segment()
    assert first is not None and first.sampling_params.adjustment == adjustment
    response.add(TokenChunk([5, 6], [-1.0, -2.0], [0, 0], StopReason.ABORT), 1)
    second = response.next_segment()
    assert second is not None and response.restarts == restarts
    if restarts:
        assert second == dataclasses.replace(first, number=2)
    else:
        counted = dataclasses.replace(adjustment, continued_tokens=2)
        assert (second.prompt_token_ids, second.sampling_params.adjustment) == ([1, 5, 6], counted)


def test_cached_tokens_are_those_of_the_segment_that_begins_the_response() -> None:
    response = Continuation([1] * 40, SamplingParams(max_tokens=8, adjustment=LogitAdjustment(presence_penalty=1.0)))
    response.next_segment()
    response.add(TokenChunk([], [], [], StopReason.ABORT, cached_tokens=16), 1)
    response.next_segment()
    response.add(TokenChunk([5], [-1.0], [0], cached_tokens=32), 2)
    response.add(TokenChunk([6], [-1.0], [0], StopReason.ABORT), 2)
    assert response.cached_tokens == 32
    response.next_segment()  # starts over: the penalties count
    response.add(TokenChunk([5], [-1.0], [0], StopReason.ABORT), 3)
    assert response.cached_tokens == 0

    continued = Continuation([1] * 40, SamplingParams(max_tokens=8))
    continued.next_segment()
    continued.add(TokenChunk([5], [-1.0], [0], StopReason.ABORT), 1)
    continued.next_segment()
    continued.add(TokenChunk([6], [-1.0], [0], cached_tokens=32), 2)
    assert continued.cached_tokens == 0, "the prompt was computed once already"


class MayStop:
    """A text that notes which tokens may complete a stop string; ``last`` completes one."""

    text_end: int | None = None

    def __init__(self, last: int | None = None) -> None:
        self.may_stop: list[bool] = []
        self.last = last

    def feed(self, token_id: int, *, may_stop: bool) -> bool:
        self.may_stop.append(may_stop)
        if token_id == self.last:
            self.text_end = 0
        return token_id == self.last


def test_what_was_sampled_behind_a_stop_string_is_dropped_from_every_list() -> None:
    params = SamplingParams(max_tokens=8, stop=("x",), top_logprobs=1)
    response = Continuation([1], params, make_text=lambda: cast(ResponseText, MayStop(last=7)))
    for number, tokens in enumerate(([5], [6, 7, 8, 9]), start=1):
        segment = response.next_segment()
        assert segment is not None and segment.sampling_params.stop == ()
        alternatives = [[(token, -float(token))] for token in tokens]
        chunk = TokenChunk(tokens, [-float(token) for token in tokens], tokens, StopReason.ABORT, alternatives)
        response.add(chunk, number)
    assert response.token_ids == response.versions == [5, 6, 7]
    assert response.logprobs == [-5.0, -6.0, -7.0]
    assert response.top_logprobs == [[(5, -5.0)], [(6, -6.0)], [(7, -7.0)]]
    assert response.stop_reason is StopReason.STOP


def test_a_stop_string_may_end_the_response_only_past_min_tokens_counted_over_all_segments() -> None:
    text = MayStop()
    params = SamplingParams(max_tokens=8, min_tokens=3, stop=("x",))
    response = Continuation([1], params, make_text=lambda: cast(ResponseText, text))
    for number, tokens in enumerate(([5, 6], [7, 8]), start=1):
        assert response.next_segment() is not None
        response.add(TokenChunk(tokens, [-1.0, -1.0], [0, 0], StopReason.ABORT), number)
    assert text.may_stop == [False, False, False, True]


def test_stop_strings_need_the_text() -> None:
    with pytest.raises(ValueError, match="need make_text"):
        Continuation([1], SamplingParams(stop=("x",)))


def test_recorded_tokens_precede_the_first_segment_and_end_with_the_response() -> None:
    response = Continuation([1], SamplingParams(max_tokens=2))
    response.resume_from(TokenChunk([5], [-1.0], [0]))
    response.resume_from(TokenChunk([6], [-1.0], [0], StopReason.STOP))
    response.resume_from(TokenChunk([7], [-1.0], [0]))
    assert response.token_ids == [5, 6]
    assert response.next_segment() is None
    response = Continuation([1], SamplingParams(max_tokens=2))
    assert response.next_segment() is not None
    with pytest.raises(ValueError, match="being sampled already"):
        response.resume_from(TokenChunk([5], [-1.0], [0]))


def test_an_engine_that_returns_too_much_or_ragged_lists_has_broken_the_contract() -> None:
    response = Continuation([1], SamplingParams(max_tokens=2))
    assert response.next_segment() is not None
    for chunk, problem in [
        (TokenChunk([5, 6, 7], [-1.0] * 3, [0] * 3), "more tokens than max_tokens"),
        (TokenChunk([5, 6], [-1.0], [0, 0]), "2 tokens, 1 log-probs and 2 versions"),
        (TokenChunk([5, 6], [-1.0, -1.0], [0]), "2 tokens, 2 log-probs and 1 versions"),
    ]:
        with pytest.raises(EngineError, match=problem):
            response.add(chunk, 1)
    response.add(TokenChunk([5, 6], [-1.0, -1.0], [0, 0], StopReason.LENGTH), 1)
    with pytest.raises(EngineError, match="has ended"):
        response.add(TokenChunk([], [], []), 1)
    response.add(TokenChunk([9], [-1.0], [0]), 0)
    assert response.token_ids == [5, 6], "a chunk of an abandoned engine is ignored"
