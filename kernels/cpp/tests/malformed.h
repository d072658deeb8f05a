// Ways to spoil a model, its KV groups and a step; the C ABI must refuse each of them.
#pragma once
#include <functional>

#include "sequences.h"

namespace stress {

template <class... Parts>
struct Fault {
    const char* name;
    std::function<void(Parts&...)> spoil;
};

// model, and its layers, which are a copy that may be changed.
inline std::vector<Fault<qd_model, qd_layer*>> model_faults() {
    using M = qd_model&;
    using L = qd_layer*&;
    return {
        {"0 layers", [](M m, L) { m.num_layers = 0; }},
        {"hidden −8", [](M m, L) { m.hidden = -8; }},
        {"hidden 0", [](M m, L) { m.hidden = 0; }},
        {"inner 0", [](M m, L) { m.inner = 0; }},
        {"head_dim 0", [](M m, L) { m.head_dim = 0; }},
        {"head_dim that 16 doesn't divide", [](M m, L) { m.head_dim += 8; }},
        {"no heads", [](M m, L) { m.q_heads = 0; }},
        {"no KV heads", [](M m, L) { m.kv_heads = 0; }},
        {"KV heads that don't divide the heads", [](M m, L) { m.kv_heads = m.q_heads + 1; }},
        {"an empty vocabulary", [](M m, L) { m.vocab = 0; }},
        {"activation 9", [](M m, L) { m.activation = 9; }},
        {"act_mode 7", [](M m, L) { m.act_mode = 7; }},
        {"a null norm", [](M m, L) { m.norm = nullptr; }},
        {"null layers", [](M, L l) { l = nullptr; }},
        {"null frequencies", [](M m, L) { m.inverse_frequencies = nullptr; }},
        {"embedding with other columns", [](M m, L) { m.embedding.cols += 8; }},
        {"embedding with too few rows", [](M m, L) { m.embedding.rows -= 1; }},
        {"head with other columns", [](M m, L) { m.head.cols += 8; }},
        {"head with too few rows", [](M m, L) { m.head.rows -= 1; }},
        {"qkv with other rows", [](M, L l) { l->qkv.rows += 32; }},
        {"qkv with other columns", [](M, L l) { l->qkv.cols += 8; }},
        {"o with other columns", [](M, L l) { l->o.cols += 8; }},
        {"gate_up with other rows", [](M, L l) { l->gate_up.rows -= 2; }},
        {"down with other columns", [](M, L l) { l->down.cols -= 1; }},
        {"kind 9", [](M, L l) { l->qkv.kind = 9; }},
        {"W4 in groups of 0", [](M, L l) { l->o.kind = QD_W4, l->o.group = 0; }},
        {"W8 in groups of 4", [](M, L l) { l->o.kind = QD_W8, l->o.group = 4; }},
        {"W4 in groups that don't divide", [](M, L l) { l->o.kind = QD_W4, l->o.group = l->o.cols + 8; }},
        {"FP8 in groups of 0", [](M, L l) { l->o.kind = QD_FP8, l->o.group = 0; }},
        {"FP8 in groups of 6", [](M, L l) { l->o.kind = QD_FP8, l->o.group = 6; }},
        {"tiles that are too small", [](M, L l) { l->down.tile_bytes -= 64; }},
        {"tiles of an odd size", [](M, L l) { l->down.tile_bytes += 1; }},
        {"null tiles", [](M, L l) { l->gate_up.tiles = nullptr; }},
        {"tiles at an odd address", [](M, L l) { l->gate_up.tiles += 1; }},
        {"a null layer norm", [](M, L l) { l->input_norm = nullptr; }},
        {"a rope that isn't there", [](M m, L l) { l->rope = m.num_ropes; }},
        {"rope −1", [](M, L l) { l->rope = -1; }},
        {"window −1", [](M, L l) { l->window = -1; }},
    };
}

// Groups, each with its layers: the description, and the layers, which may be changed.
inline std::vector<Fault<qd_kv_group, std::vector<int32_t>>> group_faults() {
    using G = qd_kv_group&;
    using L = std::vector<int32_t>&;
    return {
        {"KV dtype 9", [](G kv, L) { kv.dtype = 9; }},
        {"KV dtype −1", [](G kv, L) { kv.dtype = -1; }},
        {"blocks of 0", [](G kv, L) { kv.block_size = 0; }},
        {"blocks of −16", [](G kv, L) { kv.block_size = -16; }},
        {"sink −1", [](G kv, L) { kv.sink_blocks = -1; }},
        {"residual −1", [](G kv, L) { kv.residual_blocks = -1; }},
        {"a window that its layers haven't", [](G kv, L) { kv.window += 1000; }},
        {"window −1", [](G kv, L) { kv.window = -1; }},
        {"no layers", [](G, L l) { l.clear(); }},
        {"a layer twice", [](G, L l) { l.push_back(l[0]); }},
        {"a layer that isn't there", [](G, L l) { l[0] = 1000; }},
        {"layer −1", [](G, L l) { l[0] = -1; }},
    };
}

// slice, token, tail, group: places that exist; tail: the slice's last block.
inline std::vector<Fault<qd_step, Step>> step_faults(size_t slice, size_t token, size_t tail, int group,
                                                     const Group& pools, int groups) {
    using V = qd_step&;
    using S = Step&;
    const int open = pools.num_open, sealed = pools.num_sealed, last = open - 1;
    // These come after the view was made: arrays that move are set anew.
    const auto copy = [](V v, S s, qd_block_copy one) {
        s.copies.push_back(one);
        v.copies = s.copies.data(), v.num_copies = (int64_t)s.copies.size();
    };
    return {
        {"token = vocab", [=](V, S s) { s.token_ids[token] = (int32_t)s.vocab; }},
        {"token −1", [=](V, S s) { s.token_ids[token] = -1; }},
        {"start −1", [=](V, S s) { s.starts[slice] = -1; }},
        {"an end that overflows", [=](V, S s) { s.starts[slice] = INT32_MAX; }},
        {"count 0", [=](V, S s) { s.counts[slice] = 0; }},
        {"count −3", [=](V, S s) { s.counts[slice] = -3; }},
        {"counts that don't add up", [=](V, S s) { s.counts[slice]--; }},
        {"more logits than tokens", [=](V, S s) { s.num_logits[slice] = s.counts[slice] + 1; }},
        {"num_logits −1", [=](V, S s) { s.num_logits[slice] = -1; }},
        {"an open id out of range", [=](V, S s) { s.tables[group].open[tail] = open; }},
        {"an open id below −1", [=](V, S s) { s.tables[group].open[tail] = -2; }},
        {"a sealed id out of range", [=](V, S s) { s.tables[group].sealed[tail] = sealed; }},
        {"a block without an id", [=](V, S s) { s.tables[group].open[tail] = s.tables[group].sealed[tail] = -1; }},
        {"−1 slices", [](V v, S) { v.num_slices = -1; }},
        {"−1 tokens", [](V v, S) { v.num_tokens = -1; }},
        {"−1 copies", [](V v, S) { v.num_copies = -1; }},
        {"a copy in group −1", [=](V v, S s) { copy(v, s, {-1, 0, last}); }},
        {"a copy in a group that isn't there", [=](V v, S s) { copy(v, s, {groups, 0, last}); }},
        {"a copy from outside the pool", [=](V v, S s) { copy(v, s, {group, open, 0}); }},
        {"a copy from −1", [=](V v, S s) { copy(v, s, {group, -1, 0}); }},
        {"a copy to outside the pool", [=](V v, S s) { copy(v, s, {group, 0, open}); }},
        {"a copy onto itself", [=](V v, S s) { copy(v, s, {group, last, last}); }},
        {"a stride below the vocabulary", [](V v, S s) {
             v.logits_stride = s.vocab - 1;
             if (s.rows == 0) v.num_slices = -1;  // no rows, no stride
         }},
    };
}

}  // namespace stress
