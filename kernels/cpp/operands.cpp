#include "operands.h"

#include <algorithm>
#include <cmath>

namespace qd {

namespace {

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

}  // namespace

void fold_queries(const KVLayout& kv, int rows, AttentionScratch& s) {
    with_size(kv.head_dim, [&](auto known) {
        if (kv.counts()) {
            for (int r = 0; r < rows; r += 4) fold_into_bytes<known>(kv, r, rows - 1, s);
            return;
        }
        kv.exact ? fold_scales<true, known>(kv, rows, s) : fold_scales<false, known>(kv, rows, s);
    });
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

}  // namespace qd
