#include "panels.h"

namespace qd {

namespace {

// Rows row … row + ROWS − 1, VECTORS vectors from v on.
template <Panel KIND, int ROWS, int VECTORS> void product(const Product& p, int row, int v) {
    F acc[ROWS][VECTORS];
    float* c = p.c + row * p.ldc + v * LANES;
    QD_UNROLL
    for (int r = 0; r < ROWS; r++)
        QD_UNROLL
        for (int i = 0; i < VECTORS; i++)
            acc[r][i] = p.start ? set(p.start[row + r]) : mul(load(c + r * p.ldc + i * LANES), set(p.factor[row + r]));
    const uint32_t* a = (const uint32_t*)p.a + row * p.lda;  // both forms have 4 bytes an entry
    const int vectors = p.lanes / LANES;
    if constexpr (KIND == Panel::FLOAT)
        panel_dot_float<ROWS, VECTORS>((const float*)a, p.lda, (const float*)p.panel, vectors, v, p.reduce, acc);
    else
        panel_dot<KIND, ROWS, VECTORS>(a, p.lda, p.panel, vectors, v, p.reduce, acc);
    QD_UNROLL
    for (int r = 0; r < ROWS; r++)
        QD_UNROLL
        for (int i = 0; i < VECTORS; i++) store(c + r * p.ldc + i * LANES, acc[r][i]);
}

template <Panel KIND, bool KEYS, int ROWS, int VECTORS> void code_product(const Product& p, int row, int v) {
    constexpr int MIDDLE = KIND == Panel::N4 ? 8 : KIND == Panel::U8 ? 128 : 0;  // S8 has it taken off
    I acc[ROWS][VECTORS];
    QD_UNROLL
    for (int r = 0; r < ROWS; r++) {
        const I start = MIDDLE ? set_i(int32_t(-MIDDLE * (uint32_t)p.sums[row + r])) : zero_i();
        QD_UNROLL
        for (int i = 0; i < VECTORS; i++) acc[r][i] = start;
    }
    const uint32_t* a = (const uint32_t*)p.a + row * p.lda;
    code_dot<KIND, KEYS, ROWS, VECTORS>(a, p.lda, p.panel, p.lanes / LANES, v, p.reduce, acc);
    QD_UNROLL
    for (int r = 0; r < ROWS; r++) {
        float* c = p.c + (row + r) * p.ldc + v * LANES;
        const F scale = set(p.scale[row + r]), other = set(KEYS ? p.start[row + r] : p.factor[row + r]);
        QD_UNROLL
        for (int i = 0; i < VECTORS; i++) {
            const F before = KEYS ? other : mul(load(c + i * LANES), other);
            store(c + i * LANES, fma(to_float(acc[r][i]), scale, before));
        }
    }
}

template <Panel KIND, bool KEYS, int ROWS, int VECTORS> QD_INLINE void any_product(const Product& p, int row, int v) {
    if constexpr (KIND == Panel::U8 || KIND == Panel::S8 || KIND == Panel::N4)
        code_product<KIND, KEYS, ROWS, VECTORS>(p, row, v);
    else
        product<KIND, ROWS, VECTORS>(p, row, v);
}

template <Panel KIND, bool KEYS, int ROWS> void all_vectors(const Product& p, int row) {
    int v = p.first;
    for (; v + 4 <= p.last; v += 4) any_product<KIND, KEYS, ROWS, 4>(p, row, v);
    for (; v + 2 <= p.last; v += 2) any_product<KIND, KEYS, ROWS, 2>(p, row, v);
    for (; v < p.last; v++) any_product<KIND, KEYS, ROWS, 1>(p, row, v);
}

// KEYS matters for codes only.
template <Panel KIND, bool KEYS = true> void all_rows(const Product& p) {
    constexpr int MOST = KIND == Panel::PAIRS || KIND == Panel::FLOAT ? MAX_ROWS : DIRECT_ROWS;
    const int blocks = (p.rows + MOST - 1) / MOST;
    for (int b = 0, row = 0; b < blocks; b++) {
        const int end = p.rows * (b + 1) / blocks;
        switch (end - row) {
            case 1: all_vectors<KIND, KEYS, 1>(p, row); break;
            case 2: all_vectors<KIND, KEYS, 2>(p, row); break;
            case 3: all_vectors<KIND, KEYS, (MOST > 2 ? 3 : 1)>(p, row); break;
            case 4: all_vectors<KIND, KEYS, (MOST > 3 ? 4 : 1)>(p, row); break;
            case 5: all_vectors<KIND, KEYS, (MOST > 4 ? 5 : 1)>(p, row); break;
            default: all_vectors<KIND, KEYS, (MOST > 5 ? 6 : 1)>(p, row); break;
        }
        row = end;
    }
}

QD_INLINE void store_widened(I pairs, bool to_float32, int64_t pair, int vectors, int v, uint8_t* out) {
    if (!to_float32) return store_i(out + (pair * vectors + v) * 64, pairs);
    float* floats = (float*)out;
    store(floats + (2 * pair * vectors + v) * LANES, even_of(pairs));
    store(floats + ((2 * pair + 1) * vectors + v) * LANES, odd_of(pairs));
}

// Codes less their middle.
void widen_codes(Panel kind, const uint8_t* panel, int vectors, int reduce, float* out) {
    const bool nibbles = kind == Panel::N4;
    const int middle = middle_code(kind);
    for (int k = 0; k < reduce; k++)
        for (int v = 0; v < vectors; v++) {
            I code = load_i(panel + ((int64_t)(nibbles ? k / 8 : k / 4) * vectors + v) * 64);
            for (int byte = 0; byte < k % 4; byte++) code = shift_right<8>(code);
            if (nibbles && k % 8 >= 4) code = shift_right<4>(code);
            if (kind == Panel::S8) code = add_i(code, set_i(middle));
            code = sub_i(and_i(code, set_i(nibbles ? 15 : 255)), set_i(middle));
            store(out + ((int64_t)k * vectors + v) * LANES, to_float(code));
        }
}

}  // namespace

void panel_product(const Product& p) {
    switch (p.kind) {
        case Panel::PAIRS: return all_rows<Panel::PAIRS>(p);
        case Panel::E4M3: return all_rows<Panel::E4M3>(p);
        case Panel::U8: return all_rows<Panel::U8, true>(p);
        case Panel::S8: return all_rows<Panel::S8, false>(p);
        case Panel::N4: return p.start ? all_rows<Panel::N4, true>(p) : all_rows<Panel::N4, false>(p);
        case Panel::FLOAT: return all_rows<Panel::FLOAT>(p);
    }
}

void widen_panel(Panel kind, const uint8_t* panel, int lanes, int reduce, bool to_float32, uint8_t* out) {
    const int vectors = lanes / LANES;
    if (is_codes(kind)) return widen_codes(kind, panel, vectors, reduce, (float*)out);
    for (int p = 0; p < reduce / 2; p++)
        for (int v = 0; v < vectors; v++)
            store_widened(widen_e4m3(panel + ((int64_t)p * vectors + v) * 32), to_float32, p, vectors, v, out);
}

}  // namespace qd
