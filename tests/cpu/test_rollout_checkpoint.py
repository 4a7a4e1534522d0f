"""The rollout side of a checkpoint: its contents, the formats of earlier versions, and rejected files."""

from __future__ import annotations

import errno
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from checkpoint_worlds import checksums_of
from harness import Harness

from skyrl_train.config.compose import compose
from skyrl_train.config.schema import DataConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, ConfigError
from skyrl_train.observability.run_folder import RunFolder, choose_run_folder
from skyrl_train.rollout.checkpoint import FORMAT_VERSION, read_replay_cache, read_rollout_state, write_rollout_state
from skyrl_train.rollout.data.dataset import PromptDataset
from skyrl_train.rollout.data.loader import build_loader
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample


def group(group_index: int, **fields: Any) -> RolloutGroup:
    numbers = [0.1, -1e-300, 1e22, 5e-324]
    sequence = RolloutSequence.of_lists(
        [1, 2], [3, 4, 5, 6], [1, 1, 0, 1], numbers, [3, 4, -1, 4], numbers[::-1], "length"
    )
    return RolloutGroup(
        **{
            "group_index": group_index,
            "uid": "u",
            "data_source": "s",
            "samples": (Sample((sequence,)),),
            "submitted_version": 2,
        }
        | fields
    )


def test_reading_returns_the_state_that_was_written(tmp_path: Path) -> None:
    groups = [group(3, metrics={"m": 0.3}), group(1, masked=True), group(2, samples=(Sample(()),))]
    replay_cache = [{"session": "u@4_0", "tokens": [1, 2]}, {"session": "u@4_1", "tokens": []}]
    assert write_rollout_state({"global_step": 7}, iter(groups), tmp_path, iter(replay_cache)) == checksums_of(tmp_path)
    state, stored = read_rollout_state(tmp_path)
    assert state["global_step"] == 7
    assert list(stored) == groups
    assert read_replay_cache(tmp_path) == replay_cache


def test_text_that_is_no_unicode_survives(tmp_path: Path) -> None:
    write_rollout_state({}, [group(0, uid="half \ud800 a pair")], tmp_path, [{"session": "\ud800"}])
    assert [stored.uid for stored in read_rollout_state(tmp_path)[1]] == ["half \ud800 a pair"]
    assert read_replay_cache(tmp_path) == [{"session": "\ud800"}]


@pytest.mark.parametrize("format_version", [1, 2])
def test_checkpoints_of_earlier_versions_are_continued(tmp_path: Path, format_version: int) -> None:
    """As they were written, byte by byte, after prompts 0 and 2 were trained and 1 had failed; 3 waits, 4 was in flight."""
    dataset = PromptDataset(tuple(PromptRecord(f"p{row}", []) for row in range(7)))
    ledger = {
        "dataset_len": 7,
        "seed": 5,
        "fingerprint": dataset.fingerprint,
        "next": 5,
        "frontier": 3,
        "settled": [],
        "failed": [1],
    }
    counts = {"submitted": 4, "running": 0, "buffered": 1, "trained": 2, "failed": 1, "published": 1}
    state = {"format_version": format_version, "global_step": 1, "ledger": ledger, "counts": counts}
    (tmp_path / "rollout_state.json").write_text(json.dumps(state, indent=1))
    sequence = (
        '{"prompt_token_ids": [1], "response_ids": [2], "loss_mask": [1], "logprobs": [-0.5], "versions": [0], '
        '"rewards": [1.0], "stop_reason": "stop"}'
    )
    sample = sequence if format_version == 1 else f'{{"sequences": [{sequence}]}}'
    (tmp_path / "groups.jsonl").write_text(
        f'{{"group_index": 3, "uid": "p", "data_source": "s", "samples": [{sample}], "submitted_version": 0, "metrics": {{}}}}\n'
    )
    read, groups = read_rollout_state(tmp_path)
    assert [stored.samples[0].reward for stored in groups] == [1.0]
    assert read["counts"] == counts and read["global_step"] == 1
    assert read_replay_cache(tmp_path) == []
    loader, fresh = (build_loader(dataset, DataConfig(), seed=5) for _ in range(2))
    loader.load_state_dict(read["prompts"], buffered=[3])
    assert [loader.issue(), loader.issue()] == [4, 5]
    assert loader.ledger.failed == [1]
    assert [fresh.issue() for _ in range(6)] == list(range(6))
    assert [loader.source.record(group_index) for group_index in (3, 4, 5)] == [
        fresh.source.record(group_index) for group_index in (3, 4, 5)
    ]


def test_a_newer_format_is_rejected_with_a_remedy(tmp_path: Path) -> None:
    write_rollout_state({}, [], tmp_path)
    path = tmp_path / "rollout_state.json"
    path.write_text(path.read_text().replace(f'"format_version": {FORMAT_VERSION}', '"format_version": 99'))
    with pytest.raises(CheckpointError, match=r"format 99, but this version.*upgrade skyrl_train"):
        read_rollout_state(tmp_path)


def read_all(folder: Path) -> tuple[dict[str, Any], list[RolloutGroup], list[dict[str, Any]]]:
    state, groups = read_rollout_state(folder)
    return state, list(groups), read_replay_cache(folder)


@pytest.mark.parametrize(
    ("name", "how"),
    [
        ("rollout_state.json", "torn"),
        ("rollout_state.json", "missing"),
        ("rollout_state.json", "something else"),
        ("groups.jsonl", "torn"),
        ("groups.jsonl", "missing"),
        ("groups.jsonl", "something else"),
        ("recordings.jsonl", "torn"),
    ],
)
def test_a_half_written_checkpoint_is_refused(tmp_path: Path, name: str, how: str) -> None:
    write_rollout_state({"a": 1}, [group(0)], tmp_path, [{"session": "s"}])
    assert read_all(tmp_path)[1] == [group(0)]
    path = tmp_path / name
    if how == "torn":
        path.write_bytes(path.read_bytes()[:-9])
    elif how == "missing":
        path.unlink()
    else:
        path.write_text("[1]\n")
    with pytest.raises(CheckpointError, match=r"not a usable checkpoint .*remove it to resume from an older one"):
        read_all(tmp_path)


@pytest.mark.parametrize("number", [errno.EMFILE, errno.EIO, errno.ESTALE])
def test_an_error_that_may_pass_does_not_ask_to_remove_the_checkpoint(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    write_rollout_state({"a": 1}, [group(0)], tmp_path, [{"session": "s"}])

    def out_of_reach(*_: object, **__: object) -> None:
        raise OSError(number, os.strerror(number))

    _, groups = read_rollout_state(tmp_path)
    monkeypatch.setattr(Path, "open", out_of_reach)
    monkeypatch.setattr(Path, "read_text", out_of_reach)
    monkeypatch.setattr(Path, "read_bytes", out_of_reach)
    reads: list[Callable[[], object]] = [
        lambda: read_rollout_state(tmp_path),
        lambda: next(groups),
        lambda: read_replay_cache(tmp_path),
    ]
    for read in reads:
        with pytest.raises(CheckpointError, match=r"cannot be read now: .*make it readable") as told:
            read()
        assert "remove" not in str(told.value)


@pytest.mark.parametrize("mode", [pytest.param("sync", marks=pytest.mark.slow), "fully_async"])
@pytest.mark.parametrize(
    ("changed", "message"),
    [
        ("data.generate=9", "dataset_len 10, this run's has 9"),
        ("data.seed=1", "fingerprint"),
        ("trainer.seed=9", "seed"),
    ],
)
async def test_a_run_on_other_data_does_not_resume(tmp_path: Path, mode: str, changed: str, message: str) -> None:
    overrides = [f"trainer.mode={mode}", "trainer.max_steps=4"]
    first = Harness(tmp_path, *overrides)
    first.backend.before_update = lambda _: first.trainer.request_stop()
    await first.train()
    with pytest.raises(CheckpointError, match=message):
        await Harness(tmp_path, *overrides, changed).train()
    resumed = Harness(tmp_path, *overrides)
    await resumed.train()
    assert sorted(resumed.trained) == list(range(16)), "the checkpoint is untouched"


@pytest.mark.parametrize("mode", ["sync", "fully_async"])
async def test_a_data_set_smaller_than_one_minibatch_trains_its_prompts_in_turn(tmp_path: Path, mode: str) -> None:
    run = Harness(tmp_path, f"trainer.mode={mode}", "data.generate=3", "trainer.max_steps=6")
    await run.train()
    assert sorted(run.trained) == list(range(24))
    trained = [call.partition("@") for call in run.generator.calls]
    by_group_index = {int(group_index): uid for uid, _, group_index in trained}
    assert all(len({by_group_index[3 * epoch + place] for place in range(3)}) == 3 for epoch in range(8))


@pytest.mark.parametrize("changed", ["max_staleness_steps=8", "generate_ahead_steps=0.5"])
def test_another_bound_or_depth_is_another_run_unless_it_is_changed_while_running(tmp_path: Path, changed: str) -> None:
    base = ["trainer.mode=fully_async", f"trainer.run_dir={tmp_path / 'run'}"]
    folder = RunFolder(tmp_path / "run", compose("quickstart", base))
    folder.metrics.append({"step": 1})  # a run without a step does not bind its folder
    folder.close()
    with pytest.raises(ConfigError, match=rf"other settings:\n  trainer\.fully_async\.{changed.partition('=')[0]}: "):
        choose_run_folder(compose("quickstart", [*base, f"trainer.fully_async.{changed}"]))
