"""The chat service: n choices at once, each parsed as a message and recorded once, and no request left in the engine."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from chat_models import chat_renderer, chat_tokenizer, encode
from hypothesis import given, settings
from hypothesis import strategies as st
from scripted import ScriptedEngine, scripted_update, settle
from test_chat_parsing import ARGUMENTS, TOOLS, hermes, join

from skyrl_train.endpoint.sessions import Session
from skyrl_train.errors import ConfigError, EngineError, RequestError, SessionError
from skyrl_train.inference.chat import ChatChoice, ChatEvent, ChatRequest
from skyrl_train.inference.chat import service as chat_service
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import InferenceEngineClient
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams, StopReason, StructuredOutput
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.types import PauseMode

QWEN = "Qwen/Qwen3-0.6B"
ASK = ({"role": "user", "content": "Weather?"},)
PROMPT = len(chat_renderer(QWEN).render(ASK))
CONTEXT = 4000


@dataclass
class Scripted(GenerationService):
    """A generation service whose responses are texts, one per choice; chunks come when ``release`` says so."""

    texts: Sequence[str] = ("Hello.<|im_end|>",)
    stop_reason: StopReason = StopReason.STOP
    stop_string: str | None = None
    chunk: int = 3
    fails: dict[int, Exception] = field(default_factory=dict)  # choice -> what it raises at its end
    gate: Callable[[int], asyncio.Event] | None = None
    requests: list[GenerationRequest] = field(default_factory=list)
    running: int = 0
    chunks_made: int = 0
    policy_version: int = 3

    capabilities = EngineCapabilities(frozenset(PauseMode), frozenset(), CONTEXT, structured_output=True)

    def generation(self, request: GenerationRequest) -> Generation:
        text = self.texts[request.choice % len(self.texts)]
        ids = encode(QWEN, text + (self.stop_string or ""))
        shown = chat_tokenizer(QWEN).decode(encode(QWEN, text), skip_special_tokens=True)
        return Generation(
            list(request.prompt_token_ids),
            ids,
            [-0.5] * len(ids),
            [3] * len(ids),
            self.stop_reason,
            str(shown),
            stop_string=self.stop_string,
        )

    async def complete(self, request: GenerationRequest) -> Generation:
        [*_, last] = [chunk async for chunk in self.stream(request)]
        assert last.generation is not None
        return last.generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        self.requests.append(request)
        self.running += 1
        try:
            generation = self.generation(request)
            shown = 0
            for start in range(0, len(generation.token_ids), self.chunk):
                if self.gate is not None:
                    await self.gate(request.choice).wait()
                ids = generation.token_ids[start : start + self.chunk]
                decoded = str(chat_tokenizer(QWEN).decode(generation.token_ids[:start], skip_special_tokens=True))
                text = generation.text[shown : len(decoded)] if "�" not in decoded else ""
                shown += len(text)
                self.chunks_made += 1
                yield GenerationChunk(ids, [-0.5] * len(ids), [3] * len(ids), text)
                await asyncio.sleep(0)
            if request.choice in self.fails:
                raise self.fails[request.choice]
            yield GenerationChunk(text=generation.text[shown:], generation=generation)
        finally:
            self.running -= 1


@dataclass
class Recorder:
    """A session that keeps the recorded choices."""

    id: str = "s1"
    oldest_version: int | None = 2
    planned: list[Any] = field(default_factory=list)
    recorded: list[ChatChoice] = field(default_factory=list)
    room: int = 1000  # responses
    asked_room: list[tuple[int, int]] = field(default_factory=list)

    def plan(self, messages: Any, tools: Any, template_kwargs: Any, continue_final: bool) -> Any:
        self.planned.append((messages, tools, template_kwargs))

        @dataclass
        class Plan:
            prompt_token_ids: list[int]
            reused_tokens: int

        return Plan([7, 8, 9], 2)

    def check_room(self, responses: int, *, plan: Any, sampled_tokens: int) -> None:
        assert plan.prompt_token_ids == [7, 8, 9]
        self.asked_room.append((responses, sampled_tokens))
        if responses > self.room:
            raise SessionError("no room")

    def record(self, plan: Any, choice: ChatChoice) -> int:
        assert plan.prompt_token_ids == [7, 8, 9]
        self.recorded.append(choice)
        return len(self.recorded) - 1


def service(generation: Scripted) -> ChatService:
    return ChatService(generation, chat_renderer(QWEN))


def request(n: int = 1, **fields: Any) -> ChatRequest:
    params = SamplingParams(**{"n": n, **fields.pop("params", {})})
    return ChatRequest(messages=ASK, params=params, **fields)


async def collect(events: AsyncIterator[ChatEvent]) -> list[ChatEvent]:
    return [event async for event in events]


def run(coroutine: Any) -> Any:
    async def within() -> Any:
        async with asyncio.timeout(60):
            return await coroutine

    return asyncio.run(within())


# Results ----------------------------------------------------------------------------------------------------------


def test_an_answer_is_read_as_a_message() -> None:
    said = f"<think>\nhm\n</think>\n\nI look.\n{hermes('look_up', ARGUMENTS)}<|im_end|>"
    result = run(service(Scripted([said])).complete(request(tools=tuple(TOOLS))))
    (choice,) = result.choices
    assert (choice.message.reasoning_content, choice.message.content) == ("hm", "I look.")
    assert json.loads(choice.message.tool_calls[0].arguments) == ARGUMENTS
    assert choice.finish_reason == "tool_calls"
    assert result.prompt_token_ids == chat_renderer(QWEN).render(ASK, TOOLS)
    assert result.completion_tokens == len(encode(QWEN, said))


@pytest.mark.parametrize(("reason", "finish"), [(StopReason.STOP, "stop"), (StopReason.LENGTH, "length")])
def test_the_finish_reason_is_the_engines_without_calls(reason: StopReason, finish: str) -> None:
    result = run(service(Scripted(["yes"], reason)).complete(request()))
    assert result.choices[0].finish_reason == finish


@pytest.mark.parametrize("n", [1, 3])
@given(data=st.data())
@settings(max_examples=25)
def test_events_joined_are_the_choices_of_the_result(n: int, data: st.DataObject) -> None:
    words = st.sampled_from(
        ["yes ", "é", "<think>", "</think>", "\n", hermes("look_up", ARGUMENTS), "<tool_call>", "<"]
    )
    texts = [data.draw(st.lists(words, min_size=1, max_size=5).map("".join)) for _ in range(n)]
    stop = data.draw(st.sampled_from([None, "STOP", "<stop>"]))
    generation = Scripted(texts, stop_string=stop, chunk=data.draw(st.integers(1, 9)))
    # A training run has stop strings of its own, which the request does not name.
    named = stop is not None and data.draw(st.booleans())
    asked = request(n, tools=tuple(TOOLS), params={"stop": (stop,) if named else ()})
    result = run(service(generation).complete(asked))
    events = run(collect(service(generation).stream(asked)))
    for choice in result.choices:
        mine = [event for event in events if event.index == choice.index]
        assert mine[-1].choice == choice and all(event.choice is None for event in mine[:-1])
        assert join([event.delta for event in mine]) == choice.message
        assert [token for event in mine for token in event.chunk.token_ids] == choice.generation.token_ids


def test_the_events_of_several_choices_come_as_they_are_sampled() -> None:
    async def scenario() -> list[int]:
        gates = [asyncio.Event(), asyncio.Event()]
        events = service(Scripted(["aaa", "bbb"], chunk=1, gate=gates.__getitem__)).stream(request(2))
        gates[1].set()
        first = [(await anext(events)).index for _ in range(2)]
        gates[0].set()
        return first + [event.index async for event in events]

    order = run(scenario())
    assert order[:2] == [1, 1] and sorted(order) == [0, 0, 0, 0, 1, 1, 1, 1]


# Requests ---------------------------------------------------------------------------------------------------------


def test_every_choice_is_a_request_of_its_own() -> None:
    generation, session = Scripted(), Recorder()
    structured = StructuredOutput("json_object")
    asked = request(2, adapter="lora", params={"seed": 5, "structured": structured, "stop_token_ids": (9,)})
    result = run(service(generation).complete(asked, session))
    assert [r.choice for r in generation.requests] == [0, 1]
    for sent in generation.requests:
        assert (sent.session_id, sent.oldest_version, sent.adapter) == ("s1", 2, "lora")
        assert sent.prompt_token_ids == [7, 8, 9]
        assert (sent.params.n, sent.params.seed, sent.params.structured) == (1, 5, structured)
        assert sent.params.stop_token_ids == (9, *chat_renderer(QWEN).stop_token_ids)
    assert result.reused_tokens == 2


def test_ignoring_the_end_ignores_the_familys_too() -> None:
    generation = Scripted()
    run(service(generation).complete(request(params={"ignore_eos": True})))
    assert generation.requests[0].params.stop_token_ids == ()


def test_no_tool_choice_keeps_the_tools_from_the_model() -> None:
    call = hermes("look_up", ARGUMENTS)
    generation, session = Scripted([call]), Recorder()
    asked = request(tools=tuple(TOOLS), tool_choice="none", template_kwargs={"enable_thinking": False})
    result = run(service(generation).complete(asked, session))
    assert result.choices[0].message.content == call
    assert session.planned == [(list(ASK), (), {"enable_thinking": False})]


def test_max_tokens_is_the_requested_number_or_the_rest_of_the_context() -> None:
    generation = Scripted()
    for asked, expected in ((None, CONTEXT - PROMPT), (7, 7), (CONTEXT - PROMPT, CONTEXT - PROMPT)):
        run(service(generation).complete(request(max_tokens=asked)))
        assert generation.requests[-1].params.max_tokens == expected


def test_a_request_that_does_not_fit_is_rejected_with_the_numbers() -> None:
    chat, room = service(Scripted()), CONTEXT - PROMPT
    with pytest.raises(RequestError, match=rf"{PROMPT} tokens and {room + 1} are asked for, .* {CONTEXT}"):
        run(collect(chat.stream(request(max_tokens=room + 1))))
    with pytest.raises(RequestError, match=rf"{room + 1} are asked for"):
        run(collect(chat.stream(request(params={"min_tokens": room + 1, "max_tokens": CONTEXT}))))
    long = ChatRequest(messages=({"role": "user", "content": "x" * CONTEXT},))
    with pytest.raises(RequestError, match=f"{PROMPT - 8 + CONTEXT} tokens, and .* {CONTEXT} tokens"):
        run(chat.complete(long))


@pytest.mark.parametrize("session", [None, Recorder()], ids=["without a session", "with one"])
@pytest.mark.parametrize(
    ("text", "words"),
    [("x" * (128 * CONTEXT + 1), "more than 512000 characters"), ("word " * 12_000, "more than 8000 tokens")],
)
def test_text_that_can_never_fit_is_neither_rendered_nor_planned(
    session: Recorder | None, text: str, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def render(*_: Any) -> list[int]:
        raise AssertionError("rendered")

    monkeypatch.setattr(chat_renderer(QWEN), "render", render)
    generation = Scripted()
    with pytest.raises(RequestError, match=words):
        run(service(generation).complete(ChatRequest(messages=({"role": "user", "content": text},)), session))
    assert generation.requests == [] and (session is None or session.planned == [])


def test_assistant_messages_are_not_counted_where_a_template_may_omit_them() -> None:
    said = {"role": "assistant", "content": "<think>" + "word " * 12_000 + "</think>Yes."}
    messages = (*ASK, said, {"role": "user", "content": "Why?"})
    assert run(service(Scripted()).complete(ChatRequest(messages=messages))).prompt_token_ids
    with pytest.raises(RequestError, match="more than 8000 tokens"):
        run(service(Scripted()).complete(ChatRequest(messages=messages), Recorder()))


def test_a_long_conversation_is_rendered_in_a_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    threads = []
    rendered = chat_renderer(QWEN).render

    def render(*arguments: Any) -> list[int]:
        threads.append(threading.current_thread())
        return rendered(*arguments)

    monkeypatch.setattr(chat_renderer(QWEN), "render", render)
    monkeypatch.setattr(chat_service, "LONG_TEXT", 100)
    long = ({"role": "user", "content": "Weather? " * 30},)
    run(service(Scripted()).complete(ChatRequest(messages=long)))
    run(service(Scripted()).complete(request()))
    assert threads[0] is not threading.main_thread() and threads[1] is threading.main_thread()


@pytest.mark.parametrize("max_tokens", [None, 5])
@pytest.mark.parametrize("streamed", [False, True])
def test_all_choices_together_need_room_in_the_session(streamed: bool, max_tokens: int | None) -> None:
    generation, session = Scripted(), Recorder(room=2)
    asked = request(3, max_tokens=max_tokens)
    chat = service(generation)
    with pytest.raises(SessionError, match="no room"):
        run(collect(chat.stream(asked, session)) if streamed else chat.complete(asked, session))
    assert generation.requests == [] and session.asked_room == [(3, 3 * (max_tokens or 1))]


@pytest.mark.parametrize("max_tokens", [0, -5])
def test_max_tokens_below_one_is_an_error(max_tokens: int) -> None:
    with pytest.raises(ConfigError, match="max_tokens must be at least 1"):
        run(collect(service(Scripted()).stream(request(max_tokens=max_tokens))))


@pytest.mark.parametrize("session", [None, Recorder()])
def test_a_malformed_message_is_rejected_before_anything_is_planned(session: Recorder | None) -> None:
    generation = Scripted()
    with pytest.raises(ConfigError, match=r"messages\[0\] must be an object"):
        run(collect(service(generation).stream(ChatRequest(messages=("hi",)), session)))  # type: ignore[arg-type]
    assert generation.requests == [] and (session is None or session.planned == [])


# Recording and cancellation ---------------------------------------------------------------------------------------


def test_finished_choices_are_recorded_once() -> None:
    session = Recorder()
    result = run(service(Scripted(["a", "b"])).complete(request(2), session))
    assert session.recorded == list(result.choices)
    session = Recorder()
    events = run(collect(service(Scripted(["a", "b"])).stream(request(2), session)))
    assert session.recorded == [event.choice for event in events if event.choice is not None]
    assert len(session.recorded) == 2


def test_one_failure_cancels_the_other_choices_and_records_none() -> None:
    async def scenario() -> None:
        generation, session = Scripted(["a", "b" * 200], chunk=1, fails={0: EngineError("broken")}), Recorder()
        with pytest.raises(EngineError, match="broken"):
            await service(generation).complete(request(2), session)
        assert (generation.running, session.recorded) == (0, [])
        with pytest.raises(EngineError, match="broken"):
            await collect(service(generation).stream(request(2), session))
        assert (generation.running, session.recorded) == (0, [])

    run(scenario())


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("read", [0, 1, 4])
def test_a_reader_that_leaves_cancels_unfinished_choices(n: int, read: int) -> None:
    async def scenario() -> None:
        generation, session = Scripted(["a" * 50], chunk=1), Recorder()
        events = service(generation).stream(request(n), session)
        for _ in range(read):
            await anext(events)
        await events.aclose()
        assert (generation.running, session.recorded) == (0, [])
        reading = asyncio.create_task(collect(service(generation).stream(request(n), session)))
        await settle(read)
        reading.cancel()
        await asyncio.gather(reading, return_exceptions=True)
        assert (generation.running, session.recorded) == (0, [])
        completing = asyncio.create_task(service(generation).complete(request(n), session))
        await settle(read)
        completing.cancel()
        await asyncio.gather(completing, return_exceptions=True)
        assert (generation.running, session.recorded) == (0, [])

    run(scenario())


def test_a_choice_that_ended_before_the_reader_left_stays_recorded() -> None:
    async def scenario() -> None:
        gates = [asyncio.Event(), asyncio.Event()]
        generation, session = Scripted(["a", "b"], gate=gates.__getitem__), Recorder()
        events = service(generation).stream(request(2), session)
        gates[1].set()
        async for event in events:
            if event.choice is not None:
                break
        await events.aclose()
        assert [choice.index for choice in session.recorded] == [1]
        assert generation.running == 0

    run(scenario())


@pytest.mark.parametrize("n", [1, 3])
def test_a_reader_that_does_not_read_buffers_one_piece_per_choice(n: int) -> None:
    async def scenario() -> None:
        generation = Scripted(["a" * 300], chunk=1)
        events = service(generation).stream(request(n))
        await anext(events)
        await settle(200)
        assert generation.chunks_made <= n + 1
        await events.aclose()

    run(scenario())


# With the client and a session ------------------------------------------------------------------------------------


def test_a_response_that_may_have_one_call_ends_behind_it_and_the_next_turn_continues_its_tokens() -> None:
    call = hermes("look_up", ARGUMENTS)
    renderer, answer = chat_renderer(QWEN), encode(QWEN, f"so {call}")
    prompt = renderer.render(ASK, TOOLS)

    async def scenario() -> None:
        said = encode(QWEN, f"so {call}\n{call}<|im_end|>")
        engine = ScriptedEngine(lambda tokens, _: said[len(tokens) - len(prompt)], free_running=True)
        client = InferenceEngineClient([engine], chat_tokenizer(QWEN), QWEN)
        chat, session = ChatService(client, renderer), Session("s", renderer)
        await publish(client, 0)
        (choice,) = (await chat.complete(ChatRequest(ASK, tools=tuple(TOOLS), single_call=True), session)).choices
        assert choice.generation.token_ids == answer and choice.finish_reason == "tool_calls"
        (made,) = choice.message.tool_calls
        result = {"role": "tool", "content": "sunny", "tool_call_id": made.id}
        asked = ChatRequest((*ASK, choice.message.to_openai(), result), tools=tuple(TOOLS), single_call=True)
        following, reused = await chat.prompt(asked, session)
        assert following[:reused] == prompt + answer == following[: len(prompt) + len(answer)]
        assert chat_tokenizer(QWEN).decode(following[reused:]).startswith("<|im_end|>")
        (choice,) = (await chat.complete(ChatRequest(ASK, tools=tuple(TOOLS)))).choices
        assert len(choice.message.tool_calls) == 2
        await client.teardown()

    run(scenario())
    assert chat_renderer("meta-llama/Llama-3.2-1B-Instruct").end_of_call() == ()
    for name in ("deepseek-ai/DeepSeek-V3", "generic without mark tokens", "thinkingmachines/Inkling"):
        with pytest.raises(ConfigError, match="parallel_tool_calls is false"):
            chat_renderer(name).end_of_call()


def test_a_conversation_over_an_update_and_the_next_turn_is_token_exact() -> None:
    said = "<think>\nhm\n</think>\n\n" + hermes("look_up", ARGUMENTS) + "<|im_end|>"
    renderer = chat_renderer(QWEN)
    first_prompt = renderer.render(ASK, TOOLS)
    answer = encode(QWEN, said)

    starts = [len(first_prompt)]  # of the responses, in the order asked for

    def next_token(tokens: Sequence[int], _: int) -> int:
        return answer[len(tokens) - starts[-1]]

    async def scenario() -> None:
        engine = ScriptedEngine(next_token)
        client = InferenceEngineClient([engine], chat_tokenizer(QWEN), QWEN)
        chat, session = ChatService(client, renderer), Session("s", renderer)
        await publish(client, 0)
        turn = asyncio.create_task(chat.complete(ChatRequest(ASK, tools=tuple(TOOLS)), session))
        await settle()
        engine.tick(len(answer) // 2)
        await settle()
        await publish(client, 1)
        await settle()
        while not turn.done():
            engine.tick()
            await settle()
        (choice,) = (await turn).choices
        assert choice.message.tool_calls[0].name == "look_up" and choice.message.reasoning_content == "hm"
        assert choice.generation.token_ids == answer and choice.generation.segments == 2
        assert set(choice.generation.versions) == {0, 1}

        result = {"role": "tool", "content": "sunny", "tool_call_id": choice.message.tool_calls[0].id}
        messages = (*ASK, choice.message.to_openai(), result)
        prompt, reused = await chat.prompt(ChatRequest(messages, tools=tuple(TOOLS)), session)
        assert prompt[:reused] == first_prompt + answer and reused == len(first_prompt) + len(answer)
        assert "sunny" in chat_tokenizer(QWEN).decode(prompt[reused:])
        starts.append(len(prompt))
        events = chat.stream(ChatRequest(messages, tools=tuple(TOOLS)), session)
        reading = asyncio.create_task(collect(events))
        while not reading.done():
            await settle()
            engine.tick()
        last = (await reading)[-1].choice
        assert last is not None and last.message.tool_calls[0].id != choice.message.tool_calls[0].id
        statistics = session.statistics()
        assert (statistics.turns, statistics.branches, statistics.drifted_turns) == (2, 1, 0)
        assert statistics.sampled_tokens == 2 * len(answer)
        await client.teardown()

    run(scenario())


async def publish(client: InferenceEngineClient, version: int) -> None:
    await client.receive_weights(scripted_update(version))
    await client.load_weights(scripted_update(version), PauseMode.ABORT)
