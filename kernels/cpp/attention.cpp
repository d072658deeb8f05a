#include "operands.h"

#include <algorithm>
#include <cmath>

namespace qd {

namespace {

// Offers memory in aligned pieces; a first pass with null memory measures.
struct Carver {
    uint8_t* memory;
    int64_t used = 0;
    template <class T> void take(T*& out, int64_t count) {
        out = memory ? (T*)(memory + used) : nullptr;
        used = round_up(used + count * (int64_t)sizeof(T), 64);
    }
};

QD_INLINE float exp2_of(float x) {
    float out[LANES];
    store(out, exp2(set(x)));
    return out[0];
}

// The panel that a product should read: float8 widens once when many rows share it.
const uint8_t* readable(const KVLayout& kv, Panel& kind, const uint8_t* panel, int lanes, int reduce, int rows,
                        uint8_t* wide) {
    if (kv.counts() || (rows <= DIRECT_ROWS && !kv.exact)) return panel;
    widen_panel(kind, panel, lanes, reduce, kv.exact, wide);
    kind = kv.open_kind();
    return wide;
}

// Scores of the tile's rows with a block's first `keys` keys (all of their vectors), before masking.
void score_block(const KVLayout& kv, const Block& block, int keys, int rows, AttentionScratch& s) {
    const int dim = kv.head_dim, size = kv.block_size, vectors = (keys + LANES - 1) / LANES;
    Product product{kv.open_kind(), s.open_q, operand_stride(kv, s.width), block.data, size, 0, vectors, dim, rows,
                    s.scores, s.keys, s.starts, nullptr};
    if (block.sealed) {
        product.kind = kv.key_kind(), product.a = s.block_q;
        read_scales(kv, product.kind, block.data + kv.key_scales(), dim, s.scale, s.offset);
        fold_queries(kv, rows, s);
        if (kv.counts()) product.lda = s.width / 4, product.scale = s.q_scale, product.sums = s.q_sum;
        product.panel = readable(kv, product.kind, block.data + kv.key_codes(), size, dim, rows, s.key_panel);
    } else {
        std::memset(s.starts, 0, rows * sizeof(float));
    }
    panel_product(product);
}

// values = values · factor + weights · V, of the block's first `keys` tokens.
void gather_block(const KVLayout& kv, const Block& block, int keys, int rows, AttentionScratch& s) {
    const int dim = kv.head_dim, vectors = kv.value_group() / LANES;
    Product product{kv.open_kind(), s.weights, operand_stride(kv, s.keys), block.data + kv.open_panel_bytes(),
                    dim, 0, dim / LANES, keys, rows, s.values, dim, nullptr, s.factors};
    if (!block.sealed) return panel_product(product);
    product.kind = kv.value_kind();
    product.panel = readable(kv, product.kind, block.data + kv.value_codes(), dim, kv.block_size, rows, s.value_panel);
    if (kv.counts()) product.lda = s.keys / 4;
    for (int g = 0; g < kv.value_groups(); g++) {
        product.a = s.weights + (int64_t)g * s.rows * s.keys;
        product.scale = s.weight_scale + g * s.rows, product.sums = s.weight_sum + g * s.rows;
        product.first = g * vectors, product.last = (g + 1) * vectors;
        panel_product(product);
    }
}

// The same for an open block with values that aren't numbers: query by query, and what a query
// doesn't see is zero.
void gather_seen(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const Block& block, int first, int keys,
                 AttentionScratch& s) {
    const int dim = kv.head_dim, heads = rule.queries_per_head;
    const int64_t stride = operand_stride(kv, s.keys);
    for (int q = 0; q < tile.count; q++) {
        const int position = tile.position + q, row = q * heads;
        std::memcpy(s.value_panel, block.data + kv.open_panel_bytes(), kv.open_panel_bytes());
        for (int i = 0; i < kv.block_size; i++)
            if (first + i > position || (rule.window && first + i <= position - rule.window))
                clear_value(kv, s.value_panel, i);
        panel_product({kv.open_kind(), s.weights + row * stride, stride, s.value_panel, dim, 0, dim / LANES, keys, heads,
                       s.values + (int64_t)row * dim, dim, nullptr, s.factors + row});
    }
}

// Asks for the next block while this one is in use.
void fetch_block(const KVLayout& kv, const Reading& reading) {
    for (int i = 0; i < reading.pieces(kv); i++) fetch(reading.piece(kv, i).data, reading.piece(kv, i).bytes);
}

// `odd`: V of some token isn't a number, so that the tokens that a query doesn't see are left out by
// more than a weight of 0.
void attend_blocks(const KVLayout& kv, const HeadRule& rule, const Tile& tile, int split, const BlockSource& blocks,
                   bool odd, AttentionScratch& s) {
    const int rows = rows_of(rule, tile), dim = kv.head_dim, size = kv.block_size;
    const int last = last_block(kv, tile, split);
    for (int r = 0; r < rows; r++) s.most[r] = NOTHING, s.total[r] = 0;
    std::memset(s.offsets, 0, rows * kv.value_groups() * sizeof(float));
    std::memset(s.values, 0, (int64_t)rows * dim * sizeof(float));
    for (int b = first_block(kv, tile, split, rule.window); b <= last; b++) {
        const Block block = blocks.find(b, tile.block);
        if (b < last) fetch_block(kv, {blocks.find(b + 1, tile.block), tokens_read(kv, tile, b + 1)});
        const int keys = tokens_read(kv, tile, b);
        score_block(kv, block, keys, rows, s);
        weigh_block(kv, rule, tile, block, b * size, rows, s);
        if (odd && !block.sealed) gather_seen(kv, rule, tile, block, b * size, keys, s);
        else gather_block(kv, block, keys, rows, s);
    }
}

bool all_finite(const float* x, int64_t count) {
    F odd = zero();
    for (int64_t i = 0; i < count; i += LANES) odd = fma(load(x + i), zero(), odd);
    return sum(odd) == 0.0f;
}

}  // namespace

void AttentionScratch::reserve(const KVLayout& kv, int most_rows) {
    rows = most_rows;
    width = round_up(kv.head_dim, TILE);
    keys = round_up(kv.block_size, TILE);
    for (uint8_t* memory = nullptr;;) {
        Carver carve{memory};
        carve.take(q, rows * width);
        carve.take(open_q, rows * width);
        carve.take(block_q, rows * width);
        carve.take(scores, rows * keys);
        carve.take(weights, (int64_t)kv.value_groups() * rows * keys);
        carve.take(values, (int64_t)rows * kv.head_dim);
        carve.take(merged, (int64_t)rows * kv.head_dim);
        for (float** one : {&most, &total, &starts, &factors, &all_most, &all_total}) carve.take(*one, rows);
        carve.take(offsets, (int64_t)rows * kv.value_groups());
        carve.take(four, 4 * keys);
        carve.take(q_scale, rows), carve.take(q_sum, rows);
        carve.take(weight_scale, rows * kv.value_groups()), carve.take(weight_sum, rows * kv.value_groups());
        carve.take(scale, std::max(width, kv.value_groups() * keys));
        carve.take(offset, std::max(width, kv.value_groups() * keys));
        carve.take(key_panel, kv.elements() * 4);
        carve.take(value_panel, kv.elements() * 4);
        if (memory) return;
        memory_.assign(carve.used + 64, 0);  // zero: paddings are read, and must be numbers
        memory = memory_.data() + (64 - (uintptr_t)memory_.data() % 64) % 64;
    }
}

void merge(Partial& into, const Partial& part, int dim) {
    const float most = into.most > part.most ? into.most : part.most;
    const float kept = exp2_of(into.most - most), added = exp2_of(part.most - most);
    into.total = into.total * kept + part.total * added;
    into.most = most;
    for (int i = 0; i < dim; i += LANES)
        store(into.values + i, fma(load(part.values + i), set(added), mul(load(into.values + i), set(kept))));
}

void load_queries(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const float* q, int64_t stride,
                  const float* cos, const float* sin, int64_t angle_stride, AttentionScratch& s) {
    const int dim = kv.head_dim, heads = rule.queries_per_head;
    const F scale = set(rule.cap > 0 ? rule.scale : rule.scale * LOG2_E);
    for (int r = 0; r < rows_of(rule, tile); r++) {
        const int64_t token = tile.row + r / heads;
        float* out = s.q + r * s.width;
        std::memcpy(out, q + token * stride + (r % heads) * dim, dim * sizeof(float));
        if (rule.q_norm) head_norm(out, rule.q_norm, dim, rule.eps);
        rotate(out, cos + token * angle_stride, sin + token * angle_stride, dim);
        for (int i = 0; i < dim; i += LANES) store(out + i, mul(load(out + i), scale));
        uint32_t* operand = s.open_q + r * operand_stride(kv, s.width);
        for (int i = 0; i < dim; i += 2 * LANES)
            kv.exact ? put<true>(operand, i, load(out + i), second(out, i, dim))
                     : put<false>(operand, i, load(out + i), second(out, i, dim));
    }
}

void attend_split(const KVLayout& kv, const HeadRule& rule, const Tile& tile, int split, const BlockSource& blocks,
                  AttentionScratch& s) {
    const int rows = rows_of(rule, tile), dim = kv.head_dim, groups = kv.value_groups();
    attend_blocks(kv, rule, tile, split, blocks, false, s);
    // A later token of the tile, or a draft that was dropped, must not matter whatever it holds.
    if (!all_finite(s.values, (int64_t)rows * dim)) attend_blocks(kv, rule, tile, split, blocks, true, s);
    for (int r = 0; r < rows; r++)
        for (int i = 0; i < dim; i += LANES) {
            float* at = s.values + (int64_t)r * dim + i;
            store(at, add(load(at), set(s.offsets[r * groups + i / kv.value_group()])));
        }
}

}  // namespace qd
