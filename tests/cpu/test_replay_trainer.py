"""Whole trainers stopped and resumed: the tokens of unfinished rollouts are trained, and not sampled again."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from harness import Harness
from replay_worlds import CountingEngine, tokens_in
from scripted import settle
from test_replay_generators import Talk, gym

from skyrl_train.errors import NoEngineError
from skyrl_train.inference.interface import InferenceEngineInput, InferenceEngineOutput
from skyrl_train.rollout.checkpoint import read_replay_cache
from skyrl_train.types import GeneratorInput, GeneratorOutput

MODES = ["sync", "fully_async"]


class Run(Harness):
    """A process of a run whose rollouts are conversations of up to four turns."""

    def __init__(self, folder: Path, *overrides: str, replay: bool = True) -> None:
        self.counting = CountingEngine(free_running=True)
        super().__init__(folder, f"rollout.replay={str(replay).lower()}", *overrides, engine=self.counting)
        self.requests: list[GeneratorInput] = []
        self.before_rollout: Callable[[GeneratorInput], None] = lambda request: None
        play = gym(self.client).generate

        self.began_at = 0  # the step that was restored

        async def generate(request: GeneratorInput) -> GeneratorOutput:
            if not self.requests:
                self.began_at = self.trainer.global_step
            self.requests.append(request)
            self.before_rollout(request)
            env_classes = [f"{Talk.__module__}:Talk"] * len(request["prompts"])
            return await play({**request, "env_classes": env_classes, "sampling_params": None})

        self.generator.generate = generate  # type: ignore[method-assign]

    async def until(self, happened: Callable[[], bool]) -> asyncio.Task[None]:
        """Runs until then; nothing more is sampled."""
        training = asyncio.create_task(self.train())
        tick = self.counting.tick
        reached = asyncio.Event()

        def watched(times: int = 1) -> None:
            if not reached.is_set():
                tick(times)
            if happened():
                reached.set()

        async def looks() -> None:
            # What happens need not be followed by a tick: a checkpoint is complete, and training waits for a group.
            while not (reached.is_set() or happened()):  # noqa: ASYNC110
                await asyncio.sleep(0)
            reached.set()

        self.counting.tick = watched  # type: ignore[method-assign]
        waiting = asyncio.create_task(looks())
        await asyncio.wait([training, waiting], return_when=asyncio.FIRST_COMPLETED)
        waiting.cancel()
        await settle()  # what was sampled arrives
        return training

    async def stop(self, happened: Callable[[], bool]) -> list[dict[str, Any]]:
        """Stops as a signal does, with a checkpoint; returns its records of unfinished rollouts."""
        training = await self.until(happened)
        self.trainer.request_stop()
        await training
        folder = self.trainer.components.checkpoints.latest()
        assert folder is not None
        return read_replay_cache(folder)

    async def kill(self, happened: Callable[[], bool]) -> None:
        """Ends without a word."""
        training = await self.until(happened)
        training.cancel()
        with suppress(asyncio.CancelledError):
            await training

    def trained_sequences(self, *, versions: bool) -> list[tuple[Any, ...]]:
        """Everything that was trained, minibatch by minibatch."""
        return [
            (
                s.token_ids.tolist(),
                s.behaviour_logprobs.tolist(),
                s.advantages.tolist(),
                versions and s.versions.tolist(),
            )
            for minibatch in self.backend.minibatches
            for s in minibatch.sequences
        ]

    @property
    def settled_tokens(self) -> int:
        """Sampled tokens in groups that are trained, or wait for it."""
        trained = [version for *_, versions in self.trained_sequences(versions=True) for version in versions]
        waiting = [
            v for group in self.trainer.rollout.buffer for sample in group.samples for v in sample.sampled_versions
        ]
        return sum(version >= 0 for version in [*trained, *waiting])


class Moments:
    """Whole runs for comparison, and moments in the middle of rollouts."""

    def __init__(self, seed: int) -> None:
        self._rng = random.Random(seed)

    def __call__(self, run: Run, beyond: int) -> Callable[[], bool]:
        """Some time after so many sampled tokens, while a response is on its way."""
        at = beyond + self._rng.randrange(100)
        return lambda: run.counting.sampled > at and any(request.sampled for request in run.counting.running)


def trained_once(*runs: Run) -> bool:
    return sorted(runs[-1].trained) == list(range(32))


@pytest.mark.parametrize("mode", MODES)
async def test_a_stopped_run_samples_no_token_twice_and_trains_the_same_sequences(tmp_path: Path, mode: str) -> None:
    whole = Run(tmp_path / "whole", f"trainer.mode={mode}")
    await whole.train()
    moment, replayed = Moments(seed=len(mode)), 0
    runs: list[Run] = []
    while not runs or runs[-1].trainer.global_step < 8:
        run = Run(tmp_path / "run", f"trainer.mode={mode}")
        record = await run.stop(moment(run, 600))
        totals = run.client.replay_cache.totals
        assert (totals.mismatches, totals.discarded_tokens) == (0, 0)
        replayed += totals.replayed_tokens
        if run.trainer.global_step == 8:
            assert not record, "nothing is left of groups that were trained"
        runs.append(run)
    assert len(runs) > 2 and replayed > 0
    assert trained_once(*runs)
    exact = mode == "sync"  # whose batches do not depend on time
    got = [sequence for run in runs for sequence in run.trained_sequences(versions=exact)]
    expected = whole.trained_sequences(versions=exact)
    assert got == expected if exact else sorted(got) == sorted(expected)


async def test_a_stopped_run_of_one_step_off_trains_no_response_of_two_policies(tmp_path: Path) -> None:
    moment, recorded = Moments(seed=4), 0
    runs: list[Run] = []
    while not runs or runs[-1].trainer.global_step < 8:
        run = Run(tmp_path, "trainer.mode=one_step_off")
        recorded += tokens_in(await run.stop(moment(run, 600)))
        runs.append(run)
    assert len(runs) > 2 and recorded > 0
    assert trained_once(*runs)
    sampled = [set(s[-1]) - {-1} for run in runs for s in run.trained_sequences(versions=True)]
    assert all(len(versions) == 1 for versions in sampled)


async def test_the_engines_sample_exactly_the_tokens_that_no_record_has(tmp_path: Path) -> None:
    whole = Run(tmp_path / "whole")
    await whole.train()
    first = Run(tmp_path / "run")
    record = await first.stop(Moments(seed=1)(first, 1000))
    second = Run(tmp_path / "run")
    await second.train()
    assert tokens_in(record) > 50 and trained_once(first, second)
    assert second.counting.sampled == whole.counting.sampled - first.settled_tokens - tokens_in(record)
    assert second.client.generated_tokens == second.counting.sampled
    assert second.client.replay_cache.snapshot() == []


async def test_without_replay_unfinished_rollouts_begin_again(tmp_path: Path) -> None:
    first = Run(tmp_path, replay=False)
    assert await first.stop(Moments(seed=1)(first, 1000)) == []
    second = Run(tmp_path, replay=False)
    await second.train()
    assert second.client.replay_cache.totals.replayed_tokens == 0 and trained_once(first, second)
    third = Run(tmp_path / "other")
    assert await third.stop(Moments(seed=1)(third, 1000)) != []
    fourth = Run(tmp_path / "other", replay=False)
    await fourth.train()
    assert fourth.client.replay_cache.totals.replayed_tokens == 0 and trained_once(third, fourth)


async def test_a_killed_run_replays_the_tokens_of_its_last_checkpoint(tmp_path: Path) -> None:
    """One rollout at a time takes longer than the others: it is in flight at every checkpoint."""
    settings = ("trainer.max_steps=12", "trainer.ckpt_interval=1")
    whole = Run(tmp_path / "whole", *settings)
    await whole.train()
    for number in range(3):
        run = Run(tmp_path / "run", *settings)
        loaded = watch_load(run)
        if number < 2:
            hold_after_a_turn(run, lambda it=run: 4 * it.began_at + 9)  # type: ignore[misc]  # not admitted before
            # Before the first request, began_at is not known, and the checkpoint may be the one that is restored.
            await run.kill(lambda it=run: bool(it.requests) and (it.trainer.saving.step or 0) >= it.began_at + 4)  # type: ignore[misc]
        else:
            await run.train()
        totals = run.client.replay_cache.totals
        assert (totals.replayed_tokens, totals.mismatches, totals.discarded_tokens) == (tokens_in(loaded), 0, 0)
        assert (tokens_in(loaded) > 0) == (number > 0)
    assert sorted(run.trained) == list(range(48))
    of_whole = {str(sequence) for sequence in whole.trained_sequences(versions=False)}
    assert {str(sequence) for sequence in run.trained_sequences(versions=False)} < of_whole


def watch_load(run: Run) -> list[dict[str, Any]]:
    """The records that the run will have loaded."""
    load, rows = run.client.replay_cache.load, list[dict[str, Any]]()

    def watched(loaded: Any) -> None:
        rows.extend(loaded)
        load(rows)

    run.client.replay_cache.load = watched  # type: ignore[method-assign]
    return rows


def hold_after_a_turn(run: Run, group: Callable[[], int]) -> None:
    """The rollouts of a group get no second response before the run is killed."""
    generate, asked = run.client.generate, set[str]()

    async def held(batch: InferenceEngineInput) -> InferenceEngineOutput:
        [session_id] = batch.get("session_ids") or []
        if session_id.rpartition("_")[0].endswith(f"@{group()}") and session_id in asked:
            await asyncio.Event().wait()
        asked.add(session_id)
        return await generate(batch)

    run.client.generate = held  # type: ignore[method-assign]


async def test_an_environment_that_drifts_between_two_runs_is_sampled_afresh(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    first = Run(tmp_path / "run")
    record = await first.stop(Moments(seed=1)(first, 1000))
    monkeypatch.setattr(Talk, "mood", "!")
    second = Run(tmp_path / "run")
    await second.train()
    totals = second.client.replay_cache.totals
    assert trained_once(first, second)
    assert totals.mismatches > 0 and totals.replayed_tokens + totals.discarded_tokens == tokens_in(record)


async def test_a_run_that_lost_its_engines_continues_from_the_tokens_they_had_sampled(tmp_path: Path) -> None:
    first = Run(tmp_path / "run")
    first.client._pool._wait_timeout_s = 0.01
    training = await first.until(Moments(seed=1)(first, 1000))
    first.counting.die()
    with pytest.raises(NoEngineError):
        await training
    folder = first.trainer.components.checkpoints.latest()
    assert folder is not None
    record = read_replay_cache(folder)
    assert tokens_in(record) > 50
    second = Run(tmp_path / "run")
    await second.train()
    assert trained_once(first, second)
    assert second.client.replay_cache.totals.replayed_tokens == tokens_in(record)


async def test_a_resumed_group_continues_its_recorded_attempt(tmp_path: Path) -> None:
    """Its first attempt has failed; the tokens of that attempt are discarded."""

    def fail_the_first_attempt(run: Run) -> None:
        seen: set[str] = set()

        def before(request: GeneratorInput) -> None:
            name = request["trajectory_ids"][0].instance_id
            if name not in seen:
                seen.add(name)
                raise ValueError("scripted")

        run.before_rollout = before

    first = Run(tmp_path / "run")
    fail_the_first_attempt(first)
    record = await first.stop(Moments(seed=1)(first, 1000))
    assert {row["attempt"] for row in record} == {1}
    second = Run(tmp_path / "run")
    await second.train()
    assert trained_once(first, second)
    assert second.client.replay_cache.totals.replayed_tokens == tokens_in(record)
    of_first = {r["trajectory_ids"][0]: r["batch_metadata"].seeds for r in first.requests}
    again = [r for r in second.requests if r["trajectory_ids"][0] in of_first]
    assert again and all(r["batch_metadata"].seeds == of_first[r["trajectory_ids"][0]] for r in again)


async def test_a_group_is_admitted_as_old_as_its_oldest_token_and_starts_afresh_where_that_is_too_old(
    tmp_path: Path,
) -> None:
    """The bound was lowered between the two runs."""
    wait = "trainer.fully_async.staleness_policy=wait"
    first = Run(tmp_path / "run", wait, "trainer.fully_async.max_staleness_steps=4")
    hold_after_a_turn(first, lambda: 1)
    record = await first.stop(lambda: first.trainer.global_step == 4)
    assert {row["group"]: row for row in record}[1]["requests"][0]["versions"][0][0] == 0
    for bound, version in ((4, 0), (2, 4)):
        second = Run(tmp_path / "run", wait, f"trainer.fully_async.max_staleness_steps={bound}")
        admitted: dict[int, int] = {}
        admit = second.trainer.rollout.staleness.admit

        def watched(group_index: int, version: int, admit: Any = admit, admitted: Any = admitted) -> None:
            admitted[group_index] = version
            admit(group_index, version)

        second.trainer.rollout.staleness.admit = watched  # type: ignore[method-assign]
        await second.kill(lambda it=second: it.counting.sampled > 100)  # type: ignore[misc]
        assert admitted[1] == version
