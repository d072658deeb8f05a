#include <exception>
#include <new>

#include "engine.h"

namespace {

thread_local std::string last_error;

// Runs `body`; on an exception keeps its message and returns `failed`.
template <class T, class Body> T guarded(T failed, Body body) {
    try {
        return body();
    } catch (const std::bad_alloc&) {
        last_error = "out of memory";
    } catch (const std::exception& error) {
        last_error = error.what();
    }
    return failed;
}

qd::Model* model_of(void* handle) { return static_cast<qd::Model*>(handle); }
qd::Engine* engine_of(void* handle) { return static_cast<qd::Engine*>(handle); }
const qd::Engine* engine_of(const void* handle) { return static_cast<const qd::Engine*>(handle); }

const qd::Group* group_of(const void* handle, int32_t group) {
    const std::vector<qd::Group>& groups = engine_of(handle)->groups;
    return group >= 0 && group < (int32_t)groups.size() ? &groups[group] : nullptr;
}

}  // namespace

int32_t qd_abi_version() { return QD_ABI_VERSION; }
const char* qd_isa() { return QD_ISA; }
const char* qd_error() { return last_error.c_str(); }

void* qd_model_create(const qd_model* model, int32_t threads) {
    return guarded<void*>(nullptr, [&]() -> void* {
        qd::check(*model, threads);
        return new qd::Model(*model, threads);
    });
}

void qd_model_destroy(void* model) { delete model_of(model); }

void* qd_engine_create(void* model, const qd_kv_group* groups, int32_t num_groups) {
    return guarded<void*>(nullptr, [&]() -> void* {
        qd::check(model_of(model)->spec(), groups, num_groups);
        return new qd::Engine(*model_of(model), groups, num_groups);
    });
}

void qd_engine_destroy(void* engine) { delete engine_of(engine); }

int64_t qd_open_block_bytes(const void* engine, int32_t group) {
    const qd::Group* g = group_of(engine, group);
    return g ? g->open.block_bytes() : -1;
}

int64_t qd_sealed_block_bytes(const void* engine, int32_t group) {
    const qd::Group* g = group_of(engine, group);
    return g ? g->sealed.block_bytes() : -1;
}

int32_t qd_kv_allocate(void* engine, const int32_t* num_open, const int32_t* num_sealed) {
    return guarded(-1, [&] {
        for (size_t g = 0; g < engine_of(engine)->groups.size(); g++)
            if (num_open[g] < 0 || num_sealed[g] < 0) throw std::invalid_argument("a pool can't have fewer than 0 blocks");
        engine_of(engine)->allocate(num_open, num_sealed);
        return 0;
    });
}

void* qd_pool(void* engine, int32_t group, int32_t sealed, int64_t* bytes) {
    const qd::Group* g = group_of(engine, group);
    const qd::Memory* memory = g ? &(sealed ? g->sealed : g->open).memory : nullptr;
    *bytes = memory ? memory->bytes() : 0;
    return memory ? memory->data() : nullptr;
}

int32_t qd_read_blocks(void* engine, int32_t group, int32_t sealed, int64_t num, const int32_t* ids, uint8_t* data) {
    return guarded(-1, [&] {
        std::lock_guard<std::mutex> lock(engine_of(engine)->model.mutex);
        engine_of(engine)->pool(group, sealed, num, ids).read(num, ids, data);
        return 0;
    });
}

int32_t qd_write_blocks(void* engine, int32_t group, int32_t sealed, int64_t num, const int32_t* ids,
                        const uint8_t* data) {
    return guarded(-1, [&] {
        std::lock_guard<std::mutex> lock(engine_of(engine)->model.mutex);
        engine_of(engine)->pool(group, sealed, num, ids).write(num, ids, data);
        return 0;
    });
}

int32_t qd_execute(void* engine, const qd_step* step) {
    return guarded(-1, [&] {
        engine_of(engine)->execute(*step);
        return 0;
    });
}

double qd_read_seconds(void* model, int64_t bytes, int32_t repeats) {
    return guarded(-1.0, [&] {
        if (bytes < 1 || repeats < 1) throw std::invalid_argument("nothing to read");
        return model_of(model)->read_seconds(bytes, repeats);
    });
}

int32_t qd_linear(void* model, const qd_matrix* matrix, const float* x, int32_t rows, float* out) {
    return guarded(-1, [&] {
        const qd_matrix& m = *matrix;
        const int act_mode = model_of(model)->spec().act_mode;
        qd::check(m, "matrix", m.rows, m.cols);
        if (rows < 1 || m.rows < 1 || m.cols < 1) throw std::invalid_argument("an empty matrix");
        const qd::Memory memory(qd::activation_bytes(rows, m.cols));
        const qd::Activations a = qd::lay_out(m, act_mode, rows, memory.data());
        std::vector<float> row(2 * a.width);
        for (int r = 0; r < rows; r++) {
            std::memcpy(row.data(), x + (int64_t)r * m.cols, m.cols * sizeof(float));
            qd::put_row(row.data(), r, m, a, row.data() + a.width);
        }
        const int64_t tiles = qd::tiles_of(m);
        qd::multiply(m, qd::tile_kernels(m, act_mode), a, 0, rows, 0, tiles,
                     [&](int64_t r, int64_t tile, const qd::F* values) {
                         qd::store_tile(out + r * tiles * qd::TILE, tile, values);
                     });
        return 0;
    });
}
