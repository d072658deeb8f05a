#include "matrix.h"

namespace qd {

namespace {

constexpr int ZEROS = 2 * TILE;  // bytes of a group's scales, before its zero points

// Bytes of a group's codes, and of the group with its scales and zero points.
QD_INLINE int64_t code_bytes(const qd_matrix& m, int bits) { return (int64_t)m.group * TILE * bits / 8; }
QD_INLINE int64_t group_bytes(const qd_matrix& m, int bits) {
    return code_bytes(m, bits) + ZEROS + (m.symmetric ? 0 : TILE);
}

// FP8: where the codes of the group that begins at column `first` end, padding included.
QD_INLINE int64_t fp8_group_end(const qd_matrix& m, int64_t first) {
    const int64_t end = first + m.group < m.cols ? first + m.group : m.cols;
    return round_up(end, 4);
}

QD_INLINE int32_t four(const int8_t* p) {
    int32_t value;
    std::memcpy(&value, p, 4);
    return value;
}

// Sums of rows by the two halves of a tile.
template <int ROWS> QD_INLINE void clear(F (&sums)[ROWS][2]) {
    for (int r = 0; r < ROWS; r++) sums[r][0] = sums[r][1] = zero();
}
template <int ROWS> QD_INLINE void store_sums(const F (&sums)[ROWS][2], float* result) {
    for (int r = 0; r < ROWS; r++)
        for (int h = 0; h < 2; h++) store(result + r * TILE + h * LANES, sums[r][h]);
}

// Adds a group's integer sums, scaled, to the rows' results. p: its scales and zero points.
template <int ROWS, bool SYMMETRIC>
QD_INLINE void add_group(const I (&acc)[ROWS][2], const uint8_t* p, const float* scale, const int32_t* total,
                         int groups, bool first, float* result) {
    F weight_scale[2], zero_point[2];
    for (int h = 0; h < 2; h++) {
        weight_scale[h] = load_half((const uint16_t*)p + h * LANES);
        zero_point[h] = SYMMETRIC ? zero() : to_float(load_u8(p + ZEROS + h * LANES));
    }
    QD_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const F sums = set((float)total[(int64_t)r * groups]), row_scale = set(scale[(int64_t)r * groups]);
        QD_UNROLL
        for (int h = 0; h < 2; h++) {
            float* out = result + r * TILE + h * LANES;
            F value = to_float(acc[r][h]);
            if (!SYMMETRIC) value = fnma(zero_point[h], sums, value);
            store(out, fma(mul(value, weight_scale[h]), row_scale, first ? zero() : load(out)));
        }
    }
}

// Eight columns of W4, or two times four of W8: four vectors of unsigned bytes.
template <int BITS> QD_INLINE void codes_of(const uint8_t* p, I (&low)[2], I (&high)[2]) {
    for (int h = 0; h < 2; h++) {
        if (BITS == 4) {
            const I v = load_i(p + h * 64);
            low[h] = low_nibbles(v), high[h] = high_nibbles(v);
        } else {
            low[h] = load_i(p + h * 64), high[h] = load_i(p + 128 + h * 64);
        }
    }
}

template <int ROWS, int BITS, bool SYMMETRIC>
void int8_tile(const qd_matrix&, const uint8_t* tile, const Activations& a, int64_t row, float* result) {
    constexpr int STEP = BITS == 4 ? 128 : 256, MID = BITS == 4 ? 8 : 128;
    constexpr int CHAINS = ROWS <= 2 ? 2 : 1;  // sums of integers are exact in any order
    constexpr int META = ZEROS + (SYMMETRIC ? 0 : TILE);
    const float* scale = a.scales + row * a.groups;
    const int32_t* total = a.sums + row * a.groups;
    const int8_t* x[ROWS];
    for (int r = 0; r < ROWS; r++) x[r] = a.codes + (row + r) * a.width;
    const uint8_t* p = tile;
    for (int g = 0; g < a.groups; g++) {
        I acc[CHAINS][ROWS][2];
        QD_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const I start = SYMMETRIC ? set_i(int32_t(-MID * (uint32_t)total[(int64_t)r * a.groups + g])) : zero_i();
            acc[0][r][0] = acc[0][r][1] = start;
            if (CHAINS == 2) acc[CHAINS - 1][r][0] = acc[CHAINS - 1][r][1] = zero_i();
        }
        for (int k = g * a.group; k < (g + 1) * a.group; k += 8, p += STEP) {
            I low[2], high[2];
            codes_of<BITS>(p, low, high);
            QD_UNROLL
            for (int r = 0; r < ROWS; r++) {
                const I x0 = set_i(four(x[r] + k)), x1 = set_i(four(x[r] + k + 4));
                QD_UNROLL
                for (int h = 0; h < 2; h++) {
                    I& second = acc[CHAINS - 1][r][h];
                    acc[0][r][h] = BITS == 4 ? dot_u4(acc[0][r][h], low[h], x0) : dot_u8(acc[0][r][h], low[h], x0);
                    second = BITS == 4 ? dot_u4(second, high[h], x1) : dot_u8(second, high[h], x1);
                }
            }
        }
        if (CHAINS == 2)
            for (int r = 0; r < ROWS; r++)
                for (int h = 0; h < 2; h++) acc[0][r][h] = add_i(acc[0][r][h], acc[CHAINS - 1][r][h]);
        add_group<ROWS, SYMMETRIC>(acc[0], p, scale + g, total + g, a.groups, g == 0, result);
        p += META;
    }
}

// Codes less their zero points, as floats; scale · Σ x · (code − zero) per group.
template <int ROWS, int BITS>
void exact_tile(const qd_matrix& m, const uint8_t* tile, const Activations& a, int64_t row, float* result) {
    constexpr int QUAD = 128;  // bytes of 4 columns of bytes; W4 holds 8 columns in them
    const int groups = m.cols / m.group;
    F out[ROWS][2];
    clear(out);
    for (int g = 0; g < groups; g++) {
        const uint8_t* codes = tile + g * group_bytes(m, BITS);
        const uint8_t* scales = codes + code_bytes(m, BITS);
        const float* x = a.floats + row * a.width + (int64_t)g * m.group;
        F acc[ROWS][2];
        clear(acc);
        for (int h = 0; h < 2; h++) {
            const I zero_point = m.symmetric ? set_i(BITS == 4 ? 8 : 128) : load_u8(scales + ZEROS + h * LANES);
            for (int k = 0; k < m.group; k++) {
                const int quad = BITS == 4 ? k / 8 : k / 4, byte = k % 4, high = BITS == 4 ? k / 4 % 2 : 0;
                I v = load_i(codes + (int64_t)quad * QUAD + h * 64);
                if (high) v = shift_right<4>(v);
                v = byte == 0 ? v : byte == 1 ? shift_right<8>(v) : byte == 2 ? shift_right<16>(v) : shift_right<24>(v);
                const F weight = to_float(sub_i(and_i(v, set_i(BITS == 4 ? 15 : 255)), zero_point));
                for (int r = 0; r < ROWS; r++) acc[r][h] = fma(weight, set(x[r * a.width + k]), acc[r][h]);
            }
        }
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < 2; h++)
                out[r][h] = fma(acc[r][h], load_half((const uint16_t*)scales + h * LANES), out[r][h]);
    }
    store_sums(out, result);
}

template <int ROWS>
void pairs_tile(const qd_matrix& m, const uint8_t* tile, const Activations& a, int64_t row, float* result) {
    const int64_t pairs = (m.cols + 1) / 2;
    F out[ROWS][2];
    clear(out);
    for (int64_t k = 0; k < pairs; k++, tile += 128) {
        const I low = load_i(tile), high = load_i(tile + 64);
        for (int r = 0; r < ROWS; r++) {
            const I x = set_i((int32_t)a.pairs[(row + r) * a.width / 2 + k]);
            out[r][0] = pair_dot(out[r][0], x, low), out[r][1] = pair_dot(out[r][1], x, high);
        }
    }
    store_sums(out, result);
}

// Float8 weights: Σ x · value per group, in bfloat16 pairs or (FLOAT) in float32, times the scale.
template <int ROWS, bool FLOAT>
void fp8_tile(const qd_matrix& m, const uint8_t* tile, const Activations& a, int64_t row, float* result) {
    const int64_t width = FLOAT ? a.width : a.width / 2;
    const uint32_t* x = (FLOAT ? (const uint32_t*)a.floats : a.pairs) + row * width;
    F out[ROWS][2];
    clear(out);
    for (int64_t first = 0; first < m.cols; first += m.group) {
        F acc[ROWS][2];
        clear(acc);
        for (int64_t k = first, last = fp8_group_end(m, first); k < last; k += 4, tile += 128)
            for (int h = 0; h < 2; h++) {
                I pairs[2];
                widen_fp8(load_i(tile + h * 64), pairs);
                for (int p = 0; p < 2; p++)
                    for (int r = 0; r < ROWS; r++) {
                        const uint32_t* at = x + r * width + (FLOAT ? k + 2 * p : k / 2 + p);
                        if (!FLOAT) {
                            acc[r][h] = pair_dot(acc[r][h], set_i((int32_t)at[0]), pairs[p]);
                            continue;
                        }
                        acc[r][h] = fma(even_of(pairs[p]), from_bits(set_i((int32_t)at[0])), acc[r][h]);
                        acc[r][h] = fma(odd_of(pairs[p]), from_bits(set_i((int32_t)at[1])), acc[r][h]);
                    }
            }
        for (int r = 0; r < ROWS; r++)
            for (int h = 0; h < 2; h++) out[r][h] = fma(acc[r][h], load((const float*)tile + h * LANES), out[r][h]);
        tile += 128;
    }
    store_sums(out, result);
}

// Dense weights in float32 arithmetic; BF16 widens them on the way.
template <int ROWS, bool BF16>
void float_tile(const qd_matrix& m, const uint8_t* tile, const Activations& a, int64_t row, float* result) {
    F out[ROWS][2];
    clear(out);
    for (int64_t k = 0; k < m.cols; k++) {
        for (int h = 0; h < 2; h++) {
            F weight;
            if (BF16) {
                const I v = load_i(tile + k / 2 * 128 + h * 64);
                weight = k % 2 ? odd_of(v) : even_of(v);
            } else {
                weight = load((const float*)(tile + k * 128 + h * 64));
            }
            for (int r = 0; r < ROWS; r++) out[r][h] = fma(weight, set(a.floats[(row + r) * a.width + k]), out[r][h]);
        }
    }
    store_sums(out, result);
}

// One kernel per number of rows. MAX_ROWS is 6, or fewer where there are fewer registers.
#define QD_ROWS(NAME, ...)                                                                      \
    {                                                                                           \
        NAME<1 __VA_ARGS__>, NAME<2 __VA_ARGS__>, NAME<(MAX_ROWS > 2 ? 3 : 1) __VA_ARGS__>,     \
            NAME<(MAX_ROWS > 3 ? 4 : 1) __VA_ARGS__>, NAME<(MAX_ROWS > 4 ? 5 : 1) __VA_ARGS__>, \
            NAME<(MAX_ROWS > 5 ? 6 : 1) __VA_ARGS__>                                            \
    }
#define QD_COMMA ,
const TileKernel INT8_KERNELS[2][2][6] = {
    {QD_ROWS(int8_tile, QD_COMMA 4, false), QD_ROWS(int8_tile, QD_COMMA 4, true)},
    {QD_ROWS(int8_tile, QD_COMMA 8, false), QD_ROWS(int8_tile, QD_COMMA 8, true)},
};
const TileKernel EXACT_KERNELS[2][6] = {QD_ROWS(exact_tile, QD_COMMA 4), QD_ROWS(exact_tile, QD_COMMA 8)};
const TileKernel PAIRS_KERNELS[6] = QD_ROWS(pairs_tile, );
const TileKernel FP8_KERNELS[2][6] = {QD_ROWS(fp8_tile, QD_COMMA false), QD_ROWS(fp8_tile, QD_COMMA true)};
const TileKernel FLOAT_KERNELS[2][6] = {QD_ROWS(float_tile, QD_COMMA true), QD_ROWS(float_tile, QD_COMMA false)};

}  // namespace

const TileKernel* tile_kernels(const qd_matrix& m, int act_mode) {
    if (m.kind == QD_FP8) return FP8_KERNELS[act_mode == QD_ACT_FP32];
    const bool dense = m.kind == QD_BF16 || m.kind == QD_F32;
    switch (form_of(m, act_mode)) {
        case Form::INT8: return INT8_KERNELS[m.kind == QD_W8][m.symmetric != 0];
        case Form::PAIRS: return PAIRS_KERNELS;
        default: return dense ? FLOAT_KERNELS[m.kind == QD_F32] : EXACT_KERNELS[m.kind == QD_W8];
    }
}

// p: the row's bytes of the first four columns.
static void dequantize_fp8_row(const qd_matrix& m, const uint8_t* p, float* out) {
    for (int64_t first = 0; first < m.cols; first += m.group) {
        const int64_t last = fp8_group_end(m, first);
        float scale, values[LANES];
        std::memcpy(&scale, p + (last - first) / 4 * 128, 4);
        for (int64_t k = first; k < last; k += 4, p += 128) {
            const int32_t four[4] = {p[0], p[2], p[1], p[3]};
            for (int64_t i = 0; i < 4 && k + i < m.cols; i++) {
                store(values, e4m3_value(set_i(four[i])));
                out[k + i] = values[0] * scale;
            }
        }
        p += 128;
    }
}

void dequantize_row(const qd_matrix& m, int64_t row, float* out) {
    const uint8_t* tile = m.tiles + row / TILE * m.tile_bytes;
    const int64_t half = row % TILE / LANES, lane = row % LANES;
    for (int64_t k = m.cols; k < round_up(m.cols, TILE); k++) out[k] = 0;
    if (m.kind == QD_F32 || m.kind == QD_BF16) {
        for (int64_t k = 0; k < m.cols; k++) {
            uint32_t word;
            const int64_t unit = m.kind == QD_F32 ? k : k / 2;
            std::memcpy(&word, tile + unit * 128 + half * 64 + lane * 4, 4);
            if (m.kind == QD_BF16) word = k % 2 ? word & 0xffff0000u : word << 16;
            std::memcpy(out + k, &word, 4);
        }
        return;
    }
    if (m.kind == QD_FP8) return dequantize_fp8_row(m, tile + half * 64 + lane * 4, out);
    const bool w4 = m.kind == QD_W4;
    const int width = w4 ? 4 : 8;
    for (int64_t g = 0; g < m.cols / m.group; g++) {
        const uint8_t* codes = tile + g * group_bytes(m, width);
        const uint8_t* scales = codes + code_bytes(m, width);
        float scale[LANES];
        store(scale, load_half((const uint16_t*)scales + half * LANES));
        const int zero_point = m.symmetric ? (w4 ? 8 : 128) : scales[ZEROS + half * LANES + lane];
        for (int64_t k = 0; k < m.group; k++) {
            const int64_t quad = w4 ? k / 8 : k / 4;
            const uint8_t byte = codes[quad * 128 + half * 64 + lane * 4 + k % 4];
            const int code = !w4 ? byte : k / 4 % 2 ? byte >> 4 : byte & 15;
            out[g * m.group + k] = (float)(code - zero_point) * scale[lane];
        }
    }
}

}  // namespace qd
