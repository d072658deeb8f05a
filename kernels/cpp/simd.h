// Sixteen-lane vectors, so that one source serves every instruction set. Within a build every
// function gives the same bits wherever it is called; -ffp-contract=off keeps it so.
#pragma once
#define QD_INLINE static inline __attribute__((always_inline))
// Before loops over accumulators: they stay in registers only if they unroll early.
#define QD_UNROLL _Pragma("GCC unroll 8")

#if defined(QD_ISA_AVX512)
#include "simd_avx512.h"
#define QD_ISA "avx512"
#elif defined(QD_ISA_AVX2)
#include "simd_avx2.h"
#define QD_ISA "avx2"
#else
#include "simd_portable.h"
#define QD_ISA "portable"
#endif

namespace qd {

constexpr int LANES = 16;

// Pairs of bfloat16: a lane holds an even element in its low half and an odd one in its high half.
QD_INLINE F even_of(I pairs) { return from_bits(shift_left<16>(pairs)); }
QD_INLINE F odd_of(I pairs) { return from_bits(and_i(pairs, set_i((int32_t)0xffff0000u))); }
// Of floats that bfloat16 holds exactly.
QD_INLINE I pairs_of(F even, F odd) { return or_i(shift_right<16>(bits(even)), bits(odd)); }

// A float8 (E4M3): the bits as a float32 of exponent − 120, then scaled; 0x7f gives 480, not NaN.
QD_INLINE F e4m3_value(I byte) {
    const I sign = shift_left<24>(and_i(byte, set_i(0x80)));
    const F magnitude = mul(from_bits(shift_left<20>(and_i(byte, set_i(0x7f)))), set(0x1p120f));
    return from_bits(or_i(bits(magnitude), sign));
}

#ifndef QD_ISA_AVX512  // which has instructions for these
// Sums and maxima of four vectors each, to out[0 … 3].
QD_INLINE void sum4(const F (&x)[4], float* out) {
    for (int i = 0; i < 4; i++) out[i] = sum(x[i]);
}
QD_INLINE void largest4(const F (&x)[4], float* out) {
    for (int i = 0; i < 4; i++) out[i] = largest(x[i]);
}
QD_INLINE void sum4_i(const I (&x)[4], int32_t* out) {
    for (int i = 0; i < 4; i++) out[i] = sum_i(x[i]);
}
QD_INLINE void largest4_i(const I (&x)[4], int32_t* out) {
    for (int i = 0; i < 4; i++) out[i] = largest_i(x[i]);
}
// 4 bytes a lane of float8, elements 0, 2, 1, 3 → pairs (0, 1) and (2, 3). Normal numbers need their
// exponent moved by 120; where any isn't, all go by way of float32.
QD_INLINE void widen_fp8(I v, I (&out)[2]) {
    const I exponents = and_i(v, set_i(0x78787878));
    if (__builtin_expect(every_top_bit(add_i(exponents, set_i(0x78787878))), 1)) {
        for (int p = 0; p < 2; p++) {
            const I word = p ? v : shift_left<8>(v);  // each in the high byte of its half
            const I sign = and_i(word, set_i((int32_t)0x80008000u));
            out[p] = add_i(or_i(sign, and_i(shift_right<4>(word), set_i(0x07f007f0))), set_i(0x3c003c00));
        }
        return;
    }
    const I byte = set_i(255);
    out[0] = pairs_of(e4m3_value(and_i(v, byte)), e4m3_value(and_i(shift_right<16>(v), byte)));
    out[1] = pairs_of(e4m3_value(and_i(shift_right<8>(v), byte)), e4m3_value(shift_right<24>(v)));
}
// acc + even · even + odd · odd of bfloat16 pairs.
QD_INLINE F pair_dot(F acc, I x, I y) {
    return fma(odd_of(x), odd_of(y), fma(even_of(x), even_of(y), acc));
}
#endif

// Horner's rule, the highest power first.
template <class... Lower> QD_INLINE F polynomial(F x, float highest, Lower... lower) {
    F p = set(highest);
    ((p = fma(p, x, set(lower))), ...);
    return p;
}

// max and min return their second operand when one is NaN, so constants come first: NaN survives.

// 2ˣ for least ≤ x ≤ 127, and 2 to the power of `least` below.
QD_INLINE F exp2_from(float least, F x) {
    const F held = max(set(least), x);
    const F n = round(held);
    const F r = sub(held, n);
    return power_of_two(
        polynomial(r, 1.3333558e-3f, 9.6181291e-3f, 5.5504109e-2f, 2.4022651e-1f, 6.9314718e-1f, 1.0f), n);
}

// 2ˣ for x ≤ 127, relative error below 3e-7; at least 2⁻¹²⁶.
QD_INLINE F exp2(F x) { return exp2_from(-126.0f, x); }

// The same, but exactly 0 for −∞ (and whatever lies below −126 or, as the instruction set has it, −150):
// what is masked has no weight at all.
QD_INLINE F exp2_or_zero(F x) {
#ifdef QD_ISA_AVX512
    return exp2_from(-160.0f, x);
#else
    return select_less(x, set(-126.0f), zero(), exp2(x));
#endif
}

// eˣ for x ≤ 88, relative error below 3e-7 · (1 + |x|).
QD_INLINE F exp(F x) { return exp2(mul(x, set(1.44269504f))); }

// tanh by eˣ; for small x, where 1 − 2 / (e²ˣ + 1) would cancel, by its odd polynomial (Cephes).
QD_INLINE F tanh(F x) {
    const F a = min(set(9.5f), abs(x));
    const F e = exp(add(a, a));
    const F big = sub(set(1.0f), div(set(2.0f), add(e, set(1.0f))));
    const F s = mul(x, x);
    F p = polynomial(s, -5.70498872745e-3f, 2.06390887954e-2f, -5.37397155531e-2f, 1.33314422036e-1f,
                     -3.33332819422e-1f);
    p = fma(mul(p, s), x, x);
    const F sign = from_bits(and_i(bits(x), set_i(INT32_MIN)));
    const F far = from_bits(or_i(bits(big), bits(sign)));
    return select_less(a, set(0.625f), p, far);
}

QD_INLINE F silu(F x) { return div(x, add(set(1.0f), exp(sub(zero(), max(set(-87.0f), x))))); }

QD_INLINE F gelu_tanh(F x) {
    const F inner = mul(set(0.7978845608f), fma(mul(mul(x, x), x), set(0.044715f), x));
    return mul(mul(set(0.5f), x), add(set(1.0f), tanh(inner)));
}

// x · Φ(x) with erf by Abramowitz & Stegun 7.1.26 (absolute error 1.5e-7).
QD_INLINE F gelu(F x) {
    const F z = mul(abs(x), set(0.70710678f));
    const F t = div(set(1.0f), fma(set(0.3275911f), z, set(1.0f)));
    const F p = mul(polynomial(t, 1.061405429f, -1.453152027f, 1.421413741f, -0.284496736f, 0.254829592f), t);
    const F tail = mul(p, exp(sub(zero(), mul(z, z))));  // erfc(|x| / √2)
    const F half = mul(set(0.5f), tail);
    return mul(x, select_less(x, zero(), half, sub(set(1.0f), half)));
}

}  // namespace qd
