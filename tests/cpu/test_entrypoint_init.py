"""The command that writes a recipe, code and a test for the user's data: they run unchanged."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

import skyrl_train
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import GeneratorConfig, RunConfig
from skyrl_train.entrypoints.command_line import main
from skyrl_train.entrypoints.settings import check_working_folder
from skyrl_train.errors import ConfigError

ROWS = (
    '{"question": "2+3=", "solution": "5", "note": "a \\"quoted\\" text"}\n{"question": "1e5${?", "solution": "15"}\n'
)


@pytest.mark.parametrize(
    "kind",
    ["env", *(pytest.param(kind, marks=pytest.mark.slow) for kind in ("reward", "agent", "program"))],
)
def test_what_it_writes_passes_its_own_tests_and_generates_a_group(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "sums.jsonl").write_text(ROWS)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("SKYRL_TRAIN_LAUNCHER", "./uvw")
    assert main(["init", "mine/sums", "--kind", kind, "--data", "sums.jsonl"]) == 0
    printed = capsys.readouterr().out
    assert "prompts in 'question', right answers in 'solution'" in printed
    assert "\n../../uvw run skyrl-train train recipe.yaml\n" in printed
    monkeypatch.chdir("mine/sums")
    config = compose("recipe.yaml")
    assert config.trainer.policy.model.build.alphabet == "+1235=?e{$", "a text, in which nothing is interpolated"
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-k", "right_answer", "test_task.py"]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0 and " passed" in done.stdout, done.stdout
    # The test's other half, in this process, which has imported torch.
    monkeypatch.setenv("PATH", "/nowhere")  # its python may lack what the run has
    assert main(["try", "recipe.yaml", "--samples", "2"]) == 0
    assert "sample 2 of 2: reward" in capsys.readouterr().out


def test_characters_that_yaml_reads_as_others_are_in_the_alphabet(tmp_path: Path) -> None:
    asked = "it\x92s\x7f\x85a\u2028b\u2029\ufeff"  # of a wrong decoding, and of texts from the web
    (tmp_path / "data.jsonl").write_text(json.dumps({"prompt": asked, "answer": "\u00ad\U000e0001"}) + "\n")
    assert main(["init", str(tmp_path / "mine"), "--data", str(tmp_path / "data.jsonl")]) == 0
    build = compose(str(tmp_path / "mine" / "recipe.yaml")).trainer.policy.model.build
    assert set(build.alphabet) == {*asked, "\u00ad", "\U000e0001"}


def test_the_folder_where_one_is_gives_the_runs_its_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "sums.jsonl").write_text(ROWS)
    (tmp_path / "mine").mkdir()
    monkeypatch.chdir(tmp_path / "mine")
    assert main(["init", ".", "--data", "../sums.jsonl"]) == 0
    assert compose("recipe.yaml").trainer.run_name == "mine"


@pytest.mark.parametrize("kind", ["env", "program"])
def test_from_the_folder_above_each_command_says_where_to_change_to(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("sums.jsonl").write_text(ROWS)
    assert main(["init", "my sums", "--kind", kind, "--data", str(tmp_path / "sums.jsonl")]) == 0
    told = "which is not here and is in the recipe's folder; paths count from here. Change to that folder: cd 'my sums', then"
    for verb in ("plan", "try", "train", "doctor"):
        capsys.readouterr()
        assert main([verb, "my sums/recipe.yaml"]) == 2
        assert told in capsys.readouterr().err
    with pytest.raises(ConfigError, match="paths count from here"):
        skyrl_train.train("my sums/recipe.yaml")
    if kind == "env":
        here = [f"data.train_data=[{tmp_path}/sums.jsonl]", f"environment.env_class='{tmp_path}/my sums/task.py:Task'"]
        assert main(["plan", "my sums/recipe.yaml", *here]) == 0
        text = RunConfig(generator=GeneratorConfig(kwargs={"prompt": ["No file." * 99]}))
        check_working_folder("my sums/recipe.yaml", text)  # longer than the name of a file may be


def test_columns_that_it_does_not_know_are_asked_for(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text('{"q": "2+3=", "a": "5"}\n')
    given = ["init", str(tmp_path / "mine"), "--data", str(data)]
    assert main(given) == 2
    assert main([*given, "--prompt", "q"]) == 2
    assert main([*given, "--prompt", "q", "--answer", "b"]) == 2
    told = capsys.readouterr().err
    assert told.count("has the columns q, a. Name one of them with --prompt and one with --answer.") == 1
    assert told.count("Name one of them with --answer.") == 1
    assert f"--answer 'b' is no column of {data}. Columns: q, a." in told
    assert main([*given, "--prompt", "q", "--answer", "a", "--model", "some/model"]) == 0
    assert 'path: "some/model"' in (tmp_path / "mine" / "recipe.yaml").read_text()
    (tmp_path / "model").mkdir()
    named = ["--prompt", "q", "--answer", "a", "--model", str(tmp_path / "model")]
    assert main(["init", str(tmp_path / "other"), *given[2:], *named]) == 0
    assert 'path: "../model"' in (tmp_path / "other" / "recipe.yaml").read_text(), "as the data, from the new folder"
    assert main([*given, "--prompt", "q", "--answer", "a"]) == 2, "the folder is not empty"
    data.write_text('{"Question": "2+3=", "Solution": "5"}\n')
    assert main(["init", str(tmp_path / "capitals"), "--data", str(data)]) == 0
    assert 'prompt_key: "Question"' in (tmp_path / "capitals" / "recipe.yaml").read_text()
    data.write_text('{"prompt": "2+3="}\n')
    assert main(["init", str(tmp_path / "new"), "--data", str(data)]) == 2
    told = " ".join(capsys.readouterr().err.split())
    assert "has only prompts, in 'prompt'. The code that init writes compares responses with right answers" in told
    data.write_text("")
    assert main(["init", str(tmp_path / "new"), "--data", str(data)]) == 2
    assert "has no rows" in capsys.readouterr().err


def test_data_that_is_missing_is_told_with_what_there_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("sums.jsonl", "other.csv", "notes.md"):
        Path(name).write_text(ROWS)
    for missing, guess in (
        ("sum.jsonl", "Did you mean sums.jsonl?"),
        ("prompts.jsonl", "There is other.csv, sums.jsonl."),
    ):
        assert main(["init", "mine", "--data", missing]) == 2
        assert f"{missing} does not exist (from {tmp_path}). Correct --data. {guess}\n" in capsys.readouterr().err
    assert main(["init", "mine", "--data", "sums.jsonl", "--prompt", "questions"]) == 2
    told = "--prompt 'questions' is no column of sums.jsonl. Did you mean question? Columns: question, solution, note."
    assert told in capsys.readouterr().err
    Path("numbers.jsonl").write_text("1\n2\n")
    assert main(["init", "mine", "--data", "numbers.jsonl"]) == 2
    assert "The first row of numbers.jsonl must be an object with columns, got 1." in capsys.readouterr().err


@pytest.mark.parametrize(
    ("row", "given", "said", "asked", "columns"),
    [
        ('{"q": "2+3=", "a": "5"}', [], ["q", "nothing", "a"], 3, ("q", "a")),
        ('{"prompt": "2+3=", "a": "5", "n": "\\u001b[31m"}', [], ["a"], 1, ("prompt", "a")),
        ('{"q": "2+3=", "a": "5"}', ["--answer", "a"], ["q"], 1, ("q", "a")),
        ('{"question": "2+3=", "solution": "5"}', [], [], 0, ("question", "solution")),
    ],
)
def test_in_a_terminal_it_asks_for_columns_that_it_cannot_tell(
    row: str, given: list[str], said: list[str], asked: int, columns: tuple[str, str],
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str],
) -> None:  # fmt: skip
    (tmp_path / "data.jsonl").write_text(row + "\n")
    questions = 0

    def answer(*_: object) -> str:
        nonlocal questions
        questions += 1
        return said[questions - 1]

    monkeypatch.setattr("builtins.input", answer)
    monkeypatch.setattr("os.isatty", lambda file: True)
    command = ["init", str(tmp_path / "mine"), "--data", str(tmp_path / "data.jsonl"), *given]
    if asked:
        assert main([*command, "--yes"]) == 2 and questions == 0
        assert "Name one of them with --" in capsys.readouterr().err
    assert main(command) == 0
    printed = capsys.readouterr().out
    assert questions == asked and "\x1b" not in printed
    assert (f"prompts in {columns[0]!r}, right answers in {columns[1]!r}") in printed
    assert ("2+3=" in printed) is bool(asked)
