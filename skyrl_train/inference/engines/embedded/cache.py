"""A KV cache with one fixed row ("slot") per running request, behind the interface of transformers' own caches.

    slot      0  1  2  ... count-1 | free
    position  [ tokens of the request, one after the other, from 0 | whatever was there before ]

Requests of different lengths share a forward pass: the window says which slots take part and where each one's new keys
go; the attention mask (:mod:`runner`) hides what lies beyond a request's own length. Slots are as long as the longest
request needs, not as long as it may get: attention is bound by memory, and short rows that lie close together are read
up to twice as fast.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from transformers.cache_utils import Cache, CacheLayerMixin

BUCKET_TOKENS = 32  # lengths are rounded up to this, so that a slot's memory is aligned and shapes repeat
SHRINK_FACTOR = 4  # an empty cache this many times too long is cut


def bucket(length: int) -> int:
    """The smallest multiple of ``BUCKET_TOKENS`` that holds ``length`` positions."""
    return -(-length // BUCKET_TOKENS) * BUCKET_TOKENS


@dataclass(slots=True)
class CacheWindow:
    """Where the running forward pass reads and writes: slots ``first .. first + count``.

    ``positions`` (int64 ``[count]``) is where each slot's new token goes. In a prefill it is None: that fills positions
    ``0..P-1`` of its slots and attends to nothing else.
    """

    first: int = 0
    count: int = 0
    visible: int = 0  # positions that attention sees
    positions: torch.Tensor | None = None
    _rows: dict[int, torch.Tensor] = field(default_factory=dict)

    def move(self, first: int, count: int, visible: int, positions: torch.Tensor | None) -> None:
        """Sets the window of the next forward pass."""
        self.first, self.count, self.visible, self.positions = first, count, visible, positions
        self._rows.clear()

    def rows(self, heads: int, capacity: int) -> torch.Tensor:
        """int64 ``[count * heads]``: where new tokens go in a store seen as ``[slots * heads * capacity, d]``."""
        rows = self._rows.get(heads)
        if rows is None:
            assert self.positions is not None
            blocks = torch.arange(self.first * heads, (self.first + self.count) * heads, device=self.positions.device)
            rows = (blocks.view(self.count, heads) * capacity + self.positions[:, None]).view(-1)
            self._rows[heads] = rows
        return rows


class SlotLayer(CacheLayerMixin):
    """Keys and values of one layer, each ``[slots, heads, capacity, head_dim]``; allocated by the first pass."""

    is_sliding = False

    def __init__(self, window: CacheWindow, num_slots: int, capacity: int) -> None:
        super().__init__()
        self.window = window
        self.num_slots = num_slots
        self.capacity = capacity
        self.stores: tuple[torch.Tensor, ...] = ()

    def lazy_initialization(self, key_states: torch.Tensor, value_states: torch.Tensor) -> None:
        self.stores = tuple(
            states.new_zeros((self.num_slots, states.shape[1], self.capacity, states.shape[3]))
            for states in (key_states, value_states)
        )
        self.is_initialized = True

    def update(
        self, key_states: torch.Tensor, value_states: torch.Tensor, *args: Any, **kwargs: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Stores new states ``[k, heads, T, d]``; returns those to attend to, ``[k, heads, visible, d]``."""
        if not self.is_initialized:
            self.lazy_initialization(key_states, value_states)
        window = self.window
        slots = slice(window.first, window.first + window.count)
        states = (key_states, value_states)
        if window.positions is None:
            for store, new in zip(self.stores, states, strict=True):
                store[slots, :, : new.shape[2]] = new
            return states
        for store, new in zip(self.stores, states, strict=True):
            rows = window.rows(store.shape[1], self.capacity)
            store.view(-1, store.shape[3]).index_copy_(0, rows, new.reshape(-1, store.shape[3]))
        keys, values = (store[slots, :, : window.visible] for store in self.stores)
        return keys, values

    def resize(self, capacity: int) -> None:
        """Changes the length of all slots; what fits is kept."""
        kept, self.capacity = min(self.capacity, capacity), capacity
        stores = []
        for store in self.stores:
            resized = store.new_zeros((*store.shape[:2], capacity, store.shape[3]))
            resized[:, :, :kept] = store[:, :, :kept]
            stores.append(resized)
        self.stores = tuple(stores)

    def release(self) -> None:
        """Frees the memory; the next pass allocates it anew."""
        self.stores = ()
        self.is_initialized = False

    def copy_slot(self, source: int, target: int, length: int) -> None:
        for store in self.stores:
            store[target, :, :length] = store[source, :, :length]

    def clear_slot(self, slot: int) -> None:
        for store in self.stores:
            store[slot].zero_()

    def get_mask_sizes(self, query_length: int) -> tuple[int, int]:
        return self.window.visible, 0

    def get_seq_length(self) -> int:
        return 0 if self.window.positions is None else self.window.visible - 1

    def get_max_length(self) -> int:
        return self.capacity


class SlotCache(Cache):
    """The layers of one model; ``capacity`` is the present length of a slot, in positions."""

    def __init__(self, num_layers: int, num_slots: int) -> None:
        self.window = CacheWindow()
        self.capacity = BUCKET_TOKENS
        self._slot_layers = [SlotLayer(self.window, num_slots, self.capacity) for _ in range(num_layers)]
        super().__init__(layers=list(self._slot_layers))

    def reserve(self, length: int, empty: bool) -> None:
        """Makes the slots hold ``length`` positions, twice as many as now at least, so that copying stays cheap.

        ``empty`` says that no slot holds anything; then slots that are far too long are cut.
        """
        needed = bucket(length)
        if needed > self.capacity:
            self._resize(max(needed, 2 * self.capacity))
        elif empty and SHRINK_FACTOR * needed <= self.capacity:
            self._resize(needed)

    def _resize(self, capacity: int) -> None:
        self.capacity = capacity
        for layer in self._slot_layers:
            layer.resize(capacity)

    def release(self) -> None:
        """Frees the memory of all slots, whatever they hold."""
        for layer in self._slot_layers:
            layer.release()

    def copy_slot(self, source: int, target: int, length: int) -> None:
        """Overwrites ``target`` with the first ``length`` positions of ``source``."""
        for layer in self._slot_layers:
            layer.copy_slot(source, target, length)

    def clear_slot(self, slot: int) -> None:
        """Zeroes a slot: what is not a number would leak through the mask (0 * NaN) into the next request."""
        for layer in self._slot_layers:
            layer.clear_slot(slot)
