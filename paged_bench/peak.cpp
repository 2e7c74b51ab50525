// How fast a processor multiplies and reads memory, at the instruction set that this file is compiled for.
//
// Each `multiply_*` multiplies registers by registers, with enough independent sums to keep the multipliers busy, and
// returns the number of operations: two for each product that is added. It exists only if the level has an instruction
// for the type. It takes about 2 ms.

#include <cstdint>

#if defined(__x86_64__)
#include <immintrin.h>
#define IN_REGISTER(value) asm volatile("" : "+v"(value))  // the compiler must assume that the value changes here
#else
#define IN_REGISTER(value) asm volatile("" : "+w"(value))
#endif

#define EXPORTED extern "C" __attribute__((visibility("default")))

namespace {

#if defined(__AVX512F__)
constexpr int kBytes = 64, kSums = 24;
#elif defined(__AVX2__)
constexpr int kBytes = 32, kSums = 12;
#else
constexpr int kBytes = 16, kSums = 12;
#endif
constexpr int64_t kRounds = 1 << 18;

// Adds to kSums vectors, kRounds times. add(sum, a, b) returns the new sum, after this number of operations.
template <class Sum, class Factor, class Add>
int64_t multiply(Sum zero, Factor a, Factor b, int64_t operations, Add add) {
    Sum sums[kSums];
    for (Sum& sum : sums) sum = zero;
    IN_REGISTER(a);
    IN_REGISTER(b);
    for (int64_t round = 0; round < kRounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < kSums; ++i) sums[i] = add(sums[i], a, b);
    }
    for (Sum& sum : sums) IN_REGISTER(sum);
    return kRounds * kSums * operations;
}

typedef float Floats __attribute__((vector_size(kBytes)));

}  // namespace

EXPORTED int64_t multiply_float32() {
    return multiply(Floats{}, Floats{}, Floats{}, kBytes / 2, [](Floats sum, Floats a, Floats b) { return sum + a * b; });
}

#if defined(__AMX_BF16__)
EXPORTED int64_t multiply_bfloat16() {
    struct alignas(64) {
        uint8_t palette = 1, start_row = 0, reserved[14] = {};
        uint16_t row_bytes[16] = {};
        uint8_t rows[16] = {};
    } shape;
    for (int tile = 0; tile < 8; ++tile) shape.row_bytes[tile] = 64, shape.rows[tile] = 16;
    asm volatile("" ::: "memory");  // GCC 12 does not know that the next line reads memory
    _tile_loadconfig(&shape);
    for (int64_t round = 0; round < kRounds / 4; ++round) {
        _tile_dpbf16ps(0, 6, 7);
        _tile_dpbf16ps(1, 6, 7);
        _tile_dpbf16ps(2, 6, 7);
        _tile_dpbf16ps(3, 6, 7);
        _tile_dpbf16ps(4, 6, 7);
        _tile_dpbf16ps(5, 6, 7);
    }
    _tile_release();
    return kRounds / 4 * 6 * (2 * 16 * 16 * 32);
}
#elif defined(__AVX512BF16__)
EXPORTED int64_t multiply_bfloat16() {
    return multiply(__m512{}, __m512i{}, __m512i{}, 2 * 32, [](__m512 sum, __m512i a, __m512i b) {
        return _mm512_dpbf16_ps(sum, (__m512bh)a, (__m512bh)b);
    });
}
#endif

#if defined(__AVX512VNNI__)
EXPORTED int64_t multiply_int8() {
    return multiply(__m512i{}, __m512i{}, __m512i{}, 2 * 64, [](__m512i sum, __m512i a, __m512i b) {
        return _mm512_dpbusd_epi32(sum, a, b);
    });
}
#elif defined(__AVX512BW__)
EXPORTED int64_t multiply_int8() {  // sums of 16 bits, which are widened rarely
    return multiply(__m512i{}, __m512i{}, __m512i{}, 2 * 64, [](__m512i sum, __m512i a, __m512i b) {
        IN_REGISTER(a);
        return _mm512_add_epi16(sum, _mm512_maddubs_epi16(a, b));
    });
}
#elif defined(__AVX2__)
EXPORTED int64_t multiply_int8() {  // sums of 16 bits, which are widened rarely
    return multiply(__m256i{}, __m256i{}, __m256i{}, 2 * 32, [](__m256i sum, __m256i a, __m256i b) {
        IN_REGISTER(a);
        return _mm256_add_epi16(sum, _mm256_maddubs_epi16(a, b));
    });
}
#endif

// Reads bytes, a multiple of kStreams * kPart, in sequential streams, because one stream does not reach the bandwidth.
EXPORTED void read_memory(const char* memory, int64_t bytes) {
    constexpr int kStreams = 4, kPart = 256;
    const int64_t length = bytes / kStreams;
    for (int64_t at = 0; at < length; at += kPart) {
        for (int stream = 0; stream < kStreams; ++stream) {
#pragma GCC unroll 16
            for (int part = 0; part < kPart; part += kBytes) {
                Floats values = *reinterpret_cast<const Floats*>(memory + stream * length + at + part);
                IN_REGISTER(values);
            }
        }
    }
}
