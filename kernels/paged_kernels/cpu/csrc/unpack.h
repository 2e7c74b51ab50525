// Panels of layers with packed blocks. The columns of these value panels are in the order of elements.
#pragma once
#include "packed_blocks.h"
#include "tiles.h"

namespace paged {
namespace {

INLINE vf splat_at(const float* from) {  // one instruction, where GCC makes two of `splat`
#if defined(__AVX512F__)
  return (vf)_mm512_set1_ps(*from);
#else
  return splat(*from);
#endif
}

// Turns codes into code * scale + zero. A lane has a code in its lowest four bits. With PAIRS, each half of a lane has one.
// The low half uses scales[0] and zeros[0], the high half scales[stride] and zeros[stride].
template <bool PAIRS>
class Dequantizer {
 public:
  Dequantizer() = default;
#if defined(__AVX512BW__)
  INLINE Dequantizer(const float* scales, const float* zeros, int stride) {
    const vf codes = __builtin_convertvector(lanes(), vf), first = fma(codes, splat_at(scales), splat_at(zeros));
    if constexpr (PAIRS) table_ = pack_bf16(first, fma(codes, splat_at(scales + stride), splat_at(zeros + stride)));
    else table_ = as_bits(first);
  }

  INLINE vu operator()(vu codes) const {
    if constexpr (PAIRS) return (vu)_mm512_permutexvar_epi16((__m512i)((codes & 0x000F000Fu) | 0x00100000u), (__m512i)table_);
    else return (vu)_mm512_permutexvar_epi32((__m512i)codes, (__m512i)table_);
  }

 private:
  vu table_;  // the results of all codes
#else
  INLINE Dequantizer(const float* scales, const float* zeros, int stride) : scales_(scales), zeros_(zeros), stride_(stride) {}

  INLINE vu operator()(vu codes) const {
    const vf first = result(codes, 0);
    if constexpr (PAIRS) return rounded_bf16(first) >> 16 | rounded_bf16(result(codes >> 16, stride_));
    else return as_bits(first);
  }

 private:
  INLINE vf result(vu codes, int at) const {
    return fma(__builtin_convertvector((vi)(codes & 15u), vf), splat_at(scales_ + at), splat_at(zeros_ + at));
  }

  const float *scales_, *zeros_;
  int stride_;
#endif
};

INLINE vu exchange_middle_bytes(vu x) {
#if defined(__AVX512BW__)
  return (vu)_mm512_shuffle_epi8((__m512i)x, _mm512_broadcast_i32x4(_mm_setr_epi8(0, 2, 1, 3, 4, 6, 5, 7, 8, 10, 9, 11, 12, 14, 13, 15)));
#else
  return (x & 0xFF0000FFu) | (x >> 8 & 0x0000FF00u) | (x << 8 & 0x00FF0000u);
#endif
}

// Loads 16 bytes of each of W rows: columns[i] has bytes 4 i to 4 i + 3 of row n in lane n.
INLINE void load_columns(const char* rows, int row_bytes, vu (&columns)[4]) {
#pragma GCC unroll 4
  for (int i = 0; i < 4; i++) {
#if defined(__AVX512F__)
    __m512i four = _mm512_castsi128_si512(load<__m128i>(rows + i * row_bytes));
    four = _mm512_inserti32x4(four, load<__m128i>(rows + (4 + i) * row_bytes), 1);
    four = _mm512_inserti32x4(four, load<__m128i>(rows + (8 + i) * row_bytes), 2);
    columns[i] = (vu)_mm512_inserti32x4(four, load<__m128i>(rows + (12 + i) * row_bytes), 3);
#else
    for (int n = 0; n < W; n += 4) __builtin_memcpy((char*)&columns[i] + 4 * n, rows + (n + i) * row_bytes, 16);
#endif
  }
  All::exchange<2>(columns[0], columns[2]);
  All::exchange<2>(columns[1], columns[3]);
  All::exchange<1>(columns[0], columns[1]);
  All::exchange<1>(columns[2], columns[3]);
}

// Dequantizes the keys of a packed block into columns of a panel.
template <bool PAIRS>
INLINE void unpack_keys(const PackedBlocks& packed, int64_t block, int kv_head, int head_dim, uint32_t* panel, Prefetcher& prefetcher) {
  alignas(64) float scales[max_head_dim + W], zeros[max_head_dim + W];
  const char *of_channels = packed.at(PackedBlocks::key_scales, block, kv_head), *of_zeros = packed.at(PackedBlocks::key_zeros, block, kv_head);
  for (int d = 0; d < head_dim; d += W) {
    store(scales + d, packed_scales(extend_u8(of_channels + d)));
    store(zeros + d, widen_f16(of_zeros + 2 * d));
  }
  const char* codes = packed.at(PackedBlocks::key_codes, block, kv_head);
  constexpr int vectors = packed_block / W, elements = PAIRS ? 2 : 1;
  const int half = head_dim / 2;
  for (int byte = 0; byte < half; byte += 16) {
    vu columns[vectors][4];
#pragma GCC unroll 8
    for (int v = 0; v < vectors; v++) load_columns(codes + v * W * half + byte, half, columns[v]);
#pragma GCC unroll 4
    for (int c = 0; c < 4; c++) {
      prefetcher.fetch();
      if constexpr (PAIRS)  // so that adjacent elements are in both halves of a lane
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) columns[v][c] = exchange_middle_bytes(columns[v][c]);
#pragma GCC unroll 8
      for (int i = 0; i < 8 / elements; i++) {
        const int d = byte + 4 * c + i / 2 * elements + i % 2 * half;
        const Dequantizer<PAIRS> dequantize(scales + d, zeros + d, 1);
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++) store(panel + d / elements * key_tile + v * W, dequantize(columns[v][c] >> 4 * i));
      }
    }
  }
}

// Dequantizes the values of a packed block into rows of a panel; the first `missing` ones become zeros.
template <bool PAIRS>
INLINE void unpack_values(const PackedBlocks& packed, int64_t block, int kv_head, int value_dim, int missing, uint32_t* panel, Prefetcher& prefetcher) {
  constexpr int together = PAIRS ? 2 : 1;  // values in a row of the panel
  const int groups = value_dim / packed_group, half = value_dim / 2;
  alignas(64) float scales[max_head_dim + W], zeros[max_head_dim + W];  // [packed_block, groups]
  const char* of_groups = packed.at(PackedBlocks::value_scales, block, kv_head);
  for (int i = 0; i < value_dim; i += W) store(scales + i, packed_scales(extend_u8(of_groups + i)));
  for (int i = 0; i < missing * groups; i++) scales[i] = 0;
  for (int i = 0; i < value_dim; i += W) store(zeros + i, load<vf>(scales + i) * -7.5f);
  const char* codes = packed.at(PackedBlocks::value_codes, block, kv_head);
  for (int n = 0; n < packed_block; n += together, codes += together * half, panel += value_dim) {
    prefetcher.fetch(together);
    Dequantizer<PAIRS> of_group[max_head_dim / packed_group];
    for (int group = 0; group < groups; group++) of_group[group] = Dequantizer<PAIRS>(scales + n * groups + group, zeros + n * groups + group, groups);
    for (int d = 0; d < half; d += W) {
      vu both = extend_u8(codes + d);
      if constexpr (PAIRS) both |= extend_u8(codes + half + d) << 16;
      store(panel + d, of_group[d / packed_group](both));
      store(panel + half + d, of_group[(half + d) / packed_group](both >> 4));
    }
  }
}

// Widens up to packed_block values in int8 into rows of a panel, without their scales; missing ones become zeros.
template <bool PAIRS>
INLINE void widen_values(const void* const* rows, int count, int value_dim, uint32_t* panel) {
  constexpr int together = PAIRS ? 2 : 1;
  for (int n = 0; n < packed_block; n += together, panel += value_dim)
    for (int d = 0; d < value_dim; d += W) {
      const auto bits = [&](int key) { return key < count ? as_bits(widen<Type::int8>(at<Type::int8>(rows[key], d))) : vu{}; };
      store(panel + d, PAIRS ? bits(n) >> 16 | bits(n + 1) : bits(n));  // codes are exact in bf16
    }
}

}  // namespace
}  // namespace paged
