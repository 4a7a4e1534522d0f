"""Checksums of files (CRC-32: finds accidental damage, and is faster than cryptographic digests), as ``crc32:0a1b2c3d``."""

from __future__ import annotations

import functools
import io
import zlib
from pathlib import Path
from typing import Any

_CHUNK_BYTES = 1 << 20  # fits the processor's cache, so that the sum costs no second trip to memory


class ChecksumWriter(io.BufferedWriter):
    """A new binary file whose checksum is computed from the bytes that are written to it, in their order."""

    def __init__(self, path: Path) -> None:
        super().__init__(io.FileIO(path, "w"))
        self._crc = 0

    def write(self, data: Any) -> int:
        """Write bytes, or another object with a buffer."""
        self._crc = zlib.crc32(data, self._crc)
        return super().write(data)

    @property
    def checksum(self) -> str:
        """The checksum of everything written so far."""
        return checksum_text(self._crc)


def file_checksum(path: Path) -> str:
    """Read a file and return its checksum.

    Raises:
        OSError: it cannot be read.
    """
    crc, chunk = 0, memoryview(bytearray(_CHUNK_BYTES))
    with path.open("rb", buffering=0) as file:
        while size := file.readinto(chunk):
            crc = zlib.crc32(chunk[:size], crc)
    return checksum_text(crc)


def checksum_text(crc: int) -> str:
    """Return a CRC-32 in the form that manifests and weight updates carry."""
    return f"crc32:{crc:08x}"


# Sums of sums ---------------------------------------------------------------------------------------------------------
# A CRC-32 is a polynomial over GF(2) modulo the standard's: bit 31 is the coefficient of x^0, bit 0 that of x^31.

_POLYNOMIAL = 0xEDB88320
_ONE, _X = 1 << 31, 1 << 30


def combine(first: int, second: int, second_bytes: int) -> int:
    """Return the CRC-32 of two messages in a row, from their own and the length of the second."""
    return times(power_of_x(8 * second_bytes), first) ^ second


def times(a: int, b: int) -> int:
    """Return the product of two polynomials."""
    product = 0
    for bit in range(31, -1, -1):
        if a >> bit & 1:
            product ^= b
        b = b >> 1 ^ (_POLYNOMIAL if b & 1 else 0)  # times x
    return product


@functools.lru_cache(maxsize=64)
def power_of_x(exponent: int) -> int:
    """Return x to the power of ``exponent``."""
    power, square = _ONE, _X
    while exponent:
        if exponent & 1:
            power = times(power, square)
        square = times(square, square)
        exponent >>= 1
    return power
