// FP8 (e4m3) with a scale for each head: rows of 16 bit values to a byte each, and back.
//
// The reference, kernels/fp8.py, says what each bit is. kind: 0 bfloat16, 1 float16.
#include "bytes.h"

#define NO_SCALE 255  // of a row with a value that is not finite: it cannot be encoded

__device__ inline float of_bits(u32 bits) { return __uint_as_float(bits); }
__device__ inline u32 bits_of(float value) { return __float_as_uint(value); }

// 2 to the power of -126 … 127.
__device__ inline float power(int exponent) { return of_bits((u32)(exponent + 127) << 23); }

__device__ inline float decoded16(u32 half, u32 kind) {
    if (kind == 0) return of_bits(half << 16);
    const u32 exponent = half >> 10 & 31, mantissa = half & 1023;
    const float size = exponent ? of_bits((exponent + 112) << 23 | mantissa << 13)
                                : (float)mantissa * power(-24);
    return half >> 15 ? -size : size;
}

// To the nearest, ties to even, never to infinity.
__device__ inline u32 encoded16(float value, u32 kind) {
    const u32 bits = bits_of(value), sign = bits >> 16 & 0x8000, size = bits & 0x7FFFFFFF;
    if (size > 0x7F800000) return sign | (kind ? 0x7E00 : 0x7FC0);
    u32 found;
    if (kind == 0) {
        found = (size + 0x7FFF + (size >> 16 & 1)) >> 16;
        return sign | (found < 0x7F80 ? found : 0x7F7F);
    }
    if (size < 0x38800000)
        found = bits_of(of_bits(size) + 0.5f) - bits_of(0.5f);
    else
        found = ((size + 0xFFF + (size >> 13 & 1)) >> 13) - (112 << 10);
    return sign | (found < 0x7C00 ? found : 0x7BFF);
}

__device__ inline float decoded8(u32 code) {
    const u32 exponent = code >> 3 & 15, mantissa = code & 7;
    float size = exponent ? of_bits((exponent + 120) << 23 | mantissa << 20)
                          : (float)mantissa * power(-9);
    if ((code & 0x7F) == 0x7F) size = of_bits(0x7FC00000);
    return code >> 7 ? -size : size;
}

// To the nearest, ties to even; at most 448.
__device__ inline u32 encoded8(float value) {
    const u32 bits = bits_of(value), sign = bits >> 24 & 0x80, size = bits & 0x7FFFFFFF;
    if (size < 0x3C800000) return sign | (bits_of(of_bits(size) + 16384.0f) - bits_of(16384.0f));
    const u32 found = ((size + 0x7FFFF + (size >> 20 & 1)) >> 20) - (120 << 3);
    return sign | (found < 0x7E ? found : 0x7E);
}

// The least scale, a power of two by its biased exponent, with which the largest is at most 448.
__device__ inline u32 scale_of(u32 largest, u32 kind) {
    if (largest >= (kind ? 0x7C00u : 0x7F80u)) return NO_SCALE;
    const u32 bits = bits_of(decoded16(largest, kind));
    const int scale = (int)(bits >> 23) - 8 + ((bits & 0x7FFFFF) > 0x600000);
    return scale < 1 ? 1 : scale;
}

// largest: [row], zeros before: bits of the largest value without its sign.
extern "C" __global__ void fp8_measure(const u16* values, u64 rows, u64 length, u32* largest) {
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        u32 found = 0;
        for (u64 at = first_in_row(); at < length; at += threads_in_row()) {
            const u32 size = values[row * length + at] & 0x7FFF;
            if (size > found) found = size;
        }
        if (found) atomicMax(largest + row, found);
    }
}

// errors: [row], zeros before: bits of the largest difference to what is decoded, as a float.
extern "C" __global__ void fp8_encode(const u16* values, u64 rows, u64 length, u32 kind,
                                      const u32* largest, u8* scales, u8* codes, u32* errors) {
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const u32 scale = scale_of(largest[row], kind);
        if (first_in_row() == 0) scales[row] = (u8)scale;
        if (scale == NO_SCALE) continue;
        const float up = power((int)scale - 127), down = power(127 - (int)scale);
        float worst = 0;
        for (u64 at = first_in_row(); at < length; at += threads_in_row()) {
            const float value = decoded16(values[row * length + at], kind);
            const u32 code = encoded8(value * down);
            codes[row * length + at] = (u8)code;
            const float error = value - decoded16(encoded16(decoded8(code) * up, kind), kind);
            if (error > worst) worst = error;
            if (-error > worst) worst = -error;
        }
        if (worst > 0) atomicMax(errors + row, bits_of(worst));
    }
}

extern "C" __global__ void fp8_decode(const u8* codes, u64 rows, u64 length, u32 kind,
                                      const u8* scales, u16* values) {
    for (u64 row = blockIdx.y; row < rows; row += gridDim.y) {
        const u32 scale = scales[row];
        const float up = scale == NO_SCALE ? 0 : power((int)scale - 127);
        for (u64 at = first_in_row(); at < length; at += threads_in_row())
            values[row * length + at] =
                (u16)encoded16(decoded8(codes[row * length + at]) * up, kind);
    }
}
