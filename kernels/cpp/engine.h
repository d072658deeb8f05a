// A model, its threads, and engines: KV pools and the plan of a step over a model.
#pragma once
#include <memory>
#include <mutex>
#include <stdexcept>
#include <string>
#include <vector>

#include "attention.h"
#include "kv_pools.h"
#include "matrix.h"
#include "threads.h"

namespace qd {

struct Engine;

// What all threads of one step share. Plans are recycled in a ring: a late thread may still read
// an old one.
struct Plan {
    Engine* engine = nullptr;
    uint64_t first_phase = 0;
    int tokens = 0, logit_rows = 0;
    bool split = false;        // few tiles: splits of keys are separate chunks
    std::vector<int32_t> ids, positions, logit_tokens;
    std::vector<int64_t> tables;             // first table entry of each slice
    struct Table {
        std::vector<int32_t> open, sealed;   // per table entry: pool id, −1, or −2 − scratch block
        int scratch_blocks = 0;
    };
    std::vector<Table> groups;               // one per KV group
    std::vector<qd_block_copy> copies;
    struct Fill {
        int slice, block, low, high, row;    // positions low … high − 1 of a block; row of the first
    };
    std::vector<Fill> fills;
    std::vector<int> early;                  // fills that other tiles read: they come before attention
    std::vector<Tile> tiles;
    struct Chunk {
        int tile, head, first, last;         // splits first … last − 1
    };
    // For each kind of window (Group::schedule); each thread's range: longest first.
    std::vector<std::vector<Chunk>> schedules;
    std::vector<int> tile_of_row;
    int64_t partials = 0;                    // rows of partial results
    float* logits = nullptr;
    int64_t logits_stride = 0;
    // Or a streaming read, for benchmarks.
    const uint8_t* stream = nullptr;
    int64_t stream_bytes = 0;
};

// Memory of one thread.
struct Workspace {
    Memory rows;         // three rows of floats
    Memory activations;  // of a few rows, in any form
    int64_t width = 0;
    float* row(int i) const { return rows.as<float>() + i * width; }
};

class Model {
public:
    Model(const qd_model& model, int threads);
    ~Model();
    const qd_model& spec() const { return spec_; }
    const qd_layer& layer(int i) const { return layers_[i]; }
    Threads& threads() { return *threads_; }
    // The plan of the next step: empty, free of readers, its phases numbered.
    Plan& next_plan();
    Plan& plan(uint64_t step) { return plans_[step % PLANS]; }
    void wait_until_left(uint64_t step);
    Workspace& workspace(int thread) { return workspaces_[thread]; }
    int64_t widest() const { return widest_; }
    // Seconds of the fastest of several reads of zeroed memory by all threads.
    double read_seconds(int64_t bytes, int repeats);

    std::mutex mutex;  // one step at a time

private:
    const float* pad(const float* values, int n);
    static constexpr int PLANS = 4, PHASES_PER_LAYER = 16;

    qd_model spec_;
    std::vector<qd_layer> layers_;
    std::vector<std::unique_ptr<float[]>> padded_;
    std::vector<float> frequencies_, rope_scales_;
    int64_t widest_ = 0;
    Plan plans_[PLANS];
    uint64_t next_phase_ = 1;
    std::unique_ptr<Workspace[]> workspaces_;
    std::unique_ptr<Threads> threads_;  // last: its workers use what is above
};

// So few rows every thread prepares for itself: that is cheaper than to share them. A late thread may then read
// what others overwrite, and drops the result; ThreadSanitizer can't know that, so none under it.
#ifdef __SANITIZE_THREAD__
constexpr int ALONE_ROWS = 0;
#else
constexpr int ALONE_ROWS = 2;
#endif

struct Engine {
    Engine(Model& owner, const qd_kv_group* groups, int num_groups);
    ~Engine() { model.wait_until_left(last_step); }

    // One number per group.
    void allocate(const int32_t* open, const int32_t* sealed);
    void execute(const qd_step& step);
    // The pool that blocks `ids` lie in; throws std::invalid_argument when it lacks one of them.
    Pool& pool(int group, bool sealed, int64_t num, const int32_t* ids);

    const Group& group_of(int layer) const { return groups[places[layer].group]; }
    uint8_t* scratch_block(int id, int head) const {
        const KVLayout& kv = groups[0].kv;
        return scratch.data() + ((int64_t)id * kv.kv_heads + head) * kv.open_bytes();
    }
    // The first split that a tile reads something of, in layers of this window.
    int first_split(const Tile& tile, int window) const {
        return oldest_block(groups[0].kv, window, tile.position) / blocks_per_split(groups[0].kv);
    }

    Model& model;
    std::vector<Group> groups;  // their blocks have one size, and one form while they are open
    struct Place {
        int group, layer;  // which of the group's layers
    };
    std::vector<Place> places;  // [layers]
    std::vector<int> windows;   // different ones: of each schedule
    uint64_t last_step = 0;
    int tile_rows;  // rows of attention that one thread takes at a time
    Memory scratch, partials;
    // Buffers of a step, by rows: residual stream, projections, attention, MLP, activations, angles.
    int64_t row_capacity = 0, hidden_width, qkv_width, attention_width, inner_width;
    Memory x, delta, qkv, attended, inner, shared, shared_inner, cosines, sines;
    std::vector<AttentionScratch> attention;  // one a thread

private:
    void plan_step(const qd_step& step, Plan& plan);
    void plan_copies(const qd_step& step, Plan& plan) const;
    void plan_slice(const qd_step& step, int slice, int row, Plan& plan) const;
    void plan_table(const qd_step& step, int slice, int group, Plan::Table& table) const;
    int queries_per_tile(int tokens) const;
    void plan_chunks(Plan& plan) const;
    void plan_schedule(const Plan& plan, int window, std::vector<Plan::Chunk>& chunks) const;
    void deal(const Plan& plan, int window, std::vector<Plan::Chunk>& chunks) const;
    void reserve(const Plan& plan);
};

// The body of every thread: all phases of one step.
void run_step(Model& model, int thread, uint64_t step);
// The same of a plan that only reads a stream.
void read_stream(Model& model, const Plan& plan, int thread);

// Throws std::invalid_argument that names what is impossible.
void check(const qd_matrix& m, const char* name, int rows, int cols);
void check(const qd_model& model, int threads);
void check(const qd_model& model, const qd_kv_group* groups, int num_groups);

}  // namespace qd
