"""Failures in generation and their consequences (SEMANTICS 4.6)."""

from __future__ import annotations

import asyncio
import re
import threading
from collections.abc import Awaitable, Callable
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from harness import Harness
from rollout_worlds import (
    MASK,
    RAISE,
    Play,
    World,
    cancel_its_task,
    cancel_itself,
    end_the_program,
    fail,
    fine,
    group_index_of,
    hang,
    ignore_cancellation,
    output_of,
    quiet,
    return_late,
)
from scripted import ScriptedEngine, in_virtual_time, settle
from training_worlds import backend, build_small_model, one_thread

from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.environments import episode
from skyrl_train.environments.episode import EnvironmentCall
from skyrl_train.errors import EngineError, GeneratorOutputError, NoEngineError, RolloutActorError, RolloutError
from skyrl_train.inference.pool.fleet import FleetLimits
from skyrl_train.inference.replay import ReplayCache
from skyrl_train.rollout.buffer import decode_group, encode_group
from skyrl_train.step_metrics import step_metrics
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import GeneratorInput, GeneratorOutput, RolloutGroup, RolloutSequence, Sample

# Generators that misbehave --------------------------------------------------------------------------------------------


BAD = {
    "hangs": (hang, "rollout_timeout_s = 0.05"),
    "raises": (fail, "ValueError"),
    "ends the program": (end_the_program, "exit status 3"),
    "cancels itself": (cancel_itself, "CancelledError"),
    "cancels its task": (cancel_its_task, "CancelledError"),
    "returns late": (return_late, "rollout_timeout_s = 0.05"),
    "ignores its cancellation": (ignore_cancellation, "rollout_timeout_s = 0.05"),
}


@pytest.mark.parametrize("bad", BAD)
@in_virtual_time
async def test_a_failed_attempt_is_repeated_with_other_seeds(bad: str) -> None:
    play, reason = BAD[bad]
    async with World(rollout_timeout_s=0.05) as w:
        w.generator.plays[2] = [play, fine]
        assert await w.step(fill=True) == [0, 1, 2, 3]
        assert w.group_generator.retries == 1
        ((name, told),) = w.failed_attempts
        assert name == "group 2" and reason in told
        seeds = [s for o, s in zip(w.generator.calls, w.generator.seeds, strict=True) if o == 2]
        assert len(seeds) == 2 and set(seeds[0]).isdisjoint(seeds[1])
        w.check_books()


@pytest.mark.parametrize(("losses", "retries"), [(1, 0), (1, 1), (2, 1)])
async def test_a_rollout_that_lost_its_actor_is_the_same_attempt_again_once(losses: int, retries: int) -> None:
    async def lose(batch: GeneratorInput) -> None:
        raise RolloutActorError("rollout actor 1 is gone")

    async with World(max_rollout_retries=retries) as w:
        w.generator.plays[2] = [lose] * losses + [fine]
        assert await w.step(fill=True) == [0, 1, 2, 3]
        first, second, *third = [s for o, s in zip(w.generator.calls, w.generator.seeds, strict=True) if o == 2]
        assert first == second and first not in third, "what was sampled for it is recorded under the same seeds"
        assert (len(third), w.group_generator.retries) == (losses - 1, losses)
        w.check_books()


@pytest.mark.parametrize("bad", BAD)
@in_virtual_time
async def test_a_prompt_that_always_fails_gives_its_slot_to_the_next_prompt(bad: str) -> None:
    play, reason = BAD[bad]
    async with World(rollout_timeout_s=0.05) as w:
        w.generator.plays[2] = [play]
        assert await w.step(fill=True) == [0, 1, 3, 4]
        assert w.loader.ledger.failed == [2] and w.generator.calls.count(2) == 2
        assert all(reason in told for _, told in w.failed_attempts)
        w.check_books()


@in_virtual_time
async def test_a_group_that_comes_back_after_its_time_is_thrown_away() -> None:
    async with World(rollout_timeout_s=0.05) as w:
        w.generator.plays[1] = [return_late, fine]
        await w.dispatcher.fill()
        late = next(group for group in w.buffer if group.group_index == 1)
        assert isinstance(late, RolloutGroup)
        assert [sample.reward for sample in late.samples] == [0.0, 1.0], "of the attempt that came in time"


@in_virtual_time
async def test_a_rollout_out_of_time_tells_where_its_environment_is(monkeypatch: pytest.MonkeyPatch) -> None:
    begun, release = threading.Event(), threading.Event()

    def step() -> None:
        begun.set()
        release.wait(300)

    async def explore(batch: GeneratorInput) -> None:
        thread = threading.Thread(target=step, daemon=True)
        thread.start()
        assert begun.wait(300)
        call = EnvironmentCall("maze", "step", thread.ident or 0)
        monkeypatch.setitem(episode._running, batch["trajectory_ids"][1].to_string(), call)
        await hang(batch)

    async with World(rollout_timeout_s=0.05) as w:
        w.generator.plays[2] = [explore, fine]
        assert await w.step(fill=True) == [0, 1, 2, 3]
        release.set()
        ((_, told),) = w.failed_attempts
        told_of = r"samples that wait for environment 'maze': 1 of 2, in step\(\): .*test_failures\.py:\d+ in step"
        assert re.fullmatch(rf"it exceeded .* = 0\.05 s; {told_of}", told)


async def test_fewer_samples_than_asked_for_stop_the_workers_by_name() -> None:
    async with World() as w:

        async def one_short(batch: GeneratorInput) -> GeneratorOutput:
            output = output_of(batch, 0)
            for field in ("response_ids", "rewards", "loss_masks", "rollout_logprobs", "rollout_versions"):
                output[field] = output[field][:-1]  # type: ignore[literal-required]
            return output

        w.generator.plays[1] = [one_short]
        await w.dispatcher.fill()
        with pytest.raises(GeneratorOutputError, match="response_ids has 1 entries for 2 trajectories"):
            w.raise_if_failed()
        assert w.generator.calls.count(1) == 1, "another attempt would not mend it"


async def test_changes_of_a_generator_to_its_input_stay_local() -> None:
    async with World(prompts=4) as w:
        given: list[object] = []

        async def write(batch: GeneratorInput) -> None:
            for prompt, extras in zip(batch["prompts"], batch["env_extras"], strict=True):
                given.append((deepcopy(prompt), deepcopy(extras)))
                assert isinstance(prompt, list)
                prompt[0]["content"] = "written over"
                prompt.append({"role": "assistant", "content": "an answer"})
                extras["answers"].append("another")
            if len(given) <= len(batch["prompts"]):
                raise ValueError("another attempt, please")

        w.generator.plays[0] = [write]
        assert await w.step(fill=True) == [0, 1, 2, 3]
        assert len(given) == 4 and given[1:] == given[:-1], "two samples, two attempts"
        assert w.loader.state_dict()["identity"] == World(prompts=4).loader.state_dict()["identity"], (
            "or no run resumes"
        )


@pytest.mark.parametrize("metrics", [{"environment/score": np.float32(0.5)}, {"environment/score": np.int64(2)}])
async def test_numbers_of_other_libraries_are_metrics(metrics: dict[str, float]) -> None:
    async with World() as w:

        async def measure(batch: GeneratorInput) -> GeneratorOutput:
            return {**output_of(batch, 0), "rollout_metrics": metrics}

        w.generator.plays[1] = [measure]
        await w.dispatcher.fill()
        w.raise_if_failed()
        group = next(group for group in w.buffer if group.group_index == 1)
        assert isinstance(group, RolloutGroup)
        assert decode_group(encode_group(group)).metrics == group.metrics == {k: float(v) for k, v in metrics.items()}


@pytest.mark.parametrize("metrics", [{"environment/score": 10**400}, {"environment/score": "high"}, [1.0]], ids=repr)
async def test_metrics_that_are_no_numbers_stop_the_workers_by_name(metrics: Any) -> None:
    async with World() as w:

        async def measure(batch: GeneratorInput) -> GeneratorOutput:
            return {**output_of(batch, 0), "rollout_metrics": metrics}

        w.generator.plays[1] = [measure]
        await w.dispatcher.fill()
        with pytest.raises(GeneratorOutputError, match="rollout_metrics"):
            w.raise_if_failed()


async def test_a_version_that_the_engines_do_not_serve_yet_stops_the_workers() -> None:
    async with World() as w:

        async def counts_steps(batch: GeneratorInput) -> GeneratorOutput:
            return output_of(batch, batch["batch_metadata"].global_step)

        w.generator.plays[1] = [counts_steps]
        await w.dispatcher.fill()
        with pytest.raises(GeneratorOutputError, match="contains version 1, but the engines serve 0"):
            w.raise_if_failed()


async def test_more_failures_than_the_budget_stop_the_workers_with_the_last_reason() -> None:
    async with World(max_failed_rollouts=2, max_rollout_retries=0) as w:
        w.generator.plays.update({group_index: [fail] for group_index in range(20)})
        await w.dispatcher.fill()
        with pytest.raises(RolloutError, match=r"3 rollouts .*max_failed_rollouts = 2.*scripted") as caught:
            w.raise_if_failed()
        assert isinstance(caught.value.__cause__, RolloutError)
        assert isinstance(caught.value.__cause__.__cause__, ValueError), "the traceback of the generator's own error"
        w.check_books()


async def fail_elsewhere(batch: GeneratorInput) -> None:
    raise ValueError("scripted")


async def test_the_first_groups_that_all_fail_at_one_line_stop_the_workers_with_file_and_line() -> None:
    async with World(max_failed_rollouts=1000) as w:
        w.generator.plays.update({group_index: [fail] for group_index in range(1000)})
        await w.dispatcher.fill()
        with pytest.raises(
            RolloutError, match=r"first 3 groups all failed at \S*rollout_worlds\.py:\d+ in fail,.*scripted"
        ):
            w.raise_if_failed()
        assert max(w.generator.calls) <= 3 + w.b, "little is generated after the third"
        w.check_books()


@pytest.mark.parametrize(
    "first", [[fine, fail, fail], [fail, quiet, fail], [fail, fail_elsewhere, fail], [hang, fail, fail]]
)
async def test_a_success_or_another_line_among_the_first_groups_leaves_it_to_the_budget(first: list[Play]) -> None:
    async with World(max_failed_rollouts=9, max_filtered_share=0.9, max_rollout_retries=0) as w:
        w.generator.plays.update({group_index: [fail] for group_index in range(1000)})
        w.generator.plays.update({group_index: [play] for group_index, play in enumerate(first)})
        w.dispatcher.start()  # groups that are admitted later fail before the first has ended
        await w.until(lambda: w.dispatcher.error is not None)
        with pytest.raises(RolloutError, match="max_failed_rollouts = 9"):
            w.raise_if_failed()


async def test_the_first_groups_after_a_resume_count_too() -> None:
    async with World(max_failed_rollouts=1000) as w:
        assert await w.step(fill=True) == [0, 1, 2, 3]
        w.dispatcher._first_groups.clear()  # another process would begin here
        w.generator.plays.update({group_index: [fail] for group_index in range(4, 1000)})
        await w.dispatcher.fill()
        with pytest.raises(RolloutError, match="first 3 groups"):
            w.raise_if_failed()


async def test_with_raise_the_first_failure_stops_the_workers_and_its_prompt_stays_in_flight() -> None:
    async with World(on_rollout_failure=RAISE) as w:
        w.generator.plays[1] = [fail]
        await w.dispatcher.fill()
        with pytest.raises(RolloutError, match="scripted"):
            w.raise_if_failed()
        assert w.loader.ledger.failed == [] and w.loader.ledger.frontier == 0, "a resumed run generates it again"


# Failed groups that keep their slot (mask) ----------------------------------------------------------------------------


async def test_a_masked_failure_keeps_its_slot_without_a_token() -> None:
    async with World(on_rollout_failure=MASK, max_rollout_retries=0) as w:
        w.generator.plays[1] = [fail]
        await w.dispatcher.fill()
        (failed,) = (group for group in w.buffer if group.group_index == 1)
        assert isinstance(failed, RolloutGroup)
        assert (
            failed.masked and failed.samples == (Sample(()), Sample(())) and failed.uid == w.loader.source.record(1).uid
        )
        assert await w.step() == [0, 1, 2, 3], "the step has its groups, and the prompt counts as trained"
        assert w.dispatcher.failed_and_masked == 1 and w.loader.ledger.failed == []
        w.check_books()


async def test_masked_failures_spend_the_same_budget_also_over_a_resume() -> None:
    async with World(on_rollout_failure=MASK, max_rollout_retries=0, max_failed_rollouts=3) as w:
        w.generator.plays.update({0: [fail], 1: [fail]})
        assert await w.step(fill=True) == [0, 1, 2, 3]
        failed_and_masked = w.dispatcher.failed_and_masked  # a checkpoint stores it
    async with World(on_rollout_failure=MASK, max_rollout_retries=0, max_failed_rollouts=3) as w:
        w.dispatcher.failed_and_masked = failed_and_masked
        w.generator.plays.update({0: [fail], 1: [fail]})
        await w.dispatcher.fill()
        with pytest.raises(RolloutError, match=r"4 rollouts .*max_failed_rollouts = 3"):
            w.raise_if_failed()


def failed_group(group_index: int = 1) -> RolloutGroup:
    return RolloutGroup(group_index, "u", "test", (Sample(()), Sample(())), 3, masked=True)


def finished_group(group_index: int = 0) -> RolloutGroup:
    samples = (
        Sample((RolloutSequence.of_lists([2], [3, 4], [1, 1], [-1.0, -2.0], [2, 3], [0.0, r], "stop"),))
        for r in (0.0, 1.0)
    )
    return RolloutGroup(group_index, "v", "test", tuple(samples), 2)


def test_a_failed_group_adds_nothing_to_a_minibatch_but_its_count() -> None:
    minibatch = build_minibatch([finished_group(), failed_group()], 4, AlgorithmConfig())
    assert minibatch.num_groups == 2
    assert [s.group_index for s in minibatch.sequences] == [0, 0]


@pytest.mark.parametrize("reduction", ["token_mean", "sequence_mean"])
def test_a_failed_group_changes_no_weight_of_the_policy(tmp_path: Path, reduction: str) -> None:
    folder = build_small_model(tmp_path)
    weights = []
    with one_thread():
        for groups in ([finished_group()], [finished_group(), failed_group()]):
            local = backend(folder, algorithm__loss_reduction=reduction)
            local.update(build_minibatch(groups, 1, AlgorithmConfig()))
            weights.append(dict(local.named_weights()))
    assert all(weights[0][name].equal(weights[1][name]) for name in weights[0])


def test_a_step_of_nothing_but_failures_trains_nothing_and_has_metrics(tmp_path: Path) -> None:
    folder = build_small_model(tmp_path)
    with one_thread():
        local = backend(folder)
        before = {name: weight.clone() for name, weight in local.named_weights()}
        found = local.update(build_minibatch([failed_group(0), failed_group(1)], 1, AlgorithmConfig()))
        assert all(before[name].equal(weight) for name, weight in local.named_weights())
    full = step_metrics(
        4,
        [failed_group(0), failed_group(1)],
        found,
        counts=World().staleness.counts,
        totals={},
        max_staleness_steps=0,
        step_s=1.0,
        idle_fraction=0.0,
        generated_tokens=0,
    )
    assert "reward/mean" not in full, "nobody was rewarded; 0 would be a lie"
    assert full["staleness/max"] == 0


def test_the_rewards_of_a_step_are_those_of_what_was_sampled() -> None:
    full = step_metrics(
        4,
        [finished_group(), failed_group()],
        {},
        counts=World().staleness.counts,
        totals={},
        max_staleness_steps=4,
        step_s=1.0,
        idle_fraction=0.0,
        generated_tokens=0,
    )
    assert (full["reward/mean"], full["reward/min"], full["reward/zero_variance_groups"]) == (0.5, 0.0, 0.0)


def test_a_failed_group_survives_a_checkpoint() -> None:
    assert decode_group(encode_group(failed_group())) == failed_group()


# Engines that leave ---------------------------------------------------------------------------------------------------


def lose_engines(w: World) -> Callable[[GeneratorInput], Awaitable[None]]:
    async def play(batch: GeneratorInput) -> None:
        w.engines.leave()
        raise NoEngineError("no inference engine is left. The last one left because: scripted death")

    return play


async def test_a_group_that_lost_its_engines_is_generated_again_when_one_is_back() -> None:
    async with World(max_engine_failures=1, max_failed_rollouts=1) as w:
        w.generator.plays[2] = [lose_engines(w), fine]
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 3)
        await settle()
        assert w.generator.calls.count(2) == 1, "without an engine it is not worth beginning"
        assert any("waits for an engine" in line for line in w.dispatcher.describe())
        w.engines.join()
        assert await w.step() == [0, 1, 2, 3]
        assert (w.group_generator.engine_failures, w.group_generator.retries, w.failed_attempts) == (1, 0, []), (
            "the prompt is not to blame"
        )
        first, again = (s for o, s in zip(w.generator.calls, w.generator.seeds, strict=True) if o == 2)
        assert first == again
        w.check_books()


async def test_more_lost_groups_than_allowed_stop_the_workers_with_the_engines_reason() -> None:
    async with World(max_engine_failures=1) as w:
        w.generator.plays.update({1: [lose_engines(w), fine], 2: [lose_engines(w), fine]})
        await w.dispatcher.fill()
        with pytest.raises(NoEngineError, match=r"scripted death.*max_engine_failures = 1"):
            w.raise_if_failed()


async def test_engines_that_never_come_back_spend_the_budget_and_not_for_ever() -> None:
    async with World(max_engine_failures=5) as w:
        w.engines.come_back = False
        w.generator.plays[1] = [lose_engines(w)]
        await w.dispatcher.fill()
        with pytest.raises(NoEngineError, match="max_engine_failures = 5"):
            w.raise_if_failed()
        assert w.generator.calls.count(1) == 1 and w.group_generator.engine_failures == 6


@in_virtual_time
async def test_a_rollout_that_runs_out_of_time_while_no_engine_serves_is_the_engines_failure() -> None:
    async with World(rollout_timeout_s=0.05, max_engine_failures=1) as w:

        async def hang_without_engines(batch: GeneratorInput) -> None:
            w.engines.leave()
            await hang(batch)

        w.generator.plays[1] = [hang_without_engines, fine]
        w.dispatcher.start()
        await w.until(lambda: len(w.buffer) == 3)
        await asyncio.wait_for(w.engines.awaited.wait(), 60)
        w.engines.join()
        assert await w.step() == [0, 1, 2, 3]
        assert w.failed_attempts == []


async def test_any_other_failure_of_an_engine_stops_the_workers_as_it_is() -> None:
    async with World(max_engine_failures=5) as w:

        async def broken_engine(batch: GeneratorInput) -> None:
            raise EngineError("scripted")

        w.generator.plays[1] = [broken_engine]
        await w.dispatcher.fill()
        with pytest.raises(EngineError, match=r"^scripted$"):
            w.raise_if_failed()


# ReplayCache -----------------------------------------------------------------------------------------------------------


class NotedReplayCache(ReplayCache):
    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[object, ...]] = []

    def begin(self, group: int, session_ids: object, attempt: int = 0) -> None:
        self.calls.append(("begin", group, attempt))
        super().begin(group, session_ids, attempt)  # type: ignore[arg-type]

    def end(self, group: int) -> None:
        self.calls.append(("end", group))
        super().end(group)


async def test_sessions_are_recorded_by_attempt_and_until_the_group_has_ended() -> None:
    async with World(max_engine_failures=1) as w:
        replay_cache = w.group_generator._replay_cache = NotedReplayCache()
        w.generator.plays[0] = [fail, lose_engines(w), fine]
        running = asyncio.create_task(w.group_generator.run(0))
        await asyncio.wait_for(w.engines.awaited.wait(), 60)
        w.engines.join()
        await running
        assert replay_cache.calls == [("begin", 0, 0), ("begin", 0, 1), ("begin", 0, 1), ("end", 0)]


async def test_a_resumed_group_continues_with_the_attempt_that_was_recorded() -> None:
    async with World(max_rollout_retries=1) as w:
        replay_cache = w.group_generator._replay_cache = NotedReplayCache()
        replay_cache.begin(0, ["p0@0_0"], 1)
        w.generator.plays[0] = [fail]
        with pytest.raises(RolloutError):
            await w.group_generator.run(0)
        assert w.generator.calls == [0], "it was its second attempt, and there is no third"
        assert replay_cache.calls[1:] == [("begin", 0, 1), ("end", 0)]


# A whole trainer ------------------------------------------------------------------------------------------------------


def stop_after(h: Harness, step: int) -> None:
    loop = asyncio.get_running_loop()

    def stop(minibatch: object) -> None:
        if h.trainer.global_step == step - 1:
            loop.call_soon_threadsafe(h.trainer.request_stop)

    h.backend.before_update = stop


@pytest.mark.parametrize("mode", ["sync", "partial_rollout"])
async def test_a_filtered_run_trains_or_filters_every_prompt_once_also_when_it_was_interrupted(
    tmp_path: Path, mode: str
) -> None:
    overrides = (f"trainer.mode={mode}", "trainer.algorithm.dynamic_sampling=filter")
    first = Harness(tmp_path, *overrides)
    stop_after(first, 3)
    await first.train()
    second = Harness(tmp_path, *overrides)
    await second.train()
    trained, filtered = second.trained, second.trainer.rollout.prompts.ledger.filtered
    assert len(trained) == 32 and filtered, "some groups of this generator have no signal, and every step is full"
    places = [*trained, *filtered, *(group.group_index for group in second.trainer.rollout.buffer)]
    assert sorted(places) == list(range(len(places)))
    for minibatch in (*first.backend.minibatches, *second.backend.minibatches):
        assert all(bool(s.advantages[s.loss_mask].abs().max() > 0) for s in minibatch.sequences)
    counts = second.trainer.rollout.staleness.counts
    assert counts.submitted == len(places) and counts.filtered == len(filtered)


async def test_a_filtered_run_with_depth_zero_is_the_filtered_synchronous_one(tmp_path: Path) -> None:
    runs = []
    for folder, overrides in (
        ("sync", ["trainer.mode=sync"]),
        ("async", ["trainer.fully_async.max_staleness_steps=0", "trainer.fully_async.generate_ahead_steps=0"]),
    ):
        h = Harness(tmp_path / folder, "trainer.algorithm.dynamic_sampling=filter", *overrides)
        await h.train()
        runs.append((h.trained, [s.token_ids.tolist() for m in h.backend.minibatches for s in m.sequences]))
    assert runs[0] == runs[1]


async def test_a_batch_trains_copies_instead_of_groups_without_signal_and_all_its_prompts_count(
    tmp_path: Path,
) -> None:
    plain = Harness(tmp_path / "plain", "trainer.mode=sync")
    replaced = Harness(tmp_path / "replaced", "trainer.mode=sync", "trainer.algorithm.dynamic_sampling=replace")
    for h in (plain, replaced):
        await h.train()
    assert plain.trained == replaced.trained == list(range(32))

    def silent(h: Harness) -> int:
        return sum(not bool(s.advantages.any()) for m in h.backend.minibatches for s in m.sequences)

    assert silent(plain) > 0 == silent(replaced)


async def test_a_masked_failure_costs_a_step_one_group_and_nothing_else(tmp_path: Path) -> None:
    h = Harness(tmp_path, "trainer.failures.on_rollout_failure=mask")

    def fail_always(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 3:
            raise ValueError("scripted")

    h.generator.before = fail_always
    learned_from: list[int] = []  # by a sampler
    sampler = h.trainer.rollout.prompts.source._sampler  # type: ignore[attr-defined]
    sampler.observe = lambda row, group: learned_from.append(group.group_index)
    await h.train()
    assert sorted(h.trained) == list(range(32)) and h.rows[-1]["async/failed"] == 0
    assert sorted([*learned_from, 3]) == list(range(32))
    sequences = [len(m.sequences) for m in h.backend.minibatches]
    assert sorted(sequences) == [6] + [8] * 7 and all(m.num_groups == 4 for m in h.backend.minibatches)


async def test_a_run_outlives_the_loss_of_its_only_engine(tmp_path: Path) -> None:
    engine = ScriptedEngine(free_running=True)
    h = Harness(tmp_path, "trainer.mode=sync", "trainer.failures.max_engine_failures=100000", engine=engine)
    h.client._pool._wait_timeout_s = 0.01
    h.client._pool.fleet.limits = FleetLimits(backoff_s=0.05)

    def die(batch: GeneratorInput) -> None:
        if group_index_of(batch) == 13 and engine.calls.count("start") == 1:
            engine.die()

    h.generator.before = die
    await h.client.start()  # the supervisor starts dead engines again
    await h.train()
    assert h.trained == list(range(32)) and h.trainer.rollout.staleness.counts.failed == 0
    assert engine.calls.count("start") == 2 and h.trainer.rollout.group_generator.engine_failures >= 1


async def test_a_run_stops_although_a_generator_ignores_its_cancellation(tmp_path: Path) -> None:
    h = Harness(tmp_path)
    h.trainer.rollout.group_generator._cancel_grace_s = 0.05
    called = asyncio.Event()

    def before(batch: GeneratorInput) -> object:
        called.set()
        return ignore_cancellation(batch)

    h.generator.before = before
    training = asyncio.create_task(h.train())
    await called.wait()
    h.trainer.request_stop()
    await asyncio.wait_for(training, 60)
    assert (tmp_path / "checkpoints" / "latest").exists()
