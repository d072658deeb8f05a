// Attention of a tile of queries over the KV blocks of their sequence (DESIGN §5, P2).
//
// Each query's arithmetic is a fixed sequence: keys in splits of SPLIT_TOKENS, in a split block by
// block with a running maximum (Milakov & Gimelshein 2018), partial results merged in the order of
// splits. How many queries share a tile, which thread runs it, and whether splits are computed one
// by one or apart, doesn't change a bit. Queries of a tile lie in one block, so that all of them
// read the same blocks sealed.
#pragma once
#include <vector>

#include "kv_blocks.h"

namespace qd {

constexpr int SPLIT_TOKENS = 512;

// What the queries of a layer have in common.
struct HeadRule {
    int queries_per_head;  // query heads that share a KV head
    int window;            // 0: none
    float scale, cap, eps;
    const float *q_norm, *k_norm;  // [head_dim] or null
};

// Queries at positions position … position + count − 1 of one slice; `row` is the first one's.
struct Tile {
    int slice, row, position, count, block;
    int num_splits;
    int fill;         // the fill that its last split does first, −1 if it has been done
    int64_t partial;  // first row of its partial results, −1 when all splits run in one go
};

struct Block {
    const uint8_t* data;
    bool sealed;
};

QD_INLINE int blocks_per_split(const KVLayout& kv) {
    return SPLIT_TOKENS > kv.block_size ? SPLIT_TOKENS / kv.block_size : 1;
}
// Blocks first … last that a tile reads in a split; older ones may not be there any more.
QD_INLINE int first_block(const KVLayout& kv, const Tile& tile, int split, int window) {
    const int begin = split * blocks_per_split(kv), oldest = oldest_block(kv, window, tile.position);
    return begin > oldest ? begin : oldest;
}
QD_INLINE int last_block(const KVLayout& kv, const Tile& tile, int split) {
    const int last = (split + 1) * blocks_per_split(kv) - 1;
    return last < tile.block ? last : tile.block;
}
// How many tokens of a block the tile reads, in eights as values lie; those that follow the newest
// one have a weight of 0.
QD_INLINE int tokens_read(const KVLayout& kv, const Tile& tile, int block) {
    const int64_t tokens = round_up(tile.position + tile.count - block * kv.block_size, 8);
    return tokens < kv.block_size ? (int)tokens : kv.block_size;
}

// The bytes of a block of which `tokens` are read, piece by piece.
struct Piece {
    const uint8_t* data;
    int64_t bytes;
};
struct Reading {
    Block block;
    int tokens;

    bool whole(const KVLayout& kv) const { return block.sealed || tokens == kv.block_size; }
    int key_rows(const KVLayout& kv) const { return kv.exact ? kv.head_dim : kv.head_dim / 2; }
    int pieces(const KVLayout& kv) const { return !block.data ? 0 : whole(kv) ? 1 : key_rows(kv) + 1; }
    Piece piece(const KVLayout& kv, int i) const {
        if (whole(kv)) return {block.data, block.sealed ? kv.sealed_bytes() : kv.open_bytes()};
        if (i == key_rows(kv))
            return {block.data + kv.open_panel_bytes(), kv.open_panel_bytes() / kv.block_size * tokens};
        return {block.data + (int64_t)i * kv.block_size * 4, (int64_t)tokens * 4};
    }
};

// Where a step's K/V lie, for one layer and KV head.
struct BlockSource {
    virtual Block find(int block, int query_block) const = 0;

protected:
    ~BlockSource() = default;
};

// Maximum, sum and weighted values of some of a query's keys. Exponents are of two.
struct Partial {
    float most, total;
    float* values;  // [head_dim]
};

constexpr float NOTHING = -1e30f;  // the maximum of no keys

// Adds `part` to `into`.
void merge(Partial& into, const Partial& part, int dim);

// Memory of one thread for tiles of up to `rows` rows (queries × heads).
class AttentionScratch {
public:
    void reserve(const KVLayout& kv, int most_rows);

    int64_t rows = 0, width = 0, keys = 0;  // head_dim and block_size rounded up to 32
    float *q = nullptr, *scores = nullptr, *values = nullptr, *merged = nullptr;
    float *most = nullptr, *total = nullptr, *offsets = nullptr, *starts = nullptr, *factors = nullptr;
    float *all_most = nullptr, *all_total = nullptr;
    uint32_t *open_q = nullptr, *block_q = nullptr, *weights = nullptr;
    float *scale = nullptr, *offset = nullptr, *four = nullptr;
    // Of 8-bit operands: queries [rows], weights [value groups][rows].
    float *q_scale = nullptr, *weight_scale = nullptr;
    int32_t *q_sum = nullptr, *weight_sum = nullptr;
    uint8_t *key_panel = nullptr, *value_panel = nullptr;

private:
    std::vector<uint8_t> memory_;
};

// Rotated, normed and scaled queries of the tile into scratch.q. q: rows of a step's projections,
// stride apart, from the first query head of this KV head on; cos, sin: [head_dim / 2] per row.
void load_queries(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const float* q, int64_t stride,
                  const float* cos, const float* sin, int64_t angle_stride, AttentionScratch& s);

// One split of the tile: scratch.most, total, values hold its partial result per row.
void attend_split(const KVLayout& kv, const HeadRule& rule, const Tile& tile, int split, const BlockSource& blocks,
                  AttentionScratch& s);

}  // namespace qd
