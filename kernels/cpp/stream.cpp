// How fast all threads read memory: what bounds a step that reads as many bytes of weights.
#include <algorithm>
#include <chrono>
#include <cmath>
#include <cstring>

#include "engine.h"

namespace qd {

double Model::read_seconds(int64_t bytes, int repeats) {
    std::lock_guard<std::mutex> lock(mutex);
    const Memory memory(bytes);
    std::memset(memory.data(), 1, bytes);  // else every page is the same page of zeros
    double fastest = INFINITY;
    for (int i = 0; i < repeats; i++) {
        Plan& plan = next_plan();
        plan.stream = memory.data(), plan.stream_bytes = bytes;
        const auto start = std::chrono::steady_clock::now();
        threads_->run();
        fastest = std::min(fastest, std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count());
    }
    wait_until_left(threads_->next_step() - 1);
    return fastest;
}

void read_stream(Model& model, const Plan& plan, int thread) {
    constexpr int64_t PIECE = 1 << 20;
    const auto read = [&](int chunk) {
        const uint8_t* p = plan.stream + chunk * PIECE;
        const int64_t end = std::min(PIECE, plan.stream_bytes - chunk * PIECE) / 256 * 256;
        I sums[4] = {zero_i(), zero_i(), zero_i(), zero_i()};
        for (int64_t i = 0; i < end; i += 256) {
            for (int j = 0; j < 4; j++) sums[j] = add_i(sums[j], load_i(p + i + j * 64));
        }
        volatile int32_t kept = sum_i(add_i(add_i(sums[0], sums[1]), add_i(sums[2], sums[3])));
        (void)kept;
    };
    run_phase(model.threads(), thread, plan.first_phase, int((plan.stream_bytes + PIECE - 1) / PIECE),
              [] {}, read, [] {});
}

}  // namespace qd
