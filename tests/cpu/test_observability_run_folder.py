"""The run folder: which one a command continues, and files that survive a kill at any byte."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
import tracemalloc
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.compose import from_yaml
from skyrl_train.config.schema import ResumeMode, RunConfig, TrainerConfig
from skyrl_train.errors import ConfigError, SkyRLError
from skyrl_train.observability import run_folder
from skyrl_train.observability.advice import edge_rows
from skyrl_train.observability.run import load_run
from skyrl_train.observability.run_folder import (
    FINISHED,
    JsonlFile,
    RunChoice,
    RunFolder,
    choose_run_folder,
    left_behind,
    read_jsonl,
    replace_file,
    trains_now,
)
from skyrl_train.observability.screen import summarize


def config_of(runs_dir: Path, *, seed: int = 0, run_dir: Path | None = None, resume: str = "latest") -> RunConfig:
    config = RunConfig()
    config.trainer.runs_dir = str(runs_dir)
    config.trainer.run_dir = None if run_dir is None else str(run_dir)
    config.trainer.seed = seed
    config.trainer.resume = ResumeMode(resume)
    return config


def run(config: RunConfig, *, finish: bool = False) -> RunChoice:
    """Do to the disk the same as a command; without ``finish`` it was killed."""
    choice = choose_run_folder(config)
    with closing(RunFolder(choice.path, config)) as folder:
        if finish:
            replace_file(folder.path / FINISHED, "{}")
    return choice


# Which folder -----------------------------------------------------------------------------------------------------


def test_a_run_gets_the_next_number_and_its_parents(tmp_path: Path) -> None:
    runs = tmp_path / "a" / "b"
    assert run(config_of(runs), finish=True) == (runs / "run-1", False, False)
    assert run(config_of(runs), finish=True) == (runs / "run-2", False, False)


def test_the_same_command_continues_an_unfinished_run(tmp_path: Path) -> None:
    run(config_of(tmp_path))
    assert run(config_of(tmp_path)) == (tmp_path / "run-1", True, False)


def test_a_name_with_a_folder_is_numbered_and_continued_in_that_folder(tmp_path: Path) -> None:
    config = config_of(tmp_path)
    config.trainer.run_name = "sums/seed-0"
    assert run(config) == (tmp_path / "sums" / "seed-0-1", False, False)
    assert run(config, finish=True) == (tmp_path / "sums" / "seed-0-1", True, False)
    assert run(config) == (tmp_path / "sums" / "seed-0-2", False, False)


def test_another_configuration_starts_another_run_and_leaves_the_first_to_be_continued(tmp_path: Path) -> None:
    run(config_of(tmp_path))
    assert run(config_of(tmp_path, seed=1)) == (tmp_path / "run-2", False, False)
    assert run(config_of(tmp_path)) == (tmp_path / "run-1", True, False)


def test_resume_never_starts_another_run(tmp_path: Path) -> None:
    run(config_of(tmp_path))
    assert run(config_of(tmp_path, resume="never")).path == tmp_path / "run-2"


def test_folders_with_other_names_do_not_count(tmp_path: Path) -> None:
    for name in ("run-x", "runner-7", "run-3.bak", "other-9"):
        (tmp_path / name).mkdir()
    (tmp_path / "run-8").touch()
    assert run(config_of(tmp_path)).path == tmp_path / "run-1"


@pytest.mark.parametrize("content", [None, "", "trainer: {setting_of_another_version: 1}", "a: [", "cut: \udcc3"])
def test_a_run_whose_configuration_cannot_be_read_is_not_continued(tmp_path: Path, content: str | None) -> None:
    (tmp_path / "run-1").mkdir()
    if content is not None:
        (tmp_path / "run-1" / "config.yaml").write_text(content, errors="surrogateescape")
    assert run(config_of(tmp_path, seed=1)).path == tmp_path / "run-2"


def test_no_new_run_begins_while_a_configuration_cannot_be_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def stale(folder: Path) -> RunConfig:
        raise OSError(errno.ESTALE, "Stale file handle")

    run(config_of(tmp_path))
    with monkeypatch.context() as patch:
        patch.setattr(run_folder, "read_config", stale)
        with pytest.raises(ConfigError, match=r"run-1 may be the run to continue, but .* Stale file handle\. Give"):
            run(config_of(tmp_path))
    assert run(config_of(tmp_path)).resuming and not (tmp_path / "run-2").exists()


def test_a_number_that_another_process_takes_a_moment_earlier_is_left_to_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    really = Path.mkdir

    def taken(self: Path, *args: object, **kwargs: object) -> None:
        if self.name == "run-1":
            really(self)
        really(self, *args, **kwargs)  # type: ignore[arg-type]

    monkeypatch.setattr(Path, "mkdir", taken)
    assert choose_run_folder(config_of(tmp_path)).path == tmp_path / "run-2"


@dataclass
class Model:
    """The rule, on a list instead of a disk: ``(seed, finished)`` of run 1, 2, ..."""

    runs: list[tuple[int, bool]] = field(default_factory=list)

    def choose(self, seed: int, never: bool) -> tuple[int, bool]:
        if not never:
            for number in range(len(self.runs), 0, -1):
                if self.runs[number - 1] == (seed, False):
                    return number, True
        self.runs.append((seed, False))
        return len(self.runs), False


@settings(max_examples=15)
@given(st.lists(st.tuples(st.integers(0, 2), st.booleans(), st.booleans()), max_size=6))
def test_a_command_continues_the_newest_unfinished_run_of_its_configuration_or_starts_a_new_one(
    commands: list[tuple[int, bool, bool]],
) -> None:
    model = Model()
    with TemporaryDirectory() as folder:
        for seed, never, finish in commands:
            number, resuming = model.choose(seed, never)
            choice = run(config_of(Path(folder), seed=seed, resume="never" if never else "latest"), finish=finish)
            assert choice == (Path(folder) / f"run-{number}", resuming, False)
            if finish:
                model.runs[number - 1] = (seed, True)


def test_a_given_folder_is_used_and_continued(tmp_path: Path) -> None:
    config = config_of(tmp_path, run_dir=tmp_path / "here")
    assert run(config) == (tmp_path / "here", False, False)
    assert run(config, finish=True) == (tmp_path / "here", True, False)
    assert run(config) == (tmp_path / "here", True, True)


def test_a_given_folder_in_which_a_run_died_before_it_began_is_a_new_run(tmp_path: Path) -> None:
    (tmp_path / "here" / "checkpoints").mkdir(parents=True)
    (tmp_path / "here" / "run.lock").touch()
    config = config_of(tmp_path, run_dir=tmp_path / "here", resume="never")
    assert run(config) == (tmp_path / "here", False, False)


def test_a_given_folder_of_another_run_is_an_error_that_names_the_difference(tmp_path: Path) -> None:
    ours, other = (config_of(tmp_path, run_dir=tmp_path / "here", seed=seed) for seed in (0, 1))
    with closing(RunFolder(choose_run_folder(ours).path, ours)) as folder:
        folder.metrics.append({"step": 1})
    with pytest.raises(ConfigError, match=r"trainer\.seed: was 0, now 1\n.*trainer\.init_from=.*here and"):
        run(other)


@pytest.mark.parametrize("begun", ["", "checkpoints/global_step_0", "metrics.jsonl", "finished.json"])
def test_a_start_that_failed_leaves_its_folder_to_the_corrected_command(tmp_path: Path, begun: str) -> None:
    wrong, corrected = (config_of(tmp_path, run_dir=tmp_path / "here", seed=seed) for seed in (0, 1))
    run(wrong)
    left = [tmp_path / "here" / "model" / "config.json", tmp_path / "here" / "init_from.json"]
    left[0].parent.mkdir()
    for file in [*left, tmp_path / "here" / "logs" / "trainer.log"]:
        file.touch()
    assert run(wrong) == (tmp_path / "here", True, False) and all(file.exists() for file in left)
    if begun:
        (tmp_path / "here" / begun).write_text('{"step": 1}\n')
        with pytest.raises(ConfigError, match=r"trainer\.seed: was 0, now 1"):
            run(corrected)
        assert all(file.exists() for file in left)
        return
    assert run(corrected) == (tmp_path / "here", False, False)
    assert not any(file.exists() for file in left) and (tmp_path / "here" / "logs" / "trainer.log").exists()
    assert run(corrected) == (tmp_path / "here", True, False)


def test_a_finished_run_continues_with_more_steps_and_not_with_fewer(tmp_path: Path) -> None:
    config = config_of(tmp_path, run_dir=tmp_path / "here")
    config.trainer.max_steps = 4
    choice = choose_run_folder(config, total_steps=4)
    with closing(RunFolder(choice.path, config)) as folder:
        folder.metrics.append({"step": 4})
        replace_file(folder.path / FINISHED, "{}")
    assert choose_run_folder(config, total_steps=4).finished
    config.trainer.max_steps = 3
    assert choose_run_folder(config, total_steps=3).finished
    config.trainer.max_steps = 9
    assert choose_run_folder(config, total_steps=9) == (tmp_path / "here", True, False)
    RunFolder(tmp_path / "here", config).close()  # killed before it reached step 9
    assert choose_run_folder(config, total_steps=9) == (tmp_path / "here", True, False)


def test_a_finished_run_that_continues_has_no_policy_until_its_new_end(tmp_path: Path) -> None:
    config = config_of(tmp_path, run_dir=tmp_path / "run")
    run(config, finish=True)
    (tmp_path / "run" / "policy").mkdir()
    assert load_run(tmp_path / "run").policy == tmp_path / "run" / "policy"
    run(config)
    assert load_run(tmp_path / "run").policy is None


def test_a_given_folder_with_something_else_is_refused(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").touch()
    with pytest.raises(ConfigError, match="contains no run"):
        run(config_of(tmp_path, run_dir=tmp_path))
    with pytest.raises(ConfigError, match="is a file"):
        run(config_of(tmp_path, run_dir=tmp_path / "thesis.tex"))


def test_resume_never_refuses_a_given_folder_that_is_not_empty(tmp_path: Path) -> None:
    run(config_of(tmp_path, run_dir=tmp_path / "here"))
    with pytest.raises(ConfigError, match="drop resume=never"):
        run(config_of(tmp_path, run_dir=tmp_path / "here", resume="never"))


def test_a_place_that_cannot_be_written_is_refused_with_the_remedy(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    with pytest.raises(ConfigError, match=r"Set trainer\.runs_dir"):
        run(config_of(tmp_path / "file" / "runs"))
    with pytest.raises(ConfigError, match=r"Set trainer\.runs_dir"):
        run(config_of(tmp_path, run_dir=tmp_path / "file" / "run"))


# Contents --------------------------------------------------------------------------------------------------------


def test_the_folder_has_the_configuration_and_its_places(tmp_path: Path) -> None:
    config = config_of(tmp_path, seed=7)
    with closing(RunFolder(tmp_path / "run", config)) as folder:
        assert from_yaml((folder.path / "config.yaml").read_text()) == config
        assert folder.checkpoints.is_dir()
        assert folder.logs.is_dir()
        assert not choose_run_folder(config_of(tmp_path, seed=7, run_dir=tmp_path / "run")).finished
        replace_file(folder.path / FINISHED, "{}")
    assert choose_run_folder(config_of(tmp_path, seed=7, run_dir=tmp_path / "run")).finished


def test_a_line_is_readable_as_soon_as_it_was_appended(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        folder.metrics.append({"step": 1, "reward/mean": 0.5})
        assert list(read_jsonl(folder.metrics.path)) == [{"step": 1, "reward/mean": 0.5}]
        for response in ("ä\n", ""):
            folder.evaluations.append({"step": 1, "response": response})
        assert [row["response"] for row in read_jsonl(tmp_path / "eval.jsonl")] == ["ä\n", ""]


def test_resuming_removes_the_steps_after_the_checkpoint_and_continues(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        for step in (1, 2, 3, 4):
            folder.metrics.append({"step": step, "loss/policy": 0.0})
            for response in ("a", "b"):
                folder.evaluations.append({"step": step, "response": response})
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        folder.metrics.truncate_after(2)
        folder.evaluations.truncate_after(2)
        folder.metrics.append({"step": 3, "loss/policy": 1.0})
        assert [(row["step"], row["loss/policy"]) for row in read_jsonl(folder.metrics.path)] == [
            (1, 0.0),
            (2, 0.0),
            (3, 1.0),
        ]
        assert [row["step"] for row in read_jsonl(tmp_path / "eval.jsonl")] == [1, 1, 2, 2]


def test_numbers_that_json_does_not_know_become_null(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        folder.metrics.append({"step": 1, "a": float("nan"), "b": float("inf"), "c": 1.0})
        assert list(read_jsonl(folder.metrics.path)) == [{"step": 1, "a": None, "b": None, "c": 1.0}]


def test_half_a_surrogate_pair_is_read_as_it_was_written(tmp_path: Path) -> None:
    row = {"step": 1, "uid": "ü\ud83d\\"}
    file = JsonlFile(tmp_path / "rows.jsonl")
    file.append(row)
    file.truncate_after(1)
    file.close()
    assert list(read_jsonl(file.path)) == [row]


@given(st.integers(1, 5), st.data())
def test_a_kill_at_any_byte_loses_at_most_the_line_that_was_being_written(lines: int, data: st.DataObject) -> None:
    with TemporaryDirectory() as folder:
        path = Path(folder) / "rows.jsonl"
        file = JsonlFile(path)
        for step in range(1, lines + 1):
            file.append({"step": step, "text": "ünï" * step})
        file.close()
        content = path.read_bytes()
        kept = data.draw(st.integers(0, len(content)))
        path.write_bytes(content[:kept])
        complete = content[:kept].count(b"\n")

        file = JsonlFile(path)  # the process that resumes
        file.append({"step": 99})
        file.close()
        assert [row["step"] for row in read_jsonl(path)] == [*range(1, complete + 1), 99]
        assert path.read_bytes().endswith(b"\n")


def test_a_resume_and_the_end_of_a_long_run_hold_few_of_its_rows_in_memory(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    line = '{"step": %d, "time/step": 2.0, "group_indices": [%s1]}\n'
    path.write_text("".join(line % (step, "1, " * 3000) for step in range(1, 1001)) + "{" * 200_000)
    tracemalloc.start()
    file = JsonlFile(path)
    file.truncate_after(990)
    file.close()
    rows = edge_rows(read_jsonl(path))
    summary = summarize(read_jsonl(path))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert [row["step"] for row in rows] == [1, 2, 3, 4, 5, *range(981, 991)]
    assert (summary.steps, summary.training_s) == (990, 1980.0)
    assert path.stat().st_size > 8_000_000 > 8 * peak


def test_lines_that_cannot_be_read_do_not_stop_a_resume(tmp_path: Path) -> None:
    path = tmp_path / "rows.jsonl"
    path.write_bytes(b'{"step": 1}\n\0\0\0\n[1]\n{"no": "step"}\n\xff\xfe\n{"step": 2}\n{"st')
    file = JsonlFile(path)
    file.truncate_after(5)
    file.close()
    assert path.read_text() == '{"step": 1}\n{"step": 2}\n'


def test_a_full_disk_is_one_clear_message_and_the_old_file_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(descriptor: int, content: bytes = b"") -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        folder.metrics.append({"step": 1})
        monkeypatch.setattr(run_folder.os, "write", full)
        with pytest.raises(SkyRLError, match=r"No space left on device\. Make room"):
            folder.metrics.append({"step": 2})
        monkeypatch.setattr(run_folder.os, "fsync", full)
        with pytest.raises(SkyRLError, match=r"No space left on device\. Make room"):
            replace_file(tmp_path / FINISHED, "{}")
        assert not (tmp_path / FINISHED).exists()
        assert not list(tmp_path.glob("*.tmp"))


# Who may write ----------------------------------------------------------------------------------------------------

HOLD = """
import os, sys
from pathlib import Path
from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.run_folder import RunFolder
folder = RunFolder(Path(sys.argv[1]), RunConfig())
child = os.fork() if sys.argv[2] == "with a child" else 1
if child == 0:
    sys.stdin.read()  # outlives its parent, as an engine's process may
    os._exit(0)
print(child, flush=True)
sys.stdin.read()
"""


def holder(folder: Path, child: str) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(
        [sys.executable, "-c", HOLD, str(folder), child], stdin=subprocess.PIPE, stdout=subprocess.PIPE
    )
    assert process.stdout is not None
    assert process.stdout.readline()
    return process


def test_two_processes_never_train_in_one_folder(tmp_path: Path) -> None:
    process = holder(tmp_path, "alone")
    with pytest.raises(ConfigError, match="Another process trains in"):
        RunFolder(tmp_path, RunConfig())
    assert trains_now(tmp_path)
    process.communicate()
    assert not trains_now(tmp_path)
    RunFolder(tmp_path, RunConfig()).close()


def test_a_file_system_without_locks_is_not_another_process(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def no_locks(*_: object) -> None:
        raise OSError(errno.ENOSYS, "Function not implemented")

    with monkeypatch.context() as patch:
        patch.setattr("fcntl.lockf", no_locks)
        with pytest.raises(ConfigError, match=r"has no locks .Function not implemented.*a folder on another one"):
            RunFolder(tmp_path, RunConfig())
    (tmp_path / "run.lock").unlink()
    (tmp_path / "run.lock").mkdir()
    with pytest.raises(ConfigError, match=r"run.lock cannot be opened: Is a directory. Set trainer.runs_dir"):
        RunFolder(tmp_path, RunConfig())


def test_a_killed_run_can_be_resumed_at_once_even_if_a_child_of_it_lives_on(tmp_path: Path) -> None:
    process = holder(tmp_path, "with a child")
    process.kill()
    process.wait()
    RunFolder(tmp_path, RunConfig()).close()
    process.communicate()  # closes stdin, on which the child ends


def test_one_process_does_not_open_a_folder_twice(tmp_path: Path) -> None:
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        with pytest.raises(ConfigError, match="This process trains in"):
            RunFolder(tmp_path, RunConfig())
        folder.metrics.append({"step": 1})
    with closing(RunFolder(tmp_path, RunConfig())) as folder:
        assert list(read_jsonl(folder.metrics.path)) == [{"step": 1}]


def test_a_folder_that_could_not_be_opened_opens_once_the_cause_is_gone(tmp_path: Path) -> None:
    (tmp_path / "eval.jsonl").mkdir()
    with pytest.raises(IsADirectoryError):
        RunFolder(tmp_path, RunConfig())
    (tmp_path / "eval.jsonl").rmdir()
    RunFolder(tmp_path, RunConfig()).close()


def test_an_unfinished_run_that_is_not_continued_is_mentioned(tmp_path: Path) -> None:
    first, second = (RunConfig(trainer=TrainerConfig(runs_dir=str(tmp_path), seed=seed)) for seed in (0, 1))
    assert left_behind(first) == ""
    with closing(RunFolder(choose_run_folder(first).path, first)) as folder:
        assert left_behind(second) == "", "it has trained nothing that one could go on with"
        folder.metrics.append({"step": 1})
    assert "run-1 is unfinished, but has other settings (trainer.seed: was 0, now 1)" in left_behind(second)
