"""The last line of a run: what was learned, where it is, how to go on. Pure functions of ``metrics.jsonl``'s rows."""

from __future__ import annotations

import math
import shlex
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from skyrl_train.observability.live import counted, duration

REWARD = "reward/mean"
ENDS = 0.05  # the share of the steps that "first" and "last" are means over


@dataclass(frozen=True, slots=True)
class RunSummary:
    """Rewards are None where no step has one."""

    steps: int
    first_reward: float | None  # mean over the first 5 % of the steps, at least one
    last_reward: float | None  # mean over the last 5 %
    best_reward: float | None  # the best step's
    training_s: float  # of all steps that survived; starting the processes is not in it

    def to_dict(self) -> dict[str, Any]:
        """For ``finished.json``."""
        return asdict(self)


def summarize(rows: Sequence[Mapping[str, Any]]) -> RunSummary:
    """Sums up the rows of ``metrics.jsonl``, however often the run was resumed between them."""
    rewards = [row[REWARD] for row in rows if isinstance(row.get(REWARD), int | float) and math.isfinite(row[REWARD])]
    ends = max(1, round(len(rewards) * ENDS))
    return RunSummary(
        steps=max((row["step"] for row in rows), default=0),
        first_reward=statistics.fmean(rewards[:ends]) if rewards else None,
        last_reward=statistics.fmean(rewards[-ends:]) if rewards else None,
        best_reward=max(rewards, default=None),
        training_s=math.fsum(row.get("time/step", 0.0) for row in rows),
    )


def spent_s(rows: Sequence[Mapping[str, Any]], start_step: int, command_s: float) -> float:
    """Seconds that a run took: ``command_s`` for this command from its start on, and the steps of the commands before it.

    Args:
        start_step: the step that this command went on from.
    """
    return command_s + math.fsum(row.get("time/step", 0.0) for row in rows if row["step"] <= start_step)


def final_line(summary: RunSummary, run_dir: str, *, finished: bool, command: str, seconds: float) -> str:
    """One line: what was learned, where the run is, and ``command``, which resumes or repeats it.

    Args:
        seconds: that the run took.
    """
    if not finished and not summary.steps:
        return (
            f"Stopped after {duration(seconds)}, before the first step was done: nothing is trained yet. The run's folder is "
            f"{run_dir}. Start it again there with: {command}"
        )
    if summary.first_reward is None or summary.last_reward is None:
        learned = "no reward yet"
    else:
        learned = (
            f"reward {summary.first_reward:.3f} -> {summary.last_reward:.3f} (best step {summary.best_reward:.3f})"
        )
    done = "Trained" if finished else "Stopped after"
    after = "Train again" if finished else "Resume"
    return (
        f"{done} {counted(summary.steps, 'step', 'steps')} in {duration(seconds)}: {learned}. Everything is in {run_dir}. "
        f"{after} with: {command}"
    )


def train_command(module: str, arguments: Sequence[str], launcher: str = "") -> str:
    """The command line that was given, quoted so that a shell reads it back; ``launcher`` is what it needs before it."""
    return f"{launcher} {shlex.join(['python', '-m', module, *arguments])}".lstrip()


def resume_command(module: str, arguments: Sequence[str], run_dir: str, launcher: str = "") -> str:
    """The command line that goes on with the run in ``run_dir``: the one given, pointed there."""
    elsewhere = ("trainer.run_dir=", "trainer.resume=")
    kept = [argument for argument in arguments if not argument.startswith(elsewhere)]
    return train_command(module, [*kept, f"trainer.run_dir={run_dir}"], launcher)
