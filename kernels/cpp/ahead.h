// Asks for K and V before attention reads them, while products of matrices leave memory idle: with
// many rows these compute, and what attention reads is as much as the weights.
#pragma once
#include <algorithm>

#include "engine.h"

namespace qd {

// Goes through what the chunks of one thread's range read in one layer, in the order of use.
class Ahead {
public:
    using Tiles = std::vector<Tile>;
    using Chunks = std::vector<Plan::Chunk>;

    // find(chunk, block) is a Block; kv, window: the layer's. At most MOST_LINES are asked for.
    template <class Find>
    void advance(const Tiles& tiles, const Chunks& chunks, const KVLayout& kv, int window, int64_t lines, Find find) {
        lines = std::min(lines, left_);
        left_ -= lines;
        while (lines > 0) {
            if (at_ < end_) {
                const int64_t n = std::min<int64_t>(lines, (end_ - at_ + 63) / 64);
                fetch(at_, n * 64);
                at_ += n * 64, lines -= n;
            } else if (piece_ + 1 < reading_.pieces(kv)) {
                open_piece(kv, piece_ + 1);
            } else if (!next_block(tiles, chunks, kv, window, find)) {
                left_ = 0;
                return;
            }
        }
    }

    // Starts anew with chunks first … last − 1.
    void restart(int64_t first, int64_t last) {
        *this = Ahead();
        chunk_ = first - 1, last_ = last, left_ = MOST_LINES;
    }

    bool idle() const { return left_ == 0; }
    void stop() { left_ = 0; }

private:
    static constexpr int64_t MOST_LINES = (2 << 20) / 64;  // a part of the last-level cache

    void open_piece(const KVLayout& kv, int piece) {
        piece_ = piece;
        const Piece bytes = reading_.piece(kv, piece);
        at_ = bytes.data, end_ = bytes.data + bytes.bytes;
    }

    template <class Find>
    bool next_block(const Tiles& tiles, const Chunks& chunks, const KVLayout& kv, int window, Find find) {
        if (block_ == last_block_) {
            if (++chunk_ >= last_) return false;
            const Plan::Chunk& chunk = chunks[chunk_];
            const Tile& tile = tiles[chunk.tile];
            block_ = first_block(kv, tile, chunk.first, window) - 1;
            last_block_ = last_block(kv, tile, chunk.last - 1);
        }
        const Plan::Chunk& chunk = chunks[chunk_];
        block_++;
        reading_ = {find(chunk, block_), tokens_read(kv, tiles[chunk.tile], block_)};
        open_piece(kv, 0);
        return true;
    }

    int64_t chunk_ = -1, last_ = 0, left_ = 0;
    int block_ = 0, last_block_ = 0, piece_ = 0;
    Reading reading_{{nullptr, true}, 0};
    const uint8_t *at_ = nullptr, *end_ = nullptr;
};

}  // namespace qd
