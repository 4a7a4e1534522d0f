"""benchmarks/first_gpu_run.py with tiny models on the CPU: what it reports, and that a failure stops nothing else."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest
from forks import Forks

SCRIPT = Path(__file__).parents[2] / "benchmarks" / "first_gpu_run.py"
NO_GPU = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("first_gpu_run", SCRIPT)
    assert spec is not None and spec.loader is not None
    module = sys.modules["first_gpu_run"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture
def run(script: ModuleType, forks: Forks, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., int]:
    """The command in this process and in the folder of the test; its sections in processes that are forked."""

    def main(*arguments: str) -> int:
        monkeypatch.chdir(tmp_path)
        monkeypatch.setattr(sys, "argv", [str(SCRIPT), *arguments])
        return script.main()

    forking = SimpleNamespace(run=subprocess.run, Popen=forks.Popen, TimeoutExpired=subprocess.TimeoutExpired)
    monkeypatch.setattr(script, "subprocess", forking)
    return main


def test_one_file_has_the_figures_of_all_sections(run: Callable[..., int], tmp_path: Path) -> None:
    plenty = ["--limit", "doctor=3000", "--limit", "training=3000"]  # on a busy machine the default passes
    assert run("--dry", "--only", "doctor,training", *plenty) == 0
    result = json.loads((tmp_path / "first_gpu_run.json").read_text())
    assert all(result[key] for key in ("date", "commit", "python", "command")) and result["versions"]["torch"]
    assert [(name, section["status"]) for name, section in result["sections"].items()] == [
        ("doctor", "PASS"),
        ("training", "PASS"),
    ]
    doctor, training = (result["sections"][name]["figures"] for name in ("doctor", "training"))
    first = training["0.6b, 16384 tokens"]
    # The ceiling that the doctor measured is the one that MFU counts against; each of the three has four digits.
    assert first["mfu"] == pytest.approx(first["tflops"] / doctor["matmul"]["ceiling_tflops"], rel=2e-3)
    assert training["operations"]["update_operations"] and training["operations"]["logprobs_operations"]
    assert [path.name for path in tmp_path.glob("first_gpu_run.json*")] == ["first_gpu_run.json"]


def test_a_failed_section_is_reported_and_does_not_stop_the_next(
    run: Callable[..., int], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # without --dry nothing can run: there is no GPU
    assert run("--only", "doctor,training") == 1
    sections = json.loads((tmp_path / "first_gpu_run.json").read_text())["sections"]
    assert list(sections) == ["doctor", "training"]
    for section in sections.values():
        assert section["status"] == "FAIL"
        assert "torch sees no CUDA device" in section["failures"]["section"]
    printed = capsys.readouterr().out
    assert "doctor     FAIL" in printed and "training   FAIL" in printed


def test_a_section_beyond_its_limit_is_ended_and_keeps_its_figures(script: ModuleType, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "report.json", limit_s=1e6)
    with report.part("one"):
        report.add(figure=1)
    with report.part("two"):
        report.add(figure=2)
        raise ValueError("broken")
    with report.part("three"):
        report.add(figure=3)
    content = json.loads((tmp_path / "report.json").read_text())
    assert content["figures"] == {"one": {"figure": 1}, "two": {"figure": 2}, "three": {"figure": 3}}
    assert list(content["failures"]) == ["two"] and "ValueError: broken" in content["failures"]["two"]
    # A limit that is over before the section has imported torch: it is ended, and the report says so.
    command = [sys.executable, str(SCRIPT), "--dry", "--only", "doctor", "--limit", "doctor=0.05"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=tmp_path, env=NO_GPU)
    assert done.returncode == 1
    section = json.loads((tmp_path / "first_gpu_run.json").read_text())["sections"]["doctor"]
    assert section["failures"] == {"limit": "ended after 0 s"}


TESTS_OF_A_GPU = """
import pytest
def test_good(): pass
def test_bad(): assert 1 == 2
@pytest.mark.skip(reason="needs two GPUs")
def test_big(): pass
@pytest.fixture
def broken(): raise ValueError("no device")
def test_of_a_fixture(broken): pass
"""


def outcomes(tmp_path: Path, limit_s: float, line: str = "") -> dict[str, Any]:
    """The report of the section ``tests`` on a folder of tests, in a process of its own."""
    tests = tmp_path / "checkout" / "tests" / "gpu"
    tests.mkdir(parents=True, exist_ok=True)
    (tests / "test_one.py").write_text(TESTS_OF_A_GPU)
    (tests / "test_unreadable.py").write_text("import a_module_that_is_not_there\n")
    program = f"""
import sys; sys.path.insert(0, {str(SCRIPT.parent)!r})
from pathlib import Path
import first_gpu_run as script
script.TESTS = Path({str(tests)!r})
{line}
script.gpu_tests(script.Report(Path("report.json").resolve(), {limit_s}), None)
"""
    done = subprocess.run([sys.executable, "-c", program], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    content: dict[str, Any] = json.loads((tmp_path / "report.json").read_text())
    return content


def test_the_tests_are_counted_and_failures_and_skips_have_their_reasons(tmp_path: Path) -> None:
    content = outcomes(tmp_path, 1e6)
    figures = content["figures"]["pytest"]
    assert {name: figures[name] for name in ("collected", "passed", "failed", "skipped", "running")} == {
        "collected": 4, "passed": 1, "failed": 3, "skipped": 1, "running": "",
    }  # fmt: skip
    assert figures["skip_reasons"] == {"needs two GPUs": 1}
    failures = {name.removeprefix("tests/gpu/"): text for name, text in content["failures"].items()}
    assert list(failures) == [
        "test_unreadable.py (collect)", "test_one.py::test_bad", "test_one.py::test_of_a_fixture (setup)",
    ]  # fmt: skip
    assert "a_module_that_is_not_there" in failures["test_unreadable.py (collect)"]
    assert "assert 1 == 2" in failures["test_one.py::test_bad"]
    assert "no device" in failures["test_one.py::test_of_a_fixture (setup)"]
    assert not content["skipped"] and not content["not_run"]


def test_tests_without_time_are_named_and_the_report_has_the_others(tmp_path: Path) -> None:
    content = outcomes(tmp_path, 0.0)
    assert content["figures"]["pytest"]["passed"] == 1
    assert [name.partition("::")[2] for name in content["skipped"]] == ["test_bad", "test_big", "test_of_a_fixture"]


@pytest.mark.parametrize(
    ("line", "reason"),
    [
        ("script.TEST_PACKAGES += ('no_such_package',)", "the extra dev is not installed: there is no no_such_package"),
        ("script.TESTS = Path('elsewhere/gpu')", "there is no folder tests/gpu"),
    ],
)
def test_without_the_tests_or_pytest_the_section_is_skipped_with_the_reason(
    tmp_path: Path, line: str, reason: str
) -> None:
    content = outcomes(tmp_path, 1e6, line)
    assert content["not_run"].startswith(reason)
    assert not content["failures"] and not content["figures"]


def test_the_whole_ends_within_20_minutes(script: ModuleType) -> None:
    assert sum(script.LIMITS_S.values()) < 20 * 60
    assert list(script.LIMITS_S) == list(script.SECTIONS)


def test_a_part_without_time_is_skipped_and_named(script: ModuleType, tmp_path: Path) -> None:
    report = script.Report(tmp_path / "report.json", limit_s=-1e6)
    assert not report.has_time("late")
    assert json.loads((tmp_path / "report.json").read_text())["skipped"] == ["late"]
    assert script.Report(tmp_path / "report.json", limit_s=1e6).has_time("early")


def test_the_operations_of_a_forward_pass_are_counted_one_by_one(script: ModuleType) -> None:
    from skyrl_train.config.model_shape import ModelShape

    shape = ModelShape(
        num_layers=2,
        hidden_size=6,
        num_heads=3,
        num_kv_heads=1,
        head_dim=4,
        intermediate_size=10,
        vocab_size=50,
        max_position_embeddings=64,
        tied_embeddings=True,
    )
    lengths, scored = [7, 4], 5
    norms = 2 * 2 * shape.hidden_size + shape.hidden_size  # their weights are counted as if they were matrices
    products = 0
    for length in lengths:
        for _ in range(shape.num_layers):
            for rows, columns in ((6, 12), (6, 4), (6, 4), (12, 6), (6, 10), (6, 10), (10, 6)):
                products += 2 * length * rows * columns
            for token in range(length):
                # Half of the square: a token sees on average T / 2 others, in scores and in sums.
                del token
                products += 2 * 2 * shape.num_heads * shape.head_dim * length / 2
    products += 2 * scored * shape.hidden_size * shape.vocab_size
    assert script.forward_flops(shape, lengths, scored) == products + 2 * norms * sum(lengths)


def test_parts_with_the_same_figures_are_columns_of_one_table(script: ModuleType) -> None:
    result = {
        "command": ["benchmarks/first_gpu_run.py", "--output", "out.json", "--only", "engine"],
        "date": "2026-11-23T06:00:00+00:00",
        "commit": "abc",
        "python": "3.12.1",
        "versions": {"torch": "2.13.0", "vllm": None},
        "sections": {
            "engine": {
                "status": "FAIL",
                "total_s": 12.3,
                "figures": {
                    "device": {"name": "H100", "cpus": 16},
                    "a": {"x": 1, "y": 2.5},
                    "b": {"x": 30000, "z": "text"},
                },
                "failures": {"c": "Traceback\nValueError: broken\n"},
                "skipped": ["d"],
            }
        },
    }
    assert script.table(result).splitlines() == [
        "`python benchmarks/first_gpu_run.py --only engine`, 2026-11-23, commit abc.",
        "H100; Python 3.12.1, torch 2.13.0.",
        "",
        "`engine`: FAIL in 12 s.",
        "",
        "| | device |",
        "|---|---|",
        "| `cpus` | 16 |",
        "",
        "| | a |",
        "|---|---|",
        "| `x` | 1 |",
        "| `y` | 2.5 |",
        "",
        "| | b |",
        "|---|---|",
        "| `x` | 30,000 |",
        "",
        "Failed: c, `ValueError: broken`",
        "",
        "No time was left for: d.",
    ]
    figures = result["sections"]["engine"]["figures"]
    figures["b"]["y"] = 7
    text = script.table(result)
    assert "| | a | b |\n|---|---|---|\n| `x` | 1 | 30,000 |\n| `y` | 2.5 | 7 |\n" in text
