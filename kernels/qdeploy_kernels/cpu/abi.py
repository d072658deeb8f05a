"""The structs and enums of kernels/cpp/qdeploy_cpu.h for ctypes; that file says what they mean.

A test compares sizes and offsets with the header's. ABI_VERSION must equal qd_abi_version().
"""

from __future__ import annotations

import ctypes
from ctypes import POINTER, Structure, c_double, c_float, c_int32, c_int64, c_uint64, c_void_p
from enum import IntEnum

ABI_VERSION = 4


class Kind(IntEnum):
    """qd_kind: how a matrix's tiles hold their weights."""

    W4 = 0
    W8 = 1
    BF16 = 2
    F32 = 3
    FP8 = 4


class Activation(IntEnum):
    """qd_activation."""

    SILU = 0
    GELU_TANH = 1
    GELU = 2


class ActMode(IntEnum):
    """qd_act_mode: activations of quantized matrices as dynamic int8, or as they are."""

    INT8 = 0
    FP32 = 1


class KVDtype(IntEnum):
    """qd_kv_dtype: the format of sealed blocks."""

    BF16 = 0
    INT8 = 1
    INT4 = 2
    K8V4 = 3
    FP8 = 4


class Matrix(Structure):
    """qd_matrix. Pointers are addresses: whoever fills them keeps what they point to alive."""

    _fields_ = (
        ("rows", c_int32),
        ("cols", c_int32),
        ("kind", c_int32),
        ("group", c_int32),
        ("symmetric", c_int32),
        ("reserved", c_int32),
        ("tile_bytes", c_int64),
        ("tiles", c_void_p),
        ("bias", c_void_p),
        ("permutation", c_void_p),
    )


class Layer(Structure):
    """qd_layer."""

    _fields_ = (
        ("qkv", Matrix),
        ("o", Matrix),
        ("gate_up", Matrix),
        ("down", Matrix),
        ("input_norm", c_void_p),
        ("post_attention_norm", c_void_p),
        ("pre_feedforward_norm", c_void_p),
        ("post_feedforward_norm", c_void_p),
        ("q_norm", c_void_p),
        ("k_norm", c_void_p),
        ("window", c_int32),
        ("rope", c_int32),
    )


class Model(Structure):
    """qd_model."""

    _fields_ = (
        ("num_layers", c_int32),
        ("hidden", c_int32),
        ("inner", c_int32),
        ("q_heads", c_int32),
        ("kv_heads", c_int32),
        ("head_dim", c_int32),
        ("vocab", c_int32),
        ("activation", c_int32),
        ("sandwich_norms", c_int32),
        ("act_mode", c_int32),
        ("num_ropes", c_int32),
        ("reserved", c_int32),
        ("norm_eps", c_float),
        ("attention_scale", c_float),
        ("embedding_multiplier", c_float),
        ("attention_cap", c_float),
        ("logit_cap", c_float),
        ("reserved_float", c_float),
        ("inverse_frequencies", c_void_p),
        ("rope_scales", c_void_p),
        ("norm", c_void_p),
        ("layers", POINTER(Layer)),
        ("embedding", Matrix),
        ("head", Matrix),
    )


class KVGroup(Structure):
    """qd_kv_group."""

    _fields_ = (
        ("dtype", c_int32),
        ("block_size", c_int32),
        ("sink_blocks", c_int32),
        ("residual_blocks", c_int32),
        ("window", c_int32),
        ("num_layers", c_int32),
        ("layers", c_void_p),
    )


class BlockCopy(Structure):
    """qd_block_copy."""

    _fields_ = (("group", c_int32), ("source", c_int32), ("target", c_int32))


class Step(Structure):
    """qd_step."""

    _fields_ = (
        ("num_slices", c_int32),
        ("num_tokens", c_int32),
        ("token_ids", c_void_p),
        ("starts", c_void_p),
        ("counts", c_void_p),
        ("num_logits", c_void_p),
        ("table_starts", c_void_p),
        ("open_blocks", c_void_p),
        ("sealed_blocks", c_void_p),
        ("logits", c_void_p),
        ("logits_stride", c_int64),
        ("num_copies", c_int64),
        ("copies", c_void_p),
    )


def declare(library: ctypes.CDLL) -> None:
    """Set argument and result types of every function of the header."""
    text, handle = ctypes.c_char_p, c_void_p
    blocks: list[type] = [handle, c_int32, c_int32, c_int64, handle, handle]
    signatures: dict[str, tuple[type | None, list[type]]] = {
        "qd_abi_version": (c_int32, []),
        "qd_isa": (text, []),
        "qd_error": (text, []),
        "qd_model_create": (handle, [POINTER(Model), c_int32]),
        "qd_model_destroy": (None, [handle]),
        "qd_engine_create": (handle, [handle, POINTER(KVGroup), c_int32]),
        "qd_engine_destroy": (None, [handle]),
        "qd_open_block_bytes": (c_int64, [handle, c_int32]),
        "qd_sealed_block_bytes": (c_int64, [handle, c_int32]),
        "qd_kv_allocate": (c_int32, [handle, handle, handle]),
        "qd_pool": (handle, [handle, c_int32, c_int32, POINTER(c_int64)]),
        "qd_read_blocks": (c_int32, blocks),
        "qd_write_blocks": (c_int32, blocks),
        "qd_execute": (c_int32, [handle, POINTER(Step)]),
        "qd_read_seconds": (c_double, [handle, c_int64, c_int32]),
        "qd_linear": (c_int32, [handle, POINTER(Matrix), handle, c_int32, handle]),
        "qd_contenders": (
            c_int64,
            [handle, c_int64, c_int64, c_double, c_uint64, handle],
        ),
        "qd_near": (c_int64, [handle, c_int64, c_float, handle]),
        "qd_mass": (c_double, [handle, c_int64, c_float, c_double]),
    }
    for name, (result, arguments) in signatures.items():
        function = getattr(library, name)
        function.restype, function.argtypes = result, arguments
