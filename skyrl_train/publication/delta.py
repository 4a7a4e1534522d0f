"""Publication of what has changed: a full file now and then, and after it a small file per version, in a shared folder.

With a small learning rate and 16-bit weights most words of a version are those of the version before.
"""

from __future__ import annotations

import uuid
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

import safetensors.torch
import torch

from skyrl_train.errors import PublicationError
from skyrl_train.inference.delta_weights import TRANSPORT_NAME, Chain, Link, changes
from skyrl_train.inference.shared_weights import checksum_text
from skyrl_train.inference.weight_update import TensorSpec, WeightUpdate
from skyrl_train.publication.base import WeightTransport
from skyrl_train.publication.disk import FIRST_HEADER_BYTES
from skyrl_train.publication.safetensors_file import raw_bytes, write_atomically, write_weights
from skyrl_train.publication.weight_folder import WeightFolder

MAX_DELTAS = 64  # in a row: who joins reads them all


@dataclass(slots=True)
class _State:
    """What the next delta builds on. ``delta_bytes``: of all deltas of the chain."""

    chain: Chain
    specs: tuple[TensorSpec, ...]
    num_bytes: int
    weights: dict[str, torch.Tensor]
    delta_bytes: int = 0


class DeltaTransport(WeightTransport):
    """Casts to ``dtype`` (a torch name: what the engines serve) and compares with the version before.

    Every file is checksummed; ``verify`` adds a checksum of the result. Holds one copy of the weights in main memory.
    A new full file begins when the deltas since the last one are larger than it, or many: whoever joins late reads at
    most twice what a full copy has.

    Args:
        folder: engines see it under the same path.
    """

    name = TRANSPORT_NAME

    def __init__(self, folder: str, dtype: str = "bfloat16", verify: bool = False, sync: bool = False) -> None:
        self._folder = WeightFolder(folder)
        self._dtype = dtype
        self._verify = verify
        self._sync = sync
        self._state: _State | None = None
        self._version = -1
        self._files: set[Path] = set()

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Writes what has changed since the last version, or everything.

        Raises:
            PublicationError: the version is not newer than the last one, the transport is closed, or the folder cannot
                be written.
        """
        if version <= self._version:
            raise PublicationError(
                f"Version {version} comes after version {self._version}: deltas are published in order only. Use another "
                "transport to go back."
            )
        with self._folder.writing(version):
            before = self._state
            self._state = None  # a failure leaves nothing to build on: the next version is a full one
            needed = set() if before is None else {Path(link.path) for link in before.chain.links}
            state, changed = self._write(before, weights, version)
        self._state, self._version = state, version
        self._keep(needed | {Path(link.path) for link in state.chain.links})
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=state.chain.location(),
            num_bytes=state.num_bytes,
            tensors=state.specs,
            checksum=_checksum(state.weights) if self._verify else None,
            changed_fraction=changed / state.num_bytes if state.num_bytes else 0.0,
        )

    def close(self) -> None:
        """Removes the files. Idempotent."""
        self._state = None
        self._keep(set())
        self._folder.close()

    def _write(
        self, before: _State | None, weights: Iterable[tuple[str, torch.Tensor]], version: int
    ) -> tuple[_State, int]:
        """Returns what the next delta builds on, and how many bytes have changed."""
        if before is None:
            return self._write_full(weights, version)
        entries: dict[str, torch.Tensor] = {}
        current: dict[str, torch.Tensor] = {}
        changed = 0
        for name, weight in weights:
            stored, known = self._stored(weight), before.weights.pop(name, None)
            if known is None or known.shape != stored.shape:
                current[name] = stored.clone()
                continue
            found, num_bytes = changes(known, stored, name)
            entries |= found
            changed += num_bytes
            current[name] = known.copy_(stored)
        size = before.delta_bytes + sum(entry.nbytes for entry in entries.values())
        fits = [(name, tuple(weight.shape)) for name, weight in current.items()] == [
            (spec.name, spec.shape) for spec in before.specs
        ]
        if not fits or size >= before.num_bytes or len(before.chain.links) > MAX_DELTAS:
            state, everything = self._write_full(current.items(), version)
            return state, changed if fits else everything
        link = self._write_delta(entries, before.chain, version)
        chain = Chain(before.chain.id, (*before.chain.links, link))
        return _State(chain, before.specs, before.num_bytes, current, size), changed

    def _write_full(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> tuple[_State, int]:
        chain_id = uuid.uuid4().hex[:12]
        path = self._path(chain_id, f"{version}-full")
        current: dict[str, torch.Tensor] = {}

        def kept() -> Iterator[tuple[str, torch.Tensor]]:
            for name, weight in weights:
                current[name] = self._stored(weight).clone()
                yield name, current[name]

        written = write_weights(
            path,
            kept(),
            self._dtype,
            metadata={"version": str(version)},
            expected_offset=FIRST_HEADER_BYTES,
            sync=self._sync,
        )
        chain = Chain(chain_id, (Link(version, version, str(path), written.crc),))
        return _State(chain, written.specs, written.num_bytes, current), written.num_bytes

    def _write_delta(self, entries: dict[str, torch.Tensor], chain: Chain, version: int) -> Link:
        base = chain.links[-1].version
        contents = safetensors.torch.save(entries, {"version": str(version), "base": str(base)})
        path = self._path(chain.id, f"{version}-delta")
        with write_atomically(path, self._sync) as file:
            file.write(contents)
        return Link(version, base, str(path), zlib.crc32(contents))

    def _stored(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.detach().to("cpu", getattr(torch, self._dtype)).contiguous()

    def _path(self, chain_id: str, label: str) -> Path:
        path = self._folder.path(f"{chain_id}-{label}")
        self._files.add(path)
        return path

    def _keep(self, needed: set[Path]) -> None:
        """Removes every file but those of this update and of the one before, which engines may still read."""
        for path in self._files - needed:
            path.unlink(missing_ok=True)
        self._files &= needed


def _checksum(weights: dict[str, torch.Tensor]) -> str:
    crc = 0
    for weight in weights.values():
        crc = zlib.crc32(raw_bytes(weight), crc)
    return checksum_text(crc)
