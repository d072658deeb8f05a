#include "kv_pools.h"

#include <new>

namespace qd {

void Pool::allocate(int64_t new_blocks) {
    int64_t bytes;
    blocks = 0;
    memory = Memory();
    if (__builtin_mul_overflow(new_blocks, block_bytes(), &bytes)) throw std::bad_alloc();
    memory = Memory(bytes);
    blocks = new_blocks;
}

// A head's blocks lie together here and a block's heads there; either order of loops jumps once.
void Pool::read(int64_t num, const int32_t* ids, uint8_t* data) const {
    for (int64_t i = 0; i < num; i++)
        for (int64_t head = 0; head < heads; head++, data += head_bytes)
            std::memcpy(data, block(head, ids[i]), head_bytes);
}

void Pool::write(int64_t num, const int32_t* ids, const uint8_t* data) {
    for (int64_t i = 0; i < num; i++)
        for (int64_t head = 0; head < heads; head++, data += head_bytes)
            std::memcpy(block(head, ids[i]), data, head_bytes);
}

Group::Group(const qd_kv_group& group, const qd_model& model)
    : kv{group.dtype, group.block_size, group.sink_blocks, group.residual_blocks,
         model.head_dim, model.kv_heads, model.act_mode == QD_ACT_FP32},
      window(group.window), layers(group.layers, group.layers + group.num_layers) {
    open.heads = sealed.heads = (int64_t)group.num_layers * kv.kv_heads;
    open.head_bytes = kv.open_bytes();
    sealed.head_bytes = kv.seals() ? kv.sealed_bytes() : 0;
}

}  // namespace qd
