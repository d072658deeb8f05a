// The KV pools of one group of layers: [layers of the group][KV heads][blocks][a head's bytes], so
// that blocks of a head lie side by side and, with successive ids, are one stream.
#pragma once
#include <vector>

#include "kv_blocks.h"
#include "memory.h"

namespace qd {

struct Pool {
    Memory memory;
    int64_t heads = 0, blocks = 0, head_bytes = 0;  // heads: of all layers

    // `blocks` empty blocks; throws std::bad_alloc and is empty then.
    void allocate(int64_t new_blocks);
    int64_t block_bytes() const { return heads * head_bytes; }
    uint8_t* block(int64_t head, int64_t id) const { return memory.data() + (head * blocks + id) * head_bytes; }
    bool has(int64_t id) const { return id >= 0 && id < blocks; }
    // Whole blocks to and from [num][heads][head_bytes].
    void read(int64_t num, const int32_t* ids, uint8_t* data) const;
    void write(int64_t num, const int32_t* ids, const uint8_t* data);
};

struct Group {
    Group(const qd_kv_group& group, const qd_model& model);

    uint8_t* open_block(int layer, int id, int head) const { return open.block((int64_t)layer * kv.kv_heads + head, id); }
    uint8_t* sealed_block(int layer, int id, int head) const {
        return sealed.block((int64_t)layer * kv.kv_heads + head, id);
    }
    // The first block that a query at `position` may read.
    int oldest_block(int position) const { return qd::oldest_block(kv, window, position); }

    KVLayout kv;
    int window;
    std::vector<int32_t> layers;
    int schedule = 0;  // which of the plan's lists of chunks
    Pool open, sealed;
};

}  // namespace qd
