// The limits of the machine at this moment: how fast it reads memory, how fast its matrix unit
// multiplies. Prints one line of JSON. Built and run by ceilings.py.
#include <sys/mman.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <algorithm>
#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <functional>
#include <thread>
#include <vector>

#include "../contracts/tidemill_contracts/models/qwen3/native/tiles.h"
#include "../contracts/tidemill_contracts/models/qwen3/native/vectors.h"

constexpr std::size_t BYTES = std::size_t(1) << 30;  // far beyond any cache
constexpr int STREAMS = 4;                           // places that each thread reads from in turn
constexpr int AHEAD = 1024;                          // bytes that are fetched ahead

static double seconds(int threads, const std::function<void(int)>& work) {
    auto start = std::chrono::steady_clock::now();
    std::vector<std::thread> running;
    for (int i = 0; i < threads; ++i) running.emplace_back(work, i);
    for (auto& thread : running) thread.join();
    return std::chrono::duration<double>(std::chrono::steady_clock::now() - start).count();
}

static double read_gb_s(char* memory, int threads) {
    std::vector<float> sums(threads * 16);
    double taken = seconds(threads, [&](int thread) {
        const std::size_t part = BYTES / threads / STREAMS;
        const char* from = memory + thread * STREAMS * part;
        floats total{};
        for (std::size_t i = 0; i + 256 <= part; i += 256)
            for (int stream = 0; stream < STREAMS; ++stream)
                for (int line = 0; line < 4; ++line) {
                    const char* at = from + stream * part + i + line * 64;
                    __builtin_prefetch(at + AHEAD, 0, 3);
                    total += load(reinterpret_cast<const float*>(at));
                }
        store(&sums[thread * 16], total);
    });
    return BYTES / taken / 1e9;
}

static double matrix_tflop_s(int threads) {
    constexpr int ROUNDS = 400'000;
    double taken = seconds(threads, [&](int) {
        alignas(64) static thread_local bf16 tiles[32 * tile::A_SIZE];
        tile::configure();
        tile::zero<0>(), tile::zero<1>(), tile::zero<2>(), tile::zero<3>();
        for (int i = 0; i < ROUNDS; ++i) {
            const bf16* from = tiles + i % 8 * 4 * tile::A_SIZE;
            tile::load<4>(from, 64);
            tile::load<5>(from + tile::A_SIZE, 64);
            tile::load<6>(from + 2 * tile::A_SIZE, 64);
            tile::load<7>(from + 3 * tile::A_SIZE, 64);
            tile::multiply<0, 4, 6>();
            tile::multiply<1, 4, 7>();
            tile::multiply<2, 5, 6>();
            tile::multiply<3, 5, 7>();
        }
        tile::release();
    });
    return 2.0 * 16 * 16 * 32 * 4 * ROUNDS * threads / taken / 1e12;
}

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::atoi(arguments[1]) : 2;
    const int repeats = count > 2 ? std::atoi(arguments[2]) : 5;
    bool matrix = false;
#if defined(__AMX_BF16__)
    matrix = syscall(SYS_arch_prctl, 0x1023, 18) == 0;
#endif
    auto* memory = static_cast<char*>(
        mmap(nullptr, BYTES, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0));
    if (memory == MAP_FAILED) return 1;
    madvise(memory, BYTES, MADV_HUGEPAGE);
    seconds(threads, [&](int thread) {
        std::memset(memory + BYTES / threads * thread, 0, BYTES / threads);
    });
    double read = 0, flops = 0;
    for (int i = 0; i < repeats; ++i) {
        read = std::max(read, read_gb_s(memory, threads));
        if (matrix) flops = std::max(flops, matrix_tflop_s(threads));
    }
    std::printf("{\"threads\": %d, \"read_gb_s\": %.2f, \"matrix_tflop_s\": %.3f}\n", threads, read,
                flops);
}
