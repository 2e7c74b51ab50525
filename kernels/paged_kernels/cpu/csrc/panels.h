// The packing of keys and values into panels, for many rows.
#pragma once
#include "tiles.h"

namespace paged {
namespace {

template <bool PAIRS, Type T>
INLINE vu units(const void* row, int d, int head_dim) {  // loads W units from element d on
  if constexpr (!PAIRS) return as_bits(widen<T>(at<T>(row, d), head_dim - d));
  else if constexpr (T == Type::bf16) {
    if (d + 2 * W <= head_dim) return load<vu>(at<T>(row, d));
    vu whole = {};
    __builtin_memcpy(&whole, at<T>(row, d), 2 * max_int(0, head_dim - d));
    return whole;
  } else return pack_bf16(widen<T>(at<T>(row, d), head_dim - d), widen<T>(at<T>(row, d + W), max_int(0, head_dim - d - W)));
}

template <bool PAIRS, Type T>
void pack_keys(const void* const* rows, int count, int head_dim, uint32_t* panel, Prefetcher& prefetcher) {
  constexpr int elements = PAIRS ? 2 * W : W;
  for (int n = 0; n < count; n += W)
    for (int d = 0; d < head_dim; d += elements) {
      prefetcher.fetch(W / 4);
      vu block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) block[i] = n + i < count ? units<PAIRS, T>(rows[n + i], d, head_dim) : vu{};
      transpose(block);
      uint32_t* to = panel + d / (PAIRS ? 2 : 1) * key_tile + n;
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) store(to + i * key_tile, block[i]);
    }
}

template <bool PAIRS, Type T>
void pack_values(const void* const* rows, int count, int head_dim, int width, uint32_t* panel, Prefetcher& prefetcher) {
  const int depth = round_up(count, 32);
  if constexpr (!PAIRS) {
    for (int n = 0; n < depth; n++) {
      prefetcher.fetch();
      for (int d = 0; d < head_dim; d += W)
        store(panel + (int64_t)n * width + d, n < count ? units<PAIRS, T>(rows[n], d, head_dim) : vu{});
    }
  } else {
    for (int n = 0; n < depth; n += 2) {
      prefetcher.fetch();
      uint32_t* to = panel + (int64_t)n / 2 * width;
      for (int d = 0; d < head_dim; d += 2 * W) {
        vu a = n < count ? units<PAIRS, T>(rows[n], d, head_dim) : vu{};
        vu b = n + 1 < count ? units<PAIRS, T>(rows[n + 1], d, head_dim) : vu{};
        store(to + d, (a & 0xFFFFu) | b << 16);
        store(to + d + W, a >> 16 | (b & 0xFFFF0000u));
      }
    }
  }
}

using PackKeys = void (*)(const void* const*, int, int, uint32_t*, Prefetcher&);
using PackValues = void (*)(const void* const*, int, int, int, uint32_t*, Prefetcher&);

struct Packers {
  PackKeys keys;
  PackValues values;
};

template <bool PAIRS>
Packers packers(Type type) {
  switch (type) {
    case Type::bf16: return {pack_keys<PAIRS, Type::bf16>, pack_values<PAIRS, Type::bf16>};
    case Type::int8: return {pack_keys<PAIRS, Type::int8>, pack_values<PAIRS, Type::int8>};
    case Type::fp8: return {pack_keys<PAIRS, Type::fp8>, pack_values<PAIRS, Type::fp8>};
    default: break;
  }
  if constexpr (!PAIRS) {
    if (type == Type::f16) return {pack_keys<false, Type::f16>, pack_values<false, Type::f16>};
    return {pack_keys<false, Type::f32>, pack_values<false, Type::f32>};
  }
  __builtin_unreachable();
}

}  // namespace
}  // namespace paged
