"""One session: what a program's requests and the responses to them were, token for token (SEMANTICS 3).

    plan(messages) ──> prompt tokens ──sampled by the engines──> record(plan, choice)      any number at once
    set_reward ──> finish ──> sequences(), export()

A plan changes nothing: a request that fails or is cancelled leaves no trace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from enum import Enum
from typing import Any

from skyrl_train.concurrency import Signal
from skyrl_train.errors import ConfigError, SessionError
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import ChatChoice
from skyrl_train.inference.requests import Generation
from skyrl_train.inference.sessions.canonical import CanonicalMessage, canonical_messages, setting_digest
from skyrl_train.inference.sessions.export import SessionSequence, to_sequences
from skyrl_train.inference.sessions.limits import SessionLimits, SessionUse
from skyrl_train.inference.sessions.single_flight import KeptFlights, SingleFlight
from skyrl_train.inference.sessions.statistics import SessionStatistics, SessionTotals
from skyrl_train.inference.sessions.tree import MessageTree
from skyrl_train.inference.sessions.turns import TurnTree, differing_tokens, token_list

_AT_ONCE_TOKENS = 50_000  # exported on the caller's thread, within a millisecond or two


@dataclass(frozen=True, slots=True)
class _Place:
    """Where in the message tree an answer belongs: after ``messages``, which follow ``after``."""

    setting: bytes
    after: int | None
    messages: list[CanonicalMessage]


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The prompt of a request. Its first ``reused_tokens`` are those of earlier turns, as sampled."""

    prompt_token_ids: list[int]
    reused_tokens: int = 0
    parent: int | None = field(default=None, repr=False)  # the turn that is extended
    place: _Place | None = field(default=None, repr=False)  # None: tokens came in, not messages
    drifted: bool = field(default=False, repr=False)


class _State(Enum):
    OPEN = "open"
    FINISHED = "finished"
    GONE = "gone"


class Session:
    """One sample. All calls come from one event loop; none of them waits, except ``wait_finished``.

    Args:
        session_id: names the sample.
        renderer: turns messages into tokens.
        clock: seconds; tells when the session was used last.
        kept: finished responses for late retries, shared by the sessions of a store.
        totals: of a store; counted along.
    """

    def __init__(
        self,
        session_id: str,
        renderer: ChatRenderer,
        limits: SessionLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        kept: KeptFlights | None = None,
        totals: SessionTotals | None = None,
    ) -> None:
        limits = limits or SessionLimits()
        self.id = session_id
        self.single_flight = SingleFlight(kept or KeptFlights(limits.max_kept_responses, limits.retry_window_s, clock))
        self.last_used = clock()
        self._renderer = renderer
        self._limits = limits
        self._clock = clock
        self._totals = totals or SessionTotals()
        self._state = _State.OPEN
        self._why = ""  # it is gone
        self._changed = Signal()
        self._turns = TurnTree()
        self._messages = MessageTree(self._turns)
        self._reward = 0.0
        self._rewarded = False
        self._turn_rewards: dict[int, float] = {}
        self._versions: tuple[int, int] | None = None  # oldest, newest
        self._sampled_tokens = self._drifted_turns = self._drifted_tokens = self._restarts = 0
        self._extended: list[int] = []  # turns with drifted tokens not counted yet

    def __repr__(self) -> str:
        return f"Session({self.id!r}, {self._state.value}, {len(self._turns.turns)} turns)"

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the tokens sampled so far: what the session's next request is as old as."""
        return None if self._versions is None else self._versions[0]

    @property
    def finished(self) -> bool:
        """Whether the session has ended well: nothing is recorded any more, and it can be trained on."""
        return self._state is _State.FINISHED

    @property
    def rewarded(self) -> bool:
        """Whether a reward was set, of the session or of a turn; a session without any is worth 0."""
        return self._rewarded

    # Turns ---------------------------------------------------------------------------------------------------------

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
    ) -> TurnPlan:
        """Returns the prompt for a conversation in OpenAI's chat shape.

        The longest recorded conversation that it begins with is extended token by token; without one, or where the
        template cannot be extended, everything is rendered, and the turn begins a new branch.

        Raises:
            SessionError: the session has ended, or has no room for a response (see :meth:`check_room`).
            ConfigError: the template refuses the messages.
        """
        self._take_request()
        plan = self._plan_chat(messages, tools, template_kwargs)
        self.check_room(plan=plan)
        return plan

    def _plan_chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any] | None,
    ) -> TurnPlan:
        kwargs = dict(template_kwargs or {})
        setting, canonical = setting_digest(tools, kwargs), canonical_messages(messages)
        match = self._messages.match(setting, canonical)
        if match.turn is not None:
            prompt = self._extend(match.turn, messages[match.length :], tools, kwargs)
            if prompt is not None:
                place = _Place(setting, match.node, canonical[match.length :])
                reused = self._turns.turns[match.turn].end
                return TurnPlan(prompt, reused, match.turn, place, match.rewritten > 0)
        prompt = self._renderer.render(messages, tools=tools, template_kwargs=kwargs)
        # Tokens decide what is extended: a rendering may well begin with exactly what was sampled.
        parent = self._turns.longest_prefix(prompt)
        lost = self._messages.count_answers(canonical[: match.length]) + match.rewritten
        place = _Place(setting, None, canonical)
        if parent is None:
            return TurnPlan(prompt, 0, None, place, lost > 0)
        return TurnPlan(prompt, parent.end, parent.index, place, lost > len(self._turns.path(parent.index)))

    def plan_completion(self, prompt_token_ids: Sequence[int]) -> TurnPlan:
        """Returns the plan of a prompt that came as tokens; it extends a turn whose tokens it begins with.

        Raises:
            SessionError: as for :meth:`plan`.
        """
        self._take_request()
        prompt = list(prompt_token_ids)
        parent = self._turns.longest_prefix(prompt)
        plan = TurnPlan(prompt) if parent is None else TurnPlan(prompt, parent.end, parent.index)
        self.check_room(plan=plan)
        return plan

    def check_room(self, responses: int = 1, *, plan: TurnPlan | None = None, sampled_tokens: int = 0) -> None:
        """Checks that so many further responses fit the session's limits; keeps nothing for them.

        Whoever wants several responses asks before they are sampled, and again with what was sampled before the first of
        them is recorded: either all of them are kept or none.

        Args:
            plan: what they answer. Without it only their own tokens count.
            sampled_tokens: of all of them together; at least one each is counted.

        Raises:
            SessionError: the session has ended, or they do not fit; the message names the limit.
        """
        self._check_open()
        held = exported = max(responses, sampled_tokens)
        if plan is not None:
            more = self._turns.growth(plan.parent, plan.prompt_token_ids, responses)
            held, exported = held + more[0], exported + more[1]
        turns = self._turns
        use = SessionUse(len(turns.turns) + responses, turns.held_tokens + held, turns.exported_tokens + exported)
        if (exceeded := self._limits.exceeded(use)) is not None:
            raise SessionError(f"Session {self.id!r} {exceeded}")

    def record(self, plan: TurnPlan, choice: ChatChoice) -> int:
        """Keeps an answer to a planned prompt, and returns the index of the turn. A plan may have many answers.

        Raises:
            SessionError: the session has ended, the answer does not fit its limits, or it is to another prompt.
            EngineError: the answer has no tokens, or some of them no log-prob or version.
        """
        turn = self.record_completion(plan, choice.generation)
        if plan.place is not None:
            [answer] = canonical_messages([choice.message.to_openai()])
            place = plan.place
            self._messages.add(place.setting, place.after, place.messages, answer, turn)
        return turn

    def record_completion(self, plan: TurnPlan, generation: Generation) -> int:
        """Like :meth:`record` for a response that is no message: no conversation continues it, only tokens do."""
        self._check_open()
        if generation.prompt_token_ids != plan.prompt_token_ids:
            raise SessionError(f"Session {self.id!r} was given a response to another prompt than the one it planned.")
        self.check_room(plan=plan, sampled_tokens=len(generation.token_ids))
        branches = self._turns.branches
        turn = self._turns.add(plan.parent, generation)
        if turn.parent is not None and self._turns.turns[turn.parent].children == (turn.index,):
            self._extended.append(turn.parent)
        oldest, newest = self._versions or (generation.versions[0], generation.versions[0])
        self._versions = (min(oldest, *generation.versions), max(newest, *generation.versions))
        self._sampled_tokens += turn.sampled_tokens
        self._drifted_turns += plan.drifted
        self._restarts += generation.restarts
        self._totals.turns += 1
        self._totals.branches += self._turns.branches - branches
        self._totals.drifted_turns += plan.drifted
        self._totals.sampled_tokens += turn.sampled_tokens
        self.last_used = self._clock()
        return turn.index

    def _extend(
        self,
        turn: int,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
    ) -> list[int] | None:
        """The prompt that goes on after a turn; None where the template cannot be extended."""
        before, response = self._turns.prompt(turn), token_list(self._turns.turns[turn].response)
        try:
            prompt = self._renderer.extend(before, response, new_messages, tools=tools, template_kwargs=template_kwargs)
        except ConfigError:
            return None
        known = [*before, *response]
        return prompt if prompt[: len(known)] == known else None

    def _take_request(self) -> None:
        self.check_room()  # before anything is rendered
        self.last_used = self._clock()

    def _check_open(self) -> None:
        if self._state is not _State.OPEN:
            raise SessionError(f"Session {self.id!r} {self._why}. Open a new session for a new sample.")

    # Reward and end ------------------------------------------------------------------------------------------------

    def set_reward(self, reward: float, turn: int | None = None) -> None:
        """Sets the reward of the session, or of one turn by its index; a later call replaces an earlier one.

        The session's return is the sum of its own reward and its turns'.

        Raises:
            SessionError: the session has ended, the turn does not exist, or the reward is not finite.
        """
        self._check_open()
        if not math.isfinite(reward):
            raise SessionError(f"The reward of session {self.id!r} is {reward}; it must be a finite number.")
        self.last_used = self._clock()
        if turn is None:
            self._reward = float(reward)
        elif 0 <= turn < len(self._turns.turns):
            self._turn_rewards[turn] = float(reward)
        else:
            raise SessionError(f"Session {self.id!r} has no turn {turn}; it has {len(self._turns.turns)} turns.")
        self._rewarded = True

    def finish(self, reward: float | None = None) -> None:
        """Ends the session. Requests that still run are cancelled. Finishing again changes nothing.

        Raises:
            SessionError: the session is gone, or has finished with another reward.
        """
        if self._state is _State.FINISHED and reward in (None, self._reward):
            return
        self._check_open()
        if reward is not None:
            self.set_reward(reward)
        self._end(_State.FINISHED, "has finished")
        self._totals.finished += 1

    def close(self, why: str = "was closed") -> None:
        """Drops everything. Idempotent."""
        if self._state is _State.GONE:
            return
        self._end(_State.GONE, why)
        self._turns, self._extended = TurnTree(), []
        self._messages = MessageTree(self._turns)

    async def wait_finished(self) -> None:
        """Returns when the session has finished.

        Raises:
            SessionError: it was closed or expired instead.
        """
        await self._changed.wait_until(lambda: self._state is not _State.OPEN)
        if self._state is _State.GONE:
            self._check_open()

    def _end(self, state: _State, why: str) -> None:
        self._state, self._why = state, why
        self.single_flight.end(SessionError(f"Session {self.id!r} {why} while the request was running."))
        self._changed.notify()

    # What it became ------------------------------------------------------------------------------------------------

    def sequences(self) -> list[SessionSequence]:
        """The finished session as training data: see :mod:`~skyrl_train.inference.sessions.export`.

        Takes time in proportion to ``max_exported_tokens``: on an event loop, :meth:`export` is for that.

        Raises:
            SessionError: the session has not finished, is gone, or nothing was sampled in it.
        """
        self._check_exportable()
        return to_sequences(self._turns, self._reward, self._turn_rewards)

    async def export(self) -> list[SessionSequence]:
        """:meth:`sequences`, of a large session built in a thread while the event loop goes on.

        Raises:
            SessionError: as for :meth:`sequences`.
        """
        self._check_exportable()
        if self._turns.exported_tokens <= _AT_ONCE_TOKENS:
            return to_sequences(self._turns, self._reward, self._turn_rewards)
        # Nothing is recorded in a finished session, and one that is closed meanwhile gets another tree.
        return await asyncio.to_thread(to_sequences, self._turns, self._reward, self._turn_rewards)

    def _check_exportable(self) -> None:
        if self._state is not _State.FINISHED:
            what = "has not finished; finish it first" if self._state is _State.OPEN else f"{self._why}; it is gone"
            raise SessionError(f"Session {self.id!r} {what}.")
        if not self._turns.turns:
            raise SessionError(
                f"Session {self.id!r} sampled nothing, so there is nothing to train on. Does the program send its "
                "requests to this endpoint, and did one of them succeed?"
            )

    def statistics(self) -> SessionStatistics:
        """Counts what happened so far. Encodes the answers that were extended since the last call, to find drift."""
        for turn in self._extended:
            sampled = token_list(self._turns.turns[turn].response)
            self._drifted_tokens += differing_tokens(sampled, self._renderer.retokenise(sampled))
        self._extended.clear()
        oldest, newest = self._versions or (None, None)
        return SessionStatistics(
            turns=len(self._turns.turns),
            branches=self._turns.branches,
            drifted_turns=self._drifted_turns,
            drifted_tokens=self._drifted_tokens,
            sampled_tokens=self._sampled_tokens,
            oldest_version=oldest,
            newest_version=newest,
            restarts=self._restarts,
            finished=self.finished,
        )
