"""The rollout side without a trainer: real loader, staleness manager, buffer and dispatcher; a scripted generator."""

from __future__ import annotations

import asyncio
import contextlib
import sys
from collections.abc import Awaitable, Callable
from dataclasses import replace

from skyrl_train.config.schema import DataConfig, FailureConfig, FailurePolicy
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import NoEngineError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.rollout.buffer import RolloutBuffer
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.rollout.data.loader import build_loader
from skyrl_train.rollout.dispatcher import Dispatcher
from skyrl_train.rollout.filters import SignalFilter
from skyrl_train.rollout.group_generator import GroupGenerator
from skyrl_train.rollout.staleness.manager import StalenessManager
from skyrl_train.rollout.staleness.policies import resolve_staleness_policy
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import GeneratorInput, GeneratorOutput

PROMPTS = 10


def group_index_of(batch: GeneratorInput) -> int:
    return int(batch["trajectory_ids"][0].instance_id.rpartition("@")[2])


def output_of(batch: GeneratorInput, version: int, *rewards: float) -> GeneratorOutput:
    """One token per sample; rewards 0, 1, 2, ... unless they are given."""
    n = len(batch["trajectory_ids"])
    return GeneratorOutput(
        prompt_token_ids=[[5, 6]] * n,
        response_ids=[[7]] * n,
        rewards=list(rewards or map(float, range(n))),
        loss_masks=[[1]] * n,
        stop_reasons=["stop"] * n,
        rollout_metrics=None,
        rollout_logprobs=[[-0.5]] * n,
        rollout_versions=[[version]] * n,
        trajectory_ids=batch["trajectory_ids"],
        is_last_step=None,
    )


class FakeEngines:
    """Engines that are there or not."""

    def __init__(self) -> None:
        self.policy_version = 0
        self.changed = Signal()
        self.gone: str | None = None  # why there are none
        self.come_back = True  # those who wait for them need only wait long enough
        self.awaited = asyncio.Event()

    @property
    def serving(self) -> bool:
        return self.gone is None

    def leave(self, why: str = "scripted death") -> None:
        self.gone = why

    def join(self) -> None:
        self.gone = None
        self.changed.notify()

    async def wait_for_engine(self) -> None:
        self.awaited.set()
        if not self.come_back:
            raise NoEngineError(f"no inference engine is left: {self.gone}")
        await self.changed.wait_until(lambda: self.serving)


Play = Callable[[GeneratorInput], Awaitable[GeneratorOutput | None]]


class ScriptedGenerator(GeneratorInterface):
    """Plays a group as ``plays`` says for its group index, one entry per call and the last one from then on."""

    def __init__(self, engines: FakeEngines) -> None:
        self.engines = engines
        self.plays: dict[int, list[Play]] = {}
        self.calls: list[int] = []
        self.seeds: list[tuple[int, ...]] = []

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        group_index = group_index_of(input_batch)
        self.calls.append(group_index)
        self.seeds.append(input_batch["batch_metadata"].seeds)
        await asyncio.sleep(0)
        plays = self.plays.get(group_index, [])
        if plays:
            output = await (plays.pop(0) if len(plays) > 1 else plays[0])(input_batch)
            if output is not None:
                return output
        return output_of(input_batch, self.engines.policy_version)


class World:
    """Everything between the data set and the buffer, and a consumer that takes the part of the trainer."""

    def __init__(
        self,
        *,
        b: int = 4,
        s: int = 0,
        depth: float = 0,
        workers: int = 8,
        steps: int = 100,
        n: int = 2,
        policy: str = "accept",
        prompts: int = PROMPTS,
        max_filtered_share: float | None = None,
        **failures: object,
    ) -> None:
        self.b = b
        self.failures = replace(FailureConfig(), **failures)  # type: ignore[arg-type]
        records = tuple(
            PromptRecord(f"p{i}", [{"role": "user", "content": str(i)}], env_extras={"answers": [str(i)]})
            for i in range(prompts)
        )
        self.loader = build_loader(PromptDataset(records), DataConfig(), seed=0)
        self.engines = FakeEngines()
        self.generator = ScriptedGenerator(self.engines)
        self.buffer = RolloutBuffer()
        self.changed = Signal()
        self.staleness = StalenessManager(
            batch_groups=b,
            max_staleness_steps=s,
            generate_ahead_steps=depth,
            max_running=workers,
            total_steps=steps,
            policy=resolve_staleness_policy(policy),
        )
        self.failed_attempts: list[tuple[str, str]] = []
        self.now = 0.0
        self.group_generator = GroupGenerator(
            self.generator,
            self.loader.source,
            self.engines,
            self.failures,
            n_samples_per_prompt=n,
            sampling_params={},
            env_class="run_length",
            seed=3,
            on_failure=lambda name, reason, error: self.failed_attempts.append((name, reason)),
            clock=lambda: self.now,
            cancel_grace_s=0.05,
        )
        self.ended = 0
        self.dispatcher = Dispatcher(
            self.group_generator,
            self.loader,
            self.staleness,
            self.buffer,
            self.failures,
            admission_version=lambda group_index: self.engines.policy_version,
            changed=self.changed,
            signal_filter=None if max_filtered_share is None else SignalFilter(b, max_filtered_share),
            on_group_end=self._count_end,
        )
        self.trained: list[int] = []
        self.batches: list[list[int]] = []

    def _count_end(self) -> None:
        self.ended += 1

    async def __aenter__(self) -> World:
        await self.loader.source.start(self.changed.notify)
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.dispatcher.close()
        await self.loader.source.aclose()

    async def step(self, *, fill: bool = False) -> list[int]:
        """Trains and publishes one step, of groups that the running workers bring or that ``fill`` asks for."""
        batch = None

        def ready() -> bool:
            nonlocal batch
            batch = self.staleness.select(self.buffer)
            return batch is not None or self.dispatcher.error is not None

        if fill:
            await self.dispatcher.fill()
        await self.changed.wait_until(ready)
        self.raise_if_failed()
        assert batch is not None
        self.staleness.assert_bound(batch)
        self.buffer.take(batch)
        self.staleness.train(batch)
        self.loader.settle([group.group_index for group in batch], "trained")
        self.staleness.advance()
        self.engines.policy_version += 1
        self.staleness.served(self.engines.policy_version)
        self.batches.append([group.group_index for group in batch])
        self.trained += self.batches[-1]
        self.changed.notify()
        return self.batches[-1]

    def raise_if_failed(self) -> None:
        if self.dispatcher.error is not None:
            raise self.dispatcher.error

    async def until(self, predicate: Callable[[], bool]) -> None:
        await asyncio.wait_for(self.changed.wait_until(predicate), 60)

    def check_books(self) -> None:
        """Counts, ledger and buffer agree, and every issued prompt has exactly one place."""
        counts, loader = self.staleness.counts, self.loader
        buffered = [group.group_index for group in self.buffer]
        assert counts.submitted == (
            counts.running + counts.buffered + counts.trained + counts.failed + counts.filtered + counts.dropped
        )
        assert (counts.buffered, counts.trained) == (len(buffered), len(self.trained))
        assert (counts.failed, counts.filtered, counts.dropped) == (
            len(loader.ledger.failed),
            len(loader.ledger.filtered),
            len(loader.ledger.dropped),
        )
        places = [*buffered, *self.trained, *loader.ledger.failed, *loader.ledger.filtered, *loader.ledger.dropped]
        assert len(set(places)) == len(places)
        assert set(places) <= set(range(counts.submitted))
        assert counts.submitted - len(places) == counts.running


async def hang(batch: GeneratorInput) -> None:
    await asyncio.Event().wait()


async def fail(batch: GeneratorInput) -> None:
    raise ValueError("scripted")


async def quiet(batch: GeneratorInput) -> GeneratorOutput:
    """A group without signal."""
    return output_of(batch, 0, *[1.0] * len(batch["trajectory_ids"]))


async def fine(batch: GeneratorInput) -> None:
    return None


async def end_the_program(batch: GeneratorInput) -> None:
    sys.exit(3)


async def cancel_itself(batch: GeneratorInput) -> None:
    raise asyncio.CancelledError


async def cancel_its_task(batch: GeneratorInput) -> None:
    task = asyncio.current_task()
    assert task is not None
    task.cancel()
    await asyncio.sleep(0)


async def return_late(batch: GeneratorInput) -> GeneratorOutput:
    """Notices that it was cancelled, and returns something all the same."""
    with contextlib.suppress(asyncio.CancelledError):
        await asyncio.Event().wait()
    return output_of(batch, 0, *[99.0] * len(batch["trajectory_ids"]))


async def ignore_cancellation(batch: GeneratorInput) -> None:
    while True:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            continue


MASK, RAISE = FailurePolicy["mask"], FailurePolicy["raise"]
