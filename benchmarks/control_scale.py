"""How many agents and engines one control process carries, from costs that are measured here.

    python benchmarks/control_scale.py [--agents 32] [--turns 6] [--vllm] [--engines 64] [--on-agents 1024]

First it measures processor time. Agents hold conversations of several turns through the real endpoint, sessions, client and Ray
actors; only the engines are modelled, and send their tokens in pieces as vLLM's do. Two lengths of responses give the cost
of a turn and of a token in each process, once with the endpoint in the control process and once with it in rollout actors.
``driver_cost.py`` gives the cost of a trajectory from admission to the minibatch. ``--vllm`` adds the front end of a real vLLM
on a CPU, which runs in a process or an actor of its engine, and what is left of it in the control process.

Then it simulates a cluster in virtual time: each agent alternates between its tool, the processes, each of which does one thing
at a time and takes the measured times, and an engine. Printed: turns and tokens per second, the part of the time that each kind
of process is busy, and the most agents with which none is busy for more than 60 %.
"""

from __future__ import annotations

import argparse
import asyncio
import dataclasses
import functools
import os
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import aclosing
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np

from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig, SamplingConfig
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.remote.generator import RemoteGenerator
from skyrl_train.generators.remote.host import ActorSetup, GeneratorHost
from skyrl_train.inference.client import KEPT_TOKENS, InferenceEngineClient
from skyrl_train.inference.engines.ray_engine import RayEngine
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams, TokenChunk
from skyrl_train.models.tiny import character_tokenizer
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.runtime.process import gc_tuned
from skyrl_train.simulation.clock import run_in_virtual_time
from skyrl_train.simulation.engine import TRANSPORT, EngineSpeed, ModelledEngine
from skyrl_train.types import BatchMetadata, GeneratorInput, PauseMode, TrajectoryID
from skyrl_train.weight_sync.update import WeightUpdate
from skyrl_train.workers.ray import RayLink, RayPlacement

FILE = Path(__file__).absolute()
TOKENS = (64, 512)  # of the responses from which costs are derived
STEP_S = 1e-4  # of the measured engines: their processor time counts, and not how long they take
ENGINES = 2
VERSION = WeightUpdate(0, TRANSPORT, "", 0, ())
BUSY = 0.6


class ChunkedEngine(ModelledEngine):
    """Sends its tokens in pieces, as vLLM does."""

    def __init__(self, speed: EngineSpeed) -> None:
        super().__init__(speed)
        self._capabilities = dataclasses.replace(self._capabilities, chunked_streaming=True, stop_strings=True)

    async def stream(self, engine_input: InferenceEngineInput) -> AsyncIterator[TokenChunk]:
        size = engine_input.get("chunk_tokens", 1)
        async with aclosing(super().stream(engine_input)) as whole:
            async for chunk in whole:
                for start in range(0, len(chunk.token_ids), size):
                    at, last = slice(start, start + size), start + size >= len(chunk.token_ids)
                    await asyncio.sleep(size * STEP_S)  # pieces that wait together would travel together
                    reason = chunk.stop_reason if last else None
                    yield TokenChunk(chunk.token_ids[at], chunk.logprobs[at], chunk.versions[at], reason)


async def converse(prompt: Any, base_url: str, api_key: str, extras: dict[str, int]) -> float:
    """Hold a conversation as an agent; its reward is the number of the process that it runs in."""
    messages = list(prompt)
    async with aiohttp.ClientSession(headers={"Authorization": f"Bearer {api_key}"}) as http:
        for _ in range(extras["turns"]):
            body = {"model": "policy", "messages": messages, "max_tokens": extras["tokens"]}
            async with http.post(f"{base_url}/chat/completions", json=body) as response:
                answer = await response.json()
            said = answer["choices"][0]["message"]["content"]
            messages += [{"role": "assistant", "content": said}, {"role": "user", "content": "and then"}]
    return float(os.getpid())


@dataclass(frozen=True)
class Costs:
    """Processor seconds in one process."""

    turn_s: float
    token_s: float

    @classmethod
    def of(cls, totals: Sequence[float], turns: int) -> Costs:
        """From the totals of two runs, which differ in the tokens of a response only."""
        token_s = max(0.0, (totals[1] - totals[0]) / turns / (TOKENS[1] - TOKENS[0]))
        return cls(max(0.0, totals[0] / turns - token_s * TOKENS[0]), token_s)

    def __str__(self) -> str:
        return f"{1e3 * self.turn_s:.2f} ms | {1e6 * self.token_s:.2f} us"


def processor_s(pids: set[int]) -> float:
    """Return the processor time that these processes have used, with all of their threads."""
    ticks = 0
    for pid in pids:
        fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        ticks += int(fields[11]) + int(fields[12])
    return ticks / os.sysconf("SC_CLK_TCK")


async def measured(agents: int, turns: int, actors: int) -> dict[str, Costs]:
    """Return the costs of a turn and of a token in the control process, in rollout actors, and in engines' actors."""
    tokenizer = character_tokenizer("abcdefghijklmnopqrstuvwxyz ")
    speed = EngineSpeed(slots=agents, step_s=STEP_S)
    engines = [RayEngine(f"{FILE}:ChunkedEngine", {"speed": speed}, RayPlacement(num_cpus=0)) for _ in range(ENGINES)]
    client = InferenceEngineClient(engines, tokenizer)
    await client.start()
    await client.load_weights(VERSION, PauseMode.KEEP)
    sampling = SamplingConfig(max_tokens=TOKENS[1], temperature=1.0)
    kwargs = {"agent": f"{FILE}:converse", "max_concurrency": agents}
    config = GeneratorConfig(name="harness", kwargs=kwargs, sampling_params=sampling)
    spec = GeneratorSpec(config, EnvironmentConfig(), "")
    generator: GeneratorInterface
    if actors:
        setup = ActorSetup(spec, tokenizer, str(Path.cwd()), tuple(sys.path))
        link = functools.partial(RayLink, GeneratorHost, RayPlacement(num_cpus=0))
        generator = RemoteGenerator([link] * actors, setup, client)
    else:
        generator = spec.build(client, tokenizer)
    await generator.start()
    own, of_engines = {os.getpid()}, {engine.pid for engine in engines if engine.pid is not None}
    of_actors: set[int] = set()
    totals: dict[str, list[float]] = {"control process": [], "rollout actors": [], "engine actors": []}
    try:
        for tokens in (TOKENS[0], *TOKENS):  # the first time warms everything up, and tells the actors' processes
            pids = dict(zip(totals, (own, of_actors, of_engines), strict=True))
            before = {name: processor_s(of) for name, of in pids.items()}
            batches = [generator.generate(conversation(agent, turns, tokens)) for agent in range(agents)]
            outputs = await gather_or_cancel(batches)
            if actors and not of_actors:
                of_actors |= {int(np.sum(reward)) for output in outputs for reward in output["rewards"]}
            else:
                for name, of in pids.items():
                    totals[name].append(processor_s(of) - before[name])
            if not actors and len(totals["control process"]) == 3:
                totals = {name: values[1:] for name, values in totals.items()}
    finally:
        await generator.aclose()
        await client.teardown()
    return {name: Costs.of(values, agents * turns) for name, values in totals.items()}


def conversation(agent: int, turns: int, tokens: int) -> GeneratorInput:
    return GeneratorInput(
        prompts=[[{"role": "user", "content": "tell me a story"}]],
        env_classes=["none"],
        env_extras=[{"turns": turns, "tokens": tokens}],
        sampling_params=None,
        trajectory_ids=[TrajectoryID(str(agent), 0)],
        batch_metadata=BatchMetadata(1, "train", (agent,)),
    )


async def vllm_token_s(hosted: bool, requests: int = 32, tokens: int = 256) -> float:
    """Return the processor seconds that a vLLM on a CPU takes from this process for a token, in the pieces of the client.

    Args:
        hosted: its front end has a process of its own, as in a run.
    """
    os.environ.setdefault("VLLM_LOGGING_LEVEL", "ERROR")
    from skyrl_train.config.schema import BuildModelConfig
    from skyrl_train.inference.engines.proxy import ProcessEngine
    from skyrl_train.models.tiny import build_model_folder

    with tempfile.TemporaryDirectory() as folder:
        build_model_folder(
            BuildModelConfig(hidden_size=128, num_heads=4, max_position_embeddings=512), Path(folder) / "m", 0
        )
        arguments = {"model_path": str(Path(folder) / "m"), "max_num_seqs": requests}
        path = "skyrl_train.inference.engines.vllm:VLLMEngine"
        engine = ProcessEngine(path, arguments) if hosted else import_name(path, "engine")(**arguments)
        await engine.start()
        try:

            async def one(seed: int) -> None:
                params = SamplingParams(max_tokens=tokens, ignore_eos=True, seed=seed)
                asked = InferenceEngineInput(
                    prompt_token_ids=[[3, 4]], sampling_params=params, chunk_tokens=KEPT_TOKENS
                )
                async with aclosing(engine.stream(asked)) as chunks:  # type: ignore[type-var]
                    async for _ in chunks:
                        pass

            await asyncio.gather(*map(one, range(requests)))
            began = time.process_time()
            await asyncio.gather(*map(one, range(requests)))
            return (time.process_time() - began) / (requests * tokens)
        finally:
            await engine.teardown()


# The simulation -------------------------------------------------------------------------------------------------------


# 7B in bfloat16, on paper: 15.2 GB read at 75 % of 3.35 TB/s in each step; a KV cache of 1,000 tokens for each request.
H100_7B = EngineSpeed(slots=256, step_s=6e-3, step_per_request_s=2.3e-5)


@dataclass(frozen=True)
class Load:
    """What agents do, and how fast engines are."""

    agents: int
    engines: int
    actors: int  # rollout actors; 0: the endpoint is in the control process
    tokens: int = 500  # of a turn
    turns: int = 3
    tool_s: float = 0.0
    speed: EngineSpeed = H100_7B


class Process:
    """Does one thing at a time."""

    def __init__(self) -> None:
        self.busy_s = 0.0
        self._turn = asyncio.Lock()

    async def work(self, seconds: float) -> None:
        async with self._turn:
            await asyncio.sleep(seconds)
        self.busy_s += seconds


async def simulate(
    load: Load, costs: dict[str, Costs], trajectory_s: float, conversations: int = 2
) -> dict[str, float]:
    """Return turns and tokens per second, and the busy part of each kind of process: of the busiest one."""
    control, actors = Process(), [Process() for _ in range(load.actors)]
    hosts = [Process() for _ in range(load.engines)]
    engines = [ModelledEngine(load.speed) for _ in range(load.engines)]
    for engine in engines:
        await engine.start()
        await engine.pause(PauseMode.KEEP)
        await engine.load_weights(VERSION)
        await engine.resume()
    of = costs
    params = SamplingParams(max_tokens=load.tokens, ignore_eos=True)
    request = InferenceEngineInput(prompt_token_ids=[[5]], sampling_params=params)

    async def agent(number: int) -> None:
        engine, host = engines[number % load.engines], hosts[number % load.engines]
        own = [actors[number % load.actors]] if load.actors else []
        # Not all at once: engines and processes would wait for each other in step.
        await asyncio.sleep(number / load.agents * load.tokens * load.speed.step_s)
        for _ in range(conversations):
            for _ in range(load.turns):
                await asyncio.sleep(load.tool_s)
                for process in own:
                    await process.work(of["rollout actors"].turn_s)
                await control.work(of["control process"].turn_s)
                await host.work(of["engine actors"].turn_s)
                await engine.generate(request)
                await host.work(of["engine actors"].token_s * load.tokens)
                await control.work(of["control process"].token_s * load.tokens)
                for process in own:
                    await process.work(of["rollout actors"].token_s * load.tokens)
            await control.work(trajectory_s)

    loop = asyncio.get_running_loop()
    began = loop.time()
    await asyncio.gather(*(agent(number) for number in range(load.agents)))
    seconds = loop.time() - began
    turns = load.agents * conversations * load.turns

    def busiest(processes: Sequence[Process]) -> float:
        return max((process.busy_s for process in processes), default=0.0) / seconds

    return {
        "turns": turns / seconds,
        "tokens": turns * load.tokens / seconds,
        "control process": busiest([control]),
        "rollout actors": busiest(actors),
        "engine actors": busiest(hosts),
    }


def in_virtual_time(load: Load, costs: dict[str, Costs], trajectory_s: float) -> dict[str, float]:
    return run_in_virtual_time(lambda _: simulate(load, costs, trajectory_s))


def most_agents(carries: Callable[[int], bool], start: int) -> int:
    """Return the largest multiple of 64 up to twice ``start`` for which ``carries`` is True, 0 if there is none."""
    low, high = 0, 2 * start // 64
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if carries(64 * middle) else (low, middle - 1)
    return 64 * low


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--agents", type=int, default=32, help="that are measured at once")
    parser.add_argument("--turns", type=int, default=6, help="of a measured conversation")
    parser.add_argument("--vllm", action="store_true", help="measure vLLM's front end as well")
    parser.add_argument("--groups", type=int, default=500, help="of driver_cost.py")
    parser.add_argument("--on-agents", type=int, default=1024, help="of the simulated run")
    parser.add_argument("--engines", type=int, default=64, help="of the simulated run")
    parser.add_argument(
        "--actors", type=int, nargs="+", default=[0, 8, 16], help="rollout actors of the simulated runs"
    )
    options = parser.parse_args()
    of_run = [
        import_name(f"{FILE.parent / 'driver_cost.py'}:{name}", "driver_cost", "function")
        for name in ("run", "workload", "of_run_ms")
    ]
    run, workload, of_run_ms = of_run
    with gc_tuned():
        run(workload(50, 16, 1), "accept")
        trajectory_s = 1e-3 * of_run_ms(run(workload(options.groups, 512, 8), "accept"))
        places: dict[bool, dict[str, Costs]] = {}
        print("| endpoint | process | a turn | a token |\n|---|---|---|---|")
        for apart in (False, True):
            costs = asyncio.run(measured(options.agents, options.turns, 2 * apart))
            places[apart] = costs
            for name, cost in costs.items():
                if name != "rollout actors" or apart:
                    print(
                        f"| in {'rollout actors' if apart else 'the control process'} | {name} | {cost} |", flush=True
                    )
    print(f"\na trajectory in the control process: {1e3 * trajectory_s:.2f} ms")
    if options.vllm:
        left_s, token_s = asyncio.run(vllm_token_s(hosted=True)), asyncio.run(vllm_token_s(hosted=False))
        print(f"a token in vLLM's front end: {1e6 * token_s:.2f} us")
        print(f"in the control process, if the front end has a process of its own: {1e6 * left_s:.2f} us")
        for costs in places.values():
            mine = costs["engine actors"]
            costs["engine actors"] = Costs(mine.turn_s, mine.token_s + token_s)
    print(
        "\n| agents | engines | rollout actors | turns/s | tokens/s | control process | a rollout actor | an engine's actor | "
        "most agents |\n|---|---|---|---|---|---|---|---|---|"
    )
    per_engine = options.on_agents / options.engines
    for actors in options.actors:
        costs = places[actors > 0]

        def of_agents(agents: int, costs: dict[str, Costs] = costs, actors: int = actors) -> dict[str, float]:
            engines = max(1, round(agents / per_engine))
            # As many actors for each agent as in the run that was asked for.
            enough = -(-actors * agents // options.on_agents)
            return in_virtual_time(Load(agents, engines, enough), costs, trajectory_s)

        def carries(agents: int, of_agents: Callable[[int], dict[str, float]] = of_agents) -> bool:
            return max(value for name, value in of_agents(agents).items() if name not in ("turns", "tokens")) <= BUSY

        found = of_agents(options.on_agents)
        busy = " | ".join(f"{found[name]:.0%}" for name in ("control process", "rollout actors", "engine actors"))
        most = most_agents(carries, options.on_agents)
        print(
            f"| {options.on_agents:,} | {options.engines} | {actors} | {found['turns']:,.0f} | {found['tokens']:,.0f} | {busy} | "
            f"{most:,} |",
            flush=True,
        )


if __name__ == "__main__":
    main()
