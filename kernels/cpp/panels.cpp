#include "panels.h"

namespace qd {

namespace {

// Rows row … row + ROWS − 1, VECTORS vectors from v on.
template <Panel KIND, int ROWS, int VECTORS> void product(const Product& p, int row, int v) {
    F acc[ROWS][VECTORS];
    float* c = p.c + row * p.ldc + v * LANES;
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++)
            acc[r][i] = p.start ? set(p.start[row + r]) : mul(load(c + r * p.ldc + i * LANES), set(p.factor[row + r]));
    const uint32_t* a = (const uint32_t*)p.a + row * p.lda;  // both forms have 4 bytes an entry
    const int vectors = p.lanes / LANES;
    if constexpr (KIND == Panel::FLOAT)
        panel_dot_float<ROWS, VECTORS>((const float*)a, p.lda, (const float*)p.panel, vectors, v, p.reduce, acc);
    else
        panel_dot<KIND, ROWS, VECTORS>(a, p.lda, p.panel, vectors, v, p.reduce, acc);
    for (int r = 0; r < ROWS; r++)
        for (int i = 0; i < VECTORS; i++) store(c + r * p.ldc + i * LANES, acc[r][i]);
}

template <Panel KIND, int ROWS> void all_vectors(const Product& p, int row) {
    int v = p.first;
    for (; v + 4 <= p.last; v += 4) product<KIND, ROWS, 4>(p, row, v);
    for (; v + 2 <= p.last; v += 2) product<KIND, ROWS, 2>(p, row, v);
    for (; v < p.last; v++) product<KIND, ROWS, 1>(p, row, v);
}

template <Panel KIND> void all_rows(const Product& p) {
    constexpr int MOST = KIND == Panel::PAIRS || KIND == Panel::FLOAT ? MAX_ROWS : DIRECT_ROWS;
    const int blocks = (p.rows + MOST - 1) / MOST;
    for (int b = 0, row = 0; b < blocks; b++) {
        const int end = p.rows * (b + 1) / blocks;
        switch (end - row) {
            case 1: all_vectors<KIND, 1>(p, row); break;
            case 2: all_vectors<KIND, 2>(p, row); break;
            case 3: all_vectors<KIND, (MOST > 2 ? 3 : 1)>(p, row); break;
            case 4: all_vectors<KIND, (MOST > 3 ? 4 : 1)>(p, row); break;
            case 5: all_vectors<KIND, (MOST > 4 ? 5 : 1)>(p, row); break;
            default: all_vectors<KIND, (MOST > 5 ? 6 : 1)>(p, row); break;
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

void panel_product(const Product& p) {
    switch (p.kind) {
        case Panel::PAIRS: return all_rows<Panel::PAIRS>(p);
        case Panel::S8: return all_rows<Panel::S8>(p);
        case Panel::E4M3: return all_rows<Panel::E4M3>(p);
        case Panel::N4: return all_rows<Panel::N4>(p);
        case Panel::FLOAT: return all_rows<Panel::FLOAT>(p);
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
