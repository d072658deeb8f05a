// Sequences with block tables, as the Python side's block manager keeps them, and steps over them.
#pragma once
#include <algorithm>

#include "random_model.h"

namespace stress {

// Ids of one pool, handed out in a random order.
class Pool {
public:
    Pool(int size, Random& random) : random_(&random) {
        for (int i = 0; i < size; i++) free_.push_back(i);
    }
    int take() {
        if (free_.empty()) std::abort();  // the caller makes pools that suffice
        std::swap(free_[random_->between(0, (int64_t)free_.size() - 1)], free_.back());
        const int id = free_.back();
        free_.pop_back();
        return id;
    }
    void release(int32_t& id) {
        if (id >= 0) free_.push_back(id);
        id = -1;
    }

private:
    std::vector<int> free_;
    Random* random_;
};

// A qd_kv_group with its layers, and how large its pools are.
struct Group {
    qd_kv_group kv = {};
    std::vector<int32_t> layers;
    int num_open = 0, num_sealed = 0;
};

// Layers by policy and window, each policy drawn from two. Some groups never release what left
// their layers' window.
inline std::vector<Group> random_groups(Random& random, const qd_model& model) {
    const int block_size = random.pick<int>({16, 32, 48, 64}), policies = (int)random.between(1, 2);
    std::vector<qd_kv_group> drawn;
    for (int i = 0; i < policies; i++) {
        qd_kv_group kv = {};
        kv.dtype = (int)random.between(QD_KV_BF16, QD_KV_FP8), kv.block_size = block_size;
        kv.sink_blocks = (int)random.between(0, 2), kv.residual_blocks = (int)random.between(0, 2);
        drawn.push_back(kv);
    }
    const bool releases = random.chance(70);
    std::vector<Group> groups;
    std::vector<int> kinds;
    for (int layer = 0; layer < model.num_layers; layer++) {
        const int kind = (int)random.between(0, policies - 1), window = releases ? model.layers[layer].window : 0;
        size_t g = 0;
        while (g < groups.size() && (kinds[g] != kind || groups[g].kv.window != window)) g++;
        if (g == groups.size()) {
            groups.emplace_back().kv = drawn[kind];
            groups[g].kv.window = window, kinds.push_back(kind);
        }
        groups[g].layers.push_back(layer);
    }
    return groups;
}

// Views of groups as the C ABI takes them; `groups` must outlive them.
inline std::vector<qd_kv_group> views(const std::vector<Group>& groups) {
    std::vector<qd_kv_group> out;
    for (const Group& group : groups) {
        out.push_back(group.kv);
        out.back().num_layers = (int32_t)group.layers.size(), out.back().layers = group.layers.data();
    }
    return out;
}

// Ids per block, −1 for none.
struct Table {
    std::vector<int32_t> open, sealed;
};

struct Sequence {
    std::vector<int32_t> tokens;
    std::vector<Table> tables;  // one per group
    int done = 0;               // tokens computed
    int left() const { return (int)tokens.size() - done; }
};

// The tables of all sequences in one group.
class GroupTables {
public:
    GroupTables(const Group& group, Random& random)
        : kv_(group.kv), open(group.num_open, random), sealed(group.num_sealed, random), random_(&random) {}

    // Before a step from `start` up to `end`: every block that it reads or writes gets its id.
    // Tokens from `certain` on may be dropped again: what they fill keeps its open copy.
    void allocate(Table& t, int start, int certain, int end) {
        const int blocks = (end + kv_.block_size - 1) / kv_.block_size;
        t.open.resize(blocks, -1), t.sealed.resize(blocks, -1);
        for (int b = start / kv_.block_size; b < blocks; b++) {
            if (stays_open(b, certain) && t.open[b] < 0) t.open[b] = open.take();
            const bool seals = kv_.dtype != QD_KV_BF16 && b >= kv_.sink_blocks;
            if (seals && (b + 1) * kv_.block_size <= end && t.sealed[b] < 0) t.sealed[b] = sealed.take();
        }
    }
    // After it, when `end` tokens are computed and kept: what nobody reads any more goes.
    void commit(Table& t, int end) {
        const int blocks = (end + kv_.block_size - 1) / kv_.block_size;
        for (int b = 0; b < (int)t.open.size(); b++) {
            const bool there = b >= oldest(end) && b < blocks, full = (b + 1) * kv_.block_size <= end;
            if (!there || !stays_open(b, end)) open.release(t.open[b]);
            if (!there || (!full && random_->chance(50))) sealed.release(t.sealed[b]);
        }
        t.open.resize(blocks), t.sealed.resize(blocks);
    }
    void free(Table& t) {
        for (int32_t& id : t.open) open.release(id);
        for (int32_t& id : t.sealed) sealed.release(id);
        t = {};
    }
    // The first block that a query at `position` sees.
    int oldest(int position) const {
        return kv_.window && position >= kv_.window ? (position - kv_.window + 1) / kv_.block_size : 0;
    }

private:
    bool stays_open(int block, int end) const {
        return kv_.dtype == QD_KV_BF16 || block < kv_.sink_blocks
            || block >= end / kv_.block_size - kv_.residual_blocks;
    }
    const qd_kv_group kv_;

public:
    Pool open, sealed;

private:
    Random* random_;
};

// The tables of all sequences.
class Tables {
public:
    Tables(const std::vector<Group>& groups, Random& random) {
        for (const Group& group : groups) groups_.emplace_back(group, random);
    }
    void allocate(Sequence& s, int certain, int end) {
        s.tables.resize(groups_.size());
        for (size_t g = 0; g < groups_.size(); g++) groups_[g].allocate(s.tables[g], s.done, certain, end);
    }
    void commit(Sequence& s, int end) {
        s.done = end;
        for (size_t g = 0; g < groups_.size(); g++) groups_[g].commit(s.tables[g], end);
    }
    void free(Sequence& s) {
        for (size_t g = 0; g < groups_.size(); g++) groups_[g].free(s.tables[g]);
        s.tables.clear(), s.done = 0;
    }
    GroupTables& operator[](size_t group) { return groups_[group]; }
    size_t size() const { return groups_.size(); }

private:
    std::vector<GroupTables> groups_;
};

// A qd_step and the arrays behind it. The padding of a row of logits ends with a canary.
struct Step {
    std::vector<int32_t> token_ids, starts, counts, num_logits;
    std::vector<Table> tables;  // one per group, of all slices
    std::vector<int64_t> table_starts;
    std::vector<qd_block_copy> copies;
    std::vector<float> logits;
    std::vector<const int32_t*> open_pointers, sealed_pointers;
    int64_t stride = 0, rows = 0, vocab;
    static constexpr float CANARY = 12345.0f;

    Step(int vocab, size_t groups) : tables(groups), vocab(vocab) {}

    // `tokens` from the sequence's s.done on.
    void add(const Sequence& s, const std::vector<int32_t>& tokens, int logits) {
        starts.push_back(s.done), counts.push_back((int32_t)tokens.size()), num_logits.push_back(logits);
        token_ids.insert(token_ids.end(), tokens.begin(), tokens.end());
        table_starts.push_back((int64_t)tables[0].open.size());
        for (size_t g = 0; g < tables.size(); g++) {
            Table& all = tables[g];
            all.open.insert(all.open.end(), s.tables[g].open.begin(), s.tables[g].open.end());
            all.sealed.insert(all.sealed.end(), s.tables[g].sealed.begin(), s.tables[g].sealed.end());
        }
        rows += logits;
    }
    qd_step view(int64_t extra) {
        stride = up(vocab, 32) + extra;
        logits.assign(rows * stride, CANARY);
        open_pointers.clear(), sealed_pointers.clear();
        for (const Table& t : tables) open_pointers.push_back(t.open.data()), sealed_pointers.push_back(t.sealed.data());
        return {(int32_t)starts.size(), (int32_t)token_ids.size(), token_ids.data(), starts.data(),
                counts.data(), num_logits.data(), table_starts.data(), open_pointers.data(), sealed_pointers.data(),
                logits.data(), stride, (int64_t)copies.size(), copies.data()};
    }
    bool canaries_live() const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = up(vocab, 32); c < stride; c++)
                if (logits[r * stride + c] != CANARY) return false;
        return true;
    }
};

}  // namespace stress
