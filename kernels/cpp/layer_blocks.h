// Where K and V of a slice lie in a step: pool blocks, or the step's scratch.
#pragma once
#include "engine.h"

namespace qd {

// Where a slice's blocks lie, for one layer and KV head.
struct LayerBlocks final : BlockSource {
    LayerBlocks(const Engine& e, const Plan& plan, int layer_index, int kv_head, int slice)
        : engine(e), place(e.places[layer_index]), group(e.groups[place.group]), table(plan.groups[place.group]),
          head(kv_head), base(plan.tables[slice]) {}

    uint8_t* opened(int block) const {
        const int id = table.open[base + block];
        return id >= 0 ? group.open_block(place.layer, id, head) : engine.scratch_block(-2 - id, head);
    }
    // Null when the step has no place for it.
    uint8_t* sealed(int block) const {
        const int id = table.sealed[base + block];
        return id >= 0 ? group.sealed_block(place.layer, id, head) : nullptr;
    }
    Block find(int block, int query_block) const override {
        if (group.kv.reads_sealed(block, query_block)) return {sealed(block), true};
        return {opened(block), false};
    }

    const Engine& engine;
    const Engine::Place place;
    const Group& group;
    const Plan::Table& table;
    const int head;
    const int64_t base;
};

}  // namespace qd
