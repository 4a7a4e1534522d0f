"""Takes checkpoints while the run continues: a consistent snapshot first, then the disk in the background.

begin ──backend.snapshot (training waits)──collect (no await)──> returns
                                                    └──write──> written() returns
                                                          └──exports, one after the other──> ended() returns
"""

from __future__ import annotations

import asyncio
import shutil
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from skyrl_train.events.log import EventLog
from skyrl_train.inference.replay import SessionSnapshot
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.checkpoint import write_rollout_state
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints, Evaluated, checkpoint_step, folder_bytes

POLICY_FOLDER = "policy"  # the backend's state within a checkpoint


@dataclass(frozen=True)
class RolloutSnapshot:
    """The state of the rollout side at one moment of the event loop."""

    step: int
    state: dict[str, Any]  # JSON-able
    groups: Sequence[BufferedGroup]  # finished, untrained
    replay_cache: Sequence[SessionSnapshot]  # tokens that unfinished groups have sampled


class CheckpointSaving:
    """Writes one checkpoint at a time.

    Args:
        snapshot: copies the backend's state, off the event loop.
        collect: returns the rollout side; called without an ``await`` after the backend's state is copied.
        evaluated: returns the evaluations that decide which older checkpoints stay.
        export: writes the checkpoint of a step as a model folder, blocking; called every ``export_interval`` steps, one after
            the other. The checkpoints stay meanwhile, and no checkpoint waits for an export. A stop may write the checkpoint
            again that is being exported, with the same policy.
        export_interval: in steps; 0: never.
        sync_rows: puts the rows of the finished steps on the disk, blocking. Otherwise a power failure could leave a checkpoint
            without the rows of its steps, which never run again.
        changed: notified when a checkpoint is written or has failed, and when an export has ended.
        events: the record of the run.

    Attributes:
        step: step of the newest checkpoint on disk; None: there is none.
        disk: metrics of the disk and of the newest checkpoint that this process wrote; empty before.
    """

    def __init__(
        self,
        store: Checkpoints,
        backend: TrainingBackend,
        *,
        snapshot: Callable[[], Awaitable[dict[str, object]]],
        collect: Callable[[], RolloutSnapshot],
        evaluated: Callable[[], Evaluated],
        export: Callable[[int], None],
        export_interval: int,
        sync_rows: Callable[[], None],
        changed: Signal,
        events: EventLog,
    ) -> None:
        self._store = store
        self._backend = backend
        self._snapshot = snapshot
        self._collect = collect
        self._evaluated = evaluated
        self._export = export
        self._export_interval = export_interval
        self._sync_rows = sync_rows
        self._exports: dict[int, asyncio.Task[None]] = {}  # those that have not ended, by step
        self._exported = 0  # the step of the newest export, ended or not
        self._changed = changed
        self._events = events
        self._task: asyncio.Task[Path] | None = None
        self.step: int | None = None
        self.disk: dict[str, float] = {}

    @property
    def error(self) -> BaseException | None:
        """The error of the current write, if it has failed."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    @property
    def exporting(self) -> list[int]:
        """The steps whose exports have not ended, in their order."""
        return list(self._exports)

    def export_due(self, step: int) -> bool:
        """Return whether the checkpoint of ``step`` is also written as a model folder."""
        return self._export_interval > 0 and step % self._export_interval == 0

    async def check(self) -> None:
        """Update :attr:`step` if the current write has ended.

        Raises:
            CheckpointError: the write failed.
        """
        if self._task is not None and self._task.done():
            await self.written()

    async def begin(self) -> None:
        """Take a snapshot and start to write it. Waits for an earlier write first.

        Raises:
            CheckpointError: the earlier write failed.
        """
        await self.written()
        # The rollout side is collected after the wait for the backend, at one moment of the event loop.
        policy = await self._snapshot()
        rollout, evaluated = self._collect(), self._evaluated()
        evaluated = replace(evaluated, unfinished={*evaluated.unfinished, *self._exports})

        # Runs in a thread while training continues, so it uses only the copies above.
        def write(folder: Path) -> dict[str, str]:
            (folder / POLICY_FOLDER).mkdir()
            checksums = self._backend.save(policy, folder / POLICY_FOLDER)
            replay_cache = (recording.to_json() for recording in rollout.replay_cache)
            return write_rollout_state(rollout.state, rollout.groups, folder, replay_cache) | {
                f"{POLICY_FOLDER}/{name}": checksum for name, checksum in checksums.items()
            }

        def publish() -> Path:
            with self._events.timed("checkpoint", step=rollout.step):
                self._sync_rows()
                folder = self._store.write(rollout.step, write, evaluated)
            with suppress(OSError):  # the figures are a help, and must not end the run
                self.disk = {
                    "system/checkpoint_bytes": folder_bytes(folder),
                    "system/disk_free_bytes": shutil.disk_usage(folder).free,
                }
            return folder

        async def save() -> Path:
            folder = await asyncio.to_thread(publish)
            if self.export_due(rollout.step) and rollout.step != self._exported:
                self._exported = rollout.step
                exporting = self._export_after(list(self._exports.values()), rollout.step)
                self._exports[rollout.step] = asyncio.create_task(exporting, name="export")
            return folder

        self._task = asyncio.create_task(save(), name="checkpoint")
        # A failed write must wake a trainer that waits for groups.
        self._task.add_done_callback(lambda saved: self._changed.notify())

    async def written(self) -> None:
        """Wait for the current write.

        Raises:
            CheckpointError: it failed; the previous checkpoint is untouched.
        """
        if self._task is not None:
            try:
                # Shielded: the thread writes on when this call is cancelled, so the task must stay until it ends.
                self.step = checkpoint_step(await asyncio.shield(self._task))
            finally:
                if self._task.done():  # else this call was cancelled, and ended() waits for the writing thread
                    self._task = None

    async def _export_after(self, earlier: Sequence[asyncio.Task[None]], step: int) -> None:
        try:
            await asyncio.gather(*earlier, return_exceptions=True)
            await asyncio.to_thread(self._export, step)
        finally:
            del self._exports[step]
            self._changed.notify()

    async def ended(self) -> None:
        """Wait for the current write and the exports, and ignore their results."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
        await asyncio.gather(*self._exports.values(), return_exceptions=True)
