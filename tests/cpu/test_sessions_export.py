"""The training data of a finished session, compared with a plain list of all tokens sampled in it."""

from __future__ import annotations

import asyncio
import threading
import tracemalloc
from collections import Counter
from dataclasses import dataclass
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from session_worlds import ask, assistant, choice, generation, new_session, sampled_tokens, user

from skyrl_train.endpoint.sessions import Session, SessionLimits, SessionSequence
from skyrl_train.endpoint.sessions.export import to_sequences
from skyrl_train.errors import SessionError
from skyrl_train.inference.requests import Generation


def test_turns_that_extend_each_other_make_one_sequence() -> None:
    session = new_session()
    first = ask(session, [user("hi")], "yo", version=3)
    second = ask(session, [user("hi"), assistant("yo"), user("more")], "ok!", version=4)
    session.finish(1.0)
    [sequence] = session.sequences()
    between = second.prompt_token_ids[second.reused_tokens :]
    assert sequence.prompt_token_ids == first.prompt_token_ids
    assert sequence.response_ids == [*sampled_tokens("yo"), *between, *sampled_tokens("ok!")]
    assert sequence.loss_mask == [1, 1] + [0] * len(between) + [1, 1, 1]
    assert sequence.versions == [3, 3] + [-1] * len(between) + [4, 4, 4]
    assert sequence.logprobs[2 : 2 + len(between)] == [0.0] * len(between)
    assert sequence.rewards == [0.0] * (len(sequence.response_ids) - 1) + [1.0]
    assert sequence.turns == [0, 1]
    assert sequence.stop_reason == "stop"


def test_a_shared_beginning_is_trained_in_the_first_branch_only() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    branches = [ask(session, [user("hi"), assistant("yo"), user(more)], more) for more in ("x", "y")]
    session.finish()
    first, second = session.sequences()
    assert (first.turns, second.turns) == ([0, 1], [2])
    assert second.prompt_token_ids == branches[1].prompt_token_ids
    assert second.response_ids == sampled_tokens("y")
    assert second.loss_mask == [1]


def test_a_turns_reward_is_on_its_last_token_and_the_sessions_on_the_last_of_all() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    ask(session, [user("hi"), assistant("yo"), user("x")], "abc")
    ask(session, [user("hi"), assistant("yo"), user("y")], "de")
    session.set_reward(9.0, turn=0)
    session.set_reward(0.5, turn=0)  # the later one counts
    session.set_reward(-2.0, turn=2)
    session.set_reward(7.0)
    session.finish(4.0)
    first, second = session.sequences()
    assert [reward for reward, mask in zip(first.rewards, first.loss_mask, strict=True) if mask] == [0, 0.5, 0, 0, 0]
    assert second.rewards == [0.0, -2.0 + 4.0]


def test_the_session_reward_lies_on_the_turn_recorded_last() -> None:
    session = new_session()
    slow = session.plan([user("slow")])
    ask(session, [user("quick")], "q")
    ask(session, [user("quick"), assistant("q"), user("more")], "r")
    session.record(slow, choice(slow, "s"))
    session.finish(1.0)
    assert [sequence.turns for sequence in session.sequences()] == [[0, 1], [2]]
    assert session.sequences()[-1].rewards == [1.0]


def test_a_session_that_sampled_nothing_says_so() -> None:
    session = new_session()
    session.plan([user("hi")])
    session.finish(1.0)
    with pytest.raises(SessionError, match="sampled nothing"):
        session.sequences()


def test_a_session_must_be_finished_before_it_is_trained_on() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    with pytest.raises(SessionError, match="finish it first"):
        session.sequences()
    session.close()
    with pytest.raises(SessionError, match="was closed"):
        session.sequences()


def branched(prompt_tokens: int, branches: int, **limits: int) -> Session:
    """A conversation of one turn, continued as often as asked, each time otherwise."""
    session = new_session(limits=SessionLimits(**limits))
    prompt = list(range(1000, 1000 + prompt_tokens))
    for token_ids in (prompt, *([*prompt, 1, 2000 + branch] for branch in range(branches))):
        plan = session.plan_completion(token_ids)
        session.record_completion(plan, generation(token_ids, [1], version=1))
    return session


def test_many_branches_of_a_long_prompt_are_rejected_before_they_are_sampled() -> None:
    session = branched(3000, 33, max_exported_tokens=100_000)
    with pytest.raises(
        SessionError, match=r"trained on as 102\d+ of at most 100000 tokens \(max_exported_tokens\): each"
    ):
        session.plan_completion([*range(1000, 4000), 1, 5000])
    session.finish(1.0)
    sequences = session.sequences()
    assert 97_000 < sum(len(each.prompt_token_ids) + len(each.response_ids) for each in sequences) <= 100_000


def test_branches_share_the_tokens_that_they_repeat() -> None:
    session = branched(5000, 200)
    session.finish()
    tracemalloc.start()
    try:
        sequences = session.sequences()
        size = tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()
    repeated = sum(len(sequence.prompt_token_ids) for sequence in sequences)
    assert size < 12 * repeated, "a reference each, not a number each"


def test_the_responses_to_one_prompt_share_its_list() -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    for answer in "abc":
        session.record(plan, choice(plan, answer))
    session.finish()
    first, *others = session.sequences()
    assert all(other.prompt_token_ids is first.prompt_token_ids for other in others)
    assert first.prompt_token_ids == plan.prompt_token_ids


@pytest.mark.parametrize(("prompt_tokens", "elsewhere"), [(10, False), (20_000, True)])
async def test_a_large_session_is_exported_without_blocking_the_loop(
    prompt_tokens: int, elsewhere: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    threads: list[threading.Thread] = []

    def watched(*args: Any) -> list[SessionSequence]:
        threads.append(threading.current_thread())
        return to_sequences(*args)

    monkeypatch.setattr("skyrl_train.endpoint.sessions.session.to_sequences", watched)
    session = branched(prompt_tokens, 4)
    with pytest.raises(SessionError, match="finish it first"):
        await session.export()
    session.finish(1.0)
    exported = await session.export()
    assert [thread is not threading.current_thread() for thread in threads] == [elsewhere]
    assert exported == session.sequences()


async def test_a_session_that_is_closed_while_it_is_exported_is_exported_whole() -> None:
    session = branched(20_000, 4)
    session.finish()
    expected = session.sequences()
    exporting = asyncio.create_task(session.export())
    await asyncio.sleep(0)
    session.close()
    assert await exporting == expected


@dataclass
class _Conversation:
    """The conversation that a program holds."""

    history: list[dict[str, Any]]
    tools: list[dict[str, Any]]


def expected_reuse(recorded: list[tuple[list[Any], list[Any], int]], messages: list[Any], tools: list[Any]) -> int:
    """The reference: the longest recorded conversation with these tools that begins ``messages``."""
    fitting = [
        (len(conversation), end)
        for conversation, with_tools, end in recorded
        if with_tools == tools and messages[: len(conversation)] == conversation
    ]
    return max(fitting, default=(0, 0))[1]


@st.composite
def sessions(draw: st.DrawFn) -> tuple[Session, list[Generation], dict[int, float]]:
    """A program that starts, continues, samples twice, rewrites, and sends tokens; planned turns overlap or are lost."""
    session = new_session()
    known = [_Conversation([], [])]
    recorded: list[tuple[list[Any], list[Any], int]] = []
    generations: list[Generation] = []
    waiting: list[tuple[Any, list[Any], list[Any]]] = []
    for step in range(draw(st.integers(1, 20))):
        conversation = draw(st.sampled_from(known))
        history, tools = [*conversation.history, user(draw(st.sampled_from(["a", "b", "c"])))], conversation.tools
        match draw(st.sampled_from(["send"] * 6 + ["edit", "window", "tools", "tokens"])):
            case "edit":
                place = draw(st.integers(0, len(history) - 1))
                history[place] = {**history[place], "content": f"edited {step}"}
            case "window":
                history = history[draw(st.integers(0, len(history) - 1)) :]
            case "tools":
                tools = [*tools, {"n": step}]
            case "tokens" if generations:
                chosen = draw(st.sampled_from(generations))
                plan = session.plan_completion([*chosen.prompt_token_ids, *chosen.token_ids, 7])
                assert plan.reused_tokens >= len(chosen.prompt_token_ids) + len(chosen.token_ids)
                generations.append(generation(plan.prompt_token_ids, [step + 10]))
                session.record_completion(plan, generations[-1])
                continue
        plan = session.plan(history, tools)
        assert plan.reused_tokens == expected_reuse(recorded, history, tools)
        waiting.append((plan, history, tools))
        if draw(st.booleans()):
            continue  # it is answered later, or never
        plan, history, tools = waiting.pop(draw(st.integers(0, len(waiting) - 1)))
        for _ in range(draw(st.sampled_from([1, 1, 2]))):
            answer = choice(plan, f"{len(generations)}" * draw(st.integers(1, 3)), version=draw(st.integers(0, 5)))
            session.record(plan, answer)
            generations.append(answer.generation)
            told = [*history, assistant(answer.message.content)]
            recorded.append((told, tools, len(plan.prompt_token_ids) + len(answer.generation.token_ids)))
            known.append(_Conversation(told, tools))
    rewards = {}
    for turn in range(len(generations)):
        if draw(st.booleans()):
            rewards[turn] = float(draw(st.integers(-3, 3)))
            session.set_reward(rewards[turn], turn=turn)
    return session, generations, rewards


def find(sequences: list[SessionSequence], logprob: float) -> tuple[SessionSequence, int]:
    [(sequence, place)] = [
        (sequence, place)
        for sequence in sequences
        for place, (value, mask) in enumerate(zip(sequence.logprobs, sequence.loss_mask, strict=True))
        if mask and value == logprob
    ]
    return sequence, place


@given(sessions())
def test_every_sampled_token_is_trained_once_after_the_tokens_it_was_sampled_after(
    case: tuple[Session, list[Generation], dict[int, float]],
) -> None:
    session, generations, rewards = case
    session.finish(0.25)
    if not generations:
        with pytest.raises(SessionError, match="sampled nothing"):
            session.sequences()
        return
    sequences = session.sequences()
    trained = Counter(
        value
        for sequence in sequences
        for value, mask in zip(sequence.logprobs, sequence.loss_mask, strict=True)
        if mask
    )
    assert trained == Counter(value for each in generations for value in each.logprobs)
    for turn, sampled in enumerate(generations):
        sequence, place = find(sequences, sampled.logprobs[0])
        end = place + len(sampled.token_ids)
        assert sequence.prompt_token_ids + sequence.response_ids[:place] == sampled.prompt_token_ids
        assert sequence.response_ids[place:end] == sampled.token_ids
        assert sequence.logprobs[place:end] == sampled.logprobs
        assert sequence.versions[place:end] == sampled.versions
        session_reward = 0.25 if turn == len(generations) - 1 else 0.0
        assert sequence.rewards[place:end] == [0.0] * (end - place - 1) + [rewards.get(turn, 0.0) + session_reward]
        assert turn in sequence.turns
    for sequence in sequences:
        length = len(sequence.response_ids)
        aligned = (sequence.loss_mask, sequence.logprobs, sequence.versions, sequence.rewards)
        assert [len(values) for values in aligned] == [length] * 4
        masked = [place for place, mask in enumerate(sequence.loss_mask) if not mask]
        assert all((aligned[1][p], aligned[2][p], aligned[3][p]) == (0.0, -1, 0.0) for p in masked)
        assert sequence.loss_mask[0] == sequence.loss_mask[-1] == 1
    exported = sum(len(sequence.prompt_token_ids) + len(sequence.response_ids) for sequence in sequences)
    assert exported == session._turns.exported_tokens, "the limit counts the exported tokens"
    statistics = session.statistics()
    assert statistics.branches == len(sequences)
    assert statistics.sampled_tokens == sum(trained.values())
