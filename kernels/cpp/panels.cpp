#include "panels.h"

namespace qd {

namespace {

template <Panel KIND, int ROWS, int VECTORS>
void product(const void* a, int64_t lda, const uint8_t* panel, int vectors, int first, int reduce, float* c, int64_t ldc) {
    F acc[ROWS][VECTORS];
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) acc[r][v] = load(c + r * ldc + (first + v) * LANES);
    if constexpr (KIND == Panel::FLOAT)
        panel_dot_float<ROWS, VECTORS>((const float*)a, lda, (const float*)panel, vectors, first, reduce, acc);
    else
        panel_dot<KIND, ROWS, VECTORS>((const uint32_t*)a, lda, panel, vectors, first, reduce, acc);
    for (int r = 0; r < ROWS; r++)
        for (int v = 0; v < VECTORS; v++) store(c + r * ldc + (first + v) * LANES, acc[r][v]);
}

template <Panel KIND, int ROWS>
void all_vectors(const void* a, int64_t lda, const uint8_t* panel, int vectors, int v, int last, int reduce, float* c,
                 int64_t ldc) {
    for (; v + 4 <= last; v += 4) product<KIND, ROWS, 4>(a, lda, panel, vectors, v, reduce, c, ldc);
    for (; v + 2 <= last; v += 2) product<KIND, ROWS, 2>(a, lda, panel, vectors, v, reduce, c, ldc);
    for (; v < last; v++) product<KIND, ROWS, 1>(a, lda, panel, vectors, v, reduce, c, ldc);
}

template <Panel KIND>
void all_rows(const void* a, int64_t lda, const uint8_t* panel, int vectors, int first, int last, int reduce, int rows,
              float* c, int64_t ldc) {
    constexpr int MOST = KIND == Panel::PAIRS || KIND == Panel::FLOAT ? MAX_ROWS : DIRECT_ROWS;
    const int blocks = (rows + MOST - 1) / MOST;
    for (int b = 0, row = 0; b < blocks; b++) {
        const int end = rows * (b + 1) / blocks;
        const void* ar = (const uint32_t*)a + row * lda;  // both forms have 4 bytes an entry
        float* cr = c + row * ldc;
        switch (end - row) {
            case 1: all_vectors<KIND, 1>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
            case 2: all_vectors<KIND, 2>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
            case 3: all_vectors<KIND, (MOST > 2 ? 3 : 1)>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
            case 4: all_vectors<KIND, (MOST > 3 ? 4 : 1)>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
            case 5: all_vectors<KIND, (MOST > 4 ? 5 : 1)>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
            default: all_vectors<KIND, (MOST > 5 ? 6 : 1)>(ar, lda, panel, vectors, first, last, reduce, cr, ldc); break;
        }
        row = end;
    }
}

QD_INLINE void store_widened(I pairs, bool to_float32, int64_t pair, int vectors, int v, uint8_t* out) {
    if (!to_float32) return store_i(out + (pair * vectors + v) * 64, pairs);
    float* floats = (float*)out;
    store_i(floats + (2 * pair * vectors + v) * LANES, shift_left<16>(pairs));
    store_i(floats + ((2 * pair + 1) * vectors + v) * LANES, and_i(pairs, set_i((int32_t)0xffff0000u)));
}

}  // namespace

void panel_product(Panel kind, const void* a, int64_t lda, const uint8_t* panel, int lanes, int first, int last,
                   int reduce, int rows, float* c, int64_t ldc) {
    const int vectors = lanes / LANES;
    switch (kind) {
        case Panel::PAIRS: return all_rows<Panel::PAIRS>(a, lda, panel, vectors, first, last, reduce, rows, c, ldc);
        case Panel::S8: return all_rows<Panel::S8>(a, lda, panel, vectors, first, last, reduce, rows, c, ldc);
        case Panel::E4M3: return all_rows<Panel::E4M3>(a, lda, panel, vectors, first, last, reduce, rows, c, ldc);
        case Panel::N4: return all_rows<Panel::N4>(a, lda, panel, vectors, first, last, reduce, rows, c, ldc);
        case Panel::FLOAT: return all_rows<Panel::FLOAT>(a, lda, panel, vectors, first, last, reduce, rows, c, ldc);
    }
}

void widen_panel(Panel kind, const uint8_t* panel, int lanes, int reduce, bool to_float32, uint8_t* out) {
    const int vectors = lanes / LANES;
    if (kind == Panel::N4) {
        for (int u = 0; u < reduce / 8; u++)
            for (int v = 0; v < vectors; v++) {
                I pairs[4];
                widen_n4(panel + ((int64_t)u * vectors + v) * 64, pairs);
                for (int i = 0; i < 4; i++) store_widened(pairs[i], to_float32, u * 4 + i, vectors, v, out);
            }
        return;
    }
    for (int p = 0; p < reduce / 2; p++)
        for (int v = 0; v < vectors; v++) {
            const uint8_t* unit = panel + ((int64_t)p * vectors + v) * 32;
            store_widened(kind == Panel::S8 ? widen_s8(unit) : widen_e4m3(unit), to_float32, p, vectors, v, out);
        }
}

}  // namespace qd
