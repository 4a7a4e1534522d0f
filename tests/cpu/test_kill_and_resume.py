"""Kill -9 at any moment, run the same command again: nothing is lost and nothing is trained twice (SEMANTICS 5.1)."""

from __future__ import annotations

import json
import random
import shlex
import signal
from collections.abc import Iterator
from pathlib import Path

import pytest
from forked_runs import ForkServer
from safetensors.torch import load_file

GROUPS, PROMPTS = 4, 24


def command(folder: Path, mode: str, steps: int) -> list[str]:
    return [
        "--config-name=quickstart",
        f"trainer.run_dir={folder}",
        f"trainer.mode={mode}",
        f"trainer.policy_mini_batch_size={GROUPS}",
        f"trainer.max_steps={steps}",
        "trainer.ckpt_interval=2",
        "trainer.trackers=[]",
        "trainer.policy.model.build.hidden_size=32",
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.placement=thread",
        f"generator.inference_engine.batch_invariant={mode == 'sync'}",
        f"data.generate={PROMPTS}",
    ]


def history(folder: Path, steps: int) -> list[int]:
    """Every trained ordinal in the surviving history, in order."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [ordinal for row in rows for ordinal in row["ordinals"]]


@pytest.fixture(scope="module")
def server() -> Iterator[ForkServer]:
    with ForkServer() as server:
        yield server


def kill_and_finish(server: ForkServer, root: Path, mode: str, steps: int, kills: int, seed: int) -> list[Path]:
    """Kills at random moments, in every second life only once its loop has trained a step; then lets the run finish.

    A machine may be so fast that a run ends between two kills; the kills then go on in another one. Returns all runs.
    """
    rng = random.Random(seed)
    output = root / "output.log"
    runs = [root / "run-0"]
    killed = 0
    while killed < kills:
        in_loop = killed % 2 == 1
        kill_after_s = rng.uniform(0.0, 0.25 if in_loop else 2.0)
        once_printed = "step " if in_loop else ""
        code = server.run(output, command(runs[-1], mode, steps), kill_after_s, once_printed=once_printed)
        assert code in (None, 0), output.read_text()
        if code == 0:
            runs.append(root / f"run-{len(runs)}")
        else:
            killed += 1
    assert server.run(output, command(runs[-1], mode, steps)) == 0, output.read_text()
    return runs


@pytest.mark.timeout(1800)
@pytest.mark.parametrize("kills", [22, pytest.param(200, marks=pytest.mark.slow)])
def test_a_killed_asynchronous_run_trains_every_prompt_once_per_epoch(
    server: ForkServer, tmp_path: Path, kills: int
) -> None:
    steps = 60  # 10 epochs
    for run in kill_and_finish(server, tmp_path, "fully_async", steps, kills, seed=kills):
        assert sorted(history(run, steps)) == list(range(steps * GROUPS))


@pytest.mark.timeout(600)
def test_a_killed_synchronous_run_ends_with_the_weights_of_an_uninterrupted_one(
    server: ForkServer, tmp_path: Path
) -> None:
    steps = 24
    whole = tmp_path / "whole"
    assert server.run(tmp_path / "whole.log", command(whole, "sync", steps)) == 0, (tmp_path / "whole.log").read_text()
    for run in kill_and_finish(server, tmp_path, "sync", steps, kills=5, seed=1):
        assert history(run, steps) == history(whole, steps)
        expected, got = (
            load_file(f / "checkpoints" / f"global_step_{steps}" / "policy" / "policy.safetensors")
            for f in (whole, run)
        )
        assert all(got[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.timeout(600)
@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
@pytest.mark.parametrize("mode", ["sync", "fully_async"])
def test_a_signal_stops_with_a_checkpoint_exit_zero_and_the_command_that_resumes(
    server: ForkServer, tmp_path: Path, mode: str, number: int
) -> None:
    steps, folder, output = 12, tmp_path / "run", tmp_path / "run.log"
    assert server.run(output, command(folder, mode, steps), 0.0, number, once_printed="step 1/") == 0, (
        output.read_text()
    )
    # The line alone: libraries may have their own last words at exit.
    printed = output.read_text().rpartition("Resume with: ")[2].splitlines()[0]
    assert shlex.split(printed)[:3] == ["python", "-m", "skyrl_train.entrypoints.train"]
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    assert 1 <= json.loads((latest / "rollout_state.json").read_text())["global_step"] < steps
    assert server.run(output, shlex.split(printed)[3:]) == 0, output.read_text()
    assert sorted(history(folder, steps)) == list(range(steps * GROUPS))
