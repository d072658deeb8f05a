// Matrix times activations: one tile of 32 weight rows by up to MAX_ROWS rows of activations.
// A row's sum runs over groups and columns in order, whatever rows stand beside it.
#pragma once
#include "rows.h"

namespace qd {

// out[row][TILE] of `count` rows from `row` on, 1 ≤ count ≤ MAX_ROWS.
using TileKernel = void (*)(const qd_matrix& m, const uint8_t* tile, const Activations& a, int64_t row, float* out);

// The kernels of a matrix, by count − 1.
const TileKernel* tile_kernels(const qd_matrix& m, int act_mode);

QD_INLINE int64_t tiles_of(const qd_matrix& m) { return round_up(m.rows, TILE) / TILE; }

// Puts the two vectors of a tile's values into a row of them.
QD_INLINE void store_tile(float* row, int64_t tile, const F* values) {
    store(row + tile * TILE, values[0]), store(row + tile * TILE + LANES, values[1]);
}

// How many rows' activations stay in the second-level cache while tiles stream by.
QD_INLINE int64_t cached_rows(const Activations& a) {
    const int64_t bytes = a.form == Form::INT8 ? a.width : a.form == Form::PAIRS ? a.width * 2 : a.width * 4;
    const int64_t rows = 393216 / bytes / MAX_ROWS * MAX_ROWS;
    return rows < 8 * MAX_ROWS ? 8 * MAX_ROWS : rows;
}

// epilogue(row, tile, values) for rows low … high − 1 of tiles first … last − 1; values: two
// vectors, bias added. between(rows) runs after each block of rows.
struct Idle {
    void operator()(int64_t) const {}
};
template <class Epilogue, class Between = Idle>
inline void multiply(const qd_matrix& m, const TileKernel* kernels, const Activations& a, int64_t low, int64_t high,
                     int64_t first, int64_t last, Epilogue epilogue,
                     Between between = {}) {
    alignas(64) float out[MAX_ROWS * TILE];
    const int64_t blocks = (high - low + MAX_ROWS - 1) / MAX_ROWS;  // balanced: 16 rows go as 5, 5, 6
    for (int64_t t = first; t < last; t++) {
        const uint8_t* tile = m.tiles + t * m.tile_bytes;
        const float* bias = m.bias ? m.bias + t * TILE : nullptr;
        int64_t row = low;
        for (int64_t b = 1; b <= blocks; b++) {
            const int64_t end = low + (high - low) * b / blocks;
            if (blocks > 1 && t + 1 < last)  // a part of the next tile while this one is in use
                fetch(tile + m.tile_bytes + m.tile_bytes * (b - 1) / blocks, m.tile_bytes / blocks + 63);
            kernels[end - row - 1](m, tile, a, row, out);
            between(end - row);
            for (int i = 0; row < end; row++, i++) {
                F values[2] = {load(out + i * TILE), load(out + i * TILE + LANES)};
                if (bias) {
                    values[0] = add(values[0], load(bias));
                    values[1] = add(values[1], load(bias + LANES));
                }
                epilogue(row, t, values);
            }
        }
    }
}

// Row `row` of a matrix as floats [cols rounded up to 32].
void dequantize_row(const qd_matrix& m, int64_t row, float* out);

}  // namespace qd
