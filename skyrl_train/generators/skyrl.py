"""Runs a generator of SkyRL unchanged: ``generator.name=skyrl``, ``generator.kwargs.cls=package.module:Class``.

generate(group) ──SkyRL's arguments──> the generator ──client.generate, HTTP──> our client, and a record of its responses
                                            └──> its output, versions filled in from the record

The generator gets its tokens from ``client.generate``, or its agents from ``client.get_endpoint_url()``. A token that it adds
itself does not train: no policy sampled it.
"""

from __future__ import annotations

import copy
import dataclasses
import inspect
from collections import Counter
from collections.abc import Mapping, Sequence
from contextvars import ContextVar
from dataclasses import dataclass, field
from importlib import import_module
from numbers import Real
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf

from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.endpoint.server.settings import ServerSettings
from skyrl_train.errors import ConfigError, GeneratorOutputError, RolloutError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.harness.generator import HarnessGenerator
from skyrl_train.generators.skyrl_endpoint import AgentEndpoint, RowTokens, ServedResponses
from skyrl_train.inference.client import RequestClient
from skyrl_train.inference.interface import SamplingParams
from skyrl_train.runtime.concurrency import gather_or_cancel
from skyrl_train.runtime.seeds import derive_seed
from skyrl_train.types import GeneratorInput, GeneratorOutput

GYM = "skyrl.train.generators.skyrl_gym_generator:SkyRLGymGenerator"


@dataclass(frozen=True)
class _Response:
    """What the client sampled in one request."""

    session_id: str | None
    token_ids: list[int]
    logprobs: list[float]
    versions: list[int]


@dataclass(frozen=True)
class _RunningCall:
    """A call of ``generate`` that runs: the seed of each session, its responses and its number of requests so far."""

    seeds: Mapping[str, int]
    responses: list[_Response] = field(default_factory=list)
    requests: Counter[str] = field(default_factory=Counter)

    def next_seed(self, session: str | None) -> int | None:
        """Return a seed for the next request of ``session``. Requests that run at once have different seeds, too."""
        if session is None or session not in self.seeds:
            return None
        self.requests[session] += 1
        return derive_seed(self.seeds[session], self.requests[session] - 1)


# One generator runs many calls at once. Tasks that a call starts copy its context, so each request finds its call.
_call: ContextVar[_RunningCall] = ContextVar("call")


class SkyRLClient:
    """The methods of SkyRL's client that its generators call.

    Attributes:
        model_name: the folder or hub name of the policy's starting model.
    """

    def __init__(
        self,
        client: RequestClient,
        tokenizer: Any,
        model_name: str,
        sampling_params: Mapping[str, Any],
        endpoint: AgentEndpoint,
    ) -> None:
        self.model_name = model_name
        self._client = client
        self._endpoint = endpoint
        self._tokenizer = tokenizer
        self._sampling_params = sampling_params

    async def generate(self, input_batch: Mapping[str, Any], model: str | None = None) -> dict[str, Any]:
        """Sample one response per prompt; the fields are SkyRL's. ``model`` and ``cache_salt`` are not read.

        ``responses`` have the stop string that ended them, as in SkyRL: its environments look for it.

        Raises:
            RolloutError: the caller is no task of a running ``generate``.
        """
        params = {**self._sampling_params, **(input_batch.get("sampling_params") or {})}
        # vLLM's names of what holds here always.
        for name in ("logprobs", "skip_special_tokens", "include_stop_str_in_output"):
            params.pop(name, None)
        prompts, conversations = input_batch.get("prompt_token_ids"), input_batch.get("prompts")
        sessions = input_batch.get("session_ids") or [None] * len(prompts or conversations or ())
        call = _call.get(None)
        if call is None:
            raise RolloutError(
                "client.generate was called outside of generate's tasks, so its tokens belong to no group. In a thread of your "
                "own, run it with contextvars.copy_context()."
            )
        results = await gather_or_cancel(
            self._client.generate(
                {
                    "prompt_token_ids": None if prompts is None else [prompts[index]],
                    "prompts": None if conversations is None else [conversations[index]],
                    "sampling_params": {**params, "seed": call.next_seed(session)},
                    "session_ids": None if session is None else [session],
                    "detokenize": False,
                }
            )
            for index, session in enumerate(sessions)
        )
        for session, result in zip(sessions, results, strict=True):
            # Copies: a generator may append to the lists that it gets.
            tokens, logprobs = list(result["response_ids"][0]), list(result["response_logprobs"][0])
            call.responses.append(_Response(session, tokens, logprobs, list(result["response_versions"][0])))
        token_ids = [result["response_ids"][0] for result in results]
        return {
            "responses": [self._tokenizer.decode(ids, skip_special_tokens=True) for ids in token_ids],
            "response_ids": token_ids,
            "stop_reasons": [result["stop_reasons"][0] for result in results],
            "response_logprobs": [result["response_logprobs"][0] for result in results],
            "prompt_logprobs": None,
            "rollout_expert_indices": None,
        }

    def get_endpoint_url(self) -> str:
        """Return the URL of an OpenAI-compatible endpoint, without ``/v1``; see :class:`AgentEndpoint`.

        Raises:
            ConfigError: its address cannot be bound.
        """
        return self._endpoint.url()

    async def finish_session(self, session_id: str) -> None:
        """Forget the messages of a session. It holds no capacity here."""
        self._endpoint.finish_session(session_id)


class SkyRLGenerator(GeneratorInterface):
    """A generator of SkyRL with SkyRL's constructor arguments, each that it names.

    ``generator_cfg`` and ``skyrl_gym_cfg`` are SkyRL's own, from the installed package, with our values of the settings that
    both have; ``inference_engine_client`` is a :class:`SkyRLClient`.

    Args:
        cls: the import path of its class; by default SkyRL's generator for skyrl-gym.
        generator_cfg: further fields of SkyRL's ``GeneratorConfig`` by their dotted names.
        endpoint: settings of the endpoint behind ``get_endpoint_url``, such as ``port`` and ``model_names``
            (:class:`~skyrl_train.endpoint.server.settings.ServerSettings`).
        kwargs: further arguments of its constructor.

    Raises:
        ConfigError: SkyRL is not installed, or has no such class or field.
    """

    def __init__(
        self,
        client: RequestClient,
        tokenizer: Any,
        generator_config: GeneratorConfig,
        environment_config: EnvironmentConfig,
        model_path: str,
        cls: str = GYM,
        generator_cfg: Mapping[str, Any] | None = None,
        endpoint: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> None:
        generator = import_name(cls, "generator.kwargs.cls")
        named = inspect.signature(generator).parameters
        self._sampling = dataclasses.asdict(generator_config.sampling_params)
        names = [model_path, (generator_cfg or {}).get("inference_engine.served_model_name") or Path(model_path).name]
        settings = self.endpoint_settings({"endpoint": {"model_names": ["policy", *names], **(endpoint or {})}})
        self._endpoint = AgentEndpoint(client, settings)
        offered = {
            "inference_engine_client": SkyRLClient(client, tokenizer, model_path, self._sampling, self._endpoint),
            "tokenizer": tokenizer,
            "model_name": model_path,
        }
        if "generator_cfg" in named:
            offered["generator_cfg"] = _generator_cfg(generator_config, generator_cfg or {})
        if "skyrl_gym_cfg" in named:
            offered["skyrl_gym_cfg"] = _skyrl_gym_cfg(environment_config)
        self._generator = generator(**{name: value for name, value in offered.items() if name in named}, **kwargs)
        self._quiet = (
            {"disable_tqdm": True} if "disable_tqdm" in inspect.signature(generator.generate).parameters else {}
        )

    @staticmethod
    def endpoint_settings(kwargs: Mapping[str, Any]) -> ServerSettings:
        """Return ``generator.kwargs.endpoint``. Without an ``admin_key``, the endpoint takes requests with any key.

        Raises:
            ConfigError: a setting is unknown or impossible.
        """
        endpoint = kwargs.get("endpoint") or {}
        return HarnessGenerator.endpoint_settings({"endpoint": {"open": "admin_key" not in endpoint, **endpoint}})

    async def start(self) -> None:
        await self._endpoint.start()

    async def aclose(self) -> None:
        await self._endpoint.aclose()

    async def generate(self, input_batch: GeneratorInput) -> GeneratorOutput:
        ids = input_batch["trajectory_ids"]
        seeds = input_batch["batch_metadata"].seeds
        names = [each.to_string() for each in ids]
        call = _RunningCall(dict(zip(names, seeds, strict=False)))
        served = ServedResponses(SamplingParams.parse(input_batch["sampling_params"] or self._sampling), names)
        self._endpoint.calls.append(served)
        before = _call.set(call)
        try:
            output = await self._generator.generate(
                {
                    **input_batch,
                    "prompts": [[dict(message) for message in prompt] for prompt in input_batch["prompts"]],
                    "env_classes": [name.removeprefix("skyrl_gym:") for name in input_batch["env_classes"]],
                    # SkyRL's generator writes max_turns into it.
                    "env_extras": copy.deepcopy(input_batch["env_extras"]),
                    "sampling_params": {**(input_batch["sampling_params"] or {}), "logprobs": 1},
                },
                **self._quiet,
            )
        finally:
            _call.reset(before)
            self._endpoint.end(served)
        trajectories = output.get("trajectory_ids") or ids
        rows: list[RowTokens] = []
        fields = (output[name] for name in ("prompt_token_ids", "response_ids", "loss_masks", "rewards"))
        for trajectory, prompt, tokens, wanted, reward in zip(trajectories, *fields, strict=False):
            session = trajectory.to_string()
            row = _take(tokens, wanted, session, call.responses)
            if any(wanted) and not any(row.loss_mask):
                if not self._endpoint.is_open:
                    raise GeneratorOutputError(
                        f"None of the tokens of sample {session} that are to be trained came from client.generate. Text that "
                        "was encoded again has other tokens; return the response_ids of the client."
                    )
                row = served.row(session, prompt, tokens, wanted, reward)
            rows.append(row)
        served.check_shared()
        metrics = output.get("rollout_metrics") or {}
        return {
            "prompt_token_ids": output["prompt_token_ids"],
            "response_ids": output["response_ids"],
            "rewards": output["rewards"],
            "loss_masks": [row.loss_mask for row in rows],
            "stop_reasons": output.get("stop_reasons"),
            # Lengths and times are measured by the library; its metrics have other names.
            "rollout_metrics": {
                name: float(value)
                for name, value in metrics.items()
                if name.startswith("environment/") and isinstance(value, Real)
            },
            "rollout_logprobs": [row.logprobs for row in rows],
            "rollout_versions": [row.versions for row in rows],
            "rollout_grammars": [row.grammars for row in rows],
            "trajectory_ids": output.get("trajectory_ids"),
            "is_last_step": output.get("is_last_step"),
        }


def _take(tokens: Sequence[int], mask: Sequence[int], session: str, responses: list[_Response]) -> RowTokens:
    """Find the responses that a row consists of, and remove them from ``responses``.

    A generator may have dropped the last token of a response, or cut the end of the row.

    Args:
        tokens: of the row, [T].
        mask: 1 on tokens to train, [T].
        session: of the row's trajectory. Responses without a session belong to any.
        responses: in the order in which they ended.
    """
    row = RowTokens([0] * len(tokens), [0.0] * len(tokens), [-1] * len(tokens), [])
    position = 0
    while position < len(tokens):
        length, found = 0, 0
        for index, response in enumerate(responses):
            if not mask[position] or response.session_id not in (session, None):
                continue
            common = _common(tokens, mask, position, response.token_ids)
            whole = common >= max(len(response.token_ids) - 1, 1) or position + common == len(tokens)
            if whole and common > length:  # of another sample, a shorter response may begin like this one
                length, found = common, index
        if length:
            response = responses.pop(found)
            row.loss_mask[position : position + length] = [1] * length
            row.logprobs[position : position + length] = response.logprobs[:length]
            row.versions[position : position + length] = response.versions[:length]
        position += max(length, 1)
    return row


def _common(tokens: Sequence[int], mask: Sequence[int], start: int, response: Sequence[int]) -> int:
    length, end = 0, start + len(response)
    for token, is_trained, sampled in zip(tokens[start:end], mask[start:end], response, strict=False):
        if token != sampled or not is_trained:
            break
        length += 1
    return length


def _settings() -> Any:
    try:
        return import_module("skyrl.train.config")
    except ImportError as error:
        raise ConfigError(f"generator.name=skyrl needs SkyRL's package: pip install skyrl ({error}).") from error


def _generator_cfg(ours: GeneratorConfig, further: Mapping[str, Any]) -> Any:
    skyrl, sampling = _settings(), ours.sampling_params
    config = skyrl.GeneratorConfig(
        n_samples_per_prompt=ours.n_samples_per_prompt,
        max_turns=ours.max_turns,
        max_input_length=ours.max_input_length,
        chat_template_kwargs=dict(ours.chat_template_kwargs),
        sampling_params=skyrl.SamplingParams(
            max_generate_length=sampling.max_tokens,
            temperature=sampling.temperature,
            top_p=sampling.top_p,
            min_p=sampling.min_p,
            top_k=sampling.top_k,
            stop=list(sampling.stop) or None,
        ),
    )
    for key, value in further.items():
        *path, name = key.split(".")
        section = config
        for part in path:
            section = getattr(section, part, None)
        if not hasattr(section, name):
            raise ConfigError(f"generator.kwargs.generator_cfg: SkyRL's GeneratorConfig has no {key}.")
        setattr(section, name, value)
    return config


def _skyrl_gym_cfg(environment: EnvironmentConfig) -> Any:
    config, name = _settings().SkyRLGymConfig(), environment.env_class.removeprefix("skyrl_gym:")
    if not hasattr(config, name):
        setattr(config, name, OmegaConf.create(dict(environment.kwargs)))
        return config
    for key, value in environment.kwargs.items():
        if not hasattr(getattr(config, name), key):
            raise ConfigError(f"environment.kwargs.{key} is unknown to SkyRL's settings of {name}.")
        setattr(getattr(config, name), key, value)
    return config
