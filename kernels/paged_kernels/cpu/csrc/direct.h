// Scores and weighted sums for few rows, with keys and values read in place: each is widened once for up to 4 rows.
#pragma once
#include "panels.h"

namespace paged {
namespace {

constexpr int sums_in_registers = W == 16 ? 24 : 12;  // vectors of sums that fit the registers beside the operands

// Widens 2 W elements from element d on, with 0 past head_dim; for bf16 the even ones first, then the odd ones.
template <Type T>
INLINE void widen_two(const void* row, int d, int head_dim, vf (&to)[2]) {
  if constexpr (T == Type::bf16) {
    const vu pairs = units<true, T>(row, d, head_dim);
    to[0] = as_float(pairs << 16), to[1] = as_float(pairs & 0xFFFF0000u);
  } else {
    to[0] = as_float(units<false, T>(row, d, head_dim));
    to[1] = d + W < head_dim ? as_float(units<false, T>(row, d + W, head_dim)) : vf{};
  }
}

// Runs the statements with the number of rows, at most 4, as a constant.
#define DISPATCH_ROWS(rows, ROWS, ...)                           \
  switch (rows) {                                            \
    case 1: { constexpr int ROWS = 1; __VA_ARGS__; } break;  \
    case 2: { constexpr int ROWS = 2; __VA_ARGS__; } break;  \
    case 3: { constexpr int ROWS = 3; __VA_ARGS__; } break;  \
    default: { constexpr int ROWS = 4; __VA_ARGS__; } break; \
  }

// Computes the scores of W keys, summing over lanes for all W keys at once. The last key stands in for missing ones. The
// query is in pairs, or has the columns of `widen_two`.
template <Type T, bool PAIRS, int ROWS>
INLINE void score_block(const void* const* keys, int count, int head_dim, const uint32_t* query, int stride, float* scores, Prefetcher& prefetcher) {
  constexpr int several = ROWS == 1 ? 8 : ROWS * 4 <= sums_in_registers ? 4 : 2, step = several < W ? several : W;
  const int pace = max_int(1, step * 2 * W / head_dim);
  vf products[ROWS][W];
  for (int n = 0; n < W; n += step) {
    vf sums[ROWS][step] = {};
    const void* key[step];
    for (int i = 0; i < step; i++) key[i] = keys[min_int(n + i, count - 1)];
    for (int d = 0; d < head_dim; d += 2 * W) {
      prefetcher.fetch(pace);
#pragma GCC unroll 8
      for (int i = 0; i < step; i++) {
        if constexpr (PAIRS) {
          const vu pairs = units<true, T>(key[i], d, head_dim);
#pragma GCC unroll 4
          for (int row = 0; row < ROWS; row++)
            sums[row][i] = dot_bf16(pairs, load<vu>(query + row * stride + d / 2), sums[row][i]);
        } else {
          vf elements[2];
          widen_two<T>(key[i], d, head_dim, elements);
#pragma GCC unroll 4
          for (int row = 0; row < ROWS; row++) {
            sums[row][i] = fma(elements[0], load<vf>(query + row * stride + d), sums[row][i]);
            sums[row][i] = fma(elements[1], load<vf>(query + row * stride + d + W), sums[row][i]);
          }
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
      for (int i = 0; i < step; i++) products[row][n + i] = sums[row][i];
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++) store(scores + row * key_tile, reduce_rows(products[row]));
}

template <Type T, bool PAIRS = false>
void score_keys(const void* const* keys, int count, int head_dim, const uint32_t* query, int stride, float* scores, int rows, Prefetcher& prefetcher) {
  for (int n = 0; n < count; n += W)
    for (int row = 0; row < rows; row += 4)
      DISPATCH_ROWS(rows - row, ROWS, score_block<T, PAIRS, ROWS>(keys + n, count - n, head_dim, query + row * stride, stride, scores + row * key_tile + n, prefetcher));
}

// Loads 2 W elements of the value of a key, or with PAIRS of two keys in pairs, in the order of `widen_two`.
template <Type T, bool PAIRS>
INLINE void value_units(const void* const* values, int n, int count, int d, int head_dim, vu (&to)[2]) {
  if constexpr (PAIRS) {
    const vu a = units<true, T>(values[n], d, head_dim);
    const vu b = n + 1 < count ? units<true, T>(values[n + 1], d, head_dim) : vu{};
    to[0] = (a & 0xFFFFu) | b << 16;
    to[1] = a >> 16 | (b & 0xFFFF0000u);
  } else {
    vf elements[2];
    widen_two<T>(values[n], d, head_dim, elements);
    to[0] = as_bits(elements[0]), to[1] = as_bits(elements[1]);
  }
}

// sums += weights x values, in 2 W * CHUNKS columns, in the order of `widen_two`. Weights are in pairs, or one per unit.
template <Type T, bool PAIRS, int ROWS, int CHUNKS>
INLINE void add_columns(const void* const* values, int count, int head_dim, int d, const uint32_t* weights, float* sums, int stride, Prefetcher& prefetcher) {
  vf total[ROWS][2 * CHUNKS];
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; i++) total[row][i] = load<vf>(sums + row * stride + d + i * W);
  for (int n = 0; n < count; n += PAIRS ? 2 : 1) {
    prefetcher.fetch(PAIRS ? 2 : 1);
#pragma GCC unroll 2
    for (int c = 0; c < CHUNKS; c++) {
      vu elements[2];
      value_units<T, PAIRS>(values, n, count, d + c * 2 * W, head_dim, elements);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) {
        const vu weight = vu{} + weights[row * (PAIRS ? key_tile / 2 : key_tile) + (PAIRS ? n / 2 : n)];
        total[row][2 * c] = unit_product<PAIRS>(weight, elements[0], total[row][2 * c]);
        total[row][2 * c + 1] = unit_product<PAIRS>(weight, elements[1], total[row][2 * c + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; i++) store(sums + row * stride + d + i * W, total[row][i]);
}

template <Type T, bool PAIRS = false>
void add_values(const void* const* values, int count, int head_dim, const uint32_t* weights, float* sums, int stride, int rows, Prefetcher& prefetcher) {
  for (int row = 0; row < rows; row += 4, weights += 4 * (PAIRS ? key_tile / 2 : key_tile), sums += 4 * stride)
    DISPATCH_ROWS(rows - row, ROWS, {
      constexpr int chunks = ROWS * 4 <= sums_in_registers ? 2 : 1;
      int d = 0;
      for (; d + chunks * 2 * W <= head_dim; d += chunks * 2 * W)
        add_columns<T, PAIRS, ROWS, chunks>(values, count, head_dim, d, weights, sums, stride, prefetcher);
      for (; d < head_dim; d += 2 * W) add_columns<T, PAIRS, ROWS, 1>(values, count, head_dim, d, weights, sums, stride, prefetcher);
    });
}

struct Direct {
  void (*score)(const void* const*, int, int, const uint32_t*, int, float*, int, Prefetcher&);
  void (*add)(const void* const*, int, int, const uint32_t*, float*, int, int, Prefetcher&);
};

template <bool PAIRS>
Direct direct(Type type) {
  if constexpr (PAIRS) {
    switch (type) {
      case Type::int8: return {score_keys<Type::int8, true>, add_values<Type::int8, true>};
      case Type::fp8: return {score_keys<Type::fp8, true>, add_values<Type::fp8, true>};
      default: return {score_keys<Type::bf16, true>, add_values<Type::bf16, true>};
    }
  }
  switch (type) {
    case Type::bf16: return {score_keys<Type::bf16>, add_values<Type::bf16>};
    case Type::f16: return {score_keys<Type::f16>, add_values<Type::f16>};
    case Type::int8: return {score_keys<Type::int8>, add_values<Type::int8>};
    case Type::fp8: return {score_keys<Type::fp8>, add_values<Type::fp8>};
    default: return {score_keys<Type::f32>, add_values<Type::f32>};
  }
}

}  // namespace
}  // namespace paged
