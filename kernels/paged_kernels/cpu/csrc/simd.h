// Vectors of the level that a file is compiled for, with the vector extensions of GCC and Clang: operators for
// arithmetic, intrinsics only where there is no operator.
//
// Everything has internal linkage, and no header with inline functions is included: a function of one level must not be
// replaced by that of a level for a newer chip, by the linker or when libraries are loaded.
#pragma once
#include <cstdint>

#include "calls.h"

#if defined(__AVX2__)
#include <immintrin.h>
#endif

#ifndef PAGED_EMULATE_AMX
#define PAGED_EMULATE_AMX 0
#endif

namespace paged {
namespace {

#if defined(__AVX512F__)
constexpr int W = 16;  // lanes of 32 bits
#elif defined(__AVX2__)
constexpr int W = 8;
#else
constexpr int W = 4;
#endif

typedef float vf __attribute__((vector_size(4 * W)));
typedef int32_t vi __attribute__((vector_size(4 * W)));
typedef uint32_t vu __attribute__((vector_size(4 * W)));
typedef int8_t vi8 __attribute__((vector_size(W)));
typedef uint8_t vu8 __attribute__((vector_size(W)));
typedef uint16_t vu16 __attribute__((vector_size(2 * W)));

#define INLINE inline __attribute__((always_inline))

template <class V>
INLINE V load(const void* from) {
  V value;
  __builtin_memcpy(&value, from, sizeof value);
  return value;
}

template <class V>
INLINE void store(void* to, V value) {
  __builtin_memcpy(to, &value, sizeof value);
}

constexpr float infinity = __builtin_inff();

INLINE vf splat(float x) { return x - vf{}; }
INLINE vi splat(int32_t x) { return x - vi{}; }
INLINE vf as_float(vu x) { return (vf)x; }
INLINE vu as_bits(vf x) { return (vu)x; }
INLINE vf select(vi which, vf yes, vf no) { return which ? yes : no; }
INLINE vf max_lanes(vf a, vf b) { return a > b ? a : b; }
constexpr INLINE int min_int(int a, int b) { return a < b ? a : b; }
constexpr INLINE int max_int(int a, int b) { return a > b ? a : b; }
INLINE int round_up(int n, int to) { return (n + to - 1) / to * to; }

INLINE vi lanes() {
  vi n;
  for (int i = 0; i < W; i++) n[i] = i;
  return n;
}

INLINE vf fma(vf a, vf b, vf c) {
#if defined(__AVX512F__)
  return (vf)_mm512_fmadd_ps((__m512)a, (__m512)b, (__m512)c);
#elif defined(__AVX2__)
  return (vf)_mm256_fmadd_ps((__m256)a, (__m256)b, (__m256)c);
#else
  return a * b + c;
#endif
}

INLINE float reduce_add(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_add_ps((__m512)x);
#else
  float sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
#endif
}

INLINE float reduce_max(vf x) {
#if defined(__AVX512F__)
  return _mm512_reduce_max_ps((__m512)x);
#else
  float top = x[0];
  for (int i = 1; i < W; i++) top = x[i] > top ? x[i] : top;
  return top;
#endif
}

INLINE int32_t reduce_add(vi x) {
  int32_t sum = 0;
  for (int i = 0; i < W; i++) sum += x[i];
  return sum;
}

// 2**x for x in [-infinity, 127]; 0 below -126. The relative error is 2e-9 before rounding. FAST: with AVX-512, the error
// is 3e-6, and below -126 the result is some value from 0 to 2**-126.
template <bool FAST = false>
INLINE vf exp2(vf x) {
#if defined(__AVX512F__)
  if constexpr (FAST) {
    const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEG_INF);  // x - floor(x)
    vf p = fma(splat(1.353416792e-2f), f, splat(5.201146061e-2f));
    p = fma(p, f, splat(2.414427569e-1f));
    p = fma(p, f, splat(6.930038345e-1f));
    p = fma(p, f, splat(1.000002593f));
    return (vf)_mm512_scalef_ps((__m512)p, (__m512)x);  // p * 2**floor(x)
  }
  const vf f = (vf)_mm512_reduce_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);  // x - its nearest integer
#else
  const vf inside = x < -126.0f ? splat(-126.0f) : x;  // keeps NaN
  const vf shifted = inside + 12582912.0f;             // 1.5 * 2**23 rounds to an integer
  const vf f = inside - (shifted - 12582912.0f);
#endif
  vf p = fma(splat(1.534581097e-4f), f, splat(1.339993091e-3f));
  p = fma(p, f, splat(9.618489072e-3f));
  p = fma(p, f, splat(5.550328642e-2f));
  p = fma(p, f, splat(2.402264625e-1f));
  p = fma(p, f, splat(6.931471825e-1f));
  p = fma(p, f, splat(1.0f));
#if defined(__AVX512F__)
  const vf nearest = (vf)_mm512_roundscale_ps((__m512)x, _MM_FROUND_TO_NEAREST_INT);
  return (vf)_mm512_maskz_scalef_ps(_mm512_cmp_ps_mask((__m512)x, (__m512)splat(-126.0f), _CMP_NLT_UQ), (__m512)p, (__m512)nearest);
#else
  const vf power = as_float((as_bits(shifted) << 23) + 0x3F800000u);  // for NaN any number: the product is NaN
  return x < -126.0f ? vf{} : p * power;
#endif
}

// a / b for b from 1 to 2**126, with an error of up to two units in the last place.
INLINE vf divide(vf a, vf b) {
#if defined(__AVX512F__)  // a division of 16 numbers is slow (Sapphire Rapids)
  vf inverse = (vf)_mm512_rcp14_ps((__m512)b);
  return a * fma(inverse, fma(-b, inverse, splat(1.0f)), inverse);
#else
  return a / b;
#endif
}

INLINE float exp2(float x) { return exp2(splat(x))[0]; }
constexpr float log2e = 1.4426950408889634f;

INLINE vf tanh(vf x) {  // saturates; keeps NaN
  vf bounded = x > 20.0f ? splat(20.0f) : x < -20.0f ? splat(-20.0f) : x;
  vf e = exp2(bounded * (2 * log2e));
  return 1.0f - 2.0f / (e + 1.0f);
}

// --- elements of 8 and 16 bits --------------------------------------------------------------------------------------

// GCC compiles conversions between lanes of different width to many instructions; each of these is one.
INLINE vu extend_u16(const void* from) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu16_epi32(load<__m256i>(from));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu16_epi32(load<__m128i>(from));
#else
  return __builtin_convertvector(load<vu16>(from), vu);
#endif
}

INLINE vu extend_u8(const void* from) {
#if defined(__AVX512F__)
  return (vu)_mm512_cvtepu8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (vu)_mm256_cvtepu8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<vu8>(from), vu);
#endif
}

INLINE vi extend_i8(const void* from) {
#if defined(__AVX512F__)
  return (vi)_mm512_cvtepi8_epi32(load<__m128i>(from));
#elif defined(__AVX2__)
  return (vi)_mm256_cvtepi8_epi32(_mm_loadl_epi64((const __m128i*)from));
#else
  return __builtin_convertvector(load<vi8>(from), vi);
#endif
}

INLINE vf widen_f16(const void* from) {
#if defined(__AVX512F__)
  return (vf)_mm512_cvtph_ps(load<__m256i>(from));
#elif defined(__AVX2__)
  return (vf)_mm256_cvtph_ps(load<__m128i>(from));
#else
  vu bits = __builtin_convertvector(load<vu16>(from), vu);
  vu magnitude = (bits & 0x7FFFu) << 13;
  vf number = as_float(magnitude + (112u << 23));  // the exponent bias is 15, not 127
  vf small = __builtin_convertvector((vi)(bits & 0x7FFFu), vf) * 0x1p-24f;
  vf value = select((vi)(magnitude < (1u << 23)), small, number);
  value = select((vi)(magnitude >= (31u << 23)), as_float(magnitude | 0x7F800000u), value);
  return as_float(as_bits(value) | (bits & 0x8000u) << 16);
#endif
}

INLINE vu16 narrow_f16(vf x) {
#if defined(__AVX512F__)
  return (vu16)_mm512_cvtps_ph((__m512)x, _MM_FROUND_TO_NEAREST_INT);
#elif defined(__AVX2__)
  return (vu16)_mm256_cvtps_ph((__m256)x, _MM_FROUND_TO_NEAREST_INT);
#else
  vu bits = as_bits(x), sign = bits >> 16 & 0x8000u, magnitude = bits & 0x7FFFFFFFu;
  vu number = (magnitude + 0xFFFu + (magnitude >> 13 & 1u) - (112u << 23)) >> 13;
  number = number > 0x7C00u ? vu{} + 0x7C00u : number;
  vu small = as_bits(as_float(magnitude) + 0.5f) - 0x3F000000u;  // subnormal: steps of 2**-24 are the last bits below 1
  vu half = magnitude < (113u << 23) ? small : magnitude >= 0x47800000u ? vu{} + 0x7C00u : number;
  half = magnitude > 0x7F800000u ? vu{} + 0x7E00u : half;
  return __builtin_convertvector(half | sign, vu16);
#endif
}

INLINE vf widen_bf16(const void* from) { return as_float(extend_u16(from) << 16); }

INLINE vu rounded_bf16(vf x) {  // in the upper halves, ties to even
#if defined(__AVX512BF16__)
  const vu16 halves = (vu16)_mm512_cvtneps_pbh((__m512)x);
  return extend_u16(&halves) << 16;
#else
  vu bits = as_bits(x);
  vu rounded = bits + 0x7FFFu + (bits >> 16 & 1u);
  return x == x ? rounded & 0xFFFF0000u : vu{} + 0x7FC00000u;
#endif
}

INLINE vu16 narrow_bf16(vf x) {
#if defined(__AVX512BF16__)
  return (vu16)_mm512_cvtneps_pbh((__m512)x);  // subnormal numbers become 0
#elif defined(__AVX512F__)
  return (vu16)_mm512_cvtepi32_epi16((__m512i)(rounded_bf16(x) >> 16));
#else
  return __builtin_convertvector(rounded_bf16(x) >> 16, vu16);
#endif
}

INLINE vf widen_fp8(const void* from) {  // `quantize` never produces a NaN code
  vu bits = extend_u8(from);
  vu magnitude = bits & 0x7Fu;
  vf number = as_float((magnitude << 20) + (120u << 23));
  vf small = __builtin_convertvector((vi)magnitude, vf) * 0x1p-9f;
  vf value = select((vi)(magnitude < 8u), small, number);
  return as_float(as_bits(value) | (bits & 0x80u) << 24);
}

template <Type T>
constexpr int bytes_of = T == Type::f32 ? 4 : T == Type::f16 || T == Type::bf16 ? 2 : 1;

template <Type T>
INLINE vf widen(const void* from) {  // W elements
  if constexpr (T == Type::f32) return load<vf>(from);
  if constexpr (T == Type::f16) return widen_f16(from);
  if constexpr (T == Type::bf16) return widen_bf16(from);
  if constexpr (T == Type::int8) return __builtin_convertvector(extend_i8(from), vf);
  if constexpr (T == Type::fp8) return widen_fp8(from);
}

template <Type T>
INLINE void narrow(void* to, vf x) {
  if constexpr (T == Type::f32) store(to, x);
  if constexpr (T == Type::f16) store(to, narrow_f16(x));
  if constexpr (T == Type::bf16) store(to, narrow_bf16(x));
}

// The same for the end of a row: elements past `count` are read as 0 and not written.
template <Type T>
INLINE vf widen(const void* from, int count) {
  if (count >= W) return widen<T>(from);
  alignas(64) unsigned char whole[4 * W] = {};
  __builtin_memcpy(whole, from, count * bytes_of<T>);
  return widen<T>(whole);
}

template <Type T>
INLINE void narrow(void* to, vf x, int count) {
  if (count >= W) return narrow<T>(to, x);
  alignas(64) unsigned char whole[4 * W];
  narrow<T>(whole, x);
  __builtin_memcpy(to, whole, count * bytes_of<T>);
}

template <Type T>
INLINE vf rounded(vf x) {  // to T and back
  if constexpr (T == Type::f32) return x;
  if constexpr (T == Type::bf16) return as_float(rounded_bf16(x));
  vu16 half = narrow_f16(x);
  return widen_f16(&half);
}

template <Type T>
INLINE const void* at(const void* row, int64_t element) {
  return (const char*)row + element * bytes_of<T>;
}

template <Type T>
INLINE void* at(void* row, int64_t element) {
  return (char*)row + element * bytes_of<T>;
}

// Runs the statements with a floating-point type as a constant.
#define DISPATCH_FLOAT(type, T, ...)                                                \
  switch (type) {                                                               \
    case Type::f16: { constexpr Type T = Type::f16; __VA_ARGS__; } break;       \
    case Type::bf16: { constexpr Type T = Type::bf16; __VA_ARGS__; } break;     \
    default: { constexpr Type T = Type::f32; __VA_ARGS__; } break;              \
  }

// --- pairs of bf16 in 32 bits ---------------------------------------------------------------------------------------

INLINE vu pack_bf16(vf first, vf second) {  // 2 W elements in order
#if defined(__AVX512BF16__)
  return (vu)_mm512_cvtne2ps_pbh((__m512)second, (__m512)first);
#else
  vu16 halves[2] = {narrow_bf16(first), narrow_bf16(second)};
  return load<vu>(halves);
#endif
}

#if defined(__AVX512BF16__) || PAGED_EMULATE_AMX
constexpr bool has_dot = true;  // pairs are multiplied without being widened
#else
constexpr bool has_dot = false;
#endif

// Adds both products of each lane's pair to the sum. The order of the additions depends on the instruction set.
INLINE vf dot_bf16(vu a, vu b, vf sum) {
#if defined(__AVX512BF16__)
  return (vf)_mm512_dpbf16_ps((__m512)sum, (__m512bh)a, (__m512bh)b);
#endif
  sum = fma(as_float(a << 16), as_float(b << 16), sum);
  return fma(as_float(a & 0xFFFF0000u), as_float(b & 0xFFFF0000u), sum);
}

// --- bytes ----------------------------------------------------------------------------------------------------------

typedef uint8_t bytes16 __attribute__((vector_size(16)));

// Returns table[byte] for each byte, which must be below 16.
INLINE vu look_up(vu bytes, bytes16 table) {
#if defined(__AVX512BW__)
  return (vu)_mm512_shuffle_epi8(_mm512_broadcast_i32x4((__m128i)table), (__m512i)bytes);
#elif defined(__AVX2__)
  return (vu)_mm256_shuffle_epi8(_mm256_broadcastsi128_si256((__m128i)table), (__m256i)bytes);
#else
  uint8_t found[4 * W];
  store(found, bytes);
  for (int i = 0; i < 4 * W; i++) found[i] = table[found[i]];
  return load<vu>(found);
#endif
}

#if defined(__AVX512VNNI__)
constexpr bool has_byte_dot = true;  // 4 products of bytes are added to a lane by one instruction
#else
constexpr bool has_byte_dot = false;
#endif
constexpr int signed_bytes = -1;  // in place of the largest byte

#if defined(__AVX512BW__)
INLINE vi add_pairs(vu a, vu b) { return (vi)_mm512_madd_epi16((__m512i)a, (__m512i)b); }
INLINE vu add_byte_pairs(vu a, vu b) { return (vu)_mm512_maddubs_epi16((__m512i)a, (__m512i)b); }
INLINE vu add_halves(vu a, vu b) { return (vu)_mm512_add_epi16((__m512i)a, (__m512i)b); }
INLINE vu magnitudes(vu a) { return (vu)_mm512_abs_epi8((__m512i)a); }
INLINE vu with_signs(vu a, vu signs) {  // -a where the sign is negative
  return (vu)_mm512_mask_sub_epi8((__m512i)a, _mm512_movepi8_mask((__m512i)signs), _mm512_setzero_si512(), (__m512i)a);
}
#elif defined(__AVX2__)
INLINE vi add_pairs(vu a, vu b) { return (vi)_mm256_madd_epi16((__m256i)a, (__m256i)b); }
INLINE vu add_byte_pairs(vu a, vu b) { return (vu)_mm256_maddubs_epi16((__m256i)a, (__m256i)b); }
INLINE vu add_halves(vu a, vu b) { return (vu)_mm256_add_epi16((__m256i)a, (__m256i)b); }
INLINE vu magnitudes(vu a) { return (vu)_mm256_abs_epi8((__m256i)a); }
INLINE vu with_signs(vu a, vu signs) { return (vu)_mm256_sign_epi8((__m256i)a, (__m256i)signs); }
#endif

// Sums of products of 4 bytes in each lane: unsigned bytes up to LARGEST, or signed ones, by signed bytes from -127 on.
// Without an instruction for it, pairs of products are summed in 16 bits, up to `run` of them before they are added. `held`
// operands a, with what is derived from them, fit in registers.
template <int LARGEST>
struct ByteSum {
#if defined(__AVX512VNNI__)
  static constexpr int run = 1, held = 1;
  INLINE void add(vu a, vu b) { sum = (vi)_mm512_dpbusd_epi32((__m512i)sum, (__m512i)a, (__m512i)b); }
  INLINE vi total() const { return sum; }
  INLINE void start(vi first) { sum = first; }
  vi sum;
#elif defined(__AVX2__)
  static constexpr int held = LARGEST == signed_bytes ? 4 : 8;
  static constexpr int run = LARGEST == signed_bytes ? 1 : min_int(8, 32767 / (2 * 127 * max_int(1, LARGEST)));
  INLINE void add(vu a, vu b) {
    if constexpr (LARGEST == signed_bytes) pairs = add_halves(pairs, add_byte_pairs(magnitudes(a), with_signs(b, a)));
    else pairs = add_halves(pairs, add_byte_pairs(a, b));
  }
  INLINE vi total() const { return first + add_pairs(pairs, vu{} + 0x00010001u); }
  INLINE void start(vi sum) { first = sum, pairs = vu{}; }
  vi first;
  vu pairs;
#else
  static constexpr int run = 8, held = 8;
  INLINE void add(vu a, vu b) {
    for (uint32_t i = 0; i < 4; i++) {
      const vu byte = a << (24 - 8 * i);
      sum += (LARGEST == signed_bytes ? (vi)byte >> 24 : (vi)(byte >> 24)) * ((vi)(b << (24 - 8 * i)) >> 24);
    }
  }
  INLINE vi total() const { return sum; }
  INLINE void start(vi first) { sum = first; }
  vi sum;
#endif
};

// --- transposition of W x W lanes -----------------------------------------------------------------------------------

template <int... L>
struct Lanes {
  template <int S>
  static INLINE void exchange(vu& a, vu& b) {
    vu low = __builtin_shufflevector(a, b, ((L & S) ? W + L - S : L)...);
    b = __builtin_shufflevector(a, b, ((L & S) ? W + L : L + S)...);
    a = low;
  }
  template <int S>
  static INLINE vf fold(vf a, vf b) {  // sums of two lanes: of a where bit S of the lane number is 0, else of b
    vf kept = __builtin_shufflevector(a, b, ((L & S) ? W + L : L)...);
    return kept + __builtin_shufflevector(a, b, ((L & S) ? W + L - S : L + S)...);
  }
  static INLINE void deinterleave(vf& first, vf& second) {
    vf even = __builtin_shufflevector(first, second, (2 * L)...);
    second = __builtin_shufflevector(first, second, (2 * L + 1)...);
    first = even;
  }
  static INLINE void interleave(vf& even, vf& odd) {
    vf low = __builtin_shufflevector(even, odd, (L / 2 + (L & 1) * W)...);
    odd = __builtin_shufflevector(even, odd, (W / 2 + L / 2 + (L & 1) * W)...);
    even = low;
  }
};
#if defined(__AVX512F__)
using All = Lanes<0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15>;
#elif defined(__AVX2__)
using All = Lanes<0, 1, 2, 3, 4, 5, 6, 7>;
#else
using All = Lanes<0, 1, 2, 3>;
#endif

// deinterleave moves elements 0, 2, 4, ... of 2 W to the first vector and 1, 3, 5, ... to the second; interleave is the inverse.
INLINE void interleave(vf& even, vf& odd) { All::interleave(even, odd); }
INLINE void deinterleave(vf& first, vf& second) { All::deinterleave(first, second); }

template <int S = W / 2>
INLINE void transpose(vu (&rows)[W]) {  // exchanges lanes with bit S set across S rows
#pragma GCC unroll 16
  for (int i = 0; i < W; i++)
    if (!(i & S)) All::exchange<S>(rows[i], rows[i + S]);
  if constexpr (S > 1) transpose<S / 2>(rows);
}

// Returns the sum of rows[i] in lane i.
template <int S = W / 2>
INLINE vf reduce_rows(vf (&rows)[W]) {
#pragma GCC unroll 16
  for (int i = 0; i < S; i++) rows[i] = All::fold<S>(rows[i], rows[i + S]);
  if constexpr (S > 1) return reduce_rows<S / 2>(rows);
  else return rows[0];
}

}  // namespace
}  // namespace paged
