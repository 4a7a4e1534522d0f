"""The prompts of an evaluation, and how they are sampled."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from skyrl_train.config.schema.data import DataConfig
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.rollout.dataset import check_alphabet, load_dataset

# What the reader of prompts calls its settings, and what they are called here.
_SETTINGS = {"data.train_data": "trainer.eval.eval_data", "data.generate": "trainer.eval.generate"}


def load_evaluation_prompts(config: RunConfig) -> Sequence[PromptRecord]:
    """Reads ``trainer.eval.eval_data``, or has the environment make ``trainer.eval.generate`` prompts.

    None at all where nothing is ever evaluated.

    Raises:
        DataError, ConfigError: as :func:`load_dataset` and :func:`check_alphabet`; the message names the settings of the
            evaluation.
    """
    settings = config.trainer.eval
    if not settings.interval:
        return ()
    data = DataConfig(
        train_data=settings.eval_data,
        prompt_key=config.data.prompt_key,
        generate=settings.generate,
        seed=settings.seed,
    )
    try:
        prompts = load_dataset(data, config.environment)
        if config.trainer.policy.model.path is None:
            check_alphabet(prompts, config.trainer.policy.model.build.alphabet)
        return prompts.records
    except (DataError, ConfigError) as error:
        message = str(error)
        for theirs, ours in _SETTINGS.items():
            message = message.replace(theirs, ours)
        raise type(error)(f"The prompts of the evaluation: {message}") from error


def sampling_params(config: RunConfig) -> dict[str, Any]:
    """The run's sampling parameters with those of the evaluation over them."""
    return {**asdict(config.generator.sampling_params), **config.trainer.eval.sampling_params}
