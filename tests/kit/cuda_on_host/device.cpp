// A device of the host's: memory and launches, on orders from the standard input.
//
// Memory is malloc's, so that the address sanitizer sees its ends. Numbers are u64, little endian.
//
//   a size skew            → address of so many bytes, which begin skew behind a multiple of 64
//   f address              free it
//   w address size bytes   write
//   r address size         → bytes
//   l name(32) x y threads seed count (size bytes)…   launch a kernel with these arguments → 0
#include <sanitizer/asan_interface.h>

#include <algorithm>
#include <cstdio>
#include <cstdlib>
#include <map>
#include <string>
#include <vector>

#include "cuda.h"
// The sources:
#include "checksum.cu"
#include "move.cu"

typedef void (*Runner)(void**, u64);

template <typename... A>
static void run(void (*kernel)(A...), void** given, u64 seed) {
    run_grid(kernel, given, seed, std::index_sequence_for<A...>());
}

#define KERNEL(name) {#name, [](void** given, u64 seed) { run(name, given, seed); }}
static const std::map<std::string, Runner> KERNELS = {
    KERNEL(move_pieces), KERNEL(move_many), KERNEL(sum_stripes), KERNEL(chain_blocks),
    KERNEL(finish_pieces)};

static void take(void* to, size_t size) {
    if (fread(to, 1, size, stdin) != size) exit(0);
}

static u64 number() {
    u64 found;
    take(&found, sizeof found);
    return found;
}

static void answer(const void* from, size_t size) {
    fwrite(from, 1, size, stdout);
    fflush(stdout);
}

static std::map<u64, void*> allocations;

static void allocate() {
    const u64 size = number(), skew = number();
    void* base = nullptr;
    if (posix_memalign(&base, 64, skew + size)) abort();
    ASAN_POISON_MEMORY_REGION(base, skew);
    const u64 address = (u64)base + skew;
    allocations[address] = base;
    answer(&address, sizeof address);
}

static void launch() {
    char name[32];
    take(name, sizeof name);
    gridDim = {(unsigned)number(), (unsigned)number()};
    blockDim = {(unsigned)number(), 1};
    const u64 seed = number(), count = number();
    std::vector<std::vector<u64>> arguments(count);
    std::vector<void*> given;
    for (auto& argument : arguments) {
        const u64 size = number();
        argument.resize((size + 7) / 8);
        take(argument.data(), size);
        given.push_back(argument.data());
    }
    KERNELS.at(name)(given.data(), seed);
    const u64 done = 0;
    answer(&done, sizeof done);
}

int main() {
    for (int order; (order = getchar()) != EOF;) {
        if (order == 'a') allocate();
        if (order == 'l') launch();
        if (order == 'f') {
            const u64 address = number();
            void* base = allocations.at(address);
            ASAN_UNPOISON_MEMORY_REGION(base, address - (u64)base);
            free(base);
            allocations.erase(address);
        }
        if (order == 'w') {
            const u64 address = number();
            take((void*)address, number());
        }
        if (order == 'r') {
            const u64 address = number();
            answer((const void*)address, number());
        }
    }
    fflush(stdout);
    _Exit(0);
}
