"""Failures of users' code: the traceback in the log, the user's line on the screen, then counts."""

from __future__ import annotations

import logging
import traceback
from pathlib import Path

import pytest
from harness import Harness

from skyrl_train.config.import_path import import_name
from skyrl_train.errors import ConfigError, RolloutError, output_note
from skyrl_train.observability.failures import MAX_OUTPUTS, MAX_SHOWN_KINDS, FailureLog, user_frame
from skyrl_train.types import GeneratorInput
from skyrl_train.workers.executors import CallFailed, WorkHost
from skyrl_train.workers.messages import Call, Failure

REWARD = """
import json

def load(text):
    return json.loads(text)

def reward(group):
    return load("{")

def other(group):
    raise KeyError(group)
"""


@pytest.fixture
def rewards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    monkeypatch.chdir(tmp_path)
    Path("my_reward.py").write_text(REWARD)
    return "my_reward.py"


def raised(rewards: str, name: str) -> Exception:
    """The error of the user's function, wrapped as a rollout's."""
    try:
        try:
            import_name(f"{rewards}:{name}", "a setting", "function")("group")
        except Exception as error:
            raise RolloutError("an environment failed") from error
    except RolloutError as error:
        return error
    raise AssertionError


def test_the_users_frame_is_the_innermost_one_outside_of_libraries(rewards: str) -> None:
    # json raises in its own files; the line of the user that called it is the one to look at.
    text = "".join(traceback.format_exception(raised(rewards, "reward")))
    assert user_frame(text) == "my_reward.py:5 in load"
    assert user_frame("no traceback") == ""


def test_the_users_frame_is_found_in_the_traceback_of_another_process(rewards: str) -> None:
    host = WorkHost()
    host.function = import_name(f"{rewards}:reward", "a setting", "function")
    failure = host.answer(Call(1, "run", ("group",)))
    assert isinstance(failure, Failure)
    text = "".join(traceback.format_exception(CallFailed(failure)))
    assert user_frame(text) == "my_reward.py:5 in load"


def test_a_traceback_is_logged_once_for_each_failing_line_and_then_counted(
    rewards: str, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailureLog(Path("logs"))
    shown = [
        failures.record(f"group {number}", "it raised", raised(rewards, "other" if number == 3 else "reward"))
        for number in range(11)
    ]
    assert [(number, place) for number, place in enumerate(shown) if place is not None] == [
        (0, "my_reward.py:5 in load"),
        (3, "my_reward.py:11 in other"),
    ]
    assert caplog.text.count("Traceback") == 4  # two kinds, each with its cause
    assert 'my_reward.py", line 8, in reward' in caplog.text and "KeyError: 'group'" in caplog.text
    assert "10 failures like the one above at my_reward.py:5 in load; the last: group 10" in caplog.text
    failures.close()
    assert "failures at my_reward.py:5 in load: 10" in caplog.text
    assert "failures at my_reward.py:11 in other: 1" in caplog.text


def test_a_line_of_this_library_is_not_shown_as_the_users() -> None:
    with pytest.raises(ConfigError) as raised:
        import_name("no/file.py:reward", "a setting", "function")
    error = raised.value.with_traceback(raised.tb.tb_next)  # without this test's own line
    assert user_frame("".join(traceback.format_exception(error))) != "", "the innermost line of all"
    assert FailureLog(Path("logs")).record("group 0", "it raised", error) == ""


def test_the_screen_shows_no_more_than_a_few_kinds(tmp_path: Path) -> None:
    failures = FailureLog(tmp_path)
    shown = []
    for number in range(2 * MAX_SHOWN_KINDS):
        error = RolloutError("failed")
        error.add_note(f'Traceback (most recent call last):\n  File "/my/agent.py", line {number}, in run\n')
        shown.append(failures.record("group 0", "it raised", error))
    assert [place is not None for place in shown] == [True] * MAX_SHOWN_KINDS + [False] * MAX_SHOWN_KINDS


def test_the_output_of_a_failed_agent_program_has_a_file_of_its_own(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    failures = FailureLog(tmp_path)
    for number in range(MAX_OUTPUTS + 3):
        error = RolloutError("the agent failed")
        error.add_note(output_note(f"a/b'@{number}_0", "[standard output]\nhello\n[standard error]\nboom"))
        failures.record(f"group {number}", "it failed", error)
    files = sorted((tmp_path / "agents").iterdir())
    assert len(files) == MAX_OUTPUTS and (tmp_path / "agents" / "a%2Fb%27@0_0.log") in files
    assert files[0].read_text() == "[standard output]\nhello\n[standard error]\nboom\n"
    assert "boom" not in caplog.text


async def test_a_run_shows_the_line_that_failed_and_logs_its_start_and_weight_syncs(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    h = Harness(tmp_path / "run", "trainer.max_steps=2")
    failed: set[str] = set()

    def fail_once(batch: GeneratorInput) -> None:
        instance = batch["trajectory_ids"][0].instance_id
        if instance not in failed:
            failed.add(instance)
            raise LookupError("scripted [failure]")

    h.generator.before = fail_once
    with caplog.at_level(logging.INFO, "skyrl_train"):
        await h.train()
    line = fail_once.__code__.co_firstlineno + 4
    shown = " ".join(h.screen.getvalue().split())
    assert shown.count("an attempt failed at") == 1
    assert f"test_observability_failures.py:{line} in fail_once: it raised LookupError('scripted [failure]')" in shown
    assert caplog.text.count("LookupError: scripted [failure]") == 1
    for fact in ("start-up: first weight sync took", "policy version 0 reached", "policy version 2 reached"):
        assert fact in caplog.text
