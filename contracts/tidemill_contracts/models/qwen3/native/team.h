// Threads that run one step together: every thread walks the same phases, takes pieces of each
// phase as it gets to them, and meets the others at its end.
#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <thread>
#include <vector>

inline void relax() {
#if defined(__x86_64__)
    __builtin_ia32_pause();
#endif
}

class Team {
  public:
    explicit Team(int size) : size_(size) {
        for (int index = 1; index < size; ++index)
            threads_.emplace_back([this, index] { serve(index); });
    }

    ~Team() {
        stopping_ = true;
        round_.fetch_add(1);
        round_.notify_all();
        for (auto& thread : threads_) thread.join();
    }

    int size() const { return size_; }

    // Runs `work(thread)` on every thread, the caller's being number 0.
    void run(int phases, const std::function<void(int)>& work) {
        if (static_cast<int>(next_.size()) < phases) next_ = std::vector<Counter>(phases);
        for (auto& counter : next_) counter.value.store(0, std::memory_order_relaxed);
        work_ = &work;
        round_.fetch_add(1);
        round_.notify_all();
        work(0);
        meet();
    }

    // Waits for all threads. A thread that has lost its core to another process is waited for
    // without taking that core away.
    void meet() {
        std::uint32_t now = meetings_.load();
        if (arrived_.fetch_add(1) + 1 == size_) {
            arrived_.store(0);
            meetings_.fetch_add(1);
            return;
        }
        for (int spins = 0; meetings_.load(std::memory_order_acquire) == now; ++spins)
            if (spins < 4096)
                relax();
            else
                std::this_thread::yield();
    }

    int take(int phase) { return next_[phase].value.fetch_add(1, std::memory_order_relaxed); }

  private:
    struct alignas(64) Counter {
        std::atomic<int> value{0};
        Counter() = default;
        Counter(const Counter&) {}
    };

    void serve(int index) {
        std::uint32_t seen = 0;
        while (true) {
            round_.wait(seen);
            seen = round_.load();
            if (stopping_) return;
            (*work_)(index);
            meet();
        }
    }

    int size_;
    std::vector<std::thread> threads_;
    std::vector<Counter> next_;
    const std::function<void(int)>* work_ = nullptr;
    std::atomic<std::uint32_t> round_{0};
    std::atomic<std::uint32_t> meetings_{0};
    std::atomic<int> arrived_{0};
    std::atomic<bool> stopping_{false};
};

// One thread's walk through the phases of a step.
class Walk {
  public:
    explicit Walk(Team& team) : team_(team) {}

    // Calls `piece(i)` for each i below `count`, on whichever thread is free; ends for all at once.
    template <typename Piece>
    void share(int count, const Piece& piece) {
        for (int i; (i = team_.take(phase_)) < count;) piece(i);
        ++phase_;
        team_.meet();
    }

  private:
    Team& team_;
    int phase_ = 0;
};
