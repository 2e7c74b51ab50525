// Linear layers, [rows, in_features] by [out_features, in_features], accumulated in fp32.
//
// Weights are stored in groups of 16 outputs, so that a group is read sequentially: by input, or for bf16 by pairs of
// inputs, which a shift and a mask turn into two vectors of fp32. int8 weights have a scale per output, by which the sum
// is multiplied. A tile is a panel of rows by one or a few groups, and its sums stay in registers over all inputs. Each
// sum adds the inputs in order, so the result of a row does not depend on the other rows.
#include "names.h"
#include "simd.h"

namespace paged {
namespace {

constexpr int vectors = linear_group / W;  // per group
constexpr int max_panel_rows = W == 16 ? 16 : W == 8 ? 6 : 3;  // per panel: as many as the registers hold sums for

constexpr int groups_of_tile(int rows) {  // with few rows, several groups keep the execution units busy
  if (W < 16) return 1;
  return rows <= 4 ? 4 : rows <= 8 ? 2 : 1;
}

INLINE int64_t panels_of(int64_t rows) { return (rows + max_panel_rows - 1) / max_panel_rows; }
INLINE int64_t first_row(int64_t rows, int64_t panel) { return rows * panel / panels_of(rows); }  // panel sizes differ by at most one row

// Widens the rows [first, last), at most W, to fp32 [in_features, last - first], with a 0 for the input that completes
// the last pair. Whole vectors are stored: the excess is overwritten later, or is in the slack at the end.
template <Type T>
INLINE void widen_panel(const Linear& call, int64_t first, int64_t last, float* panel) {
  const int rows = (int)(last - first);
  const void* x = at<T>(call.x, first * call.x_stride);
  for (int64_t k = 0; k < call.in_features; k += W) {
    const int inputs = call.in_features - k < W ? (int)(call.in_features - k) : W;
    vu block[W];
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      block[i] = i < rows ? as_bits(widen<T>(at<T>(x, i * call.x_stride + k), inputs)) : vu{};
    transpose(block);
#pragma GCC unroll 16
    for (int i = 0; i < W; i++)
      if (i < inputs) store(panel + (k + i) * rows, block[i]);
  }
  if (call.in_features % 2) store(panel + call.in_features * rows, vf{});
}

template <Type T>
INLINE void widen_pair(const char* pair, int vector, vf& first, vf& second) {  // two inputs, W outputs each
  if constexpr (T == Type::bf16) {
    const vu both = load<vu>(pair + vector * sizeof(vu));
    first = as_float(both << 16);
    second = as_float(both & 0xFFFF0000u);
  } else {
    first = widen<T>(pair + vector * W * bytes_of<T>);
    second = widen<T>(pair + (linear_group + vector * W) * bytes_of<T>);
  }
}

template <Type T, int ROWS>
INLINE void finish(const Linear& call, const vf (&sums)[ROWS], vf scale, int64_t first, int64_t output, int count) {
  const vf bias = call.bias ? widen<T>(at<T>(call.bias, output), count) : vf{};
#pragma GCC unroll 16
  for (int row = 0; row < ROWS; row++)
    narrow<T>(at<T>(call.out, (first + row) * call.out_features + output), sums[row] * scale + bias, count);
}

template <Type T, int ROWS, int GROUPS>  // T: type of the weight
void multiply_tile(const Linear& call, const float* panel, int64_t first, int64_t group) {
  constexpr int V = GROUPS * vectors;
  constexpr int64_t pair_bytes = 2 * linear_group * bytes_of<T>;
  const int64_t pairs = padded_to_pairs(call.in_features) / 2, group_bytes = pairs * pair_bytes;
  const char* weights = (const char*)call.weight + group * group_bytes;
  vf sums[V][ROWS] = {};
  for (int64_t pair = 0; pair < pairs; pair++, panel += 2 * ROWS) {
    vf low[V], high[V];
#pragma GCC unroll 8
    for (int g = 0; g < GROUPS; g++) {
      const char* here = weights + g * group_bytes + pair * pair_bytes;
      for (int byte = 0; byte < pair_bytes; byte += 64) __builtin_prefetch(here + 32 * pair_bytes + byte);
#pragma GCC unroll 8
      for (int v = 0; v < vectors; v++) widen_pair<T>(here, v, low[g * vectors + v], high[g * vectors + v]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
      const vf x = splat(panel[row]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[v][row] = fma(low[v], x, sums[v][row]);
    }
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) {
      const vf x = splat(panel[ROWS + row]);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) sums[v][row] = fma(high[v], x, sums[v][row]);
    }
  }
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) {
    const int64_t output = group * linear_group + v * W, left = call.out_features - output;
    if (left <= 0) break;
    const int count = left < W ? (int)left : W;
    const vf scale = call.scales ? widen<Type::f32>(call.scales + output, count) : splat(1.0f);
    DISPATCH_FLOAT(call.type, R, finish<R>(call, sums[v], scale, first, output, count));
  }
}

template <Type T, int ROWS>
INLINE void multiply_groups(const Linear& call, const float* panel, int64_t first, int64_t begin, int64_t end) {
  constexpr int GROUPS = groups_of_tile(ROWS);
  int64_t group = begin;
  for (; group + GROUPS <= end; group += GROUPS) multiply_tile<T, ROWS, GROUPS>(call, panel, first, group);
  if constexpr (GROUPS > 1)
    for (; group < end; group++) multiply_tile<T, ROWS, 1>(call, panel, first, group);
}

template <Type T, int ROWS = max_panel_rows>
INLINE void multiply_panel(const Linear& call, int64_t rows, const float* panel, int64_t first, int64_t begin, int64_t end) {
  if (rows == ROWS) return multiply_groups<T, ROWS>(call, panel, first, begin, end);
  if constexpr (ROWS > 1) multiply_panel<T, ROWS - 1>(call, rows, panel, first, begin, end);
}

INLINE void widen_rows(const Linear& call, int64_t begin, int64_t end, float* panels) {
  const int64_t inputs = padded_to_pairs(call.in_features), rows = end - begin;
  for (int64_t panel = 0; panel < panels_of(rows); panel++) {
    const int64_t first = first_row(rows, panel), last = first_row(rows, panel + 1);
    DISPATCH_FLOAT(call.type, T, widen_panel<T>(call, begin + first, begin + last, panels + first * inputs));
  }
}

// Multiplies the rows [begin, end), in panels, by the groups [group, last): a few groups at a time stay in the L1 cache.
INLINE void multiply_rows(const Linear& call, int64_t begin, int64_t end, const float* panels, int64_t group, int64_t last) {
  const int64_t inputs = padded_to_pairs(call.in_features), rows = end - begin;
  constexpr int64_t together = 4;
  for (; group < last; group += together) {
    const int64_t until = group + together < last ? group + together : last;
    for (int64_t panel = 0; panel < panels_of(rows); panel++) {
      const int64_t first = first_row(rows, panel), count = first_row(rows, panel + 1) - first;
      const float* from = panels + first * inputs;
      if (call.scales) multiply_panel<Type::int8>(call, count, from, begin + first, group, until);
      else DISPATCH_FLOAT(call.type, T, multiply_panel<T>(call, count, from, begin + first, group, until));
    }
  }
}

}  // namespace

// Products are numbered by blocks of rows, then by groups. Every thread widens its own rows: loading rows that another
// core has widened takes longer.
void NAMED(multiply, PAGED_LEVEL)(const Linear& call, int64_t begin, int64_t end, float* panels, int64_t& widened) {
  const int64_t groups = (call.out_features + linear_group - 1) / linear_group;
  while (begin < end) {
    const int64_t block = begin / groups, group = begin % groups;
    const int64_t last = end - block * groups < groups ? end - block * groups : groups;
    const int64_t row = block * linear_rows, until = row + linear_rows < call.rows ? row + linear_rows : call.rows;
    if (widened != block) widen_rows(call, row, until, panels);
    widened = block;
    multiply_rows(call, row, until, panels, group, last);
    begin += last - group;
  }
}

}  // namespace paged
