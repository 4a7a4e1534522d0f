"""A whole minibatch: two groups of responses with tools' results, a small model in float64, and our gradient of a step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from skyrl_train.config.schema import AlgorithmConfig, BuildModelConfig, TrainerConfig
from skyrl_train.models.tiny import build_model_folder
from skyrl_train.training.local_backend import LocalBackend
from skyrl_train.training.minibatch import build_minibatch
from skyrl_train.types import RolloutGroup, RolloutSequence, Sample

TEMPERATURE = 0.8
VOCABULARY = 13  # ten digits and the special tokens
SAMPLES = 3
PROMPTS, RESPONSES = (3, 3, 3, 5, 5, 5), (4, 1, 9, 7, 9, 2)  # tokens of each sequence


def build_model(parent: Path) -> Path:
    """Write a small causal LM with random weights into a folder of ``parent``, and return the folder."""
    shape = BuildModelConfig(hidden_size=16, num_layers=2, num_heads=2, intermediate_size=32)
    build_model_folder(shape, parent / "small", seed=0)
    return parent / "small"


@dataclass(frozen=True)
class Rollouts:
    """B sequences; log-probs and masks are [B, T] over the response, padded on the right with 0."""

    prompts: list[list[int]]
    responses: list[list[int]]
    mask: torch.Tensor  # bool
    behaviour: torch.Tensor
    reference: torch.Tensor
    rewards: torch.Tensor  # [B]
    groups: tuple[int, ...] = (0, 0, 0, 1, 1, 1)

    @property
    def token_rewards(self) -> torch.Tensor:
        """The reward of each sequence on the last token of its response, [B, T]."""
        result = torch.zeros(self.mask.shape, dtype=torch.float64)
        for row, response in enumerate(self.responses):
            result[row, len(response) - 1] = self.rewards[row]
        return result

    @property
    def input_ids(self) -> torch.Tensor:
        """Prompt and response, padded on the right, [B, L]."""
        rows = [torch.tensor(p + r) for p, r in zip(self.prompts, self.responses, strict=True)]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)

    @property
    def attention_mask(self) -> torch.Tensor:
        lengths = [len(p) + len(r) for p, r in zip(self.prompts, self.responses, strict=True)]
        return (torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]).long()

    def of_responses(self, outputs: torch.Tensor) -> torch.Tensor:
        """From the model's outputs at all positions ``[B, L, ...]`` to those that predict the response, ``[B, T, ...]``."""
        length = self.mask.shape[1]
        padded = torch.cat([outputs, torch.zeros_like(outputs[:, :1]).expand(-1, length, *outputs.shape[2:])], dim=1)
        return torch.stack([row[len(p) - 1 : len(p) - 1 + length] for row, p in zip(padded, self.prompts, strict=True)])

    @property
    def labels(self) -> torch.Tensor:
        """The response, padded with 0, [B, T]."""
        rows = [torch.tensor(response) for response in self.responses]
        return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def random_rollouts(seed: int = 0) -> Rollouts:
    generator = torch.Generator().manual_seed(seed)

    def ids(count: int) -> list[int]:
        return torch.randint(0, VOCABULARY, (count,), generator=generator).tolist()

    prompts = [ids(PROMPTS[0])] * SAMPLES + [ids(PROMPTS[-1])] * SAMPLES
    mask = torch.arange(max(RESPONSES)) < torch.tensor(RESPONSES)[:, None]
    mask[:, 2:4] = False  # a tool's result
    mask[torch.arange(len(RESPONSES)), torch.tensor(RESPONSES) - 1] = True
    # Float32, in which rollouts are trained.
    behaviour, reference = (
        ((-2.5 + 0.5 * torch.randn(mask.shape, generator=generator)) * mask).double() for _ in range(2)
    )
    rewards = torch.rand(len(RESPONSES), generator=generator).double()
    return Rollouts(prompts, [ids(length) for length in RESPONSES], mask, behaviour, reference, rewards)


def our_gradient(
    model: Path, rollouts: Rollouts, algorithm: AlgorithmConfig, monkeypatch: Any, temperature: float = TEMPERATURE
) -> tuple[PreTrainedModel, dict[str, torch.Tensor], float]:
    """Train one step; return the model, the gradients that reach the optimizer, and the loss.

    The model is in float64, and the minibatch is trained in several micro-batches.
    """
    groups = [
        RolloutGroup(
            number,
            str(number),
            "",
            tuple(Sample((_sequence(rollouts, row),)) for row, group in enumerate(rollouts.groups) if group == number),
            submitted_version=0,
        )
        for number in dict.fromkeys(rollouts.groups)
    ]
    config = TrainerConfig(micro_batch_tokens=24, algorithm=algorithm)
    backend = LocalBackend(str(model), config, total_steps=1, temperature=temperature, seed=0)
    backend.model.double()
    found: dict[str, torch.Tensor] = {}

    def keep(rate: float, scale: float) -> float:
        found.update({name: p.grad * scale for name, p in backend.model.named_parameters() if p.grad is not None})
        return 0.0

    monkeypatch.setattr(backend.optimizer, "step", keep)
    metrics = backend.update(build_minibatch(groups, 1, algorithm))
    return backend.model, found, metrics["loss/policy"]


def _sequence(rollouts: Rollouts, row: int) -> RolloutSequence:
    length = len(rollouts.responses[row])
    mask = rollouts.mask[row, :length]
    return RolloutSequence.of_lists(
        rollouts.prompts[row],
        rollouts.responses[row],
        mask.int().tolist(),
        rollouts.behaviour[row, :length].tolist(),
        torch.where(mask, 0, -1).tolist(),
        rollouts.token_rewards[row, :length].tolist(),
        "stop",
        reference_logprobs=rollouts.reference[row, :length].tolist(),
    )


def assert_same_gradient(
    ours: dict[str, torch.Tensor], model: PreTrainedModel, loss: torch.Tensor, tolerance: float = 1e-6
) -> None:
    """Compare with the gradient of ``loss``, of all weights together, relative to its norm."""
    weights = dict(model.named_parameters())
    theirs = dict(zip(weights, torch.autograd.grad(loss, list(weights.values())), strict=True))
    assert ours.keys() == theirs.keys()
    mine, other = (torch.cat([gradients[name].flatten() for name in weights]) for gradients in (ours, theirs))
    assert mine.norm() > 1e-3, "nothing was compared"
    assert float((mine - other).norm() / other.norm()) < tolerance


def trl_trainer(trl: SimpleNamespace, model: Path, kind: str = "GRPO", **settings: Any) -> Any:
    """TRL's trainer, ready for the calls that its training loop makes."""
    known = {"num_generations": 2, "per_device_train_batch_size": 2, "temperature": 1.0, "beta": 0.0} | settings
    arguments = getattr(trl, f"{kind}Config")(
        output_dir=str(model / "trl"),
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        steps_per_generation=1,
        report_to="none",
        disable_tqdm=True,
        **known,
    )
    trainer = getattr(trl, f"{kind}Trainer")(
        model=AutoModelForCausalLM.from_pretrained(model, dtype="float32"),
        reward_funcs=lambda completions, **kwargs: [0.0] * len(completions),
        args=arguments,
        train_dataset=Dataset.from_list([{"prompt": "1"}] * 2),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.current_gradient_accumulation_steps = 1
    trainer.model.train()
    return trainer
