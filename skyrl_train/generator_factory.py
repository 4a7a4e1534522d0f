"""Builds the configured generator, in this process or in Ray actors."""

from __future__ import annotations

import dataclasses
import sys
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from skyrl_train.config.plan import Plan
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.generators.construction import GeneratorSpec
from skyrl_train.generators.remote.generator import RemoteGenerator
from skyrl_train.generators.remote.messages import Setup
from skyrl_train.inference.client import InferenceEngineClient


def build_generator(
    config: RunConfig, plan: Plan, client: InferenceEngineClient, tokenizer: PreTrainedTokenizerBase, model_path: str
) -> GeneratorInterface:
    """The configured generator: here, or with ``rollout.num_actors`` in actors."""
    generator = dataclasses.replace(
        config.generator,
        inference_engine=dataclasses.replace(config.generator.inference_engine, max_model_len=plan.max_model_len),
    )
    spec = GeneratorSpec(generator, config.environment, model_path)
    return _in_actors(config, spec, client, tokenizer) if config.rollout.num_actors else spec.build(client, tokenizer)


def _in_actors(
    config: RunConfig, spec: GeneratorSpec, client: InferenceEngineClient, tokenizer: PreTrainedTokenizerBase
) -> GeneratorInterface:
    spec.import_class()  # what it declares, its metrics for one, is needed here as well
    try:
        from skyrl_train.generators.remote.ray_link import RayLink
        from skyrl_train.inference.engines.ray_actor import RayPlacement
    except ImportError as error:
        raise ConfigError("rollout.num_actors needs Ray: install skyrl-train[ray].") from error
    setup = Setup(
        spec=spec,
        tokenizer=tokenizer,
        tool_parser=config.generator.chat.tool_parser,
        reasoning_parser=config.generator.chat.reasoning_parser,
        folder=str(Path.cwd()),
        search_path=tuple(path for path in sys.path if path),
    )
    placement = RayPlacement(num_cpus=config.rollout.ray_num_cpus)
    return RemoteGenerator([lambda: RayLink(placement)] * config.rollout.num_actors, setup, client)
