"""Turns as tokens. Each turn stores only what it adds to the turn that it extends, so nothing is stored twice.

    turn 0: context c0 + response r0
      └─ turn 1: prompt = c0 r0 c1, response r1         stored: c1, r1
          ├─ turn 2: prompt = c0 r0 c1 r1 c2            stored: c2, r2
          └─ turn 3: the same turn extended once more   stored: c3, r3

A turn extends another if and only if its prompt begins with the other's prompt and response, token for token.

Numbers are packed into bytes. A list of them takes nine times the memory, and the garbage collector would traverse it.
Equal contexts are one object: all responses to one prompt share it.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence
from dataclasses import dataclass

from skyrl_train.errors import EngineError
from skyrl_train.inference.requests import Generation
from skyrl_train.types import GrammarSpan

_TOKEN_BYTES = array("i").itemsize


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded response.

    Args:
        parent: index of the turn that it extends; None for the first of a conversation.
        context: int32, the prompt's tokens after the parent's.
        response, versions: int32, one entry per sampled token. ``logprobs``: float64.
        end: number of tokens from the start of the conversation to the end of the response.
        grammar: of the response, whose first token is number 0; None: it had none.
    """

    index: int
    parent: int | None
    context: bytes
    response: bytes
    logprobs: bytes
    versions: bytes
    stop_reason: str
    end: int
    grammar: GrammarSpan | None = None
    children: tuple[int, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        """The number of tokens of the response."""
        return len(self.response) // _TOKEN_BYTES


def token_list(packed: bytes) -> list[int]:
    """Return packed tokens (or versions) as a list."""
    return array("i", packed).tolist()


def differing_tokens(tokens: list[int], others: list[int]) -> int:
    """Return how many of ``tokens`` remain after removing the prefix and the suffix that ``others`` shares."""
    # Both lists spell the same text, so a difference in the middle leaves prefix and suffix equal.
    shorter = min(len(tokens), len(others))
    begin = next((place for place in range(shorter) if tokens[place] != others[place]), shorter)
    most = shorter - begin
    end = next((place for place in range(most) if tokens[-1 - place] != others[-1 - place]), most)
    return len(tokens) - begin - end


class TurnTree:
    """All turns of a session in the order of recording: parents come before their children."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.held_tokens = 0  # contexts and responses, shared ones once
        self.exported_tokens = 0  # of all exported sequences, prefixes repeated
        self.branches = 0  # turns without children; each becomes one sequence
        self._roots: list[int] = []
        self._contexts: dict[bytes, bytes] = {}

    def add(self, parent: int | None, generation: Generation) -> Turn:
        """Record a response to a prompt that begins with the tokens of ``parent``.

        Raises:
            EngineError: the response has no tokens, or a token lacks its log-prob or version.
        """
        sampled = len(generation.token_ids)
        if not sampled or not sampled == len(generation.logprobs) == len(generation.versions):
            raise EngineError(
                f"a response has {sampled} tokens, {len(generation.logprobs)} log-probs and "
                f"{len(generation.versions)} versions; it cannot be trained on"
            )
        extended = None if parent is None else self.turns[parent]
        begin, end = 0 if extended is None else extended.end, len(generation.prompt_token_ids) + sampled
        held, exported = self.growth(parent, generation.prompt_token_ids, 1)
        # Only the new part of the prompt is stored, and equal parts share one object.
        context = _packed(generation.prompt_token_ids[begin:])
        turn = Turn(
            index=len(self.turns),
            parent=parent,
            context=self._contexts.setdefault(context, context),
            response=_packed(generation.token_ids),
            logprobs=array("d", generation.logprobs).tobytes(),
            versions=_packed(generation.versions),
            stop_reason=generation.stop_reason.value,
            end=end,
            grammar=generation.grammar,
        )
        if extended is None:
            self._roots.append(turn.index)
            self.branches += 1
        else:
            # The first child continues its parent's branch, each further child starts a new one.
            self.branches += bool(extended.children)
            extended.children += (turn.index,)
        self.turns.append(turn)
        self.held_tokens += held + sampled
        self.exported_tokens += exported + sampled
        return turn

    def growth(self, parent: int | None, prompt: Sequence[int], responses: int) -> tuple[int, int]:
        """Return what responses to ``prompt`` add to ``held_tokens`` and ``exported_tokens``, besides their own tokens."""
        extended = None if parent is None else self.turns[parent]
        begin = 0 if extended is None else extended.end
        held = 0 if _packed(prompt[begin:]) in self._contexts else len(prompt) - begin
        # The first extension of a turn continues its branch; further ones repeat the prefix in a new sequence.
        repeated = 0 if extended is None or extended.children else begin
        return held, responses * len(prompt) - repeated

    def path(self, index: int) -> list[Turn]:
        """Return the turns from the first of the conversation to this one."""
        path = []
        place: int | None = index
        while place is not None:
            path.append(self.turns[place])
            place = self.turns[place].parent
        return path[::-1]

    def prompt(self, index: int) -> list[int]:
        """Return the prompt tokens of a turn."""
        # Joins bytes first: one conversion for the whole conversation.
        *before, turn = self.path(index)
        parts = [part for earlier in before for part in (earlier.context, earlier.response)]
        return token_list(b"".join([*parts, turn.context]))

    def longest_prefix(self, tokens: Sequence[int]) -> Turn | None:
        """Return the turn whose prompt and response form the longest prefix of ``tokens``.

        Among several with equal tokens takes the one with the fewest extensions, of these the latest.
        """
        packed = _packed(tokens)
        found = []
        waiting = list(self._roots)
        while waiting:
            turn = self.turns[waiting.pop()]
            end = turn.end * _TOKEN_BYTES
            middle = end - len(turn.response)
            # Compares the response first: contexts are longer, and siblings share them.
            if packed[middle:end] == turn.response and packed[middle - len(turn.context) : middle] == turn.context:
                found.append(turn)
                waiting += turn.children
        return max(found, key=lambda turn: (turn.end, -len(turn.children), turn.index), default=None)
