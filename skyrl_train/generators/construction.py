"""How the configured generator is made, wherever it is going to run."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema.data import EnvironmentConfig
from skyrl_train.config.schema.generator import GeneratorConfig
from skyrl_train.errors import ConfigError
from skyrl_train.generators.base import GeneratorInterface
from skyrl_train.inference.client import RequestClient

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

# By import path: what a generator needs is imported only where it is used.
BUILT_IN_GENERATORS = {
    "gym": "skyrl_train.generators.gym:GymGenerator",
    "harness": "skyrl_train.generators.harness.generator:HarnessGenerator",
}


@dataclass(frozen=True, slots=True)
class GeneratorSpec:
    """Everything that a generator is made of but the client; plain data.

    Args:
        config: its ``inference_engine.max_model_len`` is the resolved one.
        model_path: tells the chat renderer which model family this is; nothing is read from there.
    """

    config: GeneratorConfig
    environment: EnvironmentConfig
    model_path: str

    def import_class(self) -> Any:
        """
        Raises:
            ConfigError: ``generator.name`` names no class.
        """
        return import_name(BUILT_IN_GENERATORS.get(self.config.name, self.config.name), "generator.name")

    def build(self, client: RequestClient, tokenizer: PreTrainedTokenizerBase) -> GeneratorInterface:
        """The generator. It is given those of ``client``, ``tokenizer``, ``generator_config``, ``environment_config`` and
        ``model_path`` that its constructor names, and ``generator.kwargs``.

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
            named = inspect.signature(cls).parameters
            generator: GeneratorInterface = cls(
                **{key: value for key, value in offered.items() if key in named}, **self.config.kwargs
            )
        except TypeError as error:
            raise ConfigError(
                f"generator.name={self.config.name!r} cannot be constructed: {error}. It is given those of "
                f"{', '.join(offered)} that its constructor names, and generator.kwargs."
            ) from error
        return generator
