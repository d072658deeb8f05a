#include "threads.h"

#include <cfenv>
#include <stdexcept>
#include <string>
#include <system_error>

namespace qd {

namespace {
// About a millisecond: longer than the gap between two steps of a busy engine.
constexpr int IDLE_SPINS = 60000;

// Rounding to nearest, denormals kept: another library may have set this thread to something else,
// and bits must not depend on which thread takes a chunk.
class DefaultArithmetic {
public:
    DefaultArithmetic() { std::fegetenv(&saved_), std::fesetenv(FE_DFL_ENV); }
    ~DefaultArithmetic() { std::fesetenv(&saved_); }

private:
    std::fenv_t saved_;
};
}  // namespace

Threads::Threads(int count, Body body) : count_(count), body_(std::move(body)), seats_(new Seat[count]),
      ring_(new Counter[RING * (count + 1)]) {
    try {
        for (int i = 1; i < count; i++) workers_.emplace_back([this, i] { work(i); });
    } catch (const std::system_error&) {  // those that run must end: a running std::thread can't be destroyed
        const int started = int(workers_.size()) + 1;
        join();
        throw std::runtime_error("the system allows only " + std::to_string(started) + " threads");
    }
}

Threads::~Threads() { join(); }

void Threads::join() {
    {
        std::lock_guard<std::mutex> lock(mutex_);
        stop_.store(true);
    }
    wake_.notify_all();
    for (auto& worker : workers_) worker.join();
}

bool Threads::left(uint64_t step) const {
    for (int i = 1; i < count_; i++) {
        const uint64_t inside = seats_[i].inside.load(std::memory_order_seq_cst);
        if (inside != 0 && inside <= step && !forked()) return false;
    }
    return true;
}

void Threads::forget() {
    for (int i = 0; i < RING * (count_ + 1); i++) ring_[i].value.store(0, std::memory_order_relaxed);
}

void Threads::run() {
    const uint64_t step = step_.load(std::memory_order_relaxed) + 1;
    open_.store(step, std::memory_order_seq_cst);
    step_.store(step, std::memory_order_seq_cst);
    if (asleep_.load(std::memory_order_seq_cst) > 0 && !forked()) {
        std::lock_guard<std::mutex> lock(mutex_);
        wake_.notify_all();
    }
    const DefaultArithmetic arithmetic;
    body_(0, step);
}

void Threads::work(int thread) {
    const DefaultArithmetic arithmetic;
    Seat& seat = seats_[thread];
    uint64_t last = 0;
    while ((last = wait_for(last)) != 0) {
        // Announced before the step is checked again: whoever recycles a plan sees one or the other.
        seat.inside.store(last, std::memory_order_seq_cst);
        if (open_.load(std::memory_order_seq_cst) == last) body_(thread, last);
        seat.inside.store(0, std::memory_order_seq_cst);
    }
}

// The next step after `last`; 0 when the pool closes. Spins for a while, then sleeps.
uint64_t Threads::wait_for(uint64_t last) {
    for (int spins = 0; spins < IDLE_SPINS; spins++) {
        const uint64_t step = step_.load(std::memory_order_acquire);
        if (step != last) return step;
        if (stop_.load(std::memory_order_relaxed)) return 0;
        pause();
    }
    std::unique_lock<std::mutex> lock(mutex_);
    asleep_.fetch_add(1, std::memory_order_seq_cst);
    wake_.wait(lock, [&] { return stop_.load() || step_.load(std::memory_order_seq_cst) != last; });
    asleep_.fetch_sub(1, std::memory_order_seq_cst);
    return stop_.load() ? 0 : step_.load(std::memory_order_acquire);
}

}  // namespace qd
