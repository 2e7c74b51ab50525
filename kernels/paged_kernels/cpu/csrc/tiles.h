// Matrix products of panels, with vectors and with AMX tiles.
//
//   a [rows][k] units, row-major;  b [k][columns] units;  c [rows][columns] fp32
//
// A unit is 32 bits: one fp32, or two bf16 that are adjacent in the dimension of the sum.
#pragma once
#include "simd.h"

#if PAGED_EMULATE_AMX || defined(__AMX_BF16__)
#define PAGED_HAS_TILES 1
#else
#define PAGED_HAS_TILES 0
#endif

namespace paged {
namespace {

// Prefetches the rows of the next tile one by one during the computation of this one.
struct Prefetcher {
  const void* const* next;
  const void* const* end;
  int row_bytes;

  INLINE void fetch(int rows = 1) {
    for (; rows && next < end; rows--, next++)
      for (int byte = 0; byte < row_bytes; byte += 64) __builtin_prefetch((const char*)*next + byte, 0, 2);
  }
};

// The sum of c and the product of two units: of fp32, or with PAIRS of bf16.
template <bool PAIRS>
INLINE vf unit_product(vu a, vu b, vf c) {
  if constexpr (PAIRS) return dot_bf16(a, b, c);
  else return fma(as_float(a), as_float(b), c);
}

template <bool PAIRS, int ROWS, int VECTORS>
INLINE void block_product(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, float* c, int c_stride,
                          int depth, Prefetcher& prefetcher) {
  vf sums[ROWS][VECTORS];
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) sums[i][j] = load<vf>(c + i * c_stride + j * W);
  for (int k = 0; k < depth; k++) {
    prefetcher.fetch();
    vu right[VECTORS];
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) right[j] = load<vu>(b + (int64_t)k * b_stride + j * W);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++) {
      vu left = vu{} + a[i * a_stride + k];
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++)
        sums[i][j] = unit_product<PAIRS>(left, right[j], sums[i][j]);
    }
  }
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int j = 0; j < VECTORS; j++) store(c + i * c_stride + j * W, sums[i][j]);
}

constexpr int row_block = 6;                // row_block x column_block vectors of sums fit the registers
constexpr int column_block = W == 16 ? 4 : 2;

template <bool PAIRS, int VECTORS>
void columns_product(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, float* c, int c_stride, int rows,
                     int depth, Prefetcher& prefetcher) {
  int i = 0;
  for (; i + row_block <= rows; i += row_block)
    block_product<PAIRS, row_block, VECTORS>(a + i * a_stride, a_stride, b, b_stride, c + i * c_stride, c_stride, depth, prefetcher);
  a += i * a_stride;
  c += i * c_stride;
  switch (rows - i) {
    case 1: return block_product<PAIRS, 1, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, prefetcher);
    case 2: return block_product<PAIRS, 2, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, prefetcher);
    case 3: return block_product<PAIRS, 3, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, prefetcher);
    case 4: return block_product<PAIRS, 4, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, prefetcher);
    case 5: return block_product<PAIRS, 5, VECTORS>(a, a_stride, b, b_stride, c, c_stride, depth, prefetcher);
  }
}

// Computes c += a b. columns must be a multiple of W.
template <bool PAIRS>
INLINE void product(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, float* c, int c_stride, int rows,
                    int columns, int depth, Prefetcher& prefetcher) {
  int j = 0;
  for (; j + column_block * W <= columns; j += column_block * W)
    columns_product<PAIRS, column_block>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth, prefetcher);
  for (; j < columns; j += W)
    columns_product<PAIRS, 1>(a, a_stride, b + j, b_stride, c + j, c_stride, rows, depth, prefetcher);
}

// Computes the scores of ROWS rows and VECTORS * W keys. The products of units whose numbers are equal modulo W are
// summed first; these sums are then added as `reduce_rows` adds lanes. LANE, STEP: sums the units LANE, LANE + STEP, ...
template <bool PAIRS, bool SPLIT, int ROWS, int VECTORS, int LANE = 0, int STEP = 1>
INLINE void sum_lanes(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, int depth, Prefetcher& prefetcher, vf (&sums)[ROWS][VECTORS]) {
  if constexpr (STEP < W) {
    vf others[ROWS][VECTORS];
    sum_lanes<PAIRS, SPLIT, ROWS, VECTORS, LANE, 2 * STEP>(a, a_stride, b, b_stride, depth, prefetcher, sums);
    sum_lanes<PAIRS, SPLIT, ROWS, VECTORS, LANE + STEP, 2 * STEP>(a, a_stride, b, b_stride, depth, prefetcher, others);
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[i][j] += others[i][j];
  } else {
    constexpr int together = SPLIT ? 2 : 1;  // adjacent units in a lane
#pragma GCC unroll 8
    for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
      for (int j = 0; j < VECTORS; j++) sums[i][j] = vf{};
    prefetcher.fetch();
    for (int first = together * LANE; first < depth; first += together * W)
      for (int k = first; k < first + together && k < depth; k++)
#pragma GCC unroll 8
        for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
          for (int j = 0; j < VECTORS; j++)
            sums[i][j] = unit_product<PAIRS>(vu{} + a[i * a_stride + k], load<vu>(b + (int64_t)k * b_stride + j * W), sums[i][j]);
  }
}

template <bool PAIRS, bool SPLIT, int ROWS, int VECTORS>
void score_block_of_rows(const uint32_t* a, int a_stride, const uint32_t* b, float* c, int depth, Prefetcher& prefetcher) {
  vf sums[ROWS][VECTORS];
  sum_lanes<PAIRS, SPLIT>(a, a_stride, b, key_tile, depth, prefetcher, sums);
#pragma GCC unroll 8
  for (int i = 0; i < ROWS; i++)
#pragma GCC unroll 4
    for (int v = 0; v < VECTORS; v++) store(c + i * key_tile + v * W, sums[i][v]);
}

template <bool PAIRS, bool SPLIT>
INLINE void score_rows(const uint32_t* a, int a_stride, const uint32_t* b, float* c, int rows, int columns, int depth, Prefetcher& prefetcher) {
  constexpr int block = PAIRS ? 2 : 4, vectors = W == 16 ? 4 : 1;  // the fastest, as measured
  for (int j = 0; j < columns; j += vectors * W) {
    int i = 0;
    for (; i + block <= rows; i += block)
      score_block_of_rows<PAIRS, SPLIT, block, vectors>(a + i * a_stride, a_stride, b + j, c + i * key_tile + j, depth, prefetcher);
    for (; i < rows; i++)
      score_block_of_rows<PAIRS, SPLIT, 1, vectors>(a + i * a_stride, a_stride, b + j, c + i * key_tile + j, depth, prefetcher);
  }
}

// Computes c [rows][key_tile] = a b, with b [depth][key_tile]: scores, in the order of `score_block`. split: whether that
// sums even and odd elements apart. columns must be a multiple of 32.
template <bool PAIRS>
INLINE void score_product(bool split, const uint32_t* a, int a_stride, const uint32_t* b, float* c, int rows, int columns, int depth, Prefetcher& prefetcher) {
  if constexpr (!PAIRS)
    if (split) return score_rows<false, true>(a, a_stride, b, c, rows, columns, depth, prefetcher);
  score_rows<PAIRS, false>(a, a_stride, b, c, rows, columns, depth, prefetcher);
}

#if PAGED_HAS_TILES

struct alignas(64) TileConfig {
  uint8_t palette = 1, start_row = 0, reserved[14] = {};
  uint16_t row_bytes[16] = {64, 64, 64, 64, 64, 64, 64, 64};
  uint8_t rows[16] = {16, 16, 16, 16, 16, 16, 16, 16};
};

#if PAGED_EMULATE_AMX
// Emulation of the tile instructions, for tests on a machine without them.
struct Tile {
  uint32_t units[16][16];
};
thread_local Tile tiles[8];
thread_local bool configured;
thread_local int tile_rows[8];

void tile_config(const TileConfig& config) {
  configured = config.palette == 1;
  for (int t = 0; t < 8; t++) {
    configured &= config.row_bytes[t] == 64 && config.rows[t] <= 16;
    tile_rows[t] = config.rows[t];
  }
}
void tile_release() { configured = false; }
void tile_zero(int t) { tiles[t] = Tile{}; }
void tile_load(int t, const void* from, int64_t stride) {
  if (!configured) __builtin_trap();
  for (int r = 0; r < tile_rows[t]; r++) __builtin_memcpy(tiles[t].units[r], (const char*)from + r * stride, 64);
}
void tile_stream(int t, const void* from, int64_t stride) { tile_load(t, from, stride); }
void tile_store(int t, void* to, int64_t stride) {
  for (int r = 0; r < tile_rows[t]; r++) __builtin_memcpy((char*)to + r * stride, tiles[t].units[r], 64);
}
void tile_dot(int c, int a, int b) {
  for (int m = 0; m < tile_rows[a]; m++)
    for (int k = 0; k < 16; k++)
      for (int n = 0; n < 16; n += W) {
        vu left = vu{} + tiles[a].units[m][k];
        vf sum = dot_bf16(left, load<vu>(&tiles[b].units[k][n]), load<vf>(&tiles[c].units[m][n]));
        store(&tiles[c].units[m][n], sum);
      }
}
#else
#define tile_config(config) _tile_loadconfig(&(config))
#define tile_release() _tile_release()
#define tile_zero(t) _tile_zero(t)
// GCC does not take a load of a tile for an access to memory: the empty statement completes stores before it.
#define tile_load(t, from, stride) (__extension__({ asm volatile("" ::: "memory"); _tile_loadd(t, from, stride); }))
// A load that leaves the L1 cache to others.
#define tile_stream(t, from, stride) (__extension__({ asm volatile("" ::: "memory"); _tile_stream_loadd(t, from, stride); }))
#define tile_store(t, to, stride) _tile_stored(t, to, stride)
#define tile_dot(c, a, b) _tile_dpbf16ps(c, a, b)
#endif

// The configuration of `tile_product` for products of this many rows.
INLINE TileConfig tiles_for(int rows) {
  TileConfig config;
  for (int t = 0; t < 6; t++) config.rows[t] = (uint8_t)min_int(rows, 16);  // fewer rows are loaded and stored
  return config;
}

// The same for pairs of bf16 with tile instructions. rows, columns and depth must be multiples of 16.
void tile_product(const uint32_t* a, int a_stride, const uint32_t* b, int b_stride, float* c, int c_stride, int rows,
                  int columns, int depth, bool add) {
  const int64_t a_row = 4 * a_stride, b_row = 4 * b_stride, c_row = 4 * c_stride;
  for (int j = 0; j < columns; j += 32)
    for (int i = 0; i < rows; i += 32) {  // sums in tiles 0 to 3, of two rows and two columns of tiles
      const bool low = i + 16 < rows, right = j + 16 < columns;
      float *c00 = c + i * c_stride + j, *c10 = c00 + 16 * c_stride;
      tile_zero(0);
      tile_zero(1);
      tile_zero(2);
      tile_zero(3);
      if (add) {
        tile_load(0, c00, c_row);
        if (right) tile_load(1, c00 + 16, c_row);
        if (low) tile_load(2, c10, c_row);
        if (low && right) tile_load(3, c10 + 16, c_row);
      }
      for (int k = 0; k < depth; k += 16) {
        const uint32_t *left = a + i * a_stride + k, *top = b + (int64_t)k * b_stride + j;
        tile_load(4, left, a_row);
        tile_load(6, top, b_row);
        tile_dot(0, 4, 6);
        if (right) {
          tile_load(7, top + 16, b_row);
          tile_dot(1, 4, 7);
        }
        if (low) {
          tile_load(5, left + 16 * a_stride, a_row);
          tile_dot(2, 5, 6);
        }
        if (low && right) tile_dot(3, 5, 7);
      }
      tile_store(0, c00, c_row);
      if (right) tile_store(1, c00 + 16, c_row);
      if (low) tile_store(2, c10, c_row);
      if (low && right) tile_store(3, c10 + 16, c_row);
    }
}

#endif

}  // namespace
}  // namespace paged
