// What a step will do, from what the caller says: checked, and laid out for all threads.
#include <algorithm>

#include "engine.h"
#include "errors.h"

namespace qd {

namespace {

// Whether a query at start … end − 1 reads `block` sealed; the first one that might sees the most.
bool read_sealed(const Group& group, int block, int start, int end) {
    const KVLayout& kv = group.kv;
    if (!kv.seals() || block < kv.sink_blocks) return false;
    const int64_t first = std::max<int64_t>(start, ((int64_t)block + kv.residual_blocks + 1) * kv.block_size);
    return first < end && block >= group.oldest_block((int)first);
}

}  // namespace

void Engine::plan_step(const qd_step& step, Plan& plan) {
    plan.engine = this;
    plan.tokens = step.num_tokens;
    plan.ids.assign(step.token_ids, step.token_ids + step.num_tokens);
    plan.groups.resize(groups.size());
    plan.logits = step.logits, plan.logits_stride = step.logits_stride;
    for (int id : plan.ids) require(id >= 0 && id < model.spec().vocab, "token id %d is outside the vocabulary", id);
    plan_copies(step, plan);
    int row = 0;
    for (int s = 0; s < step.num_slices; s++) {
        const int start = step.starts[s], count = step.counts[s], logits = step.num_logits[s];
        require(start >= 0 && count >= 1 && start <= INT32_MAX - count - groups[0].kv.block_size && logits >= 0 &&
                    logits <= count,
                "slice %d has an impossible start, count or number of logits", s);
        require(row + (int64_t)count <= step.num_tokens, "slice %d exceeds the step's tokens", s);
        plan_slice(step, s, row, plan);
        row += count;
    }
    require(row == step.num_tokens, "%d tokens for slices of %d", step.num_tokens, row);
    plan.logit_rows = (int)plan.logit_tokens.size();
    require(!plan.logit_rows || (plan.logits && plan.logits_stride >= round_up(model.spec().vocab, TILE)),
            "the logits' buffer is missing or too narrow");
    plan_chunks(plan);
}

void Engine::plan_copies(const qd_step& step, Plan& plan) const {
    require(step.num_copies >= 0 && (step.num_copies == 0 || step.copies), "%d copies of blocks", (int)step.num_copies);
    for (int64_t i = 0; i < step.num_copies; i++) {
        const qd_block_copy& copy = step.copies[i];
        require(copy.group >= 0 && copy.group < (int)groups.size(), "a block is copied in KV group %d", copy.group);
        const Pool& pool = groups[copy.group].open;
        require(pool.has(copy.source) && pool.has(copy.target) && copy.source != copy.target,
                "open block id %d can't be copied to %d in a pool of %d", copy.source, copy.target, (int)pool.blocks);
        plan.copies.push_back(copy);
    }
}

// Large tiles read K and V less often; small ones leave work for every thread.
int Engine::queries_per_tile(int tokens) const {
    const qd_model& spec = model.spec();
    int queries = tile_rows / (spec.q_heads / spec.kv_heads);
    while (queries > 8 && (int64_t)tokens * spec.kv_heads < 8 * queries * model.threads().count()) queries /= 2;
    return queries;
}

void Engine::plan_slice(const qd_step& step, int slice, int row, Plan& plan) const {
    const int start = step.starts[slice], end = start + step.counts[slice], size = groups[0].kv.block_size;
    const int first = start / size, last = (end - 1) / size;
    const int queries = queries_per_tile(step.num_tokens);
    plan.tables.push_back((int64_t)plan.groups[0].open.size());
    for (int g = 0; g < (int)groups.size(); g++) plan_table(step, slice, g, plan.groups[g]);
    for (int p = start; p < end; p++) plan.positions.push_back(p);
    for (int b = first; b <= last; b++) {
        const int low = std::max(start, b * size), high = std::min(end, (b + 1) * size);
        plan.fills.push_back({slice, b, low, high, row + low - start});
        const int fill = (int)plan.fills.size() - 1;
        const bool late = first == last && high - low <= queries;  // one tile reads it, and no later block
        if (!late) plan.early.push_back(fill);
        for (int q = low; q < high; q += queries)
            plan.tiles.push_back({slice, row + q - start, q, std::min(queries, high - q), b, 0, late ? fill : -1, -1});
    }
    for (int i = end - step.num_logits[slice]; i < end; i++) plan.logit_tokens.push_back(row + i - start);
}

// The slice's blocks in one group. What no query of the slice can see is not looked at.
void Engine::plan_table(const qd_step& step, int slice, int group, Plan::Table& table) const {
    const Group& g = groups[group];
    const KVLayout& kv = g.kv;
    const int start = step.starts[slice], end = start + step.counts[slice], size = kv.block_size;
    const int first = start / size, last = (end - 1) / size, oldest = g.oldest_block(start);
    const int32_t* open_ids = step.open_blocks[group] + step.table_starts[slice];
    const int32_t* sealed_ids = step.sealed_blocks[group] + step.table_starts[slice];
    table.open.resize(table.open.size() + oldest, -1), table.sealed.resize(table.sealed.size() + oldest, -1);
    for (int b = oldest; b <= last; b++) {
        int open = open_ids[b];
        const int sealed = sealed_ids[b];
        require(open == -1 || g.open.has(open), "open block id %d is outside KV group %d's pool of %d", open, group,
                (int)g.open.blocks);
        require(sealed == -1 || g.sealed.has(sealed), "sealed block id %d is outside KV group %d's pool of %d", sealed,
                group, (int)g.sealed.blocks);
        const bool whole = b * size >= start && (b + 1) * size <= end;  // filled by this step alone
        if (open == -1 && whole && sealed >= 0) open = -2 - table.scratch_blocks++;
        require(open != -1 || (b < first && kv.reads_sealed(b, first)), "block %d is read open, but its table has no open id",
                b);
        require(sealed >= 0 || !read_sealed(g, b, start, end), "block %d is read sealed, but its table has no sealed id", b);
        table.open.push_back(open), table.sealed.push_back(sealed);
    }
}

void Engine::plan_chunks(Plan& plan) const {
    const int heads = model.spec().kv_heads, threads = model.threads().count();
    const int shared = model.spec().q_heads / heads;  // query heads of a KV head
    plan.split = (int64_t)plan.tiles.size() * heads < 4 * threads;
    plan.tile_of_row.resize(plan.tokens);
    for (int t = 0; t < (int)plan.tiles.size(); t++) {
        Tile& tile = plan.tiles[t];
        tile.num_splits = tile.block / blocks_per_split(groups[0].kv) + 1;
        if (plan.split && tile.num_splits > 1)
            tile.partial = plan.partials, plan.partials += (int64_t)heads * tile.num_splits * tile.count * shared;
        for (int i = 0; i < tile.count; i++) plan.tile_of_row[tile.row + i] = t;
    }
    plan.schedules.resize(windows.size());
    for (int w = 0; w < (int)windows.size(); w++) plan_schedule(plan, windows[w], plan.schedules[w]);
}

// The pieces of attention in layers of one window.
void Engine::plan_schedule(const Plan& plan, int window, std::vector<Plan::Chunk>& chunks) const {
    for (int t = 0; t < (int)plan.tiles.size(); t++) {
        const Tile& tile = plan.tiles[t];
        const int first = first_split(tile, window), last = tile.num_splits;
        for (int h = 0; h < model.spec().kv_heads; h++) {
            if (tile.partial < 0) chunks.push_back({t, h, first, last});
            else
                for (int s = first; s < last; s++) chunks.push_back({t, h, s, s + 1});
        }
    }
    if (!plan.split) deal(plan, window, chunks);
}

// Orders chunks so that every thread's range has its share of long ones, longest first.
void Engine::deal(const Plan& plan, int window, std::vector<Plan::Chunk>& chunks) const {
    const auto length = [&](const Plan::Chunk& c) {
        const int keys = plan.tiles[c.tile].position + 1;
        return (int64_t)(window ? std::min(keys, window) : keys) * plan.tiles[c.tile].count;
    };
    std::stable_sort(chunks.begin(), chunks.end(),
                     [&](const Plan::Chunk& a, const Plan::Chunk& b) { return length(a) > length(b); });
    const std::vector<Plan::Chunk> sorted = chunks;
    const int threads = model.threads().count();
    const int64_t count = sorted.size();
    std::vector<int64_t> next(threads);
    for (int t = 0; t < threads; t++) next[t] = count * t / threads;
    for (int64_t i = 0, t = 0; i < count; t = (t + 1) % threads)
        if (next[t] < count * (t + 1) / threads) chunks[next[t]++] = sorted[i++];
}

}  // namespace qd
