// Random models and steps through the C ABI; needs no Python. usage: stress [CASES] [FIRST_SEED]
// Checks: a sequence gives the same bits whole and alone, and in chunks in any batch with any
// number of threads, with drafts that are dropped again (some of them not numbers), blocks that are
// copied, moved to the host and back, and released behind a window; logits are finite; a matrix
// agrees with float64; malformed input is refused and changes nothing; a row of scores gives a
// token. Ends with 0, or with 1 and the seed that failed; 3: not for this CPU.
#include <chrono>
#include <cmath>
#include <cstdio>
#include <string>
#include <thread>

#include "malformed.h"

using namespace stress;

static unsigned long long current_seed = 0;

static void check(bool holds, const char* what) {
    if (holds) return;
    std::printf("FAILED %s, seed %llu: %s (last error: %s)\n", qd_isa(), current_seed, what, qd_error());
    std::fflush(stdout);
    std::_Exit(1);  // no destructors, no leak report
}

static bool runs_here() {
#if defined(QD_ISA_AVX512)
    return __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512vnni")
        && __builtin_cpu_supports("avx512bf16");
#elif defined(QD_ISA_AVX2)
    return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma");
#else
    return true;
#endif
}

static void* new_engine(void* model, const std::vector<Group>& groups) {
    const std::vector<qd_kv_group> descriptions = views(groups);
    void* engine = qd_engine_create(model, descriptions.data(), (int32_t)descriptions.size());
    check(engine, "an engine is created");
    std::vector<int32_t> open, sealed;
    for (const Group& group : groups) open.push_back(group.num_open), sealed.push_back(group.num_sealed);
    check(qd_kv_allocate(engine, open.data(), sealed.data()) == 0, "pools are allocated");
    return engine;
}

// Handles that close themselves; the engine before its model.
struct Engine {
    void *model, *engine = nullptr;
    Engine(const qd_model& m, const std::vector<Group>& groups, int threads) : model(qd_model_create(&m, threads)) {
        check(model, "a model is created");
        engine = new_engine(model, groups);
    }
    Engine(const Engine&) = delete;
    ~Engine() { qd_engine_destroy(engine), qd_model_destroy(model); }
};

struct Case {
    Random random;
    RandomModel owner;
    const qd_model& model;
    std::vector<Group> groups;
    int block_size;
    std::vector<Sequence> sequences;
    std::vector<std::vector<float>> expected;  // per sequence: [tokens, vocab], computed whole

    explicit Case(uint64_t seed)
        : random(seed), owner(random, (int)random.between(QD_ACT_INT8, QD_ACT_FP32)), model(owner.model),
          groups(random_groups(random, model)), block_size(groups[0].kv.block_size) {
        const int count = (int)random.between(1, 6);
        int blocks = 2;
        for (int i = 0; i < count; i++) {
            Sequence s;
            const int length = (int)(random.chance(30) ? random.between(1, 4) : random.between(1, 200));
            for (int t = 0; t < length; t++) s.tokens.push_back(owner.token(random));
            blocks += (length + MOST_DRAFTS) / block_size + 1;
            sequences.push_back(s);
        }
        for (Group& group : groups) group.num_open = group.num_sealed = blocks;
    }
    static constexpr int MOST_DRAFTS = 70;
};

static void run(void* engine, Step& step, int64_t extra, const char* what) {
    const qd_step view = step.view(extra);
    check(qd_execute(engine, &view) == 0, what);
    check(step.canaries_live(), "nothing is written beyond the padding of logits");
}

// Every sequence alone, in one step.
static void compute_whole(Case& c) {
    Engine e(c.model, c.groups, 1);
    Tables tables(c.groups, c.random);
    for (Sequence& s : c.sequences) {
        const int length = (int)s.tokens.size();
        tables.allocate(s, length, length);
        Step step(c.model.vocab, c.groups.size());
        step.add(s, s.tokens, length);
        run(e.engine, step, 0, "a whole sequence runs");
        std::vector<float> rows;
        for (int r = 0; r < length; r++) {
            const float* row = step.logits.data() + r * step.stride;
            rows.insert(rows.end(), row, row + c.model.vocab);
        }
        for (float x : rows) check(std::isfinite(x), "logits are finite");
        c.expected.push_back(rows);
        tables.free(s);
    }
}

static void compare(const Case& c, size_t sequence, int end, const float* logits, int64_t stride, int rows) {
    const size_t vocab = c.model.vocab;
    for (int r = 0; r < rows; r++) {
        const float* whole = c.expected[sequence].data() + (end - rows + r) * vocab;
        const bool same = std::memcmp(logits + r * stride, whole, vocab * sizeof(float)) == 0;
        check(same, "chunked equals whole, bit for bit");
    }
}

// How many tokens a sequence gets in the next step: decoding, short verification, prompt chunks.
static int chunk(Random& random, int left) {
    if (random.chance(40)) return 1;
    return std::min((int)random.between(2, random.chance(40) ? 9 : 130), left);
}

// One malformed variant of a step: refused with a message, and nothing is computed.
static void refuse_one(Case& c, void* engine, Step step) {
    const size_t slice = (size_t)c.random.between(0, (int64_t)step.starts.size() - 1);
    const size_t token = (size_t)c.random.between(0, (int64_t)step.token_ids.size() - 1);
    const int last = step.starts[slice] + step.counts[slice] - 1;
    const size_t tail = step.table_starts[slice] + last / c.block_size;
    const int groups = (int)c.groups.size(), group = (int)c.random.between(0, groups - 1);
    const auto fault = c.random.pick(step_faults(slice, token, tail, group, c.groups[group], groups));
    qd_step view = step.view(0);
    fault.spoil(view, step);
    check(qd_execute(engine, &view) == -1, fault.name);
    check(qd_error()[0] != 0, "a refusal has a message");
    for (float x : step.logits) check(x == Step::CANARY, "a refused step computes nothing");
}

static void refused(bool is, const char* what) {
    check(is, what);
    check(qd_error()[0] != 0, "a refusal has a message");
}

// Every malformed variant of the KV groups, of their sizes, and of blocks that are moved.
static void refuse_groups(Case& c, void* model) {
    const auto create = [&](const std::vector<qd_kv_group>& kv) {
        return qd_engine_create(model, kv.data(), (int32_t)kv.size());
    };
    const std::vector<qd_kv_group> good = views(c.groups);
    for (const auto& fault : group_faults()) {
        std::vector<Group> spoiled = c.groups;
        Group& one = spoiled[c.random.between(0, (int64_t)spoiled.size() - 1)];
        fault.spoil(one.kv, one.layers);
        refused(!create(views(spoiled)), fault.name);
    }
    std::vector<qd_kv_group> other = good;
    other.back().num_layers--, refused(!create(other), "a layer in no group");
    refused(!create({}), "no groups");
    if (good.size() > 1) {
        other = good, other[1].block_size += 16;
        refused(!create(other), "block sizes that differ");
    }
    void* engine = new_engine(model, c.groups);
    std::vector<int32_t> open(good.size(), 2), sealed(good.size(), 2);
    open.back() = -1, refused(qd_kv_allocate(engine, open.data(), sealed.data()) == -1, "−1 open blocks");
    open.back() = 2, check(qd_kv_allocate(engine, open.data(), sealed.data()) == 0, "pools are allocated");
    const int groups = (int)good.size();
    check(qd_open_block_bytes(engine, groups) == -1 && qd_sealed_block_bytes(engine, -1) == -1, "no such group");
    std::vector<uint8_t> data(2 * qd_open_block_bytes(engine, 0), 7);
    for (const std::vector<int32_t>& ids : {std::vector<int32_t>{0, 2}, {-1, 0}}) {
        refused(qd_read_blocks(engine, 0, 0, 2, ids.data(), data.data()) == -1, "an id outside the pool is read");
        refused(qd_write_blocks(engine, 0, 0, 2, ids.data(), data.data()) == -1, "an id outside the pool is written");
        refused(qd_read_blocks(engine, groups, 0, 1, ids.data(), data.data()) == -1, "a group outside is read");
    }
    const int32_t id = 0;
    if (good[0].dtype == QD_KV_BF16)
        refused(qd_read_blocks(engine, 0, 1, 1, &id, data.data()) == -1, "a sealed block where none are");
    for (uint8_t byte : data) check(byte == 7, "a refused read gives nothing");
    qd_engine_destroy(engine);
}

// Every malformed variant of the model and of its KV groups.
static void refuse_models(Case& c) {
    for (const auto& fault : model_faults()) {
        qd_model spoiled = c.model;
        std::vector<qd_layer> layers(c.model.layers, c.model.layers + c.model.num_layers);
        qd_layer* first = layers.data();
        fault.spoil(spoiled, first);
        spoiled.layers = first;
        check(qd_model_create(&spoiled, 1) == nullptr, fault.name);
        check(qd_error()[0] != 0, "a refusal has a message");
    }
    check(qd_model_create(&c.model, 0) == nullptr, "0 threads");
    void* model = qd_model_create(&c.model, 1);
    check(model, "a model is created");
    refuse_groups(c, model);
    qd_model_destroy(model);
}

// Blocks go to the host and come back to other places.
static void swap_blocks(void* engine, Tables& tables, Sequence& s) {
    for (int g = 0; g < (int)s.tables.size(); g++)
        for (int sealed = 0; sealed < 2; sealed++) {
            std::vector<int32_t>& table = sealed ? s.tables[g].sealed : s.tables[g].open;
            Pool& pool = sealed ? tables[g].sealed : tables[g].open;
            std::vector<int32_t> ids, fresh;
            for (int32_t id : table)
                if (id >= 0) ids.push_back(id);
            const int64_t num = (int64_t)ids.size();
            std::vector<uint8_t> data(num * (sealed ? qd_sealed_block_bytes(engine, g) : qd_open_block_bytes(engine, g)));
            check(qd_read_blocks(engine, g, sealed, num, ids.data(), data.data()) == 0, "blocks are read");
            for (int32_t id : ids) pool.release(id);
            for (int32_t& id : table)
                if (id >= 0) fresh.push_back(id = pool.take());
            check(qd_write_blocks(engine, g, sealed, num, fresh.data(), data.data()) == 0, "blocks are written");
        }
}

// Open blocks move in two copies, the second of what the first one writes.
static void copy_blocks(Case& c, Tables& tables, Sequence& s, Step& step) {
    for (int g = 0; g < (int)s.tables.size(); g++)
        for (int32_t& id : s.tables[g].open) {
            if (id < 0 || c.random.chance(50)) continue;
            int32_t from = id, between = tables[g].open.take();
            id = tables[g].open.take();
            step.copies.push_back({g, from, between}), step.copies.push_back({g, between, id});
            tables[g].open.release(from), tables[g].open.release(between);
        }
}

// Some of the sequence's next tokens, perhaps drafts after them, in a step; returns how many stay.
static int take_tokens(Case& c, Tables& tables, Sequence& s, Step& step) {
    const int kept = chunk(c.random, s.left()), vocab = c.model.vocab;
    std::vector<int32_t> tokens(s.tokens.begin() + s.done, s.tokens.begin() + s.done + kept);
    int logits = c.random.chance(20) ? 0 : (int)c.random.between(1, kept);
    if (c.random.chance(30)) {
        const int drafts = (int)c.random.between(1, c.random.chance(80) ? 9 : Case::MOST_DRAFTS);
        for (int d = 0; d < drafts; d++) tokens.push_back((int32_t)c.random.between(vocab - 3, vocab - 1));
        logits = (int)tokens.size();
    }
    tables.allocate(s, s.done + kept, s.done + (int)tokens.size());
    step.add(s, tokens, logits);
    return kept;
}

// All sequences together, in random chunks, twice over the same pools.
static void compute_chunked(Case& c, int threads) {
    Engine e(c.model, c.groups, threads);
    Tables tables(c.groups, c.random);
    const auto over = [](const Sequence& s) { return s.left() == 0; };
    for (int round = 0; round < 2; round++) {
        while (!std::all_of(c.sequences.begin(), c.sequences.end(), over)) {
            Step step(c.model.vocab, c.groups.size());
            std::vector<std::pair<size_t, int>> taken;
            for (Sequence& s : c.sequences)
                if (s.done && c.random.chance(10)) swap_blocks(e.engine, tables, s);
            for (size_t i = 0; i < c.sequences.size(); i++) {
                Sequence& s = c.sequences[i];
                if (s.done && c.random.chance(10)) copy_blocks(c, tables, s, step);
                if (s.left() && c.random.chance(70)) taken.emplace_back(i, take_tokens(c, tables, s, step));
            }
            if (!taken.empty() && c.random.chance(25)) refuse_one(c, e.engine, step);
            run(e.engine, step, c.random.between(0, 5), "a batch runs");
            int64_t row = 0;
            for (size_t i = 0; i < taken.size(); i++) {
                const auto [sequence, kept] = taken[i];
                Sequence& s = c.sequences[sequence];
                const int dropped = step.counts[i] - kept;
                tables.commit(s, s.done + kept);
                compare(c, sequence, s.done, step.logits.data() + row * step.stride, step.stride,
                        std::max(0, step.num_logits[i] - dropped));
                row += step.num_logits[i];
            }
        }
        for (Sequence& s : c.sequences) tables.free(s);
    }
}

// Engines that go as soon as their step is over, while sleeping workers are still on their way.
static void short_lives(Case& c) {
    void* model = qd_model_create(&c.model, 4);
    check(model, "a model is created");
    for (int i = 0; i < 10; i++) {
        std::this_thread::sleep_for(std::chrono::milliseconds(2));
        void* engine = new_engine(model, c.groups);
        Tables tables(c.groups, c.random);
        Sequence& s = c.sequences[0];
        tables.allocate(s, 1, 1);
        Step step(c.model.vocab, c.groups.size());
        step.add(s, {s.tokens[0]}, 1);
        run(engine, step, 0, "one token runs");
        compare(c, 0, 1, step.logits.data(), step.stride, 1);
        tables.free(s);
        qd_engine_destroy(engine);
    }
    qd_model_destroy(model);
}

// qd_linear against float64 on the model's own matrices.
static void check_linear(Case& c) {
    const qd_layer& layer = c.model.layers[0];
    void* handle = qd_model_create(&c.model, 2);
    check(handle, "a model is created");
    for (const qd_matrix* m : {&layer.qkv, &layer.o, &layer.gate_up, &layer.down, &c.model.head}) {
        const int rows = (int)c.random.between(1, 20);
        const int64_t width = up(m->rows, 32);
        const float* x = c.owner.arena.floats((int64_t)rows * m->cols, c.random, 0, 2);
        float* out = c.owner.arena.array<float>(rows * width);
        check(qd_linear(handle, m, x, rows, out) == 0, "qd_linear runs");
        // int8 activations: half a step of 127 a value; bfloat16 activations: 2⁻⁹ of it.
        const bool exact = c.model.act_mode == QD_ACT_FP32 || m->kind == QD_F32;
        for (int r = 0; r < rows; r++)
            for (int64_t place = 0; place < width; place++) {
                double sum = m->bias ? m->bias[place] : 0, size = std::abs(sum), squares = 0;
                for (int64_t k = 0; k < m->cols; k++) {
                    const double w = weight(*m, place / 32, (int)(place % 32), k);
                    const double term = w * x[(int64_t)r * m->cols + (m->permutation ? m->permutation[k] : k)];
                    sum += term, size += std::abs(term), squares += w * w;
                }
                // |x| ≤ 2, so a rounding error is at most 2 / 254 a value, and random in sign.
                const double slack = exact ? 1e-5 * size : 6 * std::sqrt(squares) * 2 / 254 + 1e-5 * size;
                check(std::abs(out[r * width + place] - sum) <= slack + 1e-6, "qd_linear agrees with float64");
            }
    }
    qd_model_destroy(handle);
}

static void sample_row(Random& random) {
    Arena arena;
    const int64_t count = random.between(1, 2000);
    float* scores = arena.floats(count, random, 0, random.pick<float>({0, 1, 30}));
    int64_t best = 0;
    for (int64_t i = 1; i < count; i++) {
        if (random.chance(10)) scores[i] = -INFINITY;
        if (scores[i] > scores[best]) best = i;
    }
    int32_t* ids = arena.array<int32_t>(count);
    const double temperature = random.pick<double>({1e-4, 1, 1e9});
    const int64_t size = qd_contenders(scores, count, best, temperature, random.bits(), ids);
    check(1 <= size && size <= count, "some token can be drawn");
    for (int64_t i = 0; i < size; i++) {
        check(i == 0 || ids[i - 1] < ids[i], "contenders rise");
        check(0 <= ids[i] && ids[i] < count && scores[ids[i]] > -INFINITY, "contenders are possible");
    }
    int64_t above = 0;
    double mass = 0;
    for (int64_t i = 0; i < count; i++) {
        above += scores[i] >= 0;
        mass += std::exp((double)scores[i] - scores[best]);
    }
    check(qd_near(scores, count, 0, ids) == above, "scores above a limit are found");
    check(qd_near(scores, count, -INFINITY, ids) == count, "all scores are found");
    check(std::abs(qd_mass(scores, count, scores[best], 1) / mass - 1) < 1e-5, "the mass of a row");
}

int main(int count, char** arguments) {
    if (!runs_here()) {
        std::printf("%s: not for this CPU\n", qd_isa());
        return 3;
    }
    const unsigned long long cases = count > 1 ? std::stoull(arguments[1]) : 60;
    const unsigned long long first = count > 2 ? std::stoull(arguments[2]) : 1;
    for (current_seed = first; current_seed < first + cases; current_seed++) {
        Case c(current_seed);
        refuse_models(c);
        check_linear(c);
        compute_whole(c);
        short_lives(c);
        compute_chunked(c, 1);
        compute_chunked(c, (int)c.random.between(2, 4));
        sample_row(c.random);
    }
    std::printf("%s: %llu cases, from seed %llu\n", qd_isa(), cases, first);
    return 0;
}
