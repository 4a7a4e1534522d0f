"""Classes and functions of the user, named in a setting by their import path."""

from __future__ import annotations

import ast
import difflib
import hashlib
import importlib
import importlib.util
import inspect
import sys
import sysconfig
import traceback
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from types import CodeType, FunctionType, ModuleType
from typing import Any, Literal

from skyrl_train.errors import ConfigError

_DEFINITIONS = (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)
_NOT_OWN = (
    str(Path(__file__).parents[1]),
    *(sysconfig.get_path(where) for where in ("stdlib", "purelib", "platlib")),
    "<",
)
_modules: dict[Path, ModuleType] = {}  # of files, by resolved path
_objects: dict[str, Any] = {}  # objects of this process that a caller passed to a run, by their import path


def is_import_path(name: str) -> bool:
    """Return whether ``name`` has the form of an import path, not of a registered name."""
    return "." in name or ":" in name


def import_path_of(target: type | Callable[..., Any]) -> str:
    """Return an import path for a class or function of this process; :func:`import_name` then returns the object itself.

    The path of an object in the main script names the script's file, so that another process can import it too. An object
    of a notebook or inside a function can only be found in this process. The path of a lambda ends in a digest of its code, so
    that a run does not resume with another one.
    """
    module, name = target.__module__, target.__qualname__
    if isinstance(target, FunctionType) and target.__name__ == "<lambda>":
        name = f"{name}#{_digest(target)}"
    file = getattr(sys.modules.get(module), "__file__", None)
    path = f"{Path(file).resolve()}:{name}" if module == "__main__" and file is not None else f"{module}:{name}"
    _objects[path] = target
    return path


def _digest(function: FunctionType) -> str:
    """Return a digest of a function's code, and of the numbers and texts that it is bound to. Where it stands does not count."""

    def described(value: object) -> object:
        match value:
            case CodeType():
                arguments = value.co_varnames[: value.co_argcount + value.co_kwonlyargcount]
                constants = [described(constant) for constant in value.co_consts]
                return arguments, value.co_names, value.co_freevars, value.co_code.hex(), constants
            case tuple():
                return [described(each) for each in value]
            case frozenset():  # its order differs between processes
                return sorted(repr(described(each)) for each in value)
            case None | bool() | int() | float() | complex() | str() | bytes():
                return repr(value)
            case _:
                return type(value).__name__

    bound: list[object] = [*(function.__defaults__ or ()), *sorted((function.__kwdefaults__ or {}).items())]
    for cell in function.__closure__ or ():
        with suppress(ValueError):  # the variable has no value yet
            bound.append(cell.cell_contents)
    text = repr([described(value) for value in (function.__code__, *bound)])
    return hashlib.sha256(text.encode()).hexdigest()[:8]


def import_name(path: str, setting: str, kind: Literal["class", "function"] = "class") -> Any:
    """Import ``package.module:Name`` (or ``package.module.Name``), or ``Name`` from a file: ``path/to/file.py:Name``.

    Args:
        kind: the kind of object that ``setting`` takes, for the message.

    Raises:
        ConfigError: there is no such object; the message names ``setting``.
    """
    # An object of this process, such as a class in a notebook: no import could find it.
    if path in _objects:
        return _objects[path]
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    example = "Class" if kind == "class" else "function"
    remedy = f"Name a {kind} as package.module:{example} or file.py:{example}."
    if not colon and path.endswith(".py"):
        raise ConfigError(f"{setting}={path!r} is a file. {remedy}")
    module: ModuleType | None = None
    try:
        module = _module_of_file(place) if place.endswith(".py") else importlib.import_module(place)
        return getattr(module, name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        close = difflib.get_close_matches(name, vars(module), n=1) if module is not None else []
        if close:
            remedy = f"Did you mean {path.removesuffix(name)}{close[0]}?"
        # Another module is missing than the named one, so the path itself is right.
        if isinstance(error, ModuleNotFoundError) and not f"{place}.".startswith(f"{error.name}."):
            remedy = f"{place} imports it: install its package here, or mend the import."
        elif line := _own_line(error):  # so did the path lead to it
            remedy = f"Mend {line}."
        raise ConfigError(f"{setting}={path!r} cannot be imported: {_said(error)}. {remedy}") from error


def is_own_code(file: str) -> bool:
    """Return whether a file in a traceback is the user's: outside of this library, Python and installed packages."""
    return not file.startswith(_NOT_OWN)


def _own_line(error: Exception) -> str:
    """Return ``file:line`` of the user's line from which an error came while it was imported, or an empty string."""
    frames = [frame for frame in traceback.extract_tb(error.__traceback__) if is_own_code(frame.filename)]
    return f"{frames[-1].filename}:{frames[-1].lineno}" if frames else ""


def _said(error: Exception) -> str:
    return f"{type(error).__name__}: {error}" if _own_line(error) else str(error)


def place_of(path: str) -> str | None:
    """Return file and line of the class or function that an import path names, or None. Does not execute its file."""
    code = getattr(inspect.unwrap(_objects[path]), "__code__", None) if path in _objects else None
    if code is not None:
        # The cell of a notebook is no file.
        return f"{code.co_filename}:{code.co_firstlineno}" if Path(code.co_filename).is_file() else None
    place, colon, name = path.rpartition(":")
    if not colon:
        place, _, name = path.rpartition(".")
    try:
        spec = None if place.endswith(".py") else importlib.util.find_spec(place)
        file = place if spec is None else spec.origin or ""
        body = ast.parse(Path(file).read_bytes()).body
    except (ImportError, AttributeError, ValueError, OSError, SyntaxError):
        return None
    line = 0
    for part in name.split("."):
        found = [node for node in body if isinstance(node, _DEFINITIONS) and node.name == part]
        if not found:
            return None
        body, line = found[-1].body, found[-1].lineno
    return f"{file}:{line}"


def import_module(name: str, setting: str) -> None:
    """Import ``package.module``, or a file, so that its classes and functions are registered.

    Raises:
        ConfigError: it cannot be imported; the message names ``setting``.
    """
    try:
        _module_of_file(name) if name.endswith(".py") else importlib.import_module(name)
    except (ImportError, AttributeError, ValueError, OSError) as error:
        line = _own_line(error)
        remedy = f"Mend {line}." if line else "Name a module of this environment, or a file: path/to/file.py."
        raise ConfigError(f"{setting}={name!r} cannot be imported: {_said(error)}. {remedy}") from error


def forget_files() -> None:
    """Forget the modules of files, so that the next run in this process executes them again.

    Their globals may belong to the event loop of the run before (an HTTP client, for example).
    """
    _modules.clear()


def _module_of_file(path: str) -> ModuleType:
    """Return the module in a file, under the file's own name, so that pickle and dataclasses find it again.

    A file is executed once per run, even if several settings name it; otherwise it would register its names twice.
    """
    file = Path(path).resolve()
    if file in _modules:
        return _modules[file]
    if "." in file.stem:
        raise ImportError(
            f"{file.name} has a dot in its name, which to Python is a module inside of another: rename the file"
        )
    if file.stem in sys.stdlib_module_names or _is_installed(file.stem):
        raise ImportError(
            f"{file.name} has the name of an installed module, which the others that import it need: rename the file"
        )
    spec = importlib.util.spec_from_file_location(file.stem, file)
    if spec is None or spec.loader is None:
        raise ImportError(f"{path} is no Python file")
    module = importlib.util.module_from_spec(spec)
    # Before the execution: dataclasses and pickle look the module up by its name.
    before = sys.modules.get(spec.name)
    sys.modules[spec.name] = module
    try:
        spec.loader.exec_module(module)
    except BaseException:  # nobody may find half of a module
        del sys.modules[spec.name]
        if before is not None:
            sys.modules[spec.name] = before
        raise
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
