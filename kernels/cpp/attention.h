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
    float *scale = nullptr, *offset = nullptr;
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
