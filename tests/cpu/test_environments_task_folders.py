"""Tasks in folders: what a task says, what its commands may do, what its tests are worth, and the example that trains."""

from __future__ import annotations

import json
import os
import shutil
import stat
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from test_sandbox import run_as_ordinary_user

from skyrl_train.config.compose import compose
from skyrl_train.entrypoints.command_line import main
from skyrl_train.environments import sandbox, task_folders
from skyrl_train.environments.episode import Episode
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.environments.sandbox import why_unavailable
from skyrl_train.environments.task_folders import PROTOCOL, TaskFolder, open_container, read_task
from skyrl_train.errors import ConfigError, DataError, RolloutError
from skyrl_train.rollout.data.dataset import open_rows

EXAMPLE = Path(__file__).parents[2] / "examples" / "async" / "tasks"

# Docker's command for one container: its root is a folder, whose bash runs on this machine.
DOCKER = """#!/bin/bash
set -eu
echo "$*" >>"$FAKE/calls"
command=$1; shift
case $command in
    build) echo sha256:1 ;;
    run) mkdir -p "$FAKE/root/app"; echo container-1 ;;
    cp) mkdir -p "$FAKE/root${2#*:}"; cp -r "$1" "$FAKE/root${2#*:}" ;;
    ps) [ -e "$FAKE/root" ] && echo container-1 ;;
    exec)
        [ -e "$FAKE/root" ] || { echo "Error response from daemon: No such container: container-1" >&2; exit 1; }
        while [ "$1" != container-1 ]; do shift; done
        words=("${@:2}"); last=$((${#words[@]} - 1))
        words[$last]=$(printf '%s' "${words[$last]}" | sed "s# /tests# $FAKE/root/tests#g; s#/logs#$FAKE/root/logs#g")
        sed -i "s#/logs#$FAKE/root/logs#g" "$FAKE"/root/tests/* 2>/dev/null || true
        cd "$FAKE/root/app" && exec "${words[@]}" ;;
    rm) rm -rf "$FAKE/root" ;;
esac
"""


@pytest.fixture
def docker(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A program that behaves like ``docker``; yields the file with its calls."""
    (tmp_path / "bin").mkdir()
    program = tmp_path / "bin" / "docker"
    program.write_text(DOCKER)
    program.chmod(program.stat().st_mode | stat.S_IEXEC)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:{os.environ['PATH']}")
    monkeypatch.setenv("FAKE", str(tmp_path))
    monkeypatch.setattr(task_folders.DockerContainer, "_images", {})
    monkeypatch.setattr(task_folders.DockerContainer, "_keeper", None)
    yield tmp_path / "calls"
    if task_folders.DockerContainer._keeper is not None:
        end(task_folders.DockerContainer._keeper[1])


def end(keeper: subprocess.Popen[bytes]) -> None:
    """What the end of this process does."""
    assert keeper.stdin is not None
    keeper.stdin.close()
    keeper.wait(60)


@pytest.fixture
def bubblewrap() -> None:
    problem = why_unavailable("namespaces")
    if problem:
        pytest.skip(problem)


def write(folder: Path, **files: str) -> Path:
    """A task; ``tests__test_sh`` is ``tests/test.sh``."""
    wanted = {
        "task_toml": "",
        "instruction_md": "Write 7 to the file answer.",
        "environment__Dockerfile": "FROM debian\n",
        "tests__test_sh": "echo 1 > /logs/verifier/reward.txt",
    }
    for name, text in {**wanted, **files}.items():
        path = folder / name.replace("__", "/").replace("_", ".")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    return folder


def environment(folder: Path, max_turns: int = 4, **kwargs: Any) -> TaskFolder:
    made = TaskFolder({"task": str(folder), "max_turns": max_turns}, **kwargs)
    made.init([{"role": "user", "content": made._task.instruction}])
    return made


def test_a_task_says_its_limits_variables_image_and_resources(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("JUDGE", "key-1")
    toml = """
        [agent]
        timeout_sec = 5
        [verifier]
        timeout_sec = 6
        env = {KEY = "${JUDGE}", MODE = "${ABSENT:-strict}"}
        [environment]
        docker_image = "python:3.12"
        cpus = 2
        memory = "4G"
        allow_internet = false
        workdir = "/work"
        env = {LEVEL = 3}
    """
    task = read_task(write(tmp_path, task_toml=toml))
    assert (task.agent_s, task.tests_s, task.image, task.cpus, task.memory_mb) == (5.0, 6.0, "python:3.12", 2.0, 4096)
    assert (task.network, task.workdir, task.variables) == (False, "/work", {"LEVEL": "3"})
    assert task.test_variables == {"KEY": "key-1", "MODE": "strict"}
    assert read_task(write(tmp_path / "plain")).network, "Harbor's default"


@pytest.mark.parametrize(
    ("files", "told"),
    [
        ({"task_toml": "[["}, "task.toml is not readable"),
        ({"task_toml": "agent = 3"}, r"must be a table, \[agent\]"),
        ({"task_toml": "[agent]\ntimeout_sec = 'long'"}, "a value of the wrong kind.*long"),
        ({"task_toml": "[environment]\nenv = {KEY = '${NOT_SET_ANYWHERE}'}"}, "NOT_SET_ANYWHERE is not set"),
        ({"task_toml": "[environment]\nmemory = '2048'"}, "memory='2048' has none of the units"),
        ({"task_toml": "[environment]\ngpus = 1"}, r"environment\.gpus, which is not supported"),
        ({"task_toml": "[agent]\nnetwork_mode = 'allowlist'"}, "network_mode=allowlist"),
        ({"environment__docker-compose_yaml": ""}, "docker-compose.yaml, which is not supported"),
    ],
)
def test_a_task_that_cannot_be_used_is_refused_by_name(tmp_path: Path, files: dict[str, str], told: str) -> None:
    with pytest.raises(DataError, match=told):
        read_task(write(tmp_path, **files))


@pytest.mark.parametrize("missing", ["task.toml", "instruction.md", "tests/test.sh", "environment/Dockerfile"])
def test_a_missing_file_of_a_task_is_named(tmp_path: Path, missing: str) -> None:
    (write(tmp_path) / missing).unlink()
    with pytest.raises(DataError, match=missing.rpartition("/")[2]):
        read_task(tmp_path)


def test_a_folder_of_tasks_is_a_data_set_with_a_row_for_each(tmp_path: Path) -> None:
    for name in ("b", "a"):
        write(tmp_path / name, instruction_md=f"Do {name}.\n")
    rows = open_rows(str(tmp_path))
    assert [row.value for row in rows.rows()] == [
        {"prompt": f"Do {name}.", "task": str(tmp_path / name)} for name in ("a", "b")
    ]
    first = next(iter(rows.rows()))
    assert [row.value["prompt"] for row in rows.rows(start=first.next)] == ["Do b."]
    before = rows.digest()
    (tmp_path / "a" / "tests" / "test.sh").write_text("echo 0 > /logs/verifier/reward.txt")
    assert rows.digest() != before, "another test is another data set"


@pytest.mark.usefixtures("bubblewrap")
def test_files_stay_from_one_command_to_the_next_and_nothing_else_does(tmp_path: Path) -> None:
    container = open_container(write(tmp_path))
    try:
        assert (
            container.run("cd /tmp; echo 7 > answer; export X=1; sleep 100 & echo out; echo err >&2", 60).output
            == "out\nerr\n"
        )
        assert container.run('cat /tmp/answer; echo "$PWD-$X"; awk "BEGIN {print 2 + 3}"', 60).output == "7\n/app-\n5\n"
        assert container.run("exit 3", 60).exit_code == 3
        assert container.run("sleep 1000", 0.5).exit_code == 124
        for closed in ("touch /usr/x", f"cat {Path(__file__).resolve()}", "cat /proc/1/status", "echo 1 > /x"):
            assert container.run(closed, 60).exit_code != 0, closed
    finally:
        container.close()
        container.close()
    assert not container._files.exists()


@pytest.mark.usefixtures("bubblewrap")
def test_a_sandbox_follows_simple_dockerfiles_and_refuses_others(tmp_path: Path) -> None:
    simple = "# a comment\nFROM debian\nWORKDIR /srv/task\nENV A=1 B='x y'\nCOPY data.txt ./\nCOPY \\\n  more /more\n"
    files = {"environment__data_txt": "given", "environment__more__x_txt": "more"}
    container = open_container(write(tmp_path / "simple", environment__Dockerfile=simple, **files))
    assert (
        container.run('echo "$PWD $A $B"; cat data.txt /more/x.txt; echo "" >> data.txt', 60).output
        == "/srv/task 1 x y\ngivenmore"
    )
    container.close()
    assert (tmp_path / "simple" / "environment" / "data.txt").read_text() == "given", "a copy was changed"
    for instruction, told in (
        ("RUN apt-get install git", "does not follow 'RUN apt-get install git'.*container=docker"),
        ("COPY --from=other a b", "does not follow"),
        ("COPY absent /app/", "finds no absent"),
        ("COPY ../tests /app/", "finds no tests"),
        ("WORKDIR /usr/src", "cannot write to '/usr/src'"),
    ):
        with pytest.raises(DataError, match=told):
            open_container(write(tmp_path / "other", environment__Dockerfile=f"FROM debian\n{instruction}\n"))
    image = write(tmp_path / "image", task_toml="[environment]\ndocker_image = 'python:3.12'")
    (image / "environment" / "Dockerfile").unlink()
    with pytest.raises(DataError, match=r"needs the image python:3\.12"):
        open_container(image)


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    ("test", "rewards"),
    [
        ("echo 0.5 > /logs/verifier/reward.txt; echo noise", {"reward": 0.5}),
        ("""echo '{"tests": 0.25, "reward": 1}' > /logs/verifier/reward.json""", {"tests": 0.25, "reward": 1.0}),
        ("echo .25 > /logs/verifier/reward.txt", {"reward": 0.25}),  # as bc prints it
        ("echo nan > /logs/verifier/reward.txt", {}),
        ("""echo '{"reward": "good"}' > /logs/verifier/reward.json""", {}),
        ("exit 1", {}),
        ("cat /app/answer > /logs/verifier/reward.txt", {"reward": 7.0}),
    ],
)
def test_the_tests_write_the_reward(
    tmp_path: Path, test: str, rewards: dict[str, float], caplog: pytest.LogCaptureFixture
) -> None:
    container = open_container(write(tmp_path, tests__test_sh=test))
    container.run("echo 7 > answer; mkdir -p /tests; echo 'echo 9 > /logs/verifier/reward.txt' > /tests/test.sh", 60)
    container.run("rm -rf /logs/verifier; ln -s /app /logs/verifier; echo 9 > /app/reward.txt", 60)
    assert container.run_tests() == rewards, "and what a command has written there counts nothing"
    assert ("wrote no reward" in caplog.text) == (not rewards)
    container.close()


CLOSES_FOLDERS = """
import sys
from skyrl_train.environments.task_folders import open_container
container = open_container(sys.argv[1])
container.run("mkdir /tests/a; touch /tests/a/b; chmod 000 /tests/a /tests", 60)
print(container.run_tests())
container.close()
"""


def test_a_command_that_closes_folders_keeps_no_tests_out(tmp_path: Path) -> None:
    # Root may remove them in any case.
    assert run_as_ordinary_user(":", CLOSES_FOLDERS, str(write(tmp_path))) == "{'reward': 1.0}\n"


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(("cases", "rewards"), [(1000, 1001), (200_000, 0)])
def test_the_rewards_of_many_tests_are_read_whole_or_not_at_all(tmp_path: Path, cases: int, rewards: int) -> None:
    test = f"""python3 -c 'import json; d = {{str(n): 0 for n in range({cases})}}; print(json.dumps(d | {{"reward": 1}}))'"""
    container = open_container(write(tmp_path, tests__test_sh=f"{test} > /logs/verifier/reward.json"))
    assert len(container.run_tests()) == rewards
    container.close()


@pytest.mark.usefixtures("bubblewrap")
@pytest.mark.parametrize(
    "command", ["yes | head -c 9000000 > x", "for n in 1 2 3; do yes | head -c 3000000 > $n; done; sleep 1000"]
)
def test_a_command_whose_files_take_too_much_space_ends_and_is_the_last_one(
    tmp_path: Path, command: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox, "DISK_CHECK_S", 0.05)
    container = open_container(write(tmp_path, task_toml="[environment]\nstorage_mb = 8\n"))
    assert container.run("yes | head -c 3000000 > y; rm y; echo fits", 60).output == "fits\n"
    ended = container.run(command, 1000)
    assert ended.output.endswith("ended: the files exceed 8 MiB\n")
    assert container.run("rm *; echo more", 60).output == "bash: the files exceed 8 MiB: nothing more is run\n"
    assert container.run_tests() == {"reward": 1.0}
    container.close()


@pytest.mark.usefixtures("bubblewrap")
def test_an_episode_that_the_context_ends_is_tested_too(tmp_path: Path) -> None:
    episode = environment(write(tmp_path, tests__test_sh="cp /app/n /logs/verifier/reward.txt"))
    assert not episode.step("```bash\necho 3 > n\n```")["done"]
    assert episode.end_early() == 3.0
    assert episode.get_metrics() == {"reward": 3.0, "commands": 1.0, "no_reward": 0.0}
    episode.close()


@pytest.mark.usefixtures("bubblewrap")
def test_an_episode_ends_without_a_command_at_the_last_turn_and_when_cut_off(tmp_path: Path) -> None:
    folder = write(tmp_path, tests__test_sh="echo 0.$(cat /app/n || echo 0) > /logs/verifier/reward.txt")
    episode = environment(folder)
    assert episode.step("First.\n```bash\nfalse\n```\nThen:\n```sh\necho 1 > n; echo yes\n```") == {
        "observations": [{"role": "user", "content": "yes\n"}],
        "reward": 0.0,
        "done": False,
    }
    assert episode.step("```bash\nexit 4\n```")["observations"][0]["content"] == "\n[exit code 4]"
    assert episode.step("Done.") == {"observations": [], "reward": 0.1, "done": True}
    assert episode.get_metrics() == {"reward": 0.1, "commands": 2.0, "no_reward": 0.0}
    episode.close()
    of_a_function = TaskFolder({"task": str(folder)})
    of_a_function.init([])
    assert not of_a_function.step("```bash\necho 5 > n\n```")["done"], "the generator counts the turns"
    assert of_a_function.end_early() == 0.5
    last = environment(folder, max_turns=1)
    assert last.step("```bash\necho 5 > n\n```")["reward"] == 0.5
    cut = environment(folder)
    cut.observe_stop("length")
    assert cut.step("```bash\necho 6 > n\n```")["reward"] == 0.6
    cut_in_a_command = environment(folder)
    cut_in_a_command.observe_stop("length")
    assert cut_in_a_command.step("```bash\necho 7 > n")["reward"] == 0.0
    ended_by_a_stop_text = environment(folder)
    assert not ended_by_a_stop_text.step("```bash\necho 7 > n\n")["done"]
    assert ended_by_a_stop_text.step("Done.")["reward"] == 0.7
    slow = environment(folder, command_s=0.3)
    assert slow.step("```bash\nsleep 1000\n```")["observations"][0]["content"] == "\n[ended after 0.3 s]"
    long = environment(folder, max_output_chars=10)
    assert long.step("```bash\nseq 100000\n```")["observations"][0]["content"].startswith("1\n2\n3\n[")
    for open_one in (last, cut, cut_in_a_command, ended_by_a_stop_text, slow, long):
        open_one.close()


@pytest.mark.usefixtures("bubblewrap")
def test_a_command_may_remove_its_folder(tmp_path: Path) -> None:
    container = open_container(write(tmp_path, environment__Dockerfile="FROM debian\nWORKDIR /srv/task\n"))
    assert container.run("rm -rf /srv/task; echo gone", 60).output == "gone\n"
    assert container.run('pwd; echo "$HOME"; ls', 60).output == "/srv/task\n/srv/task\n"
    container.run("cd /; rmdir /srv/task; touch /srv/task", 60)
    assert container.run_tests() == {"reward": 1.0}
    container.close()


@pytest.mark.usefixtures("bubblewrap")
def test_a_command_that_no_shell_takes_is_no_failed_rollout(tmp_path: Path) -> None:
    episode = environment(write(tmp_path))
    assert episode.step("```bash\necho a\0b\n```")["observations"][0]["content"] == "ab\n"
    assert episode.step("```bash\necho a\ud83db\n```")["observations"][0]["content"] == "a?b\n"
    answer = episode.step(f"```bash\necho {'a' * 200_000}\n```")["observations"][0]["content"]
    assert answer == "bash: Argument list too long\n\n[exit code 126]"
    episode.close()


@pytest.mark.usefixtures("bubblewrap")
def test_the_wait_for_a_core_is_no_time_of_the_task(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    episode = environment(write(tmp_path, task_toml="[agent]\ntimeout_sec = 600\n"))
    now = 0.0

    class Crowded:
        def __enter__(self) -> None:
            nonlocal now
            now += 1000.0

        def __exit__(self, *_: object) -> None: ...

    monkeypatch.setattr(sandbox, "_slots", Crowded())
    monkeypatch.setattr(time, "monotonic", lambda: now)
    assert not episode.step("```bash\ntrue\n```")["done"]
    episode.close()


def test_tests_are_copied_from_a_folder_with_a_colon_in_its_name(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    container = open_container(write(Path("first:task")), "docker")
    container.run_tests()
    container.close()
    copied = next(call for call in docker.read_text().splitlines() if call.startswith("cp"))
    assert copied.split()[1] == f"{tmp_path.resolve()}/first:task/tests/.", "docker reads another as CONTAINER:PATH"


async def test_an_episode_gets_the_number_of_turns_and_the_protocol(tmp_path: Path, docker: Path) -> None:
    config = compose("base", ["environment.env_class=task_folder", "environment.kwargs.container=docker"])
    factory = resolve_environment(config.environment)
    assert factory.takes_max_turns
    toml = "[environment]\ncpus = 0.5\nmemory_mb = 64\nnetwork_mode = 'no-network'\nenv = {A = '1'}\nworkdir = '/app'"
    test = "cp answer /logs/verifier/reward.txt"
    folder = write(tmp_path / "task", task_toml=toml, tests__test_sh=test)
    for _ in range(2):
        async with Episode(factory, {"task": str(folder), "max_turns": 3}, "p") as episode:
            messages, _ = await episode.init([{"role": "user", "content": "Go."}])
            assert [message["content"] for message in messages] == [PROTOCOL, "Go."]
            assert (await episode.step("```bash\necho 4 > answer; echo hi\n```", "stop"))["observations"][0][
                "content"
            ] == "hi\n"
            assert (await episode.step("Done.", "stop"))["reward"] == 4.0
        assert not (tmp_path / "root").exists(), "the container is removed"
    calls = docker.read_text().splitlines()  # noqa: ASYNC240  # nothing else runs
    assert [call.split()[0] for call in calls[:3]] == ["build", "run", "exec"]
    assert sum(call.startswith("build") for call in calls) == 1, "once for all attempts"
    run = next(call for call in calls if call.startswith("run"))
    for words in ("--network none", "--cpus 0.5", "--memory 64m", "--env A=1", "--rm"):
        assert words in run
    assert int(run.split()[-1]) >= 24 * 3600, "it outlives each wait for the policy, and not for ever"


def test_a_container_outlives_no_trainer_and_ends_at_its_close(tmp_path: Path, docker: Path) -> None:
    closed, left = (open_container(write(tmp_path / name), "docker") for name in ("a", "b"))
    closed.close()
    assert (tmp_path / "root").exists() is False
    (tmp_path / "root" / "app").mkdir(parents=True)
    assert left.run("echo here", 60).output == "here\n"
    assert task_folders.DockerContainer._keeper is not None
    label, keeper = task_folders.DockerContainer._keeper
    end(keeper)
    assert not (tmp_path / "root").exists()
    calls = docker.read_text().splitlines()
    assert calls[-2:] == [f"ps --all --quiet --filter label={label}", "rm --force container-1"]
    assert sum(f"--label {label} " in call for call in calls) == 2, "all containers of this process have it"


def test_a_container_that_is_slow_to_remove_fails_no_episode(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    episode, run = environment(write(tmp_path / "task"), container="docker"), subprocess.run

    def slow_to_remove(command: list[str], **options: Any) -> Any:
        if command[1] == "rm":
            raise subprocess.TimeoutExpired(command, 60)
        return run(command, **options)

    monkeypatch.setattr(subprocess, "run", slow_to_remove)
    episode.close()
    assert "container-1 could not be removed within 60 s" in caplog.text


def test_a_command_with_a_background_process_returns_at_its_own_end(tmp_path: Path, docker: Path) -> None:
    container = open_container(write(tmp_path / "task"), "docker")
    started = container.run("mkfifo pipe; cat pipe & echo out; echo err >&2; exit 3", 60)
    assert (started.output, started.exit_code) == ("out\nerr\n", 3)
    (tmp_path / "root" / "app" / "pipe").write_text("")  # its reader ends
    container.close()


def test_the_output_of_a_command_is_bounded_and_keeps_its_ends(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    script = task_folders._IN_CONTAINER.replace(str(task_folders._HALF_OUTPUT_BYTES), "6")
    monkeypatch.setattr(task_folders, "_IN_CONTAINER", script)
    container = open_container(write(tmp_path / "task"), "docker")
    assert container.run("seq 1000", 60).output == "1\n2\n3\n\n1000\n"
    assert container.run("echo 1234567", 60).output == "1234567\n"
    assert container.run("echo begun; sleep 1000", 0.5).exit_code == 124
    assert container.run("kill -KILL $$", 60).exit_code == 137
    container.close()


def test_a_container_that_is_lost_fails_the_rollout_and_is_no_output(tmp_path: Path, docker: Path) -> None:
    episode = environment(write(tmp_path / "task"), container="docker")
    assert episode.step("```bash\ncat absent; exit 1\n```")["observations"][0]["content"].endswith("[exit code 1]")
    shutil.rmtree(tmp_path / "root")
    with pytest.raises(RolloutError, match=r"task: the container is lost: .*No such container"):
        episode.step("```bash\necho 1\n```")
    with pytest.raises(RolloutError, match="the container is lost"):
        episode.step("Done.")


def test_docker_that_is_missing_does_not_answer_or_cannot_build_says_so(
    tmp_path: Path, docker: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = write(tmp_path / "task")
    program = docker.parent / "bin" / "docker"
    for text, error, told in (
        ("Cannot connect to the Docker daemon", ConfigError, "Docker does not answer: Cannot connect"),
        ("RUN failed", DataError, "the image cannot be built: RUN failed"),
    ):
        program.write_text(f"#!/bin/sh\necho '{text}' >&2\nexit 1\n")
        with pytest.raises(error, match=told):
            open_container(folder, "docker")
    monkeypatch.setenv("PATH", "/nowhere")
    with pytest.raises(ConfigError, match=r"Docker is not installed.*container=bubblewrap"):
        open_container(folder, "docker")
    with pytest.raises(ConfigError, match=r"'podman' is unknown\. Known: bubblewrap, docker"):
        open_container(folder, "podman")
    with pytest.raises(DataError, match="needs a column 'task'"):
        TaskFolder({})


@pytest.mark.usefixtures("bubblewrap")
def test_the_example_solves_its_tasks_by_their_solutions_and_trains(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(EXAMPLE)
    from make_tasks import write_tasks

    write_tasks(tmp_path / "tasks")
    container = open_container("tasks/write-3")
    container.run((tmp_path / "tasks" / "write-3" / "solution" / "solve.sh").read_text(), 60)
    assert container.run_tests() == {"reward": 1.0}
    container.close()
    overrides = ["trainer.max_steps=2", "trainer.policy_mini_batch_size=2", "trainer.run_dir=run"]
    assert main(["train", str(EXAMPLE / "tasks.yaml"), *overrides]) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == [1, 2] and all("environment/no_reward" in row for row in rows)
    sys.modules.pop("make_tasks", None)
