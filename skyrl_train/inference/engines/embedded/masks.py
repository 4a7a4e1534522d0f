"""The masks of grammars, computed by a thread while the model computes the logits that they are for."""

from __future__ import annotations

import threading
import weakref
from collections.abc import Sequence
from queue import SimpleQueue

import torch
from llguidance import LLExecutor

from skyrl_train.inference.grammar import GrammarMatcher, advance

# The hand-over to the thread and back costs about as much as twenty masks of a small vocabulary, and a mask about as much as a
# walk over 2,000 tokens and then the vocabulary.
_TOKENS_PER_MASK, _TOKENS_PER_HAND_OVER = 2_000, 40_000

_Sampled = Sequence[tuple[GrammarMatcher, int]]


class MaskThread:
    """Takes the sampled tokens of responses, and computes their next masks. Only it may use these matchers until ``wait``."""

    def __init__(self, vocab_size: int) -> None:
        self._vocab_size = vocab_size
        # Two queues, because the futures of an executor cost more than a few masks.
        self._todo: SimpleQueue[_Sampled | None] = SimpleQueue()
        self._done: SimpleQueue[BaseException | None] = SimpleQueue()
        self._pending = 0
        self._thread: threading.Thread | None = None
        weakref.finalize(self, self._todo.put, None)

    def submit(self, sampled: _Sampled) -> None:
        """Take one token of each response. Masks that are not worth the hand-over are computed at once."""
        if len(sampled) * (_TOKENS_PER_MASK + self._vocab_size) <= _TOKENS_PER_HAND_OVER:
            advance(sampled, None)
            return
        if self._thread is None:
            threads = torch.get_num_threads()
            executor = LLExecutor(threads) if threads > 1 else None
            self._thread = threading.Thread(
                target=_compute, args=(self._todo, self._done, executor), name="grammar-masks", daemon=True
            )
            self._thread.start()
        self._pending += 1
        self._todo.put(sampled)

    def wait(self) -> None:
        """Return when the masks of all that was submitted are computed."""
        while self._pending:
            self._pending -= 1
            error = self._done.get()
            if error is not None:
                raise error

    def close(self) -> None:
        """End the thread after the masks that it has to compute."""
        self._todo.put(None)
        if self._thread is not None:
            self._thread.join()


def _compute(
    todo: SimpleQueue[_Sampled | None], done: SimpleQueue[BaseException | None], executor: LLExecutor | None
) -> None:
    while (sampled := todo.get()) is not None:
        error = None
        try:
            advance(sampled, executor)
        except BaseException as caught:  # raised in the engine's thread, which waits
            error = caught
        done.put(error)
