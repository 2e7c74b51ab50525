// Panels of rows and the sums of tiles, for linear.cpp and int8_rows.h.
#pragma once
#include "weights.h"

namespace paged {
namespace {

constexpr int64_t bytes_ahead = 8192;  // of weights that are prefetched, in all groups of a tile

// The number of blocks with a minimum.
INLINE int64_t blocks_with_min(const Linear& call) { return call.has_mins ? blocks_of(call) : 0; }

// A panel, and where its products go.
struct Panel {
  const float* units;
  int64_t first_row;  // of x
  int rows, height;
  void* to;
  int64_t stride, first_output;  // the output of column 0 of `to`
  int64_t ahead;  // prefetch distance in bytes; 0: that of a tile that is not in the caches
};

template <Type T>
INLINE void finish_row(const Linear& call, const Panel& panel, vf sum, int row, int64_t output, int count) {
  if (call.bias) sum += widen<T>(at<T>(call.bias, output), count);
  if (call.residual)
    sum = rounded<T>(sum) + widen<T>(at<T>(call.residual, (panel.first_row + row) * call.out_features + output), count);
  narrow<T>(at<T>(panel.to, row * panel.stride + output - panel.first_output), sum, count);
}

// Adds bias and residual to the sums of a tile, [vectors][height], and writes them.
__attribute__((noinline)) void finish(const Linear& call, const Panel& panel, const vf* sums, int64_t first_output, int number) {
  for (int v = 0; v < number; v++) {
    const int64_t output = first_output + v * W, left = call.out_features - output;
    if (left <= 0) return;
    for (int row = 0; row < panel.rows; row++)
      DISPATCH_FLOAT(call.type, T, finish_row<T>(call, panel, sums[v * panel.height + row], row, output, left < W ? (int)left : W));
  }
}

// The scale, or with PART 1 the minimum, of vector v of a group, from what precedes a block.
template <int PART>
INLINE vf scale_of(const Linear& call, const char* header, int v) {
  const int64_t at = PART * linear_group + v * W;
  return call.wide_scales ? load<vf>((const float*)header + at) : widen<Type::f16>((const uint16_t*)header + at);
}

// The prefetch distance at an offset in each of `groups` groups: past their end, it leads to the next tile.
INLINE int64_t tile_ahead(int64_t ahead, int64_t offset, int64_t group_bytes, int groups) {
  return offset + ahead < group_bytes ? ahead : ahead + (groups - 1) * group_bytes;
}

}  // namespace
}  // namespace paged
