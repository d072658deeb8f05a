// Threads of one model. A step is a fixed sequence of phases; a phase is a number of chunks that
// threads claim. It is over when all its chunks are done, not when all threads arrive: a thread
// that the system has put aside delays a step only while it holds a chunk. No barrier, no OpenMP.
#pragma once
#include <unistd.h>

#include <atomic>
#include <condition_variable>
#include <functional>
#include <memory>
#include <mutex>
#include <thread>
#include <vector>

#include "simd.h"

namespace qd {

constexpr int CHUNK_BITS = 24;   // a phase has fewer than 2²⁴ chunks
// Phases are numbered below this; then numbers start anew. Tests define a small one.
#ifndef QD_LAST_PHASE
#define QD_LAST_PHASE (uint64_t(1) << (63 - CHUNK_BITS))
#endif
constexpr uint64_t LAST_PHASE = QD_LAST_PHASE;
constexpr int CACHE_LINE = 128;  // two, since neighbours are fetched in pairs

// Chunks of a phase that were claimed or done, tagged with the phase's number (high bits). Numbers
// only grow, so nothing has to be reset, and a late thread finds that its phase is over.
struct alignas(CACHE_LINE) Counter {
    std::atomic<uint64_t> value{0};
};

class Threads {
public:
    // Runs on every thread: body(thread, step).
    using Body = std::function<void(int, uint64_t)>;

    Threads(int count, Body body);
    ~Threads();  // not in a forked child, which has none of the workers
    Threads(const Threads&) = delete;
    Threads& operator=(const Threads&) = delete;

    int count() const { return count_; }
    // Whether this is a child of the process that has the workers. Thread 0 does all chunks there.
    bool forked() const { return getpid() != process_; }
    // The number that the next step will have.
    uint64_t next_step() const { return step_.load(std::memory_order_relaxed) + 1; }
    // Whether no worker is still inside `step` or an earlier one.
    bool left(uint64_t step) const;
    // No worker enters `step` any more: one that wakes after the step is over finds it closed.
    void close(uint64_t step) { open_.compare_exchange_strong(step, 0, std::memory_order_seq_cst); }
    // Announces the next step, runs the body here as thread 0, returns when it does.
    void run();
    // Forgets all phases, so that their numbers may start anew; nobody may be inside a step.
    void forget();
    // Counters of a phase: those of claims, one per thread, then that of finished chunks. Few
    // phases have counters at a time: they stay in the caches while weights stream through.
    Counter* counters(uint64_t phase) { return &ring_[phase % RING * (count_ + 1)]; }

private:
    static constexpr int RING = 4;

    struct alignas(CACHE_LINE) Seat {
        std::atomic<uint64_t> inside{0};  // the step that this worker is in, or 0
    };
    void work(int thread);
    void join();
    uint64_t wait_for(uint64_t last);

    const int count_;
    const pid_t process_ = getpid();
    const Body body_;
    alignas(CACHE_LINE) std::atomic<uint64_t> step_{0};
    std::atomic<uint64_t> open_{0};  // the step that workers may enter, or 0
    alignas(CACHE_LINE) std::atomic<int> asleep_{0};
    std::atomic<bool> stop_{false};
    std::mutex mutex_;
    std::condition_variable wake_;
    std::unique_ptr<Seat[]> seats_;
    std::unique_ptr<Counter[]> ring_;
    std::vector<std::thread> workers_;
};

// Does chunks 0 … count − 1 of a phase together with the other threads; returns when all are done,
// by whomever. Each thread has a range of successive chunks, and helps others when its own are
// claimed. prepare() runs before the first claim, on every thread that finds the phase unfinished;
// it may write to the thread's own memory only, and what it computes is used by claimed chunks
// only. meanwhile() runs before waiting.
template <class Prepare, class Work, class Meanwhile>
inline void run_phase(Threads& threads, int thread, uint64_t phase, int count, Prepare prepare, Work work,
                      Meanwhile meanwhile) {
    constexpr int BITS = CHUNK_BITS;
    if (count == 0) return;
    const uint64_t first = phase << BITS, last = first + count;
    const int total = threads.count();
    Counter* counters = threads.counters(phase);
    std::atomic<uint64_t>& done = counters[total].value;
    if (done.load(std::memory_order_acquire) >= last) return;  // or a later phase's
    prepare();
    uint64_t mine = 0;  // told once: the counter's cache line is contended
    for (int i = 0; i < total; i++) {
        const int owner = (thread + i) % total;
        const int low = int((int64_t)count * owner / total), size = int((int64_t)count * (owner + 1) / total) - low;
        std::atomic<uint64_t>& claimed = counters[owner].value;
        for (uint64_t seen = claimed.load(std::memory_order_acquire);;) {
            if (seen >> BITS > phase) return;
            const int next = seen < first ? 0 : int(seen - first);
            if (next == size) break;
            if (!claimed.compare_exchange_weak(seen, first + next + 1, std::memory_order_acq_rel)) continue;
            work(low + next);
            mine++;
            seen = first + next + 1;
        }
    }
    uint64_t seen = done.load(std::memory_order_relaxed);
    while (mine && !done.compare_exchange_weak(seen, (seen < first ? first : seen) + mine, std::memory_order_acq_rel)) {
    }
    meanwhile();
    for (int spins = 0; done.load(std::memory_order_acquire) < last; spins++) {
        if (spins < 2000) pause();
        else std::this_thread::yield();
    }
}

}  // namespace qd
