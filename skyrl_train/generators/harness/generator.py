"""The harness generator: any agent that calls a language model becomes a generator of training data.

    prompt ──> open a session ──> agent: any number of requests with the session's key ──> reward ──> close the session
                                    │                                                                    │
                                    └──HTTP──> endpoint ──RunSampling──> client              token-exact sequences

The agent sees an ordinary endpoint. Weight updates, engine failures and continuations stay invisible to it, and training
uses exactly the tokens that were sampled for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import os
import time
import traceback
import uuid
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, TypeVar

import httpx

from skyrl_train.config.import_path import import_name
from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema import GeneratorConfig
from skyrl_train.endpoint.server.app import create_app
from skyrl_train.endpoint.server.server import EndpointServer
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.endpoint.sessions import (
    OpenedSession,
    Session,
    SessionLimits,
    SessionSequence,
    SessionStatistics,
    SessionStore,
)
from skyrl_train.errors import ConfigError, GeneratorOutputError, NoEngineError, RolloutError, SessionError, output_note
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.harness.agent import (
    AgentContractError,
    AgentError,
    AgentResult,
    AgentTask,
    FunctionAgent,
    direct_connections,
)
from skyrl_train.generators.harness.process import ProcessAgent
from skyrl_train.generators.harness.sampling import RunSampling, SessionSampling
from skyrl_train.inference.chat.service import ChatService
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.runtime.concurrency import cancel_within, gather_or_cancel
from skyrl_train.types import ConversationType, GeneratorInput, GeneratorOutput, TrajectoryID

if TYPE_CHECKING:
    from skyrl_train.inference.client import RequestClient

T = TypeVar("T")
logger = logging.getLogger(__name__)
_PUBLIC_URL_TIMEOUT_S = 5.0
_CANCEL_LIMIT_S = 10.0  # time for a cancelled agent to clean up
_UNASKED = "; no agent has sent a request to its base_url with its api_key yet"


class HarnessGenerator(GeneratorInterface):
    """Runs one agent per sample. The agent gives the reward, its session the training data.

    Args:
        agent: a function, as ``package.module:function`` or ``file.py:function``; see :class:`FunctionAgent`.
        command: a program and its arguments instead, such as ``["{python}", "agent.py"]``; see :class:`ProcessAgent`.
        environment: additional variables for the program.
        timeout_s: time limit of one run, from its start.
        max_concurrency: concurrent runs, separately for training and for evaluation.
        failure_reward: reward of a run that sampled something and then raised, timed out or exited with an error.
            None: the run fails its rollout, which is retried.
        agents_choose_sampling: requests may set temperature, filters, penalties, logit_bias and seed; otherwise the run does.
        endpoint: settings of the endpoint (:class:`~skyrl_train.endpoint.server.settings.ServerSettings`).
        session_limits: such as ``max_turns`` (:class:`~skyrl_train.endpoint.sessions.SessionLimits`).

    Raises:
        ConfigError: (constructor) neither or both of ``agent`` and ``command``, or an impossible setting.
    """

    def __init__(
        self,
        client: RequestClient,
        generator_config: GeneratorConfig,
        *,
        agent: str | None = None,
        command: Sequence[str] | None = None,
        environment: Mapping[str, str] | None = None,
        timeout_s: float = 600.0,
        max_concurrency: int = 64,
        failure_reward: float | None = None,
        agents_choose_sampling: bool = False,
        endpoint: Mapping[str, Any] | None = None,
        session_limits: Mapping[str, Any] | None = None,
    ) -> None:
        for name, value in (("timeout_s", timeout_s), ("max_concurrency", max_concurrency)):
            if not value > 0:
                raise ConfigError(f"generator.kwargs.{name}={value}: must be more than 0.")
        if failure_reward is not None and not math.isfinite(failure_reward):
            raise ConfigError(f"generator.kwargs.failure_reward={failure_reward}: must be a finite number, or null.")
        self._config = generator_config
        self._events = client.events
        self._timeout_s = timeout_s
        self._failure_reward = failure_reward
        # Separate for each phase: evaluation agents that queue behind training agents would only time out.
        self._running = {phase: asyncio.Semaphore(max_concurrency) for phase in ("train", "eval")}
        limits = _dataclass(SessionLimits, session_limits or {}, "session_limits")
        server_settings = self.endpoint_settings({"endpoint": endpoint})
        self._has_public_url = server_settings.public_url is not None
        self._sampling = RunSampling(client, agents_choose=agents_choose_sampling)
        self._outside_may_begin: Callable[[], bool] = lambda: True  # see pace()
        self._store = SessionStore(
            client.renderer, limits, lambda: None if self._outside_may_begin() else limits.retry_after_s
        )
        service = ChatService(self._sampling, client.renderer)
        self._server = EndpointServer(create_app(service, client, self._store, server_settings))
        self._requested = False  # an agent has sent a request
        self._base_url: str | None = None  # while the server listens
        function = self.function_agent({"agent": agent, "command": command})
        self._agent: FunctionAgent | ProcessAgent
        if command is not None:
            # The program must not inherit the keys of the inference servers or of the endpoint's administrator.
            self._agent = ProcessAgent(
                command,
                environment,
                withheld=(generator_config.inference_engine.remote_api_key_variable,),
                secrets=[server_settings.admin_key] if server_settings.admin_key else [],
            )
        elif environment is not None:
            raise ConfigError("generator.kwargs.environment needs generator.kwargs.command; functions ignore it.")
        elif function is not None:
            self._agent = function

    @staticmethod
    def function_agent(kwargs: Mapping[str, Any]) -> FunctionAgent | None:
        """Return the agent that ``generator.kwargs`` name; None: it is a program.

        Raises:
            ConfigError: they name none or two, or it is no function with an agent's arguments.
        """
        agent = kwargs.get("agent")
        if (agent is None) == (kwargs.get("command") is None):
            raise ConfigError(
                "The harness needs one agent: set generator.kwargs.agent (package.module:function or file.py:function) "
                "or generator.kwargs.command (a list: a program and its arguments)."
            )
        if agent is None:
            return None
        return FunctionAgent(import_name(str(agent), "generator.kwargs.agent", "function"), str(agent))

    @staticmethod
    def endpoint_settings(kwargs: Mapping[str, Any]) -> ServerSettings:
        """Return the settings of the endpoint in ``generator.kwargs``.

        Raises:
            ConfigError: one is unknown or invalid.
        """
        return _dataclass(ServerSettings, kwargs.get("endpoint") or {}, "endpoint")

    async def start(self) -> None:
        """Open the endpoint. A public URL at which it cannot be reached from here is a warning: an agent may be elsewhere.

        Raises:
            ConfigError: the address cannot be bound.
        """
        self._base_url = await self._server.start()
        if not self._has_public_url:  # agents that are functions run in this process
            os.environ.update(direct_connections(self._base_url))
        elif problem := await _unreachable(self._base_url):
            logger.warning(
                "generator.kwargs.endpoint.public_url: %s, asked from this machine. Agents that are to use this URL run in "
                "another network, or they will fail: check its host, its port and the proxy between.",
                problem,
            )

    async def aclose(self) -> None:
        """Close the endpoint and cancel its requests. Idempotent."""
        self._base_url = None
        await self._server.stop(drain_s=0)

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Throttle sessions that outside programs open besides the run's own.

        While ``may_begin()`` is False (the staleness budget is spent), they get a 429 with ``Retry-After``. The run's own
        samples were admitted with their group. They and all open sessions continue.
        """
        self._outside_may_begin = may_begin

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run an agent for every entry of ``input_batch``.

        Raises:
            RolloutError: a run failed; the other runs are cancelled.
            GeneratorOutputError: the agent breaks its contract: it gave no reward, or no run has asked the model.
            EngineError: a run failed because of the engines.
            NoEngineError: no engine was left for a request, even if the agent handled the failed request.
        """
        params = input_batch["sampling_params"]
        sampling = SamplingParams.parse(asdict(self._config.sampling_params) if params is None else params)
        ids = input_batch["trajectory_ids"]
        # Without seeds in the batch, the requests keep their own.
        seeds = input_batch["batch_metadata"].seeds or (None,) * len(ids)
        runs = await gather_or_cancel(
            self._run_sample(
                prompt, extras, trajectory_id, sampling, seed, input_batch["batch_metadata"].training_phase
            )
            for prompt, extras, trajectory_id, seed in zip(
                input_batch["prompts"], input_batch["env_extras"], ids, seeds, strict=True
            )
        )
        return to_output(runs, ids)

    async def _run_sample(
        self,
        prompt: ConversationType,
        extras: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        sampling: SamplingParams,
        seed: int | None,
        phase: str,
    ) -> AgentRun:
        """Run the agent in a new session and return the session's training data."""
        async with self._running[phase]:
            if self._base_url is None:
                raise ConfigError("The harness generator was not started: await generator.start() before generate().")
            with self._session(sampling, seed, trajectory_id.to_string()) as (opened, usage):
                session = opened.session
                task = AgentTask(prompt, extras, self._base_url, opened.api_key, session.id, seed)
                result = AgentResult()
                started, failed = time.perf_counter(), False
                try:
                    try:
                        result = await self._run_agent(task)
                    finally:
                        self._requested |= session.requested
                        for failed_hook in await task.on_close.close():  # outside the time limit of the run
                            shown = "".join(traceback.format_exception(failed_hook, chain=False))
                            logger.warning(
                                "The agent of sample %r: on_close failed: %s", session.id, task.redact(shown)
                            )
                    _set_rewards(session, result, requested=self._requested)
                except AgentError as error:
                    # An engine error, not the agent, is the cause: the group is retried without blaming the agent.
                    if usage.engine_error is not None:
                        raise usage.engine_error from None
                    sample = f"The agent of sample {trajectory_id.to_string()!r}"
                    breaks = isinstance(error, AgentContractError)
                    unasked = "" if self._requested or breaks else _UNASKED
                    failure = (
                        GeneratorOutputError(task.redact(f"{sample} ({self._agent.place}): {error}"))
                        if breaks
                        else RolloutError(task.redact(f"{sample} failed: {error}{unasked}"))
                    )
                    if error.output:
                        failure.add_note(output_note(trajectory_id.to_string(), error.output))
                    # Without a sampled turn there is nothing that a reward could train.
                    if breaks or self._failure_reward is None or not session.statistics().turns:
                        # The traceback of the cause is logged, so a cause that shows the API key is left out.
                        cause = error.__cause__
                        shown = "" if cause is None else "".join(traceback.format_exception(cause))
                        raise failure from (cause if shown == task.redact(shown) else None)
                    logger.warning("%s", failure)
                    if not (session.finished and session.rewarded):  # an agent may finish its session itself
                        session.fail(self._failure_reward)
                    failed = True
                # Without engines, a reward would only rate how the agent handled failed requests.
                if isinstance(usage.engine_error, NoEngineError):
                    raise usage.engine_error
                seconds = time.perf_counter() - started
                # Finishing cancels requests that the agent left running; nothing is recorded after it.
                session.finish()
                sequences = await session.export()
                return AgentRun(sequences, session.statistics(), seconds, usage.overridden, failed, result.metrics)

    @contextmanager
    def _session(
        self, run: SamplingParams, seed: int | None, trajectory: str
    ) -> Iterator[tuple[OpenedSession, SessionSampling]]:
        """Open a session for the duration of the context. Requests that still run at its end are cancelled.

        Args:
            trajectory: the client sees the session's requests under this name.
        """
        # Reserved: the dispatcher has admitted the sample, so neither max_sessions nor the staleness budget applies.
        opened = self._store.open(reserved=True)
        session_id = opened.session.id
        # Registered before the agent gets the key, so that no request passes unchanged.
        sampling = self._sampling.sessions[session_id] = SessionSampling(run, seed, trajectory)

        def on_tools(names: Sequence[str], seconds: float) -> None:
            if self._events.wants(trajectory):
                now = self._events.now()
                self._events.detail("tool", trajectory, {"names": list(names), "t0": now - seconds, "t1": now})

        opened.session.on_tools = on_tools
        wanted, began, ok = self._events.wants(trajectory), self._events.now(), False
        try:
            yield opened, sampling
            ok = True
        finally:
            if wanted:
                turns, ended = opened.session.statistics().turns, self._events.now()
                self._events.detail("agent", trajectory, {"turns": turns, "t0": began, "t1": ended, "ok": ok})
            del self._sampling.sessions[session_id]
            self._store.close(session_id)

    async def _run_agent(self, task: AgentTask) -> AgentResult:
        """Run the agent with the time limit.

        Raises:
            AgentError: any failure of the agent.
        """
        # In a task of its own: a timeout around the call would wait for an agent that ignores its cancellation.
        running = asyncio.create_task(self._agent.run(task), name=f"agent-{task.session_id}")
        try:
            await asyncio.wait([running], timeout=self._timeout_s)
        finally:
            in_time = running.done()
            ignores = bool(await cancel_within([running], _CANCEL_LIMIT_S))
        late = f"it took longer than generator.kwargs.timeout_s={self._timeout_s:g} s"
        if ignores:
            raise AgentError(
                f"{late}, and ignores its cancellation; abandoned. It must let asyncio.CancelledError through"
            )
        try:
            result = running.result()
        except AgentError:
            raise  # already says what the agent did wrong
        # This CancelledError is the agent's: a cancellation from outside has left through the block above.
        except (Exception, asyncio.CancelledError) as error:
            if not in_time:
                # The cause shows where the agent was.
                raise AgentError(late) from error
            if isinstance(error, asyncio.CancelledError):
                raise AgentError("it cancelled itself") from error
            # The last frame only: a whole traceback would hide the cause in a long log.
            frames = traceback.extract_tb(error.__traceback__)
            place = "nowhere"
            if frames:
                place = f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}"
            raise AgentError(f"it raised {error!r} ({place})") from error
        if not in_time:
            raise AgentError(late)
        return result


async def _unreachable(base_url: str) -> str | None:
    """Return why this process cannot reach its endpoint at ``base_url``; None: it can. A request finds its own id there."""
    url, mark = f"{base_url.removesuffix('/v1')}/health", str(uuid.uuid4())
    try:
        async with httpx.AsyncClient(timeout=_PUBLIC_URL_TIMEOUT_S) as client:
            response = await client.get(url, headers={"x-request-id": mark})
    except httpx.HTTPError as error:
        return f"{url} does not answer ({type(error).__name__}: {error})"
    return None if response.headers.get("x-request-id") == mark else f"{url} is answered by another program"


def _dataclass(cls: type[T], values: Mapping[str, Any], setting: str) -> T:
    """Return ``cls(**values)``; an unknown name raises ConfigError with the closest known one."""
    if not isinstance(values, Mapping):
        raise ConfigError(f"generator.kwargs.{setting} must be a mapping of names to values, got {values!r:.100}.")
    known = getattr(cls, "__dataclass_fields__")  # noqa: B009  # the type of any dataclass has no such attribute
    for name in values:
        if name not in known:
            raise ConfigError(f"generator.kwargs.{setting}.{name} is unknown.{did_you_mean(name, known)}")
    # Lists come from yaml; the settings are frozen and take tuples.
    plain = {name: tuple(value) if isinstance(value, list) else value for name, value in values.items()}
    return cls(**plain)


def _set_rewards(session: Session, result: AgentResult, *, requested: bool) -> None:
    """Set the rewards that the agent returned.

    Args:
        requested: this run or an earlier one has sent a request.

    Raises:
        AgentContractError: the session has no reward, or no turns and no run has sent a request.
        AgentError: the session has no turns, or a reward is invalid.
    """
    if not session.statistics().turns:
        if session.refusal:
            raise AgentError(
                f"it never got a response from the model. Its last request was refused: {session.refusal}",
                result.output,
            )
        # A run may find no reason to ask, or its prompt too long. An agent of which no run asks does not know the endpoint.
        kind = AgentError if requested else AgentContractError
        raise kind(
            "it never got a response from the model. It must send its requests to the base_url, with the api_key, that "
            "it is given (a program: OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY)",
            result.output,
        )
    try:
        for turn, reward in enumerate(result.turn_rewards):
            session.set_reward(reward, turn)
        if result.reward is not None:
            session.set_reward(result.reward)
    except SessionError as error:
        raise AgentError(f"its reward cannot be set: {error}") from error
    # Posted rewards count too; without any the run would be trained with 0 by accident.
    if not session.rewarded:
        raise AgentContractError(
            f"it gave no reward: {result.remark}. Return it, print it as the last line, or post it to "
            "/v1/sessions/{id}/reward",
            result.output,
        )


@dataclass(frozen=True, slots=True)
class AgentRun:
    """A finished run of an agent.

    Args:
        seconds: duration of the run.
        overridden: requests whose sampling settings the run replaced.
        failed: the run got ``failure_reward``.
    """

    sequences: Sequence[SessionSequence]
    statistics: SessionStatistics
    seconds: float
    overridden: int
    failed: bool = False
    agent_metrics: Mapping[str, float] | None = None


def to_output(runs: Sequence[AgentRun], ids: Sequence[TrajectoryID]) -> GeneratorOutput:
    """Return one row per sequence; the rows of one run are adjacent."""
    # is_last_step marks the last sequence of a run.
    rows = [
        (row, trajectory_id, row is run.sequences[-1])
        for run, trajectory_id in zip(runs, ids, strict=True)
        for row in run.sequences
    ]
    return {
        "prompt_token_ids": [row.prompt_token_ids for row, _, _ in rows],
        "response_ids": [row.response_ids for row, _, _ in rows],
        "rewards": [row.rewards for row, _, _ in rows],
        "loss_masks": [row.loss_mask for row, _, _ in rows],
        "stop_reasons": [row.stop_reason for row, _, _ in rows],
        "rollout_metrics": run_metrics(runs),
        "rollout_logprobs": [row.logprobs for row, _, _ in rows],
        "rollout_versions": [row.versions for row, _, _ in rows],
        "trajectory_ids": [trajectory_id for _, trajectory_id, _ in rows],
        "is_last_step": [is_last for _, _, is_last in rows],
        "rollout_grammars": [row.grammars for row, _, _ in rows],
    }


def run_metrics(runs: Sequence[AgentRun]) -> dict[str, float]:
    """Return means over the runs; an agent's own metrics are averaged over the runs that report them."""
    values: dict[str, list[float]] = {
        "generate/turns": [run.statistics.turns for run in runs],
        "generate/branches": [run.statistics.branches for run in runs],
        "generate/drifted_turns": [run.statistics.drifted_turns for run in runs],
        "generate/drifted_tokens": [run.statistics.drifted_tokens for run in runs],
        "generate/response_tokens": [run.statistics.sampled_tokens for run in runs],
        "generate/agent_seconds": [run.seconds for run in runs],
        "generate/overridden_requests": [run.overridden for run in runs],
        "generate/failed_agents": [run.failed for run in runs],
    }
    for run in runs:
        for name, value in (run.agent_metrics or {}).items():
            values.setdefault(f"environment/{name}", []).append(value)
    return {name: sum(numbers) / len(numbers) for name, numbers in values.items()}
