// Linear layers over rows of x that are rounded to 8 bits, multiplied by codes as integers.
//
// A segment of consecutive inputs of a row shares a scale, its largest magnitude / 127; a code is the nearest integer,
// ties to even. A segment has 32 inputs, or fewer so that it lies in one block of the weight. Its products are summed as
// integers, exactly. If the weight's codes are unsigned bytes, factor * code + zero, the sum starts at -zero * (sum of the
// row's codes).
//
// A panel has, each by height of the panel:
//   [padded inputs / 4] x 4 codes, in the order of the operands of the weight (weights.h)
//   [segments] scales, divided by the factor
//   [segments] int32, the initial sums
//   [blocks] the sums of each block of inputs, if the weight has minima
#pragma once
#include "linear_panel.h"

namespace paged {
namespace {

constexpr int max_segment = 32;
constexpr int rows_at_once = has_byte_dot ? 16 : 2;  // that the loop over rows is unrolled by

INLINE int64_t segment_inputs(const Linear& call) {
  const int64_t size = call.block_inputs;
  return size % 32 == 0 ? 32 : size % 16 == 0 ? 16 : 8;
}

INLINE int64_t segments_of(const Linear& call) { return (call.in_features + segment_inputs(call) - 1) / segment_inputs(call); }

// Units of 32 bits per row of a panel, without the sums of blocks.
INLINE int64_t int8_units(const Linear& call) { return padded_inputs(call) / 4 + 2 * segments_of(call); }

INLINE int zero_of(Format format) {
  switch (format) {
    case Format::int4: return 8;
    case Format::int5: return 16;
    case Format::int6: return 32;
    case Format::fp4: return 12;
    default: return has_byte_dot ? 128 : 0;  // see Int8Codes
  }
}
INLINE float factor_of(Format format) { return format == Format::fp4 ? 2.0f : 1.0f; }

// Rounds `inputs` elements of a row to codes, which are 0 past the end. Returns the scale, which is NaN if any element
// is infinite or NaN.
template <Type T>
INLINE float round_segment(const void* x, int inputs, int8_t* codes, int32_t* sum) {
  vf values[max_segment / W], top = {};
  vi unordered = {}, total = {};
  for (int i = 0; i < max_segment / W; i++) {
    values[i] = i * W < inputs ? widen<T>(at<T>(x, i * W), inputs - i * W) : vf{};
    const vf magnitude = as_float(as_bits(values[i]) & 0x7FFFFFFFu);
    unordered |= !(magnitude < infinity);
    top = max_lanes(magnitude, top);
  }
  const float largest = reduce_max(top);
  const bool finite = reduce_add(unordered) == 0;
  const float scale = (largest > 0x1p-100f ? largest : 0x1p-100f) / 127.0f;
  for (int i = 0; i < max_segment / W; i++) {
    const vf nearest = (finite ? values[i] / scale : vf{}) + 12582912.0f;  // 1.5 * 2**23 rounds to an integer
    const vi code = __builtin_convertvector(nearest - 12582912.0f, vi);
    const vi8 narrowed = __builtin_convertvector(code, vi8);
    total += code;
    store(codes + i * W, narrowed);
  }
  *sum = reduce_add(total);
  return finite ? scale : __builtin_nanf("");
}

// Reorders the codes of 8 inputs as those of 4 bits are: 0, 4, 1, 5 and 2, 6, 3, 7.
INLINE void reorder(int8_t* codes) {
  typedef int8_t eight __attribute__((vector_size(8)));
  const eight in_order = load<eight>(codes);
  store(codes, __builtin_shufflevector(in_order, in_order, 0, 4, 1, 5, 2, 6, 3, 7));
}

// Rounds rows of x. Missing rows are zeros.
template <Type T>
INLINE void round_panel(const Linear& call, const void* x, int64_t stride, int rows, int height, uint32_t* panel) {
  const int64_t size = segment_inputs(call), segments = segments_of(call), padded = padded_inputs(call);
  float* scales = (float*)(panel + padded / 4 * height);
  int32_t* starts = (int32_t*)(scales + segments * height);
  for (int row = 0; row < height; row++)
    for (int64_t segment = 0; segment < segments; segment++) {
      const int64_t first = segment * size, left = call.in_features - first;
      alignas(64) int8_t codes[max_segment] = {};
      float scale = 0;
      int32_t sum = 0;
      if (row < rows) scale = round_segment<T>(at<T>(x, row * stride + first), left < size ? (int)left : (int)size, codes, &sum);
      scales[segment * height + row] = scale / factor_of(call.format);
      starts[segment * height + row] = -zero_of(call.format) * sum;
      if (has_4_bits(call.format))
        for (int i = 0; i < size; i += 8) reorder(codes + i);
      const int64_t end = padded < first + size ? padded : first + size;
      for (int64_t k = first; k < end; k += 4) panel[k / 4 * height + row] = load<uint32_t>(codes + k - first);
    }
}

// Adds the products of a step of inputs, of ROWS rows and V vectors of weights. With an instruction for dot products of bytes,
// the sums of all rows stay in registers. Without it, several operands do, and are multiplied by one row after the other.
template <class Weights, int ROWS, int V>
INLINE void add_int8_step(const char* weights, int64_t group_bytes, const uint32_t* units, int64_t ahead, vi (&sums)[V][ROWS]) {
  using Sum = ByteSum<Weights::largest>;
  constexpr int held = min_int(Sum::held, Weights::operands), run = min_int(Sum::run, held), held_vectors = has_byte_dot ? V : 1;
  static_assert(Weights::operands % held == 0 && held % run == 0);
  Weights loaded[V];
#pragma GCC unroll 8
  for (int v = 0; v < V; v++) loaded[v].read(weights + v / vectors * group_bytes + v % vectors * Weights::vector_bytes);
#pragma GCC unroll 8
  for (int v = 0; v < V; v += vectors)
#pragma GCC unroll 8
    for (int byte = 0; byte < Weights::bytes; byte += 64) __builtin_prefetch(weights + v / vectors * group_bytes + ahead + byte);
#pragma GCC unroll 8
  for (int first_vector = 0; first_vector < V; first_vector += held_vectors)
#pragma GCC unroll 8
    for (int first = 0; first < Weights::operands; first += held) {
      vu operands[held_vectors][held];
#pragma GCC unroll 8
      for (int v = 0; v < held_vectors; v++)
#pragma GCC unroll 8
        for (int i = 0; i < held; i++) operands[v][i] = loaded[first_vector + v].operand(first + i);
#pragma GCC unroll rows_at_once
      for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < held_vectors; v++) {
          vi total = sums[first_vector + v][row];
#pragma GCC unroll 8
          for (int i = 0; i < held; i += run) {
            Sum sum;
            sum.start(total);
#pragma GCC unroll 8
            for (int j = i; j < i + run; j++) sum.add(operands[v][j], vu{} + units[(first + j) * ROWS + row]);
            total = sum.total();
          }
          sums[first_vector + v][row] = total;
        }
    }
}

template <class Weights, int ROWS, int GROUPS>
void multiply_int8_tile(const Linear& call, const Panel& panel, int64_t group) {
  constexpr int V = GROUPS * vectors;
  const int64_t size = segment_inputs(call), segments = segments_of(call), segment_steps = size / Weights::inputs;
  const int64_t steps = padded_inputs(call) / Weights::inputs, group_bytes = paged::group_bytes(call), header = header_bytes(call);
  const int64_t blocks = blocks_of(call), block_segments = call.block_inputs / size;
  const char* weights = (const char*)call.weight + group * group_bytes;
  const uint32_t* units = (const uint32_t*)panel.units;
  const float* scales = panel.units + steps * Weights::operands * ROWS;
  const int32_t* starts = (const int32_t*)(scales + segments * ROWS);
  const float* block_sums = (const float*)(starts + segments * ROWS);
  vf sums[V][ROWS] = {};
  for (int64_t block = 0; block < blocks; block++) {
    const int64_t offset = block * (header + block_segments * segment_steps * Weights::bytes);
    vf block_scales[V];
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const char* at = weights + v / vectors * group_bytes + offset;
      block_scales[v] = scale_of<0>(call, at, v % vectors);
      __builtin_prefetch(at + (panel.ahead ? panel.ahead : tile_ahead(bytes_ahead / GROUPS, offset, group_bytes, GROUPS)));
    }
    const int64_t end = segments < (block + 1) * block_segments ? segments : (block + 1) * block_segments;
    for (int64_t segment = block * block_segments; segment < end; segment++) {
      vi products[V][ROWS];
#pragma GCC unroll 8
      for (int v = 0; v < V; v++)
#pragma GCC unroll 16
        for (int row = 0; row < ROWS; row++) products[v][row] = splat(starts[segment * ROWS + row]);
      const int64_t first = segment * segment_steps, number = steps - first < segment_steps ? steps - first : segment_steps;
      const int64_t from = (block + 1) * header + first * Weights::bytes;
      const int64_t ahead = panel.ahead ? panel.ahead : tile_ahead(bytes_ahead / GROUPS, from, group_bytes, GROUPS);
      for (int64_t step = 0; step < number; step++)
        add_int8_step<Weights, ROWS, V>(weights + from + step * Weights::bytes, group_bytes, units + (first + step) * Weights::operands * ROWS, ahead, products);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
        for (int v = 0; v < V; v++)
          sums[v][row] = fma(__builtin_convertvector(products[v][row], vf) * scales[segment * ROWS + row], block_scales[v], sums[v][row]);
    }
    if (!call.has_mins) continue;
#pragma GCC unroll 8
    for (int v = 0; v < V; v++) {
      const vf minimum = scale_of<1>(call, weights + v / vectors * group_bytes + offset, v % vectors);
#pragma GCC unroll 16
      for (int row = 0; row < ROWS; row++) sums[v][row] = fma(splat(block_sums[block * ROWS + row]), minimum, sums[v][row]);
    }
  }
  vf results[V][ROWS];  // not the sums themselves, which stay in registers
#pragma GCC unroll 8
  for (int v = 0; v < V; v++)
#pragma GCC unroll 16
    for (int row = 0; row < ROWS; row++) results[v][row] = sums[v][row];
  finish(call, panel, &results[0][0], group * linear_group, V);
}

}  // namespace
}  // namespace paged
