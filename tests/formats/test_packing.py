"""Bit streams against the words that the real packages wrote (formats.md §1)."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from qdeploy.formats.packing import pack_awq, pack_bits, packed_length, unpack_awq, unpack_bits


def words(tensor: torch.Tensor) -> list[int]:
    return [value & 0xFFFFFFFF for value in tensor.flatten().tolist()]


STREAMS = [
    (4, list(range(16)), [0x76543210, 0xFEDCBA98]),
    (4, [7] * 8, [0x77777777]),
    (4, [8] * 8, [0x88888888]),
    (4, [1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1, 1], [0x11111111, 0x00001111]),
    (2, [0, 1, 2, 3] * 8, [0xE4E4E4E4, 0xE4E4E4E4]),
    (2, [1] * 16, [0x55555555]),
    (3, [0, 1, 2, 3, 4, 5, 6, 7] * 4, [0x88FAC688, 0xC688FAC6, 0xFAC688FA]),
    (3, [3] * 32, [0xDB6DB6DB, 0xB6DB6DB6, 0x6DB6DB6D]),
    (8, list(range(8)), [0x03020100, 0x07060504]),
    (8, [127] * 4, [0x7F7F7F7F]),
    (8, [0, 127, 128, 255], [0xFF807F00]),
]


@pytest.mark.parametrize(("bits", "codes", "expected"), STREAMS)
def test_stream_words(bits: int, codes: list[int], expected: list[int]) -> None:
    packed = pack_bits(torch.tensor(codes), bits)
    assert packed.dtype == torch.int32
    assert words(packed) == expected
    assert unpack_bits(packed, bits, len(codes)).tolist() == codes


def test_awq_words_interleave() -> None:
    codes = torch.arange(16)[None]
    assert words(pack_awq(codes)) == [0x75316420, 0xFDB9ECA8]
    assert words(pack_awq(torch.full((1, 8), 8))) == [0x88888888]
    assert unpack_awq(pack_awq(codes)).tolist() == codes.tolist()


@given(
    bits=st.sampled_from([2, 3, 4, 8]),
    shape=st.lists(st.integers(1, 70), min_size=1, max_size=3),
    data=st.data(),
)
def test_round_trip_along_any_axis(bits: int, shape: list[int], data: st.DataObject) -> None:
    dim = data.draw(st.integers(-len(shape), len(shape) - 1))
    seed = data.draw(st.integers(0, 2**31))
    codes = torch.randint(0, 1 << bits, shape, generator=torch.Generator().manual_seed(seed))
    packed = pack_bits(codes, bits, dim)
    assert packed.shape[dim] == packed_length(shape[dim], bits) == -(-shape[dim] * bits // 32)
    assert torch.equal(unpack_bits(packed, bits, shape[dim], dim).long(), codes)


@given(bits=st.sampled_from([2, 3, 4, 8]), codes=st.lists(st.integers(0, 255), min_size=1))
def test_stream_equals_big_integer(bits: int, codes: list[int]) -> None:
    codes = [code & ((1 << bits) - 1) for code in codes]
    stream = sum(code << (index * bits) for index, code in enumerate(codes))
    count = packed_length(len(codes), bits)
    expected = [(stream >> (32 * word)) & 0xFFFFFFFF for word in range(count)]
    assert words(pack_bits(torch.tensor(codes), bits)) == expected


@pytest.mark.parametrize("code", [-1, 16])
def test_code_that_does_not_fit_is_refused(code: int) -> None:
    with pytest.raises(ValueError, match="0 … 15"):
        pack_bits(torch.tensor([0, code]), 4)


def test_wrong_number_of_words_is_refused() -> None:
    with pytest.raises(ValueError, match="2 words can't be 32 codes of 3 bits"):
        unpack_bits(torch.zeros(2, dtype=torch.int32), 3, 32)
