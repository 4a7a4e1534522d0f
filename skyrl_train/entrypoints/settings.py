"""Settings of a verb: of a recipe, or with ``--from`` of another library."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from rich.console import Console

from skyrl_train.config.compose import compose
from skyrl_train.config.migration.translate import migrate
from skyrl_train.config.schema import RunConfig
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
        return compose(recipe, overrides, config_dir)
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
    return migration.config
