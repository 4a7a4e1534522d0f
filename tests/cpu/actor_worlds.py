"""A generator that does as it is told, and a way to a host that needs no Ray. Imports little: it also runs in actors."""

from __future__ import annotations

import asyncio
import os
import pickle
from collections.abc import Callable
from typing import Any

from rollout_worlds import output_of

from skyrl_train.errors import EngineError, NoEngineError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.remote.host import GeneratorHost
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.requests import GenerationRequest
from skyrl_train.types import BatchMetadata, GeneratorInput, GeneratorOutput, TrajectoryID
from skyrl_train.workers.connection import OnGone, OnMessages, StartError, WorkerLink
from skyrl_train.workers.host import host_peer
from skyrl_train.workers.messages import Message

said: list[str] = []  # by the generators of this process


def told(order: str, seed: int = 3) -> GeneratorInput:
    """An input that is an order."""
    return GeneratorInput(
        prompts=[[{"role": "user", "content": "12"}]],
        env_classes=["none"],
        env_extras=[{"order": order}],
        sampling_params={"max_tokens": 40, "ignore_eos": True},
        trajectory_ids=[TrajectoryID("p", 0)],
        batch_metadata=BatchMetadata(1, "train", (seed,)),
    )


class Obeying(GeneratorInterface):
    """Obeys the order in its input, and returns the answer; only a trainer would reject that."""

    def __init__(self, client: RequestClient, mark: str = "") -> None:
        if mark == "refuse":
            raise ValueError("it was told to refuse")
        self._client = client
        self._may_begin: Callable[[], bool] = lambda: True

    async def start(self) -> None:
        said.append("start")

    def pace(self, may_begin: Callable[[], bool]) -> None:
        said.append("pace")
        self._may_begin = may_begin

    async def aclose(self) -> None:
        said.append("aclose")

    async def generate(self, input_batch: GeneratorInput) -> Any:
        (order, prompt), client = (input_batch["env_extras"][0]["order"], input_batch["prompts"][0]), self._client
        (seed,) = input_batch["batch_metadata"].seeds
        params = {**(input_batch["sampling_params"] or {}), "seed": seed}
        match order:
            case "generate":
                return await client.generate({"prompts": [prompt], "sampling_params": {**params, "n": 2}})
            case "chat" | "text":
                body = {"model": "policy", "max_tokens": 9, "seed": seed, "return_token_ids": True}
                if order == "chat":
                    answer = await client.chat_completion({"json": {**body, "messages": prompt}})
                else:
                    answer = await client.completion({"json": {**body, "prompt": "12"}})
                return answer["choices"]
            case "stream":
                chunks = client.stream(GenerationRequest([3, 4], SamplingParams.parse(params)))
                return [token async for chunk in chunks for token in chunk.token_ids]
            case "leave a stream":
                chunks = client.stream(GenerationRequest([3, 4], SamplingParams(max_tokens=4000, ignore_eos=True)))
                await anext(chunks)
                await chunks.aclose()
                return "left"
            case "look":
                return client.policy_version, client.capabilities, dict(client.engine_states), self._may_begin()
            case "record":
                ended = client.events.now()
                client.events.detail("tool", "p@4_1", {"names": ["search"], "t0": ended - 1.0, "t1": ended})
                times = {"t0": ended - 0.25, "t1": ended}
                client.events.detail("environment", "p@4_1", {"name": "game", "call": "step", **times, "ok": False})
                return "recorded"
            case "where":
                return os.getpid()
            case "too long":
                return await client.generate({"prompt_token_ids": [[3] * 5000], "sampling_params": params})
            case "sample for ever":
                try:
                    await client.generate(
                        {"prompt_token_ids": [[3]], "sampling_params": {**params, "max_tokens": 4000}}
                    )
                finally:
                    await asyncio.sleep(0)
                    said.append("cleaned up")
            case "raise":
                raise ValueError("scripted")
            case "end the program":
                raise SystemExit(3)
            case "engine":
                raise EngineError("scripted")
            case "no engine":
                raise NoEngineError("scripted")
            case "cancel itself":
                raise asyncio.CancelledError
            case "unpicklable":
                return lambda: None
        raise AssertionError(order)


class Sampling(GeneratorInterface):
    """Samples a response, and returns the same group for any."""

    def __init__(self, client: RequestClient) -> None:
        self._client = client

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        (session, *_), (seed, *_) = input_batch["trajectory_ids"], input_batch["batch_metadata"].seeds
        await self._client.generate(
            {
                "prompt_token_ids": [[3, 4]],
                "sampling_params": {"max_tokens": 6, "ignore_eos": True, "seed": seed},
                "session_ids": [session.to_string()],
            }
        )
        return output_of(input_batch, version=0)


class Beside(WorkerLink):
    """A host in this process. What crosses the border is pickled, as by Ray."""

    refuses = False  # all of them: there is no room
    may_start: asyncio.Event | None = None  # all of them: starting takes until then

    def __init__(self) -> None:
        self.hosted = GeneratorHost()
        self._peer = host_peer(self.hosted, self._transmit)
        self._killed = False

    async def start(self, on_messages: OnMessages, on_gone: OnGone) -> None:
        self._on_messages, self._on_gone = on_messages, on_gone
        if self.may_start is not None:
            await self.may_start.wait()
        if self.refuses:
            raise StartError("there is no room")

    def send(self, messages: list[Message]) -> None:
        asyncio.get_running_loop().call_soon(self._peer.deliver, _copied(messages))

    async def stop(self, graceful: bool) -> None:
        if graceful:
            await self._peer.end("its driver stops it")
            await self.hosted.stop()

    def kill(self) -> None:
        self._killed = True
        self._on_gone("it was killed")

    def _transmit(self, messages: list[Message]) -> None:
        if not self._killed:
            asyncio.get_running_loop().call_soon(self._on_messages, _copied(messages))


def _copied(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))
