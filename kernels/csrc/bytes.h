// Integers of fixed size, the place of a thread in its grid, and copies of bytes by a grid.
//
// The sources use no shared memory, barrier or warp operation: threads may run in any order, one by
// one too, which is how the tests run them on a host.
#pragma once

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;
typedef unsigned long long u64;

// Threads of a row of the grid share what a row does; rows share the list of things to do.
__device__ inline u64 first_in_row() { return (u64)blockIdx.x * blockDim.x + threadIdx.x; }
__device__ inline u64 threads_in_row() { return (u64)gridDim.x * blockDim.x; }

// Four loads under way before the first store: memory is hundreds of cycles away.
template <typename T>
__device__ inline void copy_elements(u64 target, u64 source, u64 count, u64 first, u64 step) {
    T* to = (T*)target;
    const T* from = (const T*)source;
    u64 at = first;
    for (; at + 3 * step < count; at += 4 * step) {
        const T a = from[at], b = from[at + step], c = from[at + 2 * step], d = from[at + 3 * step];
        to[at] = a;
        to[at + step] = b;
        to[at + 2 * step] = c;
        to[at + 3 * step] = d;
    }
    for (; at < count; at += step) to[at] = from[at];
}

// Copies in elements as large as both addresses allow, up to 16 bytes; bytes before the first whole
// element and after the last go one by one.
__device__ inline void copy_bytes(u64 target, u64 source, u64 size, u64 first, u64 step) {
    const u64 differs = (target ^ source) | 16;
    const u64 width = differs & (~differs + 1);
    u64 head = (~target + 1) & (width - 1);
    if (head > size) head = size;
    const u64 count = (size - head) / width, done = head + count * width;
    copy_elements<u8>(target, source, head, first, step);
    switch (width) {
        case 16: copy_elements<uint4>(target + head, source + head, count, first, step); break;
        case 8: copy_elements<u64>(target + head, source + head, count, first, step); break;
        case 4: copy_elements<u32>(target + head, source + head, count, first, step); break;
        case 2: copy_elements<u16>(target + head, source + head, count, first, step); break;
        default: copy_elements<u8>(target + head, source + head, count, first, step);
    }
    copy_elements<u8>(target + done, source + done, size - done, first, step);
}
