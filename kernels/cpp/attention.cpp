#include "attention.h"

#include <algorithm>
#include <cmath>
#include <type_traits>

namespace qd {

namespace {

constexpr float LOG2_E = 1.44269504f;

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

QD_INLINE int rows_of(const HeadRule& rule, const Tile& tile) { return tile.count * rule.queries_per_head; }

QD_INLINE int position_of(const HeadRule& rule, const Tile& tile, int row) {
    return tile.position + row / rule.queries_per_head;
}

// Two vectors of an operand: bfloat16 pairs, or floats in exact arithmetic.
template <bool EXACT> QD_INLINE void put(uint32_t* row, int i, F first, F second) {
    if (!EXACT) return store_pairs(row + i / 2, first, second);
    store((float*)row + i, first), store((float*)row + i + LANES, second);
}

// Sizes that are usual are known to the compiler, which unrolls their loops; 0 stands for others.
template <class Body> QD_INLINE void with_size(int size, Body body) {
    if (size == 64) body(std::integral_constant<int, 64>());
    else if (size == 128) body(std::integral_constant<int, 128>());
    else body(std::integral_constant<int, 0>());
}

// Entries of 4 bytes from one row of an operand to the next.
QD_INLINE int64_t operand_stride(const KVLayout& kv, int64_t width) { return kv.exact ? width : width / 2; }

// The second of two vectors; there is none when n is an odd number of vectors.
QD_INLINE F second(const float* x, int i, int n) { return i + LANES < n ? load(x + i + LANES) : zero(); }

// The panel that a product should read: float8 widens once when many rows share it.
const uint8_t* readable(const KVLayout& kv, Panel& kind, const uint8_t* panel, int lanes, int reduce, int rows,
                        uint8_t* wide) {
    if (kv.counts() || (rows <= DIRECT_ROWS && !kv.exact)) return panel;
    widen_panel(kind, panel, lanes, reduce, kv.exact, wide);
    kind = kv.open_kind();
    return wide;
}

// q · (code · scale + offset): the scales go into q, the offsets into one number per row.
template <bool EXACT, int DIM> void fold_scales(const KVLayout& kv, int rows, AttentionScratch& s) {
    const int dim = DIM ? DIM : kv.head_dim;
    const int64_t stride = operand_stride(kv, s.width);
    for (int r = 0; r < rows; r++) {
        const float* q = s.q + r * s.width;
        F offset = zero();
        for (int i = 0; i < dim; i += 2 * LANES) {
            const F a = load(q + i), b = second(q, i, dim);
            offset = fma(a, load(s.offset + i), offset);
            offset = fma(b, second(s.offset, i, dim), offset);
            put<EXACT>(s.block_q + r * stride, i, mul(a, load(s.scale + i)), mul(b, second(s.scale, i, dim)));
        }
        s.starts[r] = sum(offset);
    }
}

// Four rows' dynamic scales and their inverses, from the bits of their largest magnitudes; NaN and
// infinity make the scale NaN.
QD_INLINE void scales_of(const I (&top)[4], float levels, float* inverse, float* scale) {
    alignas(64) int32_t most[LANES] = {};
    largest4_i(top, most);
    const F m = from_bits(load_i(most));
    store(inverse, select_less(zero(), m, div(set(levels), m), zero()));
    store(scale, fma(m, zero(), mul(m, set(1.0f / levels))));
}

// The same for four rows as 8-bit integers, dynamically scaled per row. Rows after `last` are it again.
template <int DIM> void fold_into_bytes(const KVLayout& kv, int first, int last, AttentionScratch& s) {
    const int dim = DIM ? DIM : kv.head_dim;
    F offset[4];
    I top[4], sums[4];
    alignas(64) float inverse[LANES], scale[LANES], starts[4];
    int32_t total[4];
    for (int r = 0; r < 4; r++) {
        const float* q = s.q + std::min(first + r, last) * s.width;
        offset[r] = zero(), top[r] = zero_i();
        for (int i = 0; i < dim; i += LANES) {
            offset[r] = fma(load(q + i), load(s.offset + i), offset[r]);
            top[r] = max_i(top[r], and_i(bits(mul(load(q + i), load(s.scale + i))), set_i(0x7fffffff)));
        }
    }
    sum4(offset, starts);
    scales_of(top, 127.0f, inverse, scale);
    for (int r = 0; r < 4; r++) {
        const int row = std::min(first + r, last);
        const float* q = s.q + row * s.width;
        int8_t* out = (int8_t*)(s.block_q + row * s.width / 4);
        sums[r] = zero_i();
        for (int i = 0; i < dim; i += LANES) {
            const I code = to_int(mul(mul(load(q + i), load(s.scale + i)), set(inverse[r])));
            sums[r] = add_i(sums[r], code);
            store_s8(out + i, code);
        }
    }
    sum4_i(sums, total);
    for (int r = 0; r < 4 && first + r <= last; r++)
        s.starts[first + r] = starts[r], s.q_scale[first + r] = scale[r], s.q_sum[first + r] = total[r];
}

// Scores of the tile's rows with a block's first `keys` keys (all of their vectors), before masking.
void score_block(const KVLayout& kv, const Block& block, int keys, int rows, AttentionScratch& s) {
    const int dim = kv.head_dim, size = kv.block_size, vectors = (keys + LANES - 1) / LANES;
    Product product{kv.open_kind(), s.open_q, operand_stride(kv, s.width), block.data, size, 0, vectors, dim, rows,
                    s.scores, s.keys, s.starts, nullptr};
    if (block.sealed) {
        product.kind = kv.key_kind(), product.a = s.block_q;
        read_scales(kv, product.kind, block.data + kv.key_scales(), dim, s.scale, s.offset);
        with_size(dim, [&](auto known) {
            if (kv.counts()) {
                for (int r = 0; r < rows; r += 4) fold_into_bytes<known>(kv, r, rows - 1, s);
                return;
            }
            kv.exact ? fold_scales<true, known>(kv, rows, s) : fold_scales<false, known>(kv, rows, s);
        });
        if (kv.counts()) product.lda = s.width / 4, product.scale = s.q_scale, product.sums = s.q_sum;
        product.panel = readable(kv, product.kind, block.data, size, dim, rows, s.key_panel);
    } else {
        std::memset(s.starts, 0, rows * sizeof(float));
    }
    panel_product(product);
}

// Caps a row's scores.
void cap_row(const KVLayout& kv, const HeadRule& rule, float* scores) {
    for (int i = 0; i < kv.block_size; i += LANES) {
        const F capped = mul(tanh(div(load(scores + i), set(rule.cap))), set(rule.cap * LOG2_E));
        store(scores + i, capped);
    }
}

// Masks the keys at first … first + block_size − 1 that a query must not see.
void mask_row(const KVLayout& kv, const HeadRule& rule, int first, int position, float* scores) {
    const int after = position + 1 - first;                                  // first key that is too new
    const int before = rule.window ? position - rule.window + 1 - first : 0;  // and how many are too old
    for (int i = after > 0 ? after : 0; i < kv.block_size; i++) scores[i] = -INFINITY;
    for (int i = 0; i < before && i < kv.block_size; i++) scores[i] = -INFINITY;
}

// How weights meet V: as floats, as bfloat16 pairs, or as bytes.
enum class Weights { FLOATS, PAIRS, BYTES };

// The weights of four rows and a block's keys, of one group of V's channels, as operands for V, whose
// scales they take in; what V's offsets add. weights: [4][keys]. WINDOW: some may be masked, and the
// scale of a masked token may be NaN: 0 · NaN isn't 0.
template <Weights FORM, bool SEALED, bool WINDOW, int SIZE>
void put_weights(const KVLayout& kv, int first, int last, int group, const float* weights, AttentionScratch& s) {
    const int size = SIZE ? SIZE : kv.block_size;
    const int64_t stride = FORM == Weights::FLOATS ? s.keys : FORM == Weights::PAIRS ? s.keys / 2 : s.keys / 4;
    uint32_t* operand = s.weights + (int64_t)group * s.rows * s.keys;
    const float *scale = s.scale + group * s.keys, *offset = s.offset + group * s.keys;
    const auto seen = [](F weight, F x) { return WINDOW ? select_less(zero(), weight, x, zero()) : x; };
    const auto scaled = [&](const float* w, int i) { return mul(load(w + i), seen(load(w + i), load(scale + i))); };
    F offsets[4];
    I top[4], sums[4];
    for (int r = 0; r < 4; r++) {
        const float* w = weights + r * s.keys;
        uint32_t* out = operand + std::min(first + r, last) * stride;
        offsets[r] = zero(), top[r] = zero_i();
        if (SEALED)
            for (int i = 0; i < size; i += LANES) {
                offsets[r] = fma(load(w + i), seen(load(w + i), load(offset + i)), offsets[r]);
                if (FORM == Weights::BYTES) top[r] = max_i(top[r], bits(scaled(w, i)));
            }
        if (FORM == Weights::BYTES) continue;
        for (int i = 0; i < size; i += 2 * LANES) {
            const bool both = i + LANES < size;
            put<FORM == Weights::FLOATS>(out, i, SEALED ? scaled(w, i) : load(w + i),
                                         !both ? zero() : SEALED ? scaled(w, i + LANES) : load(w + i + LANES));
        }
    }
    float added[4] = {};
    if (SEALED) sum4(offsets, added);
    for (int r = first; r <= last && r < first + 4; r++) {
        float& kept = s.offsets[r * kv.value_groups() + group];
        kept = SEALED ? kept * s.factors[r] + added[r - first] : kept * s.factors[r];
    }
    if (FORM != Weights::BYTES) return;
    alignas(64) float inverse[LANES], scales[LANES];
    int32_t total[4] = {};
    scales_of(top, 255.0f, inverse, scales);
    const bool with_sum = kv.value_kind() == Panel::N4;
    for (int r = 0; r < 4; r++) {
        const float* w = weights + r * s.keys;
        uint8_t* out = (uint8_t*)(operand + std::min(first + r, last) * stride);
        sums[r] = zero_i();
        for (int i = 0; i < size; i += LANES) {
            const I code = to_int(mul(scaled(w, i), set(inverse[r])));
            store_u8(out + i, code);
            if (with_sum) sums[r] = add_i(sums[r], code);
        }
    }
    if (with_sum) sum4_i(sums, total);
    for (int r = 0; r < 4 && first + r <= last; r++) {
        s.weight_scale[group * s.rows + first + r] = scales[r];
        s.weight_sum[group * s.rows + first + r] = total[r];
    }
}

// Running maxima and sums of rows first … first + 3 (those after `last` are it again), and their
// weights of the block's keys. Four at a time, since most of the work for one is to add up lanes.
template <Weights FORM, bool SEALED, bool WINDOW, int SIZE>
void weigh_four(const KVLayout& kv, int first, int last, AttentionScratch& s) {
    const int size = SIZE ? SIZE : kv.block_size;
    alignas(64) float before[LANES] = {}, top[LANES] = {}, factor[LANES], sums[4];
    F most[4], total[4];
    for (int r = 0; r < 4; r++) {
        const int row = std::min(first + r, last);
        const float* scores = s.scores + row * s.keys;
        before[r] = s.most[row];
        most[r] = set(before[r]);
        for (int i = 0; i < size; i += LANES) most[r] = max(load(scores + i), most[r]);
    }
    largest4(most, top);
    store(factor, exp2(sub(load(before), load(top))));
    for (int r = 0; r < 4; r++) {
        const float* scores = s.scores + std::min(first + r, last) * s.keys;
        total[r] = zero();
        for (int i = 0; i < size; i += LANES) {
            const F weight = exp2_or_zero(sub(load(scores + i), set(top[r])));
            store(s.four + r * s.keys + i, weight);
            total[r] = add(total[r], weight);
        }
    }
    sum4(total, sums);
    for (int r = 0; r < 4 && first + r <= last; r++) {
        s.most[first + r] = top[r], s.factors[first + r] = factor[r];
        s.total[first + r] = s.total[first + r] * factor[r] + sums[r];
    }
    const int groups = SEALED ? kv.value_groups() : 1;
    for (int g = 0; g < groups; g++) put_weights<FORM, SEALED, WINDOW, SIZE>(kv, first, last, g, s.four, s);
    for (int g = groups; g < kv.value_groups(); g++)
        for (int r = 0; r < 4 && first + r <= last; r++) s.offsets[(first + r) * kv.value_groups() + g] *= factor[r];
}

template <Weights FORM, bool SEALED, int SIZE>
void weigh_rows(const KVLayout& kv, const HeadRule& rule, const Tile& tile, int first, int rows, AttentionScratch& s) {
    for (int r = 0; r < rows; r++) {
        float* scores = s.scores + r * s.keys;
        if (rule.cap > 0) cap_row(kv, rule, scores);
        mask_row(kv, rule, first, position_of(rule, tile, r), scores);
    }
    for (int r = 0; r < rows; r += 4)
        rule.window ? weigh_four<FORM, SEALED, SEALED, SIZE>(kv, r, rows - 1, s)
                    : weigh_four<FORM, SEALED, false, SIZE>(kv, r, rows - 1, s);
}

void weigh_block(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const Block& block, int first, int rows,
                 AttentionScratch& s) {
    const int64_t step = (int64_t)kv.block_size * 2 * kv.halves();
    for (int g = 0; block.sealed && g < kv.value_groups(); g++)
        read_scales(kv, kv.value_kind(), block.data + kv.value_scales() + g * step, kv.block_size,
                    s.scale + g * s.keys, s.offset + g * s.keys);
    with_size(kv.block_size, [&](auto known) {
        if (kv.exact)
            block.sealed ? weigh_rows<Weights::FLOATS, true, known>(kv, rule, tile, first, rows, s)
                         : weigh_rows<Weights::FLOATS, false, known>(kv, rule, tile, first, rows, s);
        else if (!block.sealed)
            weigh_rows<Weights::PAIRS, false, known>(kv, rule, tile, first, rows, s);
        else
            kv.counts() ? weigh_rows<Weights::BYTES, true, known>(kv, rule, tile, first, rows, s)
                        : weigh_rows<Weights::PAIRS, true, known>(kv, rule, tile, first, rows, s);
    });
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
        if ((int64_t)memory_.size() >= carve.used + 64) std::memset(memory_.data(), 0, memory_.size());
        else memory_.assign(carve.used + 64, 0);  // zero: paddings are read, and must be numbers
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
