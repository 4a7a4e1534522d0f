"""Planning of a request: the turn that it continues, the reused tokens, and the counted drift."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import pytest
from session_worlds import (
    END,
    ROLES,
    SAMPLED,
    ReadableRenderer,
    ask,
    assistant,
    choice,
    generation,
    new_session,
    sampled_tokens,
    text_tokens,
    user,
)

from skyrl_train.endpoint.sessions import Session, SessionLimits, TurnPlan
from skyrl_train.errors import EngineError, SessionError
from skyrl_train.inference.chat.conversation import normalize_messages
from skyrl_train.inference.chat.requests import ToolCall
from skyrl_train.inference.interface import StopReason

TOOL = {"type": "function", "function": {"name": "add", "parameters": {}}}


def test_the_first_request_is_rendered() -> None:
    plan = new_session().plan([user("hi")])
    assert plan.prompt_token_ids == ReadableRenderer().render([user("hi")])
    assert plan.reused_tokens == 0


def test_the_next_turn_begins_with_exactly_the_tokens_of_the_last() -> None:
    session = new_session()
    first = ask(session, [user("hi")], "yo")
    second = session.plan([user("hi"), assistant("yo"), user("more")])
    before = first.prompt_token_ids + sampled_tokens("yo")
    assert second.prompt_token_ids == [*before, END, *ReadableRenderer().render([user("more")])]
    assert second.reused_tokens == len(before)


def test_a_plan_alone_leaves_no_trace() -> None:
    session = new_session()
    session.plan([user("hi")])
    assert session.plan([user("hi"), assistant("yo"), user("more")]).reused_tokens == 0
    assert session.statistics().turns == 0


@pytest.mark.parametrize(
    "sent_back",
    [
        assistant("yo"),
        assistant("  yo\n"),
        assistant([{"type": "text", "text": "y"}, {"type": "text", "text": "o"}]),
        assistant("yo", reasoning_content="hm"),
        assistant("yo", reasoning_content=None, refusal=None, annotations=[]),
    ],
)
def test_an_answer_is_known_however_an_sdk_sends_it_back(sent_back: dict[str, Any]) -> None:
    session = new_session()
    ask(session, [user("hi")], "yo", reasoning="hm")
    plan = session.plan([user("hi"), sent_back, user("more")])
    assert plan.reused_tokens > 0
    assert not plan.drifted


def test_an_answer_that_the_program_replaced_is_a_rewritten_history() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    plan = session.plan([user("hi"), assistant("no"), user("more")])
    assert (plan.reused_tokens, plan.drifted) == (0, True)


def test_reasoning_that_came_back_changed_is_a_rewritten_history() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo", reasoning="hm")
    plan = session.plan([user("hi"), assistant("yo", reasoning_content="no"), user("more")])
    assert plan.reused_tokens == 0
    assert plan.drifted


def test_reasoning_tells_equal_answers_apart() -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    for reasoning in ("first", "second", "third"):
        session.record(plan, choice(plan, "yo", reasoning=reasoning, token_ids=sampled_tokens(reasoning)))
    again = session.plan([user("hi"), assistant("yo", reasoning_content="second"), user("more")])
    reused = again.prompt_token_ids[: again.reused_tokens]
    assert reused[len(plan.prompt_token_ids) :] == sampled_tokens("second")


def test_tool_calls_are_known_with_other_ids_and_reordered_arguments() -> None:
    session = new_session()
    calls = [ToolCall("a", "add", '{"x": 1, "y": 2}'), ToolCall("b", "add", "{}")]
    ask(session, [user("hi")], "", calls=calls, token_ids=sampled_tokens("call"))
    sent_back = [
        {"id": "p", "type": "function", "function": {"name": "add", "arguments": '{"y":2,"x":1}'}},
        {"id": "q", "type": "function", "function": {"name": "add", "arguments": "{}"}},
    ]
    results = [{"role": "tool", "content": "3", "tool_call_id": call_id} for call_id in ("p", "q")]
    history = [user("hi"), assistant(None, tool_calls=sent_back), *results]
    assert ask(session, history, "three").reused_tokens > 0
    assert session.plan([*history, assistant("three"), user("more")]).parent == 1


def test_half_a_surrogate_pair_that_cannot_be_rendered_is_no_other_call_when_it_comes_back() -> None:
    session = new_session()
    arguments = '{"of": "\\ud83d"}'
    ask(session, [user("hi")], "", calls=[ToolCall("a", "draw", arguments)], token_ids=sampled_tokens("call"))
    call = {"id": "a", "type": "function", "function": {"name": "draw", "arguments": arguments}}
    history = [user("hi"), assistant(None, tool_calls=[call]), {"role": "tool", "content": "ok", "tool_call_id": "a"}]
    assert session.plan(normalize_messages(history)).reused_tokens > 0


def test_the_time_of_tools_lasts_from_the_response_that_calls_them_to_the_request_that_continues_it() -> None:
    now, told = [10.0], []
    session = new_session(clock=lambda: now[0])
    session.on_tools = lambda names, seconds: told.append((list(names), seconds))
    calls = [ToolCall("a", "add", "{}"), ToolCall("b", "search", "{}")]
    ask(session, [user("hi")], "", calls=calls, token_ids=sampled_tokens("call"))
    now[0] = 12.5
    sent_back = [{"type": "function", "function": {"name": call.name, "arguments": "{}"}} for call in calls]
    history = [user("hi"), assistant(None, tool_calls=sent_back), {"role": "tool", "content": "3"}]
    session.plan([user("something else")])
    assert told == []
    session.plan(history)
    now[0] = 20.0
    ask(session, history, "three")  # the same request once more
    session.plan([*history, assistant("three"), user("more")])
    assert told == [(["add", "search"], 2.5)]


def test_the_longest_known_path_is_extended_also_before_messages_that_were_edited() -> None:
    session = new_session()
    history = [user("1")]
    for answer in ("a", "b", "c"):
        ask(session, history, answer)
        history = [*history, assistant(answer), user(answer)]
    edited = [*history[:3], assistant("B"), *history[4:]]
    assert session.plan(history).parent == 2
    plan = session.plan(edited)
    assert plan.parent == 0
    assert plan.drifted


def test_several_choices_of_one_request_are_continued_each_on_its_own() -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    indices = [session.record(plan, choice(plan, answer)) for answer in ("a", "b", "c")]
    for index, answer in zip(indices, ("a", "b", "c"), strict=True):
        assert session.plan([user("hi"), assistant(answer), user("more")]).parent == index
    assert session.statistics().branches == 3


def test_one_answer_can_be_continued_twice() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    plans = [session.plan([user("hi"), assistant("yo"), user(more)]) for more in ("x", "y")]
    for plan in plans:
        session.record(plan, choice(plan, "ok"))
    assert [plan.parent for plan in plans] == [0, 0]
    assert session.statistics().branches == 2
    assert session.statistics().drifted_turns == 0
    assert session.plan([user("hi"), assistant("yo"), user("y"), assistant("ok"), user("z")]).parent == 2


def test_parallel_agents_with_equal_answers_keep_a_branch_each() -> None:
    session = new_session()
    first, second = session.plan([user("hi")]), session.plan([user("hi")])
    session.record(first, choice(first, "yo"))
    session.record(second, choice(second, "yo"))
    for more in ("x", "y"):
        ask(session, [user("hi"), assistant("yo"), user(more)], "ok")
    assert session.statistics().branches == 2


@pytest.mark.parametrize("change", ["system", "tools", "template", "window", "edit", "reorder"])
def test_a_rewritten_history_is_rendered_anew_and_counted(change: str) -> None:
    session = new_session()
    history = [{"role": "system", "content": "s"}, user("1")]
    for answer in ("a", "b"):
        plan = session.plan(history, [TOOL])
        session.record(plan, choice(plan, answer))
        history = [*history, assistant(answer), user(answer)]
    tools, kwargs = [TOOL], {}
    match change:
        case "system":
            history = [{"role": "system", "content": "S"}, *history[1:]]
        case "tools":
            tools = []
        case "template":
            kwargs = {"enable_thinking": False}
        case "window":
            history = [history[0], *history[3:]]
        case "edit":
            history = [*history[:2], assistant("A"), *history[3:]]
        case "reorder":
            history = [history[0], *history[3:], *history[1:3]]
    plan = session.plan(history, tools, kwargs)
    assert plan.reused_tokens == 0
    assert plan.prompt_token_ids == ReadableRenderer().render(history, tools)
    session.record(plan, choice(plan, "c"))
    statistics = session.statistics()
    assert (statistics.drifted_turns, statistics.branches, statistics.turns) == (1, 2, 3)
    # From there it goes on token by token, and that is no drift.
    plan = session.plan([*history, assistant("c"), user("c")], tools, kwargs)
    assert (plan.parent, plan.drifted) == (2, False)


def test_another_conversation_is_a_branch_but_no_drift() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    ask(session, [user("example"), assistant("like this"), user("hi")], "ok")
    ask(session, [user("summary of what was said: yo")], "go on")
    statistics = session.statistics()
    assert (statistics.branches, statistics.drifted_turns) == (3, 0)


def test_a_message_that_a_program_wrote_where_nothing_was_sampled_is_no_drift() -> None:
    session = new_session()
    ask(session, [user("1"), user("2")], "yo")
    assert not session.plan([user("1"), assistant("written"), user("2")]).drifted


@pytest.mark.parametrize("answer", ["yo", ""])  # empty: a response that only reasons
def test_a_template_that_cannot_be_extended_is_rendered_and_counted_as_drift(answer: str) -> None:
    session = Session("s", ReadableRenderer(extends=False))
    ask(session, [user("hi")], answer)
    history = [user("hi"), assistant(answer), user("more")]
    plan = session.plan(history)
    assert plan.prompt_token_ids == ReadableRenderer().render(history)
    assert (plan.reused_tokens, plan.drifted) == (0, True)


def test_a_rendering_that_begins_with_the_sampled_tokens_extends_them() -> None:
    session = Session("s", ReadableRenderer(extends=False))
    ask(session, [user("hi")], "yo", token_ids=[*text_tokens("yo"), END])
    plan = session.plan([user("hi"), assistant("yo"), user("more")])
    assert (plan.parent, plan.drifted) == (0, False)


def test_an_extension_that_changes_earlier_tokens_is_discarded() -> None:
    class Sloppy(ReadableRenderer):
        def extend(self, prompt_token_ids: Any, response_ids: Any, *args: Any, **kwargs: Any) -> list[int]:
            return [*prompt_token_ids, *self.retokenise(response_ids), END, 9]

    session = Session("s", Sloppy())
    ask(session, [user("hi")], "yo")
    history = [user("hi"), assistant("yo"), user("more")]
    assert session.plan(history).prompt_token_ids == Sloppy().render(history)


def test_reused_tokens_that_would_be_cut_differently_are_counted_once() -> None:
    session = new_session()
    same, other = text_tokens("same"), sampled_tokens("x")
    ask(session, [user("hi")], "samexsame", token_ids=[*same, *other, *same])
    assert session.statistics().drifted_tokens == 0  # nothing is reused yet
    history = [user("hi"), assistant("samexsame"), user("more")]
    for answer in ("plain", "twice"):
        ask(session, history, answer, token_ids=text_tokens(answer))
        assert session.statistics().drifted_tokens == 1
    ask(session, [*history, assistant("plain"), user("go on")], "never reused")
    assert session.statistics().drifted_tokens == 1


@pytest.mark.parametrize("cut", ["", "same", "x"])
def test_a_span_of_differing_tokens_ends_where_the_tokens_agree_again(cut: str) -> None:
    class Cutting(ReadableRenderer):
        def retokenise(self, token_ids: Any) -> list[int]:
            begin, end = list(token_ids[:2]), list(token_ids[4:])
            return begin + text_tokens(cut) + end

    session = Session("s", Cutting())
    ask(session, [user("hi")], "ab12cd")
    ask(session, [user("hi"), assistant("ab12cd"), user("more")], "z")
    assert session.statistics().drifted_tokens == 2


def test_a_prompt_of_tokens_extends_the_turn_that_it_begins_with() -> None:
    session = new_session()
    plan = session.plan_completion([9, 8])
    assert plan.reused_tokens == 0
    session.record_completion(plan, generation([9, 8], [7, 6]))
    session.record_completion(plan, generation([9, 8], [7]))
    for prompt, parent, reused in [
        ([9, 8, 7], 1, 3),
        ([9, 8, 7, 5], 1, 3),
        ([9, 8, 7, 6, 5], 0, 4),
        ([9, 8, 6], None, 0),
        ([9, 8], None, 0),
        ([1, 8, 7], None, 0),
    ]:
        plan = session.plan_completion(prompt)
        assert (plan.parent, plan.reused_tokens) == (parent, reused)
    assert session.statistics().drifted_turns == 0


def test_of_equal_responses_to_equal_tokens_the_one_extended_least_is_extended() -> None:
    session = new_session()
    plan = session.plan_completion([9])
    for _ in range(2):
        session.record_completion(plan, generation([9], [8]))
    parents = []
    for token in (1, 2, 3):
        plan = session.plan_completion([9, 8, token])
        parents.append(plan.parent)
        session.record_completion(plan, generation(plan.prompt_token_ids, [7]))
    assert parents == [1, 0, 1]
    assert session.statistics().branches == 3


def test_chat_and_completions_continue_each_other_where_the_tokens_agree() -> None:
    session = new_session()
    chat = ask(session, [user("hi")], "yo")
    so_far = chat.prompt_token_ids + sampled_tokens("yo")
    completion = session.plan_completion([*so_far, 77])
    assert (completion.parent, completion.reused_tokens) == (0, len(so_far))
    assert session.record_completion(completion, generation(completion.prompt_token_ids, [SAMPLED])) == 1
    assert session.plan([user("hi"), assistant("yo"), user("more")]).parent == 0


def prefilled(session: Session, messages: list[dict[str, Any]], answer: str, **options: Any) -> TurnPlan:
    plan = session.plan(messages, continue_final=True)
    session.record(plan, choice(plan, answer, **options))
    return plan


def test_a_prefill_is_prompt_and_the_whole_message_continues() -> None:
    session = new_session()
    first = prefilled(session, [user("hi"), assistant("It ")], "is.")
    assert first.prompt_token_ids == [ROLES["user"], *text_tokens("hi"), END, ROLES["assistant"], *text_tokens("It ")]
    history = [user("hi"), assistant("It is."), user("more"), assistant("As")]
    second = prefilled(session, history, " well.")
    sampled = [*first.prompt_token_ids, *sampled_tokens("is.")]
    assert second.prompt_token_ids[: second.reused_tokens] == sampled
    assert second.prompt_token_ids[-2:] == text_tokens("As")
    third = ask(session, [*history[:-1], assistant("As well."), user("end")], "ok")
    assert third.parent == 1 and session.statistics().drifted_turns == 0
    session.finish()
    [sequence] = session.sequences()
    trained = [
        token for token, mask in zip(sequence.response_ids, sequence.loss_mask, strict=True) if mask
    ]  # what the program wrote is prompt
    assert trained == [*sampled_tokens("is."), *sampled_tokens(" well."), *sampled_tokens("ok")]
    assert sequence.prompt_token_ids == first.prompt_token_ids


def test_an_answer_that_was_cut_off_continues_with_its_own_tokens() -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    cut = choice(plan, "It ")
    cut = replace(cut, generation=replace(cut.generation, stop_reason=StopReason.LENGTH))
    session.record(plan, cut)
    new_turn = session.plan([user("hi"), assistant("It")])
    assert new_turn.prompt_token_ids != [*plan.prompt_token_ids, *sampled_tokens("It ")], "nobody asked to continue it"
    later = session.plan([user("hi"), assistant("It"), user("more"), assistant("As")], continue_final=True)
    assert later.prompt_token_ids[-2:] == text_tokens("As"), "only the last message is continued"
    again = prefilled(session, [user("hi"), assistant("It")], "is.")
    assert again.prompt_token_ids == [*plan.prompt_token_ids, *sampled_tokens("It ")]
    assert (again.reused_tokens, again.parent) == (len(again.prompt_token_ids), 0)
    following = ask(session, [user("hi"), assistant("Itis."), user("more")], "ok")
    assert following.parent == 1 and session.statistics().drifted_turns == 0
    assert session.statistics().branches == 1


def test_an_answer_that_had_ended_is_rendered_as_a_prefill_and_counted() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    again = prefilled(session, [user("hi"), assistant("yo")], "!")
    assert again.prompt_token_ids[-2:] == text_tokens("yo") and again.parent is None
    assert session.statistics().drifted_turns == 1


def test_the_oldest_version_is_the_oldest_of_all_turns() -> None:
    session = new_session()
    assert session.oldest_version is None
    ask(session, [user("1")], "a", version=4)
    ask(session, [user("2")], "b", version=3)
    ask(session, [user("3")], "c", version=6)
    assert session.oldest_version == 3
    statistics = session.statistics()
    assert (statistics.oldest_version, statistics.newest_version) == (3, 6)
    assert (statistics.turns, statistics.sampled_tokens) == (3, 3)


def test_restarts_are_counted() -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    session.record_completion(plan, generation(plan.prompt_token_ids, [5], restarts=2))
    assert session.statistics().restarts == 2


def test_a_response_to_another_prompt_is_rejected() -> None:
    session = new_session()
    plan, other = session.plan([user("hi")]), session.plan([user("ho")])
    with pytest.raises(SessionError, match="another prompt"):
        session.record(plan, choice(other, "yo"))


@pytest.mark.parametrize("lost", ["token_ids", "logprobs", "versions"])
def test_a_response_without_tokens_logprobs_or_versions_is_rejected(lost: str) -> None:
    session = new_session()
    plan = session.plan([user("hi")])
    whole = generation(plan.prompt_token_ids, [5, 6])
    fields = {name: getattr(whole, name) for name in ("token_ids", "logprobs", "versions")}
    fields[lost] = []
    with pytest.raises(EngineError, match="cannot be trained on"):
        session.record_completion(plan, type(whole)(whole.prompt_token_ids, **fields, stop_reason="stop", text=""))
    assert session.statistics().turns == 0


def test_a_response_without_anything_is_rejected() -> None:
    session = new_session()
    plan = session.plan_completion([9])
    with pytest.raises(EngineError, match="a response has 0 tokens"):
        session.record_completion(plan, generation([9], []))


LIMITS = [  # two turns of five tokens fit, and nothing more
    (SessionLimits(max_turns=2), "max_turns"),
    (SessionLimits(max_tokens=10), "max_tokens"),
    (SessionLimits(max_exported_tokens=10), "max_exported_tokens"),
]


@pytest.mark.parametrize(("limits", "name"), LIMITS)
def test_a_session_that_has_used_its_turns_or_tokens_takes_no_request(limits: SessionLimits, name: str) -> None:
    session = new_session(limits=limits)
    late = session.plan([user("3")])
    ask(session, [user("1")], "a")
    ask(session, [user("2")], "b")
    for refused in (
        lambda: session.plan([user("3")]),
        lambda: session.plan_completion([1]),
        lambda: session.record(late, choice(late, "c")),
    ):
        with pytest.raises(SessionError, match=rf"\({name}\).*Finish it"):
            refused()
    session.finish(1.0)
    assert [sequence.turns for sequence in session.sequences()] == [[0], [1]]


@pytest.mark.parametrize(
    ("limits", "name"),
    [
        (SessionLimits(max_turns=2), "max_turns"),
        (SessionLimits(max_tokens=6), "max_tokens"),  # one prompt of four tokens, held once
        (SessionLimits(max_exported_tokens=10), "max_exported_tokens"),
    ],
)
def test_several_responses_have_room_together_or_not_at_all(limits: SessionLimits, name: str) -> None:
    session = new_session(limits=limits)
    plan = session.plan([user("1")])
    session.check_room(2, plan=plan)
    with pytest.raises(SessionError, match=name):
        session.check_room(3, plan=plan)
    session.record(plan, choice(plan, "a"))
    session.check_room(1, plan=plan)
    with pytest.raises(SessionError, match=name):
        session.check_room(2, plan=plan)
    assert session.statistics().turns == 1


def test_without_a_plan_turns_and_sampled_tokens_are_checked() -> None:
    session = new_session(limits=SessionLimits(max_turns=4, max_tokens=8))
    session.check_room(4)
    session.check_room(1, sampled_tokens=8)
    for responses, sampled in ((5, 0), (1, 9)):
        with pytest.raises(SessionError, match="max_t"):
            session.check_room(responses, sampled_tokens=sampled)
    session.finish()
    with pytest.raises(SessionError, match="has finished"):
        session.check_room(1)


def test_a_response_longer_than_the_room_that_is_left_is_not_kept() -> None:
    session = new_session(limits=SessionLimits(max_tokens=10))
    plan = session.plan([user("1")])
    with pytest.raises(SessionError, match="would hold 11 of at most 10 tokens"):
        session.record(plan, choice(plan, "x" * 7))
    assert session.statistics().turns == session.statistics().sampled_tokens == 0
    session.record(plan, choice(plan, "x" * 6))


def test_a_full_session_renders_nothing_more() -> None:
    renderer = ReadableRenderer()
    session = Session("s", renderer, SessionLimits(max_turns=1))
    ask(session, [user("hi")], "yo")
    before = renderer.rendered_messages
    with pytest.raises(SessionError, match="max_turns"):
        session.plan([user("other")])
    assert renderer.rendered_messages == before


def test_a_prompt_that_leaves_no_room_for_one_token_is_rejected_before_sampling() -> None:
    session = new_session(limits=SessionLimits(max_tokens=10))
    for refused in (lambda: session.plan([user("x" * 10)]), lambda: session.plan_completion([1] * 10)):
        with pytest.raises(SessionError, match=r"would hold \d+ of at most 10 tokens"):
            refused()
    session.plan_completion([1] * 9)


def test_a_continued_conversation_is_exported_once_and_each_branch_from_its_beginning() -> None:
    session = new_session(limits=SessionLimits(max_exported_tokens=30))
    ask(session, [user("1")], "a")
    history = [user("1"), assistant("a"), user("2")]
    plan = ask(session, history, "b")
    assert session._turns.exported_tokens == session._turns.held_tokens == len(plan.prompt_token_ids) + 1
    ask(session, history, "c")
    assert session._turns.exported_tokens == 2 * (len(plan.prompt_token_ids) + 1)
    with pytest.raises(SessionError, match="each branch repeats"):
        session.plan(history)


def test_the_responses_to_one_prompt_hold_it_once() -> None:
    session = new_session()
    plan = session.plan([user("x" * 1000)])
    for answer in "abc":
        session.record(plan, choice(plan, answer))
    assert session._turns.held_tokens == len(plan.prompt_token_ids) + 3


def test_the_responses_to_one_continuation_hold_its_new_tokens_once() -> None:
    session = new_session()
    for prompt in ([9], [9, 8, 1, 2], [9, 8, 1, 2]):
        plan = session.plan_completion(prompt)
        session.record_completion(plan, generation(prompt, [8]))
    assert session._turns.held_tokens == (1 + 1) + (2 + 1) + 1


def test_a_long_conversation_is_rendered_and_looked_up_once_per_message() -> None:
    renderer = ReadableRenderer()
    session = Session("s", renderer)
    history = [user("0")]
    for turn in range(50):
        ask(session, history, f"answer {turn}")
        history = [*history, assistant(f"answer {turn}"), user(str(turn))]
    assert renderer.rendered_messages == 50
    session.finish()
    [sequence] = session.sequences()
    assert session.statistics().branches == 1
    assert len(sequence.prompt_token_ids) + len(sequence.response_ids) == session._turns.held_tokens


@pytest.mark.parametrize("reward", [math.nan, math.inf])
def test_a_reward_must_be_finite(reward: float) -> None:
    session = new_session()
    with pytest.raises(SessionError, match="finite"):
        session.set_reward(reward)
    with pytest.raises(SessionError, match="finite"):
        session.finish(reward)


@pytest.mark.parametrize("reward", [0.0, 1.0])
def test_a_session_knows_whether_a_reward_was_given_at_all(reward: float) -> None:
    silent, told, told_of_a_turn, told_at_the_end = sessions = [new_session() for _ in range(4)]
    for session in sessions:
        ask(session, [user("hi")], "yo")
    told.set_reward(reward)
    told_of_a_turn.set_reward(reward, turn=0)
    told_at_the_end.finish(reward)
    silent.finish()
    assert [session.rewarded for session in sessions] == [False, True, True, True]
    assert silent.sequences()[0].rewards == [0.0, 0.0]


def test_an_empty_answer_elsewhere_is_no_repetition() -> None:
    session = new_session()
    ask(session, [user("hi")], "")
    assert not session.plan([user("other"), assistant(""), user("more")]).drifted
    assert session.plan([user("hi"), assistant(None), user("more")]).reused_tokens > 0


def test_a_reward_needs_its_turn() -> None:
    session = new_session()
    ask(session, [user("hi")], "yo")
    for turn in (1, -1):
        with pytest.raises(SessionError, match=f"no turn {turn}"):
            session.set_reward(1.0, turn=turn)
