"""Agents that are programs, in any language.

| the program gets | from |
|---|---|
| its task | the JSON file ``SKYRL_PROMPT``, also on standard input: ``prompt, extras, session_id, seed`` |
| the endpoint | ``OPENAI_BASE_URL``, ``ANTHROPIC_BASE_URL`` |
| its key | ``OPENAI_API_KEY``, ``ANTHROPIC_API_KEY`` |
| its session | ``SKYRL_SESSION_ID``, for ``POST /v1/sessions/{id}/reward`` |

It inherits this process's environment without the keys of this library: ``SKYRL_ADMIN_KEY``, the inference servers' key,
and every variable that has one of them as its value.

The last line of its standard output is its reward as JSON, unless it posts the reward and prints none.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import json
import math
import os
import signal
import sys
import tempfile
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from skyrl_train.errors import ConfigError
from skyrl_train.generators.harness.agent import AgentError, AgentResult, AgentTask, direct_connections, to_result

_KEPT_BYTES = 65536  # kept from the end of each output stream
_ERROR_LINES = 8
_WITHHELD = ("SKYRL_ADMIN_KEY", "VLLM_API_KEY")  # keys of the servers, which agents must not have
_READ_TIMEOUT_S = 1.0  # to drain the pipes after the process group has ended


class ProcessAgent:
    """Starts ``command`` once per task, in a new process group that is killed at the end of the run.

    Args:
        command: the program and its arguments, without a shell; ``{python}`` is the Python that runs this process.
        environment: additional variables for the program. They are passed even if ``withheld`` or ``secrets`` match.
        grace_s: seconds between SIGTERM and SIGKILL.
        withheld: names of further variables that are not inherited.
        secrets: further values; variables with such a value are not inherited.

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
                "['{python}', agent.py]."
            )
        # The python of PATH may be another one, without the packages that the run has.
        self._command = [sys.executable if word == "{python}" else str(word) for word in command]
        self.place = " ".join(self._command)  # for messages
        self._environment = {str(name): str(value) for name, value in (environment or {}).items()}
        self._withheld = frozenset((*_WITHHELD, *withheld))
        self._secrets = frozenset(secrets)
        self._grace_s = grace_s

    async def run(self, task: AgentTask) -> AgentResult:
        """Run the program. Cancellation ends the whole process group first.

        Raises:
            AgentError: it cannot be started, exited with a non-zero status, or printed a reward that is not finite.
            AgentContractError: it printed something else than a reward.
        """
        with tempfile.TemporaryDirectory(prefix="skyrl-agent-") as folder:
            # A file, because the length of arguments and variables is limited.
            prompt = Path(folder) / "prompt.json"
            content = {
                "prompt": [dict(message) for message in task.prompt],
                "extras": dict(task.extras),
                "session_id": task.session_id,
                "seed": task.seed,
            }
            prompt.write_text(json.dumps(_without_nan(content), default=_plain), encoding="utf-8")
            secrets = self._secrets | {os.environ[name] for name in self._withheld if os.environ.get(name)}
            inherited = {
                name: value for name, value in os.environ.items() if name not in self._withheld and value not in secrets
            }
            environment = {**inherited, **self._environment, **_variables(task, prompt)}
            status, *streams = await self._run(prompt, environment)
        # Redact the whole outputs before they are truncated, because a cut key would not be found.
        out, err = (task.redact(stream.decode(errors="replace")) for stream in streams)
        output = f"[standard output]\n{out}\n[standard error]\n{err}"
        if status:
            how = f"was ended by signal {-status}" if status < 0 else f"exited with status {status}"
            lines = (err or out).strip().splitlines()[-_ERROR_LINES:]
            # Where only the first line is shown, it should have the error of a traceback, which is the last line.
            *before, last = lines or ["no output"]
            message = "\n".join(
                [f"{self._command[0]} {how}: {last}", *(["Before that it printed:", *before] if before else [])]
            )
            raise AgentError(message, output)
        try:
            return replace(_read_reward(out), output=output)
        except AgentError as error:
            error.output = output
            raise

    async def _run(self, prompt: Path, environment: Mapping[str, str]) -> tuple[int, bytes, bytes]:
        """Return the exit status and the last ``_KEPT_BYTES`` of both output streams."""
        # Own pipes: with asyncio's, process.wait() would also wait for other processes that inherited them.
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
                    remedy = ". Write {python} before it, as the first word of generator.kwargs.command"
                    raise AgentError(
                        f"{self._command[0]} cannot be started: {error.strerror or error}"
                        f"{remedy if self._command[0].endswith('.py') else ''}"
                    ) from error
            # Only the program holds the write ends now, so the pipes end when it does.
            out.close_write_end()
            err.close_write_end()
            try:
                status = await process.wait()
            except asyncio.CancelledError:
                await self._end(process)
                raise
            finally:
                _kill_group(process.pid, signal.SIGKILL)  # also ends its background processes
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
    """A pipe that keeps the last ``_KEPT_BYTES``, so that a program with much output neither blocks nor fills the memory."""

    def __init__(self) -> None:
        self._read_end, self.write_end = os.pipe()
        self._write_open = True
        self._kept = b""
        self._reading: asyncio.Task[None] | None = None
        self._transport: asyncio.ReadTransport | None = None

    async def __aenter__(self) -> _Pipe:
        reader = asyncio.StreamReader()
        # Unbuffered, because asyncio reads the descriptor itself.
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
        """Return the last bytes written. Waits briefly: a process that left the group may keep the pipe open forever."""
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


def _plain(value: Any) -> Any:
    """Convert a value that JSON lacks: times to ISO 8601, bytes to base64, numpy's to Python's, others to text."""
    if hasattr(value, "isoformat"):
        return value.isoformat()
    if isinstance(value, bytes):
        return base64.b64encode(value).decode("ascii")
    return _without_nan(value.tolist()) if hasattr(value, "tolist") else str(value)


def _without_nan(value: Any) -> Any:
    """Replace numbers that are not finite by None: JSON lacks them, and other languages refuse them."""
    if isinstance(value, Mapping):
        return {name: _without_nan(each) for name, each in value.items()}
    if isinstance(value, list | tuple):
        return [_without_nan(each) for each in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def _variables(task: AgentTask, prompt: Path) -> dict[str, str]:
    return {
        "OPENAI_BASE_URL": task.base_url,
        "OPENAI_API_KEY": task.api_key,
        "ANTHROPIC_BASE_URL": task.server_url,
        "ANTHROPIC_API_KEY": task.api_key,
        "SKYRL_PROMPT": str(prompt),
        "SKYRL_SESSION_ID": task.session_id,
        **direct_connections(task.server_url),
    }


def _kill_group(group: int, how: signal.Signals) -> None:
    # The group has ended; macOS raises PermissionError for a group that has only zombies left.
    with contextlib.suppress(ProcessLookupError, PermissionError):
        os.killpg(group, how)


def _read_reward(out: str) -> AgentResult:
    # Only the last line counts, so that programs may print other output.
    lines = [line for line in out.splitlines() if line.strip()]
    if not lines:
        return AgentResult(remark="it printed nothing")
    try:
        value = json.loads(lines[-1])
    except ValueError:
        return AgentResult(remark=f"the last line that it printed is not JSON: {lines[-1]!r:.200}")
    return to_result(value)
