"""Where a model is: a folder on this machine, or a name on the hub. Imports no torch."""

from __future__ import annotations

from pathlib import Path

from skyrl_train.errors import ModelError


def is_local(path: str) -> bool:
    """Return whether ``path`` is a folder on this machine rather than a hub name."""
    return Path(path).is_dir()


def check_place(path: str, setting: str) -> None:
    """Raise ModelError for a path that does not exist, so that it is never looked up on the hub."""
    if not is_local(path) and _looks_local(path):
        what = "a file, not a model folder" if Path(path).exists() else "not there"
        raise ModelError(f"The model folder {path!r} is {what}. Point {setting} at a folder with a config.json.")


def _looks_local(path: str) -> bool:
    """Return whether ``path`` is meant as a local path: it is no ``name`` or ``organisation/name``, or it begins with an existing
    folder."""
    parts = path.split("/")
    return (
        path.startswith((".", "~", "/"))
        or path.endswith("/")
        or len(parts) > 2
        or "\\" in path
        or Path(path).exists()
        or (len(parts) == 2 and Path(parts[0]).is_dir())
    )
