"""The delta transport: a full file now and then, and after it one small file per version with what has changed.

    full (version b) ──> delta (b -> b+1) ──> delta (b+1 -> b+2) ──> ... the update's version

With a small learning rate and 16-bit weights most words of a version equal the version before. An engine that
holds any version of the chain applies the files after it; any other engine begins with the full file. A delta names the
version that it builds on, and is applied to no other one.
"""

from __future__ import annotations

import json
import uuid
import zlib
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch
from safetensors import SafetensorError

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.runtime.checksums import checksum_text
from skyrl_train.weight_sync.disk import (
    FIRST_HEADER_BYTES,
    WeightFolder,
    open_file,
    raw_bytes,
    write_atomically,
    write_weights,
)
from skyrl_train.weight_sync.staging import tensor_view
from skyrl_train.weight_sync.update import TensorSpec, WeightTransport, WeightUpdate

DELTA = "delta"
MAX_DELTAS = 64  # in a row: an engine that joins late reads them all
WORDS = {1: torch.uint8, 2: torch.int16, 4: torch.int32, 8: torch.int64}  # by size of the served dtype
# Keys of a delta file, before a weight's name: where it changed and to what, or the whole weight.
INDEX, VALUE, WHOLE = "index/", "value/", "whole/"


@dataclass(frozen=True, slots=True)
class Link:
    """A file of a chain. ``crc`` is the CRC-32 of a delta's whole file, or of a full file's weights."""

    version: int
    base: int  # the version that it builds on; a full file builds on its own
    path: str
    crc: int


@dataclass(frozen=True, slots=True)
class Chain:
    """The location of an update: a full file and the deltas after it, in order."""

    id: str
    links: tuple[Link, ...]

    def location(self) -> str:
        """Return the chain as text, for :class:`WeightUpdate`."""
        return json.dumps({"id": self.id, "links": [[x.version, x.base, x.path, x.crc] for x in self.links]})

    @classmethod
    def parse(cls, update: WeightUpdate) -> Chain:
        """Return the chain of an update.

        Raises:
            EngineError: the location is no chain, or the chain does not end with the update's version.
        """
        try:
            parsed = json.loads(update.location)
            chain = cls(parsed["id"], tuple(Link(*link) for link in parsed["links"]))
        except (ValueError, KeyError, TypeError) as error:
            raise EngineError(
                f"Version {update.version} has no chain of files: {error}. Sync the weights again."
            ) from error
        if not chain.links or chain.links[-1].version != update.version:
            raise EngineError(f"The files of version {update.version} end with another one; sync the weights again.")
        return chain


@dataclass(slots=True)
class _ChainState:
    """The base of the next delta. ``delta_bytes`` counts all deltas of the chain."""

    chain: Chain
    specs: tuple[TensorSpec, ...]
    num_bytes: int
    weights: dict[str, torch.Tensor]
    delta_bytes: int = 0


class DeltaTransport(WeightTransport):
    """The trainer's side. Holds one copy of the weights in main memory, to compare the next version with.

    A new full file begins when the deltas since the last one are larger than it, or more than ``MAX_DELTAS``. So an engine
    that joins late reads at most twice the bytes of a full copy.

    Args:
        folder: engines see it under the same path.
        dtype: a torch name, the dtype that the engines serve. Weights are cast before they are compared.
        verify: adds a checksum of the result to each update. Every file has a checksum in any case.
        sync: waits until each file is on the disk.
    """

    name = DELTA

    def __init__(self, folder: str, dtype: str = "bfloat16", verify: bool = False, sync: bool = False) -> None:
        self._folder = WeightFolder(folder)
        self._dtype = dtype
        self._verify = verify
        self._sync = sync
        self._state: _ChainState | None = None
        self._version = -1
        self._files: set[Path] = set()

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Write what has changed since the last version, or all weights.

        Raises:
            WeightSyncError: the version is not newer than the last one, the transport is closed, or the folder cannot
                be written.
        """
        if version <= self._version:
            raise WeightSyncError(
                f"Version {version} comes after version {self._version}: deltas are sent in order only. Use another "
                "transport to go back."
            )
        with self._folder.writing(version):
            before = self._state
            self._state = None  # after a failure there is nothing to build on: the next version is a full one
            needed = set() if before is None else {Path(link.path) for link in before.chain.links}
            if before is None:
                state, changed = self._write_full(weights, version)
            else:
                state, changed = self._write_changes(before, weights, version)
        self._state, self._version = state, version
        # Engines may still read the version before, so its files stay until the next gather.
        self._remove_files_except(needed | {Path(link.path) for link in state.chain.links})
        checksum = None
        if self._verify:
            crc = 0
            for weight in state.weights.values():
                crc = zlib.crc32(raw_bytes(weight), crc)
            checksum = checksum_text(crc)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=state.chain.location(),
            num_bytes=state.num_bytes,
            tensors=state.specs,
            checksum=checksum,
            changed_fraction=changed / state.num_bytes if state.num_bytes else 0.0,
        )

    def close(self) -> None:
        """Remove the files. Idempotent."""
        self._state = None
        self._remove_files_except(set())
        self._folder.close()

    def _write_changes(
        self, before: _ChainState, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> tuple[_ChainState, int]:
        """Write a delta, or a full file where a delta does not pay.

        Returns:
            The state that the next delta builds on, and the number of bytes that have changed.
        """
        entries: dict[str, torch.Tensor] = {}
        current: dict[str, torch.Tensor] = {}
        changed = 0
        for name, weight in weights:
            # Each known weight moves to ``current`` and is overwritten there, so one copy of the model suffices.
            stored, known = self._stored(weight), before.weights.pop(name, None)
            if known is None or known.shape != stored.shape:
                current[name] = stored.clone()  # cannot be compared; the other layout leads to a full file below
                continue
            found, num_bytes = changes(known, stored, name)
            entries |= found
            changed += num_bytes
            current[name] = known.copy_(stored)
        # The sum over the chain counts, because a late engine reads all of it.
        size = before.delta_bytes + sum(entry.nbytes for entry in entries.values())
        same_layout = [(name, tuple(weight.shape)) for name, weight in current.items()] == [
            (spec.name, spec.shape) for spec in before.specs
        ]
        if not same_layout or size >= before.num_bytes or len(before.chain.links) > MAX_DELTAS:
            state, everything = self._write_full(current.items(), version)
            return state, changed if same_layout else everything
        base = before.chain.links[-1].version
        # In memory first: the link carries the checksum of the whole file.
        contents = safetensors.torch.save(entries, {"version": str(version), "base": str(base)})
        path = self._new_path(before.chain.id, f"{version}-delta")
        with write_atomically(path, self._sync) as file:
            file.write(contents)
        link = Link(version, base, str(path), zlib.crc32(contents))
        chain = Chain(before.chain.id, (*before.chain.links, link))
        return _ChainState(chain, before.specs, before.num_bytes, current, size), changed

    def _write_full(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[_ChainState, int]:
        """Begin a new chain with a file of all weights. Returns as :meth:`_write_changes`."""
        chain_id = uuid.uuid4().hex[:12]
        path = self._new_path(chain_id, f"{version}-full")
        current: dict[str, torch.Tensor] = {}

        def copied() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                current[name] = self._stored(weight).clone()
                yield name, current[name]

        written = write_weights(
            path,
            copied(),
            self._dtype,
            metadata={"version": str(version)},
            expected_offset=FIRST_HEADER_BYTES,
            sync=self._sync,
        )
        chain = Chain(chain_id, (Link(version, version, str(path), written.crc),))
        return _ChainState(chain, written.specs, written.num_bytes, current), written.num_bytes

    def _stored(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to("cpu", getattr(torch, self._dtype)).contiguous()

    def _new_path(self, chain_id: str, label: str) -> Path:
        path = self._folder.path(f"{chain_id}-{label}")
        self._files.add(path)
        return path

    def _remove_files_except(self, needed: set[Path]) -> None:
        for path in self._files - needed:
            path.unlink(missing_ok=True)
        self._files &= needed


def changes(before: torch.Tensor, after: torch.Tensor, name: str) -> tuple[dict[str, torch.Tensor], int]:
    """Compare two versions of a weight (CPU, same shape and dtype, contiguous) word by word.

    Words are compared bit for bit, so 0.0 and -0.0 differ and a NaN equals itself.

    Returns:
        The entries of a delta file that turn ``before`` into ``after`` (none; the indices and values of the changed words;
        or the whole weight where that is smaller), and the size of the changed words in bytes.
    """
    size = after.element_size()
    old, new = before.reshape(-1).view(WORDS[size]), after.reshape(-1).view(WORDS[size])
    index = torch.nonzero(old != new).reshape(-1)
    changed = index.numel() * size
    index_type = torch.int32 if new.numel() <= torch.iinfo(torch.int32).max else torch.int64
    if not changed:
        return {}, 0
    # Index and value of a word together can take more than the word.
    if changed + index.numel() * index_type.itemsize >= new.nbytes:
        return {WHOLE + name: new.clone()}, changed
    return {INDEX + name: index.to(index_type), VALUE + name: new[index]}, changed


def apply_delta(staging: torch.Tensor, specs: Mapping[str, TensorSpec], link: Link, contents: bytes, held: int) -> None:
    """Turn the bytes of version ``held`` (uint8, laid out by ``specs``) into the bytes of ``link.version``, in place.

    Raises:
        EngineError: the delta builds on another version (nothing has changed then), or its file is damaged.
    """
    if link.base != held:
        raise EngineError(
            f"The delta to version {link.version} builds on version {link.base}, not on {held}; versions are applied in "
            "order only."
        )
    if zlib.crc32(contents) != link.crc:
        raise EngineError(f"The delta to version {link.version} differs from its checksum; sync the weights again.")
    try:
        entries = safetensors.torch.load(contents)
        for key, value in entries.items():
            kind, _, name = key.partition("/")
            if f"{kind}/" == INDEX:  # used together with its values
                continue
            words = tensor_view(staging, specs[name]).view(-1).view(value.dtype)
            if f"{kind}/" == WHOLE:
                words.copy_(value)
            else:
                words[entries[INDEX + name].long()] = value
    except (SafetensorError, KeyError, IndexError, RuntimeError) as error:
        raise EngineError(
            f"The delta to version {link.version} does not match the weights: {error}; sync the weights again."
        ) from error


def read_into(staging: torch.Tensor, update: WeightUpdate, chain: Chain, base: tuple[int, torch.Tensor] | None) -> None:
    """Fill ``staging`` (uint8 ``[num_bytes]``) with the update's bytes, in the engine's process.

    Args:
        base: a version that the engine holds, and its bytes. Used if the chain contains it.

    Raises:
        EngineError: a file is missing or damaged; the contents of ``staging`` are undefined then.
    """
    versions = [link.version for link in chain.links]
    specs = {spec.name: spec for spec in update.tensors}
    if base is not None and base[0] in versions and base[1].numel() == update.num_bytes:
        # The engine's own bytes: only the deltas after that version are read.
        held, source = base
    else:
        first = chain.links[0]
        held, source = first.version, open_file(update, first.path)
        found, expected = zlib.crc32(source.numpy().data), first.crc
        if found != expected:
            raise EngineError(
                f"The file {first.path!r} has the checksum {checksum_text(found)}, not {checksum_text(expected)}; sync the "
                "weights again."
            )
    # Deltas are applied to a copy: the source is the version that the engine serves, or a mapped file.
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
