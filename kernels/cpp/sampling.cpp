// Passes over a row of scores for qdeploy/runtime/row_passes.py, whose NumPy code has the last word
// wherever rounding could decide. qdeploy/runtime/noise.py defines the noise.
#include <math.h>
#include <string.h>

#include <algorithm>

#include "qdeploy_cpu.h"
#include "simd.h"

namespace {

constexpr int64_t BLOCK = 512;
constexpr uint64_t GAMMA = 0x9E3779B97F4A7C15u;
constexpr double REACH = 8;       // tokens more than REACH · T below the best need much more noise
constexpr double SLACK = 1e-6;    // far more than two ways to round a noisy score differ by

// SplitMix64's output without its last shift, which leaves the upper 31 bits as they are.
inline uint64_t mix(uint64_t x) {
    x = (x ^ (x >> 30)) * 0xBF58476D1CE4E5B9u;
    return (x ^ (x >> 27)) * 0x94D049BB133111EBu;
}

double gumbel(uint64_t key, int64_t token) {
    uint64_t bits = mix(key + (uint64_t)(token + 1) * GAMMA);
    bits ^= bits >> 31;
    return -log(-log(((double)(bits >> 12) + 0.5) * 0x1p-52));
}

// Upper bits, with a 0 at the end, that every noise of at least `noise` reaches.
uint32_t lowest_bits(double noise) {
    const double below = exp(-exp(SLACK - noise));  // the probability of less noise
    return (uint32_t)std::min(below * 0x1p32 - 2, 0x1p32 - 2) & ~1u;
}

// take(i) for each i whose flag is set, of BLOCK flags.
template <class Take>
void scan(const uint8_t* flags, Take take) {
    for (int64_t i = 0; i < BLOCK; i += 8) {
        uint64_t eight;
        memcpy(&eight, flags + i, 8);
        for (int64_t j = i; eight != 0 && j < i + 8; j++)  // nearly all are 0
            if (flags[j]) take(j);
    }
}

// What a token's noise must reach, by its distance from the best one.
struct Limits {
    uint32_t near, far;
    void set(double bound) {
        near = bound < -3 ? 0 : lowest_bits(bound);
        far = bound + REACH < -3 ? 0 : lowest_bits(bound + REACH);
    }
};

}  // namespace

QD_API int64_t qd_contenders(const float* scores, int64_t count, int64_t best, double temperature,
                             uint64_t key, int32_t* ids) {
    uint64_t counters[BLOCK];  // additions cost less than products
    for (int64_t i = 0; i < BLOCK; i++) counters[i] = (uint64_t)(i + 1) * GAMMA;
    uint32_t noise[BLOCK];
    uint8_t found[BLOCK];
    const double top = scores[best];
    const float near = nextafterf((float)(top - REACH * temperature), -INFINITY);
    const auto noisy = [&](int64_t i) { return (scores[i] - top) / temperature + gumbel(key, i); };
    double bound = noisy(best);  // the highest noisy score so far
    Limits limits;
    limits.set(bound);
    int64_t size = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t length = std::min(BLOCK, count - start);
        const float* row = scores + start;
        const uint64_t base = key + (uint64_t)start * GAMMA;
        const Limits now = limits;
        for (int64_t i = 0; i < BLOCK; i++) noise[i] = (uint32_t)(mix(base + counters[i]) >> 32);
        for (int64_t i = 0; i < length; i++)
            found[i] = (uint8_t)((noise[i] >= now.far) | ((noise[i] >= now.near) & (row[i] >= near)));
        memset(found + length, 0, (size_t)(BLOCK - length));
        scan(found, [&](int64_t i) {
            const double value = noisy(start + i);
            if (value < bound - SLACK) return;
            if (value > bound) limits.set(bound = value);
            ids[size++] = (int32_t)(start + i);
        });
    }
    // Those found before the bound had risen.
    return std::remove_if(ids, ids + size, [&](int32_t i) { return noisy(i) < bound - SLACK; }) - ids;
}

QD_API int64_t qd_near(const float* scores, int64_t count, float lowest, int32_t* ids) {
    uint8_t found[BLOCK];
    int64_t size = 0;
    for (int64_t start = 0; start < count; start += BLOCK) {
        const int64_t length = std::min(BLOCK, count - start);
        for (int64_t i = 0; i < length; i++) found[i] = (uint8_t)(scores[start + i] >= lowest);
        memset(found + length, 0, (size_t)(BLOCK - length));
        scan(found, [&](int64_t i) { ids[size++] = (int32_t)(start + i); });
    }
    return size;
}

namespace qd {

// eˣ for x ≤ 0, relative error below 2e-7 however small; at least e⁻⁸⁷. qd::exp errs by more the
// farther x is from 0, and a sum of a vocabulary lives from such x.
QD_INLINE F exp_below(F x) {
    const F held = max(set(-87.0f), x);
    const F n = round(mul(held, set(1.44269504f)));
    // ln 2 in two parts, the first of which has few enough bits for exact products
    const F r = fnma(n, set(-2.12194440e-4f), fnma(n, set(0.693359375f), held));
    return power_of_two(polynomial(r, 1.9841270e-4f, 1.3888889e-3f, 8.3333333e-3f, 4.1666667e-2f, 1.6666667e-1f,
                                   0.5f, 1.0f, 1.0f),
                        n);
}

}  // namespace qd

QD_API double qd_mass(const float* scores, int64_t count, float best, double factor) {
    using namespace qd;
    constexpr int64_t SHORT = 8 * LANES;  // few enough for sums in float32
    const F highest = set(best), scale = set((float)factor);
    const auto weight = [&](const float* from) {
        return exp_below(mul(sub(load(from), highest), scale));
    };
    double mass = 0;
    int64_t start = 0;
    for (; start + SHORT <= count; start += SHORT) {
        F sums = zero();
        for (int64_t i = 0; i < SHORT; i += LANES) sums = add(sums, weight(scores + start + i));
        mass += (double)sum(sums);
    }
    for (; start < count; start += LANES) {
        float rest[LANES];
        std::fill(rest, rest + LANES, -INFINITY);
        memcpy(rest, scores + start, (size_t)std::min<int64_t>(LANES, count - start) * sizeof(float));
        mass += (double)sum(weight(rest));
    }
    return mass;
}
