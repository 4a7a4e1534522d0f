"""Composes a recipe of the library once in a process. Hydra's own function then applies the overrides of each call.

Most of the time that Hydra takes for a call is the same work each time, and the tests compose a thousand times.
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Sequence

import hydra
from hydra._internal.config_loader_impl import ConfigLoaderImpl
from hydra.core.global_hydra import GlobalHydra
from hydra.core.override_parser.overrides_parser import OverridesParser
from omegaconf import DictConfig

from skyrl_train.config.compose import RECIPES

compose_anew = hydra.compose


@functools.cache
def composed(name: str, search_path: str) -> DictConfig:
    return compose_anew(name, overrides=[search_path])


def compose(name: str, overrides: Sequence[str]) -> DictConfig:
    """As ``hydra.compose`` is called by ``skyrl_train.config.compose``: the last override is the search path."""
    *own, search_path = overrides
    search = GlobalHydra.instance().config_loader().get_search_path().get_path()
    if [entry.path for entry in search if entry.provider == "main"] != [str(RECIPES)]:
        return compose_anew(name, overrides=[*overrides])  # a user's recipe may change between two calls
    config = copy.deepcopy(composed(name, search_path))
    ConfigLoaderImpl._apply_overrides_to_config(OverridesParser.create().parse_overrides(own), config)
    return config
