"""The command that trains every combination of values."""

from __future__ import annotations

import subprocess
import sys
import threading
from pathlib import Path
from types import SimpleNamespace
from typing import IO, Any

import pytest
from test_entrypoint import TINY

from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.sweep import split
from skyrl_train.observability.run_folder import FINISHED, RunFolder

RATE = "trainer.policy.optimizer_config.lr"


def test_values_are_listed_by_commas_by_ranges_and_by_hydras_grammar() -> None:
    given = [
        f"{RATE}=1e-4,1e-3",
        "trainer.seed=0..2",
        "a=[1,2]",
        "b=[1],[2,3]",
        "c='x,y'",
        "d=range(0,2)",
        "e=2..1",
        "~f",
    ]
    fixed, swept = split(given)
    assert fixed == ["a=[1,2]", "c='x,y'", "e=2..1", "~f"]
    assert swept == {
        RATE: ["0.0001", "0.001"], "trainer.seed": ["0", "1", "2"], "b": ["[1]", "[2,3]"], "d": ["0", "1"]
    }  # fmt: skip


def test_a_sweep_trains_each_combination_once_and_continues_after_a_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    commands: list[list[str]] = []
    composing = threading.Lock()  # hydra has one global state

    def scripted_run(command: list[str], stdout: IO[bytes], **_: Any) -> SimpleNamespace:
        """A run that finishes at once, in a folder that holds nothing else."""
        commands.append(command)
        recipe, *overrides = command[command.index("train") + 1 :]
        with composing:
            config, wrong = compose(recipe, overrides), compose(recipe, [*overrides, "data.generate=7"])
        assert config.trainer.run_dir is not None
        folder, code = Path(config.trainer.run_dir), 2
        if not (folder / "other").exists():
            run, code = RunFolder(folder, config), 0
            run.metrics.append({"step": 3, "reward/mean": config.trainer.seed / 10})
            run.close()
            (folder / FINISHED).write_text("{}")
        else:
            RunFolder(folder, wrong).close()  # as if an earlier start with these settings had failed
        stdout.write(f"exit code {code}".encode())
        return SimpleNamespace(wait=lambda: code, poll=lambda: code)

    monkeypatch.setattr("skyrl_train.entrypoints.sweep.subprocess.Popen", scripted_run)
    folder = tmp_path / "mine"
    given = ["sweep", *TINY, f"{RATE}=1e-4,1e-3", "trainer.seed=5..6", "--folder", str(folder), "--jobs", "2"]
    names = [f"lr-{rate}_seed-{seed}" for rate in ("0.0001", "0.001") for seed in (5, 6)]
    (folder / names[3]).mkdir(parents=True)
    (folder / names[3] / "other").touch()
    assert main(given) == 1
    shown = capsys.readouterr().out
    assert shown.count("begins: ") == 4 and shown.count("finished: ") == 3
    assert f"failed with exit code 2: {names[3]}" in shown
    assert (folder / f"{names[3]}.log").read_text() == "exit code 2"
    rows = [line.split() for line in shown.splitlines() if line.startswith(" lr-")]
    assert [row[1:] for row in rows[:3]] == [
        ["finished", "3", "0.600", "0.600"],
        *[["finished", "3", "0.500", "0.500"]] * 2,
    ]
    (folder / names[3] / "other").unlink()
    assert main(given) == 0, "the one that failed"
    assert len(commands) == 5 and f"trainer.run_dir={folder / names[3]}" in commands[4]
    assert main([word.replace("data.generate=8", "data.generate=9") for word in given]) == 2
    assert "data.generate: was 8, now 9" in capsys.readouterr().err


def test_a_sweep_needs_several_values_that_can_work(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["sweep", "quickstart", "trainer.seed=1"]) == 2
    assert main(["sweep", "quickstart", "trainer.max_steps=0..1", f"--folder={tmp_path}/new"]) == 2
    assert main(["sweep", "quickstart", "trainer.sead=0..1"]) == 2
    told = capsys.readouterr().err
    assert "No setting has several values" in told and "max_steps" in told and "Did you mean trainer.seed" in told
    assert not (tmp_path / "new").exists()


@pytest.mark.parametrize(
    ("swept", "told"),
    [
        ("data.train_data=[],[missing.jsonl]", "missing.jsonl does not exist"),
        ("rollout.stages.reward.function=null,no_such_module:reward", "no_such_module"),
        ("trainer.policy.model.path=null,./no-model", "./no-model"),
    ],
)
def test_no_run_begins_if_a_later_one_cannot_work(
    swept: str, told: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["sweep", *TINY, swept, f"--folder={tmp_path}/new"]) == 2
    assert told in capsys.readouterr().err and not (tmp_path / "new").exists()


@pytest.mark.parametrize("exit_code", [0, 130], ids=["with a checkpoint", "before training began"])
def test_an_interrupted_sweep_stops_its_runs_once_and_begins_no_other(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], exit_code: int
) -> None:
    code = (
        f"import signal, sys; signal.signal(signal.SIGINT, lambda *_: sys.exit({exit_code}))\n"
        "print('up', flush=True); signal.pause()"
    )
    started: list[subprocess.Popen[bytes]] = []
    begun, raised, popen = threading.Event(), threading.Event(), subprocess.Popen

    def start(command: list[str], **how: Any) -> subprocess.Popen[bytes]:
        started.append(popen([sys.executable, "-c", code], **{**how, "stdout": subprocess.PIPE}))
        begun.set()
        raised.wait()  # Ctrl-C comes before the sweep has noted this process
        return started[-1]

    def interrupted(_: object) -> None:
        begun.wait()
        assert started[0].stdout is not None and started[0].stdout.readline() == b"up\n"
        raised.set()
        raise KeyboardInterrupt

    monkeypatch.setattr("skyrl_train.entrypoints.sweep.subprocess.Popen", start)
    monkeypatch.setattr("skyrl_train.entrypoints.sweep.wait", interrupted)
    assert main(["sweep", "quickstart", "trainer.seed=0..1", f"--folder={tmp_path}"]) == 130
    shown = capsys.readouterr().out
    assert len(started) == 1 and "stopped: seed-0" in shown
    assert shown.count("not begun") == 1


def test_a_sweep_whose_folder_or_logs_cannot_be_written_says_which(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "file").touch()
    command = ["sweep", *TINY, "trainer.seed=1,2", "--folder"]
    assert main([*command, str(tmp_path / "file" / "sweep")]) == 2
    assert "Name another folder with --folder" in capsys.readouterr().err
    for name in ("seed-1.log", "seed-2.log"):
        (tmp_path / "sweep" / name).mkdir(parents=True)
    assert main([*command, str(tmp_path / "sweep")]) == 1
    assert capsys.readouterr().out.count("seed-2.log: Is a directory") == 1
