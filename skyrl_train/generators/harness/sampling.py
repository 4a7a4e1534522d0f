"""Sampling of the requests that agents send: one session per run of an agent, sampled as the training run is configured.

    agent's request ──> RunSampling: the run's temperature and filters, a seed of the trajectory ──> client

The trainer evaluates log-probs at the run's temperature. Tokens sampled at another temperature come from another
distribution than the trained one. By default the run's settings therefore replace the agent's, and requests with other
settings are counted.
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
from skyrl_train.inference.requests import Generation, GenerationChunk, GenerationRequest, GenerationService
from skyrl_train.runtime.seeds import derive_seed

RUN_FIELDS = ("temperature", "top_p", "top_k", "min_p", "adjustment")  # the run decides these
_DEFAULTS = SamplingParams()  # the values of fields that a request leaves out

_RequestKey = tuple[int, int, str | None]  # digest of the prompt, choice, adapter; equal for repetitions of a request


@dataclass(slots=True)
class SessionSampling:
    """The sampling settings and counts of one session.

    Args:
        known_as: name of the session in requests to the client. The endpoint's session ids differ in every run, but
            trajectories keep their names, under which requests are recorded and replayed. None: the endpoint's id.
        overridden: number of requests with other sampling settings or a seed. A grammar (``response_format``) is applied
            but counted too where the trainer cannot mask the same tokens (``EngineCapabilities.grammar_continuation``).
        faults: engine errors of requests that no later attempt has made up for, by request. The agent sees only a failed
            request.
        repetitions: number of requests so far, by request.
    """

    run: SamplingParams
    seed: int | None
    known_as: str | None = None
    overridden: int = 0
    faults: dict[_RequestKey, EngineError] = field(default_factory=dict)
    repetitions: Counter[_RequestKey] = field(default_factory=Counter)

    @property
    def engine_error(self) -> EngineError | None:
        """The latest engine error that no later attempt has made up for."""
        return next(reversed(self.faults.values()), None)

    @contextmanager
    def recording_faults(self, key: _RequestKey) -> Iterator[None]:
        """Record an engine error. A success removes the error of an earlier attempt at the same request."""
        earlier = self.faults.get(key)
        try:
            yield
        except EngineError as error:
            self.faults.pop(key, None)  # insertion order: the latest error is last
            self.faults[key] = error
            raise
        if earlier is not None and self.faults.get(key) is earlier:
            del self.faults[key]


class RunSampling:
    """A generation service that samples requests of known sessions with the settings of the training run.

    | field | taken from |
    |---|---|
    | temperature, top_p, top_k, min_p, penalties, logit_bias | the run |
    | seed | the trajectory |
    | max_tokens | the smaller of both |
    | stop strings, min_tokens | the request if it has any, else the run |
    | stop_token_ids, ignore_eos | both |
    | grammar | the request |
    | session | the trajectory |

    Requests of other sessions or without a session pass unchanged. A request that names a LoRA adapter is not the policy's: it is
    sampled as it asks, under the trajectory's name.

    Args:
        agents_choose: temperature, filters and seed of a request apply where they differ from the API's defaults.
    """

    def __init__(self, generation: GenerationService, *, agents_choose: bool = False) -> None:
        self._generation = generation
        self._agents_choose = agents_choose
        self.sessions: dict[
            str, SessionSampling
        ] = {}  # by the endpoint's session id; the generator adds and removes them

    @property
    def capabilities(self) -> EngineCapabilities:
        """The capabilities that all routable engines share."""
        return self._generation.capabilities

    @property
    def policy_version(self) -> int:
        """The policy version of all routable engines."""
        return self._generation.policy_version

    def max_tokens_of(self, session_id: str | None) -> int | None:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self.sessions.get(session_id or "")
        return None if session is None else session.run.max_tokens

    async def complete(self, request: GenerationRequest) -> Generation:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self.sessions.get(request.session_id or "")
        if session is None:
            return await self._generation.complete(request)  # of an outside program
        key = _request_key(request)
        with session.recording_faults(key):
            return await self._generation.complete(self._as_configured(request, session, key))

    async def stream(self, request: GenerationRequest) -> AsyncGenerator[GenerationChunk, None]:
        """See :class:`~skyrl_train.inference.requests.GenerationService`."""
        session = self.sessions.get(request.session_id or "")
        key = _request_key(request)
        if session is not None:
            request = self._as_configured(request, session, key)
        chunks = self._generation.stream(request)
        try:
            with nullcontext() if session is None else session.recording_faults(key):
                async for chunk in chunks:
                    yield chunk
        finally:
            await chunks.aclose()  # cancels the request if the reader leaves early

    def _as_configured(
        self, request: GenerationRequest, session: SessionSampling, key: _RequestKey
    ) -> GenerationRequest:
        params, seed, is_policy = request.params, request.params.seed, request.adapter is None
        if is_policy:
            params, differs = run_params(
                request.params,
                session.run,
                agents_choose=self._agents_choose,
                exact_grammars=self.capabilities.grammar_continuation,
            )
            session.overridden += differs
        if session.seed is not None:
            # From the trajectory's seed, the prompt and the number of equal requests before, so that it does not depend on
            # the order of concurrent requests with different prompts. Two equal requests get two different samples.
            derived = derive_seed(session.seed, key[0], session.repetitions[key])
            session.repetitions[key] += 1
            if seed is None or (is_policy and not self._agents_choose):
                seed = derived
        return replace(request, params=replace(params, seed=seed), session_id=session.known_as or request.session_id)


def run_params(
    requested: SamplingParams, run: SamplingParams, *, agents_choose: bool, exact_grammars: bool = False
) -> tuple[SamplingParams, bool]:
    """Return the parameters to sample with, and whether the agent requested another distribution or a seed.

    A grammar is applied because an agent that requests one cannot parse other output. It counts as another distribution, unless
    the trainer masks the same tokens (``exact_grammars``).
    """
    # Only the fields that shape the distribution; budgets and stop conditions leave the log-probs as they are.
    chosen = {
        name: getattr(requested, name) for name in RUN_FIELDS if getattr(requested, name) != getattr(_DEFAULTS, name)
    }
    # A value equal to the API's default cannot be told from an absent field, so it means the run's value.
    kept = chosen if agents_choose else {}
    max_tokens = min(requested.max_tokens, run.max_tokens)
    params = replace(
        requested,
        max_tokens=max_tokens,
        min_tokens=min(requested.min_tokens or run.min_tokens, max_tokens),
        stop=requested.stop or run.stop,
        stop_token_ids=tuple(dict.fromkeys((*requested.stop_token_ids, *run.stop_token_ids))),
        ignore_eos=requested.ignore_eos or run.ignore_eos,
        **{name: kept.get(name, getattr(run, name)) for name in RUN_FIELDS},
    )
    differs = any(value != getattr(params, name) for name, value in chosen.items())
    differs |= not agents_choose and requested.seed is not None
    differs |= not agents_choose and not exact_grammars and requested.structured != run.structured
    return params, differs


def _request_key(request: GenerationRequest) -> _RequestKey:
    digest = hashlib.blake2b(array("q", request.prompt_token_ids).tobytes(), digest_size=8).digest()
    return int.from_bytes(digest, "big"), request.choice, request.adapter
