"""The client that a generator has in an actor: the same calls, answered by the client in the process that trains."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncGenerator, Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING

from skyrl_train.generators.remote.messages import Answer, Ask, CentralState, Event, Failed, Part, Withdraw
from skyrl_train.inference.chat.renderer import ChatRenderer
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.fleet import EngineState
from skyrl_train.inference.interface import EngineCapabilities
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class ForwardingClient(RequestClient):
    """Renders, parses and decodes here; has every response sampled by the central client.

    Versions, log-probs, continuation and replay are therefore the same as without actors. What it says of itself, such as
    ``policy_version``, is what the last message from the centre said; the versions of tokens are exact.

    Args:
        tell: sends an event to the centre.
    """

    def __init__(
        self,
        tokenizer: PreTrainedTokenizerBase,
        renderer: ChatRenderer,
        state: CentralState,
        tell: Callable[[Event], None],
    ) -> None:
        self._tokenizer = tokenizer
        self._renderer = renderer
        self._tell = tell
        self._numbers = itertools.count(1)
        self._answers: dict[int, _Answers] = {}
        self.state = state

    @property
    def tokenizer(self) -> PreTrainedTokenizerBase:
        return self._tokenizer

    @property
    def renderer(self) -> ChatRenderer:
        return self._renderer

    @property
    def capabilities(self) -> EngineCapabilities:
        return self.state.capabilities

    @property
    def policy_version(self) -> int:
        return self.state.policy_version

    @property
    def adapters(self) -> Mapping[str, str]:
        return self.state.adapters

    @property
    def engine_states(self) -> dict[int, EngineState]:
        return dict(self.state.engine_states)

    async def complete(self, request: GenerationRequest) -> Generation:
        with self._asked(Ask(next(self._numbers), request)) as answers:
            answer = await answers.next()
            assert isinstance(answer, Answer), "what was not asked to be streamed comes whole"
            return answer.generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        with self._asked(Ask(next(self._numbers), request, streamed=True)) as answers:
            while not answers.ended:
                answer = await answers.next()
                assert isinstance(answer, Part), "what was asked to be streamed comes in pieces"
                yield answer.chunk

    def take(self, answer: Answer | Part | Failed, number: int) -> None:
        """Hands an answer to whoever waits for it, if anyone still does."""
        if (answers := self._answers.get(number)) is not None:
            answers.queue.put_nowait(answer)

    @contextmanager
    def _asked(self, ask: Ask) -> Iterator[_Answers]:
        """Sends a request; one whose context is left before its last answer is withdrawn."""
        answers = self._answers[ask.ask] = _Answers()
        self._tell(ask)
        try:
            yield answers
        finally:
            del self._answers[ask.ask]
            if not answers.ended:
                self._tell(Withdraw(ask.ask))


class _Answers:
    """What is answered to one request."""

    def __init__(self) -> None:
        self.queue: asyncio.Queue[Answer | Part | Failed] = asyncio.Queue()
        self.ended = False

    async def next(self) -> Answer | Part:
        """The next answer; raises what the request raised."""
        answer = await self.queue.get()
        self.ended = not isinstance(answer, Part) or answer.chunk.generation is not None
        if isinstance(answer, Failed):
            raise answer.error()
        return answer
