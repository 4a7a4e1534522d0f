"""The distribution that tokens are drawn from, and the draw, for a whole batch at once.

    logits ──grammar──min_tokens──biases──penalties──┐
    token <──inverse CDF at one uniform── log-probs <──top-p──top-k──min-p──temperature

The order of the filters is vLLM's, so that both engines sample from the same distribution. The uniform for token ``i``
of a segment is a pure function of ``seed + i``: a sample depends on its seed and its position, never on the batch, and
a continued request (:func:`skyrl_train.runtime.seeds.segment_seed`) draws what an uninterrupted one would have.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

import numpy as np
import numpy.typing as npt
import torch

from skyrl_train.inference.interface import LogitAdjustment

SEED_MASK = (1 << 64) - 1  # seeds enter ``uniforms`` modulo 2**64
# What 8 bits of a mask add to the logits of their tokens: 0 for an allowed one, -inf for another. A logit plus this is several
# times cheaper than a choice between two values.
_BIASES = np.where(
    np.unpackbits(np.arange(256, dtype=np.uint8)[:, None], axis=1, bitorder="little"), 0, -np.inf
).astype(np.float32)


@dataclass(frozen=True, slots=True)
class AdjustedRow:
    """A row whose logits are changed.

    Attributes:
        tokens: the tokens of its prompt and response.
        response: the tokens of its response.
    """

    row: int
    adjustment: LogitAdjustment
    tokens: npt.NDArray[np.int64]
    response: npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class SamplingRows:
    """Sampling parameters of the ``n`` rows of a batch; every array has shape ``[n]``.

    Attributes:
        allowed: the rows with a grammar, and for each the tokens that may come next, as packed bits, uint8
            ``[rows, ceil(V / 8)]`` (see :mod:`skyrl_train.inference.grammar`).
        banned: (row, token) index arrays of tokens that must not be drawn: stop tokens before ``min_tokens``.
        adjusted: the rows with penalties or biases.
        top_logprobs: the number of alternatives to return per row; None if no row asks for any.
    """

    temperature: npt.NDArray[np.float32]  # 0: greedy, without filters
    top_k: npt.NDArray[np.int64]  # <= 0: off
    top_p: npt.NDArray[np.float32]
    min_p: npt.NDArray[np.float32]
    uniforms: npt.NDArray[np.float64]  # in [0, 1)
    allowed: tuple[npt.NDArray[np.int64], npt.NDArray[np.uint8]] | None = None
    banned: tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]] | None = None
    adjusted: Sequence[AdjustedRow] = ()
    top_logprobs: npt.NDArray[np.int64] | None = None


def uniforms(seeds: npt.NDArray[np.uint64], positions: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
    """Map ``seed + position`` (modulo 2**64) to ``[0, 1)`` with 53 random bits, element by element.

    SplitMix64: Steele, Lea and Flood, "Fast splittable pseudorandom number generators", 2014.
    """
    x = seeds + positions.astype(np.uint64) + np.uint64(0x9E3779B97F4A7C15)
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    x = x ^ (x >> np.uint64(31))
    return (x >> np.uint64(11)).astype(np.float64) * 2.0**-53


def process(logits: torch.Tensor, rows: SamplingRows) -> torch.Tensor:
    """Return the log-probs ``[n, V]`` (float32) of the distribution that the sampler draws from; ``logits`` is not changed.

    Greedy rows keep temperature 1 and no filter: their token is the argmax, their log-prob the policy's.
    """
    logits = logits.float()
    if rows.allowed is not None:
        guided, bits = rows.allowed
        if len(guided) < len(logits):
            all_bits = np.full((len(logits), bits.shape[1]), 255, np.uint8)
            all_bits[guided] = bits
            bits = all_bits
        logits = logits + _biases(bits, logits.device)[:, : logits.shape[-1]]
    if rows.banned is not None:
        at = tuple(torch.from_numpy(index).to(logits.device) for index in rows.banned)
        logits = logits.index_put(at, logits.new_tensor(-torch.inf))
    if rows.adjusted:
        logits = logits.clone()
        for each in rows.adjusted:
            _adjust(logits[each.row], each)
    sampled = rows.temperature > 0
    if bool((sampled & (rows.temperature != 1)).any()):
        scale = np.where(sampled, rows.temperature, np.float32(1))
        # The maximum goes first: a tiny temperature then sends the others to -inf instead of everything to inf - inf.
        logits = (logits - logits.amax(-1, keepdim=True)) / _column(scale, logits)
    if bool((sampled & (rows.min_p > 0)).any()):
        with np.errstate(divide="ignore"):
            threshold = np.log(np.where(sampled, rows.min_p, np.float32(0)))
        logits = logits.masked_fill(logits < logits.amax(-1, keepdim=True) + _column(threshold, logits), -torch.inf)
    if bool((sampled & ((rows.top_k > 0) | (rows.top_p < 1))).any()):
        logits = logits.masked_fill(~_kept_by_rank(logits, rows, sampled), -torch.inf)
    return torch.log_softmax(logits, dim=-1)


def _biases(bits: npt.NDArray[np.uint8], device: torch.device) -> torch.Tensor:
    """Return what packed bits ``[n, B]`` add to the logits, float32 ``[n, 8 * B]``."""
    if device.type == "cpu":
        return torch.from_numpy(_BIASES.take(bits, axis=0).reshape(len(bits), -1))
    # The bits are copied to the device, not the 32 times larger numbers.
    return _biases_on(device)[torch.from_numpy(bits).to(device).int()].flatten(1)


@lru_cache
def _biases_on(device: torch.device) -> torch.Tensor:
    return torch.from_numpy(_BIASES).to(device)  # once, not in each step: the copy waits for the device


def _adjust(logits: torch.Tensor, row: AdjustedRow) -> None:
    """Change the logits ``[V]`` of a row in place, by the formulas of :class:`LogitAdjustment`."""
    adjustment = row.adjustment
    if adjustment.logit_bias:
        tokens, biases = zip(*adjustment.logit_bias, strict=True)
        logits[list(tokens)] += logits.new_tensor(biases)
    if adjustment.repetition_penalty != 1:
        seen = torch.from_numpy(row.tokens).to(logits.device)
        penalty, old = adjustment.repetition_penalty, logits[seen]
        # A token that occurs twice is written twice with the same value.
        logits[seen] = torch.where(old > 0, old / penalty, old * penalty)
    if adjustment.counts:
        unique = np.unique(row.response, return_counts=True)
        used, counts = (torch.from_numpy(values).to(logits.device) for values in unique)
        logits[used] -= adjustment.frequency_penalty * counts + adjustment.presence_penalty


def sample(
    logits: torch.Tensor, rows: SamplingRows
) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.float32], dict[int, list[tuple[int, float]]]]:
    """Draw one token per row of ``logits`` ``[n, V]``.

    Returns:
        Token ids ``[n]`` and their behaviour log-probs ``[n]`` (natural log); NaN for a row with a NaN logit. For each
        row that asks for ``top_logprobs``, at most that many of its most likely tokens, of those that could be drawn.
    """
    logprobs = process(logits, rows)
    greedy = rows.temperature == 0
    if greedy.all():
        tokens = logprobs.argmax(-1)
    else:
        tokens = _inverse_cdf(logprobs, rows.uniforms)
        if greedy.any():
            tokens = torch.where(torch.from_numpy(greedy).to(tokens.device), logprobs.argmax(-1), tokens)
    chosen = logprobs.gather(-1, tokens[:, None])[:, 0]
    top = {} if rows.top_logprobs is None else _most_likely(logprobs, rows.top_logprobs)
    return tokens.cpu().numpy(), chosen.cpu().numpy(), top


def _most_likely(logprobs: torch.Tensor, counts: npt.NDArray[np.int64]) -> dict[int, list[tuple[int, float]]]:
    values, ids = logprobs.topk(min(int(counts.max()), logprobs.shape[-1]), dim=-1)
    top_values, top_ids = values.tolist(), ids.tolist()
    return {
        int(row): [(i, p) for i, p in zip(top_ids[row], top_values[row], strict=True) if p > -np.inf][: counts[row]]
        for row in np.flatnonzero(counts)
    }


def _inverse_cdf(logprobs: torch.Tensor, draws: npt.NDArray[np.float64]) -> torch.Tensor:
    """Return the first token whose cumulative probability exceeds the draw; never one of probability 0."""
    # Not exp(), which on a CPU needs five times as long where many log-probs are -inf.
    cumulative = logprobs.softmax(-1).cumsum(-1, dtype=torch.float64)
    total = cumulative[:, -1:]
    # Below the total even where the product rounds up to it, so that the draw always falls on a token with mass.
    target = torch.minimum(_column(draws, cumulative) * total, torch.nextafter(total, torch.zeros_like(total)))
    return torch.searchsorted(cumulative, target, right=True)[:, 0].clamp_(max=logprobs.shape[-1] - 1)


def _kept_by_rank(logits: torch.Tensor, rows: SamplingRows, sampled: npt.NDArray[np.bool_]) -> torch.Tensor:
    """Return ``[n, V]`` bool: True within the top-k, then within the smallest set of top-p mass; ties rank by id."""
    size = logits.shape[-1]
    ordered, order = logits.sort(dim=-1, descending=True, stable=True)
    top_k = np.where(sampled & (rows.top_k > 0), rows.top_k, size)
    keep = torch.arange(size, device=logits.device) < _column(top_k, logits, torch.int64)
    probs = ordered.masked_fill(~keep, -torch.inf).softmax(-1).double()
    before = probs.cumsum(-1) - probs
    # top_p 1 must not lose a tail to rounding, and the first token always stays.
    top_p = np.where(sampled & (rows.top_p < 1), rows.top_p, np.float32(2))
    keep &= before < _column(top_p, before)
    return torch.empty_like(keep).scatter_(-1, order, keep)


def _column(values: npt.NDArray[np.generic], like: torch.Tensor, dtype: torch.dtype | None = None) -> torch.Tensor:
    return torch.from_numpy(values).to(like.device, dtype or like.dtype)[:, None]
