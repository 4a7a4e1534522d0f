"""A policy that stays as it is: the reference of a KL term."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from skyrl_train.models.folder import load_model
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.scorer import Scorer


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """A sequence as plain data, which any process can be sent. ``loss_mask`` and what comes back have an entry per token
    of the response."""

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_ids)

    def training_sequence(self) -> TrainingSequence:
        """The same for a training backend, with nothing to learn."""
        unknown = torch.zeros(len(self))
        return TrainingSequence(
            token_ids=torch.tensor(self.prompt_token_ids + self.response_ids, dtype=torch.int64),
            loss_mask=torch.tensor([0] * len(self.prompt_token_ids) + self.loss_mask, dtype=torch.bool),
            advantages=unknown,
            behaviour_logprobs=unknown,
            versions=torch.full((len(self),), -1),
            group_index=0,
        )


class FrozenPolicy:
    """A HF causal LM that only scores.

    Log-probs are those of the sampling temperature (logits / temperature; greedy counts as 1), as the trained policy's are.

    Args:
        micro_batch_tokens, packing, fp32_head: see :class:`skyrl_train.training.scorer.Scorer`.

    Raises:
        ConfigError: (constructor) ``packing`` or ``fp32_head`` is True, and the model does not allow it.
        ModelError: (constructor) the model folder cannot be used.
    """

    def __init__(
        self,
        model_path: str,
        *,
        dtype: str,
        device: str,
        temperature: float,
        micro_batch_tokens: int,
        packing: bool | None = None,
        fp32_head: bool = False,
    ) -> None:
        model = load_model(model_path, dtype, device)
        model.eval()
        self._scorer = Scorer(
            model,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            packing=packing,
            fp32_head=fp32_head,
        )

    def __call__(self, sequences: Sequence[TokensToScore]) -> list[list[float]]:
        """The log-prob of each token with loss mask 1 given all tokens before it; 0.0 where the loss mask is 0.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``.
        """
        results = [[0.0] * len(sequence.response_ids) for sequence in sequences]
        laid_out = [sequence.training_sequence() for sequence in sequences]
        masks = [sequence.loss_mask for sequence in laid_out]
        scored = [index for index, mask in enumerate(masks) if bool(mask.any())]
        for micro_batch in self._scorer.layout.micro_batches(laid_out, scored, masks):
            logprobs = self._scorer.logprobs(micro_batch).float().cpu()
            counts = [int(masks[index].sum()) for index in micro_batch.indices]
            for index, values in zip(micro_batch.indices, logprobs.split(counts), strict=True):
                scores = iter(values.tolist())
                results[index] = [next(scores) if sampled else 0.0 for sampled in sequences[index].loss_mask]
        return results
