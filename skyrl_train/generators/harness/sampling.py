"""How the requests of agents are sampled: as the run is configured, and the same way each time the run is repeated.

    agent's request ──> RunSampling: the run's temperature and filters, a seed of the trajectory ──> client

The trainer evaluates log-probs at the run's temperature. What an agent samples at another one comes from another
distribution than the one that is trained, so that by default the run decides, and what agents asked for is counted.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import Counter
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field, replace

from skyrl_train.errors import EngineError
from skyrl_train.inference.interface import EngineCapabilities, SamplingParams
from skyrl_train.inference.randomness import mix
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService

_SAMPLED_AS = ("temperature", "top_p", "top_k", "min_p")
_UNSET = SamplingParams()  # what a request has where its body is silent

_Asked = tuple[int, int]  # digest of the prompt, number of the choice


@dataclass(slots=True)
class SessionSampling:
    """One session. ``overridden`` counts requests that asked for another distribution or for a seed of their own.

    A grammar (``response_format``) is followed, and counted: its log-probs are those of the masked distribution, which the
    trainer does not evaluate.

    ``known_as``: by this name the client knows the session. The endpoint's own name is another one in every run; under the
    trajectory's, requests are recorded and found again. None: the endpoint's.

    ``faults``: of requests that failed by the engines' fault and were not answered when they were tried again, by what they
    asked; the agent sees only that they failed.
    """

    run: SamplingParams
    seed: int | None
    known_as: str | None = None
    overridden: int = 0
    faults: dict[_Asked, EngineError] = field(default_factory=dict)
    _times: Counter[_Asked] = field(default_factory=Counter, repr=False)

    @property
    def engine_error(self) -> EngineError | None:
        """The latest fault of the engines that is not made up for."""
        return next(reversed(self.faults.values()), None)

    @contextmanager
    def watched(self, asked: _Asked) -> Iterator[None]:
        """Keeps the fault that a request ends with; a success makes up for one of the same request begun earlier."""
        earlier = self.faults.get(asked)
        try:
            yield
        except EngineError as error:
            self.faults.pop(asked, None)  # the latest goes last
            self.faults[asked] = error
            raise
        if earlier is not None and self.faults.get(asked) is earlier:
            del self.faults[asked]

    def next_seed(self, request: GenerationRequest, asked: _Asked) -> int | None:
        """The seed of a request: of the trajectory's seed, its prompt, and how often the session asked that before.

        Requests that run at the same time therefore have the same seeds in whichever order they arrive.
        """
        if self.seed is None:
            return request.params.seed
        seed = mix(self.seed, asked[0], self._times[asked])
        self._times[asked] += 1
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
    | grammar | the request's |
    | session | the trajectory's |

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

    def open(
        self, session_id: str, run: SamplingParams, seed: int | None, known_as: str | None = None
    ) -> SessionSampling:
        """Makes a session known."""
        session = self._sessions[session_id] = SessionSampling(run, seed, known_as)
        return session

    def close(self, session_id: str) -> None:
        """Forgets a session."""
        self._sessions.pop(session_id, None)

    async def complete(self, request: GenerationRequest) -> Generation:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self._session(request)
        if session is None:
            return await self._generation.complete(request)
        asked = _asked(request)
        with session.watched(asked):
            return await self._generation.complete(self._as_configured(request, session, asked))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self._session(request)
        asked = _asked(request)
        if session is not None:
            request = self._as_configured(request, session, asked)
        chunks = self._generation.stream(request)
        try:
            with nullcontext() if session is None else session.watched(asked):
                async for chunk in chunks:
                    yield chunk
        finally:
            await chunks.aclose()  # leaving early cancels the request

    def _session(self, request: GenerationRequest) -> SessionSampling | None:
        return None if request.session_id is None else self._sessions.get(request.session_id)

    def _as_configured(self, request: GenerationRequest, session: SessionSampling, asked: _Asked) -> GenerationRequest:
        params, differs = run_params(request.params, session.run, agents_choose=self._agents_choose)
        session.overridden += differs
        seed = session.next_seed(request, asked)
        if self._agents_choose and request.params.seed is not None:
            seed = request.params.seed
        return replace(request, params=replace(params, seed=seed), session_id=session.known_as or request.session_id)


def run_params(asked: SamplingParams, run: SamplingParams, *, agents_choose: bool) -> tuple[SamplingParams, bool]:
    """``asked`` as the run samples it, and whether the agent had asked for another distribution or a seed.

    A grammar is kept, because an agent that asks for one cannot read anything else; it is another distribution.
    """
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
    differs |= not agents_choose and (asked.seed is not None or asked.structured != run.structured)
    return params, differs


def _asked(request: GenerationRequest) -> _Asked:
    """What a request and its repetitions have in common."""
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big"), request.choice
