// Linear layers, [rows, in_features] by [out_features, in_features], accumulated in fp32.
//
// Rows of x are packed into panels of some rows, by input, and multiplied by weights in groups of 16 outputs, which
// weights.h describes. A tile is a panel by one or a few groups, and its sums stay in registers over all inputs. If the
// weight is quantized, the codes of a block of inputs are summed first, and the sum is multiplied by the block's scale.
// Each sum adds the inputs in order, so the result of a row does not depend on the other rows. Rows that are rounded to
// 8 bits are multiplied in int8_rows.h.
#include "int8_rows.h"
#include "level.h"
#include "norm.h"
#include "tile_linear.h"

namespace paged {
namespace {

constexpr int max_panel_rows = W == 16 ? 12 : W == 8 ? 6 : 3;
constexpr int max_int8_rows = W == 16 ? 12 : 8;  // their sums need no registers
// Up to this many rows are a single panel, if the weight is not quantized: weights are loaded from memory while it is
// multiplied, but not during the passes over further panels.
constexpr int max_single_panel = W == 16 ? 24 : max_panel_rows;

// The heights of panels for which there is code; others are filled up with zeros.
constexpr int smaller_panel(int rows) {
  return rows > 16 ? 16 : rows > 12 ? 12 : rows > 8 ? 8 : rows > 6 ? 6 : rows > 4 ? 4 : rows - 1;
}

constexpr int panel_height(int rows, int height = max_int(max_single_panel, max_int8_rows)) {
  return height > 1 && rows <= smaller_panel(height) ? panel_height(rows, smaller_panel(height)) : height;
}

template <class Weights>
constexpr int groups_of_tile(int rows) {  // with few rows, several groups keep the execution units busy
  if (W < 16) return W < 8 || rows > 2 ? 1 : Weights::is_int8 ? 2 / rows : Weights::is_quantized ? 1 : 4 / rows;
  if (Weights::is_int8) return rows <= 2 ? 4 : rows <= 6 ? 2 : 1;  // beside as many sums of integers
  if (Weights::is_quantized) return rows <= 3 ? 4 : rows <= 6 ? 2 : 1;  // beside as many sums of a block
  return rows <= 6 ? 4 : rows <= 12 ? 2 : 1;
}

INLINE bool uses_dot(const Linear& call) { return has_dot && call.type == Type::bf16; }

// Widens rows of x to fp32 [inputs, height], with 0 in missing rows and inputs. Whole vectors are stored: the excess is
// overwritten later, which is why the last rows come first, or is in the slack at the end.
template <Type T>
INLINE void widen_panel(const void* x, int64_t stride, int rows, int height, int64_t in_features, int64_t padded, float* panel) {
  for (int64_t k = 0; k < padded; k += W)
    for (int row = (height - 1) / W * W; row >= 0; row -= W) {
      const int64_t inputs = in_features - k < W ? in_features - k : W;
      vu block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        block[i] = row + i < rows && inputs > 0 ? as_bits(widen<T>(at<T>(x, (row + i) * stride + k), (int)inputs)) : vu{};
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        if (k + i < padded) store(panel + (k + i) * height + row, block[i]);
    }
}

// The same for bf16 as it is: [pairs of inputs, height].
INLINE void pair_panel(const void* x, int64_t stride, int rows, int height, int64_t in_features, int64_t padded, uint32_t* panel) {
  for (int64_t k = 0; k < padded / 2; k += W)
    for (int row = (height - 1) / W * W; row >= 0; row -= W) {
      const int64_t inputs = in_features - 2 * k < 2 * W ? in_features - 2 * k : 2 * W;
      vu block[W];
#pragma GCC unroll 16
      for (int i = 0; i < W; i++) {
        block[i] = vu{};
        if (row + i < rows && inputs > 0) __builtin_memcpy(&block[i], at<Type::bf16>(x, (row + i) * stride + 2 * k), 2 * inputs);
      }
      transpose(block);
#pragma GCC unroll 16
      for (int i = 0; i < W; i++)
        if (k + i < padded / 2) store(panel + (k + i) * height + row, block[i]);
    }
}

// Sums each block of inputs, by which the minima of the block are multiplied: [blocks, height].
template <Type T>
INLINE void sum_blocks(const Linear& call, const void* x, int64_t stride, int rows, int height, float* sums) {
  for (int64_t block = 0; block < blocks_with_min(call); block++) {
    const int64_t begin = block * call.block_inputs, end = begin + call.block_inputs < call.in_features ? begin + call.block_inputs : call.in_features;
    for (int row = 0; row < height; row++) {
      vf sum = {};
      for (int64_t k = begin; row < rows && k < end; k += W) sum += widen<T>(at<T>(x, row * stride + k), end - k < W ? (int)(end - k) : W);
      sums[block * height + row] = reduce_add(sum);
    }
  }
}

// Adds the products of some steps of inputs, of ROWS rows and V vectors of weights.
template <class Weights, int ROWS, int V>
INLINE void add_steps(const char* weights, int64_t group_bytes, const float* units, int64_t steps, int64_t ahead, vf (&sums)[V][ROWS]) {
  for (int64_t step = 0; step < steps; step++, weights += Weights::bytes, units += Weights::operands * ROWS) {
    Weights loaded[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) loaded[v].read(weights + v / vectors * group_bytes + v % vectors * Weights::vector_bytes);
#pragma GCC unroll 8
    for (int v = 0; v < V; v += vectors)
      for (int byte = 0; byte < Weights::bytes; byte += 64) __builtin_prefetch(weights + v / vectors * group_bytes + ahead + byte);
#pragma GCC unroll 8
    for (int i = 0; i < Weights::operands; i++) {
      decltype(loaded[0].operand(0)) operand[V];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) operand[v] = loaded[v].operand(i);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++) sums[v][row] = add_product(operand[v], units + i * ROWS + row, sums[v][row]);
    }
  }
}

template <class Weights, int ROWS, int GROUPS>
void multiply_float_tile(const Linear& call, const Panel& panel, int64_t group) {
  constexpr int V = GROUPS * vectors;
  const int64_t steps = padded_inputs(call) / Weights::inputs, group_bytes = paged::group_bytes(call);
  const int64_t ahead = panel.ahead ? panel.ahead : bytes_ahead / GROUPS;
  const char* weights = (const char*)call.weight + group * group_bytes;
  vf sums[V][ROWS] = {};
  if constexpr (Weights::is_quantized) {
    const int64_t blocks = blocks_of(call), block_steps = call.block_inputs / Weights::inputs, header = header_bytes(call);
    const float* block_sums = panel.units + steps * Weights::operands * ROWS;
    for (int64_t block = 0; block < blocks; block++) {
      const int64_t first = block * block_steps, number = steps - first < block_steps ? steps - first : block_steps;
      const int64_t offset = first * Weights::bytes + block * header;
      vf products[V][ROWS] = {};
      const int64_t block_ahead = panel.ahead ? ahead : tile_ahead(ahead, offset, group_bytes, GROUPS);
      add_steps<Weights, ROWS, V>(weights + offset + header, group_bytes, panel.units + first * Weights::operands * ROWS, number, block_ahead, products);
#pragma GCC unroll 8
      for (int v = 0; v < V; v++) {
        const char* scales = weights + v / vectors * group_bytes + offset;
        const vf scale = scale_of<0>(call, scales, v % vectors);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) sums[v][row] = fma(products[v][row], scale, sums[v][row]);
        if (!call.has_mins) continue;
        const vf minimum = scale_of<1>(call, scales, v % vectors);
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) sums[v][row] = fma(splat(block_sums[block * ROWS + row]), minimum, sums[v][row]);
      }
    }
  } else {
    add_steps<Weights, ROWS, V>(weights, group_bytes, panel.units, steps, ahead, sums);
  }
  vf results[V][ROWS];  // not the sums themselves, which stay in registers
#pragma GCC unroll 8
  for (int v = 0; v < V; v++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) results[v][row] = sums[v][row];
  finish(call, panel, &results[0][0], group * linear_group, V);
}

template <class Weights, int ROWS, int GROUPS>
INLINE void multiply_tile(const Linear& call, const Panel& panel, int64_t group) {
  if constexpr (Weights::is_int8) multiply_int8_tile<Weights, ROWS, GROUPS>(call, panel, group);
  else multiply_float_tile<Weights, ROWS, GROUPS>(call, panel, group);
}

template <class Weights, int ROWS = Weights::is_int8 ? max_int8_rows : Weights::is_quantized ? max_panel_rows : max_single_panel>
INLINE void multiply_panel(const Linear& call, const Panel& panel, int64_t group, int64_t last) {
  if (panel.height == ROWS) {
    constexpr int GROUPS = groups_of_tile<Weights>(ROWS);
    for (; group + GROUPS <= last; group += GROUPS) multiply_tile<Weights, ROWS, GROUPS>(call, panel, group);
    if constexpr (GROUPS > 1)
      for (; group < last; group++) multiply_tile<Weights, ROWS, 1>(call, panel, group);
    return;
  }
  if constexpr (ROWS > 1) multiply_panel<Weights, smaller_panel(ROWS)>(call, panel, group, last);
}

template <bool DOT>
INLINE void multiply_quantized(const Linear& call, const Panel& panel, int64_t group, int64_t last) {
  switch (call.format) {
    case Format::int4: return multiply_panel<FourBits<Format::int4, DOT>>(call, panel, group, last);
    case Format::int5: return multiply_panel<Planes<5, DOT>>(call, panel, group, last);
    case Format::int6: return multiply_panel<Planes<6, DOT>>(call, panel, group, last);
    case Format::fp4: return multiply_panel<FourBits<Format::fp4, DOT>>(call, panel, group, last);
    case Format::fp8: return multiply_panel<Float8<DOT>>(call, panel, group, last);
    default: return multiply_panel<Int8<DOT>>(call, panel, group, last);
  }
}

INLINE void multiply_int8(const Linear& call, const Panel& panel, int64_t group, int64_t last) {
  switch (call.format) {
    case Format::int4:
      if (segment_inputs(call) == 32 && call.in_features % 32 == 0) return multiply_panel<FourBitCodes<Format::int4, 4>>(call, panel, group, last);
      return multiply_panel<FourBitCodes<Format::int4>>(call, panel, group, last);
    case Format::int5: return multiply_panel<PlaneCodes<5>>(call, panel, group, last);
    case Format::int6: return multiply_panel<PlaneCodes<6>>(call, panel, group, last);
    case Format::fp4: return multiply_panel<FourBitCodes<Format::fp4>>(call, panel, group, last);
    default:
      if (segment_inputs(call) >= 16 && call.in_features % 16 == 0) return multiply_panel<Int8Codes<4>>(call, panel, group, last);
      return multiply_panel<Int8Codes<>>(call, panel, group, last);
  }
}

INLINE void multiply_any(const Linear& call, const Panel& panel, int64_t group, int64_t last) {
  if (call.int8_rows) {
    multiply_int8(call, panel, group, last);
  } else if (uses_dot(call)) {
    if (call.format != Format::plain) multiply_quantized<has_dot>(call, panel, group, last);
    else multiply_panel<Plain<Type::bf16, has_dot>>(call, panel, group, last);
  } else if (call.format != Format::plain) {
    multiply_quantized<false>(call, panel, group, last);
  } else {
    DISPATCH_FLOAT(call.type, T, if constexpr (!has_dot || T != Type::bf16) multiply_panel<Plain<T, false>>(call, panel, group, last));
  }
}

// Units of 32 bits per row of a panel.
INLINE int64_t panel_units(const Linear& call) {
  if (uses_tiles(call)) return tiles_of(call) * tile_inputs / 2;
  return (call.int8_rows ? int8_units(call) : padded_inputs(call) / (uses_dot(call) ? 2 : 1)) + blocks_with_min(call);
}

// The rows of a panel, if it is not the last of this many rows.
INLINE int panel_rows(const Linear& call, int64_t rows) {
  if (uses_tiles(call)) return rows_of_tile;
  if (call.int8_rows) return max_int8_rows;
  return call.format == Format::plain && rows <= max_single_panel ? max_single_panel : max_panel_rows;
}

// The rows that a panel of this many rows is filled up to.
INLINE int height_of(const Linear& call, int rows) { return uses_tiles(call) ? rows_of_tile : panel_height(rows); }

size_t panels_only(const Linear& call, int64_t rows) {
  const int64_t full = rows / panel_rows(call, rows) * panel_rows(call, rows);
  const int64_t padded = rows == full ? full : full + height_of(call, (int)(rows - full));
  return 4 * (size_t)(padded * panel_units(call) + W * linear_group);
}

template <Type T>
INLINE void pack_panel(const Linear& call, int64_t begin, int rows, float* panel, void* normed) {
  const void* x = at<T>(call.x, begin * call.x_stride);
  int64_t stride = call.x_stride;
  if (call.norm) {
    for (int row = 0; row < rows; row++)
      norm_row<T>(at<T>(x, row * stride), call.norm, call.in_features, call.eps, at<T>(normed, row * call.in_features));
    x = normed, stride = call.in_features;
  }
  if (uses_tiles(call)) return pack_tiles(x, stride, rows, call.in_features, (char*)panel);
  const int height = panel_height(rows);
  const int64_t padded = padded_inputs(call);
  if (call.int8_rows) round_panel<T>(call, x, stride, rows, height, (uint32_t*)panel);
  else if (uses_dot(call)) pair_panel(x, stride, rows, height, call.in_features, padded, (uint32_t*)panel);
  else widen_panel<T>(x, stride, rows, height, call.in_features, padded, panel);
  sum_blocks<T>(call, x, stride, rows, height, panel + (panel_units(call) - blocks_with_min(call)) * height);
}

}  // namespace

int64_t block_rows(const Linear& call) { return uses_tiles(call) ? tile_block_rows(call) : 64; }

size_t panel_bytes(const Linear& call, int64_t rows) {
  return panels_only(call, rows) + (call.norm ? panel_rows(call, rows) * call.in_features * bytes(call.type) : 0);
}

void pack_rows(const Linear& call, int64_t begin, int64_t end, void* panels) {
  void* normed = (char*)panels + panels_only(call, end - begin);
  const int height = panel_rows(call, end - begin);
  for (int64_t first = begin; first < end; first += height) {
    const int rows = min_int(height, (int)(end - first));
    float* to = (float*)panels + (first - begin) * panel_units(call);
    DISPATCH_FLOAT(call.type, T, pack_panel<T>(call, first, rows, to, normed));
  }
}

void multiply(const Linear& call, int64_t begin, int64_t end, const void* panels, int64_t group, int64_t last, int64_t groups_ahead, void* to, int64_t stride) {
#if PAGED_HAS_TILES
  if (uses_tiles(call)) return multiply_in_tiles(call, begin, end, (const char*)panels, group, last, groups_ahead, to, stride);
#endif
  const int height = panel_rows(call, end - begin);
  const int64_t first_output = group * linear_group;
  constexpr int64_t together = 4;  // groups that stay in the L1 cache
  for (; group < last; group += together) {
    const int64_t until = group + together < last ? group + together : last;
    const int64_t next = until < last || groups_ahead ? (until < last ? together : groups_ahead) * group_bytes(call) : 1;
    for (int64_t first = begin; first < end; first += height) {
      const int rows = min_int(height, (int)(end - first));
      const int64_t ahead = first == begin ? 0 : first == begin + height ? next : 1;  // 1: what is loaded anyway
      const float* units = (const float*)panels + (first - begin) * panel_units(call);
      void* products = (char*)to + (first - begin) * stride * bytes(call.type);
      multiply_any(call, {units, first, rows, panel_height(rows), products, stride, first_output, ahead}, group, until);
    }
  }
}

}  // namespace paged
