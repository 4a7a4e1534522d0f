"""A worker on a CPU that computes with its parameters and packs none, as on a GPU. vLLM imports it before its model."""

from __future__ import annotations

from typing import NoReturn

from vllm import _custom_ops
from vllm_read_back import ReadBackExtension

from skyrl_train.inference.engines.vllm import weight_loader

_custom_ops._supports_onednn = False
weight_loader.PACKING_DEVICES = ()


class UnpackedExtension(ReadBackExtension):
    """The tests' extension; the workers import it, so this folder must be on their path."""


def raises(*arguments: object) -> NoReturn:
    """A transport whose reading side fails in every worker."""
    raise ValueError("not here")
