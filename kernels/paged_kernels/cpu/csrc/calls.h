// The interface between binding, schedule and the kernels of a level: plain data, without headers of torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paged {

enum class Type : int { f32, f16, bf16, int8, fp8 };  // fp8: e4m3fn

static constexpr int bytes(Type type) { return type == Type::f32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1; }

inline constexpr int key_tile = 128;  // keys per step of the running softmax; a multiple of the tiles of every instruction set
inline constexpr int tile_step = 32;  // the first tile of keys of a window starts at a multiple of it
inline constexpr int part_keys = 512, span_keys = 4096;  // keys of a part, and of a span of parts, that are summed apart
inline constexpr int max_head_dim = 576;
inline constexpr int packed_block = 32, packed_group = 32;  // tokens of a packed block, and channels of a value that share a scale
inline constexpr int linear_group = 16;  // outputs of a weight that are stored together

struct Rows {  // packed rows [num_tokens, heads, head_dim], head_dim dense; strides in elements
  const void* data;
  int64_t token_stride, head_stride;
};

struct Pool {  // [num_blocks, num_kv_heads, block_size, head_dim or value_dim] and scales [num_blocks, num_kv_heads, block_size]
  void* data;
  int64_t block_stride, head_stride, slot_stride;
  float* scales;  // null if not quantized
  int64_t scale_block_stride, scale_head_stride;
};

// The full blocks of a layer in four bits (packed_blocks.py).
struct PackedBlocks {
  enum Part { key_codes, key_scales, key_zeros, value_codes, value_scales, num_parts };
  int num_blocks;  // 0: the layer has none
  struct {
    char* data;
    int64_t block_stride, head_bytes;  // in bytes; the heads of a block are dense
  } parts[num_parts];

  char* at(Part part, int64_t block, int head) const { return parts[part].data + block * parts[part].block_stride + head * parts[part].head_bytes; }
};

// Whether a query reads a key from packed blocks, by their positions (packed_blocks.is_packed).
static constexpr bool is_packed(int key, int query) { return key >= packed_block && key / packed_block < query / packed_block; }

struct Cache {
  Type type;
  int num_blocks, num_kv_heads, block_size, head_dim, value_dim;  // head_dim: elements of a key
  Pool keys, values;
  bool shared;  // values are the first elements of the keys, in the same memory
  const float* key_channels;  // [3, num_kv_heads, head_dim], see layer_cache.scale_keys; null: no channel is scaled
  PackedBlocks packed;
};

struct Attention {
  Type type;  // type of query, sinks and out
  Rows query;
  void* out;  // [num_tokens, num_heads, value_dim], dense
  int num_heads;
  Cache cache;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* packed_tables;  // of packed blocks; null: the layer has none
  int64_t packed_stride;
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* query_starts;  // [num_seqs + 1]
  int num_seqs, max_blocks, num_tokens;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  const void* sinks;  // [num_heads] or null
};

// The size of the partial of a row, in floats: its sums [value_dim], maximum and denominator.
static constexpr int64_t partial_floats(int value_dim) { return value_dim + 2; }

// A query of an item for several sequences.
struct SharedQuery {
  int token;
  size_t offset;  // of the partials of its rows
};

// Consecutive queries of a sequence, with all heads of one KV head's group, over the keys [begin, end). Row
// query * group + head is one query head. An item can also hold queries of several sequences with the same blocks. Each of
// them sees all of the item's keys.
struct Item {
  int seq, kv_head, first_query, queries;
  int position;  // of the first query; for several sequences: at least `end`
  int begin, end;
  bool is_part = false;                 // of a split context: the result goes to the partials
  size_t offset = 0;                    // of the partials of its rows, in floats
  const SharedQuery* shared = nullptr;  // [queries], if they are of several sequences
  float* partials = nullptr;            // all partials

  int token(int query) const { return shared ? shared[query].token : first_query + query; }
  float* partial(int row, int group, int value_dim) const {
    const int64_t at = shared ? row % group : row;
    return partials + (shared ? shared[row / group].offset : offset) + at * partial_floats(value_dim);
  }
};

struct Merge {  // the partials of items that differ in their keys only, stored one after the other
  Item item;
  int parts, part_size;  // part_size: part_keys or span_keys
  int first_part;        // number of the first one, from the start of the sequence
};

struct Write {
  Type type;  // type of key and value
  Rows key, value;  // value: not read if the cache is shared
  Cache cache;
  const int64_t* slots;
};

struct Rotation {
  Rows query;
  Write write;  // with the unrotated key
  void* out;    // [num_tokens, num_heads, head_dim], dense
  int num_heads;
  Type angles;            // type of cos and sin
  const void *cos, *sin;  // [num_tokens, head_dim]
  int64_t cos_stride, sin_stride;
  const void *query_weight, *key_weight;  // [head_dim] of query's type, or null
  float eps;
};

struct Norm {
  Type type;
  const void *x, *residual, *weight;  // residual may be null
  int64_t x_stride, residual_stride;
  void *normed, *total;  // dense; total: null without a residual
  int64_t width;
  float eps;
};

struct SwiGlu {
  Type type;
  const void* gate_up;
  int64_t stride;
  void* out;
  int64_t width;
};

struct Best {
  Type type;
  const void* logits;  // [rows, width]
  int64_t stride, width;
  int64_t* tokens;  // [rows], dense
};

// The codes of a weight, as `packed_linear.KINDS`. plain: the type of x; fp8: e4m3fn, fp4: e2m1.
enum class Format : int { plain, int8, int4, fp8, fp4, int5, int6 };

static constexpr bool has_4_bits(Format format) { return format == Format::int4 || format == Format::fp4; }

// The inputs of a step, which is what a group of weights stores together.
static constexpr int step_inputs(Format format) {
  return format == Format::int5 ? 32 : format == Format::int6 ? 16 : has_4_bits(format) ? 8 : format == Format::int8 ? 4 : 2;
}

struct Linear {
  Type type;  // type of x, bias and out
  Format format;
  const void *x, *weight, *bias;  // x [rows, in_features]; weight in groups; bias [out_features] or null
  // Of a quantized weight: a weight is scale * code, plus a minimum if there are any.
  int64_t block_inputs;  // inputs that share a scale, a multiple of 8 and of the format's step
  bool wide_scales;      // scales and minima are fp32, otherwise fp16
  bool has_mins;
  bool int8_rows;        // x is rounded to 8 bits; not for plain and fp8
  int64_t x_stride;
  void* out;  // [rows, out_features], dense; with swiglu [rows, out_features / 2]
  int64_t rows, in_features, out_features;
  const void* norm;  // [in_features], the weight of an RMSNorm of the rows of x; or null
  float eps;
  const void* residual;  // [rows, out_features], dense, to be added to the product; or null
  bool swiglu;           // out is silu(first half) * second half of the product
};

static constexpr int64_t steps_of(const Linear& call) { return (call.in_features + step_inputs(call.format) - 1) / step_inputs(call.format); }

// The number of inputs, rounded up to whole steps.
static constexpr int64_t padded_inputs(const Linear& call) { return steps_of(call) * step_inputs(call.format); }

static constexpr int64_t blocks_of(const Linear& call) { return (call.in_features + call.block_inputs - 1) / call.block_inputs; }

// The size of a step of a group.
static constexpr int64_t step_bytes(const Linear& call) {
  const int64_t elements = linear_group * step_inputs(call.format);
  switch (call.format) {
    case Format::plain: return elements * bytes(call.type);
    case Format::int5: return elements * 5 / 8;
    case Format::int6: return elements * 6 / 8;
    default: return has_4_bits(call.format) ? elements / 2 : elements;
  }
}

// The size of the scales and minima before the codes of a block.
static constexpr int64_t header_bytes(const Linear& call) { return linear_group * (call.wide_scales ? 4 : 2) * (call.has_mins ? 2 : 1); }

// The size of a group of weights.
static constexpr int64_t group_bytes(const Linear& call) {
  return steps_of(call) * step_bytes(call) + (call.format == Format::plain ? 0 : blocks_of(call) * header_bytes(call));
}

// The kernels for one instruction set. Each runs in the calling thread.
struct Level {
  size_t (*scratch)(const Attention&, int max_rows);  // bytes of scratch memory for attend, aligned to 64
  // next_item: the item that this thread probably runs next, whose first keys and values are prefetched; or null.
  void (*attend)(const Attention&, const Item&, const Item* next_item, void* scratch);
  void (*write_attended)(const Attention&, const Item&, const void* scratch);  // after attend, to out or the partials
  void (*merge)(const Attention&, const Merge&);
  void (*write)(const Write&, int64_t begin, int64_t end);  // range of tokens
  void (*pack)(const Cache&, int64_t block, int64_t packed, int kv_head);  // from one block to a packed one
  void (*rotate)(const Rotation&, int64_t begin, int64_t end);
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*swiglu)(const SwiGlu&, int64_t begin, int64_t end);
  void (*best)(const Best&, int64_t begin, int64_t end);
  // The number of rows of x that a thread processes at a time: in panels, they fit its cache.
  int64_t (*block_rows)(const Linear&);
  size_t (*panel_bytes)(const Linear&, int64_t rows);
  // Packs the rows [begin, end), at most block_rows, for multiply.
  void (*pack_rows)(const Linear&, int64_t begin, int64_t end, void* panels);
  // Multiplies these rows by the groups [group, last), without swiglu. to: [rows, stride] for these rows and outputs.
  // groups_ahead: the distance from `group` to the group that this thread probably multiplies next; 0: none.
  void (*multiply)(const Linear&, int64_t begin, int64_t end, const void* panels, int64_t group, int64_t last, int64_t groups_ahead, void* to, int64_t stride);
};

}  // namespace paged
