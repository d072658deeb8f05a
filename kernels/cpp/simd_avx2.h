// Sixteen lanes as two AVX2 registers (needs AVX2, FMA, F16C). See simd.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace qd {

struct F { __m256 a, b; };   // 16 × float32
struct I { __m256i a, b; };  // 16 × int32, or pairs of bfloat16, or 4 bytes each

constexpr int MAX_ROWS = 2;     // sixteen registers
constexpr int DIRECT_ROWS = 2;

QD_INLINE F load(const float* p) { return {_mm256_loadu_ps(p), _mm256_loadu_ps(p + 8)}; }
QD_INLINE void store(float* p, F x) { _mm256_storeu_ps(p, x.a), _mm256_storeu_ps(p + 8, x.b); }
QD_INLINE F set(float x) { return {_mm256_set1_ps(x), _mm256_set1_ps(x)}; }
QD_INLINE F zero() { return {_mm256_setzero_ps(), _mm256_setzero_ps()}; }
QD_INLINE F add(F x, F y) { return {_mm256_add_ps(x.a, y.a), _mm256_add_ps(x.b, y.b)}; }
QD_INLINE F sub(F x, F y) { return {_mm256_sub_ps(x.a, y.a), _mm256_sub_ps(x.b, y.b)}; }
QD_INLINE F mul(F x, F y) { return {_mm256_mul_ps(x.a, y.a), _mm256_mul_ps(x.b, y.b)}; }
QD_INLINE F div(F x, F y) { return {_mm256_div_ps(x.a, y.a), _mm256_div_ps(x.b, y.b)}; }
QD_INLINE F fma(F x, F y, F z) { return {_mm256_fmadd_ps(x.a, y.a, z.a), _mm256_fmadd_ps(x.b, y.b, z.b)}; }
QD_INLINE F fnma(F x, F y, F z) { return {_mm256_fnmadd_ps(x.a, y.a, z.a), _mm256_fnmadd_ps(x.b, y.b, z.b)}; }
QD_INLINE F max(F x, F y) { return {_mm256_max_ps(x.a, y.a), _mm256_max_ps(x.b, y.b)}; }
QD_INLINE F min(F x, F y) { return {_mm256_min_ps(x.a, y.a), _mm256_min_ps(x.b, y.b)}; }
QD_INLINE F abs(F x) {
    const __m256 sign = _mm256_set1_ps(-0.0f);
    return {_mm256_andnot_ps(sign, x.a), _mm256_andnot_ps(sign, x.b)};
}
QD_INLINE F round(F x) {
    constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    return {_mm256_round_ps(x.a, MODE), _mm256_round_ps(x.b, MODE)};
}
QD_INLINE float sum(F x) {
    const __m256 eight = _mm256_add_ps(x.a, x.b);
    __m128 v = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_add_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_add_ss(v, _mm_shuffle_ps(v, v, 1)));
}
QD_INLINE float largest(F x) {
    const __m256 eight = _mm256_max_ps(x.a, x.b);
    __m128 v = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_max_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_max_ss(v, _mm_shuffle_ps(v, v, 1)));
}
QD_INLINE float smallest(F x) {
    const __m256 eight = _mm256_min_ps(x.a, x.b);
    __m128 v = _mm_min_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    v = _mm_min_ps(v, _mm_movehl_ps(v, v));
    return _mm_cvtss_f32(_mm_min_ss(v, _mm_shuffle_ps(v, v, 1)));
}
QD_INLINE F select_less(F x, F y, F yes, F no) {
    return {_mm256_blendv_ps(no.a, yes.a, _mm256_cmp_ps(x.a, y.a, _CMP_LT_OQ)),
            _mm256_blendv_ps(no.b, yes.b, _mm256_cmp_ps(x.b, y.b, _CMP_LT_OQ))};
}

QD_INLINE I load_i(const void* p) {
    return {_mm256_loadu_si256((const __m256i*)p), _mm256_loadu_si256((const __m256i*)p + 1)};
}
QD_INLINE void store_i(void* p, I x) {
    _mm256_storeu_si256((__m256i*)p, x.a), _mm256_storeu_si256((__m256i*)p + 1, x.b);
}
QD_INLINE I set_i(int32_t x) { return {_mm256_set1_epi32(x), _mm256_set1_epi32(x)}; }
QD_INLINE I zero_i() { return {_mm256_setzero_si256(), _mm256_setzero_si256()}; }
QD_INLINE I add_i(I x, I y) { return {_mm256_add_epi32(x.a, y.a), _mm256_add_epi32(x.b, y.b)}; }
QD_INLINE I sub_i(I x, I y) { return {_mm256_sub_epi32(x.a, y.a), _mm256_sub_epi32(x.b, y.b)}; }
QD_INLINE I min_i(I x, I y) { return {_mm256_min_epi32(x.a, y.a), _mm256_min_epi32(x.b, y.b)}; }
QD_INLINE I max_i(I x, I y) { return {_mm256_max_epi32(x.a, y.a), _mm256_max_epi32(x.b, y.b)}; }
QD_INLINE I and_i(I x, I y) { return {_mm256_and_si256(x.a, y.a), _mm256_and_si256(x.b, y.b)}; }
QD_INLINE I or_i(I x, I y) { return {_mm256_or_si256(x.a, y.a), _mm256_or_si256(x.b, y.b)}; }
template <int N> QD_INLINE I shift_left(I x) { return {_mm256_slli_epi32(x.a, N), _mm256_slli_epi32(x.b, N)}; }
template <int N> QD_INLINE I shift_right(I x) { return {_mm256_srli_epi32(x.a, N), _mm256_srli_epi32(x.b, N)}; }
QD_INLINE I shift_left_by(I x, int n) {
    const __m128i count = _mm_cvtsi32_si128(n);
    return {_mm256_sll_epi32(x.a, count), _mm256_sll_epi32(x.b, count)};
}
QD_INLINE I bits(F x) { return {_mm256_castps_si256(x.a), _mm256_castps_si256(x.b)}; }
QD_INLINE F from_bits(I x) { return {_mm256_castsi256_ps(x.a), _mm256_castsi256_ps(x.b)}; }
QD_INLINE F to_float(I x) { return {_mm256_cvtepi32_ps(x.a), _mm256_cvtepi32_ps(x.b)}; }
QD_INLINE I to_int(F x) { return {_mm256_cvtps_epi32(x.a), _mm256_cvtps_epi32(x.b)}; }
QD_INLINE int32_t largest_i(I x) {
    const __m256i eight = _mm256_max_epi32(x.a, x.b);
    __m128i v = _mm_max_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    v = _mm_max_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_max_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
QD_INLINE int32_t sum_i(I x) {
    const __m256i eight = _mm256_add_epi32(x.a, x.b);
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}
QD_INLINE F power_of_two(F p, F n) {  // −126 ≤ n ≤ 127; NaN stays NaN by p
    const I exponent = shift_left<23>(add_i(to_int(n), set_i(127)));
    return mul(p, from_bits(exponent));
}

QD_INLINE I load_u8(const uint8_t* p) {
    return {_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
QD_INLINE I load_s8(const int8_t* p) {
    return {_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)p)),
            _mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)(p + 8)))};
}
QD_INLINE __m128i to_bytes(I x) {  // the low byte of each lane
    const __m256i pick = _mm256_setr_epi8(0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1,
                                          0, 4, 8, 12, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1, -1);
    const __m256i order = _mm256_setr_epi32(0, 4, 2, 3, 1, 5, 6, 7);
    const __m256i low = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x.a, pick), order);
    const __m256i high = _mm256_permutevar8x32_epi32(_mm256_shuffle_epi8(x.b, pick), order);
    return _mm_unpacklo_epi64(_mm256_castsi256_si128(low), _mm256_castsi256_si128(high));
}
QD_INLINE void store_s8(int8_t* p, I x) {
    _mm_storeu_si128((__m128i*)p, to_bytes(max_i(set_i(-128), min_i(set_i(127), x))));
}
QD_INLINE void store_u8(uint8_t* p, I x) { _mm_storeu_si128((__m128i*)p, to_bytes(x)); }
QD_INLINE F load_half(const uint16_t* p) {
    return {_mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p)),
            _mm256_cvtph_ps(_mm_loadu_si128((const __m128i*)p + 1))};
}
QD_INLINE void store_half(uint16_t* p, F x) {
    constexpr int MODE = _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC;
    _mm_storeu_si128((__m128i*)p, _mm256_cvtps_ph(x.a, MODE));
    _mm_storeu_si128((__m128i*)p + 1, _mm256_cvtps_ph(x.b, MODE));
}

// The nearest bfloat16 in the high half of each lane, the low half zero; NaN stays NaN.
QD_INLINE I rounded_pairs(F x) {
    const I raw = bits(x), odd = and_i(shift_right<16>(raw), set_i(1));
    const I near = add_i(raw, add_i(odd, set_i(0x7fff)));
    const __m256 nan_a = _mm256_cmp_ps(x.a, x.a, _CMP_UNORD_Q), nan_b = _mm256_cmp_ps(x.b, x.b, _CMP_UNORD_Q);
    const I kept{_mm256_blendv_epi8(near.a, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan_a)),
                 _mm256_blendv_epi8(near.b, _mm256_set1_epi32(0x7fc00000), _mm256_castps_si256(nan_b))};
    return and_i(kept, set_i((int32_t)0xffff0000u));
}
QD_INLINE void store_pairs(uint32_t* p, F first, F second) {
    const I x = shift_right<16>(rounded_pairs(first)), y = shift_right<16>(rounded_pairs(second));
    const __m256i low = _mm256_permute4x64_epi64(_mm256_packus_epi32(x.a, x.b), 0xd8);
    const __m256i high = _mm256_permute4x64_epi64(_mm256_packus_epi32(y.a, y.b), 0xd8);
    _mm256_storeu_si256((__m256i*)p, low), _mm256_storeu_si256((__m256i*)p + 1, high);
}
QD_INLINE __m256i dot_u4_half(__m256i acc, __m256i u, __m256i s) {  // |15 · 255 · 2| fits 16 bits
    return _mm256_add_epi32(acc, _mm256_madd_epi16(_mm256_maddubs_epi16(u, s), _mm256_set1_epi16(1)));
}
QD_INLINE __m256i dot_u8_half(__m256i acc, __m256i u, __m256i s) {  // 16-bit products: none saturates
    const __m256i low = _mm256_and_si256(u, _mm256_set1_epi16(255)), high = _mm256_srli_epi16(u, 8);
    const __m256i even = _mm256_srai_epi16(_mm256_slli_epi16(s, 8), 8), odd = _mm256_srai_epi16(s, 8);
    acc = _mm256_add_epi32(acc, _mm256_madd_epi16(low, even));
    return _mm256_add_epi32(acc, _mm256_madd_epi16(high, odd));
}
QD_INLINE I dot_u8(I acc, I u, I s) { return {dot_u8_half(acc.a, u.a, s.a), dot_u8_half(acc.b, u.b, s.b)}; }
QD_INLINE I dot_u4(I acc, I u, I s) { return {dot_u4_half(acc.a, u.a, s.a), dot_u4_half(acc.b, u.b, s.b)}; }
// Whether the top bit of every byte is set.
QD_INLINE bool every_top_bit(I v) { return _mm256_movemask_epi8(_mm256_and_si256(v.a, v.b)) == -1; }
QD_INLINE I low_nibbles(I v) { return and_i(v, set_i(0x0f0f0f0f)); }
QD_INLINE I high_nibbles(I v) { return and_i(shift_right<4>(v), set_i(0x0f0f0f0f)); }

QD_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
QD_INLINE void pause() { _mm_pause(); }

}  // namespace qd
