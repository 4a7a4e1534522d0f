"""How the requests of agents are sampled: as the run is configured, and the same way each time the run is repeated.

    agent's request ──> RunSampling: the run's temperature and filters, a seed of the trajectory ──> client

The trainer evaluates log-probs at the run's temperature. What an agent samples at another one comes from another
distribution than the one that is trained, so that by default the run decides, and what agents asked for is counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams
from skyrl_train.inference.randomness import mix
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService

_SAMPLED_AS = ("temperature", "top_p", "top_k", "min_p")
_UNSET = SamplingParams()  # what a request has where its body is silent


@dataclass(slots=True)
class SessionSampling:
    """One session. ``overridden`` counts requests that asked for another distribution or for a seed of their own.

    ``engine_error``: what the session's last request failed with, if it was the engines' fault; its agent sees only that
    it failed.
    """

    run: SamplingParams
    seed: int | None
    overridden: int = 0
    engine_error: EngineError | None = None
    _asked: Counter[tuple[int, int]] = field(default_factory=Counter, repr=False)

    def next_seed(self, request: GenerationRequest) -> int | None:
        """The seed of a request: of the trajectory's seed, its prompt, and how often the session asked that before.

        Requests that run at the same time therefore have the same seeds in whichever order they arrive.
        """
        if self.seed is None:
            return request.params.seed
        place = (_digest(request.prompt_token_ids), request.choice)
        seed = mix(self.seed, place[0], self._asked[place])
        self._asked[place] += 1
        return seed


class RunSampling:
    """A generation service that samples requests of known sessions as their run is configured.

    | field | whose |
    |---|---|
    | temperature, top_p, top_k, min_p | the run's |
    | seed | the trajectory's |
    | max_tokens | the smaller one |
    | stop strings, min_tokens | the request's where it has any, else the run's |
    | stop_token_ids, ignore_eos | both |

    Requests of other sessions, and of none, pass as they are.

    Args:
        agents_choose: temperature, filters and seed are the request's where it sets them to anything but the API's default.
    """

    def __init__(self, generation: GenerationService, *, agents_choose: bool = False) -> None:
        self._generation = generation
        self._agents_choose = agents_choose
        self._sessions: dict[str, SessionSampling] = {}

    @property
    def capabilities(self) -> EngineCapabilities:
        """What every engine in the routing can do."""
        return self._generation.capabilities

    @property
    def policy_version(self) -> int:
        """The version that every routed engine holds."""
        return self._generation.policy_version

    def open(self, session_id: str, run: SamplingParams, seed: int | None) -> SessionSampling:
        """Makes a session known."""
        session = self._sessions[session_id] = SessionSampling(run, seed)
        return session

    def close(self, session_id: str) -> None:
        """Forgets a session."""
        self._sessions.pop(session_id, None)

    async def complete(self, request: GenerationRequest) -> Generation:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self._session(request)
        with _watched(session):
            return await self._generation.complete(self._as_configured(request, session))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self._session(request)
        chunks = self._generation.stream(self._as_configured(request, session))
        try:
            with _watched(session):
                async for chunk in chunks:
                    yield chunk
        finally:
            await chunks.aclose()  # leaving early cancels the request

    def _session(self, request: GenerationRequest) -> SessionSampling | None:
        return None if request.session_id is None else self._sessions.get(request.session_id)

    def _as_configured(self, request: GenerationRequest, session: SessionSampling | None) -> GenerationRequest:
        if session is None:
            return request
        asked, differs = run_params(request.params, session.run, agents_choose=self._agents_choose)
        session.overridden += differs
        seed = session.next_seed(request)
        if self._agents_choose and request.params.seed is not None:
            seed = request.params.seed
        return replace(request, params=replace(asked, seed=seed))


def run_params(asked: SamplingParams, run: SamplingParams, *, agents_choose: bool) -> tuple[SamplingParams, bool]:
    """``asked`` as the run samples it, and whether the agent had asked for another distribution or a seed."""
    chosen = {name: getattr(asked, name) for name in _SAMPLED_AS if getattr(asked, name) != getattr(_UNSET, name)}
    kept = chosen if agents_choose else {}
    max_tokens = min(asked.max_tokens, run.max_tokens)
    params = replace(
        asked,
        max_tokens=max_tokens,
        min_tokens=min(asked.min_tokens or run.min_tokens, max_tokens),
        stop=asked.stop or run.stop,
        stop_token_ids=tuple(dict.fromkeys((*asked.stop_token_ids, *run.stop_token_ids))),
        ignore_eos=asked.ignore_eos or run.ignore_eos,
        **{name: kept.get(name, getattr(run, name)) for name in _SAMPLED_AS},
    )
    differs = any(value != getattr(params, name) for name, value in chosen.items())
    return params, differs or (asked.seed is not None and not agents_choose)


def _digest(token_ids: Sequence[int]) -> int:
    return int.from_bytes(hashlib.blake2b(array("q", token_ids).tobytes(), digest_size=8).digest(), "big")


@contextmanager
def _watched(session: SessionSampling | None) -> Iterator[None]:
    try:
        yield
    except EngineError as error:
        if session is not None:
            session.engine_error = error
        raise
    if session is not None:
        session.engine_error = None
