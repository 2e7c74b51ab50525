// Attention of a tile of queries over a range of keys, read through the block table (PagedAttention, arXiv:2309.06180)
// with a running softmax (arXiv:1805.02867).
//
//   for each tile of keys:   keys -> panel [head_dim units][keys]      transposed in registers
//                            values -> panel [key units][head_dim]
//     for each strip of rows:  scores = query x panel; weights; out += weights x panel
//
// Units are those of tiles.h: pairs of bf16 where tiles multiply them, else fp32. A panel of values has its columns by
// pairs: of 2 W elements first the even ones, then the odd ones. So packing takes no shuffle.
//
// Packing pays where many rows share it. Few rows, as of a decode step, take keys and values from where they lie.
#pragma once
#include "tiles.h"

namespace paged {
namespace {

enum class Way { direct, panels, tiles };

// Few rows are multiplied directly. On Sapphire Rapids panels pay from 16 rows on; where tiles do was not measured.
constexpr int few_rows = PAGED_HAS_TILES ? 7 : 12;
constexpr int strip_rows = PAGED_HAS_TILES ? 32 : 24;

constexpr float infinity = __builtin_inff();

// A thread's memory for one item.
struct Scratch {
  const void* rows[2][2 * key_tile];  // keys, then as many values, of this tile and of the next
  float key_scales[key_tile], value_scales[key_tile];
  uint32_t *query, *key_panel, *value_panel, *weights;
  float *scores, *sums, *maxima, *denominators;
  int query_stride, out_stride;
};

INLINE size_t lay_out(Scratch* s, char* memory, int rows, int head_dim) {
  const int wide = round_up(head_dim, 32), all_rows = round_up(rows, strip_rows);
  size_t used = sizeof(Scratch);
  auto take = [&](size_t units) {
    used = (used + 63) / 64 * 64;
    char* place = memory + used;
    used += 4 * units;
    return place;
  };
  char* query = take((size_t)all_rows * wide);
  char* key_panel = take((size_t)wide * key_tile);
  char* value_panel = take((size_t)wide * key_tile);
  char* weights = take(strip_rows * key_tile);
  char* scores = take(strip_rows * key_tile);
  char* sums = take((size_t)all_rows * wide);
  char* maxima = take(all_rows);
  char* denominators = take(all_rows);
  if (s) {
    s->query = (uint32_t*)query, s->key_panel = (uint32_t*)key_panel, s->value_panel = (uint32_t*)value_panel;
    s->weights = (uint32_t*)weights, s->scores = (float*)scores, s->sums = (float*)sums;
    s->maxima = (float*)maxima, s->denominators = (float*)denominators;
    s->out_stride = wide;
  }
  return used;
}

size_t scratch_bytes(const Attention& call, int max_rows) {
  return lay_out(nullptr, nullptr, max_rows, call.cache.head_dim);
}

// --- panels ---------------------------------------------------------------------------------------------------------

template <bool PAIRS, Type T>
INLINE vu units(const void* row, int d, int head_dim) {  // W units from element d on
  if constexpr (!PAIRS) return as_bits(widen<T>(at<T>(row, d), head_dim - d));
  else if constexpr (T == Type::bf16) {
    if (d + 2 * W <= head_dim) return load<vu>(at<T>(row, d));
    vu whole = {};
    __builtin_memcpy(&whole, at<T>(row, d), 2 * larger(0, head_dim - d));
    return whole;
  } else return pack_bf16(widen<T>(at<T>(row, d), head_dim - d), widen<T>(at<T>(row, d + W), larger(0, head_dim - d - W)));
}

template <bool PAIRS, Type T>
void pack_keys(const void* const* rows, int count, int head_dim, uint32_t* panel, Ahead& ahead) {
  constexpr int elements = PAIRS ? 2 * W : W;
  for (int n = 0; n < count; n += W)
    for (int d = 0; d < head_dim; d += elements) {
      ahead.bring(W / 4);
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
void pack_values(const void* const* rows, int count, int head_dim, int width, uint32_t* panel, Ahead& ahead) {
  const int depth = round_up(count, 32);
  if constexpr (!PAIRS) {
    for (int n = 0; n < depth; n++) {
      ahead.bring();
      for (int d = 0; d < head_dim; d += W)
        store(panel + (int64_t)n * width + d, n < count ? units<PAIRS, T>(rows[n], d, head_dim) : vu{});
    }
  } else {
    for (int n = 0; n < depth; n += 2) {
      ahead.bring();
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

using PackKeys = void (*)(const void* const*, int, int, uint32_t*, Ahead&);
using PackValues = void (*)(const void* const*, int, int, int, uint32_t*, Ahead&);

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

// --- few rows: each key and value is widened once for up to 4 of them ------------------------------------------------

constexpr int sums_kept = W == 16 ? 24 : 12;  // in registers, beside what is added to them

// 2 W elements from element d on, those past head_dim as 0; of bf16 the even ones, then the odd ones.
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

// Calls `body` with the number of rows as a constant, at most 4.
#define WITH_ROWS(rows, ROWS, ...)                           \
  switch (rows) {                                            \
    case 1: { constexpr int ROWS = 1; __VA_ARGS__; } break;  \
    case 2: { constexpr int ROWS = 2; __VA_ARGS__; } break;  \
    case 3: { constexpr int ROWS = 3; __VA_ARGS__; } break;  \
    default: { constexpr int ROWS = 4; __VA_ARGS__; } break; \
  }

// Scores of W keys. The sums over lanes are made of all W at once; past the last key it stands in for those missing.
template <Type T, int ROWS>
INLINE void score_some(const void* const* keys, int count, int head_dim, const float* query, int stride, float* scores, Ahead& ahead) {
  constexpr int several = ROWS == 1 ? 8 : ROWS * 4 <= sums_kept ? 4 : 2, step = several < W ? several : W;
  const int pace = larger(1, step * 2 * W / head_dim);
  vf products[ROWS][W];
  for (int n = 0; n < W; n += step) {
    vf sums[ROWS][step] = {};
    const void* key[step];
    for (int i = 0; i < step; i++) key[i] = keys[smaller(n + i, count - 1)];
    for (int d = 0; d < head_dim; d += 2 * W) {
      ahead.bring(pace);
#pragma GCC unroll 8
      for (int i = 0; i < step; i++) {
        vf elements[2];
        widen_two<T>(key[i], d, head_dim, elements);
#pragma GCC unroll 4
        for (int row = 0; row < ROWS; row++) {
          sums[row][i] = fma(elements[0], load<vf>(query + row * stride + d), sums[row][i]);
          sums[row][i] = fma(elements[1], load<vf>(query + row * stride + d + W), sums[row][i]);
        }
      }
    }
#pragma GCC unroll 4
    for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 8
      for (int i = 0; i < step; i++) products[row][n + i] = sums[row][i];
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++) store(scores + row * key_tile, sums_of(products[row]));
}

template <Type T>
void score_keys(const void* const* keys, int count, int head_dim, const float* query, int stride, float* scores, int rows, Ahead& ahead) {
  for (int n = 0; n < count; n += W)
    for (int row = 0; row < rows; row += 4)
      WITH_ROWS(rows - row, ROWS, score_some<T, ROWS>(keys + n, count - n, head_dim, query + row * stride, stride, scores + row * key_tile + n, ahead));
}

// sums += weights x values, in 2 W * CHUNKS columns.
template <Type T, int ROWS, int CHUNKS>
INLINE void add_columns(const void* const* values, int count, int head_dim, int d, const float* weights, float* sums, int stride, Ahead& ahead) {
  vf total[ROWS][2 * CHUNKS];
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; i++) total[row][i] = load<vf>(sums + row * stride + d + i * W);
  for (int n = 0; n < count; n++) {
    ahead.bring();
#pragma GCC unroll 2
    for (int c = 0; c < CHUNKS; c++) {
      vf elements[2];
      widen_two<T>(values[n], d + c * 2 * W, head_dim, elements);
#pragma GCC unroll 4
      for (int row = 0; row < ROWS; row++) {
        const vf weight = splat(weights[row * key_tile + n]);
        total[row][2 * c] = fma(weight, elements[0], total[row][2 * c]);
        total[row][2 * c + 1] = fma(weight, elements[1], total[row][2 * c + 1]);
      }
    }
  }
#pragma GCC unroll 4
  for (int row = 0; row < ROWS; row++)
#pragma GCC unroll 4
    for (int i = 0; i < 2 * CHUNKS; i++) store(sums + row * stride + d + i * W, total[row][i]);
}

template <Type T>
void add_values(const void* const* values, int count, int head_dim, const float* weights, float* sums, int stride, int rows, Ahead& ahead) {
  for (int row = 0; row < rows; row += 4, weights += 4 * key_tile, sums += 4 * stride)
    WITH_ROWS(rows - row, ROWS, {
      constexpr int chunks = ROWS * 4 <= sums_kept ? 2 : 1;
      int d = 0;
      for (; d + chunks * 2 * W <= head_dim; d += chunks * 2 * W)
        add_columns<T, ROWS, chunks>(values, count, head_dim, d, weights, sums, stride, ahead);
      for (; d < head_dim; d += 2 * W) add_columns<T, ROWS, 1>(values, count, head_dim, d, weights, sums, stride, ahead);
    });
}

struct Direct {
  void (*score)(const void* const*, int, int, const float*, int, float*, int, Ahead&);
  void (*add)(const void* const*, int, int, const float*, float*, int, int, Ahead&);
};

Direct direct(Type type) {
  switch (type) {
    case Type::bf16: return {score_keys<Type::bf16>, add_values<Type::bf16>};
    case Type::f16: return {score_keys<Type::f16>, add_values<Type::f16>};
    case Type::int8: return {score_keys<Type::int8>, add_values<Type::int8>};
    case Type::fp8: return {score_keys<Type::fp8>, add_values<Type::fp8>};
    default: return {score_keys<Type::f32>, add_values<Type::f32>};
  }
}

// --- a tile of keys -------------------------------------------------------------------------------------------------

// Addresses of the keys and values from position `start` on, as many as a tile takes.
INLINE int find_rows(const Attention& call, const Item& item, int start, const void** rows) {
  const Cache& cache = call.cache;
  const int count = smaller(key_tile, item.end - start), element = bytes(cache.type);
  const int32_t* table = call.block_tables + item.seq * call.table_stride;
  for (int n = 0; n < count;) {
    const int offset = (start + n) & (cache.block_size - 1);
    const int64_t block = table[(start + n) / cache.block_size];
    const int last = smaller(count, n + cache.block_size - offset);
    const char* key = (const char*)cache.keys.data + element * (block * cache.keys.block_stride + item.kv_head * cache.keys.head_stride + offset * cache.keys.slot_stride);
    const char* value = (const char*)cache.values.data + element * (block * cache.values.block_stride + item.kv_head * cache.values.head_stride + offset * cache.values.slot_stride);
    for (; n < last; n++, key += element * cache.keys.slot_stride, value += element * cache.values.slot_stride)
      rows[n] = key, rows[count + n] = value;
  }
  return count;
}

INLINE void find_scales(const Attention& call, const Item& item, int start, int count, float* keys, float* values) {
  const Cache& cache = call.cache;
  const Pool &of_keys = cache.keys, &of_values = cache.values;
  const int32_t* table = call.block_tables + item.seq * call.table_stride;
  for (int n = 0; n < count;) {
    const int offset = (start + n) & (cache.block_size - 1), last = smaller(count, n + cache.block_size - offset);
    const int64_t block = table[(start + n) / cache.block_size];
    const float* key = of_keys.scales + block * of_keys.scale_block_stride + item.kv_head * of_keys.scale_head_stride + offset;
    const float* value = of_values.scales + block * of_values.scale_block_stride + item.kv_head * of_values.scale_head_stride + offset;
    for (; n < last; n++) keys[n] = *key++, values[n] = *value++;
  }
  for (int n = count; n < round_up(count, 32); n++) keys[n] = values[n] = 0;
}

// --- softmax --------------------------------------------------------------------------------------------------------

// One row's scores become its weights. Keys outside [low, high) have none.
template <bool PAIRS>
INLINE void weigh(const Attention& call, Scratch& s, int row, float* scores, uint32_t* weights, int low, int high, int count, int width) {
  const bool masked = low > 0 || high < count, scaled = call.cache.keys.scales != nullptr;
  const float factor = call.scale * log2e;
  vf top = splat(-infinity);
  for (int n = 0; n < count; n += W) {
    vf x = load<vf>(scores + n);
    if (scaled) x *= load<vf>(s.key_scales + n);
    x = call.softcap > 0 ? tanh(x * (call.scale / call.softcap)) * (call.softcap * log2e) : x * factor;
    if (masked) {
      vi key = lanes() + n;
      x = select((key >= low) & (key < high), x, splat(-infinity));
    }
    store(scores + n, x);
    top = largest(x, top);
  }
  const float before = s.maxima[row], now = __builtin_fmaxf(before, largest_of(top));
  const float base = now == -infinity ? 0 : now;
  vf sum = {};
  for (int n = 0; n < count; n += 2 * W) {
    vf x[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      x[i] = exp2<PAIRS>(load<vf>(scores + n + i * W) - base);
      sum += x[i];
      if (scaled) x[i] *= load<vf>(s.value_scales + n + i * W);
    }
    if constexpr (PAIRS) {
      store(weights + n / 2, pack_bf16(x[0], x[1]));
    } else {
      store(weights + n, as_bits(x[0]));
      store(weights + n + W, as_bits(x[1]));
    }
  }
  if (now == before) {
    s.denominators[row] += sum_of(sum);
    return;
  }
  const float shrink = exp2(before - base);
  s.maxima[row] = now;
  s.denominators[row] = s.denominators[row] * shrink + sum_of(sum);
  float* sums = s.sums + (int64_t)row * s.out_stride;
  for (int d = 0; d < width; d += W) store(sums + d, load<vf>(sums + d) * shrink);
}

// --- out ------------------------------------------------------------------------------------------------------------

INLINE void by_pairs(float* row, int width) {  // elements as a panel's columns
  for (int d = 0; d < width; d += 2 * W) {
    vf first = load<vf>(row + d), second = load<vf>(row + d + W);
    deal(first, second);
    store(row + d, first), store(row + d + W, second);
  }
}

INLINE void in_order(float* row, int width) {  // a panel's columns as the elements they are
  for (int d = 0; d < width; d += 2 * W) {
    vf first = load<vf>(row + d), second = load<vf>(row + d + W);
    interleave(first, second);
    store(row + d, first), store(row + d + W, second);
  }
}

INLINE float sink_of(const Attention& call, int head) {
  float sink = -infinity;
  if (call.sinks) WITH_FLOAT(call.type, T, sink = widen<T>(at<T>(call.sinks, head), 1)[0] * log2e);
  return sink;
}

// sums / denominator of a query's head, its sink counted, to `out`.
INLINE void finish(const Attention& call, int token, int head, const float* sums, float maximum, float denominator) {
  const int head_dim = call.cache.head_dim;
  const float sink = sink_of(call, head), top = sink > maximum ? sink : maximum;
  float factor = 1;
  if (sink > -infinity) {
    factor = exp2(maximum - top);
    denominator = denominator * factor + exp2(sink - top);
  }
  factor = denominator == 0 ? 0 : factor / denominator;
  WITH_FLOAT(call.type, T, {
    void* out = at<T>(call.out, ((int64_t)token * call.num_heads + head) * head_dim);
    for (int d = 0; d < head_dim; d += W) narrow<T>(at<T>(out, d), load<vf>(sums + d) * factor, head_dim - d);
  });
}

// --- an item --------------------------------------------------------------------------------------------------------

template <bool PAIRS>
INLINE void pack_query(const Attention& call, const Item& item, Scratch& s, int group) {
  const int head_dim = call.cache.head_dim, elements = PAIRS ? 2 : 1;
  s.query_stride = round_up(head_dim, 32) / elements;
  for (int q = 0; q < item.queries; q++)
    for (int h = 0; h < group; h++) {
      uint32_t* to = s.query + (int64_t)(q * group + h) * s.query_stride;
      const int64_t place = (item.first_query + q) * call.query.token_stride + (item.kv_head * group + h) * call.query.head_stride;
      for (int u = 0; u < s.query_stride; u += W) {
        const int d = u * elements;
        vu unit = {};
        if (d < head_dim) WITH_FLOAT(call.type, T, unit = units<PAIRS, T>(at<T>(call.query.data, place), d, head_dim));
        store(to + u, unit);
      }
    }
}

template <Way WAY>
void attend_by(const Attention& call, const Item& item, const Item* following, char* memory) {
  constexpr bool PAIRS = WAY == Way::tiles;
  Scratch& s = *(Scratch*)memory;
  const int head_dim = call.cache.head_dim, group = call.num_heads / call.cache.num_kv_heads;
  const int rows = item.queries * group;
  lay_out(&s, memory, rows, head_dim);
  const int width = round_up(head_dim, WAY == Way::panels ? W : 2 * W);
  const bool scaled = call.cache.keys.scales != nullptr;
  const int row_bytes = head_dim * bytes(call.cache.type);
  const Packers pack = packers<PAIRS>(call.cache.type);
  const Direct few = direct(call.cache.type);
  const bool paired = PAIRS || (WAY == Way::direct && call.cache.type == Type::bf16);  // how columns of `sums` lie
  pack_query<PAIRS>(call, item, s, group);
  for (int row = 0; row < (PAIRS ? round_up(rows, strip_rows) : rows); row++) {  // tiles add to whole strips
    s.maxima[row] = -infinity, s.denominators[row] = 0;
    for (int d = 0; d < s.out_stride; d += W) store(s.sums + (int64_t)row * s.out_stride + d, vf{});
  }
  if (WAY == Way::direct && paired)
    for (int row = 0; row < rows; row++) by_pairs((float*)s.query + (int64_t)row * s.query_stride, width);
#if PAGED_HAS_TILES
  if constexpr (WAY == Way::tiles) {
    const TileConfig config;
    tile_config(config);
    for (int u = (head_dim + 1) / 2; u < s.query_stride; u++)  // what no element of a key fills is multiplied, too
      for (int n = 0; n < key_tile; n += W) store(s.key_panel + u * key_tile + n, vu{});
  }
#endif
  int turn = 0, count = find_rows(call, item, item.begin, s.rows[0]);
  for (int start = item.begin; start < item.end; start += key_tile, turn ^= 1) {
    const int next = start + key_tile;
    const int next_count = next < item.end ? find_rows(call, item, next, s.rows[!turn])
                           : following     ? find_rows(call, *following, following->begin, s.rows[!turn])
                                           : 0;
    const int wide = round_up(count, 32);
    const void* const* keys = s.rows[turn];
    Ahead ahead{s.rows[!turn], s.rows[!turn] + 2 * next_count, row_bytes};
    if constexpr (WAY != Way::direct) {
      pack.keys(keys, count, head_dim, s.key_panel, ahead);
      pack.values(keys + count, count, head_dim, s.out_stride, s.value_panel, ahead);
    }
    if (scaled) find_scales(call, item, start, count, s.key_scales, s.value_scales);
    for (int row = 0; row < rows; row += strip_rows) {
      const int strip = smaller(strip_rows, rows - row);
      const int last = item.position + (row + strip - 1) / group;
      if (last < start) continue;  // every key is newer
      const uint32_t* query = s.query + (int64_t)row * s.query_stride;
      float* sums = s.sums + (int64_t)row * s.out_stride;
      const int stride = PAIRS ? key_tile / 2 : key_tile;
      if constexpr (WAY == Way::direct)
        few.score(keys, count, head_dim, (const float*)query, s.query_stride, s.scores, strip, ahead);
      if constexpr (WAY == Way::panels)
        product(query, s.query_stride, s.key_panel, key_tile, s.scores, key_tile, strip, wide, head_dim, false, ahead);
#if PAGED_HAS_TILES
      if constexpr (WAY == Way::tiles)
        tile_product(query, s.query_stride, s.key_panel, key_tile, s.scores, key_tile, round_up(strip, 16), wide, s.query_stride, false);
#endif
      for (int i = 0; i < strip; i++) {
        const int position = item.position + (row + i) / group;
        const int low = call.window ? larger(0, position - call.window + 1 - start) : 0;
        const int high = smaller(count, position + 1 - start);
        weigh<PAIRS>(call, s, row + i, s.scores + i * key_tile, s.weights + i * stride, low, high, wide, width);
      }
      if constexpr (WAY == Way::direct)
        few.add(keys + count, count, head_dim, (const float*)s.weights, sums, s.out_stride, strip, ahead);
      if constexpr (WAY == Way::panels)
        product(s.weights, stride, s.value_panel, s.out_stride, sums, s.out_stride, strip, width, wide, true, ahead);
#if PAGED_HAS_TILES
      if constexpr (WAY == Way::tiles)
        tile_product(s.weights, stride, s.value_panel, s.out_stride, sums, s.out_stride, round_up(strip, 16), s.out_stride, wide / 2, true);
#endif
    }
    count = next_count;
  }
#if PAGED_HAS_TILES
  if constexpr (WAY == Way::tiles) tile_release();
#endif
  for (int row = 0; row < rows; row++) {
    float* sums = s.sums + (int64_t)row * s.out_stride;
    if (paired) in_order(sums, width);
    if (item.partial) {
      __builtin_memcpy(item.partial + (int64_t)row * head_dim, sums, 4 * head_dim);
      item.partial[(int64_t)rows * head_dim + row] = s.maxima[row];
      item.partial[(int64_t)rows * (head_dim + 1) + row] = s.denominators[row];
    } else {
      finish(call, item.first_query + row / group, item.kv_head * group + row % group, sums, s.maxima[row], s.denominators[row]);
    }
  }
}

void attend(const Attention& call, const Item& item, const Item* following, void* scratch) {
  if (item.queries * (call.num_heads / call.cache.num_kv_heads) <= few_rows)
    return attend_by<Way::direct>(call, item, following, (char*)scratch);
#if PAGED_HAS_TILES
  if (call.type == Type::bf16) return attend_by<Way::tiles>(call, item, following, (char*)scratch);
#endif
  attend_by<Way::panels>(call, item, following, (char*)scratch);
}

void merge(const Attention& call, const Merge& merge) {
  const int head_dim = call.cache.head_dim, group = call.num_heads / call.cache.num_kv_heads;
  const int rows = merge.item.queries * group;
  const int64_t size = (int64_t)rows * (head_dim + 2);
  alignas(64) float sums[max_head_dim + W];
  for (int row = 0; row < rows; row++) {
    const float* maxima = merge.item.partial + (int64_t)rows * head_dim + row;
    float top = -infinity, denominator = 0;
    for (int part = 0; part < merge.parts; part++) top = __builtin_fmaxf(top, maxima[part * size]);
    for (int d = 0; d < head_dim; d++) sums[d] = 0;
    for (int part = 0; part < merge.parts; part++) {
      const float share = exp2(maxima[part * size] - (top == -infinity ? 0 : top));
      const float* from = merge.item.partial + part * size + (int64_t)row * head_dim;
      denominator += share * maxima[part * size + rows];
      for (int d = 0; d < head_dim; d++) sums[d] += share * from[d];
    }
    finish(call, merge.item.first_query + row / group, merge.item.kv_head * group + row % group, sums, top, denominator);
  }
}

}  // namespace
}  // namespace paged
