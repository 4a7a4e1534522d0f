"""Every benchmark runs, with sizes that say nothing about speed."""

from __future__ import annotations

import json
import os
import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest
from forked_runs import ForkedRuns

from skyrl_train.inference.client import InferenceEngineClient

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
# A command line, and a part of what it prints when it has measured.
QUICK = [
    ("checkpoint_checksums --megabytes 2 --rounds 1", "read from disk"),
    ("driver_cost --groups 20 --samples 1 --tokens 16 --policies accept", "| `accept` | **"),
    ("embedded_engine --requests 1 --tokens 2", "| 1 | "),
    ("embedded_engine --requests 2 --tokens 4 --grammar", "| 2 | process |"),
    ("record_cost --groups 20 --samples 1 --tokens 16 --rounds 1", "| 1 | 100 | "),
    ("gpu_weight_sync --dry --updates 1", "embedded dry shared_memory: "),
    ("gpu_attention --dry --output attention.json", "| 256 | 1 | "),
    (
        "staleness_price strictness --samples 1 --batch 4 --steps 12 --tails 2 --bounds 1 --width 2 --futures 2",
        "| balanced | 2 | 1 |",
    ),
]
SLOW = [
    ("weight_sync --updates 2 --requests 2", "| `recompute` |"),
    ("token_budget --updates 1", "| 16384 | packed |"),
    (
        "checkpoint_blocking --rounds 1 --hidden-size 64 --layers 1 --tokens 8 --strategies local",
        "| `local` |",
    ),
    ("modes --steps 2 --cases 2", "| fully_async, streaming | 3 + 1 |"),
    ("staleness_price throughput --batch 2 --steps 12 --tails 2 --slots 1", "| 2 | 1 | training-bound | `mask` |"),
    ("staleness_price depth --batch 2 --steps 12 --tails 2", "| 2 | training-bound | "),
    ("training_executor --recipes quickstart --steps 2 --warmup 1 --rounds 1", "| median |"),
    ("async_vs_sync --steps 12 --rounds 1 trainer.policy_mini_batch_size=2", "| median |"),
    (
        "checkpoint_blocking --rounds 1 --hidden-size 64 --layers 1 --tokens 8 --strategies fsdp2",
        "| `fsdp2` |",
    ),
    (
        "control_scale --agents 2 --turns 2 --groups 20 --on-agents 64 --engines 4 --actors 0 2",
        "| in rollout actors | control process | ",
    ),
    ("engine_loss --requests 4 --seconds 1", ", **0**, **0** |"),
    ("in_flight --requests 20 --seconds 1", "| streamed | 20 |"),
    ("learning trainer.max_steps=2 --recipes quickstart --seeds 0", "| `quickstart` | 0 | 2 |"),
    ("lora_weight_sync --hidden-size 64 --layers 1 --updates 2", "| adapter / whole |"),
    ("page_speed --events 2000 --bars 50 --frames 30 --seconds 2", "| `skyrl-train watch` with its timeline |"),
    ("packing --updates 1 --methods tiles", "| tiles |"),
    (
        "policy_learning --out rows --tasks guess_number --policies mask --bounds 1 --seeds 0 --steps 10",
        "| `guess_number` | 1 |",
    ),
    ("simulation_error --steps 16", "| in turns | "),
    ("start_up --rounds 1", "| first weight sync and tokens |"),
    ("remote_wire --in-flight 2 --tokens 2 --rounds 1", "| 2 | 2 | "),
    (
        f"time_to_reward --without-trl --recipes {BENCHMARKS}/spell_backward.yaml --modes sync --seeds 1 --steps 10 --targets 0 "
        "--taught-loss 9 trainer.policy_mini_batch_size=2",
        "| 0.0 | sync | 10 (",
    ),
    ("weight_transports --updates 2 --requests 2 --hidden-size 64", "| `gloo` |"),
]
VLLM = [  # on a CPU, vLLM's attention has no heads below a size of 32
    ("endpoint_vs_vllm --requests 2 --tokens 4 --rounds 1 --width 128", "| stream |"),
    ("gpu_weight_sync --dry --engine vllm --updates 1", "vllm dry shared_memory: "),
    ("lora_weight_sync --engine vllm --hidden-size 128 --layers 1 --updates 2", "| adapter / whole |"),
    ("first_gpu_run --dry --only engine,loop --limit engine=500 --limit loop=500", "loop       PASS"),
    ("weight_broadcast --updates 1 --hidden-size 128 --layers 1", "| transfer / plain copy |"),
    ("vllm_load --layers 1 --rounds 1", "in place / vLLM's reload: "),
    ("vllm_weight_sync --updates 2 --requests 2 --modes recompute", "| `recompute` |"),
]
PEERS = ("against_peers --batch 4 --steps 8 --tails 2 --bounds 1", "| 2 | training-bound | 1 |")
TRL = [
    ("against_trl --python {python} --steps 2 --warmup 0 --rounds 1", "| median | fully_async |"),
    ("time_to_reward --python {python} --recipes quickstart --seeds 1 --steps 10 --targets 0", "| 0.0 | TRL | 10 ("),
]


@pytest.mark.parametrize(
    ("line", "printed"), [*QUICK, *(pytest.param(*benchmark, marks=pytest.mark.slow) for benchmark in SLOW)]
)
def test_a_benchmark_runs(forked_runs: ForkedRuns, tmp_path: Path, line: str, printed: str) -> None:
    assert printed in printed_by_fork(forked_runs, line, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "printed"), VLLM)
def test_a_benchmark_of_vllm_runs(tmp_path: Path, line: str, printed: str) -> None:
    pytest.importorskip("vllm")
    assert printed in printed_by(line, tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize(("line", "printed"), TRL)
def test_a_benchmark_against_trl_runs(tmp_path: Path, line: str, printed: str) -> None:
    python = os.environ.get("SKYRL_TRL_PYTHON")  # of an environment that has TRL; `.ci/run` makes one
    if python is None:
        pytest.skip("SKYRL_TRL_PYTHON names no interpreter that has TRL")
    assert printed in printed_by(line.format(python=python), tmp_path)


@pytest.mark.slow
def test_no_probe_comes_between_the_weight_syncs_that_go_past_the_client(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    defaults = InferenceEngineClient.__init__.__kwdefaults__
    monkeypatch.setitem(
        defaults, "probe_interval_s", 0.001
    )  # a probe would end the benchmark, as it did in 2 of 5 runs
    monkeypatch.setattr(sys, "argv", ["weight_sync.py", "--updates", "5", "--requests", "2"])
    runpy.run_path(str(BENCHMARKS / "weight_sync.py"), run_name="__main__")
    assert "| `recompute` |" in capsys.readouterr().out


@pytest.mark.slow
def test_the_table_and_the_plot_of_finished_measurements(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    plot = "staleness_price strictness --batch 4 --steps 12 --tails 2 --bounds 0 1 --plot price.svg"
    printed_by_fork(forked_runs, plot, tmp_path)
    assert (tmp_path / "price.svg").read_text().startswith("<?xml")
    table = "policy_learning --out rows.jsonl --table"
    assert "| policy | TIS |" in printed_by_fork(forked_runs, table, tmp_path)


def test_the_model_of_the_comparison_with_peers_is_as_fast_as_the_real_trainer(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    line, row = PEERS
    printed = printed_by_fork(forked_runs, line, tmp_path)
    figures = re.search(r"model (\S+), real trainer (\S+)", printed)
    assert figures is not None and figures[1] == figures[2]
    assert row in printed


def test_a_recorded_benchmark_has_its_output_date_commit_and_load(tmp_path: Path) -> None:
    (tmp_path / "record.py").write_text((BENCHMARKS / "record.py").read_text())
    (tmp_path / "short.py").write_text("import sys\nprint('ratio', *sys.argv[1:])\nsys.exit(len(sys.argv) > 2)\n")
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@b"]
    for arguments in (["init", "-q"], ["add", "."], ["commit", "-qm", "first"]):
        subprocess.run([*git, *arguments], cwd=tmp_path, check=True)
    record = [sys.executable, str(tmp_path / "record.py")]

    failed = subprocess.run([*record, "short", "1", "2"], capture_output=True, text=True, check=False)
    assert failed.returncode == 1
    assert "nothing was recorded" in failed.stderr
    assert not (tmp_path / "recorded").exists()

    done = subprocess.run([*record, "short", "1.5"], capture_output=True, text=True, check=True)
    row = json.loads((tmp_path / "recorded" / "short.json").read_text())
    assert done.stdout == row["output"] == "ratio 1.5\n"
    assert row["command"] == "python benchmarks/short.py 1.5"
    assert re.fullmatch(r"[0-9a-f]{7,}", row["commit"])
    assert re.fullmatch(r"\d{4}-\d\d-\d\d \d\d:\d\d UTC", row["date"])
    assert len(row["load"]) == 2

    (tmp_path / "short.py").write_text("print('other')\n")
    subprocess.run([*record, "--as", "short-other", "short", "--at", str(tmp_path)], capture_output=True, check=True)
    row = json.loads((tmp_path / "recorded" / "short-other.json").read_text())
    assert row["command"] == "python benchmarks/short.py --at FOLDER"
    assert row["commit"].endswith(" with changes")
    assert row["output"] == "other\n"


def printed_by_fork(forked_runs: ForkedRuns, line: str, folder: Path) -> str:
    """What the command prints in a process that has imported everything; its working directory is ``folder``."""
    name, *arguments = line.split()
    output = folder / "output.log"
    code = forked_runs.run(output, arguments, script=BENCHMARKS / f"{name}.py")
    assert code == 0, output.read_text()
    return output.read_text()


def printed_by(line: str, folder: Path) -> str:
    """What the command prints, from a process of its own."""
    name, *arguments = line.split()
    command = [sys.executable, str(BENCHMARKS / f"{name}.py"), *arguments]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=folder)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_every_benchmark_is_started() -> None:
    started = {line.split()[0] for line, _ in [*QUICK, *SLOW, *VLLM, PEERS, *TRL]}
    # Of the others, against_trl starts the first, and the second starts benchmarks.
    assert {path.stem for path in BENCHMARKS.glob("*.py")} == started | {"trl_quickstart", "record"}
