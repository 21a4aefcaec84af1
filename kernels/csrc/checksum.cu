// XXH3-128 (seed 0, default secret) of the pieces of payloads: the leaves of kvstore.wire.record.
//
// Within a block of 1 KiB the hash adds up what its 16 stripes give, in any order; blocks follow
// one another. So three kernels, with a scratch of 64 bytes for each KiB:
//
//   sum_stripes     all threads      the sum of each block: all that reads the data
//   chain_blocks    a lane a thread  acc = scramble(acc + sum), block after block
//   finish_pieces   a piece a thread the digest; of pieces up to 240 bytes all of it
#include "bytes.h"

#define PAYLOADS_MAX 256
#define PIECE_BYTES (512ull << 10)
#define BLOCK_BYTES 1024ull
#define SHORT_BYTES_MAX 240
#define AHEAD 16

struct Payloads {
    u64 addresses[PAYLOADS_MAX];  // each a multiple of 16
    u64 count;
    u64 size;  // of each, not 0
};

#define PRIME32_1 0x9E3779B1ull
#define PRIME32_2 0x85EBCA77ull
#define PRIME32_3 0xC2B2AE3Dull
#define PRIME64_1 0x9E3779B185EBCA87ull
#define PRIME64_2 0xC2B2AE3D27D4EB4Full
#define PRIME64_3 0x165667B19E3779F9ull
#define PRIME64_4 0x85EBCA77C2B2AE63ull
#define PRIME64_5 0x27D4EB2F165667C5ull

__constant__ const u64 SECRET[24] = {
    0xBE4BA423396CFEB8ull, 0x1CAD21F72C81017Cull, 0xDB979083E96DD4DEull, 0x1F67B3B7A4A44072ull,
    0x78E5C0CC4EE679CBull, 0x2172FFCC7DD05A82ull, 0x8E2443F7744608B8ull, 0x4C263A81E69035E0ull,
    0xCB00C391BB52283Cull, 0xA32E531B8B65D088ull, 0x4EF90DA297486471ull, 0xD8ACDEA946EF1938ull,
    0x3F349CE33F76FAA8ull, 0x1D4F0BC7C7BBDCF9ull, 0x3159B4CD4BE0518Aull, 0x647378D9C97E9FC8ull,
    0xC3EBD33483ACC5EAull, 0xEB6313FAFFA081C5ull, 0x49DAF0B751DD0D17ull, 0x9E68D429265516D3ull,
    0xFCA1477D58BE162Bull, 0xCE31D07AD1B8F88Full, 0x280416958F3ACB45ull, 0x7E404BBBCAFBD7AFull,
};

__constant__ const u64 BEGIN[8] = {PRIME32_3, PRIME64_1, PRIME64_2, PRIME64_3,
                                   PRIME64_4, PRIME32_2, PRIME64_5, PRIME32_1};

// 8 bytes of the secret, little endian, from any offset.
__device__ inline u64 secret_at(u64 offset) {
    const u64 word = offset / 8, shift = offset % 8 * 8;
    return shift ? SECRET[word] >> shift | SECRET[word + 1] << (64 - shift) : SECRET[word];
}

__device__ inline u64 read_bytes(const u8* from, int count) {
    u64 found = 0;
    for (int at = 0; at < count; at++) found |= (u64)from[at] << (8 * at);
    return found;
}

__device__ inline u64 read64(const u8* from) { return read_bytes(from, 8); }

struct Wide {
    u64 low, high;
};

__device__ inline Wide product(u64 one, u64 other) {
    const u64 low = (one & 0xFFFFFFFF) * (other & 0xFFFFFFFF), upper = (one >> 32) * (other >> 32);
    const u64 cross = (one >> 32) * (other & 0xFFFFFFFF), more = (one & 0xFFFFFFFF) * (other >> 32);
    const u64 middle = (low >> 32) + (cross & 0xFFFFFFFF) + more;
    return {middle << 32 | (low & 0xFFFFFFFF), (cross >> 32) + (middle >> 32) + upper};
}

__device__ inline u64 folded(u64 one, u64 other) {
    const Wide wide = product(one, other);
    return wide.low ^ wide.high;
}

__device__ inline u64 avalanche(u64 hash) {
    hash = (hash ^ hash >> 37) * 0x165667919E3779F9ull;
    return hash ^ hash >> 32;
}

__device__ inline u64 avalanche64(u64 hash) {
    hash = (hash ^ hash >> 33) * PRIME64_2;
    hash = (hash ^ hash >> 29) * PRIME64_3;
    return hash ^ hash >> 32;
}

__device__ inline u64 swapped(u64 word) {
    u64 found = 0;
    for (int at = 0; at < 8; at++) found = found << 8 | (word >> (8 * at) & 0xFF);
    return found;
}

__device__ inline Wide up_to_3(const u8* data, u64 size) {
    const u64 low = (u64)data[0] << 16 | (u64)data[size / 2] << 24 | data[size - 1] | size << 8;
    const u64 turned = swapped(low) >> 32;
    const u64 high = (turned << 13 | turned >> 19) & 0xFFFFFFFF;
    const u64 flip_low = (SECRET[0] ^ SECRET[0] >> 32) & 0xFFFFFFFF;
    const u64 flip_high = (SECRET[1] ^ SECRET[1] >> 32) & 0xFFFFFFFF;
    return {avalanche64(low ^ flip_low), avalanche64(high ^ flip_high)};
}

__device__ inline Wide up_to_8(const u8* data, u64 size) {
    const u64 word = read_bytes(data, 4) | read_bytes(data + size - 4, 4) << 32;
    Wide wide = product(word ^ SECRET[2] ^ SECRET[3], PRIME64_1 + (size << 2));
    wide.high += wide.low << 1;
    wide.low ^= wide.high >> 3;
    wide.low = (wide.low ^ wide.low >> 35) * 0x9FB21C651E98DF25ull;
    return {wide.low ^ wide.low >> 28, avalanche(wide.high)};
}

__device__ inline Wide up_to_16(const u8* data, u64 size) {
    const u64 first = read64(data), last = read64(data + size - 8);
    Wide wide = product(first ^ last ^ SECRET[4] ^ SECRET[5], PRIME64_1);
    wide.low += (size - 1) << 54;
    const u64 keyed = last ^ SECRET[6] ^ SECRET[7];
    wide.high += keyed + (keyed & 0xFFFFFFFF) * (PRIME32_2 - 1);
    wide.low ^= swapped(wide.high);
    const Wide more = product(wide.low, PRIME64_2);
    return {avalanche(more.low), avalanche(more.high + wide.high * PRIME64_2)};
}

__device__ inline u64 mixed(const u8* data, u64 secret) {
    return folded(read64(data) ^ secret_at(secret), read64(data + 8) ^ secret_at(secret + 8));
}

__device__ inline void mix(Wide& sum, const u8* one, const u8* other, u64 secret) {
    sum.low = (sum.low + mixed(one, secret)) ^ (read64(other) + read64(other + 8));
    sum.high = (sum.high + mixed(other, secret + 16)) ^ (read64(one) + read64(one + 8));
}

__device__ inline Wide up_to_240(const u8* data, u64 size) {
    Wide sum = {size * PRIME64_1, 0};
    if (size <= 128) {
        for (u64 pair = (size - 1) / 32; pair > 0; pair--)
            mix(sum, data + 16 * pair, data + size - 16 * (pair + 1), 32 * pair);
        mix(sum, data, data + size - 16, 0);
    } else {
        for (u64 at = 32; at < 160; at += 32) mix(sum, data + at - 32, data + at - 16, at - 32);
        sum = {avalanche(sum.low), avalanche(sum.high)};
        for (u64 at = 160; at <= size; at += 32)
            mix(sum, data + at - 32, data + at - 16, 3 + at - 160);
        mix(sum, data + size - 16, data + size - 32, 136 - 17 - 16);
    }
    const u64 high = sum.low * PRIME64_1 + sum.high * PRIME64_4 + size * PRIME64_2;
    return {avalanche(sum.low + sum.high), 0 - avalanche(high)};
}

__device__ inline Wide of_short(const u8* data, u64 size) {
    if (size <= 3) return up_to_3(data, size);
    if (size <= 8) return up_to_8(data, size);
    if (size <= 16) return up_to_16(data, size);
    return up_to_240(data, size);
}

__device__ inline u64 merged(const u64* lanes, u64 secret, u64 sum) {
    for (int pair = 0; pair < 4; pair++)
        sum += folded(lanes[2 * pair] ^ secret_at(secret + 16 * pair),
                      lanes[2 * pair + 1] ^ secret_at(secret + 16 * pair + 8));
    return avalanche(sum);
}

__device__ inline u64 blocks_of(u64 size) { return (size + BLOCK_BYTES - 1) / BLOCK_BYTES; }

__device__ inline u64 piece_bytes(u64 size, u64 piece) {
    const u64 left = size - piece * PIECE_BYTES;
    return left < PIECE_BYTES ? left : PIECE_BYTES;
}

// What two lanes of a stripe give: each the product of its own halves, and the other's bytes.
__device__ inline void add_stripe(Wide& sum, const ulonglong2 data, u64 secret) {
    const u64 even = data.x ^ secret_at(secret), odd = data.y ^ secret_at(secret + 8);
    sum.low += data.y + (even & 0xFFFFFFFF) * (even >> 32);
    sum.high += data.x + (odd & 0xFFFFFFFF) * (odd >> 32);
}

// sums: [payload][block][lane]. A thread has two lanes of a block: 16 bytes of each stripe.
extern "C" __global__ void sum_stripes(const __grid_constant__ Payloads payloads, u64* sums) {
    const u64 size = payloads.size, blocks = blocks_of(size);
    for (u64 at = first_in_row(); at < payloads.count * blocks * 4; at += threads_in_row()) {
        const u64 pair = at % 4, block = at / 4 % blocks, payload = at / 4 / blocks;
        const u64 piece = block * BLOCK_BYTES / PIECE_BYTES, length = piece_bytes(size, piece);
        if (length <= SHORT_BYTES_MAX) continue;
        const u64 begin = block * BLOCK_BYTES, end = piece * PIECE_BYTES + length;
        const bool is_last = end - begin <= BLOCK_BYTES;
        const u64 stripes = is_last ? (end - begin - 1) / 64 : 16;
        const u64 address = payloads.addresses[payload] + begin + 16 * pair;
        Wide sum = {0, 0};
#pragma unroll 4
        for (u64 stripe = 0; stripe < stripes; stripe++)
            add_stripe(sum, ((const ulonglong2*)address)[4 * stripe], 8 * stripe + 16 * pair);
        if (is_last) {  // the last 64 bytes once more, wherever they begin
            const u8* last = (const u8*)payloads.addresses[payload] + end - 64 + 16 * pair;
            add_stripe(sum, {read64(last), read64(last + 8)}, 192 - 64 - 7 + 16 * pair);
        }
        u64* lanes = sums + (payload * blocks + block) * 8 + 2 * pair;
        lanes[0] = sum.low;
        lanes[1] = sum.high;
    }
}

// Leaves the lanes of each piece where the sums of its first block were.
extern "C" __global__ void chain_blocks(u64* sums, u64 count, u64 size) {
    const u64 blocks = blocks_of(size), pieces = (size + PIECE_BYTES - 1) / PIECE_BYTES;
    for (u64 at = first_in_row(); at < count * pieces * 8; at += threads_in_row()) {
        const u64 lane = at % 8, piece = at / 8 % pieces, payload = at / 8 / pieces;
        const u64 length = piece_bytes(size, piece);
        if (length <= SHORT_BYTES_MAX) continue;
        u64* mine = sums + (payload * blocks + piece * (PIECE_BYTES / BLOCK_BYTES)) * 8 + lane;
        const u64 whole = (length - 1) / BLOCK_BYTES, secret = SECRET[16 + lane];
        // Each step needs the one before: what it adds is asked for AHEAD steps earlier.
        u64 sum = BEGIN[lane], ahead[AHEAD];
#pragma unroll
        for (u64 n = 0; n < AHEAD; n++) ahead[n] = mine[8 * (n < whole ? n : whole)];
        for (u64 block = 0; block < whole; block += AHEAD) {
#pragma unroll
            for (u64 n = 0; n < AHEAD; n++) {
                if (block + n < whole) {
                    sum += ahead[n];
                    sum = (sum ^ sum >> 47 ^ secret) * PRIME32_1;
                }
                const u64 next = block + n + AHEAD;
                ahead[n] = mine[8 * (next < whole ? next : whole)];
            }
        }
        mine[0] = sum + mine[8 * whole];
    }
}

// digests: [payload][piece][16], as xxh3_128's canonical form: the upper half first, big endian.
extern "C" __global__ void finish_pieces(const __grid_constant__ Payloads payloads,
                                         const u64* sums, u8* digests) {
    const u64 size = payloads.size, blocks = blocks_of(size);
    const u64 pieces = (size + PIECE_BYTES - 1) / PIECE_BYTES;
    for (u64 at = first_in_row(); at < payloads.count * pieces; at += threads_in_row()) {
        const u64 piece = at % pieces, payload = at / pieces, length = piece_bytes(size, piece);
        Wide hash;
        if (length <= SHORT_BYTES_MAX) {
            hash = of_short((const u8*)payloads.addresses[payload] + piece * PIECE_BYTES, length);
        } else {
            const u64* lanes = sums + (payload * blocks + piece * (PIECE_BYTES / BLOCK_BYTES)) * 8;
            hash.low = merged(lanes, 11, length * PRIME64_1);
            hash.high = merged(lanes, 192 - 64 - 11, ~(length * PRIME64_2));
        }
        for (int byte = 0; byte < 8; byte++) {
            digests[at * 16 + byte] = (u8)(hash.high >> (56 - 8 * byte));
            digests[at * 16 + 8 + byte] = (u8)(hash.low >> (56 - 8 * byte));
        }
    }
}
