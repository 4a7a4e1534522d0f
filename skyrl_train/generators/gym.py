"""The gym generator: plays environments, one trajectory per sample, token in and token out.

    prompt ──init──> render ──tokens──> client.generate ──sampled tokens──> decode ──text──> environment.step
                                             ^                                                    │
                                             └── extend: the same tokens + observation <──────────┘ not done

A trajectory's response is everything after its first prompt: sampled tokens (loss mask 1, with the behaviour log-prob
and the policy version of each) and between the turns the template's and the observations' tokens (loss mask 0, log-prob
0.0, version -1). A turn's reward lies on the last token sampled in it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from numbers import Real
from typing import TYPE_CHECKING, Any

from skyrl_train.concurrency import gather_or_cancel
from skyrl_train.config.schema.data import EnvironmentConfig
from skyrl_train.config.schema.generator import GeneratorConfig
from skyrl_train.environments.episode import Episode
from skyrl_train.environments.registry import EnvironmentFactory, resolve_environment
from skyrl_train.errors import EngineError, RolloutError
from skyrl_train.generators.base import (
    ConversationType,
    GenerationClient,
    GeneratorInput,
    GeneratorInterface,
    GeneratorOutput,
    TrajectoryID,
)
from skyrl_train.inference.chat import ChatRenderer
from skyrl_train.inference.interface import InferenceEngineInput, SamplingParams, StopReason
from skyrl_train.inference.randomness import mix

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


@dataclass
class _Trajectory:
    """What has happened so far; the response-side lists are aligned token by token."""

    prompt_token_ids: list[int]
    response_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)
    versions: list[int] = field(default_factory=list)
    rewards: list[float] = field(default_factory=list)
    stop_reason: str = StopReason.STOP
    turns: int = 0
    postprocessed_actions: int = 0
    environment_metrics: dict[str, Any] = field(default_factory=dict)

    def add_sampled(self, ids: Sequence[int], logprobs: Sequence[float], versions: Sequence[int]) -> None:
        self.response_ids += ids
        self.loss_mask += [1] * len(ids)
        self.logprobs += logprobs
        self.versions += versions
        self.rewards += [0.0] * len(ids)
        self.turns += 1

    def add_observed(self, ids: Sequence[int]) -> None:
        self.response_ids += ids
        self.loss_mask += [0] * len(ids)
        self.logprobs += [0.0] * len(ids)
        self.versions += [-1] * len(ids)
        self.rewards += [0.0] * len(ids)


class GymGenerator(GeneratorInterface):
    """Plays :mod:`skyrl_train.environments`; all trajectories of a call run concurrently.

    A prompt's own ``env_class`` decides which environment it gets; ``environment.kwargs`` belong to the configured one,
    others run with their defaults. An environment that raises fails the call.
    """

    def __init__(
        self,
        client: GenerationClient,
        tokenizer: PreTrainedTokenizerBase,
        generator_config: GeneratorConfig,
        environment_config: EnvironmentConfig,
        model_path: str,
    ) -> None:
        """Raises:
        ConfigError: ``environment_config`` names no environment.
        """
        self._client = client
        self._tokenizer = tokenizer
        self._config = generator_config
        self._renderer = ChatRenderer(tokenizer, model_path)
        self._factories = {environment_config.env_class: resolve_environment(environment_config)}

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        """Plays every trajectory of ``input_batch`` to its end.

        Raises:
            RolloutError: an environment raised, or a prompt does not fit; the other trajectories are cancelled.
            EngineError: the client failed.
        """
        params = input_batch["sampling_params"]
        sampling = SamplingParams.parse(asdict(self._config.sampling_params) if params is None else params)
        ids = input_batch["trajectory_ids"]
        seeds = input_batch["batch_metadata"].seeds or (None,) * len(ids)
        trajectories = await gather_or_cancel(
            self._play(prompt, self._factory(env_class), extras, trajectory_id, sampling, seed)
            for prompt, env_class, extras, trajectory_id, seed in zip(
                input_batch["prompts"],
                input_batch["env_classes"],
                input_batch["env_extras"],
                ids,
                seeds,
                strict=True,
            )
        )
        return _to_output(trajectories, ids)

    def _factory(self, env_class: str) -> EnvironmentFactory:
        if env_class not in self._factories:
            self._factories[env_class] = resolve_environment(EnvironmentConfig(env_class=env_class))
        return self._factories[env_class]

    async def _play(
        self,
        prompt: ConversationType,
        factory: EnvironmentFactory,
        extras: Mapping[str, Any],
        trajectory_id: TrajectoryID,
        sampling: SamplingParams,
        seed: int | None,
    ) -> _Trajectory:
        async with Episode(factory, extras, trajectory_id.instance_id) as episode:
            messages, _ = await episode.init(prompt)
            trajectory = self._begin(messages, trajectory_id)
            while await self._play_turn(episode, trajectory, trajectory_id, sampling, seed):
                pass
            trajectory.environment_metrics = await episode.get_metrics()
            return trajectory

    def _begin(self, messages: ConversationType, trajectory_id: TrajectoryID) -> _Trajectory:
        trajectory = _Trajectory(self._renderer.render(messages))
        length = len(trajectory.prompt_token_ids)
        if not self._fits(length):
            raise RolloutError(
                f"Prompt {trajectory_id.instance_id!r} has {length} tokens, more than generator.max_input_length="
                f"{self._config.max_input_length} or the engines' max_model_len allow. Raise them or remove the prompt."
            )
        return trajectory

    async def _play_turn(
        self,
        episode: Episode,
        trajectory: _Trajectory,
        trajectory_id: TrajectoryID,
        sampling: SamplingParams,
        seed: int | None,
    ) -> bool:
        """Samples a turn, gives it to the environment, and returns whether another follows (its input is appended)."""
        input_ids = trajectory.prompt_token_ids + trajectory.response_ids
        max_tokens = self._budget(len(input_ids), sampling.max_tokens)
        params = replace(
            sampling,
            max_tokens=max_tokens,
            min_tokens=min(sampling.min_tokens, max_tokens),
            seed=sampling.seed if seed is None else mix(seed, trajectory.turns),
        )
        request = InferenceEngineInput(
            prompt_token_ids=[input_ids],
            sampling_params=params,
            session_ids=[trajectory_id.to_string()],
            detokenize=False,  # the environment's text is decoded below, with a stop string if there is one
        )
        sampled_versions = [version for version in trajectory.versions if version >= 0]
        if sampled_versions:  # engines that know priorities take what is oldest first
            request["priority"] = min(sampled_versions)
        output = await self._client.generate(request)
        sampled = output["response_ids"][0]
        if not sampled:
            raise EngineError(f"The engine sampled no token for {trajectory_id.to_string()!r}; it was asked for some.")
        trajectory.add_sampled(sampled, output["response_logprobs"][0], output["response_versions"][0])
        trajectory.stop_reason = output["stop_reasons"][0]

        action = str(self._tokenizer.decode(sampled, skip_special_tokens=True))
        step = await episode.step(action, trajectory.stop_reason)
        trajectory.rewards[-1] += step["reward"]
        trajectory.postprocessed_actions += step.get("postprocessed_action") not in (None, action)
        if step["done"] or trajectory.turns >= self._config.max_turns:
            return False
        extended = self._renderer.extend(input_ids, sampled, step["observations"])
        if not self._fits(len(extended)):
            trajectory.stop_reason = StopReason.LENGTH
            return False
        trajectory.add_observed(extended[len(input_ids) + len(sampled) :])
        return True

    def _fits(self, input_length: int) -> bool:
        """Whether at least one token may be sampled after an input of this length."""
        return input_length <= self._config.max_input_length and self._budget(input_length, 1) >= 1

    def _budget(self, input_length: int, max_tokens: int) -> int:
        """``max_tokens``, or what the engines' context leaves of it."""
        max_model_len = self._config.inference_engine.max_model_len
        return max_tokens if max_model_len is None else min(max_tokens, max_model_len - input_length)


def _to_output(trajectories: Sequence[_Trajectory], ids: list[TrajectoryID]) -> GeneratorOutput:
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


def _metrics(trajectories: Sequence[_Trajectory]) -> dict[str, float]:
    """Means over the trajectories; an environment's over those that report the number."""
    values: dict[str, list[float]] = {
        "generate/turns": [t.turns for t in trajectories],
        "generate/response_tokens": [sum(t.loss_mask) for t in trajectories],
        "generate/postprocessed_actions": [t.postprocessed_actions for t in trajectories],
    }
    for trajectory in trajectories:
        for key, value in trajectory.environment_metrics.items():
            if isinstance(value, Real):
                values.setdefault(f"environment/{key}", []).append(float(value))
    return {key: sum(numbers) / len(numbers) for key, numbers in values.items() if numbers}
