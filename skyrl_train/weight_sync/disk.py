"""The disk transport: one safetensors file per version, in a folder that trainer and engines share.

gather ──write──> .name.tmp ──rename──> name-version.safetensors ──map──> engines, on this machine or on others

A file appears under its final name only when it is complete, and its bytes never change. The delta transport writes its
files with the same functions.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import logging
import mmap
import os
import platform
import shutil
import uuid
import zlib
from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from io import FileIO
from pathlib import Path
from typing import IO

import torch

from skyrl_train.errors import EngineError, WeightSyncError
from skyrl_train.runtime.checksums import checksum_text
from skyrl_train.weight_sync.staging import NUM_STAGING_AREAS
from skyrl_train.weight_sync.update import TensorSpec, WeightTransport, WeightUpdate

DISK = "disk"
FIRST_HEADER_BYTES = 1 << 20  # enough for the header of thousands of weights
PREFIX = "skyrl-weights-"

# safetensors: 8 bytes with the length of the header (little-endian), the header as JSON, then the data.
LENGTH_BYTES = 8
HEADER_ALIGNMENT_BYTES = 64  # of the first weight; the format allows no gaps after it
DTYPE_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint8": "U8",
    "bool": "BOOL",
}

logger = logging.getLogger(__name__)


class DiskTransport(WeightTransport):
    """The trainer's side. Keeps the two newest versions: one that engines may still read, and one that is being written.

    The files are not checkpoints: the operating system decides when they reach the disk, unless ``sync`` is set. Files that
    a killed trainer left in the folder are removed with the first version.

    Args:
        folder: engines see it under the same path.
        dtype: a torch name, the dtype that the engines serve. Weights are cast while they are written.
        verify: adds a checksum to each update.
        sync: waits until each file is on the disk.
    """

    name = DISK

    def __init__(self, folder: str, dtype: str = "float32", verify: bool = False, sync: bool = False) -> None:
        self._folder = WeightFolder(folder)
        self._dtype = dtype
        self._verify = verify
        self._sync = sync
        self._files: deque[Path] = deque()
        self._data_offset = FIRST_HEADER_BYTES

    def gather(self, weights: Iterable[tuple[str, torch.Tensor]], version: int) -> WeightUpdate:
        """Write the weights, cast, to a new file.

        Raises:
            WeightSyncError: the transport is closed, or the folder cannot be written.
        """
        with self._folder.writing(version):
            # The oldest file goes before the new one is written, so that the folder never holds three.
            while len(self._files) >= NUM_STAGING_AREAS:
                self._files.popleft().unlink(missing_ok=True)
            path = self._folder.path(str(version))
            written = write_weights(
                path,
                weights,
                self._dtype,
                metadata={"version": str(version)},
                expected_offset=self._data_offset,
                sync=self._sync,
            )
        self._data_offset = written.data_offset
        # A version that is gathered again replaces its own file.
        if path not in self._files:
            self._files.append(path)
        return WeightUpdate(
            version=version,
            transport=self.name,
            location=str(path),
            num_bytes=written.num_bytes,
            tensors=written.specs,
            checksum=checksum_text(written.crc) if self._verify else None,
        )

    def close(self) -> None:
        """Remove the files. Engines that mapped one keep their mapping. Idempotent."""
        while self._files:
            self._files.popleft().unlink(missing_ok=True)
        self._folder.close()


def open_file(update: WeightUpdate, path: str) -> torch.Tensor:
    """Map a file of the update in the engine's process and read it once, so that the load does not wait for the disk.

    Returns:
        The weights' bytes, uint8 ``[num_bytes]``.

    Raises:
        EngineError: the file does not exist here, or is shorter than the update says.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            # A private mapping, because torch asks for writable memory. Nothing writes to it.
            memory = mmap.mmap(descriptor, os.fstat(descriptor).st_size, access=mmap.ACCESS_COPY)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:  # mmap raises ValueError for a file of size 0
        raise EngineError(
            f"Cannot open the weights of version {update.version} at {path!r}: {error}. Trainer and engine must "
            "see generator.weight_folder under the same path, and the transport must still be open."
        ) from error
    contents = torch.frombuffer(memory, dtype=torch.uint8)
    begin = LENGTH_BYTES + int.from_bytes(memory[:LENGTH_BYTES], "little")
    staging = contents[begin : begin + update.num_bytes]
    if staging.numel() < update.num_bytes:
        raise EngineError(
            f"The file {path!r} has {staging.numel()} of {update.num_bytes} bytes of weights; sync the weights again."
        )
    int(staging[:: mmap.PAGESIZE].sum())  # touches each page
    return staging


# Safetensors files ----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """A complete file. The weights are ``num_bytes`` from ``data_offset`` on; ``crc`` is the CRC-32 of these bytes."""

    specs: tuple[TensorSpec, ...]
    data_offset: int
    num_bytes: int
    crc: int


def write_weights(
    path: Path,
    weights: Iterable[tuple[str, torch.Tensor]],
    dtype: str,
    *,
    metadata: Mapping[str, str],
    expected_offset: int = 0,
    sync: bool = False,
) -> WrittenFile:
    """Write a safetensors file while its weights arrive, cast to ``dtype`` (a torch name), and rename it to ``path``.

    The header precedes the data but is known only after it. So the data is written at ``expected_offset`` and the header
    afterwards; where the header does not fit, the data is copied once more.

    Args:
        expected_offset: the ``data_offset`` of an earlier file with the same weights.
        sync: wait until the bytes are on the disk.

    Raises:
        OSError: the disk is full, or the folder cannot be written. No file is left.
    """
    with write_atomically(path, sync) as file:
        file.seek(expected_offset)
        specs, offset, crc = [], 0, 0
        for name, weight in weights:
            stored = weight.detach().to("cpu", getattr(torch, dtype)).contiguous()
            data = raw_bytes(stored)
            file.write(data)
            crc = zlib.crc32(data, crc)
            specs.append(TensorSpec(name, tuple(weight.shape), dtype, offset))
            offset += stored.nbytes
        header = safetensors_header(specs, metadata, min_size=expected_offset)
        if len(header) > expected_offset:
            _move(file, path, expected_offset, len(header))
        file.seek(0)
        file.write(header)
    return WrittenFile(tuple(specs), len(header), offset, crc)


@contextlib.contextmanager
def write_atomically(path: Path, sync: bool) -> Iterator[IO[bytes]]:
    """Open a file to write (and read). It appears at ``path`` at the end, or not at all after a failure."""
    temporary = path.with_name(f".{path.name}.tmp")
    try:
        with temporary.open("w+b") as file:
            yield file
            file.flush()
            if sync:
                os.fsync(file.fileno())
        temporary.rename(path)
    except BaseException:
        with contextlib.suppress(OSError):
            temporary.unlink(missing_ok=True)
        raise


def raw_bytes(tensor: torch.Tensor) -> memoryview:
    """Return the bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def safetensors_header(specs: Sequence[TensorSpec], metadata: Mapping[str, str], min_size: int = 0) -> bytes:
    """Return length and header of a file that has the weights of ``specs`` in their order, without gaps between them.

    Args:
        min_size: padded with spaces to this size in bytes, or to the next aligned size if it is larger.
    """
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for spec in specs:
        end = spec.offset + getattr(torch, spec.dtype).itemsize * torch.Size(spec.shape).numel()
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [spec.offset, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    size = -(-(LENGTH_BYTES + len(text)) // HEADER_ALIGNMENT_BYTES) * HEADER_ALIGNMENT_BYTES
    text = text.ljust(max(size, min_size) - LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _move(file: IO[bytes], path: Path, begin: int, to: int) -> None:
    """Move what follows ``begin`` to ``to``. The two ranges overlap, so the bytes take the way over a second file."""
    aside = path.with_name(f".{path.name}.aside")
    try:
        with aside.open("w+b") as copy:
            file.seek(begin)
            shutil.copyfileobj(file, copy)
            file.seek(to)
            copy.seek(0)
            shutil.copyfileobj(copy, file)
    finally:
        aside.unlink(missing_ok=True)


# The shared folder ----------------------------------------------------------------------------------------------------


_OWNER_SUFFIX = ".owner"
_labels_of_this_process: set[str] = set()  # a record lock does not keep out the process that holds it


class WeightFolder:
    """The shared folder, as one transport writes to it: the right to its files ``skyrl-weights-LABEL-*``.

    It is claimed with the first version, in the process that writes it; an unused one can be pickled. A killed trainer cannot
    remove its files. So each claim holds a record lock on an owner file, which ends with the process; the next claim that gets
    such a lock removes the files of the dead owner. Many shared file systems keep locks within one machine, so files of
    another machine's owners stay.

    Args:
        folder: engines see it under the same path.
    """

    def __init__(self, folder: str) -> None:
        self._folder = Path(folder)
        self._lock: FileIO | None = None  # on the owner file, while the folder is claimed
        self._closed = False

    @contextlib.contextmanager
    def writing(self, version: int) -> Iterator[None]:
        """Files of ``version`` are written inside this context.

        Raises:
            WeightSyncError: the transport is closed, or the folder cannot be written.
        """
        if self._closed:
            raise WeightSyncError("The weight transport is closed; make a new one to sync weights again.")
        try:
            if self._lock is None:
                self.claim()
            yield
        except OSError as error:
            raise WeightSyncError(
                f"The weights of version {version} cannot be written to {self._folder}: {error.strerror}. Make room there, "
                "or set generator.weight_folder to another folder that trainer and engines share."
            ) from error

    def claim(self) -> None:
        """Take a label for this process, and remove the files of dead owners.

        Raises:
            OSError: the folder cannot be written.
        """
        self._folder.mkdir(parents=True, exist_ok=True)
        # A new one per claim: a copy of an unused object in another process must not share it.
        self.label = uuid.uuid4().hex[:12]
        self._owner = self._folder / f".{PREFIX}{self.label}{_OWNER_SUFFIX}"
        _labels_of_this_process.add(self.label)
        # Locked under another name first: an owner file without a lock would look like a dead owner's.
        new = self._owner.with_suffix(".new")
        lock = FileIO(new, "w")
        lock.write(_machine())
        self._lock = lock
        try:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            os.replace(new, self._owner)  # others find it only now that it is locked
            for owner in self._folder.glob(f".{PREFIX}*{_OWNER_SUFFIX}"):
                _remove_if_dead(self._folder, owner)
        except OSError as error:  # a file system without locks cannot tell which owners are dead
            new.unlink(missing_ok=True)
            logger.warning("Weights that killed runs have left in %s are not removed: %s", self._folder, error)

    def path(self, name: str) -> Path:
        """Return the path of one of this transport's files. Valid inside :meth:`writing`."""
        assert self._lock is not None, "paths exist inside writing() only"
        return self._folder / f"{PREFIX}{self.label}-{name}.safetensors"

    def close(self) -> None:
        """Give up the claim. The transport removes its files itself. Idempotent."""
        self._closed = True
        if self._lock is not None:
            self._owner.unlink(missing_ok=True)
            self._lock.close()
            self._lock = None
            _labels_of_this_process.discard(self.label)


def _machine() -> bytes:
    """Identify the running kernel, which all containers of a machine share."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_bytes()
    except OSError:
        return platform.node().encode()


def _remove_if_dead(folder: Path, owner: Path) -> None:
    label = owner.name.removeprefix(f".{PREFIX}").removesuffix(_OWNER_SUFFIX)
    if label in _labels_of_this_process:  # opening and closing the file would release its lock
        return
    try:
        with FileIO(owner, "r+") as lock:
            fcntl.lockf(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # A lock of another machine may be invisible here, so its owner may live.
            if lock.readall() != _machine():
                return
            left = [*folder.glob(f"{PREFIX}{label}-*"), *folder.glob(f".{PREFIX}{label}-*")]
            for path in left:
                path.unlink(missing_ok=True)
            owner.unlink(missing_ok=True)
            logger.info("removed %d files of weights that a killed run had left in %s", len(left), folder)
    except (BlockingIOError, PermissionError, FileNotFoundError):
        return  # the owner lives, or another process has just removed it
