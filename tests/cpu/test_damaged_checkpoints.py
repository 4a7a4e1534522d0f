"""A damaged checkpoint is found and passed over; the run goes on from the intact one before it (SEMANTICS 5.6)."""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from checkpoint_worlds import DAMAGES, damage
from forked_runs import ForkedRuns
from harness import Harness
from recorded import samples_of
from safetensors.torch import load_file

from skyrl_train.errors import CheckpointError
from skyrl_train.training.checkpoint import CheckpointStore

STEPS = 6
KINDS = {
    "sync": [
        "trainer.mode=sync",
        "trainer.algorithm.advantage_estimator=gae",
        "trainer.policy.model.lora.rank=2",
        "generator.inference_engine.batch_invariant=true",
    ],
    "async": ["trainer.mode=fully_async", "generator.n_samples_per_prompt=4"],
}
ROLLOUT_FILES = {"rollout_state.json", "groups.jsonl", "recordings.jsonl"}
POLICY_FILES = {"policy/policy.safetensors", "policy/optimizer.pt"}
CRITIC_FILES = {"policy/critic/policy.safetensors", "policy/critic/optimizer.pt"}


def command(folder: Path, kind: str) -> list[str]:
    return [
        "quickstart",
        f"trainer.run_dir={folder}",
        "trainer.policy_mini_batch_size=2",
        f"trainer.max_steps={STEPS}",
        "trainer.ckpt_interval=2",
        "trainer.max_ckpts_to_keep=3",
        "trainer.trackers=[]",
        "trainer.policy.model.build.hidden_size=32",
        "trainer.policy.model.build.num_layers=1",
        "generator.sampling_params.max_tokens=12",
        "generator.n_samples_per_prompt=2",
        "generator.inference_engine.executor=thread",
        "data.generate=9",
        *KINDS[kind],
    ]


@pytest.fixture(scope="module", params=KINDS)
def finished(
    request: pytest.FixtureRequest, forked_runs: ForkedRuns, tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, Path]:
    """The kind of a run, and its folder after its last step, with the checkpoints of steps 2, 4 and 6."""
    pytest.importorskip("peft")
    root = tmp_path_factory.mktemp(request.param)
    assert forked_runs.run(root / "run.log", command(root / "run", request.param)) == 0, (root / "run.log").read_text()
    return request.param, root / "run"


def rows(folder: Path) -> list[dict[str, object]]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def test_damage_of_any_file_leads_to_the_checkpoint_before(finished: tuple[str, Path], tmp_path: Path) -> None:
    kind, run = finished
    checkpoints = run / "checkpoints"
    newest = checkpoints / "global_step_6"
    listed = json.loads((newest / "manifest.json").read_text())["files"]
    assert listed.keys() == ROLLOUT_FILES | POLICY_FILES | (CRITIC_FILES if kind == "sync" else set())
    assert CheckpointStore(checkpoints, 3).latest(pytest.fail) == newest
    for name in [*listed, "manifest.json"]:
        aside = tmp_path / "aside"
        for how in DAMAGES:
            shutil.copyfile(newest / name, aside)
            damage(newest / name, how)
            if not (newest / name).exists() or (newest / name).read_bytes() != aside.read_bytes():
                lines: list[str] = []
                assert CheckpointStore(checkpoints, 3).latest(lines.append) == checkpoints / "global_step_4"
                assert len(lines) == 1 and f"global_step_6 ({name} " in lines[0], lines
            else:
                assert listed[name]["bytes"] == 0  # nothing to overwrite
            shutil.copyfile(aside, newest / name)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("policy/policy.safetensors", "overwrite"),
        pytest.param("rollout_state.json", "truncate", marks=pytest.mark.slow),
    ],
)
def test_the_run_ends_as_if_it_had_been_stopped_at_the_checkpoint_before(
    finished: tuple[str, Path], forked_runs: ForkedRuns, tmp_path: Path, name: str, how: str
) -> None:
    kind, whole = finished
    run, output = tmp_path / "run", tmp_path / "run.log"
    shutil.copytree(whole, run)
    (run / "finished.json").unlink()
    damage(run / "checkpoints" / "global_step_6" / name, how)
    assert forked_runs.run(output, command(run, kind)) == 0, output.read_text()
    (line,) = [line for line in output.read_text().splitlines() if "Damage" in line]
    assert f"global_step_6 ({name} " in line and line.endswith("The run resumes from global_step_4 instead.")
    assert "resuming after step 4" in output.read_text()

    assert [row["step"] for row in rows(run)] == list(range(1, STEPS + 1))
    trained = [group_index for row in rows(run) for group_index in row["group_indices"]]  # type: ignore[attr-defined]
    assert len(trained) == len(set(trained)) == 2 * STEPS
    assert rows(run)[:4] == rows(whole)[:4]
    sampled = [row["step"] for row in samples_of(run)]
    assert sampled == sorted(sampled) and set(sampled) == set(range(1, STEPS + 1))
    assert CheckpointStore(run / "checkpoints", 3).latest(pytest.fail) == run / "checkpoints" / "global_step_6"
    if kind == "sync":  # the same samples come again, so the same weights too
        for part in (POLICY_FILES | CRITIC_FILES) - {"policy/optimizer.pt", "policy/critic/optimizer.pt"}:
            expected, got = (load_file(f / "checkpoints" / "global_step_6" / part) for f in (whole, run))
            assert expected.keys() == got.keys() and all(got[key].equal(expected[key]) for key in expected)


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_run_without_an_intact_checkpoint_ends_and_changes_nothing(tmp_path: Path, mode: str) -> None:
    settings = [f"trainer.mode={mode}", "trainer.ckpt_interval=2", "trainer.max_ckpts_to_keep=2"]
    first = Harness(tmp_path / "run", *settings)
    first.backend.before_update = lambda _: first.trainer.request_stop() if first.trainer.global_step == 3 else None
    await first.train()
    folders = [tmp_path / "run" / "checkpoints" / f"global_step_{step}" for step in (2, 4)]
    for folder in folders:
        damage(folder / "policy" / "w.json", "overwrite")
    before = first.rows
    second = Harness(tmp_path / "run", *settings)
    with pytest.raises(CheckpointError, match=r"No checkpoint in .* is intact: global_step_4 .*global_step_2 "):
        await second.train()
    assert second.rows == before and all(folder.exists() for folder in folders)
    assert second.backend.minibatches == []

    for folder in folders:  # the same bytes as before
        damage(folder / "policy" / "w.json", "overwrite")
    third = Harness(tmp_path / "run", *settings)
    await third.train()
    assert sorted(third.trained) == list(range(32)) and "Damage" not in third.screen.getvalue()
