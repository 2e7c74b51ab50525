// Linear layers of bf16 with tile instructions.
//
// A tile of weights is 16 steps of a group, as they are stored. Rows are packed into tiles of 16 rows by 32 inputs. Four
// tiles have the sums of up to 32 rows and 32 outputs, over all inputs.
#pragma once
#include "linear_panel.h"
#include "tiles.h"

namespace paged {
namespace {

INLINE bool uses_tiles(const Linear& call) { return PAGED_HAS_TILES && call.type == Type::bf16 && call.format == Format::plain; }

constexpr int rows_of_tile = 16;
constexpr int64_t tile_inputs = 32, tile_bytes = 2 * rows_of_tile * tile_inputs;

INLINE int64_t tiles_of(const Linear& call) { return (call.in_features + tile_inputs - 1) / tile_inputs; }  // of some rows or of a group

// The rows of a block: all, or parts of about the same size whose tiles stay in the L2 cache.
INLINE int64_t tile_block_rows(const Linear& call) {
  const int64_t most = (1 << 20) / (2 * call.in_features + 1), limit = most < 64 ? 64 : most < 256 ? most : 256;
  const int64_t blocks = (call.rows - 1) / limit + 1;
  return (call.rows - 1) / (32 * blocks) * 32 + 32;
}

// Packs rows into tiles, with 0 in missing inputs.
INLINE void pack_tiles(const void* x, int64_t stride, int rows, int64_t in_features, char* to) {
  for (int64_t k = 0; k < in_features; k += tile_inputs, to += tile_bytes) {
    const int64_t inputs = in_features - k < tile_inputs ? in_features - k : tile_inputs;
    if (inputs < tile_inputs) __builtin_memset(to, 0, tile_bytes);
    for (int row = 0; row < rows; row++) {
      const void* from = at<Type::bf16>(x, row * stride + k);
      if (inputs == tile_inputs) __builtin_memcpy(to + 64 * row, from, 64);
      else __builtin_memcpy(to + 64 * row, from, 2 * inputs);
    }
  }
}

#if PAGED_HAS_TILES
static_assert(linear_group == 16);

constexpr int64_t kept_bytes = 18 * tile_bytes;  // of each of two groups, which stay in the L1 cache while all rows are multiplied

// Some cache lines that are loaded into the L2 cache with each step.
struct LinesAhead {
  const char* from;
  int64_t number;

  INLINE void fetch() {
    for (int64_t line = 0; line < number; line++, from += 64) __builtin_prefetch(from, 0, 2);
  }
};

// Multiplies one or with LOW two tiles of rows by one or with RIGHT two groups.
template <bool LOW, bool RIGHT>
INLINE void sum_tiles(const Linear& call, const char* rows, const char* weights, LinesAhead ahead, float (&sums)[4][16 * 16]) {
  const int64_t low = tiles_of(call) * tile_bytes, right = group_bytes(call), whole = right / tile_bytes * tile_bytes;
  const auto add = [&](const char* top, const char* second, bool keep) __attribute__((always_inline)) {
    ahead.fetch();
    if (keep) tile_load(6, top, 64);
    else tile_stream(6, top, 64);
    tile_stream(4, rows, 64);
    tile_dot(0, 4, 6);
    if constexpr (RIGHT) {
      if (keep) tile_load(7, second, 64);
      else tile_stream(7, second, 64);
      tile_dot(1, 4, 7);
    }
    if constexpr (LOW) {
      tile_stream(5, rows + low, 64);
      tile_dot(2, 5, 6);
    }
    if constexpr (LOW && RIGHT) tile_dot(3, 5, 7);
    rows += tile_bytes;
  };
  tile_zero(0);
  tile_zero(1);
  tile_zero(2);
  tile_zero(3);
  int64_t at = 0;
  for (; at < whole && at < kept_bytes; at += tile_bytes) add(weights + at, weights + at + right, true);
  for (; at < whole; at += tile_bytes) add(weights + at, weights + at + right, false);
  if (whole < right) {  // the last inputs do not fill a tile
    alignas(64) char last[2][tile_bytes] = {};
    __builtin_memcpy(last[0], weights + whole, right - whole);
    if constexpr (RIGHT) __builtin_memcpy(last[1], weights + right + whole, right - whole);
    add(last[0], last[1], true);
  }
  tile_store(0, sums[0], 64);
  if constexpr (RIGHT) tile_store(1, sums[1], 64);
  if constexpr (LOW) tile_store(2, sums[2], 64);
  if constexpr (LOW && RIGHT) tile_store(3, sums[3], 64);
}

// Multiplies up to 32 rows of a panel by one or two groups.
INLINE void multiply_tiles(const Linear& call, const Panel& panel, int64_t group, bool two, LinesAhead ahead) {
  alignas(64) float sums[4][16 * 16];
  const char *rows = (const char*)panel.units, *weights = (const char*)call.weight + group * group_bytes(call);
  if (panel.rows > 16 && two) sum_tiles<true, true>(call, rows, weights, ahead, sums);
  else if (panel.rows > 16) sum_tiles<true, false>(call, rows, weights, ahead, sums);
  else if (two) sum_tiles<false, true>(call, rows, weights, ahead, sums);
  else sum_tiles<false, false>(call, rows, weights, ahead, sums);
  const int64_t output = group * linear_group, left = call.out_features - output;
  const int outputs = min_int(two ? 32 : 16, left < 32 ? (int)left : 32);
  for (int row = 0; row < panel.rows; row++)
    for (int v = 0; v < outputs; v += W)
      finish_row<Type::bf16>(call, panel, load<vf>(sums[row / 16 * 2 + v / 16] + row % 16 * 16 + v % 16), row, output + v, outputs - v);
}

// Like `multiply`, for packed tiles.
INLINE void multiply_in_tiles(const Linear& call, int64_t begin, int64_t end, const char* tiles, int64_t group, int64_t last, int64_t groups_ahead, void* to, int64_t stride) {
  const int64_t first_group = group, passes = (end - begin + 31) / 32, steps = tiles_of(call);
  const TileConfig config = tiles_for((int)(end - begin));
  tile_config(config);
  for (; group < last; group += 2) {
    const bool two = group + 1 < last;
    const int64_t next = group + 2 < last ? group + 2 : first_group + groups_ahead;
    LinesAhead ahead{(const char*)call.weight + next * group_bytes(call), ((two ? 32 : 16) + passes - 1) / passes};
    for (int64_t first = begin; first < end; first += 32, ahead.from += steps * ahead.number * 64) {
      const char* rows = tiles + (first - begin) / 16 * steps * tile_bytes;
      void* products = (char*)to + (first - begin) * stride * 2;
      multiply_tiles(call, {(const float*)rows, first, min_int(32, (int)(end - first)), 16, products, stride, first_group * linear_group, 0}, group, two, ahead);
    }
  }
  tile_release();
}
#endif

}  // namespace
}  // namespace paged
