"""Commands in processes that lack something: a standard stream, a current folder, room for temporary files, a reader."""

from __future__ import annotations

import errno
import io
import logging
import os
import subprocess
import sys
from pathlib import Path
from typing import NoReturn

import pytest
from test_entrypoint import TINY

from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.run_output import RunOutput
from skyrl_train.observability.run_folder import FINISHED, TRAINER_LOG
from skyrl_train.runtime.process import add_log_file


def test_a_command_without_standard_streams_gives_their_numbers_to_no_socket(tmp_path: Path) -> None:
    code = (
        "import os, socket, sys\n"
        "from skyrl_train.entrypoints.command_line import main\n"
        "code = main(['--version'])\n"
        "ends = [end.fileno() for end in socket.socketpair()]\n"
        "streams = [os.get_inheritable(stream) for stream in range(3)]\n"
        f"open({str(tmp_path / 'found')!r}, 'w').write(f'{{code}} {{min(ends) > 2}} {{streams}}')"
    )
    closed = 'exec "$0" -c "$1" <&- >&- 2>&-'
    assert subprocess.run(["sh", "-c", closed, sys.executable, code]).returncode == 0
    assert (tmp_path / "found").read_text() == "0 True [True, True, True]"


def test_what_a_stream_cannot_encode_is_printed_as_a_question_mark() -> None:
    code = "from skyrl_train.entrypoints.command_line import main; main(['--version']); print('0.1 → 0.2')"
    ascii_only = os.environ | {"PYTHONIOENCODING": "ascii"}
    done = subprocess.run([sys.executable, "-c", code], env=ascii_only, capture_output=True, text=True, check=True)
    assert done.stdout.endswith("0.1 ? 0.2\n")


@pytest.mark.parametrize("words", [["train", "quickstart"], ["plan", "quickstart"], ["watch"], ["report", "x"]])
def test_a_current_folder_that_was_deleted_is_an_error_that_says_so(
    words: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "gone").mkdir()
    monkeypatch.chdir(tmp_path / "gone")
    (tmp_path / "gone").rmdir()
    assert main(words) == 2
    assert "cd FOLDER" in capsys.readouterr().err


def test_verbs_that_need_temporary_files_name_the_variable_for_their_folder(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_folder() -> NoReturn:
        raise FileNotFoundError(errno.ENOENT, "No usable temporary directory found in ['/tmp']")

    monkeypatch.setattr("tempfile.gettempdir", no_folder)
    assert main(["train", "quickstart"]) == 2
    told = capsys.readouterr().err
    assert "['/tmp']" in told
    assert "TMPDIR" in told
    assert main(["doctor"]) == 1
    assert "TMPDIR" in next(line for line in capsys.readouterr().out.splitlines() if "temporary files:" in line)


def test_verbs_that_compute_may_open_as_many_files_as_are_allowed() -> None:
    code = (
        "import resource\n"
        "from skyrl_train.entrypoints.command_line import main\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 200))\n"
        "print([(main([*words]), resource.getrlimit(resource.RLIMIT_NOFILE)) for words in (['plan', '-h'], ['train', '-h'])])"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.endswith("[(0, (64, 200)), (0, (200, 200))]\n")


def test_a_run_whose_pipe_has_no_reader_any_more_stops_and_the_same_command_resumes_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    command = ["train", *TINY, f"trainer.run_dir={folder}"]
    reader, writer = os.pipe()
    os.close(reader)
    with monkeypatch.context() as patch, os.fdopen(writer, "w") as pipe:
        patch.setattr("sys.stdout", pipe)
        assert main(command) == 0
    told = capsys.readouterr().err
    assert "The same command resumes it" in told
    assert "Traceback" not in told
    assert not (folder / FINISHED).exists()
    assert main(command) == 0
    assert (folder / FINISHED).exists()


def test_a_run_whose_output_cannot_be_written_trains_on(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    folder = tmp_path / "run"
    with monkeypatch.context() as patch, Path("/dev/full").open("w") as full:
        patch.setattr("sys.stdout", full)
        assert main(["train", *TINY, f"trainer.run_dir={folder}"]) == 0
    assert (folder / FINISHED).exists()
    assert "has finished" in (folder / "logs" / TRAINER_LOG).read_text()


def test_the_output_of_a_run_may_be_finalised_after_its_stream_was_closed() -> None:
    stream = io.StringIO()
    output = RunOutput(stream, lambda: None)
    stream.close()
    output.close()  # as the finaliser does, which reports errors from Python 3.13 on


def test_a_log_on_a_full_disk_loses_its_lines_and_hides_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    library = logging.getLogger("skyrl_train")
    level, handler = library.level, add_log_file(Path("/dev/full"))
    try:
        library.error("lost")
    finally:
        library.setLevel(level)
        library.removeHandler(handler)
    handler.close()
    assert capsys.readouterr().err == ""
