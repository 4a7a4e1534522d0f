"""Attention within the segments of a packed row, as an attention implementation of transformers.

row of tokens  [aaaaaaa bbbbbb ccc ddd]          segments, longest first
offsets        [0       7      13  16  19]       what torch's flash attention for ragged batches needs: 16 bit on a GPU
buckets        [aaaaaaa bbbbbb·] [ccc ddd]       elsewhere: runs of similar length, each padded to its longest for attention alone

A packed forward pass gives the model ``segments`` as a keyword argument, which its layers hand on to the attention function.
``varlen_attn`` takes the row as it is. Where it does not serve (CPU, float32, dropout), each bucket becomes a batch that is
padded on the right, where causal attention needs no mask: no real token sees the tokens to its right. So no ``[L, L]`` mask
exists either way, and at most attention pays for padding. Passes without ``segments`` use "sdpa".
"""

from __future__ import annotations

import inspect
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial
from itertools import accumulate, pairwise
from typing import TYPE_CHECKING, Any

import torch
from torch.backends.cuda import SDPAParams, can_use_flash_attention
from torch.nn.attention.varlen import varlen_attn
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from skyrl_train.errors import ModelError
from skyrl_train.training.upload import upload

if TYPE_CHECKING:
    from skyrl_train.training.sequence_parallel import SequenceRanks

SEGMENTED = "segmented_sdpa"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments that change the numbers and that scaled_dot_product_attention does not have.
_UNKNOWN_TO_SDPA = ("softcap", "s_aux", "position_bias", "cache")
# The cost of one more attention call, in padded tokens of a layer's attention; from benchmarks/token_budget.py.
BUCKET_COST_TOKENS = 256
# The kernel shares heads of keys and values. Where varlen_attn has no argument for it (torch 2.11), it hands them on unasked.
_varlen_attn: Callable[..., Any] = (
    partial(varlen_attn, enable_gqa=True) if "enable_gqa" in inspect.signature(varlen_attn).parameters else varlen_attn
)


@dataclass(frozen=True, slots=True)
class Bucket:
    """Neighbouring segments of a packed row that attention treats as one batch ``[rows, width]``, padded on the right."""

    start: int  # of its tokens in the packed row
    end: int
    rows: int
    width: int
    places: torch.Tensor | None  # int64 [end - start], of its tokens in the flattened batch; None: nothing is padded


# Not frozen: torch.compile reads all fields of frozen dataclasses, and compiles again for each number of segments.
@dataclass(eq=False)
class Segments:
    """The segments of a packed row. Tokens of different segments do not attend to each other."""

    lengths: tuple[int, ...]  # in tokens, in the row's order: longest first
    offsets: torch.Tensor  # int32 [number + 1], where each begins; the last is the number of tokens
    ranks: SequenceRanks | None = None  # the ranks that have a slice of the row each; None: this rank has all of it

    @classmethod
    def of(cls, lengths: Sequence[int]) -> Segments:
        """Describe segments with ``lengths`` tokens each, in the row's order: longest first."""
        return cls(tuple(lengths), torch.tensor([0, *accumulate(lengths)], dtype=torch.int32))

    def to(self, device: torch.device) -> Segments:
        """Move the tensors to ``device``."""
        return replace(self, offsets=upload(self.offsets, device))

    @cached_property
    def buckets(self) -> tuple[Bucket, ...]:
        """The segments in runs of similar length, for attention that takes rectangular batches only."""
        buckets, start = [], 0
        for first, last in pairwise(cheapest_cuts(self.lengths, cost_tokens=BUCKET_COST_TOKENS)):
            of_bucket = self.lengths[first:last]
            end, width = start + sum(of_bucket), of_bucket[0]
            places = None
            if of_bucket[-1] < width:
                inside = torch.arange(width) < torch.tensor(of_bucket)[:, None]
                places = upload(inside.flatten().nonzero().squeeze(1), self.offsets.device)
            buckets.append(Bucket(start, end, len(of_bucket), width, places))
            start = end
        return tuple(buckets)


def cheapest_cuts(descending: Sequence[int], *, cost_tokens: int, budget: int | None = None) -> list[int]:
    """Cut lengths (longest first) into runs, each padded to its longest, at the least cost.

    The cost is the number of padded tokens plus ``cost_tokens`` per run. Dynamic programming; exact where the budget forces
    no cut.

    Args:
        budget: padded tokens that a run may have; None: any number.

    Returns:
        The boundaries of the runs, ascending, from 0 to ``len(descending)``.
    """
    total = len(descending)
    # Only ends before a shorter sequence, or forced by the budget: elsewhere the neighbours have the same length.
    boundaries = [i for i in range(1, total) if descending[i] < descending[i - 1]]
    best_cost, best_end = [0] * (total + 1), [0] * (total + 1)
    starts = range(total - 1, -1, -1) if budget is not None else [*reversed(boundaries), *([0] if total else [])]
    for start in starts:
        width = max(descending[start], 1)
        furthest = total if budget is None else min(start + budget // width, total)
        ends = boundaries[bisect_right(boundaries, start) : bisect_left(boundaries, furthest)]
        best_cost[start], best_end[start] = min(
            (width * (end - start) + cost_tokens + best_cost[end], end) for end in [*ends, furthest]
        )
    cuts = [0]
    while cuts[-1] < total:
        cuts.append(best_end[cuts[-1]])
    return cuts


def use_segments(model: PreTrainedModel) -> bool:
    """Prepare the model for packed rows unless there is a :func:`packing_obstacle`; return whether it did."""
    if packing_obstacle(model) is not None:
        return False
    model.set_attn_implementation(SEGMENTED)
    return True


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Return why the model's sequences cannot share a row, from the model's declarations; None: they can.

    A model that supports flash attention passes everything beside a mask to its attention function: windows, scales, caps.
    """
    config = model.config.get_text_config()
    if caps_attention_scores(model):
        return "caps its attention scores"
    if config._attn_implementation not in ("sdpa", SEGMENTED):
        return f"runs its attention as {config._attn_implementation!r}, not through scaled_dot_product_attention"
    if not (model._supports_attention_backend and model._supports_flash_attn):
        return "does not take attention functions from outside"
    if model._is_stateful:
        return "carries a state from token to token"
    other = set(getattr(config, "layer_types", None) or ()) - _KNOWN_LAYER_TYPES
    if other:
        return f"has layers of type {', '.join(sorted(other))}"
    return None


def caps_attention_scores(model: PreTrainedModel) -> bool:
    """Return whether the model caps its attention scores (Gemma 2), which scaled_dot_product_attention does not."""
    return getattr(model.config.get_text_config(), "attn_logit_softcapping", None) is not None


@torch.compiler.disable
def segmented_attention(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    *,
    dropout: float = 0.0,
    scaling: float | None = None,
    sliding_window: int | None = None,
    is_causal: bool | None = None,
    segments: Segments | None = None,
    **kwargs: Any,
) -> tuple[torch.Tensor, None]:
    """Causal attention of ``query`` ``[1, heads, L, D]`` within each segment; returns ``[1, L, heads, D]``.

    Where several ranks share the row, L is the length of this rank's slice.

    Raises:
        ConfigError: the ranks that share the row do not divide the heads.
        ModelError: the model asks for attention of another kind, or hides the segments from it.
    """
    if segments is None:
        if attention_mask is not None and attention_mask.shape[-1] < key.shape[2]:
            raise ModelError(f"{type(module).__name__} does not hand on the segments. Set trainer.packing=false.")
        kwargs |= {"dropout": dropout, "scaling": scaling, "is_causal": is_causal}
        plain: tuple[torch.Tensor, None] = sdpa_attention_forward(module, query, key, value, attention_mask, **kwargs)
        return plain
    causal = is_causal if is_causal is not None else getattr(module, "is_causal", True)
    unknown = [name for name in _UNKNOWN_TO_SDPA if kwargs.get(name) is not None]
    if unknown or not causal:
        what = ", ".join(unknown) or "attention to later tokens"
        raise ModelError(f"{type(module).__name__} needs {what}, which packed rows lack. Set trainer.packing=false.")
    if segments.ranks is not None:
        query, key, value = segments.ranks.all_tokens(query, key, value)
    if varlen_serves(query, key, value, dropout):
        attended = _ragged(query, key, value, segments, sliding_window, scaling)
    else:
        attended = _bucketed(query, key, value, segments, sliding_window, scaling, dropout)
    if segments.ranks is None:
        return attended[None], None
    # The row was padded to a multiple of the ranks, behind its last segment.
    filled = pad(attended, (0, 0, 0, 0, 0, query.shape[2] - sum(segments.lengths)))
    return segments.ranks.exchange(filled[None]), None


def varlen_serves(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, dropout: float) -> bool:
    """Return whether ``varlen_attn`` takes the inputs, each ``[1, heads, L, D]``: 16 bit on a GPU, from Ampere on.

    Within ``sdpa_kernel`` without flash attention, it does not.
    """
    # It has no dropout, and scaled_dot_product_attention alone pads heads to a multiple of 8.
    if dropout or query.shape[-1] % 8:
        return False
    return can_use_flash_attention(SDPAParams(query, key, value, None, dropout, True, True))


def _ragged(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    scale: float | None,
) -> torch.Tensor:
    """Return ``[tokens of all segments, heads, D]``."""
    # [1, heads, L, D] -> [tokens, heads, D]. The kernel writes nothing behind the last segment, so it must not get tokens there.
    query, key, value = (states[0].transpose(0, 1)[: sum(segments.lengths)] for states in (query, key, value))
    longest = segments.lengths[0]
    # A token sees itself and the window - 1 tokens before it; -1: all of them.
    back = -1 if window is None else window - 1
    attended: torch.Tensor = _varlen_attn(
        query, key, value, segments.offsets, segments.offsets, longest, longest, scale=scale, window_size=(back, 0)
    )
    return attended


def _bucketed(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    segments: Segments,
    window: int | None,
    scale: float | None,
    dropout: float,
) -> torch.Tensor:
    """Return ``[tokens of all segments, heads, D]``."""
    groups = query.shape[1] // key.shape[1]
    # Beside flash attention, no kernel on a GPU shares heads but the one that keeps a [width, width] matrix for each head.
    shared_heads = groups > 1 and not query.is_cuda and use_gqa_in_sdpa(None, key, value)
    if groups > 1 and not shared_heads:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # [1, heads, L, D] -> [L, heads, D]: tokens first, as buckets cut and pad them.
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = []
    for bucket in segments.buckets:
        mask = None
        if window is not None and bucket.width > window:
            # bool [width, width]: a token sees itself and the window - 1 tokens before it
            places = torch.arange(bucket.width, device=query.device)
            back = places[:, None] - places[None, :]
            mask = (back >= 0) & (back < window)
        attended = scaled_dot_product_attention(
            _batch(query, bucket),
            _batch(key, bucket),
            _batch(value, bucket),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scale,
            enable_gqa=shared_heads,
        )
        flat = attended.transpose(1, 2).flatten(0, 1)
        outputs.append(flat if bucket.places is None else flat.index_select(0, bucket.places))
    return torch.cat(outputs)


def _batch(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """Return the bucket's tokens of ``[L, heads, D]`` as ``[rows, heads, width, D]``, zeros on padding."""
    own = states[bucket.start : bucket.end]
    if bucket.places is not None:
        empty = own.new_zeros(bucket.rows * bucket.width, *own.shape[1:])
        own = empty.index_copy(0, bucket.places, own)
    return own.reshape(bucket.rows, bucket.width, *own.shape[1:]).transpose(1, 2)


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, sdpa_mask)
