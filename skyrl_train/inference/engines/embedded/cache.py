"""A KV cache with one fixed row ("slot") per running request, behind the interface of transformers' own caches.

    slot      0  1  2  ... count-1 | free
    position  [ tokens of the request, one after the other, from 0 | stale states ]

Requests of different lengths share a forward pass: the window holds the slots that take part and the position of each one's
new keys; the attention mask (:mod:`runner`) hides positions beyond a request's length. Slots are as long as the longest
request is now, not as it may become: attention is bound by memory, and short rows that lie close together are read up to
twice as fast.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET_TOKENS = 32  # lengths are rounded up to multiples of this: aligned memory, few different shapes
SHRINK_FACTOR = 4  # an empty cache this many times too long is shortened


def bucket(length: int) -> int:
    """Return the smallest multiple of ``BUCKET_TOKENS`` that holds ``length`` positions."""
    return -(-length // BUCKET_TOKENS) * BUCKET_TOKENS


@dataclass(slots=True)
class CacheWindow:
    """The slots ``first .. first + count`` that the current forward pass reads and writes.

    ``positions`` (int64 ``[count]``) has the position of each slot's new token. In a prefill it is None: that fills positions
    ``0..P-1`` of its slots and attends to nothing else.
    """

    first: int = 0
    count: int = 0
    visible: int = 0  # positions that attention sees
    positions: torch.Tensor | None = None
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def move(self, first: int, count: int, visible: int, positions: torch.Tensor | None) -> None:
        """Set the window of the next forward pass."""
        self.first, self.count, self.visible, self.positions = first, count, visible, positions
        self._rows.clear()

    def rows(self, heads: int, capacity: int) -> torch.Tensor:
        """Return the rows (int64 ``[count * heads]``) of new tokens in a store seen as ``[slots * heads * capacity, d]``."""
        rows = self._rows.get(heads)  # the same for all layers with this number of heads
        if rows is None:
            assert self.positions is not None
            blocks = torch.arange(self.first * heads, (self.first + self.count) * heads, device=self.positions.device)
            rows = (blocks.view(self.count, heads) * capacity + self.positions[:, None]).view(-1)
            self._rows[heads] = rows
        return rows


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, each ``[slots, heads, capacity, head_dim]``; the first forward pass allocates them."""

    is_sliding = False

    def __init__(self, window: CacheWindow, num_slots: int, capacity: int) -> None:
        super().__init__()
        self.window = window
        self.num_slots = num_slots
        self.capacity = capacity
        self.stores: tuple[torch.Tensor, ...] = ()
        self.heads: tuple[int, ...] = ()  # of the stores

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.stores = tuple(
            states.new_zeros((self.num_slots, states.shape[1], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.heads = tuple(store.shape[1] for store in self.stores)
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Store new states ``[k, heads, T, d]``; returns the states to attend to, ``[k, heads, visible, d]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        slots = slice(window.first, window.first + window.count)
        states = (key_states, value_states)
        # A prefill begins at position 0, so its slots need no earlier states.
        if window.positions is None:
            for store, new in zip(self.stores, states, strict=True):
                store[slots, :, : new.shape[2]] = new
            return states
        for store, heads, new in zip(self.stores, self.heads, states, strict=True):
            # One index_copy_ for all slots: each has its new token at another position.
            rows = window.rows(heads, store.shape[2])
            store.view(-1, store.shape[3]).index_copy_(0, rows, new.reshape(-1, store.shape[3]))
        keys, values = (store[slots, :, : window.visible] for store in self.stores)
        return keys, values

    def resize(self, capacity: int) -> None:
        """Change the length of all slots, and keep the states that fit."""
        kept, self.capacity = min(self.capacity, capacity), capacity
        stores = []
        for store in self.stores:
            resized = store.new_zeros((*store.shape[:2], capacity, store.shape[3]))
            resized[:, :, :kept] = store[:, :, :kept]
            stores.append(resized)
        self.stores = tuple(stores)

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.visible, 0

    def get_seq_length(self) -> int:
        return 0 if self.window.positions is None else self.window.visible - 1

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache(Cache):
    """The cache of one model; ``capacity`` is the current length of a slot, in positions."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.window = CacheWindow()
        self.capacity = BUCKET_TOKENS
        self._slot_layers = [SlotLayer(self.window, num_slots, self.capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, length: int, empty: bool) -> None:
        """Make the slots at least ``length`` positions long.

        Args:
            empty: no slot is in use; slots that are far too long are shortened then.
        """
        needed = bucket(length)
        if needed > self.capacity:
            self.capacity = max(needed, 2 * self.capacity)  # doubling keeps the cost of copying linear
        elif empty and SHRINK_FACTOR * needed <= self.capacity:
            self.capacity = needed
        else:
            return
        for layer in self._slot_layers:
            layer.resize(self.capacity)

    def release(self) -> None:
        """Free the memory of all slots; the next forward pass allocates it again."""
        for layer in self._slot_layers:
            layer.stores = ()
            layer.is_initialized = False

    def window_stores(self) -> list[torch.Tensor]:
        """Return the slots of the window as views, the keys and the values of each layer; empty before the first prefill."""
        slots = slice(self.window.first, self.window.first + self.window.count)
        return [store[slots] for layer in self._slot_layers for store in layer.stores]

    def borrow(self, other: SlotCache, stores: Sequence[torch.Tensor]) -> None:
        """Use ``stores``, in the order of ``other.window_stores()``, as the slots from 0 on."""
        for layer, like, keys, values in zip(
            self._slot_layers, other._slot_layers, stores[::2], stores[1::2], strict=True
        ):
            layer.stores, layer.heads, layer.is_initialized = (keys, values), like.heads, True

    # In inference mode, because the forward pass that allocated the stores was, and slots also move outside of one.
    @torch.inference_mode()
    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Overwrite ``target`` with the first ``length`` positions of ``source``."""
        for layer in self._slot_layers:
            for store in layer.stores:
                store[target, :, :length] = store[source, :, :length]

    @torch.inference_mode()
    def clear_slot(self, slot: int) -> None:
        """Zero a slot that holds NaN, which would leak through the mask (0 * NaN) into the next request."""
        for layer in self._slot_layers:
            for store in layer.stores:
                store[slot].zero_()
