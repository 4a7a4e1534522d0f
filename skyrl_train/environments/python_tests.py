"""Programming tasks: the policy's Python runs in a sandbox against tests."""

from __future__ import annotations

import json
import re
import secrets
from collections.abc import Mapping, Sequence
from typing import Any

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment
from skyrl_train.environments.sandbox import ISOLATIONS, SandboxLimits, run_program
from skyrl_train.errors import ConfigError, DataError

_FENCED = re.compile(r"```(?:python3?|py)?[ \t]*\n(.*?)```", re.DOTALL)
# Runs program and test from stdin. At the end it prints a secret word that the program does not know, so exiting early
# does not pass.
_ASSERTING = """
import json, sys
def _run():
    word, program, test = json.loads(sys.stdin.read())
    namespace = {"__name__": "tests"}
    exec(compile(program, "program", "exec"), namespace)
    exec(compile(test, "test", "exec"), namespace)
    print("\\n" + word, flush=True)
_run()
"""


def fenced_program(text: str) -> str | None:
    """Return the last fenced block that is Python or names no language, or None."""
    blocks = _FENCED.findall(text)
    return blocks[-1] if blocks else None


def same_output(printed: str, expected: str) -> bool:
    """Compare line by line, without white space at the ends of the lines and of the text."""
    left, right = ([line.rstrip() for line in text.strip().splitlines()] for text in (printed, expected))
    return left == right


@register_environment("python_tests")
class PythonTests(Environment):
    """Reward 1 if the last fenced program of the answer passes all tests, else 0. With ``partial``: the fraction passed.

    The data row's ``tests`` is JSON, a list of two kinds: ``{"stdin": text, "stdout": text}`` runs the program and compares
    its output; ``{"assert": code}`` runs that code after the program, in its namespace.

    Each test runs in a separate process. The expected output of a stdin test is not in that process. An assertion is in the
    program's process: a program that overrides ``__eq__`` of its results, or finds the test in the interpreter's frames,
    passes without a solution.

    Args:
        isolation: ``namespaces`` or ``limits``; see :mod:`skyrl_train.environments.sandbox`.
        cpu_s, wall_s, memory_mib: limits of one test.
        max_tests: the number of tests of a row that are run, from the first one on.
        partial: pays for the fraction of tests that pass.

    Raises:
        ConfigError: an impossible number or an unknown isolation.
        DataError: the row has no ``tests`` of this form.
    """

    def __init__(
        self,
        extras: Mapping[str, Any],
        *,
        isolation: str = "namespaces",
        cpu_s: int = 4,
        wall_s: float = 10.0,
        memory_mib: int = 512,
        max_tests: int = 16,
        partial: bool = False,
    ) -> None:
        super().__init__(extras)
        if isolation not in ISOLATIONS:
            raise ConfigError(f"environment.kwargs.isolation={isolation!r} is unknown. Known: {', '.join(ISOLATIONS)}.")
        if not wall_s > 0:
            raise ConfigError(f"environment.kwargs.wall_s must be above 0, got {wall_s}.")
        whole: dict[str, Any] = {"cpu_s": cpu_s, "memory_mib": memory_mib, "max_tests": max_tests}
        for name, value in whole.items():
            if not isinstance(value, int) or value <= 0:  # the system counts whole seconds of CPU time
                raise ConfigError(f"environment.kwargs.{name} must be a whole number above 0, got {value!r}.")
        self._tests = _read_tests(extras.get("tests"))[:max_tests]
        self._isolation, self._partial = isolation, partial
        self._limits = SandboxLimits(cpu_s=cpu_s, wall_s=wall_s, memory_mib=memory_mib)
        self._metrics: dict[str, Any] = {}

    def step(self, action: str) -> EnvironmentStep:
        program = fenced_program(action)
        passed = 0
        if program is not None:
            for test in self._tests:
                if self._passes(program, test):
                    passed += 1
                elif not self._partial:  # the reward is 0 already
                    break
        share = passed / len(self._tests)
        self._metrics = {"solved": float(share == 1), "has_program": float(program is not None)}
        reward = share if self._partial else float(share == 1)
        return {"observations": [], "reward": reward, "done": True, "metadata": {}}

    def get_metrics(self) -> dict[str, Any]:
        return self._metrics

    def _passes(self, program: str, test: Mapping[str, str]) -> bool:
        if "assert" in test:
            word = secrets.token_hex(16)
            stdin = json.dumps([word, program, test["assert"]])
            result = run_program(_ASSERTING, stdin, self._limits, self._isolation)
            return result.succeeded and result.stdout.endswith(word + "\n")
        result = run_program(program, test["stdin"], self._limits, self._isolation)
        return result.succeeded and same_output(result.stdout, test["stdout"])


def _read_tests(column: Any) -> Sequence[Mapping[str, str]]:
    tests: Any
    try:
        tests = json.loads(column)
    except (TypeError, ValueError):
        tests = None
    kinds = ({"assert"}, {"stdin", "stdout"})
    if (
        not isinstance(tests, list)
        or not tests
        or not all(isinstance(test, dict) and set(test) in kinds for test in tests)
        or not all(isinstance(text, str) for test in tests for text in test.values())
    ):
        raise DataError(
            "PythonTests needs a column 'tests' with JSON such as "
            f'[{{"stdin": "2", "stdout": "4"}}] or [{{"assert": "assert f(2) == 4"}}], got {column!r:.80}.'
        )
    return tests
