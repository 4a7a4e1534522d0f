"""Packed sequences have the log-probs and gradients of single ones, under every kind of model that is packed."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.fsdp import fully_shard
from torch.distributed.tensor import DTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedModel
from transformers.modeling_layers import GradientCheckpointingLayer

from skyrl_train.errors import ConfigError, GeneratorOutputError
from skyrl_train.training import head as of_head
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.batch import MicroBatch
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.layers import checkpoint_activations
from skyrl_train.training.policy_worker import PolicyWorker
from skyrl_train.training.scorer import Scorer
from skyrl_train.training.state import Snapshots
from tests.cpu.training_worlds import config

pytestmark = pytest.mark.usefixtures("one_compute_thread")

VOCABULARY = 29
LENGTHS = (3, 14, 2, 9, 14, 21)
SIZES: dict[str, Any] = {
    "vocab_size": VOCABULARY,
    "hidden_size": 16,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 4,
    "intermediate_size": 24,
    "max_position_embeddings": 64,
    "pad_token_id": 0,
    "bos_token_id": None,
    "eos_token_id": 1,
    "initializer_range": 0.3,
}
PACKED = {
    "llama": {},
    "qwen2": {"tie_word_embeddings": True},
    "qwen3": {},
    "mistral": {"sliding_window": 5},
    "gemma3_text": {"sliding_window": 5, "final_logit_softcapping": 2.0},
    "granite": {"logits_scaling": 3.0, "residual_multiplier": 0.5, "embedding_multiplier": 2.0},
    "cohere": {"logit_scale": 0.25},
    "qwen3_moe": {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 8},
}
ROUND_TO_FLOAT32 = ("gemma3_text", "cohere")  # in norms and rotations, whatever the dtype
PADDED = {
    "gemma2": {"sliding_window": 5},  # caps its attention scores
    "gpt_oss": {"num_local_experts": 4, "num_experts_per_tok": 2},  # attention sinks
    "bloom": {"n_head": 4, "n_layer": 2},  # positions in its attention scores
}


def model(kind: str, **changes: object) -> PreTrainedModel:
    torch.manual_seed(0)
    built: PreTrainedModel = AutoModelForCausalLM.from_config(AutoConfig.for_model(kind, **(SIZES | changes)))
    built.set_experts_implementation("eager")  # the grouped product has no float64
    return built.double().eval()


def sequences(lengths: tuple[int, ...] = LENGTHS) -> list[TrainingSequence]:
    generator = torch.Generator().manual_seed(0)
    result = []
    for length in lengths:
        ids = torch.randint(0, VOCABULARY, (length,), generator=generator)
        nothing = torch.zeros(length)
        result.append(TrainingSequence(ids, torch.ones(length) > 0, nothing, nothing, ids, 0))
    return result


def scores(scorer: Scorer, of: list[TrainingSequence]) -> tuple[dict[int, torch.Tensor], torch.Tensor]:
    """Log-probs per sequence, and a loss of all log-probs and entropies in which every token weighs differently."""
    masks, logprobs, loss = [s.loss_mask for s in of], {}, torch.zeros(())
    for batch in scorer.layout.micro_batches(of, range(len(of)), masks):
        values, entropies = scorer.logprobs_and_entropies(batch, differentiate_entropy=True)
        for index, own, entropy in zip(
            batch.indices, values.split(batch.counts.tolist()), entropies.split(batch.counts.tolist()), strict=True
        ):
            logprobs[index] = own
            weights = torch.linspace(-1.0, 1.0 + index, len(own), dtype=own.dtype)
            loss = loss + weights @ own + weights.flip(0) @ entropy
    return logprobs, loss


def one_by_one(policy: PreTrainedModel, of: list[TrainingSequence], temperature: float) -> tuple[Any, torch.Tensor]:
    """The same from the model's own logits of one sequence at a time."""
    logprobs, loss = {}, torch.zeros(())
    for index, s in enumerate(of):
        logits = policy(input_ids=s.token_ids[None, :-1], use_cache=False).logits[0] / temperature
        distribution = torch.log_softmax(logits, dim=1)
        own = distribution[torch.arange(len(s) - 1), s.token_ids[1:]]
        weights = torch.linspace(-1.0, 1.0 + index, len(own), dtype=own.dtype)
        loss = loss + weights @ own - weights.flip(0) @ (distribution.exp() * distribution).sum(dim=1)
        logprobs[index] = own
    return logprobs, loss


def gradients(policy: PreTrainedModel, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    policy.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in policy.named_parameters() if p.grad is not None}


def assert_same(policy: PreTrainedModel, scorer: Scorer, temperature: float, tolerance: float = 1e-12) -> None:
    batch = sequences()
    expected, loss = one_by_one(policy, batch, temperature)
    expected_gradients = gradients(policy, loss)
    computed, loss = scores(scorer, batch)
    for index, logprobs in expected.items():
        torch.testing.assert_close(computed[index], logprobs, atol=tolerance, rtol=tolerance)
    computed_gradients = gradients(policy, loss)
    assert computed_gradients.keys() == expected_gradients.keys()
    for name, gradient in expected_gradients.items():
        torch.testing.assert_close(computed_gradients[name], gradient, atol=tolerance, rtol=1e3 * tolerance)


@pytest.mark.parametrize(("kind", "packing"), [*itertools.product(PACKED, (None, False))])
def test_log_probs_and_gradients_are_those_of_single_sequences(kind: str, packing: bool | None) -> None:
    policy = model(kind, **PACKED[kind])
    scorer = Scorer(policy, temperature=0.8, micro_batch_tokens=40, packing=packing)
    assert scorer.layout.packed is (packing is None)
    assert_same(policy, scorer, 0.8, tolerance=1e-5 if kind in ROUND_TO_FLOAT32 else 1e-12)


@pytest.mark.parametrize("kind", PADDED)
def test_models_whose_attention_is_not_known_to_keep_sequences_apart_are_padded(kind: str) -> None:
    policy = model(kind, **PADDED[kind])
    scorer = Scorer(policy, temperature=1.0, micro_batch_tokens=60)
    assert not scorer.layout.packed
    with pytest.raises(ConfigError, match=r"trainer.packing=true: .* Set trainer.packing=null"):
        Scorer(policy, temperature=1.0, micro_batch_tokens=60, packing=True)


def test_attention_scores_are_capped_as_the_model_says() -> None:
    def logprobs(cap: float | None, implementation: str) -> torch.Tensor:
        config = AutoConfig.for_model("gemma2", **SIZES, attn_logit_softcapping=cap)
        torch.manual_seed(0)
        model = AutoModelForCausalLM.from_config(config, attn_implementation=implementation).eval()
        if implementation == "eager":
            with torch.no_grad():
                return model(ids[None]).logits[0].log_softmax(-1)[:-1].gather(1, ids[1:, None]).squeeze(1)
        scorer, nothing = Scorer(model, temperature=1.0, micro_batch_tokens=64), torch.zeros(len(ids))
        sequence = TrainingSequence(ids, nothing == 0, nothing, nothing, ids, 0)
        (batch,) = scorer.layout.micro_batches([sequence], [0], [torch.arange(len(ids)) > 0])
        return scorer.logprobs(batch)

    ids = torch.arange(12) * 7 % VOCABULARY
    torch.testing.assert_close(logprobs(0.05, "sdpa"), logprobs(0.05, "eager"), atol=5e-5, rtol=0)
    assert (logprobs(0.05, "eager") - logprobs(None, "eager")).abs().max() > 1e-3


def test_a_packed_sequence_does_not_notice_what_its_neighbours_say() -> None:
    scorer = Scorer(model("qwen3"), temperature=1.0, micro_batch_tokens=100)
    batch = sequences()
    before, _ = scores(scorer, batch)
    for neighbour in (1, 5):
        batch[neighbour].token_ids[:] = (batch[neighbour].token_ids + 1) % VOCABULARY
    after, _ = scores(scorer, batch)
    for index in range(len(batch)):
        assert torch.equal(before[index], after[index]) is (index not in (1, 5))


def test_a_model_with_unknown_work_after_its_head_is_scored_by_its_own_logits() -> None:
    policy = model("llama")
    own = type(policy).forward
    policy.forward = lambda **inputs: _bent(own(policy, **inputs))
    scorer = Scorer(policy, temperature=1.0, micro_batch_tokens=100)
    assert scorer.layout.packed
    assert_same(policy, scorer, 1.0)
    with pytest.raises(ConfigError, match=r"trainer.policy.fp32_head=true: .* Set it to false"):
        Scorer(policy, temperature=1.0, micro_batch_tokens=100, fp32_head=True)


def test_a_sequence_beyond_the_positions_of_the_model_is_rejected() -> None:
    scorer = Scorer(model("llama"), temperature=1.0, micro_batch_tokens=100)
    with pytest.raises(GeneratorOutputError, match="has 65 tokens, but the model only 64 positions"):
        scores(scorer, sequences((3, 65)))


@pytest.mark.parametrize("packing", [True, False])
def test_checkpointed_layers_give_the_same_gradients_from_less_memory(packing: bool) -> None:
    kept: dict[bool, list[int]] = {}
    results: dict[bool, dict[str, torch.Tensor]] = {}
    for checkpointed in (False, True):
        policy = model("qwen3", num_hidden_layers=4)
        if checkpointed:
            checkpoint_activations(policy)
        assert not policy.training
        scorer = Scorer(policy, temperature=1.0, micro_batch_tokens=100, packing=packing)
        sizes = kept.setdefault(checkpointed, [])

        def keep(tensor: torch.Tensor, sizes: list[int] = sizes) -> torch.Tensor:
            sizes.append(tensor.nbytes)
            return tensor

        with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
            _, loss = scores(scorer, sequences())
        results[checkpointed] = gradients(policy, loss)
    assert sum(kept[True]) < 0.4 * sum(kept[False])
    assert all(torch.equal(results[True][name], gradient) for name, gradient in results[False].items())


def test_checkpointing_needs_layers_that_can_run_again() -> None:
    with pytest.raises(ConfigError, match=r"gradient_checkpointing: Linear .* Set it to false"):
        checkpoint_activations(torch.nn.Linear(2, 2))  # type: ignore[arg-type]


@contextmanager
def sharded(policy: PreTrainedModel) -> Iterator[PreTrainedModel]:
    """The policy by layers, and by its head where that has a weight of its own, over one rank."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    try:
        mesh = dist.device_mesh.init_device_mesh("cpu", (1,))
        for module in policy.modules():
            if isinstance(module, GradientCheckpointingLayer):
                fully_shard(module, mesh=mesh)
        if not policy.config.tie_word_embeddings:
            fully_shard(policy.get_output_embeddings(), mesh=mesh)
        yield fully_shard(policy, mesh=mesh, reshard_after_forward=True)
    finally:
        dist.destroy_process_group()


def test_log_probs_rounded_to_bfloat16_count_as_equal(monkeypatch: pytest.MonkeyPatch) -> None:
    """A sharded policy of that dtype has float32 parameters, and computes in bfloat16."""
    exact = Scorer.logprobs_and_entropies

    def rounded(self: Scorer, micro_batch: MicroBatch, way: Any, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = exact(self, micro_batch, way, **how)
        return logprobs + 0.02 * (way.packed or way.chunked), entropies

    monkeypatch.setattr(Scorer, "logprobs_and_entropies", rounded)
    wide = model("qwen3").float()
    for dtype, packs in (("bfloat16", True), ("float32", False)):
        trainer = PolicyWorker(wide, "", config(policy__dtype=dtype), 10, 1.0, Collectives(), Snapshots())
        assert trainer._scorer.layout.packed is packs


@pytest.mark.parametrize(
    ("dtype", "precision", "difference", "packs"),
    [
        (torch.bfloat16, "highest", 0.5, True),  # neighbouring values between 16 and 32 are 0.125 apart
        (torch.bfloat16, "highest", 2.0, False),
        (torch.float32, "highest", 0.05, False),
        (torch.float32, "high", 0.05, True),  # TF32
    ],
)
def test_large_logits_are_compared_as_finely_as_they_are_computed(
    dtype: torch.dtype,
    precision: str,
    difference: float,
    packs: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """On a GPU, kernels for packed rows round in another order than those for padded ones."""
    policy = model("qwen3").to(dtype)
    inputs, head = torch.arange(VOCABULARY)[None], policy.get_output_embeddings()
    with torch.no_grad():
        head.weight *= 25 / policy(input_ids=inputs, use_cache=False).logits.abs().max()
    exact = Scorer.logprobs_and_entropies

    def rounded(self: Scorer, micro_batch: MicroBatch, way: Any, **how: bool) -> tuple[torch.Tensor, torch.Tensor]:
        logprobs, entropies = exact(self, micro_batch, way, **how)
        return logprobs + difference * (way.packed or way.chunked), entropies

    monkeypatch.setattr(Scorer, "logprobs_and_entropies", rounded)
    before = torch.get_float32_matmul_precision()
    torch.set_float32_matmul_precision(precision)
    try:
        scorer = Scorer(policy, temperature=1.0, micro_batch_tokens=100)
    finally:
        torch.set_float32_matmul_precision(before)
    assert scorer.layout.packed is packs
    assert ("of packed rows" in caplog.text) is not packs


@pytest.mark.parametrize("checkpointed", [False, True])
@pytest.mark.parametrize("tied", [False, True])
def test_a_sharded_model_gives_the_same_numbers(tied: bool, checkpointed: bool) -> None:
    policy, other = (model("qwen3", tie_word_embeddings=tied) for _ in range(2))
    if checkpointed:
        checkpoint_activations(other)
    with sharded(other):
        batch, results = sequences(), []
        for each in (policy, other):
            scorer = Scorer(each, temperature=1.0, micro_batch_tokens=40, fp32_head=True)  # refused of full logits
            assert scorer.layout.packed
            micro_batch = next(iter(scorer.layout.micro_batches(batch, [0, 1, 2], [s.loss_mask for s in batch])))
            without_gradient = scorer.logprobs(micro_batch)
            assert all(isinstance(p, DTensor) for p in other.parameters())
            logprobs, loss = scores(scorer, batch)
            loss.backward()
            found = {name: p.grad for name, p in each.named_parameters() if p.grad is not None}
            results.append((without_gradient, logprobs, found))
        (a, logprobs_a, gradients_a), (b, logprobs_b, gradients_b) = results
        assert torch.equal(a, b)
        assert all(torch.equal(logprobs_a[index], logprobs_b[index]) for index in logprobs_a)
        assert gradients_a.keys() == gradients_b.keys()
        for name, gradient in gradients_b.items():
            torch.testing.assert_close(gradient.full_tensor(), gradients_a[name], atol=1e-12, rtol=1e-12, msg=name)


class TensorsOverTheVocabulary(TorchDispatchMode):
    """The shapes of all matrices that any operation makes and that have the vocabulary on one side."""

    def __init__(self) -> None:
        super().__init__()
        self.shapes: set[tuple[int, ...]] = set()

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        results = func(*args, **(kwargs or {}))
        for result in results if isinstance(results, tuple) else (results,):
            if isinstance(result, torch.Tensor) and result.dim() > 1 and VOCABULARY in result.shape:
                self.shapes.add(tuple(result.shape))
        return results


@pytest.mark.parametrize("bend", [False, True])
def test_logits_over_the_vocabulary_do_not_exist_of_a_sharded_model(
    bend: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(of_head, "_BLOCK_COLUMNS", 8)
    policy = model("qwen3", tie_word_embeddings=True)
    if bend:  # which only the model's own logits have
        own = policy.forward
        policy.forward = lambda **inputs: _bent(own(**inputs))
    with sharded(policy):
        scorer = Scorer(policy, temperature=1.0, micro_batch_tokens=100)
        with TensorsOverTheVocabulary() as seen:
            logprobs, loss = scores(scorer, sequences())
            loss.backward()
    scored = sum(len(values) for values in logprobs.values())
    weight = (VOCABULARY, SIZES["hidden_size"])
    assert weight in seen.shapes, "the head's gradient"
    assert ((scored, VOCABULARY) in seen.shapes) is bend
    assert bend or seen.shapes == {weight}


def _bent(output: Any) -> Any:
    output.logits = output.logits.sin() * 3
    return output
