"""Turns as tokens: each keeps what it added to the turn that it extends, so that nothing is stored twice.

    turn 0: context c0 + response r0
      └─ turn 1: prompt = c0 r0 c1, response r1         stored: c1, r1
          ├─ turn 2: prompt = c0 r0 c1 r1 c2            stored: c2, r2
          └─ turn 3: the same turn extended once more   stored: c3, r3

A turn extends another exactly if its prompt begins with the other's prompt and response, token for token.

Numbers are packed into bytes: a list of them takes nine times as much, and the garbage collector would look through it.
Equal contexts are one object: the responses to one prompt hold it once.
"""

from __future__ import annotations

from array import array
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_train.errors import EngineError
from skyrl_train.inference.requests import Generation

_TOKEN_BYTES = array("i").itemsize


def _packed(numbers: Sequence[int]) -> bytes:
    return array("i", numbers).tobytes()


@dataclass(slots=True, eq=False)
class Turn:
    """A recorded response. ``parent`` is the index of the turn that it extends, None for a conversation's first.

    ``context`` (the prompt's tokens behind those of the parent), ``response`` and ``versions`` are int32, ``logprobs``
    float64. ``end`` counts the tokens from the beginning of the conversation to the end of the response.
    """

    index: int
    parent: int | None
    context: bytes
    response: bytes
    logprobs: bytes
    versions: bytes
    stop_reason: str
    end: int
    children: tuple[int, ...] = ()

    @property
    def sampled_tokens(self) -> int:
        """The length of the response."""
        return len(self.response) // _TOKEN_BYTES


def token_list(packed: bytes) -> list[int]:
    """The tokens (or versions) in ``packed``."""
    return array("i", packed).tolist()


def logprob_list(packed: bytes) -> list[float]:
    """The log-probs in ``packed``."""
    return array("d", packed).tolist()


def differing_tokens(tokens: list[int], others: list[int]) -> int:
    """How many of ``tokens`` lie between the first and the last that ``others`` does not have in the same place."""
    shorter = min(len(tokens), len(others))
    begin = next((place for place in range(shorter) if tokens[place] != others[place]), shorter)
    most = shorter - begin
    end = next((place for place in range(most) if tokens[-1 - place] != others[-1 - place]), most)
    return len(tokens) - begin - end


class TurnTree:
    """All turns of a session, in the order recorded: a parent comes before its children."""

    def __init__(self) -> None:
        self.turns: list[Turn] = []
        self.held_tokens = 0  # contexts and responses, each once
        self.exported_tokens = 0  # of all branches from their conversations' beginnings
        self.branches = 0  # turns that nothing extends: the sequences that they will be
        self._roots: list[int] = []
        self._contexts: dict[bytes, bytes] = {}

    def add(self, parent: int | None, generation: Generation) -> Turn:
        """Keeps a response to a prompt that begins with the tokens of ``parent``.

        Raises:
            EngineError: the engines sampled nothing, or a token lacks its log-prob or version.
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
        )
        if extended is None:
            self._roots.append(turn.index)
            self.branches += 1
        else:
            self.branches += bool(extended.children)
            extended.children += (turn.index,)
        self.turns.append(turn)
        self.held_tokens += held + sampled
        self.exported_tokens += exported + sampled
        return turn

    def growth(self, parent: int | None, prompt: Sequence[int], responses: int) -> tuple[int, int]:
        """By how much responses to ``prompt`` would raise ``held_tokens`` and ``exported_tokens``, their own tokens aside."""
        extended = None if parent is None else self.turns[parent]
        begin = 0 if extended is None else extended.end
        held = 0 if _packed(prompt[begin:]) in self._contexts else len(prompt) - begin
        # The first to extend a turn goes on its branch.
        repeated = 0 if extended is None or extended.children else begin
        return held, responses * len(prompt) - repeated

    def path(self, index: int) -> list[Turn]:
        """The turns from a conversation's first to this one."""
        path = []
        place: int | None = index
        while place is not None:
            path.append(self.turns[place])
            place = self.turns[place].parent
        return path[::-1]

    def prompt(self, index: int) -> list[int]:
        """The tokens that a turn's response was sampled after."""
        *before, turn = self.path(index)
        parts = [part for earlier in before for part in (earlier.context, earlier.response)]
        return token_list(b"".join([*parts, turn.context]))

    def longest_prefix(self, tokens: Sequence[int]) -> Turn | None:
        """The turn whose prompt and response are the longest beginning of ``tokens``.

        Of several with equal tokens: the one extended least, of these the latest.
        """
        found = self._prefixes(_packed(tokens))
        return max(found, key=lambda turn: (turn.end, -len(turn.children), turn.index), default=None)

    def _prefixes(self, packed: bytes) -> Iterator[Turn]:
        waiting = list(self._roots)
        while waiting:
            turn = self.turns[waiting.pop()]
            end = turn.end * _TOKEN_BYTES
            middle = end - len(turn.response)
            # The response first: prompts are long, and siblings share them.
            if packed[middle:end] == turn.response and packed[middle - len(turn.context) : middle] == turn.context:
                yield turn
                waiting += turn.children
