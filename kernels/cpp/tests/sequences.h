// Sequences with block tables, as the Python side's block manager keeps them, and steps over them.
#pragma once
#include <algorithm>

#include "random_model.h"

namespace stress {

// Ids of one pool, handed out in a random order.
class Pool {
public:
    Pool(int size, Random& random) : random_(random) {
        for (int i = 0; i < size; i++) free_.push_back(i);
    }
    int take() {
        if (free_.empty()) std::abort();  // the caller makes pools that suffice
        std::swap(free_[random_.between(0, (int64_t)free_.size() - 1)], free_.back());
        const int id = free_.back();
        free_.pop_back();
        return id;
    }
    void release(int id) { free_.push_back(id); }

private:
    std::vector<int> free_;
    Random& random_;
};

struct Sequence {
    std::vector<int32_t> tokens, open, sealed;  // open, sealed: ids per block, −1 for none
    int done = 0;                               // tokens computed
    int left() const { return (int)tokens.size() - done; }
};

class Tables {
public:
    Tables(const qd_kv& kv, int num_open, int num_sealed, Random& random)
        : kv_(kv), open_(num_open, random), sealed_(num_sealed, random) {}

    // Before a step up to `end`: every block that it reads or writes gets its id.
    void allocate(Sequence& s, int end) {
        const int blocks = (end + kv_.block_size - 1) / kv_.block_size;
        s.open.resize(blocks, -1), s.sealed.resize(blocks, -1);
        for (int b = s.done / kv_.block_size; b < blocks; b++) {
            if (stays_open(b, end) && s.open[b] < 0) s.open[b] = open_.take();
            const bool seals = kv_.dtype != QD_KV_BF16 && b >= kv_.sink_blocks;
            if (seals && (b + 1) * kv_.block_size <= end && s.sealed[b] < 0) s.sealed[b] = sealed_.take();
        }
    }
    // After it: blocks that no later query reads open lose their open copy.
    void commit(Sequence& s, int end) {
        for (int b = 0; b < (int)s.open.size(); b++)
            if (s.open[b] >= 0 && !stays_open(b, end)) open_.release(s.open[b]), s.open[b] = -1;
        s.done = end;
    }
    void free(Sequence& s) {
        for (int id : s.open) if (id >= 0) open_.release(id);
        for (int id : s.sealed) if (id >= 0) sealed_.release(id);
        s.open.clear(), s.sealed.clear(), s.done = 0;
    }

private:
    bool stays_open(int block, int end) const {
        return kv_.dtype == QD_KV_BF16 || block < kv_.sink_blocks
            || block >= end / kv_.block_size - kv_.residual_blocks;
    }
    const qd_kv kv_;
    Pool open_, sealed_;
};

// A qd_step and the arrays behind it. The padding of a row of logits ends with a canary.
struct Step {
    std::vector<int32_t> token_ids, starts, counts, num_logits, open, sealed;
    std::vector<int64_t> table_starts;
    std::vector<float> logits;
    int64_t stride = 0, rows = 0, vocab;
    static constexpr float CANARY = 12345.0f;

    explicit Step(int vocab) : vocab(vocab) {}

    void add(const Sequence& s, int count, int logits) {
        starts.push_back(s.done), counts.push_back(count), num_logits.push_back(logits);
        token_ids.insert(token_ids.end(), s.tokens.begin() + s.done, s.tokens.begin() + s.done + count);
        table_starts.push_back((int64_t)open.size());
        open.insert(open.end(), s.open.begin(), s.open.end());
        sealed.insert(sealed.end(), s.sealed.begin(), s.sealed.end());
        rows += logits;
    }
    qd_step view(int64_t extra) {
        stride = up(vocab, 32) + extra;
        logits.assign(rows * stride, CANARY);
        return {(int32_t)starts.size(), (int32_t)token_ids.size(), token_ids.data(), starts.data(),
                counts.data(), num_logits.data(), table_starts.data(), open.data(), sealed.data(),
                logits.data(), stride};
    }
    bool canaries_live() const {
        for (int64_t r = 0; r < rows; r++)
            for (int64_t c = up(vocab, 32); c < stride; c++)
                if (logits[r * stride + c] != CANARY) return false;
        return true;
    }
};

}  // namespace stress
