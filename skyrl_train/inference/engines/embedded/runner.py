"""The model's own forward pass for a batch of requests of different lengths.

    CachedRunner      full and sliding-window attention: one token per request and step, KV in slots
    RecomputeRunner   all other architectures (recurrent states, unusual masks): the whole sequences, every step

``make_runner`` picks the first if the architecture allows it *and* a small trial agrees with the second. On a CPU it then
captures the forward passes of the first as graphs, if a trial agrees with those: a step of a small model is mostly Python code
between the kernels, which a graph does not run.
"""

from __future__ import annotations

import inspect
import logging
import threading
import warnings
from collections.abc import Callable, Hashable
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch.jit import TracerWarning  # type: ignore[attr-defined]
from torch.nn.utils.stateless import _reparametrize_module
from transformers import PreTrainedModel
from transformers.cache_utils import DynamicCache, DynamicLayer, DynamicSlidingWindowLayer

from skyrl_train.inference.engines.embedded.cache import BUCKET_TOKENS, SlotCache, bucket
from skyrl_train.models.folder import quiet_transformers

logger = logging.getLogger(__name__)

Tokens = npt.NDArray[np.int64]
FULL, SLIDING = "full_attention", "sliding_attention"
# Largest error of the trial, relative to the spread of the logits: rounding is far below, a wrong mask far above.
TRIAL_TOLERANCE = {torch.float32: 1e-3, torch.bfloat16: 2e-1}
TRIAL_TOKENS = 24
# transformers' SDPA asks for the number of queries where it is given no mask, which a cached runner always gives.
HARMLESS_BRANCHES = "sdpa_attention.py"

Graphs = dict[bool, Callable[..., torch.Tensor]]  # of prefill under True and of decode under False
# The graphs of each architecture of this process: weights are among their inputs, so that engines of one model share them.
_graphs: dict[Hashable, Graphs] = {}
_one_capture = threading.Lock()


class _Runner:
    """Computes the vocabulary's logits only for the positions that are needed.

    A runner runs slots ``first .. first + k``, given as ``tokens`` ``[k, >= max(lengths)]`` and ``lengths`` ``[k]``. Its methods
    ``prefill`` and ``decode`` return the logits of each row's last token, ``[k, V]``; the tokens before it are ``decode``'s past.

    Attributes:
        cache: the past of the slots, which moves with them; None: nothing is kept between calls.
    """

    cache: SlotCache | None = None

    def __init__(self, model: PreTrainedModel) -> None:
        self._model, self._device = model, model.device
        self._accepts = frozenset(inspect.signature(model.forward).parameters)

    def _last_logits(
        self, run: Callable[..., torch.Tensor], token_ids: torch.Tensor, lengths: Tokens, *inputs: torch.Tensor
    ) -> torch.Tensor:
        """Return the logits ``[k, V]`` of position ``lengths - 1`` of each row of ``token_ids`` ``[k, T]``.

        Args:
            run: returns logits, given the token ids, the columns that are needed (int64) and ``inputs``.
        """
        device = self._device
        if token_ids.shape[1] == 1:
            return run(token_ids.to(device), torch.zeros(1, dtype=torch.int64, device=device), *inputs)[:, 0]
        columns, at = np.unique(lengths - 1, return_inverse=True)
        logits = run(token_ids.to(device), torch.from_numpy(columns).to(device), *inputs)
        if logits.shape[1] != len(columns):
            at = lengths - 1
        return logits[torch.arange(len(lengths), device=device), torch.from_numpy(at).to(device)]

    def _call(self, token_ids: torch.Tensor, columns: torch.Tensor, **inputs: Any) -> torch.Tensor:
        """Return the logits ``[k, columns, V]``, or ``[k, T, V]`` if the model computes all."""
        # Models that can keep a few positions compute the head, the largest layer of small models, for those alone.
        if "logits_to_keep" in self._accepts:
            inputs["logits_to_keep"] = columns
        logits: torch.Tensor = self._model(input_ids=token_ids, return_dict=True, **inputs).logits
        return logits


class RecomputeRunner(_Runner):
    """Computes right-padded whole sequences on each call: correct for any causal LM, and slow."""

    def prefill(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        longest = int(lengths.max())
        seen = torch.from_numpy((np.arange(longest) < lengths[:, None]).astype(np.int64)).to(self._device)

        def run(token_ids: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
            mask = {"attention_mask": seen} if "attention_mask" in self._accepts else {}
            return self._call(token_ids, columns, use_cache=False, **mask)

        return self._last_logits(run, torch.from_numpy(tokens[:, :longest].copy()), lengths)

    decode = prefill


class CachedRunner(_Runner):
    """Keeps keys and values of ``num_slots`` requests of up to ``capacity`` tokens.

    Attributes:
        graphs: the captured passes; without them the model's code is called.

    Raises:
        ValueError: the architecture keeps other state than the keys and values of full or sliding-window attention.
    """

    cache: SlotCache

    def __init__(self, model: PreTrainedModel, num_slots: int, capacity: int) -> None:
        super().__init__(model)
        if not {"past_key_values", "attention_mask", "position_ids"} <= self._accepts:
            raise ValueError("its forward pass takes no cache, mask or positions")
        self._windows = _attention_windows(model)
        self._dtype = model.dtype
        self.cache = SlotCache(model.config.get_text_config(decoder=True).num_hidden_layers, num_slots)
        self._positions = torch.arange(bucket(capacity), device=self._device)
        self.max_length = capacity
        self.graphs: Graphs = {}
        self._weights = {**dict(model.named_parameters()), **dict(model.named_buffers())}

    def prefill(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        longest = int(lengths.max())
        self.cache.reserve(longest, empty=first == 0)
        self.cache.window.move(first, len(lengths), longest, None)
        positions = self._positions[:longest]
        token_ids = torch.from_numpy(tokens[:, :longest].copy())
        # Right padding needs no extra mask: it comes after every position that a real token may see.
        masks = self._masks(positions[None, :, None], longest)
        return self._last_logits(self._run, token_ids, lengths, positions.expand(len(lengths), longest), *masks)

    def decode(self, tokens: Tokens, lengths: Tokens, first: int) -> torch.Tensor:
        last, longest = lengths - 1, int(lengths.max())
        self.cache.reserve(longest, empty=False)
        # Rounded up: few different shapes, and the mask hides the positions beyond each request.
        visible = bucket(longest)
        positions = torch.from_numpy(last).to(self._device)
        self.cache.window.move(first, len(lengths), visible, positions)
        newest = torch.from_numpy(tokens[np.arange(len(last)), last][:, None])
        masks = self._masks(positions[:, None, None], visible)
        return self._last_logits(self._run, newest, np.ones_like(lengths), positions[:, None], *masks)

    def _run(self, *inputs: torch.Tensor) -> torch.Tensor:
        graph, stores = self.graphs.get(self.cache.window.positions is None), self.cache.window_stores()
        # Without a graph, and in the prefill that allocates the cache, the model's own code runs.
        if graph is None or not stores:
            return self._forward(*inputs)
        # Not optimized for shapes: these change with every request that comes or goes.
        with torch.jit.optimized_execution(False):  # type: ignore[attr-defined]
            return graph(*inputs, *stores, *self._weights.values())

    def _forward(
        self, token_ids: torch.Tensor, columns: torch.Tensor, position_ids: torch.Tensor, *masks: torch.Tensor
    ) -> torch.Tensor:
        by_kind = dict(zip(self._windows, masks, strict=True))
        return self._call(
            token_ids,
            columns,
            past_key_values=self.cache,
            use_cache=True,
            attention_mask=by_kind if len(masks) > 1 else masks[0],
            position_ids=position_ids,
        )

    def _masks(self, query: torch.Tensor, visible: int) -> list[torch.Tensor]:
        """Return an additive mask ``[k or 1, 1, T, visible]`` for each kind of attention, for queries at the positions
        ``query`` ``[k or 1, T, 1]``."""
        key = self._positions[:visible]
        causal = key <= query
        masks = []
        for width in self._windows.values():
            seen = causal if width is None else causal & (key > query - width)
            mask = torch.zeros(seen.shape, dtype=self._dtype, device=self._device)
            masks.append(mask.masked_fill_(~seen, -torch.inf)[:, None])
        return masks

    def capture(self) -> None:
        """Set ``graphs``: both passes as graphs of tensor operations, which serve all shapes and all weights.

        Raises:
            ValueError: the model's code branches on values, so that no graph is right for all inputs.
        """
        # catch_warnings changes the whole process, in which other engines may start.
        with _one_capture:
            architecture = (
                self._model.config.to_json_string(use_diff=False),
                self._model.config._attn_implementation,
                self._dtype,
                tuple((name, type(module), _numbers(module)) for name, module in self._model.named_modules()),
            )
            if architecture not in _graphs:
                _graphs[architecture] = self._traced()
            self.graphs = _graphs[architecture]

    def _traced(self) -> Graphs:
        # One row or one token would be recorded as a special shape.
        rows, length = 2, BUCKET_TOKENS
        token_ids, column = torch.zeros((rows, length), dtype=torch.int64), self._positions[:1]
        if not self.cache.window_stores():
            self.prefill(token_ids.numpy(), np.array([length] * rows), 0)
        self.cache.window.move(0, rows, length, None)
        tensors = (*self.cache.window_stores(), *self._weights.values())
        positions = self._positions[:length]
        prefill = (
            token_ids,
            positions[:2],
            positions.expand(rows, length),
            *self._masks(positions[None, :, None], length),
        )
        last = self._positions[length - rows : length]
        decode = (token_ids[:, :1], column, last[:, None], *self._masks(last[:, None, None], length))
        graphs: Graphs = {}
        for is_prefill, inputs in ((True, prefill), (False, decode)):
            with quiet_transformers(), warnings.catch_warnings(record=True) as caught:
                warnings.simplefilter("always", TracerWarning)
                graph = torch.jit.trace(self._pass(is_prefill), (*inputs, *tensors), check_trace=False)
            for warning in caught:
                if issubclass(warning.category, TracerWarning) and not warning.filename.endswith(HARMLESS_BRANCHES):
                    raise ValueError(f"its code branches on values in {warning.filename}:{warning.lineno}")
            del graph._torchdynamo_inline  # the traced function, and with it this model
            graphs[is_prefill] = graph
        return graphs

    def _pass(self, prefill: bool) -> Callable[..., torch.Tensor]:
        """Return the forward pass as a function of tensors alone: the inputs of ``_forward``, the cache's ``window_stores``,
        and the weights."""
        model, like, names = self._model, self.cache, list(self._weights)
        kinds, runner = len(self._windows), CachedRunner(self._model, num_slots=0, capacity=0)

        def forward_pass(
            token_ids: torch.Tensor, columns: torch.Tensor, position_ids: torch.Tensor, *tensors: torch.Tensor
        ) -> torch.Tensor:
            masks, stores, weights = tensors[:kinds], tensors[kinds : -len(names)], tensors[-len(names) :]
            runner.cache.borrow(like, stores)
            new = None if prefill else position_ids[:, 0]
            runner.cache.window.move(0, token_ids.shape[0], masks[0].shape[-1], new)
            with _reparametrize_module(model, dict(zip(names, weights, strict=True)), tie_weights=True):
                return runner._forward(token_ids, columns, position_ids, *masks)

        return forward_pass


def _numbers(module: torch.nn.Module) -> tuple[tuple[str, str], ...]:
    """Return the numbers that a module keeps, such as the scale of an adapter: a graph has them as constants."""
    kept = {}
    for name, value in vars(module).items():
        inner = list(value.values()) if isinstance(value, dict) else [value]
        if inner and all(isinstance(each, int | float) for each in inner):
            kept[name] = repr(value)
    return tuple(kept.items())


# Errors of a model's code that is not made for a cache, or not for graphs.
_UNSUPPORTED = (ValueError, TypeError, KeyError, IndexError, AttributeError, RuntimeError)


@torch.inference_mode()
def make_runner(model: PreTrainedModel, num_slots: int, capacity: int) -> CachedRunner | RecomputeRunner:
    """Return the fast runner if it is correct for this architecture, else the slow one, with the reason in the log."""
    name = type(model).__name__
    try:
        windows = [width for width in _attention_windows(model).values() if width]
        trial = CachedRunner(model, 2, min(capacity, max([TRIAL_TOKENS, *(width + 8 for width in windows)])))
        _check_by_trial(model, trial, rows=2)
        runner = CachedRunner(model, num_slots, capacity)
    except _UNSUPPORTED as reason:
        logger.warning("%s generates without a KV cache, which is slow: %s", name, str(reason).splitlines()[0])
        return RecomputeRunner(model)
    if model.device.type == "cpu":
        try:
            trial.capture()
            _check_by_trial(model, trial, rows=1)
            _check_by_trial(model, trial, rows=2)
            runner.graphs = trial.graphs
        except _UNSUPPORTED as reason:
            logger.info("%s generates without a captured graph: %s", name, str(reason).splitlines()[0])
    return runner


def _check_by_trial(model: PreTrainedModel, cached: CachedRunner, rows: int) -> None:
    """Compare one or two rows over a prefill and two decode steps with the whole sequences.

    Raises:
        ValueError: they differ by more than rounding. An unsupported architecture may raise other errors.
    """
    size = cached.max_length
    if size < 4:
        return
    config = model.config.get_text_config(decoder=True)
    tokens = np.random.default_rng(len(cached.graphs) + rows).integers(0, config.vocab_size, size=(rows, size))
    lengths = np.array([size - 2, max(1, size // 2)])[-rows:]
    reference = RecomputeRunner(model)
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
