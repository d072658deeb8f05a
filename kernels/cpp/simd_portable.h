// Sixteen lanes as arrays: any compiler turns the loops into what its target has. See simd.h.
#pragma once
#include <math.h>
#include <stdint.h>
#include <string.h>

#include <thread>

namespace qd {

struct F { float v[16]; };
struct I { int32_t v[16]; };

constexpr int MAX_ROWS = 2;
constexpr int DIRECT_ROWS = 2;

#define QD_EACH for (int i = 0; i < 16; i++)
#define QD_MAP(TYPE, VALUE)    \
    TYPE out;                  \
    QD_EACH out.v[i] = (VALUE); \
    return out

QD_INLINE F load(const float* p) { F x; memcpy(&x, p, sizeof x); return x; }
QD_INLINE void store(float* p, F x) { memcpy(p, &x, sizeof x); }
QD_INLINE F set(float x) { QD_MAP(F, x); }
QD_INLINE F zero() { return set(0.0f); }
QD_INLINE F add(F x, F y) { QD_MAP(F, x.v[i] + y.v[i]); }
QD_INLINE F sub(F x, F y) { QD_MAP(F, x.v[i] - y.v[i]); }
QD_INLINE F mul(F x, F y) { QD_MAP(F, x.v[i] * y.v[i]); }
QD_INLINE F div(F x, F y) { QD_MAP(F, x.v[i] / y.v[i]); }
QD_INLINE F fma(F x, F y, F z) { QD_MAP(F, x.v[i] * y.v[i] + z.v[i]); }
QD_INLINE F fnma(F x, F y, F z) { QD_MAP(F, z.v[i] - x.v[i] * y.v[i]); }
QD_INLINE F max(F x, F y) { QD_MAP(F, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
QD_INLINE F min(F x, F y) { QD_MAP(F, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
QD_INLINE F abs(F x) { QD_MAP(F, fabsf(x.v[i])); }
// Adding 1.5 · 2²³ leaves no bits behind the point; larger numbers have none.
QD_INLINE F round(F x) {
    QD_MAP(F, fabsf(x.v[i]) < 0x1p22f ? (x.v[i] + 0x1.8p23f) - 0x1.8p23f : x.v[i]);
}
QD_INLINE float sum(F x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] += x.v[i + half];
    return x.v[0];
}
QD_INLINE float largest(F x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
QD_INLINE float smallest(F x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] = x.v[i] < x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
QD_INLINE F select_less(F x, F y, F yes, F no) { QD_MAP(F, x.v[i] < y.v[i] ? yes.v[i] : no.v[i]); }

QD_INLINE I load_i(const void* p) { I x; memcpy(&x, p, sizeof x); return x; }
QD_INLINE void store_i(void* p, I x) { memcpy(p, &x, sizeof x); }
QD_INLINE I set_i(int32_t x) { QD_MAP(I, x); }
QD_INLINE I zero_i() { return set_i(0); }
QD_INLINE I add_i(I x, I y) { QD_MAP(I, (int32_t)((uint32_t)x.v[i] + (uint32_t)y.v[i])); }
QD_INLINE I sub_i(I x, I y) { QD_MAP(I, (int32_t)((uint32_t)x.v[i] - (uint32_t)y.v[i])); }
QD_INLINE I min_i(I x, I y) { QD_MAP(I, x.v[i] < y.v[i] ? x.v[i] : y.v[i]); }
QD_INLINE I max_i(I x, I y) { QD_MAP(I, x.v[i] > y.v[i] ? x.v[i] : y.v[i]); }
QD_INLINE I and_i(I x, I y) { QD_MAP(I, x.v[i] & y.v[i]); }
QD_INLINE I or_i(I x, I y) { QD_MAP(I, x.v[i] | y.v[i]); }
QD_INLINE I shift_left_by(I x, int n) { QD_MAP(I, (int32_t)((uint32_t)x.v[i] << n)); }
template <int N> QD_INLINE I shift_left(I x) { return shift_left_by(x, N); }
template <int N> QD_INLINE I shift_right(I x) { QD_MAP(I, (int32_t)((uint32_t)x.v[i] >> N)); }
QD_INLINE I bits(F x) { I out; memcpy(&out, &x, sizeof out); return out; }
QD_INLINE F from_bits(I x) { F out; memcpy(&out, &x, sizeof out); return out; }
QD_INLINE F to_float(I x) { QD_MAP(F, (float)x.v[i]); }
QD_INLINE I to_int(F x) {  // what x86 does beyond the range, and with NaN
    x = round(x);
    QD_MAP(I, x.v[i] >= -0x1p31f && x.v[i] < 0x1p31f ? (int32_t)x.v[i] : INT32_MIN);
}
QD_INLINE int32_t largest_i(I x) {
    for (int half = 8; half; half /= 2)
        for (int i = 0; i < half; i++) x.v[i] = x.v[i] > x.v[i + half] ? x.v[i] : x.v[i + half];
    return x.v[0];
}
QD_INLINE int32_t sum_i(I x) {
    uint32_t total = 0;
    QD_EACH total += (uint32_t)x.v[i];
    return (int32_t)total;
}
QD_INLINE F power_of_two(F p, F n) {  // −126 ≤ n ≤ 127; NaN stays NaN by p
    const I exponent = shift_left<23>(add_i(to_int(n), set_i(127)));
    return mul(p, from_bits(exponent));
}

QD_INLINE I load_u8(const uint8_t* p) { QD_MAP(I, p[i]); }
QD_INLINE I load_s8(const int8_t* p) { QD_MAP(I, p[i]); }
QD_INLINE void store_s8(int8_t* p, I x) {
    x = max_i(set_i(-128), min_i(set_i(127), x));
    QD_EACH p[i] = (int8_t)x.v[i];
}
QD_INLINE void store_u8(uint8_t* p, I x) { QD_EACH p[i] = (uint8_t)x.v[i]; }

QD_INLINE float half_value(uint16_t half) {
    const uint32_t sign = (uint32_t)(half & 0x8000) << 16, rest = half & 0x7fff;
    float value;
    if (rest < 0x400) {
        value = (float)rest * 0x1p-24f;
    } else {
        const uint32_t raw = rest >= 0x7c00 ? 0x7f800000 | (rest & 0x3ff) << 13 : (rest << 13) + (112u << 23);
        memcpy(&value, &raw, 4);
    }
    uint32_t raw;
    memcpy(&raw, &value, 4);
    raw |= sign;
    memcpy(&value, &raw, 4);
    return value;
}
QD_INLINE uint16_t half_bits(float value) {  // to nearest even
    uint32_t raw;
    memcpy(&raw, &value, 4);
    const uint32_t sign = raw >> 16 & 0x8000, rest = raw & 0x7fffffff;
    if (rest > 0x7f800000) return (uint16_t)(sign | 0x7e00);
    if (rest >= 0x477ff000) return (uint16_t)(sign | 0x7c00);
    if (rest < 0x38800000) {  // subnormal: a whole number of 2⁻²⁴
        float small;
        memcpy(&small, &rest, 4);
        small = (small * 0x1p24f + 0x1p23f) - 0x1p23f;
        return (uint16_t)(sign | (uint32_t)small);
    }
    return (uint16_t)(sign | (rest - (112u << 23) + 0xfff + (rest >> 13 & 1)) >> 13);
}
QD_INLINE F load_half(const uint16_t* p) { QD_MAP(F, half_value(p[i])); }
QD_INLINE void store_half(uint16_t* p, F x) { QD_EACH p[i] = half_bits(x.v[i]); }

QD_INLINE uint32_t bfloat_bits(float value) {
    uint32_t raw;
    memcpy(&raw, &value, 4);
    return value != value ? 0x7fc0 : (raw + 0x7fff + (raw >> 16 & 1)) >> 16;
}
QD_INLINE void store_pairs(uint32_t* p, F first, F second) {
    uint16_t halves[32];
    QD_EACH halves[i] = (uint16_t)bfloat_bits(first.v[i]);
    QD_EACH halves[16 + i] = (uint16_t)bfloat_bits(second.v[i]);
    for (int i = 0; i < 16; i++) p[i] = halves[2 * i] | (uint32_t)halves[2 * i + 1] << 16;
}
QD_INLINE I dot_u8(I acc, I u, I s) {
    const uint8_t* a = (const uint8_t*)u.v;
    const int8_t* b = (const int8_t*)s.v;
    QD_MAP(I, acc.v[i] + a[4 * i] * b[4 * i] + a[4 * i + 1] * b[4 * i + 1] + a[4 * i + 2] * b[4 * i + 2] +
                  a[4 * i + 3] * b[4 * i + 3]);
}
QD_INLINE I dot_u4(I acc, I u, I s) { return dot_u8(acc, u, s); }
// Whether the top bit of every byte is set.
QD_INLINE bool every_top_bit(I v) {
    uint32_t all = 0x80808080u;
    QD_EACH all &= (uint32_t)v.v[i];
    return all == 0x80808080u;
}
QD_INLINE I low_nibbles(I v) { return and_i(v, set_i(0x0f0f0f0f)); }
QD_INLINE I high_nibbles(I v) { return and_i(shift_right<4>(v), set_i(0x0f0f0f0f)); }

QD_INLINE void prefetch_far(const void* p) { __builtin_prefetch(p, 0, 2); }
QD_INLINE void pause() {
#if defined(__aarch64__)
    asm volatile("yield");
#elif defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

#undef QD_EACH
#undef QD_MAP

}  // namespace qd
