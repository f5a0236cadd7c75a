// What the matrix unit's instructions take in short windows, beside others that do not need it.
// Prints a line of JSON a window and thread, times in ns. Built and run by matrix_unit.py.
#include <sys/syscall.h>
#include <unistd.h>

#include <chrono>
#include <cstdio>
#include <cstdlib>
#include <thread>
#include <vector>

#include "../contracts/tidemill_contracts/models/qwen3/native/tiles.h"
#include "../contracts/tidemill_contracts/models/qwen3/native/vectors.h"

constexpr int TILE_BYTES = 1024;
constexpr int NEAR = 32, FAR = 480;  // tiles that fit the first cache, and the second alone

struct Window {
    double product, load_near, load_far, both, vector, scalar;
};

template <typename Work>
static double ns(int count, const Work& work) {
    auto start = std::chrono::steady_clock::now();
    work();
    return std::chrono::duration<double, std::nano>(std::chrono::steady_clock::now() - start)
               .count() / count;
}

static void load_four(const char* from) {
    tile::load<4>(from, 64);
    tile::load<5>(from + TILE_BYTES, 64);
    tile::load<6>(from + 2 * TILE_BYTES, 64);
    tile::load<7>(from + 3 * TILE_BYTES, 64);
}

static void multiply_four() {
    tile::multiply<0, 4, 6>();
    tile::multiply<1, 4, 7>();
    tile::multiply<2, 5, 6>();
    tile::multiply<3, 5, 7>();
}

static Window window(const char* tiles) {
    constexpr int ROUNDS = 2000;
    auto place = [=](int i, int among) { return tiles + i * 4 % among * TILE_BYTES; };
    Window found;
    found.product = ns(4 * ROUNDS, [] {
        for (int i = 0; i < ROUNDS; ++i) multiply_four();
    });
    found.load_near = ns(4 * ROUNDS, [&] {
        for (int i = 0; i < ROUNDS; ++i) load_four(place(i, NEAR));
    });
    found.load_far = ns(4 * ROUNDS, [&] {
        for (int i = 0; i < ROUNDS; ++i) load_four(place(i, FAR));
    });
    found.both = ns(4 * ROUNDS, [&] {
        for (int i = 0; i < ROUNDS; ++i) {
            load_four(place(i, NEAR));
            multiply_four();
        }
    });
    found.vector = ns(8 * ROUNDS, [] {
        floats sums[8] = {}, factor = floats{} + 1.0001f;
        for (int i = 0; i < ROUNDS; ++i)
#pragma GCC unroll 8
            for (int j = 0; j < 8; ++j) {
                sums[j] = sums[j] * factor + factor;
                asm volatile("" : "+v"(sums[j]));
            }
    });
    found.scalar = ns(8 * ROUNDS, [] {
        std::uint64_t value = 1;
        for (int i = 0; i < 8 * ROUNDS; ++i) {
            value = value * 6364136223846793005u + 1;
            asm volatile("" : "+r"(value));
        }
    });
    return found;
}

int main(int count, char** arguments) {
    const int threads = count > 1 ? std::atoi(arguments[1]) : 2;
    const double seconds = count > 2 ? std::atof(arguments[2]) : 5;
    constexpr int REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;  // Linux, arch/x86/xstate.rst
    if (syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) != 0) return 1;
    std::vector<std::vector<Window>> found(threads);
    std::vector<std::thread> running;
    for (int thread = 0; thread < threads; ++thread)
        running.emplace_back([&, thread] {
            std::vector<char> memory(FAR * TILE_BYTES + 64);
            auto* tiles = memory.data() + 64 - reinterpret_cast<std::uintptr_t>(memory.data()) % 64;
            tile::configure();
            auto end = std::chrono::steady_clock::now() + std::chrono::duration<double>(seconds);
            while (std::chrono::steady_clock::now() < end) found[thread].push_back(window(tiles));
            tile::release();
        });
    for (auto& thread : running) thread.join();
    for (int thread = 0; thread < threads; ++thread)
        for (const Window& w : found[thread])
            std::printf("{\"thread\": %d, \"product\": %.2f, \"load_near\": %.2f, \"load_far\": %.2f, "
                        "\"both\": %.2f, \"vector\": %.3f, \"scalar\": %.3f}\n",
                        thread, w.product, w.load_near, w.load_far, w.both, w.vector, w.scalar);
}
