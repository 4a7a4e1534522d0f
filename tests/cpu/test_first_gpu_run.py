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
