"""Thirteen client libraries with their defaults against an endpoint.

    python battery_clients.py LIBRARY URL KEY    runs the library's cases; prints ``RESULT`` and JSON per case, with error or null

It runs in an environment that has the library, and imports nothing of this project. The model behind the URL
(``battery_model.py``) calls ``get_weather`` if it is given, then says ``ANSWER``.
"""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import sys
from functools import partial
from importlib.metadata import version
from typing import Any

from pydantic import BaseModel

ANSWER = "It is sunny in Paris."
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CASES = ("plain", "stream", "tools", "forced", "schema")
PACKAGES = {
    "openai": "openai",
    "anthropic": "anthropic",
    "langchain": "langchain-openai",
    "litellm": "litellm",
    "pydantic-ai": "pydantic-ai-slim",
    "smolagents": "smolagents",
    "autogen": "autogen-agentchat",
    "dspy": "dspy",
    "instructor": "instructor",
    "openai-agents": "openai-agents",
    "agno": "agno",
    "haystack": "haystack-ai",
    "llama-index": "llama-index-llms-openai-like",
}
SCHEMA = {
    "type": "object",
    "properties": {"city": {"type": "string"}},
    "required": ["city"],
    "additionalProperties": False,
}
FUNCTION = {"name": "get_weather", "description": "Return the weather in a city.", "parameters": SCHEMA}
TOOL: Any = {"type": "function", "function": FUNCTION}


class Report(BaseModel):
    city: str
    degrees: int


cities: list[str] = []


def get_weather(city: str) -> str:
    """Return the weather in a city.

    Args:
        city: the name of the city
    """
    cities.append(city)
    return "sunny"


def check_answer(text: str | None) -> None:
    assert text == ANSWER, f"answer: {text!r}"


def check_loop(text: str | None) -> None:
    check_answer(text)
    assert cities == ["Paris"], f"calls: {cities}"


def check_call(name: str, arguments: str | dict[str, Any]) -> None:
    read = json.loads(arguments) if isinstance(arguments, str) else arguments
    assert name == "get_weather" and isinstance(read["city"], str), f"call: {name} {arguments}"


class OpenAI:
    def __init__(self, url: str, key: str) -> None:
        import openai

        self.client = openai.OpenAI()

    def plain(self) -> None:
        check_answer(self.client.chat.completions.create(model="policy", messages=MESSAGES).choices[0].message.content)
        check_answer(self.client.responses.create(model="policy", input=QUESTION).output_text)

    def stream(self) -> None:
        chunks = self.client.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
        check_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        with self.client.responses.stream(model="policy", input=QUESTION) as events:
            check_answer(events.get_final_response().output_text)

    def tools(self) -> None:
        messages = list(MESSAGES)
        message = (
            self.client.chat.completions.create(model="policy", messages=messages, tools=[TOOL]).choices[0].message
        )
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        check_loop(
            self.client.chat.completions.create(model="policy", messages=messages, tools=[TOOL])
            .choices[0]
            .message.content
        )

    def forced(self) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            answer = self.client.chat.completions.create(
                model="policy", messages=MESSAGES, tools=[TOOL], tool_choice=choice
            )
            (call,) = answer.choices[0].message.tool_calls
            check_call(call.function.name, call.function.arguments)

    def schema(self) -> None:
        answer = self.client.chat.completions.parse(model="policy", messages=MESSAGES, response_format=Report)
        assert isinstance(answer.choices[0].message.parsed, Report)
        parsed = self.client.responses.parse(model="policy", input=QUESTION, text_format=Report)
        assert isinstance(parsed.output_parsed, Report)


class Anthropic:
    def __init__(self, url: str, key: str) -> None:
        import anthropic

        self.client = anthropic.Anthropic()
        self.ask: dict[str, Any] = {"model": "policy", "max_tokens": 200, "messages": MESSAGES}
        self.tool = {"name": "get_weather", "description": "Return the weather in a city.", "input_schema": SCHEMA}

    def plain(self) -> None:
        check_answer(self.client.messages.create(**self.ask).content[0].text)

    def stream(self) -> None:
        with self.client.messages.stream(**self.ask) as events:
            check_answer("".join(events.text_stream))

    def tools(self) -> None:
        from anthropic import beta_tool

        final = self.client.beta.messages.tool_runner(**self.ask, tools=[beta_tool(get_weather)]).until_done()
        check_loop(final.content[0].text)

    def forced(self) -> None:
        for choice in ({"type": "any"}, {"type": "tool", "name": "get_weather"}):
            (call,) = self.client.messages.create(**self.ask, tools=[self.tool], tool_choice=choice).content
            check_call(call.name, call.input)

    def schema(self) -> None:
        assert isinstance(self.client.messages.parse(**self.ask, output_format=Report).parsed_output, Report)


class LangChain:
    def __init__(self, url: str, key: str) -> None:
        from langchain_openai import ChatOpenAI

        self.model = ChatOpenAI(model="policy")

    def plain(self) -> None:
        check_answer(self.model.invoke(QUESTION).content)

    def stream(self) -> None:
        check_answer("".join(chunk.content for chunk in self.model.stream(QUESTION)))

    def tools(self) -> None:
        from langchain.agents import create_agent

        check_loop(create_agent(self.model, [get_weather]).invoke({"messages": MESSAGES})["messages"][-1].content)

    def forced(self) -> None:
        (call,) = self.model.bind_tools([get_weather], tool_choice="any").invoke(QUESTION).tool_calls
        check_call(call["name"], call["args"])

    def schema(self) -> None:
        for options in ({}, {"method": "function_calling"}):
            assert isinstance(self.model.with_structured_output(Report, **options).invoke(QUESTION), Report)


class LiteLLM:
    def __init__(self, url: str, key: str) -> None:
        import litellm

        self.completion = lambda **fields: litellm.completion(model="openai/policy", messages=MESSAGES, **fields)

    def plain(self) -> None:
        check_answer(self.completion().choices[0].message.content)

    def stream(self) -> None:
        check_answer("".join(chunk.choices[0].delta.content or "" for chunk in self.completion(stream=True)))

    def tools(self) -> None:
        import litellm

        message = self.completion(tools=[TOOL]).choices[0].message
        (call,) = message.tool_calls
        result = {
            "role": "tool",
            "tool_call_id": call.id,
            "content": get_weather(**json.loads(call.function.arguments)),
        }
        answer = litellm.completion(model="openai/policy", messages=[*MESSAGES, message, result], tools=[TOOL])
        check_loop(answer.choices[0].message.content)

    def forced(self) -> None:
        (call,) = self.completion(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)

    def schema(self) -> None:
        Report.model_validate_json(self.completion(response_format=Report).choices[0].message.content)


class PydanticAI:
    def __init__(self, url: str, key: str) -> None:
        from pydantic_ai import Agent
        from pydantic_ai.models.openai import OpenAIChatModel

        self.agent, self.model = Agent, OpenAIChatModel("policy")

    def plain(self) -> None:
        check_answer(self.agent(self.model).run_sync(QUESTION).output)

    async def stream(self) -> None:
        async with self.agent(self.model).run_stream(QUESTION) as result:
            check_answer(await result.get_output())

    def tools(self) -> None:
        check_loop(self.agent(self.model, tools=[get_weather]).run_sync(QUESTION).output)

    def forced(self) -> None:
        """The output is a forced call, as by default."""
        assert isinstance(self.agent(self.model, output_type=Report).run_sync(QUESTION).output, Report)

    def schema(self) -> None:
        from pydantic_ai import NativeOutput

        agent = self.agent(self.model, output_type=NativeOutput(Report))
        assert isinstance(agent.run_sync(QUESTION).output, Report)


class Smolagents:
    def __init__(self, url: str, key: str) -> None:
        from smolagents import OpenAIModel

        self.model = OpenAIModel("policy", api_base=url, api_key=key)

    def plain(self) -> None:
        check_answer(self.model.generate(MESSAGES).content)

    def stream(self) -> None:
        check_answer("".join(delta.content or "" for delta in self.model.generate_stream(MESSAGES)))

    def forced(self) -> None:
        """Each step of the agent is a forced call, as by default: of the tool or of ``final_answer``."""
        from smolagents import ToolCallingAgent, tool

        agent = ToolCallingAgent([tool(get_weather)], self.model, verbosity_level=-1, max_steps=1)
        assert isinstance(agent.run(QUESTION), str)
        assert agent.memory.steps[1].tool_calls, "no call"

    def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "report", "schema": Report.model_json_schema()}}
        Report.model_validate_json(self.model.generate(MESSAGES, response_format=form).content)


class AutoGen:
    def __init__(self, url: str, key: str) -> None:
        from autogen_agentchat.agents import AssistantAgent
        from autogen_ext.models.openai import OpenAIChatCompletionClient

        known = {
            "vision": False,
            "function_calling": True,
            "json_output": True,
            "structured_output": True,
            "family": "unknown",
        }
        self.client, self.agent = OpenAIChatCompletionClient(model="policy", model_info=known), AssistantAgent

    async def plain(self) -> None:
        check_answer((await self.agent("assistant", self.client).run(task=QUESTION)).messages[-1].content)

    async def stream(self) -> None:
        from autogen_core.models import UserMessage

        parts = [part async for part in self.client.create_stream([UserMessage(content=QUESTION, source="user")])]
        check_answer("".join(part for part in parts if isinstance(part, str)))

    async def tools(self) -> None:
        agent = self.agent("assistant", self.client, tools=[get_weather], reflect_on_tool_use=True)
        check_loop((await agent.run(task=QUESTION)).messages[-1].content)

    async def forced(self) -> None:
        from autogen_core.models import UserMessage
        from autogen_core.tools import FunctionTool

        tool = FunctionTool(get_weather, description="Return the weather in a city.")
        message = UserMessage(content=QUESTION, source="user")
        (call,) = (await self.client.create([message], tools=[tool], tool_choice="required")).content
        check_call(call.name, call.arguments)

    async def schema(self) -> None:
        agent = self.agent("assistant", self.client, output_content_type=Report)
        assert isinstance((await agent.run(task=QUESTION)).messages[-1].content, Report)


class DSPy:
    def __init__(self, url: str, key: str) -> None:
        import dspy

        self.dspy = dspy
        dspy.configure(lm=dspy.LM("openai/policy", cache=False))

    def plain(self) -> None:
        check_answer(self.dspy.settings.lm(QUESTION)[0])
        check_answer(self.dspy.Predict("question -> answer")(question=QUESTION).answer)


class Instructor:
    def __init__(self, url: str, key: str) -> None:
        import instructor
        import openai

        self.instructor, self.openai = instructor, openai.OpenAI()

    def create(self, *mode: Any, **options: Any) -> Any:
        return self.instructor.from_openai(self.openai, *mode).chat.completions.create(
            model="policy", messages=MESSAGES, response_model=Report, **options
        )

    def stream(self) -> None:
        *_, last = self.instructor.from_openai(self.openai).chat.completions.create_partial(
            model="policy", messages=MESSAGES, response_model=Report
        )
        Report.model_validate(last.model_dump())

    def forced(self) -> None:
        assert isinstance(self.create(), Report)

    def schema(self) -> None:
        assert isinstance(self.create(self.instructor.Mode.JSON_SCHEMA), Report)


class OpenAIAgents:
    def __init__(self, url: str, key: str) -> None:
        import agents

        agents.set_tracing_disabled(True)
        self.agents = agents

    async def run(self, **options: Any) -> Any:
        agent = self.agents.Agent("assistant", model="policy", **options)
        return (await self.agents.Runner.run(agent, QUESTION)).final_output

    async def plain(self) -> None:
        check_answer(await self.run())

    async def stream(self) -> None:
        result = self.agents.Runner.run_streamed(self.agents.Agent("assistant", model="policy"), QUESTION)
        async for _ in result.stream_events():
            pass
        check_answer(result.final_output)

    async def tools(self) -> None:
        check_loop(await self.run(tools=[self.agents.function_tool(get_weather)]))

    async def forced(self) -> None:
        settings = self.agents.ModelSettings(tool_choice="required")
        check_answer(await self.run(tools=[self.agents.function_tool(get_weather)], model_settings=settings))
        assert len(cities) == 1, f"calls: {cities}"

    async def schema(self) -> None:
        assert isinstance(await self.run(output_type=Report), Report)


class Agno:
    def __init__(self, url: str, key: str) -> None:
        from agno.agent import Agent
        from agno.models.openai.like import OpenAILike

        self.agent = lambda **options: Agent(
            model=OpenAILike(id="policy", base_url=url, api_key=key), telemetry=False, **options
        )

    def plain(self) -> None:
        check_answer(self.agent().run(QUESTION).content)

    def stream(self) -> None:
        check_answer("".join(event.content or "" for event in self.agent().run(QUESTION, stream=True)))

    def tools(self) -> None:
        check_loop(self.agent(tools=[get_weather]).run(QUESTION).content)

    def forced(self) -> None:
        from agno.tools import tool

        named = {"type": "function", "function": {"name": "get_weather"}}
        self.agent(tools=[tool(stop_after_tool_call=True)(get_weather)], tool_choice=named).run(QUESTION)
        assert len(cities) == 1, f"calls: {cities}"

    def schema(self) -> None:
        assert isinstance(self.agent(output_schema=Report).run(QUESTION).content, Report)


class Haystack:
    def __init__(self, url: str, key: str) -> None:
        from haystack.components.generators.chat import OpenAIChatGenerator
        from haystack.dataclasses import ChatMessage
        from haystack.tools import Tool

        self.generator = lambda **options: OpenAIChatGenerator(model="policy", **options)
        self.messages = [ChatMessage.from_user(QUESTION)]
        self.tool = Tool(name="get_weather", description="Return the weather.", parameters=SCHEMA, function=get_weather)

    def plain(self) -> None:
        check_answer(self.generator().run(self.messages)["replies"][0].text)

    def stream(self) -> None:
        parts: list[str] = []
        self.generator(streaming_callback=lambda chunk: parts.append(chunk.content or "")).run(self.messages)
        check_answer("".join(parts))

    def tools(self) -> None:
        from haystack.components.agents import Agent

        check_loop(Agent(chat_generator=self.generator(), tools=[self.tool]).run(self.messages)["messages"][-1].text)

    def forced(self) -> None:
        generator = self.generator(tools=[self.tool], generation_kwargs={"tool_choice": "required"})
        (call,) = generator.run(self.messages)["replies"][0].tool_calls
        check_call(call.tool_name, call.arguments)

    def schema(self) -> None:
        generator = self.generator(generation_kwargs={"response_format": Report})
        Report.model_validate_json(generator.run(self.messages)["replies"][0].text)


class LlamaIndex:
    def __init__(self, url: str, key: str) -> None:
        from llama_index.llms.openai_like import OpenAILike

        self.model = OpenAILike(
            model="policy", api_base=url, api_key=key, is_chat_model=True, is_function_calling_model=True
        )

    def plain(self) -> None:
        from llama_index.core.llms import ChatMessage

        check_answer(self.model.chat([ChatMessage(QUESTION)]).message.content)

    def stream(self) -> None:
        from llama_index.core.llms import ChatMessage

        check_answer("".join(part.delta or "" for part in self.model.stream_chat([ChatMessage(QUESTION)])))

    async def tools(self) -> None:
        from llama_index.core.agent.workflow import FunctionAgent

        check_loop(str(await FunctionAgent(tools=[get_weather], llm=self.model).run(QUESTION)))

    def forced(self) -> None:
        """The structured output is a forced call, as by default."""
        from llama_index.core.prompts import PromptTemplate

        assert isinstance(self.model.structured_predict(Report, PromptTemplate(QUESTION)), Report)

    def schema(self) -> None:
        form = {"type": "json_schema", "json_schema": {"name": "report", "schema": Report.model_json_schema()}}
        from llama_index.core.llms import ChatMessage

        Report.model_validate_json(self.model.chat([ChatMessage(QUESTION)], response_format=form).message.content)


LIBRARIES = dict(
    zip(
        PACKAGES,
        (OpenAI, Anthropic, LangChain, LiteLLM, PydanticAI, Smolagents, AutoGen, DSPy, Instructor, OpenAIAgents, Agno, Haystack,
         LlamaIndex),
        strict=True,
    )
)  # fmt: skip


def main(library: str, url: str, key: str) -> None:
    os.environ.update(
        OPENAI_BASE_URL=url, OPENAI_API_BASE=url, OPENAI_API_KEY=key,
        ANTHROPIC_BASE_URL=url.removesuffix("/v1"), ANTHROPIC_API_KEY=key,
        HAYSTACK_TELEMETRY_ENABLED="False", LITELLM_LOCAL_MODEL_COST_MAP="True", AGNO_TELEMETRY="false",
    )  # fmt: skip
    client = LIBRARIES[library](url, key)
    with asyncio.Runner() as runner:  # one loop for all cases, because clients keep connections
        for case in filter(partial(hasattr, client), CASES):
            cities.clear()
            error = None
            try:
                method = getattr(client, case)
                runner.run(method()) if inspect.iscoroutinefunction(method) else method()
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"[:600]
            # Its own mark, because some libraries write to standard output.
            result = {"library": library, "version": version(PACKAGES[library]), "case": case, "error": error}
            print("RESULT " + json.dumps(result), flush=True)


if __name__ == "__main__":
    main(*sys.argv[1:])
