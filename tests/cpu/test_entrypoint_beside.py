"""Readers beside a run: the page and the screens of the command that trains."""

from __future__ import annotations

import os
import pty
import re
import signal
import socket
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path

import pytest
from recorded_runs import RecordedRun

from skyrl_train.entrypoints import beside
from skyrl_train.entrypoints.beside import Readers
from skyrl_train.entrypoints.command_line import main
from skyrl_train.observability.readers.panel import WatchedRun
from skyrl_train.observability.screens import TrainingScreens


@pytest.fixture(scope="module")
def run(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = RecordedRun(tmp_path_factory.mktemp("beside") / "run", steps=3).path
    (path / "logs").mkdir(exist_ok=True)
    return path


def test_a_port_in_use_and_a_missing_terminal_are_said_before_the_run_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(os, "isatty", lambda file: False)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        taken.listen()
        port = taken.getsockname()[1]
        for given in (["--page", f":{port}"], ["--page", str(port)], [f"--page={port}"]):
            assert main(["train", "quickstart", *given]) == 2
            assert f"127.0.0.1:{port}: Address already in use. Give another port in --page" in capsys.readouterr().err
    assert main(["train", "quickstart", "--watch"]) == 2
    assert "--watch needs a terminal" in capsys.readouterr().err
    assert main(["train", "quickstart", "--page=here"]) == 2
    assert "--page=here is no port" in capsys.readouterr().err
    assert list(tmp_path.iterdir()) == []


def test_the_page_needs_no_port(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def train_recipe(recipe: str, overrides: list[str], *_: object, page: str, **__: object) -> int:
        asked.append((recipe, list(overrides), page))
        return 0

    monkeypatch.setattr("skyrl_train.entrypoints.train.train_recipe", train_recipe)
    for words in (["--page", "quickstart"], ["quickstart", "trainer.seed=1", "--page"], ["quickstart", "--page", ":9"]):
        assert main(["train", *words]) == 0
    assert asked == [
        ("quickstart", [], ":7860"), ("quickstart", ["trainer.seed=1"], ":7860"), ("quickstart", [], ":9"),
    ]  # fmt: skip


def test_the_page_is_served_while_the_run_trains(
    run: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(beside, "END_LIMIT_S", 600.0)  # on a busy machine, a server takes long to end by itself
    with Readers(page="0", watch=False) as readers:
        assert f"The page of the run: {readers.url}/" in capsys.readouterr().out
        readers.begin(run)
        process = readers._page
        with urllib.request.urlopen(f"{readers.url}/api/runs", timeout=300) as answer:
            assert b'"step":3' in answer.read()
    assert process is not None and process.poll() == 0
    with pytest.raises(urllib.error.URLError):
        urllib.request.urlopen(f"{readers.url}/")


def test_a_reader_that_cannot_start_or_dies_does_not_fail_the_run(
    run: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def nothing(*_: object, **__: object) -> None:
        raise OSError("no processes")

    with monkeypatch.context() as patch, Readers(page="0", watch=False) as readers:
        patch.setattr(subprocess, "Popen", nothing)
        readers.begin(run)
    assert "continues without its page or screens: no processes" in caplog.text
    monkeypatch.setattr(sys, "executable", "/bin/false")
    with Readers(page="0", watch=False) as readers:
        readers.begin(run)


async def test_ctrl_c_in_the_screens_stops_the_run_and_a_second_one_at_once(run: Path) -> None:
    stops: list[bool] = []
    app = TrainingScreens(WatchedRun(run), 600.0, lambda: stops.append(True))
    async with app.run_test(size=(120, 40)) as pilot:
        await pilot.press("ctrl+c")
        assert stops == [True] and app.is_running and not app.at_once
        await pilot.press("ctrl+c")
    assert stops == [True] and app.at_once


async def test_screens_end_with_the_run_also_if_it_ends_first(run: Path) -> None:
    app = TrainingScreens(WatchedRun(run), 600.0, lambda: None)
    app.leave()
    async with app.run_test(size=(120, 40)):
        pass
    assert not app.is_running and not app.at_once


WATCHED = """
import os, signal, sys
from pathlib import Path
from skyrl_train.entrypoints.beside import Readers

stops = []
signal.signal(signal.SIGINT, lambda *_: stops.append(1))
with Readers(page=None, watch=True) as readers:
    print("held back", flush=True)
    os.system("echo of a child")
    readers.begin(Path(sys.argv[1]))
    while not stops:
        signal.pause()
    print("asked to stop", flush=True)
print("printed afterwards", flush=True)
"""


@pytest.mark.slow
def test_the_screens_have_the_terminal_and_give_it_back(run: Path) -> None:
    process, terminal = pty.fork()
    if process == 0:
        os.environ["TERM"] = "xterm-256color"
        os.execv(sys.executable, [sys.executable, "-c", WATCHED, str(run)])
    output, pressed = b"", False
    while True:
        try:
            output += os.read(terminal, 1 << 16)
        except OSError:  # the other side is closed
            break
        if not pressed and b"stop the run" in output:  # in the footer of the screens
            pressed = bool(os.write(terminal, b"\x03"))
    assert os.waitpid(process, 0)[1] == 0
    screens, _, after = output.rpartition(b"\x1b[?1049l")
    assert b"\x1b[?1049h" in screens and b"held back" not in screens
    lines = re.sub(rb"\x1b\[[0-9;?<>=u]*[a-zA-Z]", b"", after).decode().split("\r\n")
    wanted = ["held back", "of a child", "asked to stop", "printed afterwards"]
    assert [line.strip() for line in lines if line.strip() in wanted] == wanted
    os.close(terminal)


def test_a_reader_that_does_not_end_is_killed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beside, "END_LIMIT_S", 0.0)
    with subprocess.Popen([sys.executable, "-c", "import signal; signal.pause()"]) as reader:
        beside.end(reader)
    assert reader.returncode == -signal.SIGKILL
