"""Find the recorded turn that a request continues, by comparing messages.

    tools, template arguments
      └─ system ── user ─┬─ *assistant (turn 0) ── tool ── *assistant (turn 1)      * sampled
                         ├─ *assistant (turn 2)             another sample of the same prompt
                         └─ assistant ── user ── *assistant (turn 3)                a rewritten history

Messages determine which turn a request continues. Tokens (:mod:`~skyrl_train.endpoint.sessions.turns`) determine its prompt.

A sampled message and the one that a client sends back are equal under these rules:

| part | compared |
|---|---|
| role, name (except an assistant's) | exactly |
| content | as text: null, absent and "" are equal; a list of text parts equals its joined text |
| an assistant's content and reasoning | without white space at both ends (SDKs trim it) |
| reasoning_content | only if both sides have it |
| tool calls | names and arguments in order; arguments as JSON values, their numbers as doubles |
| ids of tool calls | only to find the call that a tool message answers |
| other keys | ignored |
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from skyrl_train.endpoint.sessions.turns import TurnTree

_encode = json.JSONEncoder(sort_keys=True, separators=(",", ":"), default=str).encode


@dataclass(frozen=True, slots=True)
class CanonicalMessage:
    """The compared parts of a message as digests, so that a long history is hashed once per request.

    Args:
        digest: 16 bytes, of everything except the reasoning.
        reasoning: digest of the reasoning; None if the message has none.
    """

    digest: bytes
    reasoning: bytes | None
    is_assistant: bool


def canonical_messages(messages: Sequence[Mapping[str, Any]]) -> list[CanonicalMessage]:
    """Return the canonical form of the messages of one conversation, in OpenAI's chat format."""
    call_numbers: dict[str, int] = {}  # id of a tool call -> number of calls before it; the latest of equal ids
    calls_before = 0
    canonical = []
    for message in messages:
        calls = message.get("tool_calls") or ()
        role = str(message.get("role"))
        is_assistant = role == "assistant"
        content = _text(message.get("content"))
        # SDKs trim what the model said, but must not trim what the user wrote.
        if is_assistant and isinstance(content, str):
            content = content.strip()
        parts: list[Any] = [role, content]
        if calls:
            parts.append([_call(call) for call in calls])
        # Clients may replace ids of calls, so a tool message is compared by the number of its call.
        if not is_assistant:
            answered = message.get("tool_call_id")
            parts += [message.get("name"), call_numbers.get(str(answered), answered)]
        reasoning = _text(message.get("reasoning_content")) if is_assistant else ""
        if isinstance(reasoning, str):
            reasoning = reasoning.strip()
        canonical.append(CanonicalMessage(_digest(parts), _digest(reasoning) if reasoning else None, is_assistant))
        for call in calls:
            if isinstance(call, Mapping) and call.get("id") is not None:
                call_numbers[str(call["id"])] = calls_before
            calls_before += 1
    return canonical


def setting_digest(tools: Sequence[Mapping[str, Any]], template_kwargs: Mapping[str, Any]) -> bytes:
    """Return a digest of everything besides the messages that a prompt depends on."""
    # The order of tools matters to a template, the order of arguments does not (keys are sorted).
    return _digest([list(tools), dict(template_kwargs)])


def _text(content: Any) -> Any:
    """Return the text of a message content; content with parts other than text is returned unchanged."""
    if content is None:
        return ""
    if not isinstance(content, list | tuple):
        return content
    texts: list[Any] = [
        part.get("text") if isinstance(part, Mapping) and part.get("type") == "text" else part for part in content
    ]
    return "".join(texts) if all(isinstance(text, str) for text in texts) else content


def _call(call: Any) -> Any:
    """Return name and arguments of a tool call; the arguments as a JSON value where they are JSON."""
    function = call.get("function") if isinstance(call, Mapping) else None
    if not isinstance(function, Mapping):
        return call  # not a function call: compared as it is
    name, arguments = function.get("name"), function.get("arguments")
    text = arguments if isinstance(arguments, str) else json.dumps(arguments, default=str)
    # Models write no arguments as "", "{}" or nothing at all.
    if arguments is None or not text.strip():
        return [name, {}]
    try:
        return [name, json.loads(text, parse_float=_number, parse_int=_number)]
    except (ValueError, RecursionError):
        return [name, ["no JSON", text.strip()]]


def _number(text: str) -> float | int:
    """Parse a JSON number; 1.0 and 1 are equal, because programs write either, and so are two integers of one double.

    Programs that send arguments as JSON and not as text round long integers: those in JavaScript beyond 53 bits, most others
    beyond 64.
    """
    value = float(text)
    return int(value) if value.is_integer() else value


def _digest(value: Any) -> bytes:
    return hashlib.blake2b(_encode(value).encode("ascii"), digest_size=16).digest()


_EMPTY_ANSWER = canonical_messages([{"role": "assistant"}])[0].digest


@dataclass(frozen=True, slots=True)
class Match:
    """The recorded prefix of a request's messages.

    Args:
        node, turn: the last sampled answer of the longest recorded prefix: its node and its turn. None: no turn is
            continued.
        length: number of messages up to and including that answer.
        answers: number of sampled answers among these messages, equal ones of several turns once.
        rewritten: number of later messages that repeat or replace answers of this session at positions where their
            tokens cannot be reused.
    """

    node: int | None
    turn: int | None
    length: int
    answers: int
    rewritten: int


class MessageTree:
    """The conversations of a session as one tree of messages. A look-up takes one step per message of the request.

    Nodes are numbers, and their data lies in a few dictionaries of numbers and digests. Ten thousand sessions are
    millions of nodes, and objects of that number would make every garbage collection slow.

    Args:
        turns: the turns that ``add`` refers to.
    """

    def __init__(self, turns: TurnTree) -> None:
        self._turns = turns
        self._nodes = 0
        # Children: the latest one by parent and digest, and from each the previous one with the same digest.
        self._latest: dict[bytes, int] = {}
        self._previous: dict[int, int] = {}
        self._reasoning: dict[int, bytes] = {}  # of nodes whose message has reasoning
        self._turn_of: dict[int, int] = {}  # of sampled nodes
        self._answered: set[int] = set()  # nodes with a sampled child
        self._answers: set[bytes] = set()  # digests of all sampled messages

    def match(self, setting: bytes, messages: Sequence[CanonicalMessage]) -> Match:
        """Return the longest recorded prefix of ``messages`` that ends in a sampled answer.

        Among several (equal answers to equal prompts) takes the one with the fewest extensions, of these the latest.
        """
        root = self._latest.get(setting)
        here = [] if root is None else [root]
        sampled: list[int] = []
        length, count, answered_otherwise = 0, 0, False
        for index, message in enumerate(messages):
            below = [child for node in here for child in self._equal_children(node, message)]
            if not below:
                # An unknown answer where this session sampled another one: the client has rewritten it.
                answered_otherwise = message.is_assistant and any(node in self._answered for node in here)
                answered_otherwise &= message.digest not in self._answers
                break
            # Several nodes can be equal (samples of one prompt), so all of them are followed.
            here = below
            answers = [node for node in here if node in self._turn_of]
            if answers:
                sampled, length, count = answers, index + 1, count + 1
        rewritten = self.count_answers(messages[length:]) + answered_otherwise
        if not sampled:
            return Match(None, None, 0, 0, rewritten)
        node = min(sampled, key=lambda node: (len(self._turns.turns[self._turn_of[node]].children), -node))
        return Match(node, self._turn_of[node], length, count, rewritten)

    def count_answers(self, messages: Sequence[CanonicalMessage]) -> int:
        """Return how many of these messages equal an answer that this session sampled."""
        return sum(message.digest in self._answers for message in messages)  # a digest includes the role

    def add(
        self,
        setting: bytes,
        after: int | None,
        messages: Sequence[CanonicalMessage],
        answer: CanonicalMessage,
        turn: int,
    ) -> None:
        """Add ``answer`` to ``messages``, which follow the node ``after`` (None: they are the whole conversation)."""
        node = after
        if node is None and (node := self._latest.get(setting)) is None:
            node = self._new_node(setting)
        for message in messages:
            known = next(self._equal_children(node, message), None)
            node = self._add_child(node, message) if known is None else known
        self._answered.add(node)
        self._turn_of[self._add_child(node, answer)] = turn
        # An empty answer would make every empty message of an assistant look like a repetition.
        if answer.digest != _EMPTY_ANSWER:
            self._answers.add(answer.digest)

    def _equal_children(self, node: int, message: CanonicalMessage) -> Iterator[int]:
        """Yield the children of ``node`` that equal ``message``, the latest first."""
        child = self._latest.get(_child_key(node, message))
        while child is not None:
            if message.reasoning is None or self._reasoning.get(child, message.reasoning) == message.reasoning:
                yield child
            child = self._previous.get(child)

    def _add_child(self, node: int, message: CanonicalMessage) -> int:
        key = _child_key(node, message)
        earlier = self._latest.get(key)
        child = self._new_node(key)
        if earlier is not None:
            self._previous[child] = earlier
        if message.reasoning is not None:
            self._reasoning[child] = message.reasoning
        return child

    def _new_node(self, key: bytes) -> int:
        self._latest[key] = self._nodes
        self._nodes += 1
        return self._nodes - 1


def _child_key(node: int, message: CanonicalMessage) -> bytes:
    """Return the key of ``node``'s children with this digest. It is longer than a setting's digest, the key of a root."""
    return node.to_bytes(4, "big") + message.digest
