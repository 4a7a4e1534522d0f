"""Thirteen client libraries with their defaults against an endpoint.

    python battery_clients.py LIBRARY URL KEY    runs the library's cases; prints ``RESULT`` and JSON per case, with error or null
    python battery_clients.py LIBRARY            one rollout of a run that trains: runs the case of ``TRAINED``, prints the reward

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
from pathlib import Path
from random import Random
from typing import Any

from pydantic import BaseModel

ANSWER = "It is sunny in Paris."
QUESTION = "What is the weather in Paris?"
MESSAGES: list[Any] = [{"role": "user", "content": QUESTION}]
CASES = (
    "plain", "stream", "tools", "tools_stream", "forced", "forced_stream", "schema", "schema_stream", "tools_schema", "example",
    "example_stream",
)  # fmt: skip
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


def check_report(report: object) -> None:
    assert isinstance(report, Report), f"report: {report!r}"


def check_loop_with_report(report: object) -> None:
    check_report(report)
    assert cities, "no call"


class OpenAI:
    def __init__(self, url: str, key: str) -> None:
        import openai

        self.client = openai.OpenAI()
        self.strict: Any = {"type": "function", "function": {**FUNCTION, "strict": True}}

    def loop(self, ask: Any) -> Any:
        """Answer the call in the message that ``ask`` returns, and return the next message."""
        messages = list(MESSAGES)
        message = ask(messages)
        for call in message.tool_calls:
            result = get_weather(**json.loads(call.function.arguments))
            messages += [message, {"role": "tool", "tool_call_id": call.id, "content": result}]
        return ask(messages)

    def streamed(self, messages: list[Any] = MESSAGES, **fields: Any) -> Any:
        with self.client.chat.completions.stream(model="policy", messages=messages, **fields) as events:
            return events.get_final_completion().choices[0].message

    def plain(self) -> None:
        check_answer(self.client.chat.completions.create(model="policy", messages=MESSAGES).choices[0].message.content)
        check_answer(self.client.responses.create(model="policy", input=QUESTION).output_text)

    def stream(self) -> None:
        chunks = self.client.chat.completions.create(model="policy", messages=MESSAGES, stream=True)
        check_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks))
        with self.client.responses.stream(model="policy", input=QUESTION) as events:
            check_answer(events.get_final_response().output_text)

    def tools(self) -> None:
        create = self.client.chat.completions.create
        answer = self.loop(lambda said: create(model="policy", messages=said, tools=[TOOL]).choices[0].message)
        check_loop(answer.content)

    def tools_stream(self) -> None:
        check_loop(self.loop(lambda messages: self.streamed(messages, tools=[self.strict])).content)

    def forced(self) -> None:
        for choice in ("required", {"type": "function", "function": {"name": "get_weather"}}):
            answer = self.client.chat.completions.create(
                model="policy", messages=MESSAGES, tools=[TOOL], tool_choice=choice
            )
            (call,) = answer.choices[0].message.tool_calls
            check_call(call.function.name, call.function.arguments)

    def forced_stream(self) -> None:
        (call,) = self.streamed(tools=[self.strict], tool_choice="required").tool_calls
        check_call(call.function.name, call.function.arguments)
        flat = {"type": "function", **FUNCTION, "strict": True}
        with self.client.responses.stream(
            model="policy", input=QUESTION, tools=[flat], tool_choice="required"
        ) as events:
            (item,) = events.get_final_response().output
        check_call(item.name, item.arguments)

    def schema(self) -> None:
        answer = self.client.chat.completions.parse(model="policy", messages=MESSAGES, response_format=Report)
        assert isinstance(answer.choices[0].message.parsed, Report)
        parsed = self.client.responses.parse(model="policy", input=QUESTION, text_format=Report)
        assert isinstance(parsed.output_parsed, Report)

    def schema_stream(self) -> None:
        check_report(self.streamed(response_format=Report).parsed)
        with self.client.responses.stream(model="policy", input=QUESTION, text_format=Report) as events:
            check_report(events.get_final_response().output_parsed)

    def tools_schema(self) -> None:
        parse = self.client.chat.completions.parse
        fields: Any = {"model": "policy", "tools": [self.strict], "response_format": Report}
        check_loop_with_report(self.loop(lambda said: parse(messages=said, **fields).choices[0].message).parsed)

    def example(self) -> None:
        """The second response is given the items of the first, and the result of its call."""
        flat = {"type": "function", **FUNCTION}
        fields: Any = {"model": "policy", "tools": [flat]}
        first = self.client.responses.create(input=QUESTION, **fields)
        (asked,) = first.output
        check_call(asked.name, asked.arguments)
        result = {"type": "function_call_output", "call_id": asked.call_id, "output": get_weather("Paris")}
        check_loop(self.client.responses.create(input=[*MESSAGES, asked, result], **fields).output_text)

    async def example_stream(self) -> None:
        """Many streams at once, read event by event."""
        import openai

        async def ask(client: openai.AsyncOpenAI) -> str:
            async with client.chat.completions.stream(model="policy", messages=MESSAGES) as events:
                return "".join([event.delta async for event in events if event.type == "content.delta"])

        async with openai.AsyncOpenAI() as client:
            for text in await asyncio.gather(*(ask(client) for _ in range(6))):
                check_answer(text)


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

    def tools_stream(self) -> None:
        from anthropic import beta_tool

        final: Any = None
        for events in self.client.beta.messages.tool_runner(**self.ask, tools=[beta_tool(get_weather)], stream=True):
            final = events.get_final_message()
        check_loop(final.content[0].text)

    def forced_stream(self) -> None:
        with self.client.messages.stream(**self.ask, tools=[self.tool], tool_choice={"type": "any"}) as events:
            (call,) = events.get_final_message().content
        check_call(call.name, call.input)

    def schema(self) -> None:
        check_report(self.client.messages.parse(**self.ask, output_format=Report).parsed_output)

    def schema_stream(self) -> None:
        with self.client.messages.stream(**self.ask, output_format=Report) as events:
            check_report(events.get_final_message().parsed_output)

    def tools_schema(self) -> None:
        from anthropic import beta_tool

        runner = self.client.beta.messages.tool_runner(**self.ask, tools=[beta_tool(get_weather)], output_format=Report)
        check_loop_with_report(runner.until_done().parsed_output)

    def example(self) -> None:
        """A tool loop by hand, in which the answer's blocks are sent back as they came."""
        ask = {**self.ask, "tools": [self.tool], "system": "Answer briefly."}
        said = self.client.messages.create(**ask)
        assert said.stop_reason == "tool_use", said.stop_reason
        (used,) = (block for block in said.content if block.type == "tool_use")
        result = {"type": "tool_result", "tool_use_id": used.id, "content": get_weather(**used.input)}
        messages = [*MESSAGES, {"role": "assistant", "content": said.content}, {"role": "user", "content": [result]}]
        check_loop(self.client.messages.create(**{**ask, "messages": messages}).content[0].text)

    async def example_stream(self) -> None:
        """Raw events of a stream with a tool."""
        import anthropic

        kinds, arguments = [], ""
        async with anthropic.AsyncAnthropic() as client:
            async for event in await client.messages.create(**self.ask, tools=[self.tool], stream=True):
                kinds.append(event.type)
                if event.type == "content_block_delta" and event.delta.type == "input_json_delta":
                    arguments += event.delta.partial_json
        check_call("get_weather", arguments)
        assert (kinds[0], kinds[-1]) == ("message_start", "message_stop"), kinds


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

    def tools_stream(self) -> None:
        from langchain.agents import create_agent

        agent, said = create_agent(self.model, [get_weather]), ""
        for chunk, at in agent.stream({"messages": MESSAGES}, stream_mode="messages"):
            said += str(chunk.content) if at["langgraph_node"] == "model" else ""
        check_loop(said)

    def forced_stream(self) -> None:
        first, *others = self.model.bind_tools([get_weather], tool_choice="any").stream(QUESTION)
        (call,) = sum(others, first).tool_calls
        check_call(call["name"], call["args"])

    def schema_stream(self) -> None:
        *_, last = self.model.with_structured_output(Report).stream(QUESTION)
        check_report(last)

    def tools_schema(self) -> None:
        """Each step is a forced call, as by default, which may be the report's at once."""
        from langchain.agents import create_agent

        agent = create_agent(self.model, [get_weather], response_format=Report)
        check_report(agent.invoke({"messages": MESSAGES})["structured_response"])

    def example(self) -> None:
        """An agent that remembers: two turns of one thread."""
        from langchain.agents import create_agent
        from langgraph.checkpoint.memory import InMemorySaver

        agent = create_agent(self.model, [get_weather], system_prompt="Be brief.", checkpointer=InMemorySaver())
        for _ in range(2):
            state = agent.invoke({"messages": MESSAGES}, {"configurable": {"thread_id": "1"}})
        check_loop(state["messages"][-1].content)

    async def example_stream(self) -> None:
        """A chain of prompt, model and parser, as a stream."""
        from langchain_core.output_parsers import StrOutputParser
        from langchain_core.prompts import ChatPromptTemplate

        chain = ChatPromptTemplate.from_messages([("system", "Be brief."), ("user", "{ask}")]) | self.model
        check_answer("".join([part async for part in (chain | StrOutputParser()).astream({"ask": QUESTION})]))


class LiteLLM:
    def __init__(self, url: str, key: str) -> None:
        import litellm

        self.completion = lambda messages=MESSAGES, **fields: litellm.completion(
            model="openai/policy", messages=messages, **fields
        )

    def plain(self) -> None:
        check_answer(self.completion().choices[0].message.content)

    def stream(self) -> None:
        check_answer("".join(chunk.choices[0].delta.content or "" for chunk in self.completion(stream=True)))

    def streamed(self, messages: list[Any] = MESSAGES, **fields: Any) -> Any:
        import litellm

        chunks = list(self.completion(messages, stream=True, **fields))
        return litellm.stream_chunk_builder(chunks, messages=messages).choices[0].message  # type: ignore[union-attr]

    def loop(self, ask: Any) -> str:
        """Answer the call in the message that ``ask`` returns, and return the text of the next message."""
        message = ask(MESSAGES)
        (call,) = message.tool_calls
        content = get_weather(**json.loads(call.function.arguments))
        return ask([*MESSAGES, message, {"role": "tool", "tool_call_id": call.id, "content": content}]).content

    def tools(self) -> None:
        check_loop(self.loop(lambda messages: self.completion(messages, tools=[TOOL]).choices[0].message))

    def tools_stream(self) -> None:
        check_loop(self.loop(lambda messages: self.streamed(messages, tools=[TOOL])))

    def forced(self) -> None:
        (call,) = self.completion(tools=[TOOL], tool_choice="required").choices[0].message.tool_calls
        check_call(call.function.name, call.function.arguments)

    def forced_stream(self) -> None:
        (call,) = self.streamed(tools=[TOOL], tool_choice="required").tool_calls
        check_call(call.function.name, call.function.arguments)

    def schema(self) -> None:
        Report.model_validate_json(self.completion(response_format=Report).choices[0].message.content)

    def schema_stream(self) -> None:
        Report.model_validate_json(self.streamed(response_format=Report).content)

    def tools_schema(self) -> None:
        fields: Any = {"tools": [TOOL], "response_format": Report}
        said = self.loop(lambda messages: self.completion(messages, **fields).choices[0].message)
        check_loop_with_report(Report.model_validate_json(said))

    async def example(self) -> None:
        """A router of two deployments, and many requests at once."""
        import litellm

        parameters = {"model": "openai/policy"}
        deployments: Any = [{"model_name": "weather", "litellm_params": parameters} for _ in range(2)]
        router = litellm.Router(model_list=deployments)
        answers = await asyncio.gather(*(router.acompletion(model="weather", messages=MESSAGES) for _ in range(4)))
        for answer in answers:
            check_answer(answer.choices[0].message.content)  # type: ignore[union-attr]

    async def example_stream(self) -> None:
        import litellm

        chunks = await litellm.acompletion(model="openai/policy", messages=MESSAGES, stream=True)
        check_answer("".join([chunk.choices[0].delta.content or "" async for chunk in chunks]))


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

    async def streamed(self, **options: Any) -> Any:
        async with self.agent(self.model, **options).run_stream(QUESTION) as result:
            async for _ in result.stream_output():
                pass
            return await result.get_output()

    async def tools_stream(self) -> None:
        check_loop(await self.streamed(tools=[get_weather]))

    def forced(self) -> None:
        """The output is a forced call, as by default."""
        check_report(self.agent(self.model, output_type=Report).run_sync(QUESTION).output)

    async def forced_stream(self) -> None:
        check_report(await self.streamed(output_type=Report))

    def schema(self) -> None:
        from pydantic_ai import NativeOutput

        check_report(self.agent(self.model, output_type=NativeOutput(Report)).run_sync(QUESTION).output)

    async def schema_stream(self) -> None:
        from pydantic_ai import NativeOutput

        check_report(await self.streamed(output_type=NativeOutput(Report)))

    def tools_schema(self) -> None:
        from pydantic_ai import NativeOutput

        # By default each step is a forced call, which may be the report's at once.
        check_report(self.agent(self.model, tools=[get_weather], output_type=Report).run_sync(QUESTION).output)
        agent = self.agent(self.model, tools=[get_weather], output_type=NativeOutput(Report))
        check_loop_with_report(agent.run_sync(QUESTION).output)

    def support(self) -> Any:
        """An agent of a bank: what it depends on, a tool that sees that, and an output with bounds."""
        from pydantic import Field
        from pydantic_ai import RunContext

        class Advice(BaseModel):
            text: str
            block_card: bool
            risk: int = Field(ge=0, le=10)

        agent = self.agent(
            self.model, deps_type=int, output_type=Advice, instructions="Judge the risk.", name="support"
        )

        def balance(context: RunContext[int], pending: bool) -> str:
            """Return the customer's balance.

            Args:
                pending: include what is not booked yet
            """
            return f"{context.deps} euros"

        balance.__annotations__["context"] = RunContext[int]  # the library looks for the name among those of the module
        agent.tool(balance)
        return agent

    def example(self) -> None:
        output = self.support().run_sync("I lost my card!", deps=12).output
        assert 0 <= output.risk <= 10 and isinstance(output.block_card, bool), output

    async def example_stream(self) -> None:
        async with self.support().run_stream("I lost my card!", deps=12) as result:
            async for _ in result.stream_output():
                pass
            assert 0 <= (await result.get_output()).risk <= 10


class Smolagents:
    def __init__(self, url: str, key: str) -> None:
        from smolagents import OpenAIModel

        self.model = OpenAIModel("policy", api_base=url, api_key=key)
        report = {"name": "report", "schema": Report.model_json_schema()}
        self.form = {"type": "json_schema", "json_schema": report}

    def plain(self) -> None:
        check_answer(self.model.generate(MESSAGES).content)

    def stream(self) -> None:
        check_answer("".join(delta.content or "" for delta in self.model.generate_stream(MESSAGES)))

    def forced(self, **options: Any) -> None:
        """Each step of the agent is a forced call, as by default: of the tool or of ``final_answer``."""
        from smolagents import ToolCallingAgent, tool

        agent = ToolCallingAgent([tool(get_weather)], self.model, verbosity_level=-1, max_steps=1, **options)
        assert isinstance(agent.run(QUESTION), str)
        step = agent.memory.steps[1]
        assert step.tool_calls, f"no call: {step.error}"

    def forced_stream(self) -> None:
        self.forced(stream_outputs=True)

    def schema(self) -> None:
        Report.model_validate_json(self.model.generate(MESSAGES, response_format=self.form).content)

    def schema_stream(self) -> None:
        parts = self.model.generate_stream(MESSAGES, response_format=self.form)
        Report.model_validate_json("".join(part.content or "" for part in parts))

    def tools_schema(self) -> None:
        """Each step of the agent is an object with its code."""
        from smolagents import CodeAgent, tool

        agent = CodeAgent(
            [tool(get_weather)], self.model, verbosity_level=-1, max_steps=1, use_structured_outputs_internally=True
        )
        agent.run(QUESTION)
        assert isinstance(json.loads(agent.memory.steps[1].model_output)["code"], str)

    def example(self, **options: Any) -> None:
        """A tool that is a class, and an agent that another one manages."""
        from smolagents import Tool, ToolCallingAgent

        class Altitude(Tool):
            name = "altitude"
            description = "Return the altitude of a city."
            inputs = {"city": {"type": "string", "description": "its name"}}  # noqa: RUF012
            output_type = "integer"

            def forward(self, city: str) -> int:
                return len(city)

        common: Any = {"model": self.model, "max_steps": 1, "verbosity_level": -1}
        helper = ToolCallingAgent([Altitude()], name="helper", description="Knows altitudes.", **common)
        agent = ToolCallingAgent([], managed_agents=[helper], **common)
        assert isinstance(agent.run(QUESTION), str)
        step = agent.memory.steps[1]
        assert step.tool_calls, f"no call: {step.error}"

    def example_stream(self) -> None:
        """The steps of an agent as they come."""
        from smolagents import FinalAnswerStep, ToolCallingAgent, tool

        agent = ToolCallingAgent([tool(get_weather)], self.model, max_steps=1, verbosity_level=-1, stream_outputs=True)
        *_, last = agent.run(QUESTION, stream=True)
        assert isinstance(last, FinalAnswerStep), last


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

    async def streamed(self, **options: Any) -> Any:
        agent = self.agent("assistant", self.client, model_client_stream=True, **options)
        *_, result = [item async for item in agent.run_stream(task=QUESTION)]
        return result.messages[-1].content  # type: ignore[union-attr]

    async def tools_stream(self) -> None:
        check_loop(await self.streamed(tools=[get_weather], reflect_on_tool_use=True))

    def forcing(self) -> dict[str, Any]:
        from autogen_core.models import UserMessage
        from autogen_core.tools import FunctionTool

        tool = FunctionTool(get_weather, description="Return the weather in a city.")
        message = UserMessage(content=QUESTION, source="user")
        return {"messages": [message], "tools": [tool], "tool_choice": "required"}

    async def forced(self) -> None:
        (call,) = (await self.client.create(**self.forcing())).content
        check_call(call.name, call.arguments)

    async def forced_stream(self) -> None:
        *_, result = [part async for part in self.client.create_stream(**self.forcing())]
        (call,) = result.content  # type: ignore[union-attr]
        check_call(call.name, call.arguments)

    async def schema(self) -> None:
        agent = self.agent("assistant", self.client, output_content_type=Report)
        check_report((await agent.run(task=QUESTION)).messages[-1].content)

    async def schema_stream(self) -> None:
        check_report(await self.streamed(output_content_type=Report))

    async def tools_schema(self) -> None:
        from autogen_core.tools import FunctionTool

        tool = FunctionTool(
            get_weather, description="Return the weather in a city.", strict=True
        )  # the client asks for it
        agent = self.agent("assistant", self.client, tools=[tool], output_content_type=Report)
        check_loop_with_report((await agent.run(task=QUESTION)).messages[-1].content)

    def team(self) -> Any:
        """Two agents that take turns."""
        from autogen_agentchat.conditions import MaxMessageTermination
        from autogen_agentchat.teams import RoundRobinGroupChat

        members = [self.agent(name, self.client, system_message="Be brief.") for name in ("writer", "critic")]
        return RoundRobinGroupChat(members, termination_condition=MaxMessageTermination(3))

    async def example(self) -> None:
        _, *answers = (await self.team().run(task=QUESTION)).messages
        assert [message.source for message in answers] == ["writer", "critic"]
        for message in answers:
            check_answer(message.content)

    async def example_stream(self) -> None:
        *_, result = [item async for item in self.team().run_stream(task=QUESTION)]
        check_answer(result.messages[-1].content)  # type: ignore[union-attr]


class DSPy:
    def __init__(self, url: str, key: str) -> None:
        import dspy

        self.dspy = dspy
        dspy.configure(lm=dspy.LM("openai/policy", cache=False))

    def plain(self) -> None:
        check_answer(self.dspy.settings.lm(QUESTION)[0])
        check_answer(self.dspy.Predict("question -> answer")(question=QUESTION).answer)

    async def stream(self) -> None:
        listener = self.dspy.streaming.StreamListener(signature_field_name="answer")
        predict = self.dspy.streamify(self.dspy.Predict("question -> answer"), stream_listeners=[listener])
        *_, last = [item async for item in predict(question=QUESTION)]
        check_answer(last.answer)

    def example(self) -> None:
        """A program of two steps, and some runs of it at once."""
        dspy = self.dspy

        class Twice(dspy.Module):  # type: ignore[name-defined,misc]
            def __init__(self) -> None:
                super().__init__()
                self.first, self.second = dspy.Predict("question -> answer"), dspy.Predict("question, draft -> answer")

            def forward(self, question: str) -> Any:
                return self.second(question=question, draft=self.first(question=question).answer)

        program = Twice()
        questions = [dspy.Example(question=QUESTION).with_inputs("question") for _ in range(3)]
        for result in program.batch(questions, num_threads=2, disable_progress_bar=True):
            check_answer(result.answer)


class Instructor:
    def __init__(self, url: str, key: str) -> None:
        import instructor
        import openai

        self.instructor, self.openai = instructor, openai.OpenAI()

    def create(self, *mode: Any, response_model: Any = Report, **options: Any) -> Any:
        return self.instructor.from_openai(self.openai, *mode).chat.completions.create(
            model="policy", messages=MESSAGES, response_model=response_model, **options
        )

    def partial(self, *mode: Any) -> None:
        *_, last = self.instructor.from_openai(self.openai, *mode).chat.completions.create_partial(
            model="policy", messages=MESSAGES, response_model=Report
        )
        Report.model_validate(last.model_dump())

    def plain(self) -> None:
        check_answer(self.create(response_model=None).choices[0].message.content)

    def stream(self) -> None:
        chunks = self.create(response_model=None, stream=True)
        check_answer("".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices))

    def tools(self) -> None:
        """The model decides which of several models it fills in."""
        from collections.abc import Iterable

        call = type("get_weather", (BaseModel,), {"__annotations__": {"city": str}})
        (filled,) = self.create(self.instructor.Mode.PARALLEL_TOOLS, response_model=Iterable[call])  # type: ignore[valid-type]
        assert filled.city == "Paris"

    def forced(self) -> None:
        check_report(self.create())

    def forced_stream(self) -> None:
        self.partial()

    def schema(self) -> None:
        check_report(self.create(self.instructor.Mode.JSON_SCHEMA))

    def schema_stream(self) -> None:
        self.partial(self.instructor.Mode.JSON_SCHEMA)

    def forecast(self) -> Any:
        """Nested models with classes and bounds."""
        from typing import Literal

        from pydantic import Field, create_model

        place = create_model("Place", city=(str, ...), sky=(Literal["clear", "cloudy"], ...))
        places = Field(min_length=1, max_length=3)
        return create_model("Forecast", places=(list[place], places), certainty=(int, Field(ge=0, le=9)))  # type: ignore[valid-type]

    def example(self) -> None:
        filled = self.create(response_model=self.forecast(), max_retries=2)
        assert 1 <= len(filled.places) <= 3 and 0 <= filled.certainty <= 9

    def example_stream(self) -> None:
        """The object as it grows."""
        forecast = self.forecast()
        *_, last = self.instructor.from_openai(self.openai).chat.completions.create_partial(
            model="policy", messages=MESSAGES, response_model=forecast
        )
        forecast.model_validate(last.model_dump())


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

    async def streamed(self, **options: Any) -> Any:
        result = self.agents.Runner.run_streamed(self.agents.Agent("assistant", model="policy", **options), QUESTION)
        async for _ in result.stream_events():
            pass
        return result.final_output

    async def stream(self) -> None:
        check_answer(await self.streamed())

    def tool(self) -> Any:
        return self.agents.function_tool(get_weather)

    async def tools(self) -> None:
        check_loop(await self.run(tools=[self.tool()]))

    async def tools_stream(self) -> None:
        check_loop(await self.streamed(tools=[self.tool()]))

    async def forced(self) -> None:
        settings = self.agents.ModelSettings(tool_choice="required")
        check_answer(await self.run(tools=[self.tool()], model_settings=settings))
        assert len(cities) == 1, f"calls: {cities}"

    async def forced_stream(self) -> None:
        settings = self.agents.ModelSettings(tool_choice="required")
        check_answer(await self.streamed(tools=[self.tool()], model_settings=settings))
        assert len(cities) == 1, f"calls: {cities}"

    async def schema(self) -> None:
        check_report(await self.run(output_type=Report))

    async def schema_stream(self) -> None:
        check_report(await self.streamed(output_type=Report))

    async def tools_schema(self) -> None:
        check_loop_with_report(await self.run(tools=[self.tool()], output_type=Report))

    def triage(self) -> Any:
        """An agent that hands over to one of two others."""
        others = [self.agents.Agent(name, model="policy", instructions="Be brief.") for name in ("weather", "sport")]
        forced = self.agents.ModelSettings(tool_choice="required")
        return self.agents.Agent("triage", model="policy", handoffs=others, model_settings=forced)

    async def example(self) -> None:
        result = await self.agents.Runner.run(self.triage(), QUESTION)
        assert result.last_agent.name in ("weather", "sport"), result.last_agent.name
        check_answer(result.final_output)

    async def example_stream(self) -> None:
        result = self.agents.Runner.run_streamed(self.triage(), QUESTION)
        events = [event async for event in result.stream_events()]
        names = [event.new_agent.name for event in events if event.type == "agent_updated_stream_event"]
        assert names[0] == "triage" and names[1] in ("weather", "sport"), names
        check_answer(result.final_output)


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

    def tools_stream(self) -> None:
        events = self.agent(tools=[get_weather]).run(QUESTION, stream=True)
        check_loop("".join(event.content or "" for event in events if event.event == "RunContent"))

    def forcing(self) -> Any:
        from agno.tools import tool

        named = {"type": "function", "function": {"name": "get_weather"}}
        return self.agent(tools=[tool(stop_after_tool_call=True)(get_weather)], tool_choice=named)

    def forced(self) -> None:
        self.forcing().run(QUESTION)
        assert len(cities) == 1, f"calls: {cities}"

    def forced_stream(self) -> None:
        for _ in self.forcing().run(QUESTION, stream=True):
            pass
        assert len(cities) == 1, f"calls: {cities}"

    def schema(self) -> None:
        check_report(self.agent(output_schema=Report).run(QUESTION).content)

    def schema_stream(self) -> None:
        *_, last = self.agent(output_schema=Report).run(QUESTION, stream=True, yield_run_output=True)
        check_report(last.content)

    def tools_schema(self) -> None:
        check_loop_with_report(self.agent(tools=[get_weather], output_schema=Report).run(QUESTION).content)

    def example(self) -> None:
        """An agent that remembers its session."""
        from agno.db.in_memory import InMemoryDb

        agent = self.agent(db=InMemoryDb(), add_history_to_context=True)
        for _ in range(2):
            check_answer(agent.run(QUESTION, session_id="1").content)
        assert len(agent.get_chat_history("1")) == 4

    async def example_stream(self) -> None:
        """Events of a run with a tool."""
        events = self.agent(tools=[get_weather]).arun(QUESTION, stream=True, stream_events=True)
        kinds = [event.event async for event in events]
        assert {"RunStarted", "ToolCallStarted", "ToolCallCompleted", "RunCompleted"} <= {*kinds}, kinds


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

    def loop(self, generator: Any, **options: Any) -> str:
        from haystack.components.agents import Agent

        return str(
            Agent(chat_generator=generator, tools=[self.tool], **options).run(self.messages)["messages"][-1].text
        )

    def tools(self) -> None:
        check_loop(self.loop(self.generator()))

    def tools_stream(self) -> None:
        check_loop(self.loop(self.generator(), streaming_callback=lambda chunk: None))

    def forced(self, **options: Any) -> None:
        generator = self.generator(tools=[self.tool], generation_kwargs={"tool_choice": "required"}, **options)
        (call,) = generator.run(self.messages)["replies"][0].tool_calls
        check_call(call.tool_name, call.arguments)

    def forced_stream(self) -> None:
        self.forced(streaming_callback=lambda chunk: None)

    def schema(self) -> None:
        generator = self.generator(generation_kwargs={"response_format": Report})
        Report.model_validate_json(generator.run(self.messages)["replies"][0].text)

    def form(self) -> dict[str, Any]:
        """A format that streams: the library's own takes no model there."""
        report = {"name": "report", "schema": Report.model_json_schema()}
        return {"response_format": {"type": "json_schema", "json_schema": report}}

    def schema_stream(self) -> None:
        generator = self.generator(generation_kwargs=self.form(), streaming_callback=lambda chunk: None)
        Report.model_validate_json(generator.run(self.messages)["replies"][0].text)

    def tools_schema(self) -> None:
        # The client asks for strict tools beside a format.
        said = self.loop(self.generator(generation_kwargs=self.form(), tools_strict=True))
        check_loop_with_report(Report.model_validate_json(said))

    def example(self, **options: Any) -> None:
        """A pipeline of a prompt's template and the model."""
        from haystack import Pipeline
        from haystack.components.builders import ChatPromptBuilder
        from haystack.dataclasses import ChatMessage

        pipeline = Pipeline()
        template = [ChatMessage.from_user("What is the weather in {{ city }}?")]
        pipeline.add_component("prompt", ChatPromptBuilder(template=template, required_variables=["city"]))
        pipeline.add_component("model", self.generator(**options))
        pipeline.connect("prompt.prompt", "model.messages")
        check_answer(pipeline.run({"prompt": {"city": "Paris"}})["model"]["replies"][0].text)

    def example_stream(self) -> None:
        self.example(streaming_callback=lambda chunk: None)


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

    async def run(self, **options: Any) -> Any:
        from llama_index.core.agent.workflow import FunctionAgent

        return await FunctionAgent(tools=[get_weather], llm=self.model, **options).run(QUESTION)

    async def tools(self) -> None:
        check_loop(str(await self.run(streaming=False)))

    async def tools_stream(self) -> None:
        check_loop(str(await self.run()))

    def forced(self) -> None:
        """The structured output is a forced call, as by default."""
        from llama_index.core.prompts import PromptTemplate

        check_report(self.model.structured_predict(Report, PromptTemplate(QUESTION)))

    def forced_stream(self) -> None:
        from llama_index.core.prompts import PromptTemplate

        # As a stream, the model decides about the call, and the script has only the city.
        *_, last = self.model.stream_structured_predict(Report, PromptTemplate(QUESTION))
        assert getattr(last, "city", None) == "Paris", f"streamed: {last!r}"

    def form(self) -> dict[str, Any]:
        report = {"name": "report", "schema": Report.model_json_schema()}
        return {"type": "json_schema", "json_schema": report}

    def schema(self) -> None:
        from llama_index.core.llms import ChatMessage

        answer = self.model.chat([ChatMessage(QUESTION)], response_format=self.form())
        Report.model_validate_json(answer.message.content)

    def schema_stream(self) -> None:
        from llama_index.core.llms import ChatMessage

        *_, last = self.model.stream_chat([ChatMessage(QUESTION)], response_format=self.form())
        Report.model_validate_json(last.message.content)

    async def tools_schema(self) -> None:
        """The loop ends, and a forced call makes an object of it, as by default."""
        check_loop_with_report((await self.run(output_cls=Report)).get_pydantic_model(Report))

    def example(self) -> None:
        """A conversation that the library keeps."""
        from llama_index.core.chat_engine import SimpleChatEngine

        engine = SimpleChatEngine.from_defaults(llm=self.model, system_prompt="Be brief.")
        for _ in range(2):
            check_answer(str(engine.chat(QUESTION)))
        assert len(engine.chat_history) == 4

    async def example_stream(self) -> None:
        """Events of an agent in a workflow."""
        from llama_index.core.agent.workflow import AgentStream, AgentWorkflow, ToolCallResult

        running = AgentWorkflow.from_tools_or_functions([get_weather], llm=self.model).run(user_msg=QUESTION)
        events = [event async for event in running.stream_events()]
        assert any(isinstance(event, ToolCallResult) for event in events), events
        check_loop([event for event in events if isinstance(event, AgentStream)][-1].response)


LIBRARIES = dict(
    zip(
        PACKAGES,
        (OpenAI, Anthropic, LangChain, LiteLLM, PydanticAI, Smolagents, AutoGen, DSPy, Instructor, OpenAIAgents, Agno, Haystack,
         LlamaIndex),
        strict=True,
    )
)  # fmt: skip


# The case that is an agent in its default configuration: forced calls in each of them.
TRAINED = {"langchain": "tools_schema", "pydantic-ai": "tools_schema", "smolagents": "forced", "instructor": "forced"}


def call(runner: asyncio.Runner, method: Any) -> None:
    result = method()
    if inspect.isawaitable(result):
        runner.run(result)  # type: ignore[arg-type]


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
                call(runner, getattr(client, case))
            except Exception as failure:
                error = f"{type(failure).__name__}: {failure}"[:600]
            # On a line of its own with its own mark, because some libraries write to standard output.
            result = {"library": library, "version": version(PACKAGES[library]), "case": case, "error": error}
            print("\nRESULT " + json.dumps(result), flush=True)


def rollout(library: str) -> None:
    """Run the agent on the variables that the harness has set. The reward is arbitrary, so that there is something to learn."""
    client = LIBRARIES[library](os.environ["OPENAI_BASE_URL"], os.environ["OPENAI_API_KEY"])
    with asyncio.Runner() as runner:
        call(runner, getattr(client, TRAINED[library]))
    print(Random(json.loads(Path(os.environ["SKYRL_PROMPT"]).read_text())["seed"]).random())


if __name__ == "__main__":
    (main if len(sys.argv) == 4 else rollout)(*sys.argv[1:])
