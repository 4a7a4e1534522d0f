"""A small policy, its backend, minibatches for it, and the documented loss as a loop over tokens."""

from __future__ import annotations

import copy
import dataclasses
import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM

from skyrl_train.config.schema import BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.objective import TokenFields

VOCABULARY = 13  # ten digits and the special tokens
SMALL = BuildModelConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32)
LARGER = BuildModelConfig(hidden_size=64, num_layers=3, num_heads=4, intermediate_size=160)


@contextmanager
def one_thread() -> Iterator[None]:
    """So small a model is faster on one thread, and many times faster where other processes want the cores too."""
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(before)


def build_small_model(parent: Path) -> str:
    """Writes the policy's folder and returns it."""
    build_model_folder(SMALL, parent / "small", seed=0)
    return str(parent / "small")


def variant(parent: Path, name: str, num_heads: int, **shape_changes: object) -> str:
    """The folder of a small model of another shape."""
    path = parent / name
    build_model_folder(dataclasses.replace(SMALL, num_heads=num_heads), path, seed=0)
    shape = AutoConfig.from_pretrained(path)
    for key, changed in shape_changes.items():
        setattr(shape, key, changed)
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(shape).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The folder of a small policy, one for each file of tests."""
    return build_small_model(tmp_path_factory.mktemp("models"))


@pytest.fixture(scope="module")
def one_compute_thread() -> Iterator[None]:
    """See :func:`one_thread`."""
    with one_thread():
        yield


def config(**changes: object) -> TrainerConfig:
    """A configuration with ``a__b=value`` set at ``trainer.a.b``."""
    result = TrainerConfig()
    result.policy.optimizer_config.lr = 1e-2
    for key, value in changes.items():
        *path, name = key.split("__")
        node: object = result
        for part in path:
            node = getattr(node, part)
        assert hasattr(node, name)
        setattr(node, name, value)
    return result


def backend(folder: str, temperature: float = 1.0, **changes: object) -> LocalBackend:
    return LocalBackend(folder, config(**changes), total_steps=10, temperature=temperature, seed=0)


def sequence(generator: torch.Generator, length: int, group: int = 0) -> TrainingSequence:
    mask = torch.rand(length, generator=generator) < 0.6
    mask[0] = False
    return TrainingSequence(
        token_ids=torch.randint(0, VOCABULARY, (length,), generator=generator),
        loss_mask=mask,
        advantages=torch.randn(length, generator=generator) * mask,
        behaviour_logprobs=(-2.5 + 0.5 * torch.randn(length, generator=generator)) * mask,
        versions=torch.where(mask, 0, -1),
        group_index=group,
    )


def learned(metrics: dict[str, float]) -> dict[str, float]:
    """Return the metrics of a step that do not depend on how it was split into passes."""
    split = ("/micro_batches", "/micro_batch_fill", "/distinct_shapes")
    return {name: value for name, value in metrics.items() if not name.endswith(split)}


def minibatch(seed: int = 0, step: int = 1, lengths: tuple[int, ...] = (2, 9, 5, 17, 9, 3, 1, 12)) -> Minibatch:
    """Groups of two sequences each."""
    generator = torch.Generator().manual_seed(seed)
    return Minibatch([sequence(generator, n, i // 2) for i, n in enumerate(lengths)], (len(lengths) + 1) // 2, step)


def token_fields(
    advantages: torch.Tensor, behaviour: torch.Tensor, token_weights: torch.Tensor, **others: Any
) -> TokenFields:
    """Of one sequence, sampled by the version that the step begins with, unless ``others`` say otherwise."""
    index = torch.zeros(len(advantages), dtype=torch.int64)
    known = {"proximal_logprobs": None, "sequence_index": index, "num_sequences": 1, "lags": index} | others
    return TokenFields(advantages, behaviour, token_weights, **known)


def weights(of: LocalBackend) -> dict[str, torch.Tensor]:
    return {name: weight.clone() for name, weight in of.named_weights()}


def optimizer_state(of: LocalBackend) -> dict[str, Any]:
    return copy.deepcopy(of.optimizer.state_dict())


def same(a: dict[str, torch.Tensor], b: dict[str, torch.Tensor]) -> bool:
    return a.keys() == b.keys() and all(torch.equal(a[name], b[name]) for name in a)


def brute_force_loss(model: torch.nn.Module, batch: Minibatch, settings: TrainerConfig) -> torch.Tensor:
    """The documented loss in float64, token by token; proximal = current."""
    algorithm = settings.algorithm
    sums: list[torch.Tensor] = []
    counts: list[int] = []
    for s in batch.sequences:
        logits = model(input_ids=s.token_ids[None]).logits[0].double()
        total = torch.zeros(()).double()
        for t in s.loss_mask.nonzero().flatten().tolist():
            distribution = torch.log_softmax(logits[t - 1], dim=-1)
            current = distribution[s.token_ids[t]]
            u = (current - current.detach()).exp()
            w = min(math.exp(current.item() - s.behaviour_logprobs[t].item()), 2.0)
            advantage = s.advantages[t].double()
            clipped = u.clamp(0.8, 1.2)
            entropy = -(distribution.exp() * distribution).sum()
            total = total - w * torch.minimum(u * advantage, clipped * advantage) - algorithm.entropy_coef * entropy
        sums.append(total)
        counts.append(s.counted_tokens if s.counted_tokens is not None else sum(s.loss_mask.tolist()))
    if algorithm.loss_reduction == "token_mean":
        return torch.stack(sums).sum() / sum(counts)
    return torch.stack([total / max(count, 1) for total, count in zip(sums, counts, strict=True)]).mean()
