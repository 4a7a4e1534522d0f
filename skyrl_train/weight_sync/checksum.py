"""The CRC-32 of a staging copy, computed by a GPU where it can read the copy as fast as copy it, else by several threads.

A CRC is linear: it is the remainder of a polynomial over GF(2) whose coefficients are the bits of the message. So the parts of a
message can be summed apart, and a long message can be folded to a short one that has the same remainder.
"""

from __future__ import annotations

import functools
import os
import zlib
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor

import torch

from skyrl_train.runtime.checksums import checksum_text, combine, power_of_x, times
from skyrl_train.weight_sync.pinning import using

MAX_THREADS = 16
MIN_PART_BYTES = 1 << 22  # a thread is not worth less
LANES = 1 << 21  # 32-bit words that are folded at once: enough for all of a GPU, and 8 MB remain for the CPU
_ONES = 0xFFFFFFFF
_HALF_BITS = 16


def checksum(staging: torch.Tensor, gpu: torch.device | None = None) -> str:
    """Return the CRC-32 of a contiguous uint8 tensor in the form that ``WeightUpdate`` carries.

    Args:
        gpu: the main memory ``staging`` is registered with CUDA, and this GPU computes; None: the device of ``staging`` does.
    """
    device = staging.device if staging.is_cuda else gpu
    if device is not None and staging.numel() % 4 == 0:
        return checksum_text(folded_crc(staging, LANES, device))
    return checksum_text(parallel_crc(staging.cpu()))


def parallel_crc(memory: torch.Tensor) -> int:
    """Return the CRC-32 of a contiguous uint8 tensor in main memory."""
    threads = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    size = max(MIN_PART_BYTES, -(-memory.numel() // min(threads, MAX_THREADS)))
    parts = [part.numpy().data for part in memory.split(size)]
    if len(parts) == 1:
        return zlib.crc32(parts[0])
    crc = 0
    with ThreadPoolExecutor(len(parts)) as pool:  # zlib computes without the interpreter's lock
        for part, crc_of_part in zip(parts, pool.map(zlib.crc32, parts), strict=True):
            crc = combine(crc, crc_of_part, len(part))
    return crc


def folded_crc(staging: torch.Tensor, lanes: int, device: torch.device) -> int:
    """Return the CRC-32 of a contiguous uint8 tensor, of a multiple of 4 bytes, computed by ``device``.

    Horner's rule for ``lanes`` polynomials at once: word ``i`` of the message, counted from its end, belongs to polynomial
    ``i % lanes``. The words that remain, one per lane, are a message with the same remainder.
    """
    words = staging.view(torch.int32)
    low, high = (table.to(device) for table in _tables(power_of_x(32 * lanes)))
    first = words.numel() % lanes or lanes
    state = torch.zeros(lanes, dtype=torch.int32, device=device)  # leading zeros do not change a remainder
    state[lanes - first :] = words[:first]
    for chunk in _chunks(words[first:], lanes, device):
        times_factor = low.index_select(0, state & 0xFFFF) ^ high.index_select(0, (state >> _HALF_BITS) & 0xFFFF)
        state = times_factor ^ chunk
    rest = zlib.crc32(state.cpu().numpy().data)
    # CRC-32 begins with ones in the register, which makes it depend on the length, too.
    return rest ^ times(power_of_x(32 * lanes), _ONES) ^ times(power_of_x(8 * staging.numel()), _ONES)


def _chunks(words: torch.Tensor, size: int, device: torch.device) -> Iterator[torch.Tensor]:
    """Yield ``words`` in parts of ``size`` on ``device``. Each is valid until the next but one; the next is copied meanwhile."""
    parts = words.split(size) if words.numel() else ()
    if words.device.type == device.type:
        yield from parts
        return
    compute, copies = torch.cuda.current_stream(device), torch.cuda.Stream(device)
    buffers = [torch.empty(size, dtype=words.dtype, device=device) for _ in range(2)]
    used = [torch.cuda.Event() for _ in buffers]
    copies.wait_stream(compute)  # what had the buffers' memory before
    for number, part in enumerate(parts):
        turn = number % 2
        copies.wait_event(used[turn])
        with using(copies):
            buffers[turn].copy_(part, non_blocking=True)
        compute.wait_stream(copies)
        yield buffers[turn]
        used[turn].record(compute)


@functools.lru_cache(maxsize=2)
def _tables(factor: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return the products (int32 ``[65536]`` each) of ``factor`` with the low and with the high half of a word."""
    tables = []
    for half in range(2):
        table = torch.zeros(1, dtype=torch.int64)
        for bit in range(_HALF_BITS):  # products are linear: k bits give k + 1 bits
            table = torch.cat([table, table ^ times(factor, 1 << (half * _HALF_BITS + bit))])
        tables.append(torch.where(table < 1 << 31, table, table - (1 << 32)).to(torch.int32))
    return tables[0], tables[1]
