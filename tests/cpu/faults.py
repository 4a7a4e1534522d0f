"""Faults that a run meets at the n-th opportunity, counted in events and not in time, so that a seed says where it ends."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import threading
from collections.abc import Callable, Coroutine
from dataclasses import dataclass
from typing import Any

SCRIPTED = "scripted fault"
HANGS = "scripted fault: it hangs"
TRAINERS_TASKS = re.compile(r"train|admission|watchdog|checkpoint|weight-sync-\d+|group-\d+(-\d+)?")
DISK = ("make_folder", "write_text", "sync", "rename", "remove_tree", "remove_file")


@dataclass(frozen=True)
class Fault:
    """What goes wrong inside a run.

    Args:
        place: ``turn`` (one of the trainer's tasks goes on after a wait), ``update`` (a call of the backend that trains) or
            ``save`` (an operation on the disk of the checkpoints).
        action: ``raise``, ``hang``, or a signal that the process gets: ``SIGKILL``, ``SIGTERM``, ``SIGINT``.
        after: 1 for the first opportunity.
    """

    place: str
    action: str
    after: int

    def install(self) -> None:
        """In the process of the run, before it begins."""
        import skyrl_train.entrypoints.run as entry
        from skyrl_train.training.checkpoint import FileSystem
        from skyrl_train.training.policy_worker import PolicyWorker

        countdown = Countdown(self.after, self._happen)
        if self.place == "turn":
            entry._train = in_counted_tasks(entry._train, countdown)
        elif self.place == "update":
            for name in ("accumulate", "finish"):
                countdown.before(PolicyWorker, name)
        else:
            for name in DISK:
                countdown.before(FileSystem, name)

    def _happen(self) -> None:
        if self.action == "hang":
            print(HANGS, flush=True)  # noqa: T201 - for the test that waits for it
            threading.Event().wait()
        elif self.action != "raise":
            os.kill(os.getpid(), signal.Signals[self.action])
        elif self.place == "save":
            raise OSError(SCRIPTED)
        else:
            raise RuntimeError(SCRIPTED)


class Countdown:
    """Acts once, at the ``after``-th call."""

    def __init__(self, after: int, action: Callable[[], None]) -> None:
        self._left = after
        self._action = action

    def __call__(self) -> None:
        self._left -= 1
        if self._left == 0:
            self._action()

    def before(self, cls: type, name: str) -> None:
        """Counts the calls of a method, before they happen."""
        method = getattr(cls, name)

        def counted(*arguments: Any, **named: Any) -> Any:
            self()
            return method(*arguments, **named)

        setattr(cls, name, counted)


def in_counted_tasks(train: Callable[..., Coroutine[Any, Any, bool]], countdown: Countdown) -> Callable[..., Any]:
    """``train`` on a loop, whose tasks of the trainer's names are counted at each turn but their first."""

    def new_task(loop: asyncio.AbstractEventLoop, coroutine: Any, **how: Any) -> Any:
        return asyncio.Task(Counted(coroutine, countdown), loop=loop, **how)

    async def counted_train(*arguments: Any) -> bool:
        loop = asyncio.get_running_loop()
        loop.set_task_factory(new_task)
        return await loop.create_task(train(*arguments), name="train")

    return counted_train


class Counted(Coroutine[Any, Any, Any]):
    """A task's coroutine; its turns are counted. What the count raises is thrown into it, where it waits."""

    def __init__(self, coroutine: Coroutine[Any, Any, Any], countdown: Callable[[], None]) -> None:
        self._coroutine, self._countdown, self._begun = coroutine, countdown, False

    def send(self, value: Any) -> Any:
        begun, self._begun = self._begun, True
        task = asyncio.current_task()  # Python 3.11 names a task once its factory has returned
        if begun and task is not None and TRAINERS_TASKS.fullmatch(task.get_name()):
            try:
                self._countdown()
            except RuntimeError as fault:
                return self._coroutine.throw(fault)
        return self._coroutine.send(value)

    def __getattr__(self, name: str) -> Any:  # cr_frame, cr_await: where it waits
        return getattr(self._coroutine, name)

    def throw(self, *error: Any) -> Any:
        return self._coroutine.throw(*error)

    def close(self) -> None:
        self._coroutine.close()

    def __await__(self) -> Any:
        return self._coroutine.__await__()
