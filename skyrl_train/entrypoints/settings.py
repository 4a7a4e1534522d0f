"""Settings of a verb: of a recipe, or with ``--from`` of another library."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict
from pathlib import Path

from rich.console import Console

from skyrl_train.config.compose import compose
from skyrl_train.config.migration.translate import migrate
from skyrl_train.config.schema import EnvironmentConfig, ModelConfig, RunConfig
from skyrl_train.errors import ConfigError


def read_settings(
    recipe: str,
    overrides: Sequence[str],
    config_dir: Path | None,
    library: str | None,
    console: Console,
    *,
    strict: bool = False,
) -> RunConfig:
    """Compose a recipe, or translate the settings of another library and print the translation.

    Args:
        library: None: a recipe. Otherwise ``recipe`` is a file or a setting of this library; see
            :func:`skyrl_train.config.migration.translate.migrate`.
        strict: a setting without a counterpart is an error.

    Raises:
        ConfigError: a setting cannot work.
    """
    if library is None:
        config = compose(recipe, overrides, config_dir)
        check_working_folder(recipe, config)
        return config
    if config_dir is not None:
        raise ConfigError(
            f"--config-dir is for recipes, and --from {library} takes a file of {library}. Give one of them."
        )
    migration = migrate(library, [recipe, *overrides])
    console.print(migration.describe(), markup=False, highlight=False, soft_wrap=True)
    if strict and migration.without:
        raise ConfigError(
            f"{len(migration.without)} settings of {migration.title} have no counterpart, and --strict is given."
        )
    config = migration.config
    toy_task = not config.data.train_data and config.environment == EnvironmentConfig()
    if toy_task and config.trainer.policy.model == ModelConfig():
        raise ConfigError(
            f"These settings of {migration.title} name neither a model nor data. Add ours: trainer.policy.model.path=MODEL, "
            "data.train_data=[FILE], and rollout.stages.reward.function=FILE.py:FUNCTION or environment.env_class=FILE.py:CLASS."
        )
    return config


def check_working_folder(recipe: str | Path, config: RunConfig) -> None:
    """Check that no file named in a recipe is missing here and present in the recipe's folder: paths count from here.

    Raises:
        ConfigError: there is one; the message says where to change to.
    """
    folder = Path(recipe).parent
    if not Path(recipe).is_file() or folder.resolve() == Path.cwd():
        return
    for text in texts(asdict(config)):
        name = text.partition(":")[0]  # of file.py:Name
        file = Path(name)
        looks_like_one = file.suffix and len(name) < 256 and not file.is_absolute()
        if looks_like_one and not file.exists() and (folder / file).exists():
            raise ConfigError(
                f"{recipe} names {name}, which is not here and is in the recipe's folder; paths count from here. Change to that "
                f"folder: cd {shlex.quote(str(folder))}, then give {Path(recipe).name}."
            )


def texts(value: object) -> Iterator[str]:
    """Yield the texts in a value of a configuration, at any depth."""
    if isinstance(value, str):
        yield value
    elif isinstance(value, dict | list):
        for each in value.values() if isinstance(value, dict) else value:
            yield from texts(each)
