"""OpenAI's own client against /v1/responses, over a real socket: it must not notice a difference."""

from __future__ import annotations

import asyncio
import importlib
import json
from typing import Any

import pydantic
import pytest
from dialect_world import ADMIN_KEY, World, serving

from skyrl_train.endpoint.dialects import responses as dialect
from skyrl_train.inference.openai.body import field_table

openai = pytest.importorskip("openai")

TOOL = {
    "type": "function",
    "name": "look",
    "description": "Looks.",
    "parameters": {"type": "object", "properties": {"at": {"type": "string"}}},
    "strict": False,
}
ASK: dict[str, Any] = {"model": "policy", "tools": [TOOL], "extra_body": {"return_token_ids": True}}
QUESTION = {"role": "user", "content": "How is the weather?"}


def client_of(world: World, **options: Any) -> Any:
    return openai.AsyncOpenAI(base_url=world.base_url, max_retries=0, **{"api_key": world.api_key, **options})


def outputs_of(response: Any) -> list[dict[str, Any]]:
    """The items that a program sends after calls: the output of each."""
    calls = [item.call_id for item in response.output if item.type == "function_call"]
    return [{"type": "function_call_output", "call_id": call, "output": "clouds"} for call in calls]


async def ask(client: Any, streamed: bool, **request: Any) -> Any:
    if not streamed:
        return await client.responses.create(**request)
    async with client.responses.stream(**request) as stream:
        return await stream.get_final_response()


async def converse(client: Any, streamed: bool, stored: bool = False) -> list[Any]:
    """Three turns: calls, an answer to their outputs, a last word. ``stored``: each names the one before it."""
    news: list[Any] = [QUESTION]
    history: list[Any] = []
    responses: list[Any] = []
    for follow_up in (outputs_of, lambda _: [{"role": "user", "content": "Thanks."}], None):
        named = {"previous_response_id": responses[-1].id} if stored and responses else {}
        turn = {"input": news if named else [*history, *news], **named}
        responses.append(await ask(client, streamed, instructions="Be brief.", **turn, **ASK))
        history += [*news, *responses[-1].output]
        news = [] if follow_up is None else follow_up(responses[-1])
    return responses


def told(response: Any) -> dict[str, Any]:
    """A response without its ids and times, which are new each time, and without the reused tokens, which streams omit."""
    body = response.model_dump()
    assert body.pop("id").startswith("resp_")
    for item in body["output"]:
        for name in ("id", "call_id", "parsed_arguments"):
            item.pop(name, None)
        for part in item.get("content") or []:
            part.pop("parsed", None)
    body.pop("created_at")
    body["skyrl"].pop("reused_tokens", None)
    return body


def goes_on(earlier: Any, later: Any) -> bool:
    """Whether a turn's prompt begins with all tokens of the one before."""
    before = earlier.skyrl["prompt_token_ids"] + earlier.skyrl["token_ids"]
    return bool(later.skyrl["prompt_token_ids"][: len(before)] == before)


def keys_of(params: Any) -> frozenset[str]:
    return frozenset(params.__required_keys__ | params.__optional_keys__)


def test_the_table_has_every_field_that_the_client_can_send() -> None:
    sent = keys_of(openai.types.responses.response_create_params.ResponseCreateParamsStreaming)
    assert sent <= {field.name for field in field_table(dialect.ResponsesBody)}


CALL = {"type": "function_call", "call_id": "1", "name": "f", "arguments": "{}"}
PART = {"type": "output_text", "text": "x"}
ITEMS = {
    "easy_input_message_param.EasyInputMessageParam": QUESTION,
    "response_input_item_param.Message": {"type": "message", "role": "developer", "content": []},
    "response_input_item_param.FunctionCallOutput": {"type": "function_call_output", "call_id": "1", "output": "x"},
    "response_output_message_param.ResponseOutputMessageParam": {"role": "assistant", "content": [PART]},
    "response_function_tool_call_param.ResponseFunctionToolCallParam": CALL,
    "response_reasoning_item_param.ResponseReasoningItemParam": {"type": "reasoning", "summary": []},
}


@pytest.mark.parametrize("name", ITEMS)
def test_items_may_have_every_field_that_the_client_can_send(name: str) -> None:
    module, params = name.split(".")
    keys = keys_of(getattr(importlib.import_module(f"openai.types.responses.{module}"), params))
    dialect.parse({"model": "policy", "input": [{**dict.fromkeys(keys), **ITEMS[name]}]})


def test_tools_may_have_every_field_that_the_client_can_send() -> None:
    full = {**dict.fromkeys(keys_of(openai.types.responses.FunctionToolParam)), **TOOL}
    dialect.parse({"model": "policy", "input": "x", "tools": [full]})


@pytest.mark.parametrize(("streamed", "stored"), [(False, False), (True, False), (False, True), (True, True)])
async def test_a_conversation_with_tools_continues_token_by_token(streamed: bool, stored: bool) -> None:
    async with serving() as world, client_of(world) as client:
        responses = await converse(client, streamed, stored)
        world.session.finish()
        (sequence,) = world.session.sequences()
    assert [[item.type for item in response.output] for response in responses] == [
        ["reasoning", "message", "function_call", "function_call"],
        ["reasoning", "message"],
        ["message"],
    ]
    assert json.loads(responses[0].output[2].arguments) == {"at": "Zürich", "days": 1.0}
    assert [response.output_text for response in responses] == ["I look.", "It rains.", "Bye."]
    assert goes_on(responses[0], responses[1]) and goes_on(responses[1], responses[2])
    assert sum(sequence.loss_mask) == sum(response.usage.output_tokens for response in responses)


async def test_streamed_responses_are_the_same_as_whole_ones() -> None:
    async with serving() as world:
        keys = [world.store.open().api_key for _ in range(2)]
        async with client_of(world, api_key=keys[0]) as one, client_of(world, api_key=keys[1]) as other:
            whole, streamed = await converse(one, False), await converse(other, True)
    assert [told(response) for response in streamed] == [told(response) for response in whole]


def test_a_client_that_blocks_reads_text_as_it_comes() -> None:
    def read(world: World) -> tuple[list[str], str]:
        client = openai.OpenAI(base_url=world.base_url, api_key=world.api_key, max_retries=0)
        with client, client.responses.stream(model="policy", input="Hi.") as stream:
            pieces = [event.delta for event in stream if event.type == "response.output_text.delta"]
            return pieces, stream.get_final_response().output_text

    async def run() -> tuple[list[str], str]:
        async with serving(["In pieces."]) as world:
            return await asyncio.to_thread(read, world)

    pieces, text = asyncio.run(run())
    assert len(pieces) > 1 and "".join(pieces) == text == "In pieces."


class Weather(pydantic.BaseModel):
    place: str
    rain: bool


async def test_structured_outputs_are_parsed() -> None:
    async with serving(['{"place": "Zürich", "rain": true}']) as world, client_of(world) as client:
        response = await client.responses.parse(model="policy", input="Hi.", text_format=Weather)
        asked = world.engine.requests[0]["sampling_params"]
    assert response.output_parsed == Weather(place="Zürich", rain=True)
    assert asked.structured.kind == "json_schema" and json.loads(asked.structured.value)["title"] == "Weather"


async def test_log_probs_come_with_the_text() -> None:
    async with serving(["<think>\nab\n</think>\n\nab"]) as world, client_of(world) as client:
        request = {"model": "policy", "input": "Hi.", "include": ["message.output_text.logprobs"], "top_logprobs": 2}
        whole, streamed = await ask(client, False, **request), await ask(client, True, **request)
    entries = whole.output[1].content[0].logprobs
    assert [entry.token for entry in entries] == ["a", "b"] and [len(entry.top_logprobs) for entry in entries] == [2, 2]
    assert streamed.output[1].content[0].logprobs == entries


async def test_a_response_that_is_cut_off_is_incomplete() -> None:
    async with serving(["one two"]) as world, client_of(world) as client:
        request = {"model": "policy", "input": "Hi.", "max_output_tokens": 3}
        whole = await client.responses.create(**request)
        events = [event async for event in await client.responses.create(**request, stream=True)]
    assert (whole.status, whole.incomplete_details.reason, whole.output_text) == (
        "incomplete",
        "max_output_tokens",
        "one",
    )
    assert events[-1].type == "response.incomplete" and events[-1].response.output_text == "one"
    assert [event.sequence_number for event in events] == list(range(len(events)))


async def test_a_previous_response_is_named_within_its_session_only() -> None:
    async with serving(["One.", "Two."]) as world, client_of(world) as client:
        kept = await client.responses.create(model="policy", input="Hi.")
        passing = await client.responses.create(model="policy", input="Hi.", store=False)
        assert (kept.store, passing.store) == (True, False)
        next_one = {"model": "policy", "input": "And?"}
        with pytest.raises(openai.BadRequestError) as forgotten:
            await client.responses.create(**next_one, previous_response_id=passing.id)
        assert (forgotten.value.code, forgotten.value.param) == ("previous_response_not_found", "previous_response_id")
        async with client_of(world, api_key=world.store.open().api_key) as stranger:
            with pytest.raises(openai.BadRequestError, match="not stored here"):
                await stranger.responses.create(**next_one, previous_response_id=kept.id)
        async with client_of(world, api_key=ADMIN_KEY) as admin:
            with pytest.raises(openai.BadRequestError, match="not stored here"):
                await admin.responses.create(**next_one, previous_response_id=kept.id)
        assert (await client.responses.create(**next_one, previous_response_id=kept.id)).output_text == "Two."


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_client_without_a_session_names_previous_responses_too(streamed: bool) -> None:
    async with serving(["One.", "Two.", "Three."]) as world, client_of(world, api_key=ADMIN_KEY) as client:
        made: Any = None
        for text in ("Hi.", "And?", "And then?"):
            named = {} if made is None else {"previous_response_id": made.id}
            made = await client.responses.create(model="policy", input=text, stream=streamed, **named)
            if streamed:
                made = [event async for event in made][-1].response
        assert made.output_text == "Three."
        whole = [{"role": "user", "content": "Hi."}, {"role": "assistant", "content": "One."}]
        whole += [{"role": "user", "content": "And?"}, {"role": "assistant", "content": "Two."}]
        whole += [{"role": "user", "content": "And then?"}]
        assert list(world.engine.requests[-1]["prompt_token_ids"][0]) == world.client.renderer.render(whole)
        assert await client.responses.retrieve(made.id) == made
        await client.responses.delete(made.id)
        with pytest.raises(openai.BadRequestError, match="was deleted, or is older than the last 4096 or than 3600 s"):
            await client.responses.create(model="policy", input="?", previous_response_id=made.id)
        async with client_of(world, api_key=world.store.open().api_key) as stranger:
            with pytest.raises(openai.BadRequestError, match="another session"):
                await stranger.responses.create(model="policy", input="?", previous_response_id=made.id)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_stored_response_is_retrieved_and_deleted_within_its_session(streamed: bool) -> None:
    async with serving(["One.", "Two."]) as world, client_of(world) as client:
        if streamed:
            events = [e async for e in await client.responses.create(model="policy", input="Hi.", stream=True)]
            made = events[-1].response
        else:
            made = await client.responses.create(model="policy", input="Hi.")
        passing = await client.responses.create(model="policy", input="Hi.", store=False)
        assert await client.responses.retrieve(made.id) == made
        with pytest.raises(openai.BadRequestError, match="comes whole"):
            await client.responses.retrieve(made.id, stream=True)
        async with client_of(world, api_key=world.store.open().api_key) as stranger:
            for missing, asking in ((made.id, stranger), (passing.id, client)):
                with pytest.raises(openai.NotFoundError, match="not stored here"):
                    await asking.responses.retrieve(missing)
                with pytest.raises(openai.NotFoundError):
                    await asking.responses.delete(missing)
        await client.responses.delete(made.id)
        with pytest.raises(openai.NotFoundError, match="was deleted"):
            await client.responses.retrieve(made.id)
        with pytest.raises(openai.BadRequestError, match="was deleted"):
            await client.responses.create(model="policy", input="And?", previous_response_id=made.id)


async def test_errors_are_those_that_the_client_knows() -> None:
    async with serving() as world, client_of(world) as client:
        with pytest.raises(openai.BadRequestError) as refused:
            await client.responses.create(model="policy", input="Hi.", tools=[{"type": "web_search"}])
        assert (refused.value.param, refused.value.type) == ("tools[0].type", "invalid_request_error")
        with pytest.raises(openai.NotFoundError):
            await client.responses.create(model="gpt", input="Hi.")
        with pytest.raises(openai.BadRequestError, match="context"):
            await client.responses.create(model="policy", input="Hi.", max_output_tokens=100_000)
        async with client_of(world, api_key="wrong") as stranger:
            with pytest.raises(openai.AuthenticationError):
                await stranger.responses.create(model="policy", input="Hi.")
        assert world.engine.requests == []


async def test_an_engine_that_dies_in_the_middle_fails_the_response() -> None:
    async with serving(["A long answer."], free_running=False) as world, client_of(world) as client:
        asked = asyncio.create_task(client.responses.create(model="policy", input="Hi.", stream=True))
        await world.engine.submitted.wait()
        world.engine.tick(3)
        events = []
        async for event in await asked:
            events.append(event)
            if event.type == "response.output_text.delta":
                world.engine.die()
        assert events[-1].type == "response.failed"
        assert (events[-1].response.status, events[-1].response.error.code) == ("failed", "server_error")
        with pytest.raises(openai.BadRequestError):
            await client.responses.create(model="policy", input="?", previous_response_id=events[-1].response.id)
