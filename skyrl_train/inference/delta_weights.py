"""The receiving half of the delta transport: a full file, and after it files with what each version changed.

    full (version b) ──> delta (b -> b+1) ──> delta (b+1 -> b+2) ──> ... the update's version

An engine that holds any of these versions applies what comes after it; every other one begins with the full file. A delta
names the version that it builds on and is applied to no other one.
"""

from __future__ import annotations

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from skyrl_train.errors import EngineError
from skyrl_train.inference.disk_weights import open_file
from skyrl_train.inference.shared_weights import checksum_text, tensor_view
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate

TRANSPORT_NAME = "delta"
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of the served dtype
INDEX, VALUE, WHOLE = "index/", "value/", "whole/"  # before a weight's name: where it changed, to what; or all of it


@dataclass(frozen=True, slots=True)
class Link:
    """A file of a chain; ``crc`` is the CRC-32 of a delta's whole file, and of a full file's weights."""

    version: int
    base: int  # the version that it builds on; its own for a full file
    path: str
    crc: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The location of an update: a full file and the deltas after it, in order."""

    id: str
    links: tuple[Link, ...]

    def location(self) -> str:
        """As text, for :class:`WeightUpdate`."""
        return json.dumps({"id": self.id, "links": [[x.version, x.base, x.path, x.crc] for x in self.links]})

    @classmethod
    def parse(cls, update: WeightUpdate) -> Chain:
        """The inverse of :meth:`location`.

        Raises:
            EngineError: it is no chain, or does not end with the update's version.
        """
        try:
            parsed = json.loads(update.location)
            chain = cls(parsed["id"], tuple(Link(*link) for link in parsed["links"]))
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(f"Version {update.version} has no chain of files: {error}. Publish again.") from error
        if not chain.links or chain.links[-1].version != update.version:
            raise EngineError(f"The files of version {update.version} end with another one; publish again.")
        return chain


def changes(before: torch.Tensor, after: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """What turns ``before`` into ``after`` (CPU, same shape and dtype, contiguous), as entries of a delta file.

    Words are compared bit for bit, so that 0.0 and -0.0 differ and a NaN equals itself.

    Returns:
        The entries: none; indices and values of the changed words; or the whole weight where that is smaller. And the
        number of bytes that differ by word.
    """
    size = after.element_size()
    old, new = before.reshape(-1).view(WORDS[size]), after.reshape(-1).view(WORDS[size])
    index = torch.nonzero(old != new).reshape(-1)
    changed = index.numel() * size
    index_type = torch.int32 if new.numel() <= torch.iinfo(torch.int32).max else torch.int64
    if not changed:
        return {}, 0
    if changed + index.numel() * index_type.itemsize >= new.nbytes:
        return {WHOLE + name: new.clone()}, changed
    return {INDEX + name: index.to(index_type), VALUE + name: new[index]}, changed


def apply_delta(staging: torch.Tensor, specs: Mapping[str, TensorSpec], link: Link, contents: bytes, held: int) -> None:
    """Turns the bytes of version ``held`` (uint8, by ``specs``) into those of ``link.version``, in place.

    Raises:
        EngineError: the delta builds on another version (nothing has changed then), or its file is damaged.
    """
    if link.base != held:
        raise EngineError(
            f"The delta to version {link.version} builds on version {link.base}, not on {held}; versions are applied in "
            "order only."
        )
    if zlib.crc32(contents) != link.crc:
        raise EngineError(f"The delta to version {link.version} differs from its checksum; publish again.")
    try:
        entries = safetensors.torch.load(contents)
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if f"{kind}/" == INDEX:
                continue
            words = tensor_view(staging, specs[name]).view(-1).view(value.dtype)
            if f"{kind}/" == WHOLE:
                words.copy_(value)
            else:
                words[entries[INDEX + name].long()] = value
    except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
        raise EngineError(
            f"The delta to version {link.version} does not fit the weights: {error}; publish again."
        ) from error


def read_into(staging: torch.Tensor, update: WeightUpdate, chain: Chain, base: tuple[int, torch.Tensor] | None) -> None:
    """Fills ``staging`` (uint8 ``[num_bytes]``) with the update's bytes.

    Args:
        base: a version that is held already, and its bytes; used if the chain has it.

    Raises:
        EngineError: a file is missing or damaged; ``staging`` holds anything then.
    """
    versions = [link.version for link in chain.links]
    specs = {spec.name: spec for spec in update.tensors}
    if base is not None and base[0] in versions and base[1].numel() == update.num_bytes:
        held, source = base
    else:
        first = chain.links[0]
        held, source = first.version, open_file(update, first.path)
        found, expected = zlib.crc32(source.numpy().data), first.crc
        if found != expected:
            raise EngineError(
                f"The file {first.path!r} has the checksum {checksum_text(found)}, not {checksum_text(expected)}; publish again."
            )
    staging.copy_(source)
    for link in chain.links[versions.index(held) + 1 :]:
        try:
            contents = Path(link.path).read_bytes()
        except OSError as error:
            raise EngineError(
                f"Cannot open {link.path!r} of version {update.version}: {error.strerror}. Trainer and engine must see "
                "generator.weight_folder under the same path, and the transport must still be open."
            ) from error
        apply_delta(staging, specs, link, contents, held)
        held = link.version
