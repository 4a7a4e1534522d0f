"""What trains the policy: one interface for the local backend and the distributed ones.

    minibatch of B groups ──update──────────────> metrics       named_weights ──> publication
    its groups as they arrive ──accumulate──┐                   save / load ──> checkpoint
                                            └─finish──> metrics
    sequences ──forward_logprobs──> proximal log-probs
              ──forward_values────> values (of the critic, which is trained in the same way and published to nobody)

All methods block; the trainers call them off the control loop, one at a time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from skyrl_train.algorithms.reductions import SequenceCounts

if TYPE_CHECKING:
    from skyrl_train.inference.weight_update import WeightUpdate
    from skyrl_train.publication.base import WeightTransport


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One token-exact sequence (prompt and response together); every tensor has shape ``[T]``.

    Position ``t`` of each field speaks about token ``t``. ``loss_mask`` is True on trained sampled tokens only; the
    other float fields are 0 and ``versions`` is -1 where no token was sampled.
    """

    token_ids: torch.Tensor  # int64
    loss_mask: torch.Tensor  # bool
    advantages: torch.Tensor  # float32
    behaviour_logprobs: torch.Tensor  # float32, natural log
    versions: torch.Tensor  # int64
    group_index: int  # the group within the minibatch
    proximal_logprobs: torch.Tensor | None = None  # float32; None: those of the policy as the step begins
    reference_logprobs: torch.Tensor | None = None  # float32; None: unknown, and the loss has no use for them
    counted_tokens: int | None = None  # trained tokens before some were masked for their age; None: none were
    group_tokens: int | None = None  # counted tokens of all sequences of its group; None: it is alone in its group
    group_sequences: int = 1  # of its group
    values: torch.Tensor | None = None  # float32; None: there is no critic
    returns: torch.Tensor | None = None  # float32, what the critic learns to predict: the advantages above ``values``

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def tokens_in_denominator(self) -> int:
        """What the reduction of the loss counts: a masked token leaves the numerator only (SEMANTICS 7.3)."""
        return int(self.loss_mask.sum()) if self.counted_tokens is None else self.counted_tokens

    @property
    def counts(self) -> SequenceCounts:
        """What the reduction of the loss goes by."""
        own = self.tokens_in_denominator
        return SequenceCounts(own, own if self.group_tokens is None else self.group_tokens, self.group_sequences)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """What one optimizer step trains on, or a part of it: all sequences of ``num_groups`` groups, in a fixed order."""

    sequences: Sequence[TrainingSequence]
    num_groups: int
    step: int  # t = 1, 2, ...
    kl_factor: float = 1.0  # of trainer.algorithm.kl_loss_coef in this step (trainer.algorithm.kl_ctrl)


class Training(ABC):
    """Owns a model that is trained, its optimizer and its learning-rate schedule.

    A step is trained on its whole minibatch (``update``) or part by part (``accumulate``, then ``finish``), which is the
    same thing: the loss is normalised over all sequences of the step together.
    """

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """Makes one optimizer step (micro-batches inside) and returns scalar metrics."""
        self.accumulate(minibatch)
        return self.finish(minibatch.step)

    @abstractmethod
    def accumulate(self, part: Minibatch) -> None:
        """Adds the gradient of some of a step's groups; the weights do not move.

        Parts may have any size and come in any order: each sequence of the step in exactly one of them.
        """

    @abstractmethod
    def finish(self, step: int) -> dict[str, float]:
        """Makes the optimizer step with all that was accumulated for ``step``; returns scalar metrics over all parts.

        Raises:
            ValueError: nothing was accumulated for ``step``.
        """

    @abstractmethod
    def discard(self) -> None:
        """Forgets what was accumulated, after a step that will not be finished. Nothing to forget is fine."""

    @abstractmethod
    def snapshot(self) -> dict[str, object]:
        """A copy of everything that ``load`` needs, as it is now: weights, optimizer, scheduler, RNG. Only the latest one can
        be saved.

        Copying goes on when this has returned; only what changes the state waits for it, and nothing else of a checkpoint
        is waited for. What is accumulated of an unfinished step is not part of it: its groups count as untrained.
        """

    @abstractmethod
    def save(self, snapshot: dict[str, object], folder: Path) -> None:
        """Writes a snapshot into ``folder``. Reads no live state, so training may go on."""

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restores what ``save`` wrote, and forgets what was accumulated.

        Raises:
            CheckpointError: the folder is incomplete or of another model; nothing has changed then.
        """

    def close(self) -> None:  # noqa: B027  most backends have nothing to let go of
        """Lets go of what is not in this process. Idempotent."""


class TrainingBackend(Training):
    """Trains the policy."""

    @abstractmethod
    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Log-probs of each token given the ones before it, under the current policy.

        Returns:
            One float32 tensor ``[T]`` on the CPU per sequence; entry 0 (nothing precedes it) is 0.
        """

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """As :meth:`forward_logprobs`, under the policy that the run started from, by a backend that was built to hold it
        too (``rollout.stages.reference.placement=colocated``)."""
        raise NotImplementedError(f"{type(self).__name__} holds no reference policy")

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """The policy's parameters under their HF names, in a fixed order, wherever they live; do not modify.

        Of a policy with a LoRA adapter, the adapter alone, under peft's names.
        """

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        """Copies the policy's weights to a staging area of ``transport``, in whichever process they live.

        Raises:
            PublicationError: there is no room for the copy.
        """
        return transport.gather(self.named_weights(), version)

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Writes the policy as a folder that ``transformers`` opens; a LoRA adapter merged, and by itself in ``adapter``, which
        peft opens.
        """


class CriticBackend(Training):
    """Trains the critic."""

    @abstractmethod
    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """The current critic's value of the state that each token was sampled in, which is all before it.

        Returns:
            One float32 tensor ``[T]`` on the CPU per sequence; entry 0 (nothing precedes it) is 0.
        """
