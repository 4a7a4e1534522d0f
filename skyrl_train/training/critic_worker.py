"""Training of the critic on one rank: a causal language model whose head over the vocabulary is replaced by one output.

part ──rows──> micro-batches ──forward──> values ──value loss──> backward ──> gradients (see GradientAccumulator)
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch.nn.utils import skip_init
from transformers import PreTrainedModel

from skyrl_train.algorithms.losses import value_loss, value_metrics, value_statistics
from skyrl_train.algorithms.tokens import TokenStatistics
from skyrl_train.config.schema import TrainerConfig
from skyrl_train.errors import GeneratorOutputError, ModelError
from skyrl_train.training.attention import use_segments
from skyrl_train.training.backend import Minibatch, TrainingSequence
from skyrl_train.training.batch import (
    MicroBatch,
    RowLayout,
    collate_packed,
    collate_padded,
    flat_tokens,
    two_short_sequences,
)
from skyrl_train.training.collectives import Collectives
from skyrl_train.training.gradient_accumulator import GradientAccumulator, LossInputs, StepPart
from skyrl_train.training.scorer import compute_device, reject_needed_packing, reshard, scored_hidden
from skyrl_train.training.sequence_parallel import SequenceRanks
from skyrl_train.training.state import Snapshots
from skyrl_train.training.upload import upload

VALUE_HEAD = "value_head.safetensors"  # in the folder of a trained critic, beside its model


@dataclass(frozen=True, slots=True)
class CriticMicroBatch(LossInputs):
    """For the N tokens of the micro-batch; tensors are ``[N]``."""

    old_values: torch.Tensor
    returns: torch.Tensor


class CriticWorker(GradientAccumulator[CriticMicroBatch]):
    """A value model and its optimizer.

    The loss is the clipped squared error of each trained token (:func:`skyrl_train.algorithms.losses.value_loss`), averaged
    over the tokens of the step; masked tokens leave the numerator and stay in the denominator, as in the policy's loss.
    """

    role = "critic"
    loss_metric = "loss/value"

    def __init__(
        self,
        model: PreTrainedModel,
        trainer_config: TrainerConfig,
        total_steps: int,
        collectives: Collectives,
        snapshots: Snapshots[Any],
    ) -> None:
        """
        Args:
            model: on its device, with a value head; its gradients are sums over all ranks once they have added up.
            trainer_config: from :func:`skyrl_train.config.derive.critic_trainer`.
            total_steps: optimizer minibatches of the whole run, over which the learning rate decays.
            snapshots: of the model and its optimizer: neither moves while one is being copied.

        Raises:
            ConfigError: the scheduler is unknown, a pattern of ``lr_multipliers`` matches nothing, or the model does not allow
                ``packing`` or ranks that share sequences.
            ModelError: the model has no body apart from its head.
        """
        super().__init__(model, trainer_config, total_steps, collectives, snapshots, "trainer.critic")
        self._sequence_ranks = sequence_ranks = collectives.sequence_ranks
        packed = trainer_config.packing is not False and can_pack(model, sequence_ranks)
        if not packed:
            name = f"{type(model).__name__}, the critic's model,"
            reason = f"{name} computes other values for packed sequences than for single ones"
            reject_needed_packing(trainer_config.packing, sequence_ranks, reason)
        self._layout = RowLayout.of(model, packed=packed, micro_batch_tokens=trainer_config.micro_batch_tokens)

    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """See :meth:`CriticBackend.forward_values`."""
        values = self._score_every_token(sequences)
        reshard(self.model)
        return values

    def _loss(self, micro_batch: CriticMicroBatch) -> tuple[torch.Tensor, TokenStatistics]:
        values = self._scores(micro_batch.micro_batch)
        old_values, returns = micro_batch.old_values, micro_batch.returns
        losses, clipped = value_loss(values, old_values, returns, self._config.algorithm.value_clip)
        # A sum: the step's scale, 1 / trained tokens, is known once all parts are counted.
        return losses.sum(), value_statistics(losses, clipped, old_values, returns)

    def _step_metrics(
        self, statistics: TokenStatistics, denominators: Sequence[float]
    ) -> tuple[dict[str, float], float]:
        scale = 1.0 / max(math.fsum(denominators), 1.0)
        return value_metrics(statistics, scale), scale

    def _scores(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return float32 (or wider) ``[N]``: the value of the state in which each scored token was sampled, which is
        everything before it."""
        head = self.model.get_output_embeddings()
        return _apply_to_hidden(self.model, micro_batch, head, self._sequence_ranks).squeeze(1)

    def _part(self, minibatch: Minibatch) -> StepPart[CriticMicroBatch]:
        self._check(minibatch.sequences)
        trained = [s for s in minibatch.sequences if bool(s.loss_mask.any())]
        values = [s.values for s in trained if s.values is not None and s.values.shape == s.token_ids.shape]
        returns = [s.returns for s in trained if s.returns is not None and s.returns.shape == s.token_ids.shape]
        if len(values) < len(trained) or len(returns) < len(trained):
            raise GeneratorOutputError(
                f"of {len(trained)} training sequences {len(values)} have a value and {len(returns)} a return for each token, "
                "which the critic learns from: the stage that adds values did not see their groups."
            )
        masks, device = [s.loss_mask for s in trained], compute_device(self.model)
        micro_batches = [
            CriticMicroBatch(
                micro_batch,
                upload(flat_tokens(values, micro_batch), device),
                upload(flat_tokens(returns, micro_batch), device),
            )
            for micro_batch in self._layout.micro_batches(trained, range(len(trained)), masks)
        ]
        return StepPart(minibatch.step, micro_batches, [float(s.counts.tokens) for s in minibatch.sequences])

    def _check(self, sequences: Sequence[TrainingSequence]) -> None:
        for index, s in enumerate(sequences):
            where = f"training sequence {index} (group {s.group_index})"
            if len(s) == 0 or s.loss_mask.shape != s.token_ids.shape:
                raise GeneratorOutputError(f"{where} is empty or ragged: every field needs one entry per token.")
            if bool(s.loss_mask[0]):
                raise GeneratorOutputError(
                    f"{where} trains its first token, which nothing precedes; prompts need a token."
                )
        largest = max((int(s.token_ids.max()) for s in sequences), default=0)
        if largest >= self._vocab_size:
            raise GeneratorOutputError(
                f"token id {largest} is outside the critic's vocabulary of {self._vocab_size}. Point "
                "trainer.critic.model.path at a model of the policy's vocabulary."
            )


def put_value_head(model: PreTrainedModel, model_path: str | None = None) -> PreTrainedModel:
    """Replace the model's head by a linear layer with one output, on the same device and in the same dtype.

    The new head is the one in ``model_path``, the folder of a trained critic, or else 0: then all values are 0 until the first
    step, so the first advantages equal the returns.

    Raises:
        ModelError: the model does not end in a linear head over its vocabulary.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        raise ModelError(
            f"{type(model).__name__} does not end in a linear head, so it cannot predict values. Point "
            "trainer.critic.model.path at another model of the policy's vocabulary."
        )
    # Without the layer's own initialisation, which draws from torch's global generator.
    value_head = skip_init(torch.nn.Linear, head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    torch.nn.init.zeros_(value_head.weight)
    torch.nn.init.zeros_(value_head.bias)
    if model_path is not None and (file := Path(model_path, VALUE_HEAD)).is_file():
        with torch.no_grad():
            for name, weight in load_file(file).items():
                value_head.get_parameter(name).copy_(weight)
    # With tied weights, transformers would put the embedding matrix in the head's place again.
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    model.set_output_embeddings(value_head)
    return model


@torch.no_grad()
def can_pack(model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> bool:
    """Return whether several sequences may share a row: what the model declares, checked on a few tokens.

    Prepares the model for packed rows where it returns True. The ranks of a sharded model call it together.

    Args:
        sequence_ranks: the ranks that compute a packed micro-batch together, a slice of its tokens each; None: this one alone.

    Raises:
        ConfigError: the ranks do not divide the model's heads.
    """
    if not use_segments(model):
        return False
    sequences = two_short_sequences(model.config.get_text_config().vocab_size)
    everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    # Hidden states instead of values: a new value head is 0, so all values would agree.
    alone = scored_hidden(model, collate_padded(sequences, [0, 1], everything), torch.clone)
    try:
        packed = _apply_to_hidden(model, collate_packed(sequences, [0, 1], everything), torch.clone, sequence_ranks)
    except (ModelError, TypeError):
        return False
    finally:
        reshard(model)
    tolerance = 0.1 if alone.dtype.itemsize < 4 else 2e-3  # parameters of a sharded model may be wider
    return torch.allclose(packed, alone.to(packed.dtype), atol=tolerance, rtol=tolerance)


def _apply_to_hidden(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    then: Callable[[torch.Tensor], torch.Tensor],
    sequence_ranks: SequenceRanks | None,
) -> torch.Tensor:
    """:func:`scored_hidden` in float32 or wider, of all tokens of the micro-batch also where ``sequence_ranks`` share it."""
    part, own = (micro_batch, None) if sequence_ranks is None else sequence_ranks.slice_of(micro_batch)
    scored = scored_hidden(model, part, then)
    scored = scored.to(torch.promote_types(scored.dtype, torch.float32))
    if sequence_ranks is None or own is None:
        return scored
    return sequence_ranks.join(scored, own, len(micro_batch.targets))
