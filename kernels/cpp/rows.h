// Operations on rows of activations, and the forms in which a matrix wants them.
#pragma once
#include <cmath>
#include <cstring>

#include "qdeploy_cpu.h"
#include "simd.h"

namespace qd {

constexpr int TILE = 32;  // rows of a weight tile: two halves of LANES

QD_INLINE int64_t round_up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

// Asks for memory that will be read soon.
QD_INLINE void fetch(const uint8_t* p, int64_t bytes) {
    for (int64_t i = 0; i < bytes; i += 64) prefetch_far(p + i);
}

// How a matrix reads its activations.
enum class Form { INT8, PAIRS, FLOAT };

QD_INLINE Form form_of(const qd_matrix& m, int act_mode) {
    if (act_mode == QD_ACT_FP32 || m.kind == QD_F32) return Form::FLOAT;
    return m.kind == QD_BF16 || m.kind == QD_FP8 ? Form::PAIRS : Form::INT8;
}

// Rows of activations in one form. INT8: codes[row][width], and per group a scale and the sum of
// the codes; PAIRS: bfloat16; FLOAT: float32. width is cols rounded up to 32, the rest zero.
struct Activations {
    Form form = Form::FLOAT;
    int64_t width = 0;
    int groups = 0, group = 0;
    int8_t* codes = nullptr;
    float* scales = nullptr;
    int32_t* sums = nullptr;
    uint32_t* pairs = nullptr;
    float* floats = nullptr;
};

// Bytes that `rows` rows of any form need for a matrix of `cols` columns.
QD_INLINE int64_t activation_bytes(int64_t rows, int64_t cols) {
    return rows * round_up(cols, TILE) * 4 + 256;
}

// Lays the form that `m` wants into memory of activation_bytes(rows, m.cols).
inline Activations lay_out(const qd_matrix& m, int act_mode, int64_t rows, uint8_t* memory) {
    Activations a;
    a.form = form_of(m, act_mode);
    a.width = round_up(m.cols, TILE);
    a.floats = (float*)memory;
    a.pairs = (uint32_t*)memory;
    a.codes = (int8_t*)memory;
    if (a.form == Form::INT8) {
        a.group = m.group;
        a.groups = m.cols / m.group;
        a.scales = (float*)(memory + round_up(rows * a.width, 64));
        a.sums = (int32_t*)(a.scales + rows * a.groups);
    }
    return a;
}

// Dynamic int8 per group: code = round(x · 127 / max|x|). A group of n: 8 divides n. A group with
// NaN or an infinity has the scale NaN: int8 would turn it into a number.
inline void quantize_group(const float* x, int n, int8_t* codes, float* scale, int32_t* total) {
    float padded[LANES] = {};
    const int whole = n / LANES * LANES;
    if (whole < n) std::memcpy(padded, x + whole, (n - whole) * sizeof(float));
    const I magnitude = set_i(0x7fffffff);  // magnitudes order as integers, NaN above all
    I top = and_i(bits(load(padded)), magnitude);
    for (int i = 0; i < whole; i += LANES) top = max_i(top, and_i(bits(load(x + i)), magnitude));
    const int32_t raw = largest_i(top);
    float most;
    std::memcpy(&most, &raw, sizeof most);
    const F inverse = set(most > 0 ? 127.0f / most : 0.0f);
    I sums = zero_i();
    for (int i = 0; i < whole; i += LANES) {
        const I code = to_int(mul(load(x + i), inverse));
        sums = add_i(sums, code);
        store_s8(codes + i, code);
    }
    if (whole < n) {
        int8_t last[LANES];
        const I code = to_int(mul(load(padded), inverse));
        sums = add_i(sums, code);
        store_s8(last, code);
        std::memcpy(codes + whole, last, n - whole);
    }
    *scale = raw < 0x7f800000 ? most * (1.0f / 127.0f) : NAN;
    *total = sum_i(sums);
}

// Groups first … last − 1 of a row.
inline void quantize_groups(const float* x, int64_t row, int64_t first, int64_t last, const Activations& a) {
    int8_t* codes = a.codes + row * a.width;
    float* scales = a.scales + row * a.groups;
    int32_t* sums = a.sums + row * a.groups;
    for (int64_t g = first; g < last; g++)
        quantize_group(x + (int64_t)g * a.group, a.group, codes + (int64_t)g * a.group, scales + g, sums + g);
}

// Puts one row of floats [width, zero-padded] into its form. `permuted`: scratch of width floats.
inline void put_row(const float* x, int64_t row, const qd_matrix& m, const Activations& a, float* permuted) {
    if (m.permutation) {
        for (int i = 0; i < m.cols; i++) permuted[i] = x[m.permutation[i]];
        for (int64_t i = m.cols; i < a.width; i++) permuted[i] = 0;
        x = permuted;
    }
    if (a.form == Form::INT8) return quantize_groups(x, row, 0, a.groups, a);
    if (a.form == Form::FLOAT) {
        std::memcpy(a.floats + row * a.width, x, a.width * sizeof(float));
        return;
    }
    uint32_t* out = a.pairs + row * a.width / 2;
    for (int64_t i = 0; i < a.width; i += 2 * LANES) store_pairs(out + i / 2, load(x + i), load(x + i + LANES));
}

// y = x / rms(x) · weight over n entries; x, y, weight are padded with zeros to a multiple of 32.
inline void rms_norm(const float* x, const float* weight, int n, float eps, float* y) {
    const int64_t width = round_up(n, TILE);
    F squares = zero();
    for (int64_t i = 0; i < width; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const F scale = set(1.0f / std::sqrt(sum(squares) / (float)n + eps));
    for (int64_t i = 0; i < width; i += LANES) store(y + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// The same within a head, in place; dim is a multiple of 16, nothing is padded.
inline void head_norm(float* x, const float* weight, int dim, float eps) {
    F squares = zero();
    for (int i = 0; i < dim; i += LANES) squares = fma(load(x + i), load(x + i), squares);
    const F scale = set(1.0f / std::sqrt(sum(squares) / (float)dim + eps));
    for (int i = 0; i < dim; i += LANES) store(x + i, mul(mul(load(x + i), scale), load(weight + i)));
}

// Rotates the two halves of a head; cos, sin: [dim / 2]. dim is a multiple of 16.
inline void rotate(float* x, const float* cos, const float* sin, int dim) {
    const int half = dim / 2;
    int i = 0;
    for (; i + LANES <= half; i += LANES) {
        const F a = load(x + i), b = load(x + half + i), c = load(cos + i), s = load(sin + i);
        store(x + i, sub(mul(a, c), mul(b, s)));
        store(x + half + i, add(mul(b, c), mul(a, s)));
    }
    for (; i < half; i++) {
        const float a = x[i], b = x[half + i];
        x[i] = a * cos[i] - b * sin[i];
        x[half + i] = b * cos[i] + a * sin[i];
    }
}

}  // namespace qd
