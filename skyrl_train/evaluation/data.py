"""The prompts of an evaluation."""

from __future__ import annotations

from collections.abc import Sequence

from skyrl_train.config.keys import did_you_mean
from skyrl_train.config.schema import DataConfig, RunConfig
from skyrl_train.environments.base import PromptRecord
from skyrl_train.errors import ConfigError, DataError
from skyrl_train.evaluation.metrics import score_names
from skyrl_train.rollout.data.dataset import check_alphabet, load_dataset
from skyrl_train.rollout.data.prompt_limit import PromptLimit

# Settings of the training data in error messages, and their counterparts for the evaluation.
_SETTINGS = {"data.train_data": "trainer.eval.eval_data", "data.generate": "trainer.eval.generate"}


def load_evaluation_prompts(config: RunConfig, limit: PromptLimit | None = None) -> Sequence[PromptRecord]:
    """Read ``trainer.eval.eval_data``, or let the environment generate ``trainer.eval.generate`` prompts.

    Returns no prompts with ``trainer.eval.interval=0``.

    Args:
        limit: for prompts that are too long.

    Raises:
        DataError, ConfigError: see :func:`load_dataset` and :func:`check_alphabet`; the message names the settings of the
            evaluation. Also for a ``trainer.eval.best_metric`` that these prompts do not have.
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
            build = config.trainer.policy.model.build
            check_alphabet(prompts, build.alphabet, build.words)
        if limit is not None:
            prompts = limit.fit_all(prompts, "prompts of the evaluation")
    except (DataError, ConfigError) as error:
        message = str(error)
        # load_dataset names the settings of the training data; the user has to change the evaluation's.
        for theirs, ours in _SETTINGS.items():
            message = message.replace(theirs, ours)
        raise type(error)(f"The prompts of the evaluation: {message}") from error
    if settings.best_metric is not None:
        known = score_names(settings.n_samples_per_prompt, (record.data_source for record in prompts.records))
        if settings.best_metric not in known:
            close = did_you_mean(settings.best_metric, known)
            raise ConfigError(
                f"trainer.eval.best_metric={settings.best_metric}: this evaluation has no such score.{close}"
            )
    return prompts.records
