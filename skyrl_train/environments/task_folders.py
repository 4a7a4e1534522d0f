"""Agent tasks in folders: an instruction, an environment, and tests that write the reward, each run in a container.

    tasks/NAME/instruction.md          the prompt
               task.toml               time limits, variables, an image, resources
               environment/Dockerfile  what the task begins with, and files beside it; not needed with an image
               tests/test.sh           writes a number to /logs/verifier/reward.txt, or an object to reward.json

The format is Harbor's (Terminal-Bench 2 has it). The tests reach the container after the last command.

    TaskFolder.step ──command──> Container.run ... Container.run_tests ──> reward

Containers are Docker's, or bubblewrap's: a sandbox of :mod:`~skyrl_train.environments.sandbox` that needs no image and no
daemon, has the programs of this machine, and keeps only files from one command to the next.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import logging
import math
import os
import re
import shlex
import shutil
import stat
import subprocess
import tempfile
import threading
import time
import tomllib
import uuid
from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Any, ClassVar

from skyrl_train.environments.base import Environment, EnvironmentStep
from skyrl_train.environments.registry import register_environment
from skyrl_train.environments.sandbox import (
    MIB,
    SYSTEM_FOLDERS,
    SandboxLimits,
    run_command,
    sandbox_user,
    used_bytes,
)
from skyrl_train.errors import ConfigError, DataError, RolloutError
from skyrl_train.types import ConversationType

logger = logging.getLogger(__name__)

TASK_FILE = "task.toml"
VERIFIER_FOLDER = "/logs/verifier"
PROTOCOL = (
    "You work in a Linux container. To run a command, write it in a fenced block that begins with ```bash. You then see its "
    "output. Each command runs in a new shell; files stay. When the task is done, answer without a block."
)
_COMMAND = re.compile(r"```(?:bash|sh|shell)[ \t]*\n(.*?)(```|\Z)", re.DOTALL)
_VARIABLE = re.compile(r"\$\{(\w+)(?::-([^}]*))?\}")
_UNSUPPORTED = {"steps", "environment.tpu", "environment.gpus", "environment.mcp_servers", "environment.healthcheck"}
_DOCKER = "docker"
_MAX_COMMAND_BYTES = 100_000  # the kernel takes 131,071 in one argument
_MAX_REWARD_BYTES = 1_000_000
_HALF_OUTPUT_BYTES = 2 << 20  # of an output, from its beginning and its end, that leaves a container
# Runs the command $2 for $1 seconds. Its output goes through a file without a name: "docker exec" would wait for a background
# process that has inherited its streams. timeout kills the command's group, in which this shell is not.
_IN_CONTAINER = (
    'out=$(mktemp || mktemp -p /dev/shm) && exec 2>/dev/null 3>"$out" 4<"$out" && rm "$out" || exit 126; '
    """timeout -s KILL "$1" bash -c 'eval "$1"' task "$2" </dev/null >&3 2>&1 3>&- 4<&-; code=$?; """
    f"head -c {_HALF_OUTPUT_BYTES} <&4; tail -c {_HALF_OUTPUT_BYTES} <&4; exit $code"
)
_LOGGED_CHARACTERS = 4000  # of what the tests wrote, from its end
# An episode also waits for the policy, for any time. Where nothing removes its container, that ends so long after its start.
_LIFE_S = 24 * 3600

# Tasks -------------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Task:
    """A task as its folder describes it.

    Attributes:
        image: of the container; None: built from ``environment/Dockerfile``.
        workdir: None: the image's.
        variables: of every command; ``test_variables`` also of the tests.
        agent_s, tests_s: limits of all commands together and of the tests.
        memory_mb: None: no limit with Docker, 2048 with bubblewrap.
        storage_mb: of all files, with bubblewrap. None: 2048.
        network: whether commands may reach it; never with bubblewrap.
    """

    folder: Path
    instruction: str
    image: str | None
    workdir: str | None
    variables: Mapping[str, str]
    test_variables: Mapping[str, str]
    agent_s: float
    tests_s: float
    build_s: float
    cpus: float | None
    memory_mb: int | None
    storage_mb: int | None
    network: bool


def read_task(folder: Path) -> Task:
    """Read ``folder``.

    Raises:
        DataError: it is no task, a value is wrong, or the task needs what is not supported here; the message names it.
    """
    where = folder / TASK_FILE
    try:
        content = tomllib.loads(where.read_text(encoding="utf-8"))
        instruction = (folder / "instruction.md").read_text(encoding="utf-8").strip()
    except OSError as error:
        raise DataError(
            f"{folder} is no task: {error}. A task has {TASK_FILE}, instruction.md and tests/test.sh."
        ) from error
    except ValueError as error:
        raise DataError(f"{where} is not readable: {error}") from error
    sections = {name: content.get(name) or {} for name in ("environment", "agent", "verifier")}
    for name, section in sections.items():
        if not isinstance(section, Mapping):
            raise DataError(f"{where}: {name} must be a table, [{name}].")
    environment, agent, verifier = sections["environment"], sections["agent"], sections["verifier"]
    asked = {**content, **{f"environment.{name}": value for name, value in environment.items()}}
    unsupported = sorted(name for name in _UNSUPPORTED if asked.get(name))
    if environment.get("os", "linux") != "linux":
        unsupported.append("environment.os")
    if any(section.get("network_mode") == "allowlist" for section in sections.values()):
        unsupported.append("network_mode=allowlist")
    if verifier.get("environment_mode") == "separate" or verifier.get("environment"):
        unsupported.append("a separate environment of the verifier")
    if (folder / "environment" / "docker-compose.yaml").exists():
        unsupported.append("environment/docker-compose.yaml")
    if unsupported:
        raise DataError(f"{where} needs {', '.join(unsupported)}, which is not supported. Leave this task out.")
    image = environment.get("docker_image")
    needed = ["tests/test.sh"] if image else ["tests/test.sh", "environment/Dockerfile"]
    for name in needed:
        if not (folder / name).is_file():
            raise DataError(f"{folder} is no task: it has no {name}.")
    try:
        return Task(
            folder,
            instruction,
            image,
            environment.get("workdir"),
            _variables(environment.get("env") or {}),
            _variables(verifier.get("env") or {}),
            agent_s=float(agent.get("timeout_sec") or 600.0),
            tests_s=float(verifier.get("timeout_sec") or 600.0),
            build_s=float(environment.get("build_timeout_sec") or 600.0),
            cpus=None if environment.get("cpus") is None else float(environment["cpus"]),
            memory_mb=_size_mb(environment, "memory"),
            storage_mb=_size_mb(environment, "storage"),
            network=environment.get("network_mode", "public") == "public"
            and environment.get("allow_internet") is not False,
        )
    except (TypeError, ValueError, AttributeError) as error:
        raise DataError(f"{where} has a value of the wrong kind: {error}") from error


def _size_mb(environment: Mapping[str, Any], name: str) -> int | None:
    if environment.get(f"{name}_mb") is not None:
        return int(environment[f"{name}_mb"])
    text = environment.get(name)  # the older field, such as "2G"
    if text is None:
        return None
    units = {"G": 1024, "M": 1, "K": 1 / 1024}
    if text[-1:].upper() not in units:
        raise ValueError(f"{name}={text!r} has none of the units G, M and K")
    return int(float(text[:-1]) * units[text[-1].upper()])


def _variables(given: Mapping[str, Any]) -> dict[str, str]:
    """Return the variables with ``${NAME}`` and ``${NAME:-default}`` replaced from this process's environment.

    Raises:
        ValueError: a name without a default is not set.
    """

    def value(match: re.Match[str]) -> str:
        found = os.environ.get(match[1], match[2])
        if found is None:
            raise ValueError(f"the environment variable {match[1]} is not set")
        return found

    return {name: _VARIABLE.sub(value, str(text)) for name, text in given.items()}


# Containers --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class CommandResult:
    """The output of a command on both streams, its exit code (124 after its time limit), and how long it ran."""

    output: str
    exit_code: int
    seconds: float


class Container(ABC):
    """The container of one attempt at a task. All methods block; :meth:`close` may come from another thread."""

    def __init__(self, task: Task) -> None:
        self.task = task

    def run(self, command: str, timeout_s: float, variables: Mapping[str, str] | None = None) -> CommandResult:
        """Run ``command`` in a new shell of bash, in the task's working folder."""
        # No argument may have a null character, which bash leaves out, or half of a surrogate pair, which a model may
        # write in the JSON of a tool call.
        command = command.replace("\0", "").encode(errors="replace").decode()
        if len(command.encode()) > _MAX_COMMAND_BYTES:
            return CommandResult("bash: Argument list too long\n", 126, 0.0)
        return self._run(command, timeout_s, variables or {})

    @abstractmethod
    def _run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        """See :meth:`run`."""

    @abstractmethod
    def add_tests(self) -> None:
        """Copy the task's tests to ``/tests``."""

    @abstractmethod
    def close(self) -> None:
        """End all processes and remove the container. Idempotent."""

    def run_tests(self) -> dict[str, float]:
        """Run the task's tests and return their rewards by name; a single number is called ``reward``. Empty: they wrote none."""
        self.add_tests()
        # In one command, for its time. What an earlier command has written there is no reward.
        place = VERIFIER_FOLDER
        ended = self.run(
            f"rm -rf {place}; mkdir -p {place}; bash /tests/test.sh >{place}/output 2>&1; cd {place}; "
            "for name in reward.json reward.txt; do "
            f"if [ -f $name ]; then echo $name; head -c {_MAX_REWARD_BYTES + 1} $name; exit; fi; done; "
            f"echo output; tail -c {_LOGGED_CHARACTERS} output",
            self.task.tests_s,
            self.task.test_variables,
        )
        name, _, text = ended.output.partition("\n")
        with contextlib.suppress(ValueError, TypeError, AttributeError):
            if name != "output" and len(text) <= _MAX_REWARD_BYTES:
                # As Harbor reads them: the text is a number of Python, such as the .5 of bc.
                value = json.loads(text) if name == "reward.json" else {"reward": text}
                rewards = {str(key): float(number) for key, number in value.items()}
                if all(map(math.isfinite, rewards.values())):
                    return rewards
        shown = text[-_LOGGED_CHARACTERS:]
        logger.warning("%s: the tests wrote no reward (exit code %d): %s", self.task.folder, ended.exit_code, shown)
        return {}


class BubblewrapContainer(Container):
    """A sandbox with the programs of this machine. Of a Dockerfile it takes WORKDIR, COPY and ENV, and ignores FROM.

    Raises:
        DataError: (constructor) the task needs an image or another instruction.
        SandboxError: (run) this machine does not allow it.
    """

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if task.image is not None and not (task.folder / "environment" / "Dockerfile").is_file():
            raise DataError(f"{task.folder} needs the image {task.image}. Set environment.kwargs.container=docker.")
        self._user = sandbox_user()
        # The files that commands may change: what lies in it is at their root.
        # Its removal opens folders that a command has closed.
        self._folder = tempfile.TemporaryDirectory(prefix="task-", ignore_cleanup_errors=True)
        self._files = Path(self._folder.name)
        self._files.chmod(0o711)
        self._variables = dict(task.variables)
        self._workdir = "/app"
        self._storage_mb = self._disk_mib = task.storage_mb or 2048
        self._is_full = False
        try:
            for place in ("/app", "/tmp", "/tests", VERIFIER_FOLDER):
                self._inside(place).mkdir(parents=True, exist_ok=True)
            self._build()
            self._workdir = task.workdir or self._workdir
            self._inside(self._workdir).mkdir(parents=True, exist_ok=True)
            for top in self._files.iterdir():
                self._give_away(top)
        except BaseException:
            self.close()
            raise

    def run(self, command: str, timeout_s: float, variables: Mapping[str, str] | None = None) -> CommandResult:
        """See :meth:`Container.run`. After a command that exceeded the limit of all files, only the tests run."""
        if self._is_full:
            return CommandResult(f"bash: the files exceed {self._storage_mb} MiB: nothing more is run\n", 126, 0.0)
        return super().run(command, timeout_s, variables)

    def run_tests(self) -> dict[str, float]:
        self._is_full = False
        self._disk_mib = used_bytes(self._files) // MIB + self._storage_mb  # the commands may have left no room
        return super().run_tests()

    def _run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        limits = SandboxLimits(
            cpu_s=math.ceil(timeout_s),
            wall_s=timeout_s,
            memory_mib=self.task.memory_mb or 2048,
            processes=64,
            file_mib=64,
            disk_mib=self._disk_mib,
        )
        # Both streams into one, in their order. An earlier command may have removed the working folder.
        enter = 'cd -- "$2" 2>/dev/null || mkdir -p -- "$2" 2>/dev/null && cd -- "$2" 2>/dev/null'
        argv = ["bash", "-c", f'exec 2>&1; {enter}; eval "$1"', "task", command, self._workdir]
        given = {"HOME": self._workdir, **self._variables, **variables}
        ended = run_command(argv, self._files, "/", given, limits, self._user)
        self._is_full = ended.is_full
        output = ended.stdout
        if ended.is_full:
            output += f"\nbash: ended: the files exceed {self._storage_mb} MiB\n"
        return CommandResult(output, 124 if ended.timed_out else ended.exit_code, ended.seconds)

    def add_tests(self) -> None:
        target = self._inside("/tests")  # no link: commands cannot replace what lies at the root
        _open_folders(target)
        shutil.rmtree(target)
        shutil.copytree(self.task.folder / "tests", target)
        self._give_away(target)

    def close(self) -> None:
        self._folder.cleanup()

    def _inside(self, place: str) -> Path:
        """The folder of this machine that is ``place`` inside.

        Raises:
            DataError: that is a folder of the system, or not absolute.
        """
        parts = PurePosixPath(place).parts
        closed = {PurePosixPath(system).parts[1] for system in (*SYSTEM_FOLDERS, "/dev", "/etc")}
        if not parts or parts[0] != "/" or ".." in parts or len(parts) < 2 or parts[1] in closed:
            raise DataError(
                f"{self.task.folder}: bubblewrap cannot write to {place!r}. Use a folder such as /app, or "
                "environment.kwargs.container=docker."
            )
        return self._files.joinpath(*parts[1:])

    def _build(self) -> None:
        """Follow the Dockerfile."""
        source = self.task.folder / "environment"
        for line in _dockerfile(source / "Dockerfile"):
            word, _, rest = line.partition(" ")
            match word.upper():
                case "FROM":
                    continue
                case "WORKDIR":
                    self._workdir = str(PurePosixPath(self._workdir, rest.strip()))
                    self._inside(self._workdir).mkdir(parents=True, exist_ok=True)
                case "ENV" if "=" in rest.split(" ")[0]:
                    self._variables.update(part.partition("=")[::2] for part in shlex.split(rest))
                case "COPY" if len(shlex.split(rest)) == 2 and not rest.startswith("--"):
                    given, target = shlex.split(rest)
                    self._copy((source / given).resolve(), str(PurePosixPath(self._workdir, target)), source, target)
                case _:
                    raise DataError(
                        f"{source / 'Dockerfile'}: bubblewrap does not follow {line!r:.100}, only FROM, WORKDIR, COPY and "
                        "ENV. Set environment.kwargs.container=docker."
                    )

    def _copy(self, given: Path, target: str, source: Path, written: str) -> None:
        if not given.is_relative_to(source.resolve()) or not given.exists():
            raise DataError(f"{source / 'Dockerfile'}: COPY finds no {given.name} in {source}.")
        place = self._inside(target)
        if given.is_dir():
            shutil.copytree(given, place, dirs_exist_ok=True, ignore=shutil.ignore_patterns("Dockerfile"))
        else:
            place = place / given.name if written.endswith("/") or place.is_dir() or written == "." else place
            place.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(given, place)

    def _give_away(self, top: Path) -> None:
        """Make the user of the commands the owner of everything in ``top``."""
        if os.getuid() == 0:
            for path in [top, *top.rglob("*")]:
                os.chown(path, self._user, self._user, follow_symlinks=False)


def _open_folders(top: Path) -> None:
    """Give the owner back all rights to ``top`` and the folders in it, which a command may have closed."""
    waiting = [top]
    while waiting:
        folder = waiting.pop()
        folder.chmod(stat.S_IRWXU)
        waiting += [path for path in folder.iterdir() if not path.is_symlink() and path.is_dir()]


def _dockerfile(path: Path) -> list[str]:
    """Return the instructions, one a line, without comments."""
    text = re.sub(r"\\[ \t]*\n", " ", path.read_text(encoding="utf-8"))
    return [line.strip() for line in text.splitlines() if line.strip() and not line.lstrip().startswith("#")]


class DockerContainer(Container):
    """A container of Docker's, through the command ``docker``.

    Raises:
        ConfigError: (constructor) the program is missing, or its daemon does not answer.
        DataError: (constructor) the image cannot be built or started.
    """

    _images: ClassVar[dict[Path, str]] = {}
    # The label of this process's containers, and the process that removes them.
    _keeper: ClassVar[tuple[str, subprocess.Popen[bytes]] | None] = None
    _lock: ClassVar[threading.Lock] = threading.Lock()

    def __init__(self, task: Task) -> None:
        super().__init__(task)
        if shutil.which(_DOCKER) is None:
            raise ConfigError(
                "Docker is not installed. Install it, or set environment.kwargs.container=bubblewrap for tasks without "
                "an image of their own."
            )
        image = task.image or self._built_image()
        limits = [] if task.cpus is None else ["--cpus", f"{task.cpus:g}"]
        limits += [] if task.memory_mb is None else ["--memory", f"{task.memory_mb}m"]
        variables = [word for name, value in task.variables.items() for word in ("--env", f"{name}={value}")]
        self._id = self._docker(
            *(
                "run",
                "--detach",
                "--rm",
                "--init",
                "--label",
                self._label(),
                "--network",
                "bridge" if task.network else "none",
            ),
            *(*limits, *variables, "--entrypoint", "sleep", image, str(_LIFE_S)),
            failed=f"{task.folder}: the container cannot be started",
            timeout_s=task.build_s,
        )

    def _run(self, command: str, timeout_s: float, variables: Mapping[str, str]) -> CommandResult:
        where = [] if self.task.workdir is None else ["--workdir", self.task.workdir]
        given = [word for name, value in variables.items() for word in ("--env", f"{name}={value}")]
        # Killed inside: the end of the client alone would leave the command running.
        words = ["bash", "-c", _IN_CONTAINER, "task", str(math.ceil(timeout_s)), command]
        began = time.monotonic()
        try:
            ended = subprocess.run(
                [_DOCKER, "exec", *where, *given, self._id, *words],
                stdin=subprocess.DEVNULL,
                capture_output=True,
                timeout=timeout_s + 30,
                check=False,
            )
        except subprocess.TimeoutExpired:
            return CommandResult("", 124, time.monotonic() - began)
        # The command's own errors are in its standard output.
        if ended.returncode and ended.stderr.startswith(b"Error"):
            reason = ended.stderr.decode(errors="replace").strip()
            raise RolloutError(f"{self.task.folder}: the container is lost: {reason[-500:]}")
        seconds = time.monotonic() - began
        # timeout itself ends with 137 after the signal. So does a command that the kernel ended for its memory.
        code = 124 if ended.returncode == 137 and seconds >= timeout_s else ended.returncode
        return CommandResult((ended.stdout + ended.stderr).decode(errors="replace"), code, seconds)

    def add_tests(self) -> None:
        self.run("rm -rf /tests; mkdir /tests", self.task.tests_s)
        failed = f"{self.task.folder}: the tests cannot be copied into the container"
        # Absolute: docker takes what is before a colon in a relative path for the name of a container.
        tests = (self.task.folder / "tests").resolve()
        self._docker("cp", f"{tests}/.", f"{self._id}:/tests", failed=failed, timeout_s=self.task.tests_s)

    def close(self) -> None:
        try:
            subprocess.run([_DOCKER, "rm", "--force", self._id], capture_output=True, timeout=60, check=False)
        except subprocess.TimeoutExpired:  # the episode has its reward, and the keeper removes the container in the end
            logger.warning("%s: the container %s could not be removed within 60 s", self.task.folder, self._id)

    def _built_image(self) -> str:
        """Build the image once in this process; Docker's cache has it for others."""
        folder = self.task.folder.resolve()
        with self._lock:
            if folder not in self._images:
                name = f"skyrl-task-{hashlib.sha256(str(folder).encode()).hexdigest()[:16]}"
                self._docker(
                    *("build", "--quiet", "--tag", name, str(folder / "environment")),
                    failed=f"{folder}: the image cannot be built",
                    timeout_s=self.task.build_s,
                )
                self._images[folder] = name
            return self._images[folder]

    @classmethod
    def _label(cls) -> str:
        """Return the label of this process's containers. Another process removes them once this one has ended, by any cause."""
        with cls._lock:
            if cls._keeper is None:
                label = f"skyrl_train={uuid.uuid4().hex}"
                # Its standard input ends with this process.
                script = f'cat; {_DOCKER} rm --force $({_DOCKER} ps --all --quiet --filter "label=$1")'
                keeper = subprocess.Popen(
                    ["sh", "-c", script, "sh", label],
                    stdin=subprocess.PIPE,
                    stdout=subprocess.DEVNULL,
                    stderr=subprocess.DEVNULL,
                    start_new_session=True,
                )
                cls._keeper = label, keeper
            return cls._keeper[0]

    def _docker(self, *arguments: str, failed: str, timeout_s: float) -> str:
        try:
            ended = subprocess.run(
                [_DOCKER, *arguments], capture_output=True, text=True, timeout=timeout_s, check=False
            )
        except subprocess.TimeoutExpired:
            raise DataError(f"{failed}: it took longer than {timeout_s:g} s.") from None
        if ended.returncode:
            reason = ended.stderr.strip()[-500:]
            if "connect" in reason and "daemon" in reason:  # every task would fail
                raise ConfigError(f"Docker does not answer: {reason}")
            raise DataError(f"{failed}: {reason}")
        return ended.stdout.strip()


CONTAINERS: Mapping[str, type[Container]] = {"bubblewrap": BubblewrapContainer, "docker": DockerContainer}


def open_container(folder: str | Path, container: str = "bubblewrap") -> Container:
    """Return a new container for the task in ``folder``. An agent runs its tools there, then :meth:`Container.run_tests`.

    Raises:
        ConfigError: ``container`` is unknown, or cannot be used on this machine.
        DataError: the task cannot be used.
    """
    if container not in CONTAINERS:
        raise ConfigError(f"environment.kwargs.container={container!r} is unknown. Known: {', '.join(CONTAINERS)}.")
    return CONTAINERS[container](read_task(Path(folder)))


# The environment ---------------------------------------------------------------------------------------------------


@register_environment("task_folder")
class TaskFolder(Environment):
    """The task of a folder: the policy's commands run in a container, and the task's tests give the reward.

    The last fenced block of an answer, of the language bash, sh or shell, is run. The next message is its output. An answer
    without one ends the episode, as do the last turn (``generator.max_turns``), an answer cut off at ``max_tokens``, an output
    that does not fit the context, and the task's ``[agent] timeout_sec``. Then the tests run. Tests that write no reward give 0.

    The data row's ``task`` is the folder; ``data.train_data=[FOLDER]`` has a row for each task in FOLDER.

    Args:
        container: ``bubblewrap`` or ``docker``.
        system_prompt: before the instruction; null: none.
        command_s: time limit of one command.
        max_output_chars: of a command's output that the policy sees, from its beginning and its end.

    Raises:
        ConfigError: an unknown container, or an impossible number.
        DataError: there is no such task, or it cannot be used.
    """

    takes_max_turns = True

    def __init__(
        self,
        extras: Mapping[str, Any],
        *,
        container: str = "bubblewrap",
        system_prompt: str | None = PROTOCOL,
        command_s: float = 60.0,
        max_output_chars: int = 4000,
    ) -> None:
        super().__init__(extras)
        if container not in CONTAINERS:
            raise ConfigError(f"environment.kwargs.container={container!r} is unknown. Known: {', '.join(CONTAINERS)}.")
        for name, value in (("command_s", command_s), ("max_output_chars", max_output_chars)):
            if not value > 0:
                raise ConfigError(f"environment.kwargs.{name} must be above 0, got {value}.")
        if not isinstance(extras.get("task"), str):
            raise DataError(
                "TaskFolder needs a column 'task' with a task's folder; data.train_data=[FOLDER] makes such rows."
            )
        self._task = read_task(Path(extras["task"]))
        self._make, self._system_prompt = CONTAINERS[container], system_prompt
        self._command_s, self._max_chars = command_s, max_output_chars
        # None if a function makes the environment: then the generator ends the episode, and end_early() runs the tests.
        self._turns_left = float(extras.get("max_turns") or math.inf)
        self._seconds_left = self._task.agent_s
        self._container: Container | None = None
        self._stop_reason = "stop"
        self._commands = 0
        self._metrics: dict[str, float] = {}

    def init(self, prompt: ConversationType) -> tuple[ConversationType, dict[str, Any]]:
        self._container = self._make(self._task)
        system: ConversationType = []
        if self._system_prompt is not None:
            system = [{"role": "system", "content": self._system_prompt}]
        return [*system, *prompt], {}

    def observe_stop(self, stop_reason: str) -> None:
        self._stop_reason = stop_reason

    def step(self, action: str) -> EnvironmentStep:
        container = self._container
        assert container is not None, "init() comes first"
        # The end of a block may have been a stop text, but a block that was cut off is no command.
        blocks = [block for block, end in _COMMAND.findall(action) if end or self._stop_reason == "stop"]
        self._turns_left -= 1
        output = ""
        if blocks:
            limit = min(self._command_s, self._seconds_left)
            ended = container.run(blocks[-1].strip(), limit)
            self._seconds_left -= ended.seconds
            self._commands += 1
            output = _shortened(ended.output, self._max_chars)
            if ended.exit_code == 124:
                output += f"\n[ended after {limit:g} s]"
            elif ended.exit_code:
                output += f"\n[exit code {ended.exit_code}]"
        if blocks and self._turns_left > 0 and self._seconds_left > 0 and self._stop_reason == "stop":
            return {"observations": [{"role": "user", "content": output}], "reward": 0.0, "done": False}
        return {"observations": [], "reward": self.end_early(), "done": True}

    def end_early(self) -> float:
        """Run the tests and return their reward."""
        assert self._container is not None, "init() comes first"
        rewards = self._container.run_tests()
        self._metrics = {**rewards, "commands": float(self._commands), "no_reward": float(not rewards)}
        return rewards.get("reward", next(iter(rewards.values()), 0.0))

    def close(self) -> None:
        if self._container is not None:
            self._container.close()

    def get_metrics(self) -> dict[str, Any]:
        return self._metrics


def _shortened(text: str, limit: int) -> str:
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n[{len(text) - 2 * half} characters left out]\n{text[-half:]}"
