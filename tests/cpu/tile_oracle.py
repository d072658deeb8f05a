"""Reads tiles byte by byte, as qdeploy_cpu.h words it: slow, and no code of the packer's."""

from __future__ import annotations

import struct

import numpy as np
import torch
from torch import Tensor

from qdeploy_kernels.cpu.abi import Kind
from qdeploy_kernels.cpu.tiles import TileMatrix


def unpack(matrix: TileMatrix) -> Tensor:
    """Weights [num_tiles · 32, cols], float64, rows in tile order, columns as input features."""
    out = torch.zeros(len(matrix.tiles) * 32, matrix.cols, dtype=torch.float64)
    for tile, data in enumerate(matrix.tiles):
        for row in range(32):
            weights = _row(matrix, data.tobytes(), row)
            for column, weight in enumerate(weights):
                feature = column if matrix.permutation is None else matrix.permutation[column]
                out[32 * tile + row, feature] = weight
    return out


def _row(matrix: TileMatrix, data: bytes, row: int) -> list[float]:
    if matrix.kind is Kind.F32:
        return [struct.unpack_from("<f", data, (k * 32 + row) * 4)[0] for k in range(matrix.cols)]
    if matrix.kind is Kind.BF16:
        return [_bfloat16(data, (k // 2 * 32 + row) * 4 + k % 2 * 2) for k in range(matrix.cols)]
    if matrix.kind is Kind.FP8:
        return _fp8_row(matrix, data, row)
    per_byte = 2 if matrix.kind is Kind.W4 else 1
    codes = 32 * matrix.group // per_byte
    stride = codes + (64 if matrix.symmetric else 96)
    weights = []
    for k in range(matrix.cols):
        group = data[k // matrix.group * stride :][:stride]
        (scale,) = struct.unpack_from("<e", group, codes + 2 * row)
        zero = group[codes + 64 + row] if not matrix.symmetric else 128 // 16 ** (per_byte - 1)
        weights.append((_code(matrix.kind, group, k % matrix.group, row) - zero) * scale)
    return weights


def _fp8_row(matrix: TileMatrix, data: bytes, row: int) -> list[float]:
    weights, at = [], 0
    for first in range(0, matrix.cols, matrix.group):
        count = min(matrix.group, matrix.cols - first)
        codes, at = at, at + 32 * (count + -count % 4)
        (scale,) = struct.unpack_from("<f", data, at + 4 * row)
        at += 128
        for k in range(count):
            byte = data[codes + (k // 4 * 32 + row) * 4 + (0, 2, 1, 3)[k % 4]]
            weights.append(_e4m3(byte) * scale)
    return weights


def _e4m3(byte: int) -> float:
    exponent, mantissa = byte >> 3 & 15, byte & 7
    size = mantissa * 2.0**-9 if exponent == 0 else (8 + mantissa) * 2.0 ** (exponent - 10)
    return -size if byte & 128 else size


def _code(kind: Kind, data: bytes, k: int, row: int) -> int:
    if kind is Kind.W8:
        return data[(k // 4 * 32 + row) * 4 + k % 4]
    byte = data[(k // 8 * 32 + row) * 4 + k % 4]
    return byte >> 4 if k % 8 >= 4 else byte & 15


def _bfloat16(data: bytes, at: int) -> float:
    (bits,) = struct.unpack_from("<H", data, at)
    return float(np.array([bits << 16], dtype=np.uint32).view(np.float32)[0])
