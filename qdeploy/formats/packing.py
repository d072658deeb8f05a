"""Codes of 2, 3, 4 or 8 bits in int32 words: a little-endian bit stream along one axis.

GPTQ, KIVI and compressed-tensors share this stream; AWQ GEMM alone interleaves its nibbles.
"""

from __future__ import annotations

import math

import torch
from torch import Tensor

#: Nibble i of an AWQ word holds the code of channel AWQ_ORDER[i] of its eight.
AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
#: Channel i of eight is in nibble AWQ_REVERSE_ORDER[i].
AWQ_REVERSE_ORDER = (0, 4, 1, 5, 2, 6, 3, 7)
_WORD_BITS = 32


def packed_length(length: int, bits: int) -> int:
    """Number of int32 words that hold `length` codes: ceil(length · bits / 32)."""
    return -(-length * bits // _WORD_BITS)


def _period(bits: int) -> tuple[int, int]:
    """(codes, words) after which the stream is word-aligned again: (32, 3) for 3 bits."""
    common = math.gcd(_WORD_BITS, bits)
    return _WORD_BITS // common, bits // common


def pack_bits(codes: Tensor, bits: int, dim: int = -1) -> Tensor:
    """Pack codes (0 … 2^bits − 1, any integer dtype) along `dim`; int32, zero-padded.

    Code i occupies bits i·bits … i·bits + bits − 1 of the stream; a 3-bit code may straddle
    two words. Raises ValueError for a code that doesn't fit.
    """
    if codes.numel() and not 0 <= int(codes.min()) <= int(codes.max()) < 1 << bits:
        raise ValueError(f"codes are not all within 0 … {(1 << bits) - 1}")
    stream = codes.movedim(dim, -1)
    length = stream.shape[-1]
    period_codes, period_words = _period(bits)
    periods = -(-length // period_codes)
    padded = torch.nn.functional.pad(stream, (0, periods * period_codes - length))
    lanes = padded.reshape(*stream.shape[:-1], periods, period_codes)
    words = torch.zeros(*lanes.shape[:-1], period_words, dtype=torch.int32, device=codes.device)
    for index in range(period_codes):
        word, shift = divmod(index * bits, _WORD_BITS)
        lane = lanes[..., index].to(torch.int32)
        words[..., word] |= lane << shift
        if shift + bits > _WORD_BITS:
            words[..., word + 1] |= lane >> (_WORD_BITS - shift)
    flat = words.reshape(*stream.shape[:-1], periods * period_words)
    return flat[..., : packed_length(length, bits)].movedim(-1, dim).contiguous()


def unpack_bits(words: Tensor, bits: int, length: int, dim: int = -1) -> Tensor:
    """The inverse of `pack_bits`: the first `length` codes along `dim`, uint8."""
    stream = words.movedim(dim, -1)
    if stream.shape[-1] != packed_length(length, bits):
        raise ValueError(
            f"{stream.shape[-1]} words can't be {length} codes of {bits} bits "
            f"({packed_length(length, bits)} words)"
        )
    if 8 % bits == 0:
        return _unpack_bytes(stream, bits)[..., :length].movedim(-1, dim).contiguous()
    period_codes, period_words = _period(bits)
    periods = -(-length // period_codes)
    padded = torch.nn.functional.pad(stream, (0, periods * period_words - stream.shape[-1]))
    lanes = padded.reshape(*stream.shape[:-1], periods, period_words)
    codes = torch.empty(*lanes.shape[:-1], period_codes, dtype=torch.uint8, device=words.device)
    mask = (1 << bits) - 1
    for index in range(period_codes):
        word, shift = divmod(index * bits, _WORD_BITS)
        # >> keeps the sign, so a straddling code's low part needs its own mask.
        lane = (lanes[..., word] >> shift) & (mask & ((1 << (_WORD_BITS - shift)) - 1))
        if shift + bits > _WORD_BITS:
            lane = (lane | (lanes[..., word + 1] << (_WORD_BITS - shift))) & mask
        codes[..., index] = lane.to(torch.uint8)
    flat = codes.reshape(*stream.shape[:-1], periods * period_codes)
    return flat[..., :length].movedim(-1, dim).contiguous()


def _unpack_bytes(stream: Tensor, bits: int) -> Tensor:
    """All codes of 2, 4 or 8 bits: none straddles a byte, and int32 words are little-endian."""
    octets = stream.contiguous().view(torch.uint8)
    if bits == 8:
        return octets
    codes = torch.empty(*octets.shape, 8 // bits, dtype=torch.uint8, device=stream.device)
    for index in range(8 // bits):
        torch.bitwise_right_shift(octets, index * bits, out=codes[..., index])
    return codes.bitwise_and_((1 << bits) - 1).flatten(-2)


def pack_awq(codes: Tensor) -> Tensor:
    """Pack 4-bit codes [rows, out] in AWQ GEMM order: int32 [rows, out / 8]; out % 8 == 0."""
    return pack_bits(_permute_eights(codes, AWQ_ORDER), 4)


def unpack_awq(words: Tensor) -> Tensor:
    """The inverse of `pack_awq`: uint8 [rows, words · 8]."""
    return _permute_eights(unpack_bits(words, 4, words.shape[-1] * 8), AWQ_REVERSE_ORDER)


def _permute_eights(codes: Tensor, order: tuple[int, ...]) -> Tensor:
    eights = codes.reshape(*codes.shape[:-1], -1, 8)
    return eights[..., list(order)].reshape(codes.shape)
