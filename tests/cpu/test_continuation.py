"""A response across segments: when it ends, and which fields an engine may leave out (SEMANTICS 2.4)."""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncIterator

import pytest
from scripted import ScriptedEngine
from test_client import publish, request
from test_client_fleet import fleet_of

from skyrl_train.errors import EngineDeadError, EngineError
from skyrl_train.inference.continuation import Continuation
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams, StopReason, TokenChunk

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
