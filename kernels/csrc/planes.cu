// Lossless: planes of bytes, in groups of 32 that keep their least byte and the bits above it.
//
// The reference, kernels/planes.py, has the form. A group is one thread's; its words are at the
// place of its tile, and in it behind those of the groups before.
#include "bytes.h"

#define GROUP 32  // bytes of a plane
#define TILE 64   // groups

struct Shape {
    u64 count;           // elements, of 1, 2 or 4 bytes
    u64 groups, tiles;   // of a plane
    u64 planes;          // as many as an element has bytes
    u64 words;           // room for them, or how many there are
};

// An element with its sign as the lowest bit, so that its exponent is in the highest bits.
template <typename T>
__device__ inline u32 turned(T element) {
    return (T)(element << 1 | element >> (8 * sizeof(T) - 1));
}

template <typename T>
__device__ inline T turned_back(u32 element) {
    return (T)(element >> 1 | element << (8 * sizeof(T) - 1));
}

// The byte of a plane, of which the first is the highest; beyond the end the last one again.
template <typename T>
__device__ inline u32 plane_byte(const T* data, u64 count, u64 at, u64 plane) {
    return turned<T>(data[at < count ? at : count - 1]) >> (8 * (sizeof(T) - 1 - plane)) & 0xFF;
}

template <typename T>
__device__ inline void measure(const T* data, const Shape& shape, u8* groups) {
    for (u64 at = first_in_row(); at < shape.planes * shape.groups; at += threads_in_row()) {
        const u64 plane = at / shape.groups, begin = at % shape.groups * GROUP;
        u32 least = 255, largest = 0;
        for (u64 place = begin; place < begin + GROUP; place++) {
            const u32 byte = plane_byte(data, shape.count, place, plane);
            if (byte < least) least = byte;
            if (byte > largest) largest = byte;
        }
        u32 width = 0;
        while ((largest - least) >> width) width++;
        groups[2 * at] = (u8)least;
        groups[2 * at + 1] = (u8)width;
    }
    const u64 end = shape.planes * shape.groups;
    if (first_in_row() == 0 && end % 2) groups[2 * end] = groups[2 * end + 1] = 0;  // up to a word
}

// groups: [plane][group][least, width].
extern "C" __global__ void planes_measure(const void* data, const __grid_constant__ Shape shape,
                                          u8* groups) {
    if (shape.planes == 1) measure((const u8*)data, shape, groups);
    if (shape.planes == 2) measure((const u16*)data, shape, groups);
    if (shape.planes == 4) measure((const u32*)data, shape, groups);
}

// Words of a tile's groups before the end.
__device__ inline u32 words_before(const u8* groups, u64 begin, u64 end) {
    u32 found = 0;
    for (u64 group = begin; group < end; group++) found += groups[2 * group + 1];
    return found;
}

// sizes: [plane][tile]
extern "C" __global__ void planes_count(const u8* groups, const __grid_constant__ Shape shape,
                                        u32* sizes) {
    for (u64 at = first_in_row(); at < shape.planes * shape.tiles; at += threads_in_row()) {
        const u64 plane = at / shape.tiles, begin = at % shape.tiles * TILE;
        const u64 end = begin + TILE < shape.groups ? begin + TILE : shape.groups;
        sizes[at] = words_before(groups, plane * shape.groups + begin, plane * shape.groups + end);
    }
}

// offsets: [plane][tile], and behind them the sum. Every tile adds up those before: a few thousand.
extern "C" __global__ void planes_place(const u32* sizes, const __grid_constant__ Shape shape,
                                        u32* offsets) {
    const u64 tiles = shape.planes * shape.tiles;
    for (u64 at = first_in_row(); at < tiles + 1; at += threads_in_row()) {
        u32 found = 0;
        for (u64 tile = 0; tile < at; tile++) found += sizes[tile];
        offsets[at] = found;
    }
}

__device__ inline u64 place_of(const u8* groups, const u32* offsets, const Shape& shape, u64 plane,
                               u64 group) {
    const u64 tile = group / TILE, base = plane * shape.groups;
    return offsets[plane * shape.tiles + tile] +
           (u64)words_before(groups, base + tile * TILE, base + group);
}

template <typename T>
__device__ inline void write(const T* data, const Shape& shape, const u8* groups,
                             const u32* offsets, u32* words) {
    for (u64 at = first_in_row(); at < shape.planes * shape.groups; at += threads_in_row()) {
        const u64 plane = at / shape.groups, group = at % shape.groups;
        const u32 least = groups[2 * at], width = groups[2 * at + 1];
        u32 bits[8] = {0, 0, 0, 0, 0, 0, 0, 0};
        for (u32 place = 0; place < GROUP; place++) {
            const u32 above =
                plane_byte(data, shape.count, group * GROUP + place, plane) - least;
#pragma unroll
            for (u32 bit = 0; bit < 8; bit++) bits[bit] |= (above >> bit & 1) << place;
        }
        u32* mine = words + place_of(groups, offsets, shape, plane, group);
#pragma unroll
        for (u32 bit = 0; bit < 8; bit++)
            if (bit < width) mine[bit] = bits[bit];
    }
}

// Writes nothing if the words do not fit: the payload is kept as it is.
extern "C" __global__ void planes_write(const void* data, const __grid_constant__ Shape shape,
                                        const u8* groups, const u32* offsets, u32* words) {
    if (offsets[shape.planes * shape.tiles] > shape.words) return;
    if (shape.planes == 1) write((const u8*)data, shape, groups, offsets, words);
    if (shape.planes == 2) write((const u16*)data, shape, groups, offsets, words);
    if (shape.planes == 4) write((const u32*)data, shape, groups, offsets, words);
}

// The bits of a group; false if it cannot be one.
__device__ inline bool bits_of_group(const Shape& shape, const u8* groups, const u32* offsets,
                                     const u32* words, u64 plane, u64 group, u32 bits[8]) {
    const u32 width = groups[2 * (plane * shape.groups + group) + 1];
    const u64 begin = place_of(groups, offsets, shape, plane, group);
    if (width > 8 || begin + width > shape.words) return false;
#pragma unroll
    for (u32 bit = 0; bit < 8; bit++) bits[bit] = bit < width ? words[begin + bit] : 0;
    return true;
}

template <typename T>
__device__ inline void read(T* data, const Shape& shape, const u8* groups, const u32* offsets,
                            const u32* words, u32* faults) {
    for (u64 group = first_in_row(); group < shape.groups; group += threads_in_row()) {
        u32 bits[sizeof(T)][8];
        bool is_right = offsets[shape.planes * shape.tiles] == shape.words;
#pragma unroll
        for (u32 plane = 0; plane < sizeof(T); plane++)
            is_right &= bits_of_group(shape, groups, offsets, words, plane, group, bits[plane]);
        if (!is_right) {
            atomicMax(faults, 1u);
            continue;
        }
        for (u32 place = 0; place < GROUP && group * GROUP + place < shape.count; place++) {
            u32 element = 0;
#pragma unroll
            for (u32 plane = 0; plane < sizeof(T); plane++) {
                u32 byte = groups[2 * (plane * shape.groups + group)];
#pragma unroll
                for (u32 bit = 0; bit < 8; bit++) byte += (bits[plane][bit] >> place & 1) << bit;
                element = element << 8 | (byte & 0xFF);
            }
            data[group * GROUP + place] = turned_back<T>(element);
        }
    }
}

// faults: one number, zero before: not zero if the groups and offsets do not fit the words.
extern "C" __global__ void planes_read(const u8* groups, const u32* offsets, const u32* words,
                                       const __grid_constant__ Shape shape, void* data,
                                       u32* faults) {
    if (shape.planes == 1) read((u8*)data, shape, groups, offsets, words, faults);
    if (shape.planes == 2) read((u16*)data, shape, groups, offsets, words, faults);
    if (shape.planes == 4) read((u32*)data, shape, groups, offsets, words, faults);
}
