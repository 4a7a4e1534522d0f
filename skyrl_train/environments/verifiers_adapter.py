"""Trains on environments of the package verifiers: ``load_environment()`` of an installed environment, or of a file.

    get_dataset() ──> prompts ──> harness ──> run() ──> Environment.run_rollout() ──HTTP──> endpoint
                                                  <── reward and metrics of its rubric

An environment runs its own conversation and scores it, so it is an agent of the harness: the run needs
``generator.name=harness`` and ``generator.kwargs.agent=skyrl_train.environments.verifiers_adapter:run``.
"""

from __future__ import annotations

import asyncio
import functools
import importlib.util
import json
import signal
import threading
from collections.abc import Callable, Mapping
from types import SimpleNamespace
from typing import Any

from skyrl_train.config.import_path import import_name
from skyrl_train.environments.base import EnvironmentFactory, PromptRecord
from skyrl_train.errors import ConfigError, RolloutError

AGENT = f"{__name__}:run"


def verifiers_environment(name: str, kwargs: Mapping[str, Any]) -> EnvironmentFactory:
    """Return the factory of ``verifiers:<name>``, which makes prompts but no environments.

    Its prompts are the first rows of the environment's training set, shuffled with the seed; there may be fewer than
    requested.

    Raises:
        ConfigError: verifiers or the environment is not installed, or the environment cannot be loaded or used.
    """
    environment = _load(name, json.dumps(dict(kwargs), sort_keys=True))

    def generate_prompts(count: int, seed: int) -> list[PromptRecord]:
        try:
            rows = environment.get_dataset(n=count, seed=seed)
        except Exception as error:  # it may build them now
            raise ConfigError(
                f"environment.env_class='verifiers:{name}' gives no training set: {type(error).__name__}: {error}"
            ) from error
        records = []
        for index, row in enumerate(rows):
            prompt = row.pop("prompt")
            if isinstance(prompt, str):
                row, prompt = {**row, "prompt": prompt}, [{"role": "user", "content": prompt}]
            records.append(
                PromptRecord(
                    uid=f"{name}-{seed}-{index}",
                    # A column of structs has every key in every row; keys that a message lacks are None.
                    prompt=[{key: value for key, value in message.items() if value is not None} for message in prompt],
                    env_extras={"verifiers": {"name": name, "kwargs": dict(kwargs)}, "row": row},
                    data_source=str(row.get("task") or name),
                )
            )
        return records

    def make(extras: Mapping[str, Any]) -> Any:
        raise ConfigError(
            f"A row names env_class='verifiers:{name}', which runs its own conversations. Remove the column."
        )

    return EnvironmentFactory(f"verifiers:{name}", make, generate_prompts=generate_prompts)


def _load(name: str, kwargs: str) -> Any:
    """Return the ``verifiers.Environment`` with the arguments ``kwargs``, a JSON object. Each process loads it once per run."""
    setting = f"environment.env_class='verifiers:{name}'"
    if importlib.util.find_spec("verifiers") is None:
        raise ConfigError(
            f"{setting} needs a package that is not installed. Install it: pip install 'verifiers<0.4' (in a clone: ./uvw run "
            "--extra verifiers ...)"
        )
    import verifiers

    if importlib.util.find_spec("verifiers.envs") is None:
        raise ConfigError(
            f"{setting} needs a version of verifiers with load_environment(); {verifiers.__version__} has none. Install "
            "one: pip install 'verifiers<0.4'"
        )
    _keep_signal_handlers()
    # Of a file, each run has another function: the file may have changed since the last run of this process.
    function = import_name(f"{name}:load_environment", setting, "function") if name.endswith(".py") else None
    try:
        environment = _made(name, function, kwargs)
    except Exception as error:  # its code may raise anything
        raise ConfigError(f"{setting} cannot be loaded with environment.kwargs={kwargs}: {error}") from error
    if environment.requires_group_rollouts:
        raise ConfigError(
            f"{setting} scores the rollouts of a prompt together, and here each is scored alone. Leave the group's reward "
            "functions out of its rubric, and set rollout.stages.reward.function to a function that scores groups."
        )
    return environment


@functools.cache
def _keep_signal_handlers() -> None:
    """Keep environments from replacing the handlers of SIGINT and SIGTERM, which are the trainer's.

    In a rollout actor, which loads them beside its main thread, that is even an error.
    """
    from verifiers.envs import environment

    vars(environment)["signal"] = SimpleNamespace(**{**vars(signal), "signal": lambda number, handler: None})


@functools.cache
def _made(name: str, function: Callable[..., Any] | None, kwargs: str) -> Any:
    """Return what ``function`` returns for ``kwargs``, or else the installed environment ``name``."""
    import verifiers

    arguments = json.loads(kwargs)
    return verifiers.load_environment(name, **arguments) if function is None else function(**arguments)


@functools.cache
def _event_loop() -> asyncio.AbstractEventLoop:
    """Return the event loop of all environments in this process, which runs in a thread.

    Their rubrics may compute for seconds, which would stop the control loop. One loop, because their rollouts share locks
    and HTTP clients.
    """
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="verifiers", daemon=True).start()
    return loop


async def run(prompt: list[dict[str, Any]], base_url: str, api_key: str, extras: Mapping[str, Any]) -> dict[str, Any]:
    """Run one rollout of the environment that made the prompt: the agent of the harness.

    Raises:
        ConfigError: another environment made the prompt.
        RolloutError: the environment recorded an error.
    """
    if "verifiers" not in extras:
        raise ConfigError(f"The agent {AGENT} needs prompts of environment.env_class=verifiers:<name>.")
    made_by = extras["verifiers"]
    environment = _load(made_by["name"], json.dumps(made_by["kwargs"], sort_keys=True))

    async def rollout() -> dict[str, Any]:
        from openai import AsyncOpenAI, DefaultAsyncHttpxClient
        from verifiers.clients import OpenAIChatCompletionsClient

        # The certificates take 80 ms to load and are of no use with plain HTTP. The harness bounds the time of a run.
        http = DefaultAsyncHttpxClient(verify=base_url.startswith("https:"))
        async with AsyncOpenAI(base_url=base_url, api_key=api_key, http_client=http, timeout=None) as client:
            output: dict[str, Any] = await environment.run_rollout(
                {"prompt": prompt, **extras["row"]}, OpenAIChatCompletionsClient(client), "policy", {}
            )
        return output

    output = await asyncio.wrap_future(asyncio.run_coroutine_threadsafe(rollout(), _event_loop()))
    if output.get("error"):
        raise RolloutError(f"The environment verifiers:{made_by['name']} failed: {output['error']}")
    return {"reward": output["reward"], "metrics": output["metrics"]}
