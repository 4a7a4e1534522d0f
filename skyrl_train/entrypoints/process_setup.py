"""What a command needs of the process that it was started in: standard streams, open files, a current and a temporary folder."""

from __future__ import annotations

import io
import os
import resource
import sys
from contextlib import suppress
from pathlib import Path

from skyrl_train.errors import ConfigError

MAX_OPEN_FILES = 65_536


def prepare_streams() -> None:
    """Open the null device for each standard stream that is closed, and print a replacement for what a stream cannot encode.

    A closed stream leaves its number to the next file or socket that is opened. A child process would lose that file to its own
    standard stream.
    """
    for descriptor in range(3):
        try:
            os.fstat(descriptor)
        except OSError:
            os.open(os.devnull, os.O_RDWR)  # gets the lowest free number, which is this one
            os.set_inheritable(descriptor, True)
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # None: it was closed when Python started
            stream.reconfigure(errors="replace")


def raise_open_files_limit() -> None:
    """Let this process and its children open as many files as the administrator allows, up to ``MAX_OPEN_FILES``.

    The limit that a shell sets is often 1,024. Each request of an agent in this process takes two: the client's and the
    endpoint's end of a connection.
    """
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        with suppress(ValueError, OSError):  # macOS has a smaller limit than the one that it names
            resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def check_current_folder() -> None:
    """Check that the current folder exists: relative paths, and imports of some libraries, need one.

    Raises:
        ConfigError: it was deleted, or its path cannot be read.
    """
    try:
        Path.cwd()
    except OSError as error:
        raise ConfigError(
            f"The current folder cannot be found ({error.strerror}); it may have been deleted. Change to another one: cd FOLDER."
        ) from error


def check_temporary_folder() -> None:
    """Check that temporary files can be written, which PyTorch's import needs too.

    Raises:
        ConfigError: all folders for them are full, or not writable.
    """
    import tempfile

    try:
        tempfile.gettempdir()
    except FileNotFoundError as error:
        raise ConfigError(
            f"{error.strerror}: each is missing, full or not writable. Name a folder with free space in TMPDIR, such as "
            "TMPDIR=/dev/shm."
        ) from error
