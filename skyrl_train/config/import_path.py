"""Classes and functions of other people, named in a setting."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import sysconfig
from pathlib import Path
from types import ModuleType
from typing import Any, Literal

from skyrl_train.errors import ConfigError

_modules: dict[Path, ModuleType] = {}  # of files, by resolved path


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
        remedy = f"Name a {kind} as package.module:{example} or file.py:{example}."
        if isinstance(error, ModuleNotFoundError) and not f"{place}.".startswith(f"{error.name}."):
            remedy = f"{place} imports it: install its package here, or mend the import."
        raise ConfigError(f"{setting}={path!r} cannot be imported: {error}. {remedy}") from error


def forget_files() -> None:
    """Another run begins in this process: files are run anew, since what they keep may belong to the event loop of the run
    before (an HTTP client)."""
    _modules.clear()


def _module_of_file(path: str) -> ModuleType:
    """The module in a file, under the file's own name, so that it can be found again (by pickle, by dataclasses).

    A file is run once in a run, however many settings name it: what it registers it would otherwise register again.
    """
    file = Path(path).resolve()
    if file in _modules:
        return _modules[file]
    if file.stem in sys.stdlib_module_names or _is_installed(file.stem):
        raise ImportError(
            f"{file.name} has the name of an installed module, which the others that import it need: rename the file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    _modules[file] = module
    return module


def _is_installed(name: str) -> bool:
    try:
        spec = importlib.util.find_spec(name)
    except ValueError:  # __main__ has none
        return False
    if spec is None or spec.origin is None:
        return False
    return any(Path(spec.origin).is_relative_to(sysconfig.get_path(where)) for where in ("purelib", "platlib"))
