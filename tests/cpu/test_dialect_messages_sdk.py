"""Anthropic's own client against the endpoint, over a real socket: it must not notice a difference."""

from __future__ import annotations

import asyncio
import itertools
from typing import Any

import pytest
from dialect_world import ADMIN_KEY, World, serving

from skyrl_train.endpoint.dialects import anthropic as dialect
from skyrl_train.inference.openai.body import field_table

anthropic = pytest.importorskip("anthropic")

TOOL = {
    "name": "look",
    "description": "Looks.",
    "input_schema": {"type": "object", "properties": {"at": {"type": "string"}}},
}
ASK: dict[str, Any] = {"model": "policy", "max_tokens": 400, "tools": [TOOL], "extra_body": {"return_token_ids": True}}
START = [{"role": "user", "content": "How is the weather?"}]


def client_of(world: World, **options: Any) -> Any:
    return anthropic.AsyncAnthropic(base_url=world.root, max_retries=0, **{"api_key": world.api_key, **options})


def results_of(message: Any) -> dict[str, Any]:
    """The message that a program sends after calls: the result of each."""
    calls = [block.id for block in message.content if block.type == "tool_use"]
    return {
        "role": "user",
        "content": [{"type": "tool_result", "tool_use_id": call, "content": "clouds"} for call in calls],
    }


async def ask(client: Any, streamed: bool, **request: Any) -> tuple[Any, dict[str, Any]]:
    """A message, and its ``skyrl`` object."""
    if not streamed:
        message = await client.messages.create(**request)
        return message, message.skyrl
    async with client.messages.stream(**request) as stream:
        skyrl = [event.skyrl async for event in stream if event.type == "message_delta"]
        return await stream.get_final_message(), skyrl[0]


async def converse(client: Any, streamed: bool) -> tuple[list[Any], list[dict[str, Any]]]:
    """Three turns: calls, an answer to their results, a last word."""
    history: list[Any] = list(START)
    messages, tokens = [], []
    for follow_up in (results_of, lambda _: {"role": "user", "content": "Thanks."}, None):
        message, skyrl = await ask(client, streamed, messages=history, **ASK)
        messages.append(message)
        tokens.append(skyrl)
        if follow_up is not None:
            history += [message.to_param(), follow_up(message)]
    return messages, tokens


def told(message: Any) -> dict[str, Any]:
    """All that a message says; ids are new each time."""
    body = message.model_dump()
    ids = [body.pop("id"), *(block.pop("id", None) for block in body["content"])]
    assert ids[0].startswith("msg_")
    for block in body["content"]:
        block.pop("parsed_output", None)
    body.pop("skyrl", None)
    return body


def keys_of(params: Any) -> frozenset[str]:
    return frozenset(params.__required_keys__ | params.__optional_keys__)


def test_the_table_has_every_field_that_the_client_can_send() -> None:
    fields = {field.name for field in field_table(dialect.MessagesBody)}
    assert keys_of(anthropic.types.message_create_params.MessageCreateParamsStreaming) <= fields
    assert keys_of(anthropic.types.beta.message_create_params.MessageCreateParamsStreaming) <= fields
    counted = keys_of(anthropic.types.MessageCountTokensParams) - {"user_profile_id", "workspace_id"}
    assert counted <= {field.name for field in field_table(dialect.CountTokensBody)}


BLOCKS = {
    "TextBlockParam": ("user", {"type": "text", "text": "x"}),
    "ThinkingBlockParam": ("assistant", {"type": "thinking", "thinking": "x"}),
    "ToolUseBlockParam": ("assistant", {"type": "tool_use", "id": "1", "name": "f", "input": {}}),
    "ToolResultBlockParam": ("user", {"type": "tool_result", "tool_use_id": "1"}),
}


@pytest.mark.parametrize("name", BLOCKS)
def test_blocks_may_have_every_field_that_the_client_can_send(name: str) -> None:
    role, block = BLOCKS[name]
    full = {**dict.fromkeys(keys_of(getattr(anthropic.types, name))), **block}
    dialect.parse({"model": "policy", "max_tokens": 5, "messages": [{"role": role, "content": [full]}, *START]})


def test_tools_may_have_every_field_that_the_client_can_send() -> None:
    full = {**dict.fromkeys(keys_of(anthropic.types.ToolParam)), **TOOL}
    dialect.parse({"model": "policy", "max_tokens": 5, "messages": START, "tools": [full]})


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_conversation_with_tools_continues_token_by_token(streamed: bool) -> None:
    async with serving() as world, client_of(world) as client:
        messages, tokens = await converse(client, streamed)
        world.session.finish()
        (sequence,) = world.session.sequences()
    assert [[block.type for block in message.content] for message in messages] == [
        ["thinking", "text", "tool_use", "tool_use"],
        ["thinking", "text"],
        ["text"],
    ]
    assert messages[0].content[2].input == {"at": "Zürich", "days": 1.0}
    assert [message.stop_reason for message in messages] == ["tool_use", "end_turn", "end_turn"]
    for earlier, later in itertools.pairwise(tokens):
        before = earlier["prompt_token_ids"] + earlier["token_ids"]
        assert later["prompt_token_ids"][: len(before)] == before
    assert all(skyrl["versions"] == [4] * len(skyrl["token_ids"]) for skyrl in tokens)
    assert sum(sequence.loss_mask) == sum(len(skyrl["token_ids"]) for skyrl in tokens)


@pytest.mark.parametrize("streamed", [False, True])
async def test_a_long_integer_in_a_call_arrives_exactly_and_its_call_is_continued(streamed: bool) -> None:
    call = '<tool_call>\n{"name": "look", "arguments": {"at": 123456789012345678901}}\n</tool_call>'
    async with serving([call, "Bye."]) as world, client_of(world) as client:
        message, _ = await ask(client, streamed, messages=START, **ASK)
        history = [*START, message.to_param(), results_of(message)]
        _, continued = await ask(client, False, messages=history, **ASK)
    assert message.content[0].input == {"at": 123456789012345678901}
    assert continued["reused_tokens"] > 0


async def test_streamed_messages_are_the_same_as_whole_ones() -> None:
    async with serving() as world:
        keys = [world.store.open().api_key for _ in range(2)]
        async with client_of(world, api_key=keys[0]) as one, client_of(world, api_key=keys[1]) as other:
            (whole, _), (streamed, _) = await converse(one, False), await converse(other, True)
    assert [told(message) for message in streamed] == [told(message) for message in whole]


def test_a_client_that_blocks_reads_text_as_it_comes() -> None:
    def read(world: World) -> tuple[list[str], str]:
        client = anthropic.Anthropic(base_url=world.root, auth_token=world.api_key, max_retries=0)
        with client, client.messages.stream(model="policy", max_tokens=50, messages=START) as stream:
            pieces = list(stream.text_stream)
            return pieces, stream.get_final_text()

    async def run() -> tuple[list[str], str]:
        async with serving(["In pieces."]) as world:
            return await asyncio.to_thread(read, world)

    pieces, text = asyncio.run(run())
    assert len(pieces) > 1 and "".join(pieces) == text == "In pieces."


async def test_events_come_in_anthropics_order() -> None:
    async with serving(["<think>\nHm.\n</think>\n\nYes."]) as world, client_of(world) as client:
        stream = await client.messages.create(model="policy", max_tokens=50, messages=START, stream=True)
        names = [event.type async for event in stream]
    block = ["content_block_start", "content_block_delta", "content_block_stop"]
    once = [name for name, before in zip(names, [None, *names], strict=False) if name != before]
    assert once == ["message_start", *block, *block, "message_delta", "message_stop"]


async def test_a_message_has_its_stop_reason() -> None:
    async with serving(["one END two"]) as world, client_of(world) as client:
        request = {"model": "policy", "messages": START}
        stopped = await client.messages.create(**request, max_tokens=50, stop_sequences=["STOP", "END"])
        cut = await client.messages.create(**request, max_tokens=3)
    assert (stopped.stop_reason, stopped.stop_sequence, stopped.content[0].text) == ("stop_sequence", "END", "one ")
    assert (cut.stop_reason, cut.usage.output_tokens, cut.content[0].text) == ("max_tokens", 3, "one")


async def test_tokens_are_counted_as_a_message_would_use_them() -> None:
    async with serving() as world, client_of(world) as client:
        prompt = {"model": "policy", "messages": START, "system": "Be brief.", "tools": [TOOL]}
        counted = await client.messages.count_tokens(**prompt)
        message = await client.messages.create(**prompt, max_tokens=400)
        picture = {"type": "image", "source": {"type": "url", "url": "https://example.org/x.png"}}
        with pytest.raises(anthropic.BadRequestError, match="text only"):
            await client.messages.count_tokens(model="policy", messages=[{"role": "user", "content": [picture]}])
    assert counted.input_tokens == message.usage.input_tokens


async def test_the_tool_runner_sends_the_whole_conversation_where_threads_are_unsupported() -> None:
    @anthropic.beta_async_tool
    async def look(at: str, days: float) -> str:
        """Return the weather."""
        return f"rain in {at}"

    async with serving() as world, client_of(world) as client:
        runner = client.beta.messages.tool_runner(model="policy", max_tokens=400, messages=START, tools=[look])
        final = await runner.until_done()
        assert final.content[-1].text == "It rains."
        assert world.session.statistics().turns == 2


async def test_errors_are_those_that_the_client_knows() -> None:
    request: dict[str, Any] = {"model": "policy", "max_tokens": 5, "messages": START}
    async with serving() as world, client_of(world) as client:
        with pytest.raises(anthropic.BadRequestError) as refused:
            await client.messages.create(**request, tools=[TOOL], tool_choice={"type": "any"})
        assert refused.value.body["type"] == "error"
        assert refused.value.body["error"]["type"] == "invalid_request_error"
        with pytest.raises(anthropic.NotFoundError) as unknown:
            await client.messages.create(**{**request, "model": "claude"})
        assert unknown.value.body["error"]["type"] == "not_found_error"
        with pytest.raises(anthropic.BadRequestError, match="context"):
            await client.messages.create(**{**request, "max_tokens": 100_000}, timeout=300)
        async with client_of(world, api_key="wrong") as stranger:
            with pytest.raises(anthropic.AuthenticationError) as wrong:
                await stranger.messages.create(**request)
            assert wrong.value.body["error"]["type"] == "authentication_error"
            with pytest.raises(anthropic.AuthenticationError):
                await stranger.messages.count_tokens(model="policy", messages=START)
        assert world.engine.requests == []


async def test_an_engine_that_dies_in_the_middle_ends_the_stream_with_an_error() -> None:
    async with serving(["A long answer."], free_running=False) as world, client_of(world, api_key=ADMIN_KEY) as client:
        asked = asyncio.create_task(client.messages.create(model="policy", max_tokens=50, messages=START, stream=True))
        await world.engine.submitted.wait()
        world.engine.tick(3)
        stream = await asked
        while (await anext(stream)).type != "content_block_delta":
            pass
        world.engine.die()
        with pytest.raises(anthropic.APIStatusError) as failed:
            await anext(stream)
    assert failed.value.body["error"]["type"] == "overloaded_error"
