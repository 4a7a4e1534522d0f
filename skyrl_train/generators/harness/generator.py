"""The harness generator: any agent that speaks to a language model becomes a generator of training data.

    prompt ──> open a session ──> agent: any number of requests with the session's key ──> reward ──> close the session
                                    │                                                                    │
                                    └──HTTP──> endpoint ──RunSampling──> client              token-exact sequences

The agent sees an ordinary endpoint. Weight updates, engine deaths and continuations happen underneath, and what is
trained on are the tokens that were really sampled for it.
"""

from __future__ import annotations

import asyncio
import logging
import math
import time
import traceback
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING, Any

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema.generator import GeneratorConfig
from skyrl_train.errors import ConfigError, NoEngineError, RolloutError, SessionError
from skyrl_train.generators.base import (
    ConversationType,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl_train.generators.harness.agent import Agent, AgentError, AgentResult, AgentTask
from skyrl_train.generators.harness.endpoint import SessionEndpoint
from skyrl_train.generators.harness.function import FunctionAgent
from skyrl_train.generators.harness.output import PlayedSession, to_output
from skyrl_train.generators.harness.process import ProcessAgent
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.inference.sessions import Session

if TYPE_CHECKING:
    from skyrl_train.inference.client import RequestClient

logger = logging.getLogger(__name__)


class HarnessGenerator(GeneratorInterface):
    """Runs one agent per sample; the reward comes from the agent, the training data from its session.

    Args:
        agent: a function, as ``package.module:function`` or ``file.py:function``; see :class:`FunctionAgent`.
        command: a program and its arguments instead; see :class:`ProcessAgent`.
        environment: further variables of the program.
        timeout_s: of one run, from its start.
        max_concurrency: runs at once; further ones wait for their turn.
        failure_reward: what a run is worth that raised, timed out or exited with an error after it had sampled
            something. None: it fails its rollout, which is tried again.
        agents_choose_sampling: lets requests set temperature, top_p, top_k, min_p and seed; otherwise the run does.
        endpoint: settings of the endpoint (:class:`~skyrl_train.inference.server.settings.ServerSettings`).
        session_limits: such as ``max_turns`` (:class:`~skyrl_train.inference.sessions.SessionLimits`).

    Raises:
        ConfigError: (constructor) neither or both of ``agent`` and ``command``, or a setting that cannot work.
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
        _check_positive("timeout_s", timeout_s)
        _check_positive("max_concurrency", max_concurrency)
        if failure_reward is not None and not math.isfinite(failure_reward):
            raise ConfigError(f"generator.kwargs.failure_reward={failure_reward}: must be a finite number, or null.")
        self._config = generator_config
        self._timeout_s = timeout_s
        self._failure_reward = failure_reward
        # A share for each phase: an evaluation whose agents waited behind those of training would only time out.
        self._running = {phase: asyncio.Semaphore(max_concurrency) for phase in ("train", "eval")}
        self._endpoint = SessionEndpoint(
            client,
            settings=dict(endpoint or {}),
            limits=dict(session_limits or {}),
            agents_choose=agents_choose_sampling,
        )
        self._agent = _build_agent(
            agent,
            command,
            environment,
            withheld=(generator_config.inference_engine.remote_api_key_variable,),
            secrets=filter(None, (self._endpoint.admin_key,)),
        )

    async def start(self) -> None:
        """Opens the endpoint."""
        await self._endpoint.start()

    async def aclose(self) -> None:
        """Closes the endpoint; requests in flight are cancelled."""
        await self._endpoint.stop()

    def pace(self, may_begin: Callable[[], bool]) -> None:
        """Sets what is asked before a program from outside opens a session beside the run's own.

        Where ``may_begin()`` is false (the staleness budget is spent), it gets a 429 with ``Retry-After``. The run's own
        samples were admitted with their group and are not held up; nor is any session that is open already.
        """
        self._endpoint.pace(may_begin)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Runs an agent for every entry of ``input_batch``.

        Raises:
            RolloutError: a run failed, gave no reward, or never called the model; the other runs are ended.
            EngineError: a run failed because the engines did.
            NoEngineError: no engine was left for a request of a run, whatever its agent made of that.
        """
        params = input_batch["sampling_params"]
        sampling = SamplingParams.parse(asdict(self._config.sampling_params) if params is None else params)
        ids = input_batch["trajectory_ids"]
        seeds = input_batch["batch_metadata"].seeds or (None,) * len(ids)
        sessions = await gather_or_cancel(
            self._play(prompt, extras, trajectory_id, sampling, seed, input_batch["batch_metadata"].training_phase)
            for prompt, extras, trajectory_id, seed in zip(
                input_batch["prompts"], input_batch["env_extras"], ids, seeds, strict=True
            )
        )
        return to_output(sessions, ids)

    async def _play(
        self,
        prompt: ConversationType,
        extras: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        sampling: SamplingParams,
        seed: int | None,
        phase: str,
    ) -> PlayedSession:
        async with self._running[phase]:
            base_url = self._endpoint.base_url
            with self._endpoint.session(sampling, seed, trajectory_id.to_string()) as run:
                session, usage = run.opened.session, run.sampling
                task = AgentTask(prompt, extras, base_url, run.opened.api_key, session.id, seed)
                result = AgentResult()
                started, failed = time.perf_counter(), False
                try:
                    result = await self._run(task)
                    _set_rewards(session, result)
                except AgentError as error:
                    if usage.engine_error is not None:
                        raise usage.engine_error from None
                    if self._failure_reward is None or not session.statistics().turns:
                        raise _rollout_error(error, task, trajectory_id) from _printable(error.__cause__, task)
                    logger.warning("%s", _rollout_error(error, task, trajectory_id))
                    if not session.finished:  # an agent may end its session itself
                        session.set_reward(self._failure_reward)
                    failed = True
                # A reward for what an agent made of that is none of its own.
                if isinstance(usage.engine_error, NoEngineError):
                    raise usage.engine_error
                seconds = time.perf_counter() - started
                session.finish()
                sequences = await session.export()
                return PlayedSession(sequences, session.statistics(), seconds, usage.overridden, failed, result.metrics)

    async def _run(self, task: AgentTask) -> AgentResult:
        """Runs the agent.

        Raises:
            AgentError: whatever it did wrong.
        """
        limit = asyncio.timeout(self._timeout_s)
        try:
            async with limit:
                return await self._agent.run(task)
        except AgentError:
            raise
        except asyncio.CancelledError as error:
            current = asyncio.current_task()
            if current is None or current.cancelling():
                raise
            raise AgentError("it cancelled itself") from error
        except Exception as error:
            if limit.expired():
                raise AgentError(f"it took longer than generator.kwargs.timeout_s={self._timeout_s:g} s") from None
            raise AgentError(f"it raised {error!r} ({_place(error)})") from error


def _build_agent(
    agent: str | None,
    command: Sequence[str] | None,
    environment: Mapping[str, str] | None,
    *,
    withheld: Iterable[str],
    secrets: Iterable[str],
) -> Agent:
    if (agent is None) == (command is None):
        raise ConfigError(
            "The harness needs one agent: set generator.kwargs.agent (package.module:function or file.py:function) or "
            "generator.kwargs.command (a list: a program and its arguments)."
        )
    if command is not None:
        return ProcessAgent(command, environment, withheld=tuple(withheld), secrets=tuple(secrets))
    if environment is not None:
        raise ConfigError(
            "generator.kwargs.environment is for generator.kwargs.command; a function has none of its own."
        )
    return FunctionAgent(import_name(str(agent), "generator.kwargs.agent", "function"), str(agent))


def _check_positive(name: str, value: float) -> None:
    if not value > 0:
        raise ConfigError(f"generator.kwargs.{name}={value}: must be more than 0.")


def _set_rewards(session: Session, result: AgentResult) -> None:
    """Gives the session what the agent returned, and makes sure that it is worth something.

    Raises:
        AgentError: there is no reward, or nothing that it could be the reward of.
    """
    if not session.statistics().turns:
        raise AgentError(
            "it never got a response from the model. It must send its requests to the base_url, with the api_key, that "
            "it is given (a program: OPENAI_BASE_URL and OPENAI_API_KEY, or ANTHROPIC_BASE_URL and ANTHROPIC_API_KEY)"
        )
    try:
        for turn, reward in enumerate(result.turn_rewards):
            session.set_reward(reward, turn)
        if result.reward is not None:
            session.set_reward(result.reward)
    except SessionError as error:
        raise AgentError(f"its reward cannot be set: {error}") from error
    if not session.rewarded:
        raise AgentError(
            f"it gave no reward: {result.remark}. Return it, print it as the last line, or post it to "
            "/v1/sessions/{id}/reward"
        )


def _rollout_error(error: AgentError, task: AgentTask, trajectory_id: TrajectoryID) -> RolloutError:
    return RolloutError(task.redact(f"The agent of sample {trajectory_id.to_string()!r} failed: {error}"))


def _place(error: BaseException) -> str:
    """Where an agent raised: file, line and function."""
    frames = traceback.extract_tb(error.__traceback__)
    return f"{Path(frames[-1].filename).name}, line {frames[-1].lineno}, in {frames[-1].name}" if frames else "nowhere"


def _printable(cause: BaseException | None, task: AgentTask) -> BaseException | None:
    """``cause`` where its traceback does not speak of the key."""
    told = "" if cause is None else "".join(traceback.format_exception(cause))
    return cause if told == task.redact(told) else None
