"""Convert the turns of a session into training sequences.

    turns      sequences (context c, response r)
    0─1─2      prompt: c0                 response: r0 c1 r1 c2 r2     trained: r0 r1 r2
      └─3      prompt: c0 r0 c1 r1 c3     response: r3                 trained: r3

Every turn without children ends one sequence, and the sequences have the order of these turns. A turn that several
sequences share is trained in the first of them and is part of the prompt in the others.
"""

from __future__ import annotations

from array import array
from collections.abc import Mapping
from dataclasses import dataclass

from skyrl_train.endpoint.sessions.turns import Turn, TurnTree, token_list


@dataclass(frozen=True, slots=True)
class SessionSequence:
    """One token sequence. The lists from ``response_ids`` to ``rewards`` have one entry per response token.

    Args:
        loss_mask: 1 on sampled tokens; elsewhere 0, with ``logprobs`` 0.0 and ``versions`` -1.
        rewards: a turn's reward is on its last token.
        stop_reason: of the last turn.
        turns: indices of the turns that are trained in this sequence.
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
    """Return the sequences of a session. Each sampled token has loss mask 1 in exactly one of them.

    The session's own ``reward`` is added to the last token of the last sequence, which is the last token of the turn
    recorded last. The rewards of all sequences sum to the session's return.

    May run in any thread, because the tree of a finished session does not change. Sequences with equal prompts share one
    list, which callers must not modify.
    """
    sequences: list[SessionSequence] = []
    trained: set[int] = set()
    tokens = _Tokens(tree)
    for leaf in tree.turns:
        if leaf.children:
            continue
        # If a turn is already trained, so are all before it. The rest of the path is trained here.
        path = tree.path(leaf.index)
        begin = next(place for place, turn in enumerate(path) if turn.index not in trained)
        turns = path[begin:]
        # Sequences follow the order of their last turns, so the first one that has a turn trains it.
        trained.update(turn.index for turn in turns)
        sequences.append(_to_sequence(tokens, path[:begin], turns, turn_rewards))
    # The last recorded turn has no children, so it ends the last sequence.
    if sequences:
        sequences[-1].rewards[-1] += reward
    return sequences


class _Tokens:
    """The tokens of a tree as lists. Each token becomes one int object; repetitions in sequences refer to it."""

    def __init__(self, tree: TurnTree) -> None:
        # Keyed by identity, because equal contexts are one object (see TurnTree).
        self._contexts = {id(context): token_list(context) for context in {turn.context for turn in tree.turns}}
        self.responses = [token_list(turn.response) for turn in tree.turns]
        self._prompts: dict[tuple[int | None, int], list[int]] = {}

    def context(self, turn: Turn) -> list[int]:
        return self._contexts[id(turn.context)]

    def prompt(self, before: list[Turn], turn: Turn) -> list[int]:
        """Return the prompt of ``turn``, which follows the turns ``before``."""
        # Samples of one prompt have the same parent and the same context object.
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
        # The context of the first turn is part of the prompt; later contexts are untrained response tokens.
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
        sequence.logprobs.extend(array("d", turn.logprobs))
        sequence.versions.extend(token_list(turn.versions))
        sequence.rewards.extend([0.0] * (sampled - 1) + [turn_rewards.get(turn.index, 0.0)])
    return sequence
