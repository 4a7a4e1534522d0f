"""Readers beside a run: its page and its screens, as child processes of ``skyrl-train train``. They only read the run's folder.

train --page ──bind, begin(run)──> child with the socket, which serves the page
train --watch ──begin(run)──> child with the terminal; what this process prints meanwhile is held back

A reader ends when this process says so, or ends itself, however it ends: then a pipe that both share is closed. A reader that
fails is never a failure of the run.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import termios
import threading
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from rich.console import Console

from skyrl_train.entrypoints.page import DEFAULT_PORT, TOKEN_VARIABLE, address, page_server
from skyrl_train.errors import ConfigError
from skyrl_train.observability.run_folder import LOGS
from skyrl_train.runtime.listening import bind

logger = logging.getLogger(__name__)

END_LIMIT_S = 10.0  # for a reader to end
# Leaves the alternate screen, shows the cursor, and stops reports of the mouse and of pasted text.
RESET_TERMINAL = b"\x1b[?1049l\x1b[?25h\x1b[?1000l\x1b[?1003l\x1b[?1015l\x1b[?1006l\x1b[?2004l"


class Readers:
    """Use ``with Readers(...) as readers`` around a run, in the main thread, and call :meth:`begin` when its folder exists.

    Args:
        page: the port of the page, with or without a colon before it; "0": a free one. None: no page.
        watch: give the terminal to the screens of ``skyrl-train watch``.

    Attributes:
        url: the address of the page; None without one.

    Raises:
        ConfigError: the port is in use or is none, or there is no terminal for the screens.
    """

    def __init__(self, *, page: str | None, watch: bool) -> None:
        self.url: str | None = None
        self._listener: socket.socket | None = None
        self._screens = Screens() if watch else None
        self._page: subprocess.Popen[bytes] | None = None
        self._alive: int | None = None  # the end of the pipe that the readers see closing
        if page is not None:
            port = page.removeprefix(":")
            if not port.isdecimal():
                raise ConfigError(f"--page={page} is no port. Write --page, or --page :{DEFAULT_PORT}.")
            self._listener, self.url = bind("127.0.0.1", int(port), "--page")

    def __enter__(self) -> Self:
        if self.url is not None:
            text = f"The page of the run: {address(self.url, os.environ.get(TOKEN_VARIABLE))}"
            Console().print(text, markup=False, highlight=False, soft_wrap=True)
        if self._screens is not None:
            self._screens.hold()
        return self

    def begin(self, run: Path) -> None:
        """Start the readers of the run in this folder."""
        if self._listener is None and self._screens is None:
            return
        seen, self._alive = os.pipe()
        try:
            self._start(run, seen)
        except OSError as error:  # no processes, or no room on the disk
            logger.warning("the run continues without its page or screens: %s", error)
        os.close(seen)

    def _start(self, run: Path, seen: int) -> None:
        if self._listener is not None:
            self._listener.listen()  # a browser that is early waits for the page
            with (run / LOGS / "page.log").open("ab") as log:
                self._page = start(
                    "page", run, seen, self._listener.fileno(),
                    stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True,  # no Ctrl-C
                )  # fmt: skip
            self._listener.close()
            self._listener = None
        if self._screens is not None:
            self._screens.start(run, seen)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        if self._alive is not None:
            with suppress(BrokenPipeError):  # the readers have ended
                os.write(self._alive, b"\n")  # a forked child of this process may keep the pipe open
            os.close(self._alive)
        if self._page is not None:
            end(self._page)
        if self._listener is not None:
            self._listener.close()
        if self._screens is not None:
            self._screens.end()


class Screens:
    """The screens of ``skyrl-train watch`` in the terminal of this process.

    While they have it, files 1 and 2 of this process, which its children inherit, lead to a file that has no name. It is printed
    when the reader leaves the screens, or when the run has ended.

    Raises:
        ConfigError: there is no terminal.
    """

    def __init__(self) -> None:
        if not all(os.isatty(file) for file in (0, 1)) or os.environ.get("TERM") == "dumb":
            raise ConfigError("--watch needs a terminal. `skyrl-train watch` shows the run in another one.")
        self._terminal = os.dup(1)
        self._before: list[Any] = termios.tcgetattr(self._terminal)
        self._held = tempfile.TemporaryFile()  # noqa: SIM115  closed by end()
        self._printed = 0  # bytes of it
        self._kept: list[tuple[int, int]] = []  # files and where they led
        self._process: subprocess.Popen[bytes] | None = None
        self._leaving = threading.Thread(target=self._wait, name="screens", daemon=True)

    def hold(self) -> None:
        """Hold back what this process and its children print."""
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        for file in (1, 2):
            self._kept.append((file, os.dup(file)))
            os.dup2(self._held.fileno(), file)

    def start(self, run: Path, seen: int) -> None:
        """Show the run in this folder until the reader leaves, or ``seen`` can be read."""
        self._process = start("watch", run, seen, stdin=None, stdout=self._terminal, stderr=self._terminal)
        self._leaving.start()

    def _wait(self) -> None:
        assert self._process is not None
        failed = self._process.wait()
        with suppress(OSError, termios.error):  # the terminal is gone
            if failed:
                os.write(self._terminal, RESET_TERMINAL)
            termios.tcsetattr(self._terminal, termios.TCSANOW, self._before)
        self._release()

    def _release(self) -> None:
        for stream in (sys.stdout, sys.stderr):
            stream.flush()
        kept, self._kept = self._kept, []
        for file, led in kept:
            os.dup2(led, file)
            os.close(led)
        with suppress(OSError):
            while text := os.pread(self._held.fileno(), 1 << 16, self._printed):  # children may write to it still
                self._printed += os.write(self._terminal, text)

    def end(self) -> None:
        """Wait until the screens have ended, and print what was held back."""
        if self._process is not None:
            end(self._process)
            self._leaving.join()
        self._release()
        self._held.close()
        os.close(self._terminal)


def start(reader: str, run: Path, seen: int, *files: int, **options: Any) -> subprocess.Popen[bytes]:
    """Start a reader, which a Ctrl-C in the terminal does not end."""
    paths = os.pathsep.join(path for path in sys.path if path)  # the same packages as here
    blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        return subprocess.Popen(
            [sys.executable, "-m", "skyrl_train.entrypoints.beside", reader, str(run), *map(str, (seen, *files))],
            env={**os.environ, "PYTHONPATH": paths},
            pass_fds=(seen, *files),
            **options,
        )
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


def end(reader: subprocess.Popen[bytes]) -> None:
    """Wait for a reader that knows that it has to end."""
    try:
        reader.wait(END_LIMIT_S)
    except subprocess.TimeoutExpired:
        reader.kill()
        reader.wait()


def when_over(seen: int, stop: Callable[[], object]) -> None:
    """Call ``stop`` in another thread when the process that started this one has, or is, ended."""

    def wait() -> None:
        os.read(seen, 1)
        stop()

    threading.Thread(target=wait, name="over", daemon=True).start()


def read(reader: str, run: str, seen: int, *files: int) -> None:
    """Be a reader: "page" serves on the socket that is the only one of ``files``, "watch" has the terminal."""
    if reader == "page":
        server = page_server(Path(run), os.environ.get(TOKEN_VARIABLE))
        when_over(seen, lambda: setattr(server, "should_exit", True))
        server.run(sockets=[socket.socket(fileno=files[0])])
        return
    from skyrl_train.entrypoints.watch import POLL_S
    from skyrl_train.observability.readers.panel import WatchedRun
    from skyrl_train.observability.screens import TrainingScreens

    command = os.getppid()
    screens = TrainingScreens(WatchedRun(Path(run)), POLL_S, lambda: os.kill(command, signal.SIGINT))
    when_over(seen, screens.leave)
    screens.run()
    if screens.at_once:  # only now: the terminal is as it was
        os.kill(command, signal.SIGINT)


if __name__ == "__main__":
    read(sys.argv[1], sys.argv[2], *map(int, sys.argv[3:]))
