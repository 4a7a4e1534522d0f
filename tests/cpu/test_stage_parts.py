"""The stages themselves: rewards by a function, log-probs by other policies, and how they are set up."""

from __future__ import annotations

import asyncio
import dataclasses
import math
from typing import Any

import pytest
import torch
from stage_worlds import RECORD, SEEN_BY_TRL, Held, decode, group, sequence, work
from training_worlds import backend, one_thread

from skyrl_train.build.rollout import build_stages
from skyrl_train.config.compose import compose
from skyrl_train.config.schema import AlgorithmConfig, DynamicSampling, RunConfig
from skyrl_train.config.validate import raise_errors, validate
from skyrl_train.errors import ConfigError, NonFiniteRewardError, RolloutError, StageError, TrainingWorkerError
from skyrl_train.rollout.buffer import decode_group, encode_group, from_line, size_bytes, to_line
from skyrl_train.rollout.stages.logprobs import (
    ProximalStage,
    ReferenceStage,
    backend_stages,
    tokens_to_score,
    with_scores,
    worth_scoring,
)
from skyrl_train.rollout.stages.reward import (
    GroupToReward,
    RewardStage,
    check_signature,
    group_to_reward,
    is_async,
    load_reward_function,
    mean_metrics,
    reward_work,
    with_rewards,
)
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.training.reference import FrozenPolicy
from skyrl_train.types import RolloutGroup, Sample
from skyrl_train.workers.executors import LoopExecutor, ThreadWorker, Work, WorkerPool, process_worker

# Rewards --------------------------------------------------------------------------------------------------------------


def test_a_reward_function_sees_the_prompts_row_and_the_last_sequence_of_each_sample() -> None:
    branched = Sample((sequence(1, 2, rewards=[0.0, 0.25]), sequence(3, 4, 5, mask=[1, 0, 1], rewards=[0.0, 0.0, 0.5])))
    asked = group_to_reward(RECORD, [branched, Sample((sequence(9),))], decode)
    assert (asked.uid, asked.data_source, asked.prompt, asked.env_extras) == ("p", "d", RECORD.prompt, {"answer": "3"})
    assert [s.text for s in asked.samples] == ["345", "9"]
    assert [s.reward for s in asked.samples] == [0.75, 0.0]
    assert asked.samples[0].loss_mask == [1, 0, 1] and asked.samples[0].prompt_token_ids == [5, 6]


def test_rewards_replace_those_of_the_generator_and_stand_on_the_last_token() -> None:
    branched = Sample((sequence(1, 2, rewards=[0.5, 0.25]), sequence(3, 4, rewards=[0.0, 0.5])))
    cut_off = Sample((sequence(1, rewards=[1.0]), sequence()))
    rewarded = with_rewards([branched, cut_off, Sample((sequence(),))], [2.0, 3, 4.0])
    assert [[s.rewards for s in sample.sequences] for sample in rewarded] == [
        [[0.0, 0.0], [0.0, 2.0]],
        [[3.0], []],
        [[]],
    ]
    assert [sample.reward for sample in rewarded] == [2.0, 3.0, 0]


@pytest.mark.parametrize(
    "answer",
    [
        *(None, 1.0, [1.0], [1.0, 2.0, 3.0], ["a", "b"], [1.0, None], "12x"),
        *("12", ["1", "2"], {0: 0.5, 1: 1.0}, {0.5, 1.0}),  # of the right length, but without an order, or texts
    ],
    ids=repr,
)
def test_an_answer_without_a_reward_for_each_sample_stops_the_run(answer: Any) -> None:
    with pytest.raises(StageError, match=r"function=file\.py:reward\) returned .* one finite number for each"):
        with_rewards(group().samples, answer, "file.py:reward")


@pytest.mark.parametrize("reward", [math.nan, math.inf, 1e39, 10**400], ids=["nan", "inf", "1e39", "10**400"])
def test_a_reward_that_is_not_finite_as_float32_is_a_failed_rollout(reward: float) -> None:
    with pytest.raises(NonFiniteRewardError, match="must be finite"):
        with_rewards(group().samples, [1.0, reward])


def test_numbers_of_other_libraries_are_rewards() -> None:
    assert [s.reward for s in with_rewards(group().samples, torch.tensor([1.0, 2.0]))] == [1.0, 2.0]


@pytest.mark.parametrize(
    ("path", "kwargs", "rewards"),
    [("length_reward", {"scale": 2.0}, [4.0, 2.0]), ("Model", {"bonus": 1.5}, [1.5, 1.5])],
)
def test_a_reward_function_is_a_function_with_arguments_or_a_class(
    path: str, kwargs: dict[str, float], rewards: list[float]
) -> None:
    function = load_reward_function(f"stage_worlds:{path}", kwargs)
    assert list(function(group_to_reward(RECORD, group().samples, decode))) == rewards


@pytest.mark.parametrize("is_text", [True, False])
async def test_a_reward_function_of_trl_gets_lists_with_an_entry_for_each_sample(is_text: bool) -> None:
    record = dataclasses.replace(RECORD, is_text=is_text)
    asked = group_to_reward(record, [Sample((sequence(3, 4),)), Sample((sequence(9),))], decode)
    prompt = RECORD.prompt[0]["content"] if is_text else RECORD.prompt
    given = {"prompts": [prompt] * 2, "completion_ids": [[3, 4], [9]], "answer": ["3", "3"]}
    given["completions"] = (
        ["34", "9"] if is_text else [[{"role": "assistant", "content": text}] for text in ("34", "9")]
    )
    SEEN_BY_TRL.clear()
    assert load_reward_function("stage_worlds:trl_reward", {"scale": 2.0})(asked) == [4.0, 2.0]
    assert load_reward_function("stage_worlds:TRLReward", {"scale": 3.0})(asked) == [6.0, 3.0]
    assert await load_reward_function("stage_worlds:async_trl_reward", {})(asked) == [1.0, 0.0]
    assert [given, {"completion_ids": given["completion_ids"]}, {"answer": ["3", "3"]}] == SEEN_BY_TRL


def test_a_setting_of_a_reward_function_of_trl_wins_over_a_column_of_its_name() -> None:
    record = dataclasses.replace(RECORD, env_extras={"answer": "3", "scale": "large"})
    asked = group_to_reward(record, [Sample((sequence(3, 4),)), Sample((sequence(9),))], decode)
    assert load_reward_function("stage_worlds:trl_reward", {"scale": 2.0})(asked) == [4.0, 2.0]


def test_a_wrong_name_in_a_setting_is_rejected_before_the_run() -> None:
    assert [
        is_async(f"stage_worlds:{name}", {}) for name in ("length_reward", "async_length_reward", "Model", "AsyncModel")
    ] == [
        False,
        True,
        False,
        True,
    ]
    with pytest.raises(ConfigError, match="cannot be called"):
        is_async("stage_worlds:NOT_CALLABLE", {})
    with pytest.raises(ConfigError, match=r"rollout.stages.reward.function='stage_worlds:nothing' cannot be imported"):
        is_async("stage_worlds:nothing", {})
    with pytest.raises(ConfigError, match=r"rollout.stages.reward.kwargs.*no_such"):
        load_reward_function("stage_worlds:Model", {"no_such": 1})


SUM = "skyrl_train.rollout.stages.reward:WeightedSum"


def summed(*names: str, weights: list[float] | None = None) -> dict[str, Any]:
    return {"functions": [f"stage_worlds:{name}" for name in names], "weights": weights}


async def test_several_functions_are_summed_with_their_weights_and_each_is_a_metric() -> None:
    asked = group_to_reward(RECORD, [Sample((sequence(3, 4),)), Sample((sequence(9),))], decode)
    answer = load_reward_function(SUM, summed("length_reward", "one_is_not_judged", weights=[0.5, 10]))(asked)
    assert [entry["reward"] for entry in answer] == [1.0, 40.5]
    assert mean_metrics(answer) == {
        "environment/length_reward": 1.5,
        "environment/one_is_not_judged": 4.0,
        "environment/judged": 1.0,
    }
    asynchronous = summed("async_trl_reward", "length_reward")
    answer = await load_reward_function(SUM, asynchronous)(asked)
    assert [entry["reward"] for entry in answer] == [3.0, 1.0]
    assert not is_async(SUM, asynchronous)  # the other function would block the loop
    assert is_async(SUM, summed("async_trl_reward", "async_length_reward"))


async def test_metrics_of_a_reward_function_are_those_of_its_group() -> None:
    stage = RewardStage(LoopExecutor(Work("stage_worlds:judge", {})), decode, max_parallel=1)
    await stage.start()
    before = dataclasses.replace(group(), metrics={"environment/turns": 2.0})
    rewarded = await stage.run(before, RECORD)
    assert [sample.reward for sample in rewarded.samples] == [0.5, 0.5]
    assert rewarded.metrics == {"environment/turns": 2.0, "environment/judged": 3.0}
    parts = [sample.reward_parts for sample in rewarded.samples]
    assert sum(part["judged"] for part in parts if part) / len(parts) == 3.0
    assert decode_group(encode_group(rewarded)) == rewarded
    with pytest.raises(StageError, match="returned the metric judged='x', no finite number"):
        mean_metrics([{"reward": 1.0, "metrics": {"judged": "x"}}])
    with pytest.raises(NonFiniteRewardError, match="returned the metric judged=nan, no finite number"):
        mean_metrics([{"reward": 1.0, "metrics": {"judged": math.nan}}])
    with pytest.raises(StageError, match=r"returned the metrics \[3\], no dict of numbers"):
        mean_metrics([{"reward": 1.0, "metrics": [3]}])


@pytest.mark.parametrize(
    ("kwargs", "message"),
    [
        ({}, "list the import paths of the functions"),
        ({"functions": "stage_worlds:length_reward"}, "list the import paths of the functions"),
        (summed("Model"), r"cannot be constructed with rollout.stages.reward.kwargs: .*'bonus'"),
        (summed(), "name at least one reward function"),
        (summed("length_reward", "length_reward"), "each with a name of its own"),
        (summed("length_reward", weights=["x"]), "must be one number for each of the 1 functions"),
        (summed("length_reward", weights=[1, 2]), "must be one number for each of the 1 functions"),
        ({**summed("length_reward"), "weight": 1}, "unexpected keyword argument 'weight'"),
    ],
)
def test_a_sum_that_cannot_be_made_is_refused(kwargs: dict[str, Any], message: str) -> None:
    def check_and_load() -> None:
        check_signature(SUM, kwargs)
        load_reward_function(SUM, kwargs)

    with pytest.raises(ConfigError, match=message):
        check_and_load()


def test_a_function_of_a_sum_that_leaves_a_sample_out_stops_the_run() -> None:
    with pytest.raises(StageError, match=r"one_is_not_judged returned .* for 1 samples"):
        load_reward_function(SUM, summed("one_is_not_judged"))(
            group_to_reward(RECORD, [Sample((sequence(3, 4),))], decode)
        )


@pytest.mark.parametrize(
    ("name", "message"),
    [
        ("text_reward", r"text_reward returned the text '1\.0'"),
        ("numbered_reward", "numbered_reward returned {0: 0.5, 1: 0.5} for 2 samples"),
    ],
)
def test_a_function_of_a_sum_that_returns_no_numbers_stops_the_run(name: str, message: str) -> None:
    with pytest.raises(StageError, match=message):
        load_reward_function(SUM, summed(name))(group_to_reward(RECORD, group().samples, decode))


async def test_a_sum_whose_function_breaks_the_contract_stops_the_run_and_is_not_called_again() -> None:
    told: list[tuple[str, str]] = []
    stage = reward_stage(WorkerPool([ThreadWorker(reward_work(SUM, summed("numbered_reward")))]), told)
    await stage.start()
    with pytest.raises(StageError, match="numbered_reward returned"):
        await stage.run(group(), RECORD)
    await stage.aclose()
    assert told == []


async def test_a_reward_function_may_be_a_generator() -> None:
    stage = reward_stage(WorkerPool([ThreadWorker(reward_work("stage_worlds:generated_reward", {}))]), [])
    await stage.start()
    rewarded = await stage.run(group(), RECORD)
    await stage.aclose()
    assert [(sample.reward, sample.reward_parts) for sample in rewarded.samples] == [
        (2.0, {"length": 2.0}),
        (1.0, {"length": 1.0}),
    ]
    assert rewarded.metrics == {"environment/length": 1.5}


def reward_stage(
    executor: Any, told: list[tuple[str, str]], attempts: int = 2, timeout_s: float | None = None
) -> RewardStage:
    return RewardStage(
        executor,
        decode,
        max_parallel=1,
        attempts=attempts,
        timeout_s=timeout_s,
        on_failure=lambda name, reason, error: told.append((name, reason)),
    )


class FlakyExecutor:
    """Fails as often as it is told to."""

    def __init__(self, executor: WorkerPool, *orders: str) -> None:
        self.orders = list(orders)
        self.executor = executor
        self.start, self.aclose = executor.start, executor.aclose
        self.limits_s: list[float | None] = []

    async def call(self, argument: GroupToReward, timeout_s: float | None = None) -> Any:
        self.limits_s.append(timeout_s)
        order = self.orders.pop(0) if self.orders else [float(i) for i, _ in enumerate(argument.samples)]
        # Only the call that hangs has a short limit: a busy machine may exceed it.
        return await self.executor.call(order, 0.3 if order == "hang" else timeout_s)


@pytest.mark.parametrize("order", ["raise", "hang", "die"])
async def test_a_reward_function_that_fails_once_is_asked_again(order: str) -> None:
    told: list[tuple[str, str]] = []
    executor = FlakyExecutor(WorkerPool([process_worker(work())]), order)
    stage = reward_stage(executor, told, timeout_s=300.0)
    await stage.start()
    try:
        rewarded = await stage.run(group(), RECORD)
        assert [sample.reward for sample in rewarded.samples] == [0.0, 1.0]
        assert [name for name, _ in told] == ["group 7"]
        assert executor.limits_s == [300.0, 300.0]
    finally:
        await stage.aclose()


async def test_a_reward_function_may_write_into_what_it_gets() -> None:
    told: list[tuple[str, str]] = []
    stage = reward_stage(WorkerPool([ThreadWorker(reward_work("stage_worlds:Careless", {}))]), told)
    await stage.start()
    rewarded = await stage.run(group(), RECORD)
    await stage.aclose()
    assert [sample.reward for sample in rewarded.samples] == [3.0, 2.0]
    assert ["ConnectionError" in reason for _, reason in told] == [True]
    assert RECORD.env_extras == {"answer": "3"}
    asked = group_to_reward(RECORD, group().samples, decode)
    functions = summed("taking_reward", "taking_trl_reward")
    assert [entry["reward"] for entry in load_reward_function(SUM, functions)(asked)] == [3.0 + 2.0] * 2


async def test_a_reward_function_that_fails_for_good_is_a_failed_rollout_with_its_reason() -> None:
    told: list[tuple[str, str]] = []
    stage = reward_stage(FlakyExecutor(WorkerPool([ThreadWorker(work())]), "raise", "raise"), told)
    await stage.start()
    with pytest.raises(RolloutError, match=r"no reward after 2 attempts; .* it raised ValueError: scripted") as caught:
        await stage.run(group(), RECORD)
    assert "in __call__" in caught.value.__cause__.__notes__[0]  # type: ignore[union-attr]
    assert len(told) == 2
    await stage.aclose()


# Log-probs ------------------------------------------------------------------------------------------------------------


def scored_group() -> RolloutGroup:
    branched = Sample((sequence(1, 2, 3), sequence(4, 5, 6, 7, mask=[1, 0, 0, 1])))
    return group(branched, Sample((sequence(),)), Sample((sequence(8, 9, mask=[0, 0]),)), Sample((sequence(2),)))


def frozen(folder: str, temperature: float = 1.0) -> FrozenPolicy:
    return FrozenPolicy(folder, dtype="float32", device="cpu", temperature=temperature, micro_batch_tokens=16)


@pytest.mark.parametrize("temperature", [1.0, 0.7, 0.0])
def test_the_frozen_policy_scores_as_the_trained_one_did_when_it_started(folder: str, temperature: float) -> None:
    with one_thread():
        trained = backend(folder, temperature=temperature, micro_batch_tokens=64)
        scores = frozen(folder, temperature)(tokens_to_score(scored_group()))
        sequences = build_minibatch(
            [with_scores(scored_group(), "reference_logprobs", scores)], 1, AlgorithmConfig()
        ).sequences
        for s, expected in zip(sequences, trained.forward_logprobs(sequences), strict=True):
            assert s.reference_logprobs is not None
            torch.testing.assert_close(s.reference_logprobs, expected * s.loss_mask, rtol=1e-5, atol=1e-5)


def test_scores_are_aligned_with_the_response_and_survive_the_checkpoint() -> None:
    scores = [[-1.0, -2.0, -3.0], [-4.0, 0.0, 0.0, -5.0], [], [0.0, 0.0], [-6.0]]
    scored = with_scores(scored_group(), "reference_logprobs", scores)
    assert [s.reference_logprobs for sample in scored.samples for s in sample.sequences] == scores
    assert decode_group(encode_group(scored)) == scored
    assert size_bytes(scored) == size_bytes(scored_group()) + 32 * 10


def test_a_group_that_was_written_before_there_were_stages_is_read() -> None:
    row = from_line(encode_group(scored_group()))
    for sample in row["samples"]:
        for written in sample["sequences"]:
            del written["reference_logprobs"], written["proximal_logprobs"], written["values"]
    assert decode_group(to_line(row)) == scored_group()


async def test_proximal_logprobs_are_those_of_the_policy_when_the_group_is_finished(folder: str) -> None:
    with one_thread():
        trained = backend(folder, algorithm__entropy_coef=0.1)

        async def forward(sequences: list[TrainingSequence]) -> list[torch.Tensor]:
            return await asyncio.to_thread(trained.forward_logprobs, sequences)

        arrived = await ProximalStage(forward).run(scored_group(), RECORD)
        expected = frozen(folder)(tokens_to_score(scored_group()))
        (before,) = [build_minibatch([arrived], 1, AlgorithmConfig())]
        given = [s.proximal_logprobs for sample in arrived.samples for s in sample.sequences]
        assert [len(values) for values in given if values is not None] == [3, 4, 0, 2, 1]
        flat = [value for values in given for value in values or ()]
        assert flat == pytest.approx([value for values in expected for value in values], abs=1e-5)

        moved = trained.update(build_minibatch([with_rewards_of(scored_group())], 1, AlgorithmConfig()))
        assert moved["policy/ratio_mean"] == 1.0, "proximal and current policy are the same"
        trained.accumulate(before)
        assert trained.finish(1)["policy/ratio_mean"] != pytest.approx(1.0, abs=1e-4), "the policy has moved since"


def with_rewards_of(g: RolloutGroup) -> RolloutGroup:
    return dataclasses.replace(g, samples=with_rewards(g.samples, [float(i) for i, _ in enumerate(g.samples)]))


@pytest.mark.parametrize(
    ("order", "kind", "why"),
    [
        ("raise", StageError, "it raised ValueError"),
        ("be asked too often", StageError, "it raised QuotaError: ask later"),
        ("lose a rank", TrainingWorkerError, "rank 1 is gone"),  # what trainer.max_restarts goes by
    ],
)
async def test_a_reference_that_fails_stops_the_run(order: str, kind: type[Exception], why: str) -> None:
    executor = WorkerPool([ThreadWorker(work())])
    stage = ReferenceStage(executor, max_parallel=1)
    await stage.start()
    executor.call = lambda argument, timeout_s=None: WorkerPool.call(executor, order)  # type: ignore[method-assign]
    with pytest.raises(kind, match=f"reference log-probs cannot be computed: {why}"):
        await stage.run(group(), RECORD)
    await stage.aclose()


async def test_groups_that_the_filter_will_take_away_are_not_scored() -> None:
    async def forward(sequences: Any) -> list[torch.Tensor]:
        return [torch.full((len(s),), -1.0) for s in sequences]

    filtering = AlgorithmConfig(dynamic_sampling=DynamicSampling.filter)
    alike = group()
    for algorithm, scored in ((filtering, False), (AlgorithmConfig(), True)):
        result = await ProximalStage(forward, needed=worth_scoring(algorithm)).run(alike, RECORD)
        assert (result.samples[0].sequences[0].proximal_logprobs is not None) is scored
    different = with_rewards_of(alike)
    result = await ProximalStage(forward, needed=worth_scoring(filtering)).run(different, RECORD)
    assert result.samples[0].sequences[0].proximal_logprobs == [-1.0, -1.0]


# Settings -------------------------------------------------------------------------------------------------------------


def configured(*overrides: str) -> RunConfig:
    return compose("quickstart", list(overrides))


REWARD = "rollout.stages.reward"
FUNCTION = f"{REWARD}.function=stage_worlds:length_reward"
ASYNC = f"{REWARD}.function=stage_worlds:async_length_reward"


def test_without_settings_there_are_no_stages(folder: str) -> None:
    assert build_stages(configured(), folder, decode, lambda group_index, reason: None) == []


def test_stages_are_built_in_their_order(folder: str) -> None:
    stages = build_stages(
        configured(FUNCTION, "trainer.algorithm.kl_loss_coef=0.1"), folder, decode, lambda group_index, reason: None
    )
    assert [(stage.name, stage.max_parallel) for stage in stages] == [("reward", 8), ("reference", 1)]


def test_a_reference_of_several_workers_has_a_group_of_its_own(folder: str) -> None:
    sharded = ["trainer.strategy=fsdp2", "trainer.fsdp.num_workers=4", "trainer.fsdp.shard_size=2"]
    reference = ["rollout.stages.reference.executor=workers", "rollout.stages.reference.num_workers=3"]
    config = configured(*sharded, *reference, "trainer.algorithm.kl_loss_coef=0.1")
    (stage,) = build_stages(config, folder, decode, lambda group_index, reason: None)
    assert isinstance(stage, ReferenceStage) and isinstance(stage.executor, WorkerPool)
    (worker,) = stage.executor._workers
    assert isinstance(worker, ThreadWorker)
    fsdp = worker._work.arguments["trainer"].fsdp
    assert (fsdp.num_workers, fsdp.shard_size, fsdp.ray_num_gpus) == (3, None, 0.0)


async def test_a_colocated_reference_is_scored_by_the_backend_before_the_proximal_policy(folder: str) -> None:
    async def reference(sequences: Any) -> list[torch.Tensor]:
        return [torch.full((len(s),), -1.0) for s in sequences]

    async def current(sequences: Any) -> list[torch.Tensor]:
        return [torch.full((len(s),), -2.0) for s in sequences]

    beside = [
        "trainer.strategy=fsdp2",
        "rollout.stages.reference.executor=colocated",
        "trainer.algorithm.kl_loss_coef=0.1",
    ]
    config = configured(*beside, "trainer.algorithm.proximal_policy=arrival")
    assert build_stages(config, folder, decode, lambda group_index, reason: None) == [], (
        "it has no resources of its own"
    )
    scored = with_rewards_of(group())
    stages = backend_stages(config, reference, current)
    for stage in stages:
        scored = await stage.run(scored, RECORD)
    assert [stage.name for stage in stages] == ["reference", "proximal"]
    first = scored.samples[0].sequences[0]
    assert (first.reference_logprobs, first.proximal_logprobs) == ([-1.0, -1.0], [-2.0, -2.0])
    assert backend_stages(configured(), reference, current) == []


async def test_a_work_that_holds_something_lets_go_of_it_with_its_thread() -> None:
    worker = ThreadWorker(Work("stage_worlds:Held", {}))
    await worker.start()
    assert await worker.call(1) == "held"
    await worker.stop()
    assert Held.closed == 1


@pytest.mark.parametrize(
    ("overrides", "executor"),
    [([FUNCTION], WorkerPool), ([ASYNC], LoopExecutor), ([ASYNC, f"{REWARD}.executor=process"], WorkerPool)],
)
def test_a_reward_function_has_a_fitting_place_by_default(folder: str, overrides: list[str], executor: type) -> None:
    (stage,) = build_stages(configured(*overrides), folder, decode, lambda group_index, reason: None)
    assert isinstance(stage, RewardStage) and isinstance(stage.executor, executor)


def test_a_function_that_blocks_is_refused_on_the_loop(folder: str) -> None:
    with pytest.raises(ConfigError, match="Set executor=thread or process"):
        build_stages(configured(FUNCTION, f"{REWARD}.executor=loop"), folder, decode, lambda group_index, reason: None)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{REWARD}.function=length_reward", "Name it as package.module:function"),
        (f"{REWARD}.max_parallel=0", "must be at least 1"),
        (f"{REWARD}.timeout_s=0", "must be more than 0"),
        (f"{REWARD}.executor=proces", "Did you mean process"),
        ("rollout.stages.reference.executor=loop", "unknown"),
        ("rollout.stages.reference.ray_num_gpus=-1", "must be at least 0"),
    ],
)
def test_settings_that_cannot_work_are_refused_with_their_remedy(override: str, remedy: str) -> None:
    with pytest.raises(ConfigError, match=remedy):
        raise_errors(validate(configured(override)).errors)


@pytest.mark.parametrize(
    ("override", "remedy"),
    [
        (f"{REWARD}.kwargs={{scale: 1}}", "Name the function"),
        (f"{REWARD}.max_parallel=2", "Name the function"),
    ],
)
def test_settings_of_a_reward_function_that_is_not_named_are_a_warning(override: str, remedy: str) -> None:
    found = validate(configured(override))
    assert found.errors == [] and any(remedy in warning for warning in found.warnings), found
