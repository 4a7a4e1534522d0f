"""Constructs the configured generator, in the driver or in a rollout actor."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema import EnvironmentConfig, GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

    from skyrl_train.inference.client import RequestClient

# Import paths, because the dependencies of a generator are imported only where it is used.
BUILT_IN_GENERATORS = {
    "gym": "skyrl_train.generators.gym:GymGenerator",
    "harness": "skyrl_train.generators.harness.generator:HarnessGenerator",
    "skyrl": "skyrl_train.generators.skyrl:SkyRLGenerator",
}


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """The construction of a generator without client and tokenizer, as plain data.

    Args:
        config: with the resolved ``inference_engine.max_model_len``.
        model_path: tells the chat renderer the model family. Nothing is read from there.
    """

    config: GeneratorConfig
    environment: EnvironmentConfig
    model_path: str

    def import_class(self) -> Any:
        """Import the generator's class.

        Raises:
            ConfigError: ``generator.name`` names no class.
        """
        return import_name(BUILT_IN_GENERATORS.get(self.config.name, self.config.name), "generator.name")

    def build(self, client: RequestClient, tokenizer: PreTrainedTokenizerBase) -> GeneratorInterface:
        """Construct the generator.

        The constructor receives each of ``client``, ``tokenizer``, ``generator_config``, ``environment_config`` and
        ``model_path`` that it names, and ``generator.kwargs``.

        Raises:
            ConfigError: it cannot be imported or constructed.
        """
        cls = self.import_class()
        offered: Mapping[str, Any] = {
            "client": client,
            "tokenizer": tokenizer,
            "generator_config": self.config,
            "environment_config": self.environment,
            "model_path": self.model_path,
        }
        try:
            # By name, so that a generator takes only what it needs.
            named = inspect.signature(cls).parameters
            generator: GeneratorInterface = cls(
                **{key: value for key, value in offered.items() if key in named}, **self.config.kwargs
            )
        except TypeError as error:
            raise ConfigError(
                f"generator.name={self.config.name!r} cannot be constructed: {error}. The constructor receives each "
                f"of {', '.join(offered)} that it names, and generator.kwargs."
            ) from error
        return generator
