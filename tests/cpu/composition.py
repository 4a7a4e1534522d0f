"""Composes a recipe of the library once in a process, and parses an override and a run's configuration once. Hydra's own
function then applies the overrides of each call.

Most of the time that Hydra takes for a call is the same work each time, and the tests compose a thousand times.
"""

from __future__ import annotations

import copy
import functools
import pickle
from collections.abc import Sequence
from typing import TYPE_CHECKING

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import Override
from omegaconf import DictConfig, OmegaConf

import skyrl_train.config.compose
from skyrl_train.config.compose import RECIPES, from_yaml
from skyrl_train.config.schema import RunConfig

if TYPE_CHECKING:
    import pytest

compose_anew = hydra.compose
parse_anew = OverridesParser.parse_override


@functools.cache
def parsed(text: str) -> Override:
    return parse_anew(OverridesParser.create(), text)


@functools.cache
def composed(name: str, search_path: str) -> bytes:
    """A pickle, because ``copy.deepcopy`` of a DictConfig takes two and a half times as long as to load one."""
    return pickle.dumps(compose_anew(name, overrides=[search_path]))


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """As ``hydra.compose`` is called by ``skyrl_train.config.compose``: the last override is the search path."""
    *own, search_path = overrides
    search = GlobalHydra.instance().config_loader().get_search_path().get_path()
    if [entry.path for entry in search if entry.provider == "main"] != [str(RECIPES)]:
        return compose_anew(name, overrides=[*overrides])  # a user's recipe may change between two calls
    config: DictConfig = pickle.loads(composed(name, search_path))
    ConfigLoaderImpl._apply_overrides_to_config([parsed(text) for text in own], config)
    return config


@functools.cache
def read_once(text: str, where: str) -> RunConfig:
    return from_yaml(text, where)


def read(text: str, where: str) -> RunConfig:
    """What ``from_yaml`` returns."""
    return copy.deepcopy(read_once(text, where))


@functools.cache
def recipe(name: str) -> DictConfig:
    return OmegaConf.structured(skyrl_train.config.compose.compose(name))


def settings(*overrides: str, base: str = "base") -> RunConfig:
    """The same typed result as ``skyrl_train.config.compose.compose``, without the time that hydra's grammar takes."""
    config = OmegaConf.to_object(OmegaConf.merge(recipe(base), OmegaConf.from_dotlist(list(overrides))))
    assert isinstance(config, RunConfig)
    return config


def install(patch: pytest.MonkeyPatch) -> None:
    """Configurations are composed here from now on."""
    patch.setattr(hydra, "compose", compose)
    patch.setattr(OverridesParser, "parse_override", lambda _, text: parsed(text))
    for module in ("observability.run_folder", "training.remote_checkpoint"):
        patch.setattr(f"skyrl_train.{module}.from_yaml", read)
