"""A step trained part by part is the step trained at once: ``accumulate`` and ``finish`` against ``update``.

What is equal, and how exactly:

- The scale of the loss and all counts: to the last bit, for any split and order.
- Gradients: sums of the same terms in another order. In float64 they agree within 1e-12 of the largest entry of their
  tensor; where the parts are the micro-batches that the whole step would make, in their order, weights and metrics agree
  to the last bit, in every dtype.
- Weights in float32, parts of another size or order: AdamW divides a gradient by its own size, so where it is close to 0,
  the last bit decides. Over several steps they differ by less than 1e-3 of what they moved (root mean square).
"""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from training_worlds import (
    VOCABULARY,
    backend,
    brute_force_loss,
    config,
    learned,
    minibatch,
    optimizer_state,
    same,
    weights,
)

from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.training.backend import Minibatch
from skyrl_train.training.local_backend import LocalBackend

pytestmark = pytest.mark.usefixtures("one_compute_thread")

REDUCTIONS = ["token_mean", "sequence_mean"]
PROPORTIONAL = {"policy__optimizer_config__adam_eps": 1e3}  # AdamW's first step is a multiple of the gradient then


def aged(batch: Minibatch) -> Minibatch:
    """The minibatch as ``mask`` leaves it: of group 1 the first trained tokens are masked, of group 3 all are."""

    def masked(index: int) -> torch.Tensor:
        sequence = batch.sequences[index]
        positions = torch.arange(len(sequence))
        first_kept = {1: len(sequence) // 2, 3: len(sequence)}.get(sequence.group_index, 0)
        return sequence.loss_mask & (positions >= first_kept)

    sequences = [
        dataclasses.replace(s, loss_mask=masked(index), counted_tokens=int(s.loss_mask.sum()))
        for index, s in enumerate(batch.sequences)
    ]
    return dataclasses.replace(batch, sequences=sequences)


def parts_of(batch: Minibatch, split: Sequence[Sequence[int]]) -> list[Minibatch]:
    """One part per list of group indices."""
    return [
        Minibatch([s for group in groups for s in batch.sequences if s.group_index == group], len(groups), batch.step)
        for groups in split
    ]


def train_by_parts(trained: LocalBackend, parts: Sequence[Minibatch]) -> dict[str, float]:
    for part in parts:
        trained.accumulate(part)
    return trained.finish(parts[0].step)


def gradients(of: LocalBackend) -> dict[str, torch.Tensor]:
    return {name: p.grad.clone() for name, p in of.model.named_parameters() if p.grad is not None}


def moments(of: LocalBackend) -> dict[str, torch.Tensor]:
    """AdamW's first moments, which show the last bit of a gradient where a bfloat16 weight does not."""
    states: Any = optimizer_state(of)["adamw"]["state"]
    return {name: values["exp_avg"] for name, values in states.items()}


BATCH = aged(minibatch(lengths=(2, 9, 5, 17, 9, 3, 1, 12, 12, 7)))


@st.composite
def splits(draw: st.DrawFn) -> list[list[int]]:
    """The groups of ``BATCH`` in any order, cut anywhere; a part may be empty."""
    order = draw(st.permutations(range(BATCH.num_groups)))
    cuts = sorted(draw(st.lists(st.integers(0, len(order)), max_size=4)))
    return [list(order[a:b]) for a, b in zip([0, *cuts], [*cuts, len(order)], strict=True)]


class TestTheSameStep:
    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_however_it_is_split_and_ordered(self, folder: str, reduction: str, tmp_path: Path) -> None:
        options = {"algorithm__loss_reduction": reduction, "algorithm__entropy_coef": 0.1, **PROPORTIONAL}
        options["policy__optimizer_config__max_grad_norm"] = 0.05  # below this gradient's norm
        trained = backend(folder, micro_batch_tokens=34, **options)
        trained.model.double()
        trained.save(trained.snapshot(), tmp_path)
        begin = weights(trained)

        def outcome(parts: Sequence[Minibatch]) -> tuple[dict[str, torch.Tensor], ...]:
            for part in parts:
                trained.accumulate(part)
            summed = gradients(trained)
            metrics.append(trained.finish(1))
            moved = {name: weight - begin[name] for name, weight in weights(trained).items()}
            trained.load(tmp_path)
            return summed, moved

        metrics: list[dict[str, float]] = []
        whole = outcome([BATCH])
        assert metrics[0]["policy/grad_norm"] > 0.05

        @settings(max_examples=15)
        @given(splits())
        def any_split(split: list[list[int]]) -> None:
            parts = outcome(parts_of(BATCH, split))
            for of_whole, of_parts, tolerance in zip(whole, parts, (1e-12, 1e-10), strict=True):
                assert of_whole.keys() == of_parts.keys()
                for name, expected in of_whole.items():
                    worst = (of_parts[name] - expected).abs().max() / expected.abs().max().clamp(min=1e-300)
                    assert worst.item() < tolerance, name
            assert learned(metrics[-1]) == pytest.approx(learned(metrics[0]), rel=1e-12, abs=1e-12)
            assert metrics[-1]["policy/tokens"] == metrics[0]["policy/tokens"]

        any_split()

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    def test_is_the_hand_written_one_with_masked_tokens_in_the_denominator_only(
        self, folder: str, reduction: str
    ) -> None:
        options = {"algorithm__loss_reduction": reduction, "algorithm__entropy_coef": 0.1}
        trained = backend(folder, **options)
        trained.model.double()
        model = copy.deepcopy(trained.model)
        metrics = train_by_parts(trained, parts_of(BATCH, [[4, 1], [0], [3], [2]]))
        loss = brute_force_loss(model, BATCH, config(**options))
        loss.backward()
        norm = math.sqrt(sum(p.grad.square().sum().item() for p in model.parameters() if p.grad is not None))
        assert metrics["loss/policy"] - 0.1 * metrics["loss/entropy"] == pytest.approx(loss.item(), rel=1e-6)
        assert metrics["policy/grad_norm"] == pytest.approx(norm, rel=1e-6)
        assert metrics["policy/tokens"] == sum(int(s.loss_mask.sum()) for s in BATCH.sequences)

    @pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
    def test_to_the_last_bit_where_the_parts_are_the_micro_batches_of_the_whole(self, folder: str, dtype: str) -> None:
        a, b, c = (backend(folder, micro_batch_tokens=budget, policy__dtype=dtype) for budget in (34, 34, 16384))
        batch = minibatch(lengths=(17, 17, 16, 16, 14, 14))  # no two groups fit into one micro-batch of 34
        assert a.update(batch) == train_by_parts(b, parts_of(batch, [[0], [1], [2]]))
        assert same(weights(a), weights(b)) and same(moments(a), moments(b))
        c.update(batch)
        assert not same(moments(a), moments(c)), "a comparison that cannot fail compares nothing"

    def test_a_part_that_is_the_whole_is_an_update(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        for step in (1, 2, 3):
            assert a.update(minibatch(step, step)) == train_by_parts(b, [minibatch(step, step)])
        assert same(weights(a), weights(b))

    def test_in_every_later_step_too(self, folder: str) -> None:
        a, b = (backend(folder, policy__optimizer_config__adam_eps=1e-3) for _ in range(2))
        for trained in (a, b):
            trained.model.double()
        for step in (1, 2, 3):
            batch = minibatch(step, step)
            assert learned(train_by_parts(b, parts_of(batch, [[3], [0, 2], [1]]))) == pytest.approx(
                learned(a.update(batch)), rel=1e-6
            )
        for name, weight in a.named_weights():
            torch.testing.assert_close(dict(b.named_weights())[name], weight, rtol=0, atol=1e-12)

    def test_in_float32_but_for_the_last_bits_of_the_gradients(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        begin = weights(a)
        for step in range(1, 6):
            batch = minibatch(step, step)
            a.update(batch)
            train_by_parts(b, parts_of(batch, [[3], [2], [1], [0]]))
        moved = sum((w - begin[name]).square().sum().item() for name, w in a.named_weights())
        apart = sum((w - weights(b)[name]).square().sum().item() for name, w in a.named_weights())
        assert 0 < apart < 1e-6 * moved

    @pytest.mark.parametrize("reduction", REDUCTIONS)
    @pytest.mark.parametrize("factor", [10, 10**9])
    def test_the_size_of_the_denominator_costs_no_precision(self, folder: str, reduction: str, factor: int) -> None:
        """Sequences that only count make the loss ``factor`` times smaller, and change nothing else."""
        batch = minibatch()
        counted = sum(int(s.loss_mask.sum()) for s in batch.sequences)
        silent = dataclasses.replace(
            batch.sequences[1], loss_mask=torch.zeros(9, dtype=torch.bool), counted_tokens=(factor - 1) * counted
        )
        a, b = (backend(folder, algorithm__loss_reduction=reduction) for _ in range(2))
        alone = a.update(batch)
        beside = train_by_parts(b, [batch, Minibatch([silent], 1, 1)])
        expected = 1 / factor if reduction == "token_mean" else 8 / 9
        for key in ("loss/policy", "policy/grad_norm"):
            assert beside[key] == pytest.approx(expected * alone[key], rel=1e-6)
        assert beside["policy/tokens"] == alone["policy/tokens"] == counted


class TestBetweenTheParts:
    def test_the_policy_stands_still_and_can_be_scored_and_saved(self, folder: str, tmp_path: Path) -> None:
        a, b = backend(folder), backend(folder)
        batch = minibatch()
        parts = parts_of(batch, [[0, 1], [2, 3]])
        before, scores = weights(a), a.forward_logprobs(batch.sequences)
        a.accumulate(parts[0])
        assert same(before, weights(a))
        assert all(map(torch.equal, a.forward_logprobs(batch.sequences), scores))
        a.save(a.snapshot(), tmp_path)
        a.accumulate(parts[1])
        assert a.finish(1) == train_by_parts(b, parts)
        assert same(weights(a), weights(b))
        a.load(tmp_path)
        assert same(before, weights(a))

    def test_discarding_leaves_no_trace(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        a.accumulate(minibatch(7))
        a.discard()
        a.discard()
        assert a.update(minibatch()) == b.update(minibatch())
        assert same(weights(a), weights(b))

    def test_loading_discards(self, folder: str, tmp_path: Path) -> None:
        a, b = backend(folder), backend(folder)
        a.save(a.snapshot(), tmp_path)
        a.accumulate(minibatch(7))
        a.load(tmp_path)
        assert a.update(minibatch()) == b.update(minibatch())

    @pytest.mark.parametrize(
        ("break_it", "error"),
        [
            (lambda s: dataclasses.replace(s, token_ids=s.token_ids + VOCABULARY), GeneratorOutputError),
            (lambda s: minibatch(lengths=(60,)).sequences[0], ConfigError),  # longer than a micro-batch
        ],
    )
    def test_a_rejected_part_leaves_the_others(
        self, folder: str, break_it: Callable[..., object], error: type[Exception]
    ) -> None:
        a, b = (backend(folder, micro_batch_tokens=40) for _ in range(2))
        parts = parts_of(minibatch(), [[0, 1], [2, 3]])
        bad = Minibatch([parts[1].sequences[0], break_it(parts[1].sequences[1])], 1, 1)  # type: ignore[list-item]
        a.accumulate(parts[0])
        with pytest.raises(error):
            a.accumulate(bad)
        a.accumulate(parts[1])
        assert a.finish(1) == train_by_parts(b, parts)
        assert same(weights(a), weights(b))

    def test_a_part_that_fails_half_way_takes_the_whole_sum_with_it(self, folder: str) -> None:
        a, b = (backend(folder, micro_batch_tokens=17) for _ in range(2))
        a.accumulate(minibatch(7))
        calls = iter(range(100))

        def out_of_memory(*_: object) -> None:
            if next(calls) == 1:
                raise MemoryError("scripted")

        handle = a.model.register_forward_pre_hook(out_of_memory)
        with pytest.raises(MemoryError, match="scripted"):
            a.accumulate(minibatch(8))
        handle.remove()
        with pytest.raises(ValueError, match="nothing accumulated"):
            a.finish(1)
        assert a.update(minibatch()) == b.update(minibatch())
        assert same(weights(a), weights(b))

    def test_one_part_that_is_not_finite_costs_the_step_and_no_other(self, folder: str) -> None:
        a, b = backend(folder), backend(folder)
        parts = parts_of(minibatch(), [[0, 1], [2, 3]])
        parts[0].sequences[1].advantages[parts[0].sequences[1].loss_mask] = math.nan
        before = weights(a)
        assert train_by_parts(a, parts)["policy/skipped_nonfinite"] == 1.0
        assert same(before, weights(a))
        assert a.update(minibatch(5)) == b.update(minibatch(5))
        assert same(weights(a), weights(b))

    def test_without_trained_tokens_in_any_part_nothing_moves(self, folder: str) -> None:
        trained = backend(folder, policy__optimizer_config__weight_decay=0.5)
        before = weights(trained)
        silent = [
            dataclasses.replace(s, loss_mask=torch.zeros_like(s.loss_mask), counted_tokens=5)
            for s in minibatch().sequences
        ]
        batch = dataclasses.replace(minibatch(), sequences=silent)
        metrics = train_by_parts(trained, parts_of(batch, [[0], [1, 2, 3]]))
        assert same(before, weights(trained))
        assert metrics["policy/tokens"] == metrics["loss/policy"] == metrics["policy/skipped_nonfinite"] == 0.0


class TestOutOfOrder:
    def test_finishing_a_step_that_has_no_part(self, folder: str) -> None:
        trained = backend(folder)
        with pytest.raises(ValueError, match="step 1 has nothing accumulated"):
            trained.finish(1)
        trained.accumulate(minibatch(step=2))
        with pytest.raises(ValueError, match="step 1 has nothing accumulated"):
            trained.finish(1)
        trained.finish(2)
        with pytest.raises(ValueError, match="step 2 has nothing accumulated"):
            trained.finish(2)

    def test_a_part_of_another_step(self, folder: str) -> None:
        trained = backend(folder)
        trained.accumulate(minibatch(step=1))
        with pytest.raises(ValueError, match="step 1 is neither finished nor discarded, and step 2 begins"):
            trained.accumulate(minibatch(step=2))

    def test_an_update_in_the_middle_of_a_step(self, folder: str) -> None:
        trained = backend(folder)
        trained.accumulate(minibatch(step=1))
        with pytest.raises(ValueError, match="step 1 has begun part by part"):
            trained.update(minibatch(step=1))

    def test_parts_where_a_step_has_several_passes(self, folder: str) -> None:
        trained = backend(folder, update_epochs_per_batch=2)
        with pytest.raises(
            ConfigError, match=r"update_epochs_per_batch=2 needs whole minibatches.*streaming_min_groups"
        ):
            trained.accumulate(minibatch())
        trained.update(minibatch())
