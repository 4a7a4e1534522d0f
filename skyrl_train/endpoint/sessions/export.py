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
from dataclasses import dataclass, field

from skyrl_train.endpoint.sessions.turns import TurnTree, token_list
from skyrl_train.types import GrammarSpan


@dataclass(frozen=True, slots=True)
class SessionSequence:
    """One token sequence. The lists from ``response_ids`` to ``rewards`` have one entry per response token.

    Args:
        loss_mask: 1 on sampled tokens; elsewhere 0, with ``logprobs`` 0.0 and ``versions`` -1.
        rewards: a turn's reward is on its last token.
        stop_reason: of the last turn.
        turns: indices of the turns that are trained in this sequence.
        grammars: one span for each turn with a grammar.
    """

    prompt_token_ids: list[int]
    response_ids: list[int]
    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    rewards: list[float]
    stop_reason: str
    turns: list[int]
    grammars: list[GrammarSpan] = field(default_factory=list)


def to_sequences(tree: TurnTree, reward: float, turn_rewards: Mapping[int, float]) -> list[SessionSequence]:
    """Return the sequences of a session. Each sampled token has loss mask 1 in exactly one of them.

    The session's own ``reward`` is added to the last token of the last sequence, which is the last token of the turn
    recorded last. The rewards of all sequences sum to the session's return.

    May run in any thread, because the tree of a finished session does not change. Sequences with equal prompts share one
    list, which callers must not modify.
    """
    # Each token becomes one int object, and all sequences refer to it. Equal contexts are one object (see TurnTree), so
    # their identity is a key.
    contexts = {id(context): token_list(context) for context in {turn.context for turn in tree.turns}}
    responses = [token_list(turn.response) for turn in tree.turns]
    prompts: dict[tuple[int | None, int], list[int]] = {}
    sequences: list[SessionSequence] = []
    trained: set[int] = set()
    for leaf in tree.turns:
        if leaf.children:
            continue
        # If a turn is already trained, so are all before it. The rest of the path is trained here. Sequences follow the
        # order of their last turns, so the first one that has a turn trains it.
        path = tree.path(leaf.index)
        begin = next(place for place, turn in enumerate(path) if turn.index not in trained)
        before, turns = path[:begin], path[begin:]
        trained.update(turn.index for turn in turns)
        # Samples of one prompt have the same parent and the same context object.
        key = turns[0].parent, id(turns[0].context)
        prompt = prompts.get(key)
        if prompt is None:
            prompt = prompts[key] = []
            for earlier in before:
                prompt += contexts[id(earlier.context)]
                prompt += responses[earlier.index]
            prompt += contexts[id(turns[0].context)]
        sequence = SessionSequence(prompt, [], [], [], [], [], leaf.stop_reason, [turn.index for turn in turns])
        for turn in turns:
            # The context of the first turn is part of the prompt; later contexts are untrained response tokens.
            if turn is not turns[0]:
                context = contexts[id(turn.context)]
                between = len(context)
                sequence.response_ids.extend(context)
                sequence.loss_mask.extend([0] * between)
                sequence.logprobs.extend([0.0] * between)
                sequence.versions.extend([-1] * between)
                sequence.rewards.extend([0.0] * between)
            sampled = turn.sampled_tokens
            if turn.grammar is not None:
                sequence.grammars.append(turn.grammar.moved(len(sequence.response_ids)))
            sequence.response_ids.extend(responses[turn.index])
            sequence.loss_mask.extend([1] * sampled)
            sequence.logprobs.extend(array("d", turn.logprobs))
            sequence.versions.extend(token_list(turn.versions))
            sequence.rewards.extend([0.0] * (sampled - 1) + [turn_rewards.get(turn.index, 0.0)])
        sequences.append(sequence)
    # The last recorded turn has no children, so it ends the last sequence.
    if sequences:
        sequences[-1].rewards[-1] += reward
    return sequences
