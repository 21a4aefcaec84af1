// Pieces of blocks between pages of a KV cache and a room on the device, or from a slab to pages.
#include "bytes.h"

// The list is an argument: it needs no memory that somebody would have to free. 32,764 bytes are
// allowed; a list of one block is shorter, since the driver copies all of an argument.
#define PIECES_MAX 160
#define MANY_MAX 1360

template <u64 SIZE>
struct Pieces {
    u64 targets[SIZE];
    u64 sources[SIZE];
    u64 sizes[SIZE];
    u64 count;
};

template <u64 SIZE>
__device__ inline void move_all(const Pieces<SIZE>& pieces) {
    for (u64 at = blockIdx.y; at < pieces.count; at += gridDim.y)
        copy_bytes(pieces.targets[at], pieces.sources[at], pieces.sizes[at], first_in_row(),
                   threads_in_row());
}

extern "C" __global__ void move_pieces(const __grid_constant__ Pieces<PIECES_MAX> pieces) {
    move_all(pieces);
}

extern "C" __global__ void move_many(const __grid_constant__ Pieces<MANY_MAX> pieces) {
    move_all(pieces);
}
