"""Attention within the segments of a packed row, by either way, against softmax written out."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.training import attention
from skyrl_train.training.attention import Segments, segmented_attention, varlen_serves

SIZE = 8
LENGTHS = (7, 6, 3, 1, 1)


def states(heads: int, shared_heads: int, tokens: int) -> list[torch.Tensor]:
    """Queries, keys and values ``[1, heads, tokens, SIZE]`` in float64."""
    generator = torch.Generator().manual_seed(heads * 100 + shared_heads * 10 + tokens)
    return [
        torch.randn(1, number, tokens, SIZE, generator=generator, dtype=torch.float64).requires_grad_()
        for number in (heads, shared_heads, shared_heads)
    ]


def written_out(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: tuple[int, ...],
    window: int | None,
    scale: float,
) -> torch.Tensor:
    """Attention ``[1, tokens, heads, SIZE]``, a token at a time; behind the segments it is 0."""
    shares = query.shape[1] // key.shape[1]
    rows = [torch.zeros(query.shape[1], SIZE, dtype=query.dtype) for _ in range(query.shape[2])]
    start = 0
    for length in lengths:
        for token in range(start, start + length):
            first = start if window is None else max(start, token - window + 1)
            heads = []
            for head in range(query.shape[1]):
                keys, values = (s[0, head // shares, first : token + 1] for s in (key, value))
                heads.append(torch.softmax(keys @ query[0, head, token] * scale, 0) @ values)
            rows[token] = torch.stack(heads)
        start += length
    return torch.stack(rows)[None]


def by_its_manual(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    offsets_q: torch.Tensor,
    offsets_k: torch.Tensor,
    max_q: int,
    max_k: int,
    *,
    scale: float | None,
    window_size: tuple[int, int],
) -> torch.Tensor:
    """What torch says that ``varlen_attn`` computes; like its kernel, it writes nothing behind the last segment."""
    assert offsets_q.dtype == offsets_k.dtype == torch.int32
    assert max_q == max_k == int(offsets_q.diff().max())
    left, right = window_size
    out = torch.full_like(query, torch.nan)
    shares = query.shape[1] // key.shape[1]
    for start, end in zip(offsets_q.tolist(), offsets_q.tolist()[1:], strict=False):
        places = torch.arange(end - start)
        ahead = places[None, :] - places[:, None]  # of the key to the query
        hidden = (ahead > right) | ((ahead < -left) & (left >= 0))
        keys, values = (s[start:end].repeat_interleave(shares, dim=1) for s in (key, value))
        scores = torch.einsum("qhd,khd->hqk", query[start:end], keys) * scale
        out[start:end] = torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), values)
    return out


class OnlyRank:
    """A rank that has a whole row, filled to a multiple of the ranks, to itself."""

    def all_tokens(self, *parts: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return parts

    def exchange(self, part: torch.Tensor) -> torch.Tensor:
        return part


@pytest.mark.parametrize("filling", [0, 2])
@pytest.mark.parametrize("window", [None, 1, 3])
@pytest.mark.parametrize(("heads", "shared_heads"), [(2, 2), (4, 2), (4, 1)])
@pytest.mark.parametrize("way", ["varlen", "buckets"])
def test_tokens_attend_to_their_segment_and_window(
    way: str, heads: int, shared_heads: int, window: int | None, filling: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    served: list[str] = []

    def kernel(*args: Any, **kwargs: Any) -> torch.Tensor:
        served.append("varlen")
        return by_its_manual(*args, **kwargs)

    monkeypatch.setattr(attention, "_varlen_attn", kernel)
    monkeypatch.setattr(attention, "varlen_serves", lambda *_: way == "varlen")
    segments = Segments.of(LENGTHS)
    if filling:
        segments = Segments(segments.lengths, segments.offsets, ranks=OnlyRank())  # type: ignore[arg-type]
    inputs = states(heads, shared_heads, sum(LENGTHS) + filling)
    module = torch.nn.Module()
    ours, weights = segmented_attention(module, *inputs, None, scaling=0.3, sliding_window=window, segments=segments)
    expected = written_out(*inputs, LENGTHS, window, 0.3)
    assert weights is None
    assert served == ["varlen"] * (way == "varlen")
    torch.testing.assert_close(ours, expected, atol=1e-12, rtol=0)
    # The gradient of what a token gives depends on the token, so that a gradient in a wrong place shows.
    seen = torch.arange(1, ours.numel() + 1, dtype=ours.dtype).sin().view_as(ours)
    gradients = torch.autograd.grad((ours * seen).sum(), inputs)
    for gradient, wanted in zip(gradients, torch.autograd.grad((expected * seen).sum(), inputs), strict=True):
        torch.testing.assert_close(gradient, wanted, atol=1e-12, rtol=0)


@given(st.lists(st.integers(1, 600), min_size=1, max_size=20))
def test_offsets_say_where_each_segment_begins_and_the_last_ends(lengths: list[int]) -> None:
    offsets = Segments.of(lengths).offsets
    assert offsets.dtype == torch.int32
    assert offsets[0] == 0
    assert offsets.diff().tolist() == lengths


def test_varlen_serves_where_flash_attention_does_and_it_needs_neither_dropout_nor_filled_heads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[Any] = []

    def flash_attention_serves(params: Any) -> bool:
        seen.append(params)
        return True

    query, key = torch.zeros(1, 4, 6, 64, dtype=torch.bfloat16), torch.zeros(1, 2, 6, 64, dtype=torch.bfloat16)
    narrow = torch.zeros(1, 4, 6, 20)
    assert not varlen_serves(query, key, key, 0.0)  # on the CPU
    monkeypatch.setattr(attention, "can_use_flash_attention", flash_attention_serves)
    assert varlen_serves(query, key, key, 0.0)
    assert not varlen_serves(query, key, key, 0.1)
    assert not varlen_serves(narrow, narrow, narrow, 0.0)
    (params,) = seen
    assert (params.query.shape, params.key.shape) == (query.shape, key.shape)
    assert params.is_causal and params.enable_gqa


def test_buckets_are_built_for_the_device_of_the_offsets_and_once() -> None:
    segments = Segments.of([5, 4])
    assert segments.buckets is segments.buckets
    moved = segments.to(torch.device("meta"))
    (bucket,) = moved.buckets
    assert moved.offsets.device.type == "meta"
    assert bucket.places is not None and bucket.places.device.type == "meta"
