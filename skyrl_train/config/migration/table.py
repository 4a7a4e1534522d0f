"""A library's table of settings, and conversions that several tables use."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

UNSET: Any = object()  # no default; as a converted value: our default stays
Theirs = Mapping[str, Any]  # settings of the other library by their names, with its defaults


@dataclass(frozen=True)
class Without:
    """A value that has no counterpart, though its setting has one."""

    reason: str


@dataclass(frozen=True)
class Setting:
    """A setting of another library.

    Attributes:
        name: its name there. ``section.*`` stands for all settings in a section.
        here: our setting, or ``section.*``; None: it has no counterpart.
        note: the difference; without a counterpart, the reason.
        default: there, if a run from that library keeps it. The settings of one name have it once.
        convert: (value, all settings there) -> our value, UNSET to leave ours, or Without.
    """

    name: str
    here: str | None
    note: str = ""
    default: Any = UNSET
    convert: Callable[[Any, Theirs], Any] = lambda value, theirs: value


@dataclass(frozen=True)
class Library:
    """A library, the version that its table describes, its settings, and former names of some of them.

    ``whole``: the table has all of its settings, so that another name is a mistake.
    """

    title: str
    version: str
    settings: Sequence[Setting]
    renamed: Mapping[str, str] = field(default_factory=dict)
    whole: bool = False

    def rows(self, name: str) -> list[Setting]:
        """Return the rows named ``name``, else the rows of the nearest section around it."""
        exact = [row for row in self.settings if row.name == name]
        inside = [row for row in self.settings if row.name.endswith(".*") and name.startswith(row.name[:-1])]
        longest = max((len(row.name) for row in inside), default=0)
        return exact or [row for row in inside if len(row.name) == longest]


def without(reason: str, *names: str) -> list[Setting]:
    """Return settings that have no counterpart, for one reason."""
    return [Setting(name, None, reason) for name in names]


def as_list(value: Any, theirs: Theirs) -> list[Any]:
    """Convert None to an empty list, and a single value to a list of it."""
    return [] if value is None else value if isinstance(value, list) else [value]


def unless_none(value: Any, theirs: Theirs) -> Any:
    """Keep the value; None leaves ours."""
    return UNSET if value is None else value


def list_unless_none(value: Any, theirs: Theirs) -> Any:
    """Convert a single value to a list of it; None leaves ours."""
    return UNSET if value is None else as_list(value, theirs)


def data_files(value: Any, theirs: Theirs) -> list[str]:
    """Convert a path or paths to a list, with ``~`` expanded."""
    return [str(Path(path).expanduser()) if str(path).startswith("~") else path for path in as_list(value, theirs)]


def checkpoints_to_keep(value: Any, theirs: Theirs) -> Any:
    """Convert a number of checkpoints; None, all of them, has no counterpart."""
    return Without("not all checkpoints are kept: trainer.max_ckpts_to_keep is a number") if value is None else value


def share_of_steps(share: float, steps: int | None) -> int | Without:
    """Convert a share of ``steps``, the number of all steps, to a number of steps."""
    return (
        Without("num_warmup_steps counts steps; a share needs their number") if steps is None else round(share * steps)
    )


def trackers(value: Any, theirs: Theirs) -> list[Any]:
    """Convert a list of loggers. ``console`` is no tracker here."""
    return [name for name in as_list(value, theirs) if name != "console"]


def other_names(section: str, names: Mapping[str, str]) -> list[Setting]:
    """Return settings below ``section`` that differ from ours in the name alone."""
    return [Setting(f"{section}{name}", here) for name, here in names.items()]


_CHECKPOINT = re.compile(r"(.+)/checkpoints/global_step_(\d+)/?")  # of a run of this library


def resumed(path: str, mode: str, mode_value: str) -> list[Setting]:
    """Return the settings ``path``, which names a checkpoint to resume from, for one that a run of this library has written.

    Args:
        mode, mode_value: the setting that makes the library read ``path``, and its value for that.
    """

    def part(number: int) -> Callable[[Any, Theirs], Any]:
        def convert(value: Any, theirs: Theirs) -> Any:
            found = _CHECKPOINT.fullmatch(value or "")
            if value is None or theirs.get(mode) != mode_value or (found is None and number == 2):
                return UNSET
            if found is None:
                return Without("name RUN/checkpoints/global_step_N; trainer.init_from=RUN:N takes its policy alone")
            return found[1] if number == 1 else int(found[2])

        return convert

    note = f"RUN/checkpoints/global_step_N, with {mode}={mode_value}"
    return [
        Setting(path, "trainer.run_dir", note, UNSET, part(1)),
        Setting(path, "trainer.resume_step", note, UNSET, part(2)),
    ]


def mapped_values(values: Mapping[Any, Any]) -> Callable[[Any, Theirs], Any]:
    """Return a conversion of the values in ``values``. Other values stay."""
    return lambda value, theirs: values.get(value, value)


def known_values(values: Mapping[Any, Any], reason: str) -> Callable[[Any, Theirs], Any]:
    """Return a conversion of the values in ``values``. Other values have no counterpart, for ``reason``."""
    return lambda value, theirs: values.get(value, Without(reason))
