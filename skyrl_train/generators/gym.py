"""The gym generator: runs environments, one trajectory per sample, token in and token out.

    prompt ──init──> render ──tokens──> client.generate ──sampled tokens──> decode ──text──> environment.step
                                             ^                                                    │
                                             └── extend: the same tokens + observation <──────────┘ not done

The response of a trajectory is everything after its first prompt: sampled tokens (loss mask 1, with the behaviour log-prob
and the policy version of each), and between the turns the tokens of template and observations (loss mask 0, log-prob 0.0,
version -1). The reward of a turn lies on the last token sampled in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.environments.base import EnvironmentFactory
from skyrl_train.environments.episode import Episode
from skyrl_train.environments.registry import resolve_environment
from skyrl_train.errors import ConfigError, EngineError, RolloutError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.chat import ChatRenderer
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams, StopReason
from skyrl_train.inference.text_length import CHARACTERS_PER_TOKEN, characters
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.runtime.process import DaemonThreadPool
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import ConversationType, GeneratorInput, GeneratorOutput, TrajectoryID

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.inference.client import RequestClient


@dataclass
class _Trajectory:
    """The trajectory so far. The lists of the response side are aligned token by token."""

    prompt_token_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reason: str = StopReason.STOP
    turns: int = 0
    done: bool = False  # the environment said so
    postprocessed_actions: int = 0
    environment_metrics: dict[str, Any] = field(default_factory=dict)

    def add(self, ids: Sequence[int], mask: int, logprobs: Sequence[float], versions: Sequence[int]) -> None:
        """Append sampled (``mask`` 1) or observed (0) tokens to the response, without reward."""
        self.response_ids += ids
        self.loss_mask += [mask] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(ids)


class GymGenerator(GeneratorInterface):
    """Runs :mod:`skyrl_train.environments`. All trajectories of a call run concurrently.

    A prompt's ``env_class`` selects its environment. ``environment.kwargs`` apply to the configured environment; others run
    with their defaults. An environment that raises fails the call.

    Raises:
        ConfigError: ``environment_config`` names no environment.
    """

    def __init__(
        self,
        client: RequestClient,
        tokenizer: PreTrainedTokenizerBase,
        generator_config: GeneratorConfig,
        environment_config: EnvironmentConfig,
        model_path: str,
    ) -> None:
        self._client = client
        self._tokenizer = tokenizer
        self._config = generator_config
        self._renderer = ChatRenderer.configured(generator_config, tokenizer, model_path)
        self._own = resolve_environment(environment_config)
        self._factories = {environment_config.env_class: self._own}
        self._environment_threads: list[DaemonThreadPool] = []  # that wait for an episode

    async def aclose(self) -> None:
        """End the threads of environments."""
        while self._environment_threads:
            self._environment_threads.pop().shutdown(wait=False)

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Run every trajectory of ``input_batch`` to its end.

        Raises:
            RolloutError: an environment raised, or a prompt is too long. The other trajectories are cancelled.
            EngineError: the client failed.
        """
        params = input_batch["sampling_params"]
        sampling = SamplingParams.parse(asdict(self._config.sampling_params) if params is None else params)
        ids = input_batch["trajectory_ids"]
        # Resolve every environment before a trajectory begins: an unknown name then wastes no sampling.
        for env_class in input_batch["env_classes"]:
            if env_class not in self._factories:
                factory = resolve_environment(EnvironmentConfig(env_class=env_class))
                # A row of SkyRL names skyrl_gym:gsm8k, with the run's settings, by its plain id.
                self._factories[env_class] = self._own if factory.name == self._own.name else factory
        # One failed trajectory fails the group, so the others are cancelled instead of sampled in vain.
        trajectories = await gather_or_cancel(
            self._run_trajectory(prompt, self._factories[env_class], extras, trajectory_id, sampling, seed)
            for prompt, env_class, extras, trajectory_id, seed in zip(
                input_batch["prompts"],
                input_batch["env_classes"],
                input_batch["env_extras"],
                ids,
                input_batch["batch_metadata"].seeds or (None,) * len(ids),
                strict=True,
            )
        )
        return {
            "prompt_token_ids": [t.prompt_token_ids for t in trajectories],
            "response_ids": [t.response_ids for t in trajectories],
            "rewards": [t.rewards for t in trajectories],
            "loss_masks": [t.loss_mask for t in trajectories],
            "stop_reasons": [t.stop_reason for t in trajectories],
            "rollout_metrics": _metrics(trajectories),
            "rollout_logprobs": [t.logprobs for t in trajectories],
            "rollout_versions": [t.versions for t in trajectories],
            "trajectory_ids": list(ids),
            "is_last_step": None,
        }

    async def _run_trajectory(
        self,
        prompt: ConversationType,
        factory: EnvironmentFactory,
        extras: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        sampling: SamplingParams,
        seed: int | None,
    ) -> _Trajectory:
        """Let policy and environment take turns until the environment, ``max_turns`` or the context ends the episode."""
        session, events = trajectory_id.to_string(), self._client.events
        if factory.takes_max_turns:
            extras = {**extras, "max_turns": self._config.max_turns}
        async with Episode(
            factory,
            extras,
            trajectory_id.instance_id,
            events=events,
            session=session,
            idle_threads=self._environment_threads,
        ) as episode:
            messages, _ = await episode.init(prompt)
            input_ids = self._renderer.render(messages)
            trajectory = _Trajectory(input_ids)
            oldest_version: int | None = None  # of the tokens sampled so far
            budget = self._token_budget(len(input_ids), sampling.max_tokens)
            # Training cannot use a shortened prompt, so a long one is an error instead of a truncation.
            if budget < 1:
                raise RolloutError(
                    f"Prompt {trajectory_id.instance_id!r} has {len(input_ids)} tokens, more than "
                    f"generator.max_input_length={self._config.max_input_length} or the engines' max_model_len allow. Raise "
                    "them or remove the prompt."
                )
            while True:
                request = InferenceEngineInput(
                    prompt_token_ids=[input_ids],
                    sampling_params=replace(
                        sampling,
                        max_tokens=budget,
                        min_tokens=min(sampling.min_tokens, budget),
                        seed=sampling.seed if seed is None else derive_seed(seed, trajectory.turns),
                    ),
                    session_ids=[session],
                    detokenize=False,  # decoded below, because the environment's text includes a matched stop string
                )
                if oldest_version is not None:  # engines with priorities take the oldest trajectory first
                    request["priority"] = oldest_version
                output = await self._client.generate(request)
                sampled = output["response_ids"][0]
                # A turn without tokens would have no place for its reward.
                if not sampled:
                    raise EngineError(
                        f"The engine sampled no token for {trajectory_id.to_string()!r}; it was asked for some."
                    )
                versions = output["response_versions"][0]
                trajectory.add(sampled, 1, output["response_logprobs"][0], versions)
                oldest_version = min(versions) if oldest_version is None else min(oldest_version, *versions)
                trajectory.stop_reason = output["stop_reasons"][0]
                trajectory.turns += 1
                action = str(self._tokenizer.decode(sampled, skip_special_tokens=True))
                step = await episode.step(action, trajectory.stop_reason)
                # The last token of the response is the last token of this turn: observations are added only below.
                trajectory.rewards[-1] += step["reward"]
                trajectory.postprocessed_actions += step.get("postprocessed_action") not in (None, action)
                trajectory.done = step["done"]
                if trajectory.done:
                    break
                if trajectory.turns >= self._config.max_turns:
                    trajectory.rewards[-1] += await episode.end_early()
                    break
                extended, budget, most = list[int](), 0, self._config.max_input_length * CHARACTERS_PER_TOKEN
                # Text that no tokenizer fits into the context is not encoded: megabytes would take seconds of all rollouts.
                if characters(step["observations"], most) <= most:
                    # The next input begins with the very tokens that were sampled; text is never encoded again.
                    try:
                        extended = self._renderer.extend(input_ids, sampled, step["observations"])
                    except ConfigError as error:
                        raise RolloutError(
                            f"The observations of environment {factory.name!r} on prompt {trajectory_id.instance_id!r} cannot "
                            f"be rendered: {error}"
                        ) from error
                    budget = self._token_budget(len(extended), sampling.max_tokens)
                # The episode ends before the observation, so that the trajectory ends with a sampled token.
                if budget < 1:
                    trajectory.rewards[-1] += await episode.end_early()
                    trajectory.stop_reason = StopReason.LENGTH
                    break
                observed = extended[len(input_ids) + len(sampled) :]
                trajectory.add(observed, 0, [0.0] * len(observed), [-1] * len(observed))
                input_ids = extended
            trajectory.environment_metrics = await episode.end()
            return trajectory

    def _token_budget(self, input_length: int, max_tokens: int) -> int:
        """Return how many tokens may be sampled after an input of this length; less than 1: the input is too long.

        The last turn before the end of the context gets fewer than ``max_tokens``.
        """
        if input_length > self._config.max_input_length:
            return 0
        max_model_len = self._config.inference_engine.max_model_len
        return max_tokens if max_model_len is None else min(max_tokens, max_model_len - input_length)


def _metrics(trajectories: Sequence[_Trajectory]) -> dict[str, float]:
    """Return means over the trajectories; an environment's numbers over the trajectories that report them."""
    values: dict[str, list[float]] = {
        "generate/turns": [t.turns for t in trajectories],
        "generate/response_tokens": [sum(t.loss_mask) for t in trajectories],
        "generate/unfinished_episodes": [not t.done for t in trajectories],
        "generate/postprocessed_actions": [t.postprocessed_actions for t in trajectories],
    }
    for trajectory in trajectories:
        for key, value in trajectory.environment_metrics.items():
            if isinstance(value, Real):
                values.setdefault(f"environment/{key}", []).append(float(value))
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items() if numbers}
