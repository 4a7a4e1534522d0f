"""Failures of users' code: environments, reward functions, agents and generators.

failed attempt ──FailureLog──> trainer.log: the traceback of each kind of failure, then counts
                          ├──> logs/agents/<sample>.log: the output of an agent program
                          └──> a line for the screen, at the first of each kind
"""

from __future__ import annotations

import logging
import re
import traceback
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from urllib.parse import quote

from skyrl_train.config.import_path import is_own_code
from skyrl_train.errors import AGENT_OUTPUT

logger = logging.getLogger(__name__)

OnFailure = Callable[[str, str, BaseException | None], None]  # name of what failed, reason, error if one was raised

REASON_WIDTH = 190  # characters: a group that failed twice has names of prompt and sample before the error and its line
MAX_SHOWN_KINDS = 8  # on the screen; the log has all of them
MAX_OUTPUTS = 100  # files in logs/agents

_FRAME = re.compile(r'^\s*File "(.+)", line (\d+), in (.+)$', re.MULTILINE)
_OUTPUT = re.compile(rf"^\s*{AGENT_OUTPUT} ['\"](.+)['\"]:\n(.*?)\n\s*End of the output\.$", re.MULTILINE | re.DOTALL)


def shortened(reason: str, width: int = REASON_WIDTH) -> str:
    """Return ``reason`` as one line of at most ``width`` characters, without those that steer a terminal."""
    line = " ".join("".join(letter if letter.isprintable() else " " for letter in reason).split())
    return line if len(line) <= width else f"{line[: width - 3]}..."


def sentence(reason: str) -> str:
    """Return ``reason`` like :func:`shortened`, with a full stop at the end."""
    line = shortened(reason)
    return line if line.endswith(".") else f"{line}."


def user_frame(text: str, *, own_only: bool = False) -> str:
    """Return ``file:line in function`` of the user's frame in a traceback, from which the error came; empty if it has no frame.

    The innermost frame outside of this library, Python's and installed packages; if there is none, the innermost frame, or
    with ``own_only`` an empty string. A chain of errors begins with its cause, and the notes of an error may contain the
    traceback of another process.
    """
    innermost = ""
    for block in text.split("Traceback (most recent call last):"):
        frames = _FRAME.findall(block)
        own = [frame for frame in frames if is_own_code(frame[0])]
        if own:
            return _shown(*own[-1])
        if frames and not innermost and not own_only:
            innermost = _shown(*frames[-1])
    return innermost


def place_of(error: BaseException | None) -> str:
    """Return ``file:line in function`` of the user's code from which an error came; empty if it came from no such line."""
    return "" if error is None else user_frame("".join(traceback.format_exception(error)), own_only=True)


def _shown(file: str, line: str, function: str) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}:{line} in {function}"


class FailureLog:
    """Logs and counts failed attempts at rollouts. Failures are of one kind if the same line of code failed.

    Attributes:
        counts: failures of each kind, by the user's frame.
    """

    def __init__(self, logs: Path) -> None:
        self.counts: Counter[str] = Counter()
        self._outputs = logs / "agents"
        self._outputs_written = 0

    def record(self, name: str, reason: str, error: BaseException | None) -> str | None:
        """Log a failure of ``name``. Returns the user's frame, or "", if the failure is to be shown: it is the first of its kind.

        A line of this library is none: the message of an error that it raises says what to do.

        Args:
            error: None: nothing was raised (a time limit, for example).
        """
        text = "" if error is None else "".join(traceback.format_exception(error))
        for sample, output in _OUTPUT.findall(text):
            self._write_output(sample, output)
        # The outputs are in separate files.
        text = _OUTPUT.sub("", text).rstrip()
        place = user_frame(text)
        self.counts[place] += 1
        count = self.counts[place]
        if count == 1:
            logger.error("%s failed: %s\n%s", name, reason, text)
        elif count in (10, 100, 1_000, 10_000, 100_000):
            logger.error(
                "%d failures like the one above at %s; the last: %s: %s", count, place or "no line", name, reason
            )
        shown = count == 1 and len(self.counts) <= MAX_SHOWN_KINDS
        return user_frame(text, own_only=True) if shown else None

    def close(self) -> None:
        """Log the counts."""
        for place, count in self.counts.most_common():
            logger.warning("failures at %s: %d", place or "no line of code", count)
        self.counts.clear()

    def _write_output(self, sample: str, output: str) -> None:
        if self._outputs_written >= MAX_OUTPUTS:
            return
        self._outputs_written += 1
        try:
            self._outputs.mkdir(exist_ok=True)
            # Percent-encoded: a uid may contain any character.
            (self._outputs / f"{quote(sample, safe='@ =+')[:200]}.log").write_text(output + "\n", encoding="utf-8")
        except OSError as problem:  # the outputs are a help, and must not end the run
            logger.error("the output of %s cannot be written: %s", sample, problem)
