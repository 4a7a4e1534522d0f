"""One session: the requests of a program and their responses, token for token.

    plan(messages) ──> prompt tokens ──sampled by the engines──> record(plan, choice)      any number concurrently
    set_reward ──> finish ──> sequences(), export()

``plan`` changes nothing: a request that fails or is cancelled leaves no trace.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, fields
from enum import Enum
from typing import Any

from skyrl_train.endpoint.sessions.deduplicator import CompletedRequests, RequestDeduplicator
from skyrl_train.endpoint.sessions.export import SessionSequence, to_sequences
from skyrl_train.endpoint.sessions.messages import CanonicalMessage, MessageTree, canonical_messages, setting_digest
from skyrl_train.endpoint.sessions.turns import Turn, TurnTree, differing_tokens, token_list
from skyrl_train.errors import ConfigError, SessionError
from skyrl_train.inference.chat.conversation import normalize_messages
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.chat.requests import ChatChoice
from skyrl_train.inference.interface import StopReason
from skyrl_train.inference.requests import Generation

_EXPORT_IN_THREAD_TOKENS = 50_000  # fewer are exported on the event loop, within a millisecond or two


@dataclass(frozen=True, slots=True)
class SessionLimits:
    """Limits of one :class:`~skyrl_train.endpoint.sessions.store.SessionStore`.

    ``max_turns``, ``max_tokens`` and ``max_exported_tokens`` are strict. A request that would exceed one is rejected
    before sampling if that is known by then. Otherwise (its own length or concurrent requests decide) it fails when it is
    recorded, and nothing of it is kept.

    Args:
        max_sessions: open sessions, including finished ones until they are closed, without reserved ones.
        max_turns: responses per session.
        max_tokens: tokens that one session holds: prompts and responses, shared prefixes once.
        max_exported_tokens: tokens of the sequences that a session produces. Each branch repeats its prefix, so many
            short branches of a long prompt are few tokens to hold and many to train on.
        idle_expiry_s: a session without a request for this long is dropped. Must exceed the longest tool call.
        retry_window_s: how long a finished response is kept for a late retry.
        max_kept_responses: finished responses kept for retries over all sessions; the oldest are dropped first.
        retry_after_s: ``Retry-After`` for clients when ``max_sessions`` are open.
    """

    max_sessions: int = 10_000
    max_turns: int = 1_000
    max_tokens: int = 4_000_000
    max_exported_tokens: int = 4_000_000
    idle_expiry_s: float = 3600.0
    retry_window_s: float = 60.0
    max_kept_responses: int = 1_000
    retry_after_s: float = 1.0

    def __post_init__(self) -> None:
        for limit in fields(self):
            least = 0 if limit.name == "max_kept_responses" else 1e-3
            if not getattr(self, limit.name) >= least:
                raise ConfigError(f"{limit.name} must be positive, got {getattr(self, limit.name)}.")


@dataclass(frozen=True, slots=True)
class SessionStatistics:
    """Counts of one session so far.

    Args:
        branches: sequences that the session produces.
        drifted_turns: turns whose request contained responses of this session whose tokens could not be reused, because
            they were changed, moved, given with other tools, or because the template cannot be extended.
        drifted_tokens: reused tokens that a fresh rendering would have tokenized differently.
        restarts: requests that an engine restarted from the beginning.
    """

    turns: int
    branches: int
    drifted_turns: int
    drifted_tokens: int
    sampled_tokens: int
    oldest_version: int | None
    newest_version: int | None
    restarts: int
    finished: bool


@dataclass(frozen=True, slots=True)
class _MessagePosition:
    """The position of an answer in the message tree: after ``messages``, which follow the node ``after``."""

    setting: bytes
    after: int | None
    messages: list[CanonicalMessage]


@dataclass(frozen=True, slots=True)
class TurnPlan:
    """The prompt of a request. Its first ``reused_tokens`` are tokens of earlier turns, exactly as sampled.

    ``prefill`` is the message that the response continues; its tokens are part of the prompt.
    """

    prompt_token_ids: list[int]
    reused_tokens: int = 0
    parent: int | None = field(default=None, repr=False)  # the turn that is extended
    position: _MessagePosition | None = field(default=None, repr=False)  # None for a prompt of tokens
    drifted: bool = field(default=False, repr=False)
    prefill: Mapping[str, Any] | None = field(default=None, repr=False)


class _SessionState(Enum):
    OPEN = "open"
    FINISHED = "finished"
    CLOSED = "closed"


class Session:
    """The requests of one sample. All methods run on one event loop.

    Args:
        session_id: names the sample.
        renderer: converts messages into tokens.
        clock: seconds, for ``last_used``.
        completed: finished responses for late retries, shared by the sessions of a store.
    """

    def __init__(
        self,
        session_id: str,
        renderer: ChatRenderer,
        limits: SessionLimits | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
        completed: CompletedRequests | None = None,
    ) -> None:
        limits = limits or SessionLimits()
        self.id = session_id
        self.deduplicator = RequestDeduplicator(
            completed or CompletedRequests(limits.max_kept_responses, limits.retry_window_s, clock)
        )
        self.last_used = clock()
        # Told the names of called tools, and the seconds from their response to the request that continues it.
        self.on_tools: Callable[[Sequence[str], float], None] = lambda names, seconds: None
        self.requested = False  # a request for a response has arrived, answered or not
        self.refusal = ""  # the error that its last refused request was answered with
        self.rewarded = False  # a reward was set; a session without one is worth 0
        self._renderer = renderer
        self._limits = limits
        self._clock = clock
        self._state = _SessionState.OPEN
        self._why = ""  # why it no longer takes requests
        self._turns = TurnTree()
        self._messages = MessageTree(self._turns)
        self._reward = 0.0
        self._turn_rewards: dict[int, float] = {}
        self._versions: tuple[int, int] | None = None  # oldest, newest
        self._sampled_tokens = self._drifted_turns = self._drifted_tokens = self._restarts = 0
        self._calling: dict[int, tuple[list[str], float]] = {}  # by turn: the tools that it calls, and since when
        self._extended: list[int] = []  # extended turns whose drifted tokens are not counted yet

    def __repr__(self) -> str:
        return f"Session({self.id!r}, {self._state.value}, {len(self._turns.turns)} turns)"

    @property
    def oldest_version(self) -> int | None:
        """The oldest policy version among the sampled tokens; it determines the staleness of the next request."""
        return None if self._versions is None else self._versions[0]

    @property
    def finished(self) -> bool:
        """Whether the session is complete: it takes no further turns and can be trained on."""
        return self._state is _SessionState.FINISHED

    # Turns ---------------------------------------------------------------------------------------------------------

    def plan(
        self,
        messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] = (),
        template_kwargs: Mapping[str, Any] | None = None,
        continue_final: bool = False,
    ) -> TurnPlan:
        """Return the prompt for a conversation in OpenAI's chat format.

        Extends the longest recorded conversation that is a prefix of ``messages``, token by token. If there is none, or
        the template cannot be extended, renders everything, and the turn starts a new branch.

        Args:
            continue_final: the response continues the last message. If that is an answer of this session that was cut off, its
                tokens are reused as sampled.

        Raises:
            SessionError: the session has ended, or has no room for a response (see :meth:`check_room`).
            ConfigError: the template rejects the messages.
        """
        self.check_room()  # before anything is rendered
        self.last_used = self._clock()
        kwargs = dict(template_kwargs or {})
        setting, canonical = setting_digest(tools, kwargs), canonical_messages(messages)
        # First choice: messages continue a recorded turn, whose tokens are reused as sampled.
        # Tools and template arguments are part of the match: with others the template renders another prompt.
        # A prefill is the beginning of the answer, not a part of the history.
        history = canonical[:-1] if continue_final else canonical
        prefill = messages[-1] if continue_final else None
        match = self._messages.match(setting, history)
        cut_off = self._cut_off_turn(setting, canonical) if continue_final else None
        rewritten = match.rewritten
        parent = prompt = None
        if cut_off is not None:
            parent, prompt = cut_off, [*self._turns.prompt(cut_off.index), *token_list(cut_off.response)]
        else:
            rewritten += self._messages.count_answers(canonical[len(history) :])
            if match.turn is not None:
                parent = self._turns.turns[match.turn]
                prompt = self._extend(match.turn, messages[match.length :], tools, kwargs, continue_final)
        if parent is not None and prompt is not None:
            position = _MessagePosition(setting, match.node, history[match.length :])
            plan = TurnPlan(prompt, parent.end, parent.index, position, rewritten > 0, prefill)
        else:
            prompt = self._renderer.render(messages, tools=tools, template_kwargs=kwargs, continue_final=continue_final)
            # Tokens decide which turn is extended: the rendering may start with exactly what was sampled.
            parent = self._turns.longest_prefix(prompt)
            # Repeated answers beyond the turns on the extended path were not reused: the request has drifted.
            lost = max(match.answers, self._messages.count_answers(history[: match.length])) + rewritten
            position = _MessagePosition(setting, None, history)
            if parent is None:
                plan = TurnPlan(prompt, 0, None, position, lost > 0, prefill)
            else:
                drifted = lost > len(self._turns.path(parent.index))
                plan = TurnPlan(prompt, parent.end, parent.index, position, drifted, prefill)
        self.check_room(plan=plan)
        if plan.parent in self._calling:
            names, since = self._calling.pop(plan.parent)
            self.on_tools(names, self._clock() - since)
        return plan

    def plan_completion(self, prompt_token_ids: Sequence[int]) -> TurnPlan:
        """Return the plan for a prompt of tokens. It extends a turn whose tokens are a prefix of the prompt.

        Raises:
            SessionError: as for :meth:`plan`.
        """
        self.check_room()
        self.last_used = self._clock()
        prompt = list(prompt_token_ids)
        parent = self._turns.longest_prefix(prompt)
        plan = TurnPlan(prompt) if parent is None else TurnPlan(prompt, parent.end, parent.index)
        self.check_room(plan=plan)
        return plan

    def check_room(self, responses: int = 1, *, plan: TurnPlan | None = None, sampled_tokens: int = 0) -> None:
        """Raise SessionError if so many further responses exceed the session's limits. Reserves nothing.

        A caller with several responses checks before sampling, and again with the sampled tokens before recording the
        first one, so that either all of them are recorded or none.

        Args:
            plan: their prompt. Without it only their own tokens count.
            sampled_tokens: of all responses together; each counts as at least one token.

        Raises:
            SessionError: the session has ended, or they do not fit; the message names the limit.
        """
        self._check_open()
        turns, limits = self._turns, self._limits
        # A response without tokens does not exist, so each counts as one token at least.
        held = exported = max(responses, sampled_tokens)
        if plan is not None:
            more = turns.growth(plan.parent, plan.prompt_token_ids, responses)
            held, exported = held + more[0], exported + more[1]
        after_turns = len(turns.turns) + responses
        after_held, after_exported = turns.held_tokens + held, turns.exported_tokens + exported
        problem = None
        if after_turns > limits.max_turns:
            problem = f"would have {after_turns} of at most {limits.max_turns} turns (max_turns). Finish it."
        elif after_held > limits.max_tokens:
            problem = f"would hold {after_held} of at most {limits.max_tokens} tokens (max_tokens). Finish it."
        elif after_exported > limits.max_exported_tokens:
            problem = (
                f"would be trained on as {after_exported} of at most {limits.max_exported_tokens} tokens "
                "(max_exported_tokens): each branch repeats the tokens before it. Finish it; continue conversations "
                "instead of starting them again, or raise the limit."
            )
        if problem is not None:
            raise SessionError(f"Session {self.id!r} {problem}")

    def record(self, plan: TurnPlan, choice: ChatChoice) -> int:
        """Record a response to a planned prompt and return the index of its turn. A plan may have many responses.

        Raises:
            SessionError: the session has ended, the response exceeds its limits, or it belongs to another prompt.
            EngineError: the response has no tokens, or tokens without a log-prob or version.
        """
        turn = self.record_completion(plan, choice.generation)
        if choice.message.tool_calls:
            self._calling[turn] = [call.name for call in choice.message.tool_calls], self.last_used
        if plan.position is not None:
            message = choice.message.to_openai()
            if plan.prefill is not None:  # programs send the whole message back
                message["content"] = f"{plan.prefill['content']}{message['content'] or ''}"
                if (reasoning := plan.prefill.get("reasoning_content")) is not None:
                    message["reasoning_content"] = reasoning
            [answer] = canonical_messages(normalize_messages([message]))  # as it comes back in the next request
            position = plan.position
            self._messages.add(position.setting, position.after, position.messages, answer, turn)
        return turn

    def record_completion(self, plan: TurnPlan, generation: Generation) -> int:
        """Like :meth:`record` for a response that is not a message. Only prompts of tokens can continue it."""
        if generation.prompt_token_ids != plan.prompt_token_ids:
            raise SessionError(f"Session {self.id!r} was given a response to another prompt than the one it planned.")
        self.check_room(plan=plan, sampled_tokens=len(generation.token_ids))
        # add() validates before it changes anything; the counts below only follow a recorded turn.
        turn = self._turns.add(plan.parent, generation)
        if turn.parent is not None and self._turns.turns[turn.parent].children == (turn.index,):
            self._extended.append(turn.parent)  # extended for the first time
        # The oldest version decides the staleness of the whole sample.
        versions = (*generation.versions, *(self._versions or ()))
        self._versions = (min(versions), max(versions))
        self._sampled_tokens += turn.sampled_tokens
        self._drifted_turns += plan.drifted
        self._restarts += generation.restarts
        self.last_used = self._clock()
        return turn.index

    def _cut_off_turn(self, setting: bytes, canonical: Sequence[CanonicalMessage]) -> Turn | None:
        """Return the turn whose answer is the last of these messages, if it ended at a token limit."""
        match = self._messages.match(setting, canonical)
        turn = None if match.turn is None else self._turns.turns[match.turn]
        if turn is None or turn.stop_reason != StopReason.LENGTH or match.length < len(canonical):
            return None
        return turn

    def _extend(
        self,
        turn: int,
        new_messages: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]],
        template_kwargs: Mapping[str, Any],
        continue_final: bool,
    ) -> list[int] | None:
        """Return the prompt that continues a turn, or None if the template cannot be extended."""
        before, response = self._turns.prompt(turn), token_list(self._turns.turns[turn].response)
        try:
            prompt = self._renderer.extend(
                before,
                response,
                new_messages,
                tools=tools,
                template_kwargs=template_kwargs,
                continue_final=continue_final,
            )
        except ConfigError:
            return None
        # Some templates rewrite earlier turns; such a prompt would not continue the sampled tokens.
        known = [*before, *response]
        return prompt if prompt[: len(known)] == known else None

    def _check_open(self) -> None:
        if self._state is not _SessionState.OPEN:
            raise SessionError(f"Session {self.id!r} {self._why}. Open a new session for a new sample.")

    # Reward and end ------------------------------------------------------------------------------------------------

    def set_reward(self, reward: float, turn: int | None = None) -> None:
        """Set the reward of the session, or of the turn with index ``turn``. A later call replaces an earlier one.

        The return of the session is the sum of the session's and its turns' rewards.

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
        self.rewarded = True

    def fail(self, reward: float) -> None:
        """Set the return of the session of a failed run, in place of all rewards so far. The session may have finished."""
        self._reward, self._turn_rewards, self.rewarded = float(reward), {}, True

    def finish(self, reward: float | None = None) -> None:
        """Finish the session and cancel its running requests. Finishing again has no effect.

        Raises:
            SessionError: the session is closed, or has finished with another reward.
        """
        # An agent and its generator may both finish the session.
        if self._state is _SessionState.FINISHED and reward in (None, self._reward):
            return
        self._check_open()
        if reward is not None:
            self.set_reward(reward)
        self._end(_SessionState.FINISHED, "has finished")

    def close(self, why: str = "was closed") -> None:
        """Drop all data. Idempotent."""
        if self._state is _SessionState.CLOSED:
            return
        self._end(_SessionState.CLOSED, why)
        # New trees instead of cleared ones: an export may still read the old ones in a thread.
        self._turns, self._extended = TurnTree(), []
        self._messages = MessageTree(self._turns)

    def _end(self, state: _SessionState, why: str) -> None:
        self._state, self._why = state, why
        self.deduplicator.end(SessionError(f"Session {self.id!r} {why} while the request was running."))

    # Results -------------------------------------------------------------------------------------------------------

    def sequences(self) -> list[SessionSequence]:
        """Return the finished session as training data; see :mod:`~skyrl_train.endpoint.sessions.export`.

        Takes time in proportion to ``max_exported_tokens``. Use :meth:`export` on an event loop.

        Raises:
            SessionError: the session has not finished, is closed, or sampled nothing.
        """
        self._check_exportable()
        return to_sequences(self._turns, self._reward, self._turn_rewards)

    async def export(self) -> list[SessionSequence]:
        """Like :meth:`sequences`; builds them in a thread if the session is large.

        Raises:
            SessionError: as for :meth:`sequences`.
        """
        self._check_exportable()
        if self._turns.exported_tokens <= _EXPORT_IN_THREAD_TOKENS:
            return to_sequences(self._turns, self._reward, self._turn_rewards)
        # Safe without a lock: nothing is recorded in a finished session, and close() replaces the tree.
        return await asyncio.to_thread(to_sequences, self._turns, self._reward, self._turn_rewards)

    def _check_exportable(self) -> None:
        if self._state is not _SessionState.FINISHED:
            what = (
                "has not finished; finish it first" if self._state is _SessionState.OPEN else f"{self._why}; it is gone"
            )
            raise SessionError(f"Session {self.id!r} {what}.")
        if not self._turns.turns:
            raise SessionError(
                f"Session {self.id!r} sampled nothing, so there is nothing to train on. Does the program send its "
                "requests to this endpoint, and did one of them succeed?"
            )

    def statistics(self) -> SessionStatistics:
        """Return the counts so far. Tokenizes the turns extended since the last call to count drifted tokens."""
        # Only extended turns count: of the others no token has been reused.
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
