#include "engine.h"

#include <algorithm>

#include "errors.h"

namespace qd {

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
    if (next_phase_ >= LAST_PHASE) {  // after weeks of small steps: numbers would overflow
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

Engine::Engine(Model& owner, const qd_kv_group* descriptions, int num_groups) : model(owner) {
    const qd_model& spec = model.spec();
    places.resize(spec.num_layers);
    for (int g = 0; g < num_groups; g++) {
        groups.emplace_back(descriptions[g], spec);
        Group& group = groups.back();
        for (int i = 0; i < (int)group.layers.size(); i++) places[group.layers[i]] = {g, i};
        group.schedule = int(std::find(windows.begin(), windows.end(), group.window) - windows.begin());
        if (group.schedule == (int)windows.size()) windows.push_back(group.window);
    }
    hidden_width = round_up(spec.hidden, TILE);
    qkv_width = round_up((spec.q_heads + 2 * spec.kv_heads) * spec.head_dim, TILE);
    attention_width = round_up(spec.q_heads * spec.head_dim, TILE);
    inner_width = round_up(spec.inner, TILE);
    const int heads = spec.q_heads / spec.kv_heads, block_size = groups[0].kv.block_size;
    attention.resize(model.threads().count());
    tile_rows = std::max(heads, std::min(192 / heads * heads, block_size * heads));
}

void Engine::allocate(const int32_t* open, const int32_t* sealed) {
    std::lock_guard<std::mutex> lock(model.mutex);
    model.wait_until_left(last_step);
    for (Group& group : groups) group.open.allocate(0), group.sealed.allocate(0);
    for (size_t g = 0; g < groups.size(); g++) {
        groups[g].open.allocate(open[g]);
        if (groups[g].kv.seals()) groups[g].sealed.allocate(sealed[g]);
    }
}

Pool& Engine::pool(int group, bool sealed, int64_t num, const int32_t* ids) {
    if (group < 0 || group >= (int)groups.size()) fail("there is no KV group %d", group);
    Pool& pool = sealed ? groups[group].sealed : groups[group].open;
    for (int64_t i = 0; i < num; i++)
        if (!pool.has(ids[i])) fail("block id %d is outside the pool of %d", ids[i], (int)pool.blocks);
    return pool;
}

void Engine::execute(const qd_step& step) {
    std::lock_guard<std::mutex> lock(model.mutex);
    Plan& plan = model.next_plan();
    plan_step(step, plan);
    if (plan.tokens == 0 && plan.copies.empty()) return;
    reserve(plan);
    last_step = model.threads().next_step();
    model.threads().run();
}

// Grows the step's buffers. Nobody may read the old ones then.
void Engine::reserve(const Plan& plan) {
    const KVLayout& kv = groups[0].kv;
    const int64_t rows = plan.tokens, dim = kv.head_dim;
    const int64_t partial_bytes = plan.partials * (dim + 2) * (int64_t)sizeof(float);
    int64_t scratch_blocks = 0;  // layers run one after the other, so that groups share them
    for (const Plan::Table& table : plan.groups) scratch_blocks = std::max<int64_t>(scratch_blocks, table.scratch_blocks);
    const int64_t scratch_bytes = scratch_blocks * kv.kv_heads * kv.open_bytes();
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
    shared_inner = Memory(activation_bytes(rows, model.spec().inner));
    row_capacity = rows;
}

}  // namespace qd
