"""Environments of the package verifiers, one for each of its classes: name a digit, guess one, look one up with a tool."""

from __future__ import annotations

from typing import Any

import verifiers as vf
from datasets import Dataset


def rows(digits: int) -> Dataset:
    return Dataset.from_list([{"question": "?", "answer": str(digit)} for digit in range(digits)])


def exact(completion: Any, answer: str) -> float:
    return float(completion[-1]["content"] == answer)


def length(completion: Any) -> float:
    return float(len(completion))


class Guess(vf.MultiTurnEnv):
    async def env_response(self, messages: Any, state: Any, **kwargs: Any) -> list[dict[str, str]]:
        return [{"role": "user", "content": "!" if messages[-1]["content"] == state["answer"] else "+"}]


def compare(guess: int) -> str:
    """Compare a guess.

    Args:
        guess: a digit.
    """
    return "!" if guess == 3 else "+"


def by_group(completions: list[Any]) -> list[float]:
    return [1.0] * len(completions)


def load_environment(kind: str = "single", digits: int = 10) -> vf.Environment:
    rubric = vf.Rubric(funcs=[by_group if kind == "group" else exact, length], weights=[1.0, 0.0])
    if kind == "multi":
        return Guess(dataset=rows(digits), rubric=rubric, max_turns=3)
    if kind == "text":
        return vf.SingleTurnEnv(dataset=Dataset.from_list([{"prompt": "?", "answer": "3"}]), rubric=rubric)
    if kind == "evaluation":
        return vf.SingleTurnEnv(eval_dataset=rows(digits), rubric=rubric)
    if kind == "tool":
        return vf.ToolEnv(tools=[compare], dataset=rows(digits), rubric=rubric, max_turns=3)
    return vf.SingleTurnEnv(dataset=rows(digits), system_prompt="=", rubric=rubric)
