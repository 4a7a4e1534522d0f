"""Settings of other libraries, translated into ours: ``skyrl-train train --from skyrl ...``.

a library's table (data, one module each) + its file and overrides ──migrate──> RunConfig, and what has no counterpart

``docs/reference/migration.md`` is generated from the tables.
"""

from __future__ import annotations

import json
import re
import tomllib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml
from omegaconf import OmegaConf
from omegaconf.errors import OmegaConfBaseException

from skyrl_train.config.compose import from_settings, with_overrides
from skyrl_train.config.keys import did_you_mean, in_free_section, known_keys, setting
from skyrl_train.config.migration.areal import AREAL
from skyrl_train.config.migration.prime_rl import PRIME_RL
from skyrl_train.config.migration.skyrl import SKYRL
from skyrl_train.config.migration.table import UNSET, Library, Without, as_list
from skyrl_train.config.migration.trl import TRL
from skyrl_train.config.migration.verl import VERL
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError, first_line

LIBRARIES: dict[str, Library] = {"skyrl": SKYRL, "verl": VERL, "trl": TRL, "prime-rl": PRIME_RL, "areal": AREAL}
_OTHER_FILES = (
    "hydra's other files are not read: {}. Write all settings into one file; "
    "the script of the other library prints them with `--cfg job --resolve`"
)


@dataclass(frozen=True)
class Migration:
    """Settings of another library in our terms.

    Attributes:
        title: of the library.
        config: the whole configuration.
        mapped: each given setting with a counterpart: its name and value there, our setting, and our value (UNSET: ours
            stays).
        defaults: our setting and value of each default there that differs from ours, and that the run keeps.
        without: name and reason of each given setting without a counterpart.
    """

    title: str
    config: RunConfig
    mapped: list[tuple[str, Any, str, Any]]
    defaults: list[tuple[str, Any]]
    without: list[tuple[str, str]]

    def describe(self) -> str:
        """Return the settings whose name or value changes, the defaults that are kept, and what has no counterpart."""
        names = {name for name, *_ in self.mapped} | {name for name, _ in self.without}
        lacking = {name for name, _ in self.without}
        lines = [f"{self.title}: {len(names - lacking)} of {len(names)} settings have a counterpart."]
        lines += [
            f"  {name}={_text(value)} -> {key}={_text(here)}"
            for name, value, key, here in self.mapped
            if here is not UNSET and (name, value) != (key, here)
        ]
        translated = {key for _, _, key, _ in self.mapped} | {key for key, _ in self.defaults}
        remote = self.config.generator.inference_engine.backend == "vllm_remote"
        devices = ["trainer.device", *([] if remote else ["generator.inference_engine.device"])]
        on_cpu = [f"{key}=cpu" for key in devices if key not in translated and setting(self.config, key) == "cpu"]
        if on_cpu:
            lines.append(f"Not named there: {' and '.join(on_cpu)}, as by default here. On a GPU, set cuda.")
        if self.defaults:
            lines.append(f"Defaults of {self.title} that are kept, and differ from ours:")
            lines += [f"  {key}={_text(value)}" for key, value in self.defaults]
        if self.without:
            lines.append("Without a counterpart:")
            lines += [f"  {name}: {reason}" for name, reason in self.without]
        return "\n".join(lines)


def _text(value: Any) -> str:
    return value if isinstance(value, str) else json.dumps(value)


def migrate(library: str, arguments: Sequence[str]) -> Migration:
    """Translate the settings of another library.

    Args:
        library: a key of ``LIBRARIES``.
        arguments: a file of its settings (yaml or toml), ``key=value`` overrides of them, or both. Overrides with names that
            only we have are applied last, as they are.

    Raises:
        ConfigError: the file cannot be read, a name is known to neither, though the table is whole, or a value is of another
            type here.
    """
    if library not in LIBRARIES:
        raise ConfigError(
            f"--from {library}: there is no such table.{did_you_mean(library, LIBRARIES)} Known: {', '.join(LIBRARIES)}."
        )
    table = LIBRARIES[library]
    files = [text for text in arguments if "=" not in text]
    if len(files) > 1:
        raise ConfigError(f"--from {library} takes one file and key=value settings, not {' and '.join(files)}.")
    ours: list[str] = []  # overrides that only we have
    texts: list[str] = []
    for text in arguments:
        if "=" in text:
            key = text.partition("=")[0].lstrip("+~")
            known_here = key in known_keys() or in_free_section(key)
            (ours if known_here and not table.rows(table.renamed.get(key, key)) else texts).append(text)
    given: dict[str, Any] = {}
    settings: dict[str, Any] = {}  # ours
    without: list[tuple[str, str]] = []
    read = _read(library, files, texts)
    if other_files := [entry for entry in as_list(read.pop("defaults", None), {}) if entry != "_self_"]:
        without.append(("defaults", _OTHER_FILES.format(", ".join(map(_text, other_files)))))
    for name, value in _leaves(read):
        name = table.renamed.get(name, name)
        if name.rpartition(".")[2] == "_target_":
            continue  # hydra's: the class of a section
        if value is None and not table.rows(name) and any(row.name.startswith(f"{name}.") for row in table.settings):
            continue  # a section without settings
        if not table.rows(name):
            if name in known_keys() or in_free_section(name):
                settings[name] = value
                continue
            meant = did_you_mean(name, [row.name.removesuffix(".*") for row in table.settings])
            if table.whole:
                raise ConfigError(f"{name} is a setting of neither {table.title} nor skyrl_train.{meant}")
            without.append((name, f"it is not in our table of {table.title}'s settings.{meant}"))
            continue
        given[name] = value
        numbers = [row.default for row in table.rows(name) if isinstance(row.default, bool | int | float)]
        if numbers and (not isinstance(value, int | float) or isinstance(value, bool) != isinstance(numbers[0], bool)):
            holds = "true or false" if isinstance(numbers[0], bool) else "a number"
            raise ConfigError(f"{name}={_text(value)} (in {table.title}'s settings) must be {holds}.")

    named_here = set(settings)  # by our names in the file: they win over what follows from theirs
    default = RunConfig()
    theirs = {row.name: row.default for row in table.settings if row.default is not UNSET} | given
    mapped, kept = [], {}
    for name, value in theirs.items():
        for row in table.rows(name):
            try:
                ours_value = row.convert(value, theirs) if row.here is not None else Without(row.note)
            except (TypeError, AttributeError) as error:  # about a type
                raise ConfigError(
                    f"{name}={_text(value)} (in {table.title}'s settings) cannot be translated into {row.here}: it has the wrong "
                    "type."
                ) from error
            except ValueError as error:
                raise ConfigError(
                    f"{name}={_text(value)} (in {table.title}'s settings) cannot be translated: {error}."
                ) from error
            if isinstance(ours_value, Without):
                if name in given:
                    without.append((name, ours_value.reason))
                continue
            key = str(row.here)
            if key.endswith(".*"):
                key = key[:-1] + name.removeprefix(row.name[:-1])
            if key in named_here:
                if name in given:
                    mapped.append((name, value, key, UNSET))
                continue
            if name in given:
                mapped.append((name, value, key, ours_value))
            elif ours_value is not UNSET and ours_value != _default(default, key):
                kept[key] = ours_value
            if ours_value is not UNSET:
                settings[key] = ours_value
    changed = {key: value for key, value in settings.items() if value != _default(default, key)}
    where = f"{table.title}'s settings"
    try:
        config = from_settings(changed, where)
    except ConfigError as error:  # it names our setting, and the user has written theirs
        for name, value, key, _ in mapped:
            if name != key and re.match(rf"{re.escape(key)}\b(?!\.)", str(error)):
                said = str(error).replace(f" (in {where})", "", 1)
                raise ConfigError(f"{name}={_text(value)} (in {where}): {said}") from error
        raise
    given_here = {key for _, _, key, _ in mapped}
    return Migration(
        table.title,
        config=with_overrides(config, ours) if ours else config,
        mapped=mapped,
        defaults=[(key, value) for key, value in kept.items() if key not in given_here],
        without=without,
    )


def _read(library: str, files: Sequence[str], overrides: Sequence[str]) -> dict[Any, Any]:
    """Return the sections and settings in ``files`` and ``overrides``, interpolations resolved."""
    for text in overrides:
        if text.startswith("~"):
            raise ConfigError(f"Cannot read the override {text!r}: leave the setting out instead.")
    place = files[0] if files else "the command line"
    try:
        read = [
            OmegaConf.create(tomllib.loads(Path(path).read_text(encoding="utf-8")))
            if path.endswith(".toml")
            else OmegaConf.load(path)
            for path in files
        ]
        read.append(OmegaConf.from_dotlist([text.lstrip("+") for text in overrides]))
        settings = OmegaConf.to_container(OmegaConf.merge(*read), resolve=True)
    except OSError as error:
        raise ConfigError(f"--from {library}: cannot read {place}: {error.strerror or error}.") from error
    except (yaml.YAMLError, OmegaConfBaseException, ValueError, AssertionError) as error:
        raise ConfigError(f"--from {library}: {place} does not hold readable settings: {first_line(error)}") from error
    if not isinstance(settings, dict):
        raise ConfigError(f"--from {library}: {place} is not a mapping of settings.")
    return settings


def _leaves(section: Mapping[Any, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in section.items():
        if isinstance(value, dict):
            yield from _leaves(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def _default(default: RunConfig, key: str) -> Any:
    return setting(default, key) if key in known_keys() else UNSET
