"""A run ends at any moment, in any way; the same command again: nothing is lost, nothing is trained twice (SEMANTICS 5.1)."""

from __future__ import annotations

import ast
import json
import random
import shlex
import signal
from collections import Counter
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from faults import HANGS, SCRIPTED, Fault
from forked_runs import RAISED, ForkedRuns
from safetensors.torch import load_file

GROUPS, PROMPTS = 2, 9  # an epoch's tail flows into the next one's first step
OUTCOMES = (
    "group_indices",
    "failed_group_indices",
    "filtered_group_indices",
    "dropped_group_indices",
)


def command(folder: Path, mode: str, steps: int) -> list[str]:
    return [
        "quickstart",
        f"trainer.run_dir={folder}",
        f"trainer.mode={mode}",
        f"trainer.policy_mini_batch_size={GROUPS}",
        f"trainer.max_steps={steps}",
        "trainer.ckpt_interval=2",
        "trainer.trackers=[]",
        "trainer.policy.model.build.hidden_size=32",
        "trainer.policy.model.build.num_layers=1",
        "generator.sampling_params.max_tokens=12",
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.executor=thread",
        f"generator.inference_engine.batch_invariant={mode == 'sync'}",
        f"data.generate={PROMPTS}",
    ]


def history(folder: Path, steps: int) -> list[int]:
    """Every trained group index in the surviving history, in order."""
    rows = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    assert [row["step"] for row in rows] == list(range(1, steps + 1))
    return [group_index for row in rows for group_index in row["group_indices"]]


def kill_and_finish(forked_runs: ForkedRuns, root: Path, mode: str, steps: int, kills: int, seed: int) -> list[Path]:
    """Kills at random moments, every second process only once its loop has trained a step; then lets the run finish.

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
        code = forked_runs.run(output, command(runs[-1], mode, steps), kill_after_s, once_printed=once_printed)
        assert code in (None, 0), output.read_text()
        if code == 0:
            runs.append(root / f"run-{len(runs)}")
        else:
            killed += 1
    assert forked_runs.run(output, command(runs[-1], mode, steps)) == 0, output.read_text()
    return runs


# Ends of every kind, in every mode ------------------------------------------------------------------------------------

ADAPTING = "trainer.fully_async.generate_ahead_steps=null"  # the quickstart sets 1
MODES = {
    "sync": ["trainer.mode=sync"],
    "one_step_off": ["trainer.mode=one_step_off"],
    "partial_rollout": ["trainer.mode=partial_rollout"],
    "accept": ["trainer.mode=fully_async", "trainer.fully_async.staleness_policy=accept"],
    "wait": ["trainer.mode=fully_async", "trainer.fully_async.staleness_policy=wait", ADAPTING],
    "mask": ["trainer.mode=fully_async", "trainer.fully_async.staleness_policy=mask"],
    "drop": ["trainer.mode=fully_async", "trainer.fully_async.staleness_policy=drop"],
    "streaming": ["trainer.mode=fully_async", "trainer.fully_async.streaming_min_groups=1", ADAPTING],
    "overlap": ["trainer.mode=fully_async", "trainer.fully_async.overlap_weight_sync=true"],
    "every_second": ["trainer.mode=fully_async", "trainer.fully_async.weight_sync_interval=2", ADAPTING],
    "filter": ["trainer.mode=fully_async", "trainer.algorithm.dynamic_sampling=filter"],
}


@dataclass(frozen=True)
class End:
    """How a run ends: a fault at a place, at a random one of the first ``most`` opportunities; a whole run has 200 turns, 12
    updates or more, and 100 operations on the disk."""

    place: str
    action: str
    most: int

    def draw(self, rng: random.Random) -> Fault:
        """The fault of one process."""
        return Fault(self.place, self.action, rng.randint(1, self.most))


ENDS = (
    End("turn", "SIGKILL", 120),
    End("turn", "SIGTERM", 120),
    End("turn", "raise", 120),
    End("update", "raise", 6),
    End("update", "SIGKILL", 6),
    End("save", "SIGKILL", 40),
    End("save", "raise", 40),
    None,  # kill -9 from outside, at a random time
)


class Lives:
    """One run that ends again and again; once it has trained to its end, the next one begins."""

    def __init__(self, forked: ForkedRuns, root: Path, mode: str, steps: int, rng: random.Random) -> None:
        self._forked, self._root, self._mode, self._steps, self._rng = forked, root, mode, steps, rng
        self._output = root / "output.log"
        self._runs = [root / "run-0"]
        self._survived = 0  # runs in succession that had trained their last step before they were ended

    def end_once(self, how: End | None) -> bool:
        """Runs until it ends; whether it was ended, or has trained its last step."""
        fault = None if how is None else how.draw(self._rng)
        seen = self._output.stat().st_size if self._output.exists() else 0
        code = self._run(fault=fault, kill_after_s=self._rng.uniform(0.0, 2.0) if fault is None else None)
        said = self._output.read_text()[seen:]
        if code == 0 and (self._runs[-1] / "finished.json").exists():
            self._runs.append(self._root / f"run-{len(self._runs)}")
            self._survived += 1
            assert self._survived < 10, f"{how} never ends the run"
            return False
        self._survived = 0
        if fault is not None and fault.action == "raise":
            assert code in (1, RAISED) and SCRIPTED in said, (fault, code, said)
        elif fault is not None and fault.action == "SIGTERM":
            before = code == 130 and "interrupted before training began" in said
            assert code == 0 or before, (fault, code, said)
        else:
            assert code is None, (fault, code, said)
        return True

    def finish(self) -> None:
        """Lets it train to its end."""
        assert self._run() == 0, self._output.read_text()

    def check(self) -> None:
        """Every step once; every prompt up to the last one that trained once, whatever became of it."""
        for run in self._runs:
            rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
            assert [row["step"] for row in rows] == list(range(1, self._steps + 1)), run
            trained, ended = (
                [group_index for row in rows for outcome in outcomes for group_index in row[outcome]]
                for outcomes in (["group_indices"], OUTCOMES)
            )
            assert len(trained) == self._steps * GROUPS, run
            repeated = [group_index for group_index, times in Counter(ended).items() if times > 1]
            lost = sorted(set(range(max(trained))) - set(ended))
            assert (lost, repeated) == ([], []), run

    def _run(self, **how: Any) -> int | None:
        arguments = [*command(self._runs[-1], "sync", self._steps), *MODES[self._mode]]
        return self._forked.run(self._output, arguments, **how)


# By default each trainer. All kinds of ends are among them.
BY_DEFAULT = {"sync", "one_step_off", "partial_rollout", "streaming"}


@pytest.mark.parametrize(
    ("mode", "first", "ends"),
    [
        *(pytest.param(mode, 0, 2, marks=() if mode in BY_DEFAULT else pytest.mark.slow) for mode in MODES),
        *(pytest.param(mode, 2, len(ENDS) - 2, marks=pytest.mark.slow) for mode in MODES),
    ],
)
def test_however_a_run_ends_every_prompt_is_trained_once_per_epoch(
    forked_runs: ForkedRuns, tmp_path: Path, mode: str, first: int, ends: int
) -> None:
    lives = Lives(forked_runs, tmp_path, mode, steps=8 if ends == 2 else 12, rng=random.Random(f"{mode} {ends}"))
    ended = 0
    while ended < ends:  # each mode begins with other kinds; together the two tests of a mode have all of them
        ended += lives.end_once(ENDS[(2 * list(MODES).index(mode) + first + ended) % len(ENDS)])
    lives.finish()
    lives.check()


def test_a_forked_run_has_its_libraries_imported(forked_runs: ForkedRuns, tmp_path: Path) -> None:
    script = tmp_path / "run.py"
    script.write_text(
        "import sys\nbefore = set(sys.modules)\nfrom skyrl_train.entrypoints.command_line import main\n"
        f"main(['train', *{command(tmp_path / 'run', 'fully_async', steps=1)}])\n"
        "print('new:', sorted(set(sys.modules) - before))\n"
    )
    assert forked_runs.run(tmp_path / "run.log", [], script=script) == 0, (tmp_path / "run.log").read_text()
    new = ast.literal_eval((tmp_path / "run.log").read_text().rpartition("new: ")[2])
    assert len([name for name in new if name.startswith(("torch", "transformers"))]) < 30, new


def test_a_run_that_hangs_fails_with_the_stacks_of_its_threads_and_tasks(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    hangs: dict[str, Any] = {"fault": Fault("update", "hang", 2), "once_printed": HANGS, "limit_s": 0}
    with pytest.raises(AssertionError, match=r"(?s)in _happen.*trainer\.py:\d+ train_step"):
        forked_runs.run(tmp_path / "run.log", command(tmp_path / "run", "sync", steps=2), **hangs)


def test_a_killed_synchronous_run_ends_with_the_weights_of_an_uninterrupted_one(
    forked_runs: ForkedRuns, tmp_path: Path
) -> None:
    steps, whole = 8, tmp_path / "whole"
    assert forked_runs.run(tmp_path / "whole.log", command(whole, "sync", steps)) == 0, (
        tmp_path / "whole.log"
    ).read_text()
    for run in kill_and_finish(forked_runs, tmp_path, "sync", steps, kills=2, seed=1):
        assert history(run, steps) == history(whole, steps)
        expected, got = (
            load_file(f / "checkpoints" / f"global_step_{steps}" / "policy" / "policy.safetensors")
            for f in (whole, run)
        )
        assert all(got[name].equal(tensor) for name, tensor in expected.items())


@pytest.mark.parametrize(
    ("mode", "number"),
    [
        ("sync", signal.SIGTERM),
        ("fully_async", signal.SIGINT),
        pytest.param("sync", signal.SIGINT, marks=pytest.mark.slow),
        pytest.param("fully_async", signal.SIGTERM, marks=pytest.mark.slow),
    ],
)
def test_a_signal_stops_with_a_checkpoint_exit_zero_and_the_command_that_resumes(
    forked_runs: ForkedRuns, tmp_path: Path, mode: str, number: signal.Signals
) -> None:
    steps, folder, output = 12, tmp_path / "run", tmp_path / "run.log"
    in_step_2 = Fault("update", number.name, 3)  # a step accumulates and finishes
    assert forked_runs.run(output, command(folder, mode, steps), fault=in_step_2) == 0, output.read_text()
    # The line alone: libraries may have their own last words at exit.
    printed = output.read_text().rpartition("Resume: ")[2].strip().splitlines()[0]
    assert shlex.split(printed)[:2] == ["skyrl-train", "train"]
    latest = folder / "checkpoints" / (folder / "checkpoints" / "latest").read_text().strip()
    assert 1 <= json.loads((latest / "rollout_state.json").read_text())["global_step"] < steps
    assert forked_runs.run(output, shlex.split(printed)[2:]) == 0, output.read_text()
    assert sorted(history(folder, steps)) == list(range(steps * GROUPS))
