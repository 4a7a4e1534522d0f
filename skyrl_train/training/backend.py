"""The training backend: one interface for training on one device (local) and on many (Ray and FSDP2).

    minibatch of B groups ──update──────────────> metrics       named_weights / stage ──> weight sync
    its groups as they arrive ──accumulate──┐                   snapshot, save / load ──> checkpoint
                                            └─finish──> metrics
    sequences ──forward_logprobs──> proximal log-probs
              ──forward_values────> values (of the critic, which is trained in the same way and never sent to engines)

All methods block; the trainers call them one at a time through a :class:`TrainingThread`, so that the control loop continues.
"""

from __future__ import annotations

import asyncio
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.algorithms.reductions import SequenceCounts
from skyrl_train.errors import ConfigError, GeneratorOutputError, StalenessError
from skyrl_train.events.log import NO_EVENTS, EventLog
from skyrl_train.types import GrammarSpan

if TYPE_CHECKING:
    from skyrl_train.weight_sync.update import WeightTransport, WeightUpdate

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TrainingSequence:
    """One token-exact sequence (prompt and response together); every tensor has shape ``[T]``.

    Entry ``t`` of each field belongs to token ``t``. ``loss_mask`` is True on trained sampled tokens only; the other float
    fields are 0 and ``versions`` is -1 where no token was sampled.
    """

    token_ids: torch.Tensor  # int64
    loss_mask: torch.Tensor  # bool
    advantages: torch.Tensor  # float32
    behaviour_logprobs: torch.Tensor  # float32, natural log
    versions: torch.Tensor  # int64
    group_index: int  # of the group within the minibatch
    proximal_logprobs: torch.Tensor | None = None  # float32; None: use the policy at the beginning of the step
    reference_logprobs: torch.Tensor | None = None  # float32; None: unknown, and the loss does not need them
    counted_tokens: int | None = None  # trained tokens before some were masked for their age; None: none were
    group_tokens: int | None = None  # counted tokens of all sequences of its group; None: it is alone in its group
    group_sequences: int = 1  # of its group
    values: torch.Tensor | None = None  # float32; None: there is no critic
    returns: torch.Tensor | None = None  # float32, the critic's target: advantages + values
    grammars: tuple[GrammarSpan, ...] = ()  # spans of [T] that were sampled under a grammar
    record: int | None = None  # not None: the backend keeps its log-probs and weights under this key

    def __len__(self) -> int:
        return self.token_ids.shape[0]

    @property
    def counts(self) -> SequenceCounts:
        """The input of the reduction of the loss. A masked token counts: it leaves the numerator only."""
        # Without counted_tokens nothing was masked, so the trained tokens are all that count.
        own = int(self.loss_mask.sum()) if self.counted_tokens is None else self.counted_tokens
        return SequenceCounts(own, own if self.group_tokens is None else self.group_tokens, self.group_sequences)


@dataclass(frozen=True, slots=True)
class Minibatch:
    """The groups of one optimizer step, or some of them: all sequences of ``num_groups`` groups, in a fixed order."""

    sequences: Sequence[TrainingSequence]
    num_groups: int
    step: int  # t = 1, 2, ...
    kl_factor: float = 1.0  # of trainer.algorithm.kl_loss_coef in this step (trainer.algorithm.kl_ctrl)


class TokenRecord(NamedTuple):
    """Numbers of the trained tokens of a recorded sequence (those with loss mask True), in their order."""

    logprobs: npt.NDArray[np.float32]  # under the policy at the beginning of the step
    weights: npt.NDArray[np.float32]  # importance weights of the loss, after truncation and rejection


class Training(ABC):
    """Owns a model that is trained, its optimizer and its learning-rate schedule.

    A step trains on its whole minibatch (``update``) or part by part (``accumulate``, then ``finish``). Both give the same
    result: the loss is normalised over all sequences of the step together.
    """

    def update(self, minibatch: Minibatch) -> dict[str, float]:
        """Make one optimizer step (micro-batches inside) and return scalar metrics."""
        self.accumulate(minibatch)
        return self.finish(minibatch.step)

    @abstractmethod
    def accumulate(self, part: Minibatch) -> None:
        """Add the gradient of some of a step's groups; the weights do not move.

        Parts may have any size and come in any order. Each sequence of the step belongs to exactly one of them.
        """

    @abstractmethod
    def finish(self, step: int) -> dict[str, float]:
        """Make the optimizer step with everything accumulated for ``step``; return scalar metrics over all parts.

        Raises:
            ValueError: nothing was accumulated for ``step``.
        """

    @abstractmethod
    def discard(self) -> None:
        """Discard the accumulated gradients of a step that will not be finished. Does nothing if there are none."""

    @abstractmethod
    def snapshot(self) -> dict[str, object]:
        """Begin to copy everything that ``load`` needs: weights, optimizer, RNG. Only the latest snapshot can be saved.

        The copy continues in the background after this returns. Only calls that change the state wait for it. Accumulated
        gradients of an unfinished step are not part of it: its groups count as untrained.
        """

    @abstractmethod
    def save(self, snapshot: dict[str, object], folder: Path) -> dict[str, str]:
        """Write a snapshot into ``folder``. Reads no live state, so training may continue meanwhile.

        Returns:
            Checksums of files, by their paths below ``folder``; see :meth:`Checkpoints.write`.
        """

    @abstractmethod
    def load(self, folder: Path) -> None:
        """Restore what ``save`` wrote, and discard accumulated gradients.

        Raises:
            CheckpointError: the folder is incomplete or belongs to another model; nothing has changed.
        """

    def offload_states(self) -> None:
        """Free the devices' memory: move parameters, masters and moments to main memory. No step may have begun.

        They can be read and overwritten there (weight sync, checkpoints), but not trained or scored with.
        """
        raise NotImplementedError(
            f"{type(self).__name__} stays on its devices; set trainer.placement.colocate_all=false"
        )

    def reload_states(self) -> None:
        """Undo :meth:`offload_states`. Idempotent."""
        raise NotImplementedError(
            f"{type(self).__name__} stays on its devices; set trainer.placement.colocate_all=false"
        )

    def close(self) -> None:  # noqa: B027  most backends hold nothing outside this process
        """Release everything outside this process, and memory that is registered with CUDA. Idempotent."""


class TrainingBackend(Training):
    """Trains the policy."""

    @abstractmethod
    def forward_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Compute log-probs of each token given the tokens before it, under the current policy.

        Returns:
            One float32 tensor ``[T]`` on the CPU per sequence; entry 0 (nothing precedes it) is 0.
        """

    def reference_logprobs(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """As :meth:`forward_logprobs`, under the initial policy of the run, by a backend that also holds it
        (``rollout.stages.reference.executor=colocated``)."""
        raise NotImplementedError(f"{type(self).__name__} holds no reference policy")

    def take_records(self) -> dict[int, TokenRecord]:
        """Return the records of the trained sequences that have a key (``TrainingSequence.record``), and forget them.

        A backend may return none of them.
        """
        return {}

    @abstractmethod
    def named_weights(self) -> Iterator[tuple[str, torch.Tensor]]:
        """Yield what engines need of the policy under its HF names, in a fixed order, on any device; do not modify it.

        A policy with a LoRA adapter yields the adapter alone, under peft's names.
        """

    def stage(self, transport: WeightTransport, version: int) -> WeightUpdate:
        """Copy the policy's weights to a staging area of ``transport``, in the process that holds them.

        Raises:
            WeightSyncError: there is no room for the copy.
        """
        return transport.gather(self.named_weights(), version)

    def release_staging(self, transport: WeightTransport) -> bool:
        """Free the staging copies on devices, as :meth:`WeightTransport.release`, in the processes that hold them."""
        return transport.release()

    @abstractmethod
    def export_hf(self, folder: Path) -> None:
        """Write the policy as a folder that ``transformers`` opens.

        A LoRA adapter is merged, and also written separately to ``adapter``, which peft opens.
        """


class CriticBackend(Training):
    """Trains the critic."""

    @abstractmethod
    def forward_values(self, sequences: Sequence[TrainingSequence]) -> list[torch.Tensor]:
        """Compute the current critic's value of the state in which each token was sampled, which is everything before it.

        Returns:
            One float32 tensor ``[T]`` on the CPU per sequence; entry 0 (nothing precedes it) is 0.
        """


class TrainingThread:
    """Runs the backend's blocking calls one at a time, in the order of their arrival.

    Attributes:
        weights_in_doubt: an update began and did not succeed. Such weights must not be saved.
    """

    def __init__(self, events: EventLog = NO_EVENTS) -> None:
        self._thread = ThreadPoolExecutor(max_workers=1, thread_name_prefix="training")
        self._events = events
        self.weights_in_doubt = False

    async def run(self, function: Callable[..., T], *args: Any) -> T:
        """Run a call that does not move the policy."""

        def call() -> T:
            # In the thread: the wait for earlier calls is not part of the activity.
            with self._events.span(getattr(function, "__name__", type(function).__name__)):
                return function(*args)

        return await asyncio.get_running_loop().run_in_executor(self._thread, call)

    async def update(self, function: Callable[..., T], *args: Any) -> T:
        """Run a call that may move the policy; the weights are in doubt until it succeeds.

        Raises:
            ConfigError, GeneratorOutputError, StalenessError: found before anything moved; the weights are not in doubt.
        """
        # Set before the call, so that any error, also a cancellation, leaves the weights in doubt.
        self.weights_in_doubt = True
        try:
            result = await self.run(function, *args)
        except (ConfigError, GeneratorOutputError, StalenessError):
            self.weights_in_doubt = False
            raise
        self.weights_in_doubt = False
        return result

    async def aclose(self) -> None:
        """Wait until the last call has ended."""
        await asyncio.to_thread(self._thread.shutdown)
