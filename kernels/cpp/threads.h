// Threads of one model. A step is a fixed sequence of phases; a phase is a number of chunks that
// threads claim. It is over when all its chunks are done, not when all threads arrive: a thread
// that the system has put aside delays a step only while it holds a chunk. No barrier, no OpenMP.
#pragma once
#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace qd {

constexpr int CACHE_LINE = 128;  // two, since neighbours are fetched in pairs

// Claimed and finished chunks of a phase, tagged with the step (high half), so that nothing has
// to be reset between steps and a late thread can't claim in a later one.
struct alignas(CACHE_LINE) Phase {
    std::atomic<uint64_t> claimed{0};
    alignas(CACHE_LINE) std::atomic<uint64_t> done{0};
};

class Threads {
public:
    // Runs on every thread: body(thread, step).
    using Body = std::function<void(int, uint64_t)>;

    Threads(int count, Body body);
    ~Threads();
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }
    // The number that the next step will have.
    uint64_t next_step() const { return step_.load(std::memory_order_relaxed) + 1; }
    // Whether no worker is still inside `step` or an earlier one.
    bool left(uint64_t step) const;
    // No worker enters `step` any more: one that wakes after the step is over finds it closed.
    void close(uint64_t step) { open_.compare_exchange_strong(step, 0, std::memory_order_seq_cst); }
    // Announces the next step, runs the body here as thread 0, returns when it does.
    void run();
    // Whether `step` is the one in progress.
    bool current(uint64_t step) const { return step_.load(std::memory_order_relaxed) == step; }

private:
    struct alignas(CACHE_LINE) Seat {
        std::atomic<uint64_t> inside{0};  // the step that this worker is in, or 0
    };
    void work(int thread);
    uint64_t wait_for(uint64_t last);

    const int count_;
    const Body body_;
    alignas(CACHE_LINE) std::atomic<uint64_t> step_{0};
    std::atomic<uint64_t> open_{0};  // the step that workers may enter, or 0
    alignas(CACHE_LINE) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Seat[]> seats_;
    std::vector<std::thread> workers_;
};

// Claims and does chunks 0 … count − 1 of a phase; returns when all are done (by whomever), or
// false when the step is over, which only a late thread sees. prepare() runs before the first
// claim, on every thread that finds the phase unfinished; it may write to the thread's own memory
// only, and what it computes is used by claimed chunks only.
template <class Prepare, class Work>
inline bool run_phase(const Threads& threads, Phase& phase, uint64_t step, int count, Prepare prepare, Work work) {
    const uint64_t first = step << 32, last = first + count;
    const auto value_of = [first](uint64_t tagged) { return tagged >> 32 == first >> 32 ? tagged : first; };
    if (count == 0 || phase.done.load(std::memory_order_acquire) == last) return true;
    if (!threads.current(step)) return false;
    prepare();
    uint64_t mine = 0;  // chunks done here: told once, since the counter's cache line is contended
    for (;;) {
        uint64_t seen = phase.claimed.load(std::memory_order_acquire);
        if (seen >> 32 > step) return false;
        const uint64_t next = value_of(seen);
        if (next == last) break;
        if (!phase.claimed.compare_exchange_weak(seen, next + 1, std::memory_order_acq_rel)) continue;
        work(int(next - first));
        mine++;
    }
    uint64_t finished = phase.done.load(std::memory_order_relaxed);
    while (mine && !phase.done.compare_exchange_weak(finished, value_of(finished) + mine, std::memory_order_acq_rel)) {
    }
    for (int spins = 0; phase.done.load(std::memory_order_acquire) != last; spins++) {
        if (!threads.current(step)) return false;
        if (spins < 2000) pause();
        else std::this_thread::yield();
    }
    return true;
}

}  // namespace qd
