// KV blocks of one KV head: how an open and a sealed block lie in memory, and how tokens get there.
// Same rule as qdeploy.kv.kivi: keys are quantized per channel over a block's tokens, values per
// token over groups of channels; x ≈ code · scale + minimum, both float16 (fp8: scale only).
#pragma once
#include "panels.h"

namespace qd {

struct KVLayout {
    int dtype, block_size, sink_blocks, residual_blocks;
    int head_dim, kv_heads;
    bool exact;  // open blocks are float32 and all arithmetic is (act fp32)

    bool seals() const { return dtype != QD_KV_BF16; }
    bool has_minimum() const { return dtype != QD_KV_FP8; }
    Panel open_kind() const { return exact ? Panel::FLOAT : Panel::PAIRS; }
    Panel key_kind() const { return dtype == QD_KV_INT4 ? Panel::N4 : dtype == QD_KV_FP8 ? Panel::E4M3 : Panel::U8; }
    // Sealed blocks meet 8-bit queries and weights of attention.
    bool counts() const { return !exact && is_codes(key_kind()); }
    Panel value_kind() const {
        return dtype == QD_KV_INT8 ? Panel::S8 : dtype == QD_KV_FP8 ? Panel::E4M3 : Panel::N4;
    }
    int value_group() const { return head_dim % 64 == 0 ? 64 : head_dim; }
    int value_groups() const { return head_dim / value_group(); }
    int64_t elements() const { return (int64_t)block_size * head_dim; }
    int64_t open_panel_bytes() const { return panel_bytes(open_kind(), elements()); }
    int64_t open_bytes() const { return 2 * open_panel_bytes(); }  // K panel, V panel
    int halves() const { return has_minimum() ? 2 : 1; }
    // A sealed block, in the order of reading, so that memory sees one stream: K scales [head_dim],
    // minima [head_dim]; K codes; for each group of channels V scales [block_size], minima
    // [block_size]; V codes.
    int64_t key_scales() const { return 0; }
    int64_t key_codes() const { return (int64_t)head_dim * 2 * halves(); }
    int64_t value_scales() const { return key_codes() + panel_bytes(key_kind(), elements()); }
    int64_t value_codes() const { return value_scales() + (int64_t)block_size * value_groups() * 2 * halves(); }
    int64_t sealed_bytes() const { return value_codes() + panel_bytes(value_kind(), elements()); }

    // DESIGN §5: does a query in `query_block` read `block` sealed?
    bool reads_sealed(int block, int query_block) const {
        return seals() && block >= sink_blocks && block < query_block - residual_blocks;
    }
};

// The first block that a query at `position` sees some of; `window` 0: all.
inline int oldest_block(const KVLayout& kv, int window, int position) {
    return window && position >= window ? (position - window + 1) / kv.block_size : 0;
}

// Writes one token at `offset` of an open block; k, v: [head_dim] float32.
void store_token(const KVLayout& kv, uint8_t* open, int offset, const float* k, const float* v);

// Zeroes a token's V in a panel of open values.
void clear_value(const KVLayout& kv, uint8_t* values, int offset);

// Quantizes a full open block. A group with a value that float16 can't hold gets a NaN scale.
void seal_block(const KVLayout& kv, const uint8_t* open, uint8_t* sealed);

// Scales and code-zero offsets of `count` groups as floats; offset = minimum + code of zero · scale.
void read_scales(const KVLayout& kv, Panel kind, const uint8_t* scales, int count, float* scale, float* offset);

}  // namespace qd
