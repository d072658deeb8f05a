// Sixteen lanes as one AVX-512 register (needs F, BW, VL, DQ, VNNI, BF16). See simd.h.
#pragma once
#include <immintrin.h>
#include <stdint.h>

namespace qd {

using F = __m512;   // 16 × float32
using I = __m512i;  // 16 × int32, or 32 × bfloat16 as 16 pairs, or 64 bytes as 16 × 4

constexpr int MAX_ROWS = 6;    // rows of a GEMM tile whose accumulators stay in registers
constexpr int DIRECT_ROWS = 4; // of a product with codes, or with float8 that widens on the way

QD_INLINE F load(const float* p) { return _mm512_loadu_ps(p); }
QD_INLINE void store(float* p, F x) { _mm512_storeu_ps(p, x); }
QD_INLINE F set(float x) { return _mm512_set1_ps(x); }
QD_INLINE F zero() { return _mm512_setzero_ps(); }
QD_INLINE F add(F a, F b) { return _mm512_add_ps(a, b); }
QD_INLINE F sub(F a, F b) { return _mm512_sub_ps(a, b); }
QD_INLINE F mul(F a, F b) { return _mm512_mul_ps(a, b); }
QD_INLINE F div(F a, F b) { return _mm512_div_ps(a, b); }
QD_INLINE F fma(F a, F b, F c) { return _mm512_fmadd_ps(a, b, c); }    // a · b + c
QD_INLINE F fnma(F a, F b, F c) { return _mm512_fnmadd_ps(a, b, c); }  // c − a · b
QD_INLINE F max(F a, F b) { return _mm512_max_ps(a, b); }
QD_INLINE F min(F a, F b) { return _mm512_min_ps(a, b); }
QD_INLINE F abs(F a) { return _mm512_abs_ps(a); }
QD_INLINE F round(F a) { return _mm512_roundscale_ps(a, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC); }
QD_INLINE float sum(F a) { return _mm512_reduce_add_ps(a); }
QD_INLINE float largest(F a) { return _mm512_reduce_max_ps(a); }
QD_INLINE float smallest(F a) { return _mm512_reduce_min_ps(a); }
QD_INLINE F select_less(F a, F b, F yes, F no) {
    return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_LT_OQ), no, yes);
}

QD_INLINE I load_i(const void* p) { return _mm512_loadu_si512(p); }
QD_INLINE void store_i(void* p, I x) { _mm512_storeu_si512(p, x); }
QD_INLINE I set_i(int32_t x) { return _mm512_set1_epi32(x); }
QD_INLINE I zero_i() { return _mm512_setzero_si512(); }
QD_INLINE I add_i(I a, I b) { return _mm512_add_epi32(a, b); }
QD_INLINE I sub_i(I a, I b) { return _mm512_sub_epi32(a, b); }
QD_INLINE I min_i(I a, I b) { return _mm512_min_epi32(a, b); }
QD_INLINE I max_i(I a, I b) { return _mm512_max_epi32(a, b); }
QD_INLINE I and_i(I a, I b) { return _mm512_and_si512(a, b); }
QD_INLINE I or_i(I a, I b) { return _mm512_or_si512(a, b); }
template <int N> QD_INLINE I shift_left(I a) { return _mm512_slli_epi32(a, N); }
template <int N> QD_INLINE I shift_right(I a) { return _mm512_srli_epi32(a, N); }
QD_INLINE I shift_left_by(I a, int n) { return _mm512_sll_epi32(a, _mm_cvtsi32_si128(n)); }
QD_INLINE I bits(F a) { return _mm512_castps_si512(a); }
QD_INLINE F from_bits(I a) { return _mm512_castsi512_ps(a); }
QD_INLINE F to_float(I a) { return _mm512_cvtepi32_ps(a); }
QD_INLINE I to_int(F a) { return _mm512_cvtps_epi32(a); }  // to nearest even
QD_INLINE int32_t largest_i(I a) { return _mm512_reduce_max_epi32(a); }
QD_INLINE int32_t sum_i(I a) {  // _mm512_reduce_add_epi32 must not overflow
    const __m256i eight = _mm256_add_epi32(_mm512_castsi512_si256(a), _mm512_extracti64x4_epi64(a, 1));
    __m128i v = _mm_add_epi32(_mm256_castsi256_si128(eight), _mm256_extracti128_si256(eight, 1));
    v = _mm_add_epi32(v, _mm_shuffle_epi32(v, 0x4e));
    return _mm_cvtsi128_si32(_mm_add_epi32(v, _mm_shuffle_epi32(v, 0xb1)));
}

// Sums and maxima of four vectors each, to out[0 … 3]: half the shuffles of one after another.
template <class Join> QD_INLINE __m128 join4(const F (&x)[4], Join join) {
    const F low = join(_mm512_shuffle_f32x4(x[0], x[1], 0x44), _mm512_shuffle_f32x4(x[0], x[1], 0xee));
    const F high = join(_mm512_shuffle_f32x4(x[2], x[3], 0x44), _mm512_shuffle_f32x4(x[2], x[3], 0xee));
    F all = join(_mm512_shuffle_f32x4(low, high, 0x88), _mm512_shuffle_f32x4(low, high, 0xdd));
    all = join(all, _mm512_shuffle_ps(all, all, 0x4e));
    all = join(all, _mm512_shuffle_ps(all, all, 0xb1));
    const I firsts = _mm512_broadcast_i32x4(_mm_setr_epi32(0, 4, 8, 12));  // of each quarter
    return _mm512_castps512_ps128(_mm512_permutexvar_ps(firsts, all));
}
QD_INLINE void sum4(const F (&x)[4], float* out) {
    _mm_storeu_ps(out, join4(x, [](F a, F b) { return _mm512_add_ps(a, b); }));
}
QD_INLINE void largest4(const F (&x)[4], float* out) {
    _mm_storeu_ps(out, join4(x, [](F a, F b) { return _mm512_max_ps(a, b); }));
}
QD_INLINE void sum4_i(const I (&x)[4], int32_t* out) {
    const F as[4] = {from_bits(x[0]), from_bits(x[1]), from_bits(x[2]), from_bits(x[3])};
    _mm_storeu_ps((float*)out, join4(as, [](F a, F b) { return from_bits(_mm512_add_epi32(bits(a), bits(b))); }));
}
QD_INLINE void largest4_i(const I (&x)[4], int32_t* out) {
    const F as[4] = {from_bits(x[0]), from_bits(x[1]), from_bits(x[2]), from_bits(x[3])};
    _mm_storeu_ps((float*)out, join4(as, [](F a, F b) { return from_bits(_mm512_max_epi32(bits(a), bits(b))); }));
}
QD_INLINE F power_of_two(F p, F n) { return _mm512_scalef_ps(p, n); }  // p · 2ⁿ, n integral

QD_INLINE I load_u8(const uint8_t* p) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i*)p)); }
QD_INLINE I load_s8(const int8_t* p) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i*)p)); }
QD_INLINE void store_s8(int8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtsepi32_epi8(x)); }
QD_INLINE void store_u8(uint8_t* p, I x) { _mm_storeu_si128((__m128i*)p, _mm512_cvtepi32_epi8(x)); }
QD_INLINE F load_half(const uint16_t* p) { return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i*)p)); }
QD_INLINE void store_half(uint16_t* p, F x) {
    _mm256_storeu_si256((__m256i*)p, _mm512_cvtps_ph(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC));
}

// Thirty-two consecutive floats as bfloat16, so that floats 2n, 2n + 1 are pair n.
QD_INLINE void store_pairs(uint32_t* p, F first, F second) {
    _mm512_storeu_si512(p, (I)_mm512_cvtne2ps_pbh(second, first));
}
// 16-bit words with a float8 (E4M3) in their high byte → bfloat16. Normal numbers need their exponent
// moved by 120; others are looked up by their three bits. rare: whether there is any other.
QD_INLINE I fp8_words(I v, bool rare) {
    const I moved = _mm512_and_si512(_mm512_srai_epi16(v, 4), _mm512_set1_epi16((short)0x87f0));
    const I normal = _mm512_add_epi16(moved, _mm512_set1_epi16(0x3c00));
    if (__builtin_expect(!rare, 1)) return normal;
    const I table = _mm512_broadcast_i32x4(_mm_setr_epi16(0, 0x3b00, 0x3b80, 0x3bc0, 0x3c00, 0x3c20, 0x3c40, 0x3c60));
    const __mmask32 small = _mm512_testn_epi16_mask(v, _mm512_set1_epi16(0x7800));
    const I value = _mm512_permutexvar_epi16(_mm512_srli_epi16(v, 8), table);
    const I sign = _mm512_and_si512(v, _mm512_set1_epi16((short)0x8000));
    return _mm512_mask_mov_epi16(normal, small, _mm512_or_si512(value, sign));
}
// 4 bytes a lane of float8, elements 0, 2, 1, 3 → pairs (0, 1) and (2, 3).
QD_INLINE void widen_fp8(I v, I (&out)[2]) {
    const bool rare = _mm512_testn_epi8_mask(v, _mm512_set1_epi8(0x78)) != 0;
    out[0] = fp8_words(_mm512_slli_epi16(v, 8), rare);
    out[1] = fp8_words(v, rare);
}
// acc + even · even + odd · odd of bfloat16 pairs.
QD_INLINE F pair_dot(F acc, I a, I b) { return _mm512_dpbf16_ps(acc, (__m512bh)a, (__m512bh)b); }

// acc + Σ of 4 products of unsigned and signed bytes. dot_u4: one of the two has 4 bits, ≤ 15.
QD_INLINE I dot_u8(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
QD_INLINE I dot_u4(I acc, I u, I s) { return _mm512_dpbusd_epi32(acc, u, s); }
QD_INLINE I low_nibbles(I v) { return _mm512_and_si512(v, _mm512_set1_epi8(15)); }
QD_INLINE I high_nibbles(I v) { return _mm512_and_si512(_mm512_srli_epi16(v, 4), _mm512_set1_epi8(15)); }

QD_INLINE void prefetch_far(const void* p) { _mm_prefetch((const char*)p, _MM_HINT_T1); }
QD_INLINE void pause() { _mm_pause(); }

}  // namespace qd
