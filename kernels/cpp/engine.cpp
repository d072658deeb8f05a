#include "engine.h"

#include <sys/mman.h>

#include <algorithm>
#include <cstdio>

namespace qd {

namespace {

constexpr int64_t HUGE_PAGE = 2 << 20;

std::string describe(const char* format, int a, int b = 0) {
    char text[256];
    std::snprintf(text, sizeof text, format, a, b);
    return text;
}

[[noreturn]] void fail(const std::string& message) { throw std::invalid_argument(message); }

int64_t pool_bytes(const KVLayout& kv, int64_t blocks, int64_t head_bytes) {
    int64_t bytes;
    if (__builtin_mul_overflow(blocks, (int64_t)kv.layers * kv.kv_heads * head_bytes, &bytes)) throw std::bad_alloc();
    return bytes;
}

}  // namespace

Memory::Memory(int64_t bytes) : bytes_(bytes) {
    if (bytes <= 0) return;
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
    if (p == MAP_FAILED) {
        bytes_ = 0;
        throw std::bad_alloc();
    }
    data_ = (uint8_t*)p;
#ifdef MADV_HUGEPAGE
    if (bytes >= HUGE_PAGE) madvise(p, bytes, MADV_HUGEPAGE);
#endif
}

void Memory::release() {
    if (data_) munmap(data_, bytes_);
}

Model::Model(const qd_model& model, int threads) : spec_(model), layers_(model.layers, model.layers + model.num_layers) {
    const int hidden = spec_.hidden;
    spec_.layers = layers_.data();
    spec_.norm = pad(spec_.norm, hidden);
    frequencies_.assign(spec_.inverse_frequencies, spec_.inverse_frequencies + spec_.num_ropes * spec_.head_dim / 2);
    rope_scales_.assign(spec_.rope_scales, spec_.rope_scales + spec_.num_ropes);
    spec_.inverse_frequencies = frequencies_.data();
    spec_.rope_scales = rope_scales_.data();
    for (qd_layer& layer : layers_) {
        for (const float** norm : {&layer.input_norm, &layer.post_attention_norm, &layer.pre_feedforward_norm,
                                   &layer.post_feedforward_norm})
            *norm = pad(*norm, hidden);
        layer.q_norm = pad(layer.q_norm, spec_.head_dim);
        layer.k_norm = pad(layer.k_norm, spec_.head_dim);
    }
    widest_ = round_up(std::max({hidden, spec_.inner, spec_.q_heads * spec_.head_dim}), TILE);
    workspaces_.reset(new Workspace[threads]);
    for (int i = 0; i < threads; i++) {
        Workspace& w = workspaces_[i];
        w.width = widest_;
        w.rows = Memory(3 * widest_ * sizeof(float));
        w.activations = Memory(activation_bytes(ALONE_ROWS, widest_));
    }
    threads_.reset(new Threads(threads, [this](int thread, uint64_t step) { run_step(*this, thread, step); }));
}

Model::~Model() {
    // A forked child has no workers to join, and what they wait for can't be destroyed.
    if (threads_->forked()) (void)threads_.release();
}

const float* Model::pad(const float* values, int n) {
    if (!values) return nullptr;
    padded_.emplace_back(new float[round_up(n, TILE)]());
    std::copy(values, values + n, padded_.back().get());
    return padded_.back().get();
}

Plan& Model::next_plan() {
    const uint64_t step = threads_->next_step();
    if (step > PLANS) wait_until_left(step - PLANS);
    if (next_phase_ >> (63 - CHUNK_BITS)) {  // after weeks of small steps: numbers would overflow
        wait_until_left(step - 1);
        threads_->forget();
        next_phase_ = 1;
    }
    Plan& next = plan(step);
    next = Plan{};
    next.first_phase = next_phase_;
    next_phase_ += spec_.num_layers * PHASES_PER_LAYER + 8;
    return next;
}

void Model::wait_until_left(uint64_t step) {
    threads_->close(step);
    while (!threads_->left(step)) std::this_thread::yield();
}

Engine::Engine(Model& owner, const qd_kv& config) : model(owner) {
    const qd_model& spec = model.spec();
    kv = KVLayout{config.dtype, config.block_size, config.sink_blocks, config.residual_blocks,
                  spec.head_dim, spec.kv_heads, spec.num_layers, spec.act_mode == QD_ACT_FP32};
    hidden_width = round_up(spec.hidden, TILE);
    qkv_width = round_up((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim, TILE);
    attention_width = round_up(spec.q_heads * spec.head_dim, TILE);
    inner_width = round_up(spec.inner, TILE);
    const int heads = spec.q_heads / spec.kv_heads;
    attention.resize(model.threads().count());
    tile_rows = std::max(heads, std::min(192 / heads * heads, kv.block_size * heads));
}

void Engine::allocate(int open, int sealed) {
    std::lock_guard<std::mutex> lock(model.mutex);
    model.wait_until_left(last_step);
    num_open = num_sealed = 0;
    open_pool = Memory(), sealed_pool = Memory();
    open_pool = Memory(pool_bytes(kv, open, kv.open_bytes()));
    if (kv.seals()) sealed_pool = Memory(pool_bytes(kv, sealed, kv.sealed_bytes()));
    num_open = open, num_sealed = sealed;
}

void Engine::execute(const qd_step& step) {
    std::lock_guard<std::mutex> lock(model.mutex);
    Plan& plan = model.next_plan();
    plan_step(step, plan);
    if (plan.tokens == 0) return;
    reserve(plan);
    last_step = model.threads().next_step();
    model.threads().run();
}

void Engine::plan_step(const qd_step& step, Plan& plan) {
    plan.engine = this;
    plan.tokens = step.num_tokens;
    plan.ids.assign(step.token_ids, step.token_ids + step.num_tokens);
    plan.starts.assign(step.starts, step.starts + step.num_slices);
    plan.counts.assign(step.counts, step.counts + step.num_slices);
    plan.logits = step.logits, plan.logits_stride = step.logits_stride;
    for (int id : plan.ids)
        if (id < 0 || id >= model.spec().vocab) fail(describe("token id %d is outside the vocabulary", id));
    int row = 0;
    for (int s = 0; s < step.num_slices; s++) {
        if (step.starts[s] < 0 || step.counts[s] < 1 || step.starts[s] > INT32_MAX - step.counts[s] - kv.block_size ||
            step.num_logits[s] < 0 || step.num_logits[s] > step.counts[s])
            fail(describe("slice %d has an impossible start, count or number of logits", s));
        if (row + step.counts[s] > step.num_tokens) fail(describe("slice %d exceeds the step's tokens", s));
        plan_slice(step, s, row, plan);
        row += step.counts[s];
    }
    if (row != step.num_tokens) fail(describe("%d tokens for slices of %d", step.num_tokens, row));
    plan.logit_rows = (int)plan.logit_tokens.size();
    if (plan.logit_rows && (!plan.logits || plan.logits_stride < round_up(model.spec().vocab, TILE)))
        fail("the logits' buffer is missing or too narrow");
    plan.alone = plan.tokens <= ALONE_ROWS;
    plan_chunks(plan);
}

// Large tiles read K and V less often; small ones leave work for every thread.
int Engine::queries_per_tile(int tokens) const {
    int queries = tile_rows / (model.spec().q_heads / model.spec().kv_heads);
    while (queries > 8 && (int64_t)tokens * kv.kv_heads < 8 * queries * model.threads().count()) queries /= 2;
    return queries;
}

void Engine::plan_slice(const qd_step& step, int slice, int row, Plan& plan) {
    const int start = step.starts[slice], end = start + step.counts[slice], size = kv.block_size;
    const int first = start / size, last = (end - 1) / size, base = (int)plan.open.size();
    const int queries = queries_per_tile(step.num_tokens);
    plan.tables.push_back(base);
    for (int b = 0; b <= last; b++) {
        int open = step.open_blocks[step.table_starts[slice] + b];
        const int sealed = step.sealed_blocks[step.table_starts[slice] + b];
        if (open < -1 || open >= num_open) fail(describe("open block id %d is outside the pool of %d", open, num_open));
        if (sealed < -1 || sealed >= (kv.seals() ? num_sealed : 0))
            if (sealed != -1) fail(describe("sealed block id %d is outside the pool of %d", sealed, num_sealed));
        const bool whole = b * size >= start && (b + 1) * size <= end;  // filled by this step alone
        if (open == -1 && whole && sealed >= 0) open = -2 - plan.scratch_blocks++;
        if (open == -1 && (b >= first || b < kv.sink_blocks || !kv.seals() || b >= first - kv.residual_blocks))
            fail(describe("block %d is read open, but its table has no open id", b));
        if (sealed == -1 && kv.reads_sealed(b, last))
            fail(describe("block %d is read sealed, but its table has no sealed id", b));
        plan.open.push_back(open), plan.sealed.push_back(sealed);
    }
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

void Engine::plan_chunks(Plan& plan) {
    const int heads = model.spec().kv_heads, threads = model.threads().count();
    const int shared = model.spec().q_heads / heads;  // query heads of a KV head
    const int per_split = std::max(1, SPLIT_TOKENS / kv.block_size);
    plan.split = (int64_t)plan.tiles.size() * heads < 4 * threads;
    plan.tile_of_row.resize(plan.tokens);
    for (int t = 0; t < (int)plan.tiles.size(); t++) {
        Tile& tile = plan.tiles[t];
        tile.num_splits = tile.block / per_split + 1;
        const bool apart = plan.split && tile.num_splits > 1;
        if (apart) tile.partial = plan.partials, plan.partials += (int64_t)heads * tile.num_splits * tile.count * shared;
        for (int i = 0; i < tile.count; i++) plan.tile_of_row[tile.row + i] = t;
        for (int h = 0; h < heads; h++)
            for (int s = 0; s < (apart ? tile.num_splits : 1); s++)
                plan.chunks.push_back({t, h, s, apart ? s + 1 : tile.num_splits});
    }
    if (!plan.split) deal(plan, threads);
}

// Orders chunks so that every thread's range has its share of long ones, longest first.
void Engine::deal(Plan& plan, int threads) {
    const auto length = [&](const Plan::Chunk& c) {
        return (int64_t)(plan.tiles[c.tile].position + 1) * plan.tiles[c.tile].count;
    };
    std::stable_sort(plan.chunks.begin(), plan.chunks.end(),
                     [&](const Plan::Chunk& a, const Plan::Chunk& b) { return length(a) > length(b); });
    const std::vector<Plan::Chunk> sorted = plan.chunks;
    const int64_t count = sorted.size();
    std::vector<int64_t> next(threads);
    for (int t = 0; t < threads; t++) next[t] = count * t / threads;
    for (int64_t i = 0, t = 0; i < count; t = (t + 1) % threads)
        if (next[t] < count * (t + 1) / threads) plan.chunks[next[t]++] = sorted[i++];
}

// Grows the step's buffers. Nobody may read the old ones then.
void Engine::reserve(const Plan& plan) {
    const int64_t rows = plan.tokens, dim = kv.head_dim;
    const int64_t partial_bytes = plan.partials * (dim + 2) * (int64_t)sizeof(float);
    const int64_t scratch_bytes = (int64_t)plan.scratch_blocks * kv.kv_heads * kv.open_bytes();
    const bool grow = rows > row_capacity;
    if (!grow && partial_bytes <= partials.bytes() && scratch_bytes <= scratch.bytes() && last_step) return;
    model.wait_until_left(model.threads().next_step() - 1);
    if (!last_step)
        for (AttentionScratch& scratch : attention) scratch.reserve(kv, tile_rows);
    if (partial_bytes > partials.bytes()) partials = Memory(), partials = Memory(partial_bytes);
    if (scratch_bytes > scratch.bytes()) scratch = Memory(), scratch = Memory(scratch_bytes);
    if (!grow) return;
    const int64_t angles = rows * model.spec().num_ropes * dim / 2;
    const auto floats = [](int64_t n) { return Memory(n * (int64_t)sizeof(float)); };
    row_capacity = 0;
    x = floats(rows * hidden_width), delta = floats(rows * hidden_width), qkv = floats(rows * qkv_width);
    attended = floats(rows * attention_width), inner = floats(rows * inner_width);
    cosines = floats(angles), sines = floats(angles);
    shared = Memory(activation_bytes(rows, model.widest()));
    row_capacity = rows;
}

}  // namespace qd
