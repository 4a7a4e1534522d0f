"""A safetensors file written while its weights arrive, one at a time; it appears whole or not at all."""

from __future__ import annotations

import contextlib
import json
import os
import shutil
import zlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO

import torch

from skyrl_train.inference.disk_weights import LENGTH_BYTES
from skyrl_train.inference.weight_update import TensorSpec

ALIGNMENT_BYTES = 64  # where the data begins; the format asks for no gaps after that
DTYPE_CODES = {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16"}


@dataclass(frozen=True, slots=True)
class WrittenFile:
    """``data_offset``: where the weights begin in the file; ``num_bytes`` and the CRC-32 ``crc`` are theirs alone."""

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
    """Writes ``weights``, stored as ``dtype`` (a torch name), and renames the file to ``path`` when it is complete.

    Args:
        expected_offset: ``data_offset`` of a file with the same weights: with a wrong one the data is copied once more.
        sync: waits until the bytes are on the disk.

    Raises:
        OSError: the disk is full, or the folder cannot be written; no file is left.
    """
    with write_atomically(path, sync) as file:
        file.seek(expected_offset)
        specs, num_bytes, crc = _write_data(file, weights, dtype)
        header = _header(specs, metadata)
        if len(header) > expected_offset:
            _move(file, path, expected_offset, len(header))
        else:
            header = _padded(header, expected_offset)
        file.seek(0)
        file.write(header)
    return WrittenFile(tuple(specs), len(header), num_bytes, crc)


@contextlib.contextmanager
def write_atomically(path: Path, sync: bool) -> Iterator[IO[bytes]]:
    """A file to write (and read) that is found at ``path`` when all is well, and nowhere after a failure."""
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
    """The bytes of a contiguous CPU tensor, without a copy."""
    return tensor.reshape(-1).view(torch.uint8).numpy().data


def _write_data(
    file: IO[bytes], weights: Iterable[tuple[str, torch.Tensor]], dtype: str
) -> tuple[list[TensorSpec], int, int]:
    specs, offset, crc = [], 0, 0
    for name, weight in weights:
        stored = weight.detach().to("cpu", getattr(torch, dtype)).contiguous()
        data = raw_bytes(stored)
        file.write(data)
        crc = zlib.crc32(data, crc)
        specs.append(TensorSpec(name, tuple(weight.shape), dtype, offset))
        offset += stored.nbytes
    return specs, offset, crc


def _header(specs: Sequence[TensorSpec], metadata: Mapping[str, str]) -> bytes:
    entries: dict[str, object] = {"__metadata__": dict(metadata)}
    for spec in specs:
        begin = spec.offset
        end = begin + getattr(torch, spec.dtype).itemsize * torch.Size(spec.shape).numel()
        entries[spec.name] = {
            "dtype": DTYPE_CODES[spec.dtype],
            "shape": list(spec.shape),
            "data_offsets": [begin, end],
        }
    text = json.dumps(entries, separators=(",", ":")).encode()
    whole = LENGTH_BYTES + len(text)
    return _padded(len(text).to_bytes(LENGTH_BYTES, "little") + text, -(-whole // ALIGNMENT_BYTES) * ALIGNMENT_BYTES)


def _padded(header: bytes, size: int) -> bytes:
    text = header[LENGTH_BYTES:].ljust(size - LENGTH_BYTES)
    return len(text).to_bytes(LENGTH_BYTES, "little") + text


def _move(file: IO[bytes], path: Path, begin: int, to: int) -> None:
    """Shifts what is behind ``begin`` to ``to``: by way of another file, because the two overlap."""
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
