// What meets K and V of a block in attention: queries and weights as operands of panel products.
#pragma once
#include <type_traits>

#include "attention.h"

namespace qd {

QD_INLINE int rows_of(const HeadRule& rule, const Tile& tile) { return tile.count * rule.queries_per_head; }

QD_INLINE int position_of(const HeadRule& rule, const Tile& tile, int row) {
    return tile.position + row / rule.queries_per_head;
}

constexpr float LOG2_E = 1.44269504f;

// Two vectors of an operand: bfloat16 pairs, or floats in exact arithmetic.
template <bool EXACT> QD_INLINE void put(uint32_t* row, int i, F first, F second) {
    if (!EXACT) return store_pairs(row + i / 2, first, second);
    store((float*)row + i, first), store((float*)row + i + LANES, second);
}

// Sizes that are usual are known to the compiler, which unrolls their loops; 0 stands for others.
template <class Body> QD_INLINE void with_size(int size, Body body) {
    if (size == 64) body(std::integral_constant<int, 64>());
    else if (size == 128) body(std::integral_constant<int, 128>());
    else body(std::integral_constant<int, 0>());
}

// Entries of 4 bytes from one row of an operand to the next.
QD_INLINE int64_t operand_stride(const KVLayout& kv, int64_t width) { return kv.exact ? width : width / 2; }

// The second of two vectors; there is none when n is an odd number of vectors.
QD_INLINE F second(const float* x, int i, int n) { return i + LANES < n ? load(x + i + LANES) : zero(); }

// Queries as operands for a sealed block's keys, whose scales (s.scale, s.offset) they take in.
void fold_queries(const KVLayout& kv, int rows, AttentionScratch& s);

// From scores of a block whose first token is `first`: running maxima and sums, and weights as operands
// for the block's values, whose scales they take in.
void weigh_block(const KVLayout& kv, const HeadRule& rule, const Tile& tile, const Block& block, int first, int rows,
                 AttentionScratch& s);

}  // namespace qd
