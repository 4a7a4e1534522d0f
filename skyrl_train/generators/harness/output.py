"""Played sessions as a generator's output: one row per sequence. Pure."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from skyrl_train.generators.base import GeneratorOutput, TrajectoryID
from skyrl_train.inference.sessions.export import SessionSequence
from skyrl_train.inference.sessions.statistics import SessionStatistics


@dataclass(frozen=True, slots=True)
class PlayedSession:
    """A finished session. ``seconds`` is how long its agent ran; ``failed`` whether it got the reward of a failure."""

    sequences: Sequence[SessionSequence]
    statistics: SessionStatistics
    seconds: float
    overridden: int
    failed: bool = False
    agent_metrics: Mapping[str, float] | None = None


def to_output(sessions: Sequence[PlayedSession], ids: Sequence[TrajectoryID]) -> GeneratorOutput:
    """The rows of all sessions, those of one session in a row."""
    rows = [
        (row, trajectory_id, row is session.sequences[-1])
        for session, trajectory_id in zip(sessions, ids, strict=True)
        for row in session.sequences
    ]
    return {
        "prompt_token_ids": [row.prompt_token_ids for row, _, _ in rows],
        "response_ids": [row.response_ids for row, _, _ in rows],
        "rewards": [row.rewards for row, _, _ in rows],
        "loss_masks": [row.loss_mask for row, _, _ in rows],
        "stop_reasons": [row.stop_reason for row, _, _ in rows],
        "rollout_metrics": metrics(sessions),
        "rollout_logprobs": [row.logprobs for row, _, _ in rows],
        "rollout_versions": [row.versions for row, _, _ in rows],
        "trajectory_ids": [trajectory_id for _, trajectory_id, _ in rows],
        "is_last_step": [is_last for _, _, is_last in rows],
    }


def metrics(sessions: Sequence[PlayedSession]) -> dict[str, float]:
    """Means over the sessions; an agent's own over those that report the number."""
    values: dict[str, list[float]] = {
        "generate/turns": [session.statistics.turns for session in sessions],
        "generate/branches": [session.statistics.branches for session in sessions],
        "generate/drifted_turns": [session.statistics.drifted_turns for session in sessions],
        "generate/drifted_tokens": [session.statistics.drifted_tokens for session in sessions],
        "generate/response_tokens": [session.statistics.sampled_tokens for session in sessions],
        "generate/agent_seconds": [session.seconds for session in sessions],
        "generate/overridden_requests": [session.overridden for session in sessions],
        "generate/failed_agents": [session.failed for session in sessions],
    }
    for session in sessions:
        for name, value in (session.agent_metrics or {}).items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
