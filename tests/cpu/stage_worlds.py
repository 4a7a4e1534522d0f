"""Stages and reward functions that do as they are told. Imports little: some of it runs in processes of its own."""

from __future__ import annotations

import asyncio
import os
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import QuotaError, TrainingWorkerError
from skyrl_train.rollout.stages.reward import GroupToReward
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample
from skyrl_train.workers.executors import Work


def work(**arguments: Any) -> Work:
    """A work that obeys: see :class:`Obey`."""
    return Work("stage_worlds:Obey", arguments)


class Obey:
    """Obeys its argument. ``on_start``: the order to obey when it is built."""

    def __init__(self, on_start: str = "") -> None:
        self.calls = 0
        if on_start:
            self(on_start)

    def __call__(self, order: Any) -> Any:
        self.calls += 1
        match order:
            case "count":
                return self.calls
            case "where":
                return os.getpid(), threading.get_ident()
            case "raise":
                raise ValueError("scripted")
            case "lose a rank":
                raise TrainingWorkerError("rank 1 is gone")
            case "be asked too often":
                raise QuotaError("ask later", retry_after_s=1.0)
            case "exit":
                sys.exit(3)
            case "die":
                os.kill(os.getpid(), 9)
            case "hang":
                time.sleep(3600)
            case "unpicklable":
                return threading.Lock()
            case "await":
                return answered_later(7)
            case "generate":
                return (threading.get_ident() for _ in range(2))
            case ("meet", here, there):  # named pipes: opening one blocks until somebody opens the other end
                Path(here).write_text("")
                Path(there).read_text()
            case ("meet and raise", here, there):
                Path(here).write_text("")
                raise ValueError(Path(there).read_text())
        return order


async def answered_later(value: Any) -> Any:
    await asyncio.sleep(0)
    return value


# Reward functions -----------------------------------------------------------------------------------------------------


def length_reward(group: GroupToReward, scale: float = 1.0) -> list[float]:
    return [scale * len(sample.response_ids) for sample in group.samples]


def generated_reward(group: GroupToReward) -> Iterator[dict[str, Any]]:
    for sample in group.samples:
        yield {"reward": len(sample.response_ids), "metrics": {"length": len(sample.response_ids)}}


async def async_length_reward(group: GroupToReward) -> list[float]:
    await asyncio.sleep(0)
    return length_reward(group)


SEEN_BY_TRL: list[dict[str, Any]] = []


def trl_reward(prompts: list[Any], completions: list[Any], scale: float = 1.0, **columns: Any) -> list[float]:
    SEEN_BY_TRL.append({"prompts": prompts, "completions": completions, **columns})
    return [scale * len(ids) for ids in columns["completion_ids"]]


class TRLReward:
    def __init__(self, scale: float) -> None:
        self.scale = scale

    def __call__(self, completions: list[Any], completion_ids: list[list[int]]) -> list[float]:
        SEEN_BY_TRL.append({"completion_ids": completion_ids})
        return [self.scale * len(ids) for ids in completion_ids]


async def async_trl_reward(completions: list[Any], answer: list[str]) -> list[float]:
    await asyncio.sleep(0)
    SEEN_BY_TRL.append({"answer": answer})
    return [1.0, 0.0]


class Model:
    """A reward model that is built once."""

    def __init__(self, bonus: float) -> None:
        self.bonus = bonus

    def __call__(self, group: GroupToReward) -> Sequence[float]:
        return tuple(sample.reward + self.bonus for sample in group.samples)


class AsyncModel(Model):
    async def __call__(self, group: GroupToReward) -> Sequence[float]:  # type: ignore[override]
        return super().__call__(group)


def one_is_not_judged(completions: list[Any], **columns: Any) -> list[Any]:
    return [None, {"reward": 4.0, "metrics": {"judged": 1}}]


def judge() -> Any:
    async def reward(group: GroupToReward) -> list[Any]:
        return [{"reward": 0.5, "metrics": {"judged": 3}} for _ in group.samples]

    return reward


class Careless:
    """Writes into what it gets, and fails in its first call."""

    def __init__(self) -> None:
        self.calls = 0

    def __call__(self, group: GroupToReward) -> list[float]:
        self.calls += 1
        answer = group.env_extras.pop("answer")  # type: ignore[attr-defined]
        for sample in group.samples:
            sample.response_ids.append(int(answer))
        if self.calls == 1:
            raise ConnectionError("scripted")
        return length_reward(group)


def taking_reward(group: GroupToReward) -> list[float]:
    return [float(group.env_extras.pop("answer"))] * len(group.samples)  # type: ignore[attr-defined]


def taking_trl_reward(prompts: list[Any], completions: list[Any], answer: list[str]) -> list[float]:
    for prompt, completion in zip(prompts, completions, strict=True):
        prompt += completion
    return [float(len(prompt)) for prompt in prompts]


def text_reward(group: GroupToReward) -> list[str]:
    return ["1.0" for _ in group.samples]


def numbered_reward(group: GroupToReward) -> dict[int, float]:
    return {number: 0.5 for number, _ in enumerate(group.samples)}


NOT_CALLABLE = 3

# Groups ---------------------------------------------------------------------------------------------------------------

RECORD = PromptRecord("p", [{"role": "user", "content": "3?"}], env_extras={"answer": "3"}, data_source="d")


def sequence(*ids: int, mask: list[int] | None = None, rewards: list[float] | None = None) -> RolloutSequence:
    mask = [1] * len(ids) if mask is None else mask
    return RolloutSequence.of_lists(
        prompt_token_ids=[5, 6],
        response_ids=list(ids),
        loss_mask=mask,
        logprobs=[-0.5 * value for value in mask],
        versions=[3 if value else -1 for value in mask],
        rewards=[0.0] * len(ids) if rewards is None else rewards,
        stop_reason="stop",
    )


def group(*samples: Sample, group_index: int = 7) -> RolloutGroup:
    return RolloutGroup(group_index, "p", "d", samples or (Sample((sequence(1, 2),)), Sample((sequence(3),))), 3)


def decode(ids: Any) -> str:
    return "".join(map(str, ids))


class Held:
    """Counts how often it was closed."""

    closed = 0

    def __call__(self, argument: object) -> str:
        return "held"

    def close(self) -> None:
        Held.closed += 1
