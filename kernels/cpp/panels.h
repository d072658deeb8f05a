// Panels: small matrices [reduce][lanes] of K or V, read as `reduce` steps over vectors of lanes.
// Keys have tokens as lanes and channels to reduce, values the other way round, so one kernel does
// both products of attention. reduce is a multiple of 8, lanes one of 16:
//   PAIRS  [reduce / 2][lanes / 16][16 lanes][2] bfloat16
//   S8     [reduce / 2][lanes / 16][2][16 lanes] int8, code − 128
//   E4M3   the same, float8
//   N4     [reduce / 8][lanes / 16][64 bytes], see widen_n4: code − 8
//   FLOAT  [reduce][lanes / 16][16 lanes] float32
// Codes are exact in bfloat16 and in float32; their scales are folded into the other operand.
#pragma once
#include "rows.h"

namespace qd {

enum class Panel { PAIRS, S8, E4M3, N4, FLOAT };

QD_INLINE int64_t panel_bytes(Panel kind, int64_t elements) {
    switch (kind) {
        case Panel::PAIRS: return elements * 2;
        case Panel::FLOAT: return elements * 4;
        case Panel::N4: return elements / 2;
        default: return elements;
    }
}

QD_INLINE F e4m3_value(I byte) {  // the bits as a float32 of exponent − 120, then scaled; 0x7f is NaN
    const I sign = shift_left<24>(and_i(byte, set_i(0x80)));
    const F magnitude = mul(from_bits(shift_left<20>(and_i(byte, set_i(0x7f)))), set(0x1p120f));
    return from_bits(or_i(bits(magnitude), sign));
}

QD_INLINE I widen_e4m3(const uint8_t* p) {
    const I even = bits(e4m3_value(load_u8(p))), odd = bits(e4m3_value(load_u8(p + 16)));
    return or_i(shift_right<16>(even), odd);
}

// acc[row][v] += Σ a[row] · panel[vector first + v], pairs of reduce steps in order. a: bfloat16
// pairs, lda apart; `vectors`: lanes / 16 of the panel.
template <Panel KIND, int ROWS, int VECTORS>
QD_INLINE void panel_dot(const uint32_t* a, int64_t lda, const uint8_t* panel, int vectors, int first, int reduce,
                         F (&acc)[ROWS][VECTORS]) {
    if constexpr (KIND == Panel::N4) {
        for (int u = 0; u < reduce / 8; u++) {
            I b[VECTORS][4];
            for (int v = 0; v < VECTORS; v++) widen_n4(panel + ((int64_t)u * vectors + first + v) * 64, b[v]);
            for (int i = 0; i < 4; i++)
                for (int r = 0; r < ROWS; r++) {
                    const I x = set_i((int32_t)a[r * lda + u * 4 + i]);
                    for (int v = 0; v < VECTORS; v++) acc[r][v] = pair_dot(acc[r][v], x, b[v][i]);
                }
        }
    } else {
        constexpr int UNIT = KIND == Panel::PAIRS ? 64 : 32;
        for (int p = 0; p < reduce / 2; p++) {
            I b[VECTORS];
            for (int v = 0; v < VECTORS; v++) {
                const uint8_t* unit = panel + ((int64_t)p * vectors + first + v) * UNIT;
                b[v] = KIND == Panel::PAIRS ? load_i(unit) : KIND == Panel::S8 ? widen_s8(unit) : widen_e4m3(unit);
            }
            for (int r = 0; r < ROWS; r++) {
                const I x = set_i((int32_t)a[r * lda + p]);
                for (int v = 0; v < VECTORS; v++) acc[r][v] = pair_dot(acc[r][v], x, b[v]);
            }
        }
    }
}

template <int ROWS, int VECTORS>
QD_INLINE void panel_dot_float(const float* a, int64_t lda, const float* panel, int vectors, int first, int reduce,
                               F (&acc)[ROWS][VECTORS]) {
    for (int k = 0; k < reduce; k++) {
        F b[VECTORS];
        for (int v = 0; v < VECTORS; v++) b[v] = load(panel + ((int64_t)k * vectors + first + v) * LANES);
        for (int r = 0; r < ROWS; r++) {
            const F x = set(a[r * lda + k]);
            for (int v = 0; v < VECTORS; v++) acc[r][v] = fma(x, b[v], acc[r][v]);
        }
    }
}

// Lanes 16 first … 16 last − 1 of a · panel, for any number of rows: c = start + product, or
// c = c · factor + product when start is null. a: bfloat16 pairs (float32 for FLOAT), lda entries
// of 4 bytes apart; start, factor: [rows].
struct Product {
    Panel kind;
    const void* a;
    int64_t lda;
    const uint8_t* panel;
    int lanes, first, last, reduce, rows;
    float* c;
    int64_t ldc;
    const float *start, *factor;
};
void panel_product(const Product& product);

// Writes codes as PAIRS (or FLOAT): what a product over many rows reads.
void widen_panel(Panel kind, const uint8_t* panel, int lanes, int reduce, bool to_float32, uint8_t* out);

}  // namespace qd
