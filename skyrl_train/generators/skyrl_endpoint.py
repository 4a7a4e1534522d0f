"""The endpoint behind SkyRL's ``client.get_endpoint_url()``: agents send no key that tells which sample they work for.

agent ──HTTP──> endpoint ──AgentEndpoint: the run's sampling──> client
                                └──> ServedResponses of every running generate() ──by tokens──> versions and log-probs of a row

A row belongs to the responses that continue exactly the tokens before them. Under one policy version a token has one
log-prob after given tokens, so a match is exact even if two samples got the same response.
"""

from __future__ import annotations

import asyncio
import hashlib
import logging
from array import array
from collections import deque
from collections.abc import AsyncGenerator, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, replace

from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.server import EndpointServer
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions import SessionStore
from skyrl_train.errors import RolloutError
from skyrl_train.generators.harness.sampling import RUN_FIELDS, run_params
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest
from skyrl_train.types import GrammarSpan

logger = logging.getLogger(__name__)

KEPT_PROMPTS = 256


@dataclass(frozen=True, slots=True)
class RowTokens:
    """What was sampled of one row; the lists have an entry per token: 0, 0.0 and -1 where the token was not sampled."""

    loss_mask: list[int]
    logprobs: list[float]
    versions: list[int]
    grammars: list[GrammarSpan]


class ServedResponses:
    """The responses that were served while one call of ``generate`` runs, those for other calls included.

    Args:
        sampling: of the call. Responses that were sampled with other settings are not kept.
        sessions: the names of the call's samples. A response to a request with one of them in ``x-session-id`` belongs to it.
    """

    def __init__(self, sampling: SamplingParams, sessions: Sequence[str]) -> None:
        self.sampling = sampling
        self.sessions = frozenset(sessions)
        self._by_digest: dict[bytes, list[tuple[str | None, Generation]]] = {}
        self._latest_prompts: deque[bytes] = deque(maxlen=KEPT_PROMPTS)  # for error messages
        # Rows with equal responses that were not sampled alike, by prompt and tokens: their names, the number of these
        # responses, and what the rows are.
        self._shared: dict[tuple[bytes, tuple[int, ...]], list[tuple[str, int, object]]] = {}

    def add(self, prompt: bytes, digest: bytes, session: str | None, generation: Generation) -> None:
        """Keep a response to ``prompt``: packed tokens, which the calls share, with their digest."""
        self._by_digest.setdefault(digest, []).append((session, generation))
        self._latest_prompts.append(prompt)

    def row(
        self, session: str, prompt: Sequence[int], tokens: Sequence[int], mask: Sequence[int], reward: object
    ) -> RowTokens:
        """Find the responses that a row consists of.

        A generator may cut a response off. Tokens that it adds behind a whole response, such as EOS, do not train.

        Args:
            session: the name of the row's sample.
            tokens: of the row after its prompt, [T].
            mask: 1 on tokens to train, [T].
            reward: of the row; for :meth:`check_shared`, to be called after the last row.

        Raises:
            RolloutError: tokens to train were not served after the tokens before them.
        """
        row = RowTokens([0] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens), [])
        before = array("i", [*prompt, *tokens])
        position, after_response = 0, False
        while position < len(tokens):
            if not mask[position]:
                position, after_response = position + 1, False
                continue
            end = next((place for place in range(position, len(tokens)) if not mask[place]), len(tokens))
            digest = _digest(before[: len(prompt) + position].tobytes())
            lengths = [
                (_common(tokens[position:end], generation.token_ids), generation)
                for sender, generation in self._by_digest.get(digest, ())
                if sender == session or sender not in self.sessions
            ]
            length = max((length for length, _ in lengths), default=0)
            if not length and after_response:
                position = end
                continue
            longest = [generation for common, generation in lengths if common == length]
            whole = any(length >= len(generation.token_ids) - 1 for generation in longest)
            if not length or not (whole or position + length == end):
                raise RolloutError(self._unmatched(session, before[: len(prompt) + position], longest, length))
            distributions = {
                (
                    *generation.versions[:length],
                    generation.grammar and (generation.grammar.kind, generation.grammar.value),
                )
                for generation in longest
            }
            generation, stop = longest[0], position + length
            if len(distributions) > 1:
                rows = self._shared.setdefault((digest, tuple(tokens[position:stop])), [])
                generation = longest[min(len(rows), len(longest) - 1)]
                rows.append((session, len(longest), (list(prompt), list(tokens), reward)))
            row.loss_mask[position:stop] = [1] * length
            row.logprobs[position:stop] = generation.logprobs[:length]
            row.versions[position:stop] = generation.versions[:length]
            if generation.grammar is not None:
                row.grammars.append(replace(generation.grammar.moved(position), stop=stop))
            position, after_response = stop, True
        return row

    def check_shared(self) -> None:
        """Check the rows that have equal responses of several policy versions, or with and without a grammar.

        It does not matter which row has which of them, if the rows are equal, rewards included, and have all of them.

        Raises:
            RolloutError: it matters.
        """
        for rows in self._shared.values():
            session, responses, first = rows[0]
            if len(rows) != responses or any(row != first for _, _, row in rows):
                raise RolloutError(
                    f"Sample {session} has one of {responses} equal responses that were sampled by several policy versions, or "
                    "with and without a grammar. Let each sample send its name (TrajectoryID.to_string()) in the header "
                    "x-session-id."
                )

    def _unmatched(self, session: str, before: array[int], longest: list[Generation], length: int) -> str:
        if not self._by_digest:
            return (
                f"Sample {session} has tokens to train, and no request has reached get_endpoint_url() since its group began with "
                "the run's sampling settings."
            )
        if longest and length:
            return (
                f"Sample {session} returned {length} tokens of a response and then another one than the sampled "
                f"{longest[0].token_ids[length]}: text that was encoded again has other tokens. Ask for return_token_ids, and "
                "return these."
            )
        closest = max(_common(before, array("i", prompt)) for prompt in self._latest_prompts)
        return (
            f"Sample {session} has tokens to train that no response to the {len(before)} tokens before them has; the closest "
            f"request had the same first {closest}. The row must repeat prompts and responses as the endpoint returns them with "
            "return_token_ids."
        )


class AgentEndpoint:
    """Serves the model to agents, and shows each response to all calls of ``generate`` that run. It opens when it is asked for.

    The run's temperature, filters and penalties replace those of a request; ``max_tokens`` is the smaller of both.

    Args:
        settings: of the endpoint; if ``open``, each program on this machine may use it.
    """

    def __init__(self, client: RequestClient, settings: ServerSettings) -> None:
        self.calls: list[ServedResponses] = []  # of the calls that run
        self._client = client
        self._settings = settings
        self._store: SessionStore | None = None
        self._server: EndpointServer | None = None
        self._loop: asyncio.AbstractEventLoop | None = None  # after start()

    @property
    def is_open(self) -> bool:
        """Whether the generator has asked for the URL."""
        return self._server is not None

    def url(self) -> str:
        """Return the URL without ``/v1``. Usable before :meth:`start` and in any thread; requests wait until it serves.

        Raises:
            ConfigError: the address cannot be bound.
        """
        if self._server is None:
            self._store = SessionStore(self._client.renderer)
            app = create_app(ChatService(self, self._client.renderer), self._client, self._store, self._settings)
            self._server = EndpointServer(app)
            self._server.bind()
            if self._loop is not None:
                starting = asyncio.run_coroutine_threadsafe(self._server.start(), self._loop)
                starting.add_done_callback(_report_failure)
        return self._server.bind().removesuffix("/v1")

    async def start(self) -> None:
        """Serve, now or when the URL is asked for."""
        self._loop = asyncio.get_running_loop()
        if self._server is not None:
            await self._server.start()

    async def aclose(self) -> None:
        """Close the port and cancel the requests. Idempotent."""
        if self._server is not None:
            await self._server.stop(drain_s=0)

    def end(self, call: ServedResponses) -> None:
        """Show ``call`` no more responses, and close the sessions with the names of its samples."""
        self.calls.remove(call)
        # The prompts of an evaluation may have the names of training prompts.
        for name in call.sessions.difference(*(other.sessions for other in self.calls)):
            self.finish_session(name)

    def finish_session(self, session_id: str) -> None:
        """Forget what was served with this name in ``x-session-id``."""
        if self._store is not None:
            self._store.close(session_id)

    @property
    def capabilities(self) -> EngineCapabilities:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        return self._client.capabilities

    @property
    def policy_version(self) -> int:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        return self._client.policy_version

    def max_tokens_of(self, session_id: str | None) -> int | None:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        return max((call.sampling.max_tokens for call in self._calls_of(session_id)), default=None)

    async def complete(self, request: GenerationRequest) -> Generation:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        request, run = self._as_configured(request)
        generation = await self._client.complete(request)
        self._keep(request, run, generation)
        return generation

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        request, run = self._as_configured(request)
        chunks = self._client.stream(request)
        try:
            async for chunk in chunks:
                if chunk.generation is not None:
                    self._keep(request, run, chunk.generation)
                yield chunk
        finally:
            await chunks.aclose()  # cancels the request if the reader leaves early

    def _as_configured(self, request: GenerationRequest) -> tuple[GenerationRequest, SamplingParams | None]:
        """Return the request with the settings of a run, and these settings.

        An evaluation beside training has settings of its own. The name of a sample tells them apart, or else what the request
        asks for: a field that it may have left out tells less than another one.
        """
        requested = replace(request.params, seed=None)  # an agent's fixed seed would make all samples of a group equal
        exact = self.capabilities.grammar_continuation
        runs = dict.fromkeys(call.sampling for call in self._calls_of(request.session_id))
        fits = [(run, *run_params(requested, run, agents_choose=False, exact_grammars=exact)) for run in runs]
        if not fits:
            return replace(request, params=requested), None
        run, params, _ = min(fits, key=lambda fit: (fit[2], _differing_fields(requested, fit[0])))
        return replace(request, params=params), run

    def _calls_of(self, session_id: str | None) -> list[ServedResponses]:
        """Return the calls with a sample of this name, or all if the name tells nothing."""
        return [call for call in self.calls if session_id in call.sessions] or self.calls

    def _keep(self, request: GenerationRequest, run: SamplingParams | None, generation: Generation) -> None:
        if run is None or request.adapter is not None:
            return
        prompt = array("i", generation.prompt_token_ids).tobytes()
        digest = _digest(prompt)
        # A conversation's prompts repeat each other, so that all of them would take much memory.
        kept = replace(generation, prompt_token_ids=[], text="", top_logprobs=None)
        for call in self.calls:
            if call.sampling == run:
                call.add(prompt, digest, request.session_id, kept)


def _report_failure(starting: Future[str]) -> None:
    if not starting.cancelled() and (error := starting.exception()) is not None:
        logger.error("the endpoint for agents cannot serve; their requests will fail: %s", error, exc_info=error)


def _differing_fields(requested: SamplingParams, run: SamplingParams) -> int:
    return sum(getattr(requested, name) != getattr(run, name) for name in RUN_FIELDS)


def _digest(prompt: bytes) -> bytes:
    return hashlib.blake2b(prompt, digest_size=16).digest()


def _common(tokens: Sequence[int], sampled: Sequence[int]) -> int:
    """Return the number of equal tokens at the beginning."""
    shorter = min(len(tokens), len(sampled))
    return next((place for place in range(shorter) if tokens[place] != sampled[place]), shorter)
