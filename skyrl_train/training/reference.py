"""Policies that only score: the reference of a KL term, on one device or sharded over workers, and a replica of the policy."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from skyrl_train.config.schema import LoraConfig, TrainerConfig
from skyrl_train.errors import EngineError
from skyrl_train.inference.engines.embedded.core import load_update
from skyrl_train.models.folder import load_model, load_tokenizer
from skyrl_train.models.lora import add_adapter
from skyrl_train.training.backend import TrainingSequence
from skyrl_train.training.scorer import Scorer
from skyrl_train.types import GrammarSpan
from skyrl_train.weight_sync.pinning import wait_for_copies
from skyrl_train.weight_sync.receiver import WeightReceiver
from skyrl_train.weight_sync.update import WeightUpdate

if TYPE_CHECKING:
    from skyrl_train.workers.ray import RayPlacement


@dataclass(frozen=True, slots=True)
class TokensToScore:
    """A sequence as plain data, which can be sent to any process. ``loss_mask`` and the scores have one entry per token of
    the response."""

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    grammars: tuple[GrammarSpan, ...] = ()  # places within the response

    def __len__(self) -> int:
        return len(self.prompt_token_ids) + len(self.response_ids)

    def training_sequence(self) -> TrainingSequence:
        """Return the same sequence for a training backend, with nothing to learn."""
        nothing = torch.zeros(len(self))
        return TrainingSequence(
            token_ids=torch.tensor(self.prompt_token_ids + self.response_ids, dtype=torch.int64),
            loss_mask=torch.tensor([0] * len(self.prompt_token_ids) + self.loss_mask, dtype=torch.bool),
            advantages=nothing,
            behaviour_logprobs=nothing,
            versions=torch.full((len(self),), -1),
            group_index=0,
            grammars=tuple(span.moved(len(self.prompt_token_ids)) for span in self.grammars),
        )


class FrozenPolicy:
    """A HF causal LM that only scores, in this process.

    Log-probs are computed at the sampling temperature (logits / temperature; greedy counts as 1), as for the trained policy.

    Args:
        micro_batch_tokens, packing, fp32_head: see :class:`skyrl_train.training.scorer.Scorer`.
        lora: adds an adapter that changes nothing.

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
        lora: LoraConfig | None = None,
    ) -> None:
        model = load_model(model_path, dtype, device)
        self._model = (model if lora is None else add_adapter(model, lora)).eval()
        self._scorer = Scorer(
            self._model,
            temperature=temperature,
            micro_batch_tokens=micro_batch_tokens,
            packing=packing,
            fp32_head=fp32_head,
            tokenizer=partial(load_tokenizer, model_path),
        )

    def __call__(self, sequences: Sequence[TokensToScore]) -> list[list[float]]:
        """Return the log-prob of each token with loss mask 1 given all tokens before it; 0.0 where the loss mask is 0.

        Raises:
            ConfigError: a sequence does not fit ``micro_batch_tokens``.
            GeneratorOutputError: a response does not follow its grammar.
        """
        results = [[0.0] * len(sequence.response_ids) for sequence in sequences]
        laid_out = [sequence.training_sequence() for sequence in sequences]
        masks = [sequence.loss_mask for sequence in laid_out]
        scored = [index for index, mask in enumerate(masks) if bool(mask.any())]
        for micro_batch in self._scorer.layout.micro_batches(laid_out, scored, masks):
            logprobs = self._scorer.logprobs(micro_batch).float().cpu()
            counts = [int(masks[index].sum()) for index in micro_batch.indices]
            for index, values in zip(micro_batch.indices, logprobs.split(counts), strict=True):
                # Scored tokens only were computed: spread them over the response.
                scores = iter(values.tolist())
                results[index] = [next(scores) if sampled else 0.0 for sampled in sequences[index].loss_mask]
        return results


class PolicyReplica(FrozenPolicy):
    """A copy of the trained policy that receives its weight syncs, so that proximal log-probs need nothing of the trainer.

    Its weights are those that the engines serve, in their dtype. It scores under the version that it has loaded last.

    Args:
        lora: of the policy: then weight syncs carry the adapter.
        options: of :class:`FrozenPolicy`.
    """

    def __init__(self, model_path: str, *, lora: LoraConfig | None = None, **options: Any) -> None:
        super().__init__(model_path, lora=lora, **options)
        self._receiver = WeightReceiver(self._model.device)
        self._version = -1

    def __call__(self, request: Sequence[TokensToScore] | WeightUpdate) -> Any:
        """Score sequences, as :meth:`FrozenPolicy.__call__`; or load an update and return its version.

        Raises:
            EngineError: the update does not reach this process or is not this model's: the old weights stay. Or there was none.
        """
        if not isinstance(request, WeightUpdate):
            if self._version < 0:
                raise EngineError("The replica of the policy has no weights: it was started again after its death.")
            return super().__call__(request)
        load_update(self._model, request, self._receiver.open_update(request))
        if self._model.device.type == "cuda":
            wait_for_copies(self._model.device)  # the trainer may overwrite the staging copy after this
        self._version = request.version
        return self._version

    def close(self) -> None:
        """Forget what was received. Idempotent."""
        self._receiver.close()


class ShardedReference:
    """A :class:`FrozenPolicy` that is sharded over its own worker group, where one device cannot hold it.

    It is never trained, so no rank holds gradients or moments.

    Args:
        trainer: as for the policy; ``fsdp`` gives the number of workers.
        placements: see :class:`skyrl_train.training.distributed.worker_group.WorkerGroup`.

    Raises:
        ConfigError, ModelError, TrainingWorkerError: (constructor) as for :class:`RayBackend`.
    """

    def __init__(
        self,
        model_path: str,
        trainer: TrainerConfig,
        temperature: float,
        placements: Sequence[RayPlacement] | None = None,
    ) -> None:
        from skyrl_train.training.distributed.ray_backend import RayBackend  # a frozen policy needs no Ray

        self._backend = RayBackend(
            model_path,
            trainer,
            total_steps=1,
            temperature=temperature,
            seed=trainer.seed,
            placements=placements,
        )

    def __call__(self, sequences: Sequence[TokensToScore]) -> list[list[float]]:
        """See :meth:`FrozenPolicy.__call__`.

        Raises:
            TrainingWorkerError: a worker is gone.
        """
        laid_out = [sequence.training_sequence() for sequence in sequences]
        scored = self._backend.forward_logprobs(laid_out)
        return [
            (values * sequence.loss_mask)[len(tokens.prompt_token_ids) :].tolist()
            for tokens, sequence, values in zip(sequences, laid_out, scored, strict=True)
        ]

    def close(self) -> None:
        """End the workers. Idempotent."""
        self._backend.close()
