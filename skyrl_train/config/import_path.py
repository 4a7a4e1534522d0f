"""Classes and functions of other people, named in a setting."""

from __future__ import annotations

import importlib
import importlib.util
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from skyrl_train.errors import ConfigError


def is_import_path(name: str) -> bool:
    """Whether ``name`` is of the shape that :func:`import_name` takes, and no registered name."""
    return "." in name or ":" in name


def import_name(path: str, setting: str, kind: Literal["class", "function"] = "class") -> Any:
    """Imports ``package.module:Name`` (or ``package.module.Name``), or ``Name`` from a file: ``path/to/file.py:Name``.

    Args:
        kind: what ``setting`` wants, for the message.

    Raises:
        ConfigError: there is no such thing; the message names ``setting``.
    """
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    try:
        return getattr(_module_of_file(place) if place.endswith(".py") else importlib.import_module(place), name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        example = "Class" if kind == "class" else "function"
        raise ConfigError(
            f"{setting}={path!r} cannot be imported: {error}. Name a {kind} as package.module:{example} or "
            f"file.py:{example}."
        ) from error


def _module_of_file(path: str) -> ModuleType:
    """The module in a file, under the file's own name, so that it can be found again (by pickle, by dataclasses)."""
    spec = importlib.util.spec_from_file_location(Path(path).stem, path)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module
