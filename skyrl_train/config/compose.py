"""Recipe + overrides -> a typed configuration. Hydra composes; each error names the key and what to write instead.

recipes/NAME.yaml  (defaults: [base, _self_])  ──┐
base = the schema's defaults                   ──┼──hydra──> RunConfig (plain dataclasses)
key=value ... from the command line            ──┘
"""

from __future__ import annotations

import math
import re
import tempfile
import threading
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict
from enum import Enum
from pathlib import Path
from typing import Any

import hydra
import yaml
from hydra.core.config_store import ConfigStore
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override, Quote, QuotedString
from hydra.errors import HydraException, MissingConfigException
from omegaconf import DictConfig, OmegaConf
from omegaconf.errors import InterpolationResolutionError, OmegaConfBaseException

from skyrl_train.config.keys import did_you_mean, in_free_section, known_keys, meant_setting, nearest, setting
from skyrl_train.config.schema import RunConfig
from skyrl_train.errors import ConfigError, first_line

try:
    from yaml import CSafeDumper as SafeDumper
except ImportError:  # PyYAML was built without libyaml: the same text, four times slower
    from yaml import SafeDumper

RECIPES = Path(__file__).parent / "recipes"
BASE = "base"
OVERRIDES = "the overrides"
_hydra = threading.Lock()  # its configuration is a global of the process

# Settings that name files or folders: ~ at their beginning is the user's home, which a shell leaves as it is after a dotted key.
_PATHS = (
    "trainer.runs_dir",
    "trainer.run_dir",
    "trainer.init_from",
    "trainer.policy.model.path",
    "trainer.critic.model.path",
    "trainer.eval.eval_data",
    "data.train_data",
    "environment.modules",
    "generator.chat_template",
    "generator.weight_folder",
)

_QUOTED_NAME = re.compile(r"""([{,]\s*)(['"])(.*?)\2\s*:""")  # of a mapping in an override

ConfigStore.instance().store(name=BASE, node=RunConfig)


def compose(config_name: str, overrides: Sequence[str] = (), config_dir: str | Path | None = None) -> RunConfig:
    """Compose a recipe and command-line overrides.

    Args:
        config_name: a recipe's name, the path of a yaml file, or the folder of a run, whose settings these are then.
            ``"base"`` is the schema's defaults.
        overrides: ``key=value`` in hydra's grammar. Keys below ``generator.kwargs``, ``environment.kwargs`` and the like
            are free, and ``~key`` removes one that a recipe has.
        config_dir: a folder with the user's recipes. They may build on the library's
            (``defaults: [quickstart, _self_]``).

    Raises:
        ConfigError: an unknown recipe or key (the message names the nearest one), a value of another type, or an override
            that cannot be read.
    """
    settings_of_run = Path(config_name) / "config.yaml"
    if Path(config_name).name != config_name and settings_of_run.is_file():
        try:
            text = settings_of_run.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"{settings_of_run} cannot be read: {error}") from error
        return with_overrides(from_yaml(text, str(settings_of_run)), overrides)
    folder, name = _locate(config_name, config_dir)
    # A user's recipe may build on the library's, which hydra finds through its search path.
    prepared = [*_prepare(overrides), f"hydra.searchpath=['file://{RECIPES}']"]
    try:
        with _hydra, hydra.initialize_config_dir(str(folder), version_base="1.3"):
            composed = hydra.compose(name, overrides=prepared)
    except MissingConfigException as error:
        missing = error.missing_cfg_file or ""
        guess = did_you_mean(missing, [BASE, *recipe_names(config_dir)])
        raise ConfigError(
            f"Recipe {config_name!r} builds on {missing!r} in its `defaults`, which does not exist.{guess}"
        ) from error
    except (HydraException, OmegaConfBaseException) as error:
        raise _explain(error, where=config_name) from error
    except yaml.YAMLError as error:
        raise ConfigError(f"Recipe {config_name!r} is not readable yaml: {_one_line(error)}") from error
    # Without the schema, hydra accepts any key and any type.
    if OmegaConf.get_type(composed) is not RunConfig:
        raise ConfigError(
            f"Recipe {config_name!r} does not build on the schema. Start it with the line `defaults: [{BASE}, _self_]`; "
            "for the settings of a run, give its folder; for settings of another library, name it: --from trl FILE."
        )
    return _to_run_config(composed, where=config_name)


def with_overrides(config: RunConfig, overrides: Sequence[str]) -> RunConfig:
    """Return ``config`` with ``key=value`` overrides, checked like the overrides of a recipe.

    Raises:
        ConfigError: see :func:`compose`.
    """
    with tempfile.TemporaryDirectory() as folder:
        recipe = Path(folder) / "config.yaml"
        recipe.write_text(f"defaults: [{BASE}, _self_]\n{to_yaml(config)}", encoding="utf-8")
        return compose(str(recipe), overrides)


def text_override(key: str, text: str) -> str:
    """Return the override that sets ``key`` to ``text``. The text is quoted if hydra would read something else without."""
    try:
        is_read = OverridesParser.create().parse_override(f"{key}={text}").value() == text
    except HydraException:
        is_read = False
    return f"{key}={text if is_read else _quoted(text)}"


def _quoted(text: str) -> str:
    quoted: str = QuotedString(text, Quote.single).with_quotes()
    return quoted


def _is_readable(override: str) -> bool:
    try:
        OverridesParser.create().parse_override(override)
    except HydraException:
        return False
    return True


def recipe_names(config_dir: str | Path | None = None) -> list[str]:
    """Return the names that ``compose`` takes: the library's recipes, and the ones in ``config_dir``."""
    folders = [RECIPES] if config_dir is None else [RECIPES, Path(config_dir)]
    return sorted({path.stem for folder in folders for path in folder.glob("*.yaml")})


def to_yaml(config: RunConfig) -> str:
    """Return the whole configuration as yaml that ``from_yaml`` reads."""
    # Without OmegaConf: the values are typed already, and to wrap each of them takes 0.1 s.
    text: str = yaml.dump(_escaped(asdict(config)), Dumper=_Dumper, allow_unicode=True, sort_keys=False)
    return text


class _Dumper(SafeDumper):
    """Writes strings so that OmegaConf reads strings."""

    def represent_str(self, value: str) -> yaml.ScalarNode:
        # OmegaConf reads more texts as floats than yaml does (1e5), and yaml quotes a text only if yaml would read a float.
        try:
            style = "'" if math.isfinite(float(value)) else None
        except ValueError:
            style = None
        return self.represent_scalar("tag:yaml.org,2002:str", value, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _escaped(value: Any) -> Any:
    """Return ``value`` with ``${`` and the backslashes before it escaped in every string, or reading it would interpolate."""
    match value:
        case Enum():
            return value.name
        case str():
            return re.sub(r"(\\*)\$\{", r"\1\1\\${", value)
        case dict():
            return {key: _escaped(each) for key, each in value.items()}
        case list() | tuple():
            return [_escaped(each) for each in value]
        case _:
            return value


def from_yaml(text: str, where: str = "config.yaml") -> RunConfig:
    """Read the yaml of ``to_yaml``; settings that it does not name have their defaults.

    Raises:
        ConfigError: the text is not yaml, or has unknown keys or values of another type.
    """
    try:
        given = OmegaConf.create(text)
    except AssertionError:  # OmegaConf raises this for a bare number
        given = None
    except yaml.YAMLError as error:
        raise ConfigError(f"{where} is not readable yaml: {_one_line(error)}") from error
    except OmegaConfBaseException as error:
        raise _explain(error, where) from error
    if not isinstance(given, DictConfig):
        raise ConfigError(f"{where} is not a mapping of settings.")
    try:
        # Merged into the schema, which checks keys and types. Hydra's store has it ready: to make it takes 0.1 s.
        merged = OmegaConf.merge(ConfigStore.instance().load(f"{BASE}.yaml").node, given)
    except OmegaConfBaseException as error:
        raise _explain(error, where) from error
    assert isinstance(merged, DictConfig)
    return _to_run_config(merged, where)


def from_settings(settings: Mapping[str, Any], where: str) -> RunConfig:
    """Return the defaults with ``settings``, values by dotted keys.

    Raises:
        ConfigError: see :func:`from_yaml`.
    """
    root: dict[str, Any] = {}
    for key, value in settings.items():
        *sections, name = key.split(".")
        section = root
        for part in sections:
            section = section.setdefault(part, {})
        section[name] = _escaped(value)
    return from_yaml(yaml.dump(root, Dumper=_Dumper, allow_unicode=True), where)


def _to_run_config(composed: DictConfig, where: str) -> RunConfig:
    try:
        config = OmegaConf.to_object(composed)
    except OmegaConfBaseException as error:
        raise _explain(error, where) from error
    if not isinstance(config, RunConfig):
        raise ConfigError(f"{where} does not hold the settings of a run")
    for key in _PATHS:
        section, _, name = key.rpartition(".")
        value = setting(config, key)
        expanded = [_at_home(each) for each in value] if isinstance(value, list) else _at_home(value)
        setattr(setting(config, section), name, expanded)
    return config


def _at_home(path: Any) -> Any:
    # Rows in the place of a file, and other values that are no paths, are an error later, which names them.
    return str(Path(path).expanduser()) if isinstance(path, str) and path.startswith("~/") else path


def _locate(config_name: str, config_dir: str | Path | None) -> tuple[Path, str]:
    path = Path(config_name)
    if path.suffix in (".yaml", ".yml") or path.parent != Path():
        if not path.is_file():
            known = ", ".join(recipe_names())
            there = {file.stem: file for suffix in ("*.yaml", "*.yml") for file in path.parent.glob(suffix)}
            meant = nearest(path.stem, there)
            raise ConfigError(
                f"There is no recipe file {config_name!r}.{f' Did you mean {there[meant]}?' if meant else ''} Give an existing "
                f"file, the folder of a run, or one of: {known}."
            )
        return path.parent.resolve(), path.name
    if config_dir is not None and not Path(config_dir).is_dir():
        raise ConfigError(f"There is no recipe folder {str(config_dir)!r}.")
    if config_name != BASE and config_name not in recipe_names(config_dir):
        recipes = recipe_names(config_dir)
        close = nearest(config_name, recipes)
        guess = f" Did you mean {close}?" if close else ""
        raise ConfigError(f"There is no recipe {config_name!r}.{guess} Recipes: {', '.join(recipes)}.")
    if config_dir is not None and (Path(config_dir) / f"{config_name}.yaml").is_file():
        return Path(config_dir).resolve(), config_name
    return RECIPES, config_name


def _prepare(overrides: Sequence[str]) -> Iterator[str]:
    """Check each override, and let hydra add keys to the free dictionaries without a ``+``."""
    for index, text in enumerate(overrides):
        try:
            override = OverridesParser.create().parse_override(text)
        except HydraException as error:
            # A shell splits key = value into three arguments.
            around = " ".join(overrides[max(index - 1, 0) : index + 3])
            spaced = re.search(r"([\w.]+)(?: = ?|= )(\S+)", around)
            if text.startswith("--"):
                hint = f"write settings without dashes: {text.lstrip('-') if '=' in text else 'key=value'}"
            elif spaced is not None:
                hint = f"write it without spaces: {spaced[1]}={spaced[2]}"
            elif "=" in text:
                key, _, value = text.partition("=")
                hint = f'quote text with spaces or special characters: "{key}={_quoted(value)}"'
                unquoted = _QUOTED_NAME.sub(r"\1\3:", value)
                if unquoted != value and _is_readable(f"{key}={unquoted}"):
                    hint = f'names in a mapping have no quotes: "{key}={unquoted}"'
            else:
                hint = "write key=value"
            raise ConfigError(f"Cannot read the override {text!r}: {hint} ({first_line(error)}).") from error
        _check(override, text)
        # hydra adds a key only behind "+", and replaces one only without; "++" does both.
        adds = in_free_section(override.key_or_group) and not override.is_delete()
        yield "++" + text.lstrip("+") if adds else text.lstrip("+")


def _check(override: Override, text: str) -> None:
    key = override.key_or_group
    if override.is_delete() and (key in known_keys() or not in_free_section(key)):
        what = "name the keys in it" if in_free_section(key) else "set it to another value"
        raise ConfigError(f"Cannot read the override {text!r}: a setting cannot be removed; {what}.")
    if override.is_sweep_override():
        raise ConfigError(
            f"{text!r} gives several values. Write key=[a,b] for a list; for several runs, use skyrl-train sweep."
        )
    if override.package is not None:
        raise _unknown_key(f"{key}@{override.package}", OVERRIDES)
    if key not in known_keys() and not in_free_section(key):
        raise _unknown_key(key, OVERRIDES)


def _unknown_key(key: str, where: str) -> ConfigError:
    meant = meant_setting(key)
    remedy = (
        f"Did you mean {meant}?" if meant else "skyrl_train/config/schema.py lists all settings with their meaning."
    )
    return ConfigError(f"Unknown setting {key} (in {where}). {remedy}")


def _explain(error: Exception, where: str) -> ConfigError:
    """Turn an error of hydra or omegaconf into one that names the key, the value and the expected type."""
    text = "\n".join(str(e) for e in (error, error.__cause__) if e is not None)
    # The override is wrong, not the recipe.
    if re.match("Error merging override|Could not override", str(error)):
        where = OVERRIDES
    # The key is in the text of the error or of its cause, or in an attribute: it depends on the library that raises.
    found = re.search(r"^\s*full_key: (\S+)$", text, re.MULTILINE)
    key = found.group(1) if found else getattr(error, "full_key", None)
    if key is None:
        return ConfigError(f"Cannot compose {where!r}: {_one_line(error)}")
    interpolation = next((e for e in (error, error.__cause__) if isinstance(e, InterpolationResolutionError)), None)
    if interpolation is not None:  # also in the value of an override
        return ConfigError(f"{key} (in {where}) refers to something that is not there: {first_line(interpolation)}")
    if key not in known_keys() and not in_free_section(key) and "[" not in key:
        return _unknown_key(key, where)
    if "missing mandatory value" in text:
        return ConfigError(f"{key} has no value (in {where}); give it one: {key}=...")
    holds = known_keys().get(key.partition("[")[0], "another kind of value")
    given = _given_value(text, key, error)
    value, remedy = given.partition(", got ")[2], ""
    # A single value stands where a list of them belongs.
    if holds.startswith("a list") and value != "null" and re.fullmatch(r"[^\[{,][^,]*", value):
        remedy = f" Write {key}=[{value}]."
    return ConfigError(f"{key} (in {where}) must be {holds}{given}.{remedy}")


def _given_value(text: str, key: str, error: Exception) -> str:
    override = re.search(r"^Error merging override (\S+?)=(.*)$", str(error), re.MULTILINE)
    if override:
        return f", got {override.group(2)}"
    if "Incompatible value 'None'" in text or "is not Optional" in text:
        return ", got null"
    value = re.search(r"(?:Value|Invalid value) '([^']*)'", text)
    if value:
        return f", got {value.group(1)}"
    detail = next((line for line in text.splitlines() if key not in line and "raised while" not in line), "")
    return f" ({detail.strip()})" if detail else ""


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split())
