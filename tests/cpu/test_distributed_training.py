"""A policy on two ranks is trained as on one: the contract of the local backend, its numbers, and the rules of its own."""

from __future__ import annotations

import dataclasses
import errno
import math
import os
import re
import signal
import threading
from collections.abc import Callable
from pathlib import Path
from traceback import StackSummary
from types import SimpleNamespace
from unittest.mock import Mock

import pytest
import torch
from checkpoint_worlds import DAMAGES, damage
from hypothesis import given
from hypothesis import strategies as st
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_lora_training import checks_the_export
from test_lora_training import lora as lora_settings
from torch.distributed.checkpoint.api import CheckpointException
from training_worlds import (
    SMALL,
    VOCABULARY,
    backend,
    config,
    learned,
    minibatch,
    same,
    variant,
    weights,
)
from transformers import AutoModelForCausalLM

from skyrl_train.config.schema import ClipCovConfig, KlCovConfig, TrainerConfig
from skyrl_train.errors import CheckpointError, ConfigError, GeneratorOutputError, ModelError, TrainingWorkerError
from skyrl_train.models.adapter_spec import AdapterSpec
from skyrl_train.models.folder import load_model
from skyrl_train.models.lora import add_adapter, policy_weights
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.observability.failures import user_frame
from skyrl_train.training import checkpoint
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.checkpoint import CheckpointStore, find_damage
from skyrl_train.training.collectives import AgreedError
from skyrl_train.training.distributed.worker import TrainingWorker
from skyrl_train.training.export import load_policy
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.messages import ModelSettings, PackedSequences, Role
from skyrl_train.training.reference import FrozenPolicy, TokensToScore
from skyrl_train.weight_sync.disk import DiskTransport
from skyrl_train.weight_sync.shared_memory import SharedMemoryReceiver, SharedMemoryTransport

ray = pytest.importorskip("ray")

from distributed_worlds import FSDP, TwoProcesses, one_rank  # noqa: E402
from ray.exceptions import RayActorError  # noqa: E402
from ray_worlds import GPUS, RayNodes  # noqa: E402

from skyrl_train.training.distributed import ray_backend, worker_group  # noqa: E402
from skyrl_train.training.distributed.ray_backend import RayBackend, share_out  # noqa: E402
from skyrl_train.training.distributed.worker_group import RankLocation, WorkerGroup  # noqa: E402
from skyrl_train.training.reference import ShardedReference  # noqa: E402
from skyrl_train.workers.messages import Call, Result  # noqa: E402

pytestmark = pytest.mark.usefixtures("one_compute_thread")

POLICY = Role.policy
# AdamW moves a weight by rate * gradient / (|gradient| + eps). With the usual eps of 1e-8 a gradient that is as small shows its
# rounding in full: one weight was 5.5e-6 apart.
LIKE_LOCAL = {
    "policy__optimizer_config__lr": 1e-3,
    "policy__optimizer_config__adam_eps": 1e-4,
    "micro_batch_tokens": 34,
}
ROUNDING = 5e-6  # of 5e-3 that weights move in five steps: two ranks sum in another order, which makes 1.2e-7
LENGTHS = (2, 9, 5, 17, 9, 3, 1, 12, 4)  # nine sequences over two ranks, five groups


@pytest.fixture(scope="module")
def two_ranks(folder: str, two_processes: TwoProcesses) -> RayBackend:
    """One group for all tests here; each begins from :func:`fresh`."""
    return start_on(two_processes, folder)


def start_on(processes: TwoProcesses, model: str, *, to_keep: bool = False) -> RayBackend:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(ray_backend, "WorkerGroup", processes.groups(to_keep=to_keep))
        return RayBackend(model, settings(), total_steps=10, temperature=1.0, seed=0)


@pytest.fixture(scope="module")
def first_policy(two_ranks: RayBackend, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("first")
    two_ranks.save(two_ranks.snapshot(), path)
    return path


@pytest.fixture
def fresh(two_ranks: RayBackend, two_processes: TwoProcesses, folder: str, first_policy: Path) -> RayBackend:
    if two_processes.latest is not two_ranks.group:  # another test's policy has taken the processes
        two_ranks.group = start_on(two_processes, folder).group
    two_ranks.load(first_policy)
    return two_ranks


@pytest.fixture
def rejoined(
    first_policy: Path, folder: str, two_processes: TwoProcesses, monkeypatch: pytest.MonkeyPatch
) -> Callable[..., RayBackend]:
    """A policy of other settings on the same two processes, which is quicker than to start some."""
    monkeypatch.setattr(ray_backend, "WorkerGroup", two_processes.groups())
    return lambda model=folder, reference=None, **changes: RayBackend(model, settings(**changes), 10, 1.0, 0, reference)


def settings(**changes: object):  # type: ignore[no-untyped-def]
    return config(**LIKE_LOCAL, fsdp__ray_num_cpus=0.5, **changes)


def local(folder: str, **changes: object) -> LocalBackend:
    return backend(folder, **LIKE_LOCAL, **changes)


def apart(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> float:
    """The largest difference between two policies' weights."""
    assert a.keys() == b.keys()
    return max((a[name] - b[name]).abs().max().item() for name in a)


class TestTheSameNumbers:
    def test_five_steps_as_on_one_rank(self, folder: str, fresh: RayBackend) -> None:
        alone = local(folder)
        begin = weights(alone)
        for step in range(1, 6):
            batch = minibatch(step, step, LENGTHS)
            assert learned(fresh.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(fresh), weights(alone)) < ROUNDING
        assert apart(begin, weights(alone)) > 1e-3, "a comparison of policies that stand still compares nothing"

    def test_steps_with_one_matrix_for_embeddings_and_head(
        self, rejoined: Callable[..., RayBackend], tmp_path: Path
    ) -> None:
        path = variant(tmp_path, "tied", num_heads=2, tie_word_embeddings=True)
        ours, alone = rejoined(path, policy__fp32_head=True), local(path)
        for step in range(1, 4):
            batch = minibatch(step, step, LENGTHS)
            assert learned(ours.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(ours), weights(alone)) < ROUNDING

    @pytest.mark.parametrize("lengths", [(9,), (17, 2, 2, 2)])
    def test_with_fewer_sequences_than_ranks_and_unequal_work(
        self, folder: str, fresh: RayBackend, lengths: tuple[int, ...]
    ) -> None:
        alone, batch = local(folder), minibatch(lengths=lengths)
        assert learned(fresh.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(fresh), weights(alone)) < ROUNDING

    def test_part_by_part(self, folder: str, fresh: RayBackend) -> None:
        alone, batch = local(folder), minibatch(lengths=LENGTHS)
        for of_part in (batch.sequences[:3], batch.sequences[3:]):
            fresh.accumulate(Minibatch(of_part, 2, 1))
        assert learned(fresh.finish(1)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        fresh.accumulate(batch)
        fresh.discard()
        with pytest.raises(ValueError, match="step 1 has nothing accumulated"):
            fresh.finish(1)

    def test_log_probs_come_back_in_the_order_of_the_sequences(self, folder: str, fresh: RayBackend) -> None:
        sequences = minibatch(lengths=LENGTHS).sequences
        for ours, expected in zip(
            fresh.forward_logprobs(sequences), local(folder).forward_logprobs(sequences), strict=True
        ):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)

    def test_a_step_without_trained_tokens_or_with_a_broken_number_moves_nothing(self, fresh: RayBackend) -> None:
        before, batch = weights(fresh), minibatch(lengths=LENGTHS)
        silent = [dataclasses.replace(s, loss_mask=torch.zeros_like(s.loss_mask)) for s in batch.sequences]
        assert fresh.update(dataclasses.replace(batch, sequences=silent))["policy/tokens"] == 0.0
        batch.sequences[1].advantages[batch.sequences[1].loss_mask] = math.nan  # one rank's
        assert fresh.update(batch)["policy/skipped_nonfinite"] == 1.0
        assert same(before, weights(fresh))


SETTINGS = {
    "clip_cov": {"algorithm__policy_loss_type": "clip_cov", "algorithm__clip_cov": ClipCovConfig(0.3, 0.0, 5.0)},
    "kl_cov": {"algorithm__policy_loss_type": "kl_cov", "algorithm__kl_cov": KlCovConfig(0.3, 1.0)},
    "m2po": {"algorithm__off_policy_correction__m2po_threshold": 0.04},
    "two passes": {"update_epochs_per_batch": 2},
    "a coefficient of the divergence that changes": {"algorithm__kl_loss_coef": 0.5},
    "padded rows": {"packing": False},
    "layers that run again": {"policy__gradient_checkpointing": True},
    "layers that stay whole": {"fsdp__reshard_after_forward": False},
    "a head in float32, which full logits do not have": {"policy__fp32_head": True},
}
TOGETHER = [  # each setting in one run; as slow tests, each in a run of its own
    ("clip_cov", "two passes", "layers that stay whole"),
    ("kl_cov", "padded rows", "a coefficient of the divergence that changes"),
    ("m2po", "layers that run again", "a head in float32, which full logits do not have"),
]
ALONE = [pytest.param((name,), marks=pytest.mark.slow) for name in SETTINGS]


@pytest.mark.parametrize("names", [*TOGETHER, *ALONE], ids=", ".join)
def test_settings_mean_the_same_on_two_ranks_as_on_one(
    folder: str, rejoined: Callable[..., RayBackend], names: tuple[str, ...]
) -> None:
    changes = {key: value for name in names for key, value in SETTINGS[name].items()}
    ours, alone = rejoined(**changes), local(folder, **{k: v for k, v in changes.items() if not k.startswith("fsdp")})
    for step in range(1, 4):
        batch = minibatch(step, step, LENGTHS)
        given = [dataclasses.replace(s, reference_logprobs=0.9 * s.behaviour_logprobs) for s in batch.sequences]
        batch = dataclasses.replace(batch, sequences=given, kl_factor=1 / step)
        assert learned(ours.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
    assert apart(weights(ours), weights(alone)) < ROUNDING


def test_a_sharded_reference_scores_as_one_on_one_device(folder: str, rejoined: Callable[..., RayBackend]) -> None:
    sequences = [
        TokensToScore([1, 2], [3, 4, 5], [1, 0, 1]),
        TokensToScore([6], [7] * 9, [1] * 9),
        TokensToScore([8], [], []),
    ]
    frozen = FrozenPolicy(folder, dtype="float32", device="cpu", temperature=0.5, micro_batch_tokens=34)
    reference = ShardedReference(folder, settings(), temperature=0.5)
    for ours, expected in zip(reference(sequences), frozen(sequences), strict=True):
        assert ours == pytest.approx(expected, abs=1e-5)


@pytest.mark.parametrize(
    "changes", [{}, pytest.param({"fsdp__sequence_parallel_size": 2}, marks=pytest.mark.slow)], ids=str
)
def test_a_reference_beside_the_policy_stays_as_it_is(
    folder: str, rejoined: Callable[..., RayBackend], changes: dict[str, int], tmp_path: Path
) -> None:
    reference = settings(fsdp__cpu_offload=True, **changes)
    ours, alone, first = rejoined(reference=reference, **changes), local(folder), local(folder)
    sequences = minibatch(lengths=LENGTHS).sequences
    for step in (1, 2):
        batch = minibatch(step, step, LENGTHS)
        ours.accumulate(batch)
        for scored, expected in zip(ours.reference_logprobs(sequences), first.forward_logprobs(sequences), strict=True):
            torch.testing.assert_close(scored, expected, atol=1e-5, rtol=0)
        assert learned(ours.finish(step)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        ours.save(ours.snapshot(), tmp_path)
        ours.load(tmp_path)
    assert apart(weights(ours), weights(alone)) < ROUNDING
    moved = ours.forward_logprobs(sequences)[3] - ours.reference_logprobs(sequences)[3]
    assert moved.abs().max() > 1e-4, "else the same policy was scored twice"


class TestWhereTheStateLies:
    @pytest.mark.parametrize(
        "changes",
        [
            {"fsdp__shard_size": 1, "fsdp__cpu_offload": True},
            pytest.param({"fsdp__shard_size": 1}, marks=pytest.mark.slow),
            pytest.param({"fsdp__cpu_offload": True}, marks=pytest.mark.slow),
        ],
        ids=str,
    )
    def test_in_copies_or_in_main_memory_it_moves_as_on_one_rank_and_is_saved(
        self,
        folder: str,
        rejoined: Callable[..., RayBackend],
        first_policy: Path,
        tmp_path: Path,
        changes: dict[str, object],
    ) -> None:
        ours, alone = rejoined(**changes), local(folder)
        ours.load(first_policy)  # which was written by two ranks that share each parameter
        for step in (1, 2):
            batch = minibatch(step, step, LENGTHS)
            assert learned(ours.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        then = weights(ours)
        assert apart(then, weights(alone)) < ROUNDING
        ours.save(ours.snapshot(), tmp_path)
        after = ours.update(minibatch(3, 3, LENGTHS))
        ours.load(tmp_path)
        assert same(weights(ours), then)
        assert ours.update(minibatch(3, 3, LENGTHS)) == after


class TestSequenceParallelism:
    @pytest.mark.slow
    @pytest.mark.parametrize("changes", [{}, {"policy__gradient_checkpointing": True}], ids=str)
    def test_two_ranks_with_a_slice_of_each_row_train_as_one(
        self, folder: str, rejoined: Callable[..., RayBackend], changes: dict[str, bool]
    ) -> None:
        shared, alone = rejoined(fsdp__sequence_parallel_size=2, **changes), local(folder)
        sequences = minibatch(lengths=LENGTHS).sequences
        for ours, expected in zip(shared.forward_logprobs(sequences), alone.forward_logprobs(sequences), strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        for step in range(1, 4):
            batch = minibatch(step, step, LENGTHS)
            assert learned(shared.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(shared), weights(alone)) < ROUNDING

    def test_with_one_key_head_for_all_and_layers_that_run_again_and_a_loss_that_looks_at_whole_sequences(
        self, rejoined: Callable[..., RayBackend], tmp_path: Path
    ) -> None:
        path = variant(tmp_path, "grouped", num_heads=4, num_key_value_heads=1)
        changes = {"algorithm__off_policy_correction__m2po_threshold": 0.04, "algorithm__policy_loss_type": "gspo"}
        shared = rejoined(path, fsdp__sequence_parallel_size=2, policy__gradient_checkpointing=True, **changes)
        alone, sequences = local(path, **changes), minibatch(lengths=LENGTHS).sequences
        for ours, expected in zip(shared.forward_logprobs(sequences), alone.forward_logprobs(sequences), strict=True):
            torch.testing.assert_close(ours, expected, atol=1e-5, rtol=0)
        for step, lengths in enumerate((LENGTHS, (9,), (17, 2)), start=1):
            batch = minibatch(step, step, lengths)
            assert learned(shared.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(shared), weights(alone)) < ROUNDING

    def test_impossible_sequence_parallelism_is_rejected_as_the_policy_is_built(
        self, folder: str, rejoined: Callable[..., RayBackend], tmp_path: Path
    ) -> None:
        path = tmp_path / "one_head"
        build_model_folder(dataclasses.replace(SMALL, num_heads=1), path, seed=0)
        with pytest.raises(ConfigError, match="does not divide the model's 1 attention heads"):
            rejoined(str(path), fsdp__sequence_parallel_size=2)
        with pytest.raises(ConfigError, match="needs packed rows"):
            rejoined(folder, fsdp__sequence_parallel_size=2, packing=False)


class TestRefusals:
    def test_an_error_of_one_rank_is_raised_by_all_and_the_group_goes_on(self, folder: str, fresh: RayBackend) -> None:
        alone, batch = local(folder), minibatch(lengths=LENGTHS)
        foreign = [
            dataclasses.replace(s, token_ids=s.token_ids + VOCABULARY) if i == 3 else s
            for i, s in enumerate(batch.sequences)
        ]
        with pytest.raises(GeneratorOutputError, match="outside the model's vocabulary"):
            fresh.update(dataclasses.replace(batch, sequences=foreign))
        with pytest.raises(ConfigError, match="the longest has 60 tokens"):
            fresh.update(minibatch(lengths=(60, 2)))
        assert learned(fresh.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)

    def test_a_loss_of_ones_own_that_raises_on_one_rank_moves_nothing_and_the_group_goes_on(
        self, folder: str, rejoined: Callable[..., RayBackend], tmp_path: Path
    ) -> None:
        (tmp_path / "mine.py").write_text(
            "from skyrl_train.algorithms.losses import ppo_clip\n\n"
            "def loss(tokens, config):\n"
            "    if tokens.advantages.abs().max() > 100:\n"
            "        return 1 / 0\n"
            "    return ppo_clip(tokens, config)\n"
        )
        changes = {"algorithm__policy_loss_type": f"{tmp_path / 'mine.py'}:loss"}
        shared, alone = rejoined(**changes), local(folder, **changes)
        before, batch = weights(shared), minibatch(lengths=LENGTHS)
        for call in (shared.update, shared.accumulate):
            with pytest.raises(ConfigError, match="The loss of step 1 raised ZeroDivisionError") as caught:
                call(with_huge_advantages(batch))
            assert user_frame("".join(caught.value.__notes__)).endswith("mine.py:5 in loss")
        assert same(before, weights(shared))
        assert learned(shared.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(shared), weights(alone)) < ROUNDING

    def test_statistics_of_ones_own_that_raise_move_nothing_and_the_group_goes_on(
        self, rejoined: Callable[..., RayBackend], tmp_path: Path
    ) -> None:
        loss = f"{tmp_path / 'mine.py'}:loss"
        (tmp_path / "mine.py").write_text(
            "from skyrl_train.algorithms.losses import ppo_clip as loss\n"
            "from skyrl_train.algorithms.tokens import register_minibatch_statistics\n\n"
            f"@register_minibatch_statistics({loss!r})\n"
            "def statistics(tokens, config):\n"
            "    return {'largest': 1 / (tokens.advantages.abs().max() < 100).item()}\n"
        )
        shared, batch = rejoined(algorithm__policy_loss_type=loss), minibatch(lengths=LENGTHS)
        before = weights(shared)
        with pytest.raises(ConfigError, match=r"mine\.py:loss raised ZeroDivisionError"):
            shared.update(with_huge_advantages(batch))
        assert same(before, weights(shared))
        assert shared.update(batch)["policy/grad_norm"] > 0


def with_huge_advantages(batch: Minibatch) -> Minibatch:
    """Of one sequence, which one rank has."""
    sequences = list(batch.sequences)
    sequences[3] = dataclasses.replace(sequences[3], advantages=sequences[3].advantages * 1e6)
    return dataclasses.replace(batch, sequences=sequences)


class TestWeights:
    def test_are_staged_in_the_process_of_rank_0_for_engines_on_this_machine(self, fresh: RayBackend) -> None:
        transport = SharedMemoryTransport(verify=True)
        receiver = SharedMemoryReceiver()
        for version in (1, 2, 3):  # the third takes the place of the first
            fresh.update(minibatch(version, version, LENGTHS))
            update = fresh.stage(transport, version)
            assert f"/{fresh.group.locations[0].pid}/" in update.location
            assert same(weights(fresh), {name: w.clone() for name, w in receiver.open_update(update).items()})

    def test_are_exported_as_a_folder_that_transformers_opens(self, fresh: RayBackend, tmp_path: Path) -> None:
        fresh.export_hf(tmp_path / "export")
        model = AutoModelForCausalLM.from_pretrained(tmp_path / "export")
        assert same(weights(fresh), {name: p.detach() for name, p in model.named_parameters()})

    def test_of_a_checkpoint_are_loaded_by_one_process(self, folder: str, fresh: RayBackend, tmp_path: Path) -> None:
        fresh.update(minibatch(lengths=LENGTHS))
        fresh.save(fresh.snapshot(), tmp_path)
        model = load_model(folder, "float32", "cpu")
        assert not same(weights(fresh), {name: p.detach() for name, p in model.named_parameters()})
        load_policy(model, tmp_path)
        assert same(weights(fresh), {name: p.detach() for name, p in model.named_parameters()})


class TestCheckpoints:
    def test_resume_on_two_ranks_bit_for_bit_and_on_one(
        self, folder: str, fresh: RayBackend, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        fresh.update(minibatch(1, 1, LENGTHS))
        snapshot, then = fresh.snapshot(), weights(fresh)
        after = fresh.update(minibatch(2, 2, LENGTHS))  # which the snapshot does not see
        with monkeypatch.context() as patch:
            patch.setattr(checkpoint, "file_checksum", pytest.fail)  # each rank knows the checksums of its files
            saved = CheckpointStore(tmp_path, 1).write(1, lambda path: fresh.save(snapshot, path))
        assert find_damage(saved) is None and len(list(saved.glob("shard-*"))) == 2
        fresh.load(saved)
        assert same(weights(fresh), then)
        assert fresh.update(minibatch(2, 2, LENGTHS)) == after
        alone = a_rank(folder)
        try:
            alone.load(POLICY, saved)
            assert all(torch.equal(alone.weight(name), weight) for name, weight in then.items())
            batch = minibatch(2, 2, LENGTHS)
            assert learned(alone.update(POLICY, PackedSequences.of(batch.sequences), batch)) == pytest.approx(
                learned(after), rel=1e-5, abs=1e-5
            )
        finally:
            alone.leave()

    def test_with_a_damaged_shard_are_passed_over_by_all_ranks(self, fresh: RayBackend, tmp_path: Path) -> None:
        store, then = CheckpointStore(tmp_path, 2), weights(fresh)
        for step in (1, 2):
            snapshot = fresh.snapshot()
            written = store.write(step, lambda path, of=snapshot: fresh.save(of, path))  # type: ignore[misc]
            fresh.update(minibatch(step, step, LENGTHS))
        shard = max(written.glob("shard-*"))  # of rank 1
        content = shard.read_bytes()
        for how in DAMAGES:
            damage(shard, how)
            lines: list[str] = []
            intact = store.latest(lines.append)
            assert intact == tmp_path / "global_step_1" and len(lines) == 1 and shard.name in lines[0], how
            shard.write_bytes(content)
        assert store.latest(pytest.fail) == written
        fresh.load(tmp_path / "global_step_1")
        assert same(weights(fresh), then)

    def test_of_the_local_backend_and_of_nothing_are_refused(
        self, folder: str, fresh: RayBackend, first_policy: Path, tmp_path: Path
    ) -> None:
        alone = local(folder)
        alone.save(alone.snapshot(), tmp_path)
        before = weights(fresh)
        with pytest.raises(CheckpointError, match=r"was written by trainer\.strategy=local"):
            fresh.load(tmp_path)
        with pytest.raises(CheckpointError, match=r"was written by trainer\.strategy=fsdp2"):
            alone.load(first_policy)
        with pytest.raises(CheckpointError, match="cannot be read"):
            fresh.load(tmp_path / "nothing")
        assert same(before, weights(fresh))

    def test_that_is_out_of_reach_for_now_is_not_said_to_be_of_another_model(
        self, folder: str, first_policy: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        error = OSError(errno.EMFILE, "Too many open files")
        rank = a_rank(folder)
        try:
            for raised in (error, CheckpointException("no", {0: (error, StackSummary())})):
                monkeypatch.setattr("skyrl_train.training.distributed.checkpoint.load_shards", Mock(side_effect=raised))
                with pytest.raises(AgreedError, match=r"Too many open files\)\. It may be intact; make it readable"):
                    rank.load(POLICY, first_policy)
        finally:
            rank.leave()

    def test_of_another_model_is_refused(self, first_policy: Path, tmp_path: Path) -> None:
        build_model_folder(dataclasses.replace(SMALL, num_layers=1), tmp_path / "other", seed=1)
        other = a_rank(str(tmp_path / "other"))
        try:
            with pytest.raises(AgreedError, match=r"has 'optimizer\.model\.layers\.1") as caught:
                other.load(POLICY, first_policy)
        finally:
            other.leave()
        assert isinstance(caught.value.error, CheckpointError)

    def test_only_the_latest_snapshot_can_be_written(self, fresh: RayBackend, tmp_path: Path) -> None:
        early = fresh.snapshot()
        fresh.snapshot()
        with pytest.raises(CheckpointError, match="a later snapshot"):
            fresh.save(early, tmp_path)


@pytest.fixture
def adapted(rejoined: Callable[..., RayBackend]) -> RayBackend:
    """A policy with a LoRA adapter."""
    return rejoined(policy__model__lora=lora_settings())


class TestLora:
    """An adapter on two ranks, whose base is sharded too."""

    def test_as_on_one_rank_and_resumed_exactly(self, folder: str, adapted: RayBackend, tmp_path: Path) -> None:
        alone = local(folder, policy__model__lora=lora_settings())
        begin = weights(alone)
        assert same(begin, weights(adapted))
        for step in range(1, 4):
            batch = minibatch(step, step, LENGTHS)
            assert learned(adapted.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(adapted), weights(alone)) < ROUNDING
        assert apart(begin, weights(alone)) > 1e-3, "a comparison of policies that stand still compares nothing"
        adapted.export_hf(tmp_path / "policy")
        checks_the_export(folder, tmp_path / "policy", weights(adapted))
        transport = SharedMemoryTransport()
        update = adapted.stage(transport, 3)
        assert (update.adapter, {spec.name for spec in update.tensors}) == (AdapterSpec(4, 1.5), set(weights(alone)))
        (tmp_path / "checkpoint").mkdir()
        adapted.save(adapted.snapshot(), tmp_path / "checkpoint")
        alone_again = add_adapter(load_model(folder, "float32", "cpu"), lora_settings())
        load_policy(alone_again, tmp_path / "checkpoint")
        assert same(weights(adapted), {name: p.detach() for name, p in policy_weights(alone_again)})
        further = [adapted.update(minibatch(step, step, LENGTHS)) for step in (4, 5)]
        end = weights(adapted)
        adapted.load(tmp_path / "checkpoint")
        assert [adapted.update(minibatch(step, step, LENGTHS)) for step in (4, 5)] == further
        assert same(weights(adapted), end)

    @pytest.mark.slow
    @pytest.mark.parametrize("changes", [{"fsdp__sequence_parallel_size": 2}, {"fsdp__shard_size": 1}], ids=str)
    def test_with_a_slice_of_each_row_or_in_copies_as_on_one_rank(
        self, folder: str, rejoined: Callable[..., RayBackend], changes: dict[str, int]
    ) -> None:
        lora = lora_settings()
        ours, alone = rejoined(policy__model__lora=lora, **changes), local(folder, policy__model__lora=lora)
        begin = weights(alone)
        for step in range(1, 4):
            batch = minibatch(step, step, LENGTHS)
            assert learned(ours.update(batch)) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        assert apart(weights(ours), weights(alone)) < ROUNDING
        assert apart(begin, weights(alone)) > 1e-3, "a comparison of policies that stand still compares nothing"

    def test_a_checkpoint_of_another_base_is_refused(self, folder: str, adapted: RayBackend, tmp_path: Path) -> None:
        adapted.save(adapted.snapshot(), tmp_path)
        names = {name.rsplit(".", 1)[0] for file in tmp_path.glob("*.safetensors") for name in load_file(file)}
        assert all(".lora_" in name or name.startswith(("rng.", "policy")) for name in names), names
        file = next(file for file in tmp_path.glob("*.safetensors") if "policy.base_fingerprint" in load_file(file))
        with safe_open(file, "pt") as opened:
            metadata, contents = opened.metadata(), load_file(file)
        contents["policy.base_fingerprint"][0] ^= 1
        save_file(contents, file, metadata)
        with pytest.raises(CheckpointError, match="another base model"):
            adapted.load(tmp_path)


class ScriptedRank:
    """Records its calls in ``calls`` in the order of their submission, after it has done ``first``."""

    def __init__(self, calls: list[str], first: Callable[[str], None] = lambda method: None) -> None:
        self._calls, self._first = calls, first

    @property
    def answer(self) -> SimpleNamespace:
        def remote(call: Call) -> object:
            self._first(call.method)
            self._calls.append(call.method)
            return ray.put(Result(call.id))

        return SimpleNamespace(remote=remote)


class WatchedLock:
    """``waited_for``: somebody has found it taken."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self.waited_for = threading.Event()

    def __enter__(self) -> None:
        if not self._lock.acquire(blocking=False):
            self.waited_for.set()
            self._lock.acquire()

    def __exit__(self, *error: object) -> None:
        self._lock.release()


def test_calls_of_two_threads_reach_all_ranks_in_one_order(two_ranks: RayBackend) -> None:
    """Weights are staged in one thread and sequences scored in another (``proximal_policy=arrival``): ranks that got the two
    in different orders would wait for each other in two collectives."""
    calls: tuple[list[str], list[str]] = ([], [])
    lock = WatchedLock()

    def other_thread() -> None:
        group.call_alike("score")
        lock.waited_for.set()

    other = threading.Thread(target=other_thread, daemon=True)

    def first(method: str) -> None:
        if method == "stage":  # it is on its way to rank 0: now the other one comes
            other.start()
            assert lock.waited_for.wait(60)

    class Group(WorkerGroup):
        def _start(self, trainer: TrainerConfig, key: str, log: Path | None) -> None:
            self._calling = lock  # type: ignore[assignment]
            self._actors = [ScriptedRank(calls[0], first), ScriptedRank(calls[1])]
            self.locations = two_ranks.group.locations

    group = Group(settings(), FSDP)
    group.call_alike("stage")
    other.join(60)
    assert calls[0] == calls[1] == ["stage", "score"]


@pytest.mark.parametrize("more", [1, 3], ids=["than is free", "than there is"])
def test_workers_that_the_only_machine_lacks_cpus_for_are_an_error_without_waiting(
    two_ranks: RayBackend, more: int
) -> None:
    free = int(ray.cluster_resources()["CPU"]) - 1  # two ranks have a half each
    workers = 2 * free + more
    told = rf"^{workers} ranks of the policy with 0.5 CPU and 0 GPU each need .* free are .* trainer.fsdp.ray_num_cpus"
    with pytest.raises(ConfigError, match=told) as error:
        WorkerGroup(settings(fsdp__num_workers=workers, fsdp__start_timeout_s=0.01), FSDP)
    # Of each node: a test before this one may have left a second one.
    of_nodes = re.findall(r"(\d+) CPU and \d+ GPU(?=, |\. )", str(error.value))
    assert sum(map(int, of_nodes)) == free


def test_gpus_that_the_only_machine_lacks_are_an_error_without_waiting(ray_nodes: RayNodes) -> None:
    more = {"fsdp__num_workers": 2, "fsdp__ray_num_gpus": 1.0 + GPUS}
    with pytest.raises(
        ConfigError, match=f"2 ranks of the policy with 0.5 CPU and {1 + GPUS} GPU each need .* and {GPUS} GPU"
    ):
        WorkerGroup(settings(device="cuda", fsdp__start_timeout_s=0.01, **more), FSDP)


def test_a_worker_that_dies_before_the_others_meet_it_is_an_error_of_ours(monkeypatch: pytest.MonkeyPatch) -> None:
    location, store = object(), object()
    reservation = SimpleNamespace(placements=lambda role: [None], release=lambda: None)

    def get(calls: list[object], timeout: float) -> list[RankLocation]:
        if calls == [store]:
            raise RayActorError
        return [RankLocation("127.0.0.1", 1)]

    actor = SimpleNamespace(
        location=SimpleNamespace(remote=lambda: location), answer=SimpleNamespace(remote=lambda call: store)
    )
    monkeypatch.setattr(worker_group, "ray", SimpleNamespace(get=get, kill=lambda actor: None))
    monkeypatch.setattr(worker_group, "connect", lambda: None)
    monkeypatch.setattr(worker_group, "Reservation", lambda *arguments: reservation)
    monkeypatch.setattr(worker_group, "_actor", lambda *arguments: actor)
    with pytest.raises(TrainingWorkerError, match="The training workers did not start"):
        WorkerGroup(settings(fsdp__num_workers=1), FSDP)


def test_restarts_that_were_asked_for_are_not_asked_for_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker_group, "connect", lambda: None)
    monkeypatch.setattr(WorkerGroup, "_start", lambda *arguments: None)
    group = WorkerGroup(settings(max_restarts=2), FSDP)
    group.locations = [RankLocation("127.0.0.1", 1)]
    told = str(group._broken({0: RayActorError()}, "finish"))
    assert "set trainer.max_restarts" not in told
    assert "trainer.max_restarts=2" in told and "give the same command" in told


@pytest.mark.last_in_its_file
def test_a_worker_that_is_killed_is_named_with_its_node(folder: str, two_processes: TwoProcesses) -> None:
    """It ends the group."""
    ours = start_on(two_processes, folder, to_keep=True)
    location = ours.group.locations[1]
    os.kill(location.pid, signal.SIGKILL)
    with pytest.raises(TrainingWorkerError, match=rf"rank 1 \(of 2, node {location.node}, pid {location.pid}\) ended"):
        ours.update(minibatch(lengths=LENGTHS))
    with pytest.raises(TrainingWorkerError, match=r"rank 1 .* or set trainer\.max_restarts to have that done"):
        ours.snapshot()


def test_staged_files_are_removed_when_the_workers_end(folder: str, ray_nodes: RayNodes, tmp_path: Path) -> None:
    started = RayBackend(folder, settings(fsdp__num_workers=1), total_steps=10, temperature=1.0, seed=0)
    try:
        update = started.stage(DiskTransport(str(tmp_path)), 1)
        assert [str(path) for path in tmp_path.glob("skyrl*")] == [update.location]
    finally:
        started.close()
    assert list(tmp_path.iterdir()) == []
    with pytest.raises(TrainingWorkerError, match="were closed"):
        started.snapshot()


def a_rank(folder: str, **changes: object) -> TrainingWorker:
    """A rank that is alone, in this process."""
    trainer = settings(**changes)
    return one_rank(trainer, policy=ModelSettings(folder, trainer, 10, 1.0, 0))


@pytest.mark.parametrize("model_type", ["gpt2", pytest.param("gemma2", marks=pytest.mark.slow)])
def test_tied_embeddings_and_other_layers_are_sharded_too(model_type: str, tmp_path: Path) -> None:
    path = tmp_path / "model"
    build_model_folder(dataclasses.replace(SMALL, model_type=model_type), path, seed=0)
    alone, batch = local(str(path)), minibatch(lengths=LENGTHS)
    rank = a_rank(str(path))
    try:
        metrics = rank.update(POLICY, PackedSequences.of(batch.sequences), batch)
        assert learned(metrics) == pytest.approx(learned(alone.update(batch)), rel=1e-5, abs=1e-5)
        for name, weight in weights(alone).items():
            torch.testing.assert_close(rank.weight(name), weight, atol=ROUNDING, rtol=0)
    finally:
        rank.leave()


@pytest.mark.parametrize("fp32_head", [False, True])
def test_bfloat16_rounds_the_weights_that_compute_and_are_synced(folder: str, fp32_head: bool) -> None:
    rank = a_rank(folder, policy__dtype="bfloat16", policy__fp32_head=fp32_head)
    alone = local(folder, policy__dtype="bfloat16", policy__fp32_head=fp32_head)
    try:
        assert rank.weight("lm_head.weight").dtype == torch.bfloat16
        batch = minibatch(lengths=LENGTHS)
        metrics = rank.update(POLICY, PackedSequences.of(batch.sequences), batch)
        assert metrics["loss/policy"] == pytest.approx(alone.update(batch)["loss/policy"], abs=5e-3)
    finally:
        rank.leave()


def test_a_model_that_cannot_be_opened_is_named(tmp_path: Path) -> None:
    worker = one_rank(settings())
    try:
        with pytest.raises(AgreedError) as caught:
            worker.hold(POLICY, ModelSettings(str(tmp_path), settings(), 10, 1.0, 0))
        assert isinstance(caught.value.error, ModelError)
    finally:
        worker.leave()


# Messages -------------------------------------------------------------------------------------------------------------


@given(st.lists(st.integers(0, 50), max_size=30), st.integers(1, 6))
def test_every_sequence_goes_to_one_rank_and_the_tokens_are_balanced(lengths: list[int], num_ranks: int) -> None:
    shares = share_out(lengths, num_ranks)
    assert sorted(index for share in shares for index in share) == list(range(len(lengths)))
    assert all(share == sorted(share) for share in shares)
    loads = [sum(lengths[index] for index in share) for share in shares]
    assert len(loads) == num_ranks
    assert max(loads) - min(loads) <= max(lengths, default=0)


@given(st.lists(st.tuples(st.integers(1, 9), st.booleans(), st.booleans()), max_size=6))
def test_sequences_arrive_as_they_were_sent(drawn: list[tuple[int, bool, bool]]) -> None:
    sent = []
    for index, (length, proximal, counted) in enumerate(drawn):
        one = minibatch(index, lengths=(length,)).sequences[0]
        sent.append(
            dataclasses.replace(
                one,
                proximal_logprobs=torch.full((length,), -float(index)) if proximal else None,
                counted_tokens=length if counted else None,
                group_tokens=2 * length if counted else None,
                group_sequences=1 + index,
                advantages=one.advantages[: length - 1] if index == 2 else one.advantages,  # ragged ones as they are
            )
        )
    for before, after in zip(sent, PackedSequences.of(sent).unpack(), strict=True):
        for name in TrainingSequence.__slots__:
            mine, other = getattr(before, name), getattr(after, name)
            assert torch.equal(mine, other) and mine.dtype == other.dtype if torch.is_tensor(mine) else mine == other
