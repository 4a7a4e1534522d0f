"""TensorBoard: event files in ``<run>/logs/tensorboard/<run>``. Its *Custom scalars* open on the reward."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from tensorboard.compat.proto.summary_pb2 import Summary
from torch.utils.tensorboard import SummaryWriter

from skyrl_train.config.schema import RunConfig
from skyrl_train.observability.trackers.tracker import Tracker, flat_config, run_name, split_histograms

_CHARTS = {
    "1 Does it learn?": {
        "reward": ["Multiline", ["reward/mean", "reward/p10", "reward/p90"]],
        "reward of evaluations": ["Multiline", [r"^eval/(reward|pass@\d+)$"]],
        "tokens of a response": ["Multiline", ["generate/response_tokens"]],
    },
    "2 Is it sane?": {
        "entropy": ["Multiline", ["loss/entropy"]],
        "gradient norm": ["Multiline", ["policy/grad_norm"]],
        "effective sample size": ["Multiline", ["off_policy/ess"]],
        "lag": ["Multiline", ["staleness/mean", "staleness/max"]],
        "groups without signal, truncated": ["Multiline", ["reward/zero_variance_groups", "generate/truncated"]],
    },
    "3 Who waits for whom?": {
        "seconds of a step": ["Multiline", ["time/step", "time/train", "time/wait_for_batch", "time/pause"]],
        "idle generation slots": ["Multiline", ["async/idle_fraction"]],
        "tokens per second": ["Multiline", ["inference/tokens_per_second", "policy/tokens_per_second"]],
    },
}


class TensorBoardTracker(Tracker):
    """Steps that are repeated after a resume replace the old ones."""

    def __init__(self, folder: Path, config: RunConfig, resume_step: int) -> None:
        # TensorBoard shows the last folder as the name of the run.
        self._writer = SummaryWriter(str(folder / run_name(folder)), purge_step=resume_step + 1, flush_secs=10)
        self._writer.add_custom_scalars(_CHARTS)
        settings = "\n".join(f"{key}: {value}" for key, value in flat_config(config).items())
        self._writer.add_text("settings", _literal(settings), resume_step)

    def log(self, step: int, metrics: Mapping[str, float]) -> None:
        scalars, histograms = split_histograms(metrics)
        # One record for the step: each record opens the file again, and a step has a hundred metrics.
        summary = Summary(value=[Summary.Value(tag=name, simple_value=value) for name, value in scalars.items()])
        self._writer.file_writer.add_summary(summary, step)  # type: ignore[attr-defined]  # to mypy it is None
        for name, (counts, edges) in histograms.items():
            values = edges[:-1] + 0.5
            total, squares = float(counts @ values), float(counts @ values**2)
            self._writer.add_histogram_raw(
                name, edges[0], edges[-1], counts.sum(), total, squares, edges[1:].tolist(), counts.tolist(), step
            )

    def log_samples(self, phase: str, step: int, rows: Sequence[Mapping[str, Any]]) -> None:
        parts = []
        for row in rows:
            facts = f"**reward {row['reward']:g}**, group {row['group_index']}, lag {row['lag']}, {row['stop_reason']}"
            parts += [facts, _literal(row["prompt"]), "answer:", _literal(row["response"]), "---"]
        self._writer.add_text(f"samples/{phase}", "\n\n".join(parts), step)

    def close(self) -> None:
        self._writer.close()


def _literal(text: str) -> str:
    """Return Markdown that shows ``text`` as it is."""
    return "\n".join(f"    {line}" for line in text.splitlines()) or "    "
