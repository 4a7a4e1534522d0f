"""The policy's forward pass: log-probs and entropies of token sequences under a causal LM.

sequences ──micro_batches──> MicroBatch (within the token budget) ──score──> log-probs, entropies of its scored tokens

A micro-batch goes through the model in one of three ways:

chunked        the model's body, then the head a chunk of tokens at a time (:mod:`skyrl_train.training.head`)
full logits    the model's own forward pass, with everything it does after its head; a hook gives the head scored tokens only
hidden states  the model's body alone, and a function of its outputs (a critic)

All go through ``model(...)``, and reach the head's weight only inside ``head(...)``: the hooks of a sharded model (FSDP2), which
gather weights around the ``forward`` of a module, see calls and outputs as in any other pass.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import Any

import torch
from torch.distributed.fsdp import FSDPModule
from torch.distributed.tensor import DTensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from skyrl_train.errors import ConfigError, ModelError
from skyrl_train.inference.grammar import Grammars
from skyrl_train.training.attention import caps_attention_scores, packing_obstacle, use_segments
from skyrl_train.training.batch import MicroBatch, RowLayout, collate_packed, collate_padded, two_short_sequences
from skyrl_train.training.head import LogitRule, token_scores
from skyrl_train.training.sequence_parallel import SequenceRanks
from skyrl_train.training.upload import upload

ENTROPY_CHUNK_TOKENS = 1024  # rows of [*, vocab] that the entropy's temporaries hold at once
TF32_STEP = 2**-10  # between two neighbouring values of a matrix product's inputs, relative to them
ROUNDING_STEPS = 4  # of the largest logit, that two correct methods may differ by: their kernels round in another order

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ScoringMethod:
    """How rows are laid out, and how log-probs are computed from them."""

    packed: bool
    chunked: bool


class Scorer:
    """Scores tokens at the sampling temperature (logits / temperature; greedy counts as 1).

    Sequences are packed into rows without padding where the model's attention can keep them apart, and logits of all tokens
    never exist at once where the operations after the model's head are known. The constructor chooses and checks the method
    against the model's own forward pass on a few tokens; the ranks of a sharded model construct it together.

    Attributes:
        layout: splits sequences into micro-batches for this model, packed if that is correct.
    """

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        temperature: float,
        micro_batch_tokens: int,
        packing: bool | None = None,
        fp32_head: bool = False,
        sequence_ranks: SequenceRanks | None = None,
        dtype: torch.dtype | None = None,
        tokenizer: Callable[[], PreTrainedTokenizerBase] | None = None,
    ) -> None:
        """
        Args:
            micro_batch_tokens: per forward pass, padding included.
            packing: several sequences in a row instead of padding; None: where the model allows it.
            fp32_head: compute the head's products in float32, also for a narrower model.
            sequence_ranks: the ranks that score every micro-batch together, a slice of its tokens each; None: this one alone.
            dtype: in which the model computes; None: the dtype of its parameters. A sharded model may have wider parameters.
            tokenizer: returns the model's tokenizer, which only responses that were sampled under a grammar need.

        Raises:
            ConfigError: ``packing`` or ``fp32_head`` is True, or there are ``sequence_ranks``, and the model does not allow it.
            ModelError: the model is no causal language model.
        """
        self._model = model
        self._fp32_head = False
        self._sequence_ranks = sequence_ranks
        self._rule = LogitRule.of(model, temperature if temperature > 0 else 1.0)
        if caps_attention_scores(model) and model.config.get_text_config()._attn_implementation == "sdpa":
            model.set_attn_implementation("eager")
        self._method = self._fastest_correct_method(packing, dtype or model.dtype)
        if not self._method.packed:
            obstacle = packing_obstacle(model) or "computes other log-probs for packed sequences than for single ones"
            reject_needed_packing(packing, sequence_ranks, f"{type(model).__name__} {obstacle}")
        if fp32_head and not self._method.chunked:
            raise ConfigError(
                f"trainer.policy.fp32_head=true: {type(model).__name__} is not known to end in a linear head with at most "
                "a scale and a cap after it. Set it to false."
            )
        self._fp32_head = fp32_head

        @cache
        def grammars() -> Grammars:
            if tokenizer is None:
                raise ConfigError(
                    "A response was sampled under a grammar, and the scorer has no tokenizer to repeat its masks."
                )
            return Grammars(tokenizer(), model.config)

        self.layout = RowLayout.of(
            model, packed=self._method.packed, micro_batch_tokens=micro_batch_tokens, grammars=grammars
        )

    # Not inference_mode: weights that a sharded model gathers here for the first time are kept for training.
    @torch.no_grad()
    def logprobs(self, micro_batch: MicroBatch) -> torch.Tensor:
        """Return log-probs ``[N]`` of the scored tokens, without gradient."""
        return self.logprobs_and_entropies(micro_batch, differentiate_entropy=False)[0]

    def logprobs_and_entropies(
        self, micro_batch: MicroBatch, method: ScoringMethod | None = None, *, differentiate_entropy: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return log-probs ``[N]`` of the scored tokens, with gradient, and the entropies ``[N]`` of their distributions.

        Args:
            method: None: the one that the constructor chose.
        """
        method = method or self._method
        ranks = self._sequence_ranks if method.packed else None
        part, own = (micro_batch, None) if ranks is None else ranks.slice_of(micro_batch)
        if method.chunked:
            scores = chunked_scores(
                self._model, part, self._rule, fp32=self._fp32_head, differentiate_entropy=differentiate_entropy
            )
        else:
            temperature = self._rule.temperature
            scores = full_scores(self._model, part, temperature, differentiate_entropy=differentiate_entropy)
        if not torch.is_grad_enabled():
            reshard(self._model)
        if ranks is None or own is None:
            return scores
        number = len(micro_batch.targets)
        return ranks.join(scores[0], own, number), ranks.join(scores[1], own, number)

    @torch.no_grad()
    def _fastest_correct_method(self, packing: bool | None, dtype: torch.dtype) -> ScoringMethod:
        """Return the first method that agrees with the model's own logits of padded sequences."""
        sequences = two_short_sequences(self._model.config.get_text_config().vocab_size)
        everything = [torch.ones(len(sequence), dtype=torch.bool) for sequence in sequences]
        plain = ScoringMethod(packed=False, chunked=False)
        padded = collate_padded(sequences, [0, 1], everything)
        with _largest_output(_head(self._model)) as largest:
            expected = self.logprobs_and_entropies(padded, plain, differentiate_entropy=False)[0]
        tolerance = _tolerance(dtype, max(largest) * abs(self._rule.scale) / self._rule.temperature)
        packable = packing is not False and use_segments(self._model)
        # Chunks need a body that ends in hidden states and a linear head on top of it.
        model, head = self._model, self._model.get_output_embeddings()
        chunkable = isinstance(head, torch.nn.Linear) and model.base_model is not model
        methods = [ScoringMethod(packed, chunked) for packed in (True, False) for chunked in (True, False)]
        for method in methods[:-1]:
            if method.packed > packable or method.chunked > chunkable:
                continue
            batch = collate_packed(sequences, [0, 1], everything) if method.packed else padded
            try:
                scores = self.logprobs_and_entropies(batch, method, differentiate_entropy=False)[0]
            except (ModelError, TypeError):  # TypeError: a layer does not take the segments
                continue
            if torch.allclose(scores, expected, atol=tolerance, rtol=0.0):
                return method
            logger.warning(
                "%s: log-probs of %s rows%s differ from its own by %.3g, more than rounding can explain (%.3g). They are "
                "computed in a way that takes more time and memory.",
                type(self._model).__name__,
                "packed" if method.packed else "padded",
                ", with logits of a chunk of tokens at a time," if method.chunked else "",
                (scores - expected).abs().max().item(),
                tolerance,
            )
        return plain


def _tolerance(dtype: torch.dtype, largest_logit: float) -> float:
    """Return by how much two correct methods may differ in a log-prob: by some steps of the dtype at the size of the logits."""
    products_in_tf32 = dtype == torch.float32 and torch.get_float32_matmul_precision() != "highest"
    step = TF32_STEP if products_in_tf32 else torch.finfo(dtype).eps
    return max(0.1 if dtype.itemsize < 4 else 2e-3, ROUNDING_STEPS * step * largest_logit)


@contextmanager
def _largest_output(module: torch.nn.Module) -> Iterator[list[float]]:
    """While open, append the largest absolute value of each output of the module."""
    found: list[float] = []
    handle = module.register_forward_hook(lambda _module, _inputs, output: found.append(output.abs().max().item()))
    try:
        yield found
    finally:
        handle.remove()


def reject_needed_packing(packing: bool | None, sequence_ranks: SequenceRanks | None, reason: str) -> None:
    """For a model that cannot pack: raise if a setting needs packed rows.

    Raises:
        ConfigError: ``packing`` is True, or there are ``sequence_ranks``; with the reason and the remedy.
    """
    if sequence_ranks is not None:
        setting, size = sequence_ranks.setting, sequence_ranks.size
        raise ConfigError(f"{setting}={size} needs packed rows: {reason}. Set {setting}=1.")
    if packing:
        raise ConfigError(f"trainer.packing=true: {reason}. Set trainer.packing=null.")


def compute_device(model: PreTrainedModel) -> torch.device:
    """Return the device on which the model computes; its parameters may wait in main memory (``trainer.fsdp.cpu_offload``)."""
    weight = next(model.parameters())
    if isinstance(weight, DTensor) and weight.device_mesh.device_type == "cuda":
        return torch.device("cuda", torch.cuda.current_device())
    return model.device


def reshard(model: PreTrainedModel) -> None:
    """Free the layers of a sharded model that a forward pass has left gathered, where no backward pass follows.

    Otherwise ``parameters()`` would return the gathered ones, which no optimizer moves.
    """
    for module in model.modules():
        if isinstance(module, FSDPModule):
            module.reshard()


def chunked_scores(
    model: PreTrainedModel, micro_batch: MicroBatch, rule: LogitRule, *, fp32: bool, differentiate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies ``[N]``; nothing of size N times the vocabulary exists at any time.

    Args:
        rule: all operations of the model after its head, and the temperature.
        fp32: see :func:`skyrl_train.training.head.token_scores`.
    """
    head, body = _head(model), model.base_model
    device = compute_device(model)
    outputs, targets = upload(micro_batch.outputs, device), upload(micro_batch.targets, device)
    allowed = None if micro_batch.allowed is None else micro_batch.allowed.to(device)

    def of_head(hidden: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        return token_scores(
            hidden,
            head,  # type: ignore[arg-type]
            targets,
            rule,
            fp32=fp32,
            differentiate_entropy=differentiate_entropy,
            allowed=allowed,
        )

    def of_model(**inputs: Any) -> tuple[torch.Tensor, torch.Tensor]:
        hidden = body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, outputs)
        scores: tuple[torch.Tensor, torch.Tensor] = head(hidden)
        return scores

    with _as_forward(head, of_head), _as_forward(model, of_model):
        scores: tuple[torch.Tensor, torch.Tensor] = model(**_inputs(micro_batch, device))
    return scores


def full_scores(
    model: PreTrainedModel, micro_batch: MicroBatch, temperature: float, *, differentiate_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return log-probs and entropies ``[N]`` from the model's own logits ``[N, V]``, float32 or wider."""
    device = compute_device(model)
    outputs = upload(micro_batch.outputs, device)

    def select(_module: torch.nn.Module, args: tuple[Any, ...]) -> tuple[Any, ...]:
        hidden, *rest = args
        return (hidden.flatten(0, 1).index_select(0, outputs), *rest)

    # The head sees only the hidden states that predict scored tokens.
    handle = _head(model).register_forward_pre_hook(select)
    try:
        logits: torch.Tensor = model(**_inputs(micro_batch, device)).logits
    finally:
        handle.remove()
    logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
    logits = logits if temperature == 1.0 else logits / temperature
    if micro_batch.allowed is not None:
        logits = logits.clone()
        micro_batch.allowed.to(logits.device).forbid_(logits, slice(None), 0)
    targets = upload(micro_batch.targets, logits.device)
    logprobs = logits.gather(1, targets[:, None]).squeeze(1) - logits.logsumexp(dim=1)
    with torch.set_grad_enabled(differentiate_entropy and torch.is_grad_enabled()):
        entropies = [
            chunk.logsumexp(dim=1) - (chunk.softmax(dim=1) * chunk).sum(dim=1)
            for chunk in logits.split(ENTROPY_CHUNK_TOKENS)
        ]
        return logprobs, torch.cat(entropies)


def scored_hidden(
    model: PreTrainedModel, micro_batch: MicroBatch, then: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """Apply ``then`` to the hidden states ``[N, d]`` from which the scored tokens were sampled.

    Operations of the model after its head (scales, caps) are left out.

    Raises:
        ModelError: the model has no body apart from its head.
    """
    body = model.base_model
    if body is model:
        raise ModelError(f"{type(model).__name__} has no body apart from its head; name another model.")
    device = compute_device(model)
    outputs = upload(micro_batch.outputs, device)

    def of_model(**inputs: Any) -> torch.Tensor:
        return then(body(**inputs).last_hidden_state.flatten(0, 1).index_select(0, outputs))

    with _as_forward(model, of_model):
        result: torch.Tensor = model(**_inputs(micro_batch, device))
    return result


def _inputs(micro_batch: MicroBatch, device: torch.device) -> dict[str, Any]:
    segments = micro_batch.segments
    if micro_batch.attention_mask is not None:
        mask = upload(micro_batch.attention_mask, device)
    else:
        # Models hand on a mask of four dimensions as it is and build none. It hides everything, so that attention which used it
        # as a mask would be noticed.
        mask = torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)
    inputs: dict[str, Any] = {
        "input_ids": upload(micro_batch.input_ids, device),
        "attention_mask": mask,
        "position_ids": upload(micro_batch.position_ids, device),
        "use_cache": False,
    }
    return inputs if segments is None else inputs | {"segments": segments.to(device)}


def _head(model: PreTrainedModel) -> torch.nn.Module:
    head: torch.nn.Module | None = model.get_output_embeddings()
    if head is None:
        raise ModelError(f"{type(model).__name__} has no output embeddings; train a causal language model.")
    return head


@contextmanager
def _as_forward(module: torch.nn.Module, forward: Callable[..., Any]) -> Iterator[None]:
    """While open, a call of the module runs ``forward`` between the module's hooks."""
    before = vars(module).get("forward")
    module.forward = forward
    try:
        yield
    finally:
        if before is None:
            del module.forward
        else:
            module.forward = before
