// What the kernels of kernels/csrc need of CUDA, for a compiler of the host.
#pragma once
#include <utility>

#define __global__
#define __device__
#define __constant__
#define __grid_constant__

struct alignas(16) uint4 { unsigned int x, y, z, w; };
struct alignas(16) ulonglong2 { unsigned long long x, y; };
struct Dim { unsigned int x, y; };
static Dim gridDim, blockIdx, blockDim, threadIdx;

// All threads of a grid one after the other, in the seed's order: a walk that meets each once.
template <typename... Arguments, std::size_t... At>
void run_grid(void (*kernel)(Arguments...), void** given, unsigned long long seed,
              std::index_sequence<At...>) {
    const unsigned long long count = 1ull * gridDim.x * gridDim.y * blockDim.x;
    unsigned long long step = seed % count | 1;
    while (std::__gcd(step, count) != 1) step += 2;
    unsigned long long at = seed / 7 % count;
    for (unsigned long long n = 0; n < count; n++, at = (at + step) % count) {
        threadIdx.x = at % blockDim.x;
        blockIdx.x = at / blockDim.x % gridDim.x;
        blockIdx.y = at / blockDim.x / gridDim.x;
        kernel(*(std::remove_reference_t<Arguments>*)given[At]...);
    }
}
