"""A critic on two ranks is trained as on one."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from critic_worlds import critic, critic_config, valued_minibatch, with_values
from training_worlds import build_small_model, minibatch, one_thread

from skyrl_train.errors import CheckpointError, GeneratorOutputError
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.local_backend import LocalCritic

ray = pytest.importorskip("ray")

from skyrl_train.training.distributed.ray_backend import RayCritic  # noqa: E402

pytestmark = pytest.mark.timeout(300)  # the first test starts Ray and two processes that import torch

LIKE_LOCAL = {"critic__optimizer_config__lr": 1e-3, "micro_batch_tokens": 34}
LENGTHS = (2, 9, 5, 17, 9, 3, 1, 12, 4)


@pytest.fixture(scope="module", autouse=True)
def _quick() -> Iterator[None]:
    with one_thread():
        yield


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    return build_small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def two_ranks(folder: str) -> Iterator[RayCritic]:
    ray.init(num_cpus=2, include_dashboard=False, object_store_memory=100 << 20)
    started = RayCritic(folder, critic_config(**LIKE_LOCAL, critic__fsdp__ray_num_cpus=0.5), total_steps=10, seed=0)
    yield started
    started.close()
    ray.shutdown()


def apart(a: RayCritic, b: LocalCritic) -> float:
    """The largest difference between two critics' values."""
    sequences = minibatch(7, lengths=LENGTHS).sequences
    pairs = zip(a.forward_values(sequences), b.forward_values(sequences), strict=True)
    return max((x - y).abs().max().item() for x, y in pairs)


def test_steps_parts_refusals_and_a_checkpoint_as_on_one_rank(
    folder: str, two_ranks: RayCritic, tmp_path: Path
) -> None:
    alone = critic(folder, **LIKE_LOCAL)
    for step in range(1, 5):
        batch = with_values(minibatch(step, step, LENGTHS), alone)
        assert two_ranks.update(batch) == pytest.approx(alone.update(batch), rel=1e-5, abs=1e-5)
    assert apart(two_ranks, alone) < 1e-6
    assert max(values.abs().max().item() for values in alone.forward_values(batch.sequences)) > 1e-3, "they have moved"

    few = valued_minibatch(5, 5, lengths=(9,))  # one rank has nothing to do
    assert two_ranks.update(few) == pytest.approx(alone.update(few), rel=1e-5, abs=1e-5)
    with pytest.raises(GeneratorOutputError, match="have a value"):
        two_ranks.update(minibatch(lengths=LENGTHS))

    batch = valued_minibatch(6, 6, lengths=LENGTHS)
    two_ranks.save(two_ranks.snapshot(), tmp_path)
    metrics = two_ranks.update(batch)
    assert metrics == pytest.approx(alone.update(batch), rel=1e-5, abs=1e-5)
    after = two_ranks.forward_values(batch.sequences)
    two_ranks.load(tmp_path)
    assert two_ranks.update(batch) == metrics
    assert all(map(torch.equal, after, two_ranks.forward_values(batch.sequences))), "resumed bit for bit"
    two_ranks.load(tmp_path)
    for part in (batch.sequences[:3], batch.sequences[3:]):
        two_ranks.accumulate(Minibatch(part, 2, 6))
    assert two_ranks.finish(6) == pytest.approx(metrics, rel=1e-5, abs=1e-5)
    assert apart(two_ranks, alone) < 1e-6
    with pytest.raises(CheckpointError, match=r"was written by trainer\.strategy=fsdp2"):
        alone.load(tmp_path)
