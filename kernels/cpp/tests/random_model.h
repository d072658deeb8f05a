// Small random models in the layouts of qdeploy_cpu.h. Every array has exactly the size that the
// header promises, so that AddressSanitizer sees a read past its end.
#pragma once
#include <cmath>
#include <cstdlib>
#include <cstring>
#include <memory>
#include <random>
#include <vector>

#include "qdeploy_cpu.h"

namespace stress {

struct Random {
    std::mt19937_64 bits;
    explicit Random(uint64_t seed) : bits(seed) {}
    // In low … high, both included.
    int64_t between(int64_t low, int64_t high) { return low + (int64_t)(bits() % (uint64_t)(high - low + 1)); }
    bool chance(int percent) { return between(1, 100) <= percent; }
    // In ±1.
    float real() { return (float)((double)(bits() >> 11) * 0x1p-52 - 1.0); }
    template <class T>
    T pick(const std::vector<T>& from) {
        return from[between(0, (int64_t)from.size() - 1)];
    }
};

// Owns arrays until the end of a case; 64-byte aligned, not a byte longer than asked for.
class Arena {
public:
    template <class T>
    T* array(int64_t count) {
        void* memory = nullptr;
        if (posix_memalign(&memory, 64, count > 0 ? count * sizeof(T) : 1) != 0) std::abort();
        std::memset(memory, 0, count * sizeof(T));
        held_.emplace_back(memory, std::free);
        return (T*)memory;
    }
    float* floats(int64_t count, Random& random, float around, float spread) {
        float* out = array<float>(count);
        for (int64_t i = 0; i < count; i++) out[i] = around + spread * random.real();
        return out;
    }

private:
    std::vector<std::unique_ptr<void, void (*)(void*)>> held_;
};

inline int64_t up(int64_t n, int64_t to) { return (n + to - 1) / to * to; }

inline uint32_t bits_of(float x) {
    uint32_t bits;
    std::memcpy(&bits, &x, sizeof bits);
    return bits;
}

// float16 of a normal number, cut; and back.
inline uint16_t half_of(float x) {
    const uint32_t bits = bits_of(x);
    const int exponent = (int)(bits >> 23 & 255) - 112;
    return exponent <= 0 ? 0 : (uint16_t)(exponent << 10 | (bits >> 13 & 1023));
}
inline float from_half(uint16_t half) {
    const uint32_t bits = half ? ((uint32_t)(half >> 10) + 112) << 23 | (uint32_t)(half & 1023) << 13 : 0;
    float x;
    std::memcpy(&x, &bits, sizeof x);
    return x;
}

// Which rows a tile's 32 places hold: paired for gate_up, else in order. −1: padding.
inline int64_t row_at(int64_t rows, bool paired, int64_t tile, int place) {
    if (!paired) return tile * 32 + place < rows ? tile * 32 + place : -1;
    const int64_t row = tile * 16 + place % 16;
    return row < rows / 2 ? (place < 16 ? row : rows / 2 + row) : -1;
}

// Bytes of a group of W4 or W8: codes, scales, zero points.
inline int64_t group_bytes(const qd_matrix& m) {
    return (m.kind == QD_W4 ? 16 : 32) * (int64_t)m.group + (m.symmetric ? 64 : 96);
}

// FP8: the column after the group that begins at `first`, filled to fours.
inline int64_t fp8_end(const qd_matrix& m, int64_t first) {
    return up(first + m.group < m.cols ? first + m.group : m.cols, 4);
}

inline float e4m3(uint8_t byte) {
    const int exponent = byte >> 3 & 15, mantissa = byte & 7;
    const float size = exponent ? std::ldexp(8.0f + mantissa, exponent - 10) : std::ldexp((float)mantissa, -9);
    return byte & 128 ? -size : size;
}

inline void fill_fp8(const qd_matrix& m, uint8_t* at, Random& random, uint32_t padding, float spread) {
    for (int64_t first = 0; first < m.cols; first += m.group) {
        const int64_t last = fp8_end(m, first);
        for (int64_t i = 0; i < (last - first) * 32; i++) at[i] = (uint8_t)(random.between(0, 126) + 128 * random.between(0, 1));
        at += (last - first) * 32;
        for (int place = 0; place < 32; place++)
            ((float*)at)[place] = padding >> place & 1 ? 0 : spread / 448 * (1.0f + 0.5f * random.real());
        at += 128;
    }
}

// Weights of about ±spread. group counts for W4, W8 and FP8 only.
inline qd_matrix random_matrix(Arena& arena, Random& random, int rows, int cols, int kind, int group,
                               bool paired, float spread) {
    qd_matrix m = {};
    m.rows = rows, m.cols = cols, m.kind = kind;
    const int64_t tiles = up(rows, 32) / 32;
    const bool codes = kind == QD_W4 || kind == QD_W8;
    int64_t code_bytes = kind == QD_F32 ? 128 * (int64_t)cols : 64 * up(cols, 2);
    if (codes) {
        m.group = group, m.symmetric = random.chance(50);
        code_bytes = kind == QD_W4 ? 16 * (int64_t)cols : 32 * (int64_t)cols;
    }
    if (kind == QD_FP8) {
        m.group = group, m.symmetric = true;
        code_bytes = 32 * up(cols, 4) + 128 * ((cols + group - 1) / group);
    }
    const int64_t groups = codes ? cols / group : 0;
    m.tile_bytes = up(code_bytes + groups * (codes && m.symmetric ? 64 : 96), 64);
    uint8_t* memory = arena.array<uint8_t>(tiles * m.tile_bytes);
    for (int64_t t = 0; t < tiles; t++) {
        uint8_t* tile = memory + t * m.tile_bytes;
        const auto pads = [&](int place) { return row_at(rows, paired, t, place) < 0; };
        if (kind == QD_FP8) {
            uint32_t padding = 0;
            for (int place = 0; place < 32; place++) padding |= (uint32_t)pads(place) << place;
            fill_fp8(m, tile, random, padding, spread);
        } else if (codes) {
            const float step = spread / (kind == QD_W4 ? 8 : 128);
            for (int64_t g = 0; g < groups; g++) {
                uint8_t* at = tile + g * group_bytes(m);
                uint16_t* scales = (uint16_t*)(at + code_bytes / groups);
                uint8_t* zeros = at + code_bytes / groups + 64;
                for (int64_t i = 0; i < code_bytes / groups; i++) at[i] = (uint8_t)random.between(0, 255);
                for (int i = 0; i < 32; i++) {
                    scales[i] = pads(i) ? 0 : half_of(step * (1.0f + 0.5f * random.real()));
                    if (!m.symmetric) zeros[i] = (uint8_t)random.between(0, kind == QD_W4 ? 15 : 255);
                }
            }
        } else {
            for (int64_t c = 0; c < cols; c++)
                for (int place = 0; place < 32; place++) {
                    const float w = pads(place) ? 0 : spread * random.real();
                    if (kind == QD_F32) ((float*)tile)[c * 32 + place] = w;
                    else ((uint16_t*)tile)[c / 2 * 64 + place * 2 + c % 2] = (uint16_t)(bits_of(w) >> 16);
                }
        }
    }
    m.tiles = memory;
    if (random.chance(40)) m.bias = arena.floats(up(rows, 32), random, 0, 0.1f);
    if (random.chance(30)) {
        int32_t* order = arena.array<int32_t>(cols);
        for (int i = 0; i < cols; i++) order[i] = i;
        for (int i = cols - 1; i > 0; i--) std::swap(order[i], order[random.between(0, i)]);
        m.permutation = order;
    }
    return m;
}

// The weight at a place of a tile, read by the header's words.
inline float weight(const qd_matrix& m, int64_t tile, int place, int64_t c) {
    const uint8_t* at = m.tiles + tile * m.tile_bytes;
    if (m.kind == QD_F32) return ((const float*)at)[c * 32 + place];
    if (m.kind == QD_BF16) {
        const uint32_t bits = (uint32_t)((const uint16_t*)at)[c / 2 * 64 + place * 2 + c % 2] << 16;
        float w;
        std::memcpy(&w, &bits, sizeof w);
        return w;
    }
    if (m.kind == QD_FP8) {
        int64_t first = 0;
        for (; first + m.group <= c; first += m.group) at += (fp8_end(m, first) - first) * 32 + 128;
        const int order[4] = {0, 2, 1, 3};
        const uint8_t byte = at[(c - first) / 4 * 128 + place * 4 + order[(c - first) % 4]];
        return e4m3(byte) * ((const float*)(at + (fp8_end(m, first) - first) * 32))[place];
    }
    at += c / m.group * group_bytes(m);
    c %= m.group;
    int code, zero = m.kind == QD_W4 ? 8 : 128;
    if (m.kind == QD_W4) {
        const uint8_t both = at[c / 8 * 128 + place * 4 + c % 4];
        code = c % 8 < 4 ? both & 15 : both >> 4;
    } else {
        code = at[c / 4 * 128 + place * 4 + c % 4];
    }
    at += (m.kind == QD_W4 ? 16 : 32) * (int64_t)m.group;
    if (!m.symmetric) zero = at[64 + place];
    return (float)(code - zero) * from_half(((const uint16_t*)at)[place]);
}

inline int random_group(Random& random, int cols) {
    std::vector<int> fits;
    for (int g = 8; g <= cols; g += 8)
        if (cols % g == 0) fits.push_back(g);
    return random.pick(fits);
}

// The whole of a model, with what it points to.
struct RandomModel {
    Arena arena;
    qd_model model = {};
    int sick = -1;  // a token whose hidden state isn't a number, if there is one

    RandomModel(Random& random, int act_mode) {
        qd_model& m = model;
        m.num_layers = (int)random.between(1, 3);
        m.kv_heads = (int)random.between(1, 3);
        m.q_heads = m.kv_heads * random.pick<int>({1, 2, 3, 4, 7});
        m.head_dim = 16 * random.pick<int>({1, 2, 3, 4, 5, 8});
        // Codes need columns in eights; floats take any number.
        const bool floats = random.chance(25);
        m.hidden = (int)(floats ? random.between(5, 100) : 8 * random.between(1, 16));
        m.inner = (int)(floats ? random.between(5, 150) : 8 * random.between(1, 24));
        m.vocab = (int)random.between(7, 200);
        m.activation = (int)random.between(0, 2);
        m.sandwich_norms = random.chance(40);
        m.act_mode = act_mode;
        m.norm_eps = 1e-5f;
        m.attention_scale = 1.0f / std::sqrt((float)m.head_dim);
        m.embedding_multiplier = random.chance(30) ? 5.5f : 1.0f;
        m.attention_cap = random.chance(30) ? 20.0f : 0.0f;
        m.logit_cap = random.chance(30) ? 15.0f : 0.0f;
        m.num_ropes = (int)random.between(1, 2);
        m.inverse_frequencies = arena.floats(m.num_ropes * m.head_dim / 2, random, 0.5f, 0.5f);
        m.rope_scales = arena.floats(m.num_ropes, random, 1.0f, 0.2f);
        m.norm = arena.floats(m.hidden, random, 1.0f, 0.3f);
        m.embedding = matrix(random, m.vocab, m.hidden, floats, false, 1.0f);
        m.embedding.bias = nullptr, m.embedding.permutation = nullptr;
        const bool tied = random.chance(40);
        m.head = tied ? m.embedding : matrix(random, m.vocab, m.hidden, floats, false, 0.3f);
        if (!tied) spoil(sick = m.vocab - 1);
        qd_layer* layers = arena.array<qd_layer>(m.num_layers);
        for (int i = 0; i < m.num_layers; i++) fill(random, layers[i], floats);
        m.layers = layers;
    }

    // A token that is well.
    int32_t token(Random& random) const { return (int32_t)random.between(0, sick >= 0 ? sick - 1 : model.vocab - 1); }

private:
    void spoil(int token) {
        const qd_matrix& m = model.embedding;
        uint8_t* tile = const_cast<uint8_t*>(m.tiles) + token / 32 * m.tile_bytes;
        const int place = token % 32;
        if (m.kind == QD_F32) ((float*)tile)[place] = NAN;
        else if (m.kind == QD_BF16) ((uint16_t*)tile)[place * 2] = 0x7fc0;
        else if (m.kind == QD_FP8) ((float*)(tile + fp8_end(m, 0) * 32))[place] = NAN;
        else ((uint16_t*)(tile + (m.kind == QD_W4 ? 16 : 32) * (int64_t)m.group))[place] = 0x7e00;
    }

    qd_matrix matrix(Random& random, int rows, int cols, bool floats, bool paired, float spread) {
        const bool dense = floats || cols % 8 != 0;
        const int kind = (int)random.between(dense ? QD_BF16 : QD_W4, QD_FP8);
        int group = kind == QD_W4 || kind == QD_W8 ? random_group(random, cols) : 0;
        if (kind == QD_FP8) group = random.chance(40) ? cols : 4 * (int)random.between(1, cols / 4 + 1);
        return random_matrix(arena, random, rows, cols, kind, group, paired, spread);
    }

    void fill(Random& random, qd_layer& layer, bool floats) {
        const qd_model& m = model;
        const int q = m.q_heads * m.head_dim, kv = m.kv_heads * m.head_dim;
        layer.qkv = matrix(random, q + 2 * kv, m.hidden, floats, false, 0.3f);
        layer.o = matrix(random, m.hidden, q, floats, false, 0.2f);
        layer.gate_up = matrix(random, 2 * m.inner, m.hidden, floats, true, 0.3f);
        layer.down = matrix(random, m.hidden, m.inner, floats, false, 0.2f);
        layer.input_norm = arena.floats(m.hidden, random, 1.0f, 0.3f);
        layer.post_attention_norm = arena.floats(m.hidden, random, 1.0f, 0.3f);
        if (m.sandwich_norms) {
            layer.pre_feedforward_norm = arena.floats(m.hidden, random, 1.0f, 0.3f);
            layer.post_feedforward_norm = arena.floats(m.hidden, random, 1.0f, 0.3f);
        }
        if (random.chance(40)) {
            layer.q_norm = arena.floats(m.head_dim, random, 1.0f, 0.3f);
            layer.k_norm = arena.floats(m.head_dim, random, 1.0f, 0.3f);
        }
        layer.window = random.chance(40) ? (int)random.between(1, 90) : 0;
        layer.rope = (int)random.between(0, m.num_ropes - 1);
    }
};

}  // namespace stress
