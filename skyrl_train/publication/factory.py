"""Builds the configured transport: one of ours, or a class given by its import path."""

from __future__ import annotations

import inspect
from typing import Any

from skyrl_train.config import derive
from skyrl_train.config.import_path import import_name
from skyrl_train.config.schema.run import RunConfig
from skyrl_train.config.transports import TRANSPORTS
from skyrl_train.errors import ConfigError
from skyrl_train.publication.base import WeightTransport


def build_transport(config: RunConfig) -> WeightTransport:
    """How weights travel to the engines.

    A class is constructed with those of ``dtype``, ``verify``, ``folder``, ``device`` (the trainer's) and ``timeout_s``
    that its constructor names, and with ``generator.weight_transport_kwargs``.

    Raises:
        ConfigError: there is no such class, or it cannot be constructed so.
    """
    name, generator = derive.weight_transport(config), config.generator
    cls = import_name(TRANSPORTS[name].path if name in TRANSPORTS else name, "generator.weight_transport")
    offered: dict[str, Any] = {
        "dtype": generator.inference_engine.dtype,
        "verify": generator.verify_weights,
        "folder": generator.weight_folder,
        "device": config.trainer.device,
        "timeout_s": generator.pause_timeout_s,
    }
    try:
        named = inspect.signature(cls).parameters
        arguments = {key: value for key, value in offered.items() if key in named}
        transport: WeightTransport = cls(**{**arguments, **generator.weight_transport_kwargs})
    except TypeError as error:
        raise ConfigError(
            f"generator.weight_transport={name!r} cannot be constructed: {error}. It is given those of "
            f"{', '.join(offered)} that its constructor names, and generator.weight_transport_kwargs."
        ) from error
    return transport
