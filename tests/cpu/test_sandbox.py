"""Untrusted programs: what they cannot do, and the environment that runs them against tests."""

from __future__ import annotations

import fcntl
import json
import os
import resource
import shutil
import socket
import subprocess
import sys
import uuid
from pathlib import Path
from typing import Any

import pytest

from skyrl_train.environments import sandbox
from skyrl_train.environments.python_tests import PythonTests, fenced_program, same_output
from skyrl_train.environments.sandbox import (
    ISOLATIONS,
    SandboxLimits,
    SandboxResult,
    run_program,
    wait_for_exit,
    why_unavailable,
)
from skyrl_train.errors import ConfigError, DataError

SHORT = SandboxLimits(cpu_s=1, wall_s=600.0, memory_mib=256, file_mib=1)


def run(program: str, isolation: str = "namespaces", limits: SandboxLimits = SHORT, stdin: str = "") -> SandboxResult:
    if why_unavailable(isolation):
        pytest.skip(str(why_unavailable(isolation)))
    return run_program(program, stdin, limits, isolation)


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_program_reads_prints_and_says_how_it_ended(isolation: str) -> None:
    result = run("import sys; print(input() * 2); print('é', file=sys.stderr); sys.exit(3)", isolation, stdin="ab\n")
    assert (result.stdout, result.stderr, result.exit_code, result.timed_out) == ("abab\n", "é\n", 3, False)
    assert not result.succeeded


# A process that ended would leave its place to another one, so all wait until each has met the limit: for the end of a pipe that
# each holds open until then.
FORK_BOMB = """
import os
read, write = os.pipe()
try:
    while True:
        os.fork()
except OSError as error:
    print(error.errno, flush=True)
os.close(write)
os.read(read, 1)
"""


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_fork_bomb_ends_at_the_limit_of_processes(isolation: str) -> None:
    found = run(FORK_BOMB, isolation).stdout.split()
    assert 1 <= len(found) <= SHORT.processes + 1
    assert set(found) == {"11"}  # EAGAIN


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_an_endless_loop_ends_with_its_cpu_time(isolation: str) -> None:
    result = run("while True: pass", isolation)
    assert not result.succeeded and not result.timed_out  # killed by the kernel, long before the wall clock


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_program_that_sleeps_ends_with_the_wall_clock(isolation: str) -> None:
    result = run("import time; time.sleep(1000)", isolation, SandboxLimits(wall_s=0.5))
    assert result.timed_out and not result.succeeded


def test_the_end_of_a_process_is_awaited_also_with_many_open_files(monkeypatch: pytest.MonkeyPatch) -> None:
    opened: list[int] = []

    def behind_a_thousand(pid: int, flags: int = 0) -> int:
        first = pidfd_open(pid, flags)
        opened.append(fcntl.fcntl(first, fcntl.F_DUPFD_CLOEXEC, 1024))
        os.close(first)
        return opened[-1]

    pidfd_open, limits = os.pidfd_open, resource.getrlimit(resource.RLIMIT_NOFILE)
    monkeypatch.setattr("os.pidfd_open", behind_a_thousand)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(limits[0], 2048), limits[1]))
    try:
        with subprocess.Popen(["sleep", "1000"]) as process:
            process.kill()
            wait_for_exit(process.pid)
            assert process.poll() == -9
    finally:
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    assert opened and opened[0] >= 1024


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_a_flood_of_output_ends_at_the_size_of_a_file(isolation: str) -> None:
    result = run("while True: print('x' * 10000)", isolation)
    assert not result.succeeded
    assert len(result.stdout) <= SHORT.file_mib * 2**20


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_memory_is_limited(isolation: str) -> None:
    result = run("x = bytearray(2**30)", isolation)
    assert "MemoryError" in result.stderr


@pytest.mark.parametrize("isolation", ISOLATIONS)
def test_the_secrets_of_the_environment_are_not_there(isolation: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-5d2c")
    result = run("import os; print(dict(os.environ))", isolation)
    assert result.succeeded and "secret" not in result.stdout and "HF_TOKEN" not in result.stdout


READS_SECRETS = """
import glob
for path in glob.glob("/proc/*/environ") + glob.glob(ROOT + "/**", recursive=True):
    try:
        print(open(path).read())
    except OSError:
        pass
print("end")
"""


def test_files_and_processes_of_the_machine_are_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HF_TOKEN", "secret-5d2c")
    (tmp_path / "key").write_text("secret-77aa")
    result = run(f"ROOT = {str(tmp_path)!r}\n" + READS_SECRETS)
    assert (result.stdout, result.exit_code) == ("end\n", 0)


def test_nothing_is_written_outside_of_its_folder(tmp_path: Path) -> None:
    outside = tmp_path / "written"
    places = [str(outside), "/written", "/usr/written", "/dev/shm/written", "/tmp/written"]
    program = (
        f"for path in {places!r}:\n    try:\n        open(path, 'w')\n        print(path)\n    except OSError: pass"
    )
    result = run(program + "\nopen('inside', 'w').write('x')\nprint('end')")
    assert (result.stdout, result.exit_code) == ("end\n", 0)
    assert not outside.exists()


def test_all_its_files_together_are_limited() -> None:
    program = "for number in range(9): open(f'{number}', 'wb').write(bytes(2**18))"
    assert "No space left" in run(program).stderr


def test_there_is_no_network() -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        server.setblocking(False)
        port = server.getsockname()[1]
        result = run(f"import socket; socket.create_connection(('127.0.0.1', {port}), 5)")
        with pytest.raises(BlockingIOError):
            server.accept()
    assert "Error: [Errno" in result.stderr and not result.succeeded


def test_it_has_no_rights_and_cannot_get_any() -> None:
    program = """
import ctypes, os
print(os.getuid() == 0, ctypes.CDLL(None).unshare(1 << 28))
"""
    assert run(program).stdout == "False -1\n"


DAEMON = """
import os, sys
begun, begins = os.pipe()  # closes when the child becomes another program
if os.fork() == 0:
    os.setsid()
    os.close(1)
    os.execv(sys.executable, [sys.executable, "-c", "import time; time.sleep(1000)", MARK])
os.close(begins)
os.read(begun, 1)
print("it runs")
"""


def test_a_process_that_leaves_the_session_ends_with_the_program() -> None:
    mark = uuid.uuid4().hex
    assert run(f"MARK = {mark!r}\n" + DAEMON).stdout == "it runs\n"
    left = []
    for process in Path("/proc").glob("[0-9]*"):
        try:
            if mark.encode() in (process / "cmdline").read_bytes():
                left.append(process.name)
        except OSError:
            continue  # it ended meanwhile
    assert left == []


TRIES_EACH_ISOLATION = """
from skyrl_train.environments.sandbox import ISOLATIONS, SandboxError, run_program
for isolation in ISOLATIONS:
    try:
        print(isolation, run_program("print('ran')", isolation=isolation).stdout.strip())
    except SandboxError as error:
        print(isolation, error)
"""


def run_as_ordinary_user(first: str, program: str, *arguments: str) -> str:
    """What a program prints that user 1000 runs, without rights, after the shell command ``first`` with rights."""
    if shutil.which("unshare") is None or why_unavailable("namespaces"):
        pytest.skip(f"no user namespace can be made here for the test: {why_unavailable('namespaces')}")
    become = ["unshare", "--user", "--map-user=1000", "--map-group=1000", "--keep-caps", "sh", "-ec"]
    script = f'{first}; exec setpriv --ambient-caps=-all --inh-caps=-all "$@"'
    command = [*become, script, "sh", sys.executable, "-c", program, *arguments]
    return subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True).stdout


def of_an_ordinary_user(first: str) -> dict[str, str]:
    """What each isolation answers to an ordinary user."""
    return dict(line.split(" ", 1) for line in run_as_ordinary_user(first, TRIES_EACH_ISOLATION).splitlines())


def test_an_ordinary_user_has_each_isolation() -> None:
    assert of_an_ordinary_user(":") == {"namespaces": "ran", "limits": "ran"}


def test_where_no_user_namespace_is_allowed_the_refusal_says_what_to_do() -> None:
    answers = of_an_ordinary_user("echo 0 >/proc/sys/user/max_user_namespaces")  # as in many containers
    assert answers["limits"] == "ran"
    assert answers["namespaces"].startswith("Sandbox isolation 'namespaces' does not work here: bwrap: ")
    assert "sysctl user.max_user_namespaces" in answers["namespaces"]
    assert "you can set environment.kwargs.isolation=limits instead" in answers["namespaces"]


@pytest.mark.parametrize(("name", "value"), [("cpu_s", 2.5), ("cpu_s", 0), ("memory_mib", "512"), ("max_tests", 1.5)])
def test_a_limit_that_the_system_does_not_take_is_refused(name: str, value: Any) -> None:
    with pytest.raises(ConfigError, match=rf"environment\.kwargs\.{name} must be a whole number above 0, got"):
        PythonTests({"tests": '[{"assert": "assert True"}]'}, **{name: value})


def test_an_unknown_isolation_is_refused() -> None:
    with pytest.raises(ConfigError, match="'jail' is unknown"):
        run_program("", isolation="jail")


@pytest.mark.parametrize(
    ("text", "program"),
    [
        ("```python\nx = 1\n```", "x = 1\n"),
        ("```py\na\n``` and ```\nb\n```", "b\n"),
        ("```json\n{}\n```", None),
        ("x = 1", None),
        ("```python\nunfinished", None),
    ],
)
def test_the_last_fenced_program_counts(text: str, program: str | None) -> None:
    assert fenced_program(text) == program


def test_a_machine_that_is_slow_for_a_minute_is_not_one_without_a_sandbox(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(program: str, stdin: str, limits: SandboxLimits, isolation: str) -> SandboxResult:
        in_time = limits.wall_s > 60 and limits.cpu_s > 10
        return SandboxResult("", "", 0 if in_time else 137, timed_out=not in_time)

    monkeypatch.setattr(sandbox, "_available", set())
    monkeypatch.setattr(sandbox, "_run", slow)
    assert why_unavailable("namespaces") is None


def test_a_sandbox_that_failed_once_is_tried_again_and_one_that_works_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    outcomes: list[Exception | SandboxResult] = [
        FileNotFoundError("No usable temporary directory found"),
        SandboxResult("", "", 0, timed_out=False),
    ]

    def run_once(program: str, stdin: str, limits: SandboxLimits, isolation: str) -> SandboxResult:
        outcome = outcomes.pop(0)
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    monkeypatch.setattr(sandbox, "_available", set())
    monkeypatch.setattr(sandbox, "_run", run_once)
    assert "No usable temporary directory" in str(why_unavailable("namespaces"))
    assert why_unavailable("namespaces") is None
    assert outcomes == []
    assert why_unavailable("namespaces") is None, "without a third program"


def test_output_is_compared_without_white_space_at_ends() -> None:
    assert same_output("1 2 \n3\n\n", "1 2\n3")
    assert not same_output("1  2\n3", "1 2\n3")
    assert not same_output("1 2 3", "1 2\n3")


def environment(tests: list[dict[str, str]], **kwargs: Any) -> PythonTests:
    if why_unavailable("namespaces"):
        pytest.skip(str(why_unavailable("namespaces")))
    return PythonTests({"tests": json.dumps(tests)}, **kwargs)


DOUBLES = [{"stdin": "2\n", "stdout": "4\n"}, {"stdin": "5\n", "stdout": "10\n"}]
ASSERTS = [{"assert": "assert double(2) == 4"}, {"assert": "assert double(5) == 10"}]


@pytest.mark.parametrize(
    ("tests", "program", "reward", "share"),
    [
        (DOUBLES, "print(int(input()) * 2)", 1.0, 1.0),
        (DOUBLES, "print(4)", 0.0, 0.5),
        (ASSERTS, "def double(x): return 2 * x", 1.0, 1.0),
        (ASSERTS, "def double(x): return x ** 2", 0.0, 0.5),
        (ASSERTS, "import sys; sys.exit(0)", 0.0, 0.0),
        (ASSERTS, "import os; os._exit(0)", 0.0, 0.0),
        (ASSERTS, "def double(x): exit(0)", 0.0, 0.0),
        (ASSERTS, "syntax error", 0.0, 0.0),
    ],
)
def test_a_program_is_worth_the_tests_that_it_passes(
    tests: list[dict[str, str]], program: str, reward: float, share: float
) -> None:
    action = f"Here it is:\n```python\n{program}\n```"
    assert environment(tests).step(action)["reward"] == reward
    assert environment(tests, partial=True).step(action)["reward"] == share


def test_an_answer_without_a_program_runs_nothing() -> None:
    tested = environment(DOUBLES)
    assert tested.step("4")["reward"] == 0.0
    assert tested.get_metrics() == {"solved": 0.0, "has_program": 0.0}


@pytest.mark.parametrize("tests", [None, "", "[]", "{}", '[{"stdin": "2"}]', '[{"assert": 1}]', "[1]"])
def test_a_row_without_tests_is_an_error_of_the_data(tests: Any) -> None:
    with pytest.raises(DataError, match="PythonTests needs a column 'tests'"):
        PythonTests({"tests": tests})


@pytest.mark.parametrize("kwargs", [{"isolation": "jail"}, {"wall_s": 0}, {"max_tests": -1}])
def test_an_impossible_setting_is_refused(kwargs: dict[str, Any]) -> None:
    with pytest.raises(ConfigError, match=r"environment\.kwargs\."):
        PythonTests({"tests": json.dumps(DOUBLES)}, **kwargs)
