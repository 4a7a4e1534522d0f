"""Standard output of a run, which outlives its terminal, its pipe and the disk of its file."""

from __future__ import annotations

import io
import logging
import os
from collections.abc import Callable
from typing import TextIO

logger = logging.getLogger(__name__)


class RunOutput(io.TextIOBase):
    """Writes to ``stream``. After an error of the stream, all output of this process to it is discarded.

    A run does not fail with its output: its folder has all that it prints. If the reader of a pipe has ended, as in
    ``skyrl-train train RECIPE | head``, ``on_broken_pipe`` is called: nobody may know that the run still works. Other errors (the
    terminal of a background job was closed, the disk is full) are logged.

    Attributes:
        broken_pipe: whether the reader has ended.
    """

    def __init__(self, stream: TextIO, on_broken_pipe: Callable[[], object]) -> None:
        self._stream = stream
        self._on_broken_pipe = on_broken_pipe
        self.broken_pipe = False

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stream.encoding

    def isatty(self) -> bool:
        return self._stream.isatty()

    def fileno(self) -> int:
        return self._stream.fileno()

    def write(self, text: str) -> int:
        try:
            self._stream.write(text)
        except OSError as error:
            self._discard(error)
        return len(text)

    def flush(self) -> None:
        # Its owner may have closed it before this object is finalised, which flushes; a Tee of the user's may lack the attribute.
        if getattr(self._stream, "closed", False):
            return
        try:
            self._stream.flush()
        except OSError as error:
            self._discard(error)

    def _discard(self, error: OSError) -> None:
        null = os.open(os.devnull, os.O_WRONLY)
        os.dup2(null, self._stream.fileno())  # what the stream still buffers goes there too
        os.close(null)
        if isinstance(error, BrokenPipeError):
            self.broken_pipe = True
            logger.warning("the reader of the run's output has ended: the run stops after this step")
            self._on_broken_pipe()
        else:
            logger.warning("the run prints nothing from now on, because its output cannot be written: %s", error)
