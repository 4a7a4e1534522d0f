"""A critic on two ranks, its own or the policy's, is trained as on one."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import numpy as np
import pytest
import torch
from checkpoint_worlds import checksums_of
from critic_worlds import actor_critic, critic, critic_config, valued_minibatch, with_values
from training_worlds import SMALL, config, learned, minibatch, weights

from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.actor_critic import ActorCritic
from skyrl_train.training.backend import CriticBackend, Minibatch
from skyrl_train.training.collectives import AgreedError
from skyrl_train.training.distributed.sharding import gathered
from skyrl_train.training.messages import ModelSettings, Role

pytest.importorskip("ray")

from distributed_worlds import TwoProcesses, one_rank

from skyrl_train.training.distributed import ray_backend
from skyrl_train.training.distributed.ray_backend import RayBackend, RayCritic

pytestmark = pytest.mark.usefixtures("one_compute_thread")

LIKE_LOCAL = {
    "critic__optimizer_config__lr": 1e-3,
    "critic__optimizer_config__adam_eps": 1e-4,  # small gradients do not show their rounding in full
    "critic__optimizer_config__scheduler": "linear",
    "policy__optimizer_config__lr": 1e-3,
    "policy__optimizer_config__adam_eps": 1e-4,
    "micro_batch_tokens": 34,
}
COLOCATED = {"critic__placement": "colocated"}
ROUNDING = 1e-6  # of values and weights that move by more than 1e-3: two ranks sum in another order, which makes 1e-8
LENGTHS = (2, 9, 5, 17, 9, 3, 1, 12, 4)


@pytest.fixture
def on_both(two_processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch) -> None:
    """All groups that a test starts are on the same two processes."""
    monkeypatch.setattr(ray_backend, "WorkerGroup", two_processes.groups())


def own_workers(folder: str, **changes: object) -> RayCritic:
    return RayCritic(folder, critic_config(**LIKE_LOCAL, **changes), total_steps=10, seed=0)


def beside_policy(folder: str, critic_folder: str | None = None, **changes: object) -> ActorCritic:
    trainer = config(**LIKE_LOCAL, **changes)
    policy = RayBackend(folder, trainer, total_steps=10, temperature=1.0, seed=0, reference=trainer)
    of_critic = critic_config(**LIKE_LOCAL, **COLOCATED, **changes)
    return ActorCritic(policy, RayCritic(critic_folder or folder, of_critic, 10, 0, policy.group))


def apart(a: CriticBackend, b: CriticBackend) -> float:
    """The largest difference between two critics' values."""
    sequences = minibatch(7, lengths=LENGTHS).sequences
    pairs = zip(a.forward_values(sequences), b.forward_values(sequences), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"critic__fsdp__sequence_parallel_size": 2}, marks=pytest.mark.slow)], ids=str
)
def test_steps_parts_refusals_and_a_checkpoint_as_on_one_rank(
    folder: str, on_both: None, changes: dict[str, int], tmp_path: Path
) -> None:
    two_ranks, alone = own_workers(folder, **changes), critic(folder, **LIKE_LOCAL)
    for step in range(1, 4):
        batch = with_values(minibatch(step, step, LENGTHS), alone)
        assert learned(two_ranks.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
    assert apart(two_ranks, alone) < ROUNDING
    assert max(values.abs().max().item() for values in alone.forward_values(batch.sequences)) > 1e-3, "they have moved"

    few = valued_minibatch(5, 5, lengths=(9,))  # one rank has nothing to do, or half a sequence
    assert learned(two_ranks.update(few)) == pytest.approx(learned(alone.update(few)), rel=1e-5, abs=1e-5)
    with pytest.raises(GeneratorOutputError, match="have a value"):
        two_ranks.update(minibatch(lengths=LENGTHS))

    batch = valued_minibatch(6, 6, lengths=LENGTHS)
    two_ranks.save(two_ranks.snapshot(), tmp_path)
    metrics = two_ranks.update(batch)
    assert learned(metrics) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
    after = two_ranks.forward_values(batch.sequences)
    two_ranks.load(tmp_path)
    assert two_ranks.update(batch) == metrics
    assert all(map(torch.equal, after, two_ranks.forward_values(batch.sequences))), "resumed bit for bit"
    two_ranks.load(tmp_path)
    for part in (batch.sequences[:3], batch.sequences[3:]):
        two_ranks.accumulate(Minibatch(part, 2, 6))
    assert learned(two_ranks.finish(6)) == pytest.approx(learned(metrics), rel=1e-5, abs=1e-5)
    assert apart(two_ranks, alone) < ROUNDING
    with pytest.raises(CheckpointError, match=r"was written by trainer\.strategy=fsdp2"):
        alone.load(tmp_path)


PLACES = [
    pytest.param({}, id="as it is", marks=pytest.mark.slow),
    pytest.param({"fsdp__sequence_parallel_size": 2}, id="with slices"),
    pytest.param(
        {"fsdp__shard_size": 1, "critic__fsdp__cpu_offload": True},
        id="in copies and in main memory",
        marks=pytest.mark.slow,
    ),
]


@pytest.mark.parametrize("changes", PLACES)
def test_beside_the_policy_both_move_as_on_one_rank_and_resume_on_any_number(
    folder: str, on_both: None, changes: dict[str, object], tmp_path: Path
) -> None:
    both, alone = beside_policy(folder, **changes), actor_critic(folder, **LIKE_LOCAL)
    sequences = minibatch(7, lengths=LENGTHS).sequences
    at_start = both.forward_logprobs(sequences)
    for step in range(1, 4):
        batch = with_values(minibatch(step, step, LENGTHS), alone._critic)
        keyed = [dataclasses.replace(sequence, record=key) for key, sequence in enumerate(batch.sequences)]
        batch = dataclasses.replace(batch, sequences=keyed)
        if step == 2:  # part by part, while values are asked for
            both.accumulate(Minibatch(batch.sequences[:3], 2, step))
            both.submit_values(batch.sequences).result()
            both.accumulate(Minibatch(batch.sequences[3:], 3, step))
            metrics = both.finish(step)
        else:
            metrics = both.update(batch)
        assert learned(metrics) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        records, expected = both.take_records(), alone.take_records()
        assert records.keys() == expected.keys() and len(records) > 3
        for key, record in records.items():
            np.testing.assert_allclose(record, expected[key], atol=1e-4, rtol=1e-4)
    assert apart(both._critic, alone._critic) < ROUNDING
    moved = [values.abs().max().item() for values in both.submit_values(batch.sequences).result()]
    assert max(moved) > 1e-3, "a comparison of critics that stand still compares nothing"
    assert all(map(torch.equal, both.reference_logprobs(sequences), at_start)), "the third model of the ranks stays"

    assert both.save(both.snapshot(), tmp_path) == checksums_of(tmp_path)
    rank = one_rank(
        config(**LIKE_LOCAL),
        policy=ModelSettings(folder, config(**LIKE_LOCAL), 10, 1.0, 0),
        critic=ModelSettings(folder, critic_config(**LIKE_LOCAL), 10, 1.0, 0),
    )
    try:
        rank.load(Role.policy, tmp_path)
        rank.load(Role.critic, tmp_path / "critic")
        of_alone = {Role.policy: weights(alone._policy), Role.critic: weights_of(alone._critic.model)}
        for role, expected in of_alone.items():
            ours = weights_of(rank._held[role].worker.model)
            assert ours.keys() == expected.keys()
            assert max((ours[name] - expected[name]).abs().max().item() for name in ours) < ROUNDING
    finally:
        rank.leave()
    batch = valued_minibatch(6, 6, lengths=LENGTHS)
    after = both.update(batch)
    both.load(tmp_path)
    assert both.update(batch) == after


def weights_of(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    return {name: gathered(weight.detach(), weight.dtype) for name, weight in model.named_parameters()}


def test_a_critic_whose_heads_the_policys_ranks_do_not_divide_is_refused(
    folder: str, on_both: None, tmp_path: Path
) -> None:
    build_model_folder(dataclasses.replace(SMALL, num_heads=1), tmp_path / "one_head", seed=0)
    with pytest.raises(ConfigError, match="sequence_parallel_size=2 does not divide the model's 1 attention heads"):
        beside_policy(folder, str(tmp_path / "one_head"), fsdp__sequence_parallel_size=2)


def test_unsupported_settings_of_its_model_are_named_as_the_critics(
    folder: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("skyrl_train.training.layers.GradientCheckpointingLayer", str)  # no layer is one
    trainer = critic_config(critic__gradient_checkpointing=True)
    rank = one_rank(trainer)
    try:
        with pytest.raises(AgreedError, match=r"^trainer\.critic\.gradient_checkpointing: "):
            rank.hold(Role.critic, ModelSettings(folder, trainer, 10, 1.0, 0))
    finally:
        rank.leave()
