"""Names that a configuration may use, and the functions they stand for."""

from __future__ import annotations

import difflib
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Generic, TypeVar

from skyrl_train.config.import_path import import_name, is_import_path
from skyrl_train.errors import ConfigError, SkyRLError

T = TypeVar("T")


class Registry(Generic[T]):
    """Maps the values of one setting to functions. ``setting`` is its dotted name, used in messages."""

    def __init__(self, setting: str) -> None:
        self._setting = setting
        self._entries: dict[str, T] = {}
        self._imported: dict[str, T] = {}  # by import path; a file is executed once

    def register(self, name: str) -> Callable[[T], T]:
        """Return a decorator that registers a function as ``name``.

        Raises:
            ConfigError: the name is taken; with two meanings of one name, the import order would decide.
        """

        def add(entry: T) -> T:
            if name in self._entries:
                raise ConfigError(f"{self._setting}: {name!r} is registered already; choose another name.")
            self._entries[name] = entry
            return entry

        return add

    def get(self, name: str, setting: str | None = None) -> T:
        """Return the function behind ``name``: a registered name, or an import path (``package.module:function``).

        Args:
            setting: the setting that has this value, where it is not the registry's own.

        Raises:
            ConfigError: the name is unknown (with the nearest known name and all others), or it cannot be imported.
        """
        where = setting or self._setting
        if name in self._entries:
            return self._entries[name]
        if is_import_path(str(name)):
            if name not in self._imported:
                self._imported[name] = import_name(name, where, "function")
            return self._imported[name]
        nearest = difflib.get_close_matches(str(name), self._entries, n=1)
        hint = f" Did you mean {nearest[0]!r}?" if nearest else ""
        raise ConfigError(f"{where}={name!r} is unknown.{hint} Known: {', '.join(self.names())}.")

    def is_of_program(self, name: str | None) -> bool:
        """Return whether only this program and its forks have ``name``: it was registered outside this library, or is the import
        path of an object of a notebook."""
        entry = self._entries.get(name or "")
        if entry is None:
            return (name or "").startswith("__main__:")
        return not str(getattr(entry, "__module__", "")).startswith("skyrl_train.")

    def names(self) -> list[str]:
        """Return all registered names, sorted."""
        return sorted(self._entries)


@contextmanager
def called_by_setting(key: str, value: str | None) -> Iterator[None]:
    """While a function is called that ``key=value`` names, raise what it raises as a ConfigError with the setting.

    For calls before a step moves anything: after a ConfigError, the finished steps are saved.
    """
    try:
        yield
    except SkyRLError:
        raise
    except Exception as error:
        raise ConfigError(f"{key}={value} raised {error!r}. Mend it, and give the same command to continue.") from error
