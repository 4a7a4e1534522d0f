"""Agents that are programs: any argument list, in whatever language.

| the program gets | where |
|---|---|
| its task | the JSON file that ``SKYRL_PROMPT`` names, also standard input: ``prompt, extras, session_id, seed`` |
| the endpoint | ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` |
| its key | ``OPENAI_API_KEY``, ``ANTHROPIC_API_KEY`` |
| its session | ``SKYRL_SESSION_ID``, for ``POST /v1/sessions/{id}/reward`` |

The rest of this process's environment is passed on, without the keys of this library: ``SKYRL_ADMIN_KEY``, the inference
servers' key, and whatever variable has one of them for its value.

It says what its run was worth in the last line of its standard output, as JSON, or posts the reward and prints none.
"""

from __future__ import annotations

import asyncio
import base64
import json
import os
import signal
import tempfile
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

from skyrl_train.errors import ConfigError
from skyrl_train.generators.harness.agent import AgentError, AgentResult, AgentTask, to_result

_KEPT_BYTES = 65536  # of each output stream, its end
_ERROR_LINES = 8
_WITHHELD = ("SKYRL_ADMIN_KEY", "VLLM_API_KEY")  # of whoever serves, not of an agent
_READ_TIMEOUT_S = 1.0  # for what is still in the pipes once the whole process group is gone


class ProcessAgent:
    """Starts ``command`` once per task, each in a process group of its own that ends with the run, whole.

    Args:
        command: the program and its arguments; no shell.
        environment: variables beside those of this process and the task's own; these are passed whatever they are.
        withheld: further variables of this process that are not passed on.
        secrets: further values that no variable of this process is passed on with.
        grace_s: between the request to end (SIGTERM) and the end (SIGKILL).

    Raises:
        ConfigError: (constructor) there is no command.
    """

    def __init__(
        self,
        command: Sequence[str],
        environment: Mapping[str, str] | None = None,
        *,
        grace_s: float = 2.0,
        withheld: Collection[str] = (),
        secrets: Collection[str] = (),
    ) -> None:
        if not command or isinstance(command, str):
            raise ConfigError(
                f"generator.kwargs.command={command!r} must be a list: the program, then its arguments, such as "
                "[python, agent.py]."
            )
        self._command = [str(word) for word in command]
        self._environment = {str(name): str(value) for name, value in (environment or {}).items()}
        self._withheld = frozenset((*_WITHHELD, *withheld))
        self._secrets = frozenset(secrets)
        self._grace_s = grace_s

    async def run(self, task: AgentTask) -> AgentResult:
        """Runs the program to its end. Cancelled, it ends the whole process group first.

        Raises:
            AgentError: it cannot be started, exited with another status than 0, or printed a reward of the wrong shape.
        """
        with tempfile.TemporaryDirectory(prefix="skyrl-agent-") as folder:
            prompt = Path(folder) / "prompt.json"
            prompt.write_text(json.dumps(_task_json(task), default=_plain), encoding="utf-8")
            environment = {**self._inherited(), **self._environment, **_variables(task, prompt)}
            status, *streams = await self._run(prompt, environment)
        # Whole, before anything is cut out of them.
        out, err = (task.redact(stream.decode(errors="replace")) for stream in streams)
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            raise AgentError(f"{self._command[0]} {how}; its last words: {_last_lines(err or out)}")
        return _read_reward(out)

    def _inherited(self) -> dict[str, str]:
        """The variables of this process that are no keys of this library."""
        secrets = self._secrets | {os.environ[name] for name in self._withheld if os.environ.get(name)}
        return {
            name: value for name, value in os.environ.items() if name not in self._withheld and value not in secrets
        }

    async def _run(self, prompt: Path, environment: Mapping[str, str]) -> tuple[int, bytes, bytes]:
        """Returns exit status and the ends of both output streams."""
        # Pipes of our own: asyncio's would make the end of the process wait for everyone who inherited them.
        async with _Pipe() as out, _Pipe() as err:
            with prompt.open("rb") as task:
                try:
                    process = await asyncio.create_subprocess_exec(
                        *self._command,
                        stdin=task,
                        stdout=out.write_end,
                        stderr=err.write_end,
                        env=dict(environment),
                        start_new_session=True,
                    )
                except OSError as error:
                    raise AgentError(f"{self._command[0]} cannot be started: {error.strerror or error}") from error
            out.close_write_end()
            err.close_write_end()
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                await self._end(process)
                raise
            finally:
                _kill_group(process.pid, signal.SIGKILL)  # what it left running in the background
            return status, await out.end(), await err.end()

    async def _end(self, process: asyncio.subprocess.Process) -> None:
        _kill_group(process.pid, signal.SIGTERM)
        try:
            async with asyncio.timeout(self._grace_s):
                await process.wait()
        except TimeoutError:
            _kill_group(process.pid, signal.SIGKILL)
            await process.wait()


class _Pipe:
    """A pipe whose end is kept: the reader never waits for memory, the writer never for the reader."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._write_open = True
        self._kept = b""
        self._reading: asyncio.Task[None] | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def __aenter__(self) -> _Pipe:
        reader = asyncio.StreamReader()
        pipe = os.fdopen(self._read_end, "rb", buffering=0)
        self._transport, _ = await asyncio.get_running_loop().connect_read_pipe(
            lambda: asyncio.StreamReaderProtocol(reader), pipe
        )
        self._reading = asyncio.create_task(self._read(reader))
        return self

    async def _read(self, reader: asyncio.StreamReader) -> None:
        while data := await reader.read(_KEPT_BYTES):
            self._kept = (self._kept + data)[-_KEPT_BYTES:]

    def close_write_end(self) -> None:
        if self._write_open:
            os.close(self.write_end)
            self._write_open = False

    async def end(self) -> bytes:
        """The last bytes written. A process that left the group may hold the pipe for ever: it is not waited for."""
        if self._reading is not None:
            await asyncio.wait([self._reading], timeout=_READ_TIMEOUT_S)
        return self._kept

    async def __aexit__(self, *_: object) -> None:
        self.close_write_end()
        if self._reading is not None:
            self._reading.cancel()
            await asyncio.gather(self._reading, return_exceptions=True)
        if self._transport is not None:
            self._transport.close()


def _task_json(task: AgentTask) -> dict[str, Any]:
    return {
        "prompt": [dict(message) for message in task.prompt],
        "extras": dict(task.extras),
        "session_id": task.session_id,
        "seed": task.seed,
    }


def _plain(value: Any) -> Any:
    """What a row may have that JSON lacks: times in ISO 8601, bytes in base64, numpy's as Python's; anything else as text."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return value.tolist() if hasattr(value, "tolist") else str(value)


def _variables(task: AgentTask, prompt: Path) -> dict[str, str]:
    host = urlsplit(task.server_url).hostname or ""
    # Clients ask the proxy of the environment also for this machine, unless they are told not to.
    direct = ",".join(filter(None, (os.environ.get("NO_PROXY") or os.environ.get("no_proxy"), host)))
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.server_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "SKYRL_PROMPT": str(prompt),
        "SKYRL_SESSION_ID": task.session_id,
        "NO_PROXY": direct,
        "no_proxy": direct,
    }


def _kill_group(group: int, how: signal.Signals) -> None:
    try:
        os.killpg(group, how)
    except ProcessLookupError:
        return  # it has ended
    except PermissionError:
        return  # macOS says this of a group that has only zombies left


def _read_reward(out: str) -> AgentResult:
    lines = [line for line in out.splitlines() if line.strip()]
    if not lines:
        return AgentResult(remark="it printed nothing")
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return AgentResult(remark=f"the last line that it printed is no JSON: {lines[-1]!r:.200}")
    return to_result(value)


def _last_lines(output: str) -> str:
    lines = output.strip().splitlines()[-_ERROR_LINES:]
    return "\n".join(["", *lines]) if lines else "none"
