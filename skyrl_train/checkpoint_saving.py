"""Takes checkpoints of a run that goes on: the snapshot at one instant, the disk in the background.

begin ──backend.snapshot (training waits)──collect (one instant of the loop)──> returns
                                                                   └──write──> written() returns
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from skyrl_train.concurrency import Signal
from skyrl_train.inference.recordings import SessionSnapshot
from skyrl_train.rollout.buffer import BufferedGroup
from skyrl_train.rollout.checkpoint import write_rollout_state
from skyrl_train.training.backend import TrainingBackend
from skyrl_train.training.checkpoint import Checkpoints, checkpoint_step

POLICY_FOLDER = "policy"  # of the backend's state within a checkpoint


@dataclass(frozen=True)
class RolloutSnapshot:
    """The rollout side at one instant of the loop."""

    step: int
    state: dict[str, Any]  # JSON-able
    groups: Sequence[BufferedGroup]  # finished, untrained
    recordings: Sequence[SessionSnapshot]  # of what unfinished groups have sampled


class CheckpointSaving:
    """One checkpoint at a time.

    Args:
        snapshot: copies the backend's state, off the loop.
        collect: the rollout side; called with nothing in between, once the backend's state is copied.
        changed: notified when one is written, or failed.
    """

    def __init__(
        self,
        store: Checkpoints,
        backend: TrainingBackend,
        *,
        snapshot: Callable[[], Awaitable[dict[str, object]]],
        collect: Callable[[], RolloutSnapshot],
        changed: Signal,
    ) -> None:
        self._store = store
        self._backend = backend
        self._snapshot = snapshot
        self._collect = collect
        self._changed = changed
        self._task: asyncio.Task[Path] | None = None
        self.step: int | None = None  # of the newest checkpoint on disk

    @property
    def error(self) -> BaseException | None:
        """What ended the writing under way."""
        task = self._task
        return task.exception() if task is not None and task.done() and not task.cancelled() else None

    async def check(self) -> None:
        """Takes note of a checkpoint that is written by now.

        Raises:
            CheckpointError: it could not be.
        """
        if self._task is not None and self._task.done():
            await self.written()

    async def begin(self) -> None:
        """Takes a snapshot and writes it while the run goes on; one that is being written is waited for.

        Raises:
            CheckpointError: the one before could not be written.
        """
        await self.written()
        policy = await self._snapshot()
        rollout = self._collect()

        def write(folder: Path) -> None:
            (folder / POLICY_FOLDER).mkdir()
            self._backend.save(policy, folder / POLICY_FOLDER)
            recordings = (recording.to_json() for recording in rollout.recordings)
            write_rollout_state(rollout.state, rollout.groups, folder, recordings)

        self._task = asyncio.create_task(asyncio.to_thread(self._store.write, rollout.step, write), name="checkpoint")
        self._task.add_done_callback(lambda saved: self._changed.notify())

    async def written(self) -> None:
        """Returns when nothing is being written.

        Raises:
            CheckpointError: it could not be; the checkpoint before stands.
        """
        if self._task is not None:
            try:
                self.step = checkpoint_step(await asyncio.shield(self._task))
            finally:
                if self._task.done():  # else we are being cancelled: ended() waits for the thread that writes
                    self._task = None

    async def ended(self) -> None:
        """Returns when nothing is being written, however it ended."""
        if self._task is not None:
            await asyncio.gather(self._task, return_exceptions=True)
