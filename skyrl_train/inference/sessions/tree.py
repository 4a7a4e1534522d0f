"""A session's conversations as one tree of messages: where does a request continue what was sampled?

    tools, template arguments
      └─ system ── user ─┬─ *assistant (turn 0) ── tool ── *assistant (turn 1)      * sampled
                         ├─ *assistant (turn 2)             another sample of the same prompt
                         └─ assistant ── user ── *assistant (turn 3)                a rewritten history

Messages say which turn a request continues; tokens (``turns``) say what its prompt is.

A node is a number, and what is known of it lies in a few dictionaries of numbers and digests: ten thousand sessions are
millions of nodes, and the garbage collector has nothing to look at in them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from skyrl_train.inference.sessions.canonical import CanonicalMessage, canonical_messages
from skyrl_train.inference.sessions.turns import TurnTree

_NOTHING_SAID = canonical_messages([{"role": "assistant"}])[0].digest


@dataclass(frozen=True, slots=True)
class Match:
    """How far a request's messages are known.

    ``turn`` is the last sampled answer of the longest known path and ``node`` its place (None: nothing sampled is
    continued); ``length`` messages lead to it. ``rewritten`` counts answers of this session that come after it: their
    words come back, or others in their place, but not where their tokens can be used.
    """

    node: int | None
    turn: int | None
    length: int
    rewritten: int


class MessageTree:
    """Finds and keeps messages. Finding costs one look-up per message of the request.

    Args:
        turns: the turns that ``add`` gets.
    """

    def __init__(self, turns: TurnTree) -> None:
        self._turns = turns
        self._nodes = 0
        # Children: the latest by parent and digest, and from each the one before it with the same digest.
        self._latest: dict[bytes, int] = {}
        self._before: dict[int, int] = {}
        self._reasoning: dict[int, bytes] = {}  # of nodes whose message has some
        self._turn_of: dict[int, int] = {}  # of nodes that were sampled
        self._answered: set[int] = set()  # nodes with a sampled child
        self._answers: set[bytes] = set()  # digests of what was sampled, wherever it stands

    def match(self, setting: bytes, messages: Sequence[CanonicalMessage]) -> Match:
        """Finds the longest recorded path that begins ``messages`` and ends in a sampled answer.

        Of several (equal answers to equal prompts): the one extended least, of these the latest.
        """
        root = self._latest.get(setting)
        here = [] if root is None else [root]
        sampled: list[int] = []
        length, answered_otherwise = 0, False
        for index, message in enumerate(messages):
            below = [child for node in here for child in self._like(node, message)]
            if not below:
                answered_otherwise = message.is_assistant and any(node in self._answered for node in here)
                answered_otherwise &= message.digest not in self._answers
                break
            here = below
            answers = [node for node in here if node in self._turn_of]
            if answers:
                sampled, length = answers, index + 1
        rewritten = self.count_answers(messages[length:]) + answered_otherwise
        if not sampled:
            return Match(None, None, 0, rewritten)
        node = min(sampled, key=lambda node: (len(self._turns.turns[self._turn_of[node]].children), -node))
        return Match(node, self._turn_of[node], length, rewritten)

    def count_answers(self, messages: Sequence[CanonicalMessage]) -> int:
        """How many of these messages have the words of an answer that this session sampled."""
        return sum(message.is_assistant and message.digest in self._answers for message in messages)

    def add(
        self,
        setting: bytes,
        after: int | None,
        messages: Sequence[CanonicalMessage],
        answer: CanonicalMessage,
        turn: int,
    ) -> None:
        """Keeps ``answer`` to ``messages``, which follow ``after`` (None: which are the whole conversation)."""
        node = after
        if node is None and (node := self._latest.get(setting)) is None:
            node = self._new_node(setting)
        for message in messages:
            known = next(self._like(node, message), None)
            node = self._child(node, message) if known is None else known
        self._answered.add(node)
        self._turn_of[self._child(node, answer)] = turn
        if answer.digest != _NOTHING_SAID:
            self._answers.add(answer.digest)

    def _like(self, node: int, message: CanonicalMessage) -> Iterator[int]:
        """The messages below ``node`` that are ``message``, the latest first."""
        child = self._latest.get(_place(node, message))
        while child is not None:
            if message.reasoning is None or self._reasoning.get(child, message.reasoning) == message.reasoning:
                yield child
            child = self._before.get(child)

    def _child(self, node: int, message: CanonicalMessage) -> int:
        place = _place(node, message)
        earlier = self._latest.get(place)
        child = self._new_node(place)
        if earlier is not None:
            self._before[child] = earlier
        if message.reasoning is not None:
            self._reasoning[child] = message.reasoning
        return child

    def _new_node(self, place: bytes) -> int:
        self._latest[place] = self._nodes
        self._nodes += 1
        return self._nodes - 1


def _place(node: int, message: CanonicalMessage) -> bytes:
    """Where children of ``node`` with this digest are. Longer than a setting's digest, which is where a root is."""
    return node.to_bytes(4, "big") + message.digest
