"""Checksums that are computed in parts are those of the whole."""

from __future__ import annotations

import os
import zlib

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from skyrl_train.runtime.checksums import combine, power_of_x, times
from skyrl_train.weight_sync import checksum
from skyrl_train.weight_sync.checksum import folded_crc, parallel_crc


@given(message=st.binary(max_size=300), cut=st.integers(0, 300))
def test_the_sum_of_two_messages_in_a_row_follows_from_their_sums(message: bytes, cut: int) -> None:
    first, second = message[:cut], message[cut:]
    assert combine(zlib.crc32(first), zlib.crc32(second), len(second)) == zlib.crc32(message)


@given(
    a=st.integers(0, 2**32 - 1),
    b=st.integers(0, 2**32 - 1),
    exponents=st.tuples(st.integers(0, 99), st.integers(0, 99)),
)
def test_products_commute_and_exponents_add(a: int, b: int, exponents: tuple[int, int]) -> None:
    assert times(a, b) == times(b, a)
    assert times(a, power_of_x(0)) == a
    assert times(power_of_x(exponents[0]), power_of_x(exponents[1])) == power_of_x(sum(exponents))


@given(words=st.integers(1, 60), lanes=st.integers(1, 70), data=st.data())
def test_a_folded_message_keeps_its_checksum(words: int, lanes: int, data: st.DataObject) -> None:
    message = bytearray(data.draw(st.binary(min_size=4 * words, max_size=4 * words)))
    assert folded_crc(torch.frombuffer(message, dtype=torch.uint8), lanes, torch.device("cpu")) == zlib.crc32(message)


@pytest.mark.parametrize("threads", [1, 3, 64])
@pytest.mark.parametrize("size", [1, 999, 1000, 1001, 12_345])
def test_threads_compute_one_checksum(monkeypatch: pytest.MonkeyPatch, threads: int, size: int) -> None:
    monkeypatch.setattr(checksum, "MIN_PART_BYTES", 1000)
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: set(range(threads)), raising=False)
    message = torch.randint(0, 256, (size,), dtype=torch.uint8)
    assert parallel_crc(message) == zlib.crc32(message.numpy().data)
