// Attention of a tile of queries over a range of keys, read through the block table (PagedAttention, arXiv:2309.06180)
// with a running softmax (arXiv:1805.02867).
//
//   for each tile of keys:   keys -> panel [head_dim units][keys]      transposed in registers
//                            values -> panel [key units][value_dim]
//     for each strip of rows:  scores = query x panel; weights; out += weights x panel
//
// Tiles start at multiples of key_tile, apart from the first one of a window. Sums over part_keys keys are added in order
// to a sum over span_keys keys, and these in order to the result. Keys outside of a window add zeros. So the result of a
// query depends on its position, and not on the other queries of the step. For many rows, `score_product` sums a score in
// the same order as the code for few rows does. Tile instructions do not.
//
// Units (tiles.h) are pairs of bf16 where the level multiplies them, else fp32. The columns of a value panel are
// deinterleaved: of 2 W elements, the even ones come first, then the odd ones, so that packing needs no shuffle.
//
// Panels pay off if many rows share them. With few rows, as in a decode step, keys and values are read in place. But layers
// with packed blocks (unpack.h) always use panels, as to dequantize a key for each row would take longer.
#include "direct.h"
#include "level.h"
#include "unpack.h"

namespace paged {
namespace {

enum class Method { direct, panels, tiles };

// Up to this many rows, keys and values are read in place. On Sapphire Rapids, panels pay off from 16 rows on; for tiles
// it has not been measured.
constexpr int max_direct_rows = PAGED_HAS_TILES ? 7 : 12;
constexpr int strip_rows = PAGED_HAS_TILES ? 32 : 24;

// The scratch memory of a thread for one work item.
struct Scratch {
  const void* rows[2][2 * key_tile];  // what `find_rows` or `find_blocks` has found for this tile and for the next
  float key_scales[key_tile], value_scales[key_tile];
  uint32_t *query, *key_panel, *value_panel, *weights;
  float *scores, *sums, *maxima, *denominators;
  float *totals, *total_maxima, *total_denominators;  // over the parts before this one
  int query_stride, out_stride;
};

INLINE size_t layout_scratch(Scratch* s, char* memory, int rows, const Cache& cache) {
  const int wide = round_up(cache.head_dim, 32), value_wide = round_up(cache.value_dim, 32), all_rows = round_up(rows, strip_rows);
  size_t used = sizeof(Scratch);
  auto take = [&](size_t units) {
    used = (used + 63) / 64 * 64;
    char* place = memory + used;
    used += 4 * units;
    return place;
  };
  char* query = take((size_t)all_rows * wide);
  char* key_panel = take((size_t)wide * key_tile);
  char* value_panel = take((size_t)value_wide * key_tile);
  char* weights = take(strip_rows * key_tile);
  char* scores = take(strip_rows * key_tile);
  char* sums = take((size_t)all_rows * value_wide);
  char* maxima = take(all_rows);
  char* denominators = take(all_rows);
  char* totals = take((size_t)all_rows * value_wide);
  char* total_maxima = take(all_rows);
  char* total_denominators = take(all_rows);
  if (s) {
    s->query = (uint32_t*)query, s->key_panel = (uint32_t*)key_panel, s->value_panel = (uint32_t*)value_panel;
    s->weights = (uint32_t*)weights, s->scores = (float*)scores, s->sums = (float*)sums;
    s->maxima = (float*)maxima, s->denominators = (float*)denominators;
    s->totals = (float*)totals, s->total_maxima = (float*)total_maxima, s->total_denominators = (float*)total_denominators;
    s->out_stride = value_wide;
  }
  return used;
}

// --- a tile of keys -------------------------------------------------------------------------------------------------

INLINE int first_tile(const Item& item) { return item.begin / tile_step * tile_step; }
INLINE int next_tile(int start) { return (start / key_tile + 1) * key_tile; }

INLINE int tile_keys(const Item& item, int start) { return min_int(next_tile(start), item.end) - start; }

// Finds the addresses of `count` keys from position `start` on, and of their values after them. The item's first key
// stands in for those before it. Returns the number of addresses.
INLINE int find_rows(const Attention& call, const Item& item, int start, int count, const void** rows) {
  const Cache& cache = call.cache;
  const int missing = max_int(0, item.begin - start), element = bytes(cache.type);
  const int32_t* table = call.block_tables + item.seq * call.table_stride;
  for (int n = missing; n < count;) {
    const int offset = (start + n) & (cache.block_size - 1);
    const int64_t block = table[(start + n) / cache.block_size];
    const int last = min_int(count, n + cache.block_size - offset);
    const char* key = (const char*)cache.keys.data + element * (block * cache.keys.block_stride + item.kv_head * cache.keys.head_stride + offset * cache.keys.slot_stride);
    const char* value = (const char*)cache.values.data + element * (block * cache.values.block_stride + item.kv_head * cache.values.head_stride + offset * cache.values.slot_stride);
    for (; n < last; n++, key += element * cache.keys.slot_stride, value += element * cache.values.slot_stride)
      rows[n] = key, rows[count + n] = value;
  }
  for (int n = 0; n < missing; n++) rows[n] = rows[missing], rows[count + n] = rows[count + missing];
  return 2 * count;
}

INLINE void gather_scales(const Attention& call, const Item& item, int start, int count, float* keys, float* values) {
  const Cache& cache = call.cache;
  const Pool &of_keys = cache.keys, &of_values = cache.values;
  const int32_t* table = call.block_tables + item.seq * call.table_stride;
  const int missing = max_int(0, item.begin - start);
  for (int n = 0; n < missing; n++) keys[n] = values[n] = 0;
  for (int n = missing; n < count;) {
    const int offset = (start + n) & (cache.block_size - 1), last = min_int(count, n + cache.block_size - offset);
    const int64_t block = table[(start + n) / cache.block_size];
    const float* key = of_keys.scales + block * of_keys.scale_block_stride + item.kv_head * of_keys.scale_head_stride + offset;
    const float* value = of_values.scales + block * of_values.scale_block_stride + item.kv_head * of_values.scale_head_stride + offset;
    for (; n < last; n++) keys[n] = *key++, values[n] = *value++;
  }
  for (int n = count; n < round_up(count, 32); n++) keys[n] = values[n] = 0;
}

// Visits the blocks of one tile of a layer with packed blocks. packed(n, block): takes a packed block, from key n of the
// tile on. in_int8(n, rows, count): takes `count` keys of another block, and their values, from what `find_rows` has found.
template <class Packed, class InInt8>
INLINE void visit_blocks(const Attention& call, const Item& item, int start, const Packed& packed, const InInt8& in_int8) {
  const int keys = tile_keys(item, start);
  for (int n = 0; n < keys; n += packed_block) {
    if (is_packed(start + n, item.position)) {
      packed(n, call.packed_tables[item.seq * call.packed_stride + (start + n) / packed_block]);
    } else {
      const void* rows[2 * packed_block];
      const int count = min_int(packed_block, keys - n);
      find_rows(call, item, start + n, count, rows);
      in_int8(n, rows, count);
    }
  }
}

INLINE int prefetched_bytes(const Attention& call) { return round_up(max_int(call.cache.head_dim, call.cache.value_dim), 128); }

// Finds what to prefetch of one tile of a layer with packed blocks. Returns the number of addresses.
INLINE int find_blocks(const Attention& call, const Item& item, int start, const void** to) {
  const PackedBlocks& packed = call.cache.packed;
  const void** end = to;
  visit_blocks(call, item, start,
      [&](int, int64_t block) {
        for (int part = 0; part < PackedBlocks::num_parts; part++) {
          const char* data = packed.at((PackedBlocks::Part)part, block, item.kv_head);
          for (int byte = 0; byte < packed.parts[part].head_bytes; byte += prefetched_bytes(call)) *end++ = data + byte;
        }
      },
      [&](int, const void* const* rows, int count) {
        for (int i = 0; i < 2 * count; i++) *end++ = rows[i];
      });
  return (int)(end - to);
}

// Fills the key panel with one tile of a layer with packed blocks, and gathers the scales of its keys and values.
template <bool PAIRS>
INLINE void unpack_tile_keys(const Attention& call, const Item& item, int start, PackKeys pack_keys, Scratch& s, Prefetcher& prefetcher) {
  const int head_dim = call.cache.head_dim;
  visit_blocks(call, item, start,
      [&](int n, int64_t block) {
        unpack_keys<PAIRS>(call.cache.packed, block, item.kv_head, head_dim, s.key_panel + n, prefetcher);
        for (int i = n; i < n + packed_block; i++) s.key_scales[i] = s.value_scales[i] = 1;
      },
      [&](int n, const void* const* rows, int count) {
        pack_keys(rows, count, head_dim, s.key_panel + n, prefetcher);
        gather_scales(call, item, start + n, count, s.key_scales + n, s.value_scales + n);
      });
}

template <bool PAIRS>
INLINE void unpack_tile_values(const Attention& call, const Item& item, int start, Scratch& s, Prefetcher& prefetcher) {
  const int value_dim = call.cache.value_dim;
  const auto panel = [&](int n) { return s.value_panel + (int64_t)(PAIRS ? n / 2 : n) * value_dim; };
  visit_blocks(call, item, start,
      [&](int n, int64_t block) { unpack_values<PAIRS>(call.cache.packed, block, item.kv_head, value_dim, item.begin - start - n, panel(n), prefetcher); },
      [&](int n, const void* const* rows, int count) { widen_values<PAIRS>(rows + count, count, value_dim, panel(n)); });
}

// --- softmax --------------------------------------------------------------------------------------------------------

// Turns the scores of one row into softmax weights. Keys outside [low, high) get the weight 0.
template <bool PAIRS>
INLINE void softmax_row(const Attention& call, Scratch& s, int row, float* scores, uint32_t* weights, int low, int high, int count, int width) {
  const bool masked = low > 0 || high < count, scaled = call.cache.keys.scales != nullptr;
  const bool capped = call.softcap > 0, late = !capped && call.scale > 0;  // late: scores are scaled after their maximum is known
  const float scale = call.scale * log2e, factor = late ? scale : 1;
  vf top = splat(-infinity);
  for (int n = 0; n < count; n += W) {
    vf x = load<vf>(scores + n);
    if (scaled) x *= load<vf>(s.key_scales + n);
    if (!late) x = capped ? tanh(x * (call.scale / call.softcap)) * (call.softcap * log2e) : x * scale;
    if (masked) {
      vi key = lanes() + n;
      x = select((key >= low) & (key < high), x, splat(-infinity));
    }
    if (scaled || !late || masked) store(scores + n, x);
    top = max_lanes(x, top);
  }
  const float before = s.maxima[row], now = __builtin_fmaxf(before, reduce_max(top) * factor);
  const float base = now == -infinity ? 0 : now;
  vf sum = {};
  for (int n = 0; n < count; n += 2 * W) {
    vf x[2];
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) {
      x[i] = exp2<PAIRS>(load<vf>(scores + n + i * W) * factor - base);  // not fused: 0 for the largest score
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
    s.denominators[row] += reduce_add(sum);
    return;
  }
  const float shrink = exp2(before - base);
  s.maxima[row] = now;
  s.denominators[row] = s.denominators[row] * shrink + reduce_add(sum);
  float* sums = s.sums + (int64_t)row * s.out_stride;
  for (int d = 0; d < width; d += W) store(sums + d, load<vf>(sums + d) * shrink);
}

// Adds the result of a row over some keys to that over keys before them. A result over no keys adds nothing.
INLINE void add_part(float* sums, float* maximum, float* denominator, const float* more, float more_maximum, float more_denominator, int width) {
  const float top = __builtin_fmaxf(*maximum, more_maximum), base = top == -infinity ? 0 : top;
  const float share = exp2(*maximum - base), more_share = exp2(more_maximum - base);
  *maximum = top;
  *denominator = *denominator * share + more_denominator * more_share;
  for (int d = 0; d < width; d += W) store(sums + d, load<vf>(sums + d) * share + load<vf>(more + d) * more_share);
}

INLINE void clear_sums(Scratch& s, int rows) {
  for (int row = 0; row < rows; row++) {
    s.maxima[row] = -infinity, s.denominators[row] = 0;
    for (int d = 0; d < s.out_stride; d += W) store(s.sums + (int64_t)row * s.out_stride + d, vf{});
  }
}

// Adds the sums of a part to the totals. Returns true.
INLINE bool add_part_to_totals(Scratch& s, int rows, bool is_first) {
  if (is_first) {
    __builtin_memcpy(s.totals, s.sums, 4 * (size_t)rows * s.out_stride);
    __builtin_memcpy(s.total_maxima, s.maxima, 4 * (size_t)rows);
    __builtin_memcpy(s.total_denominators, s.denominators, 4 * (size_t)rows);
    return true;
  }
  for (int row = 0; row < rows; row++) {
    const int64_t at = (int64_t)row * s.out_stride;
    add_part(s.totals + at, s.total_maxima + row, s.total_denominators + row, s.sums + at, s.maxima[row], s.denominators[row], s.out_stride);
  }
  return true;
}

// --- out ------------------------------------------------------------------------------------------------------------

INLINE void deinterleave_columns(float* row, int width) {  // from the order of elements to that of a panel
  for (int d = 0; d < width; d += 2 * W) {
    vf first = load<vf>(row + d), second = load<vf>(row + d + W);
    deinterleave(first, second);
    store(row + d, first), store(row + d + W, second);
  }
}

INLINE void interleave_columns(float* row, int width) {  // from the order of a panel to that of elements
  for (int d = 0; d < width; d += 2 * W) {
    vf first = load<vf>(row + d), second = load<vf>(row + d + W);
    interleave(first, second);
    store(row + d, first), store(row + d + W, second);
  }
}

INLINE float sink_of(const Attention& call, int head) {
  float sink = -infinity;
  if (call.sinks) DISPATCH_FLOAT(call.type, T, sink = widen<T>(at<T>(call.sinks, head), 1)[0] * log2e);
  return sink;
}

// Writes sums / denominator of one query head to `out`, with its sink added to the denominator.
INLINE void finish(const Attention& call, int token, int head, const float* sums, float maximum, float denominator) {
  const int value_dim = call.cache.value_dim;
  const float sink = sink_of(call, head), top = sink > maximum ? sink : maximum;
  float factor = 1;
  if (sink > -infinity) {
    factor = exp2(maximum - top);
    denominator = denominator * factor + exp2(sink - top);
  }
  factor = denominator == 0 ? 0 : factor / denominator;
  DISPATCH_FLOAT(call.type, T, {
    void* out = at<T>(call.out, ((int64_t)token * call.num_heads + head) * value_dim);
    for (int d = 0; d < value_dim; d += W) narrow<T>(at<T>(out, d), load<vf>(sums + d) * factor, value_dim - d);
  });
}

// --- an item --------------------------------------------------------------------------------------------------------

// Scales the channels of a query, like `layer_cache.scale_queries`. Returns `to`.
INLINE const void* scale_query(const Attention& call, int kv_head, const void* query, void* to) {
  const int head_dim = call.cache.head_dim;
  const float* factor = call.cache.key_channels + (int64_t)(2 * call.cache.num_kv_heads + kv_head) * head_dim;
  DISPATCH_FLOAT(call.type, T, {
    for (int d = 0; d < head_dim; d += W)
      narrow<T>(at<T>(to, d), widen<T>(at<T>(query, d), head_dim - d) * widen<Type::f32>(factor + d, head_dim - d), head_dim - d);
  });
  return to;
}

template <bool PAIRS>
INLINE void pack_query(const Attention& call, const Item& item, Scratch& s, int group) {
  const int head_dim = call.cache.head_dim, elements = PAIRS ? 2 : 1;
  s.query_stride = round_up(head_dim, 32) / elements;
  for (int q = 0; q < item.queries; q++)
    for (int h = 0; h < group; h++) {
      uint32_t* to = s.query + (int64_t)(q * group + h) * s.query_stride;
      const int64_t place = item.token(q) * call.query.token_stride + (item.kv_head * group + h) * call.query.head_stride;
      const void* row = (const char*)call.query.data + place * bytes(call.type);
      alignas(64) float scaled[max_head_dim];
      if (call.cache.key_channels) row = scale_query(call, item.kv_head, row, scaled);
      for (int u = 0; u < s.query_stride; u += W) {
        const int d = u * elements;
        vu unit = {};
        if (d < head_dim) DISPATCH_FLOAT(call.type, T, unit = units<PAIRS, T>(row, d, head_dim));
        store(to + u, unit);
      }
    }
}

template <Method METHOD, bool PAIRS>  // PAIRS: query, keys, weights and values are multiplied in pairs of bf16
void attend_with(const Attention& call, const Item& item, const Item* next_item, char* memory) {
  Scratch& s = *(Scratch*)memory;
  const int head_dim = call.cache.head_dim, value_dim = call.cache.value_dim, group = call.num_heads / call.cache.num_kv_heads;
  const int rows = item.queries * group;
  layout_scratch(&s, memory, rows, call.cache);
  const int columns = METHOD == Method::panels && !PAIRS ? W : 2 * W;
  const int query_width = round_up(head_dim, columns), width = round_up(value_dim, columns);
  const bool scaled = call.cache.keys.scales != nullptr;
  const bool packed = METHOD != Method::direct && call.packed_tables;
  const int row_bytes = packed ? prefetched_bytes(call) : max_int(head_dim, value_dim) * bytes(call.cache.type);
  const Packers pack = packers<PAIRS>(call.cache.type);
  const Direct few = direct<METHOD == Method::direct && PAIRS>(call.cache.type);
  const bool split = !PAIRS && call.cache.type == Type::bf16;  // whether `few` sums even and odd elements of a key apart
  const bool paired = !packed && (PAIRS || (METHOD == Method::direct && split));  // whether the columns of `sums` are deinterleaved
  const int all_rows = METHOD == Method::tiles ? round_up(rows, strip_rows) : rows;  // tile instructions add to whole strips
  if (packed && rows <= strip_rows) s.value_panel = s.key_panel;  // half the memory fits a faster cache
  pack_query<PAIRS>(call, item, s, group);
  clear_sums(s, all_rows);
  if (METHOD == Method::direct && !PAIRS && paired)
    for (int row = 0; row < rows; row++) deinterleave_columns((float*)s.query + (int64_t)row * s.query_stride, query_width);
#if PAGED_HAS_TILES
  if constexpr (METHOD == Method::tiles) {
    const TileConfig config = tiles_for(rows);
    tile_config(config);
    for (int u = (head_dim + 1) / 2; u < s.query_stride; u++)  // padding is multiplied too
      for (int n = 0; n < key_tile; n += W) store(s.key_panel + u * key_tile + n, vu{});
  }
#endif
  bool has_totals = false;
  int buffer = 0;
  const auto find = [&](const Item& of, int start, const void** to) { return packed ? find_blocks(call, of, start, to) : find_rows(call, of, start, tile_keys(of, start), to); };
  find(item, first_tile(item), s.rows[0]);
  for (int start = first_tile(item), next; start < item.end; start = next, buffer ^= 1) {
    next = next_tile(start);
    const int found = next < item.end ? find(item, next, s.rows[!buffer]) : next_item ? find(*next_item, first_tile(*next_item), s.rows[!buffer]) : 0;
    const int count = tile_keys(item, start), wide = round_up(count, 32);
    const void* const* keys = s.rows[buffer];
    Prefetcher prefetcher{s.rows[!buffer], s.rows[!buffer] + found, row_bytes};
    if (packed) {
      unpack_tile_keys<PAIRS>(call, item, start, pack.keys, s, prefetcher);
    } else {
      if constexpr (METHOD != Method::direct) {
        pack.keys(keys, count, head_dim, s.key_panel, prefetcher);
        pack.values(keys + count, count, value_dim, s.out_stride, s.value_panel, prefetcher);
      }
      if (scaled) gather_scales(call, item, start, count, s.key_scales, s.value_scales);
    }
    for (int row = 0; row < rows; row += strip_rows) {
      const int strip = min_int(strip_rows, rows - row);
      const int last = item.position + (row + strip - 1) / group;
      if (last < start) continue;  // every key is newer than the queries
      const uint32_t* query = s.query + (int64_t)row * s.query_stride;
      float* sums = s.sums + (int64_t)row * s.out_stride;
      const int stride = PAIRS ? key_tile / 2 : key_tile;
      if constexpr (METHOD == Method::direct)
        few.score(keys, count, head_dim, query, s.query_stride, s.scores, strip, prefetcher);
      if constexpr (METHOD == Method::panels)
        score_product<PAIRS>(split, query, s.query_stride, s.key_panel, s.scores, strip, wide, PAIRS ? (head_dim + 1) / 2 : head_dim, prefetcher);
#if PAGED_HAS_TILES
      if constexpr (METHOD == Method::tiles)
        tile_product(query, s.query_stride, s.key_panel, key_tile, s.scores, key_tile, round_up(strip, 16), wide, s.query_stride, false);
#endif
      for (int i = 0; i < strip; i++) {
        const int position = item.position + (row + i) / group;
        const int low = max_int(0, (call.window ? max_int(item.begin, position - call.window + 1) : item.begin) - start);
        const int high = min_int(count, position + 1 - start);
        softmax_row<PAIRS>(call, s, row + i, s.scores + i * key_tile, s.weights + i * stride, low, high, wide, width);
      }
      if (packed && row == 0) unpack_tile_values<PAIRS>(call, item, start, s, prefetcher);
      if constexpr (METHOD == Method::direct)
        few.add(keys + count, count, value_dim, s.weights, sums, s.out_stride, strip, prefetcher);
      if constexpr (METHOD == Method::panels)
        product<PAIRS>(s.weights, stride, s.value_panel, s.out_stride, sums, s.out_stride, strip, width, PAIRS ? wide / 2 : wide, prefetcher);
#if PAGED_HAS_TILES
      if constexpr (METHOD == Method::tiles)
        tile_product(s.weights, stride, s.value_panel, s.out_stride, sums, s.out_stride, round_up(strip, 16), s.out_stride, wide / 2, true);
#endif
    }
    if (next % part_keys == 0 && next < item.end) {
      has_totals = add_part_to_totals(s, rows, !has_totals);
      clear_sums(s, all_rows);
    }
  }
#if PAGED_HAS_TILES
  if constexpr (METHOD == Method::tiles) tile_release();
#endif
  if (has_totals) {
    add_part_to_totals(s, rows, false);
    s.sums = s.totals, s.maxima = s.total_maxima, s.denominators = s.total_denominators;
  }
  for (int row = 0; paired && row < rows; row++) interleave_columns(s.sums + (int64_t)row * s.out_stride, width);
}

}  // namespace

size_t scratch_bytes(const Attention& call, int max_rows) {
  return layout_scratch(nullptr, nullptr, max_rows, call.cache);
}

// The memory is that of attend.
void write_attended(const Attention& call, const Item& item, const void* memory) {
  const Scratch& s = *(const Scratch*)memory;
  const int value_dim = call.cache.value_dim, group = call.num_heads / call.cache.num_kv_heads, rows = item.queries * group;
  for (int row = 0; row < rows; row++) {
    const float* sums = s.sums + (int64_t)row * s.out_stride;
    if (item.is_part) {
      float* partial = item.partial(row, group, value_dim);
      __builtin_memcpy(partial, sums, 4 * value_dim);
      partial[value_dim] = s.maxima[row], partial[value_dim + 1] = s.denominators[row];
    } else {
      finish(call, item.first_query + row / group, item.kv_head * group + row % group, sums, s.maxima[row], s.denominators[row]);
    }
  }
}

void attend(const Attention& call, const Item& item, const Item* next_item, void* scratch) {
  const bool pairs = has_dot && call.type == Type::bf16;
  char* memory = (char*)scratch;
  if (!call.packed_tables && item.queries * (call.num_heads / call.cache.num_kv_heads) <= max_direct_rows) {
    if (pairs) return attend_with<Method::direct, has_dot>(call, item, next_item, memory);
    return attend_with<Method::direct, false>(call, item, next_item, memory);
  }
#if PAGED_HAS_TILES
  if (pairs) return attend_with<Method::tiles, true>(call, item, next_item, memory);
#else
  if (pairs) return attend_with<Method::panels, has_dot>(call, item, next_item, memory);
#endif
  attend_with<Method::panels, false>(call, item, next_item, memory);
}

void merge(const Attention& call, const Merge& merge) {
  const int value_dim = call.cache.value_dim, group = call.num_heads / call.cache.num_kv_heads;
  const int rows = merge.item.queries * group, width = round_up(value_dim, W);
  const int64_t size = rows * partial_floats(value_dim);
  struct alignas(64) Result {
    float sums[max_head_dim + W], maximum, denominator;

    INLINE void clear(int width) {
      maximum = -infinity, denominator = 0;
      for (int d = 0; d < width; d += W) store(sums + d, vf{});
    }
    INLINE void add(const Result& more, int width) { add_part(sums, &maximum, &denominator, more.sums, more.maximum, more.denominator, width); }
  } total, span, one;
  for (int row = 0; row < rows; row++) {
    total.clear(width);
    span.clear(width);
    one.clear(width);
    for (int part = 0; part < merge.parts; part++) {
      const float* from = merge.item.partial(row, group, value_dim) + part * size;
      __builtin_memcpy(one.sums, from, 4 * value_dim);
      one.maximum = from[value_dim], one.denominator = from[value_dim + 1];
      if (part && (merge.first_part + part) * (int64_t)merge.part_size % span_keys == 0) {
        total.add(span, width);
        span.clear(width);
      }
      span.add(one, width);
    }
    total.add(span, width);
    finish(call, merge.item.first_query + row / group, merge.item.kv_head * group + row % group, total.sums, total.maximum, total.denominator);
  }
}

}  // namespace paged
