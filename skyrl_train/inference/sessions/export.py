"""A session's turns as training sequences (SEMANTICS 3.3).

    turns      sequences (context c, response r)
    0─1─2      prompt: c0                 response: r0 c1 r1 c2 r2     trained: r0 r1 r2
      └─3      prompt: c0 r0 c1 r1 c3     response: r3                 trained: r3

Every turn that nothing extends ends one sequence; they come in the order of these turns. A turn that several sequences
share is trained in the first of them; in the others it is part of the prompt.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.inference.sessions.turns import Turn, TurnTree, logprob_list, token_list


@dataclass(frozen=True, slots=True)
class SessionSequence:
    """One token sequence; the response-side lists are aligned token by token.

    ``loss_mask`` is 1 on sampled tokens; elsewhere ``logprobs`` is 0.0 and ``versions`` -1. ``rewards`` has a turn's
    reward on its last token. ``turns`` are the turns trained here; ``stop_reason`` is the last one's.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    rewards: list[float]
    stop_reason: str
    turns: list[int]


def to_sequences(tree: TurnTree, reward: float, turn_rewards: Mapping[int, float]) -> list[SessionSequence]:
    """Each sampled token has loss mask 1 in exactly one sequence.

    ``reward``, the session's, is added to the last token of the last sequence, which is the last token of the turn
    recorded last; all rewards of all sequences together are the session's return.

    Takes nothing but a tree that no longer changes, so that it may run in any thread. Sequences with equal prompts share
    the list: it must not be changed.
    """
    sequences: list[SessionSequence] = []
    trained: set[int] = set()
    tokens = _Tokens(tree)
    for leaf in tree.turns:
        if leaf.children:
            continue
        # Where a turn is trained already, so are all before it: what is left is the path's end.
        path = tree.path(leaf.index)
        begin = next(place for place, turn in enumerate(path) if turn.index not in trained)
        turns = path[begin:]
        trained.update(turn.index for turn in turns)
        sequences.append(_to_sequence(tokens, path[:begin], turns, turn_rewards))
    if sequences:
        sequences[-1].rewards[-1] += reward
    return sequences


class _Tokens:
    """The tokens of a tree as lists. Every number is made once: what sequences repeat are references to it."""

    def __init__(self, tree: TurnTree) -> None:
        self._contexts = {id(context): token_list(context) for context in {turn.context for turn in tree.turns}}
        self.responses = [token_list(turn.response) for turn in tree.turns]
        self._prompts: dict[tuple[int | None, int], list[int]] = {}

    def context(self, turn: Turn) -> list[int]:
        return self._contexts[id(turn.context)]

    def prompt(self, before: list[Turn], turn: Turn) -> list[int]:
        """The prompt of ``turn``, which follows the turns ``before``."""
        key = turn.parent, id(turn.context)
        prompt = self._prompts.get(key)
        if prompt is None:
            prompt = self._prompts[key] = []
            for earlier in before:
                prompt += self.context(earlier)
                prompt += self.responses[earlier.index]
            prompt += self.context(turn)
        return prompt


def _to_sequence(
    tokens: _Tokens, before: list[Turn], turns: list[Turn], turn_rewards: Mapping[int, float]
) -> SessionSequence:
    prompt = tokens.prompt(before, turns[0])
    sequence = SessionSequence(prompt, [], [], [], [], [], turns[-1].stop_reason, [turn.index for turn in turns])
    for turn in turns:
        if turn is not turns[0]:
            context = tokens.context(turn)
            between = len(context)
            sequence.response_ids.extend(context)
            sequence.loss_mask.extend([0] * between)
            sequence.logprobs.extend([0.0] * between)
            sequence.versions.extend([-1] * between)
            sequence.rewards.extend([0.0] * between)
        sampled = turn.sampled_tokens
        sequence.response_ids.extend(tokens.responses[turn.index])
        sequence.loss_mask.extend([1] * sampled)
        sequence.logprobs.extend(logprob_list(turn.logprobs))
        sequence.versions.extend(token_list(turn.versions))
        sequence.rewards.extend([0.0] * (sampled - 1) + [turn_rewards.get(turn.index, 0.0)])
    return sequence
