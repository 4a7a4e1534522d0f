"""Where a model is: a folder on this machine, or a name on the hub. Imports no torch."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from skyrl_train.errors import ModelError, first_line

HUB_LIMIT_S = 10.0


def is_local(path: str) -> bool:
    """Return whether ``path`` is a folder on this machine rather than a hub name."""
    return Path(path).is_dir()


def check_place(path: str, setting: str) -> None:
    """Raise ModelError for a path that does not exist, so that it is never looked up on the hub."""
    if not is_local(path) and _looks_local(path):
        what = "a file, not a model folder" if Path(path).exists() else "not there"
        raise ModelError(f"The model folder {path!r} is {what}. Point {setting} at a folder with a config.json.")


def check_hub(name: str, setting: str) -> None:
    """Check that the local cache or the hub has a model.

    Raises:
        ModelError: the hub has no such model, or does not answer.
    """
    reason = None if in_hub_cache(name) else why_not_on_hub(name, "model")
    if reason is not None:
        raise ModelError(
            f"{name!r} is no folder here, and the hub did not give it either ({reason}). Point {setting} at a model folder, or "
            f"download the model where there is a network: hf download {name}."
        )


def in_hub_cache(name: str) -> bool:
    """Return whether the model ``name`` was downloaded from the hub before."""
    from huggingface_hub import try_to_load_from_cache
    from huggingface_hub.errors import HFValidationError

    try:
        return isinstance(try_to_load_from_cache(name, "config.json"), str)
    except HFValidationError:
        return False


def why_not_on_hub(name: str, kind: Literal["model", "dataset"]) -> str | None:
    """Ask the hub once whether it has ``name``: other libraries would repeat their request for half a minute.

    Returns:
        Why it does not give it, or None.
    """
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HFValidationError, RepositoryNotFoundError

    try:
        HfApi().repo_info(name, repo_type=kind, timeout=HUB_LIMIT_S)
    except (RepositoryNotFoundError, HFValidationError):
        return f"it has no {kind} of that name, or a private one: log in with `hf auth login`"
    except Exception as error:  # errors of the HTTP library, which huggingface_hub passes on
        return first_line(error).rstrip(".")
    return None


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
