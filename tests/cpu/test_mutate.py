"""The command that changes rules and runs their tests: ``tests/mutate.py``."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import mutate
import pytest

RULES = """
import threading

def is_stale(lag: int, bound: int) -> bool:
    return lag > bound

def count(limit: int) -> int:
    counted = 0
    while counted < limit:
        counted += 1
    return counted

def open_gate() -> bool:
    gate = threading.Event()
    gate.set()
    return gate.wait()
"""
TESTS = """
from rules import count, is_stale, open_gate

def test_rules() -> None:
    assert is_stale(2, 0) and not is_stale(0, 2)
    assert count(3) == 3
    assert open_gate()
"""


def mutate_rules(folder: Path, *options: str, tests: str = TESTS) -> tuple[int, str]:
    """Runs the command with limits that suit a test of no length; its exit code and output."""
    (folder / "rules.py").write_text(RULES)
    (folder / "test_rules.py").write_text(tests)
    code = "import sys, mutate; mutate.TEST_CPU_S, mutate.ASLEEP_S = 0.3, 2; sys.exit(mutate.main(sys.argv[1:]))"
    done = subprocess.run(
        [sys.executable, "-c", code, "rules.py", "--tests", "test_rules.py", *options],
        cwd=folder,
        env={
            "PYTHONPATH": str(Path(mutate.__file__).parent),
            "PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1",
        },  # seconds of imports
        capture_output=True,
        text=True,
    )
    assert (folder / "rules.py").read_text() == RULES, "no file is changed"
    return done.returncode, done.stdout + done.stderr


def line_of(code: str) -> str:
    return f"--only=rules.py:{next(n for n, line in enumerate(RULES.splitlines(), 1) if code in line)}"


def test_a_mutant_that_no_test_notices_survives(tmp_path: Path) -> None:
    code, output = mutate_rules(tmp_path, line_of("lag > bound"))
    assert code == 1
    assert [line for line in output.splitlines() if line.startswith("survived")] == [
        "survived: rules.py:5: lag > bound  →  lag >= bound  in  return lag > bound"
    ]
    assert output.count("killed by test_rules.py::test_rules") == 2, "lag <= bound, and None"
    assert output.splitlines()[-3].split() == ["all", "3", "2", "66.7%"]


def test_an_endless_loop_and_an_endless_sleep_are_noticed(tmp_path: Path) -> None:
    code, output = mutate_rules(tmp_path, line_of("counted += 1"), line_of("gate.set()"))
    assert code == 0
    assert "counted += 1  →  pass  killed by SIGPROF" in output
    assert "gate.set()  →  pass  killed by the tests sleep" in output


def test_tests_that_fail_without_a_mutant_judge_nothing(tmp_path: Path) -> None:
    code, output = mutate_rules(tmp_path, tests=TESTS + "    assert False")
    assert code == 2
    assert "The tests fail without a mutant (test_rules.py::test_rules)." in output
    code, output = mutate_rules(tmp_path, tests="def test_nothing() -> None: pass")
    assert code == 2
    assert "The tests do not import rules.py." in output


def changes(tmp_path: Path, code: str) -> list[str]:
    file = tmp_path / "rules.py"
    file.write_text(code)
    mutants = mutate.mutants_of(file)
    for mutant in mutants:
        assert ast.unparse(mutant.tree()) != ast.unparse(ast.parse(code))
    return [mutant.after for mutant in mutants]


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("a < b", ["a <= b", "a >= b"]),
        ("a and b", ["a or b", "b", "a"]),
        ("not a", ["a"]),
        ("a + b", ["a - b"]),
        ("a + 'text'", []),
        ("x = -2", ["2", "3", "1"]),
        ("x = True", ["False"]),
        ("x = min(a, b)", ["max(a, b)", "a", "b"]),
        ("x = a.detach()", ["a"]),
        ("a[b:c]", ["a[:c]", "a[b:]"]),
        ("a if b else c", ["a", "c", "not b"]),
        ("for a in b: continue", ["break", "pass"]),
        ("def f(a):\n    a.b = 1\n    c = 2\n    return c", ["pass", "2", "0", "3", "1", "return None"]),
        ("def __init__(self):\n    self.a = None", []),
        ("raise ValueError(f'{a + b} is wrong')", ["pass"]),
        ("logger.info(a + b)", []),
        ("x = zip(a, b, strict=True)", []),
        ("await asyncio.sleep(0)", ["pass"]),
        ("await asyncio.sleep(2)", ["pass", "3", "1"]),
        ("f(a)", ["pass"]),
        ("def __repr__(self):\n    return a + b", []),
        ("a: b | c", []),
    ],
)
def test_each_kind_of_mutant(tmp_path: Path, code: str, expected: list[str]) -> None:
    assert changes(tmp_path, code) == expected


def test_a_larger_sample_contains_a_smaller_one_and_all_files_have_their_share() -> None:
    files = [mutate.ROOT / "skyrl_train" / "algorithms" / name for name in ("kl.py", "losses.py")]
    small, large = mutate.sample(files, 20, seed=1), mutate.sample(files, 40, seed=1)
    assert large[:20] == small == mutate.sample(files, 20, seed=1)
    assert small != mutate.sample(files, 20, seed=2)
    for file in files:
        share = len(mutate.mutants_of(file)) / sum(len(mutate.mutants_of(file)) for file in files)
        assert abs(sum(mutant.file == file for mutant in large) - 40 * share) <= 1
