"""Values on their way from the critic to the step: a stage, the buffer, the minibatch, in every mode."""

from __future__ import annotations

import asyncio
import dataclasses
import json
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from harness import Harness
from hypothesis import given
from hypothesis import strategies as st
from stage_worlds import RECORD, group, sequence
from training_worlds import SMALL

from skyrl_train.algorithms.advantages import gae
from skyrl_train.config import derive
from skyrl_train.config.compare import differences
from skyrl_train.config.compose import compose
from skyrl_train.config.plan import resolve
from skyrl_train.config.schema import AlgorithmConfig
from skyrl_train.config.validate import validate
from skyrl_train.errors import GeneratorOutputError, StageError
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.rollout.buffer import decode_group, encode_group, size_bytes
from skyrl_train.rollout.stages.logprobs import ValueStage
from skyrl_train.training.backend import CriticBackend, Minibatch, TrainingSequence
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, Sample

GAE = "trainer.algorithm.advantage_estimator=gae"
SHARDED = [GAE, "trainer.strategy=fsdp2"]
COLOCATED = "trainer.critic.placement=colocated"
PPO = AlgorithmConfig(advantage_estimator="gae", gamma=0.9, lambd=0.8, advantage_batch_normalize=False)


class ScriptedCritic(CriticBackend):
    """Its value of every state is the number of its steps, and ``first_value``."""

    def __init__(self, first_value: int = 0) -> None:
        self.steps = 0
        self.first_value = first_value
        self.parts: list[Minibatch] = []
        self.minibatches: list[list[TrainingSequence]] = []

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.full((len(sequence),), float(self.first_value + self.steps)) for sequence in sequences]

    def accumulate(self, part: Minibatch) -> None:
        self.parts.append(part)

    def finish(self, step: int) -> dict[str, float]:
        self.minibatches.append([sequence for part in self.parts for sequence in part.sequences])
        self.parts = []
        self.steps += 1
        return {"loss/value": 0.0, "critic/lr": 1.0}

    def discard(self) -> None:
        self.parts = []

    def snapshot(self) -> dict[str, object]:
        return {"steps": self.steps}

    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        (folder / "steps.json").write_text(json.dumps(snapshot))
        return {}

    def load(self, folder: Path) -> None:
        self.steps = json.loads((folder / "steps.json").read_text())["steps"]


def values_in(of: Sequence[TrainingSequence]) -> set[int]:
    for s in of:
        assert s.values is not None and s.returns is not None
        assert bool((s.values[~s.loss_mask] == 0).all()) and bool((s.returns[~s.loss_mask] == 0).all())
    return {int(value) for s in of if s.values is not None for value in s.values[s.loss_mask]}


# In every mode --------------------------------------------------------------------------------------------------------

WHOLE = "trainer.algorithm.advantage_batch_normalize=false"


@pytest.mark.parametrize(
    "settings",
    [
        ["trainer.mode=sync"],
        ["trainer.mode=one_step_off"],
        ["trainer.mode=fully_async"],
        ["trainer.mode=partial_rollout", "generator.pause_mode=abort"],
        ["trainer.fully_async.streaming_min_groups=1", WHOLE],
        ["trainer.fully_async.staleness_policy=wait", "rollout.buffer_memory_bytes=1"],
    ],
    ids=lambda settings: settings[0].rpartition(".")[2],
)
async def test_the_critic_trains_in_step_on_values_of_when_a_group_arrived(tmp_path: Path, settings: list[str]) -> None:
    critic = ScriptedCritic()
    h = Harness(tmp_path, GAE, *settings, critic=critic)
    await h.train()
    assert critic.steps == 8 and sorted(h.trained) == list(range(32))
    for step, (mine, of_policy) in enumerate(zip(critic.minibatches, h.backend.minibatches, strict=True)):
        assert [id(s) for s in mine] == [id(s) for s in of_policy.sequences], "both train on the same sequences"
        steps = values_in(mine)
        assert max(steps) <= step and min(steps) >= step - 4
        if settings == ["trainer.mode=sync"]:
            assert steps == {step}
    assert h.rows[-1]["loss/value"] == 0.0 and h.rows[-1]["critic/lr"] == 1.0
    assert sum(row["stages/values/groups"] for row in h.rows) >= 32


async def test_values_in_the_buffer_outlive_a_checkpoint(tmp_path: Path) -> None:
    settings = (GAE, "trainer.fully_async.staleness_policy=wait")
    first = Harness(tmp_path, *settings, critic=ScriptedCritic())
    loop = asyncio.get_running_loop()

    def stop_with_a_full_buffer(part: Minibatch) -> None:
        if first.trainer.global_step == 1:
            generated = first.trainer.changed.wait_until(lambda: len(first.trainer.rollout.buffer) == 8)
            asyncio.run_coroutine_threadsafe(generated, loop).result(timeout=300)
            loop.call_soon_threadsafe(first.trainer.request_stop)

    first.backend.before_update = stop_with_a_full_buffer
    await first.train()
    resumed = ScriptedCritic(first_value=100)
    again = Harness(tmp_path, *settings, critic=resumed)
    await again.train()
    assert resumed.steps == 8 and sorted(again.trained) == list(range(32))
    assert max(values_in(resumed.minibatches[0])) < 100, "computed before the stop, not again"
    assert min(values_in(resumed.minibatches[-1])) >= 100


# The stage ------------------------------------------------------------------------------------------------------------


async def test_the_stage_asks_for_all_sequences_of_a_group_and_keeps_sampled_tokens() -> None:
    asked: list[int] = []

    async def forward(sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        asked.append(len(sequences))
        return [torch.arange(float(len(s))) for s in sequences]

    branched = group(Sample((sequence(1, 2, 3, mask=[1, 0, 1]), sequence(4))), Sample((sequence(5),)))
    valued = await ValueStage(forward).run(branched, RECORD)
    assert asked == [3]
    values = [s.values for sample in valued.samples for s in sample.sequences]
    assert values == [[2.0, 0.0, 4.0], [2.0], [2.0]], "of the place in the whole sequence, behind two tokens of prompt"
    assert decode_group(encode_group(valued)) == valued
    assert size_bytes(valued) == size_bytes(branched) + 32 * 5


async def test_values_that_are_no_numbers_stop_the_run() -> None:
    async def forward(sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        return [torch.full((len(s),), float("nan")) for s in sequences]

    with pytest.raises(StageError, match="values of a group are not all finite"):
        await ValueStage(forward).run(group(), RECORD)


# The minibatch --------------------------------------------------------------------------------------------------------

token = st.tuples(st.booleans(), st.floats(-2, 2, width=32), st.floats(-2, 2, width=32))
turns = st.lists(st.lists(token, min_size=1, max_size=6), min_size=1, max_size=3)  # sequences of a sample


def valued_sample(sequences: list[list[tuple[bool, float, float]]]) -> Sample:
    return Sample(
        tuple(
            dataclasses.replace(
                sequence(*[3] * len(tokens), mask=[int(m) for m, _, _ in tokens], rewards=[r for _, r, _ in tokens]),
                values=[v if m else 0.0 for m, _, v in tokens],
            )
            for tokens in sequences
        )
    )


@given(st.lists(turns, min_size=1, max_size=3))
def test_advantages_and_returns_are_gae_over_the_sampled_tokens_of_each_sample(
    samples: list[list[list[tuple[bool, float, float]]]],
) -> None:
    """The next state is that of the next sampled token, however much of a tool's output is between the two."""
    made = group(*(valued_sample(sequences) for sequences in samples))
    built = iter(build_minibatch([made], 4, PPO).sequences)
    for sequences in samples:
        mask, rewards, values = (
            list(column) for column in zip(*(t for tokens in sequences for t in tokens), strict=True)
        )
        known = torch.tensor([v if m else 0.0 for m, v in zip(mask, values, strict=True)])
        advantages, returns = gae(torch.tensor(rewards).double(), known, torch.tensor(mask), 0.9, 0.8)
        start = 0
        for tokens in sequences:
            s, part = next(built), slice(start, start + len(tokens))
            start += len(tokens)
            assert s.values is not None and s.returns is not None
            torch.testing.assert_close(s.advantages[2:], advantages[part].float())
            torch.testing.assert_close(s.returns[2:], returns[part].float(), atol=1e-5, rtol=1e-5)
            assert torch.equal(s.values[2:], known[part])


def test_returns_are_those_before_advantages_are_normalised_and_old_tokens_keep_them() -> None:
    made = group(valued_sample([[(True, 0.0, 0.5), (True, 1.0, 0.25)]]), valued_sample([[(True, 0.0, 0.0)]]))
    algorithm = AlgorithmConfig(advantage_estimator="gae")
    batch = build_minibatch([made], 9, algorithm, oldest_trained_version=4)
    first = batch.sequences[0]
    assert first.returns is not None and first.returns[2:].tolist() == [1.0, 1.0]
    assert not bool(first.loss_mask.any()), "all tokens are of version 3"
    every = torch.cat([s.advantages[2:] for s in batch.sequences])
    assert every.mean().item() == pytest.approx(0.0, abs=1e-6) and every.std().item() == pytest.approx(1.0, abs=1e-4)


def test_a_group_without_values_is_rejected_and_a_masked_one_needs_none() -> None:
    with pytest.raises(GeneratorOutputError, match="group 7 has no values"):
        build_minibatch([group()], 4, PPO)
    masked: RolloutGroup = dataclasses.replace(group(), masked=True)
    assert all(
        s.returns is not None and not bool(s.loss_mask.any()) for s in build_minibatch([masked], 4, PPO).sequences
    )


# Settings -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        ([GAE, "trainer.algorithm.lambd=1.5"], "must be between 0 and 1"),
        ([GAE, "trainer.algorithm.value_clip=0"], "trainer.algorithm.value_clip=0"),
        ([GAE, "trainer.critic.dtype=float16"], "trainer.critic.dtype=float16 is unknown"),
        ([GAE, "trainer.critic.optimizer_config.lr=0"], "trainer.critic.optimizer_config.lr=0"),
        ([GAE, "trainer.fully_async.streaming_min_groups=1"], "advantage_batch_normalize=false"),
        ([*SHARDED, "trainer.critic.fsdp.num_workers=0"], "trainer.critic.fsdp.num_workers=0"),
        (
            [*SHARDED, "trainer.critic.fsdp.num_workers=3", "trainer.critic.fsdp.sequence_parallel_size=2"],
            "Set trainer.critic.fsdp.num_workers=4",
        ),
        (
            [*SHARDED, "trainer.critic.fsdp.num_workers=3", "trainer.critic.fsdp.sequence_parallel_size=3"],
            "does not divide the critic's 4 attention heads",
        ),
        (
            [*SHARDED, "trainer.critic.fsdp.sequence_parallel_size=2", "trainer.packing=false"],
            "Set trainer.packing=null",
        ),
        ([*SHARDED, "trainer.critic.fsdp.shard_size=3"], "trainer.critic.fsdp.shard_size=3 does not"),
        ([*SHARDED, "trainer.critic.device=cuda:1"], "Set trainer.critic.device=cuda"),
        (
            [*SHARDED, "trainer.device=cuda", "trainer.critic.fsdp.ray_num_gpus=0.5"],
            "Set trainer.critic.fsdp.ray_num_gpus=1",
        ),
        ([*SHARDED, "trainer.critic.placement=worker"], "trainer.critic.placement=worker is unknown"),
    ],
)
def test_impossible_settings_are_rejected_with_a_remedy(overrides: list[str], remedy: str) -> None:
    found = validate(compose("quickstart", overrides)).errors
    assert any(remedy in problem for problem in found), found


@pytest.mark.parametrize(
    ("overrides", "remedy"),
    [
        (
            ["trainer.critic.optimizer_config.lr=1e-3"],
            "trainer.critic.optimizer_config with trainer.algorithm.advantage",
        ),
        (["trainer.algorithm.lambd=0.9"], "trainer.algorithm.lambd with"),
        ([*SHARDED, "trainer.critic.fsdp.ray_num_gpus=1"], "Set trainer.critic.device=cuda"),
        ([GAE, COLOCATED], "set trainer.strategy=fsdp2"),
        ([*SHARDED, COLOCATED, "trainer.critic.device=cpu"], "Set trainer.critic.device=null"),
        ([*SHARDED, COLOCATED, "trainer.critic.fsdp.num_workers=4"], "Set trainer.fsdp.num_workers"),
        ([COLOCATED], "trainer.critic.placement with trainer.algorithm.advantage_estimator=grpo"),
    ],
)
def test_a_setting_without_effect_is_a_warning_with_its_reason(overrides: list[str], remedy: str) -> None:
    found = validate(compose("quickstart", overrides))
    assert found.errors == [] and any(remedy in warning for warning in found.warnings), found


def test_slices_of_the_tokens_and_the_policys_ranks_are_not_rejected_and_make_no_other_run(tmp_path: Path) -> None:
    slices = "trainer.critic.fsdp.sequence_parallel_size=2"
    assert validate(compose("quickstart", [*SHARDED, slices])).errors == []
    colocated = [*SHARDED, COLOCATED, "trainer.fsdp.sequence_parallel_size=2", "trainer.critic.fsdp.cpu_offload=true"]
    assert validate(compose("quickstart", colocated)).errors == []
    assert not differences(
        compose("quickstart", colocated), compose("quickstart", [*SHARDED, slices, "trainer.critic.device=cuda"])
    )
    build_model_folder(dataclasses.replace(SMALL, num_heads=1), tmp_path / "one_head", seed=0)
    found = validate(compose("quickstart", [*colocated, f"trainer.critic.model.path={tmp_path / 'one_head'}"])).errors
    assert len(found) == 1 and "does not divide the critic's 1 attention heads" in found[0]


def test_the_plan_shows_the_critic_and_what_it_holds() -> None:
    config = compose("quickstart", [GAE, "trainer.algorithm.lambd=0.95", "trainer.critic.dtype=bfloat16"])
    plan = resolve(config, 512)
    assert plan.memory is not None
    assert plan.memory.critic_bytes == plan.memory.num_parameters * (2 + 4 + 4 + 8)
    assert (
        "the policy's model (bfloat16, on cpu, in this process), gamma 1, lambda 0.95, moves of 0.2" in plan.describe()
    )
    assert "critic" not in resolve(compose("quickstart", []), 512).describe()
    slices = "trainer.critic.fsdp.sequence_parallel_size=2"
    own = resolve(compose("quickstart", [*SHARDED, slices, "trainer.critic.fsdp.cpu_offload=true"]), 512)
    assert "2 separate Ray actors with 1 CPUs each, 2 share each micro-batch, state in main memory)" in own.describe()
    on_gpus = resolve(compose("quickstart", [*SHARDED, "trainer.critic.device=cuda"]), 512)
    assert "on cuda, 2 separate Ray actors with 1 CPUs and 1 GPUs each)" in on_gpus.describe()
    assert "on top of each rank, and " in on_gpus.describe() and "where the critic is" in on_gpus.describe()
    assert "on cpu, in the policy's ranks)" in resolve(compose("quickstart", [*SHARDED, COLOCATED]), 512).describe()
    assert derive.critic_trainer(config.trainer).policy.optimizer_config.lr == 5e-6
