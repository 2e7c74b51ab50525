// What goes between the binding, the schedule and the kernels of a level: plain data, no headers of torch.
#pragma once
#include <cstddef>
#include <cstdint>

namespace paged {

enum class Type : int { f32, f16, bf16, int8, fp8 };  // fp8: e4m3fn

static constexpr int bytes(Type type) { return type == Type::f32 ? 4 : type == Type::f16 || type == Type::bf16 ? 2 : 1; }

inline constexpr int key_tile = 128;  // keys of a step of the running softmax; whole tiles of every instruction set
inline constexpr int max_head_dim = 256;
inline constexpr int linear_group = 16;  // outputs of a weight that lie together
inline constexpr int linear_rows = 64;  // of x, that a thread works on at a time: widened, they fit its cache

struct Rows {  // packed rows [num_tokens, heads, head_dim], head_dim dense; strides in elements
  const void* data;
  int64_t token_stride, head_stride;
};

struct Pool {  // [num_blocks, num_kv_heads, block_size, head_dim] and scales [num_blocks, num_kv_heads, block_size]
  void* data;
  int64_t block_stride, head_stride, slot_stride;
  float* scales;  // null where elements are no codes
  int64_t scale_block_stride, scale_head_stride;
};

struct Cache {
  Type type;
  int num_blocks, num_kv_heads, block_size, head_dim;
  Pool keys, values;
};

struct Attention {
  Type type;  // of query, sinks and out
  Rows query;
  void* out;  // [num_tokens, num_heads, head_dim], dense
  int num_heads;
  Cache cache;
  const int32_t* block_tables;
  int64_t table_stride;
  const int32_t* context_lens;  // [num_seqs]
  const int32_t* query_starts;  // [num_seqs + 1]
  int num_seqs, max_blocks, num_tokens;
  float scale;
  int window;     // 0: none
  float softcap;  // 0: none
  const void* sinks;  // [num_heads] or null
};

// Consecutive queries of a sequence, all heads of one KV head's group, over the keys [begin, end). Its row
// query * group + head is a query head's.
struct Item {
  int seq, kv_head, first_query, queries;
  int position;  // of the first query
  int begin, end;
  float* partial;  // null: writes out; else [rows, head_dim], then maxima [rows] and sums [rows]
};

struct Merge {  // the partials of items that differ in their keys only, one after the other
  Item item;
  int parts;
};

struct Write {
  Type type;  // of key and value
  Rows key, value;
  Cache cache;
  const int64_t* slots;
};

struct Rotation {
  Rows query;
  Write write;  // its key is not rotated yet
  void* out;    // [num_tokens, num_heads, head_dim], dense
  int num_heads;
  Type angles;            // of cos and sin
  const void *cos, *sin;  // [num_tokens, head_dim]
  int64_t cos_stride, sin_stride;
  const void *query_weight, *key_weight;  // [head_dim] of query's type, or null
  float eps;
};

struct Norm {
  Type type;
  const void *x, *residual, *weight;  // residual: or null
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

static constexpr int64_t whole_pairs(int64_t inputs) { return inputs + inputs % 2; }  // as weights and panels have them

struct Linear {
  Type type;  // of x, bias and out, and of the weight, or that is int8
  const void *x, *weight, *bias;  // x [rows, in_features]; weight in groups; bias [out_features] or null
  const float* scales;  // [out_features] of a weight in int8, or null
  int64_t x_stride;
  void* out;  // [rows, out_features], dense
  int64_t rows, in_features, out_features;
};

// The kernels for one instruction set. Each works on what it is given in the calling thread.
struct Level {
  const char* name;
  size_t (*scratch)(const Attention&, int max_rows);  // bytes that attend needs, aligned to 64
  // `following`: the one that this thread attends to next, whose first keys and values are prefetched; or null.
  void (*attend)(const Attention&, const Item&, const Item* following, void* scratch);
  void (*merge)(const Attention&, const Merge&);
  void (*write)(const Write&, int64_t begin, int64_t end);  // of tokens
  void (*rotate)(const Rotation&, int64_t begin, int64_t end);
  void (*norm)(const Norm&, int64_t begin, int64_t end);
  void (*swiglu)(const SwiGlu&, int64_t begin, int64_t end);
  // Of the products of `linear_rows` rows by a group. panels: fp32, in_features rounded up to 2 for each of these rows,
  // and a group; `widened`: which rows it holds, or -1.
  void (*multiply)(const Linear&, int64_t begin, int64_t end, float* panels, int64_t& widened);
};

}  // namespace paged
