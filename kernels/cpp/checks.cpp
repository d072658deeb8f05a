// What a caller may have got wrong, found before anything is computed.
#include "engine.h"
#include "errors.h"

namespace qd {

namespace {

int64_t least_tile_bytes(const qd_matrix& m) {
    const int64_t cols = m.cols;
    if (m.kind == QD_F32) return cols * 128;
    if (m.kind == QD_BF16) return (cols + 1) / 2 * 128;
    if (m.kind == QD_FP8) return (cols + 3) / 4 * 128 + (cols + m.group - 1) / m.group * 128;
    const int64_t codes = m.kind == QD_W4 ? cols * 16 : cols * 32;
    return codes + cols / m.group * (m.symmetric ? 64 : 96);
}

}  // namespace

void check(const qd_matrix& m, const char* name, int rows, int cols) {
    require(m.rows == rows && m.cols == cols, "%s is [%d, %d]; the model needs [%d, %d]", name, m.rows, m.cols, rows, cols);
    require(m.kind >= QD_W4 && m.kind <= QD_FP8, "%s has the unknown kind %d", name, m.kind);
    if (m.kind <= QD_W8)
        require(m.group >= 8 && m.group % 8 == 0 && m.cols % m.group == 0,
                "%s has groups of %d; they must be multiples of 8 that divide %d", name, m.group, m.cols);
    if (m.kind == QD_FP8)
        require(m.group >= 1 && (m.group % 4 == 0 || m.group == m.cols),
                "%s has groups of %d; they must be a multiple of 4, or all of %d columns", name, m.group, m.cols);
    require(m.tiles != nullptr && (uintptr_t)m.tiles % 64 == 0, "%s has no tiles, or not at a multiple of 64", name);
    require(m.tile_bytes >= least_tile_bytes(m) && m.tile_bytes % 64 == 0, "%s has tiles of %d bytes", name, (int)m.tile_bytes);
    for (int i = 0; m.permutation && i < m.cols; i++)
        require(m.permutation[i] >= 0 && m.permutation[i] < m.cols, "%s has the column %d in its permutation", name,
                m.permutation[i]);
}

void check(const qd_model& m, int threads) {
    require(threads >= 1 && threads <= 1024, "%d threads are not possible", threads);
    for (int size : {m.num_layers, m.hidden, m.inner, m.q_heads, m.kv_heads, m.head_dim, m.vocab, m.num_ropes})
        require(size >= 1, "a size of the model is %d", size);
    require(m.head_dim % LANES == 0 && m.head_dim <= 1024, "head_dim %d is not a multiple of %d up to 1024", m.head_dim, LANES);
    require(m.q_heads % m.kv_heads == 0, "%d query heads for %d KV heads", m.q_heads, m.kv_heads);
    require(m.activation >= QD_SILU && m.activation <= QD_GELU, "the activation %d is unknown", m.activation);
    require(m.act_mode == QD_ACT_INT8 || m.act_mode == QD_ACT_FP32, "the activation mode %d is unknown", m.act_mode);
    require(m.layers && m.norm && m.inverse_frequencies && m.rope_scales, "the model lacks an array");
    const int q = m.q_heads * m.head_dim, kv = m.kv_heads * m.head_dim;
    for (int i = 0; i < m.num_layers; i++) {
        const qd_layer& layer = m.layers[i];
        check(layer.qkv, "qkv", q + 2 * kv, m.hidden);
        check(layer.o, "o", m.hidden, q);
        check(layer.gate_up, "gate_up", 2 * m.inner, m.hidden);
        check(layer.down, "down", m.hidden, m.inner);
        require(layer.input_norm && layer.post_attention_norm, "layer %d lacks a norm", i);
        if (m.sandwich_norms)
            require(layer.pre_feedforward_norm && layer.post_feedforward_norm, "layer %d lacks a norm", i);
        require(layer.rope >= 0 && layer.rope < m.num_ropes, "layer %d has the RoPE kind %d", i, layer.rope);
        require(layer.window >= 0, "layer %d has a window of %d", i, layer.window);
    }
    check(m.embedding, "embedding", m.vocab, m.hidden);
    require(!m.embedding.permutation, "the embedding has a permutation");
    check(m.head, "head", m.vocab, m.hidden);
}

void check(const qd_model& m, const qd_kv_group* groups, int num_groups) {
    require(groups && num_groups >= 1 && num_groups <= m.num_layers, "%d KV groups for %d layers", num_groups, m.num_layers);
    std::vector<bool> placed(m.num_layers);
    int layers = 0;
    for (int g = 0; g < num_groups; g++) {
        const qd_kv_group& kv = groups[g];
        require(kv.dtype >= QD_KV_BF16 && kv.dtype <= QD_KV_FP8, "the KV format %d is unknown", kv.dtype);
        require(kv.block_size >= LANES && kv.block_size % LANES == 0 && kv.block_size <= 1024,
                "block_size %d is not a multiple of %d up to 1024", kv.block_size, LANES);
        require(kv.block_size == groups[0].block_size, "KV groups have blocks of %d and of %d tokens", kv.block_size,
                groups[0].block_size);
        require(kv.sink_blocks >= 0 && kv.residual_blocks >= 0, "KV group %d keeps %d sink and %d residual blocks", g,
                kv.sink_blocks, kv.residual_blocks);
        require(kv.layers && kv.num_layers >= 1, "KV group %d has no layers", g);
        for (int i = 0; i < kv.num_layers; i++) {
            const int layer = kv.layers[i];
            require(layer >= 0 && layer < m.num_layers, "KV group %d has the layer %d", g, layer);
            require(!placed[layer], "layer %d is in a KV group twice", layer);
            require(kv.window == 0 || m.layers[layer].window == kv.window, "KV group %d has a window of %d, its layer %d one of %d", g,
                    kv.window, layer, m.layers[layer].window);
            placed[layer] = true, layers++;
        }
    }
    require(layers == m.num_layers, "%d of %d layers are in a KV group", layers, m.num_layers);
}

}  // namespace qd
