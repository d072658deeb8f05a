// One step on one thread: the same phases on all of them, in the same order.
#include <algorithm>
#include <cmath>

#include "ahead.h"
#include "layer_blocks.h"

namespace qd {

namespace {

constexpr int ROWS_PER_CHUNK = 8;  // of row-wise phases
constexpr int FEW_ROWS = 16;       // up to so many, reading weights takes longer than using them
constexpr int IDLE_ROWS = 8;       // beyond so many, products leave memory time for K and V
constexpr int MANY_ROWS = 128;     // from so many on, attention computes longer than it reads
constexpr int64_t EXPECTED_BYTES = 16384;
constexpr int64_t WORK_PER_LINE = 48;  // weights × rows of a tile per line of K and V, fetched ahead

class Step final {
public:
    Step(Model& model, int thread, uint64_t number)
        : model_(model), spec_(model.spec()), plan_(model.plan(number)), engine_(*plan_.engine), kv_(engine_.groups[0].kv),
          work_(model.workspace(thread)), scratch_(engine_.attention[thread]), thread_(thread),
          next_phase_(plan_.first_phase) {}

    void run() {
        if (!plan_.copies.empty()) copy_blocks();
        if (!plan_.tokens) return;
        look_ahead_at(0);
        embed();
        for (int i = 0; i < spec_.num_layers; i++) layer(i);
        if (plan_.logit_rows) logits();
    }

private:
    template <class Prepare, class Work, class Meanwhile>
    void phase(int count, Prepare prepare, Work work, Meanwhile meanwhile) {
        run_phase(model_.threads(), thread_, next_phase_++, count, prepare, work, meanwhile);
    }
    template <class Work> void phase(int count, Work work) {
        phase(count, [] {}, work, [] {});
    }

    // A phase over rows in chunks of several.
    template <class Work> void each_row(int rows, Work work) {
        phase((rows + ROWS_PER_CHUNK - 1) / ROWS_PER_CHUNK, [&](int chunk) {
            const int end = std::min(rows, (chunk + 1) * ROWS_PER_CHUNK);
            for (int row = chunk * ROWS_PER_CHUNK; row < end; row++) work(row);
        });
    }

    // Chunks of columns of a matrix when `rows` rows are multiplied.
    int64_t columns_of(const qd_matrix& m, int64_t rows) const {
        const int64_t tiles = tiles_of(m);
        return std::min<int64_t>(tiles, (rows > FEW_ROWS ? 8 : 2) * model_.threads().count());
    }

    // Fetches the beginning of this thread's range of the matrix that comes next: the hardware
    // fetches ahead only once it has seen a stream.
    void expect(const qd_matrix& m, int64_t rows) {
        if (rows > FEW_ROWS) return;
        const int64_t tiles = tiles_of(m), columns = columns_of(m, rows);
        const int64_t column = columns * thread_ / model_.threads().count();
        const uint8_t* begin = m.tiles + tiles * column / columns * m.tile_bytes;
        fetch(begin, std::min<int64_t>(EXPECTED_BYTES, m.tiles + tiles * m.tile_bytes - begin));
    }

    // epilogue(row, tile, values) of matrix · source(row). source returns a row of floats, padded
    // with zeros; it may use the thread's rows 0 and 1. next: the matrix of the following phase.
    template <class Source, class Epilogue>
    void linear(const qd_matrix& m, int rows, Source source, Epilogue epilogue, const qd_matrix* next) {
        const bool alone = rows <= ALONE_ROWS;
        const Activations a =
            lay_out(m, spec_.act_mode, rows, alone ? work_.activations.data() : engine_.shared.data());
        const auto put = [&](int row) { put_row(source(row), row, m, a, work_.row(2)); };
        if (!alone) each_row(rows, put);
        product(m, a, rows, 1,
                [&] {
                    if (alone)
                        for (int row = 0; row < rows; row++) put(row);
                },
                epilogue, [](int64_t, int64_t, int64_t, int64_t) {}, next);
    }

    // The product with rows that have their form. Chunks hold whole units of tiles; after(low, high,
    // first, last) follows rows low … high − 1 of tiles first … last − 1.
    template <class Prepare, class Epilogue, class After>
    void product(const qd_matrix& m, const Activations& a, int rows, int64_t unit, Prepare prepare, Epilogue epilogue,
                 After after, const qd_matrix* next) {
        const TileKernel* kernels = tile_kernels(m, spec_.act_mode);
        const int64_t tiles = tiles_of(m), units = (tiles + unit - 1) / unit;
        int64_t height = cached_rows(a), bands = 1;
        if (rows > height) bands = (rows + height - 1) / height;
        height = (rows + bands - 1) / bands;
        const int64_t columns = std::min(units, columns_of(m, rows));
        phase(int(bands * columns), prepare,
              [&](int chunk) {
                  const int64_t column = chunk / bands, band = chunk % bands;
                  const int64_t low = band * height, high = std::min<int64_t>(rows, low + height);
                  const int64_t first = units * column / columns * unit;
                  const int64_t last = std::min(tiles, units * (column + 1) / columns * unit);
                  multiply(m, kernels, a, low, high, first, last, epilogue, [&](int64_t n) {
                      if (!ahead_.idle()) look_ahead(m.cols * n);
                  });
                  after(low, high, first, last);
              },
              [&] {
                  if (next) expect(*next, rows);
              });
    }

    void feed_forward(const qd_layer& layer, const float* norm, const qd_matrix* next);

    void copy_blocks();

    const std::vector<Plan::Chunk>& chunks_of(int index) const {
        return plan_.schedules[engine_.group_of(index).schedule];
    }
    // From now on products ask for what this thread will read of K and V of the layer.
    void look_ahead_at(int index) {
        ahead_.stop();
        if (plan_.tokens <= IDLE_ROWS || plan_.tokens > MANY_ROWS || index == spec_.num_layers) return;
        const int64_t chunks = chunks_of(index).size(), threads = model_.threads().count();
        ahead_layer_ = index;
        ahead_.restart(chunks * thread_ / threads, chunks * (thread_ + 1) / threads);
    }
    void look_ahead(int64_t work);

    void embed();
    void layer(int index);
    void store_keys(int index, const qd_layer& layer);
    void fill(int index, const qd_layer& layer, const Plan::Fill& fill, int head);
    void attend(int index, const qd_layer& layer);
    void attend_chunk(const HeadRule& rule, const Plan::Chunk& chunk, int index, const qd_layer& layer);
    const float* attended(int row, int window);
    void logits();
    void add_normed(const float* weight);

    void add_residual(int64_t row, int64_t tile, const F* values) {
        if (spec_.sandwich_norms) return store_tile(delta(row), tile, values);
        float* out = x(row) + tile * TILE;
        store(out, add(load(out), values[0])), store(out + LANES, add(load(out + LANES), values[1]));
    }

    float* x(int64_t row) { return engine_.x.as<float>() + row * engine_.hidden_width; }
    float* delta(int64_t row) { return engine_.delta.as<float>() + row * engine_.hidden_width; }
    float* qkv(int64_t row) { return engine_.qkv.as<float>() + row * engine_.qkv_width; }
    float* inner(int64_t row) { return engine_.inner.as<float>() + row * engine_.inner_width; }
    const float* normed(const float* row, const float* weight) {
        rms_norm(row, weight, spec_.hidden, spec_.norm_eps, work_.row(0));
        return work_.row(0);
    }
    int64_t angle_stride() const { return (int64_t)spec_.num_ropes * spec_.head_dim / 2; }
    float* cosines(int rope) { return engine_.cosines.as<float>() + (int64_t)rope * spec_.head_dim / 2; }
    float* sines(int rope) { return engine_.sines.as<float>() + (int64_t)rope * spec_.head_dim / 2; }
    Partial partial(const Tile& tile, int head, int split, int row) {
        const int64_t rows = (int64_t)tile.count * (spec_.q_heads / spec_.kv_heads);
        const int64_t slot = (int64_t)head * tile.num_splits + split;
        float* at = engine_.partials.as<float>() + (tile.partial + slot * rows + row) * (kv_.head_dim + 2);
        return {at[kv_.head_dim], at[kv_.head_dim + 1], at};
    }

    Model& model_;
    const qd_model& spec_;
    Plan& plan_;
    Engine& engine_;
    const KVLayout& kv_;  // of any group: for what is equal in all of them
    Workspace& work_;
    AttentionScratch& scratch_;
    const int thread_;
    uint64_t next_phase_;
    Ahead ahead_;
    int ahead_layer_ = 0;
};

// All copies of one head by one thread: one may write what a later one reads.
void Step::copy_blocks() {
    const int heads = spec_.kv_heads;
    phase(spec_.num_layers * heads, [&](int chunk) {
        const Engine::Place place = engine_.places[chunk / heads];
        const Group& group = engine_.groups[place.group];
        for (const qd_block_copy& copy : plan_.copies)
            if (copy.group == place.group)
                std::memcpy(group.open_block(place.layer, copy.target, chunk % heads),
                            group.open_block(place.layer, copy.source, chunk % heads), group.kv.open_bytes());
    });
}

void Step::embed() {
    each_row(plan_.tokens, [&](int row) {
        float* out = x(row);
        dequantize_row(spec_.embedding, plan_.ids[row], out);
        if (spec_.embedding_multiplier != 1.0f)
            for (int64_t i = 0; i < engine_.hidden_width; i += LANES)
                store(out + i, mul(load(out + i), set(spec_.embedding_multiplier)));
        const int half = spec_.head_dim / 2;
        for (int rope = 0; rope < spec_.num_ropes; rope++)
            for (int i = 0; i < half; i++) {
                const float angle = (float)plan_.positions[row] * spec_.inverse_frequencies[rope * half + i];
                cosines(rope)[row * angle_stride() + i] = std::cos(angle) * spec_.rope_scales[rope];
                sines(rope)[row * angle_stride() + i] = std::sin(angle) * spec_.rope_scales[rope];
            }
    });
}

void Step::layer(int index) {
    const qd_layer& layer = model_.layer(index);
    const int rows = plan_.tokens;
    const auto into_residual = [&](int64_t row, int64_t tile, const F* values) { add_residual(row, tile, values); };
    linear(layer.qkv, rows, [&](int row) { return normed(x(row), layer.input_norm); },
           [&](int64_t row, int64_t tile, const F* values) { store_tile(qkv(row), tile, values); }, nullptr);
    store_keys(index, layer);
    attend(index, layer);
    look_ahead_at(index + 1);
    linear(layer.o, rows, [&](int row) { return attended(row, layer.window); }, into_residual, &layer.gate_up);
    if (spec_.sandwich_norms) add_normed(layer.post_attention_norm);
    const float* norm = spec_.sandwich_norms ? layer.pre_feedforward_norm : layer.post_attention_norm;
    const bool last = index + 1 == spec_.num_layers;
    feed_forward(layer, norm, last ? &spec_.head : &model_.layer(index + 1).qkv);
    if (spec_.sandwich_norms) add_normed(layer.post_feedforward_norm);
}

// A tile of gate_up makes LANES columns of down's input: whole groups of them are quantized at once
// by the thread that has them in its cache.
void Step::feed_forward(const qd_layer& layer, const float* norm, const qd_matrix* next) {
    const int rows = plan_.tokens;
    const auto source = [&](int row) { return normed(x(row), norm); };
    const auto gated = [&](int64_t row, int64_t tile, const F* values) {
        const F gate = spec_.activation == QD_SILU        ? silu(values[0])
                       : spec_.activation == QD_GELU_TANH ? gelu_tanh(values[0])
                                                          : gelu(values[0]);
        store(inner(row) + tile * LANES, mul(gate, values[1]));
    };
    const auto into_residual = [&](int64_t row, int64_t tile, const F* values) { add_residual(row, tile, values); };
    const qd_matrix& down = layer.down;
    const bool by_groups = rows > ALONE_ROWS && form_of(down, spec_.act_mode) == Form::INT8 && !down.permutation &&
                           down.group % LANES == 0 && down.cols / down.group >= columns_of(layer.gate_up, rows);
    if (!by_groups) {
        linear(layer.gate_up, rows, source, gated, &down);
        return linear(down, rows, [&](int row) { return inner(row); }, into_residual, next);
    }
    const Activations in = lay_out(layer.gate_up, spec_.act_mode, rows, engine_.shared.data());
    const Activations out = lay_out(down, spec_.act_mode, rows, engine_.shared_inner.data());
    const auto quantize = [&](int64_t low, int64_t high, int64_t first, int64_t last) {
        for (int64_t row = low; row < high; row++)
            quantize_groups(inner(row), row, first * LANES / out.group, last * LANES / out.group, out);
    };
    each_row(rows, [&](int row) { put_row(source(row), row, layer.gate_up, in, work_.row(2)); });
    product(layer.gate_up, in, rows, out.group / LANES, [] {}, gated, quantize, &down);
    product(down, out, rows, 1, [] {}, into_residual, [](int64_t, int64_t, int64_t, int64_t) {}, next);
}

void Step::add_normed(const float* weight) {
    each_row(plan_.tokens, [&](int row) {
        const float* add_to = normed(delta(row), weight);
        for (int64_t i = 0; i < engine_.hidden_width; i += LANES)
            store(x(row) + i, add(load(x(row) + i), load(add_to + i)));
    });
}

// Rotates and stores K and V that the step's queries of other tiles read.
void Step::store_keys(int index, const qd_layer& layer) {
    const int heads = spec_.kv_heads;
    phase((int)plan_.early.size() * heads, [&](int chunk) {
        fill(index, layer, plan_.fills[plan_.early[chunk / heads]], chunk % heads);
    });
}

// Rotates and stores the tokens of one block and head; a block that is full now is sealed at once.
void Step::fill(int index, const qd_layer& layer, const Plan::Fill& fill, int head) {
    const LayerBlocks blocks(engine_, plan_, index, head, fill.slice);
    const KVLayout& kv = blocks.group.kv;
    const int dim = spec_.head_dim, begin = fill.block * kv.block_size, end = begin + kv.block_size;
    uint8_t* open = blocks.opened(fill.block);
    // What a pool block held before may be NaN, and 0 · NaN isn't 0.
    if (fill.low == begin && fill.high < end) std::memset(open, 0, kv.open_bytes());
    float* key = work_.row(0);
    for (int p = fill.low; p < fill.high; p++) {
        const int64_t row = fill.row + p - fill.low;
        const float* source = qkv(row) + (spec_.q_heads + head) * dim;
        std::memcpy(key, source, dim * sizeof(float));
        if (layer.k_norm) head_norm(key, layer.k_norm, dim, spec_.norm_eps);
        rotate(key, cosines(layer.rope) + row * angle_stride(), sines(layer.rope) + row * angle_stride(), dim);
        store_token(kv, open, p - begin, key, source + spec_.kv_heads * dim);
    }
    uint8_t* sealed = fill.high == end ? blocks.sealed(fill.block) : nullptr;
    if (sealed) seal_block(kv, open, sealed);
}

void Step::look_ahead(int64_t work) {
    const Group& group = engine_.group_of(ahead_layer_);
    ahead_.advance(plan_.tiles, chunks_of(ahead_layer_), group.kv, group.window, work / WORK_PER_LINE,
                   [&](const Plan::Chunk& chunk, int block) {
                       const Tile& tile = plan_.tiles[chunk.tile];
                       return LayerBlocks(engine_, plan_, ahead_layer_, chunk.head, tile.slice).find(block, tile.block);
                   });
}

void Step::attend(int index, const qd_layer& layer) {
    const HeadRule rule{spec_.q_heads / spec_.kv_heads, layer.window, spec_.attention_scale, spec_.attention_cap,
                        spec_.norm_eps, layer.q_norm, layer.k_norm};
    const std::vector<Plan::Chunk>& chunks = chunks_of(index);
    phase((int)chunks.size(), [] {}, [&](int i) { attend_chunk(rule, chunks[i], index, layer); },
          [&] { expect(layer.o, plan_.tokens); });
}

void Step::attend_chunk(const HeadRule& rule, const Plan::Chunk& chunk, int index, const qd_layer& layer) {
    const Tile& tile = plan_.tiles[chunk.tile];
    AttentionScratch& s = scratch_;
    const int dim = kv_.head_dim, heads = rule.queries_per_head, rows = tile.count * heads;
    const LayerBlocks blocks(engine_, plan_, index, chunk.head, tile.slice);
    const KVLayout& kv = blocks.group.kv;
    if (tile.fill >= 0 && chunk.last == tile.num_splits) fill(index, layer, plan_.fills[tile.fill], chunk.head);
    load_queries(kv, rule, tile, qkv(0) + (int64_t)chunk.head * heads * dim, engine_.qkv_width, cosines(layer.rope),
                 sines(layer.rope), angle_stride(), s);
    if (tile.partial >= 0) {
        attend_split(kv, rule, tile, chunk.first, blocks, s);
        for (int r = 0; r < rows; r++) {
            float* at = partial(tile, chunk.head, chunk.first, r).values;
            std::memcpy(at, s.values + (int64_t)r * dim, dim * sizeof(float));
            at[dim] = s.most[r], at[dim + 1] = s.total[r];
        }
        return;
    }
    for (int r = 0; r < rows; r++) s.all_most[r] = NOTHING, s.all_total[r] = 0;
    std::memset(s.merged, 0, (int64_t)rows * dim * sizeof(float));
    for (int split = chunk.first; split < chunk.last; split++) {
        attend_split(kv, rule, tile, split, blocks, s);
        for (int r = 0; r < rows; r++) {
            Partial all{s.all_most[r], s.all_total[r], s.merged + (int64_t)r * dim};
            merge(all, {s.most[r], s.total[r], s.values + (int64_t)r * dim}, dim);
            s.all_most[r] = all.most, s.all_total[r] = all.total;
        }
    }
    for (int r = 0; r < rows; r++) {
        float* out = engine_.attended.as<float>() + (tile.row + r / heads) * engine_.attention_width +
                     (chunk.head * heads + r % heads) * dim;
        const F inverse = set(1.0f / s.all_total[r]);
        for (int i = 0; i < dim; i += LANES) store(out + i, mul(load(s.merged + (int64_t)r * dim + i), inverse));
    }
}

// A row's attention over all heads; merges its partial results if it has any.
const float* Step::attended(int row, int window) {
    const Tile& tile = plan_.tiles[plan_.tile_of_row[row]];
    if (tile.partial < 0) return engine_.attended.as<float>() + row * engine_.attention_width;
    const int dim = kv_.head_dim, heads = spec_.q_heads / spec_.kv_heads;
    float* out = work_.row(0);
    std::memset(out, 0, engine_.attention_width * sizeof(float));
    for (int head = 0; head < spec_.q_heads; head++) {
        Partial all{NOTHING, 0, out + head * dim};
        const int at = (row - tile.row) * heads + head % heads;
        for (int split = engine_.first_split(tile, window); split < tile.num_splits; split++)
            merge(all, partial(tile, head / heads, split, at), dim);
        const F inverse = set(1.0f / all.total);
        for (int i = 0; i < dim; i += LANES) store(all.values + i, mul(load(all.values + i), inverse));
    }
    return out;
}

void Step::logits() {
    linear(spec_.head, plan_.logit_rows,
           [&](int row) { return normed(x(plan_.logit_tokens[row]), spec_.norm); },
           [&](int64_t row, int64_t tile, const F* values) {
               float* out = plan_.logits + row * plan_.logits_stride + tile * TILE;
               for (int h = 0; h < 2; h++) {
                   const F cap = set(spec_.logit_cap);
                   store(out + h * LANES, spec_.logit_cap > 0 ? mul(tanh(div(values[h], cap)), cap) : values[h]);
               }
           },
           nullptr);
}

}  // namespace

void run_step(Model& model, int thread, uint64_t step) {
    const Plan& plan = model.plan(step);
    if (plan.stream) return read_stream(model, plan, thread);
    Step(model, thread, step).run();
}

}  // namespace qd
