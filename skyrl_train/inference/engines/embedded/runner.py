"""The model's own forward pass for a batch of requests of different lengths.

    CachedRunner      full and sliding-window attention: one token per request and step, KV in slots
    RecomputeRunner   all other architectures (recurrent states, unusual masks): the whole sequences, every step

``make_runner`` picks the first if the architecture allows it *and* a small trial agrees with the second.
"""

from __future__ import annotations

import inspect
import logging
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from skyrl_train.inference.engines.embedded.cache import SlotCache, bucket

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]
FULL, SLIDING = "full_attention", "sliding_attention"
# Largest error of the trial, relative to the spread of the logits: rounding is far below, a wrong mask far above.
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-1}
TRIAL_TOKENS = 24


class _Runner:
    """Calls the model, and computes the vocabulary's logits only for the positions that are needed.

    A runner runs slots ``first .. first + k``, given as ``tokens`` ``[k, >= max(lengths)]`` and ``lengths`` ``[k]``. Its methods
    ``prefill`` and ``decode`` return the logits of each row's last token, ``[k, V]``; the tokens before it are ``decode``'s past.

    Attributes:
        cache: the past of the slots, which moves with them; None: nothing is kept between calls.
    """

    cache: SlotCache | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model = model
        self._accepts = frozenset(inspect.signature(model.forward).parameters)

    def _last_logits(self, token_ids: torch.Tensor, lengths: Tokens, inputs: dict[str, Any]) -> torch.Tensor:
        """Return the logits ``[k, V]`` of position ``lengths - 1`` of each row of ``token_ids`` ``[k, T]``."""
        device = self._model.device
        inputs = {
            name: value.to(device) if isinstance(value, torch.Tensor) else value for name, value in inputs.items()
        }
        # Models that can keep a few positions compute the head, the largest layer of small models, for those alone.
        columns, at = np.unique(lengths - 1, return_inverse=True)
        if "logits_to_keep" in self._accepts:
            whole = len(columns) == 1 and columns[0] == token_ids.shape[1] - 1
            inputs["logits_to_keep"] = 1 if whole else torch.from_numpy(columns).to(device)
        else:
            at = lengths - 1
        logits: torch.Tensor = self._model(input_ids=token_ids.to(device), return_dict=True, **inputs).logits
        if logits.shape[1] == 1:
            return logits[:, 0]
        return logits[torch.arange(len(lengths), device=device), torch.from_numpy(at).to(device)]


class RecomputeRunner(_Runner):
    """Computes right-padded whole sequences on each call: correct for any causal LM, and slow."""

    def prefill(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        longest = int(lengths.max())
        inputs: dict[str, Any] = {"use_cache": False}
        if "attention_mask" in self._accepts:
            inputs["attention_mask"] = torch.from_numpy((np.arange(longest) < lengths[:, None]).astype(np.int64))
        return self._last_logits(torch.from_numpy(tokens[:, :longest].copy()), lengths, inputs)

    decode = prefill


class CachedRunner(_Runner):
    """Keeps keys and values of ``num_slots`` requests of up to ``capacity`` tokens.

    Raises:
        ValueError: the architecture keeps other state than the keys and values of full or sliding-window attention.
    """

    cache: SlotCache

    def __init__(self, model: PreTrainedModel, num_slots: int, capacity: int) -> None:
        super().__init__(model)
        if not {"past_key_values", "attention_mask", "position_ids"} <= self._accepts:
            raise ValueError("its forward pass takes no cache, mask or positions")
        self._windows = _attention_windows(model)
        self._device, self._dtype = model.device, model.dtype
        self.cache = SlotCache(model.config.get_text_config(decoder=True).num_hidden_layers, num_slots)
        self._positions = torch.arange(bucket(capacity), device=self._device)

    def prefill(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        longest = int(lengths.max())
        self.cache.reserve(longest, empty=first == 0)
        self.cache.window.move(first, len(lengths), longest, None)
        positions = self._positions[:longest]
        inputs = {
            "past_key_values": self.cache,
            "use_cache": True,
            # Right padding needs no extra mask: it comes after every position that a real token may see.
            "attention_mask": self._masks(positions[None, :, None], longest),
            "position_ids": positions.expand(len(lengths), longest),
        }
        return self._last_logits(torch.from_numpy(tokens[:, :longest].copy()), lengths, inputs)

    def decode(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        last, longest = lengths - 1, int(lengths.max())
        self.cache.reserve(longest, empty=False)
        # Rounded up: few different shapes, and the mask hides the positions beyond each request.
        visible = bucket(longest)
        positions = torch.from_numpy(last).to(self._device)
        self.cache.window.move(first, len(lengths), visible, positions)
        inputs = {
            "past_key_values": self.cache,
            "use_cache": True,
            "attention_mask": self._masks(positions[:, None, None], visible),
            "position_ids": positions[:, None],
        }
        newest = torch.from_numpy(tokens[np.arange(len(last)), last][:, None])
        return self._last_logits(newest, np.ones_like(lengths), inputs)

    def _masks(self, query: torch.Tensor, visible: int) -> torch.Tensor | dict[str, torch.Tensor]:
        """Return additive masks ``[k or 1, 1, T, visible]`` for queries at the positions ``query`` ``[k or 1, T, 1]``."""
        key = self._positions[:visible]
        causal = key <= query
        masks = {}
        for kind, width in self._windows.items():
            seen = causal if width is None else causal & (key > query - width)
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
            masks[kind] = mask.masked_fill_(~seen, -torch.inf)[:, None]
        return masks if len(masks) > 1 else next(iter(masks.values()))


@torch.inference_mode()
def make_runner(model: PreTrainedModel, num_slots: int, capacity: int) -> CachedRunner | RecomputeRunner:
    """Return the fast runner if it is correct for this architecture, else the slow one, with the reason in the log."""
    try:
        _check_by_trial(model, capacity)
        return CachedRunner(model, num_slots, capacity)
    except (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError) as reason:
        logger.warning(
            "%s generates without a KV cache, which is slow: %s", type(model).__name__, str(reason).splitlines()[0]
        )
        return RecomputeRunner(model)


def _check_by_trial(model: PreTrainedModel, capacity: int) -> None:
    """Compare two rows over a prefill and two decode steps with the whole sequences.

    Raises:
        ValueError: they differ by more than rounding. An unsupported architecture may raise other errors.
    """
    size = min(capacity, max([TRIAL_TOKENS, *(width + 8 for width in _attention_windows(model).values() if width)]))
    if size < 4:
        return
    config = model.config.get_text_config(decoder=True)
    tokens = np.random.default_rng(0).integers(0, config.vocab_size, size=(2, size))
    lengths = np.array([size - 2, max(1, size // 2)])
    cached, reference = CachedRunner(model, 2, size), RecomputeRunner(model)
    for step in range(3):
        run = cached.prefill if step == 0 else cached.decode
        got, expected = run(tokens, lengths, 0).float(), reference.prefill(tokens, lengths, 0).float()
        error = float((got - expected).abs().max() / expected.std().clamp_min(1e-6))
        if not error <= TRIAL_TOLERANCE[model.dtype]:
            raise ValueError(f"its logits with a cache are off by {error:.1e} of their spread")
        lengths = lengths + 1


def _attention_windows(model: PreTrainedModel) -> dict[str, int | None]:
    """Return the kinds of attention, named as in transformers' mask mapping, and the window of each (None: unlimited).

    Raises:
        ValueError: a layer is of another kind.
    """
    for layer in DynamicCache(config=model.config).layers:
        if type(layer) not in (DynamicLayer, DynamicSlidingWindowLayer):
            raise ValueError(f"it keeps the state of a {type(layer).__name__}")
    config = model.config.get_text_config(decoder=True)
    width = getattr(config, "sliding_window", None)
    kinds = dict.fromkeys(getattr(config, "layer_types", None) or [SLIDING if width else FULL])
    if unknown := [kind for kind in kinds if kind not in (FULL, SLIDING)]:
        raise ValueError(f"it has layers of type {unknown[0]}")
    return {kind: width if kind == SLIDING else None for kind in kinds}
