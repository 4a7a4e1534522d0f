"""Attention within the segments of a packed row, as an attention implementation of transformers.

A packed forward pass gives the model ``segments`` as a keyword argument, which its layers hand on to the attention
function. Each bucket of segments becomes a batch that is padded on the right, where causal attention needs no mask: no
real token sees what is to its right. So no ``[L, L]`` mask exists, the kernel of ``scaled_dot_product_attention`` is the
same as without packing, and only attention pays for padding. Passes without ``segments`` are those of "sdpa".
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import pad, scaled_dot_product_attention
from transformers import AttentionInterface, PreTrainedModel
from transformers.integrations.sdpa_attention import repeat_kv, sdpa_attention_forward, use_gqa_in_sdpa
from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

from skyrl_train.errors import ModelError
from skyrl_train.training.segments import Bucket, Segments

SEGMENTED = "segmented_sdpa"
_KNOWN_LAYER_TYPES = {"full_attention", "sliding_attention"}
# Arguments that change the numbers and that scaled_dot_product_attention does not have.
_UNKNOWN_TO_SDPA = ("softcap", "s_aux", "position_bias", "cache")


def packed_mask(device: torch.device) -> torch.Tensor:
    """What a packed pass gives as attention mask: models hand on a mask of four dimensions as it is and build none.

    It hides everything, so that attention which took it for a mask would not go unnoticed.
    """
    return torch.zeros(1, 1, 1, 1, dtype=torch.bool, device=device)


def keep_caps(model: PreTrainedModel) -> None:
    """Makes a model that caps its attention scores (Gemma 2) do so: through scaled_dot_product_attention it would not."""
    if _caps_scores(model) and model.config.get_text_config()._attn_implementation == "sdpa":
        model.set_attn_implementation("eager")


def use_segments(model: PreTrainedModel) -> bool:
    """Prepares the model for packed rows where :func:`packing_obstacle` sees none; returns whether it did."""
    if packing_obstacle(model) is not None:
        return False
    model.set_attn_implementation(SEGMENTED)
    return True


def packing_obstacle(model: PreTrainedModel) -> str | None:
    """Why the model's sequences cannot share a row, from what it declares; None: they can.

    A model that supports flash attention gives its attention function all it needs beside a mask: windows, scales, caps.
    """
    config = model.config.get_text_config()
    if _caps_scores(model):
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


def _caps_scores(model: PreTrainedModel) -> bool:
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

    Of ranks that share the row, L is the length of this one's slice.

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
    groups = query.shape[1] // key.shape[1]
    shared_heads = groups > 1 and use_gqa_in_sdpa(None, key, value)
    if groups > 1 and not shared_heads:
        key, value = repeat_kv(key, groups), repeat_kv(value, groups)
    # [1, heads, L, D] -> [L, heads, D]: tokens first, as buckets cut and pad them.
    query, key, value = (states[0].transpose(0, 1) for states in (query, key, value))
    outputs = []
    for bucket in segments.buckets:
        mask = _window(bucket.width, sliding_window, query.device)
        attended = scaled_dot_product_attention(
            _batch(query, bucket),
            _batch(key, bucket),
            _batch(value, bucket),
            attn_mask=mask,
            dropout_p=dropout,
            is_causal=mask is None,
            scale=scaling,
            enable_gqa=shared_heads,
        )
        flat = attended.transpose(1, 2).flatten(0, 1)
        outputs.append(flat if bucket.places is None else flat.index_select(0, bucket.places))
    if segments.ranks is None:
        return torch.cat(outputs)[None], None
    filled = pad(torch.cat(outputs), (0, 0, 0, 0, 0, query.shape[0] - segments.num_tokens))
    return segments.ranks.all_heads(filled[None]), None


def _batch(states: torch.Tensor, bucket: Bucket) -> torch.Tensor:
    """The bucket's tokens of ``[L, heads, D]`` as ``[rows, heads, width, D]``, zeros on padding."""
    own = states[bucket.start : bucket.end]
    if bucket.places is not None:
        empty = own.new_zeros(bucket.rows * bucket.width, *own.shape[1:])
        own = empty.index_copy(0, bucket.places, own)
    return own.reshape(bucket.rows, bucket.width, *own.shape[1:]).transpose(1, 2)


def _window(width: int, sliding_window: int | None, device: torch.device) -> torch.Tensor | None:
    """What is visible (bool ``[width, width]``) where a token looks back by less than ``sliding_window``; None: all."""
    if sliding_window is None or width <= sliding_window:
        return None
    places = torch.arange(width, device=device)
    back = places[:, None] - places[None, :]
    return (back >= 0) & (back < sliding_window)


AttentionInterface.register(SEGMENTED, segmented_attention)
AttentionMaskInterface.register(SEGMENTED, sdpa_mask)
