// Panels: small matrices [reduce][lanes] of K or V, read as `reduce` steps over vectors of lanes.
// Keys have tokens as lanes and channels to reduce, values the other way round, so one kernel does
// both products of attention. reduce is a multiple of 8, lanes one of 16:
//   PAIRS  [reduce / 2][lanes / 16][16 lanes][2] bfloat16
//   E4M3   [reduce / 2][lanes / 16][2][16 lanes] float8
//   U8     [reduce / 4][lanes / 16][16 lanes][4] uint8, code
//   S8     the same, int8, code − 128
//   N4     [reduce / 8][lanes / 16][16 lanes][4] byte j: codes j (low nibble) and j + 4
//   FLOAT  [reduce][lanes / 16][16 lanes] float32
// Codes meet rows of 8-bit integers, whose sums are exact in any order; in exact arithmetic they
// widen to float32. Their scales are folded into the other operand.
#pragma once
#include "rows.h"

namespace qd {

enum class Panel { PAIRS, E4M3, U8, S8, N4, FLOAT };

// Whether the panel holds codes of affine groups, and the code that stands for 0.
QD_INLINE bool is_codes(Panel kind) { return kind == Panel::U8 || kind == Panel::S8 || kind == Panel::N4; }
QD_INLINE int middle_code(Panel kind) { return kind == Panel::N4 ? 8 : is_codes(kind) ? 128 : 0; }

QD_INLINE int64_t panel_bytes(Panel kind, int64_t elements) {
    switch (kind) {
        case Panel::PAIRS: return elements * 2;
        case Panel::FLOAT: return elements * 4;
        case Panel::N4: return elements / 2;
        default: return elements;
    }
}

QD_INLINE I widen_e4m3(const uint8_t* p) {
    return pairs_of(e4m3_value(load_u8(p)), e4m3_value(load_u8(p + 16)));
}

// acc[row][v] += Σ a[row] · panel[vector first + v], pairs of reduce steps in order. a: bfloat16
// pairs, lda apart; `vectors`: lanes / 16 of the panel.
template <Panel KIND, int ROWS, int VECTORS>
QD_INLINE void panel_dot(const uint32_t* a, int64_t lda, const uint8_t* panel, int vectors, int first, int reduce,
                         F (&acc)[ROWS][VECTORS]) {
    constexpr int UNIT = KIND == Panel::PAIRS ? 64 : 32;
    for (int p = 0; p < reduce / 2; p++) {
        I b[VECTORS];
        QD_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            const uint8_t* unit = panel + ((int64_t)p * vectors + first + v) * UNIT;
            b[v] = KIND == Panel::PAIRS ? load_i(unit) : widen_e4m3(unit);
        }
        QD_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const I x = set_i((int32_t)a[r * lda + p]);
            QD_UNROLL
            for (int v = 0; v < VECTORS; v++) acc[r][v] = pair_dot(acc[r][v], x, b[v]);
        }
    }
}

// The same with codes. a: bytes, four an entry; signed for keys, unsigned for values, whose codes
// take the sign then.
template <Panel KIND, bool KEYS, int ROWS, int VECTORS>
QD_INLINE void code_dot(const uint32_t* a, int64_t lda, const uint8_t* panel, int vectors, int first, int reduce,
                        I (&acc)[ROWS][VECTORS]) {
    constexpr int HALVES = KIND == Panel::N4 ? 2 : 1;
    for (int k = 0; k < reduce / 4; k++) {
        const uint8_t* unit = panel + ((int64_t)(k / HALVES) * vectors + first) * 64;
        I codes[VECTORS];
        QD_UNROLL
        for (int v = 0; v < VECTORS; v++) {
            codes[v] = load_i(unit + v * 64);
            if (HALVES == 2) codes[v] = k % 2 ? high_nibbles(codes[v]) : low_nibbles(codes[v]);
        }
        QD_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const I x = set_i((int32_t)a[r * lda + k]);
            QD_UNROLL
            for (int v = 0; v < VECTORS; v++) {
                const I u = KEYS ? codes[v] : x, s = KEYS ? x : codes[v];
                acc[r][v] = HALVES == 2 ? dot_u4(acc[r][v], u, s) : dot_u8(acc[r][v], u, s);
            }
        }
    }
}

template <int ROWS, int VECTORS>
QD_INLINE void panel_dot_float(const float* a, int64_t lda, const float* panel, int vectors, int first, int reduce,
                               F (&acc)[ROWS][VECTORS]) {
    for (int k = 0; k < reduce; k++) {
        F b[VECTORS];
        QD_UNROLL
        for (int v = 0; v < VECTORS; v++) b[v] = load(panel + ((int64_t)k * vectors + first + v) * LANES);
        QD_UNROLL
        for (int r = 0; r < ROWS; r++) {
            const F x = set(a[r * lda + k]);
            QD_UNROLL
            for (int v = 0; v < VECTORS; v++) acc[r][v] = fma(x, b[v], acc[r][v]);
        }
    }
}

// Lanes 16 first … 16 last − 1 of a · panel, for any number of rows: c = start + product, or
// c = c · factor + product when start is null. a: bfloat16 pairs (float32 for FLOAT; for codes bytes,
// signed where start is given), lda entries of 4 bytes apart; start, factor: [rows]. For codes, less
// their middle, scale: [rows] multiplies the product, and sums: [rows] are those of a row's bytes.
struct Product {
    Panel kind;
    const void* a;
    int64_t lda;
    const uint8_t* panel;
    int lanes, first, last, reduce, rows;
    float* c;
    int64_t ldc;
    const float *start, *factor;
    const float* scale = nullptr;
    const int32_t* sums = nullptr;
};
void panel_product(const Product& product);

// Writes float8 as PAIRS, or anything but PAIRS as FLOAT: codes less their middle.
void widen_panel(Panel kind, const uint8_t* panel, int lanes, int reduce, bool to_float32, uint8_t* out);

}  // namespace qd
