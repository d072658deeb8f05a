// Random models and steps through the C ABI; needs no Python. usage: stress [CASES] [FIRST_SEED]
// Checks: a sequence gives the same bits whole and alone, and in chunks in any batch with any
// number of threads; logits are finite; a matrix agrees with float64; malformed input is refused
// and changes nothing. Ends with 0, or with 1 and the seed that failed; 3: not for this CPU.
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

// Handles that close themselves; the engine before its model.
struct Engine {
    void *model, *engine = nullptr;
    Engine(const qd_model& m, const qd_kv& kv, int threads, int num_open, int num_sealed)
        : model(qd_model_create(&m, threads)) {
        check(model, "a model is created");
        engine = qd_engine_create(model, &kv);
        check(engine, "an engine is created");
        check(qd_kv_allocate(engine, num_open, num_sealed) == 0, "pools are allocated");
    }
    Engine(const Engine&) = delete;
    ~Engine() { qd_engine_destroy(engine), qd_model_destroy(model); }
};

struct Case {
    Random random;
    RandomModel owner;
    const qd_model& model;
    qd_kv kv;
    std::vector<Sequence> sequences;
    std::vector<std::vector<float>> expected;  // per sequence: [tokens, vocab], computed whole
    int num_open = 0, num_sealed = 0;

    explicit Case(uint64_t seed)
        : random(seed), owner(random, (int)random.between(QD_ACT_INT8, QD_ACT_FP32)), model(owner.model) {
        kv.dtype = (int)random.between(QD_KV_BF16, QD_KV_FP8);
        kv.block_size = random.pick<int>({16, 32, 48, 64});
        kv.sink_blocks = (int)random.between(0, 2);
        kv.residual_blocks = (int)random.between(0, 2);
        const int count = (int)random.between(1, 6);
        for (int i = 0; i < count; i++) {
            Sequence s;
            const int length = (int)(random.chance(30) ? random.between(1, 4) : random.between(1, 200));
            for (int t = 0; t < length; t++) s.tokens.push_back((int32_t)random.between(0, model.vocab - 1));
            num_open += length / kv.block_size + 1, num_sealed += length / kv.block_size;
            sequences.push_back(s);
        }
    }
};

static void run(void* engine, Step& step, int64_t extra, const char* what) {
    const qd_step view = step.view(extra);
    check(qd_execute(engine, &view) == 0, what);
    check(step.canaries_live(), "nothing is written beyond the padding of logits");
}

// Every sequence alone, in one step.
static void compute_whole(Case& c) {
    Engine e(c.model, c.kv, 1, c.num_open, c.num_sealed);
    Tables tables(c.kv, c.num_open, c.num_sealed, c.random);
    for (Sequence& s : c.sequences) {
        const int length = (int)s.tokens.size();
        tables.allocate(s, length);
        Step step(c.model.vocab);
        step.add(s, length, length);
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
    const size_t tail = step.table_starts[slice] + last / c.kv.block_size;
    const auto fault = c.random.pick(step_faults(slice, token, tail, c.num_open, c.num_sealed));
    qd_step view = step.view(0);
    fault.spoil(view, step);
    check(qd_execute(engine, &view) == -1, fault.name);
    check(qd_error()[0] != 0, "a refusal has a message");
    for (float x : step.logits) check(x == Step::CANARY, "a refused step computes nothing");
}

// Every malformed variant of the model and of its KV configuration.
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
    for (const auto& fault : kv_faults()) {
        qd_kv spoiled = c.kv;
        fault.spoil(spoiled);
        check(qd_engine_create(model, &spoiled) == nullptr, fault.name);
        check(qd_error()[0] != 0, "a refusal has a message");
    }
    void* engine = qd_engine_create(model, &c.kv);
    check(qd_kv_allocate(engine, -1, 4) == -1, "−1 open blocks");
    qd_engine_destroy(engine), qd_model_destroy(model);
}

// All sequences together, in random chunks, twice over the same pools.
static void compute_chunked(Case& c, int threads) {
    Engine e(c.model, c.kv, threads, c.num_open, c.num_sealed);
    Tables tables(c.kv, c.num_open, c.num_sealed, c.random);
    for (int round = 0; round < 2; round++) {
        while (true) {
            Step step(c.model.vocab);
            std::vector<std::pair<size_t, int>> taken;
            for (size_t i = 0; i < c.sequences.size(); i++) {
                Sequence& s = c.sequences[i];
                if (s.left() == 0 || c.random.chance(30)) continue;
                const int count = chunk(c.random, s.left());
                tables.allocate(s, s.done + count);
                step.add(s, count, c.random.chance(20) ? 0 : (int)c.random.between(1, count));
                taken.emplace_back(i, count);
            }
            if (!taken.empty()) {
                if (c.random.chance(25)) refuse_one(c, e.engine, step);
                run(e.engine, step, c.random.between(0, 5), "a batch runs");
            }
            int64_t row = 0;
            for (size_t i = 0; i < taken.size(); i++) {
                Sequence& s = c.sequences[taken[i].first];
                tables.commit(s, s.done + taken[i].second);
                const float* logits = step.logits.data() + row * step.stride;
                compare(c, taken[i].first, s.done, logits, step.stride, step.num_logits[i]);
                row += step.num_logits[i];
            }
            const auto over = [](const Sequence& s) { return s.left() == 0; };
            if (std::all_of(c.sequences.begin(), c.sequences.end(), over)) break;
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
        void* engine = qd_engine_create(model, &c.kv);
        check(engine && qd_kv_allocate(engine, c.num_open, c.num_sealed) == 0, "an engine is created");
        Tables tables(c.kv, c.num_open, c.num_sealed, c.random);
        Sequence& s = c.sequences[0];
        tables.allocate(s, 1);
        Step step(c.model.vocab);
        step.add(s, 1, 1);
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
    }
    std::printf("%s: %llu cases, from seed %llu\n", qd_isa(), cases, first);
    return 0;
}
