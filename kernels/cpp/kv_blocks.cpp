#include "kv_blocks.h"

namespace qd {

namespace {

constexpr int MAX_VECTORS = 64;  // 1,024 tokens or channels
constexpr float HALF_MAX = 65504.0f, SMALLEST_SCALE = 0x1p-24f, HALF_STEP = 0x1p-11f, E4M3_MAX = 448.0f;

QD_INLINE uint16_t to_half(float x) {
    uint16_t halves[LANES];
    store_half(halves, set(x));
    return halves[0];
}

QD_INLINE float from_half(uint16_t x) {
    uint16_t halves[LANES] = {x};
    float out[LANES];
    store(out, load_half(halves));
    return out[0];
}

// Step `r`, vector `v` of an open panel as floats.
QD_INLINE F open_row(Panel kind, const uint8_t* panel, int vectors, int r, int v) {
    if (kind == Panel::FLOAT) return load((const float*)panel + ((int64_t)r * vectors + v) * LANES);
    const I pairs = load_i(panel + ((int64_t)(r / 2) * vectors + v) * 64);
    return r % 2 ? odd_of(pairs) : even_of(pairs);
}

// x ≈ code · scale + minimum, both float16.
struct Scaling {
    uint16_t scale, minimum;
};

struct Range {
    float low, high;
    bool held;  // every value fits float16
};

Range range_of(const F* x, int count) {
    F low = x[0], high = x[0], odd = mul(x[0], zero());
    for (int i = 1; i < count; i++) {
        low = min(low, x[i]), high = max(high, x[i]);
        odd = fma(x[i], zero(), odd);
    }
    Range range{smallest(low), largest(high), false};
    range.held = sum(odd) == 0.0f && std::fabs(range.low) < HALF_MAX && std::fabs(range.high) < HALF_MAX;
    return range;
}

// The minimum is rounded down and the scale up, so that no value of the group is clipped.
Scaling affine_group(const Range& range, int levels) {
    Scaling group;
    group.minimum = to_half(range.low - std::fabs(range.low) * HALF_STEP);
    float scale = (range.high - from_half(group.minimum)) / (float)levels * (1.0f + HALF_STEP) + SMALLEST_SCALE / 2;
    if (!(scale > SMALLEST_SCALE)) scale = SMALLEST_SCALE;
    group.scale = to_half(range.held ? scale : NAN);
    return group;
}

Scaling float_group(const Range& range) {
    const float most = std::fabs(range.low) > std::fabs(range.high) ? std::fabs(range.low) : std::fabs(range.high);
    float scale = most / E4M3_MAX * (1.0f + HALF_STEP) + SMALLEST_SCALE / 2;
    if (!(scale > SMALLEST_SCALE)) scale = SMALLEST_SCALE;
    return {to_half(range.held ? scale : NAN), 0};
}

// Nearest float8 (e4m3fn) of |x| ≤ 448, ties to even, as bits.
QD_INLINE I e4m3_bits(F x) {
    const I magnitude = and_i(bits(x), set_i(0x7fffffff));
    const I sign = and_i(shift_right<24>(bits(x)), set_i(0x80));
    const I odd = and_i(shift_right<20>(magnitude), set_i(1));
    const I rounded = add_i(add_i(magnitude, set_i(0x7ffff)), odd);
    const F normal = to_float(sub_i(shift_right<20>(rounded), set_i(120 << 3)));
    const F subnormal = round(mul(from_bits(magnitude), set(512.0f)));
    const F code = select_less(from_bits(magnitude), set(0x1p-6f), subnormal, normal);
    return or_i(to_int(min(set(126.0f), max(zero(), code))), sign);
}

QD_INLINE I codes_of(Panel kind, F x, F scale, F minimum) {
    if (kind == Panel::E4M3) return e4m3_bits(div(x, scale));
    const I top = set_i(kind == Panel::N4 ? 15 : 255);
    return min_i(top, max_i(zero_i(), to_int(div(sub(x, minimum), scale))));
}

// Eight rows of codes [vectors] into a panel.
void put_codes(Panel kind, const I (*codes)[MAX_VECTORS], int r, int vectors, uint8_t* panel) {
    const auto words = [&](int first, int v) {  // of four rows' bytes
        I out = zero_i();
        for (int i = 0; i < 4; i++) {
            I code = codes[first + i][v];
            if (kind == Panel::S8) code = and_i(sub_i(code, set_i(128)), set_i(255));
            out = or_i(out, shift_left_by(code, i * 8));
        }
        return out;
    };
    for (int v = 0; v < vectors; v++) {
        if (kind == Panel::N4) {
            store_i(panel + ((int64_t)(r / 8) * vectors + v) * 64, or_i(words(0, v), shift_left<4>(words(4, v))));
        } else if (is_codes(kind)) {
            for (int i = 0; i < 8; i += 4) store_i(panel + ((int64_t)((r + i) / 4) * vectors + v) * 64, words(i, v));
        } else {
            for (int i = 0; i < 8; i++)
                store_u8(panel + ((int64_t)((r + i) / 2) * vectors + v) * 32 + i % 2 * 16, codes[i][v]);
        }
    }
}

// Quantizes the rows of an open panel, each in groups of `group` vectors. groups of row r go to
// scales[g · 2 · rows + r] (and the minimum `rows` further on).
void seal_panel(const KVLayout& kv, Panel kind, const uint8_t* open, int rows, int vectors, int group, uint8_t* panel,
                uint16_t* scales) {
    const int levels = kind == Panel::N4 ? 15 : 255, step = kv.halves() * rows;
    I codes[8][MAX_VECTORS];
    for (int r = 0; r < rows; r += 8) {
        for (int i = 0; i < 8; i++) {
            for (int first = 0; first < vectors; first += group) {
                F x[MAX_VECTORS];
                for (int v = 0; v < group; v++) x[v] = open_row(kv.open_kind(), open, vectors, r + i, first + v);
                const Range range = range_of(x, group);
                const Scaling made = kv.has_minimum() ? affine_group(range, levels) : float_group(range);
                uint16_t* at = scales + first / group * step + r + i;
                at[0] = made.scale;
                if (kv.has_minimum()) at[rows] = made.minimum;
                const F scale = set(from_half(made.scale)), minimum = set(from_half(made.minimum));
                for (int v = 0; v < group; v++) codes[i][first + v] = codes_of(kind, x[v], scale, minimum);
            }
        }
        put_codes(kind, codes, r, vectors, panel);
    }
}

}  // namespace

void store_token(const KVLayout& kv, uint8_t* open, int offset, const float* k, const float* v) {
    uint8_t* values = open + kv.open_panel_bytes();
    const int dim = kv.head_dim, block = kv.block_size;
    if (kv.exact) {
        float* keys = (float*)open;
        for (int c = 0; c < dim; c++) keys[(int64_t)c * block + offset] = k[c];
        std::memcpy((float*)values + (int64_t)offset * dim, v, dim * sizeof(float));
        return;
    }
    alignas(64) uint32_t pairs[2][LANES];
    uint32_t* keys = (uint32_t*)open + offset;
    uint16_t* out = (uint16_t*)values + (int64_t)(offset / 2) * dim * 2 + offset % 2;
    for (int c = 0; c < dim; c += LANES) {
        store_pairs(pairs[0], load(k + c), zero());
        store_pairs(pairs[1], load(v + c), zero());
        for (int p = 0; p < LANES / 2; p++) keys[(int64_t)(c / 2 + p) * block] = pairs[0][p];
        const uint16_t* halves = (const uint16_t*)pairs[1];
        for (int i = 0; i < LANES; i++) out[(c + i) * 2] = halves[i];
    }
}

void clear_value(const KVLayout& kv, uint8_t* values, int offset) {
    const int dim = kv.head_dim;
    if (kv.exact) {
        std::memset((float*)values + (int64_t)offset * dim, 0, dim * sizeof(float));
        return;
    }
    uint16_t* halves = (uint16_t*)values + (int64_t)(offset / 2) * dim * 2 + offset % 2;
    for (int i = 0; i < dim; i++) halves[i * 2] = 0;
}

void seal_block(const KVLayout& kv, const uint8_t* open, uint8_t* sealed) {
    const int token_vectors = kv.block_size / LANES, channel_vectors = kv.head_dim / LANES;
    seal_panel(kv, kv.key_kind(), open, kv.head_dim, token_vectors, token_vectors, sealed + kv.key_codes(),
               (uint16_t*)(sealed + kv.key_scales()));
    seal_panel(kv, kv.value_kind(), open + kv.open_panel_bytes(), kv.block_size, channel_vectors,
               kv.value_group() / LANES, sealed + kv.value_codes(), (uint16_t*)(sealed + kv.value_scales()));
}

void read_scales(const KVLayout& kv, Panel kind, const uint8_t* scales, int count, float* scale, float* offset) {
    const uint16_t* halves = (const uint16_t*)scales;
    const F middle = set((float)middle_code(kind));
    for (int i = 0; i < count; i += LANES) {
        const F s = load_half(halves + i);
        store(scale + i, s);
        store(offset + i, kv.has_minimum() ? fma(s, middle, load_half(halves + count + i)) : zero());
    }
}

}  // namespace qd
