"""The prompt loader (SEMANTICS 5): whatever happens in whatever order, every prompt has one surviving outcome."""

from __future__ import annotations

import asyncio
import json
import random
from collections.abc import Callable, Mapping
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from skyrl_train.config.schema import DataConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import CheckpointError, DataError
from skyrl_train.rollout.data import streaming
from skyrl_train.rollout.data.dataset import PromptDataset, RecordMaker
from skyrl_train.rollout.data.ledger import OUTCOMES
from skyrl_train.rollout.data.loader import PromptLoader, build_loader
from skyrl_train.rollout.data.samplers import SampledPrompts, Sampler
from skyrl_train.rollout.data.streaming import StreamingPrompts
from skyrl_train.runtime.concurrency import Signal
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample

SEED = 3


def dataset(size: int) -> PromptDataset:
    return PromptDataset(tuple(PromptRecord(f"p{row}", [], data_source="ab"[row % 2]) for row in range(size)))


def group(group_index: int, uid: str = "u", reward: float = 0.5) -> RolloutGroup:
    sequence = RolloutSequence.of_lists([1], [2], [1], [-0.5], [0], [reward], "stop")
    return RolloutGroup(group_index, uid, "s", (Sample((sequence,)),), submitted_version=0)


class LeastRewarded(Sampler):
    """A curriculum: the row whose groups had the lowest mean reward so far, those never seen first."""

    def __init__(self, dataset: PromptDataset, seed: int) -> None:
        super().__init__(dataset, seed)
        self.totals = [0.0] * len(dataset)
        self.seen = [0] * len(dataset)
        self.drawn = 0

    def row(self, group_index: int) -> int:
        assert group_index == self.drawn, "asked twice, or out of order"
        self.drawn += 1
        return min(
            range(len(self.seen)), key=lambda row: (self.totals[row] / max(self.seen[row], 1), self.seen[row], row)
        )

    def observe(self, row: int, group: RolloutGroup) -> None:
        assert self.dataset[row].uid == group.uid
        self.totals[row] += group.samples[0].reward
        self.seen[row] += 1

    def state_dict(self) -> dict[str, Any]:
        return {"totals": self.totals, "seen": self.seen, "drawn": self.drawn}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        self.totals, self.seen, self.drawn = list(state["totals"]), list(state["seen"]), state["drawn"]


SAMPLERS: dict[str, DataConfig] = {
    "shuffle": DataConfig(sampler="shuffle"),
    "sequential": DataConfig(sampler="sequential"),
    "weighted": DataConfig(sampler="weighted", sampler_kwargs={"weights": {"a": 2, "b": 1}}),
    "curriculum": DataConfig(sampler="test_dataloader:LeastRewarded"),
}


def loader_of(sampler: str, size: int = 6) -> PromptLoader:
    return build_loader(dataset(size), SAMPLERS[sampler], SEED)


class History:
    """One loader after the other, as a run that is interrupted has them; checkpoints go through JSON."""

    def __init__(self, make: Callable[[], PromptLoader], rng: random.Random) -> None:
        self.make = make
        self.rng = rng
        self.flying: dict[int, str] = {}  # group index -> uid
        self.buffered: dict[int, str] = {}
        self.settled: dict[int, tuple[str, str]] = {}  # group index -> (uid, outcome)
        self.known: dict[int, str] = {}  # of every group index that the saved history has issued
        self.loader = make()
        self.changed = Signal()
        self.save()

    def save(self) -> None:
        self.saved = (json.dumps(self.loader.state_dict()), dict(self.buffered), dict(self.settled), self.issued)

    @property
    def issued(self) -> dict[int, str]:
        return {**self.flying, **self.buffered, **{group_index: uid for group_index, (uid, _) in self.settled.items()}}

    async def crash(self) -> None:
        await self.loader.source.aclose()
        state, buffered, settled, self.known = self.saved
        self.flying, self.buffered, self.settled = {}, dict(buffered), dict(settled)
        self.loader = self.make()
        self.loader.load_state_dict(json.loads(state), self.buffered)
        await self.loader.source.start(self.changed.notify)

    async def issue(self) -> bool:
        await self.changed.wait_until(lambda: self.loader.ready)
        end = self.loader.source.end
        ended = end is not None and self.loader.ledger.next >= end
        group_index = self.loader.issue()
        assert (group_index is None) == ended
        if group_index is None:
            return False
        uid = self.loader.source.record(group_index).uid
        assert group_index not in self.issued, "issued twice"
        assert self.known.get(group_index, uid) == uid, "a group index has become another prompt"
        self.flying[group_index] = uid
        return True

    def settle(self, outcome: str) -> None:
        pool = self.rng.choice([pool for pool in (self.flying, self.buffered) if pool])
        group_index = self.rng.choice(sorted(pool))
        uid = pool.pop(group_index)
        self.settled[group_index] = (uid, outcome)
        learned = [group(group_index, uid, self.rng.random())] if outcome in ("trained", "filtered") else []
        self.loader.settle([group_index], outcome, learned)

    async def play(self, events: list[str], to_the_end: int) -> list[str]:
        """Plays ``events``, then goes on without crashes to group index ``to_the_end``; returns the uids by group index."""
        await self.loader.source.start(self.changed.notify)
        for event in events:
            if event == "issue":
                await self.issue()
            elif event == "finish" and self.flying:
                group_index = self.rng.choice(sorted(self.flying))
                self.buffered[group_index] = self.flying.pop(group_index)
            elif event in OUTCOMES and self.flying | self.buffered:
                self.settle(event)
            elif event == "checkpoint":
                self.save()
            elif event == "crash":
                await self.crash()
            for group_index, uid in (self.flying | self.buffered).items():
                assert self.loader.source.record(group_index).uid == uid
        while self.loader.ledger.frontier < to_the_end:
            if not (len(self.issued) < to_the_end and await self.issue()) and not self.flying | self.buffered:
                break
            self.settle("trained")
        while self.flying | self.buffered:
            self.settle("trained")
        await self.loader.source.aclose()
        assert sorted(self.settled) == list(range(len(self.settled)))
        assert self.loader.ledger.frontier == len(self.settled)
        return [self.settled[group_index][0] for group_index in sorted(self.settled)]


EVENTS = st.lists(
    st.sampled_from(["issue", "issue", "finish", *OUTCOMES, "checkpoint", "crash"]), min_size=10, max_size=70
)


@pytest.mark.parametrize("sampler", sorted(SAMPLERS))
@settings(max_examples=25)
@given(events=EVENTS, rng=st.randoms(use_true_random=False))
def test_every_prompt_has_one_surviving_outcome_with_any_sampler(
    sampler: str, events: list[str], rng: random.Random
) -> None:
    history = History(lambda: loader_of(sampler), rng)
    uids = asyncio.run(history.play(events, to_the_end=30))
    if sampler == "sequential":
        assert uids[:12] == [f"p{row}" for row in range(6)] * 2
    if sampler == "shuffle":
        assert all(len(set(uids[start : start + 6])) == 6 for start in range(0, 30, 6))


@settings(max_examples=40)
@given(events=EVENTS, rng=st.randoms(use_true_random=False), epochs=st.integers(1, 3))
def test_every_prompt_has_one_surviving_outcome_with_a_stream(
    tmp_path_factory: pytest.TempPathFactory, events: list[str], rng: random.Random, epochs: int
) -> None:
    folder = tmp_path_factory.getbasetemp() / "stream"
    folder.mkdir(exist_ok=True)
    rows = [[f"a{row}" for row in range(7)], [f"b{row}" for row in range(4)]]
    paths = [folder / "a.jsonl", folder / "b.jsonl"]
    for path, uids in zip(paths, rows, strict=True):
        path.write_text("".join(json.dumps({"prompt": uid, "uid": uid}) + "\n" for uid in uids))

    def make() -> PromptLoader:
        return PromptLoader(StreamingPrompts(map(str, paths), RecordMaker("prompt", "run_length"), epochs), SEED)

    with patch.object(streaming, "CHUNK_ROWS", 2), patch.object(streaming, "ROWS_AHEAD", 3):
        uids = asyncio.run(History(make, rng).play(events, to_the_end=1000))
    assert uids == (rows[0] + rows[1]) * epochs


async def test_after_a_resume_a_curriculum_continues_with_its_rows_and_its_state() -> None:
    loader = loader_of("curriculum")
    uids = {index: loader.source.record(index).uid for index in [loader.issue() for _ in range(6)] if index is not None}
    for group_index in (0, 2, 3):
        loader.settle([group_index], "trained", [group(group_index, uids[group_index], reward=0.1 * (group_index + 1))])
    resumed = loader_of("curriculum")
    resumed.load_state_dict(json.loads(json.dumps(loader.state_dict())), buffered=[4])
    assert [resumed.source.record(group_index).uid for group_index in (1, 4, 5)] == [
        uids[group_index] for group_index in (1, 4, 5)
    ]
    assert [resumed.issue(), resumed.issue()] == [1, 5]
    rest = [[loader.issue() for _ in range(8)], [resumed.issue() for _ in range(8)]]
    assert rest[0] == rest[1]
    assert [loader.source.record(o).uid for o in rest[0]] == [resumed.source.record(o).uid for o in rest[1]]  # type: ignore[arg-type]


async def test_a_sampler_that_fails_to_learn_stops_the_next_issue_and_not_the_step_that_it_learns_from() -> None:
    class Forgetful(LeastRewarded):
        def observe(self, row: int, group: RolloutGroup) -> None:
            raise KeyError("notes")

    loader = PromptLoader(SampledPrompts(dataset(4), Forgetful(dataset(4), 0)), 0)
    group_index = loader.issue()
    assert group_index == 0
    loader.settle([0], "trained", [group(0, "p0")])
    assert loader.ledger.frontier == 1
    assert loader.ready
    with pytest.raises(DataError, match="failed in observe") as caught:
        loader.issue()
    assert isinstance(caught.value.__cause__, KeyError)


def test_rows_of_numpy_go_into_a_checkpoint() -> None:
    class Drawing(Sampler):
        def row(self, group_index: int) -> int:
            return np.random.default_rng(group_index).integers(4)  # type: ignore[return-value]

    loader = PromptLoader(SampledPrompts(dataset(4), Drawing(dataset(4), 0)), 0)
    assert loader.issue() == 0
    state = json.loads(json.dumps(loader.state_dict()))
    resumed = PromptLoader(SampledPrompts(dataset(4), Drawing(dataset(4), 0)), 0)
    resumed.load_state_dict(state, buffered=[])
    assert resumed.source.record(0) == loader.source.record(0)


@pytest.mark.parametrize("row", [-1, 4, None, 1.0])
def test_a_sampler_that_chooses_no_row_is_named(row: int) -> None:
    class Astray(Sampler):
        def row(self, group_index: int) -> int:
            return row

    loader = PromptLoader(SampledPrompts(dataset(4), Astray(dataset(4), 0)), 0)
    with pytest.raises(DataError, match=rf"Astray chose row {row} of a data set of 4 prompts"):
        loader.issue()
    assert loader.state_dict()["ledger"]["next"] == 0, "a group index without a row must not be issued"


@pytest.mark.parametrize(
    ("other", "key"),
    [
        (lambda: build_loader(dataset(5), SAMPLERS["shuffle"], SEED), "dataset_len 6, this run's has 5"),
        (lambda: build_loader(dataset(6), SAMPLERS["shuffle"], SEED + 1), "seed 3, this run's has 4"),
        (
            lambda: build_loader(dataset(6), SAMPLERS["sequential"], SEED),
            "sampler 'shuffle', this run's has 'sequential'",
        ),
        (
            lambda: build_loader(
                PromptDataset((PromptRecord("x", []), *dataset(6).records[1:])), SAMPLERS["shuffle"], SEED
            ),
            "fingerprint",
        ),
    ],
)
def test_a_checkpoint_of_other_data_is_refused(other: Callable[[], PromptLoader], key: str) -> None:
    loader = other()
    with pytest.raises(CheckpointError, match=f"{key}.*resume with the data set"):
        loader.load_state_dict(loader_of("shuffle").state_dict(), [])
    assert loader.issue() == 0, "a refused checkpoint has changed nothing"


def test_other_weights_are_another_order() -> None:
    other = DataConfig(sampler="weighted", sampler_kwargs={"weights": {"a": 3, "b": 1}})
    with pytest.raises(CheckpointError, match="sampler"):
        build_loader(dataset(6), other, SEED).load_state_dict(loader_of("weighted").state_dict(), [])
