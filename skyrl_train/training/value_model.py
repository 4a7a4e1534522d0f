"""A causal language model as a critic: its body, with a head of one output in the place of the one over the vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from transformers import PreTrainedModel

from skyrl_train.errors import ModelError
from skyrl_train.training.attention import use_segments
from skyrl_train.training.batch import MicroBatch, collate_packed, collate_padded
from skyrl_train.training.layout import two_short_sequences
from skyrl_train.training.logprobs import scored_hidden, share_weights_again
from skyrl_train.training.sequence_parallel import SequenceRanks


def put_value_head(model: PreTrainedModel) -> PreTrainedModel:
    """Gives the model a linear head with one output, on the device and in the dtype of the one that it takes the place of.

    It is 0: every value is, until the first step has been made, so that the first advantages are the returns themselves.

    Raises:
        ModelError: the model does not end in a linear head over its vocabulary.
    """
    head = model.get_output_embeddings()
    if not isinstance(head, torch.nn.Linear) or model.base_model is model:
        raise ModelError(
            f"{type(model).__name__} does not end in a linear head, so it cannot predict values. Point "
            "trainer.critic.model.path at another model of the policy's vocabulary."
        )
    value_head = torch.nn.Linear(head.in_features, 1, device=head.weight.device, dtype=head.weight.dtype)
    torch.nn.init.zeros_(value_head.weight)
    torch.nn.init.zeros_(value_head.bias)
    model.config.tie_word_embeddings = False
    model.config.get_text_config().tie_word_embeddings = False
    model.set_output_embeddings(value_head)
    return model


def token_values(
    model: PreTrainedModel, micro_batch: MicroBatch, sequence_ranks: SequenceRanks | None = None
) -> torch.Tensor:
    """Float32 (or wider) ``[N]``: the value of the state that each scored token was sampled in, which is all before it.

    Args:
        sequence_ranks: those that compute a packed micro-batch together, a slice of its tokens each; None: this one alone.
    """
    return _of_hidden(model, micro_batch, model.get_output_embeddings(), sequence_ranks).squeeze(1)


@torch.no_grad()
def can_pack(model: PreTrainedModel, sequence_ranks: SequenceRanks | None = None) -> bool:
    """Whether several sequences may share a row: what the model declares, checked on a few tokens.

    Prepares the model for packed rows where it returns True; a sharded model's ranks call it together.

    Args:
        sequence_ranks: see :func:`token_values`.

    Raises:
        ConfigError: the ranks do not divide the model's heads.
    """
    if not use_segments(model):
        return False
    sequences = two_short_sequences(model.config.get_text_config().vocab_size)
    everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
    alone = scored_hidden(model, collate_padded(sequences, [0, 1], everything), torch.clone)
    try:
        packed = _of_hidden(model, collate_packed(sequences, [0, 1], everything), torch.clone, sequence_ranks)
    except (ModelError, TypeError):
        return False
    finally:
        share_weights_again(model)
    tolerance = 0.1 if alone.dtype.itemsize < 4 else 2e-3  # of a sharded model, parameters may be wider
    return torch.allclose(packed, alone.to(packed.dtype), atol=tolerance, rtol=tolerance)


def _of_hidden(
    model: PreTrainedModel,
    micro_batch: MicroBatch,
    then: Callable[[torch.Tensor], torch.Tensor],
    sequence_ranks: SequenceRanks | None,
) -> torch.Tensor:
    """:func:`scored_hidden`, in float32 or wider; of all tokens of a micro-batch also where ``sequence_ranks`` share it."""
    part, own = (micro_batch, None) if sequence_ranks is None else sequence_ranks.slice_of(micro_batch)
    scored = scored_hidden(model, part, then)
    scored = scored.to(torch.promote_types(scored.dtype, torch.float32))
    if sequence_ranks is None or own is None:
        return scored
    return sequence_ranks.join(scored, own, len(micro_batch.targets))
